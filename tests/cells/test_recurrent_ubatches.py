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


def unchanged_by(memory, ubatch):
    """Neither applying a ubatch nor computing it changes a bit."""
    assert_identical(jaxkv.apply(memory, ubatch), memory)
    assert_identical(walk(memory, ubatch)[0], memory)


# -------------------------------------------------------------------------- stale and refused ones


@pytest.mark.parametrize(("kept", "count"), [(3, 4), pytest.param(0, 1, marks=pytest.mark.core)])
def test_apply_stale_ubatch_changes_nothing(kept, count):
    """Twice, late, after another one of the same plan, on other memories."""
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
def test_apply_ubatches_out_of_order_changes_nothing():
    memory = tell(make(1), [1])
    first, second = jaxkv.init_batch(memory, make_batch([2] * 8), ubatch_size=4).ubatches
    unchanged_by(memory, second)
    memory, _ = walk(memory, first)
    unchanged_by(memory, first)
    memory, _ = walk(memory, second)
    assert states_of(memory)[-1] == (8, bytes_of([1] + [2] * 8, (0, 1)))


def test_read_states_of_an_unapplied_ubatch_is_nan():
    memory = tell(make(3), [1, 2])
    ubatch = planned(memory, [3])
    states = jaxkv.read_states(memory, 0, ubatch)
    assert np.isnan(states["trace"][0]).all() and states["hash"][0] == 0  # the lowest integer
    written = {n: jnp.repeat(x[:, None], 4, axis=1) for n, x in states.items()}
    assert_identical(jaxkv.write_states(memory, 0, ubatch, written), memory)


@pytest.mark.core
def test_read_states_of_a_refused_plan_is_zero():
    """Also those of sequences that have a state."""
    memory, tokens = tell(make(3), [1, 2], [3]), np.full((3, WIDTH), 4)
    valid = np.arange(WIDTH) < [[1], [1], [0]]
    plan = plan_rows(memory, tokens, valid, tokens + 5)
    assert plan.reason.tolist() == [Reason.NOT_NEXT, Reason.NOT_NEXT, Reason.FITS]
    after, passed = walk(memory, plan.ubatches[0])
    assert_identical(after, memory)
    assert not any(np.any(x[:, 0]) for x in jax.tree.leaves(passed))


@pytest.mark.core
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


def test_write_states_padding_advances_nothing():
    """Rows of 5 tokens are padded to 8, and a row may be empty."""
    memory = make(3)
    memory, passed = walk(memory, planned(memory, [1] * 5, [2] * 5))
    for seq in range(2):
        wanted = [(p, bytes_of([seq + 1] * (p + 1), (0, 1))) for p in range(1, 5)]
        assert states_of(memory, seq) == wanted
    assert states_of(memory, 2) == []
    after = np.asarray(passed[0]["hash"])[:, 5:]
    np.testing.assert_array_equal(after, np.broadcast_to(after[:, :1], after.shape))


@pytest.mark.core
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


@pytest.mark.core
def test_init_batch_any_split_leaves_the_same_states():
    """Together in rows, cut into ubatches of one token each, or one sequence after another."""
    tokens = [[1, 2, 3], [8, 9, 10], [11, 12, 13]]
    wanted = kept_of(*jaxkv.split(tell(make(1), *tokens)))
    for seq, history in enumerate(tokens):
        assert wanted[seq][-1][1] == bytes_of(history, (0, 1))
    memory = run(make(1), make_batch(tokens), ubatch_size=3)
    assert kept_of(*jaxkv.split(memory)) == wanted
    alone = make(1)
    for seq in (2, 0, 1):
        alone = tell(alone, *[tokens[seq] if s == seq else [] for s in range(3)])
    assert kept_of(*jaxkv.split(alone)) == wanted


@pytest.mark.core
def test_init_batch_lengths_of_a_bucket_share_a_program():
    """Lengths, ids and fills are values: ubatches differ in nothing that is compiled for."""
    memory, found = make(3), set()
    for i, count in enumerate((5, 6, 8)):
        batch = make_batch([1] * count, sequences=i)
        (ubatch,) = jaxkv.init_batch(memory, batch, ubatch_size=8).ubatches
        leaves, structure = jax.tree.flatten((memory, ubatch))
        found.add((structure, tuple((x.shape, x.dtype) for x in leaves)))
        memory = jaxkv.apply(memory, ubatch)
    assert len(found) == 1


# --------------------------------------------------------------------------------- transformations


def decode(memory, tokens, valid):
    """One token for each sequence: plan, apply, compute."""
    ubatch, ok = jaxkv.plan_step(memory, tokens, jnp.arange(3), valid)
    memory, passed = compute(jaxkv.apply(memory, ubatch), ubatch)
    return memory, (passed, ok)


def looked_at(memory):
    """What `test_every_argument` does not ask of many memories at once."""
    ends = (jaxkv.seq_pos_min(memory, 0), jaxkv.seq_pos_max(memory, 1), jaxkv.used(memory))
    back = jaxkv.go_back(jaxkv.split(memory)[0], jaxkv.clear(memory))
    return memory, ends, back, jaxkv.check_invariants(memory)


@pytest.mark.nightly
def test_plan_step_in_vmap_of_scan_is_a_loop():
    tokens = jnp.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    valid = jnp.array([[1, 1, 1], [1, 0, 1], [0, 0, 0]], bool)
    memories = [told(kept=3, counts=counts).memory for counts in ((6, 2, 3), (5, 1, 0))]
    memories.append(jaxkv.seq_cp(memories[0], 0, 1))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *memories)
    steps = partial(jax.lax.scan, lambda m, x: decode(m, *x), xs=(tokens, valid))
    together = jax.jit(jax.vmap(lambda m: looked_at(steps(m)[0])))(stacked)
    step = jax.jit(lambda *args: decode(*args)[0])
    for i, memory in enumerate(memories):
        for row in zip(tokens, valid, strict=True):
            memory = step(memory, *row)
        assert_identical(jax.tree.map(lambda x, i=i: x[i], together), looked_at(memory))


@pytest.mark.core
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


@pytest.mark.core
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


@pytest.mark.core
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
