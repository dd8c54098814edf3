"""Loops on a mesh whose axes are explicit, as `jax.make_mesh` makes them, and on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv import loops
from tests.cases import mostly_nightly
from tests.generation.test_compiles_once import counting
from tests.meshes import mesh_of, placed

Q, KEPT = 4, 1
AXES = {"data": 2, "tensor": 2, "cells": 2}


def attending(**options):
    sizes = {"layers": 1, "cells": 16, "kv_heads": 2, "head_dim": 4, "sequences": Q}
    return jaxkv.make_kv_cache(**{**sizes, **options})


def recurring(streams):
    states = {"x": ((4,), jnp.float32)}
    sizes = {"layers": 1, "sequences": Q, "rollback": KEPT, "streams": streams}
    return jaxkv.make_recurrent_cache(states=states, splits={"x": (0, 4)}, **sizes)


KINDS = {
    "striped": ("a", lambda: attending(placement="striped", shards=2)),
    "groups": ("a", lambda: attending(streams=2, window=jaxkv.window.sliding(6))),
    "hybrid": (
        "ar",
        lambda: jaxkv.make_hybrid_cache((attending(streams=4), (0,)), (recurring(4), (1,))),
    ),
}


def whole(x):
    """A model's own arrays are whole on each device: explicit axes want to be told."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.sharding.reshard(x, P()) if AxisType.Explicit in mesh.axis_types else x


def model_of(layers):
    def forward(weights, memory, ubatch):
        x = weights[whole(ubatch.tokens)]
        for layer, kind in enumerate(layers):
            if kind == "a":
                heads = jnp.stack([x, -x], axis=2)
                memory, out = jaxkv.attend(memory, layer, ubatch, heads, heads, heads)
                x = x + jnp.sum(whole(out), axis=2)
                continue
            before = whole(jaxkv.read_states(memory, layer, ubatch)["x"])
            every = jnp.cumsum(jnp.where(whole(ubatch.valid)[..., None], x, 0), axis=1)
            every = before[:, None] + jnp.pad(every, [(0, 0), (1, 0), (0, 0)])
            keep = whole(jaxkv.steps_to_keep(ubatch, KEPT + 1))
            states = jnp.take_along_axis(every, keep[..., None], axis=1)
            memory = jaxkv.write_states(memory, layer, ubatch, {"x": states})
            x = x + every[:, 1:]
        return memory, x.reshape(-1, 4)[whole(ubatch.outputs)] @ weights.T

    return forward


def after_a_warm_up(layers, make, place):
    """What prompts give, and how much was compiled for them."""
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)
    forward, memory, weights = model_of(layers), place(make()), whole(weights)
    memory = loops.warm_up(forward, weights, memory, ubatch_size=4, longest=6)
    memory = loops.warm_up(forward, weights, memory, ubatch_size=4, donate=True)
    logits = []
    with counting(traces=True) as heard:
        for seq, prompt in enumerate([[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 12]]):
            batch = jaxkv.make_batch(prompt, sequences=seq)
            memory, out = jaxkv.prefill(forward, weights, memory, batch, ubatch_size=4)
            logits.append(np.asarray(out))
    return np.concatenate(logits), heard()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", mostly_nightly(KINDS, few=["hybrid"]))
def test_a_warm_up_with_explicit_axes(kind):
    """Nothing compiles for the prompts that come after it, and they give what they gave."""
    logits, _ = after_a_warm_up(*KINDS[kind], lambda memory: memory)
    with jax.set_mesh(mesh_of(AxisType.Explicit, **AXES)):
        others, compiled = after_a_warm_up(*KINDS[kind], placed)
    np.testing.assert_allclose(others, logits, atol=1e-4)
    assert compiled == 0


def after_loops(place):
    """What beams, a slide and an extension give, of a memory in groups."""
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)
    forward, weights = model_of("a"), whole(weights)
    memory = place(attending(sequences=4, streams=2, rope=jaxkv.make_rope(4)))
    prompts, sequences = [[1, 2, 3, 1, 2], [4, 5, 6, 4, 5]], [0, 2]
    batch = jaxkv.make_batch(prompts, sequences=sequences)
    memory, logits = jaxkv.prefill(forward, weights, memory, batch)
    search = {"width": 2, "steps": 2, "sequences": [0, 1]}
    searched, beams = loops.beam(forward, weights, memory, logits[:1], **search)
    slid, ok = loops.slide(memory, 2, keep=1, drop=2)
    extended, done, well = loops.extend(memory, 0, 0, group=2, width=4)
    assert ok and well
    found = [beams.tokens, beams.held, done]
    for one in (searched, slid, extended):
        found += [one.table.position, one.table.owners, *one.buffers.k, *one.buffers.v]
    return [np.asarray(x) for x in found]


@pytest.mark.nightly
def test_loops_where_some_axes_are_explicit():
    types = (AxisType.Explicit, AxisType.Auto, AxisType.Explicit)
    wanted = after_loops(lambda memory: memory)
    with jax.set_mesh(jax.make_mesh((*AXES.values(),), (*AXES,), types)):
        found = after_loops(placed)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
