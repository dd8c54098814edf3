"""The product with a matrix of weights, laid out so that reading them is all the time it takes."""

import jax
import jax.numpy as jnp
from flax import nnx

FEW = 64
"""The most rows of tokens for which the weights are the first factor."""


def matrix(rngs: nnx.Rngs, rows: int, columns: int, dtype: jnp.dtype) -> nnx.Param:
    """Make random weights for `linear`, `[rows, columns]`, from `columns` numbers to `rows`."""
    return nnx.Param(jax.random.normal(rngs.params(), (rows, columns), dtype) * columns**-0.5)


def linear(x: jax.Array, weights: nnx.Param) -> jax.Array:
    """Map the last dimension of `x` by a matrix; `[..., n]` and `[m, n]` to `[..., m]`.

    With few tokens the time goes into reading weights. Processors share the rows of a product's
    first factor among their cores, so that is what the weights are then; the barrier keeps the
    compiler from exchanging the factors. In other dtypes than float32 a product that is to be
    rounded, or has one row alone, converts all weights first: so sums are float32, and that row
    takes a second one along.
    """
    weight, rows = weights[...], x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if weight.dtype == jnp.float32 and count <= FEW:
        out = jax.lax.optimization_barrier(weight @ rows.T).T
    else:
        if count == 1:
            rows = jax.lax.optimization_barrier(jnp.concatenate([rows, rows]))
        out = jnp.einsum("tn,mn->tm", rows, weight, preferred_element_type=jnp.float32)[:count]
    return out.reshape(*x.shape[:-1], -1).astype(jnp.result_type(x, weight))
