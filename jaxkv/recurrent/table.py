"""`StateTable`, the table of a recurrent cache, and construction of the cache."""

# Functions are methods of the table here; tests/cells/test_contract.py compares their arguments.
# pyright: reportAssignmentType=false
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import Cache, merge
from jaxkv.cache_spec import CacheSpec
from jaxkv.core.constants import END, MAX_CELLS
from jaxkv.core.partitioning import ShardingRules
from jaxkv.core.pytree import pytree_dataclass, static_field
from jaxkv.core.validate import check_count, check_shape
from jaxkv.draw.text import draw_states
from jaxkv.recurrent import copy as copies
from jaxkv.recurrent import slots, states
from jaxkv.recurrent.buffers import (
    Buffers,
    read_layer_states,
    state_specs,
    write_layer_states,
)
from jaxkv.recurrent.states import States, empty_fields
from jaxkv.spec import TableSpec
from jaxkv.step import Step, without_buffers
from jaxkv.table import Admission, CacheTable, MaintenancePlan, check_sizes, format_sizes

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Int32, PyTree, Shaped

    from jaxkv.core.types import AnyMesh


@pytree_dataclass
class EmptyPlan(MaintenancePlan):
    """Plan without changes, for an update or a defrag of a recurrent cache."""

    spec: TableSpec = static_field()

    @property
    def num_changes(self) -> Int32[Array, ""]:
        """Number of changes, 0."""
        return jnp.int32(0)

    def is_current(self, table: StateTable) -> Bool[Array, ""]:
        """Return True."""
        del table
        return jnp.array(True)

    def commit(
        self, table: StateTable, buffers: Buffers, ok: Bool[Array, ""]
    ) -> tuple[StateTable, Buffers]:
        """Return the table and buffers unchanged."""
        del ok
        return table, buffers


@pytree_dataclass
class StateTable(States, CacheTable):
    """Table of a recurrent cache; has the arrays of `States` and the methods of `CacheTable`."""

    advance_version = states.advance_version
    seq_pos_min = states.seq_pos_min
    seq_pos_max = states.seq_pos_max
    compare_last_tokens = states.compare_last_tokens
    num_used_cells = states.num_used_cells
    sequence_status = states.sequence_status
    choose_slots = slots.choose_slots
    occupy = slots.occupy
    seq_rm = states.seq_rm
    view_cells = states.view_cells
    seq_cp = copies.seq_cp
    can_seq_cp = copies.can_seq_cp
    seq_select = copies.seq_select
    can_insert = copies.can_insert
    insert = copies.insert
    make_empty_like = copies.make_empty_like
    seq_keep = states.seq_keep
    clear = states.clear
    seq_add = states.seq_add
    can_seq_add = states.can_seq_add
    seq_div = states.seq_div
    can_resume = states.can_resume
    rewind = states.rewind
    violations_by_invariant = states.violations_by_invariant
    serves = "states"

    @property
    def spec(self) -> TableSpec:
        """Static configuration of the table."""
        return TableSpec(
            kind="recurrent",
            sequences=self.sequences,
            streams=self.streams,
            single_sequence_rows=True,
            ubatch_size=None,
            max_rollback=self.num_earlier_states,
        )

    def cache_spec(self, buffers: Buffers) -> CacheSpec:
        """Return the `CacheSpec` of the layers whose states are in `buffers`."""
        leading = self.stamp.ndim
        states = {name: (x.shape[leading:], x.dtype) for name, x in buffers[0].items()}
        splits = {name: (dimension, parts) for name, dimension, parts in self.shard_dims}
        return CacheSpec.recurrent(len(buffers), states, splits)

    def describe(self, buffers: Buffers) -> str:
        """Return kind, sizes and bytes of a cache, for its `repr`."""
        sizes: dict[str, object] = {
            "layers": len(buffers),
            "cells": self.stamp.shape[-1],
            "sequences": self.position.shape[-2],
            "streams": self.stamp.shape[-2],
            "max_rollback": self.position.shape[-1] - 1,
        }
        return format_sizes("recurrent", sizes, self.position.shape[:-2], self, buffers)

    def to_text(self, width: int | None) -> str:
        """Draw the positions of the states; all arrays must be NumPy arrays."""
        return draw_states(np.asarray(self.position), width)

    def buffer_specs(self, buffers: Buffers, mesh: AnyMesh) -> PyTree:
        """Return `PartitionSpec`s that split streams and the state dimensions of `shard_dims`."""
        rules = self.sharding_rules or ShardingRules()
        leading = rules.split(mesh, streams=self.streams)["streams"], None
        return tuple(state_specs(self, arrays, leading, mesh) for arrays in buffers)

    def num_layers(self, buffers: Buffers) -> int:
        """Return the number of layers, L."""
        return len(buffers)

    def check_buffers(self, buffers: Buffers) -> None:
        """Raise a ValueError unless states and table have equal numbers of streams and cells."""
        check_sizes(self, *next(iter(buffers[0].values())).shape[:2])

    def find_fitting_sequences(self, demand: Int32[Array, " Q"], one_ubatch: bool) -> Admission:
        """Return True for all sequences, since each new state replaces a state of its sequence."""
        del one_ubatch
        all_fit = demand >= 0
        return Admission(all_fit, jnp.full_like(demand, END))

    def num_cells_saved_by_sharing(self) -> Int32[Array, " S"]:
        """Return zeros: E + 1 cells are kept for each sequence, even if sequences share cells."""
        return jnp.zeros(self.streams, jnp.int32)

    def can_allocate(
        self, lengths: Int[np.ndarray, " Q"], at_once: int, num_shared_cells: Int[np.ndarray, " S"]
    ) -> Bool[np.ndarray, " S"]:
        """Return True for each stream, since states have the same size for any number of tokens."""
        del lengths, at_once, num_shared_cells
        return np.ones(self.streams, bool)

    def can_seq_select(
        self, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
    ) -> Bool[Array, ""]:
        """Return True, because a stream has E + 1 cells for each of its sequences."""
        del parents, targets
        return jnp.array(True)

    def plan_shift(self) -> MaintenancePlan:
        """Return an empty plan, because states have no pending shifts."""
        return EmptyPlan(spec=self.spec)

    def plan_defrag(self, max_moves: int | None) -> MaintenancePlan:
        """Return an empty plan, because a recurrent cache has no gaps to close."""
        del max_moves
        return EmptyPlan(spec=self.spec)

    def read_states(self, step: Step, layer: int) -> dict[str, Shaped[Array, "R ..."]]:
        """Return a layer's states before the first token of each row; keys are state names."""
        _check_layer(step.buffers, layer)
        return read_layer_states(without_buffers(step), step.buffers[layer])

    def write_states(
        self, step: Step, layer: int, states: Mapping[str, Shaped[Array, "R ..."]]
    ) -> Buffers:
        """Check and write a layer's states, `[R, E + 1, ...]`; `[R, ...]` is valid if E is 0."""
        _check_layer(step.buffers, layer)
        old = step.buffers[layer]
        if not isinstance(states, Mapping):
            raise TypeError(
                f"expected states by name, a dict of {sorted(old)}, got {type(states)}; pass a dict"
            )
        if set(states) != set(old):
            raise ValueError(
                f"expected the states {sorted(old)}, got {sorted(states)}; use the names of the "
                "spec"
            )
        rows, new = len(step.ubatch.row_stream), {}
        for name, array in old.items():
            state, shape = states[name], (rows, self.num_earlier_states + 1, *array.shape[2:])
            if not hasattr(state, "dtype"):
                raise TypeError(f"expected {name} as an array, got {type(state)}; pass a jax.Array")
            if self.num_earlier_states == 0 and state.shape == (rows, *shape[2:]):
                state = state[:, None]
            if state.shape != shape:
                raise ValueError(
                    f"expected {name} [R, E + 1, ...] of {shape}, got {state.shape}; give the "
                    "states after step.state_write_steps(layer) tokens"
                )
            if not _is_exact_kind(state.dtype, array.dtype):
                raise TypeError(
                    f"expected {name} of {array.dtype}, got {state.dtype}, which a cast would "
                    f"truncate; cast it, or make the cache with a state of {state.dtype}"
                )
            new[name] = state
        new = write_layer_states(without_buffers(step), new, old)
        return (*step.buffers[:layer], new, *step.buffers[layer + 1 :])

    def max_rollback(self, buffers: Buffers, layer: int) -> int:
        """Return the largest number of earlier states, E, which is equal for all layers."""
        _check_layer(buffers, layer)
        return self.num_earlier_states


def _check_layer(buffers: Buffers, layer: int) -> None:
    if not 0 <= layer < len(buffers):
        raise ValueError(
            f"expected a layer from 0 to {len(buffers) - 1}, got {layer}; pass a layer of the cache"
        )


def _is_exact_kind(given: np.dtype, stored: np.dtype) -> bool:
    """Return False if a cast would drop fractions or imaginary parts."""
    is_complex, is_inexact = (
        [jnp.issubdtype(dtype, kind) for dtype in (given, stored)]
        for kind in (jnp.complexfloating, jnp.inexact)
    )
    return is_complex[0] <= is_complex[1] and is_inexact[0] <= is_inexact[1]


def make_recurrent_cache(
    spec: CacheSpec, *, sequences: int, streams: int, max_rollback: int
) -> Cache:
    """Make an empty recurrent cache with Q / S * (E + 1) cells in each stream."""
    max_rollback = check_count(max_rollback, "max_rollback", low=0)
    cells = check_count(
        sequences // streams * (max_rollback + 1), "states of a stream", high=MAX_CELLS - 1
    )
    for name, shape, _ in spec.states:
        check_shape((streams, cells, *shape), f"the state {name}")
    fields = empty_fields(sequences=sequences, streams=streams, max_rollback=max_rollback)
    table = StateTable(**fields, shard_dims=spec.shard_dims)

    def layer() -> dict[str, jax.Array]:
        return {
            name: jnp.zeros((streams, cells, *shape), dtype) for name, shape, dtype in spec.states
        }

    return merge(table, tuple(layer() for _ in range(spec.layers)))
