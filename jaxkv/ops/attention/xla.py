"""Attention over all cells as two matrix products, which compilers can fuse and split."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.ops.attention.softmax import (
    AttentionOptions,
    OnlineSoftmax,
    group_heads,
    group_queries,
    mask_logits,
    softmax_dtype,
    zero_unseen,
)
from jaxkv.ops.attention.visibility import Visibility, compute_bias, compute_mask
from jaxkv.ops.storage.forms import storage_of
from jaxkv.ops.storage.storage import Stored

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float


def attend_all_cells(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    visibility: Visibility,
    options: AttentionOptions,
) -> OnlineSoftmax:
    """Attend to all cells of each list's stream; for arguments see `dispatch.AttentionFn`."""
    of_lists, mask = visibility.gather_list_streams, compute_mask(visibility)
    return attend_by_mask(q, of_lists(k), of_lists(v), mask, options, compute_bias(visibility))


def attend_differentiably(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    mask: Bool[Array, "P T N"],
    options: AttentionOptions,
    bias: Float[Array, "P _ T N"] | None = None,
) -> OnlineSoftmax:
    """Compute `attend_by_mask`; hidden keys and values do not affect the derivatives."""
    # Derivatives multiply keys and values by zeros, and NaN times zero is NaN. Hidden cells and
    # numbers that are not finite are therefore set to zero, in a copy. A token that attends to such
    # a number gets NaN afterwards, as its output and as the derivative by its query.
    seen = jnp.any(mask, axis=1)[:, None, :, None]
    k, v = (jnp.where(seen, storage_of(x).decode(), 0) for x in (k, v))
    finite = jnp.all(jnp.isfinite(k), axis=3) & jnp.all(jnp.isfinite(v), axis=3)  # [P, K, N]
    is_broken = jnp.any(mask[:, None] & ~finite[:, :, None], axis=3)  # [P, K, T]
    k, v = (jnp.where(jnp.isfinite(x), x, 0) for x in (k, v))
    groups = q.shape[2] // k.shape[1]
    of_queries = jnp.repeat(is_broken, groups, axis=1).swapaxes(1, 2)[..., None]  # [P, T, H, 1]
    q = _multiply_tangent(q, jnp.where(of_queries, jnp.nan, 1.0).astype(q.dtype))
    sums = attend_by_mask(q, k, v, mask, options, bias)
    is_broken = jnp.tile(is_broken, groups)
    return sums._replace(
        denom=jnp.where(is_broken, jnp.nan, sums.denom),
        out=jnp.where(is_broken[..., None], jnp.nan, sums.out),
    )


@jax.custom_jvp
def _multiply_tangent(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Return `x`; derivatives by `x` are multiplied by `factor`."""
    del factor
    return x


@_multiply_tangent.defjvp
def _multiply_tangent_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return primals[0], tangents[0] * primals[1]


def attend_by_mask(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    mask: Bool[Array, "P T N"],
    options: AttentionOptions,
    bias: Float[Array, "P _ T N"] | None = None,
) -> OnlineSoftmax:
    """Attend from list p of tokens to the keys and values at index p; values must be finite."""
    q = group_queries(options.scale_queries(q), k.shape[1])
    logits = _masked_logits(q, k, mask, options, bias)
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    weights = jnp.exp(logits - highest[..., None])
    sums = OnlineSoftmax(
        highest, *_sum_weighted_values(weights, v), weights if options.keep_weights else None
    )
    return zero_unseen(sums, jnp.any(mask, axis=2))


def add_cells(
    sums: OnlineSoftmax,
    q: Float[Array, "P K X D"],
    k: Stored,
    v: Stored,
    mask: Bool[Array, "P T C"],
    options: AttentionOptions,
    bias: Float[Array, "P _ T C"] | None = None,
) -> tuple[OnlineSoftmax, Float[Array, "P K X C"] | None]:
    """Add cells `[P, K, C, ...]` to a partial softmax; call `zero_unseen` after the last cells.

    The queries must be packed and scaled, and the values must be finite. The second result is the
    logits of the cells, `[P, K, X, C]`, if the options have `keep_weights`; otherwise None.
    """
    logits = _masked_logits(q, k, mask, options, bias)
    highest = jax.lax.stop_gradient(jnp.maximum(jnp.max(logits, axis=-1), sums.max_logit))
    weights = jnp.exp(logits - highest[..., None])
    sums = sums.merge_block(highest, *_sum_weighted_values(weights, v))
    return sums, logits if options.keep_weights else None


def _masked_logits(
    q: jax.Array, k: Stored, mask: jax.Array, options: AttentionOptions, bias: jax.Array | None
) -> jax.Array:
    """Return masked logits `[P, K, X, C]` in `softmax_dtype`; for arguments see `add_cells`."""
    logits = storage_of(k).logits(q, softmax_dtype(q))
    by_token = options.cap_logits(logits).reshape(*q.shape[:2], -1, *mask.shape[1:])
    bias = None if bias is None else group_heads(bias, k.shape[1])
    return mask_logits(by_token, mask[:, None, None], bias).reshape(logits.shape)


def _sum_weighted_values(weights: jax.Array, v: Stored) -> tuple[jax.Array, jax.Array]:
    """Return the sums of weights, `[P, K, X]`, and the sums of weighted values, `[P, K, X, Dv]`."""
    out = storage_of(v).weighted_values(weights)
    return jnp.sum(weights, axis=-1), out
