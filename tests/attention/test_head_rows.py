"""Caches with several heads or zeros in each row, against caches with a head in each row."""

from contextlib import nullcontext
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import CacheSpec, make_batch, make_cache, sharding
from jaxkv.kv.layer_kv import HeadSizes
from jaxkv.kv.make import choose_heads_per_row, default_lanes
from jaxkv.ops.storage.latent import ValueSlice
from tests.generation.tiny import load_tiny
from tests.helpers.meshes import mesh_of
from tests.helpers.mistakes import assert_raises, mistakes
from tests.helpers.parametrize import mark_cases

HEADS, SIZE, VALUE, QUERIES = 4, 8, 4, 8
SPEC = CacheSpec.attention(layers=1, kv_heads=HEADS, head_dim=SIZE, value_dim=VALUE)
SINKS = jnp.linspace(-1.0, 1.0, QUERIES)
BIAS = np.random.default_rng(5).normal(size=(2, 4, QUERIES, 16)).astype(np.float32)
OPTIONS = {
    "plain": {},
    "tiles": {"implementation": "tiles", "sinks": SINKS},
    "whole": {"implementation": "whole", "softcap": 2.0},
    "pallas": {"implementation": "pallas", "sinks": SINKS, "scale": 0.5},
    "bias": {"bias": BIAS, "causal": False},
    "traced scale": {"scale": jnp.float32(0.3)},
}
LANES = {12: (1, 12), 16: (2, 16), 40: (4, 40)}
"""Heads in a row, and size of a row of keys, for each value of the option."""
WAYS = [(name, lanes, {}) for name in OPTIONS for lanes in LANES]
WAYS += [("tiles", 16, {"data": 2, "tensor": 2}), ("bias", 16, {"tensor": 2, "cells": 2})]
CORE_WAYS = [*WAYS[::4], WAYS[-2]]


@pytest.mark.parametrize(("name", "lanes", "axes"), mark_cases(WAYS, core=CORE_WAYS))
def test_attend_and_read_kv_do_not_depend_on_lanes(name, lanes, axes):
    mesh = mesh_of(**axes) if axes else None
    kv = {}
    for option in (1, lanes):
        with jax.set_mesh(mesh) if axes else nullcontext():
            cache = make_cache(SPEC, cells=16, sequences=2, streams=2, lanes=option, mesh=mesh)
            plan = jaxkv.init_batch(cache, make_batch([[1, 2, 3], [4, 5]])).check()
            rng, shape = np.random.default_rng(0), plan.ubatch.valid.shape
            heads = ((QUERIES, SIZE), (HEADS, SIZE), (HEADS, VALUE))
            arrays = [jnp.float32(rng.normal(size=(*shape, *head))) for head in heads]
            attend = partial(jaxkv.attend, **OPTIONS[name])
            step, out = attend(jaxkv.apply(cache, plan), 0, *arrays)
            cache = step.cache
            split = cache.buffers.k[0].addressable_shards[0].data.shape
            kv[option] = [out, *jaxkv.read_kv(step, 0)]
        assert cache.spec == SPEC
        n, row_size = LANES.get(option, (1, SIZE))
        assert cache.buffers.k[0].shape == (2, HEADS // n, 16, row_size)
        assert split[1] == HEADS // n // axes.get("tensor", 1)
    for found, wanted in zip(kv[lanes], kv[1], strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.parametrize("head_dim, lanes", [(160, 512), (300, 256)])
def test_rotation_of_8_bit_keys_does_not_depend_on_lanes(head_dim, lanes):
    spec = CacheSpec.attention(1, 1, head_dim, rope=jaxkv.Rope.make(2, base=10.0))
    x = jnp.float32(np.random.default_rng(0).normal(size=(1, 4, 1, head_dim)))
    keys = {}
    for option in (1, lanes):
        cache = make_cache(spec, cells=8, dtype="int8", lanes=option)
        plan = jaxkv.init_batch(cache, make_batch([1, 2, 3, 4])).check()
        cache = jaxkv.write_kv(jaxkv.apply(cache, plan), 0, x, x).cache
        cache, ok = jaxkv.seq_rm(cache, 0, 0, 1)
        cache, ok = jaxkv.seq_add(cache, 0, 1, -1, delta=-1)
        cache = jaxkv.apply(cache, jaxkv.init_update(cache))
        plan = jaxkv.init_batch(cache, make_batch([5])).check()
        step = jaxkv.write_kv(jaxkv.apply(cache, plan), 0, x[:, :1], x[:, :1])
        keys[option] = jaxkv.read_kv(step, 0).k
    assert np.isfinite(keys[lanes]).all()
    np.testing.assert_array_equal(keys[lanes], keys[1])


@pytest.mark.nightly
def test_generate_does_not_depend_on_lanes():
    """Gemma 3: a hybrid cache, whose parts take a number each."""
    model = load_tiny("gemma3")
    texts = []
    for lanes in (1, (1, 1), (48, 1)):
        cache = model.make_cache(cells=32, sequences=2, lanes=lanes)
        found = jaxkv.generation.generate(
            model.forward, model.params, [[1, 2, 3], [4, 5]], cache=cache, max_new_tokens=5
        )
        texts.append(found.lists())
    assert texts[0] == texts[1] == texts[2]


BFLOAT16, INT8 = jnp.dtype("bfloat16"), jnp.dtype("int8")
CHOICES = [
    (2, [(8, 64, 64)], BFLOAT16, 1),
    (4, [(8, 32, 32), (4, 32, 32)], BFLOAT16, 1),
    (1, [(8, 128, 128)], BFLOAT16, 1),
    (1, [(8, 256, 256)], BFLOAT16, 1),
    (1, [(8, 80, 80)], BFLOAT16, 1),
    (1, [(3, 64, 64)], BFLOAT16, 1),
    (3, [(3, 40, 40)], BFLOAT16, 1),
    (2, [(8, 64, 32)], BFLOAT16, 1),
    (1, [(8, 64, 64), (8, 128, 128)], BFLOAT16, 1),
    (1, [(8, 64, 64)], INT8, 1),
    (1, [(8, 64, ValueSlice(0, 32))], BFLOAT16, 1),
    (2, [(8, 64, 64)], BFLOAT16, 4),
    (1, [(8, 64, 64)], BFLOAT16, 8),  # eight devices would share four rows
    (2, [(8, 64, 64)], BFLOAT16, 16),  # devices cannot split the heads anyway
]


@pytest.mark.parametrize(("wanted", "heads", "dtype", "devices"), CHOICES)
def test_heads_per_row_fill_lanes_and_can_be_split(wanted, heads, dtype, devices):
    sizes = [HeadSizes(*layer) for layer in heads]
    assert choose_heads_per_row(128, sizes, [dtype], devices) == wanted
    assert choose_heads_per_row(1, sizes, [dtype], devices) == 1


def test_default_lanes_depend_on_platform_and_devices():
    assert default_lanes(1, "tpu") == default_lanes(8, "tpu") == 128
    assert default_lanes(None, "tpu") == default_lanes(1, "gpu") == 1  # eight devices, no mesh


@pytest.mark.parametrize(
    ("size", "tensor", "rows"), [(64, 2, 2), (64, 4, 4), (80, 2, 4), (80, 4, 4)]
)
def test_default_rows_are_those_of_the_mesh(monkeypatch, size, tensor, rows):
    """Shapes of a maker without the mesh equal those of a cache on the mesh."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    make = partial(make_cache, CacheSpec.attention(layers=1, kv_heads=4, head_dim=size), cells=8)
    assert jax.eval_shape(make).buffers.k[0].shape == (1, 4, 8, size)  # devices without a mesh
    mesh = mesh_of(tensor=tensor)
    shapes = sharding.shapes(make, mesh, sharding.ShardingRules())
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, make(mesh=mesh))
    assert shapes.buffers.k[0].shape == (1, rows, 8, 128)


def test_fit_mesh_and_messages_count_heads_not_rows():
    mesh, rules = mesh_of(tensor=4), sharding.ShardingRules()
    spec = CacheSpec.attention(layers=1, kv_heads=6, head_dim=64)
    found = []
    for lanes in (1, 128):
        shapes = jax.eval_shape(partial(make_cache, spec, cells=16, lanes=lanes))
        fitted, _ = sharding.fit_mesh(shapes, mesh, rules)
        found.append((dict(fitted.shape), sharding.device_bytes(shapes, mesh, rules).whole))
    assert found[0] == found[1] == ({"tensor": 2, "cells": 2}, (found[0][1][0],))
    assert "kv_heads (6)" in found[0][1][0]


def test_device_bytes_count_padding():
    mesh, rules = mesh_of(tensor=2, cells=2), sharding.ShardingRules(cells="cells")
    found = [
        sharding.device_bytes(
            jax.eval_shape(partial(make_cache, SPEC, cells=16, sequences=2, lanes=lanes)),
            mesh,
            rules,
            heads=QUERIES,
        )
        for lanes in (1, 16)
    ]
    assert found[0].whole == found[1].whole
    # Rows have 16 numbers: two keys, or two values and zeros, which are not sent.
    assert found[1].buffers == found[0].buffers + 2 * 16 // 4 * 8 * 4
    assert found[1].sent == found[0].sent


@pytest.mark.parametrize(("call", "outcome"), mistakes("head_rows"))
def test_lanes_that_are_no_count_raise(call, outcome):
    assert_raises(call, outcome, globals() | locals())
