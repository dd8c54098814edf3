"""Meshes of virtual devices, and memories that lie on them."""

import math
from dataclasses import dataclass, replace

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


def _kind(name, axes, **options):
    return OnMesh(name, sequences=4, axes=tuple(axes.items()), **options)


DATA_CELLS, TENSOR_CELLS = {"data": 2, "cells": 2}, {"tensor": 2, "cells": 2}
STRIPED = {"placement": "striped", "shards": 2}
KINDS = [
    _kind("all", {"data": 2, **TENSOR_CELLS}, cells=8, streams=4, **STRIPED),
    _kind("data", {"data": 4}, cells=8, streams=4),
    _kind("window", TENSOR_CELLS, cells=12, windows=(near,)),
    _kind("full-and-window", DATA_CELLS, cells=14, streams=4, windows=(None, near)),
    _kind("groups", {"data": 2, "tensor": 2}, cells=10, streams=2),
    _kind("groups-contiguous", DATA_CELLS, cells=10, streams=2, placement="contiguous"),
    replace(
        _kind("groups-striped-window", DATA_CELLS, cells=16, streams=4, windows=(near,), **STRIPED),
        sequences=8,
    ),
    _kind("tiled", TENSOR_CELLS, cells=16, placement="tiled"),
    _kind("groups-tiled", DATA_CELLS, cells=16, streams=2, windows=(None, near), placement="tiled"),
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
