"""Moving what lies in cells between buffers and the host, some cells at a time.

Chunks are of one size, so that a program is compiled once for a buffer, however much is moved, and
nothing is held beside buffers and host but a chunk.
"""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.constants import MAX_CELLS

Read = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Read an array at streams and cells."""
Write = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""Write it there; a cell past the last one is left out."""


def taken_out(
    array: jax.Array, streams: np.ndarray, cells: np.ndarray, read: Read, size: int
) -> np.ndarray:
    """Return what an array of buffers holds for cells, `[n]` each; `[n, ...]` on the host."""
    shape = jax.eval_shape(read, array, streams, cells)
    out = np.empty(shape.shape, shape.dtype)
    for here, where in _chunks(streams, cells, size):
        out[here] = np.asarray(_taken(array, *where, read=read))[: out[here].shape[0]]
    return out


def put_in(
    array: jax.Array,
    streams: np.ndarray,
    cells: np.ndarray,
    new: np.ndarray,
    origin: np.ndarray,
    write: Write,
    size: int,
) -> jax.Array:
    """Put `new[origin]` into cells; the array is donated.

    Streams, cells and `origin` are `[m]` int32, and `new` is `[n, ...]`.
    """
    for here, where in _chunks(streams, cells, size):
        chunk = new[origin[here]]
        pad = [(0, size - len(chunk)), *[(0, 0)] * (chunk.ndim - 1)]
        array = _put(array, *where, np.pad(chunk, pad), write=write)
    return array


def _chunks(
    streams: np.ndarray, cells: np.ndarray, size: int
) -> Iterator[tuple[slice, tuple[np.ndarray, np.ndarray]]]:
    """Deal out cells, `[n]` each; what fills the last chunk up is past the last cell.

    Yields where a chunk lies among them, and its streams and cells, `[size]` int32 each.
    """
    for start in range(0, len(cells), size):
        here = slice(start, start + size)
        stream, cell = np.zeros(size, np.int32), MAX_CELLS + np.arange(size, dtype=np.int32)
        stream[: len(cells[here])], cell[: len(cells[here])] = streams[here], cells[here]
        yield here, (stream, cell)


@partial(jax.jit, static_argnames="read")
def _taken(array: jax.Array, streams: jax.Array, cells: jax.Array, *, read: Read) -> jax.Array:
    """Read what an array holds for a chunk of cells, `[size]` int32 each; `[size, ...]`."""
    return read(array, streams, cells)


@partial(jax.jit, static_argnames="write", donate_argnames="array")
def _put(
    array: jax.Array, streams: jax.Array, cells: jax.Array, new: jax.Array, *, write: Write
) -> jax.Array:
    """Write `[size, ...]` into a chunk of cells, `[size]` int32 each; the array is donated."""
    return write(array, streams, cells, jnp.asarray(new, array.dtype))
