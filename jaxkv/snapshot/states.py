"""Snapshots of recurrent caches: n saved states; a shared state is saved once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache_spec import CacheSpec
from jaxkv.core.array_utils import DROP, FILL, to_host
from jaxkv.core.constants import EMPTY, END
from jaxkv.core.hashing import chain_hashes, hash_overwritten_cells
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
    check_places,
    check_values,
    from_json,
    static_fields,
)
from jaxkv.spec import check_sequences_and_streams

if TYPE_CHECKING:
    from jaxtyping import Array, Int32, PyTree, Shaped

    from jaxkv.recurrent.buffers import Buffers
    from jaxkv.recurrent.states import States
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
        take = partial(take_cells, streams=stream, cells=cell, read=_read_states, size=CHUNK)
        return arrays, jax.tree.map(take, buffers)

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
        return forms, jax.tree.map(lambda x: jax.eval_shape(_read_states, x, each, each), buffers)

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
    def assign_slots(
        table: StateTable,
        saved: StateTable,
        read: Read,
        moves: SequenceMap,
        seed: int,
        fresh: bool,
    ) -> SlotAssignment:
        """Choose a free cell for each state if `fresh` is True; otherwise use the saved cell."""
        host = jax.tree.map(np.array, to_host(table))
        position, state = _take_newest_states(
            table.num_earlier_states + 1, read("position"), read("state"), moves.saved_index
        )
        new, kept = np.array(moves.new, int), position != EMPTY
        host.position[new], host.cell[new] = position, host.num_cells

        stream = np.broadcast_to((new // host.sequences_per_stream)[:, None], state.shape)[kept]
        # A state that sequences share is written once into each stream.
        target, index = np.unique(np.stack([stream, state[kept]]), axis=1, return_inverse=True)
        streams, origin = target.astype(np.int32)
        cells = _lowest_free_cells(host, streams) if fresh else read("cell")[origin]
        where = np.full(state.shape, host.num_cells, np.int32)
        where[kept] = cells[index.reshape(-1)]
        host.cell[new] = where

        hashes = jnp.asarray(host.stamp[streams, cells])
        mark = chain_hashes(jnp.full(origin.shape, seed, jnp.uint32), jnp.asarray(origin))
        stamp = np.asarray(hash_overwritten_cells(hashes, mark))
        host.stamp[streams, cells] = stamp
        host.content[streams, cells] = read("content")[origin]
        host.first_position[streams, cells] = _read_first_positions(read)[origin]
        filled = jax.tree.map(jnp.asarray, host).advance_version(table)
        return SlotAssignment(table=filled, streams=streams, cells=cells, origin=origin)

    @staticmethod
    def write_array(array: Array, placed: SlotAssignment, new: np.ndarray) -> Array:
        """Write saved states, `[n, ...]`, into the array of a layer."""
        where = placed.streams, placed.cells
        return write_cells(array, *where, new, placed.origin, write=_write_states, size=CHUNK)


def _read_first_positions(read: Read) -> Int32[np.ndarray, " n"]:
    """Return the saved first positions; 0 for older files."""
    try:
        return read("first_position")
    except KeyError:
        return np.zeros_like(read("stream"))


def _take_newest_states(
    pairs: int,
    position: Int32[np.ndarray, "q e"],
    state: Int32[np.ndarray, "q e"],
    saved_index: list[int],
) -> tuple[Int32[np.ndarray, "m {pairs}"], Int32[np.ndarray, "m {pairs}"]]:
    """Return positions and indices of the newest states of sequences, newest state last."""
    padding = [(0, 0), (max(pairs - position.shape[1], 0), 0)]
    position = np.pad(position[saved_index, -pairs:], padding, constant_values=EMPTY)
    return position, np.pad(state[saved_index, -pairs:], padding)


def _lowest_free_cells(host: States, streams: Int32[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
    """Return one free cell for each entry of `streams`, lowest cells first."""
    cells = np.zeros(len(streams), np.int32)
    for stream in np.unique(streams):
        used_cells = host.cell[
            stream * host.sequences_per_stream : (stream + 1) * host.sequences_per_stream
        ]
        open_cells = np.setdiff1d(np.arange(host.num_cells), used_cells)
        in_stream = streams == stream
        cells[in_stream] = open_cells[: in_stream.sum()]
    return cells


def _read_states(
    array: Shaped[Array, "S N *state"], streams: Int32[Array, " m"], cells: Int32[Array, " m"]
) -> Shaped[Array, " m *state"]:
    """Read the states in the given cells; cells past the last cell give zeros."""
    return array.at[streams, cells].get(**FILL, fill_value=0)


def _write_states(
    array: Shaped[Array, "S N *state"],
    streams: Int32[Array, " m"],
    cells: Int32[Array, " m"],
    new: Shaped[Array, " m *state"],
) -> Shaped[Array, "S N *state"]:
    """Write states into the given cells; cells past the last cell are skipped."""
    return array.at[streams, cells].set(new, **DROP, unique_indices=True)
