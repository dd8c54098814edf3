"""Operations that a step traces: each one is compiled in a first call, those of a layer L times."""

import jax
import jax.numpy as jnp
import pytest

import jaxkv


def count(jaxpr):
    """Return the number of operations, with those of inner functions at each call."""
    inner = [
        [getattr(x, "jaxpr", x) for value in eqn.params.values() for x in as_tuple(value)]
        for eqn in jaxpr.eqns
    ]
    inner = [[x for x in found if hasattr(x, "eqns")] for found in inner]
    return sum(sum(map(count, found)) if found else 1 for found in inner)


def as_tuple(value):
    return value if isinstance(value, (tuple, list)) else (value,)


@pytest.mark.parametrize(
    ("options", "planned"),
    [
        ({"cells": 512, "streams": 8}, 380),
        ({"cells": 4096, "placement": "any"}, 540),
        ({"cells": 4096}, 730),  # tiles
    ],
)
def test_step_traces_few_operations(options, planned):
    spec = jaxkv.CacheSpec.attention(layers=2, kv_heads=2, head_dim=64)
    cache = jax.eval_shape(lambda: jaxkv.make_cache(spec, sequences=8, **options))
    tokens = jax.ShapeDtypeStruct((8,), jnp.int32)
    (ubatch,) = jax.eval_shape(jaxkv.plan_step, cache, tokens).ubatches
    step = jax.eval_shape(jaxkv.apply, cache, ubatch)
    q, k = (jax.ShapeDtypeStruct((*step.valid.shape, heads, 64), jnp.float32) for heads in (4, 2))

    def layers(step, q, k):
        for layer in range(2):
            step, _ = jaxkv.attend(step, layer, q, k, k, implementation="whole")
        return step.buffers

    assert count(jax.make_jaxpr(jaxkv.plan_step)(cache, tokens).jaxpr) <= planned
    assert count(jax.make_jaxpr(jaxkv.apply)(cache, ubatch).jaxpr) <= 170
    assert count(jax.make_jaxpr(layers)(step, q, k).jaxpr) <= 2 * 170
