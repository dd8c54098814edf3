"""Writing and looking apart: what `attend` does is `write`, `view`, and attention over that."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxkv
from jaxkv.ops.attention import attention
from tests import histories
from tests.cases import in_lanes, mostly_nightly
from tests.memories import (
    ALL_KINDS,
    GROUPS_RUNS,
    GROUPS_STRIPES,
    GROUPS_TILES,
    HEADS,
    LAYERS,
    SIZE,
    SMALL,
    STACKED,
    STRIPES_SPLIT,
    WIDE,
    Kind,
    filled,
)
from tests.meshes import mesh_of, placed

SOME = [WIDE, GROUPS_RUNS, STRIPES_SPLIT, GROUPS_TILES, STACKED]
over_kinds = pytest.mark.parametrize(
    "kind", in_lanes(ALL_KINDS, fast=[SMALL], core=SOME), ids=lambda kind: kind.name
)
CLOSE = dict(rtol=0, atol=2e-6)


def lived_in(kind):
    """A memory with a fork, a hole, a shift and a token that was let go."""
    memory = filled(5, 3, kind=kind)
    if jaxkv.can_seq_cp(memory, 0, 2):
        memory = jaxkv.seq_cp(memory, 0, 2)
    memory, _ = jaxkv.seq_rm(memory, 0, 1, 2)
    if jaxkv.can_seq_add(memory, 0, 2, -1, 3):
        memory = jaxkv.apply(memory, jaxkv.init_update(jaxkv.seq_add(memory, 0, 2, -1, 3)))
    return jaxkv.seq_rm(memory, 1, 2)[0]


def applied(memory, sequences=(0, 1)):
    """A memory with two tokens more for some sequences, and their ubatch."""
    batch = jaxkv.make_batch([[1, 2]] * len(sequences), sequences=[*sequences])
    (ubatch,) = jaxkv.init_batch(memory, batch).check().ubatches
    return jaxkv.apply(memory, ubatch), ubatch


def arrays_for(ubatch, seed=0):
    """Queries, keys and values."""
    rng = np.random.default_rng(seed)
    heads = (2 * HEADS, HEADS, HEADS)
    return [
        jnp.asarray(rng.normal(size=(*ubatch.valid.shape, h, SIZE)), jnp.float32) for h in heads
    ]


def by_hand(memory, layer, ubatch, q, k, v, causal=True):
    """What `attend` does, of its parts."""
    memory = jaxkv.write(memory, layer, ubatch, k, v)
    k, v, mask, _ = jaxkv.view(memory, layer, ubatch, causal=causal)
    out = attention(q.reshape(*mask.shape[:2], *q.shape[2:]), k, v, mask)
    return memory, out.reshape(q.shape)


def assert_same(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


@over_kinds
@pytest.mark.parametrize("causal", in_lanes([True, False], fast=[True]))
def test_attending_is_writing_looking_and_weighing(kind, causal):
    memory, ubatch = applied(lived_in(kind))
    for layer in range(LAYERS):
        new = arrays_for(ubatch, layer)
        after, wanted = jaxkv.attend(memory, layer, ubatch, *new, causal=causal)
        memory, found = by_hand(memory, layer, ubatch, *new, causal=causal)
        np.testing.assert_allclose(found, wanted, **CLOSE)
        assert_same(memory, after)
        q = arrays_for(ubatch, 7)[0]
        looked, out = jaxkv.attend(memory, layer, ubatch, q, causal=causal)
        assert_same(looked, memory)  # nothing is written
        np.testing.assert_allclose(
            out, by_hand(memory, layer, ubatch, q, *new[1:], causal)[1], **CLOSE
        )


@over_kinds
def test_positions_and_owners_are_those_of_the_cells(kind):
    memory, ubatch = applied(lived_in(kind), sequences=[1])
    for layer in range(LAYERS):
        _, _, mask, positions = jaxkv.view(memory, layer, ubatch)
        assert mask.shape == (mask.shape[0], mask.shape[1], kind.cells)
        at = np.asarray(ubatch.positions).reshape(mask.shape[:2])
        seen = np.where(mask, np.asarray(positions)[:, None], -1)
        valid = np.asarray(ubatch.valid).reshape(mask.shape[:2])
        assert (seen.max(-1) == np.where(valid, at, -1)).all()  # itself, and nothing later
        assert ((np.asarray(positions) >= -1) & (np.asarray(positions) <= 9)).all()


@pytest.mark.parametrize(
    "kind",
    in_lanes([SMALL, GROUPS_STRIPES], fast=[SMALL], core=[GROUPS_STRIPES]),
    ids=lambda kind: kind.name,
)
def test_a_stale_ubatch_writes_nothing_and_sees_no_number(kind):
    memory, ubatch = applied(lived_in(kind), sequences=[0])
    q, k, v = arrays_for(ubatch)
    edited, _ = jaxkv.seq_rm(memory, 0, 0, 1)
    assert_same(jaxkv.write(edited, 0, ubatch, k, v), edited)
    _, out = by_hand(edited, 0, ubatch, q, k, v)
    valid = np.asarray(ubatch.valid)
    assert np.isnan(out[valid]).all()
    assert np.isnan(jaxkv.attend(edited, 0, ubatch, q)[1][valid]).all()


def test_padding_sees_nothing():
    memory = filled(3)
    valid = np.array([[1, 0, 0], [1, 1, 0]], bool)
    batch = jaxkv.make_batch(np.ones((2, 3), int), sequences=[[0] * 3, [1] * 3], valid=valid)
    (ubatch,) = jaxkv.init_batch(memory, batch).check().ubatches
    memory = jaxkv.apply(memory, ubatch)
    mask = jaxkv.view(memory, 0, ubatch).mask
    np.testing.assert_array_equal(mask.any(-1).ravel(), np.asarray(ubatch.valid).ravel())


@pytest.mark.core
def test_a_part_of_a_hybrid_memory_is_found():
    """Layer 0 is recurrent, layer 1 attends."""
    states = histories.make(layers=1)
    memory = jaxkv.make_hybrid_cache((states, [0]), (SMALL.make(), [1, 2]))
    memory, ubatch = applied(memory, [1])
    q, k, v = arrays_for(ubatch)
    memory, found = by_hand(memory, 1, ubatch, q, k, v)
    np.testing.assert_allclose(found, jaxkv.attend(memory, 1, ubatch, q)[1], **CLOSE)
    with pytest.raises(ValueError, match="layer"):
        jaxkv.view(memory, 0, ubatch)
    states, ubatch = applied(states, [1])
    for call in (partial(jaxkv.write, k=k, v=v), jaxkv.view):
        with pytest.raises(TypeError, match="wanted a memory with attention layers"):
            call(states, 0, ubatch)


@pytest.mark.core
@pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    "axes",
    mostly_nightly(
        [dict(data=2), dict(tensor=2), dict(cells=4), dict(data=2, tensor=2, cells=2)],
        few=[dict(data=2, tensor=2, cells=2)],
    ),
    ids=str,
)
@pytest.mark.parametrize("sequences", [(0, 1, 2, 3), (3, 0)], ids=["all", "some"])
def test_on_a_mesh_it_is_what_one_device_sees(axes, mode, sequences):
    kind = Kind("pools", cells=12, sequences=4, streams=2)
    alone, ubatch = applied(lived_in(kind), sequences)
    q, k, v = arrays_for(ubatch)
    wanted = jaxkv.view(jaxkv.write(alone, 1, ubatch, k, v), 1, ubatch)
    _, by_one = jaxkv.attend(alone, 1, ubatch, q, k, v)
    with jax.set_mesh(mesh_of(mode, **axes)):
        memory, ubatch = applied(placed(lived_in(kind)), sequences)
        memory = jaxkv.write(memory, 1, ubatch, k, v)
        assert_same(jaxkv.view(memory, 1, ubatch), wanted)
        looked, out = jaxkv.attend(memory, 1, ubatch, q)
    np.testing.assert_allclose(out, by_one, **CLOSE)
    assert_same(looked, memory)


@pytest.mark.core
def test_derivatives_through_a_view_are_those_of_attending():
    memory, ubatch = applied(lived_in(SMALL))
    q, k, v = arrays_for(ubatch)

    def loss(way, q, k, v):
        _, out = way(memory, 0, ubatch, q, k, v)
        return jnp.sum(jnp.where(ubatch.valid[..., None, None], out, 0) ** 2)

    wanted = jax.grad(partial(loss, jaxkv.attend), (0, 1, 2))(q, k, v)
    for found, one in zip(
        jax.grad(partial(loss, by_hand), (0, 1, 2))(q, k, v), wanted, strict=True
    ):
        np.testing.assert_allclose(found, one, rtol=0, atol=1e-5)


def test_looking_copies_no_layer():
    """Inside of a program: what is not written is passed through, and donated it stays in place."""
    memory, ubatch = applied(filled(3))
    q, k, v = arrays_for(ubatch)

    def step(table, buffers, ubatch, q, k, v):
        memory = jaxkv.write(jaxkv.join(table, buffers), 0, ubatch, k, v)
        memory, out = jaxkv.attend(memory, 0, ubatch, q)
        return memory.buffers, out

    program = jax.jit(step, donate_argnums=1).lower(*jaxkv.split(memory), ubatch, q, k, v).compile()
    assert program.memory_analysis().alias_size_in_bytes == jaxkv.nbytes(memory.buffers)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, u, q, k, v: jaxkv.attend(m, 0, u, q, k), "none of them to look alone, got keys"),
        (
            lambda m, u, q, k, v: jaxkv.attend(m, 0, u, q, v=v),
            "none of them to look alone, got values",
        ),
        (lambda m, u, q, k, v: jaxkv.write(m, 0, u, k[:, :1], v), r"wanted k \[R, T, K, D\] of"),
        (lambda m, u, q, k, v: jaxkv.write(m, 2, u, k, v), "wanted a layer from 0 to 1, got 2"),
        (lambda m, u, q, k, v: jaxkv.view(m, -1, u), "wanted a layer from 0 to 1, got -1"),
        (lambda m, u, q, k, v: jaxkv.view(m, q[0, 0, 0, 0], u), "known while tracing"),
        (lambda m, u, q, k, v: jaxkv.view(SMALL.make(), 0, m), "wanted a ubatch"),
    ],
)
def test_mistakes_are_named(call, message):
    memory, ubatch = applied(filled(3))
    with pytest.raises((TypeError, ValueError), match=message):
        call(memory, ubatch, *arrays_for(ubatch))


def test_a_donated_memory_is_named_by_programs_that_ran_before():
    memory, ubatch = applied(jax.tree.map(jnp.copy, filled(3)))
    q, k, v = arrays_for(ubatch)
    calls = [
        lambda: jaxkv.view(memory, 0, ubatch),
        lambda: jaxkv.write(memory, 0, ubatch, k, v),
        lambda: jaxkv.attend(memory, 0, ubatch, q),
    ]
    for _ in range(2):
        jax.block_until_ready([call() for call in calls])
    jax.jit(lambda memory: jaxkv.write(memory, 0, ubatch, k, v), donate_argnums=0)(memory)
    for call in calls:
        with pytest.raises(ValueError, match="whose buffers were donated"):
            call()
