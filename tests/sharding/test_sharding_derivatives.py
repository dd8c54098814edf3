"""Derivatives through a prompt on a mesh are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.meshes import RULES, mesh_of, placed

HEADS, KV_HEADS, SIZE, CELLS, TOKENS = 8, 4, 8, 32, 6

LAYOUTS = {
    "data": ({"data": 4}, 4),
    "tensor": ({"tensor": 4}, 1),
    "cells": ({"cells": 4}, 1),
    "all": ({"data": 2, "tensor": 2, "cells": 2}, 4),
}


def prompt(streams):
    """A memory with a prompt of four sequences applied, and what a layer makes of its tokens."""
    cells = CELLS // streams  # so few that all devices hold some that are used
    sizes = {"layers": 2, "cells": cells, "kv_heads": KV_HEADS, "head_dim": SIZE}
    memory = jaxkv.make_kv_cache(**sizes, sequences=4, streams=streams)
    texts = [list(range(i, TOKENS + i)) for i in range(4)]
    (ubatch,) = jaxkv.init_batch(memory, jaxkv.make_batch(texts)).check().ubatches
    keys = jax.random.split(jax.random.key(0), 4)
    shape = ubatch.valid.shape
    q = jax.random.normal(keys[0], (*shape, HEADS, SIZE))
    k, v = (jax.random.normal(key, (*shape, KV_HEADS, SIZE)) for key in keys[1:3])
    sinks = jax.random.normal(keys[3], (HEADS,))
    return memory, ubatch, (q, k, v, sinks)


def loss(arrays, memory, ubatch):
    q, k, v, sinks = arrays
    memory = jaxkv.apply(memory, ubatch)
    for layer in range(2):
        memory, out = jaxkv.attend(memory, layer, ubatch, q, k, v, sinks=sinks)
        q, v = q + out, v + out[:, :, :: HEADS // KV_HEADS]
    return jnp.sum(jnp.where(ubatch.valid[..., None, None], jnp.sin(q), 0.0))


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYOUTS)
def test_derivatives_of_a_prompt_are_those_of_one_device(name):
    axes, streams = LAYOUTS[name]
    memory, ubatch, arrays = prompt(streams)
    wanted = jax.jit(jax.value_and_grad(loss))(arrays, memory, ubatch)
    with jax.set_mesh(mesh_of(**axes)):
        found = jax.jit(jax.value_and_grad(loss))(arrays, placed(memory, RULES), ubatch)
    assert max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(wanted[1])) > 0.1
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=1e-5, rtol=1e-5)
