"""Implementations of `attend`, `write_kv` and `read_kv` for attention layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxkv.core.array_utils import is_traced
from jaxkv.core.constants import MAX_CELLS
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
from jaxkv.kv.mask import needs_unwritten_tokens, visibility_of
from jaxkv.ops.attention import dispatch as attention
from jaxkv.ops.attention.bias import Bias, BiasOfLists, PositionBias, check_bias
from jaxkv.ops.attention.dispatch import Implementation
from jaxkv.ops.attention.softmax import AttentionOptions, make_options, merge_over_devices
from jaxkv.ops.attention.visibility import Visibility, compute_mask
from jaxkv.ops.storage.head_rows import pad_queries, split_rows_of_cells, take_own_heads
from jaxkv.ops.storage.latent import ValueSlice
from jaxkv.ops.storage.layer_stack import LayerView, gather_streams
from jaxkv.ops.storage.quantised import codes_and_scales, dequantise
from jaxkv.step import Step, mask_step_rows, step_partition_specs, without_buffers
from jaxkv.table import KVView
from jaxkv.ubatch import CrossAttentionSlots, Ubatch, row_mesh_axes

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree

    from jaxkv.core.types import Tokens


def attend(
    step: Step,
    layer: int | Int32[Array, ""],
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
) -> tuple[Buffers, Float[Array, "R T H Dv"]]:
    """Implement `jaxkv.attend` for a step of an attention cache; return its next buffers."""
    writes = k is not None or v is not None
    step, causal = _as_reader_of_sources(step, causal, visible_until, writes=writes)
    ubatch, (layer_kv, sizes) = step.ubatch, _get_layer_kv(step.buffers, layer)
    new = _check_kv(ubatch, sizes, k, v) if writes else ()
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
    layer_kv, out = _attend_layer(
        without_buffers(step),
        layer_kv,
        _incomplete_streams(step, layer, writes=writes),
        new,
        q,
        options,
        added,
        visible_until,
        causal,
        implementation,
        sizes,
    )
    return step.buffers.with_layer(layer, *layer_kv) if new else step.buffers, out


def write_kv(
    step: Step,
    layer: int | Int32[Array, ""],
    k: Float[Array | np.ndarray, "R T K D"],
    v: Float[Array | np.ndarray, "R T K Dv"] | None,
) -> Buffers:
    """Implement `jaxkv.write_kv` for a step of an attention cache; return its next buffers."""
    step, _ = _as_reader_of_sources(step, causal=True, visible_until=None, writes=True)
    layer_kv, sizes = _get_layer_kv(step.buffers, layer)
    new = _check_kv(step.ubatch, sizes, k, v)
    return step.buffers.with_layer(layer, *_write_layer(without_buffers(step), layer_kv, new))


def read_kv(
    step: Step,
    layer: int | Int32[Array, ""],
    *,
    causal: bool = True,
    visible_until: Tokens | None = None,
) -> KVView:
    """Implement `jaxkv.read_kv` for a step of an attention cache."""
    step, causal = _as_reader_of_sources(step, causal, visible_until, writes=False)
    visible_until = _check_visible_until(visible_until, step.ubatch, causal)
    layer_kv, sizes = _get_layer_kv(step.buffers, layer)
    incomplete = _incomplete_streams(step, layer, writes=False)
    return _visible_kv(without_buffers(step), layer_kv, incomplete, visible_until, causal, sizes)


def _incomplete_streams(step: Step, layer: int | jax.Array, *, writes: bool) -> jax.Array | None:
    """Return in which streams a layer of a stacked cache lacks keys, `[S]` bool; else None."""
    if step.is_written is None:
        return None
    incomplete = step.table.incomplete[:, layer]
    return incomplete if writes else incomplete | ~step.is_written[layer]


def _as_reader_of_sources(
    step: Step, causal: bool, visible_until: Tokens | None, *, writes: bool
) -> tuple[Step, bool]:
    """For decoder tokens in a cross-attention part, return a step that sees the whole source.

    The second result is the option `causal`. Other steps are returned unchanged.
    """
    ubatch = step.ubatch
    if not isinstance(ubatch.slots, CrossAttentionSlots):
        return step, causal
    if writes:
        raise ValueError(
            "expected queries only for a cross-attention layer, got keys and values; write these "
            "for the ubatch of init_batch(encoder=True)"
        )
    if visible_until is not None:
        raise ValueError("expected no visible_until for a source, got one; leave it out")
    # All sequences of a shared token have the same source, so the first sequence is sufficient.
    no_more = jnp.zeros_like(ubatch.continues_later)  # the source is complete in every ubatch
    ubatch = replace(ubatch, slots=ubatch.slots.looks, shared_with=None, continues_later=no_more)
    return replace(step, ubatch=ubatch), False


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
    split: AxisPartition, layer_kv: LayerKV, ubatch: Ubatch, new: tuple[jax.Array, ...]
) -> LayerKV:
    slots = ubatch.slots
    if split.cells:
        first = first_local_index(split.cells, layer_kv[0].shape[2])
        slots = offset_slots_into_range(slots, first, layer_kv[0].shape[2])
    return write_keys_and_values(*layer_kv, ubatch.row_stream, slots, *new)


def _local_visibility(
    split: AxisPartition,
    step: Step,
    layer_kv: LayerKV,
    causal: bool,
    visible_until: jax.Array | None,
) -> Visibility:
    visibility, count = (
        visibility_of(step, causal=causal, visible_until=visible_until),
        layer_kv[0].shape[2],
    )
    return (
        visibility.slice_cells(first_local_index(split.cells, count), count)
        if split.cells
        else visibility
    )


def _is_readable(
    step: Step,
    layer_kv: LayerKV,
    incomplete: jax.Array | None,
    causal: bool,
    visible_until: jax.Array | None,
) -> Bool[Array, "R _"]:
    """Return which tokens, or rows of tokens, can attend to a layer; the others get NaN."""
    readable = ~step.is_stale
    if incomplete is not None:  # rows without slots have zeros, as in a refused plan
        has_slots = jnp.any(step.ubatch.slots < MAX_CELLS, axis=1)
        readable &= ~(incomplete[step.ubatch.row_stream] & has_slots)
    keys, _ = codes_and_scales(layer_kv[0])
    if isinstance(keys, LayerView):
        readable &= jnp.all(keys.is_in_range)
    ahead = needs_unwritten_tokens(step, causal=causal, visible_until=visible_until)
    return readable[:, None] if ahead is None else readable[:, None] & ~ahead


def _all_over_axes(flags: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.pmin(flags.astype(jnp.int32), axes) == 1 if axes else flags


@jax.jit
def _write_layer(step: Step, layer_kv: LayerKV, new: tuple[jax.Array, ...]) -> LayerKV:
    table = step.table
    split = make_axis_partition(table.sharding_rules, **shardable_sizes(layer_kv[0]))

    def write_on_shard(step: Step, layer_kv: LayerKV, new: tuple[jax.Array, ...]) -> LayerKV:
        step = mask_step_rows(step, split.streams)
        return _write_local_kv(split, layer_kv, step.ubatch, new)

    new_specs = P(row_mesh_axes(step.ubatch, split.streams), None, split.kv_heads)
    kv_specs = layer_partition_specs(split, layer_kv)
    in_specs = step_partition_specs(step, split.streams), kv_specs, new_specs
    run = map_shards(table.sharding_rules, write_on_shard, in_specs, kv_specs)
    return run(step, layer_kv, new)


@partial(jax.jit, static_argnames=("causal", "sizes"))
def _visible_kv(
    step: Step,
    layer_kv: LayerKV,
    incomplete: jax.Array | None,
    visible_until: jax.Array | None,
    causal: bool,
    sizes: HeadSizes,
) -> KVView:
    table, ubatch = step.table, step.ubatch
    split = make_axis_partition(table.sharding_rules, **shardable_sizes(layer_kv[0]))
    rows = row_mesh_axes(ubatch, split.streams)
    shared_axes = () if rows else split.streams
    heads_per_row = sizes.kv_heads // layer_kv[0].shape[1]

    def read_on_shard(
        step: Step,
        layer_kv: LayerKV,
        incomplete: jax.Array | None,
        visible_until: jax.Array | None,
    ) -> tuple[jax.Array, ...]:
        own = mask_step_rows(step, split.streams)
        visibility = _local_visibility(split, own, layer_kv, causal, visible_until)
        current = ~own.is_stale
        readable = _is_readable(own, layer_kv, incomplete, causal, visible_until)
        readable = jnp.all(readable, axis=1)
        mask = compute_mask(visibility)
        if shared_axes:  # each row is a list, on all devices
            mask = broadcast_from_owner(mask.reshape(*ubatch.valid.shape, -1), shared_axes)
            lists = partial(gather_sharded, axes=shared_axes, index=step.ubatch.row_stream)
            (keys, values), positions = jax.tree.map(
                lists, (gather_streams(layer_kv, None), visibility.position)
            )
        else:
            (keys, values), positions = visibility.gather_list_streams(
                (layer_kv, visibility.position)
            )
        flags = _all_over_axes(jnp.stack([current, readable]), shared_axes)
        flags = flags.reshape(2, mask.shape[0], -1)
        current, readable = jnp.all(flags, axis=2)[..., None, None]
        keys = dequantise(keys)
        values = values.slice_values(keys) if isinstance(values, ValueSlice) else dequantise(values)
        keys = split_rows_of_cells(keys, heads_per_row, sizes.head_dim)
        values = split_rows_of_cells(values, heads_per_row, sizes.value_dim)
        keys = jnp.where(readable[..., None], keys, jnp.nan)
        return keys, values, mask | ~current, positions

    of_heads = P(rows, split.kv_heads, split.cells)
    out_specs = of_heads, of_heads, P(rows, None, split.cells), P(rows, split.cells)
    kv_specs = layer_partition_specs(split, layer_kv)
    in_specs = step_partition_specs(step, split.streams), kv_specs, P(split.streams), P(rows)
    run = map_shards(table.sharding_rules, read_on_shard, in_specs, out_specs)
    return KVView(*run(step, layer_kv, incomplete, visible_until))


@partial(jax.jit, static_argnames=("causal", "implementation", "sizes"))
def _attend_layer(
    step: Step,
    layer_kv: LayerKV,
    incomplete: jax.Array | None,
    new: tuple[jax.Array, ...],
    q: jax.Array,
    options: AttentionOptions,
    bias: BiasOfLists | None,
    visible_until: jax.Array | None,
    causal: bool,
    implementation: Implementation | None,
    sizes: HeadSizes,
) -> tuple[tuple[PyTree, ...], jax.Array]:
    """Write `new` (if not empty) into a layer, and attend."""
    # If row r is sequence r, devices split rows like streams. Otherwise all devices compute all
    # rows, and one collective merges the partial softmaxes of each row.
    rules = step.table.sharding_rules
    split = make_axis_partition(rules, **shardable_sizes(layer_kv[0]))
    heads = axes_of_queries(rules, current_mesh(rules), *layer_kv, q.shape[2])
    rows = row_mesh_axes(step.ubatch, split.streams)
    shared_axes = () if rows else split.streams
    heads_per_row = sizes.kv_heads // layer_kv[0].shape[1]
    if split.cells and implementation in ("xla", "cudnn"):
        raise ValueError(
            f"expected an implementation for cells that a mesh splits, got {implementation!r}; "
            "pass implementation=None"
        )

    def attend_on_shard(
        step: Step,
        layer_kv: LayerKV,
        incomplete: jax.Array | None,
        new: tuple[jax.Array, ...],
        q: jax.Array,
        options: AttentionOptions,
        bias: BiasOfLists | None,
        visible_until: jax.Array | None,
    ) -> tuple[tuple[PyTree, ...], jax.Array]:
        step = mask_step_rows(step, split.streams)
        readable = _is_readable(step, layer_kv, incomplete, causal, visible_until)
        visibility = _local_visibility(split, step, layer_kv, causal, visible_until)
        if isinstance(bias, jax.Array):
            bias = bias.reshape(*visibility.at.shape, *bias.shape[2:])
        visibility = replace(visibility, bias=bias)
        if new:
            layer_kv = _write_local_kv(split, layer_kv, step.ubatch, new)
        keys = layer_kv[0]
        lists = q.reshape(*visibility.at.shape, *q.shape[2:])
        lists = pad_queries(lists, keys.shape[1], heads_per_row, keys.shape[3])
        sums = attention.partial_attention(lists, *layer_kv, visibility, options, implementation)
        sums = sums._replace(out=take_own_heads(sums.out, heads_per_row, sizes.value_dim))
        sums = merge_over_devices(sums, (*split.cells, *shared_axes))
        out = attention.finalize(sums, lists, options)
        out = out.reshape(*q.shape[:3], -1)
        readable = _all_over_axes(readable, shared_axes)
        out = jnp.where(readable[..., None, None], out, jnp.nan)
        return (layer_kv if new else ()), out

    new_specs, query_specs = P(rows, None, split.kv_heads), P(rows, None, heads)
    kv_specs = layer_partition_specs(split, layer_kv)
    in_specs = (
        step_partition_specs(step, split.streams),
        kv_specs,
        P(split.streams),
        new_specs,
        query_specs,
        P(heads),
        _specs_of_bias(bias, rows, heads, split.cells),
        P(rows),
    )
    out_specs = (kv_specs if new else ()), query_specs
    run = map_shards(rules, attend_on_shard, in_specs, out_specs)
    return run(step, layer_kv, incomplete, new, q, options, bias, visible_until)


def _specs_of_bias(
    bias: BiasOfLists | None, rows: tuple[str, ...], heads: tuple[str, ...], cells: tuple[str, ...]
) -> PositionBias | P | None:
    """Return the `PartitionSpec` of a bias, split by rows, query heads and cells."""
    if isinstance(bias, PositionBias):
        return replace(bias, function=P(), heads=P(heads))
    if bias is None:
        return None
    return P(rows, None, heads if bias.shape[2] > 1 else (), cells)
