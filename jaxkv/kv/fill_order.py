"""In which order the cells of a stream are taken: by their numbers, or in stripes.

On a mesh that splits cells, each device holds a share of neighbours. Taken by their numbers, those
of a short text would lie on the first device alone. In stripes, shares are taken from in turn, a
few neighbours at a time: at most 64, and a power of two that divides the share. The cell that is
taken first has rank 0.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxkv.core.array_utils import divmod_nonnegative

if TYPE_CHECKING:
    from jaxtyping import Array, Int32, Shaped

STRIPE = 64
"""The most neighbouring cells that are taken before those of the next share."""


def to_fill_order(x: Shaped[Array, "... N"], shards: int) -> Shaped[Array, "... N"]:
    """Bring what there is for each cell into the order in which cells are taken.

    >>> to_fill_order(jnp.arange(16), 2)
    Array([ 0,  1,  8,  9,  2,  3, 10, 11,  4,  5, 12, 13,  6,  7, 14, 15],      dtype=int32)
    """
    stripe, turns = _stripe_sizes(x.shape[-1], shards)
    rest = x.shape[:-1]
    return x.reshape(*rest, shards, turns, stripe).swapaxes(-3, -2).reshape(x.shape)


def cells_at_ranks(rank: Int32[Array, "*n"], cells: int, shards: int) -> Int32[Array, "*n"]:
    """Return the cells of ranks; one past the last of N `cells` stays past it.

    >>> cells_at_ranks(jnp.array([2, 4, 15, 16]), 16, 2)
    Array([ 8,  2, 15, 16], dtype=int32)
    """
    if shards == 1:
        return rank
    stripe, turns = _stripe_sizes(cells, shards)
    block, inside = divmod_nonnegative(rank, stripe)
    turn, shard = divmod_nonnegative(block, shards)
    return jnp.where(rank < cells, (shard * turns + turn) * stripe + inside, rank)


def _stripe_sizes(cells: int, shards: int) -> tuple[int, int]:
    """Return the cells of a stripe, and how many stripes each share has.

    A stripe is smaller where a share has no multiple of it, or fewer than four.
    """
    share = cells // shards
    stripe = gcd(STRIPE, share)
    while stripe > 1 and 4 * stripe > share:
        stripe //= 2
    return stripe, share // stripe
