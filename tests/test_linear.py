"""The product with weights is the plain one, whichever factor comes first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.families.linear import FEW, linear


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (1, FEW + 1)])
def test_the_plain_product(shape, dtype):
    rng = np.random.default_rng(0)
    x, weights = (jnp.asarray(rng.normal(size=size), dtype) for size in ((*shape, 24), (40, 24)))
    out = jax.jit(linear)(x, weights)
    wanted = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    assert out.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(out, np.float64), wanted, atol=1e-5 if dtype == jnp.float32 else 0.05, rtol=0.01
    )


def test_one_row_does_not_convert_the_weights():
    """One row of bfloat16 would have them all turned into float32, at every step."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 1, 512), (2048, 512))]
    compiled = jax.jit(linear).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2048 * 512


@pytest.mark.parametrize(("platform", "barriers"), [("cpu", 1), ("tpu", 0), ("cuda", 0)])
def test_what_is_tuned_for_processors_stays_there(platform, barriers):
    """Wherever it is traced: what a program is lowered for decides."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 1, 64), (96, 64))]
    lowered = jax.jit(linear).trace(*shapes).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count("optimization_barrier") == barriers
