"""Tiles: runs of cells; sequences get separate tiles while the stream has empty tiles.

In this module, a stream has M tiles and U sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import DROP, FILL, divmod_nonnegative, indices_of_true, search_sorted
from jaxkv.core.constants import END, WORD
from jaxkv.kv.placement import TILE, Placement, StreamCells, tile_size
from jaxkv.ubatch import Ubatch

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32


@dataclass(frozen=True)
class Tiled(Placement):
    """A sequence gets whole empty tiles, while there are any: the placement "tiled"."""

    @property
    def name(self) -> str:
        """The name "tiled"."""
        return "tiled"

    @property
    def cell_multiple(self) -> int:
        """64, the size of a tile in a large stream."""
        return TILE

    def check_cells(self, cells: int) -> None:
        """Raise a ValueError if `cells` is 256 or more and not a multiple of 64."""
        # Tiles of a few cells would make a step use several times the memory of a layer's keys.
        if cells >= 4 * TILE:
            super().check_cells(cells)

    def tile(self, cells: int) -> int:
        """Return `tile_size(cells)`."""
        return tile_size(cells)

    def order(self, stream: StreamCells) -> Int32[Array, " N"]:
        """Return the order of copies and snapshots: first tiles in which every cell is open."""
        size = stream.free.size
        cells = jnp.arange(size, dtype=jnp.int32).reshape(-1, tile_size(size))
        whole = jnp.all(stream.open.reshape(cells.shape), axis=1)
        return cells[jnp.argsort(~whole, stable=True)].reshape(-1)

    def choose_slots(
        self, streams: StreamCells, ubatch: Ubatch, all_streams: bool
    ) -> Int32[Array, "R T"]:
        """Choose slots for a ubatch with `choose_for_list`; a token without a cell gets slot N."""
        count, valid = ubatch.spec.sequences_per_stream, ubatch.valid
        _, sequences = divmod_nonnegative(ubatch.sequences, count)
        if all_streams:
            sequences, valid = (x.reshape(len(streams.position), -1) for x in (sequences, valid))
        else:
            # The list of a row has all tokens of the row's stream, because they share its free
            # cells. Only the slots of the row's own tokens are read. Axes of `valid`: list, row,
            # token.
            same_stream = ubatch.row_stream[:, None] == ubatch.row_stream[None]
            streams = jax.tree.map(lambda x: x[ubatch.row_stream], streams)
            valid = (same_stream[..., None] & valid[None]).reshape(len(valid), -1)
            sequences = jnp.broadcast_to(sequences.reshape(1, -1), valid.shape)
        # The result is [list, token]. If each row is a list, list r has the tokens of all rows, and
        # only the diagonal of the axes [list, row, token] is used.
        slots = jax.vmap(partial(choose_for_list, count=count))(streams, sequences, valid)
        if not all_streams:
            rows = jnp.arange(len(slots))
            slots = slots.reshape(len(slots), *ubatch.valid.shape)[rows, rows]
        return slots.reshape(ubatch.valid.shape)

    def find_moves(self, stream: StreamCells) -> tuple[None, Bool[Array, " N"], Bool[Array, " N"]]:
        """Return moves of whole tiles, in the order of indices."""
        cells = (~stream.free).reshape(-1, tile_size(stream.free.size))  # [M, cells of a tile]
        has_used, rank = jnp.any(cells, axis=1), jnp.arange(len(cells))
        # As many used tiles have a rank of `used` or more as unused tiles have a rank below `used`.
        used = jnp.sum(has_used)
        leaving, gaps = has_used & (rank >= used), ~has_used & (rank < used)
        # The n-th used tile that leaves moves to the n-th gap, with its empty cells.
        leaves = cells.at[indices_of_true(leaving, rank.size)].get(**FILL, fill_value=False)
        enter = jnp.zeros_like(cells).at[indices_of_true(gaps, rank.size)].set(leaves, **DROP)
        return None, (cells & leaving[:, None]).reshape(-1), enter.reshape(-1)


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
    # Tokens are in the order of sequences, padding last. `rank` counts the tokens of one sequence.
    sequence = jnp.where(valid, sequences, count)
    order = jnp.argsort(sequence, stable=True)
    sequence, is_valid = sequence[order], valid[order]
    # In the sorted list, `search_sorted` returns the index of the first token of each sequence.
    rank = jnp.arange(sequence.size, dtype=jnp.int32) - search_sorted(sequence, sequence)
    demand = jnp.zeros(count, jnp.int32).at[sequence].add(1, **DROP)

    is_free = pool.free.reshape(-1, size)  # [M, cells of a tile]
    num_empty = jnp.sum(is_free, axis=1, dtype=jnp.int32)
    is_tile_empty, owner = num_empty == size, _sole_owner(pool.owners, size, count)
    # A sequence that lacks cells in its tiles gets ceil(lack / size) empty tiles. The n-th empty
    # tile goes to the first sequence up to which at least n empty tiles are given.
    lack = jnp.maximum(demand - jnp.zeros_like(demand).at[owner].add(num_empty, **DROP), 0)
    given = jnp.cumsum(divmod_nonnegative(lack + (size - 1), size)[0], dtype=jnp.int32)
    next_owner = search_sorted(given, jnp.cumsum(is_tile_empty, dtype=jnp.int32))
    owner = jnp.where(is_tile_empty, next_owner, owner)  # U or more if a tile has no owner
    room = jnp.zeros_like(demand).at[owner].add(num_empty, **DROP)

    # Tiles in the order of sequences; used tiles of a sequence come before its empty tiles.
    by_owner = jnp.argsort(2 * owner + is_tile_empty, stable=True).astype(jnp.int32)
    # In this order, the empty cells of a sequence are contiguous and begin at `start`. Tiles
    # without an owner come last, because their `owner` is U or more.
    start = _get_or_zero(jnp.cumsum(room, dtype=jnp.int32) - room, sequence)
    is_own = is_valid & (rank < _get_or_zero(room, sequence))
    tile, number = _locate_nth(num_empty[by_owner], start + rank)
    tile = jnp.where(is_own, _get_or_zero(by_owner, tile), num_empty.size)
    num_empty -= jnp.zeros_like(num_empty).at[tile].add(1, **DROP)
    # The other tokens, numbered from 0, take the remaining cells of all tiles. These follow the
    # `num_taken` lowest empty cells of their tile.
    other = jnp.cumsum(is_valid & ~is_own, dtype=jnp.int32) - 1
    other_tile, number_in_rest = _locate_nth(num_empty, other)
    num_taken = jnp.sum(is_free, axis=1, dtype=jnp.int32) - num_empty
    number = jnp.where(is_own, number, _get_or_zero(num_taken, other_tile) + number_in_rest)
    tile = jnp.where(is_own, tile, other_tile)

    # Empty cell n of a tile is the first one up to which the tile has more than n empty cells.
    num_up_to = jnp.cumsum(is_free.at[tile].get(**FILL, fill_value=False), axis=1)
    cell = tile * size + jnp.argmax(num_up_to > number[:, None], axis=1).astype(jnp.int32)
    if pool.evictable is not None:
        by_position = jnp.argsort(jnp.where(pool.evictable, pool.position, END), stable=True)
        # Tokens for which no empty cell remains are numbered from 0 by `nth`. `_locate_nth`
        # returned tile M for them.
        nth = other - jnp.sum(num_empty, dtype=jnp.int32)
        evicted = jnp.where(nth < jnp.sum(pool.evictable), _get_or_zero(by_position, nth), cells)
        cell = jnp.where(tile == num_empty.size, evicted.astype(jnp.int32), cell)
    cell = jnp.where(is_valid, cell, cells)
    return jnp.zeros_like(cell).at[order].set(cell, unique_indices=True)


def _get_or_zero(x: jax.Array, index: jax.Array) -> jax.Array:
    return x.at[index].get(**FILL, fill_value=0)


def _sole_owner(owners: jax.Array, size: int, count: int) -> jax.Array:
    """Return the only owner of each tile, `[M]`; U or more for no owner or several owners."""
    # A tile has one owner if one bit is set in the union of its cells' owner words. `clz` is
    # 31 - bit for the word of this bit, and 32 for the other words; the remainder of 32 is 0.
    words = owners.reshape(owners.shape[0], -1, size)
    words = jax.lax.reduce(words, jnp.uint32(0), jax.lax.bitwise_or, (2,))  # [W, M]
    is_sole = jnp.sum(jax.lax.population_count(words), axis=0) == 1
    word = jnp.argmax(words != 0, axis=0).astype(jnp.int32)
    bit = (WORD - 1) - jnp.max(jax.lax.clz(words).astype(jnp.int32) % WORD, axis=0)
    return jnp.where(is_sole, word * WORD + bit, count)


def _locate_nth(counts: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the tile of empty cell n, and the index of cell n among the empty cells of the tile.

    Tile i has `counts[i]` empty cells. If there are at most n empty cells, the tile is M.
    """
    # The tile is the first one for which `ends` exceeds n. Its index is the number of tiles for
    # which `ends` is at most n, because `ends` never decreases.
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    group = search_sorted(ends, n + 1)
    return group, n - _get_or_zero(ends - counts, group)
