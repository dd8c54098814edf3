"""Positions and owners of the cells of a cache, as NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxkv.cache import Cache, split
from jaxkv.core.array_utils import is_traced, to_host
from jaxkv.core.constants import EMPTY
from jaxkv.hybrid import HybridTable
from jaxkv.jit_helpers import check_concrete_cache
from jaxkv.kv.cells import WORD, Cells
from jaxkv.recurrent.states import States

if TYPE_CHECKING:
    from jaxtyping import Int32, UInt32

    from jaxkv.table import CacheTable


@dataclass(frozen=True, kw_only=True, eq=False)
class CellView:
    """Positions, owners and shifts of all cells, as NumPy arrays that later edits do not change.

    position: position of the token in each cell; for a cell with a recurrent state, position of the
      state's last token; -1 for an empty cell.
    words: owners of each cell; bit b of word w is sequence 32 * w + b of the stream.
    shift: pending shift of the key in each cell; 0 for states.
    sequences: number of sequences, Q; sequence q is in stream q // (Q // S).
    """

    position: Int32[np.ndarray, "S N"]
    words: UInt32[np.ndarray, "S W N"]
    shift: Int32[np.ndarray, "S N"]
    sequences: int

    @property
    def sequences_per_stream(self) -> int:
        """Number of sequences in each stream, Q // S."""
        return self.sequences // len(self.position)

    @property
    def owner(self) -> Int32[np.ndarray, "S N"]:
        """Lowest id of the sequences that own each cell; -1 if the cell is empty."""
        found = np.full(self.position.shape, -1, np.int32)
        for i in reversed(range(self.words.shape[1])):
            word = self.words[:, i]
            lowest = np.bitwise_count((word & (~word + np.uint32(1))) - np.uint32(1))
            found = np.where(word, WORD * i + lowest.astype(np.int32), found)
        first = np.arange(len(found), dtype=np.int32)[:, None] * np.int32(self.sequences_per_stream)
        return np.where(found < 0, np.int32(-1), found + first)

    @property
    def num_owners(self) -> Int32[np.ndarray, "S N"]:
        """Number of sequences that own each cell."""
        return np.bitwise_count(self.words).sum(axis=1, dtype=np.int32)

    def sequence_positions(self, seq: int) -> Int32[np.ndarray, " N"]:
        """Return the position of each cell that a sequence owns; -1 for other cells of its stream.

        Raises:
          ValueError: If the sequence does not exist.
        """
        if not 0 <= seq < self.sequences:
            raise ValueError(
                f"expected a sequence from 0 to {self.sequences - 1}, got {seq}; pass an id of "
                "the cache"
            )
        stream, local = divmod(seq, self.sequences_per_stream)
        owns = (self.words[stream, local // WORD] >> np.uint32(local % WORD)) & np.uint32(1)
        return np.where(owns, self.position[stream], np.int32(EMPTY))


def view_cells(cache: Cache) -> CellView:
    """Return the positions, owners and pending shifts of all cells of a cache.

    Args:
      cache: cache that is not hybrid, such as one of the `parts` of a hybrid cache. If the cache is
        split over processes, every process must call `Cache.cells`.

    Returns:
      A `CellView` of NumPy arrays `[S, N]` int32: `position`, `owner`, `num_owners` and `shift`.
      `owner` is the lowest id of a cell's owners. For an empty cell, `position` and `owner` are -1.

    Raises:
      TypeError: If the cache is hybrid or traced, or has shapes instead of arrays.
      ValueError: If the cache was donated, or is a batch of caches made by `vmap`.

    Examples:
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
      >>> cache = make_cache(spec, cells=5, sequences=3)
      >>> cache = prefill(forward, params, cache, [[1, 2], [3]]).cache
      >>> view = seq_cp(cache, 0, 2).cache.cells()
      >>> view.position.tolist(), view.owner.tolist(), view.num_owners.tolist()
      ([[0, 1, 0, -1, -1]], [[0, 0, 1, -1, -1]], [[2, 2, 1, 0, 0]])
      >>> view.sequence_positions(2).tolist()
      [0, 1, -1, -1, -1]
    """
    return make_cell_view(fetch_table(cache))


def fetch_table(cache: Cache) -> CacheTable:
    """Return the table of a cache as NumPy arrays; raise if the table has no concrete values."""
    table, _ = split(cache)
    if is_traced(table):
        raise TypeError(
            "expected a concrete cache, got a traced one; draw it outside of jit, or "
            "by jax.debug.callback"
        )
    check_concrete_cache(table)
    return to_host(table)


def part_names(table: CacheTable) -> list[str]:
    """Return a title for each part of a hybrid table; an empty list for other tables."""
    if not isinstance(table, HybridTable):
        return []
    return [
        f"part {i}, layers {', '.join(map(str, layers))}" for i, layers in enumerate(table.layers)
    ]


def make_cell_view(table: CacheTable) -> CellView:
    """Return the `CellView` of a table with NumPy arrays; raise a TypeError for a hybrid table."""
    match table:
        case Cells():
            arrays = {
                "position": np.asarray(table.position),
                "words": np.asarray(table.owners),
                "shift": np.asarray(table.shift),
            }
        case States():
            arrays = _arrays_of_states(table)
        case HybridTable():
            raise TypeError(
                "expected a cache of one kind, got a hybrid one; look at each of cache.parts"
            )
        case _:
            raise TypeError(
                f"expected a cache of cells or of states, got {type(table).__name__}; pass a "
                "cache of make_cache"
            )
    return CellView(**arrays, sequences=table.sequences)


def _arrays_of_states(states: States) -> dict[str, np.ndarray]:
    cells = (states.streams, states.num_cells)
    position = np.full(cells, EMPTY, np.int32)
    words = np.zeros(
        (states.streams, -(-states.sequences_per_stream // WORD), states.num_cells), np.uint32
    )
    for seq, pair in np.argwhere(states.position != EMPTY):
        stream, local = divmod(int(seq), states.sequences_per_stream)
        cell = states.cell[seq, pair]
        position[stream, cell] = states.position[seq, pair]
        words[stream, local // WORD, cell] |= np.uint32(1 << local % WORD)
    return {"position": position, "words": words, "shift": np.zeros(cells, np.int32)}
