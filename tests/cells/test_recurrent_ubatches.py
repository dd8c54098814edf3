"""What a ubatch reads and writes in recurrent memories: stale, padded, split, compiled, donated.

See `tests.histories` for the model whose states name all the tokens that they have seen.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, make_batch
from tests import hlo
from tests.histories import (
    bytes_of,
    kept_of,
    make,
    planned,
    run,
    states_of,
    tell,
    walk,
)
from tests.memories import WIDTH, assert_identical, plan_rows

core = pytest.mark.core


# -------------------------------------------------------------------------- stale and refused ones


def test_read_states_of_an_unapplied_ubatch_is_nan():
    memory = tell(make(3), [1, 2])
    ubatch = planned(memory, [3])
    states = jaxkv.read_states(memory, 0, ubatch)
    assert np.isnan(states["trace"][0]).all() and states["hash"][0] == 0  # the lowest integer
    written = {n: jnp.repeat(x[:, None], 4, axis=1) for n, x in states.items()}
    assert_identical(jaxkv.write_states(memory, 0, ubatch, written), memory)


@core
def test_read_states_of_a_refused_plan_is_zero():
    """Also those of sequences that have a state."""
    memory, tokens = tell(make(3), [1, 2], [3]), np.full((3, WIDTH), 4)
    valid = np.arange(WIDTH) < [[1], [1], [0]]
    plan = plan_rows(memory, tokens, valid, tokens + 5)
    assert plan.reason.tolist() == [Reason.NOT_NEXT, Reason.NOT_NEXT, Reason.FITS]
    after, passed = walk(memory, plan.ubatches[0])
    assert_identical(after, memory)
    assert not any(np.any(x[:, 0]) for x in jax.tree.leaves(passed))


@core
def test_init_batch_two_rows_of_one_sequence_is_refused():
    """In a memory of one sequence, where rows name no stream."""
    memory, rows = make(1, sequences=1), jnp.zeros((2, 2), jnp.int32)
    plan = jax.jit(lambda m, t: jaxkv.init_batch(m, make_batch(t, sequences=0)))(memory, rows)
    assert not plan.ok and plan.reason[0] == Reason.MIXED_ROW
    assert_identical(jaxkv.apply(memory, plan), memory)


# ------------------------------------------------------------------------------- padding and splits


def test_read_states_of_a_new_sequence_ignores_old_bytes():
    """Trap 94: a fresh state is selected, not multiplied by zero."""
    table, buffers = jaxkv.split(make(3))
    for number in (np.nan, np.inf):
        poison = [dict(layer, trace=jnp.full_like(layer["trace"], number)) for layer in buffers]
        memory = tell(jaxkv.join(table, tuple(poison)), [1, 2, 3], [4])
        wanted = [(p, bytes_of([1, 2, 3][: p + 1], (0, 1))) for p in range(3)]
        assert states_of(memory) == wanted
        assert states_of(memory, 1) == [(0, bytes_of([4], (0, 1)))]


@core
def test_steps_to_keep_skips_holes_in_a_row():
    """Rows that the caller lays out may have padding anywhere."""
    memory = make(3)
    tokens, valid = np.zeros((3, WIDTH), int), np.zeros((3, WIDTH), bool)
    valid[0, [1, 3, 4, 7]] = valid[1, 6] = True
    (ubatch,) = plan_rows(memory, tokens, valid).check().ubatches
    assert jaxkv.steps_to_keep(ubatch, 3).tolist() == [[2, 3, 4], [0, 0, 1], [0, 0, 0]]
    table = jaxkv.apply(memory, ubatch).table
    assert table.position.tolist() == [[0, 1, 2, 3], [-1, -1, -1, 0], [-1] * 4]
    stamps = np.asarray(ubatch.stamps)
    assert np.asarray(table.stamp)[0, table.cell[0]].tolist() == stamps[0, :4].tolist()


@core
def test_init_batch_any_split_leaves_the_same_states():
    """Together in rows, or cut into ubatches of one token of each."""
    tokens = [[1, 2, 3], [8, 9, 10], [11, 12, 13]]
    memory = run(make(1), make_batch(tokens), ubatch_size=3)
    for seq, history in enumerate(tokens):
        assert states_of(memory, seq)[-1] == (2, bytes_of(history, (0, 1)))
    assert kept_of(*jaxkv.split(memory)) == kept_of(*jaxkv.split(tell(make(1), *tokens)))


# --------------------------------------------------------------------------------- transformations


@core
def test_write_states_passes_gradients():
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

    gradient = jax.jit(jax.grad(loss, argnums=1))
    np.testing.assert_array_equal(
        gradient([layer["trace"] for layer in buffers], jnp.ones((1, 2))), [[2.0, 2.0]]
    )


LARGE = {"x": ((64, 1024), jnp.float32)}  # 256 KB a state


@core
def test_write_states_donated_copies_no_layer():
    """A step holds the states of its rows, and never those of all cells; a verb none."""
    kept = 3
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

    layer = 64 * (kept + 1) * 64 * 1024 * 4
    for edit, most, *args in (
        (one, layer / 2, jnp.zeros(2, jnp.int32)),
        (lambda m: jaxkv.seq_rm(m, 0, 1, 5)[0], layer / 100),
        (lambda m: jaxkv.seq_cp(m, 0, [1, 2]), layer / 100),
        (lambda m: jaxkv.seq_add(m, 0, 4, -1, -2), layer / 100),
        (lambda m: jaxkv.seq_div(m, 0, 0, -1, 2), layer / 100),
        (lambda m: jaxkv.go_back(jaxkv.split(m)[0], m)[0], layer / 100),
    ):
        compiled = jax.jit(edit, donate_argnums=0).lower(memory, *args).compile()
        assert hlo.temporary_bytes(compiled) < most
        assert hlo.large_moves(compiled, layer // 2) == []


def adds(weight, memory, ubatch):
    """A model whose state is the sum of its tokens, each times a weight."""
    tokens = jnp.sum(ubatch.tokens * ubatch.valid, axis=1)
    total = jaxkv.read_states(memory, 0, ubatch)["x"] + weight * tokens
    logits = jnp.broadcast_to(total[:, None], ubatch.tokens.shape).reshape(-1, 1)
    return jaxkv.write_states(memory, 0, ubatch, {"x": total}), logits[ubatch.outputs]


@core
@pytest.mark.parametrize("streams", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_prefill_of_forgotten_tokens_computes_them_anew(streams):
    """States of an earlier run are not those of this one, though all tokens are."""

    def summed(memory, *tokens, weight):
        return jaxkv.prefill(adds, jnp.float32(weight), memory, make_batch(tokens))

    states = {"x": ((), jnp.float32)}
    empty = jaxkv.make_recurrent_cache(layers=1, states=states, sequences=2, streams=streams)
    memory, _ = summed(empty, 1, 2, weight=float("nan"))
    for forgotten in (
        jaxkv.seq_rm(memory, 0)[0],
        jaxkv.clear(memory),
        jaxkv.go_back(jaxkv.split(empty)[0], memory)[0],
    ):
        again, total = summed(forgotten, 1, 2, weight=1)
        assert total.item() == 3
        assert summed(again, 3, weight=10)[1].item() == 33
