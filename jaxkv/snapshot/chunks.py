"""Copies of cells between buffers and the CPU, in chunks of equal size.

Equal sizes let one compiled program copy any number of cells. A copy needs memory for one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.constants import MAX_CELLS
from jaxkv.ops.storage.layer_stack import LayerView

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Int32, Shaped

A = TypeVar("A", bound=jax.Array | LayerView)

Read = Callable[[A, jax.Array, jax.Array], jax.Array]
"""Function that reads an array at stream and cell indices."""
Write = Callable[[A, jax.Array, jax.Array, jax.Array], A]
"""Function that writes an array at stream and cell indices; skips cells past the last cell."""


def take_cells(
    array: A,
    streams: Int32[np.ndarray, " n"],
    cells: Int32[np.ndarray, " n"],
    read: Read[A],
    size: int,
) -> Shaped[np.ndarray, "n ..."]:
    """Return the contents of the given cells of a buffer as a NumPy array."""
    shape = jax.eval_shape(read, array, streams, cells)
    out = np.empty(shape.shape, shape.dtype)
    for here, where in _iterate_chunks(streams, cells, size):
        out[here] = np.asarray(_take_chunk(array, *where, read=read))[: out[here].shape[0]]
    return out


def write_cells(
    array: A,
    streams: Int32[np.ndarray, " m"],
    cells: Int32[np.ndarray, " m"],
    new: Shaped[np.ndarray, "n ..."],
    origin: Int[np.ndarray, " m"],
    write: Write[A],
    size: int,
) -> A:
    """Write the values `new[origin]` into cells of a donated array."""
    for here, where in _iterate_chunks(streams, cells, size):
        chunk = new[origin[here]]
        pad = [(0, size - len(chunk)), *[(0, 0)] * (chunk.ndim - 1)]
        array = _write_chunk(array, *where, np.pad(chunk, pad), write=write)
    return array


def _iterate_chunks(
    streams: Int32[np.ndarray, " n"], cells: Int32[np.ndarray, " n"], size: int
) -> Iterator[tuple[slice, tuple[Int32[np.ndarray, " C"], Int32[np.ndarray, " C"]]]]:
    """Yield the index slice of each chunk, with padded stream and cell indices."""
    for start in range(0, len(cells), size):
        here = slice(start, start + size)
        stream, cell = np.zeros(size, np.int32), MAX_CELLS + np.arange(size, dtype=np.int32)
        stream[: len(cells[here])], cell[: len(cells[here])] = streams[here], cells[here]
        yield here, (stream, cell)


@partial(jax.jit, static_argnames="read")
def _take_chunk(
    array: A, streams: Int32[Array, " C"], cells: Int32[Array, " C"], *, read: Read[A]
) -> Shaped[Array, "C ..."]:
    return read(array, streams, cells)


@partial(jax.jit, static_argnames="write", donate_argnames="array")
def _write_chunk(
    array: A,
    streams: Int32[Array, " C"],
    cells: Int32[Array, " C"],
    new: Shaped[Array, "C ..."],
    *,
    write: Write[A],
) -> A:
    return write(array, streams, cells, jnp.asarray(new, array.dtype))
