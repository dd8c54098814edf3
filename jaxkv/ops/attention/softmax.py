"""A softmax before its division: over some cells, so that it can be joined with others.

Its arrays are packed: the G query heads of a key head and the T tokens of a list are X = G * T
queries of one product, so that a key is read once for all of them.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

LOWEST = float(jnp.finfo(jnp.float32).min)
"""The logit of a hidden cell; finite, so that max and exp never meet infinity minus infinity."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """What a model's attention asks for beside its arrays.

    scale: what the products of queries and keys are multiplied by, static; None for 1 / sqrt(D).
    softcap: what those products stay below, c * tanh(x / c), static; None for no bound.
    sinks: `[H]`, a logit of each head that takes its share of the attention and gives nothing.
    """

    scale: float | None = field(default=None, metadata={"static": True})
    softcap: float | None = field(default=None, metadata={"static": True})
    sinks: jax.Array | None = None

    def scaled(self, q: jax.Array) -> jax.Array:
        """Return queries `[..., D]` times the scale, in their own dtype."""
        return q * jnp.asarray(q.shape[-1] ** -0.5 if self.scale is None else self.scale, q.dtype)

    def capped(self, logits: jax.Array) -> jax.Array:
        """Return logits below the bound, smoothly, if there is one."""
        cap = self.softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class Sums(NamedTuple):
    """A softmax over some cells before its division, for queries from `packed`.

    The dtype is that of `sums_dtype`.

    highest: `[P, K, X]`, the highest logit; what is finite and low where nothing is seen.
    total: `[P, K, X]`, the sum of exp(logit - highest).
    out: `[P, K, X, Dv]`, the values, each times its exp(logit - highest), added up.
    """

    highest: jax.Array
    total: jax.Array
    out: jax.Array

    def plus(self, highest: jax.Array, total: jax.Array, out: jax.Array) -> "Sums":
        """Return the sums over these cells and others that were weighed by a higher `highest`."""
        down = jnp.exp(self.highest - highest)
        return Sums(highest, self.total * down + total, self.out * down[..., None] + out)


def sums_dtype(q: jax.Array) -> jnp.dtype:
    """Return what logits and sums are computed in: float32, or float64 for such queries."""
    return jnp.promote_types(q.dtype, jnp.float32)


def masked(logits: jax.Array, mask: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Give hidden cells the lowest logit, and others a higher one; a NaN that is seen stays.

    A bias is added, if there is one; where it is -inf it hides.
    """
    if bias is not None:
        logits, mask = logits + bias.astype(logits.dtype), mask & (bias != -jnp.inf)
    return jnp.where(mask, jnp.maximum(logits, LOWEST / 2), LOWEST)


def seen_alone(sums: Sums, sees: jax.Array) -> Sums:
    """Set the sums of a token that sees nothing to those over no cells; `sees` is `[P, T]` bool.

    It may have sums all the same, of hidden cells, whose logits are then the highest. What is seen
    in a later tile, or by another shard, has so much higher ones that nothing is left of them. A
    kernel that never came to the token has left any numbers there.
    """
    return _kept(sums, jnp.tile(sees, sums.total.shape[2] // sees.shape[1])[:, None])


def unhidden_alone(sums: Sums) -> Sums:
    """Set the sums of a query from which a bias hides all that its token sees to those over none.

    It has the lowest logit for its highest, which no other has, see `masked`.
    """
    return _kept(sums, sums.highest != LOWEST)


def _kept(sums: Sums, sees: jax.Array) -> Sums:
    """Set the sums of queries that see nothing to those over no cells; `sees` is `[P, 1, X]`."""
    return Sums(
        jnp.where(sees, sums.highest, LOWEST),
        jnp.where(sees, sums.total, 0.0),
        jnp.where(sees[..., None], sums.out, 0.0),
    )


def nothing(q: jax.Array, value_dim: int) -> Sums:
    """Return the sums over no cells, for packed queries `[P, K, X, D]`."""
    zero = jnp.zeros_like(q[..., 0], sums_dtype(q))  # on a mesh it lies as the queries do
    out = jnp.broadcast_to(zero[..., None], (*zero.shape, value_dim))
    return Sums(zero + LOWEST, zero, out)


def joined(a: Sums, b: Sums) -> Sums:
    """Return the softmax over the cells of two."""
    highest = jax.lax.stop_gradient(jnp.maximum(a.highest, b.highest))
    down = jnp.exp(b.highest - highest)
    return a.plus(highest, b.total * down, b.out * down[..., None])


def joined_over(sums: Sums, axes: tuple[str, ...]) -> Sums:
    """Return the softmax over the cells of all devices along axes of a mesh: one small message."""
    if not axes:
        return sums
    mine = [sums.highest[..., None], sums.total[..., None], sums.out]
    parts = jax.lax.all_gather(jnp.concatenate(mine, axis=-1), axes)  # [n, P, K, X, Dv + 2]
    highest = jax.lax.stop_gradient(jnp.max(parts[..., 0], axis=0, keepdims=True))
    down = jnp.exp(parts[..., 0] - highest)
    out = jnp.sum(parts[..., 2:] * down[..., None], axis=0)
    return Sums(highest[0], jnp.sum(parts[..., 1] * down, axis=0), out)


def with_sinks(sums: Sums, sinks: jax.Array | None) -> Sums:
    """Add the sinks `[H]`, if there are any, to the sums over all cells."""
    if sinks is None:
        return sums
    lists, groups, queries = sums.total.shape
    heads = sinks.astype(sums.total.dtype).reshape(1, groups, -1, 1)
    logits = jnp.broadcast_to(heads, (lists, groups, heads.shape[2], queries // heads.shape[2]))
    logits = logits.reshape(sums.total.shape)
    return joined(sums, Sums(logits, jnp.ones_like(logits), jnp.zeros_like(sums.out)))


def closed(sums: Sums) -> jax.Array:
    """Divides; zeros where nothing is seen. `[P, K, X, Dv]`."""
    return sums.out / jnp.where(sums.total == 0.0, 1.0, sums.total)[..., None]


def packed(q: jax.Array, groups: int) -> jax.Array:
    """Lay queries out as one product with each key head; `[P, T, H, D]` to `[P, K, G * T, D]`."""
    lists, tokens, _, size = q.shape
    return (
        q.reshape(lists, tokens, groups, -1, size)
        .transpose(0, 2, 3, 1, 4)
        .reshape(lists, groups, -1, size)
    )


def by_groups(x: jax.Array, groups: int) -> jax.Array:
    """Give the heads of a key a dimension; `[P, H or 1, T, C]` to `[P, K or 1, G or 1, T, C]`."""
    lists, heads, *pairs = x.shape
    return x.reshape(lists, min(heads, groups), -1, *pairs)


def unpacked(out: jax.Array, tokens: int) -> jax.Array:
    """Undo `packed`; `[P, K, G * T, Dv]` to `[P, T, H, Dv]`."""
    lists, groups, _, size = out.shape
    out = out.reshape(lists, groups, -1, tokens, size).transpose(0, 3, 1, 2, 4)
    return out.reshape(lists, tokens, -1, size)
