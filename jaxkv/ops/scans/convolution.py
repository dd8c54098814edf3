"""Short causal convolution over the tokens of a row."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


def convolve(
    x: Float[Array, "R T C"],
    tail: Float[Array, "R before C"],
    weight: Float[Array, "F C"],
    bias: Float[Array, " C"] | None,
    counts: Int32[Array, "R n"],
) -> tuple[Float[Array, "R T C"], Float[Array, "R n before C"]]:
    """Convolve each channel over time, causally (llama.cpp: `ggml_ssm_conv`).

    Args:
      x: inputs, finite also at padding.
      tail: the F - 1 inputs before the first token of each row.
      weight: filter, oldest input first.
      bias: bias of each channel, or None.
      counts: for each returned tail, the number of tokens of its row up to the tail's end, 0 to T.

    Returns:
      The outputs, float32, and the returned tails, in the dtype of the argument `tail`.

    Examples:
      >>> x, tail = jnp.arange(1.0, 5.0).reshape(1, 4, 1), jnp.zeros((1, 1, 1))
      >>> out, tails = convolve(x, tail, jnp.ones((2, 1)), None, jnp.array([[0, 4]]))
      >>> out.ravel(), tails.ravel()
      (Array([1., 3., 5., 7.], dtype=float32), Array([0., 4.], dtype=float32))
    """
    width, length = weight.shape[0], x.shape[1]
    padded = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    parts = (
        padded[:, i : i + length].astype(jnp.float32) * weight[i].astype(jnp.float32)[None, None]
        for i in range(width)
    )
    start = jnp.zeros((1, 1, 1)) if bias is None else bias.astype(jnp.float32)[None, None]
    out = reduce(jnp.add, parts, start)
    # After n tokens, the last F - 1 inputs are at n to n + F - 2 in `padded`, which begins with the
    # F - 1 inputs of the tail.
    at = counts[..., None] + jnp.arange(width - 1)[None, None]
    tails = jnp.take_along_axis(padded[:, None], at[..., None], axis=2)
    return out, tails.astype(tail.dtype)
