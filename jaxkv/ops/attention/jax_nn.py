"""`jax.nn.dot_product_attention` as an implementation, compiled by XLA or with cuDNN."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

from jaxkv.ops.attention.softmax import (
    LOWEST,
    AttentionOptions,
    OnlineSoftmax,
    group_heads,
    group_queries,
    softmax_dtype,
)
from jaxkv.ops.attention.visibility import Visibility, compute_bias, compute_mask
from jaxkv.ops.storage.forms import storage_of
from jaxkv.ops.storage.storage import Stored

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def xla(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    visibility: Visibility,
    options: AttentionOptions,
) -> OnlineSoftmax:
    """Call `jax.nn.dot_product_attention` in the widest dtype of queries, keys and values."""
    k, v = (storage_of(visibility.gather_list_streams(x)).decode() for x in (k, v))
    dtype = jnp.result_type(q, k, v)
    return _call_jax_nn(
        "xla", q.astype(dtype), k.astype(dtype), v.astype(dtype), visibility, options
    )


def cudnn(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    visibility: Visibility,
    options: AttentionOptions,
) -> OnlineSoftmax:
    """Call `jax.nn.dot_product_attention` with cuDNN."""
    is_encoded = storage_of(k).is_encoded or storage_of(v).is_encoded
    known = q.dtype in (jnp.float16, jnp.bfloat16)
    if is_encoded or not known or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"expected queries, keys and values of float16, or of bfloat16, for 'cudnn', got "
            f"{q.dtype}, {k.dtype} and {v.dtype}; pass implementation=None"
        )
    return _call_jax_nn(
        "cudnn",
        q,
        visibility.gather_list_streams(k),
        visibility.gather_list_streams(v),
        visibility,
        options,
    )


def _call_jax_nn(
    name: Literal["xla", "cudnn"],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visibility: Visibility,
    options: AttentionOptions,
) -> OnlineSoftmax:
    """Attend from queries `[P, T, H, D]` to keys `[P, K, N, D]` and values `[P, K, N, Dv]`."""
    if options.softcap is not None or options.sinks is not None:
        raise ValueError(
            f"expected an implementation with softcap and sinks, got {name!r}; pass "
            f"implementation=None"
        )
    if k.shape[3] != v.shape[3]:
        raise ValueError(
            f"expected keys and values of one size for {name!r}, got {k.shape[3]} and "
            f"{v.shape[3]}; pass implementation=None"
        )
    kv_heads, mask = k.shape[1], compute_mask(visibility)
    bias, mask = compute_bias(visibility, mask), mask[:, None]  # [P, 1, T, N]
    if bias is not None:  # Cells that the bias hides are removed from the mask of each head.
        mask = mask & (bias != -jnp.inf)
        bias = jnp.where(mask, bias, 0)
    # The kernel may add a mask to NaN logits, and derivatives multiply hidden keys by 0. Zeros
    # therefore replace keys with NaN, and the values of these keys (which may be slices of the
    # keys). The output of a token that attends to such a key is set to NaN afterwards.
    broken = jnp.any(jnp.isnan(k), axis=3)  # [P, K, N]
    k, v = (jnp.where(broken[..., None], 0, x).swapaxes(1, 2) for x in (k, v))
    out, highest = jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias=bias,
        mask=mask,
        scale=options.scale,
        implementation=name,
        return_residual=True,
    )
    some = jnp.any(mask, axis=3).swapaxes(1, 2)  # [P, T, 1 or H]
    shows = group_heads(mask, kv_heads) & broken[:, :, None, None]
    shows = jnp.any(shows, axis=4)  # [P, K, G or 1, T]
    shows = jnp.tile(shows, (1, 1, q.shape[2] // (kv_heads * shows.shape[2]), 1))
    shows = shows.reshape(*shows.shape[:2], -1)  # [P, K, G * T]
    highest = group_queries(jnp.where(some, highest, LOWEST)[..., None], kv_heads)[..., 0]
    # Outputs are normalised, so the denominator is 1, or 0 if no cell is visible.
    total = group_queries(jnp.broadcast_to(some, q.shape[:3])[..., None], kv_heads)[..., 0]
    out = group_queries(jnp.where(some[..., None], out, 0), kv_heads)
    dtype = softmax_dtype(q)
    return OnlineSoftmax(
        highest.astype(dtype),
        total.astype(dtype),
        jnp.where(shows[..., None], jnp.nan, out).astype(dtype),
    )
