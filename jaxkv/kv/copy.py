"""Copying of sequences between streams, if each stream has one sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import DROP, FILL, out_of_range_slots
from jaxkv.core.hashing import overwrite_stamps
from jaxkv.core.loops import differentiable_fori_loop
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.cells import (
    C,
    Cells,
    evicted_below_of_copy,
    incomplete_layers,
    is_in_range,
    is_sequence,
    with_owners,
)
from jaxkv.kv.shards import Shard, map_kv, map_table
from jaxkv.kv.shift import CHUNK
from jaxkv.ops.storage.layer_stack import CellArray, map_arrays

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
    is_copied = is_sequence(cells, src) & is_sequence(cells, targets) & (src != targets)

    def copy_into_target(i: jax.Array, carry: tuple[C, jax.Array]) -> tuple[C, jax.Array]:
        pair = src[None], targets[i, None]
        cells, count = _replace_streams(carry[0], *pair, is_copied[i, None], start, stop)
        return cells, carry[1].at[i].set(count)

    begin = cells, jnp.zeros(targets.size, jnp.int32)
    table, counts = jax.lax.fori_loop(
        jnp.int32(0), jnp.int32(targets.size), copy_into_target, begin
    )
    return table, map_kv(cells, buffers, _copy_runs, src, targets, counts)


def _replace_streams(
    cells: C,
    source: jax.Array,
    targets: jax.Array,
    is_copied: jax.Array,
    start: jax.Array,
    stop: jax.Array,
) -> tuple[C, jax.Array]:
    """Replace each stream `targets[i]` by a range of stream `source[i]`, if `is_copied[i]`.

    Also returns how many cells of the buffers to copy.
    """

    def replace_on_shard(
        shard: Shard,
        cells: C,
        source: jax.Array,
        targets: jax.Array,
        is_copied: jax.Array,
        *bounds: jax.Array,
    ) -> tuple[C, jax.Array]:
        copies = jax.tree.map(lambda field: shard.take(field, source), cells)
        index, own = (jnp.arange(n, dtype=jnp.int32) for n in (cells.num_cells, len(source)))
        is_kept = is_in_range(copies, *bounds)
        # All cells below `count` are copied in the buffers, also cells without a token of the
        # range. Therefore all of them get new stamps.
        count = 1 + jnp.max(jnp.where(is_copied[:, None] & is_kept, index, -1))
        count = _round_up_to_chunks(cells, count)
        # A target of another device is skipped.
        target, is_own = shard.to_local_streams(targets, cells.streams)
        target = jnp.where(is_copied & is_own, target, cells.streams)
        old = cells.stamp.at[target].get(**FILL, fill_value=0)
        new = replace(
            with_owners(copies, jnp.where(is_kept[:, None], copies.owners, 0)),
            evicted_below=evicted_below_of_copy(copies, own, *bounds),
            stamp=jnp.where(index < count, overwrite_stamps(old, copies.stamp), old),
            incomplete=incomplete_layers(copies),
        )
        return jax.tree.map(lambda x, value: x.at[target].set(value, **DROP), cells, new), count

    args = source, targets, is_copied, start, stop
    return map_table(cells, replace_on_shard, *args, out_by_stream=(True, False))


def _copy_runs(
    shard: Shard, src: jax.Array, targets: jax.Array, counts: jax.Array, arrays: PyTree
) -> PyTree:
    """Copy the first `counts[i]` cells of stream `src` to stream `targets[i]`, for each i."""
    share = arrays[0][0].shape[2]  # cells of a shard
    size = min(CHUNK, share)

    def copy_to_target(
        i: jax.Array, arrays: PyTree, src: jax.Array, targets: jax.Array, counts: jax.Array
    ) -> PyTree:
        count = shard.count_cells(counts[i], share)
        return differentiable_fori_loop(
            copy_chunk, -(-count // size), -(-share // size), arrays, src, targets[i], count
        )

    def copy_chunk(
        j: jax.Array, arrays: PyTree, src: jax.Array, dst: jax.Array, count: jax.Array
    ) -> PyTree:
        first = jnp.minimum(j * size, share - size)  # the last chunk may overlap
        dst = jnp.where(j * size < count, dst, src)  # chunks past `count` are copied to themselves

        return map_arrays(lambda x: shard.copy_run(x, src, dst, first, size, count), arrays)

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
    everything = jnp.int32(0), jnp.int32(-1)
    selected, count = _replace_streams(cells, source, targets, is_copied, *everything)
    return selected, map_kv(cells, buffers, _select_cells, source, targets, is_copied, count)


def _select_cells(
    shard: Shard,
    source: jax.Array,
    targets: jax.Array,
    is_copied: jax.Array,
    count: jax.Array,
    arrays: PyTree,
) -> PyTree:
    """Copy `count` cells of stream `source[i]` to stream `targets[i]`, if `is_copied[i]`."""
    share = arrays[0][0].shape[2]
    size, count = min(CHUNK, share), shard.count_cells(count, share)
    shard = shard._replace(cells=())  # cell indices do not change, so shards are independent

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

        def copy_array(x: CellArray) -> CellArray:
            return shard.scatter(
                x, targets[:, None], slots, shard.gather(x, source[:, None], slots)
            )

        return map_arrays(copy_array, arrays)

    args = source, targets, is_copied, count
    return differentiable_fori_loop(
        select_chunk, -(-count // size), -(-share // size), arrays, *args
    )


def _round_up_to_chunks(cells: Cells, count: jax.Array) -> jax.Array:
    # Buffers are copied in whole chunks, so the last chunk may overwrite cells after the last
    # token.
    size = min(CHUNK, cells.num_cells)
    return jnp.minimum(-(-count // size) * size, cells.num_cells)
