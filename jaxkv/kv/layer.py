"""Implementations of `attend`, `write_kv` and `read_kv` for attention layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxkv.batch import Ubatch, mask_rows_of_other_devices, row_mesh_axes, ubatch_partition_specs
from jaxkv.core.array_utils import is_traced, stack_unfused
from jaxkv.core.partitioning import (
    AxisPartition,
    broadcast_from_owner,
    current_mesh,
    first_local_index,
    gather_sharded,
    make_axis_partition,
    map_shards,
)
from jaxkv.core.validate import check_int32
from jaxkv.kv import slots
from jaxkv.kv.buffers import (
    Buffers,
    HeadSizes,
    LayerKV,
    axes_of_queries,
    layer_partition_specs,
    offset_slots_into_range,
    shardable_sizes,
    write_keys_and_values,
)
from jaxkv.kv.cells import C, Cells
from jaxkv.kv.mask import needs_unwritten_tokens, visibility_of
from jaxkv.ops.attention import dispatch as attention
from jaxkv.ops.attention.bias import Bias, BiasOfLists, PositionBias, check_bias
from jaxkv.ops.attention.dispatch import Implementation
from jaxkv.ops.attention.softmax import AttentionOptions, make_options, merge_over_devices
from jaxkv.ops.attention.visibility import Visibility, compute_mask
from jaxkv.ops.head_rows import pad_queries, split_rows_of_cells, take_own_heads
from jaxkv.ops.layer_stack import LayerView, gather_streams
from jaxkv.ops.mla import ValueSlice
from jaxkv.ops.quantised import codes_and_scales, dequantise
from jaxkv.table import KVView

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, PyTree

    from jaxkv.core.types import Tokens


def attend(
    table: C,
    buffers: Buffers,
    layer: int | Int32[Array, ""],
    ubatch: Ubatch,
    q: Float[Array | np.ndarray, "R T H D"],
    k: Float[Array | np.ndarray, "R T K D"] | None,
    v: Float[Array | np.ndarray, "R T K Dv"] | None,
    *,
    scale: float | Float[Array, ""] | None = None,
    softcap: float | None = None,
    sinks: Float[Array | np.ndarray, " H"] | None = None,
    bias: Bias | None = None,
    causal: bool = True,
    visible_until: Tokens | None = None,
    implementation: Implementation | None = None,
) -> tuple[C, Buffers, Float[Array, "R T H Dv"]]:
    """Implement `jaxkv.attend` for attention layers."""
    layer_kv, sizes = _get_layer_kv(buffers, layer)
    new = () if k is None and v is None else _check_kv(ubatch, sizes, k, v)
    _check_array("q", q)
    if sinks is not None:
        _check_array("sinks", sinks)
    heads, size = sizes.kv_heads, sizes.head_dim
    if (
        q.ndim != 4
        or (*q.shape[:2], q.shape[3]) != (*ubatch.valid.shape, size)
        or q.shape[2] % heads
        or not q.shape[2]
    ):
        raise ValueError(
            f"expected q [R, T, H, D] of {(*ubatch.valid.shape, 'H', size)}, H a multiple of "
            f"{heads}, got {q.shape}; tokens come before heads"
        )
    if isinstance(scale, jax.Array):  # options are static, and an array may be traced
        if scale.ndim:
            raise ValueError(f"expected one scale, got the shape {scale.shape}; pass a scalar")
        q = jnp.asarray(q)
        q, scale = q * _check_array("scale", scale).astype(q.dtype), 1.0
    options = make_options(size**-0.5 if scale is None else scale, softcap, sinks)
    added = check_bias(bias, (*q.shape[:3], layer_kv[0].shape[2]))
    visible_until = _check_visible_until(visible_until, ubatch, causal)
    arrays = new, q, options, added, visible_until
    layer_written = _layer_history(table, layer)
    layer_written, layer_kv, out = _attend_layer(
        table, ubatch, layer_kv, layer_written, *arrays, causal, implementation, sizes
    )
    if not new:
        return table, buffers, out
    return (
        _with_layer_history(table, layer, layer_written),
        buffers.with_layer(layer, *layer_kv),
        out,
    )


def write_kv(
    table: C,
    buffers: Buffers,
    layer: int | Int32[Array, ""],
    ubatch: Ubatch,
    k: Float[Array | np.ndarray, "R T K D"],
    v: Float[Array | np.ndarray, "R T K Dv"] | None,
) -> tuple[C, Buffers]:
    """Implement `jaxkv.write_kv` for attention layers."""
    layer_kv, sizes = _get_layer_kv(buffers, layer)
    new = _check_kv(ubatch, sizes, k, v)
    layer_written = _layer_history(table, layer)
    layer_written, layer_kv = _write_layer(table, ubatch, layer_kv, layer_written, new)
    return _with_layer_history(table, layer, layer_written), buffers.with_layer(layer, *layer_kv)


def read_kv(
    table: Cells,
    buffers: Buffers,
    layer: int | Int32[Array, ""],
    ubatch: Ubatch,
    *,
    causal: bool = True,
    visible_until: Tokens | None = None,
) -> KVView:
    """Implement `jaxkv.read_kv` for attention layers."""
    visible_until = _check_visible_until(visible_until, ubatch, causal)
    layer_kv, sizes = _get_layer_kv(buffers, layer)
    layer_written = _layer_history(table, layer)
    return _visible_kv(table, ubatch, layer_kv, layer_written, visible_until, causal, sizes)


def _layer_history(table: Cells, layer: int | jax.Array) -> jax.Array:
    """Return `table.written[:, layer]`."""
    # XLA on CPUs compiles equal loops once. A loop that slices `written` differs in each layer.
    return stack_unfused([table.written[:, layer], table.history[:, 1]], 1)[:, 0]


def _with_layer_history(table: C, layer: int | jax.Array, layer_written: jax.Array) -> C:
    """Set `table.written[:, layer]`; do nothing if a traced layer number is out of range."""
    written = table.written
    if is_traced(layer):
        here = jnp.arange(written.shape[1]) == layer  # all False for a layer out of range
        written = jnp.where(here, layer_written[:, None], written)
    else:
        # From a concatenation, XLA can read the hashes of one layer without those of other layers.
        parts = written[:, :layer], layer_written[:, None], written[:, layer + 1 :]
        written = jnp.concatenate(parts, axis=1)
    return replace(table, written=written)


def _get_layer_kv(buffers: Buffers, layer: int | jax.Array) -> tuple[LayerKV, HeadSizes]:
    if not is_traced(layer) and not 0 <= layer < buffers.layers:
        raise ValueError(
            f"expected a layer from 0 to {buffers.layers - 1}, got {layer}; make the cache with "
            f"layers= of the model"
        )
    return buffers.layer(layer), buffers.head_sizes[0 if buffers.stacked else layer]


def _check_array(name: str, x: object) -> jax.Array | np.ndarray:
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"expected an array for {name}, got {type(x)}; convert it with jnp.asarray")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"expected floats for {name}, got {x.dtype}; cast them")
    return x


def _check_kv(
    ubatch: Ubatch, sizes: HeadSizes, k: object, v: object
) -> tuple[jax.Array | np.ndarray, ...]:
    """Check the new keys and values; return only the keys if values are slices of the keys."""
    kv_heads, head_dim, values = sizes
    if isinstance(values, ValueSlice):
        if v is not None:
            raise TypeError(
                f"expected keys alone, whose numbers {values.first} to {values.last - 1} are the "
                f"values of this cache, got values too; leave v out"
            )
        entries = (("k", "D", k, head_dim),)
    else:
        if (k is None) != (v is None):
            alone = "keys" if v is None else "values"
            raise TypeError(
                f"expected both keys and values, got only {alone}; pass both, or neither to attend "
                f"without a write"
            )
        entries = (("k", "D", k, head_dim), ("v", "Dv", v, values))
    new_kv = ()
    for name, letter, array, size in entries:
        new = _check_array(name, array)
        shape = (*ubatch.valid.shape, kv_heads, size)
        if new.shape != shape:
            raise ValueError(
                f"expected {name} [R, T, K, {letter}] of {shape}, got {new.shape}; tokens come "
                "before heads, whose sizes are those of the spec"
            )
        new_kv += (new,)
    return new_kv


def _check_visible_until(
    visible_until: Tokens | None, ubatch: Ubatch, causal: bool
) -> jax.Array | None:
    if not isinstance(causal, bool | np.bool_):
        raise TypeError(
            f"expected causal as True or False, known while tracing, got {causal!r}; pass a "
            "Python bool"
        )
    if visible_until is None:
        return None
    if not causal:
        raise ValueError(
            "expected visible_until or causal=False, got both; leave one of them out, since "
            "causal=False makes all later tokens visible"
        )
    last = jnp.asarray(check_int32(visible_until, "visible_until"))
    if last.shape != ubatch.valid.shape:
        raise ValueError(
            f"expected visible_until [R, T] of {ubatch.valid.shape}, the last position that each "
            f"token sees, got {last.shape}; give each token its last visible position"
        )
    return last


def _write_local_kv(
    split: AxisPartition,
    layer_kv: LayerKV,
    ubatch: Ubatch,
    where: jax.Array,
    new: tuple[jax.Array, ...],
) -> LayerKV:
    if not new:
        return layer_kv
    if split.cells:
        first = first_local_index(split.cells, layer_kv[0].shape[2])
        where = offset_slots_into_range(where, first, layer_kv[0].shape[2])
    return write_keys_and_values(*layer_kv, ubatch.row_stream, where, *new)


def _local_visibility(
    split: AxisPartition,
    table: Cells,
    ubatch: Ubatch,
    layer_kv: LayerKV,
    causal: bool,
    visible_until: jax.Array | None,
) -> Visibility:
    visibility, count = (
        visibility_of(table, ubatch, causal=causal, visible_until=visible_until),
        layer_kv[0].shape[2],
    )
    return (
        visibility.slice_cells(first_local_index(split.cells, count), count)
        if split.cells
        else visibility
    )


def _slots_to_write(table: Cells, ubatch: Ubatch, layer_kv: LayerKV) -> tuple[jax.Array, jax.Array]:
    """Return `slots.committed_slots`; if the layer is out of range, no row counts as current."""
    where, current = slots.committed_slots(table, ubatch)
    keys, _ = codes_and_scales(layer_kv[0])
    return where, current & jnp.all(keys.is_in_range) if isinstance(keys, LayerView) else current


def _all_over_axes(flags: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.pmin(flags.astype(jnp.int32), axes) == 1 if axes else flags


@jax.jit
def _write_layer(
    table: Cells,
    ubatch: Ubatch,
    layer_kv: LayerKV,
    layer_written: jax.Array,
    new: tuple[jax.Array, ...],
) -> tuple[jax.Array, LayerKV]:
    split = make_axis_partition(table.sharding_rules, **shardable_sizes(layer_kv[0]))

    def write_on_shard(
        table: Cells,
        ubatch: Ubatch,
        layer_kv: LayerKV,
        layer_written: jax.Array,
        new: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, LayerKV]:
        ubatch = mask_rows_of_other_devices(ubatch, split.streams, table.streams)
        where, _ = slots.committed_slots(table, ubatch)
        layer_written = slots.layer_history_after(table, ubatch, where, layer_written)
        return layer_written, _write_local_kv(split, layer_kv, ubatch, where, new)

    of_new = P(row_mesh_axes(ubatch, split.streams), None, split.kv_heads)
    of_held = layer_partition_specs(split, layer_kv)
    streams = P(split.streams)
    in_specs = (streams, ubatch_partition_specs(ubatch, split.streams), of_held, streams, of_new)
    run = map_shards(table.sharding_rules, write_on_shard, in_specs, (streams, of_held))
    return run(table, ubatch, layer_kv, layer_written, new)


@partial(jax.jit, static_argnames=("causal", "sizes"))
def _visible_kv(
    table: Cells,
    ubatch: Ubatch,
    layer_kv: LayerKV,
    layer_written: jax.Array,
    visible_until: jax.Array | None,
    causal: bool,
    sizes: HeadSizes,
) -> KVView:
    split = make_axis_partition(table.sharding_rules, **shardable_sizes(layer_kv[0]))
    rows = row_mesh_axes(ubatch, split.streams)
    shared_axes = () if rows else split.streams
    heads_per_row = sizes.kv_heads // layer_kv[0].shape[1]

    def read_on_shard(
        table: Cells,
        ubatch: Ubatch,
        layer_kv: LayerKV,
        layer_written: jax.Array,
        visible_until: jax.Array | None,
    ) -> tuple[jax.Array, ...]:
        share = mask_rows_of_other_devices(ubatch, split.streams, table.streams)
        visibility = _local_visibility(split, table, share, layer_kv, causal, visible_until)
        _, current = _slots_to_write(table, share, layer_kv)
        whole = current & slots.can_read_layer(table, share, layer_written)
        if (
            ahead := needs_unwritten_tokens(
                table, share, causal=causal, visible_until=visible_until
            )
        ) is not None:
            whole &= ~jnp.any(ahead, axis=1)
        mask = compute_mask(visibility)
        if shared_axes:  # each row is a list, on all devices
            mask = broadcast_from_owner(mask.reshape(*ubatch.valid.shape, -1), shared_axes)
            lists = partial(gather_sharded, axes=shared_axes, index=ubatch.row_stream)
            (keys, values), positions = jax.tree.map(
                lists, (gather_streams(layer_kv, None), visibility.position)
            )
        else:
            (keys, values), positions = visibility.gather_list_streams(
                (layer_kv, visibility.position)
            )
        flags = _all_over_axes(jnp.stack([current, whole]), shared_axes).reshape(
            2, mask.shape[0], -1
        )
        current, whole = jnp.all(flags, axis=2)[..., None, None]
        keys = dequantise(keys)
        values = values.slice_values(keys) if isinstance(values, ValueSlice) else dequantise(values)
        keys = split_rows_of_cells(keys, heads_per_row, sizes.head_dim)
        values = split_rows_of_cells(values, heads_per_row, sizes.value_dim)
        keys = jnp.where(whole[..., None], keys, jnp.nan)
        return keys, values, mask | ~current, positions

    of_heads = P(rows, split.kv_heads, split.cells)
    out_specs = of_heads, of_heads, P(rows, None, split.cells), P(rows, split.cells)
    of_held = layer_partition_specs(split, layer_kv)
    streams = P(split.streams)
    in_specs = streams, ubatch_partition_specs(ubatch, split.streams), of_held, streams, P(rows)
    run = map_shards(table.sharding_rules, read_on_shard, in_specs, out_specs)
    return KVView(*run(table, ubatch, layer_kv, layer_written, visible_until))


@partial(jax.jit, static_argnames=("causal", "implementation", "sizes"))
def _attend_layer(
    table: Cells,
    ubatch: Ubatch,
    layer_kv: LayerKV,
    layer_written: jax.Array,
    new: tuple[jax.Array, ...],
    q: jax.Array,
    options: AttentionOptions,
    bias: BiasOfLists | None,
    visible_until: jax.Array | None,
    causal: bool,
    implementation: Implementation | None,
    sizes: HeadSizes,
) -> tuple[jax.Array, tuple[PyTree, ...], jax.Array]:
    """Write `new` (if not empty) into a layer, and attend."""
    # If row r is sequence r, devices split rows like streams. Otherwise all devices compute all
    # rows, and one collective merges the partial softmaxes of each row.
    split = make_axis_partition(table.sharding_rules, **shardable_sizes(layer_kv[0]))
    heads = axes_of_queries(
        table.sharding_rules, current_mesh(table.sharding_rules), *layer_kv, q.shape[2]
    )
    rows = row_mesh_axes(ubatch, split.streams)
    shared_axes = () if rows else split.streams
    heads_per_row = sizes.kv_heads // layer_kv[0].shape[1]
    if split.cells and implementation in ("xla", "cudnn"):
        raise ValueError(
            f"expected an implementation for cells that a mesh splits, got {implementation!r}; "
            "pass implementation=None"
        )

    def attend_on_shard(
        table: Cells,
        ubatch: Ubatch,
        layer_kv: LayerKV,
        layer_written: jax.Array,
        new: tuple[jax.Array, ...],
        q: jax.Array,
        options: AttentionOptions,
        bias: BiasOfLists | None,
        visible_until: jax.Array | None,
    ) -> tuple[jax.Array, tuple[PyTree, ...], jax.Array]:
        ubatch = mask_rows_of_other_devices(ubatch, split.streams, table.streams)
        where, current = _slots_to_write(table, ubatch, layer_kv)
        if new:
            layer_written = slots.layer_history_after(table, ubatch, where, layer_written)
        current = (current & slots.can_read_layer(table, ubatch, layer_written))[:, None]
        if (
            ahead := needs_unwritten_tokens(
                table, ubatch, causal=causal, visible_until=visible_until
            )
        ) is not None:
            current &= ~ahead
        visibility = _local_visibility(split, table, ubatch, layer_kv, causal, visible_until)
        if isinstance(bias, jax.Array):
            bias = bias.reshape(*visibility.at.shape, *bias.shape[2:])
        visibility = replace(visibility, bias=bias)
        layer_kv = _write_local_kv(split, layer_kv, ubatch, where, new)
        keys = layer_kv[0]
        lists = q.reshape(*visibility.at.shape, *q.shape[2:])
        lists = pad_queries(lists, keys.shape[1], heads_per_row, keys.shape[3])
        sums = attention.partial_attention(lists, *layer_kv, visibility, options, implementation)
        sums = sums._replace(out=take_own_heads(sums.out, heads_per_row, sizes.value_dim))
        sums = merge_over_devices(sums, (*split.cells, *shared_axes))
        out = attention.finalize(sums, lists, options)
        out = out.reshape(*q.shape[:3], -1)
        current = _all_over_axes(current, shared_axes)
        out = jnp.where(current[..., None, None], out, jnp.nan)
        return layer_written, (layer_kv if new else ()), out

    of_new, of_queries = P(rows, None, split.kv_heads), P(rows, None, heads)
    of_held = layer_partition_specs(split, layer_kv)
    in_specs = (
        P(split.streams),
        ubatch_partition_specs(ubatch, split.streams),
        of_held,
        P(split.streams),
        of_new,
        of_queries,
        P(heads),
        _specs_of_bias(bias, rows, heads, split.cells),
        P(rows),
    )
    out_specs = P(split.streams), (of_held if new else ()), of_queries
    run = map_shards(table.sharding_rules, attend_on_shard, in_specs, out_specs)
    return run(table, ubatch, layer_kv, layer_written, new, q, options, bias, visible_until)


def _specs_of_bias(
    bias: BiasOfLists | None, rows: tuple[str, ...], heads: tuple[str, ...], cells: tuple[str, ...]
) -> PositionBias | P | None:
    """Return the `PartitionSpec` of a bias, split by rows, query heads and cells."""
    if isinstance(bias, PositionBias):
        return replace(bias, function=P(), heads=P(heads))
    if bias is None:
        return None
    return P(rows, None, heads if bias.shape[2] > 1 else (), cells)
