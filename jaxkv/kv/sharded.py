"""Work on a table of cells, done where its streams lie: on a mesh each device does its own.

Left to a compiler, a look-up by a stream that it does not know would bring the whole table to every
device. Without a mesh these functions add nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxkv.batch import Ubatch, mask_rows_of_other_devices, row_mesh_axes, ubatch_partition_specs
from jaxkv.core.constants import EMPTY
from jaxkv.core.partitioning import (
    broadcast_from_owner,
    make_axis_partition,
    map_shards,
    to_local_index,
)
from jaxkv.kv.cells import C, Cells, is_sequence, locate_owner_bit

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, PyTree, UInt32

T = TypeVar("T")
W = TypeVar("W")

Axes = tuple[str, ...]
"""Axes of a mesh."""


def map_streams(cells: Cells, work: Callable[..., W], *args: PyTree) -> W:
    """Do work on each stream by itself.

    Args:
      cells: the table.
      work: is given the streams of a device, and what the arguments have for these.
      args: `[S, ...]` or `[Q, ...]`, or trees of such arrays.

    Returns:
      What comes of it, `[S, ...]` or `[Q, ...]`, where the streams are.
    """
    streams = P(make_axis_partition(cells.sharding_rules, streams=cells.streams).streams)
    return map_shards(cells.sharding_rules, work, streams, streams)(cells, *args)


def map_streams_gather(cells: Cells, work: Callable[..., T], *args: jax.Array) -> T:
    """Do work on each stream by itself, and tell all devices what came of it in one message.

    Args:
      cells: the table.
      work: see `map_streams`; returns arrays of int32 or bool, all of one shape.
      args: `[S, ...]` or `[Q, ...]`.
    """
    axes = make_axis_partition(cells.sharding_rules, streams=cells.streams).streams

    def gather_on_shard(*args: PyTree) -> T:
        return gather_over_axes(work(*args), axes)

    return map_shards(cells.sharding_rules, gather_on_shard, P(axes), P())(cells, *args)


def compare_last_tokens(
    cells: Cells, sequences: Int32[Array, " T"], contents: UInt32[Array, " T"]
) -> tuple[UInt32[Array, " T"], Bool[Array, " T"]]:
    """Return what the last cells of some sequences hold.

    Args:
      cells: the table.
      sequences: their ids.
      contents: one asked about for each sequence.

    Returns:
      The content of a cell at the last position, 0 if there is none; and whether one of those cells
      (`seq_div` may bring two to a position) has the content that was asked about. On all devices.
    """
    axes = make_axis_partition(cells.sharding_rules, streams=cells.streams).streams
    does = is_sequence(cells, sequences)

    def compare_on_shard(
        cells: Cells, sequences: jax.Array, does: jax.Array, contents: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        stream, word, bit = locate_owner_bit(cells, sequences)
        stream, is_own = to_local_index(stream, axes, cells.streams)
        owns = (cells.owners[stream, word] >> bit[:, None]) & 1 == 1
        at = jnp.where(owns & (does & is_own)[:, None], cells.position[stream], EMPTY)
        last, cell_contents = jnp.max(at, axis=1), cells.content[stream]
        found = jnp.take_along_axis(cell_contents, jnp.argmax(at, axis=1)[:, None], axis=1)[:, 0]
        same = (at == last[:, None]) & (cell_contents == contents[:, None])
        found = jnp.where(last >= 0, found, 0)
        same = is_own & jnp.where(last >= 0, jnp.any(same, axis=1), contents == 0)
        return broadcast_from_owner(found, axes), broadcast_from_owner(same, axes)

    run = map_shards(cells.sharding_rules, compare_on_shard, (P(axes), P(), P(), P()), P())
    return run(cells, jnp.where(does, sequences, 0), does, contents)


def map_rows(
    cells: C,
    ubatch: Ubatch,
    work: Callable[[C, Ubatch, Axes, Axes], W],
    out_specs: Callable[[Axes], P],
) -> W:
    """Do work on the rows of a ubatch where their streams lie.

    Args:
      cells: the table.
      ubatch: its rows.
      work: is given the streams of a device, and their rows alone where rows are in the order of
        sequences, or else all rows, of which those of other streams are padding; and the axes
        that split the rows, and those along which devices have other padding.
      out_specs: how what it returns is split, made of the axes of the streams.
    """
    axes = make_axis_partition(cells.sharding_rules, streams=cells.streams).streams
    rows = row_mesh_axes(ubatch, axes)
    shared_axes = () if rows else axes

    def work_on_shard(cells: C, ubatch: Ubatch) -> W:
        return work(
            cells, mask_rows_of_other_devices(ubatch, axes, cells.streams), rows, shared_axes
        )

    run = map_shards(
        cells.sharding_rules,
        work_on_shard,
        (P(axes), ubatch_partition_specs(ubatch, axes)),
        out_specs(axes),
    )
    return run(cells, ubatch)


def gather_over_axes(found: T, axes: tuple[str, ...]) -> T:
    """Return what devices along some axes found, int32 or bool of one shape, one after another."""
    if not axes:
        return found
    leaves, form = jax.tree.flatten(found)
    packed = jnp.stack([x.astype(jnp.int32) for x in leaves], axis=-1)
    packed = jax.lax.all_gather(packed, axes, tiled=True)
    return form.unflatten([packed[..., i].astype(x.dtype) for i, x in enumerate(leaves)])
