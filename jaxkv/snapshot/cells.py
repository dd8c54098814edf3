"""Snapshots of attention caches: n saved cells, ordered by stream, then by cell index.

A cell with several owners is saved once. A cell whose owners are restored to several streams is
copied once to each of these streams.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache_spec import CacheSpec
from jaxkv.core.array_utils import dtype_names, out_of_range_slots, to_host
from jaxkv.core.constants import EMPTY, END, WORD
from jaxkv.core.hashing import chain_hashes
from jaxkv.core.validate import check_count
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.cells import empty_fields, incomplete_layers, sequence_bits, with_owners
from jaxkv.kv.cross_attention import as_source_table
from jaxkv.kv.layer_kv import LayerKV
from jaxkv.kv.make import make_attention_cache
from jaxkv.kv.record import INITIAL, CellRecord
from jaxkv.kv.slots import choose_cells, mark_used, usable_cells
from jaxkv.kv.table import CellTable
from jaxkv.ops.storage.cell_arrays import gather, scatter
from jaxkv.ops.storage.forms import form_of_dtype, storage_in_snapshot
from jaxkv.ops.storage.head_rows import A, join_heads
from jaxkv.ops.storage.latent import ValueSlice
from jaxkv.ops.storage.layer_stack import CellArray, map_arrays
from jaxkv.ops.storage.storage import Storage, Stored
from jaxkv.plan import PlanRefusedError
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
    static_fields,
    to_json,
)
from jaxkv.snapshot.placements import find_saved_placement
from jaxkv.spec import check_sequences_and_streams

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Bool, Int, Int32, PyTree, UInt32

    from jaxkv.rope import NotGiven, Rope
    from jaxkv.snapshot.description import CellDescription
    from jaxkv.snapshot.parts import Fill

CHUNK = 256
"""Number of cells that one read or write transfers."""

SAVED = [name for name in INITIAL if name not in ("owners", "stamp")]
"""Fields of a cell that are saved as they are; a loaded cell gets other owners and a new stamp."""


class CellPart(Part[CellTable, Buffers, "CellDescription"]):
    """Saving and loading of attention caches: arrays of n saved cells and q saved sequences.

    position, shift, stream, cell: `[n]` int32. Position, pending shift and indices of saved cells.
    content: `[n]` uint32. Content hash of each saved cell.
    owners: `[n, W]` uint32. Bits of the saved sequences that own each cell, as in the table.
    evicted_below: `[q]` int32. For each saved sequence, 1 + its highest evicted position.
    """

    @staticmethod
    def describe(table: CellTable, buffers: Buffers) -> CellDescription:
        """Return the sizes, static fields and ropes of a cache, as JSON values."""
        return {
            "kind": "attention",
            "cells": table.num_cells,
            "sequences": table.sequences,
            "streams": table.streams,
            "static": {**table.placement.saved_fields(), **static_fields(table)},
            "ropes": to_json(buffers.ropes),
            "latent": [_slice_bounds(sizes.latent) for sizes in buffers.head_sizes],
        }

    @staticmethod
    def make_empty(description: CellDescription, entries: Entries) -> tuple[CellTable, Buffers]:
        """Make an empty cache with the saved sizes and heads."""
        ropes = from_json(description["ropes"])
        sizes = {name: description[name] for name in ("cells", "sequences", "streams")}
        static = {name: from_json(value) for name, value in description["static"].items()}
        static["placement"] = find_saved_placement(static["placement"], static.pop("shards"))

        find = partial(storage_in_snapshot, entries=entries)
        shapes = _buffer_shapes(sizes, static, ropes, description["latent"], find)
        table = CellTable(**empty_fields(stacked_layers=0, **sizes), **static)

        def zeros_as_saved(name: str, shape: Any) -> Stored:
            dtype = find(name).dtype
            return form_of_dtype(dtype).zeros(shape.shape, dtype)

        k = tuple(zeros_as_saved(f"k.{i}", shape) for i, shape in enumerate(shapes.k))
        v = tuple(
            sizes.latent or zeros_as_saved(f"v.{i}", shape)
            for i, (sizes, shape) in enumerate(zip(shapes.head_sizes, shapes.v, strict=True))
        )
        return table, replace(shapes, k=k, v=v)

    @staticmethod
    def compatibility_fields(table: CellTable, buffers: Buffers) -> dict[str, object]:
        """Return the layers, head sizes, dtypes, window and ropes of a cache."""
        dtypes = dtype_names((buffers.k, buffers.v))
        return {
            "layers": buffers.layers,
            "kv_heads": [layer.kv_heads for layer in buffers.head_sizes],
            "head_dim": [layer.head_dim for layer in buffers.head_sizes],
            "value_dim": [layer.values for layer in buffers.head_sizes],
            "dtype": dtypes[0] if len(set(dtypes)) == 1 else dtypes,
            "window": table.window,
            **{f"rope of layer {i}": rope for i, rope in enumerate(buffers.ropes)},
        }

    @staticmethod
    def extract_sequences(
        table: CellTable, buffers: Buffers, sequences: list[int]
    ) -> tuple[dict[str, np.ndarray], PyTree]:
        """Copy the cells of the given sequences; keys and values are `[n, K, ...]`."""
        host = to_host(table)
        missing = to_host(incomplete_layers(table))
        for seq in sequences:
            stream, _, _ = _locate_owner_bit(host, seq)
            if missing is not None and missing[stream].any():
                raise ValueError(
                    f"expected every layer to hold all tokens of sequence {seq}, got layers "
                    f"{np.flatnonzero(missing[stream]).tolist()} that were not written after an "
                    f"apply; go back to the table before it (rewind)"
                )
        words = _owner_words(host, sequences, np.arange(host.streams))
        owners = host.owners & words[..., None]
        stream, cell = (x.astype(np.int32) for x in np.nonzero(owners.any(axis=1)))
        arrays = {
            **{name: getattr(host, name)[stream, ..., cell] for name in SAVED},
            "stream": stream,
            "cell": cell,
            "owners": owners[stream, :, cell],
            "evicted_below": host.evicted_below[np.array(sequences, int)],
        }

        def take_rows(array: CellArray) -> np.ndarray:
            return take_cells(array, stream, cell, read=gather, size=CHUNK)

        return arrays, _read_heads(buffers, take_rows)

    @staticmethod
    def saved_shapes(
        table: CellTable, buffers: Buffers, count: int, saved: int
    ) -> tuple[dict[str, Form], PyTree]:
        """Return the shapes and dtypes of the arrays from `extract_sequences`."""
        each = jax.ShapeDtypeStruct((count,), jnp.int32)
        forms: dict[str, Form] = dict.fromkeys(("stream", "cell"), each)
        for name in (*SAVED, "owners"):
            field = getattr(table, name)  # [S, ..., N]
            forms[name] = jax.ShapeDtypeStruct((count, *field.shape[1:-1]), field.dtype)
        forms["evicted_below"] = jax.ShapeDtypeStruct((saved,), jnp.int32)

        def heads_at(buffers: Buffers, index: Int32[Array, " n"]) -> Buffers:
            return _read_heads(buffers, lambda x: gather(x, index, index))

        return forms, jax.eval_shape(heads_at, buffers, each)

    @staticmethod
    def check_saved_table(table: CellTable, read: Read, sequences: list[int]) -> None:
        """Raise a ValueError if a saved position, shift, owner or `evicted_below` is invalid."""
        check_places(read, table.streams, table.num_cells)
        position, shift = (read(name).astype(np.int64) for name in ("position", "shift"))
        check_values(
            (position >= 0) & (position < END), "position", position, f"from 0 to {END - 1}"
        )
        was = position - shift
        check_values((was >= 0) & (was < END), "shift", shift, "from a position to another")
        owners, (streams, index) = read("owners"), np.unique(read("stream"), return_inverse=True)
        words = _owner_words(table, sequences, streams)[index]
        check_values(
            owners & ~words == 0, "owners", owners, "among the saved sequences of the stream"
        )
        check_values(np.any(owners != 0, axis=1), "owners", owners[:, 0], "of each cell")
        evicted_below = read("evicted_below")
        check_values(evicted_below >= 0, "evicted_below", evicted_below, "of at least 0")
        if table.window is None:  # else each batch of the sequence would be refused
            check_values(evicted_below == 0, "evicted_below", evicted_below, "of 0 (no window)")

    @staticmethod
    def assign_slots(
        table: CellTable,
        saved: CellTable,
        read: Read,
        moves: SequenceMap,
        seed: int,
        fresh: bool,
    ) -> SlotAssignment:
        """Choose a free cell for each saved cell if `fresh` is True, else use the saved index."""
        demand, origin, owners = _assign_cells(table, saved, read("stream"), read("owners"), moves)
        evicted_below = np.full(table.sequences, EMPTY, np.int32)
        evicted_below[moves.new] = read("evicted_below")[moves.saved_index]
        rest, open_cells, num_free = _release_sequences(table, evicted_below)
        for stream in np.flatnonzero(demand > np.asarray(num_free)):
            raise PlanRefusedError(
                f"expected {demand[stream]} free cells in stream {stream} for a snapshot, got "
                f"{num_free[stream]}; remove a sequence there (seq_rm), or make a cache with more "
                f"cells"
            )
        # In stream s, only the first `demand[s]` entries of `origin` are saved cells.
        is_filled = np.arange(table.num_cells)[None] < demand[:, None]

        def gather_by_origin(name: str) -> np.ndarray:
            field = read(name)
            return np.append(field, np.zeros(1, field.dtype))[origin]

        slots = _choose(rest, open_cells) if fresh else jnp.asarray(gather_by_origin("cell"))
        slots = np.where(is_filled, slots, np.asarray(out_of_range_slots(slots)))
        fields = {"owners": owners, **{name: gather_by_origin(name) for name in SAVED}}
        filled = _occupy_cells(rest, slots, fields, origin, np.uint32(seed))
        streams = np.broadcast_to(
            np.arange(table.streams, dtype=np.int32)[:, None], is_filled.shape
        )
        return SlotAssignment(
            table=filled.advance_version(table),
            streams=streams[is_filled],
            cells=slots[is_filled],
            origin=origin[is_filled],
        )

    @staticmethod
    def fill_buffers(buffers: Buffers, prefix: str, fill: Fill) -> Buffers:
        """Fill the arrays of all layers, one layer at a time, and return the buffers."""
        called = buffer_names(_unstack_layers(buffers), prefix)
        for i in range(buffers.layers):
            layer = buffers.layer(i)
            names = called.k[i], called.v[i]
            keys, values = map_arrays(fill, (layer.keys, layer.values), names)
            buffers = buffers.with_layer(i, replace(layer, keys=keys, values=values))
        return buffers

    @staticmethod
    def write_array(array: CellArray, placed: SlotAssignment, new: np.ndarray) -> CellArray:
        """Write saved keys or values, `[n, K, ...]`, into the array of a layer."""
        where, rows = (
            (placed.streams, placed.cells),
            join_heads(new, new.shape[1] // array.shape[1], array.shape[3]),
        )
        return write_cells(array, *where, rows, placed.origin, write=scatter, size=CHUNK)


def _unstack_layers(buffers: Buffers) -> Buffers:
    """Return the buffers with one array for each layer, as in a snapshot."""
    return _with_layers(buffers, [buffers.layer(i) for i in range(buffers.layers)])


def _with_layers(buffers: Buffers, layers: list[LayerKV]) -> Buffers:
    k, v = tuple(layer.keys for layer in layers), tuple(layer.values for layer in layers)
    return replace(buffers, k=k, v=v, stacked=False)


def _read_heads(buffers: Buffers, read: Callable[[CellArray], A]) -> Buffers:
    """Read the rows of each layer with `read`, and split each row into heads."""
    layers = [buffers.layer(i).read_heads(read) for i in range(buffers.layers)]
    return _with_layers(buffers, layers)


def _owner_words(
    table: CellTable, sequences: list[int], streams: Int[np.ndarray, " n"]
) -> UInt32[np.ndarray, "n W"]:
    """Return the owner flags of sequences in some streams, without arrays of all streams."""
    owner_words = np.zeros((len(streams), table.owners.shape[1]), np.uint32)
    for seq in sequences:
        stream, word, bit = _locate_owner_bit(table, seq)
        owner_words[streams == stream, word] |= np.uint32(1 << bit)
    return owner_words


def _buffer_shapes(
    sizes: dict[str, int],
    static: dict[str, Any],
    ropes: tuple[Rope | NotGiven | None, ...],
    latent: list[list[int] | None],
    find: Callable[[str], Storage],
) -> Buffers:
    """Return the shapes of buffers from `make_cache`; raise for invalid sizes or static fields."""
    layers = range(len(ropes))
    heads, keys = zip(*(find(f"k.{i}").shape[1:] for i in layers), strict=True)
    values = [slice(*x) if (x := latent[i]) else find(f"v.{i}").shape[2] for i in layers]
    if static["ubatch_size"] is not None:
        check_count(static["ubatch_size"], "ubatch_size")
    spec = CacheSpec.attention(len(ropes), heads, keys, values, window=static["window"], rope=ropes)
    check_sequences_and_streams(sizes["sequences"], sizes["streams"])
    make = partial(
        make_attention_cache,
        spec,
        **sizes,
        dtype=find("k.0").dtype,
        ubatch_size=1,
        max_rollback=sizes["cells"],
        placement=static["placement"],
        stacked=False,
        lanes=None,
        devices=None,
    )
    return jax.eval_shape(make).buffers


def _locate_owner_bit(table: CellTable, seq: int) -> tuple[int, int, int]:
    """Return the stream of a sequence, and the word index and bit index of its owner flag."""
    stream, local = divmod(seq, table.sequences_per_stream)
    return stream, *divmod(local, WORD)


def _assign_cells(
    table: CellTable,
    saved: CellTable,
    stream: Int32[np.ndarray, " n"],
    owners: UInt32[np.ndarray, "n X"],
    moves: SequenceMap,
) -> tuple[Int32[np.ndarray, " S"], Int32[np.ndarray, "S N"], UInt32[np.ndarray, "S W N"]]:
    """Return the number of cells to fill in each stream, and the source and owners of each cell.

    A source is the index of a saved cell; n for unfilled cells. The first array also counts the
    saved cells that do not fit in a stream.
    """
    bits_by_pair: dict[tuple[int, int], np.ndarray] = {}
    streams, words, size = table.owners.shape
    for old, new in zip(moves.old, moves.new, strict=True):
        (source, word, bit), (target, own_word, own_bit) = (
            _locate_owner_bit(saved, old),
            _locate_owner_bit(table, new),
        )
        # Saved cells are ordered by stream, so the cells of stream `source` are a slice.
        here = slice(*np.searchsorted(stream, (source, source + 1)))
        own_bits = owners[here, word] >> np.uint32(bit) & np.uint32(1)
        theirs = bits_by_pair.setdefault(
            (target, source), np.zeros((len(own_bits), words), np.uint32)
        )
        theirs[:, own_word] |= own_bits << np.uint32(own_bit)

    # Cells of a saved stream that go to one stream are neighbours in `origin`, in the order of
    # saved streams.
    demand = np.zeros(streams, np.int32)
    origin = np.full((streams, size), len(stream), np.int32)
    owner = np.zeros((streams, words, size), np.uint32)
    for (target, source), theirs in sorted(bits_by_pair.items()):
        used = np.flatnonzero(theirs.any(axis=1))
        first, last = demand[target], demand[target] + len(used)
        demand[target] = last
        if last <= size:
            origin[target, first:last] = np.searchsorted(stream, source) + used
            owner[target, :, first:last] = theirs[used].T
    return demand, origin, owner


@jax.jit
def _release_sequences(
    table: CellTable, evicted_below: Int32[ArrayLike, " Q"]
) -> tuple[CellTable, Bool[Array, "S N"], Int32[Array, " S"]]:
    """Remove sequences whose entry in `evicted_below` is not -1; copy these entries to the table.

    Also return the free cells, and the number of cells that a snapshot may fill in each stream.
    """
    is_removed = evicted_below != EMPTY
    ids = jnp.where(is_removed, jnp.arange(table.sequences, dtype=jnp.int32), table.sequences)
    gone = jax.lax.reduce_or(jax.vmap(partial(sequence_bits, table))(ids), axes=(0,))
    rest = with_owners(table, table.owners & ~gone[..., None])
    rest = replace(rest, evicted_below=jnp.where(is_removed, evicted_below, rest.evicted_below))
    open_cells = usable_cells(rest)
    return rest, open_cells, jnp.sum(open_cells, axis=1, dtype=jnp.int32)


_choose = jax.jit(choose_cells)


@jax.jit
def _occupy_cells(
    rest: CellTable,
    slots: Int32[Array, "S N"],
    fields: dict[str, jax.Array],
    origin: Int32[Array, "S N"],
    seed: UInt32[Array, ""],
) -> CellTable:
    """Write restored cells into a table; compute each `stamp` from `seed` and `origin`."""
    stamp = chain_hashes(jnp.broadcast_to(seed, origin.shape), origin)
    new_cells = CellRecord(stamp=stamp, **fields)
    return mark_used(rest, slots, new_cells, jax.tree.map(jnp.zeros_like, rest.incomplete))


def _slice_bounds(latent: ValueSlice | None) -> list[int] | None:
    """Return the bounds of the slice that serves as values; None if values are stored."""
    return [latent.first, latent.last] if latent else None


class SourcePart(CellPart):
    """Saving and loading of cross-attention caches, with the arrays of `CellPart`."""

    @staticmethod
    def describe(table: CellTable, buffers: Buffers) -> CellDescription:
        """Return sizes, ropes and static fields, as JSON values."""
        return {**CellPart.describe(table, buffers), "kind": "source"}

    @staticmethod
    def make_empty(description: CellDescription, entries: Entries) -> tuple[CellTable, Buffers]:
        """Make an empty cross-attention cache with the saved sizes and heads."""
        table, buffers = CellPart.make_empty(description, entries)
        return as_source_table(table), buffers
