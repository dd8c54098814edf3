"""Softmax over the rows that a mask allows. Knows arrays, and nothing of caches."""

import jax
import jax.numpy as jnp

from jaxkv.ops.attention.softmax import (
    LOWEST,
    Sums,
    cap,
    closed,
    joined,
    packed,
    sinks_alone,
    unpacked,
)
from jaxkv.ops.attention.xla_cpu import in_parts, scores, weigh

Arrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]
"""Queries, keys, values and sinks: what there are derivatives by."""


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend from every token to the rows that it may see.

    Args:
      q: `[R, T, H, D]`, queries. Query head h reads key/value head h // (H / K).
      k: `[R, K, N, D]`, keys, one table for each row of tokens.
      v: `[R, K, N, Dv]`, values.
      mask: `[R, T, N]` bool, which rows each token sees.
      scale: what the products of queries and keys are multiplied by; by default 1 / sqrt(D).
      softcap: what those products stay below: c * tanh(x / c).
      sinks: `[H]`, a logit of each head that takes its share of the attention and gives nothing.

    Returns:
      `[R, T, H, Dv]` in the dtype of `q`; sums and softmax in float32. A token that sees nothing
      gets zeros. What stands in a hidden row never matters, even where it is not a number.
      Derivatives are safe from rows that no token sees: for them keys and values are cleaned, which
      holds a copy.

    Raises:
      ValueError: when H is not a multiple of K, or shapes do not fit together.

    Examples:
      Two equal keys share the attention; a hidden one gets none, whatever it holds:

      >>> q, k = jnp.ones((1, 1, 1, 2)), jnp.ones((1, 1, 3, 2))
      >>> v = jnp.array([2.0, 4.0, jnp.nan]).reshape(1, 1, 3, 1)
      >>> attention(q, k, v, jnp.array([[[True, True, False]]]))[0, 0, 0]
      Array([3.], dtype=float32)
      >>> attention(q, k, v, jnp.array([[[False, False, False]]]))[0, 0, 0]
      Array([0.], dtype=float32)
    """
    rows, tokens, heads, size = q.shape
    dtype = q.dtype
    groups = k.shape[1]
    if heads % groups or k.shape[:3] != v.shape[:3] or k.shape[3] != size:
        raise ValueError(
            f"wanted q [R, T, H, D], k [R, K, N, D] and v [R, K, N, Dv] with H a multiple of K, "
            f"got {q.shape}, {k.shape} and {v.shape}"
        )
    if mask.shape != (rows, tokens, k.shape[2]):
        raise ValueError(f"wanted a mask {(rows, tokens, k.shape[2])}, got {mask.shape}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"wanted sinks {(heads,)}, one for each query head, got {sinks.shape}")
    scale = size**-0.5 if scale is None else scale

    @jax.custom_jvp
    def attend(arrays: Arrays, mask: jax.Array) -> jax.Array:
        q, k, v, sinks = arrays
        sums = open_softmax(packed(q * jnp.asarray(scale, dtype), groups), k, v, mask, softcap)
        if sinks is not None:
            sums = joined(sums, sinks_alone(sinks, sums))
        return unpacked(closed(sums), tokens, heads).astype(dtype)

    @attend.defjvp
    def derive(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
        # A derivative has 0 times what is hidden in it, which a NaN would survive.
        (q, k, v, sinks), mask = primals
        seen = jnp.any(mask, axis=1)[:, None, :, None]
        clean = q, jnp.where(seen, k, 0), jnp.where(seen, v, 0), sinks
        return jax.jvp(lambda arrays: attend.fun(arrays, mask), (clean,), tangents[:1])

    return attend((q, k, v, sinks), mask)


def open_softmax(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, softcap: float | None
) -> Sums:
    """Weigh the rows that are seen, for queries `[R, K, X, D]` from `packed`, scaled."""
    rows, tokens, _ = mask.shape
    k, v = in_parts(k, q.shape[2]), in_parts(v, q.shape[2])
    seen = mask.reshape(rows, 1, 1, tokens, *k.shape[2:4]).transpose(0, 1, 4, 2, 3, 5)
    logits = cap(scores(q, k), softcap).reshape(*k.shape[:3], -1, tokens, k.shape[3])
    logits = jnp.where(seen, jnp.maximum(logits, LOWEST / 2), LOWEST)  # [R, K, P, G, T, C]
    # Maximum, difference and exponential in a row are one fast function of the compiler's on CPU.
    # It takes nothing between them, such as a guard against -inf.
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=(2, 5), keepdims=True))
    weights = jnp.exp(logits - highest)
    total = jnp.sum(weights, axis=(2, 5)).reshape(q.shape[:3])
    out = weigh(weights.reshape(*k.shape[:3], -1, k.shape[3]), v)
    # Who sees nothing has weights all the same, of rows that are hidden.
    sees = jnp.tile(jnp.any(mask, axis=2), q.shape[2] // tokens)[:, None]
    return Sums(
        highest.reshape(q.shape[:3]),
        jnp.where(sees, total, 0.0),
        jnp.where(sees[..., None], out, 0.0),
    )
