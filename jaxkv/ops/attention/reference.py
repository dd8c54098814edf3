"""Reference implementation of attention, for comparisons in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.ops.attention.softmax import AttentionOptions

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float


def reference(
    q: Float[Array, "P T H D"],
    k: Float[Array, "P K N D"],
    v: Float[Array, "P K N Dv"],
    mask: Bool[Array | np.ndarray, "P T N"],
    options: AttentionOptions,
) -> tuple[Float[Array, "P T H Dv"], Float[Array, "P H N"]]:
    """Return the output and the attention mass by the plain formula, in float32."""
    heads, cells = q.shape[2], k.shape[2]
    k, v = (jnp.repeat(x.astype(jnp.float32), heads // k.shape[1], axis=1) for x in (k, v))
    logits = jnp.einsum("pthd,phnd->pthn", options.scale_queries(q.astype(jnp.float32)), k)
    logits = jnp.where(mask[:, :, None], options.cap_logits(logits), -jnp.inf)
    sinks = jnp.full(heads, -jnp.inf) if options.sinks is None else options.sinks
    sinks = jnp.broadcast_to(sinks, logits.shape[:3])[..., None]
    weights = jax.nn.softmax(jnp.concatenate([logits, sinks], axis=-1))[..., :cells]
    some = jnp.any(mask, axis=2)[..., None, None]
    weights = jnp.where(some, weights, 0.0)
    return jnp.einsum("pthn,phnd->pthd", weights, v), jnp.sum(weights, axis=1)
