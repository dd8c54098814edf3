"""Partial (online) softmax over some cells; partial softmaxes over different cells can be merged.

Arrays are packed: for each key head, the T tokens and the G query heads form one axis of X = G * T
queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.pytree import pytree_dataclass, static_field
from jaxkv.core.validate import check_number

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Shaped

LOWEST = float(jnp.finfo(jnp.float32).min)
"""Logit of a hidden cell; finite, so that max and exp never compute inf - inf."""


@pytree_dataclass
class AttentionOptions:
    """Options of a model's attention.

    scale: Factor that multiplies the products of queries and keys.
    softcap: Bound c: each scaled product x becomes c * tanh(x / c). If None, there is no bound.
    sinks: Additional logit of each query head, without a value; None for no sinks.
    keep_weights: Whether a partial softmax contains its weights, from which mass is computed.
    """

    scale: float | None = static_field(default=None)
    softcap: float | None = static_field(default=None)
    sinks: Float[Array | np.ndarray, " H"] | None = None
    keep_weights: bool = static_field(default=False)

    def scale_queries(self, q: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
        """Return queries times the scale, in the dtype of the queries."""
        return q * jnp.asarray(q.shape[-1] ** -0.5 if self.scale is None else self.scale, q.dtype)

    def cap_logits(self, logits: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """Return logits bounded by the softcap; if `softcap` is None, return them unchanged."""
        cap = self.softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def make_options(
    scale: float | None,
    softcap: float | None,
    sinks: Float[Array | np.ndarray, " H"] | None,
    *,
    keep_weights: bool = False,
) -> AttentionOptions:
    """Return options; raise a TypeError if `scale` or `softcap` is traced or not a number."""
    return AttentionOptions(
        scale=None if scale is None else check_number(scale, "scale"),
        softcap=None if softcap is None else check_number(softcap, "softcap"),
        sinks=sinks,
        keep_weights=keep_weights,
    )


class OnlineSoftmax(NamedTuple):
    """Partial softmax over some cells, for queries that `group_queries` packed.

    The dtype of all fields is the result of `softmax_dtype`.

    max_logit: Highest logit of each query; LOWEST if no cell is visible.
    denom: Sum of exp(logit - max_logit).
    out: Sum of values times exp(logit - max_logit).
    weights: exp(logit - max_logit) of all cells; undefined if `denom` is 0. None unless options
      have `keep_weights`.
    """

    max_logit: Float[Array, "P K X"]
    denom: Float[Array, "P K X"]
    out: Float[Array, "P K X Dv"]
    weights: Float[Array, "P K X N"] | None = None

    def merge_block(
        self,
        max_logit: Float[Array, "P K X"],
        denom: Float[Array, "P K X"],
        out: Float[Array, "P K X Dv"],
    ) -> OnlineSoftmax:
        """Add sums over further cells; `max_logit` is the highest logit of old and new cells."""
        # `max_logit` is at least the old maximum, so the factor is at most 1 and cannot overflow.
        factor = jnp.exp(self.max_logit - max_logit)
        denom, out = self.denom * factor + denom, self.out * factor[..., None] + out
        return OnlineSoftmax(max_logit, denom, out)


def softmax_dtype(q: Float[Array, "*_"]) -> jnp.dtype:
    """Return the dtype of logits and sums: float32, or float64 for float64 queries."""
    return jnp.promote_types(q.dtype, jnp.float32)


def mask_logits(
    logits: Float[Array, "*#n C"],
    mask: Bool[Array, "*#n C"],
    bias: Float[Array, "*#n #C"] | None = None,
) -> Float[Array, "*#n C"]:
    """Add a bias, and set the logits of hidden cells to LOWEST.

    A bias of -inf hides a cell. The logit of a visible cell becomes at least LOWEST / 2.
    """
    # A visible NaN is kept.
    if bias is not None:
        logits, mask = logits + bias.astype(logits.dtype), mask & (bias != -jnp.inf)
    # The highest visible logit is then at least LOWEST / 2, so the weight of a hidden cell is at
    # most exp(LOWEST / 2), which is 0.
    return jnp.where(mask, jnp.maximum(logits, LOWEST / 2), LOWEST)


def zero_unseen(sums: OnlineSoftmax, has_visible: Bool[Array, "P T"]) -> OnlineSoftmax:
    """Set the partial softmax to `empty_softmax` for tokens without visible cells."""
    # For these tokens, `sums` includes hidden cells, or is undefined if a kernel skipped the token.
    # For other tokens, the high logit of a visible cell removes the contribution of hidden cells.
    groups = sums.denom.shape[2] // has_visible.shape[1]
    return _reset_unseen(sums, jnp.tile(has_visible, groups)[:, None])


def reset_where_bias_hides_all(sums: OnlineSoftmax) -> OnlineSoftmax:
    """Set the partial softmax to `empty_softmax` for queries whose bias hides all cells."""
    return _reset_unseen(sums, sums.max_logit != LOWEST)


def _reset_unseen(sums: OnlineSoftmax, has_visible: jax.Array) -> OnlineSoftmax:
    """Set the partial softmax to `empty_softmax` where `has_visible` `[P, K or 1, X]` is False."""
    return sums._replace(
        max_logit=jnp.where(has_visible, sums.max_logit, LOWEST),
        denom=jnp.where(has_visible, sums.denom, 0.0),
        out=jnp.where(has_visible[..., None], sums.out, 0.0),
    )


def empty_softmax(q: Float[Array, "P K X D"], value_dim: int) -> OnlineSoftmax:
    """Return a partial softmax over no cells, for packed queries; `value_dim` is Dv."""
    zero = jnp.zeros_like(q[..., 0], softmax_dtype(q))  # split on a mesh as queries are
    out = jnp.broadcast_to(zero[..., None], (*zero.shape, value_dim))
    return OnlineSoftmax(zero + LOWEST, zero, out)


def merge_softmax(a: OnlineSoftmax, b: OnlineSoftmax) -> OnlineSoftmax:
    """Merge two partial softmaxes."""
    # The quotient out / denom does not depend on the maximum, so its derivative is left out.
    highest = jax.lax.stop_gradient(jnp.maximum(a.max_logit, b.max_logit))
    factor = jnp.exp(b.max_logit - highest)
    return a.merge_block(highest, b.denom * factor, b.out * factor[..., None])


def merge_over_devices(sums: OnlineSoftmax, axes: tuple[str, ...]) -> OnlineSoftmax:
    """Merge the partial softmaxes of all devices along mesh axes, with one small all-gather."""
    if not axes:
        return sums
    own_parts = [sums.max_logit[..., None], sums.denom[..., None], sums.out]
    parts = jax.lax.all_gather(jnp.concatenate(own_parts, axis=-1), axes)  # [n, P, K, X, Dv + 2]
    highest = jax.lax.stop_gradient(jnp.max(parts[..., 0], axis=0, keepdims=True))
    factor = jnp.exp(parts[..., 0] - highest)
    out = jnp.sum(parts[..., 2:] * factor[..., None], axis=0)
    return OnlineSoftmax(highest[0], jnp.sum(parts[..., 1] * factor, axis=0), out)


def with_sinks(sums: OnlineSoftmax, sinks: Float[Array | np.ndarray, " H"] | None) -> OnlineSoftmax:
    """Add the sinks to a softmax over all cells; if `sinks` is None, return `sums`."""
    if sinks is None:
        return sums
    lists, kv_heads, queries = sums.denom.shape
    # A sink is a cell with a value of 0: its own maximum is its logit, and its denominator is
    # exp(0).
    heads = sinks.astype(sums.denom.dtype).reshape(1, kv_heads, -1, 1)
    logits = jnp.broadcast_to(heads, (lists, kv_heads, heads.shape[2], queries // heads.shape[2]))
    logits = logits.reshape(sums.denom.shape)
    return merge_softmax(
        sums, OnlineSoftmax(logits, jnp.ones_like(logits), jnp.zeros_like(sums.out))
    )


def normalize(sums: OnlineSoftmax) -> Float[Array, "P K X Dv"]:
    """Divide the weighted values by the denominators; return zeros where no cell is visible."""
    return sums.out / jnp.where(sums.denom == 0.0, 1.0, sums.denom)[..., None]


def with_weights(sums: OnlineSoftmax, logits: Float[Array, "P K X N"] | None) -> OnlineSoftmax:
    """Return a partial softmax with the weights of its logits; without logits, return `sums`."""
    if logits is None:
        return sums
    return sums._replace(weights=jnp.exp(logits - sums.max_logit[..., None]))


def sum_weights(
    part: OnlineSoftmax, whole: OnlineSoftmax, options: AttentionOptions, tokens: int
) -> Float[Array, "P H N"] | None:
    """Return the weights of the cells of `part`, summed over the T tokens of a list.

    The argument `tokens` is T, and `whole` is the softmax over all cells, without sinks. Without
    `keep_weights`, the result is None.
    """
    if part.weights is None:
        return None
    whole = with_sinks(whole, options.sinks)
    factor = jnp.exp(part.max_logit - whole.max_logit) / whole.denom
    factor = jnp.where(whole.denom == 0.0, 0.0, factor)
    weights, factor = (x.reshape(len(x), -1, tokens, *x.shape[3:]) for x in (part.weights, factor))
    return jnp.einsum("phtn,pht->phn", weights, factor)


def group_queries(q: Shaped[Array, "P T H D"], kv_heads: int) -> Shaped[Array, "P K X D"]:
    """For each key head, pack its G query heads and the T tokens into one axis X of size G * T."""
    lists, tokens, _, size = q.shape
    return (
        q.reshape(lists, tokens, kv_heads, -1, size)
        .transpose(0, 2, 3, 1, 4)
        .reshape(lists, kv_heads, -1, size)
    )


def group_heads(x: Shaped[Array, "P _ T C"], kv_heads: int) -> Shaped[Array, "P _ _ T C"]:
    """Reshape an axis of H heads to two axes `[K, G]`, and an axis of size 1 to `[1, 1]`."""
    lists, heads, *pairs = x.shape
    return x.reshape(lists, min(heads, kv_heads), -1, *pairs)


def ungroup_queries(out: Float[Array, "P K X Dv"], tokens: int) -> Float[Array, "P T H Dv"]:
    """Undo `group_queries`; the argument `tokens` is T."""
    lists, kv_heads, _, size = out.shape
    out = out.reshape(lists, kv_heads, -1, tokens, size).transpose(0, 3, 1, 2, 4)
    return out.reshape(lists, tokens, -1, size)
