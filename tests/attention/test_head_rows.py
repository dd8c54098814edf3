"""Caches with several heads in each row, against caches with a head in each row."""

from contextlib import nullcontext
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import CacheSpec, make_batch, make_cache, sharding
from jaxkv.kv.make import default_heads_per_row
from tests.generation.tiny import load
from tests.helpers.meshes import mesh_of
from tests.helpers.mistakes import assert_raises, mistakes
from tests.helpers.parametrize import in_lanes

core = pytest.mark.core
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
WAYS = [(name, n, {}) for name in OPTIONS for n in (2, 4)]
WAYS += [("tiles", 2, {"data": 2, "tensor": 2}), ("bias", 2, {"tensor": 2, "cells": 2})]


@pytest.mark.parametrize(
    ("name", "n", "axes"), in_lanes(WAYS, core=[WAYS[0], WAYS[3], WAYS[6], WAYS[9], WAYS[-2]])
)
def test_attend_and_read_kv_do_not_depend_on_heads_per_row(name, n, axes):
    mesh = mesh_of(**axes) if axes else None
    kv = {}
    for rows in (1, n):
        with jax.set_mesh(mesh) if axes else nullcontext():
            cache = make_cache(
                SPEC, cells=16, sequences=2, streams=2, heads_per_row=rows, mesh=mesh
            )
            plan = jaxkv.init_batch(cache, make_batch([[1, 2, 3], [4, 5]])).check()
            rng, shape = np.random.default_rng(0), plan.ubatch.valid.shape
            heads = ((QUERIES, SIZE), (HEADS, SIZE), (HEADS, VALUE))
            arrays = [jnp.float32(rng.normal(size=(*shape, *head))) for head in heads]
            attend = partial(jaxkv.attend, **OPTIONS[name])
            cache, out = attend(jaxkv.apply(cache, plan), 0, plan.ubatch, *arrays)
            split = cache.buffers.k[0].addressable_shards[0].data.shape
            kv[rows] = [out, *jaxkv.read_kv(cache, 0, plan.ubatch)]
        assert cache.spec == SPEC
        assert cache.buffers.k[0].shape == (2, HEADS // rows, 16, SIZE * rows)
        assert split[1] == HEADS // rows // axes.get("tensor", 1)
    for found, wanted in zip(kv[n], kv[1], strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6)


@core
def test_generate_does_not_depend_on_heads_per_row():
    """Gemma 3: a hybrid cache, whose parts take a number each."""
    model = load("gemma3")
    texts = []
    for rows in (1, (1, 1)):
        cache = model.make_cache(cells=32, sequences=2, heads_per_row=rows)
        found = jaxkv.generation.generate(
            model.forward, model.params, [[1, 2, 3], [4, 5]], cache=cache, max_new_tokens=5
        )
        texts.append(found.lists())
    assert texts[0] == texts[1]


BFLOAT16, INT8 = jnp.dtype("bfloat16"), jnp.dtype("int8")
DEFAULTS = [
    (2, [8], [64], [64], BFLOAT16, 1),
    (4, [8, 4], [32, 32], [32, 32], BFLOAT16, 1),
    (1, [8], [128], [128], BFLOAT16, 1),
    (1, [8], [256], [256], BFLOAT16, 1),
    (1, [8], [80], [80], BFLOAT16, 1),  # does not divide a row of 128
    (1, [3], [64], [64], BFLOAT16, 1),
    (1, [8], [64], [32], BFLOAT16, 1),
    (1, [8, 8], [64, 128], [64, 128], BFLOAT16, 1),
    (1, [8], [64], [64], INT8, 1),
    (2, [8], [64], [64], BFLOAT16, 4),
    (1, [8], [64], [64], BFLOAT16, 8),  # eight devices would share four rows
    (2, [8], [64], [64], BFLOAT16, 16),  # devices cannot split the heads anyway
]


@pytest.mark.parametrize(("wanted", "heads", "keys", "values", "dtype", "devices"), DEFAULTS)
def test_default_heads_per_row_fill_lanes_and_can_be_split(
    wanted, heads, keys, values, dtype, devices
):
    sizes = heads, keys, values, dtype
    assert default_heads_per_row(*sizes, devices=devices, platform="tpu") == wanted
    assert default_heads_per_row(*sizes, devices=devices, platform="gpu") == 1


def test_default_heads_per_row_is_that_of_the_mesh(monkeypatch):
    """Shapes of a maker without the mesh equal those of a cache on the mesh."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    make = partial(make_cache, CacheSpec.attention(layers=1, kv_heads=4, head_dim=64), cells=8)
    assert jax.eval_shape(make).buffers.heads_per_row == 1  # several devices, and no mesh
    for tensor, rows in ((2, 2), (4, 1)):
        mesh = mesh_of(tensor=tensor)
        shapes = sharding.shapes(make, mesh, sharding.ShardingRules())
        chex.assert_trees_all_equal_shapes_and_dtypes(shapes, make(mesh=mesh))
        assert shapes.buffers.heads_per_row == rows


def test_fit_mesh_and_messages_count_heads_not_rows():
    mesh, rules = mesh_of(tensor=4), sharding.ShardingRules()
    spec = CacheSpec.attention(layers=1, kv_heads=6, head_dim=64)
    found = []
    for rows in (1, 2):
        shapes = jax.eval_shape(partial(make_cache, spec, cells=16, heads_per_row=rows))
        fitted, _ = sharding.fit_mesh(shapes, mesh, rules)
        found.append((dict(fitted.shape), sharding.device_bytes(shapes, mesh, rules).whole))
    assert found[0] == found[1] == ({"tensor": 2, "cells": 2}, (found[0][1][0],))
    assert "kv_heads (6)" in found[0][1][0]


def test_device_bytes_of_rows_equal_those_of_heads():
    mesh, rules = mesh_of(tensor=2, cells=2), sharding.ShardingRules(cells="cells")
    found = [
        sharding.device_bytes(
            jax.eval_shape(partial(make_cache, SPEC, cells=16, sequences=2, heads_per_row=rows)),
            mesh,
            rules,
            heads=QUERIES,
        )
        for rows in (1, 2)
    ]
    assert found[0].buffers == found[1].buffers and found[0].whole == found[1].whole
    # Each partial softmax has values of both heads of a row.
    assert found[1].sent - found[0].sent == 2 * 2 * QUERIES // 2 * VALUE * 4


@pytest.mark.parametrize(("call", "outcome"), mistakes("head_rows"))
def test_heads_per_row_that_do_not_fit_raise(call, outcome):
    latent = CacheSpec.attention(1, 2, 8, slice(4, 8))
    assert_raises(call, outcome, globals() | locals())
