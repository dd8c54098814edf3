"""Maps over streams and rows of a table; each device processes its own streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxkv.core.constants import EMPTY
from jaxkv.core.partitioning import (
    broadcast_from_owner,
    make_axis_partition,
    map_shards,
    to_local_index,
)
from jaxkv.kv.cells import C, Cells, is_sequence, locate_owner_bit
from jaxkv.ubatch import Ubatch, mask_rows_of_other_devices, row_mesh_axes, ubatch_partition_specs

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, PyTree, UInt32

T = TypeVar("T")
W = TypeVar("W")

Axes = tuple[str, ...]
"""Mesh axes."""


def map_streams(cells: Cells, work: Callable[..., W], *args: PyTree) -> W:
    """Call a function with each device's streams; arguments and results are split by streams."""
    streams = P(make_axis_partition(cells.sharding_rules, streams=cells.streams).streams)
    return map_shards(cells.sharding_rules, work, streams, streams)(cells, *args)


def map_streams_gather(cells: Cells, work: Callable[..., T], *args: jax.Array) -> T:
    """Call a function with each device's streams; gather the results with one collective."""
    axes = make_axis_partition(cells.sharding_rules, streams=cells.streams).streams

    def gather_on_shard(*args: PyTree) -> T:
        return gather_over_axes(work(*args), axes)

    return map_shards(cells.sharding_rules, gather_on_shard, P(axes), P())(cells, *args)


def compare_last_tokens(
    cells: Cells, sequences: Int32[Array, " Z"], contents: UInt32[Array, " Z"]
) -> tuple[UInt32[Array, " Z"], Bool[Array, " Z"]]:
    """Compare the content hash of each sequence's last cell with the array `contents`.

    Returns the hashes (0 for an empty sequence), and which hashes are equal to `contents`. After
    `seq_div`, a sequence may have several cells at its last position. In this case, the returned
    flag is True if at least one of these cells has the hash in `contents`.
    """
    axes = make_axis_partition(cells.sharding_rules, streams=cells.streams).streams
    exists = is_sequence(cells, sequences)

    def compare_on_shard(
        cells: Cells, sequences: jax.Array, exists: jax.Array, contents: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        stream, word, bit = locate_owner_bit(cells, sequences)
        stream, is_own = to_local_index(stream, axes, cells.streams)
        owns = (cells.owners[stream, word] >> bit[:, None]) & 1 == 1
        at = jnp.where(owns & (exists & is_own)[:, None], cells.position[stream], EMPTY)
        last, cell_contents = jnp.max(at, axis=1), cells.content[stream]
        last_content = jnp.take_along_axis(cell_contents, jnp.argmax(at, axis=1)[:, None], axis=1)[
            :, 0
        ]
        same = (at == last[:, None]) & (cell_contents == contents[:, None])
        last_content = jnp.where(last >= 0, last_content, 0)
        same = is_own & jnp.where(last >= 0, jnp.any(same, axis=1), contents == 0)
        return broadcast_from_owner(last_content, axes), broadcast_from_owner(same, axes)

    run = map_shards(cells.sharding_rules, compare_on_shard, (P(axes), P(), P(), P()), P())
    return run(cells, jnp.where(exists, sequences, 0), exists, contents)


def map_rows(
    cells: C,
    ubatch: Ubatch,
    work: Callable[[C, Ubatch, Axes, Axes], W],
    out_specs: Callable[[Axes], P],
) -> W:
    """Call `work(cells, ubatch, rows, shared_axes)` with the streams and rows of each device.

    `rows` has the mesh axes that split rows. If `rows` is empty, each device gets all rows, and the
    rows of other devices' streams are padding; `shared_axes` has the axes that split streams. If
    `rows` is not empty, `shared_axes` is empty.
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


def gather_over_axes(tree: T, axes: tuple[str, ...]) -> T:
    """All-gather int32 or bool arrays of one shape along mesh axes, with one collective."""
    if not axes:
        return tree
    leaves, form = jax.tree.flatten(tree)
    packed = jnp.stack([x.astype(jnp.int32) for x in leaves], axis=-1)
    packed = jax.lax.all_gather(packed, axes, tiled=True)
    return form.unflatten([packed[..., i].astype(x.dtype) for i, x in enumerate(leaves)])
