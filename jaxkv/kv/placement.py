"""Order in which the empty cells of a stream are taken: by index, or in stripes.

Striped placement divides a stream into n stripes, and takes a tile of each stripe in rotation. The
rank of a cell is its index in the order in which cells are taken.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from jaxkv.core.array_utils import divmod_nonnegative

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, Shaped, UInt32


TILE = 64
"""Largest number of cells in a tile."""


def tile_size(cells: int) -> int:
    """Return the number of cells in a tile: a divisor of `cells`, at most 64.

    >>> [tile_size(cells) for cells in (4096, 96, 100, 12, 5)]
    [64, 16, 4, 2, 1]
    """
    size = gcd(TILE, cells)
    while size > 1 and 4 * size > cells:
        size //= 2
    return size


class StreamCells(NamedTuple):
    """Cells of a stream."""

    owners: UInt32[Array, "W N"]
    free: Bool[Array, " N"]
    evictable: Bool[Array, " N"] | None
    position: Int32[Array, " N"]


def to_fill_order(x: Shaped[Array, "... N"], shards: int) -> Shaped[Array, "... N"]:
    """Reorder an array over cells from the order of indices to the order of ranks."""
    if shards == 1:
        return x
    # In the order of indices, the axes are stripe, tile of the stripe, and cell of the tile. In the
    # order of ranks, stripe and tile are exchanged.
    size = tile_size(x.shape[-1] // shards)
    return x.reshape(*x.shape[:-1], shards, -1, size).swapaxes(-3, -2).reshape(x.shape)


def cells_at_ranks(rank: Int32[Array, "*n"], cells: int, shards: int) -> Int32[Array, "*n"]:
    """Return the indices of the cells at given ranks; return ranks past the last cell unchanged."""
    if shards == 1:
        return rank
    stripe_size = cells // shards
    size = tile_size(stripe_size)
    number, offset = divmod_nonnegative(rank, size)
    tile, stripe = divmod_nonnegative(number, shards)
    return jnp.where(rank < cells, stripe * stripe_size + tile * size + offset, rank)
