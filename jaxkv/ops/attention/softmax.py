"""A softmax before its division: over some cells, so that it can be joined with that over others.

Its arrays are packed: the G query heads of a key head and the T tokens of a list are X = G * T
queries of one product, so that a key is read once for all of them. C is the cells that are weighed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Shaped

LOWEST = float(jnp.finfo(jnp.float32).min)
"""The logit of a hidden cell; finite, so that max and exp never meet infinity minus infinity."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionOptions:
    """What a model's attention asks for beside its arrays.

    scale: what the products of queries and keys are multiplied by, static; None for 1 / sqrt(D).
    softcap: c, which bounds those products: each becomes c * tanh(x / c); static; None for none.
    sinks: a logit of each head that takes its share of the attention and gives nothing.
    """

    scale: float | None = field(default=None, metadata={"static": True})
    softcap: float | None = field(default=None, metadata={"static": True})
    sinks: Float[Array | np.ndarray, " H"] | None = None

    def scale_queries(self, q: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
        """Return queries times the scale, in their own dtype."""
        return q * jnp.asarray(q.shape[-1] ** -0.5 if self.scale is None else self.scale, q.dtype)

    def cap_logits(self, logits: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """Return logits below the softcap, smoothly, if there is one."""
        cap = self.softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class OnlineSoftmax(NamedTuple):
    """A softmax over some cells before its division, for queries from `group_queries`.

    The dtype is that of `softmax_dtype`.

    max_logit: the highest logit; low, but finite, where nothing is seen.
    denom: the sum of exp(logit - highest).
    out: the values, each times its exp(logit - highest), added up.
    """

    max_logit: Float[Array, "P K X"]
    denom: Float[Array, "P K X"]
    out: Float[Array, "P K X Dv"]

    def merge_block(
        self,
        max_logit: Float[Array, "P K X"],
        denom: Float[Array, "P K X"],
        out: Float[Array, "P K X Dv"],
    ) -> OnlineSoftmax:
        """Return the sums over these cells and others.

        `max_logit` is the highest logit of both, by which `denom` and `out` of the others were
        weighed. Shapes are those of `OnlineSoftmax`.
        """
        down = jnp.exp(self.max_logit - max_logit)
        return OnlineSoftmax(max_logit, self.denom * down + denom, self.out * down[..., None] + out)


def softmax_dtype(q: Float[Array, "*_"]) -> jnp.dtype:
    """Return the dtype of logits and sums: float32, or float64 for queries of float64."""
    return jnp.promote_types(q.dtype, jnp.float32)


def mask_logits(
    logits: Float[Array, "*#n C"],
    mask: Bool[Array, "*#n C"],
    bias: Float[Array, "*#n #C"] | None = None,
) -> Float[Array, "*#n C"]:
    """Give hidden cells the lowest logit, and others a higher one; a NaN that is seen stays.

    A bias is added, if there is one; where it is -inf it hides the cell. All broadcast to the
    result.
    """
    if bias is not None:
        logits, mask = logits + bias.astype(logits.dtype), mask & (bias != -jnp.inf)
    return jnp.where(mask, jnp.maximum(logits, LOWEST / 2), LOWEST)


def zero_unseen(sums: OnlineSoftmax, sees: Bool[Array, "P T"]) -> OnlineSoftmax:
    """Set the sums of a token that sees nothing to those over no cells.

    Such a token may have sums of hidden cells, since the highest of its logits is then the lowest
    one. (Where it sees a cell in a later tile, or in the share of another device, the logit of that
    cell is so much higher that nothing is left of hidden ones.) And a kernel that never came to the
    token has left any numbers there.
    """
    return _reset_unseen(sums, jnp.tile(sees, sums.denom.shape[2] // sees.shape[1])[:, None])


def reset_where_bias_hides_all(sums: OnlineSoftmax) -> OnlineSoftmax:
    """Set the sums of a query to those over no cells where a bias hides all that its token sees.

    Its highest logit is then the lowest one, and that of a query that sees a cell is not: see
    `mask_logits`.
    """
    return _reset_unseen(sums, sums.max_logit != LOWEST)


def _reset_unseen(sums: OnlineSoftmax, sees: jax.Array) -> OnlineSoftmax:
    """Set the sums of queries that see nothing to those over no cells.

    `sees` is `[P, K or 1, X]` bool.
    """
    return OnlineSoftmax(
        jnp.where(sees, sums.max_logit, LOWEST),
        jnp.where(sees, sums.denom, 0.0),
        jnp.where(sees[..., None], sums.out, 0.0),
    )


def empty_softmax(q: Float[Array, "P K X D"], value_dim: int) -> OnlineSoftmax:
    """Return the sums over no cells, for packed queries; Dv is `value_dim`."""
    zero = jnp.zeros_like(q[..., 0], softmax_dtype(q))  # split on a mesh as queries are
    out = jnp.broadcast_to(zero[..., None], (*zero.shape, value_dim))
    return OnlineSoftmax(zero + LOWEST, zero, out)


def merge_softmax(a: OnlineSoftmax, b: OnlineSoftmax) -> OnlineSoftmax:
    """Return the open softmax over the cells of two."""
    highest = jax.lax.stop_gradient(jnp.maximum(a.max_logit, b.max_logit))
    down = jnp.exp(b.max_logit - highest)
    return a.merge_block(highest, b.denom * down, b.out * down[..., None])


def merge_over_devices(sums: OnlineSoftmax, axes: tuple[str, ...]) -> OnlineSoftmax:
    """Return the open softmax over the cells of all devices along axes of a mesh.

    It costs one small message.
    """
    if not axes:
        return sums
    own_parts = [sums.max_logit[..., None], sums.denom[..., None], sums.out]
    parts = jax.lax.all_gather(jnp.concatenate(own_parts, axis=-1), axes)  # [n, P, K, X, Dv + 2]
    highest = jax.lax.stop_gradient(jnp.max(parts[..., 0], axis=0, keepdims=True))
    down = jnp.exp(parts[..., 0] - highest)
    out = jnp.sum(parts[..., 2:] * down[..., None], axis=0)
    return OnlineSoftmax(highest[0], jnp.sum(parts[..., 1] * down, axis=0), out)


def with_sinks(sums: OnlineSoftmax, sinks: Float[Array | np.ndarray, " H"] | None) -> OnlineSoftmax:
    """Add the sinks, if there are any, to the sums over all cells."""
    if sinks is None:
        return sums
    lists, kv_heads, queries = sums.denom.shape
    heads = sinks.astype(sums.denom.dtype).reshape(1, kv_heads, -1, 1)
    logits = jnp.broadcast_to(heads, (lists, kv_heads, heads.shape[2], queries // heads.shape[2]))
    logits = logits.reshape(sums.denom.shape)
    return merge_softmax(
        sums, OnlineSoftmax(logits, jnp.ones_like(logits), jnp.zeros_like(sums.out))
    )


def normalize(sums: OnlineSoftmax) -> Float[Array, "P K X Dv"]:
    """Divide; zeros where nothing is seen."""
    return sums.out / jnp.where(sums.denom == 0.0, 1.0, sums.denom)[..., None]


def group_queries(q: Shaped[Array, "P T H D"], kv_heads: int) -> Shaped[Array, "P K X D"]:
    """Lay queries out for one product with each key head; X is G * T."""
    lists, tokens, _, size = q.shape
    return (
        q.reshape(lists, tokens, kv_heads, -1, size)
        .transpose(0, 2, 3, 1, 4)
        .reshape(lists, kv_heads, -1, size)
    )


def group_heads(x: Shaped[Array, "P _ T C"], kv_heads: int) -> Shaped[Array, "P _ _ T C"]:
    """Split query heads by their key heads; H or 1 to K or 1 and G or 1."""
    lists, heads, *pairs = x.shape
    return x.reshape(lists, min(heads, kv_heads), -1, *pairs)


def ungroup_queries(out: Float[Array, "P K X Dv"], tokens: int) -> Float[Array, "P T H Dv"]:
    """Undo `group_queries`, for T `tokens`."""
    lists, kv_heads, _, size = out.shape
    out = out.reshape(lists, kv_heads, -1, tokens, size).transpose(0, 3, 1, 2, 4)
    return out.reshape(lists, tokens, -1, size)
