"""Buffers of an attention cache: the keys and values of all cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxkv.core.array_utils import DROP, nbytes, out_of_range_slots
from jaxkv.core.constants import END
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
from jaxkv.ops.storage.head_rows import join_heads
from jaxkv.ops.storage.latent import Values, ValueSlice
from jaxkv.ops.storage.layer_stack import LayerView, flatten_layers, make_layer_view, map_arrays
from jaxkv.ops.storage.quantised import Stored, dequantised_dtype, quantise_like
from jaxkv.rope import NotGiven, Rope

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Int32, PyTree, Shaped

    from jaxkv.core.types import AnyMesh

LayerKV = tuple[Stored, Values]
"""Keys `[S, K, N, D]` and values `[S, K, N, Dv]` of a layer."""


class HeadSizes(NamedTuple):
    """Sizes of heads in a layer; `values` is Dv, or a slice if each value is a slice of its key."""

    kv_heads: int
    head_dim: int
    values: int | ValueSlice

    @property
    def value_dim(self) -> int:
        """Size of a value, Dv."""
        values = self.values
        return values.last - values.first if isinstance(values, ValueSlice) else values


Cached = jax.Array | LayerView
"""Keys, values, codes or scales of one layer: an array `[S, K, N, D]`, or a `LayerView`."""

X = TypeVar("X")
A = TypeVar("A", bound=Cached)


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
    v: tuple[Values, ...]
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

    def map_layers(self, of_layer: Callable[[Stored, Values], X]) -> list[X]:
        """Return `of_layer(k, v)` for each layer; if stacked, all L entries are from one call."""
        return [of_layer(k, v) for k, v in zip(self.k, self.v, strict=True)] * self.layers_per_array

    @property
    def heads_per_row(self) -> int:
        """Number of heads in a row of an array, see `ops.storage.head_rows`."""
        return self.head_sizes[0].kv_heads // self.k[0].shape[-3]

    def layer(self, number: int | jax.Array) -> LayerKV:
        """Return the keys and values of a layer, as two `LayerView` if layers are stacked."""
        if not self.stacked:
            return self.k[number], self.v[number]
        halves = self.k[0], self.v[0]
        return jax.tree.map(lambda x: make_layer_view(x, number, self.layers), halves)

    def with_layer(self, number: int | jax.Array, k: Stored, v: Values) -> Buffers:
        """Replace the keys and values of a layer, in the form that `Buffers.layer` returns."""
        if self.stacked:
            k, v = map_arrays(lambda x: x.all, (k, v))
            return replace(self, k=(k,), v=(v,))

        def put(old: tuple[X, ...], new: X) -> tuple[X, ...]:
            return (*old[:number], new, *old[number + 1 :])

        return replace(self, k=put(self.k, k), v=put(self.v, v))


KVPartitions = tuple[tuple[object, ...], tuple[object, ...]]
"""Two tuples, for keys and for values, with an `AxisPartition` for each array."""


def shardable_sizes(array: Stored, depth: int = 1) -> dict[str, int]:
    """Return the numbers of streams, key heads and cells of an array, by field name."""
    streams, kv_heads, cells, _ = array.shape
    return {"streams": streams // depth, "kv_heads": kv_heads, "cells": cells}


def layer_partition_specs(split: AxisPartition, layer_kv: LayerKV) -> PyTree:
    """Return the pytree `layer_kv` with a `PartitionSpec` instead of each array."""

    def spec_of_array(x: Cached) -> PyTree:
        spec, streams = split.partition_spec, P(split.streams)
        return replace(x, all=spec, layer=streams) if isinstance(x, LayerView) else spec

    return map_arrays(spec_of_array, layer_kv)


def axes_of_queries(
    sharding_rules: ShardingRules | None,
    mesh: AnyMesh | None,
    keys: Stored,
    values: Values,
    heads: int,
    depth: int = 1,
) -> tuple[str, ...]:
    """Return the mesh axes that split the query heads; `()` without a mesh."""
    # With MLA, each device stores the only key head, and `kv_heads` splits the query heads. Without
    # MLA, the projection params of a single key head are replicated, and a split of the query heads
    # would add communication.
    if sharding_rules is None or mesh is None:
        return ()
    split = sharding_rules.split(mesh, **shardable_sizes(keys, depth))
    if not isinstance(values, ValueSlice) or keys.shape[1] > 1:
        return split["kv_heads"]
    axes = sharding_rules.split(mesh, kv_heads=heads)["kv_heads"]
    return () if {*axes} & {*split["streams"], *split["cells"]} else axes


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


def write_keys_and_values(
    keys: Stored,
    values: Values,
    streams: Int32[Array, " R"],
    slots: Int32[Array, "R T"],
    k: Float[Array, "R T K D"],
    v: Float[Array, "R T K Dv"] | None = None,
) -> tuple[Stored, Values]:
    """Write the keys and values of a ubatch into a layer; skip slots past the last cell."""
    # Stored values are always finite, so that a masked cell contributes 0.
    n, k = k.shape[2] // keys.shape[1], k.astype(dequantised_dtype(keys))
    streams = streams[:, None]
    if isinstance(values, ValueSlice):
        k = values.nan_unless_finite(join_heads(k, n, keys.shape[3]))
        return write_cells(keys, streams, slots, k), values
    assert v is not None
    v = v.astype(dequantised_dtype(values))
    is_finite = jnp.isfinite(v)
    # A NaN in one element is sufficient, and a reduction would take longer.
    of_key = is_finite if v.shape == k.shape else jnp.all(is_finite, axis=3, keepdims=True)
    k, v = jnp.where(of_key & jnp.isfinite(k), k, jnp.nan), jnp.where(is_finite, v, 0)
    k, v = join_heads(k, n, keys.shape[3]), join_heads(v, n, values.shape[3])
    return write_cells(keys, streams, slots, k), write_cells(values, streams, slots, v)


def write_cells(
    stored: Stored,
    streams: Int[Array, "*#n"],
    slots: Int[Array, "*#n"],
    new: Float[Array, "*#n K D"],
) -> Stored:
    """Write keys or values into cells; quantise them first if `stored` is quantised."""

    def scatter_array(array: Cached, new: jax.Array) -> Cached:
        return scatter(array, streams, slots, new)

    return map_arrays(scatter_array, stored, quantise_like(new, stored))


def gather_from_any_device(
    split: AxisPartition, array: Cached, streams: Int[Array, "*#n"], slots: Int[Array, "*#n"]
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
    split: AxisPartition, array: Cached, streams: jax.Array, slots: jax.Array
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


def gather(
    array: Cached, streams: Int[Array, "*#n"], slots: Int[Array, "*#n"]
) -> Shaped[Array, "*#n K D"]:
    """Return the keys or values of a layer at `streams` and `slots`; zeros past the last cell."""
    if isinstance(array, LayerView):
        return gather(array.all, array.stream_indices(streams), slots)
    by_head = slots.ndim  # the axis of heads, in indices and in the result
    dimensions = jax.lax.GatherDimensionNumbers(
        offset_dims=(by_head + 1,),
        collapsed_slice_dims=(0, 2),
        start_index_map=(0, 2),
        operand_batching_dims=(1,),
        start_indices_batching_dims=(by_head,),
    )
    return jax.lax.gather(
        array,
        _scatter_index(array, streams, slots),
        dimensions,
        slice_sizes=(1, 1, 1, array.shape[3]),
        mode="fill",
        fill_value=0,
    )


def scatter(
    array: A, streams: Int[Array, "*#n"], slots: Int[Array, "*#n"], new: Shaped[Array, "*#n K D"]
) -> A:
    """Write keys or values into distinct cells of a layer; skip slots past the last cell."""
    if not _is_upcast_by_cpu_write(array.dtype):
        return _scatter_by_index(array, streams, slots, new)
    ways = {"cpu": _scatter_by_select, "default": _scatter_by_index}
    return jax.lax.platform_dependent(array, streams, slots, new, **ways)


def copy_cell_run(
    split: AxisPartition,
    array: Cached,
    src: Int32[Array, ""],
    dst: Int32[Array, ""],
    first: Int32[Array, ""],
    size: int,
    end: Int32[Array, ""],
) -> Cached:
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

    def write_by_select(array: Cached, run: jax.Array, dst: jax.Array, first: jax.Array) -> Cached:
        return _scatter_by_select(array, dst, first + jnp.arange(size), run[0].swapaxes(0, 1))

    def write_as_slice(array: Cached, run: jax.Array, dst: jax.Array, first: jax.Array) -> Cached:
        arrays, number, _ = flatten_layers(array, dst)
        arrays = jax.lax.dynamic_update_slice(arrays, run, (number, zero, first, zero))
        return _replace_array(array, arrays)

    if not _is_upcast_by_cpu_write(array.dtype):
        return write_as_slice(array, run, dst, first)
    ways = {"cpu": write_by_select, "default": write_as_slice}
    return jax.lax.platform_dependent(array, run, dst, first, **ways)


def _replace_array(array: A, new: PyTree) -> A:
    if isinstance(array, LayerView):
        return replace(array, all=new)
    return new


def _scatter_index(array: jax.Array, streams: jax.Array, slots: jax.Array) -> jax.Array:
    """Return stream and cell indices for each token and head, `[..., K, 2]` int32."""
    pairs = jnp.stack(jnp.broadcast_arrays(streams, slots), axis=-1)[..., None, :]
    return jnp.broadcast_to(pairs, (*slots.shape, array.shape[1], 2))


def _scatter_by_index(array: A, streams: jax.Array, slots: jax.Array, new: jax.Array) -> A:
    """Implement `scatter` by an XLA scatter with an index for each cell and head."""
    if isinstance(array, LayerView):
        return _replace_array(
            array, _scatter_by_index(array.all, array.stream_indices(streams), slots, new)
        )
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
    where = _scatter_index(array, streams, slots)
    put = jax.lax.scatter(array, where, new, dimensions, unique_indices=True, mode="drop")
    return _replace_array(array, put)


def _scatter_by_select(array: A, streams: jax.Array, slots: jax.Array, new: jax.Array) -> A:
    """Implement `scatter` by `jnp.where` over all cells (of all layers if stacked)."""
    cells, count = (array.shape[0], array.shape[2]), slots.size
    token = jnp.arange(count, dtype=jnp.int32).reshape(slots.shape)
    token_of_cell = jnp.full(cells, count, jnp.int32)
    token_of_cell = token_of_cell.at[streams, slots].set(token, **DROP, unique_indices=True)
    # If `new` was computed from the same array, it must be read before the write. A branch that
    # is never taken keeps the compiler from fusing the read into the write.
    new = jax.lax.cond(jnp.any(slots < 0), jnp.zeros_like, lambda x: x, new)
    old = array.all if isinstance(array, LayerView) else array
    if isinstance(array, LayerView):
        layer = jnp.arange(array.all.shape[0]) % array.layers
        is_of_layer = layer == jnp.repeat(array.layer, array.layers)
        token_of_cell = jnp.where(
            is_of_layer[:, None], jnp.repeat(token_of_cell, array.layers, axis=0), count
        )
    new = new.reshape(count, *old.shape[1::2])[
        jnp.minimum(token_of_cell, count - 1)
    ]  # [S, N, K, D]
    return _replace_array(
        array, jnp.where((token_of_cell < count)[:, None, :, None], new.swapaxes(1, 2), old)
    )


def _is_upcast_by_cpu_write(dtype: jnp.dtype) -> bool:
    """Return whether XLA on a CPU converts a whole array to float32 to write some cells."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 and dtype != jnp.float16
    return jax.__version_info__ < (0, 12) and narrow
