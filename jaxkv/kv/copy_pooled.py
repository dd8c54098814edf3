"""Copying between streams with several sequences; copied tokens get empty or evictable cells."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import (
    DROP,
    divmod_nonnegative,
    out_of_range_slots,
    resolve_range_end,
    search_sorted,
)
from jaxkv.core.loops import differentiable_fori_loop
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.cells import (
    C,
    Cells,
    evicted_below_of_copy,
    fold_over_true,
    incomplete_layers,
    is_in_range,
    is_owned_by,
    is_sequence,
    locate_owner_bit,
    seq_select,
    sequence_bits,
    with_owners,
)
from jaxkv.kv.cells import seq_cp as share
from jaxkv.kv.record import CellRecord
from jaxkv.kv.shards import Shard, map_kv, map_streams, map_table
from jaxkv.kv.shift import CHUNK
from jaxkv.kv.slots import choose_cells, mark_used, usable_cells
from jaxkv.ops.storage.layer_stack import CellArray, map_arrays

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, PyTree


class CopyDemand(NamedTuple):
    """Numbers of cells that a copy needs (`demand`) and can use (`capacity`) in each stream."""

    demand: Int32[Array, " S"]
    capacity: Int32[Array, " S"]

    @property
    def ok(self) -> Bool[Array, ""]:
        """Whether each stream has enough cells."""
        return jnp.all(self.demand <= self.capacity)


class CopyPlan(NamedTuple, Generic[C]):
    """Plan of a copy: cells shared within streams, and cells copied between streams.

    base: Table with the new owners of shared cells, but without the tokens to copy.
    new_cells: Cells of the tokens to copy, with their new owners.
    origin: Index of each cell to copy, stream * N + cell. In `origin`, `slots` and `new_cells`,
      only the first `need.demand[s]` entries of stream s are valid.
    """

    base: C
    new_cells: CellRecord
    origin: Int32[Array, "S N"]
    slots: Int32[Array, "S N"]
    need: CopyDemand


def plan_copy(
    cells: C, src: jax.Array, dst: jax.Array, start: jax.Array, stop: jax.Array
) -> CopyPlan[C]:
    """Plan `seq_cp`: share cells in the stream of `src`, and copy cells to other streams."""
    dst = jnp.atleast_1d(dst)
    parents = jnp.broadcast_to(src, dst.shape)
    is_cross_stream = _is_in_other_stream(cells, parents, dst)
    base = share(cells, src, jnp.where(is_cross_stream, cells.sequences, dst), start, stop)
    return _plan_transfer(cells, base, parents, dst, is_cross_stream, start, stop)


def plan_select(cells: C, parents: jax.Array, targets: jax.Array) -> CopyPlan[C]:
    """Plan `seq_select` for distinct `targets`; skip targets outside `[0, Q)`."""
    is_cross_stream = _is_in_other_stream(cells, parents, targets)
    base = seq_select(cells, parents, jnp.where(is_cross_stream, cells.sequences, targets))
    everything = jnp.int32(0), jnp.int32(-1)
    return _plan_transfer(cells, base, parents, targets, is_cross_stream, *everything)


def execute_copy(cells: C, buffers: Buffers, transfer: CopyPlan[C]) -> tuple[C, Buffers]:
    """Apply a copy plan to the table and the buffers, if each stream has enough cells."""
    # A layer that lacks tokens of a source stream lacks tokens of the target stream afterwards.
    base, new_cells, origin, slots, need = transfer
    is_filled = need.ok & (jnp.arange(cells.num_cells)[None] < need.demand[:, None])
    slots = jnp.where(is_filled, slots, out_of_range_slots(slots))
    source, _ = divmod_nonnegative(origin, cells.num_cells)
    is_source = (source[..., None] == jnp.arange(cells.streams)[None, None]) & is_filled[..., None]
    is_source = jnp.any(is_source, axis=1)  # [S, S], target and source
    incomplete = jax.tree.map(
        lambda x: jnp.any(is_source[..., None] & x[None], axis=1), incomplete_layers(cells)
    )
    filled = map_streams(base, mark_used, slots, new_cells, incomplete)
    filled = jax.tree.map(lambda new, old: jnp.where(need.ok, new, old), filled, cells)
    args = origin, slots, jnp.where(need.ok, need.demand, 0)
    return filled, map_kv(cells, buffers, _copy_planned_cells, *args, by_stream=2)


def _copy_planned_cells(
    shard: Shard, origin: jax.Array, slots: jax.Array, num_copied: jax.Array, arrays: PyTree
) -> PyTree:
    """Copy keys and values of cell `origin[s, i]` to `slots[s, i]`, for i < `num_copied[s]`."""
    ends = jnp.cumsum(num_copied)
    size = slots.shape[1]

    def copy_chunk(
        i: jax.Array,
        arrays: PyTree,
        origin: jax.Array,
        slots: jax.Array,
        num_copied: jax.Array,
        ends: jax.Array,
    ) -> PyTree:
        # Copies are numbered over all streams; stream s has the numbers from `ends[s - 1]` up to
        # `ends[s] - 1`. Numbers after the last copy are padding.
        number = i * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        stream = search_sorted(ends, number + 1)
        stream = jnp.minimum(stream, num_copied.size - 1)
        rank = number - (ends - num_copied)[stream]
        slot = jnp.where(
            number < ends[-1],
            shard.take(slots, stream, rank),
            out_of_range_slots(number),
        )
        source = divmod_nonnegative(shard.take(origin, stream, rank), size)

        def copy_array(x: CellArray) -> CellArray:
            return shard.scatter(x, stream, slot, shard.gather(x, *source))

        return map_arrays(copy_array, arrays)

    steps, limit = -(-ends[-1] // CHUNK), -(-num_copied.size * size // CHUNK)
    return differentiable_fori_loop(
        copy_chunk, steps, limit, arrays, origin, slots, num_copied, ends
    )


def _is_in_other_stream(cells: Cells, parents: jax.Array, targets: jax.Array) -> jax.Array:
    (theirs, *_), (ours, *_) = locate_owner_bit(cells, parents), locate_owner_bit(cells, targets)
    return is_sequence(cells, parents) & is_sequence(cells, targets) & (theirs != ours)


def _plan_transfer(
    cells: C,
    base: C,
    parents: jax.Array,
    targets: jax.Array,
    is_cross_stream: jax.Array,
    start: jax.Array,
    stop: jax.Array,
) -> CopyPlan[C]:
    """Plan copies of a range from `parents[i]` to `targets[i]`, if `is_cross_stream[i]` is True."""

    def combine_sequence_bits(ids: jax.Array) -> jax.Array:
        ids = jnp.where(is_cross_stream, ids, cells.sequences)
        return jax.lax.reduce_or(jax.vmap(partial(sequence_bits, cells))(ids), axes=(0,))  # [S, W]

    evicted_below = evicted_below_of_copy(cells, parents, start, stop)
    base = replace(
        with_owners(base, base.owners & ~combine_sequence_bits(targets)[..., None]),
        evicted_below=base.evicted_below.at[
            jnp.where(is_cross_stream, targets, cells.sequences)
        ].set(evicted_below, **DROP),
    )
    is_copied = is_owned_by(cells, combine_sequence_bits(parents)) & is_in_range(cells, start, stop)
    # Targets of one stream with the same parent share one copy, made for the first of them.
    home_of, *_ = locate_owner_bit(cells, targets)
    is_same_copy = (
        is_cross_stream[:, None] & is_cross_stream[None] & (home_of[:, None] == home_of[None])
    )
    is_same_copy &= parents[:, None] == parents[None]
    # A cell of a parent may be evictable, or free in `base` if the parent is also a target. It must
    # not be overwritten before it is read.
    open_cells = usable_cells(base) & ~is_copied
    args = base, open_cells, parents, targets, is_same_copy, start, stop
    new_cells, origin, slots, *need = map_table(
        cells, _queue_copies, *args, by_stream=2, out_by_stream=True
    )
    return CopyPlan(base, new_cells, origin, slots, CopyDemand(*need))


def _queue_copies(
    shard: Shard,
    cells: C,
    base: C,
    open_cells: jax.Array,
    parents: jax.Array,
    targets: jax.Array,
    is_same_copy: jax.Array,
    start: jax.Array,
    stop: jax.Array,
) -> tuple[CellRecord, jax.Array, jax.Array, jax.Array, jax.Array]:
    """List the cells to copy into each stream of a device, and choose slots in `open_cells`."""
    # Targets i and j share one copy if `is_same_copy[i, j]`.
    (streams, words, bits_of), (theirs, word, bit) = (
        locate_owner_bit(cells, targets),
        locate_owner_bit(cells, parents),
    )
    here = jnp.arange(cells.owners.shape[1])[None] == words[:, None]
    owner = jnp.where(here, jnp.uint32(1) << bits_of[:, None], 0)  # [n, W]
    # `first` is [n]: target i is the first target of its copy.
    first = jnp.any(is_same_copy, axis=1) & (
        jnp.argmax(is_same_copy, axis=1) == jnp.arange(targets.size)
    )
    index = jnp.arange(cells.num_cells, dtype=jnp.int32)

    def queue_parent_cells(i: jax.Array, queue: tuple) -> tuple:
        *entries, num_copied = queue
        # All devices run all iterations, because `take` is a collective. Only the device of the
        # target adds entries to its queue.
        line = jax.tree.map(lambda field: shard.take(field, theirs[i]), cells.record)
        is_copied = (line.owners[word[i]] >> bit[i]) & 1 == 1
        is_copied &= line.position >= jnp.maximum(start, 0)
        is_copied &= line.position < resolve_range_end(stop)
        count = jnp.cumsum(is_copied, dtype=jnp.int32)
        stream, is_own = shard.to_local_streams(streams[i], cells.streams)
        # Entry i of the queue gets the copied cell number `rank`, counted from 0. This is the first
        # cell at which `count` is `rank + 1`.
        rank = index - num_copied[stream]
        these = is_own & (rank >= 0) & (rank < count[-1])
        cell = search_sorted(count, rank + 1)
        # `whose` is [W]: bits of all targets that share the copy.
        whose = jax.lax.reduce_or(jnp.where(is_same_copy[i][:, None], owner, 0), axes=(0,))

        def put(field: jax.Array, value: jax.Array) -> jax.Array:
            return field.at[stream].set(jnp.where(these, value, field[stream]))

        line = replace(jax.tree.map(lambda x: x[..., cell], line), owners=whose[:, None])
        entries = jax.tree.map(put, entries, [line, theirs[i] * cells.num_cells + cell])
        return *entries, num_copied.at[stream].add(jnp.where(is_own, count[-1], 0))

    # Entries past the last cell to copy are not read, so they may have any values.
    queue = cells.record, jnp.zeros_like(cells.position), jnp.zeros(cells.streams, jnp.int32)
    new_cells, origin, num_copied = fold_over_true(first, queue_parent_cells, queue)
    return (
        new_cells,
        origin,
        choose_cells(base, open_cells),
        num_copied,
        jnp.sum(open_cells, axis=1, dtype=jnp.int32),
    )
