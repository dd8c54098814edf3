"""Edits that change keys are linear in them, and their derivatives are the transposed maps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.cache import Cache
from tests.helpers.meshes import mesh_of
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import apply_batch

SPEC = jaxkv.CacheSpec.attention(layers=2, kv_heads=2, head_dim=4, rope=jaxkv.Rope.make(4))
LENGTHS = [6, 3, 5]
CACHES = {
    "pool": {},
    "streams": {"streams": 4},
    "shared streams": {"streams": 2, "cells": 9},  # the copies of `seq_select` fill a stream
    "stacked": {"streams": 4, "stacked": True},
    "bfloat16": {"dtype": jnp.bfloat16},
    "mesh": {"streams": 4, "mesh": mesh_of(data=2, tensor=2)},
}


def shift(cache):
    cache, _ = jaxkv.seq_rm(cache, 0, 1, 3)
    cache, _ = jaxkv.seq_add(cache, 0, 3, None, delta=-2)
    return jaxkv.apply(cache, jaxkv.init_update(cache))


def defrag(cache):
    cache, _ = jaxkv.seq_rm(cache, 0, 1, 3)
    return jaxkv.apply(cache, jaxkv.defrag_plan(cache))


EDITS = {
    "seq_cp": lambda cache: jaxkv.seq_cp(cache, 0, [1, 2]).cache,
    "seq_select": lambda cache: jaxkv.seq_select(cache, [0, 1], [2, 3]).cache,
    "shift": shift,
    "defrag": defrag,
}
ALL = [(edit, kind) for edit in EDITS for kind in CACHES]
CORE = [("seq_cp", "shared streams"), ("seq_select", "streams")]
CORE += [("shift", "bfloat16"), ("defrag", "pool")]


def with_tokens(**options):
    cache = jaxkv.make_cache(SPEC, sequences=4, **{"cells": 16} | options)
    for sequence, length in enumerate(LENGTHS):
        cache = apply_batch(cache, np.arange(length), sequences=sequence)
    return cache


def dot(xs, ys):
    pairs = zip(jax.tree.leaves(xs), jax.tree.leaves(ys), strict=True)
    return sum(jnp.vdot(*(np.float32(1) * leaf for leaf in pair)) for pair in pairs)


@pytest.mark.parametrize("edit, kind", mark_cases(ALL, core=CORE))
def test_derivative_of_edit_is_transposed(edit, kind):
    with jax.set_mesh(CACHES[kind].get("mesh", mesh_of())):
        cache = with_tokens(**CACHES[kind])
        rng = np.random.default_rng(0)

        def draw(tree):
            return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree)

        def edited(kv):
            k, v = kv
            buffers = jax.tree.unflatten(jax.tree.structure(cache.buffers), jax.tree.leaves(kv))
            after = EDITS[edit](Cache(table=cache.table, buffers=buffers)).buffers
            return after.k, after.v

        kv = draw((cache.buffers.k, cache.buffers.v))
        after, transposed = jax.vjp(edited, kv)
        weights = draw(after)
        (slopes,) = transposed(weights)
        tolerance = {"rtol": 2e-2} if kind == "bfloat16" else {"rtol": 1e-4}
        assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(slopes))
        np.testing.assert_allclose(dot(slopes, kv), dot(weights, after), **tolerance)


@pytest.mark.core
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "int4"]
)
def test_shift_of_zero_keys_is_zero(dtype):
    cache = with_tokens(dtype=dtype)
    cache, _ = jaxkv.seq_add(cache, 0, 0, None, delta=3)
    cache = jaxkv.apply(cache, jaxkv.init_update(cache))
    assert not any(np.asarray(leaf, float).any() for leaf in jax.tree.leaves(cache.buffers.k))
