"""A short causal convolution over the tokens of a row.

Letters beside those of the package: C channels, F tokens that a filter sees.
"""

from functools import reduce

import jax
import jax.numpy as jnp


def convolve(
    x: jax.Array, tail: jax.Array, weight: jax.Array, bias: jax.Array | None, counts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Convolve each channel over time, causally.

    Args:
      x: `[R, T, C]` floats, finite also where a row is padded.
      tail: `[R, F - 1, C]` floats, the inputs before the first token.
      weight: `[F, C]` floats, for the oldest input first.
      bias: `[C]` floats, or None.
      counts: `[R, n]` int32, after how many tokens of its row each wanted tail is taken.

    Returns:
      The outputs, `[R, T, C]` float32, and the tails, `[R, n, F - 1, C]` in the dtype of `tail`.

    Examples:
      >>> x = jnp.arange(1.0, 5.0).reshape(1, 4, 1)
      >>> out, tails = convolve(
      ...     x, jnp.zeros((1, 1, 1)), jnp.ones((2, 1)), None, jnp.array([[0, 4]])
      ... )
      >>> out.ravel(), tails.ravel()
      (Array([1., 3., 5., 7.], dtype=float32), Array([0., 4.], dtype=float32))

    llama.cpp: `ggml_ssm_conv`.
    """
    width, length = weight.shape[0], x.shape[1]
    padded = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    parts = (
        padded[:, i : i + length].astype(jnp.float32) * weight[i].astype(jnp.float32)[None, None]
        for i in range(width)
    )
    start = jnp.zeros((1, 1, 1)) if bias is None else bias.astype(jnp.float32)[None, None]
    out = reduce(jnp.add, parts, start)
    at = counts[..., None] + jnp.arange(width - 1)[None, None]
    tails = jnp.take_along_axis(padded[:, None], at[..., None], axis=2)
    return out, tails.astype(tail.dtype)
