"""Buffers of a recurrent cache: reads, writes and copies of states on each device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxkv.core.array_utils import DROP, FILL
from jaxkv.core.partitioning import (
    broadcast_from_owner,
    current_mesh,
    make_axis_partition,
    map_shards,
    to_local_index,
)
from jaxkv.recurrent.states import States
from jaxkv.step import Step, map_step
from jaxkv.ubatch import row_mesh_axes

if TYPE_CHECKING:
    from jaxtyping import Array, Shaped

    from jaxkv.core.types import AnyMesh

Buffers = tuple[dict[str, jax.Array], ...]
"""For each layer, the states of all cells, `[S, N, ...]`, by state name."""

Place = tuple[jax.Array, jax.Array]
"""Stream indices and cell indices: two int32 arrays that broadcast to each other."""


@jax.jit
def read_layer_states(
    step: Step, arrays: dict[str, Shaped[Array, "S N ..."]]
) -> dict[str, Shaped[Array, "R ..."]]:
    """Return a layer's states before the first token of each row; keys are state names."""
    table = step.table
    streams = make_axis_partition(table.sharding_rules, streams=table.streams).streams
    rows = row_mesh_axes(step.ubatch, streams)

    def read_on_shard(step: Step, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        where = (step.ubatch.row_stream, step.ubatch.slots.source)

        def gather_state(array: jax.Array) -> jax.Array:
            # `fill` selects, so NaN in a cell does not affect a state that starts at zero.
            state = array.at[where].get(**FILL, fill_value=0)
            is_stale = step.is_stale.reshape(-1, *[1] * (state.ndim - 1))
            state = jnp.where(is_stale, _unreadable_value(array.dtype), state)
            return state if rows == streams else broadcast_from_owner(state, streams)

        return jax.tree.map(gather_state, arrays)

    array_specs = state_specs(table, arrays, (streams, None))
    out_specs = state_specs(table, arrays, (rows,))
    return map_step(step, streams, read_on_shard, (arrays,), (array_specs,), out_specs)


@jax.jit
def write_layer_states(
    step: Step,
    states: dict[str, Shaped[Array, "R _ ..."]],
    arrays: dict[str, Shaped[Array, "S N ..."]],
) -> dict[str, Shaped[Array, "S N ..."]]:
    """Write E + 1 states of each row into a layer; return the layer's new arrays."""
    table = step.table
    streams = make_axis_partition(table.sharding_rules, streams=table.streams).streams
    rows = row_mesh_axes(step.ubatch, streams)

    def write_on_shard(
        step: Step, states: dict[str, jax.Array], arrays: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
        where = (step.ubatch.row_stream[:, None], step.ubatch.slots.cells)

        def put_state(array: jax.Array, state: jax.Array) -> jax.Array:
            new = state.astype(array.dtype)
            return array.at[where].set(new, **DROP, unique_indices=True)

        return jax.tree.map(put_state, arrays, states)

    array_specs = state_specs(table, arrays, (streams, None))
    in_specs = state_specs(table, arrays, (rows, None)), array_specs
    return map_step(step, streams, write_on_shard, (states, arrays), in_specs, array_specs)


def read_cells(table: States, buffers: Buffers, place: Place) -> Buffers:
    """Return the states `[*n, ...]` in the given cells; zeros for cells past the last one."""
    streams = make_axis_partition(table.sharding_rules, streams=table.streams).streams
    none = (None,) * place[1].ndim

    def read_on_shard(place: Place, buffers: Buffers) -> Buffers:
        def read_state(x: jax.Array) -> jax.Array:
            state = x.at[_to_local_cells(table, place, streams, len(x))].get(**FILL, fill_value=0)
            return broadcast_from_owner(state, streams)

        return jax.tree.map(read_state, buffers)

    buffer_specs, out_specs = (
        tuple(state_specs(table, arrays, leading) for arrays in buffers)
        for leading in ((streams, None), none)
    )
    run = map_shards(table.sharding_rules, read_on_shard, (P(), buffer_specs), out_specs)
    return run(place, buffers)


def write_cells(table: States, buffers: Buffers, place: Place, states: Buffers) -> Buffers:
    """Write states that `read_cells` returned for any cache; skip cells past the last one."""
    streams = make_axis_partition(table.sharding_rules, streams=table.streams).streams
    none = (None,) * place[1].ndim

    def write_on_shard(place: Place, states: Buffers, buffers: Buffers) -> Buffers:
        def write_state(x: jax.Array, state: jax.Array) -> jax.Array:
            return x.at[_to_local_cells(table, place, streams, len(x))].set(state, **DROP)

        return jax.tree.map(write_state, buffers, states)

    buffer_specs, in_specs = (
        tuple(state_specs(table, arrays, leading) for arrays in buffers)
        for leading in ((streams, None), none)
    )
    in_specs = P(), in_specs, buffer_specs
    run = map_shards(table.sharding_rules, write_on_shard, in_specs, buffer_specs)
    return run(place, states, buffers)


def _to_local_cells(table: States, place: Place, streams: tuple[str, ...], count: int) -> Place:
    """Return indices in a shard of `count` streams; cells of other devices move past the last."""
    stream, is_own = to_local_index(place[0], streams, count)
    return stream, jnp.where(is_own, place[1], table.num_cells)


def state_specs(
    table: States, names: Iterable[str], leading: tuple, mesh: AnyMesh | None = None
) -> dict[str, P]:
    """Return the `PartitionSpec` of each state, after the mesh axes of the leading dimensions.

    `mesh=None` means the current mesh.
    """
    rules = table.sharding_rules
    mesh = current_mesh(rules) if mesh is None else mesh
    axes: dict[str, tuple] = {}
    if rules is not None and mesh is not None:
        for name, dimension, parts in table.shard_dims:
            split = rules.split(mesh, kv_heads=parts)["kv_heads"]
            axes[name] = (*[None] * dimension, split) if split else ()
    return {name: P(*leading, *axes.get(name, ())) for name in names}


def _unreadable_value(dtype: jnp.dtype) -> float | int:
    """Return the value of an unreadable state: NaN, the lowest integer, or False for bool."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else False
