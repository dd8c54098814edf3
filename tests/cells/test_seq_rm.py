"""`seq_rm`: one range and several, all tokens of a sequence, and refused ranges."""

import pytest

import jaxkv
from tests.cells.plans import NEAR, plan_of
from tests.helpers import edit_sequences
from tests.helpers.caches import SMALL, SPLIT, WINDOW, assert_identical, fill_cache, parse_cache
from tests.helpers.edit_sequences import make, run_rows
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import add_tokens


@pytest.mark.parametrize("kind", mark_cases([SMALL, SPLIT, WINDOW], [SMALL], [SPLIT]), ids=str)
def test_seq_rm_many_is_one_after_another(kind):
    cache = wanted = fill_cache(3, 2, 4, kind=kind)
    cuts = [(1, 1, -1), (2, -1, 2), (2, 3, -1)]
    for cut in cuts:
        wanted, _ = jaxkv.seq_rm(wanted, *cut)
    found, ok = jaxkv.seq_rm(cache, *zip(*cuts, strict=True))
    assert_identical(found, wanted)
    assert ok.tolist() == [True] * 3
    found, _ = jaxkv.seq_rm(cache, [0, 1, 2], 1)
    assert found.seq_pos_max([0, 1, 2]).tolist() == [0, 0, 0]


@pytest.mark.core
def test_seq_rm_many_refuses_each_by_itself():
    """States allow a rollback of one step."""
    cache = run_rows(make(kept=1), [1, 2, 3], [4, 5, 6], [7, 8, 9])
    cache, ok = jaxkv.seq_rm(cache, [0, 1, 2], [1, 2, 0])
    assert ok.tolist() == [False, True, True]
    assert cache.seq_pos_max([0, 1, 2]).tolist() == [2, 1, -1]


def test_seq_rm_that_leaves_a_token_to_miss_something_is_refused():
    """Trap 29. llama.cpp reports success, and attention lacks cells."""
    cache = add_tokens(NEAR.make(), [1] * 10, each=1)
    assert cache.seq_pos_min(0) == 4
    for start, mark in ((0, 4), (4, 0)):
        fork = jaxkv.seq_cp(cache, 0, 1, start).cache
        assert fork.table.evicted_below.tolist() == [4, mark, 0]
    short, ok = jaxkv.seq_rm(cache, 0, 8)
    assert ok and plan_of(short).ok and cache.can_resume(0, 8)
    same, ok = jaxkv.seq_rm(cache, 0, 6)
    assert not ok and not cache.can_resume(0, 6)
    assert_identical(same, cache)
    for emptied in (jaxkv.seq_rm(cache, 0)[0], jaxkv.seq_rm(cache, -1)[0], jaxkv.clear(cache)):
        assert emptied.num_used_cells() == 0 and plan_of(emptied).ok
    # Cells that the caller removes do not count as missing, as in a cache without a window.
    holed, _ = jaxkv.seq_rm(parse_cache("0{0} 1{0} 2{0} 3{0}", NEAR), 0, 1, 3)
    assert holed.table.evicted_below[0] == 0 and plan_of(holed).ok


@pytest.mark.core
@pytest.mark.parametrize("kinds", mark_cases(["r", "ar"], ["ar"]))
def test_seq_rm_from_the_first_position_removes_the_sequence(kinds):
    """Also after shifts, copies and inserts."""
    twin = edit_sequences.Twin(kinds, kept=1, sequences=4, streams=2)
    assert twin.decode([0] * 4, positions=[5, 6, 7, 8])
    past = twin.fork()
    for start, stop in ((5, -1), (3, 9), (5, 100)):
        assert twin.seq_rm(0, start, stop) and twin.cache.seq_pos_max(0) == -1
        twin.compare()
        twin.return_to(past)
    assert not twin.seq_rm(0, 6) and not twin.seq_rm(0, 5, 8)
    assert twin.cache.can_resume(0, 4) and not twin.cache.can_resume(0, 6)
    for start, stop in ((0, 3), (4, 5)):  # no token
        assert twin.seq_rm(0, start, stop) and twin.edit("seq_add", 0, start, stop, -5)
        assert twin.cache.seq_pos_max(0) == 8
    twin.edit("seq_cp", 0, [1, 2])
    assert twin.edit("seq_add", 2, 0, -1, -4) and twin.edit("seq_select", [2], [3])
    twin.compare()
    assert not twin.edit("seq_add", 3, 0, -1, -2)  # the first position would be negative
    other = edit_sequences.Twin(kinds, kept=0, sequences=2)
    assert other.insert(twin, [2], [1]) and not other.seq_rm(1, 2) and other.seq_rm(1, 1)
    other.compare()
    for seq, first in ((0, 5), (1, 5), (2, 1), (3, 1)):
        assert not twin.seq_rm(seq, first + 1, -1) and twin.seq_rm(seq, first, -1)
        twin.compare()
