"""Attention on plain arrays follows the settings of its caller."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxkv.ops.attention.dispatch import attention

pytestmark = pytest.mark.core

Q, K = (
    jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(2, 3, 4, 8), (2, 2, 16, 8)])
)
MASK = jnp.ones((2, 3, 16), bool)


def test_attention_without_jit_matches():
    with jax.disable_jit():
        found = attention(Q, K, K, MASK)
    np.testing.assert_allclose(found, attention(Q, K, K, MASK), atol=1e-6)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_attention_has_the_matmul_precision_of_its_caller(platform):
    @jax.jit
    def precise(q):
        with jax.default_matmul_precision("highest"):
            return attention(q, K, K, MASK)

    text = precise.trace(Q).lower(lowering_platforms=(platform,)).as_text()
    assert "HIGHEST" in text and "precision = [DEFAULT" not in text


def test_attention_has_the_x64_mode_of_its_caller():
    @jax.jit
    def exact(q):
        with jax.enable_x64(True):
            return attention(q.astype(jnp.float64), K, K, MASK).astype(jnp.float32)

    np.testing.assert_allclose(exact(Q), attention(Q, K, K, MASK), atol=1e-5)


def test_attention_keeps_the_types_of_meshes():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, jax.NamedSharding(mesh, P("x"))) for x in (Q, K, K, MASK)]
        assert jax.typeof(jax.jit(attention)(*arrays)).sharding.spec[0] == "x"

        def twice(q, k, v, mask):
            return jax.lax.scan(lambda x, _: (attention(x, k, v, mask), None), q, None, length=2)[0]

        for function in (twice, jax.grad(lambda *x: attention(*x).sum())):
            run = jax.shard_map(function, in_specs=(P("x"),) * 4, out_specs=P("x"))
            assert jnp.all(jnp.isfinite(jax.jit(run)(*arrays)))
