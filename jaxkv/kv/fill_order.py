"""Order in which the empty cells of a stream are taken: by index, or in stripes.

Striped placement divides a stream into n stripes, and takes a tile of each stripe in rotation. The
rank of a cell is its index in the order in which cells are taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxkv.core.array_utils import divmod_nonnegative
from jaxkv.kv.tiles import tile_size

if TYPE_CHECKING:
    from jaxtyping import Array, Int32, Shaped


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
