"""`seq_rm`: one range and several, all tokens of a sequence, and refused ranges; and `evict`."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.cells.plans import NEAR, plan_of
from tests.helpers import edit_sequences
from tests.helpers.caches import (
    GROUPS,
    SMALL,
    SPLIT,
    WINDOW,
    assert_identical,
    assert_same_content,
    fill_cache,
    parse_cache,
)
from tests.helpers.edit_sequences import make, run_rows
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import add_tokens
from tests.sharding import tiny


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


# ------------------------------------------------------------------------------------------- evict


def evict_one_by_one(cache, keep, sequences):
    """Remove the cells that `evict` removes by a mask."""
    for seq in sequences:
        positions = np.asarray(cache.cell_positions(seq))
        stream = seq // cache.table.spec.sequences_per_stream
        for position in positions[~keep[stream] & (positions >= 0)]:
            cache = jaxkv.seq_rm(cache, seq, int(position), int(position) + 1).check()
    return cache


ASKED = [*product([SMALL, SPLIT, GROUPS], [None, 1, [0, 2]])]


@pytest.mark.parametrize(
    ("kind", "sequences"), mark_cases(ASKED, ASKED[:3], core=[ASKED[5], ASKED[6]]), ids=str
)
def test_evict_equals_seq_rm_of_each_cell(kind, sequences):
    cache = fill_cache(3, 2, 4, kind=kind)
    if kind is SMALL:  # with shared cells
        cache = jaxkv.seq_cp(jaxkv.seq_rm(cache, 1).check(), 0, 1).check()
    keep = np.random.default_rng(0).integers(2, size=cache.table.position.shape).astype(bool)
    asked = np.atleast_1d(range(3) if sequences is None else sequences)
    expected = evict_one_by_one(cache, keep, asked)
    got, ok = jaxkv.evict(cache, keep, sequences=sequences)
    assert ok
    assert_same_content(got, expected)
    changed = (got.table.owners != cache.table.owners).any(axis=(1, 2))
    np.testing.assert_array_equal(got.table.version != cache.table.version, changed)
    traced, ok = jax.jit(lambda cache, keep: jaxkv.evict(cache, keep, sequences=sequences))(
        cache, keep
    )
    assert ok
    assert_identical(traced, got)
    everything, ok = jaxkv.evict(cache, np.ones_like(keep), sequences=sequences)
    assert ok
    assert_identical(everything, cache)


def test_evict_of_cells_that_a_window_needs_is_refused():
    cache = add_tokens(NEAR.make(), [1] * 10, each=1)  # evicts the first positions
    positions = np.asarray(cache.cell_positions(0))
    got, ok = jaxkv.evict(cache, (positions < 9)[None])
    assert ok and got.seq_pos_max(0) == 8
    got = jaxkv.evict(cache, (positions < 6)[None])
    assert not got.ok and got.reason == jaxkv.Reason.CONTEXT_EVICTED
    assert_identical(got.cache, cache)


def test_parts_of_a_hybrid_keep_different_cells():
    windows = (None, jaxkv.Window.sliding(4))
    cache = fill_cache(5, kind=SMALL.__class__("two", cells=8, sequences=3, windows=windows))
    keep = np.arange(8)[None] != 1
    got = jaxkv.evict(cache, (keep, None)).check()
    assert [x.num_used_cells().item() for x in got.parts] == [4, 5]
    assert got.seq_pos_max(0) == 4
    _, ok = reason = jaxkv.evict(cache, (np.arange(8)[None] < 4, None))  # the last token of a part
    assert not ok and reason.reason == jaxkv.Reason.PARTS_DIFFER
    states = tiny.make_tiny("ar")
    for mask, error in (((None, np.ones((1, 3), bool)), TypeError), (keep, ValueError)):
        with pytest.raises(error, match="expected (None for a part|a tuple with a mask)"):
            jaxkv.evict(states, mask)


@pytest.mark.parametrize("keep", [np.ones((1, 3), bool), np.ones((1, 8)), None, 5], ids=str)
def test_evict_of_a_wrong_mask_raises(keep):
    cache = fill_cache(2, kind=SMALL)
    if keep is None:
        assert_identical(jaxkv.evict(cache, keep).check(), cache)
        return
    with pytest.raises(ValueError, match=r"expected a bool mask \[S, N\]"):
        jaxkv.evict(cache, keep)


def test_evict_of_unknown_traced_sequence_changes_nothing():
    cache = fill_cache(3, kind=SMALL)
    nothing = jnp.zeros(cache.table.position.shape, bool)
    for seq in (-1, 3, 99):
        got, ok = jax.jit(lambda seq: jaxkv.evict(cache, nothing, sequences=seq))(seq)
        assert ok
        assert_identical(got, cache)
