"""`evict`: cells removed by a mask are those that `seq_rm` removes one by one."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.cells.plans import NEAR
from tests.helpers.caches import (
    GROUPS,
    SMALL,
    SPLIT,
    assert_identical,
    assert_same_content,
    fill_cache,
)
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import add_tokens
from tests.sharding import tiny


def evict_one_by_one(cache, keep, sequences):
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
