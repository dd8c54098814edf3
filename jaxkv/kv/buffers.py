"""Buffers of an attention cache: the keys and values of all cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxkv.core.array_utils import nbytes, out_of_range_slots
from jaxkv.core.loops import differentiable_fori_loop
from jaxkv.core.partitioning import (
    AxisPartition,
    ShardingRules,
    broadcast_from_owner,
    first_local_index,
    make_axis_partition,
    map_shards,
    to_local_index,
)
from jaxkv.core.pytree import pytree_dataclass, static_field
from jaxkv.kv.layer_kv import HeadSizes, LayerKV, make_layer_kv, shardable_sizes
from jaxkv.ops.storage.cell_arrays import (
    gather,
    is_upcast_by_cpu_write,
    scatter,
    scatter_by_select,
)
from jaxkv.ops.storage.latent import ValueSlice
from jaxkv.ops.storage.layer_stack import (
    A,
    CellArray,
    flatten_layers,
    make_layer_view,
    map_arrays,
    with_array,
)
from jaxkv.ops.storage.storage import Stored
from jaxkv.rope import NotGiven, Rope

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Int32, PyTree, Shaped


X = TypeVar("X")


@pytree_dataclass
class Buffers:
    """Keys and values of all cells, for each layer.

    k: L arrays `[S, K, N, D]` of keys. If stacked, one array `[S * L, K, N, D]`, in which index s *
      L + l is stream s of layer l. The key of a cell at position p with shift d is rotated for
      position p - d. If n heads share a row (`ops.storage.head_rows`), K becomes K / n, and D
      becomes the size of a row.
    v: L arrays `[S, K, N, Dv]` of values; if stacked, one array `[S * L, K, N, Dv]`.
    ropes: Rotary embedding of each layer's keys, static; None for keys without rotation, `NotGiven`
      if the cache was made without `rope=`.
    """

    k: tuple[Stored, ...]
    v: tuple[Stored | ValueSlice, ...]
    ropes: tuple[Rope | NotGiven | None, ...] = static_field()
    head_sizes: tuple[HeadSizes, ...] = static_field()
    stacked: bool = static_field(default=False)

    @property
    def layers(self) -> int:
        """Number of layers, L."""
        return len(self.ropes)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the keys and values of all layers."""
        return nbytes(self)

    @property
    def layers_per_array(self) -> int:
        """Number of layers in each array: L if stacked, otherwise 1."""
        return self.layers if self.stacked else 1

    @property
    def heads_per_row(self) -> int:
        """Number of heads in a row of an array, see `ops.storage.head_rows`."""
        return self.head_sizes[0].kv_heads // self.k[0].shape[-3]

    def layer(self, layer: int | jax.Array) -> LayerKV:
        """Return the keys and values of a layer, as two `LayerView` if layers are stacked."""
        if not self.stacked:
            return make_layer_kv(self.k[layer], self.v[layer], self.head_sizes[layer])
        k, v = jax.tree.map(
            lambda x: make_layer_view(x, layer, self.layers), (self.k[0], self.v[0])
        )
        return make_layer_kv(k, v, self.head_sizes[0])

    def with_layer(self, layer: int | jax.Array, new: LayerKV) -> Buffers:
        """Replace the keys and values of a layer, in the form that `Buffers.layer` returns."""
        if self.stacked:
            k, v = map_arrays(lambda x: x.all, (new.keys, new.values))
            return replace(self, k=(k,), v=(v,))

        def put(old: tuple[X, ...], new: X) -> tuple[X, ...]:
            return (*old[:layer], new, *old[layer + 1 :])

        return replace(self, k=put(self.k, new.keys), v=put(self.v, new.values))


KVPartitions = tuple[tuple[object, ...], tuple[object, ...]]
"""Two tuples, for keys and for values, with an `AxisPartition` for each array."""


def kv_partitions(sharding_rules: ShardingRules | None, buffers: Buffers) -> KVPartitions:
    """Return how the current mesh splits each array of keys and values."""
    halves, depth = (buffers.k, buffers.v), buffers.layers_per_array
    return jax.tree.map(
        lambda x: make_axis_partition(sharding_rules, **shardable_sizes(x, depth)), halves
    )


def stream_cell_axes(split: KVPartitions) -> AxisPartition:
    """Return the mesh axes that split streams and cells; all arrays have the same axes."""
    return replace(jax.tree.leaves(split)[0], kv_heads=())


def map_kv(
    sharding_rules: ShardingRules | None,
    buffers: Buffers,
    change: Callable[..., PyTree],
    *args: PyTree,
    by_stream: int = 0,
) -> Buffers:
    """Replace the keys and values on each device by the result of the function `change`.

    If layers are stacked, `change` is called for each layer, otherwise once for all layers. On a
    mesh, the first `by_stream` elements of `args` are split by streams, and the other elements are
    replicated.
    """
    split = kv_partitions(sharding_rules, buffers)
    specs = jax.tree.map(lambda partition: partition.partition_spec, split)
    streams = (P(stream_cell_axes(split).streams),) * by_stream
    in_specs = (*streams, *(P(),) * (len(args) - by_stream), specs)

    def change_layers_in_turn(*args: PyTree) -> PyTree:
        def of_layer(layer: jax.Array, arrays: PyTree, *args: PyTree) -> PyTree:
            layer_kv = jax.tree.map(lambda x: make_layer_view(x, layer, buffers.layers), arrays)
            return map_arrays(lambda x: x.all, change(split, *args, layer_kv))

        layers = buffers.layers
        return differentiable_fori_loop(of_layer, jnp.int32(layers), layers, args[-1], *args[:-1])

    of_share = change_layers_in_turn if buffers.stacked else partial(change, split)
    k, v = map_shards(sharding_rules, of_share, in_specs, specs)(*args, (buffers.k, buffers.v))
    return replace(buffers, k=k, v=v)


def gather_from_any_device(
    split: AxisPartition, array: CellArray, streams: Int[Array, "*#n"], slots: Int[Array, "*#n"]
) -> Shaped[Array, "*#n K D"]:
    """Return the keys or values at global `streams` and `slots`, on all devices."""
    here = gather(array, *_to_local_slots(split, array, streams, slots))
    return broadcast_from_owner(here, (*split.streams, *split.cells))


def scatter_local(
    split: AxisPartition,
    array: A,
    streams: Int[Array, "*#n"],
    slots: Int[Array, "*#n"],
    new: Shaped[Array, "*#n K D"],
) -> A:
    """Write keys or values into a device's shard `array`; skip cells outside of the shard."""
    return scatter(array, *_to_local_slots(split, array, streams, slots), new)


def _to_local_slots(
    split: AxisPartition, array: CellArray, streams: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Convert global streams and slots to local; slots of other devices become out of range."""
    if split.streams:
        streams, is_own = to_local_index(streams, split.streams, array.shape[0])
        slots = jnp.where(jnp.broadcast_to(is_own, slots.shape), slots, out_of_range_slots(slots))
    if split.cells:
        slots = offset_slots_into_range(
            slots, first_local_index(split.cells, array.shape[2]), array.shape[2]
        )
    return streams, slots


def offset_slots_into_range(
    slots: Int32[Array, "*n"], first: jax.Array | int, count: int
) -> Int32[Array, "*n"]:
    """Subtract `first` from slots; move slots outside `[first, first + count)` past all cells."""
    is_within = (slots >= first) & (slots < first + count)
    return jnp.where(is_within, slots - first, out_of_range_slots(slots))


def copy_cell_run(
    split: AxisPartition,
    array: CellArray,
    src: Int32[Array, ""],
    dst: Int32[Array, ""],
    first: Int32[Array, ""],
    size: int,
    end: Int32[Array, ""],
) -> CellArray:
    """Copy a run of contiguous cells from one stream to the same cells of another stream.

    The stream indices `src` and `dst` are global. The cell indices `first` and `end` are indices in
    the shard of the device. If a mesh splits cells, cells with an index of `end` or more are not
    copied.
    """
    shape, zero = (1, array.shape[1], size, array.shape[3]), jnp.zeros_like(first)

    def read_run(stream: jax.Array) -> jax.Array:
        arrays, number, _ = flatten_layers(array, stream)
        return jax.lax.dynamic_slice(arrays, (number, zero, first, zero), shape)

    if split.streams:
        src, has_src = to_local_index(src, split.streams, array.shape[0])
        dst, has_dst = to_local_index(dst, split.streams, array.shape[0])
        run = broadcast_from_owner(jnp.where(has_src, read_run(src), 0), split.streams)
        run = jnp.where(has_dst, run, read_run(dst))  # other devices rewrite their own cells
    else:
        run = read_run(src)
    if split.cells:
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
