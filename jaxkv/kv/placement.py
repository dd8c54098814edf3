"""Order in which the open cells of a stream are taken; another policy is a subclass of `Placement`.

A cell is open if a token may get it: free cells, and with a window also evictable cells. The rank
of a cell is its index in the order in which cells are taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import FILL, search_sorted
from jaxkv.core.constants import END

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, Num, Shaped, UInt32

    from jaxkv.ubatch import Ubatch

TILE = 64
"""Largest number of cells in a tile."""


def tile_size(cells: int) -> int:
    """Return the number of cells in a tile: a divisor of `cells`, at most 64.

    >>> [tile_size(cells) for cells in (4096, 96, 100, 12, 5)]
    [64, 16, 4, 2, 1]
    """
    # A stream has at least four tiles, unless tiles have one cell, so that several sequences can
    # get tiles.
    size = gcd(TILE, cells)
    while size > 1 and 4 * size > cells:
        size //= 2
    return size


class StreamCells(NamedTuple):
    """Cells of a stream, see `Placement.sort_keys`. Several streams add an axis to each array."""

    owners: UInt32[Array, "W N"]
    free: Bool[Array, " N"]
    evictable: Bool[Array, " N"] | None
    position: Int32[Array, " N"]

    @property
    def open(self) -> Bool[Array, " N"]:
        """True for each cell that a token may get."""
        return self.free if self.evictable is None else self.free | self.evictable


class RankedCells(NamedTuple):
    """Cells of a stream in the order of ranks.

    position: Position of each cell, to evict lower positions first; None if no cell is evictable.
    cell: Index of each cell; None if ranks and indices are equal.
    """

    open: Bool[Array, " N"]
    position: Int32[Array, " N"] | None
    cell: Int32[Array, " N"] | None


@dataclass(frozen=True)
class Placement:
    """Order in which the open cells of a stream are taken, for the option `placement`.

    Free cells are taken in the order of `sort_keys`, then evictable cells, lowest position first.
    A subclass needs only this method: plans, copies, snapshots and defrags follow its order. An
    object is static in the table, so it is hashable, and a program is reused for equal objects.

    stripes: Number of equal runs of cells that are filled evenly.

    Examples:
      >>> class LastFit(Placement):
      ...     def sort_keys(self, stream):
      ...         return -jnp.arange(stream.position.size)
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
      >>> cache = make_cache(spec, cells=4, placement=LastFit())
      >>> plan_step(cache, [7]).ubatch.slots.tolist()
      [[3]]
    """

    stripes: int = field(default=1, init=False, repr=False)

    def sort_keys(self, stream: StreamCells) -> Num[Array, " N"] | None:
        """Return a number for each cell of a stream; cells with lower numbers are taken first.

        Cells with equal numbers are taken in the order of indices. None is the order of indices.
        The argument has these arrays:

        - `owners`, uint32 `[W, N]`: bits of the sequences that own each cell, in words of 32
          sequences of the stream;
        - `position`, int32 `[N]`: position of the token in each cell, -1 for an empty cell;
        - `free`, bool `[N]`: whether a token may get each cell, without an eviction;
        - `evictable`, bool `[N]`: the same with an eviction; None without a window, and in a
          defrag.
        """
        del stream

    @property
    def name(self) -> str:
        """Name in messages, in the repr of a cache and in snapshots."""
        return type(self).__name__

    def __str__(self) -> str:
        return self.name

    def repr_fields(self) -> dict[str, object]:
        """Return what the repr of a cache shows."""
        return {"placement": self.name}

    def snapshot_fields(self) -> dict[str, str | int]:
        """Return the static fields of a snapshot that name the placement."""
        return {"placement": self.name.partition(":")[0], "shards": self.stripes}

    @property
    def cell_multiple(self) -> int:
        """A default number of cells is rounded up to a multiple of this number."""
        return self.stripes

    def check_cells(self, cells: int) -> None:
        """Raise a ValueError if a stream cannot have this number of cells."""
        unit = self.cell_multiple
        if cells % unit:
            raise ValueError(
                f"expected a multiple of {unit} cells for placement={self.name!r}, got {cells}; "
                f"take {-(-cells // unit) * unit}"
            )

    def tile(self, cells: int) -> int | None:
        """Return the number of cells of a tile, or None if sequences do not get separate tiles.

        A defrag moves whole tiles, and attention multiplies few tokens with the keys of a tile.
        """
        del cells

    def fills_evenly(self, devices: int) -> bool:
        """Return whether devices that split a stream get equal shares of a sequence."""
        return self.stripes % devices == 0

    def order(self, stream: StreamCells) -> Int32[Array, " N"] | None:
        """Return the cells in the order of ranks; None for the order of indices.

        Raises:
          ValueError: If `sort_keys` does not return one number for each cell.
        """
        keys = self.sort_keys(stream)
        if keys is None:
            return None
        if jnp.shape(keys) != stream.position.shape:
            raise ValueError(
                f"expected one sort key for each of {stream.position.size} cells from {self.name}, "
                f"got the shape {jnp.shape(keys)}; return an array [N] from sort_keys"
            )
        return jnp.argsort(keys, stable=True).astype(jnp.int32)

    def sort(self, x: Shaped[Array, " N"], order: Int32[Array, " N"] | None) -> Shaped[Array, " N"]:
        """Return an array over the cells of a stream in the order of ranks."""
        return x if order is None else x[order]

    def rank_cells(self, stream: StreamCells) -> RankedCells:
        """Return the cells of a stream in the order of ranks."""
        order = self.order(stream)
        position = None if stream.evictable is None else self.sort(stream.position, order)
        return RankedCells(self.sort(stream.open, order), position, order)

    def choose_slots(
        self, streams: StreamCells, ubatch: Ubatch, all_streams: bool
    ) -> Int32[Array, "R T"]:
        """Choose a slot for each token of a ubatch; a slot past the last cell for no cell.

        If `all_streams`, the rows of each stream are neighbours, with the rows of lower streams
        first.
        """
        ranked, valid = jax.vmap(self.rank_cells)(streams), ubatch.valid
        lists = len(streams.position) if all_streams else len(valid)
        # With one token for each stream, a minimum replaces the cumulative sums and searches below.
        if all_streams and valid.size == lists:
            return jax.vmap(choose_first)(ranked).reshape(valid.shape)
        # Padding repeats the number of an earlier token. The caller replaces the slots of padding.
        ordinal = jnp.cumsum(valid.reshape(lists, -1), axis=1, dtype=jnp.int32)
        if not all_streams:
            # Each row is a list. In a stream, the tokens of a lower sequence take cells first, so
            # the numbers of a row begin after the tokens of all rows of lower sequences.
            stream = ubatch.row_stream
            ranked = jax.tree.map(lambda x: x[stream], ranked)
            if ubatch.spec.sequences_per_stream > 1:
                is_later = ubatch.row_sequence[:, None] > ubatch.row_sequence[None]  # [R, R]
                is_later &= stream[:, None] == stream[None]
                before = jnp.where(is_later, ordinal[None, :, -1], 0)
                ordinal += jnp.sum(before, axis=1, dtype=jnp.int32)[:, None]
        return jax.vmap(choose_in_stream)(ranked, ordinal).reshape(valid.shape)

    def find_moves(
        self, stream: StreamCells
    ) -> tuple[Int32[Array, " N"] | None, Bool[Array, " N"], Bool[Array, " N"]]:
        """Return the order of a defrag, which cells leave, and which gaps their tokens enter.

        Both masks are in the order of ranks: the n-th cell that leaves moves to the n-th gap.
        """
        order = self.order(stream)
        is_used = self.sort(~stream.free, order)
        # With U used cells, as many used cells have a rank of U or more as empty cells have a rank
        # below U. The n-th of each kind form a move, so no used cell remains outside of the first U
        # ranks.
        rank, used = jnp.arange(is_used.size), jnp.sum(is_used)
        return order, is_used & (rank >= used), ~is_used & (rank < used)


@dataclass(frozen=True)
class FirstFit(Placement):
    """Cells are taken in the order of indices: the placement "any"."""

    @property
    def name(self) -> str:
        """The name "any"."""
        return "any"

    def repr_fields(self) -> dict[str, object]:
        """Return nothing: the repr of a cache shows other placements only."""
        return {}


@dataclass(frozen=True)
class Striped(Placement):
    """A tile of each of n stripes is taken in rotation: the placement "striped:n"."""

    stripes: int = 1

    @property
    def name(self) -> str:
        """The name "striped:n"."""
        return f"striped:{self.stripes}"

    def order(self, stream: StreamCells) -> Int32[Array, " N"]:
        """Return the cells in the order of ranks."""
        return self.sort(jnp.arange(stream.free.size, dtype=jnp.int32))

    def sort(
        self, x: Shaped[Array, " N"], order: Int32[Array, " N"] | None = None
    ) -> Shaped[Array, " N"]:
        """Return an array over the cells of a stream in the order of ranks."""
        # In the order of indices, the axes are stripe, tile of the stripe, and cell of the tile. In
        # the order of ranks, stripe and tile are exchanged. This is faster than reads by index.
        tiles = x.reshape(self.stripes, -1, tile_size(x.size // self.stripes))
        return tiles.swapaxes(0, 1).reshape(x.shape)


def cells_at_ranks(
    rank: Int32[Array, "*n"], order: Int32[Array, " N"] | None
) -> Int32[Array, "*n"]:
    """Return the indices of the cells at given ranks; N for ranks past the last cell."""
    return rank if order is None else order.at[rank].get(**FILL, fill_value=order.size)


def choose_first(ranked: RankedCells) -> Int32[Array, ""]:
    """Return the slot of the only token of a stream; N if no cell is open."""
    is_open, size = ranked.open, ranked.open.size
    if ranked.position is not None:
        # An empty cell has position -1, so evictable cells count only if no cell is empty.
        is_open &= ranked.position == jnp.min(jnp.where(is_open, ranked.position, END))
    rank = jnp.min(jnp.where(is_open, jnp.arange(size, dtype=jnp.int32), size))
    return cells_at_ranks(rank, ranked.cell)


def choose_in_stream(ranked: RankedCells, ordinal: Int32[Array, " T"]) -> Int32[Array, " T"]:
    """Return the slot of each token in a stream; N for no cell.

    Tokens are numbered from 1 in the order in which they take cells.
    """
    count = jnp.cumsum(ranked.open, dtype=jnp.int32)  # inclusive
    if ranked.position is None:
        # Token n takes the first cell at which `count` is n.
        return cells_at_ranks(search_sorted(count, ordinal), ranked.cell)
    # Empty cells come first, because they have position -1. The added rank N is for no cell.
    size = ranked.open.size
    by_position = jnp.argsort(jnp.where(ranked.open, ranked.position, END), stable=True)
    by_position = jnp.append(by_position.astype(jnp.int32), jnp.int32(size))
    rank = by_position[jnp.where(ordinal <= count[-1], ordinal - 1, size)]
    return cells_at_ranks(rank, ranked.cell)
