"""Order in which the empty cells of a stream are taken: by index, or in stripes.

Striped placement takes a stripe of at most 64 contiguous cells from each device in rotation. The
rank of a cell is its index in the order in which cells are taken.
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
    """Reorder an array over cells from the order of indices to the order of ranks."""
    stripe, rounds = _stripe_sizes(x.shape[-1], shards)
    rest = x.shape[:-1]
    return x.reshape(*rest, shards, rounds, stripe).swapaxes(-3, -2).reshape(x.shape)


def cells_at_ranks(rank: Int32[Array, "*n"], cells: int, shards: int) -> Int32[Array, "*n"]:
    """Return the indices of the cells at given ranks; return ranks past the last cell unchanged."""
    if shards == 1:
        return rank
    stripe, rounds = _stripe_sizes(cells, shards)
    block, inside = divmod_nonnegative(rank, stripe)
    round_, shard = divmod_nonnegative(block, shards)
    return jnp.where(rank < cells, (shard * rounds + round_) * stripe + inside, rank)


def _stripe_sizes(cells: int, shards: int) -> tuple[int, int]:
    """Return the number of cells of a stripe, and the number of stripes on a device."""
    share = cells // shards
    stripe = gcd(STRIPE, share)
    while stripe > 1 and 4 * stripe > share:
        stripe //= 2
    return stripe, share // stripe
