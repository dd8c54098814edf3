"""Attention as it is written down: what every implementation is compared with."""

import jax
import jax.numpy as jnp

from jaxkv.ops.attention.softmax import Options


def reference(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, options: Options
) -> jax.Array:
    """Attend in the plainest way: `[P, T, H, Dv]` float32.

    The arrays are those of `jaxkv.ops.attention.attention`, for P lists in place of rows.
    """
    heads, cells = q.shape[2], k.shape[2]
    k, v = (jnp.repeat(x.astype(jnp.float32), heads // k.shape[1], axis=1) for x in (k, v))
    logits = jnp.einsum("pthd,phnd->pthn", options.scaled(q.astype(jnp.float32)), k)
    logits = jnp.where(mask[:, :, None], options.capped(logits), -jnp.inf)
    sinks = jnp.full(heads, -jnp.inf) if options.sinks is None else options.sinks
    sinks = jnp.broadcast_to(sinks, logits.shape[:3])[..., None]
    weights = jax.nn.softmax(jnp.concatenate([logits, sinks], axis=-1))[..., :cells]
    some = jnp.any(mask, axis=2)[..., None, None]
    return jnp.where(some, jnp.einsum("pthn,phnd->pthd", weights, v), 0.0)
