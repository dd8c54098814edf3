"""A stream for each sequence: rows of one each, copies between them, any set in any order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, make_batch
from tests.memories import (
    ROPE,
    SPLIT,
    Kind,
    assert_identical,
    cells_of,
    drawing,
    drawn,
    run,
    sign,
    think,
)

UNIFIED = Kind("unified", cells=32, sequences=4)
FOUR = Kind("four", cells=12, sequences=4, streams=4)


def prompts(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 9, n).tolist() for n in lengths]


def fed(kind, *lengths):
    """A memory in which sequences 0, 1, 2 ... have prompts of these lengths, 12 at most."""
    tokens = np.zeros((2, kind.sequences, 12), np.int32)
    for seq, prompt in enumerate(prompts(*lengths)):
        tokens[:, seq, : len(prompt)] = prompt, np.ones(len(prompt))
    return run_rows(kind.make(), *tokens)


@jax.jit
def run_rows(memory, tokens, valid):
    """Run a row of tokens for each sequence, one program for prompts of any lengths."""
    sequences = jnp.broadcast_to(jnp.arange(len(tokens))[:, None], tokens.shape)
    batch = make_batch(tokens, sequences=sequences, valid=valid != 0)
    (ubatch,) = jaxkv.init_batch(memory, batch).ubatches
    return think(memory, ubatch)[0]


@pytest.mark.core
def test_split_answers_as_unified():
    batch = make_batch(prompts(4, 2, 4, 2))
    step = make_batch([[1], [2], [3], [4]])
    answers = []
    for kind, size in ((UNIFIED, 4), (FOUR, 8)):
        memory, first = run(kind.make(), batch, ubatch_size=size)
        memory, second = run(memory, step)
        answers.append(np.concatenate([first, second]))
    np.testing.assert_allclose(*answers, atol=1e-5)


def test_trap_30_a_copy_takes_any_range_and_replaces():
    """llama.cpp aborts unless everything is copied."""
    memory = fed(SPLIT, 4, 7)
    assert drawing(jaxkv.seq_cp(memory, 0, 1)).split(" | ")[1] == "0{1} 1{1} 2{1} 3{1}"
    memory = jaxkv.seq_cp(memory, 0, 1, 2)
    assert drawing(memory) == "0{0} 1{0} 2{0} 3{0} | . . 2{1} 3{1} | "


@pytest.mark.parametrize(("p0", "p1"), [(0, 0), (255, -1), (3, 2)])
def test_trap_31_an_empty_range_copies_nothing(p0, p1):
    """llama.cpp copies everything. The destination is replaced all the same: it holds nothing."""
    memory = fed(SPLIT, 4, 2)
    assert drawing(jaxkv.seq_cp(memory, 0, 1, p0, p1)) == "0{0} 1{0} 2{0} 3{0} |  | "


def test_trap_32_36_37_a_copy_is_there_at_once():
    """llama.cpp copies with the next decode; saving, restoring or clearing before it goes wrong."""
    memory = fed(SPLIT, 4, 2)
    memory = jaxkv.seq_cp(jaxkv.seq_cp(memory, 0, 1), 1, 2)
    for array in (*memory.buffers.k, *memory.buffers.v):
        np.testing.assert_array_equal(array[0, :, :4], array[1, :, :4])
        np.testing.assert_array_equal(array[0, :, :4], array[2, :, :4])


def test_trap_35_clear_leaves_no_copy_behind():
    memory = jaxkv.clear(jaxkv.seq_cp(fed(SPLIT, 4, 2), 0, 1))
    batch = make_batch([[5, 6, 7]], sequences=[1])
    np.testing.assert_array_equal(run(memory, batch)[1], run(SPLIT.make(), batch)[1])


def test_trap_33_34_rotations_that_are_owed_are_copied_with_their_keys():
    memory = jaxkv.seq_add(fed(SPLIT, 4), 0, 0, -1, 3)
    memory = jaxkv.seq_cp(memory, 0, 1)
    assert drawing(memory).split(" | ")[1] == "3{1}+3 4{1}+3 5{1}+3 6{1}+3"
    memory = jaxkv.apply(memory, jaxkv.init_update(memory))
    np.testing.assert_array_equal(memory.buffers.k[0][0, :, :4], memory.buffers.k[0][1, :, :4])


@pytest.mark.core
def test_a_copy_goes_on_as_its_source_would():
    memory = fed(FOUR, 5, 2, 3)
    forked = jaxkv.seq_cp(memory, 0, [1, 3])
    step = [7]
    (alone,) = run(memory, make_batch([step], sequences=[0]))[1]
    _, together = run(forked, make_batch([step] * 3, sequences=[3, 0, 1]))
    np.testing.assert_allclose(together, np.stack([alone] * 3), atol=1e-5)


def test_a_copy_of_more_cells_than_a_chunk():
    kind = Kind("long", cells=600, sequences=2, streams=2)
    memory = drawn(" ".join(f"{i}{{0}}" for i in range(520)), kind)
    table, buffers = jaxkv.split(memory)
    noise = jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), x.shape), buffers)
    copied = jaxkv.seq_cp(jaxkv.join(table, noise), 0, 1, 3, 519)
    assert [*cells_of(copied.table)][520:] == [(1, i) for i in range(3, 519)]
    for array in copied.buffers.k:
        np.testing.assert_array_equal(array[0, :, :519], array[1, :, :519])


def test_a_copy_to_the_same_sequence_and_unknown_traced_ids_change_nothing():
    memory = fed(SPLIT, 4, 2)
    assert_identical(jaxkv.seq_cp(memory, 0, 0, 1, 2), memory)
    traced = jax.jit(jaxkv.seq_cp)
    for src, dst in ((0, 3), (5, 1), (-1, 1)):
        assert_identical(traced(memory, src, dst), memory)
    with pytest.raises(ValueError, match="sequence ids from 0 to 2, got 3"):
        jaxkv.seq_cp(memory, 0, 3)


def test_donated_or_not_a_copy_is_the_same():
    wanted = jaxkv.seq_cp(fed(SPLIT, 4, 2), 0, 1)
    memory = fed(SPLIT, 4, 2)
    assert_identical(jaxkv.seq_cp(memory, 0, 1, donate=True), wanted)
    assert memory.buffers.k[0].is_deleted()


def test_a_copy_cannot_be_undone_where_it_overwrote_keys():
    memory = fed(SPLIT, 4, 2)
    table, _ = jaxkv.split(memory)
    _, ok = jaxkv.go_back(table, jaxkv.seq_cp(memory, 0, 1))
    assert not ok
    _, ok = jaxkv.go_back(table, jaxkv.seq_cp(memory, 0, 2))  # no cell there was in use
    assert ok


@pytest.mark.core
@pytest.mark.parametrize("ids", [[0, 2], [0, 1, 2], [1, 0], [2], [3, 0, 2, 1], [2, 3]])
def test_trap_38_any_streams_in_any_order_are_one_ubatch(ids):
    """llama.cpp wants consecutive ids in rising order, and else cuts the batch into pieces."""
    memory = fed(FOUR, 3, 4, 2, 5)
    tokens = [[i + 1] for i in ids]
    plan = jaxkv.init_batch(memory, make_batch(tokens, sequences=ids))
    assert len(plan.ubatches) == 1
    _, logits = run(memory, make_batch(tokens, sequences=ids))
    for i, row in zip(ids, logits, strict=True):  # in the order of the batch
        _, (alone,) = run(memory, make_batch([[i + 1]], sequences=[i]))
        np.testing.assert_allclose(row, alone, atol=1e-5)


@pytest.mark.core
def test_trap_38_outputs_of_all_tokens_come_in_the_order_of_the_batch():
    batch = make_batch([3, 4, 5, 6, 7, 8], sequences=[2, 0, 2, 0, 0, 3], outputs=np.ones(6, bool))
    np.testing.assert_allclose(run(FOUR.make(), batch)[1], run(UNIFIED.make(), batch)[1], atol=1e-5)


@pytest.mark.core
def test_trap_88_streams_that_take_no_part_are_untouched():
    memory = fed(FOUR, 3, 4, 2, 5)
    after, _ = run(memory, make_batch([[1]], sequences=[2]))
    for old, new in zip(jax.tree.leaves(memory), jax.tree.leaves(after), strict=True):
        if old.shape[0] == 4:
            np.testing.assert_array_equal(np.delete(old, 2, 0), np.delete(new, 2, 0))


def test_trap_89_an_id_past_the_last_stream_is_refused():
    memory = FOUR.make()
    with pytest.raises(ValueError, match="from 0 to 3, got 4"):
        jaxkv.init_batch(memory, make_batch([1], sequences=4))
    with pytest.raises(ValueError, match="from 0 to 3, got 4"):
        jaxkv.seq_keep(memory, 4)
    traced = jax.jit(lambda seq: jaxkv.seq_rm(memory, seq)[0])(4)
    assert_identical(traced, memory)


def test_each_stream_has_room_of_its_own():
    memory = fed(FOUR, 12, 3)
    plan = jaxkv.init_batch(memory, make_batch([[1], [2], [3]]))
    assert plan.fits.tolist() == [False, True, True, True]
    assert plan.reason[0] == Reason.NO_ROOM
    assert (plan.expected[0], plan.found[0]) == (1, 0)


def test_seq_keep_empties_every_other_stream():
    memory = jaxkv.seq_keep(fed(SPLIT, 2, 3, 1), 1)
    assert drawing(memory) == " | 0{1} 1{1} 2{1} | "


def test_seq_rm_of_all_reaches_every_stream():
    memory, _ = jaxkv.seq_rm(fed(SPLIT, 2, 3, 1), -1, 1, 2)
    assert drawing(memory) == "0{0} | 0{1} . 2{1} | 0{2}"


def test_defrag_closes_the_gaps_of_each_stream():
    memory, _ = jaxkv.seq_rm(fed(SPLIT, 5, 4), -1, 1, 3)
    memory = jaxkv.apply(memory, jaxkv.defrag_plan(memory))
    assert drawing(memory) == "0{0} 3{0} 4{0} | 0{1} 3{1} | "


@pytest.mark.core
def test_rows_traced_in_any_order_and_with_gaps():
    """A batch in rows, planned inside of jit: rows find their streams, padding goes nowhere."""
    memory = fed(FOUR, 3, 4, 2, 5)
    tokens = jnp.array([[5, 6], [7, 0], [0, 0], [8, 9]])
    sequences = jnp.array([[3, 3], [0, 0], [0, 0], [1, 1]])
    valid = jnp.array([[True, True], [True, False], [False, False], [True, True]])

    @jax.jit
    def step(memory, tokens, sequences, valid):
        batch = make_batch(tokens, sequences=sequences, valid=valid, outputs=valid)
        plan = jaxkv.init_batch(memory, batch)
        memory, logits = think(memory, plan.ubatches[0])
        return memory, plan.collect([logits]), plan.ok

    after, logits, ok = step(memory, tokens, sequences, valid)
    assert ok and jaxkv.seq_pos_max(after, [0, 1, 2, 3]).tolist() == [3, 5, 1, 6]
    batch = make_batch([5, 6, 7, 8, 9], sequences=[3, 3, 0, 1, 1], outputs=np.ones(5, bool))
    np.testing.assert_allclose(logits[:5], run(memory, batch)[1], atol=1e-5)


@jax.jit
def applied_rows(memory, sequences):
    batch = make_batch(jnp.ones((2, 2), jnp.int32), sequences=sequences)
    plan = jaxkv.init_batch(memory, batch)
    return jaxkv.apply(memory, plan), plan.reason


@pytest.mark.parametrize("sequences", [[[0, 1], [2, 2]], [[1, 1], [1, 1]]])
def test_a_row_of_several_or_several_rows_of_one_are_refused(sequences):
    memory = fed(FOUR, 3, 4, 2, 5)
    after, reason = applied_rows(memory, jnp.array(sequences))
    assert Reason.MIXED_ROW in reason.tolist()
    assert_identical(after, memory)
    with pytest.raises(ValueError, match="must come in rows"):
        jax.jit(lambda t: jaxkv.init_batch(memory, make_batch(t)).ok)(jnp.ones(2, jnp.int32))


@pytest.mark.core
@pytest.mark.parametrize("active", [[True] * 4, [False, True, False, True]])
def test_generation_in_streams_is_that_in_one(active):
    """The loop's short call: rows in the order of streams, logits in the order asked for."""
    steps = []
    ids = jnp.array([2, 0, 3, 1])
    for kind in (UNIFIED, FOUR):
        memory = fed(kind, 3, 4, 2, 5)
        ubatch, ok = jaxkv.plan_step(memory, jnp.array([4, 5, 6, 7]), ids, jnp.array(active))
        assert ok
        memory, logits = think(memory, ubatch)
        steps.append((logits[np.array(active)], jaxkv.seq_pos_max(memory, [0, 1, 2, 3]).tolist()))
    np.testing.assert_allclose(steps[0][0], steps[1][0], atol=1e-5)
    assert steps[0][1] == steps[1][1]


@pytest.mark.core
def test_a_subset_of_streams_in_the_loop():
    memory = fed(FOUR, 3, 4, 2, 5)
    ubatch, ok = jaxkv.plan_step(memory, jnp.array([4, 5]), jnp.array([3, 1]), jnp.ones(2, bool))
    assert ok and ubatch.row_stream.tolist() == [3, 1]
    memory, _ = think(memory, ubatch)
    assert jaxkv.seq_pos_max(memory, [0, 1, 2, 3]).tolist() == [2, 4, 1, 5]


@pytest.mark.parametrize("streams", [0, 3, 8])
def test_the_number_of_streams_divides_that_of_sequences(streams):
    with pytest.raises(ValueError, match="wanted streams .*got"):
        jaxkv.make_kv_cache(layers=1, cells=4, kv_heads=1, head_dim=2, sequences=4, streams=streams)


def test_the_worst_case_is_a_row_for_each_stream():
    memory = jax.eval_shape(lambda: FOUR.make(rope=ROPE))
    (ubatch,) = jaxkv.init_full(memory, ubatch_size=16).ubatches
    assert ubatch.tokens.shape == (4, 4)
    jax.eval_shape(sign, memory, ubatch)
