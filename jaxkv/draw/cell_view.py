"""Positions and owners of the cells of a cache, as NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxkv.core.constants import EMPTY, WORD

if TYPE_CHECKING:
    from jaxtyping import Int32, UInt32


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
        owner = np.full(self.position.shape, -1, np.int32)
        for i in reversed(range(self.words.shape[1])):
            word = self.words[:, i]
            lowest = np.bitwise_count((word & (~word + np.uint32(1))) - np.uint32(1))
            owner = np.where(word, WORD * i + lowest.astype(np.int32), owner)
        first = np.arange(len(owner), dtype=np.int32)[:, None] * np.int32(self.sequences_per_stream)
        return np.where(owner < 0, np.int32(-1), owner + first)

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
