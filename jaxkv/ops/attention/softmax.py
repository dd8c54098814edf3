"""A softmax before its division: over some cells, so that it can be joined with others."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

LOWEST = float(jnp.finfo(jnp.float32).min)
"""The logit of a hidden row; finite, so that a token that sees nothing needs no care on the way."""


class Sums(NamedTuple):
    """A softmax over some rows before its division, so that it can be joined with others.

    highest: `[R, K, X]`, the highest logit; what is finite and low where nothing is seen.
    total: `[R, K, X]`, the sum of exp(logit - highest).
    out: `[R, K, X, Dv]`, the values, each times its exp(logit - highest), added up.
    """

    highest: jax.Array
    total: jax.Array
    out: jax.Array


def sinks_alone(sinks: jax.Array, like: Sums) -> Sums:
    """Make what `[H]` sinks add: a logit for each head that takes its share and gives nothing."""
    rows, groups, queries = like.total.shape
    heads = sinks.astype(jnp.float32).reshape(1, groups, -1, 1)
    tokens = queries // heads.shape[2]
    logits = jnp.broadcast_to(heads, (rows, groups, heads.shape[2], tokens))
    logits = logits.reshape(like.total.shape)
    return Sums(logits, jnp.ones_like(like.total), jnp.zeros_like(like.out))


def joined(a: Sums, b: Sums) -> Sums:
    """Make one softmax over the rows of two."""
    highest = jax.lax.stop_gradient(jnp.maximum(a.highest, b.highest))
    x, y = jnp.exp(a.highest - highest), jnp.exp(b.highest - highest)
    return Sums(highest, a.total * x + b.total * y, a.out * x[..., None] + b.out * y[..., None])


def closed(sums: Sums) -> jax.Array:
    """Divide; zeros where nothing is seen. `[R, K, X, Dv]`."""
    return sums.out / jnp.where(sums.total == 0.0, 1.0, sums.total)[..., None]


def packed(q: jax.Array, groups: int) -> jax.Array:
    """Lay queries out as one product with each key head; `[R, T, H, D]` to `[R, K, G * T, D]`.

    The G query heads of a key head are G rows of one matrix product, so that a key is read once.
    """
    rows, tokens, _, size = q.shape
    return (
        q.reshape(rows, tokens, groups, -1, size)
        .transpose(0, 2, 3, 1, 4)
        .reshape(rows, groups, -1, size)
    )


def unpacked(out: jax.Array, tokens: int, heads: int) -> jax.Array:
    """Undo `packed`; `[R, K, G * T, Dv]` to `[R, T, H, Dv]`."""
    rows, groups, _, size = out.shape
    out = out.reshape(rows, groups, -1, tokens, size).transpose(0, 3, 1, 2, 4)
    return out.reshape(rows, tokens, heads, size)


def cap(logits: jax.Array, softcap: float | None) -> jax.Array:
    """Keep logits below a bound, smoothly, if there is one."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
