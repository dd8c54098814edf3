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
from tests.memories import ROPE, Kind, assert_identical, drawing, drawn, run, sign, think

core = pytest.mark.core
SHARED = Kind("contiguous", cells=8, sequences=4, streams=2, placement="contiguous")
NEAR = Kind("window", cells=6, sequences=4, streams=2, windows=(jaxkv.window.sliding(2),))
LENGTHS = (3, 4, 2, 5)

over_streams = pytest.mark.parametrize("kind", [TWO, FOUR], ids=lambda kind: kind.name)


# ---- logits


@core
@over_streams
@pytest.mark.parametrize(
    ("tokens", "sequences", "ubatches"),
    [
        ([[5], [6], [7], [8]], [0, 1, 2, 3], 1),
        ([[5], [6], [7], [8]], [3, 0, 2, 1], 1),
        ([[5], [6]], [2, 0], 1),
        ([[5], [6]], [1, 0], 1),
        ([3, 4, 5, 6, 7, 8], [2, 0, 2, 0, 0, 3], 3),
    ],
    ids=["in order", "any order", "some", "neighbours", "uneven"],
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
@pytest.mark.parametrize("active", [[True] * 4, [False, True, False, True]])
def test_plan_step_any_rows_matches_one_stream(kind, active):
    """Rows of a step in any order, some of them not active."""
    steps = []
    for one in (ONE, kind):
        memory = fed(one, *LENGTHS)
        ids, tokens = jnp.array([2, 0, 3, 1]), jnp.array([4, 5, 6, 7])
        ubatch, ok = jaxkv.plan_step(memory, tokens, ids, jnp.array(active))
        assert ok
        memory, logits = think(memory, ubatch)
        steps.append((logits[np.array(active)], jaxkv.seq_pos_max(memory, [0, 1, 2, 3]).tolist()))
    np.testing.assert_allclose(steps[0][0], steps[1][0], atol=1e-5)
    assert steps[0][1] == steps[1][1]


@core
@over_streams
def test_plan_step_of_some_sequences_leaves_the_others(kind):
    memory = fed(kind, *LENGTHS)
    ubatch, ok = jaxkv.plan_step(memory, jnp.array([4, 5]), jnp.array([3, 1]), jnp.ones(2, bool))
    sharing = 4 // kind.streams
    assert ok and ubatch.row_stream.tolist() == [3 // sharing, 1 // sharing]
    after = jaxkv.apply(memory, ubatch)
    assert jaxkv.seq_pos_max(after, [0, 1, 2, 3]).tolist() == [2, 4, 1, 5]


@core
@over_streams
def test_run_leaves_other_streams_untouched(kind):
    """Trap 88."""
    memory = fed(kind, *LENGTHS)
    after, _ = run(memory, make_batch([[5], [6]], sequences=[2, 3]))
    taken = np.unique(np.array([2, 3]) * kind.streams // 4)
    for old, new in zip(jax.tree.leaves(memory), jax.tree.leaves(after), strict=True):
        if old.shape[0] == kind.streams:
            np.testing.assert_array_equal(np.delete(old, taken, 0), np.delete(new, taken, 0))


# ---- cells


@pytest.mark.parametrize(
    "kind",
    [TWO, pytest.param(SHARED, marks=core), pytest.param(NEAR, marks=core)],
    ids=lambda kind: kind.name,
)
def test_init_batch_rows_of_one_stream_get_their_own_cells(kind):
    """In the order of sequences, whatever the order of rows."""
    for ids in ([0, 1], [1, 0]):
        plan = jaxkv.init_batch(kind.make(), make_batch([[5, 6], [7, 8]], sequences=ids)).check()
        (ubatch,) = plan.ubatches
        assert ubatch.row_sequence.tolist() == ids
        cells = drawing(jaxkv.apply(kind.make(), ubatch))
        assert cells == "0{0} 1{0} 0{1} 1{1} | "


@core
def test_init_batch_contiguous_rows_of_one_stream_are_one_run():
    memory = drawn(". 0{0} . . . 1{0} . . |", SHARED)
    plan = jaxkv.init_batch(memory, make_batch([[5, 5], [6, 6], [7, 7]], sequences=[2, 1, 0]))
    assert not plan.ok and plan.reason.tolist() == [Reason.FRAGMENTED] * 2 + [0, 0]
    plan = jaxkv.init_batch(memory, make_batch([[5], [6], [7]], sequences=[2, 1, 0])).check()
    assert drawing(jaxkv.apply(memory, plan)) == ". 0{0} 2{0} 0{1} . 1{0} | 0{2}"


@pytest.mark.parametrize(
    ("kind", "cells", "rows", "found"),
    [
        pytest.param(TWO, 8, [[1] * 3, [2] * 2, [3] * 9], (3, 2), marks=core),
        (FOUR, 8, [[1], [2], [3]], (1, 0)),
    ],
    ids=["two", "four"],
)
def test_init_batch_full_stream_refuses_its_sequences_alone(kind, cells, rows, found):
    memory = drawn(" ".join(f"{i}{{0}}" for i in range(cells)), kind)
    plan = jaxkv.init_batch(memory, make_batch(rows, sequences=[0, 1, 2]))
    assert plan.fits.tolist() == [False, True, True, True] and plan.reason[0] == Reason.NO_ROOM
    assert (plan.expected[0], plan.found[0]) == found


@core
@over_streams
def test_is_current_only_edits_of_its_stream_make_stale(kind):
    memory = drawn("0{0} 1{0} | | ", kind)
    plans = [jaxkv.init_batch(memory, make_batch([1], sequences=seq)) for seq in (0, 3)]
    edited, _ = jaxkv.seq_rm(memory, 0, 1)
    current = [jaxkv.is_current(edited, plan.ubatches[0]).item() for plan in plans]
    assert current == [False, True]


@pytest.mark.parametrize(
    ("verb", "after"),
    [
        (lambda m: jaxkv.seq_keep(m, 1), " | 0{1} 1{1} 2{1} |  | "),
        (lambda m: jaxkv.seq_rm(m, -1, 1, 2)[0], "0{0} | 0{1} . 2{1} | 0{2} . 2{2} | "),
        (jaxkv.clear, " |  |  | "),
    ],
    ids=["seq_keep", "seq_rm", "clear"],
)
def test_edits_reach_every_stream(verb, after):
    memory = drawn("0{0} 1{0} | 0{1} 1{1} 2{1} | 0{2} 1{2} 2{2} |", FOUR)
    assert drawing(verb(memory)) == after


def test_defrag_closes_the_gaps_of_each_stream():
    memory = drawn("0{0} . . 3{0} 4{0} | 0{1} . . 3{1} | | ", FOUR)
    memory = jaxkv.apply(memory, jaxkv.defrag_plan(memory))
    assert drawing(memory) == "0{0} 3{0} 4{0} | 0{1} 3{1} |  | "


@core
def test_sight_reads_a_stream_once_where_all_sequences_have_rows():
    memory = TWO.make()
    for count, shape in ((4, (2, 2)), (2, (2, 1))):
        plan = jaxkv.init_batch(memory, make_batch([[1]] * count)).check()
        sight = sight_of(jaxkv.apply(memory, plan).table, plan.ubatches[0])
        assert sight.at.shape == shape and sight.all_streams == (count == 4)
    assert sight.streams.tolist() == [0, 0]


def test_init_full_of_streams_has_a_row_for_each():
    memory = jax.eval_shape(lambda: FOUR.make(rope=ROPE))
    (ubatch,) = jaxkv.init_full(memory, ubatch_size=16).ubatches
    assert ubatch.tokens.shape == (4, 4)
    jax.eval_shape(sign, memory, ubatch)


# ---- errors


def test_ids_past_the_last_stream_raise():
    """Trap 89. A traced one changes nothing."""
    memory = FOUR.make()
    with pytest.raises(ValueError, match="from 0 to 3, got 4"):
        jaxkv.init_batch(memory, make_batch([1], sequences=4))
    with pytest.raises(ValueError, match="from 0 to 3, got 4"):
        jaxkv.seq_keep(memory, 4)
    assert_identical(jax.jit(lambda seq: jaxkv.seq_rm(memory, seq)[0])(4), memory)


def test_init_batch_traced_list_for_streams_raises():
    with pytest.raises(ValueError, match="must come in rows"):
        jax.eval_shape(lambda t: jaxkv.init_batch(FOUR.make(), make_batch(t)), jnp.ones(2, int))


def test_streams_that_do_not_divide_sequences_raise():
    make = partial(jaxkv.make_kv_cache, layers=1, cells=4, kv_heads=1, head_dim=2, sequences=4)
    for streams in (0, 3, 8):
        with pytest.raises(ValueError, match="wanted streams .*got"):
            make(streams=streams)
    with pytest.raises(ValueError, match=r"same number of streams, got \[2, 4\]"):
        jaxkv.make_hybrid_cache((make(streams=2), (0,)), (make(streams=4), (1,)))


# ---- loops


def forward(weights, memory, ubatch):
    del weights
    return think(memory, ubatch)


@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, 4])
def test_decode_in_two_streams_matches_one_stream(count):
    """Two rows of a memory of two streams are not its two streams."""
    texts = []
    for kind in (TWO, ONE):
        prompts = make_batch([[i + 1, 2 * i + 1] for i in range(count)])
        memory, logits = jaxkv.prefill(forward, None, kind.make(), prompts)
        sampler = loops.sampling.make_sampler()
        state, first = loops.begin(sampler, memory, logits, limit=4)
        _, _, picked = jaxkv.decode(forward, sampler, None, memory, state, steps=4)
        texts.append(np.concatenate([first.tokens, picked.tokens], axis=1))
    np.testing.assert_array_equal(*texts)


@pytest.mark.nightly
def test_engine_in_two_streams_gives_each_text_as_alone():
    """Also where cells run out, so that texts are put off and computed again."""
    engine = loops.batching.Engine(forward, None, TWO.make(), chunk=8, steps=3, reserve=False)

    def texts(*numbers):
        for i in numbers:
            prompt = [i % 7 + 1] * (2 + i % 3)
            engine.submit(loops.batching.Request(prompt=prompt, limit=5 + i % 4))
        results = sorted(engine.results(), key=lambda result: result.id)
        assert jaxkv.used(engine.memory) == 0
        return [result.tokens.tolist() for result in results]

    assert texts(*range(9)) == [text for i in range(9) for text in texts(i)]


@pytest.mark.nightly
def test_beam_in_the_second_stream_matches_one_stream():
    tokens = []
    for kind, ids in ((TWO, [2, 3]), (ONE, [0, 1])):
        prompt = make_batch([1, 2, 3], sequences=ids[0])
        memory, logits = jaxkv.prefill(forward, None, kind.make(), prompt)
        beam = partial(loops.beam, forward, None, memory, logits, width=2, steps=3)
        tokens.append(beam(sequences=ids)[1].tokens)
    np.testing.assert_array_equal(*tokens)


def test_beam_of_two_streams_or_traced_sequences_raises():
    beam = partial(loops.beam, forward, None, TWO.make(), jnp.zeros((1, 16)), width=2, steps=3)
    with pytest.raises(ValueError, match=r"one stream of 2 for the beams, .* got \[1, 2\]"):
        beam(sequences=[1, 2])
    with pytest.raises(ValueError, match="got traced ones"):
        jax.eval_shape(lambda ids: beam(sequences=ids)[1], jnp.array([2, 3]))
