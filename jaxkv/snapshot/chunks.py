"""Copies of cells between buffers and the CPU, in chunks of equal size.

Equal sizes let one compiled program copy any number of cells. A copy needs memory for one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import jax
import numpy as np

from jaxkv.core.constants import MAX_CELLS
from jaxkv.snapshot.parts import SlotAssignment

if TYPE_CHECKING:
    from jaxtyping import Int32, PyTree

X = TypeVar("X")


def take_cells(
    read: Callable[..., PyTree],
    streams: Int32[np.ndarray, " n"],
    cells: Int32[np.ndarray, " n"],
    size: int,
) -> PyTree:
    """Return the results `[n, ...]` of `read(streams, cells)` as NumPy arrays."""
    shapes = jax.eval_shape(read, streams, cells)
    out = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes)
    for here, where in _iterate_chunks(streams, cells, size):

        def put(out: np.ndarray, new: jax.Array, here: slice = here) -> None:
            out[here] = np.asarray(new)[: len(out[here])]

        jax.tree.map(put, out, read(*where))
    return out


def write_cells(
    write: Callable[..., X], target: X, placed: SlotAssignment, new: PyTree, size: int
) -> X:
    """Write the values `new[placed.origin]`, by calls `write(target, values, streams, cells)`."""
    for here, where in _iterate_chunks(placed.streams, placed.cells, size):
        index = placed.origin[here]

        def take_padded(x: np.ndarray, index: np.ndarray = index) -> np.ndarray:
            return np.pad(x[index], [(0, size - len(index)), *[(0, 0)] * (x.ndim - 1)])

        target = write(target, jax.tree.map(take_padded, new), *where)
    return target


def _iterate_chunks(
    streams: Int32[np.ndarray, " n"], cells: Int32[np.ndarray, " n"], size: int
) -> Iterator[tuple[slice, tuple[Int32[np.ndarray, " C"], Int32[np.ndarray, " C"]]]]:
    """Yield the index slice of each chunk, with padded stream and cell indices."""
    for start in range(0, len(cells), size):
        here = slice(start, start + size)
        stream, cell = np.zeros(size, np.int32), MAX_CELLS + np.arange(size, dtype=np.int32)
        stream[: len(cells[here])], cell[: len(cells[here])] = streams[here], cells[here]
        yield here, (stream, cell)
