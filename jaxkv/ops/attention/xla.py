"""All cells at once, in two plain products: what any compiler knows how to fuse and to split."""

import jax
import jax.numpy as jnp

from jaxkv.ops.attention.sight import Sight, mask_of
from jaxkv.ops.attention.softmax import (
    Options,
    Sums,
    masked,
    packed,
    seen_alone,
    sums_dtype,
)


def whole(q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight, options: Options) -> Sums:
    """Weighs all cells of the streams that take part, see `jaxkv.ops.attention.api`."""
    return by_mask(q, sight.of_lists(k), sight.of_lists(v), mask_of(sight), options)


def cleaned(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, options: Options) -> Sums:
    """Does what `by_mask` does, in a form whose derivatives are safe from what no token sees.

    They multiply keys and values by the zeros of what is hidden, which a NaN would survive. So what
    no token sees is set to zero, which holds a copy.
    """
    seen = jnp.any(mask, axis=1)[:, None, :, None]
    return by_mask(q, jnp.where(seen, k, 0), jnp.where(seen, v, 0), mask, options)


def by_mask(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, options: Options) -> Sums:
    """Weighs the cells `[P, K, N, D]` of each list that its mask `[P, T, N]` shows to it."""
    return open_softmax(packed(options.scaled(q), k.shape[1]), k, v, mask, options)


def open_softmax(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, options: Options
) -> Sums:
    """Weighs the cells that are seen.

    Args:
      q: `[P, K, X, D]`, queries from `packed`, scaled.
      k: `[P, K, N, D]`, keys.
      v: `[P, K, N, Dv]`, values, finite all of them.
      mask: `[P, T, N]` bool, what each token sees.
      options: of which the softcap is looked at.
    """
    dtype = sums_dtype(q)
    logits = jnp.einsum("pkxd,pknd->pkxn", q, k, preferred_element_type=dtype)
    by_token = (*q.shape[:2], -1, *mask.shape[1:])
    logits = masked(options.capped(logits).reshape(by_token), mask[:, None, None])
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    weights = jnp.exp(logits - highest[..., None])
    total = jnp.sum(weights, axis=-1)
    weights = weights.reshape(*q.shape[:3], -1)
    out = jnp.einsum("pkxn,pknd->pkxd", weights, v, preferred_element_type=dtype)
    return seen_alone(Sums(highest.reshape(q.shape[:3]), total.reshape(q.shape[:3]), out), mask)
