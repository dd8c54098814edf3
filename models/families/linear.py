"""Products with a matrix, arranged so that reading weights takes most of the time."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.meshes import WHOLE, Split

FEW = 64
"""Largest number of rows for which the weights are the first factor on a CPU."""


def matrix(
    rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype, *, split: Split = WHOLE
) -> nnx.Param:
    """Make random weights `[..., n]` for `linear`, which map n numbers."""
    values = jax.random.normal(rngs.params(), shape, dtype) * shape[-1] ** -0.5
    return nnx.Param(values, split=split)


@jax.jit  # a program of many layers contains it once for each shape
def linear(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Map the last dimension of `x` by a matrix: `[..., n]` and `[m, n]` to `[..., m]`.

    In place of m the weights may have several dimensions, which the result then has. Sums are at
    least float32. The platform that a program is lowered for selects the implementation.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = jax.lax.platform_dependent(rows, weights, cpu=_on_a_processor, default=_plain)
    return out.reshape(*x.shape[:-1], *weights.shape[:-1]).astype(jnp.result_type(x, weights))


def _plain(rows: jax.Array, weights: jax.Array) -> jax.Array:
    exact = jnp.promote_types(jnp.result_type(rows, weights), jnp.float32)
    return jnp.einsum("tn,...n->t...", rows, weights, preferred_element_type=exact)


def _on_a_processor(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the same as `_plain`, arranged for XLA on CPUs.

    CPU cores share the rows of the first factor, so with few tokens the weights are that factor.
    The barrier prevents XLA from swapping the factors. For other dtypes than float32, a product
    with a single row converts all weights first, so a single row is duplicated. Weights of three
    dimensions would be transposed for each product. They are merged on a single device; on a mesh
    any dimension may be split.
    """
    count = rows.shape[0]
    if weights.dtype == jnp.float32 and count <= FEW:
        return jnp.moveaxis(jax.lax.optimization_barrier(weights @ rows.T), -1, 0)
    if count == 1:
        rows = jax.lax.optimization_barrier(jnp.concatenate([rows, rows]))
    if jax.device_count() > 1:
        return _plain(rows, weights)[:count]
    out = _plain(rows, weights.reshape(-1, weights.shape[-1]))[:count]
    return out.reshape(count, *weights.shape[:-1])
