"""Copies of sequences from one attention cache into another, of other sizes and another form."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from zlib import crc32

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import dtype_names
from jaxkv.core.hashing import chain_hashes
from jaxkv.core.loops import differentiable_fori_loop
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.cells import C, Cells, empty_fields, incomplete_layers, locate_owner_bit
from jaxkv.kv.copy_pooled import (
    CopyPlan,
    Place,
    num_chunks,
    places_of_chunk,
    plan_copies,
    with_copies,
)
from jaxkv.kv.placement import FirstFit
from jaxkv.kv.shards import Shard, map_table, read_layer, write_layer
from jaxkv.plan import Reason
from jaxkv.table import EditCheck, join_checks

if TYPE_CHECKING:
    from jaxtyping import Array, Int32


def plan_insert(
    cells: C, source: Cells, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
) -> CopyPlan[C]:
    """Plan to replace each target by its parent, a sequence of another table."""
    everything = jnp.int32(0), jnp.int32(-1)
    return plan_copies(cells, source, parents, targets, targets < cells.sequences, *everything)


def can_insert(
    cells: Cells, source: Cells, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
) -> EditCheck:
    """Return whether `insert` is possible."""
    need = plan_insert(cells, source, parents, targets).need
    checks = [(need.ok, Reason.OUT_OF_CELLS)]
    missing = incomplete_layers(source)
    if missing is not None and cells.incomplete is None:
        stream, *_ = locate_owner_bit(source, parents)
        is_missing = jnp.any(missing, axis=1)[stream] & (targets < cells.sequences)
        checks.append((~jnp.any(is_missing), Reason.LAYER_NOT_WRITTEN))
    return join_checks(*checks)


def insert(
    cells: C,
    buffers: Buffers,
    source: Cells,
    source_buffers: Buffers,
    parents: Int32[Array, " n"],
    targets: Int32[Array, " n"],
) -> tuple[C, Buffers]:
    """Replace each target by its parent, a sequence of another table; skip targets of Q or more."""
    copies = plan_insert(cells, source, parents, targets)
    # Keys and values that were converted from another form are other numbers.
    form = dtype_names((source_buffers.k, source_buffers.v)), source_buffers.rotated
    stamp = chain_hashes(copies.new_cells.stamp, jnp.uint32(crc32(repr(form).encode())))
    copies = replace(copies, new_cells=replace(copies.new_cells, stamp=stamp))

    def copy_chunk(
        chunk: jax.Array, both: tuple[Buffers, Buffers], *plan: jax.Array
    ) -> tuple[Buffers, Buffers]:
        def locate_on_shard(
            shard: Shard,
            _: Cells,
            origin: jax.Array,
            slots: jax.Array,
            num_copied: jax.Array,
            chunk: jax.Array,
        ) -> tuple[Place, Place]:
            return places_of_chunk(shard, source.num_cells, chunk, origin, slots, num_copied)

        own, other = both
        origin, target = map_table(
            cells, locate_on_shard, *plan, chunk, num_split_args=2, out_by_stream=False
        )
        for i in range(own.layers):
            heads = read_layer(source, other.layer(i), *origin)
            own = own.with_layer(i, write_layer(cells, own.layer(i), *target, heads))
        return own, other

    # The buffers of the source are in the carry, since the loop is differentiable in its carry.
    plan = copies.origin, copies.slots, copies.num_copied
    steps, limit = num_chunks(copies.num_copied, cells.num_cells)
    buffers, _ = differentiable_fori_loop(
        copy_chunk, steps, limit, (buffers, source_buffers), *plan
    )
    return with_copies(cells, source, copies), buffers


def make_empty_like(
    cells: C, buffers: Buffers, sequences: int, num_cells: tuple[int, ...]
) -> tuple[C, Buffers]:
    """Return an empty table and buffers of one stream, with the layers and the form of others."""
    largest = cells.num_cells * min(sequences, cells.streams)  # the sequences own no more cells
    size = min(*num_cells, largest)
    ubatch_size = cells.ubatch_size if size == largest else None
    fields = empty_fields(
        stacked_layers=0 if cells.incomplete is None else cells.incomplete.shape[1],
        cells=size,
        sequences=sequences,
        streams=1,
        fields=cells.field_specs,
    )

    def zeros(x: jax.Array) -> jax.Array:
        return jnp.zeros((buffers.layers_per_array, x.shape[1], size, x.shape[3]), x.dtype)

    table = replace(cells, **fields, placement=FirstFit(), ubatch_size=ubatch_size)
    return table, jax.tree.map(zeros, buffers)
