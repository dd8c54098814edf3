"""Snapshots of recurrent caches: n saved states; a shared state is saved once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache_spec import CacheSpec
from jaxkv.core.array_utils import to_host
from jaxkv.core.constants import EMPTY, END
from jaxkv.jit_helpers import jit_table, replicate
from jaxkv.recurrent import buffers as recurrent_buffers
from jaxkv.recurrent.buffers import Buffers, Place
from jaxkv.recurrent.copy import plan_insert
from jaxkv.recurrent.states import empty_fields
from jaxkv.recurrent.table import StateTable, make_recurrent_cache
from jaxkv.snapshot.chunks import take_cells, write_cells
from jaxkv.snapshot.parts import (
    Entries,
    Form,
    Part,
    Read,
    SequenceMap,
    SlotAssignment,
    buffer_names,
    check_places,
    check_values,
    from_json,
    stamps_of_saved_cells,
    static_fields,
)
from jaxkv.spec import check_sequences_and_streams

if TYPE_CHECKING:
    from jaxtyping import Array, Int32, PyTree

    from jaxkv.snapshot.description import StateDescription

CHUNK = 8
"""Number of states that one read or write transfers."""


class StatePart(Part[StateTable, "Buffers", "StateDescription"]):
    """Saving and loading of recurrent caches: arrays of n saved states and q saved sequences.

    position: `[q, E + 1]` int32. Positions of the states of each sequence; -1 if no state.
    state: `[q, E + 1]` int32. Index of each state among the n saved states; n if no state.
    stream, cell: `[n]` int32. Stream index and cell index of each saved state.
    content: `[n]` uint32. Content hash of each saved state.
    first_position: `[n]` int32. No token in each state is before it; absent in older files.
    written: `[L, n]` bool. Whether each layer wrote each state; True.
    """

    @staticmethod
    def describe(table: StateTable, buffers: Buffers) -> StateDescription:
        """Return the sizes and static fields of a cache, as JSON values."""
        return {
            "kind": "recurrent",
            "layers": len(buffers),
            "sequences": table.sequences,
            "streams": table.streams,
            "max_rollback": table.num_earlier_states,
            "static": static_fields(table),
        }

    @staticmethod
    def make_empty(description: StateDescription, entries: Entries) -> tuple[StateTable, Buffers]:
        """Make an empty cache with the saved sizes, and states of the saved shapes."""
        sizes = {
            name: description[name] for name in ("layers", "sequences", "streams", "max_rollback")
        }
        static = {name: from_json(value) for name, value in description["static"].items()}
        check_sequences_and_streams(sizes["sequences"], sizes["streams"])
        numbers = {name.partition(".")[0] for name in entries}
        if sizes["layers"] != len(numbers):
            raise ValueError(
                f"expected {len(numbers)} layers, as saved, got {sizes['layers']}; save the "
                "snapshot again"
            )
        count = sizes.pop("layers")
        table = StateTable(**empty_fields(**sizes), **static)
        layers: tuple[dict[str, jax.Array], ...] = tuple({} for _ in range(count))
        for name, (dtype, (_, *shape)) in entries.items():
            layer, _, state = name.partition(".")
            layers[int(layer)][state] = jnp.zeros((*table.stamp.shape, *shape), dtype)
        states = {name: (x.shape[2:], x.dtype) for name, x in layers[0].items()}
        shard_dims = {name: (dim, parts) for name, dim, parts in static["shard_dims"]}
        spec = CacheSpec.recurrent(count, states, shard_dims)
        jax.eval_shape(partial(make_recurrent_cache, spec, **sizes))
        return table, layers

    @staticmethod
    def compatibility_fields(table: StateTable, buffers: Buffers) -> dict[str, object]:
        """Return the number of layers, and the shapes and dtypes of states."""
        return {
            "layers": len(buffers),
            "states": [
                {name: (x.shape[2:], x.dtype.name) for name, x in sorted(layer.items())}
                for layer in buffers
            ],
        }

    @staticmethod
    def extract_sequences(
        table: StateTable, buffers: Buffers, sequences: list[int]
    ) -> tuple[dict[str, np.ndarray], PyTree]:
        """Copy the states of the given sequences; each state array of a layer is `[n, ...]`."""
        host = to_host(table)
        ids, size = np.array(sequences, int), host.num_cells
        place = ids[:, None] // host.sequences_per_stream * size + host.cell[ids]
        kept = host.cell[ids] < size
        places = np.unique(place[kept])
        state = np.where(kept, np.searchsorted(places, place), len(places))
        stream, cell = (x.astype(np.int32) for x in np.divmod(places, size))
        arrays = {
            "position": host.position[ids],
            "state": state.astype(np.int32),
            "stream": stream,
            "cell": cell,
            "content": host.content[stream, cell],
            "first_position": host.first_position[stream, cell],
            "written": np.ones((len(buffers), len(cell)), bool),
        }
        read = partial(_gather_chunk, table, buffers)
        return arrays, take_cells(read, stream, cell, size=CHUNK)

    @staticmethod
    def saved_shapes(
        table: StateTable, buffers: Buffers, count: int, saved: int
    ) -> tuple[dict[str, Form], PyTree]:
        """Return the shapes and dtypes of the arrays from `extract_sequences`."""
        each = jax.ShapeDtypeStruct((count,), jnp.int32)
        pairs = jax.ShapeDtypeStruct((saved, table.num_earlier_states + 1), jnp.int32)
        forms = {"position": pairs, "state": pairs, "stream": each, "cell": each}
        forms["first_position"] = each
        forms["content"] = jax.ShapeDtypeStruct((count,), jnp.uint32)
        forms["written"] = jax.ShapeDtypeStruct((len(buffers), count), jnp.bool_)
        return forms, jax.eval_shape(_gather_chunk, table, buffers, each, each)

    @staticmethod
    def check_saved_table(table: StateTable, read: Read, sequences: list[int]) -> None:
        """Raise a ValueError if a saved position or state index is invalid."""
        check_places(read, table.streams, table.num_cells)
        check_values(read("written"), "written", read("written"), "of True; compute them again")
        position, state, stream = read("position"), read("state"), read("stream")
        size, kept = len(stream), position != EMPTY
        check_values(
            (position >= EMPTY) & (position < END), "position", position, f"of -1 to {END - 1}"
        )
        rises = (position[:, 1:] > position[:, :-1]) | ~kept[:, :-1]
        check_values(rises, "position", position[:, 1:], "above the one before it")
        in_range = (state >= 0) & (state < size)
        check_values(np.where(kept, in_range, state == size), "state", state, "that has a position")
        home = np.array(sequences, int)[:, None] // table.sequences_per_stream
        same = np.append(stream, EMPTY)[state] == home
        check_values(~kept | same, "state", state, "in the stream of its sequence")
        position_of_state = np.full(size + 1, EMPTY, np.int32)
        position_of_state[state] = position
        check_values(
            position_of_state[state] == position,
            "position",
            position,
            "that the state has in all places",
        )
        check_values(
            position_of_state[:-1] != EMPTY, "state", np.arange(size), "that a sequence keeps"
        )
        first = _read_first_positions(read)
        in_range = (first >= 0) & (first <= position_of_state[:-1])
        check_values(in_range, "first_position", first, "from 0 to the position of the state")

    @staticmethod
    def restore_table(
        table: StateTable, read: Read, sequences: list[int], seed: int
    ) -> SlotAssignment:
        """Add the saved states to an empty table, each in its own cell."""
        stream, cell = read("stream"), read("cell")
        host, origin = jax.tree.map(np.array, to_host(table)), np.arange(len(cell))
        ids, state = np.array(sequences, int), read("state")
        host.position[ids] = read("position")
        host.cell[ids] = np.append(cell, np.int32(table.num_cells))[state]
        for name, field in _read_fields(read, seed).items():
            getattr(host, name)[stream, cell] = field
        filled = jax.tree.map(jnp.asarray, host).advance_version(table)
        return SlotAssignment(table=filled, streams=stream, cells=cell, origin=origin)

    @staticmethod
    def insert_into_table(
        table: StateTable,
        saved: StateTable,
        read: Read,
        sequences: list[int],
        moves: SequenceMap,
        seed: int,
    ) -> SlotAssignment:
        """Choose a free cell for each state, as `jaxkv.insert` does."""
        source = _pool_of_saved_states(saved, read, seed)
        args = np.array(moves.saved_index, np.int32), np.array(moves.new, np.int32)
        filled, *places = _plan(table, source, *args)
        (_, origin), (streams, cells) = to_host(places)
        is_copied = cells < table.num_cells
        streams = np.broadcast_to(streams, cells.shape)
        return SlotAssignment(
            table=filled,
            streams=streams[is_copied],
            cells=cells[is_copied],
            origin=origin[is_copied],
        )

    @staticmethod
    def write_buffers(buffers: Buffers, prefix: str, placed: SlotAssignment, read: Read) -> Buffers:
        """Write states into the assigned cells."""
        states = jax.tree.map(read, buffer_names(buffers, prefix))
        write = partial(_scatter_chunk, placed.table)
        return write_cells(write, buffers, placed, states, size=CHUNK)


def _read_first_positions(read: Read) -> Int32[np.ndarray, " n"]:
    """Return the saved first positions; 0 for older files."""
    try:
        return read("first_position")
    except KeyError:
        return np.zeros_like(read("stream"))


def _read_fields(read: Read, seed: int) -> dict[str, np.ndarray]:
    """Return the fields of the saved cells, by name."""
    return {
        "content": read("content"),
        "first_position": _read_first_positions(read),
        "stamp": stamps_of_saved_cells(read, seed),
    }


def _pool_of_saved_states(saved: StateTable, read: Read, seed: int) -> StateTable:
    """Return a table of one stream with all saved states in saved order, and all sequences."""
    position, count = read("position"), len(read("stream"))

    def pad(field: np.ndarray) -> np.ndarray:
        return np.pad(field, (0, position.size - count))[None]

    return replace(
        saved,
        position=position,
        cell=np.where(position != EMPTY, read("state"), position.size).astype(np.int32),
        version=np.zeros(1, np.uint32),
        **{name: pad(field) for name, field in _read_fields(read, seed).items()},
    )


@jit_table
def _plan(
    table: StateTable, source: StateTable, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
) -> tuple[StateTable, Place, Place]:
    filled, origin, target = plan_insert(table, source, parents, targets)
    return filled.advance_version(table), origin, target


@jax.jit
def _gather_chunk(
    table: StateTable, buffers: Buffers, streams: Int32[Array, " n"], cells: Int32[Array, " n"]
) -> Buffers:
    return replicate(table, recurrent_buffers.read_cells(table, buffers, (streams, cells)))


@partial(jax.jit, donate_argnums=1)
def _scatter_chunk(
    table: StateTable,
    buffers: Buffers,
    states: Buffers,
    streams: Int32[Array, " n"],
    cells: Int32[Array, " n"],
) -> Buffers:
    return recurrent_buffers.write_cells(table, buffers, (streams, cells), states)
