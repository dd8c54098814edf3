"""The product with a matrix of weights, laid out so that reading them is all the time it takes."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.meshes import WHOLE, Split

FEW = 64
"""The most rows of tokens for which the weights are the first factor on a processor."""


def matrix(
    rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype, *, split: Split = WHOLE
) -> nnx.Param:
    """Make random weights for `linear`, `[..., n]`, from n numbers to those of the other sizes."""
    values = jax.random.normal(rngs.params(), shape, dtype) * shape[-1] ** -0.5
    return nnx.Param(values, split=split)


@jax.jit  # a program of many layers holds it once for each shape
def linear(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Map the last dimension of `x` by a matrix; `[..., n]` and `[m, n]` to `[..., m]`.

    Weights may have several dimensions in place of m, and then the outcome has them: it is one
    product all the same. They are not merged where there are several devices, since on a mesh any
    of them may be split.

    Sums are float32 at least. How it is computed is chosen by the platform for which a program is
    lowered, wherever it is traced.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = jax.lax.platform_dependent(rows, weights, cpu=_on_a_processor, default=_plain)
    return out.reshape(*x.shape[:-1], *weights.shape[:-1]).astype(jnp.result_type(x, weights))


def _plain(rows: jax.Array, weights: jax.Array) -> jax.Array:
    exact = jnp.promote_types(jnp.result_type(rows, weights), jnp.float32)
    return jnp.einsum("tn,...n->t...", rows, weights, preferred_element_type=exact)


def _on_a_processor(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """The same, arranged for XLA's code for processors.

    With few tokens the time goes into reading weights. Processors share the rows of a product's
    first factor among their cores, so that is what the weights are then; the barrier keeps the
    compiler from exchanging the factors. In other dtypes than float32 a product that is to be
    rounded, or has one row alone, converts all weights first: so that row takes a second one along.
    Weights of three dimensions would be transposed for each product: a device that is alone, whose
    weights are whole, merges them. Where it guesses wrong that costs time, and no more.
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
