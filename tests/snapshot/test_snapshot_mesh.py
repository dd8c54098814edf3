"""Snapshots of caches on a mesh: files and loaded caches have the contents of one device."""

import jax
import pytest
from jax.sharding import AxisType

import jaxkv
from jaxkv import make_batch, sharding, snapshot
from tests.helpers.caches import assert_identical
from tests.helpers.meshes import mesh_of
from tests.helpers.parametrize import mark_cases
from tests.sharding import tiny

RULES = sharding.ShardingRules(cells="cells")
CACHES = [
    ("aa", {}, {"tensor": 2}),
    ("a", {"streams": 2, "dtype": "int8"}, {"data": 2, "tensor": 2}),
    ("aa", {"stacked": True, "placement": "striped:4"}, {"cells": 4}),
    ("ar", {"streams": 4}, {"data": 4, "tensor": 2}),
]
CASES = [(*one, mode) for one in CACHES for mode in (AxisType.Auto, AxisType.Explicit)]
CORE = [CASES[i] for i in (1, 2, 5, 6)]  # each cache in one mode, and the first in both


def make_filled(layers, options):
    cache = tiny.make_tiny(layers, **options)
    batch = make_batch([[1, 2, 3, 4], [5, 6], [7]], sequences=[0, 2, 3])
    cache = jaxkv.prefill(tiny.model_of(layers), tiny.params(), cache, batch).cache
    return jaxkv.seq_cp(cache, 0, 1).check()


@pytest.mark.parametrize(
    ("layers", "options", "axes", "mode"), mark_cases(CASES, fast=CASES[:1], core=CORE), ids=str
)
def test_snapshots_on_a_mesh_are_those_of_one_device(layers, options, axes, mode):
    cache = make_filled(layers, options)
    other = jaxkv.seq_rm(make_filled(layers, options), 2).check()
    data = snapshot.save(cache, sequences=[1, 2])
    expected = snapshot.load(data, into=other, sequences=[2, 0])
    mesh = mesh_of(mode, **axes)
    with jax.set_mesh(mesh):
        on_mesh, other = (sharding.move(x, mesh, sharding_rules=RULES) for x in (cache, other))
        saved = snapshot.save(on_mesh, sequences=[1, 2])
        assert_identical(snapshot.load(saved), snapshot.load(data))
        before = jax.device_get(other)
        loaded = snapshot.load(data, into=other, sequences=[2, 0])
        assert_identical(jax.device_get(other), before)
        shares = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves((other, loaded))]
        assert shares[: len(shares) // 2] == shares[len(shares) // 2 :]
        donated = snapshot.load(data, into=other, sequences=[2, 0], donate=True)
    for got in (loaded, donated):
        assert_identical(sharding.move(got, jax.devices()[0]), expected)
