"""Copying of sequences between streams, if each stream has one sequence."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxkv.core.array_utils import DROP, FILL, out_of_range_slots
from jaxkv.core.hashing import hash_overwritten_cells
from jaxkv.core.loops import differentiable_fori_loop
from jaxkv.core.partitioning import (
    AxisPartition,
    first_local_index,
    gather_sharded,
    make_axis_partition,
    map_shards,
    to_local_index,
)
from jaxkv.kv.buffers import (
    Buffers,
    Cached,
    KVPartitions,
    copy_cell_run,
    gather_from_any_device,
    map_kv,
    scatter_local,
    stream_cell_axes,
)
from jaxkv.kv.cells import (
    C,
    Cells,
    evicted_below_of_copy,
    incomplete_layers,
    is_cell_empty,
    is_in_range,
    is_sequence,
    with_owners,
)
from jaxkv.kv.shift import CHUNK
from jaxkv.ops.layer_stack import map_arrays

if TYPE_CHECKING:
    from jaxtyping import Array, Int32, PyTree


def copy_between_streams(
    cells: C,
    buffers: Buffers,
    src: Int32[Array, ""],
    dst: Int32[Array, "*n"],
    start: Int32[Array, ""],
    stop: Int32[Array, ""],
) -> tuple[C, Buffers]:
    """Replace sequences `dst` (except `src`) by copies of the tokens of `src` in a range."""
    # Copied tokens keep their cell indices, so contiguous cells are copied as slices.
    targets = jnp.atleast_1d(dst)

    def copy_into_target(i: jax.Array, carry: tuple[C, jax.Array]) -> tuple[C, jax.Array]:
        cells, count = _copy_range(carry[0], src, targets[i], start, stop)
        return cells, carry[1].at[i].set(count)

    begin = cells, jnp.zeros(targets.size, jnp.int32)
    table, counts = jax.lax.fori_loop(
        jnp.int32(0), jnp.int32(targets.size), copy_into_target, begin
    )
    return table, map_kv(cells.sharding_rules, buffers, _copy_runs, src, targets, counts)


def _copy_range(
    cells: C, src: jax.Array, dst: jax.Array, start: jax.Array, stop: jax.Array
) -> tuple[C, jax.Array]:
    """Copy a range of `src` to `dst` in the table; return how many cells to copy in buffers."""
    is_copied = is_sequence(cells, src) & is_sequence(cells, dst) & (src != dst)
    axes = make_axis_partition(cells.sharding_rules, streams=cells.streams).streams

    def copy_on_shard(
        cells: C, is_copied: jax.Array, src: jax.Array, dst: jax.Array, *bounds: jax.Array
    ) -> tuple[C, jax.Array]:
        source = jax.tree.map(lambda field: gather_sharded(field, axes, src)[None], cells)
        return _replace_range(
            cells, source, is_copied, dst - first_local_index(axes, cells.streams), *bounds
        )

    run = map_shards(cells.sharding_rules, copy_on_shard, (P(axes), *(P(),) * 5), (P(axes), P()))
    return run(cells, is_copied, src, dst, start, stop)


def _replace_range(
    cells: C,
    source: C,
    is_copied: jax.Array,
    dst: jax.Array,
    start: jax.Array,
    stop: jax.Array,
) -> tuple[C, jax.Array]:
    """If `is_copied`, replace stream `dst` by the cells of `source` in a range of positions.

    The table `source` has a single stream. Also returns how many cells of the buffers to copy.
    """
    shared = is_in_range(source, start, stop)  # [1, N]
    index = jnp.arange(cells.num_cells, dtype=jnp.int32)
    end = jnp.where(is_copied, jnp.max(jnp.where(shared[0], index, -1)) + 1, 0)
    count = _round_up_to_chunks(cells, end)
    copy = replace(
        with_owners(source, jnp.where(shared[:, None], source.owners, 0)),
        evicted_below=evicted_below_of_copy(source, jnp.int32(0), start, stop)[None],
        incomplete=incomplete_layers(source),
    )
    return _put_streams(cells, copy, jnp.where(is_copied, dst, cells.streams)[None], count), count


def _put_streams(cells: C, copies: C, targets: jax.Array, count: jax.Array) -> C:
    """Replace streams `targets` by those of `copies`, and change the stamps of `count` cells."""
    # A target outside of `cells` belongs to another device and is skipped.
    old = cells.stamp.at[targets].get(**FILL, fill_value=0)
    is_written = jnp.arange(cells.num_cells, dtype=jnp.int32) < count
    stamp = jnp.where(is_written, hash_overwritten_cells(old, copies.stamp), old)

    def put(field: jax.Array, value: jax.Array) -> jax.Array:
        return field.at[targets].set(value, **DROP)

    return jax.tree.map(put, cells, replace(copies, stamp=stamp))


def _copy_runs(
    split: KVPartitions, src: jax.Array, targets: jax.Array, counts: jax.Array, arrays: PyTree
) -> PyTree:
    """Copy the first `counts[i]` cells of stream `src` to stream `targets[i]`, for each i."""
    share, size, _ = _local_chunk_sizes(split, arrays, counts)

    def copy_to_target(
        i: jax.Array, arrays: PyTree, src: jax.Array, targets: jax.Array, counts: jax.Array
    ) -> PyTree:
        _, _, count = _local_chunk_sizes(split, arrays, counts[i])
        return differentiable_fori_loop(
            copy_chunk, -(-count // size), -(-share // size), arrays, src, targets[i], count
        )

    def copy_chunk(
        j: jax.Array, arrays: PyTree, src: jax.Array, dst: jax.Array, count: jax.Array
    ) -> PyTree:
        first = jnp.minimum(j * size, share - size)  # the last chunk may overlap
        dst = jnp.where(j * size < count, dst, src)  # chunks past `count` are copied to themselves

        def copy_array(x: Cached, how: AxisPartition) -> Cached:
            return copy_cell_run(how, x, src, dst, first, size, count)

        return map_arrays(copy_array, arrays, split)

    num_targets = targets.size
    return differentiable_fori_loop(
        copy_to_target, jnp.int32(num_targets), num_targets, arrays, src, targets, counts
    )


def select_between_streams(
    cells: C, buffers: Buffers, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
) -> tuple[C, Buffers]:
    """Replace distinct `targets` by copies of their parents; skip targets outside `[0, Q)`."""
    # Each chunk is read from all parents before a target is written, so sequences can be swapped.
    is_copied = is_sequence(cells, targets)
    targets = jnp.where(is_copied, targets, cells.streams)
    source = jnp.where(is_copied, parents, 0)
    axes = make_axis_partition(cells.sharding_rules, streams=cells.streams).streams
    run = map_shards(
        cells.sharding_rules,
        partial(_replace_streams, axes),
        (P(axes), P(), P(), P()),
        (P(axes), P()),
    )
    selected, count = run(cells, source, targets, is_copied)
    return selected, map_kv(
        cells.sharding_rules, buffers, _select_cells, source, targets, is_copied, count
    )


def _replace_streams(
    axes: tuple[str, ...], cells: C, source: jax.Array, targets: jax.Array, is_copied: jax.Array
) -> tuple[C, jax.Array]:
    """Replace stream `targets[i]` by stream `source[i]`, if `is_copied[i]` is True."""
    copies = jax.tree.map(lambda field: gather_sharded(field, axes, source), cells)
    index = jnp.arange(cells.num_cells, dtype=jnp.int32)
    used_cells = jnp.where(is_copied[:, None] & ~is_cell_empty(copies), index, -1)
    count = _round_up_to_chunks(cells, jnp.max(used_cells) + 1)
    local, is_own = to_local_index(targets, axes, cells.streams)
    local = jnp.where(is_copied & is_own, local, cells.streams)
    return _put_streams(cells, copies, local, count), count


def _select_cells(
    split: KVPartitions,
    source: jax.Array,
    targets: jax.Array,
    is_copied: jax.Array,
    count: jax.Array,
    arrays: PyTree,
) -> PyTree:
    """Copy `count` cells of stream `source[i]` to stream `targets[i]`, if `is_copied[i]`."""
    share, size, count = _local_chunk_sizes(split, arrays, count)

    def select_chunk(
        i: jax.Array,
        arrays: PyTree,
        source: jax.Array,
        targets: jax.Array,
        is_copied: jax.Array,
        count: jax.Array,
    ) -> PyTree:
        slots = jnp.broadcast_to(i * size + jnp.arange(size), (targets.size, size))
        slots = jnp.where(is_copied[:, None] & (slots < count), slots, out_of_range_slots(slots))

        def copy_array(x: Cached, how: AxisPartition) -> Cached:
            how = replace(how, cells=())  # cell indices do not change, so shards are independent
            return scatter_local(
                how,
                x,
                targets[:, None],
                slots,
                gather_from_any_device(how, x, source[:, None], slots),
            )

        return map_arrays(copy_array, arrays, split)

    args = source, targets, is_copied, count
    return differentiable_fori_loop(
        select_chunk, -(-count // size), -(-share // size), arrays, *args
    )


def _round_up_to_chunks(cells: Cells, count: jax.Array) -> jax.Array:
    size = min(CHUNK, cells.num_cells)
    return jnp.minimum(-(-count // size) * size, cells.num_cells)


def _local_chunk_sizes(
    split: KVPartitions, arrays: PyTree, count: jax.Array
) -> tuple[int, int, jax.Array]:
    """Return how many cells are in a shard, in a chunk, and to be copied in the local shard."""
    share = arrays[0][0].shape[2]
    first = first_local_index(stream_cell_axes(split).cells, share)
    return share, min(CHUNK, share), jnp.clip(count - first, 0, share)
