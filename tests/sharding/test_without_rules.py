"""A cache without rules, with heads that the caller splits: no transfers, equal values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv.cache import merge
from tests.helpers.caches import attention_cache
from tests.helpers.hlo import collectives
from tests.helpers.meshes import mesh_of
from tests.helpers.parametrize import mark_cases

HEADS, KV_HEADS, SIZE, Q = 8, 4, 16, 4
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def arguments(streams, dtype="float32"):
    """A cache with some tokens, an applied ubatch, queries and keys."""
    sizes = dict(layers=1, cells=4096 // streams, kv_heads=KV_HEADS, head_dim=SIZE, sequences=Q)
    rope = jaxkv.Rope.make(SIZE)
    cache = attention_cache(**sizes, streams=streams, rope=rope, dtype=dtype)
    batch = jaxkv.make_batch(np.arange(12).reshape(Q, 3))
    (ubatch,) = jaxkv.init_batch(cache, batch).check().ubatches
    rng, shape = np.random.default_rng(0), ubatch.valid.shape
    q, k = (jnp.asarray(rng.normal(size=(*shape, n, SIZE)), dtype) for n in (HEADS, KV_HEADS))
    return cache, ubatch, q, k


def place_split(mesh, cache, ubatch, q, k):
    """The same on four devices: heads are split, everything else is replicated."""

    def put(tree, *spec):
        return jax.device_put(tree, NamedSharding(mesh, P(*spec)))

    cache = merge(put(cache.table), put(cache.buffers, None, "heads"))
    return cache, put(ubatch), *put((q, k), None, None, "heads")


def attends(implementation=None):
    def attend(cache, ubatch, q, k):
        step = jaxkv.apply(cache, ubatch)
        return jaxkv.attend(step, 0, q, k, k, implementation=implementation)

    return jax.jit(attend)


@jax.jit
def edit_all(cache, ubatch, q, k):
    step, _ = jaxkv.attend(jaxkv.apply(cache, ubatch), 0, q, k, k)
    cache, _ = jaxkv.seq_rm(step.cache, 0, 0, 1)
    cache = jaxkv.seq_add(cache, 0, 1, -1, delta=-1).cache
    cache = jaxkv.apply(cache, jaxkv.init_update(cache))
    return jaxkv.apply(cache, jaxkv.defrag_plan(cache)), ()


CASES = [
    (attends(), Q, AUTO, "float32"),
    (attends("whole"), 1, EXPLICIT, "float32"),
    (attends("xla"), 1, EXPLICIT, "float32"),
    (edit_all, 1, EXPLICIT, "float32"),
    (edit_all, 1, AUTO, "bfloat16"),
]


@pytest.mark.parametrize("run, streams, mode, dtype", mark_cases(CASES, core=CASES[:1]))
def test_program_with_split_heads_sends_nothing(run, streams, mode, dtype):
    plain = arguments(streams, dtype)
    wanted, mesh = run(*plain), mesh_of(mode, heads=4)
    sharded = place_split(mesh, *plain)
    with jax.set_mesh(mesh):
        compiled = run.lower(*sharded).compile()
        got = compiled(*sharded)
    assert not collectives(compiled)
    assert got[0].buffers.k[0].sharding.is_equivalent_to(sharded[0].buffers.k[0].sharding, 4)
    atol = 2e-2 if run is edit_all else 1e-5
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(one, float), np.asarray(other, float), atol=atol)


@pytest.mark.core
def test_attend_pallas_without_rules_raises_on_mesh():
    mesh = mesh_of(heads=4)
    sharded = place_split(mesh, *arguments(Q))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="and rules on a mesh for 'pallas'"):
        attends("pallas").lower(*sharded)
