"""A memory without rules, whose heads the caller splits: nothing is sent, and values stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from tests.cases import in_lanes
from tests.hlo import collectives
from tests.meshes import mesh_of

HEADS, KV_HEADS, SIZE, Q = 8, 4, 16, 4
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def arguments(streams, dtype=jnp.float32):
    """A memory with some tokens, a ubatch that it has taken in, queries and keys."""
    rope = jaxkv.make_rope(SIZE)
    sizes = dict(layers=1, cells=4096 // streams, kv_heads=KV_HEADS, head_dim=SIZE, sequences=Q)
    memory = jaxkv.make_kv_cache(**sizes, streams=streams, rope=rope, dtype=dtype)
    batch = jaxkv.make_batch([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]])
    (ubatch,) = jaxkv.init_batch(memory, batch).check().ubatches
    rng, shape = np.random.default_rng(0), ubatch.valid.shape
    q, k = (jnp.asarray(rng.normal(size=(*shape, n, SIZE)), dtype) for n in (HEADS, KV_HEADS))
    return jaxkv.apply(memory, ubatch), ubatch, q, k


def placed(mesh, memory, ubatch, q, k):
    """The same on four devices: heads apart, everything else on each."""

    def put(tree, *spec):
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P(*spec))), tree)

    table, buffers = jaxkv.split(memory)
    memory = jaxkv.join(put(table), put(buffers, None, "heads"))
    return memory, put(ubatch), *put((q, k), None, None, "heads")


def attends(implementation=None):
    def attend(memory, ubatch, q, k):
        return jaxkv.attend(memory, 0, ubatch, q, k, k, implementation=implementation)

    return jax.jit(attend)


def check_on_mesh(mode, run, plain, atol):
    """A program on four devices sends nothing, and gives what it gives on one."""
    wanted, mesh = run(*plain), mesh_of(mode, heads=4)
    sharded = placed(mesh, *plain)
    with jax.set_mesh(mesh):
        compiled = run.lower(*sharded).compile()
        got = compiled(*sharded)
    assert not collectives(compiled)
    assert got[0].buffers.k[0].sharding.is_equivalent_to(sharded[0].buffers.k[0].sharding, 4)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(one, float), np.asarray(other, float), atol=atol)


CASES = [(None, Q, AUTO), (None, 1, EXPLICIT), ("whole", Q, EXPLICIT), ("xla", 1, EXPLICIT)]


@pytest.mark.parametrize(
    ("implementation", "streams", "mode"), in_lanes(CASES, fast=[], core=CASES[:1])
)
def test_attend_with_split_heads_sends_nothing(implementation, streams, mode):
    check_on_mesh(mode, attends(implementation), arguments(streams), atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(("dtype", "mode"), [(jnp.float32, EXPLICIT), (jnp.bfloat16, AUTO)])
def test_moves_with_split_heads_send_nothing(dtype, mode):
    def tidy(memory, *_):
        memory, _ = jaxkv.seq_rm(memory, 0, 0, 1)
        memory = jaxkv.seq_add(memory, 0, 1, -1, -1)
        memory = jaxkv.apply(memory, jaxkv.init_update(memory))
        return jaxkv.apply(memory, jaxkv.defrag_plan(memory)), ()

    memory, *rest = arguments(1, dtype)
    memory, _ = attends()(memory, *rest)
    check_on_mesh(mode, jax.jit(tidy), (memory, *rest), atol=2e-2)


@pytest.mark.core
def test_attend_pallas_without_rules_raises_on_mesh():
    mesh = mesh_of(heads=4)
    sharded = placed(mesh, *arguments(Q))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="'pallas' wants .*with rules"):
        attends("pallas").lower(*sharded)
