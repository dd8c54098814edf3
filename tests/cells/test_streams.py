"""Rows of sequences that share one stream, share several or have one each: cells and logits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, loops, make_batch
from jaxkv.kv.mask import sight_of
from tests.cells.pools import FOUR, ONE, TWO, fed
from tests.memories import Kind, assert_identical, drawing, drawn, run, think

core = pytest.mark.core
SHARED = Kind("contiguous", cells=8, sequences=4, streams=2, placement="contiguous")
LENGTHS = (3, 4, 2, 5)
GREEDY = loops.sampling.make_sampler()

over_streams = pytest.mark.parametrize("kind", [TWO, FOUR], ids=lambda kind: kind.name)


# ---- logits


@core
@over_streams
@pytest.mark.parametrize(
    ("tokens", "sequences", "ubatches"),
    [
        ([[5], [6], [7], [8]], [3, 0, 2, 1], 1),
        ([[5], [6]], [2, 0], 1),
        ([3, 4, 5, 6, 7, 8], [2, 0, 2, 0, 0, 3], 3),
    ],
    ids=["any order", "some", "uneven"],
)
def test_run_any_rows_matches_one_stream(kind, tokens, sequences, ubatches):
    """Trap 38: one ubatch for any streams in any order, with logits in the order of the batch.

    llama.cpp wants consecutive ids in rising order, and else cuts the batch into pieces.
    """
    batch = make_batch(tokens, sequences=sequences, outputs=np.ones(len(tokens), bool))
    plan = jaxkv.init_batch(fed(kind, *LENGTHS), batch, ubatch_size=8)
    assert len(plan.ubatches) == ubatches
    logits, wanted = (run(fed(one, *LENGTHS), batch, ubatch_size=8)[1] for one in (kind, ONE))
    np.testing.assert_allclose(logits, wanted, atol=1e-5)


@jax.jit
def traced_rows(memory, tokens, sequences, valid):
    plan = jaxkv.init_batch(
        memory, make_batch(tokens, sequences=sequences, valid=valid, outputs=valid)
    )
    memory, logits = think(memory, plan.ubatches[0])
    return memory, plan.collect([logits]), plan.reason


@core
@over_streams
def test_run_traced_rows_matches_one_stream(kind):
    """Rows find their streams, and padding goes nowhere."""
    tokens = jnp.array([[5, 6], [7, 0], [0, 0], [8, 9]])
    sequences = jnp.array([[3, 3], [0, 0], [0, 0], [1, 1]])
    valid = jnp.array([[True, True], [True, False], [False, False], [True, True]])
    after, logits, reason = traced_rows(fed(kind, *LENGTHS), tokens, sequences, valid)
    assert not reason.any() and jaxkv.seq_pos_max(after, [0, 1, 2, 3]).tolist() == [3, 5, 1, 6]
    batch = make_batch([5, 6, 7, 8, 9], sequences=[3, 3, 0, 1, 1], outputs=np.ones(5, bool))
    np.testing.assert_allclose(logits[:5], run(fed(ONE, *LENGTHS), batch)[1], atol=1e-5)


@core
def test_init_batch_traced_mixed_rows_are_refused():
    """A row of several sequences, and several rows of one."""
    memory, valid = fed(FOUR, *LENGTHS), jnp.ones((4, 2), bool)
    for sequences in ([[0, 1], [2, 2], [1, 1], [3, 3]], [[1, 1], [1, 1], [0, 0], [2, 2]]):
        after, _, reason = traced_rows(memory, 1 + 0 * valid, jnp.array(sequences), valid)
        assert Reason.MIXED_ROW in reason.tolist()
        assert_identical(after, memory)


@core
@over_streams
def test_plan_step_any_rows_matches_one_stream(kind):
    """Rows of a step in any order, some of them not active; or of some sequences alone."""
    for ids, active in (([2, 0, 3, 1], [False, True, False, True]), ([3, 1], [True, True])):
        steps = []
        for one in (ONE, kind):
            memory, active = fed(one, *LENGTHS), np.array(active)
            ubatch, ok = jaxkv.plan_step(memory, 4 + np.arange(len(ids)), np.array(ids), active)
            assert ok
            memory, logits = think(memory, ubatch)
            last = jaxkv.seq_pos_max(memory, [0, 1, 2, 3]).tolist()
            steps.append((logits[active], last))
        np.testing.assert_allclose(steps[0][0], steps[1][0], atol=1e-5)
        assert steps[0][1] == steps[1][1]


@core
def test_run_leaves_other_streams_untouched():
    """Trap 88."""
    memory = fed(FOUR, *LENGTHS)
    after, _ = run(memory, make_batch([[5], [6]], sequences=[2, 3]))
    for old, new in zip(jax.tree.leaves(memory), jax.tree.leaves(after), strict=True):
        if old.shape[0] == 4:
            np.testing.assert_array_equal(old[:2], new[:2])


# ---- cells


def test_init_batch_rows_of_one_stream_get_their_own_cells():
    """In the order of sequences, whatever the order of rows."""
    for ids in ([0, 1], [1, 0]):
        plan = jaxkv.init_batch(TWO.make(), make_batch([[5, 6], [7, 8]], sequences=ids)).check()
        assert plan.ubatches[0].row_sequence.tolist() == ids
        assert drawing(jaxkv.apply(TWO.make(), plan)) == "0{0} 1{0} 0{1} 1{1} | "


@core
def test_init_batch_contiguous_rows_of_one_stream_are_one_run():
    memory = drawn(". 0{0} . . . 1{0} . . |", SHARED)
    plan = jaxkv.init_batch(memory, make_batch([[5, 5], [6, 6], [7, 7]], sequences=[2, 1, 0]))
    assert not plan.ok and plan.reason.tolist() == [Reason.FRAGMENTED] * 2 + [0, 0]
    plan = jaxkv.init_batch(memory, make_batch([[5], [6], [7]], sequences=[2, 1, 0])).check()
    assert drawing(jaxkv.apply(memory, plan)) == ". 0{0} 2{0} 0{1} . 1{0} | 0{2}"


def test_init_batch_full_stream_refuses_its_sequences_alone():
    memory = drawn(" ".join(f"{i}{{0}}" for i in range(8)), TWO)
    plan = jaxkv.init_batch(memory, make_batch([[1] * 3, [2] * 2, [3] * 9], sequences=[0, 1, 2]))
    assert plan.fits.tolist() == [False, True, True, True] and plan.reason[0] == Reason.NO_ROOM
    assert (plan.expected[0], plan.found[0]) == (3, 2)


@core
def test_sight_reads_a_stream_once_where_all_sequences_have_rows():
    memory = TWO.make()
    for count, shape in ((4, (2, 2)), (2, (2, 1))):
        plan = jaxkv.init_batch(memory, make_batch([[1]] * count)).check()
        sight = sight_of(jaxkv.apply(memory, plan).table, plan.ubatches[0])
        assert sight.at.shape == shape and sight.all_streams == (count == 4)
    assert sight.streams.tolist() == [0, 0]


# ---- errors


def test_init_batch_traced_list_for_streams_raises():
    with pytest.raises(ValueError, match="must come in rows"):
        jax.eval_shape(lambda t: jaxkv.init_batch(FOUR.make(), make_batch(t)), jnp.ones(2, int))


# ---- loops


def forward(weights, memory, ubatch):
    del weights
    return think(memory, ubatch)


@pytest.mark.nightly
def test_loops_in_two_streams_match_one_stream():
    """Two rows of a memory of two streams are not its two streams; beams may be in the second."""
    texts, beams = [], []
    for kind, ids in ((TWO, [2, 3]), (ONE, [0, 1])):
        memory, logits = jaxkv.prefill(forward, None, kind.make(), make_batch([[1, 2], [3, 4]]))
        state, first = loops.begin(GREEDY, memory, logits, limit=4)
        _, _, picked = jaxkv.decode(forward, GREEDY, None, memory, state, steps=4)
        texts.append(np.concatenate([first.tokens, picked.tokens], axis=1))
        prompt = make_batch([1, 2, 3], sequences=ids[0])
        memory, logits = jaxkv.prefill(forward, None, kind.make(), prompt)
        found = loops.beam(forward, None, memory, logits, width=2, steps=3, sequences=ids)
        beams.append(found[1].tokens)
    np.testing.assert_array_equal(*texts)
    np.testing.assert_array_equal(*beams)


def test_beam_of_two_streams_or_traced_sequences_raises():
    beam = partial(loops.beam, forward, None, TWO.make(), jnp.zeros((1, 16)), width=2, steps=3)
    with pytest.raises(ValueError, match=r"one stream of 2 for the beams, .* got \[1, 2\]"):
        beam(sequences=[1, 2])
    with pytest.raises(ValueError, match="got traced ones"):
        jax.eval_shape(lambda ids: beam(sequences=ids)[1], jnp.array([2, 3]))
