"""Layers in one array: a scan over them is the loop over layers apart, whatever is done between.

The oracle is a memory whose layers have arrays of their own, in a loop in Python; its own oracles
are those of the other tests.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxkv
from jaxkv import make_batch, sharding, snapshot
from jaxkv.kv.mask import sight_of
from jaxkv.ops.attention import pallas_gpu
from jaxkv.ops.attention.softmax import Options
from jaxkv.ops.quantised import Quantised, dtype_of
from jaxkv.ops.stacked import each_array, of_streams, part_of_all
from tests import hlo, memories
from tests.cases import mostly_nightly
from tests.memories import HEADS, LAYERS, ROPE, SIZE, SMALL, WEIGHTS, assert_identical, by_layer
from tests.meshes import mesh_of, placed

PART = slice(2, 4)
"""Which numbers of a key are its value, where that is asked for: those that ROPE leaves."""

HALF = replace(ROPE, frequencies=ROPE.frequencies[:1])


def make(*, stacked, **options):
    sizes = {"cells": 24, "sequences": 4, "rope": ROPE} | options
    return jaxkv.make_kv_cache(
        layers=LAYERS, kv_heads=HEADS, head_dim=SIZE, stacked=stacked, **sizes
    )


def layer_of(ubatch, options, memory, x, weights, number):
    q, k, v = ((x @ weights[one]).reshape(*ubatch.valid.shape, -1, SIZE) for one in "qkv")
    rope = memory.buffers.ropes[0]
    q, k = (jaxkv.rotate(heads, ubatch.positions, rope) for heads in (q, k))
    v = None if jax.tree.leaves(memory.buffers.v) == [] else v
    memory, out = jaxkv.attend(memory, number, ubatch, q, k, v, **options)
    out = jnp.concatenate([out] * (SIZE // out.shape[3]), axis=3)  # latent values are shorter
    return memory, jnp.tanh(x + out.reshape(x.shape) @ weights["out"])


def run(memory, ubatch, weights=WEIGHTS, options=None):
    """Run all layers, in a scan where they are stacked."""
    memory = jaxkv.apply(memory, ubatch)
    x = weights["embedding"][ubatch.tokens]
    step = partial(layer_of, ubatch, options or {})
    weights = {name: weights[name] for name in ("q", "k", "v", "out")}
    if not memory.buffers.stacked:
        for number in range(LAYERS):
            own = jax.tree.map(lambda w, number=number: w[number], weights)
            memory, x = step(memory, x, own, number)
        return memory, x
    (memory, x), _ = jax.lax.scan(
        lambda carry, own: (step(*carry, *own), None),
        (memory, x),
        (weights, jnp.arange(LAYERS)),
    )
    return memory, x


compiled = jax.jit(run, donate_argnums=())


def held(memory):
    """Keys and values of all layers as numbers; a list, quantised ones with their scales."""
    found = []
    for half in (memory.buffers.k, memory.buffers.v):
        for one in zip(*(jax.tree.leaves(x) for x in half), strict=True):
            found.append(by_layer(one, memory.buffers.depth).astype(np.float32))
    return found


def assert_alike(stacked, apart):
    assert_identical(stacked.table, apart.table)
    for one, other in zip(held(stacked), held(apart), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)


def decode(memory, texts, sequences, options=None):
    (ubatch,) = jaxkv.init_batch(memory, make_batch(texts, sequences=sequences)).check().ubatches
    return compiled(memory, ubatch, options=options)


def life(memory, *, moves=True):
    """Prompts, a fork, copies, a cut, a shift, a defrag and a step; what was seen on the way."""
    seen = []

    def say(texts, sequences, **options):
        nonlocal memory
        memory, x = decode(memory, texts, sequences, options)
        seen.append(np.asarray(x))

    def checked(next_one):
        nonlocal memory
        memory = next_one
        seen.append(memory)

    say([[1, 2, 3, 4, 5], [6, 7, 8, 9, 2]], [0, 2])
    checked(jaxkv.seq_cp(memory, 0, [1, 3]))  # within streams, and between them
    cut, ok = jaxkv.seq_rm(memory, 0, 3, -1)
    assert ok
    checked(cut)
    say([[5], [7]], [0, 1])
    if moves:
        cut, ok = jaxkv.seq_rm(memory, 2, 1, 3)
        assert ok
        checked(jaxkv.seq_add(cut, 2, 3, -1, -2))
        checked(jaxkv.apply(memory, jaxkv.init_update(memory)))
    checked(jaxkv.apply(memory, jaxkv.defrag_plan(memory)))
    checked(jaxkv.seq_select(memory, [2, 1], [1, 2]))
    say([[3], [4]], [1, 2])
    checked(memory)
    return seen


def assert_same_life(stacked, apart, **options):
    for one, other in zip(life(stacked, **options), life(apart, **options), strict=True):
        if isinstance(one, jaxkv.Memory):
            assert_alike(one, other)
        else:
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)


# ---------------------------------------------------------------------------- the same as apart


def test_a_scan_over_layers_is_a_loop_over_them():
    batch = make_batch([1, 2, 3, 4], sequences=1)
    apart, wanted = memories.run(SMALL.make(), batch)
    stacked = replace(SMALL, stacked=True).make()
    plan = jaxkv.init_batch(stacked, batch, ubatch_size=4)
    stacked, x = compiled(stacked, plan.ubatches[0])
    logits = x.reshape(-1, x.shape[2])[plan.ubatches[0].outputs] @ WEIGHTS["embedding"].T
    np.testing.assert_allclose(plan.collect([logits]), wanted, rtol=0, atol=1e-5)
    assert np.abs(held(stacked)[0][1]).max() > 0
    assert_alike(stacked, apart)


KINDS = [
    {},
    {"streams": 2, "dtype": "int8"},
    {"streams": 4, "dtype": "bfloat16", "window": jaxkv.window.sliding(4)},
    {"streams": 2, "dtype": "float8_e4m3fn", "placement": "contiguous"},
    {"streams": 2, "value_dim": PART, "rope": HALF},
    {"placement": "tiled"},
    {"placement": "tiled", "dtype": "int8"},
]


@pytest.mark.core
@pytest.mark.parametrize("options", mostly_nightly(KINDS, few=[KINDS[2], KINDS[6]]))
def test_all_verbs_do_the_same(options):
    moves = "window" not in options  # which refuses a cut into what it has
    assert_same_life(make(stacked=True, **options), make(stacked=False, **options), moves=moves)


def nearer(query, key, head):
    return (key - query) * 0.5 / (1 + head)


@pytest.mark.core
@pytest.mark.parametrize("implementation", [None, "whole", "xla", "pallas"])
def test_all_implementations_do_the_same(implementation):
    """Two of three sequences look, so that neither numbers of streams nor of cells agree."""
    plain = {} if implementation == "xla" else {"softcap": 4.0, "sinks": jnp.arange(2.0 * HEADS)}
    biased = {} if implementation == "pallas" else {"bias": jax.tree_util.Partial(nearer)}
    found = []
    for stacked in (True, False):
        memory, _ = decode(make(stacked=stacked, streams=2), [[1, 2, 3, 4]] * 3, [0, 1, 3])
        (ubatch,) = jaxkv.init_batch(memory, make_batch([[5, 6]] * 2, sequences=[1, 3])).ubatches
        until = ubatch.positions.at[:, 0].add(1)
        options = plain | biased | {"until": until, "implementation": implementation}
        found.append(jax.jit(partial(run, options=options))(memory, ubatch))
    (stacked, x), (apart, wanted) = found
    np.testing.assert_allclose(x, wanted, rtol=0, atol=2e-6)
    assert_alike(stacked, apart)


@pytest.mark.core
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_kernel_for_gpus_finds_the_layer(dtype):
    """Interpreted: of three layers of random keys the one that is asked for is weighed."""
    memory, _ = decode(make(stacked=False, streams=2), [[1, 2, 3, 4]] * 3, [0, 1, 3])
    plan = jaxkv.init_batch(memory, make_batch([[5], [6]], sequences=[1, 3]))
    sight = sight_of(jaxkv.apply(memory, plan.ubatches[0]).table, plan.ubatches[0])
    rng = np.random.default_rng(0)

    def drawn():
        numbers = jnp.asarray(rng.normal(size=(6, HEADS, 24, 16)), jnp.float32)
        if dtype == "float32":
            return numbers
        scales = jnp.asarray(rng.uniform(1, 2, size=(6, HEADS, 24, 1)), jnp.float32)
        return Quantised(codes=jnp.round(20 * numbers).astype(jnp.int8), scales=scales / 20)

    keys, values = (jax.tree.map(lambda x: part_of_all(x, 1, 3), drawn()) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(2, 1, 4, 16)), jnp.float32)
    weigh = jax.jit(partial(pallas_gpu.weigh, options=Options(), interpret=True))
    got = weigh(q, keys, values, sight)
    wanted = weigh(q, *of_streams((keys, values), None), sight)
    assert_identical(got, wanted)
    other = each_array(lambda x: part_of_all(x.all, 2, 3), (keys, values))
    assert not np.allclose(weigh(q, *other, sight).out, wanted.out)


@pytest.mark.core
def test_write_and_view_take_a_traced_layer():
    found = []
    for stacked in (True, False):
        memory, _ = decode(make(stacked=stacked, streams=2), [[1, 2, 3]] * 2, [0, 2])
        (ubatch,) = jaxkv.init_batch(memory, make_batch([[5], [6]], sequences=[0, 2])).ubatches
        k = jnp.arange(2.0 * HEADS * SIZE).reshape(2, 1, HEADS, SIZE)

        def of_layer(memory, layer, ubatch=ubatch, k=k):
            memory = jaxkv.write(jaxkv.apply(memory, ubatch), layer, ubatch, k, k + 1)
            return memory, jaxkv.view(memory, layer, ubatch)

        traced = jax.jit(of_layer) if stacked else of_layer
        found.append(traced(memory, 1))
    (stacked, seen), (apart, wanted) = found
    assert_identical(seen, wanted)
    assert_alike(stacked, apart)


# ---------------------------------------------------------------------------- transformations


@pytest.mark.core
def test_derivatives_are_the_same():
    def loss(weights, memory, ubatch):
        return jnp.sum(run(memory, ubatch, weights)[1] ** 2)

    grads = []
    for stacked in (True, False):
        memory, _ = decode(make(stacked=stacked), [[1, 2, 3]], [0])
        (ubatch,) = jaxkv.init_batch(memory, make_batch([4, 5])).ubatches
        grads.append(jax.jit(jax.grad(loss))(WEIGHTS, memory, ubatch))
    assert np.abs(grads[1]["k"]).max() > 1e-3
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), *grads)


@pytest.mark.core
def test_a_batch_of_memories_and_a_batch_of_layers():
    texts = [[1, 2, 3, 4], [5, 6, 7, 8]]
    memories = [decode(make(stacked=True, streams=2), [text], [3])[0] for text in texts]
    (ubatch,) = jaxkv.init_batch(memories[0], make_batch([[9]], sequences=[3])).ubatches
    ubatches = [jaxkv.init_batch(m, make_batch([[9]], sequences=[3])).ubatches[0] for m in memories]
    batch, of_ubatches = (jax.tree.map(lambda *x: jnp.stack(x), *xs) for xs in (memories, ubatches))
    after, x = jax.jit(jax.vmap(run))(batch, of_ubatches)
    for i, (memory, own) in enumerate(zip(memories, ubatches, strict=True)):
        alone, wanted = compiled(memory, own)
        np.testing.assert_allclose(x[i], wanted, rtol=0, atol=2e-6)
        assert_alike(jax.tree.map(lambda y, i=i: y[i], after), alone)

    memory, q = jaxkv.apply(memories[0], ubatch), jnp.ones((1, 1, 2 * HEADS, SIZE))
    look = lambda layer: jaxkv.attend(memory, layer, ubatch, q)[1]  # noqa: E731
    together = jax.vmap(look)(jnp.arange(LAYERS))
    for layer in range(LAYERS):
        np.testing.assert_allclose(together[layer], look(layer), rtol=0, atol=2e-6)


MESHES = [
    ({"data": 2, "cells": 2}, AxisType.Auto, {"streams": 4}),
    ({"data": 2, "tensor": 2}, AxisType.Explicit, {"streams": 2, "dtype": "int8"}),
    ({"tensor": 2, "cells": 2}, AxisType.Explicit, {"streams": 1}),
]


@pytest.mark.core
@pytest.mark.parametrize(("axes", "mode", "options"), mostly_nightly(MESHES, few=MESHES[:1]))
def test_a_mesh_splits_each_layer_alike(axes, mode, options):
    wanted = life(make(stacked=False, **options))
    with jax.set_mesh(mesh_of(mode, **axes)):
        got = life(placed(make(stacked=True, **options)))
    for one, other in zip(got, wanted, strict=True):
        if isinstance(one, jaxkv.Memory):
            assert_alike(jaxkv.join(one.table.with_rules(None), one.buffers), other)
        else:
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)


def test_a_device_holds_its_streams_in_all_layers():
    shapes = {
        stacked: jax.eval_shape(partial(make, stacked=stacked, streams=4))
        for stacked in (True, False)
    }
    mesh = mesh_of(data=2, tensor=2)
    layouts = [sharding.layout(one, mesh, sharding.Rules()) for one in shapes.values()]
    assert layouts[0] == layouts[1]
    one = jax.eval_shape(partial(make, stacked=True))  # a single stream is split by nothing
    specs = sharding.shardings(one, mesh, sharding.Rules()).buffers.k[0].spec
    assert not specs[0] and specs[1] == "tensor"


# ---------------------------------------------------------------------------- files


@pytest.mark.core
@pytest.mark.parametrize("options", [{}, {"dtype": "int8"}, {"value_dim": PART, "rope": HALF}])
def test_a_file_does_not_know(options):
    memory, _ = decode(make(stacked=False, streams=2, **options), [[1, 2, 3], [4, 5, 6]], [0, 3])
    file = snapshot.to_bytes(memory)
    stacked, apart = (
        snapshot.load_into(file, make(stacked=one, streams=1, **options)) for one in (True, False)
    )
    assert_alike(stacked, apart)
    assert np.abs(held(stacked)[0][1]).max() > 0
    again = snapshot.to_bytes(stacked)
    assert_identical(snapshot.load(again), snapshot.load(snapshot.to_bytes(apart)))
    full = snapshot.load_into(again, stacked, sequences=[2, 1, 0, 3])
    assert_alike(full, snapshot.load_into(again, apart, sequences=[2, 1, 0, 3]))
    assert_alike(stacked, apart)


# ---------------------------------------------------------------------------- refused, and nowhere


def test_what_cannot_be_stacked_is_refused_by_name():
    sizes = {"layers": 2, "cells": 4, "kv_heads": 1, "head_dim": 4, "stacked": True}
    for name, values in {
        "kv_heads": [1, 2],
        "head_dim": [4, 6],
        "value_dim": [2, 4],
        "rope": (ROPE, None),
    }.items():
        with pytest.raises(ValueError, match=f"wanted the same {name} in all layers for stacked"):
            jaxkv.make_kv_cache(**(sizes | {name: values}))


def test_a_layer_that_is_none_is_refused():
    memory = make(stacked=True)
    (ubatch,) = jaxkv.init_batch(memory, make_batch([1])).ubatches
    memory, q = jaxkv.apply(memory, ubatch), jnp.ones((1, 1, HEADS, SIZE))
    with pytest.raises(ValueError, match="wanted a layer from 0 to 1, got 2"):
        jaxkv.attend(memory, 2, ubatch, q, q, q)
    for bad, error in ((q, ValueError), (q[0, 0, 0, 0], TypeError)):
        with pytest.raises(error, match="wanted the number of one layer|wanted integers for a l"):
            jax.jit(jaxkv.attend)(memory, bad, ubatch, q, q, q)


@pytest.mark.core
def test_a_traced_layer_that_is_none_goes_nowhere():
    memory = make(stacked=True, streams=2)
    (ubatch,) = jaxkv.init_batch(memory, make_batch([[1], [2]], sequences=[0, 3])).ubatches
    memory, q = jaxkv.apply(memory, ubatch), jnp.ones((2, 1, HEADS, SIZE))
    attend = jax.jit(jaxkv.attend)
    for layer in (LAYERS, -1, 2**31 - 1, -(2**31)):
        after, out = attend(memory, jnp.int32(layer), ubatch, q, q, q)
        assert_identical(after, memory)
        assert np.isnan(out).all()
    assert not np.isnan(attend(memory, jnp.int32(1), ubatch, q, q, q)[1]).any()


def test_a_traced_layer_of_layers_apart_is_refused_with_what_to_do():
    apart, hybrid = make(stacked=False), jaxkv.make_hybrid_cache((make(stacked=True), (0, 1)))
    for memory in (apart, hybrid):
        (ubatch,) = jaxkv.init_batch(memory, make_batch([1])).ubatches
        q = jnp.ones((1, 1, HEADS, SIZE))
        with pytest.raises(TypeError, match=r"make_kv_cache\(stacked=True\)"):
            jax.jit(jaxkv.attend)(memory, 0, ubatch, q, q, q)
    out = jaxkv.attend(jaxkv.apply(hybrid, ubatch), 1, ubatch, q, q, q)[1]  # a number is known
    np.testing.assert_array_equal(out, 1)


# ---------------------------------------------------------------------------- bytes

CELLS, DEEP = 16384, 8


def step(memory, ubatch):
    """What a model does with a memory in a scan, and nothing besides."""
    memory = jaxkv.apply(memory, ubatch)
    x = jnp.ones((*ubatch.valid.shape, 4, 64), dtype_of(memory.buffers.k[0]))

    def layer(carry, number):
        memory, x = carry
        memory, out = jaxkv.attend(memory, number, ubatch, x, x[:, :, :2], x[:, :, 2:])
        return (memory, x + out), None

    return jax.lax.scan(layer, (memory, x), jnp.arange(DEEP))[0]


BYTES = {
    "step": step,
    "update": lambda memory, _: jaxkv.apply(memory, jaxkv.init_update(memory)),
    "defrag": lambda memory, _: jaxkv.apply(memory, jaxkv.defrag_plan(memory)),
    "seq_cp": lambda memory, _: jaxkv.seq_cp(memory, 0, [1, 7]),
}
ONE = pytest.param("step", "float32", 8)
OTHERS = [
    *(("step", dtype, tokens) for dtype in ("bfloat16", "int8") for tokens in (1, 8)),
    *((verb, dtype, 1) for verb in ("update", "defrag") for dtype in ("float32", "int8")),
    ("seq_cp", "float32", 1),
]


@pytest.mark.parametrize(
    ("name", "dtype", "tokens"),
    [ONE, *(pytest.param(*one, marks=pytest.mark.core) for one in OTHERS)],
)
def test_nothing_is_held_but_half_of_one_layers_keys(name, dtype, tokens):
    """Compiled only. All layers are donated, written in place, and read tile by tile."""
    make = partial(
        jaxkv.make_kv_cache, layers=DEEP, cells=CELLS, kv_heads=2, head_dim=64, sequences=8,
        rope=jaxkv.make_rope(64), dtype=dtype, stacked=True, streams=8 if name == "seq_cp" else 1,
    )  # fmt: skip
    memory = jax.eval_shape(make)
    (ubatch,) = jaxkv.init_full(memory, ubatch_size=tokens).ubatches
    compiled = jax.jit(BYTES[name], donate_argnums=0).lower(memory, ubatch).compile()
    keys = CELLS * 2 * 64 * jnp.dtype(dtype).itemsize
    assert hlo.temporary_bytes(compiled) < keys / 2
    assert compiled.memory_analysis().alias_size_in_bytes > 2 * DEEP * keys
    if dtype != "bfloat16":  # which a processor's compiler rewrites, in place
        assert hlo.large_moves(compiled, keys) == []
