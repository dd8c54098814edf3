"""Work on the shards of a table and its buffers: each device processes its own streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxkv.core.array_utils import out_of_range_slots
from jaxkv.core.loops import differentiable_fori_loop
from jaxkv.core.partitioning import (
    broadcast_from_owner,
    first_local_index,
    gather_sharded,
    make_axis_partition,
    map_shards,
    to_local_index,
)
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.cells import C, Cells
from jaxkv.kv.layer_kv import LayerKV, shardable_sizes
from jaxkv.ops.storage.cell_arrays import (
    gather,
    is_upcast_by_cpu_write,
    scatter,
    scatter_by_select,
)
from jaxkv.ops.storage.layer_stack import (
    A,
    CellArray,
    flatten_layers,
    make_layer_view,
    map_arrays,
    with_array,
)
from jaxkv.ubatch import (
    Ubatch,
    mask_rows_of_other_devices,
    row_mesh_axes,
    ubatch_partition_specs,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Int32, PyTree, Shaped

R = TypeVar("R")


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

    def to_local_streams(
        self, stream: Int32[Array, "*n"], count: int
    ) -> tuple[Int32[Array, "*n"], PyTree[Bool[Array, "*n"] | bool]]:
        """Return indices in a shard of `count` streams, and which streams are in the shard."""
        return to_local_index(stream, self.streams, count)

    def broadcast(self, x: Shaped[Array, "*n"]) -> Shaped[Array, "*n"]:
        """Copy entries to all devices; each entry must be 0 on all devices but one."""
        return broadcast_from_owner(x, self.streams)

    def take(
        self, x: Shaped[Array, "S ..."], stream: Int32[Array, "*n"], *rest: Int32[Array, "*n"]
    ) -> Shaped[Array, " ..."]:
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


def map_kv(
    table: Cells,
    buffers: Buffers,
    change: Callable[..., PyTree],
    *args: PyTree,
    num_split_args: int = 0,
) -> Buffers:
    """Replace the keys and values on each device by `change(shard, *args, arrays)`.

    If layers are stacked, `change` is called for each layer, otherwise once for all layers. On a
    mesh, the first `num_split_args` elements of `args` are split by streams, and the others are
    replicated.
    """
    halves, depth = (buffers.k, buffers.v), buffers.layers_per_array
    partitions = jax.tree.map(
        lambda x: make_axis_partition(table.sharding_rules, **shardable_sizes(x, depth)), halves
    )
    specs = jax.tree.map(lambda partition: partition.partition_spec, partitions)
    axes, *_ = jax.tree.leaves(partitions)  # those of streams and cells are equal in all arrays
    shard = Shard(axes.streams, axes.cells)
    in_specs = (
        *(P(shard.streams),) * num_split_args,
        *(P(),) * (len(args) - num_split_args),
        specs,
    )

    def change_layers_in_turn(*args: PyTree) -> PyTree:
        def of_layer(layer: jax.Array, arrays: PyTree, *args: PyTree) -> PyTree:
            layer_kv = jax.tree.map(lambda x: make_layer_view(x, layer, buffers.layers), arrays)
            return map_arrays(lambda x: x.all, change(shard, *args, layer_kv))

        layers = buffers.layers
        return differentiable_fori_loop(of_layer, jnp.int32(layers), layers, args[-1], *args[:-1])

    run = change_layers_in_turn if buffers.stacked else partial(change, shard)
    k, v = map_shards(table.sharding_rules, run, in_specs, specs)(*args, halves)
    return replace(buffers, k=k, v=v)


def read_layer(
    table: Cells, layer: LayerKV, streams: Int32[Array, " n"], cells: Int32[Array, " n"]
) -> LayerKV:
    """Return the heads of a layer in the given cells, see `LayerKV.read_heads`."""
    shard, specs, head_specs = _partition_layer(table, layer)

    def read_on_shard(layer: LayerKV, *place: jax.Array) -> LayerKV:
        return layer.read_heads(lambda x: shard.gather(x, *place))

    run = map_shards(table.sharding_rules, read_on_shard, (specs, P(), P()), head_specs)
    return run(layer, streams, cells)


def write_layer(
    table: Cells,
    layer: LayerKV,
    streams: Int32[Array, " n"],
    slots: Int32[Array, " n"],
    heads: LayerKV,
) -> LayerKV:
    """Write heads that `read_layer` returned for any cache; skip slots past the last cell."""
    shard, specs, head_specs = _partition_layer(table, layer)

    def write_on_shard(
        layer: LayerKV, heads: LayerKV, streams: jax.Array, slots: jax.Array
    ) -> LayerKV:
        return layer.put(layer.join(heads), lambda x, rows: shard.scatter(x, streams, slots, rows))

    in_specs = specs, head_specs, P(), P()
    run = map_shards(table.sharding_rules, write_on_shard, in_specs, specs)
    return run(layer, heads, streams, slots)


def _partition_layer(table: Cells, layer: LayerKV) -> tuple[Shard, LayerKV, P]:
    """Return the shard of a layer, the spec of each array, and the spec of its heads `[n, K, D]`.

    The mesh splits the heads as it splits the rows of the layer.
    """
    axes = make_axis_partition(table.sharding_rules, **shardable_sizes(layer.keys))
    return Shard(axes.streams, axes.cells), layer.partition_specs(axes), P(None, axes.kv_heads)


def map_table(
    cells: Cells,
    work: Callable[..., R],
    *args: PyTree,
    num_split_args: int = 0,
    out_by_stream: PyTree,
) -> R:
    """Call `work(shard, cells, *args)` with the streams of each device.

    The first `num_split_args` elements of `args` are split by streams of `cells`, other tables in
    `args` by their own streams; other elements are replicated. `out_by_stream` is True, or a tree
    prefix of the results with True, for results that are split by streams; other results must be
    equal on all devices.
    """
    shard = shard_of_table(cells)
    others = [P(shard_of_table(x).streams) if isinstance(x, Cells) else P() for x in args]
    in_specs = (*(P(shard.streams),) * (1 + num_split_args), *others[num_split_args:])
    out_specs = jax.tree.map(lambda is_split: P(shard.streams) if is_split else P(), out_by_stream)
    rules = cells.sharding_rules
    for table in [x for x in args if isinstance(x, Cells) and rules is None]:
        rules = table.sharding_rules
    return map_shards(rules, partial(work, shard), in_specs, out_specs)(cells, *args)


def shard_of_table(cells: Cells) -> Shard:
    """Return the mesh axes that split the streams of a table."""
    return Shard(make_axis_partition(cells.sharding_rules, streams=cells.streams).streams)


def map_streams(cells: Cells, work: Callable[..., R], *args: PyTree) -> R:
    """Call a function with each device's streams; arguments and results are split by streams."""
    return map_table(
        cells, lambda _, *args: work(*args), *args, num_split_args=len(args), out_by_stream=True
    )


def map_streams_gather(cells: Cells, work: Callable[..., R], *args: jax.Array) -> R:
    """Call a function with each device's streams; gather the results with one collective."""

    def gather_results(shard: Shard, *args: PyTree) -> R:
        return _gather_over_axes(work(*args), shard.streams)

    return map_table(cells, gather_results, *args, num_split_args=len(args), out_by_stream=False)


def map_rows(cells: C, ubatch: Ubatch, work: Callable[[C, Ubatch], C]) -> C:
    """Return the table `work(cells, ubatch)`, from the streams and rows of each device.

    If the mesh does not split rows, each device gets all rows, and rows of other devices are
    padding.
    """
    return _map_rows(cells, ubatch, lambda _, __, *args: work(*args), out_by_stream=True)


def map_rows_gather(
    cells: C, ubatch: Ubatch, choose: Callable[[C, Ubatch], Int32[Array, "R T"]]
) -> Int32[Array, "R T"]:
    """Return the slots `choose(cells, ubatch)`, chosen as in `map_rows`, on all devices."""

    def choose_on_shard(
        axes: tuple[str, ...], rows: tuple[str, ...], cells: C, ubatch: Ubatch
    ) -> jax.Array:
        slots = choose(cells, ubatch)
        if rows or not axes:
            return _gather_over_axes(slots, rows)
        # The device with a token's stream chooses the slot; the other devices get a larger number.
        slots = jnp.where(ubatch.valid, slots, out_of_range_slots(slots))
        return jax.lax.pmin(slots, axes)

    return _map_rows(cells, ubatch, choose_on_shard, out_by_stream=False)


def _map_rows(cells: Cells, ubatch: Ubatch, work: Callable[..., R], *, out_by_stream: bool) -> R:
    """Call `work(axes, rows, cells, ubatch)` on each device.

    `axes` has the mesh axes that split streams, and `rows` those that split rows.
    """
    axes = make_axis_partition(cells.sharding_rules, streams=cells.streams).streams
    rows = row_mesh_axes(ubatch, axes)

    def work_on_shard(cells: Cells, ubatch: Ubatch) -> R:
        return work(axes, rows, cells, mask_rows_of_other_devices(ubatch, axes, cells.streams))

    in_specs = P(axes), ubatch_partition_specs(ubatch, axes)
    out_specs = P(axes) if out_by_stream else P()
    return map_shards(cells.sharding_rules, work_on_shard, in_specs, out_specs)(cells, ubatch)


def _gather_over_axes(tree: R, axes: tuple[str, ...]) -> R:
    """All-gather int32 or bool arrays of one shape along mesh axes, with one collective."""
    if not axes:
        return tree
    leaves, form = jax.tree.flatten(tree)
    packed = jnp.stack([x.astype(jnp.int32) for x in leaves], axis=-1)
    packed = jax.lax.all_gather(packed, axes, tiled=True)
    return form.unflatten([packed[..., i].astype(x.dtype) for i, x in enumerate(leaves)])
