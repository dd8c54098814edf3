"""Table of an attention cache, assembled from the modules of this folder."""

# Functions are methods of the table here; tests/cells/test_contract.py compares their arguments.
# pyright: reportAssignmentType=false
from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxkv.cache_spec import CacheSpec
from jaxkv.core.partitioning import AxisPartition, ShardingRules
from jaxkv.core.pytree import pytree_dataclass
from jaxkv.draw.cell_view import CellView
from jaxkv.draw.text import draw_cells
from jaxkv.kv import cells, copy, copy_pooled, defrag, eviction, shift, slots
from jaxkv.kv import insert as inserts
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.cells import Cells
from jaxkv.kv.layer_kv import shardable_sizes
from jaxkv.kv.shards import map_streams_gather
from jaxkv.plan import Reason
from jaxkv.rope import NotGiven
from jaxkv.spec import TableSpec
from jaxkv.table import (
    Admission,
    CacheTable,
    EditCheck,
    MaintenancePlan,
    SequenceStatus,
    check_sizes,
    format_sizes,
    join_checks,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Array, Bool, Int32

    from jaxkv.core.types import AnyMesh


@pytree_dataclass
class CellTable(Cells, CacheTable):
    """Table of an attention cache: `Cells` with the methods of `CacheTable`."""

    cell_positions = cells.sequence_positions
    seq_pos_min = cells.seq_pos_min
    seq_pos_max = cells.seq_pos_max
    compare_last_tokens = slots.compare_last_tokens
    num_used_cells = cells.num_used_cells
    num_cells_saved_by_sharing = cells.num_cells_saved_by_sharing
    can_allocate = slots.can_allocate
    choose_slots = slots.choose_slots
    occupy = slots.occupy
    can_insert = inserts.can_insert
    insert = inserts.insert
    make_empty_like = inserts.make_empty_like
    seq_keep = cells.seq_keep
    clear = cells.clear
    seq_add = shift.seq_add
    can_seq_add = shift.can_seq_add
    seq_div = shift.seq_div
    can_resume = eviction.can_resume
    rewind = cells.rewind
    advance_version = cells.advance_version
    violations_by_invariant = cells.violations_by_invariant
    mark_incomplete = slots.mark_incomplete
    serves = "attend"

    @property
    def spec(self) -> TableSpec:
        """Static configuration of the table."""
        return TableSpec(
            kind="attention",
            sequences=self.sequences,
            streams=self.streams,
            single_sequence_rows=self.streams > 1,
            ubatch_size=self.ubatch_size,
            details=(
                ("cells", self.num_cells),
                ("window", self.window),
                ("placement", self.placement),
            ),
        )

    def cache_spec(self, buffers: Buffers) -> CacheSpec:
        """Return the `CacheSpec` of the layers in `buffers`."""
        heads, keys, values = zip(*buffers.head_sizes, strict=True)
        made = CacheSpec.attention(len(heads), heads, keys, values, self.window, buffers.ropes)
        return replace(made, fields=self.field_specs)

    def describe(self, buffers: Buffers) -> str:
        """Return kind, sizes and bytes of a cache, for its `repr`."""
        heads = {heads for heads, _, _ in buffers.head_sizes}
        sizes: dict[str, object] = {
            "layers": buffers.layers,
            "cells": self.position.shape[-1],
            "sequences": self.evicted_below.shape[-1],
            "streams": self.position.shape[-2],
            "kv_heads": heads.pop() if len(heads) == 1 else sorted(heads),
        }
        if self.window is not None:
            sizes["window"] = f"{self.window.rule}({self.window.width})"
        sizes |= self.placement.repr_fields()
        return format_sizes(self.spec.kind, sizes, self.position.shape[:-2], self, buffers)

    def view_cells(self) -> CellView:
        """Return the cells; all arrays must be NumPy arrays."""
        position, words, shift = map(np.asarray, (self.position, self.owners, self.shift))
        return CellView(position=position, words=words, shift=shift, sequences=self.sequences)

    def to_text(self, width: int | None) -> str:
        """Draw the cells as text; all arrays must be NumPy arrays."""
        return draw_cells(self.view_cells(), width)

    def buffer_specs(self, buffers: Buffers, mesh: AnyMesh) -> Buffers:
        """Return a `PartitionSpec` for each array of the buffers."""
        rules, depth = self.sharding_rules or ShardingRules(), buffers.layers_per_array

        def spec_of_array(x: jax.Array) -> P:
            return AxisPartition(**rules.split(mesh, **shardable_sizes(x, depth))).partition_spec

        return jax.tree.map(spec_of_array, buffers)

    def num_layers(self, buffers: Buffers) -> int:
        """Return the number of layers, L."""
        return buffers.layers

    def check_buffers(self, buffers: Buffers) -> None:
        """Raise if the buffers have another number of streams or cells than the table."""
        streams, _, size, _ = buffers.k[0].shape
        check_sizes(self, streams // buffers.layers_per_array, size)

    def check_can_shift(self, buffers: Buffers) -> None:
        """Raise if the cache was made without `rope=`."""
        if any(isinstance(rope, NotGiven) for rope in buffers.ropes):
            raise ValueError(
                "expected a cache made with rope= to move keys, got one made without; make it with "
                "rope=Rope.make(...), or rope=None if keys have no positions"
            )

    def sequence_status(self, present: Bool[Array, " Q"]) -> SequenceStatus:
        """Return `slots.sequence_status`, computed on each stream's device and all-gathered."""
        return map_streams_gather(self, slots.sequence_status, present)

    def find_fitting_sequences(self, demand: Int32[Array, " Q"], one_ubatch: bool) -> Admission:
        """Return `slots.find_fitting_sequences`, computed on each stream's device and gathered."""
        find = partial(slots.find_fitting_sequences, one_ubatch=one_ubatch)
        return map_streams_gather(self, find, demand)

    def owns_same_cells(self, partner: Int32[Array, " Q"]) -> Bool[Array, " Q"]:
        """Return `cells.owns_same_cells`, computed on each stream's device and all-gathered."""
        return map_streams_gather(self, cells.owns_same_cells, partner)

    def seq_rm(
        self, seq: Int32[Array, ""], start: Int32[Array, ""], stop: Int32[Array, ""]
    ) -> tuple[CellTable, EditCheck]:
        """Remove a range of a sequence, if every sequence can continue afterwards."""
        return eviction.accept_edit(
            self, cells.seq_rm(self, seq, start, stop), self.evicted_below - 1
        )

    def evict(
        self, keep: Bool[Array, "S N"] | None, is_asked: Bool[Array, " Q"]
    ) -> tuple[CellTable, EditCheck]:
        """Remove cells by a mask, if every sequence can continue afterwards."""
        if keep is None:
            return self, join_checks()
        if not hasattr(keep, "dtype") or keep.dtype != bool or keep.shape != self.position.shape:
            raise ValueError(
                f"expected a bool mask [S, N] of shape {self.position.shape}, got {keep!r:.60}; "
                "pass one flag for each cell, True to keep it"
            )
        evicted = cells.remove_owners(self, keep, is_asked)
        return eviction.accept_edit(self, evicted, self.evicted_below - 1)

    def get_fields(self) -> dict[str, Any]:
        """Return the user fields, `[S, ..., N]`, by name."""
        return self.user_fields

    def with_fields(self, values: Mapping[str, Any]) -> Self:
        """Replace user fields; raise for an unknown name, or another shape or kind of number."""
        arrays = {name: self._check_field(name, value) for name, value in values.items()}
        return replace(self, user_fields={**self.user_fields, **arrays})

    def _check_field(self, name: str, value: Any) -> jax.Array:
        if name not in self.user_fields:
            raise ValueError(
                f"expected one of the fields {sorted(self.user_fields)}, got {name!r}; declare it "
                "in CacheSpec.attention(fields=)"
            )
        old, new = self.user_fields[name], jnp.asarray(value)
        if new.shape != old.shape or not jnp.can_cast(new.dtype, old.dtype, "same_kind"):
            raise ValueError(
                f"expected {old.dtype} of shape {old.shape} for the field {name!r}, got "
                f"{new.dtype} of shape {new.shape}; pass one value for each cell"
            )
        return new.astype(old.dtype)

    def seq_cp(
        self,
        buffers: Buffers | None,
        src: Int32[Array, ""],
        dst: Int32[Array, "*n"],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
    ) -> tuple[CellTable, Buffers | None]:
        """Share cells of `src` within its stream; copy the cells to targets in other streams."""
        if buffers is None:
            return cells.seq_cp(self, src, dst, start, stop), None
        if self.sequences_per_stream == 1:
            return copy.copy_between_streams(self, buffers, src, dst, start, stop)
        return copy_pooled.execute_copy(
            self, buffers, copy_pooled.plan_copy(self, src, dst, start, stop)
        )

    def can_seq_cp(
        self,
        src: Int32[Array, ""],
        dst: Int32[Array, "*n"],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
    ) -> tuple[EditCheck, Int32[Array, " n"]]:
        """Return whether a copy is possible, and the last positions of targets after the copy."""
        ok, ends = eviction.can_resume_after_copy(self, src, dst, start, stop)
        checks = [(ok, Reason.CONTEXT_EVICTED)]
        if self.spec.has_shared_streams:
            need = copy_pooled.plan_copy(self, src, dst, start, stop).need
            checks.append((need.ok, Reason.OUT_OF_CELLS))
        return join_checks(*checks), ends

    def seq_select(
        self, buffers: Buffers | None, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
    ) -> tuple[CellTable, Buffers | None]:
        """Replace each target by the tokens of its parent."""
        if buffers is None:
            return cells.seq_select(self, parents, targets), None
        if self.sequences_per_stream == 1:
            return copy.select_between_streams(self, buffers, parents, targets)
        return copy_pooled.execute_copy(
            self, buffers, copy_pooled.plan_select(self, parents, targets)
        )

    def can_seq_select(
        self, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
    ) -> Bool[Array, ""]:
        """Return whether there are enough empty or evictable cells for all targets."""
        if not self.spec.has_shared_streams:
            return jnp.array(True)
        return copy_pooled.plan_select(self, parents, targets).need.ok

    def plan_shift(self) -> MaintenancePlan:
        """Return the plan of the rotation of all keys with a pending shift."""
        return shift.ShiftPlan(shift=self.shift, spec=self.spec)

    def plan_defrag(self, max_moves: int | None) -> MaintenancePlan:
        """Return the plan of moves that close gaps between used cells."""
        return defrag.plan_moves(self, max_moves, self.spec)

    @property
    def num_stacked_layers(self) -> int:
        """L if the cache is stacked; otherwise 0."""
        return 0 if self.incomplete is None else self.incomplete.shape[-1]
