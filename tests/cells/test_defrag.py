"""Closing gaps: complete, in chunks of any size, with the tokens of every sequence as they were."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv


def holed(keep, *, cells=24, sequences=2):
    """A cache filled to the brim, of which the cells in `keep` stay; each key tells its token."""
    memory = jaxkv.make_kv_cache(layers=2, cells=cells, kv_heads=2, head_dim=4, sequences=sequences)
    half = cells // 2
    batch = jaxkv.make_batch([list(range(half)), list(range(cells - half))])
    plan = jaxkv.init_batch(memory, batch, ubatch_size=cells)
    (ubatch,) = plan.ubatches
    cell = np.arange(cells, dtype=np.int32)
    kept = np.isin(cell, [*keep])
    return forget(marked(memory, ubatch), cell // half, cell % half, ~kept)


@jax.jit
def marked(memory, ubatch):
    """Run a ubatch whose keys and values tell their tokens."""
    memory = jaxkv.apply(memory, ubatch)
    for layer in (0, 1):
        mark = (ubatch.positions + 1000 * ubatch.sequences + 5000 * layer)[..., None, None]
        keys = jnp.broadcast_to(mark.astype(jnp.float32), (*ubatch.valid.shape, 2, 4))
        memory, _ = jaxkv.attend(memory, layer, ubatch, keys, keys, -keys)
    return memory


@jax.jit
def forget(memory, sequences, positions, gone):
    """Remove one position after another, where they are to go: one program for every pattern."""

    def one(table, where):
        seq, start, gone = where
        memory, _ = jaxkv.seq_rm(jaxkv.join(table, buffers), seq, start, start + gone)
        return jaxkv.split(memory)[0], None

    table, buffers = jaxkv.split(memory)
    table, _ = jax.lax.scan(one, table, (sequences, positions, gone))
    return jaxkv.join(table, buffers)


def content(memory):
    """What is held, wherever it lies: position, owners and the marks of its keys and values."""
    table, buffers = jax.tree.map(np.asarray, (memory.table, memory.buffers))
    there = np.flatnonzero(table.position[0] >= 0)
    return sorted(
        (
            int(table.position[0, c]),
            int(table.owners[0, 0, c]),
            *(
                float(x[0, h, c, d])
                for x in (*buffers.k, *buffers.v)
                for h in (0, 1)
                for d in (0, 3)
            ),
        )
        for c in there
    )


def compact(memory):
    taken = np.asarray(memory.table.position[0]) >= 0
    return taken[: taken.sum()].all()


PATTERNS = {
    "every second": range(0, 24, 2),
    "the end": range(17, 24),
    "mixed": [0, 1, 5, 6, 7, 11, 19, 20, 23],
    "one at the end": [23],
    "nothing": [],
    "full": range(24),
    "already compact": range(9),
}


@pytest.mark.core
@pytest.mark.parametrize(
    "max_moves", [2, *(pytest.param(most, marks=pytest.mark.core) for most in (None, 1))]
)
@pytest.mark.parametrize("name", PATTERNS)
def test_repeated_until_there_is_nothing_to_move_no_gap_is_left(name, max_moves):
    memory = holed(PATTERNS[name])
    before, rounds = content(memory), 0
    while (plan := jaxkv.defrag_plan(memory, max_moves=max_moves)).count.any():
        memory = jaxkv.apply(memory, plan)
        assert content(memory) == before
        assert not any(jaxkv.check_invariants(memory).values())
        rounds += 1
        assert rounds <= 24
    assert compact(memory)
    if max_moves is None:
        assert rounds <= 1
    assert jaxkv.apply(memory, plan) is memory  # nothing to do costs nothing


@pytest.mark.core
def test_runs_are_merged_and_come_from_the_end():
    memory = holed({0, 3, 4, 5, 10, 11, 12})
    plan = jaxkv.defrag_plan(memory)
    moves = [
        tuple(int(x[0, i]) for x in (plan.source, plan.destination, plan.length))
        for i in range(int(plan.count[0]))
    ]
    assert moves == [(12, 6, 1), (10, 1, 2)]


@pytest.mark.core
def test_more_cells_than_a_chunk_move():
    memory = holed(range(0, 1200, 2), cells=1200)
    before = content(memory)
    memory = jaxkv.apply(memory, jaxkv.defrag_plan(memory))
    assert compact(memory) and content(memory) == before


@pytest.mark.core
def test_a_plan_whose_cells_have_changed_changes_nothing():
    memory = holed({0, 5, 15})
    plan = jaxkv.defrag_plan(memory)
    other, _ = jaxkv.seq_rm(memory, 1, 3, 4)  # cell 15, a source
    filled = jaxkv.apply(memory, jaxkv.init_batch(memory, jaxkv.make_batch([1] * 8)))
    for table in (other, filled):
        after = jaxkv.apply(table, plan)
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(table), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.core
def test_pending_shifts_move_with_their_cells():
    memory = holed({0, 5})
    memory = jaxkv.seq_add(memory, 0, 5, -1, 2)
    memory = jaxkv.apply(memory, jaxkv.defrag_plan(memory))
    assert memory.table.position[0, :3].tolist() == [0, 7, -1]
    assert memory.table.shift[0, :3].tolist() == [0, 2, 0]


def test_max_moves_below_one_is_refused():
    with pytest.raises(ValueError, match="max_moves of at least 1, got 0"):
        jaxkv.defrag_plan(holed([]), max_moves=0)


def large():
    """The shapes of a cache whose keys of one layer are 8 MB."""
    rope = jaxkv.make_rope(64)
    make = partial(jaxkv.make_kv_cache, layers=4, cells=16384, kv_heads=2, head_dim=64, rope=rope)
    return jax.eval_shape(make)


def test_keys_are_moved_in_chunks_not_all_at_once():
    """What a defrag holds beside its arguments does not grow with what it moves."""
    memory = large()
    plan = jax.eval_shape(jaxkv.defrag_plan, memory)
    compiled = jax.jit(jaxkv.apply, donate_argnums=0).lower(memory, plan).compile()
    one_layer = 16384 * 2 * 64 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < one_layer / 2


def test_an_update_rotates_in_chunks_not_all_at_once():
    memory = large()
    plan = jax.eval_shape(jaxkv.init_update, memory)
    compiled = jax.jit(jaxkv.apply, donate_argnums=0).lower(memory, plan).compile()
    one_layer = 16384 * 2 * 64 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < one_layer / 2
