"""Order in which the cells of a stream are filled: by number, or in stripes.

If a mesh splits cells, each device stores a contiguous share. Filled by number, a short sequence
would be on the first device only. Stripes alternate between the shares, a few contiguous cells at a
time: at most 64, and a power of two that divides the share. The cell filled first has rank 0.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxkv.core.array_utils import divmod_nonnegative

if TYPE_CHECKING:
    from jaxtyping import Array, Int32, Shaped

STRIPE = 64
"""Largest number of contiguous cells in a stripe."""


def to_fill_order(x: Shaped[Array, "... N"], shards: int) -> Shaped[Array, "... N"]:
    """Reorder an array of cells by rank.

    >>> to_fill_order(jnp.arange(16), 2)
    Array([ 0,  1,  8,  9,  2,  3, 10, 11,  4,  5, 12, 13,  6,  7, 14, 15],      dtype=int32)
    """
    stripe, turns = _stripe_sizes(x.shape[-1], shards)
    rest = x.shape[:-1]
    return x.reshape(*rest, shards, turns, stripe).swapaxes(-3, -2).reshape(x.shape)


def cells_at_ranks(rank: Int32[Array, "*n"], cells: int, shards: int) -> Int32[Array, "*n"]:
    """Return the cells of ranks; a rank of `cells` or more is unchanged.

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
    """Return the number of cells of a stripe, and of stripes in each share.

    A stripe is smaller than 64 if the share is not a multiple of 64 or has fewer than four stripes.
    """
    share = cells // shards
    stripe = gcd(STRIPE, share)
    while stripe > 1 and 4 * stripe > share:
        stripe //= 2
    return stripe, share // stripe
