"""A cache that is saved on one mesh and restored on another, by Orbax."""

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import sharding
from jaxkv.cache import merge, split
from tests.helpers.caches import assert_identical
from tests.helpers.meshes import RULES, mesh_of, place_on_mesh
from tests.helpers.steps import apply_batch, apply_plan
from tests.sharding import tiny

ocp = pytest.importorskip("orbax.checkpoint", reason="the package orbax-checkpoint is missing")


def make_saved():
    return tiny.make_tiny("arar", streams=4)


@pytest.mark.nightly
def test_orbax_restores_hybrid_cache_on_another_mesh(tmp_path):
    rng = np.random.default_rng(0)
    table, buffers = split(make_saved())
    buffers = jax.tree.map(lambda x: rng.integers(0, 99, x.shape).astype(x.dtype), buffers)
    cache = apply_batch(merge(table, buffers), [[1, 2], [3, 4], [5, 6]])
    cache = jaxkv.seq_cp(cache, 0, 3).cache
    path = tmp_path / "cache"
    with ocp.StandardCheckpointer() as checkpointer:
        with jax.set_mesh(mesh_of(data=2, tensor=2)):
            checkpointer.save(path, place_on_mesh(cache))
            checkpointer.wait_until_finished()
        mesh = mesh_of(data=4, cells=2)
        shapes = sharding.shapes(make_saved, mesh, RULES)
        restored = checkpointer.restore(path, shapes)
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, restored, shapes))
    plain = merge(restored.table.with_sharding_rules(None), restored.buffers)
    assert_identical(jax.device_get(plain), jax.device_get(cache))
    with jax.set_mesh(mesh):  # it continues
        plan = jaxkv.init_batch(restored, jaxkv.make_batch([[7], [8], [9], [10]])).check()
        assert apply_plan(restored, plan).num_used_cells() > cache.num_used_cells()
