"""On a mesh over key/value heads each device reads and writes its own, and sends nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from tests.hlo import collectives

LAYERS, CELLS, HEADS, KV_HEADS, SIZE, Q = 2, 4096, 8, 4, 16, 4
BUFFERS, PROJECTED = P(None, "heads"), P(None, None, "heads")

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
OTHERS = ["tiles", "whole", "xla"]
over_modes = pytest.mark.parametrize(
    "mode",
    [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.nightly)],
    ids=str,
)


def arguments(streams, dtype=jnp.float32):
    """A memory with some tokens, a ubatch that it has taken in, and projected arrays."""
    memory = jaxkv.make_kv_cache(
        layers=LAYERS,
        cells=CELLS // streams,
        kv_heads=KV_HEADS,
        head_dim=SIZE,
        sequences=Q,
        streams=streams,
        rope=jaxkv.make_rope(SIZE),
        dtype=dtype,
    )
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    memory = jaxkv.apply(memory, jaxkv.init_batch(memory, jaxkv.make_batch(prompts)).check())
    tokens = jnp.zeros(Q, jnp.int32), jnp.arange(Q), jnp.ones(Q, bool)
    ubatch, ok = jaxkv.plan_step(memory, *tokens)
    assert ok
    rng = np.random.default_rng(0)
    shape = ubatch.valid.shape
    q, k = (jnp.asarray(rng.normal(size=(*shape, n, SIZE)), dtype) for n in (HEADS, KV_HEADS))
    return jaxkv.apply(memory, ubatch), ubatch, q, k


def placed(mode, memory, ubatch, q, k):
    """The same on four devices: heads apart, everything else on each."""
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(mode,))

    def put(tree, spec):
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), tree)

    table, buffers = jaxkv.split(memory)
    memory = jaxkv.join(put(table, P()), put(buffers, BUFFERS))
    return mesh, (memory, put(ubatch, P()), put(q, PROJECTED), put(k, PROJECTED))


def step(implementation):
    def run(memory, ubatch, q, k):
        for layer in range(LAYERS):
            memory, out = jaxkv.attend(
                memory, layer, ubatch, q, k, k, implementation=implementation
            )
            q, k = q + out, k + out[:, :, :: HEADS // KV_HEADS]
        return memory, q

    return jax.jit(run)


@pytest.mark.nightly
@over_modes
def test_the_kernel_is_refused_where_the_compiler_would_have_to_split_it(mode):
    mesh, sharded = placed(mode, *arguments(Q))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="'pallas' wants .*with rules"):
        step("pallas").lower(*sharded)


@over_modes
@pytest.mark.parametrize("streams", [pytest.param(1, marks=pytest.mark.nightly), Q])
@pytest.mark.parametrize(
    "implementation", [None, *(pytest.param(x, marks=pytest.mark.nightly) for x in OTHERS)]
)
def test_a_step_sends_nothing_and_gives_what_one_device_gives(implementation, streams, mode):
    plain = arguments(streams)
    wanted = step(implementation)(*plain)
    mesh, sharded = placed(mode, *plain)
    with jax.set_mesh(mesh):
        compiled = step(implementation).lower(*sharded).compile()
        got = compiled(*sharded)
    assert not collectives(compiled)
    assert got[0].buffers.k[0].sharding.is_equivalent_to(sharded[0].buffers.k[0].sharding, 4)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.nightly
@over_modes
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_moving_keys_and_values_sends_nothing(dtype, mode):
    def tidy(memory):
        memory, _ = jaxkv.seq_rm(memory, 0, 0, 1)
        memory = jaxkv.seq_add(memory, 0, 1, -1, -1)
        memory = jaxkv.apply(memory, jaxkv.init_update(memory))
        return jaxkv.apply(memory, jaxkv.defrag_plan(memory))

    plain = arguments(1, dtype)
    memory, _ = step(None)(*plain)
    wanted = jax.jit(tidy)(memory)
    mesh, (sharded, *_) = placed(mode, memory, *plain[1:])
    with jax.set_mesh(mesh):
        compiled = jax.jit(tidy).lower(sharded).compile()
        got = compiled(sharded)
    assert not collectives(compiled)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(one, float), np.asarray(other, float), atol=2e-2)


def test_collectives_are_found():
    """So that the tests above can fail: a sum over heads is one."""
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((1, 4)), NamedSharding(mesh, P(None, "heads")))
    assert collectives(jax.jit(jnp.sum).lower(x).compile())
