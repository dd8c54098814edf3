"""Reads and writes of cells in a device's shard of the buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import out_of_range_slots
from jaxkv.core.partitioning import (
    broadcast_from_owner,
    first_local_index,
    gather_sharded,
    to_local_index,
)
from jaxkv.ops.storage.cell_arrays import (
    gather,
    is_upcast_by_cpu_write,
    scatter,
    scatter_by_select,
)
from jaxkv.ops.storage.layer_stack import A, CellArray, flatten_layers, with_array

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Int32, Shaped


class Shard(NamedTuple):
    """Mesh axes that split the streams and the cells of all arrays; `()` without a split.

    The methods are called in a function that runs on each device. Stream and cell indices are
    global.
    """

    streams: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()

    def gather(
        self, array: CellArray, streams: Int[Array, "*#n"], slots: Int[Array, "*#n"]
    ) -> Shaped[Array, "*#n K D"]:
        """Return the keys or values at `streams` and `slots`, from any device."""
        here = gather(array, *self._to_local(array, streams, slots))
        return broadcast_from_owner(here, (*self.streams, *self.cells))

    def scatter(
        self,
        array: A,
        streams: Int[Array, "*#n"],
        slots: Int[Array, "*#n"],
        new: Shaped[Array, "*#n K D"],
    ) -> A:
        """Write keys or values; skip cells of other devices and slots past the last cell."""
        return scatter(array, *self._to_local(array, streams, slots), new)

    def _to_local(
        self, array: CellArray, streams: jax.Array, slots: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return local indices; slots of other devices become out of range."""
        if self.streams:
            streams, is_own = to_local_index(streams, self.streams, array.shape[0])
            is_own = jnp.broadcast_to(is_own, slots.shape)
            slots = jnp.where(is_own, slots, out_of_range_slots(slots))
        return streams, self.to_local_slots(slots, array.shape[2])

    def to_local_slots(self, slots: Int32[Array, "*n"], num_cells: int) -> Int32[Array, "*n"]:
        """Return slots in a shard of `num_cells` cells; other slots move past all cells."""
        if not self.cells:
            return slots
        first = first_local_index(self.cells, num_cells)
        is_within = (slots >= first) & (slots < first + num_cells)
        return jnp.where(is_within, slots - first, out_of_range_slots(slots))

    def take(
        self, x: Shaped[Array, "S ..."], stream: Int32[Array, "*n"], *rest: Int32[Array, "*n"]
    ) -> Shaped[Array, ...]:
        """Return `x[stream, *rest]` of an array that the mesh splits by streams."""
        return gather_sharded(x, self.streams, stream, *rest)

    def slice_cells(self, x: Shaped[Array, "S _"], num_cells: int) -> Shaped[Array, "S _"]:
        """Return the columns of an array over all cells for a shard of `num_cells` cells."""
        if not self.cells:
            return x
        first = first_local_index(self.cells, num_cells)
        return jax.lax.dynamic_slice_in_dim(x, first, num_cells, axis=1)

    def count_cells(self, count: Int32[Array, "*n"], num_cells: int) -> Int32[Array, "*n"]:
        """Return how many of the first `count` cells are in a shard of `num_cells` cells."""
        return jnp.clip(count - first_local_index(self.cells, num_cells), 0, num_cells)

    def copy_run(
        self,
        array: CellArray,
        src: Int32[Array, ""],
        dst: Int32[Array, ""],
        first: Int32[Array, ""],
        size: int,
        end: Int32[Array, ""],
    ) -> CellArray:
        """Copy a run of contiguous cells from one stream to the same cells of another stream.

        The cell indices `first` and `end` are local. If a mesh splits cells, cells with an index of
        `end` or more are not copied.
        """
        shape, zero = (1, array.shape[1], size, array.shape[3]), jnp.zeros_like(first)

        def read_run(stream: jax.Array) -> jax.Array:
            arrays, number, _ = flatten_layers(array, stream)
            return jax.lax.dynamic_slice(arrays, (number, zero, first, zero), shape)

        if self.streams:
            src, has_src = to_local_index(src, self.streams, array.shape[0])
            dst, has_dst = to_local_index(dst, self.streams, array.shape[0])
            run = broadcast_from_owner(jnp.where(has_src, read_run(src), 0), self.streams)
            run = jnp.where(has_dst, run, read_run(dst))  # other devices rewrite their own cells
        else:
            run = read_run(src)
        if self.cells:
            is_within = (first + jnp.arange(size) < end)[None, None, :, None]
            run = jnp.where(is_within, run, read_run(dst))

        def write_by_select(
            array: CellArray, run: jax.Array, dst: jax.Array, first: jax.Array
        ) -> CellArray:
            return scatter_by_select(array, dst, first + jnp.arange(size), run[0].swapaxes(0, 1))

        def write_as_slice(
            array: CellArray, run: jax.Array, dst: jax.Array, first: jax.Array
        ) -> CellArray:
            arrays, number, _ = flatten_layers(array, dst)
            arrays = jax.lax.dynamic_update_slice(arrays, run, (number, zero, first, zero))
            return with_array(array, arrays)

        if not is_upcast_by_cpu_write(array.dtype):
            return write_as_slice(array, run, dst, first)
        ways = {"cpu": write_by_select, "default": write_as_slice}
        return jax.lax.platform_dependent(array, run, dst, first, **ways)
