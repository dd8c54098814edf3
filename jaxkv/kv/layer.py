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
)
from jaxkv.core.validate import check_int32, check_static_bool
from jaxkv.kv.attend_lists import attend_lists
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.layer_kv import LayerKV, NewKV, check_floats, shardable_sizes
from jaxkv.kv.mask import list_shape, needs_unwritten_tokens, visibility_of
from jaxkv.kv.shards import Shard
from jaxkv.ops.attention.active_tiles import split_visibility
from jaxkv.ops.attention.bias import Bias, BiasOfLists, PositionBias, check_bias
from jaxkv.ops.attention.dispatch import Implementation
from jaxkv.ops.attention.softmax import AttentionOptions, make_options
from jaxkv.ops.attention.visibility import Visibility, compute_mask
from jaxkv.ops.storage.layer_stack import gather_streams, layer_views
from jaxkv.step import Step, map_step, without_buffers
from jaxkv.table import KVView
from jaxkv.ubatch import CrossAttentionSlots, Ubatch, row_mesh_axes

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32

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
    select: Int32[Array | np.ndarray, "P _ n"] | None = None,
    implementation: Implementation | None = None,
    return_mass: bool = False,
) -> tuple[Buffers, Float[Array, "R T H Dv"], *tuple[Float[Array, "P H N"], ...]]:
    """Implement `jaxkv.attend` for a step of an attention cache; return its next buffers."""
    writes = k is not None or v is not None
    step, causal = _as_reader_of_sources(step, causal, visible_until, writes=writes)
    ubatch, layer_kv = step.ubatch, _get_layer_kv(step.buffers, layer)
    new = layer_kv.check_new(ubatch.valid.shape, k, v) if writes else ()
    check_floats("q", q)
    if sinks is not None:
        check_floats("sinks", sinks)
    heads, size, _ = layer_kv.sizes
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
        q, scale = q * check_floats("scale", scale).astype(q.dtype), 1.0
    check_static_bool(return_mass, "return_mass")
    options = make_options(
        size**-0.5 if scale is None else scale, softcap, sinks, keep_weights=return_mass
    )
    added = check_bias(bias, (*q.shape[:3], layer_kv.num_cells))
    visible_until = _check_visible_until(visible_until, ubatch, causal)
    select = _check_select(select, step)
    layer_kv, out, mass = _attend_layer(
        without_buffers(step),
        layer_kv,
        _incomplete_streams(step, layer, writes=writes),
        new,
        q,
        options,
        added,
        visible_until,
        select,
        causal,
        implementation,
    )
    buffers = step.buffers.with_layer(layer, layer_kv) if new else step.buffers
    return buffers, out, *(() if mass is None else (mass,))


def write_kv(
    step: Step,
    layer: int | Int32[Array, ""],
    k: Float[Array | np.ndarray, "R T K D"],
    v: Float[Array | np.ndarray, "R T K Dv"] | None,
) -> Buffers:
    """Implement `jaxkv.write_kv` for a step of an attention cache; return its next buffers."""
    step, _ = _as_reader_of_sources(step, causal=True, visible_until=None, writes=True)
    layer_kv = _get_layer_kv(step.buffers, layer)
    new = layer_kv.check_new(step.valid.shape, k, v)
    return step.buffers.with_layer(layer, _write_layer(without_buffers(step), layer_kv, new))


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
    layer_kv = _get_layer_kv(step.buffers, layer)
    incomplete = _incomplete_streams(step, layer, writes=False)
    return _visible_kv(without_buffers(step), layer_kv, incomplete, visible_until, causal)


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


def _get_layer_kv(buffers: Buffers, layer: int | jax.Array) -> LayerKV:
    if not is_traced(layer) and not 0 <= layer < buffers.layers:
        raise ValueError(
            f"expected a layer from 0 to {buffers.layers - 1}, got {layer}; make the cache with "
            f"layers= of the model"
        )
    return buffers.layer(layer)


def _check_visible_until(
    visible_until: Tokens | None, ubatch: Ubatch, causal: bool
) -> jax.Array | None:
    check_static_bool(causal, "causal")
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


def _check_select(select: jax.Array | np.ndarray | None, step: Step) -> jax.Array | None:
    if select is None:
        return None
    cells, lists = jnp.asarray(check_int32(select, "select")), list_shape(step)
    if cells.ndim != 3 or cells.shape[:2] != lists or not cells.size:
        raise ValueError(
            f"expected select [P, T, n] of {(*lists, 'n')}, at least one cell for each token, got "
            f"{cells.shape}; P and T are sizes of the mask of read_kv"
        )
    return cells


def _write_local_kv(axes: AxisPartition, layer_kv: LayerKV, ubatch: Ubatch, new: NewKV) -> LayerKV:
    slots = Shard(cells=axes.cells).to_local_slots(ubatch.slots, layer_kv.num_cells)
    return layer_kv.write(ubatch.row_stream, slots, new)


def _local_visibility(
    axes: AxisPartition,
    step: Step,
    layer_kv: LayerKV,
    causal: bool,
    visible_until: jax.Array | None,
) -> Visibility:
    visibility = visibility_of(step, causal=causal, visible_until=visible_until)
    if not axes.cells:
        return visibility
    first = first_local_index(axes.cells, layer_kv.num_cells)
    return visibility.slice_cells(first, layer_kv.num_cells)


def _may_attend(
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
    for view in layer_views(layer_kv)[:1]:
        readable &= jnp.all(view.is_in_range)
    ahead = needs_unwritten_tokens(step, causal=causal, visible_until=visible_until)
    return readable[:, None] if ahead is None else readable[:, None] & ~ahead


def _all_over_axes(flags: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.pmin(flags.astype(jnp.int32), axes) == 1 if axes else flags


@jax.jit
def _write_layer(step: Step, layer_kv: LayerKV, new: NewKV) -> LayerKV:
    axes = make_axis_partition(step.table.sharding_rules, **shardable_sizes(layer_kv.keys))

    def write_on_shard(step: Step, layer_kv: LayerKV, new: NewKV) -> LayerKV:
        return _write_local_kv(axes, layer_kv, step.ubatch, new)

    new_specs = P(row_mesh_axes(step.ubatch, axes.streams), None, axes.kv_heads)
    kv_specs = layer_kv.partition_specs(axes)
    return map_step(
        step, axes.streams, write_on_shard, (layer_kv, new), (kv_specs, new_specs), kv_specs
    )


@partial(jax.jit, static_argnames="causal")
def _visible_kv(
    step: Step,
    layer_kv: LayerKV,
    incomplete: jax.Array | None,
    visible_until: jax.Array | None,
    causal: bool,
) -> KVView:
    ubatch = step.ubatch
    axes = make_axis_partition(step.table.sharding_rules, **shardable_sizes(layer_kv.keys))
    rows = row_mesh_axes(ubatch, axes.streams)
    shared_axes = () if rows else axes.streams

    def read_on_shard(
        step: Step,
        layer_kv: LayerKV,
        incomplete: jax.Array | None,
        visible_until: jax.Array | None,
        row_stream: jax.Array,
    ) -> tuple[jax.Array, ...]:
        visibility = _local_visibility(axes, step, layer_kv, causal, visible_until)
        current = ~step.is_stale
        readable = _may_attend(step, layer_kv, incomplete, causal, visible_until)
        readable = jnp.all(readable, axis=1)
        mask = compute_mask(visibility)
        if shared_axes:  # each row is a list, on all devices
            mask = broadcast_from_owner(mask.reshape(*ubatch.valid.shape, -1), shared_axes)
            lists = partial(gather_sharded, axes=shared_axes, index=row_stream)
            layer_kv, positions = jax.tree.map(
                lists, (gather_streams(layer_kv, None), visibility.position)
            )
        else:
            layer_kv, positions = visibility.gather_list_streams((layer_kv, visibility.position))
        flags = _all_over_axes(jnp.stack([current, readable]), shared_axes)
        flags = flags.reshape(2, mask.shape[0], -1)
        current, readable = jnp.all(flags, axis=2)[..., None, None]
        keys, values = layer_kv.decode()
        keys = jnp.where(readable[..., None], keys, jnp.nan)
        return keys, values, mask | ~current, positions

    of_heads = P(rows, axes.kv_heads, axes.cells)
    out_specs = of_heads, of_heads, P(rows, None, axes.cells), P(rows, axes.cells)
    in_specs = layer_kv.partition_specs(axes), P(axes.streams), P(rows), P(rows)
    args = layer_kv, incomplete, visible_until, ubatch.row_stream
    return KVView(*map_step(step, axes.streams, read_on_shard, args, in_specs, out_specs))


@partial(jax.jit, static_argnames=("causal", "implementation"))
def _attend_layer(
    step: Step,
    layer_kv: LayerKV,
    incomplete: jax.Array | None,
    new: NewKV,
    q: jax.Array,
    options: AttentionOptions,
    bias: BiasOfLists | None,
    visible_until: jax.Array | None,
    select: jax.Array | None,
    causal: bool,
    implementation: Implementation | None,
) -> tuple[LayerKV | None, jax.Array, jax.Array | None]:
    """Write `new` (if not empty) into a layer, attend, and return the mass that options require."""
    # If row r is sequence r, devices split rows like streams. Otherwise all devices compute all
    # rows, and one collective merges the partial softmaxes of each row.
    rules = step.table.sharding_rules
    axes = make_axis_partition(rules, **shardable_sizes(layer_kv.keys))
    heads = layer_kv.query_axes(rules, current_mesh(rules), q.shape[2])
    rows = row_mesh_axes(step.ubatch, axes.streams)
    shared_axes = () if rows else axes.streams
    if axes.cells and implementation in ("xla", "cudnn"):
        raise ValueError(
            f"expected an implementation for cells that a mesh splits, got {implementation!r}; "
            "pass implementation=None"
        )

    def attend_on_shard(
        step: Step,
        layer_kv: LayerKV,
        incomplete: jax.Array | None,
        new: NewKV,
        q: jax.Array,
        options: AttentionOptions,
        bias: BiasOfLists | None,
        visible_until: jax.Array | None,
        select: jax.Array | None,
    ) -> tuple[LayerKV | None, jax.Array, jax.Array | None]:
        readable = _may_attend(step, layer_kv, incomplete, causal, visible_until)
        visibility = _local_visibility(axes, step, layer_kv, causal, visible_until)
        if shared_axes and options.keep_weights:  # each row is a list, on all devices
            visibility = split_visibility(visibility, len(q) // len(visibility.at))
        if isinstance(bias, jax.Array):
            bias = bias.reshape(*visibility.at.shape, *bias.shape[2:])
        visibility = replace(visibility, bias=bias)
        if new:
            layer_kv = _write_local_kv(axes, layer_kv, step.ubatch, new)
        if select is not None:
            select = Shard(cells=axes.cells).to_local_slots(select, layer_kv.num_cells)
            select = select.reshape(*visibility.at.shape, -1)
        lists, merged = q.reshape(*visibility.at.shape, *q.shape[2:]), (*axes.cells, *shared_axes)
        out, mass = attend_lists(
            layer_kv, lists, visibility, select, options, merged, implementation
        )
        out = out.reshape(*q.shape[:3], -1)
        readable = _all_over_axes(readable, shared_axes)
        out = jnp.where(readable[..., None, None], out, jnp.nan)
        if mass is not None:
            of_lists = jnp.all(readable.reshape(len(mass), -1), axis=1)[:, None, None]
            mass = jax.lax.psum(mass, shared_axes) if shared_axes else mass
            mass = jnp.where(of_lists, mass, jnp.nan)
        return (layer_kv if new else None), out, mass

    new_specs, query_specs = P(rows, None, axes.kv_heads), P(rows, None, heads)
    kv_specs = layer_kv.partition_specs(axes)
    in_specs = kv_specs, P(axes.streams), new_specs, query_specs, P(heads)
    in_specs += _specs_of_bias(bias, rows, heads, axes.cells), P(rows), P(rows)
    mass_specs = P(rows, heads, axes.cells) if options.keep_weights else None
    out_specs = (kv_specs if new else None), query_specs, mass_specs
    args = layer_kv, incomplete, new, q, options, bias, visible_until, select
    return map_step(step, axes.streams, attend_on_shard, args, in_specs, out_specs)


def _specs_of_bias(
    bias: BiasOfLists | None, rows: tuple[str, ...], heads: tuple[str, ...], cells: tuple[str, ...]
) -> PositionBias | P | None:
    """Return the `PartitionSpec` of a bias, split by rows, query heads and cells."""
    if isinstance(bias, PositionBias):
        return replace(bias, function=P(), heads=P(heads))
    if bias is None:
        return None
    return P(rows, None, heads if bias.shape[2] > 1 else (), cells)
