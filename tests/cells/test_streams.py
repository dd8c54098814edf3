"""Rows of sequences with one, some or separate streams: cells and logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, make_batch
from jaxkv.kv.mask import visibility_of
from tests.cells.pools import FOUR, ONE, TWO, fill_cache
from tests.helpers.caches import assert_identical, run_batch, run_ubatch
from tests.helpers.parametrize import mark_cases

pytestmark = pytest.mark.core
LENGTHS = (3, 4, 2, 5)

over_streams = pytest.mark.parametrize("kind", [TWO, FOUR], ids=str)
ROWS = [
    ([[5], [6], [7], [8]], [3, 0, 2, 1]),
    ([[5], [6]], [2, 0]),
    ([3, 4, 5, 6, 7, 8], [2, 0, 2, 0, 0, 3]),
]
EVERY = [(kind, *rows) for kind in (TWO, FOUR) for rows in ROWS]


@pytest.mark.parametrize(
    ("kind", "tokens", "sequences"), mark_cases(EVERY, [EVERY[0], EVERY[5]]), ids=str
)
def test_run_any_rows_matches_one_stream(kind, tokens, sequences):
    """Trap 38: one ubatch for any streams in any order, with logits in the order of the batch.

    llama.cpp requires consecutive ids in rising order. Other streams are unchanged (trap 88).
    """
    batch = make_batch(tokens, sequences=sequences, outputs=np.ones(len(tokens), bool))
    plan = jaxkv.init_batch(fill_cache(kind, *LENGTHS), batch, ubatch_size=8)
    assert len(plan.ubatches) == 1
    after, logits = run_batch(fill_cache(kind, *LENGTHS), batch, ubatch_size=8)
    np.testing.assert_allclose(
        logits, run_batch(fill_cache(ONE, *LENGTHS), batch, ubatch_size=8)[1], atol=1e-5
    )
    for old, new in zip(*map(jax.tree.leaves, (fill_cache(kind, *LENGTHS), after)), strict=True):
        for stream in {1, 3} - {*sequences} if kind is FOUR else ():
            np.testing.assert_array_equal(old[stream], new[stream])


@jax.jit
def traced_rows(cache, tokens, sequences, valid):
    batch = make_batch(tokens, sequences=sequences, valid=valid, outputs=valid)
    plan = jaxkv.init_batch(cache, batch)
    cache, logits = run_ubatch(cache, plan.ubatches[0])
    return cache, plan.gather_outputs([logits]), plan.reason


@over_streams
def test_run_traced_rows_matches_one_stream(kind):
    """Rows use the right streams, and padding is not written."""
    tokens = jnp.array([[5, 6], [7, 0], [0, 0], [8, 9]])
    sequences = jnp.array([[3, 3], [0, 0], [0, 0], [1, 1]])
    valid = jnp.array([[True, True], [True, False], [False, False], [True, True]])
    after, logits, reason = traced_rows(fill_cache(kind, *LENGTHS), tokens, sequences, valid)
    assert not reason.any() and after.seq_pos_max([0, 1, 2, 3]).tolist() == [3, 5, 1, 6]
    batch = make_batch([5, 6, 7, 8, 9], sequences=[3, 3, 0, 1, 1], outputs=np.ones(5, bool))
    np.testing.assert_allclose(
        logits[:5], run_batch(fill_cache(ONE, *LENGTHS), batch)[1], atol=1e-5
    )


def test_init_batch_traced_mixed_rows_are_refused():
    """A row of several sequences, and several rows of one."""
    cache, rows = fill_cache(FOUR, *LENGTHS), jnp.tile(jnp.arange(4)[:, None], 2)
    for sequences, valid in (
        ([[0, 1], [2, 2], [0, 0], [3, 3]], rows != 2),
        ([[1, 1], [1, 1], [0, 0], [2, 2]], rows >= 0),
    ):
        after, _, reason = traced_rows(cache, 1 + 0 * valid, jnp.array(sequences), valid)
        assert Reason.MIXED_ROW in reason.tolist()
        assert_identical(after, cache)


@over_streams
def test_plan_step_any_rows_matches_one_stream(kind):
    """Rows of a step in any order, some of them inactive; or of some sequences only."""
    for ids, active in (([2, 0, 3, 1], [False, True, False, True]), ([3, 1], [True, True])):
        steps = []
        for one in (ONE, kind):
            cache, active = fill_cache(one, *LENGTHS), np.array(active)
            plan = jaxkv.plan_step(cache, 4 + np.arange(len(ids)), sequences=ids, active=active)
            assert plan.ok
            cache, logits = run_ubatch(cache, plan.ubatch)
            steps.append([*logits[active].ravel(), *cache.seq_pos_max([0, 1, 2, 3])])
        np.testing.assert_allclose(*steps, atol=1e-5)


def test_visibility_reads_a_stream_once_where_all_sequences_have_rows():
    cache = TWO.make()
    for count, shape in ((4, (2, 2)), (2, (2, 1))):
        plan = jaxkv.init_batch(cache, make_batch([[1]] * count)).check()
        visibility = visibility_of(jaxkv.apply(cache, plan))
        assert visibility.at.shape == shape and visibility.all_streams == (count == 4)
    assert visibility.streams.tolist() == [0, 0]
