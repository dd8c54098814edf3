"""Matrix products in which reading the weights takes most of the time."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.meshes import WHOLE, Split

FEW = 64
"""Largest number of rows in `x` for which a CPU uses the weights as the first factor."""


def matrix(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    *,
    inputs: int = -1,
    split: Split = WHOLE,
) -> nnx.Param:
    """Make random weights; the dimension `inputs` has the size of the input vectors.

    The input vectors are the last dimension of weights for the function `linear`.
    """
    values = jax.random.normal(rngs.params(), shape, dtype) * shape[inputs] ** -0.5
    return nnx.Param(values, split=split)


@jax.jit  # a program of many layers contains the function's code once for each shape
def linear(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Multiply the last dimension of `x` by a matrix: `[..., n]` and `[m, n]` give `[..., m]`.

    The weights and the result may have several dimensions in place of m. Sums are computed in
    float32 or a wider dtype. The implementation depends on the platform for which a program is
    lowered.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = jax.lax.platform_dependent(rows, weights, cpu=_on_cpu, default=_plain)
    return out.reshape(*x.shape[:-1], *weights.shape[:-1]).astype(jnp.result_type(x, weights))


def _plain(rows: jax.Array, weights: jax.Array) -> jax.Array:
    exact = jnp.promote_types(jnp.result_type(rows, weights), jnp.float32)
    return jnp.einsum("tn,...n->t...", rows, weights, preferred_element_type=exact)


def _on_cpu(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the result of `_plain`, computed in a form that is fast with XLA on CPUs.

    XLA divides the rows of the first factor among the CPU cores. Float32 weights are therefore the
    first factor if the argument `rows` has at most `FEW` rows; a barrier prevents XLA from swapping
    the factors. If the weights have another dtype, XLA would convert all of them before a product
    with a single row, so a single row is duplicated. XLA would transpose weights of three
    dimensions for each product, so all dimensions of the weights but the last are merged. They are
    not merged if there are several devices, because a mesh may split any dimension.
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
