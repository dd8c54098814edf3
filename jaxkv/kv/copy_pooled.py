"""Copying between streams with several sequences; copied tokens get empty or evictable cells."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    union_of_sequence_bits,
    with_owners,
)
from jaxkv.kv.cells import seq_cp as share
from jaxkv.kv.record import CellRecord, with_fields_of
from jaxkv.kv.shards import Shard, map_kv, map_streams, map_table, shard_of_table
from jaxkv.kv.shift import CHUNK
from jaxkv.kv.slots import choose_cells, mark_used, usable_cells
from jaxkv.ops.storage.layer_stack import CellArray, map_arrays

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, PyTree


Place = tuple[jax.Array, jax.Array]
"""Stream indices and cell indices, two int32 arrays of one shape."""


class CopyDemand(NamedTuple):
    """Numbers of cells that a copy needs (`demand`) and can use (`capacity`) in each stream."""

    demand: Int32[Array, " S"]
    capacity: Int32[Array, " S"]

    @property
    def ok(self) -> Bool[Array, ""]:
        """Whether each stream has enough cells."""
        return jnp.all(self.demand <= self.capacity)


@dataclass(frozen=True)
class CopyPlan(Generic[C]):
    """Plan of a copy: cells shared within streams, and cells copied between streams.

    base: Table with the new owners of shared cells, but without the tokens to copy.
    new_cells: Cells of the tokens to copy, with their new owners.
    origin: Index of each cell to copy, stream * N + cell, in the table of the source. In `origin`,
      `slots` and `new_cells`, only the first `need.demand[s]` entries of stream s are valid.
    """

    base: C
    new_cells: CellRecord
    origin: Int32[Array, "S N"]
    slots: Int32[Array, "S N"]
    need: CopyDemand

    @property
    def num_copied(self) -> Int32[Array, " S"]:
        """Number of cells that are copied to each stream; 0 if a stream has too few cells."""
        return jnp.where(self.need.ok, self.need.demand, 0)


def plan_copy(
    cells: C, src: jax.Array, dst: jax.Array, start: jax.Array, stop: jax.Array
) -> CopyPlan[C]:
    """Plan `seq_cp`: share cells in the stream of `src`, and copy cells to other streams."""
    dst = jnp.atleast_1d(dst)
    parents = jnp.broadcast_to(src, dst.shape)
    is_cross_stream = _is_in_other_stream(cells, parents, dst)
    base = share(cells, src, jnp.where(is_cross_stream, cells.sequences, dst), start, stop)
    return _plan_copies_in_table(cells, base, parents, dst, is_cross_stream, start, stop)


def plan_select(cells: C, parents: jax.Array, targets: jax.Array) -> CopyPlan[C]:
    """Plan `seq_select` for distinct `targets`; skip targets outside `[0, Q)`."""
    is_cross_stream = _is_in_other_stream(cells, parents, targets)
    base = seq_select(cells, parents, jnp.where(is_cross_stream, cells.sequences, targets))
    everything = jnp.int32(0), jnp.int32(-1)
    return _plan_copies_in_table(cells, base, parents, targets, is_cross_stream, *everything)


def execute_copy(cells: C, buffers: Buffers, copies: CopyPlan[C]) -> tuple[C, Buffers]:
    """Apply a copy plan to the table and the buffers, if each stream has enough cells."""
    args = copies.origin, copies.slots, copies.num_copied
    filled = map_kv(cells, buffers, _copy_planned_cells, *args, num_split_args=2)
    return with_copies(cells, cells, copies), filled


def with_copies(cells: C, source: Cells, copies: CopyPlan[C]) -> C:
    """Apply a plan of copies from the table `source`, if each stream has enough cells."""
    ok = copies.need.ok
    is_filled = jnp.arange(cells.num_cells)[None] < copies.num_copied[:, None]
    slots = jnp.where(is_filled, copies.slots, out_of_range_slots(copies.slots))
    # A layer that lacks tokens of a source stream lacks tokens of the target stream afterwards.
    stream, _ = divmod_nonnegative(copies.origin, source.num_cells)
    is_source = (stream[..., None] == jnp.arange(source.streams)[None, None]) & is_filled[..., None]
    is_source = jnp.any(is_source, axis=1)  # [S, S'], target and source
    incomplete, of_source = (
        jax.tree.map(jnp.zeros_like, cells.incomplete),
        incomplete_layers(source),
    )
    if incomplete is not None and of_source is not None:
        incomplete = jnp.any(is_source[..., None] & of_source[None], axis=1)
    filled = map_streams(copies.base, mark_used, slots, copies.new_cells, incomplete)
    return jax.tree.map(lambda new, old: jnp.where(ok, new, old), filled, cells)


def _copy_planned_cells(
    shard: Shard, origin: jax.Array, slots: jax.Array, num_copied: jax.Array, arrays: PyTree
) -> PyTree:
    """Copy keys and values of cell `origin[s, i]` to `slots[s, i]`, for i < `num_copied[s]`."""

    def copy_chunk(
        i: jax.Array,
        arrays: PyTree,
        origin: jax.Array,
        slots: jax.Array,
        num_copied: jax.Array,
    ) -> PyTree:
        source, target = places_of_chunk(shard, num_cells, i, origin, slots, num_copied)

        def copy_array(x: CellArray) -> CellArray:
            return shard.scatter(x, *target, shard.gather(x, *source))

        return map_arrays(copy_array, arrays)

    num_cells = slots.shape[1]
    steps, limit = num_chunks(num_copied, num_cells)
    return differentiable_fori_loop(copy_chunk, steps, limit, arrays, origin, slots, num_copied)


def num_chunks(num_copied: Int32[Array, " S"], num_cells: int) -> tuple[Int32[Array, ""], int]:
    """Return the number of chunks of a copy, and the largest number for streams of N cells."""
    return -(-jnp.sum(num_copied) // CHUNK), -(-num_copied.size * num_cells // CHUNK)


def places_of_chunk(
    shard: Shard,
    source_cells: int,
    i: Int32[Array, ""],
    origin: Int32[Array, "S N"],
    slots: Int32[Array, "S N"],
    num_copied: Int32[Array, " _"],
) -> tuple[Place, Place]:
    """Return source and target of each copy of chunk i, for a source of `source_cells` cells."""
    # Copies are numbered over all streams; stream s has the numbers from `ends[s - 1]` up to
    # `ends[s] - 1`. Numbers after the last copy are padding.
    ends = jnp.cumsum(num_copied)
    number = i * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
    stream = jnp.minimum(search_sorted(ends, number + 1), num_copied.size - 1)
    rank = number - (ends - num_copied)[stream]
    slot = shard.take(slots, stream, rank)
    slot = jnp.where(number < ends[-1], slot, out_of_range_slots(number))
    source = divmod_nonnegative(shard.take(origin, stream, rank), source_cells)
    return source, (stream, slot)


def _is_in_other_stream(cells: Cells, parents: jax.Array, targets: jax.Array) -> jax.Array:
    (theirs, *_), (ours, *_) = locate_owner_bit(cells, parents), locate_owner_bit(cells, targets)
    return is_sequence(cells, parents) & is_sequence(cells, targets) & (theirs != ours)


def _plan_copies_in_table(
    cells: C,
    base: C,
    parents: jax.Array,
    targets: jax.Array,
    is_cross_stream: jax.Array,
    start: jax.Array,
    stop: jax.Array,
) -> CopyPlan[C]:
    """Plan copies of a range from `parents[i]` to `targets[i]`, if `is_cross_stream[i]` is True."""
    # A cell of a parent may be evictable, or free in `base` if the parent is also a target. It must
    # not be overwritten before it is read.
    words = union_of_sequence_bits(cells, jnp.where(is_cross_stream, parents, cells.sequences))
    is_copied = is_owned_by(cells, words) & is_in_range(cells, start, stop)
    args = parents, targets, is_cross_stream, start, stop
    return plan_copies(base, cells, *args, is_reserved=is_copied)


def plan_copies(
    base: C,
    source: Cells,
    parents: Int32[Array, " n"],
    targets: Int32[Array, " n"],
    is_copied: Bool[Array, " n"],
    start: Int32[Array, ""],
    stop: Int32[Array, ""],
    is_reserved: Bool[Array, "S N"] | None = None,
) -> CopyPlan[C]:
    """Plan to replace `targets[i]` by copies of a range of `parents[i]`, if `is_copied[i]` is True.

    Parents are sequences of the table `source`, and targets are distinct sequences of `base`.
    Reserved cells are not overwritten.
    """
    source = with_fields_of(source, base)
    evicted_below = evicted_below_of_copy(source, parents, start, stop)
    where = jnp.where(is_copied, targets, base.sequences)
    words = union_of_sequence_bits(base, where)
    base = replace(
        with_owners(base, base.owners & ~words[..., None]),
        evicted_below=base.evicted_below.at[where].set(evicted_below, **DROP),
    )
    open_cells = usable_cells(base)
    if is_reserved is not None:
        open_cells &= ~is_reserved
    # Copies from one stream to one stream form a group: a cell with several owners is copied once
    # for the whole group. Targets with the same parent get the same cells.
    (ours, *_), (theirs, *_) = locate_owner_bit(base, targets), locate_owner_bit(source, parents)
    in_group = is_copied[:, None] & is_copied[None]
    in_group &= (ours[:, None] == ours[None]) & (theirs[:, None] == theirs[None])
    args = open_cells, source, parents, targets, in_group, start, stop
    new_cells, origin, slots, *need = map_table(
        base,
        partial(_queue_copies, shard_of_table(source)),
        *args,
        num_split_args=1,
        out_by_stream=True,
    )
    return CopyPlan(base, new_cells, origin, slots, CopyDemand(*need))


def _queue_copies(
    shard_of_source: Shard,
    shard: Shard,
    base: Cells,
    open_cells: jax.Array,
    source: Cells,
    parents: jax.Array,
    targets: jax.Array,
    in_group: jax.Array,
    start: jax.Array,
    stop: jax.Array,
) -> tuple[CellRecord, jax.Array, jax.Array, jax.Array, jax.Array]:
    """List the cells to copy into each stream of a device, and choose slots in `open_cells`."""
    streams, word, bit = locate_owner_bit(base, targets)
    theirs, parent_word, parent_bit = locate_owner_bit(source, parents)
    here = jnp.arange(base.owners.shape[1])[None] == word[:, None]
    target_bits = jnp.where(here, jnp.uint32(1) << bit[:, None], 0)  # [n, W]
    has_same_parent = in_group & (parents[:, None] == parents[None])
    index = jnp.arange(base.num_cells, dtype=jnp.int32)

    def queue_group(i: jax.Array, queue: tuple) -> tuple:
        *entries, num_copied = queue
        # All devices run all iterations, because `take` is a collective. Only the device of the
        # target adds entries to its queue.
        line = jax.tree.map(lambda field: shard_of_source.take(field, theirs[i]), source.record)
        in_range = line.position >= jnp.maximum(start, 0)
        in_range &= line.position < resolve_range_end(stop)

        def add_owners(j: jax.Array, owners: jax.Array) -> jax.Array:
            # The bits of all targets of parent j, [W], in the cells of the parent.
            bits = jax.lax.reduce_or(
                jnp.where(has_same_parent[j][:, None], target_bits, 0), axes=(0,)
            )
            is_owned = (line.owners[parent_word[j]] >> parent_bit[j]) & 1 == 1
            return owners | jnp.where(is_owned & in_range, bits[:, None], 0)

        no_owners = jnp.zeros((target_bits.shape[1], line.position.size), jnp.uint32)
        owners = fold_over_true(in_group[i] & _is_first(has_same_parent), add_owners, no_owners)
        count = jnp.cumsum(jnp.any(owners != 0, axis=0), dtype=jnp.int32)
        stream, is_own = shard.to_local_streams(streams[i], base.streams)
        # Entry i of the queue gets the copied cell number `rank`, counted from 0. This is the first
        # cell at which `count` is `rank + 1`.
        rank = index - num_copied[stream]
        these = is_own & (rank >= 0) & (rank < count[-1])
        cell = search_sorted(count, rank + 1)

        def put(field: jax.Array, value: jax.Array) -> jax.Array:
            return field.at[stream].set(jnp.where(these, value, field[stream]))

        line = jax.tree.map(lambda x: x[..., cell], replace(line, owners=owners))
        entries = jax.tree.map(put, entries, [line, theirs[i] * source.num_cells + cell])
        return *entries, num_copied.at[stream].add(jnp.where(is_own, count[-1], 0))

    # Entries past the last cell to copy are not read, so they may have any values.
    queue = base.record, jnp.zeros_like(base.position), jnp.zeros(base.streams, jnp.int32)
    new_cells, origin, num_copied = fold_over_true(_is_first(in_group), queue_group, queue)
    return (
        new_cells,
        origin,
        choose_cells(base, open_cells),
        num_copied,
        jnp.sum(open_cells, axis=1, dtype=jnp.int32),
    )


def _is_first(is_same: Bool[Array, "n n"]) -> Bool[Array, " n"]:
    """Return which elements are the first of their class, given which elements are equivalent."""
    return jnp.any(is_same, axis=1) & (
        jnp.argmax(is_same, axis=1) == jnp.arange(len(is_same), dtype=jnp.int32)
    )
