"""What a ubatch reads and writes in recurrent memories: stale, padded, split, compiled, donated.

See `tests.histories` for the model whose states name all the tokens that they have seen.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, make_batch
from tests import hlo
from tests.histories import (
    bytes_of,
    compute,
    kept_of,
    make,
    planned,
    run,
    states_of,
    tell,
    told,
    walk,
)
from tests.memories import WIDTH, assert_identical, plan_rows

# ---------------------------------------------------------------------------------- stale ubatches


def unchanged_by(memory, ubatch, kinds="rr"):
    """Neither applying a ubatch nor computing it changes a bit."""
    assert_identical(jaxkv.apply(memory, ubatch), memory)
    assert_identical(walk(memory, ubatch, kinds)[0], memory)


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("count", [1, 4])
def test_a_ubatch_twice_or_late_or_rivalled_writes_nothing(kept, count):
    memory = tell(make(kept), [1, 2, 3])
    ubatch, rival = (planned(memory, [token] * count) for token in (7, 8))
    after, _ = walk(memory, ubatch)
    unchanged_by(after, ubatch)
    unchanged_by(after, rival)
    unchanged_by(tell(after, [9]), ubatch)
    unchanged_by(jaxkv.seq_rm(memory, 0)[0], ubatch)
    unchanged_by(make(kept), ubatch)
    forked = jaxkv.seq_cp(memory, 0, [1, 2])
    for token in (5, 6):  # the cells that were free are taken
        forked = tell(forked, [], [token] * 4, [token] * 4)
    unchanged_by(forked, ubatch)


@pytest.mark.core
def test_ubatches_out_of_order_change_nothing():
    memory = tell(make(1), [1])
    first, second = jaxkv.init_batch(memory, make_batch([2] * 8), ubatch_size=4).ubatches
    unchanged_by(memory, second)
    memory, _ = walk(memory, first)
    unchanged_by(memory, first)
    memory, _ = walk(memory, second)
    assert states_of(memory)[-1] == (8, bytes_of([1] + [2] * 8, (0, 1)))


def test_what_was_never_applied_reads_zeros_and_is_written_nowhere():
    memory = tell(make(), [1, 2])
    ubatch = planned(memory, [3])
    after, _ = jax.jit(compute)(memory, ubatch)
    assert_identical(after, memory)
    assert not jnp.any(jaxkv.read_states(memory, 0, ubatch)["hash"])


@pytest.mark.core
def test_two_rows_of_one_sequence_are_refused():
    """In a memory of one sequence, where rows name no stream."""
    memory = make(1, sequences=1)
    rows = jnp.zeros((2, 2), jnp.int32)
    plan = jax.jit(lambda m, t: jaxkv.init_batch(m, make_batch(t, sequences=0)))(memory, rows)
    assert not plan.ok
    assert plan.reason[0] == Reason.MIXED_ROW
    assert_identical(walk(memory, plan.ubatches[0])[0], memory)


# -------------------------------------------------------------------------------- what callers get


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_trap_94_a_fresh_state_is_selected_not_multiplied(number):
    memory = make(kept=1)
    table, buffers = jaxkv.split(memory)
    poison = [dict(layer, trace=jnp.full_like(layer["trace"], number)) for layer in buffers]
    memory = tell(jaxkv.join(table, tuple(poison)), [1, 2, 3], [4])
    assert states_of(memory) == [(p, bytes_of([1, 2, 3][: p + 1], (0, 1))) for p in (1, 2)]
    assert states_of(memory, 1) == [(0, bytes_of([4], (0, 1)))]


def test_padding_advances_nothing():
    """Rows of 5 tokens are padded to 8, and a row may be empty."""
    memory = make(1)
    ubatch = planned(memory, [1] * 5, [2] * 5)
    memory, passed = walk(memory, ubatch)
    for seq in range(2):
        history = [seq + 1] * 5
        assert states_of(memory, seq) == [(p, bytes_of(history[: p + 1], (0, 1))) for p in (3, 4)]
    assert states_of(memory, 2) == []
    after = np.asarray(passed[0]["hash"])[:, 5:]
    np.testing.assert_array_equal(after, np.broadcast_to(after[:, :1], after.shape))


def test_holes_in_a_row_do_not_count():
    """Rows that the caller lays out may have padding anywhere."""
    memory = make(3)
    tokens, valid = np.zeros((3, WIDTH), int), np.zeros((3, WIDTH), bool)
    valid[0, [1, 3, 4, 7]] = valid[1, 6] = True
    plan = plan_rows(memory, tokens, valid).check()
    (ubatch,) = plan.ubatches
    assert jaxkv.steps_to_keep(ubatch, 3).tolist() == [[2, 3, 4], [0, 0, 1], [0, 0, 0]]
    table = jaxkv.apply(memory, ubatch).table
    assert table.position.tolist() == [[0, 1, 2, 3], [-1, -1, -1, 0], [-1] * 4]
    stamps = np.asarray(ubatch.stamps)
    assert np.asarray(table.stamp)[0, table.cell[0]].tolist() == stamps[0, :4].tolist()


@pytest.mark.core
def test_any_split_gives_the_same():
    """Together in rows, cut into ubatches of other shapes, or one sequence after another."""
    tokens = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13]]
    wanted = kept_of(*jaxkv.split(tell(make(1), *tokens)))
    for seq, history in enumerate(tokens):
        assert wanted[seq][-1][1] == bytes_of(history, (0, 1))
    for size in (3, 32):
        memory = run(make(1), make_batch(tokens), ubatch_size=size)
        assert kept_of(*jaxkv.split(memory)) == wanted
    alone = make(1)
    for seq in (2, 0, 1):
        alone = tell(alone, *[tokens[seq] if s == seq else [] for s in range(3)])
    assert kept_of(*jaxkv.split(alone)) == wanted


# --------------------------------------------------------------------------------- transformations


def everything(memory, seq, other, p0, p1):
    """Each verb and question, with one set of arguments."""
    return {
        "seq_rm": jaxkv.seq_rm(memory, seq, p0, p1),
        "seq_rm of all": jaxkv.seq_rm(memory, -1, p0, p1),
        "seq_cp": jaxkv.seq_cp(memory, seq, other, p0, p1),
        "seq_keep": jaxkv.seq_keep(memory, seq),
        "seq_add": jaxkv.seq_add(memory, seq, p0, p1, 1 - other),
        "seq_div": jaxkv.seq_div(memory, seq, p0, p1, other + 1),
        "clear": jaxkv.clear(memory),
        "seq_pos_min": jaxkv.seq_pos_min(memory, seq),
        "seq_pos_max": jaxkv.seq_pos_max(memory, seq),
        "used": jaxkv.used(memory),
        "can_seq_rm": jaxkv.can_seq_rm(memory, seq, p0, p1),
        "can_resume": jaxkv.can_resume(memory, seq, p0),
        "check_invariants": jaxkv.check_invariants(memory),
        "go_back": jaxkv.go_back(jaxkv.split(memory)[0], jaxkv.clear(memory)),
    }


ARGUMENTS = [(0, 1, 4, -1), (2, 0, -1, -1), (1, 2, 1, 0), (0, 1, 3, 5)]


def lives():
    """Three memories of different pasts."""
    one = told(kept=1, counts=(6, 2, 3))
    two = told(kept=1, counts=(6, 0, 3))
    two.both("seq_cp", 0, [1])
    three = told(kept=1, counts=(5, 1, 0))
    return [twin.memory for twin in (one, two, three)]


@pytest.mark.core
def test_compiled_with_traced_arguments_is_as_called():
    compiled = jax.jit(everything)
    for memory in lives()[:2]:
        for args in ARGUMENTS:
            plain = everything(memory, *args)
            for name, result in compiled(memory, *args).items():
                assert_identical(result, plain[name])


@pytest.mark.core
def test_vmap_over_memories_is_a_loop():
    memories, args = lives(), ARGUMENTS[:3]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *memories)
    together = jax.jit(jax.vmap(everything))(stacked, *map(jnp.array, zip(*args, strict=True)))
    for i, (memory, one) in enumerate(zip(memories, args, strict=True)):
        for name, alone in everything(memory, *one).items():
            assert_identical(jax.tree.map(lambda x, i=i: x[i], together[name]), alone)


def decode(memory, tokens, valid):
    """One token for each sequence: plan, apply, compute."""
    ubatch, ok = jaxkv.plan_step(memory, tokens, jnp.arange(3), valid)
    memory, passed = compute(jaxkv.apply(memory, ubatch), ubatch)
    return memory, (passed, ok)


@pytest.mark.core
def test_a_step_in_scan_and_vmap_is_a_step():
    tokens = jnp.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    valid = jnp.array([[1, 1, 1], [1, 0, 1], [0, 0, 0]], bool)
    memories = lives()
    plain = []
    for memory in memories:
        for step in zip(tokens, valid, strict=True):
            memory, _ = decode(memory, *step)
        plain.append(memory)
    loop = jax.jit(lambda m: jax.lax.scan(lambda m, x: decode(m, *x), m, (tokens, valid))[0])
    for memory, expected in zip(memories, plain, strict=True):
        assert_identical(loop(memory), expected)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *memories)
    together = jax.jit(jax.vmap(loop))(stacked)
    for i, expected in enumerate(plain):
        assert_identical(jax.tree.map(lambda x, i=i: x[i], together), expected)


@pytest.mark.core
def test_lengths_share_programs():
    """Lengths of one bucket, ids and fills are values: nothing is compiled for them."""

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(memory, ubatch):
        return walk(memory, ubatch)[0]

    memory = make(1, 3)
    for i, count in enumerate((5, 6, 7, 8, 5)):
        batch = make_batch([1] * count, sequences=i % 3)
        (ubatch,) = jaxkv.init_batch(memory, batch, ubatch_size=8).ubatches
        memory = step(memory, ubatch)
        memory, _ = jaxkv.seq_rm(memory, i % 3, jaxkv.seq_pos_max(memory, i % 3))


@pytest.mark.core
def test_gradients_flow_through_states():
    memory = make(0)
    (ubatch,) = jaxkv.init_batch(memory, make_batch([1])).ubatches
    table, buffers = jaxkv.split(jaxkv.apply(memory, ubatch))
    numbers = [layer["hash"] for layer in buffers]

    def loss(traces, x):
        parts = [dict(hash=n, trace=t) for n, t in zip(numbers, traces, strict=True)]
        memory = jaxkv.join(table, tuple(parts))
        state = jaxkv.read_states(memory, 0, ubatch)
        new = {"hash": state["hash"], "trace": state["trace"] * 3 + x}
        memory = jaxkv.write_states(memory, 0, ubatch, new)
        return jnp.sum(memory.buffers[0]["trace"] ** 2)

    gradient = jax.grad(loss, argnums=1)([layer["trace"] for layer in buffers], jnp.ones((1, 2)))
    np.testing.assert_array_equal(gradient, [[2.0, 2.0]])


LARGE = {"x": ((64, 1024), jnp.float32)}  # 256 KB a state


@pytest.mark.core
@pytest.mark.parametrize("kept", [0, 3])
def test_a_donated_step_copies_no_layer(kept):
    """It holds the states of its rows, and never those of all cells."""
    make_large = partial(
        jaxkv.make_recurrent_cache, layers=2, states=LARGE, sequences=64, rollback=kept
    )
    memory = jax.eval_shape(make_large)

    def one(memory, tokens):
        ubatch, _ = jaxkv.plan_step(memory, tokens, jnp.array([5, 9]), jnp.array([True, True]))
        memory = jaxkv.apply(memory, ubatch)
        for layer in range(2):
            x = jaxkv.read_states(memory, layer, ubatch)["x"]
            after = jnp.stack([x] * kept + [x / 2 + ubatch.tokens[..., None]], axis=1)
            memory = jaxkv.write_states(memory, layer, ubatch, {"x": after})
        return memory

    compiled = jax.jit(one, donate_argnums=0).lower(memory, jnp.zeros(2, jnp.int32)).compile()
    layer = 64 * (kept + 1) * 64 * 1024 * 4
    assert hlo.temporary_bytes(compiled) < layer / 2
    assert hlo.large_moves(compiled, layer // 2) == []
    for verb in (
        lambda m: jaxkv.seq_rm(m, 0, 1, 5)[0],
        lambda m: jaxkv.seq_cp(m, 0, [1, 2]),
        lambda m: jaxkv.seq_add(m, 0, 4, -1, -2),
        lambda m: jaxkv.seq_div(m, 0, 0, -1, 2),
        lambda m: jaxkv.go_back(jaxkv.split(m)[0], m)[0],
    ):
        compiled = jax.jit(verb, donate_argnums=0).lower(memory).compile()
        assert hlo.temporary_bytes(compiled) < layer / 100
        assert hlo.large_moves(compiled, layer // 2) == []


def adds(weight, memory, ubatch):
    """A model whose state is the sum of its tokens, each times a weight."""
    tokens = jnp.sum(ubatch.tokens * ubatch.valid, axis=1)
    total = jaxkv.read_states(memory, 0, ubatch)["x"] + weight * tokens
    logits = jnp.broadcast_to(total[:, None], ubatch.tokens.shape).reshape(-1, 1)
    return jaxkv.write_states(memory, 0, ubatch, {"x": total}), logits[ubatch.outputs]


def summed(memory, *tokens, weight):
    memory, logits = jaxkv.prefill(adds, jnp.float32(weight), memory, make_batch(tokens))
    return memory, logits.item()


@pytest.mark.core
@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("forget", ["seq_rm", "clear", "go_back"])
def test_the_same_tokens_told_anew_are_computed_anew(forget, streams):
    """States of an earlier run are not those of this one, though all tokens are."""
    states = {"x": ((), jnp.float32)}
    empty = jaxkv.make_recurrent_cache(layers=1, states=states, sequences=2, streams=streams)
    memory, _ = summed(empty, 1, 2, weight=float("nan"))
    forgotten = {
        "seq_rm": lambda: jaxkv.seq_rm(memory, 0)[0],
        "clear": lambda: jaxkv.clear(memory),
        "go_back": lambda: jaxkv.go_back(jaxkv.split(empty)[0], memory)[0],
    }[forget]()
    memory, total = summed(forgotten, 1, 2, weight=1)
    assert total == 3
    assert summed(memory, 3, weight=10)[1] == 33
