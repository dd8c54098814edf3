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
from jaxkv.core.array_utils import dtype_names, next_power_of_two, to_host
from jaxkv.core.constants import END, WORD
from jaxkv.core.validate import check_count
from jaxkv.jit_helpers import jit_table, replicate
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.cells import Cells, empty_fields, incomplete_layers
from jaxkv.kv.copy_pooled import CopyDemand, with_copies
from jaxkv.kv.cross_attention import as_source_table
from jaxkv.kv.insert import plan_insert
from jaxkv.kv.layer_kv import LayerKV
from jaxkv.kv.make import make_attention_cache
from jaxkv.kv.placement import FirstFit
from jaxkv.kv.record import INITIAL
from jaxkv.kv.shards import read_layer, write_layer
from jaxkv.kv.table import CellTable
from jaxkv.ops.storage.forms import form_of_dtype, storage_in_snapshot
from jaxkv.ops.storage.latent import ValueSlice
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
    stamps_of_saved_cells,
    static_fields,
    to_json,
)
from jaxkv.snapshot.placements import find_saved_placement
from jaxkv.spec import check_sequences_and_streams

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Int32, PyTree, UInt32

    from jaxkv.rope import NotGiven, Rope
    from jaxkv.snapshot.description import CellDescription

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
    field.NAME: `[n, ...]`. User field NAME of each saved cell.
    """

    @staticmethod
    def describe(table: CellTable, buffers: Buffers) -> CellDescription:
        """Return the sizes, static fields and ropes of a cache, as JSON values."""
        description: CellDescription = {
            "kind": "attention",
            "cells": table.num_cells,
            "sequences": table.sequences,
            "streams": table.streams,
            "static": {**table.placement.snapshot_fields(), **static_fields(table)},
            "ropes": to_json(buffers.ropes),
            "latent": [_slice_bounds(sizes.latent) for sizes in buffers.head_sizes],
        }
        fields = [(name, list(shape), dtype.name) for name, shape, dtype in table.field_specs]
        if fields:
            description["fields"] = fields
        if buffers.rotated:  # older files do not have the key
            description["rotated"] = True
        return description

    @staticmethod
    def make_empty(description: CellDescription, entries: Entries) -> tuple[CellTable, Buffers]:
        """Make an empty cache with the saved sizes and heads."""
        ropes = from_json(description["ropes"])
        sizes = {name: description[name] for name in ("cells", "sequences", "streams")}
        static = {name: from_json(value) for name, value in description["static"].items()}
        static["placement"] = find_saved_placement(static["placement"], static.pop("shards"))

        find = partial(storage_in_snapshot, entries=entries)
        rotated = description.get("rotated", False)
        shapes = _buffer_shapes(sizes, static, ropes, description["latent"], find, rotated=rotated)
        forms = {name: (shape, dtype) for name, shape, dtype in description.get("fields", ())}
        fields = CacheSpec.attention(1, 1, 1, fields=forms).fields
        table = CellTable(**empty_fields(stacked_layers=0, **sizes, fields=fields), **static)

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
        """Return the layers, head sizes, dtypes, rotation, window and ropes of a cache."""
        dtypes = [*dict.fromkeys(dtype_names((buffers.k, buffers.v)))]
        return {
            "layers": buffers.layers,
            "kv_heads": [layer.kv_heads for layer in buffers.head_sizes],
            "head_dim": [layer.head_dim for layer in buffers.head_sizes],
            "value_dim": [layer.values for layer in buffers.head_sizes],
            "dtype": dtypes[0] if len(dtypes) == 1 else dtypes,
            "rotate": buffers.rotated,
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
            **{f"field.{x}": y[stream, ..., cell] for x, y in host.user_fields.items()},
            "stream": stream,
            "cell": cell,
            "owners": owners[stream, :, cell],
            "evicted_below": host.evicted_below[np.array(sequences, int)],
        }

        heads = [
            take_cells(partial(_gather_chunk, table, buffers.layer(i)), stream, cell, size=CHUNK)
            for i in range(buffers.layers)
        ]
        return arrays, _with_layers(buffers, heads)

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
        for name, shape, dtype in table.field_specs:
            forms[f"field.{name}"] = jax.ShapeDtypeStruct((count, *shape), dtype)
        forms["evicted_below"] = jax.ShapeDtypeStruct((saved,), jnp.int32)

        heads = [
            jax.eval_shape(_gather_chunk, table, layer, each, each)
            for layer in _unstack_layers(buffers)
        ]
        return forms, _with_layers(buffers, heads)

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
    def restore_table(
        table: CellTable, read: Read, sequences: list[int], seed: int
    ) -> SlotAssignment:
        """Add the saved cells to an empty table, each at its own index."""
        stream, cell = read("stream"), read("cell")
        host, origin = jax.tree.map(np.array, to_host(table)), np.arange(len(cell))
        for name, field in {**_read_fields(read, seed), "owners": read("owners")}.items():
            getattr(host, name)[stream, ..., cell] = field
        for name, field in host.user_fields.items():
            field[stream, ..., cell] = read(f"field.{name}")
        host.evicted_below[np.array(sequences, int)] = read("evicted_below")
        filled = jax.tree.map(jnp.asarray, host).advance_version(table)
        return SlotAssignment(table=filled, streams=stream, cells=cell, origin=origin)

    @staticmethod
    def insert_into_table(
        table: CellTable,
        saved: CellTable,
        read: Read,
        sequences: list[int],
        moves: SequenceMap,
        seed: int,
    ) -> SlotAssignment:
        """Choose a free cell for each saved cell, as `jaxkv.insert` does."""
        source = _pool_of_saved_cells(saved, read, sequences, seed)
        args = np.array(moves.saved_index, np.int32), np.array(moves.new, np.int32)
        filled, origin, slots, need = _plan(table, source, *args)
        origin, slots, need = to_host((origin, slots, need))
        for stream in np.flatnonzero(need.demand > need.capacity):
            raise PlanRefusedError(
                f"expected {need.demand[stream]} free cells in stream {stream} for a snapshot, got "
                f"{need.capacity[stream]}; remove a sequence there (seq_rm), or make a cache with "
                f"more cells"
            )
        streams, rank = np.nonzero(np.arange(slots.shape[1])[None] < need.demand[:, None])
        return SlotAssignment(
            table=filled,
            streams=streams.astype(np.int32),
            cells=slots[streams, rank],
            origin=origin[streams, rank],
        )

    @staticmethod
    def write_buffers(buffers: Buffers, prefix: str, placed: SlotAssignment, read: Read) -> Buffers:
        """Write keys and values into the assigned slots, one layer at a time."""
        names = buffer_names(_with_layers(buffers, _unstack_layers(buffers)), prefix)
        for i in range(buffers.layers):
            layer = buffers.layer(i)
            keys, values = jax.tree.map(read, (names.k[i], names.v[i]))
            heads = replace(layer, keys=keys, values=values)
            write = partial(_scatter_chunk, placed.table)
            layer = write_cells(write, layer, placed, heads, size=CHUNK)
            buffers = buffers.with_layer(i, layer)
        return buffers


@jax.jit
def _gather_chunk(
    table: CellTable, layer: LayerKV, streams: Int32[Array, " n"], cells: Int32[Array, " n"]
) -> LayerKV:
    return replicate(table, read_layer(table, layer, streams, cells))


@partial(jax.jit, donate_argnums=1)
def _scatter_chunk(
    table: CellTable,
    layer: LayerKV,
    heads: LayerKV,
    streams: Int32[Array, " n"],
    cells: Int32[Array, " n"],
) -> LayerKV:
    return write_layer(table, layer, streams, cells, heads)


@jit_table
def _plan(
    table: CellTable, source: Cells, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
) -> tuple[CellTable, Int32[Array, "S N"], Int32[Array, "S N"], CopyDemand]:
    copies = plan_insert(table, source, parents, targets)
    filled = with_copies(table, source, copies).advance_version(table)
    return filled, copies.origin, copies.slots, copies.need


def _read_fields(read: Read, seed: int) -> dict[str, np.ndarray]:
    """Return the fields of the saved cells except for owners, by name."""
    return {**{name: read(name) for name in SAVED}, "stamp": stamps_of_saved_cells(read, seed)}


def _pool_of_saved_cells(
    saved: CellTable, read: Read, sequences: list[int], seed: int
) -> CellTable:
    """Return a table of one stream with all saved cells in saved order, and all saved sequences."""
    # The number of cells is rounded up, so that few programs are compiled.
    stream, bits = read("stream"), read("owners")
    count, size = len(stream), next_power_of_two(len(stream))
    words = np.zeros((-(-len(sequences) // WORD), count), np.uint32)
    for i, seq in enumerate(sequences):
        home, word, bit = _locate_owner_bit(saved, seq)
        is_own = (stream == home) & (bits[:, word] >> np.uint32(bit) & 1 == 1)
        words[i // WORD, is_own] |= np.uint32(1 << i % WORD)

    def pad_cells(field: np.ndarray, value: np.generic) -> Any:
        padding = [(0, 0)] * (field.ndim - 1) + [(0, size - count)]
        return np.pad(field, padding, constant_values=value)[None]

    fields = {**_read_fields(read, seed), "owners": words}
    user_fields = {name: np.moveaxis(read(f"field.{name}"), 0, -1) for name in saved.user_fields}
    return CellTable(
        **{name: pad_cells(field, INITIAL[name]) for name, field in fields.items()},
        user_fields={name: pad_cells(x, x.dtype.type(0)) for name, x in user_fields.items()},
        evicted_below=jnp.asarray(read("evicted_below")),
        version=jnp.zeros(1, jnp.uint32),
        incomplete=None,
        placement=FirstFit(),
        window=saved.window,
        ubatch_size=None,
    )


def _unstack_layers(buffers: Buffers) -> list[LayerKV]:
    return [buffers.layer(i) for i in range(buffers.layers)]


def _with_layers(buffers: Buffers, layers: list[LayerKV]) -> Buffers:
    """Return buffers with one array for each layer, as in a snapshot."""
    k, v = tuple(layer.keys for layer in layers), tuple(layer.values for layer in layers)
    return replace(buffers, k=k, v=v, stacked=False)


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
    *,
    rotated: bool,
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
        dtype=(find("k.0").dtype, find("k.0" if latent[0] else "v.0").dtype),
        rotate=rotated,
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
