"""Operations that a step traces: each one is compiled in a first call, those of a layer L times."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from benchmarks.compile import measure, program_of


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
    ("options", "planned", "applied"),
    [
        ({"cells": 512, "streams": 8}, 290, 90),
        ({"cells": 4096, "placement": "any"}, 380, 120),
        ({"cells": 4096}, 545, 120),  # tiles
    ],
)
def test_step_traces_few_operations(options, planned, applied):
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
    assert count(jax.make_jaxpr(jaxkv.apply)(cache, ubatch).jaxpr) <= applied
    assert count(jax.make_jaxpr(layers)(step, q, k).jaxpr) <= 2 * 156


def size_of(program):
    """Instructions of a step without layers; instructions, loops and branches of a layer."""
    two, four = (measure(*program_of(program, n, sequences=8, cells=1024)) for n in (2, 4))
    names = "instructions", "loops", "branches"
    layer = np.array([four[name] - two[name] for name in names]) / 2
    return two["instructions"] - 2 * layer[0], layer


@pytest.mark.core
def test_compiled_steps_have_few_instructions_more_than_by_hand():
    fixed, by_hand = size_of("by hand")
    for program, most_of_step, most_of_layer in (("streams", 1800, 30), ("one pool", 2700, 730)):
        step, layer = size_of(program)
        assert step - fixed <= most_of_step
        assert layer[0] - by_hand[0] <= most_of_layer
        if program == "streams":
            np.testing.assert_array_equal(layer[1:], by_hand[1:])
