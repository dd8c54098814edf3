"""Meshes of virtual devices, and memories that lie on them."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jaxkv
from jaxkv import sharding
from jaxkv.sharding import Rules
from tests import memories
from tests.memories import Kind

RULES = Rules(cells="cells")


def mesh_of(mode=AxisType.Auto, **axes):
    count = math.prod(axes.values())
    types = (mode,) * len(axes)
    return jax.make_mesh((*axes.values(),), (*axes,), types, devices=jax.devices()[:count])


def placed(memory, rules=RULES):
    """The same memory on the mesh at hand."""
    table, buffers = jaxkv.split(memory)
    memory = jaxkv.join(table.with_rules(rules), buffers)
    return jax.device_put(memory, sharding.shardings(memory, jax.sharding.get_mesh(), rules))


@dataclass(frozen=True)
class OnMesh(Kind):
    """A memory under test that lies on a mesh."""

    axes: tuple[tuple[str, int], ...] = ()

    def make(self, rope=memories.ROPE):
        return placed(super().make(rope))


near = jaxkv.window.sliding(3)


KINDS = [
    OnMesh("data", cells=8, sequences=4, streams=4, axes=(("data", 4),)),
    OnMesh("tensor", cells=12, sequences=3, axes=(("tensor", 2),)),
    OnMesh("cells", cells=12, sequences=3, placement="striped", shards=4, axes=(("cells", 4),)),
    OnMesh(
        "all",
        cells=8,
        sequences=4,
        streams=4,
        placement="striped",
        shards=2,
        axes=(("data", 2), ("tensor", 2), ("cells", 2)),
    ),
    OnMesh("window", cells=12, sequences=3, windows=(near,), axes=(("tensor", 2), ("cells", 2))),
    OnMesh(
        "full-and-window",
        cells=14,
        sequences=4,
        streams=4,
        windows=(None, near),
        axes=(("data", 2), ("cells", 2)),
    ),
    OnMesh("groups", cells=10, sequences=4, streams=2, axes=(("data", 2), ("tensor", 2))),
    OnMesh(
        "groups-contiguous",
        cells=10,
        sequences=4,
        streams=2,
        placement="contiguous",
        axes=(("data", 2), ("cells", 2)),
    ),
    OnMesh(
        "groups-striped-window",
        cells=16,
        sequences=8,
        streams=4,
        placement="striped",
        shards=2,
        windows=(near,),
        axes=(("data", 2), ("cells", 2)),
    ),
    OnMesh("tiled", cells=16, sequences=4, placement="tiled", axes=(("tensor", 2), ("cells", 2))),
    OnMesh(
        "groups-tiled",
        cells=16,
        sequences=8,
        streams=4,
        placement="tiled",
        windows=(None, near),
        axes=(("data", 2), ("cells", 2)),
    ),
]


@jax.jit
def weigh(memory, ubatch, q, k):
    memory = jaxkv.apply(memory, ubatch)
    outs = []
    for layer in range(2):
        memory, out = jaxkv.attend(memory, layer, ubatch, q, k, k * (layer + 2))
        outs.append(out)
    return memory, jnp.stack(outs)


def edited(memory):
    """Prompts, verbs of every kind, and a step of all sequences; all that was seen on the way."""
    rng, seen = np.random.default_rng(0), []

    def compute(memory, ubatch):
        shape = (*ubatch.valid.shape, 4, 4)
        q = np.asarray(rng.normal(size=shape), np.float32)
        memory, out = weigh(memory, ubatch, q, q[:, :, ::2])
        seen.append(out)
        return memory

    prompts = jaxkv.make_batch([[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]])
    for ubatch in jaxkv.init_batch(memory, prompts, ubatch_size=8).check().ubatches:
        memory = compute(memory, ubatch)
    past, _ = jaxkv.split(memory)
    later, _ = jaxkv.seq_rm(memory, 1)
    memory, ok = jaxkv.go_back(past, later)
    assert ok
    memory = jaxkv.seq_cp(jaxkv.seq_cp(memory, 0, 1, 0, 2), 2, 0)
    memory, _ = jaxkv.seq_rm(memory, [0, 2], [1, 0], [2, 1])
    memory = jaxkv.seq_add(memory, 0, 2, -1, -1)
    memory = jaxkv.apply(memory, jaxkv.init_update(memory))
    memory = jaxkv.apply(memory, jaxkv.defrag_plan(memory))
    memory = jaxkv.seq_select(memory, [3, 2], [2, 3])
    ubatch, ok = jaxkv.plan_step(memory, jnp.arange(4), jnp.array([3, 1, 0, 2]), jnp.ones(4, bool))
    assert ok
    return compute(memory, ubatch), seen
