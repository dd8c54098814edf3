"""Hybrid caches whose parts disagree: plans and edits are refused by one part alone."""

import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, make_batch
from jaxkv.hybrid import compose_hybrid_cache
from tests.helpers.caches import ROPE, assert_identical, attention_cache, recurrent_cache
from tests.helpers.steps import add_tokens

pytestmark = pytest.mark.core
STATES = {"x": ((), "float32")}


def make_attention(**sizes):
    sizes = dict(layers=1, kv_heads=1, head_dim=4, sequences=3, rope=ROPE) | sizes
    return attention_cache(**sizes)


def make_hybrid(*parts, counts=()):
    """A hybrid cache of parts that have one layer each, after tokens of each sequence."""
    cache = compose_hybrid_cache(*((part, (i,)) for i, part in enumerate(parts)))
    for seq, count in enumerate(counts):
        cache = add_tokens(cache, [seq + 1] * count, seq)
    return cache


def both_orders(*parts):
    return [parts, parts[::-1]]


def in_both_orders(*parts):
    """Parametrise a test with parts in both orders, of which every change tests the second."""
    first, second = both_orders(*parts)
    cases = pytest.param(first, marks=pytest.mark.nightly), second
    return pytest.mark.parametrize("parts", cases, ids=[1, 2])


@pytest.mark.parametrize(
    "parts", both_orders(make_attention(cells=4), make_attention(cells=9)), ids=[1, 2]
)
def test_plan_fits_where_every_part_has_cells(parts):
    """The sequence with fewer tokens fits, in any order of the tokens."""
    for tokens, refused in (([[1, 2], [3, 4, 5]], 1), ([[1, 2, 3], [4, 5]], 0)):
        plan = jaxkv.init_batch(make_hybrid(*parts), make_batch(tokens))
        wanted = [Reason.OUT_OF_CELLS if seq == refused else Reason.OK for seq in range(3)]
        assert plan.reason.tolist() == wanted and not plan.ok
        assert plan.fits.tolist() == [seq != refused for seq in range(3)]
        assert (plan.expected[refused], plan.actual[refused]) == (3, 2)


def make_states(**sizes):
    return recurrent_cache(1, STATES, sequences=3, **sizes)


@in_both_orders(make_attention(cells=9), make_states())
def test_plan_of_a_shift_in_one_part_is_refused_for_its_sequence(parts):
    cache, ok = jaxkv.seq_add(make_hybrid(*parts, counts=(2, 2)), 0, 0, -1, delta=3)
    assert ok
    plan = jaxkv.init_batch(cache, make_batch([[1], [2]]))
    assert plan.reason.tolist() == [Reason.SHIFT_PENDING, Reason.OK, Reason.OK]
    assert jaxkv.init_batch(cache, make_batch([2], sequences=1)).ok
    assert jaxkv.init_batch(jaxkv.apply(cache, jaxkv.init_update(cache)), make_batch([1])).ok


@in_both_orders(make_attention(cells=9), make_states(max_rollback=1))
def test_edit_that_one_part_refuses_changes_no_part(parts):
    """States cannot lose tokens in the middle; the last positions would stay equal."""
    cache = make_hybrid(*parts, counts=(4, 2))
    for p0, p1 in ((1, 3), (0, 2), (2, -1)):
        after, ok = jaxkv.seq_rm(cache, 0, p0, p1)
        assert not ok
        assert_identical(after, cache)
    assert jaxkv.seq_rm(cache, 0, 3).ok and jaxkv.seq_rm(cache, 0).ok


def test_parts_with_other_last_positions_are_read_and_emptied():
    counts = (3, 2, 1), (2, 2, 0)
    ends = [make_hybrid(make_attention(cells=9), counts=count).parts[0] for count in counts]
    for one, other in both_orders(*ends):
        cache = make_hybrid(one, other)
        assert cache.seq_pos_min([0, 1, 2]).tolist() == [0, 0, -1]
        assert cache.seq_pos_max([0, 1, 2]).tolist() == [1, 1, -1]
        assert cache.table.nonempty_sequences().tolist() == [True] * 3
        assert cache.table.num_layers(cache.buffers) == 2
        plan = jaxkv.init_batch(cache, make_batch([[1], [2]]))
        assert plan.reason.tolist() == [Reason.CONTEXT_EVICTED, Reason.OK, Reason.OK]
        for src, dst, p0 in ((0, 2, 0), (1, [0, 1], 5)):  # the second copies no token
            same, ok = jaxkv.seq_cp(cache, src, dst, p0)
            assert not ok
            assert_identical(same, cache)
        rest, ok = jaxkv.seq_rm(cache, 1)
        assert ok and rest.seq_pos_max(1) == -1
        rest, ok = jaxkv.seq_rm(rest, 0)
        assert ok and jaxkv.init_batch(rest, make_batch([[1], [2]])).ok


POOLS = [make_attention(cells=cells, sequences=4, streams=2) for cells in (4, 9)]


@pytest.mark.parametrize("parts", both_orders(*POOLS), ids=[1, 2])
def test_can_allocate_where_every_part_has_cells(parts):
    table, none = make_hybrid(*parts).table, (np.zeros(2, np.int32),) * 2
    for lengths, wanted in (([4, 0, 2, 2], [True, True]), ([5, 0, 4, 1], [False, False])):
        assert table.can_allocate(np.array(lengths), 1, none).tolist() == wanted
    assert table.can_allocate(np.array([5, 0, 1, 0]), 1, none).tolist() == [False, True]


@in_both_orders(*POOLS)
def test_copies_to_another_stream_need_cells_in_every_part(parts):
    cache = make_hybrid(*parts, counts=(3, 0, 2))
    for same, ok in (jaxkv.seq_select(cache, [0], [3]), jaxkv.seq_cp(cache, 0, 3)):
        assert not ok
        assert_identical(same, cache)
    rest, _ = jaxkv.seq_rm(cache, 2)
    after, ok = jaxkv.seq_select(rest, [0], [3])
    assert ok and after.seq_pos_max([0, 3]).tolist() == [2, 2]
