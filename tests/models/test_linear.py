"""The product with weights equals the plain one in any order of factors."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.families.linear import FEW, linear


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (1, FEW + 1)])
def test_linear_equals_plain_product(shape, dtype):
    rng = np.random.default_rng(0)
    x, weights = (jnp.asarray(rng.normal(size=size), dtype) for size in ((*shape, 24), (40, 24)))
    out = linear(x, weights)
    wanted = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    assert out.dtype == dtype
    atol = 1e-5 if dtype == jnp.float32 else 0.05
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, atol=atol, rtol=0.01)


def test_linear_one_row_converts_no_weights():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 1, 512), (2048, 512))]
    compiled = jax.jit(linear).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2048 * 512


def test_linear_barrier_is_for_cpu_alone():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 1, 64), (96, 64))]
    for platform, barriers in [("cpu", 1), ("tpu", 0), ("cuda", 0)]:
        lowered = jax.jit(linear).trace(*shapes).lower(lowering_platforms=(platform,))
        assert lowered.as_text().count("optimization_barrier") == barriers


ALONE = """
import jax, numpy as np
from models.families.linear import linear
assert jax.device_count() == 1
shapes = (1, 128, 256), (3, 320, 256)
x, weights = (np.random.default_rng(0).normal(size=s).astype(np.float32) for s in shapes)
compiled = jax.jit(linear).lower(x, weights).compile()
out = compiled(x, weights)
np.testing.assert_allclose(out, np.einsum("btn,kmn->btkm", x, weights), rtol=1e-3, atol=1e-3)
print(compiled.memory_analysis().temp_size_in_bytes, weights.nbytes)
"""


@pytest.mark.nightly
def test_linear_single_device_transposes_no_weights():
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
    said = subprocess.check_output([sys.executable, "-c", ALONE], env=env, text=True)
    temporary, weights = map(int, said.split())
    assert temporary < weights / 4
