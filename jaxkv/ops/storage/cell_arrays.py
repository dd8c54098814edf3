"""Reads and writes of cells in the array of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import DROP
from jaxkv.core.constants import END
from jaxkv.ops.storage.layer_stack import A, CellArray, locate_streams, with_array

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Shaped


def gather(
    array: CellArray, streams: Int[Array, "*#n"], slots: Int[Array, "*#n"]
) -> Shaped[Array, "*#n K D"]:
    """Return the keys or values of a layer at `streams` and `slots`; zeros past the last cell."""
    array, streams = locate_streams(array, streams)
    return _gather_by_index(array, _scatter_index(array, streams, slots), slots.ndim)


def gather_streams_of_cells(
    array: CellArray, streams: Int[Array, " n"], cells: Int[Array, "n C"]
) -> Shaped[Array, "n K C D"]:
    """Return the keys or values in C cells of each stream; zeros past the last cell."""
    # On a CPU, a transpose of the result of `gather` would take longer than the reads.
    array, streams = locate_streams(array, streams)
    where = jnp.stack(jnp.broadcast_arrays(streams[:, None], cells), axis=-1)[:, None]
    where = jnp.broadcast_to(where, (len(cells), array.shape[1], *where.shape[2:]))
    return _gather_by_index(array, where, by_head=1)


def _gather_by_index(array: jax.Array, where: jax.Array, by_head: int) -> jax.Array:
    """Gather heads at stream and cell indices `[..., 2]`; axis `by_head` of `where` is of heads."""
    dimensions = jax.lax.GatherDimensionNumbers(
        offset_dims=(where.ndim - 1,),
        collapsed_slice_dims=(0, 2),
        start_index_map=(0, 2),
        operand_batching_dims=(1,),
        start_indices_batching_dims=(by_head,),
    )
    return jax.lax.gather(
        array,
        where,
        dimensions,
        slice_sizes=(1, 1, 1, array.shape[3]),
        mode="fill",
        fill_value=0,
    )


def scatter(
    array: A, streams: Int[Array, "*#n"], slots: Int[Array, "*#n"], new: Shaped[Array, "*#n K D"]
) -> A:
    """Write keys or values into distinct cells of a layer; skip slots past the last cell."""
    if not is_upcast_by_cpu_write(array.dtype):
        return _scatter_by_index(array, streams, slots, new)
    ways = {"cpu": scatter_by_select, "default": _scatter_by_index}
    return jax.lax.platform_dependent(array, streams, slots, new, **ways)


def _scatter_index(array: jax.Array, streams: jax.Array, slots: jax.Array) -> jax.Array:
    """Return stream and cell indices for each token and head, `[..., K, 2]` int32."""
    pairs = jnp.stack(jnp.broadcast_arrays(streams, slots), axis=-1)[..., None, :]
    return jnp.broadcast_to(pairs, (*slots.shape, array.shape[1], 2))


def _scatter_by_index(array: A, streams: jax.Array, slots: jax.Array, new: jax.Array) -> A:
    """Implement `scatter` by an XLA scatter with an index for each cell and head."""
    old, streams = locate_streams(array, streams)
    if new.size == new.shape[-1]:
        # The compiler turns a write of one head of one cell into a slice update, and then copies
        # the array for attention to read. A second write, which is skipped, prevents this.
        slots = jnp.stack([slots, jnp.full_like(slots, END)])
        streams, new = (jnp.stack([x, x]) for x in (streams, new))
    # Heads are a batch dimension, so that each device of a mesh writes its own heads. A slice over
    # heads would make the compiler copy the array.
    by_head = slots.ndim
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(by_head + 1,),
        inserted_window_dims=(0, 2),
        scatter_dims_to_operand_dims=(0, 2),
        operand_batching_dims=(1,),
        scatter_indices_batching_dims=(by_head,),
    )
    where = _scatter_index(old, streams, slots)
    put = jax.lax.scatter(old, where, new, dimensions, unique_indices=True, mode="drop")
    return with_array(array, put)


def scatter_by_select(
    array: A,
    streams: Int[Array, "*#n"],
    slots: Int[Array, "*#n"],
    new: Shaped[Array, "*#n K D"],
) -> A:
    """Implement `scatter` by `jnp.where` over all cells (of all layers if stacked)."""
    old, streams = locate_streams(array, streams)
    count = slots.size
    token = jnp.arange(count, dtype=jnp.int32).reshape(slots.shape)
    # Only token indices are scattered. Each cell then reads the token that is written into it; the
    # index is `count` for cells without a new token.
    token_of_cell = jnp.full(old.shape[::2][:2], count, jnp.int32)  # [S, N], or [S * L, N]
    token_of_cell = token_of_cell.at[streams, slots].set(token, **DROP, unique_indices=True)
    # If `new` was computed from the same array, it must be read before the write. A branch that
    # is never taken keeps the compiler from fusing the read into the write.
    new = jax.lax.cond(jnp.any(slots < 0), jnp.zeros_like, lambda x: x, new)
    new = new.reshape(count, *old.shape[1::2])
    new = new[jnp.minimum(token_of_cell, count - 1)]  # [S, N, K, D]
    is_written = (token_of_cell < count)[:, None, :, None]
    return with_array(array, jnp.where(is_written, new.swapaxes(1, 2), old))


def is_upcast_by_cpu_write(dtype: jnp.dtype) -> bool:
    """Return whether XLA on a CPU converts a whole array to float32 to write some cells."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 and dtype != jnp.float16
    return jax.__version_info__ < (0, 12) and narrow
