"""Tiles: runs of cells; sequences get separate tiles while the stream has empty tiles.

In this module, a stream has M tiles and U sequences.
"""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.batch import Ubatch
from jaxkv.core.array_utils import DROP, FILL, divmod_nonnegative, search_sorted
from jaxkv.core.constants import END
from jaxkv.kv.cells import WORD, Cells, is_cell_empty, locate_owner_bit
from jaxkv.kv.eviction import is_evictable

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, UInt32

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


def check_tile_multiple(cells: int) -> None:
    """Raise a ValueError if `cells` is 256 or more and not a multiple of 64.

    Tiles of a few cells would make a decode step use several times the memory of a layer's keys.
    """
    if cells >= 4 * TILE and cells % TILE:
        raise ValueError(
            f"expected a number of cells that tiles of {TILE} divide, got {cells}; take "
            f"{-(-cells // TILE) * TILE}"
        )


def order_open_tiles_first(open_cells: Bool[Array, " N"]) -> Int32[Array, " N"]:
    """Return all cell indices of a stream; tiles in which every cell is open come first.

    >>> order_open_tiles_first(jnp.array([True, False, False, True, True, True, True, True]))
    Array([4, 5, 6, 7, 0, 1, 2, 3], dtype=int32)
    """
    size = open_cells.size
    cells = jnp.arange(size, dtype=jnp.int32).reshape(-1, tile_size(size))
    whole = jnp.all(open_cells.reshape(cells.shape), axis=1)
    return cells[jnp.argsort(~whole, stable=True)].reshape(-1)


def choose_in_tiles(cells: Cells, ubatch: Ubatch, all_streams: bool) -> Int32[Array, "R T"]:
    """Choose slots for a ubatch with `choose_for_list`; a token without a cell gets the slot N."""
    unseen = None if cells.window is None else is_evictable(cells)
    pool = StreamCells(cells.owners, is_cell_empty(cells), unseen, cells.position)
    _, word, bit = locate_owner_bit(cells, ubatch.sequences)
    sequences, valid = word * WORD + bit.astype(jnp.int32), ubatch.valid
    if all_streams:
        sequences, valid = (x.reshape(cells.streams, -1) for x in (sequences, valid))
    else:  # each row is a list with all tokens of the row's stream
        beside = ubatch.row_stream[:, None] == ubatch.row_stream[None]
        pool = jax.tree.map(lambda x: x[ubatch.row_stream], pool)
        valid = (beside[..., None] & valid[None]).reshape(len(valid), -1)
        sequences = jnp.broadcast_to(sequences.reshape(1, -1), valid.shape)
    slots = jax.vmap(partial(choose_for_list, count=cells.sequences_per_stream))(
        pool, sequences, valid
    )
    if not all_streams:
        rows = jnp.arange(len(slots))
        slots = slots.reshape(len(slots), *ubatch.valid.shape)[rows, rows]
    return slots.reshape(ubatch.valid.shape)


class StreamCells(NamedTuple):
    """Cells of a stream."""

    owners: UInt32[Array, "W N"]
    free: Bool[Array, " N"]
    evictable: Bool[Array, " N"] | None
    position: Int32[Array, " N"]


def choose_for_list(
    pool: StreamCells, sequences: Int32[Array, " T"], valid: Bool[Array, " T"], count: int
) -> Int32[Array, " T"]:
    """Choose a slot for each token, lowest sequence id first; N for a token without a cell.

    Cells are taken in this order: empty cells in tiles that only the token's sequence uses; cells
    of empty tiles that are assigned to the sequence; other empty cells; evictable cells. Empty
    cells are taken in the order of indices, and evictable cells in the order of positions. Empty
    tiles, lowest first, are assigned to sequences in the order of sequence ids.
    """
    cells, size = pool.free.size, tile_size(pool.free.size)
    in_turn = jnp.argsort(jnp.where(valid, sequences, count), stable=True)
    sequence, is_valid = jnp.where(valid, sequences, count)[in_turn], valid[in_turn]
    first = search_sorted(sequence, sequence)
    turn = jnp.arange(sequence.size, dtype=jnp.int32) - first  # among the tokens of its sequence
    demand = jnp.zeros(count, jnp.int32).at[sequence].add(1, **DROP)

    flags = pool.free.reshape(-1, size)
    num_empty = jnp.sum(flags, axis=1, dtype=jnp.int32)  # in each tile
    empty, owner = num_empty == size, _sole_owner(pool.owners, size, count)
    short = jnp.maximum(demand - jnp.zeros_like(demand).at[owner].add(num_empty, **DROP), 0)
    heirs = jnp.cumsum(divmod_nonnegative(short + (size - 1), size)[0], dtype=jnp.int32)
    heir = search_sorted(heirs, jnp.cumsum(empty, dtype=jnp.int32))
    owner = jnp.where(empty, heir, owner)  # U or more if a tile has no owner
    room = jnp.zeros_like(demand).at[owner].add(num_empty, **DROP)

    # Tiles in the order of sequences; used tiles of a sequence come before its empty tiles.
    by_owner = jnp.argsort(2 * owner + empty, stable=True).astype(jnp.int32)
    start = _get_or_zero(jnp.cumsum(room, dtype=jnp.int32) - room, sequence)
    is_own = is_valid & (turn < _get_or_zero(room, sequence))
    tile, number = _locate_nth(num_empty[by_owner], start + turn)
    tile = jnp.where(is_own, _get_or_zero(by_owner, tile), num_empty.size)
    num_empty -= jnp.zeros_like(num_empty).at[tile].add(1, **DROP)
    further = jnp.cumsum(is_valid & ~is_own, dtype=jnp.int32) - 1
    other_tile, beyond = _locate_nth(num_empty, further)
    # The lowest empty cells of each tile are used first, so the remaining cells follow them.
    total = jnp.sum(flags, axis=1, dtype=jnp.int32)
    number = jnp.where(is_own, number, _get_or_zero(total - num_empty, other_tile) + beyond)
    tile = jnp.where(is_own, tile, other_tile)

    before = jnp.cumsum(flags.at[tile].get(**FILL, fill_value=False), axis=1)
    cell = tile * size + jnp.argmax(before > number[:, None], axis=1).astype(jnp.int32)
    if pool.evictable is not None:
        by_position = jnp.argsort(jnp.where(pool.evictable, pool.position, END), stable=True)
        nth = further - jnp.sum(num_empty, dtype=jnp.int32)
        hidden_one = jnp.where(nth < jnp.sum(pool.evictable), _get_or_zero(by_position, nth), cells)
        cell = jnp.where(tile == num_empty.size, hidden_one.astype(jnp.int32), cell)
    cell = jnp.where(is_valid, cell, cells)
    return jnp.zeros_like(cell).at[in_turn].set(cell, unique_indices=True)


def _get_or_zero(x: jax.Array, index: jax.Array) -> jax.Array:
    return x.at[index].get(**FILL, fill_value=0)


def _sole_owner(owners: jax.Array, size: int, count: int) -> jax.Array:
    """Return the only owner of each tile, `[M]`; U or more for no owner or several owners."""
    words = owners.reshape(owners.shape[0], -1, size)
    words = jax.lax.reduce(words, jnp.uint32(0), jax.lax.bitwise_or, (2,))  # [W, M]
    alone = jnp.sum(jax.lax.population_count(words), axis=0) == 1
    word = jnp.argmax(words != 0, axis=0).astype(jnp.int32)
    bit = (WORD - 1) - jnp.max(jax.lax.clz(words).astype(jnp.int32) % WORD, axis=0)
    return jnp.where(alone, word * WORD + bit, count)


def _locate_nth(counts: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the tile of empty cell n, and the index of cell n among the empty cells of the tile.

    Tile i has `counts[i]` empty cells. If there are at most n empty cells, the tile is M.
    """
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    group = search_sorted(ends, n + 1)
    return group, n - _get_or_zero(ends - counts, group)
