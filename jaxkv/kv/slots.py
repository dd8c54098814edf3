"""Choice of cells for tokens of ubatches, copies and snapshots; storage of tokens in cells."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.array_utils import DROP, MAX_COMPARISONS, out_of_range_slots
from jaxkv.core.constants import EMPTY
from jaxkv.core.hashing import cell_stamps, mix_linearly, overwrite_stamps
from jaxkv.kv.cells import (
    C,
    Cells,
    incomplete_layers,
    is_cell_empty,
    is_sequence,
    last_positions,
    locate_owner_bit,
    sequences_owning_cells,
)
from jaxkv.kv.eviction import evict_cells, is_context_evicted, is_evictable
from jaxkv.kv.placement import StreamCells, choose_in_stream
from jaxkv.kv.record import (
    CellRecord,
    gather_cells,
    scatter_cells,
    scatter_tokens,
    with_record,
)
from jaxkv.kv.shards import Shard, map_rows, map_rows_gather, map_table
from jaxkv.table import Admission, SequenceStatus
from jaxkv.ubatch import Ubatch, expand_streams_to_rows, hash_tokens, placed_rows
from jaxkv.window import max_lookback

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Int32, UInt32


def sequence_status(cells: Cells, present: Bool[Array, " Q"]) -> SequenceStatus:
    """Return the status of each sequence with `present` True."""
    last = jnp.where(
        present, jnp.maximum(last_positions(cells, present), cells.evicted_below - 1), EMPTY
    )
    return SequenceStatus(
        last=last,
        context_evicted=present & is_context_evicted(cells, last + 1),
        shift_pending=present & sequences_owning_cells(cells, cells.shift != 0),
    )


def compare_last_tokens(
    cells: Cells, sequences: Int32[Array, " Z"], contents: UInt32[Array, " Z"]
) -> tuple[UInt32[Array, " Z"], Bool[Array, " Z"]]:
    """Compare the content hash of each sequence's last cell with the array `contents`.

    Returns the hashes (0 for an empty sequence), and which hashes are equal to `contents`. After
    `seq_div`, a sequence may have several cells at its last position. In this case, the returned
    flag is True if at least one of these cells has the hash in `contents`.
    """

    def compare_on_shard(
        shard: Shard, cells: Cells, sequences: jax.Array, exists: jax.Array, contents: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        stream, word, bit = locate_owner_bit(cells, sequences)
        stream, is_own = shard.to_local_streams(stream, cells.streams)
        owns = (cells.owners[stream, word] >> bit[:, None]) & 1 == 1
        # `at` is [Z, N]: positions of the cells of each sequence. On other devices and for empty
        # sequences, `last` is EMPTY and `last_content` is 0, so a sum over devices returns the
        # value of the device that has the stream.
        at = jnp.where(owns & (exists & is_own)[:, None], cells.position[stream], EMPTY)
        last, stored = jnp.max(at, axis=1), cells.content[stream]
        last_content = jnp.take_along_axis(stored, jnp.argmax(at, axis=1)[:, None], axis=1)[:, 0]
        same = (at == last[:, None]) & (stored == contents[:, None])
        last_content = jnp.where(last >= 0, last_content, 0)
        same = is_own & jnp.where(last >= 0, jnp.any(same, axis=1), contents == 0)
        return shard.broadcast(last_content), shard.broadcast(same)

    exists = is_sequence(cells, sequences)
    sequences = jnp.where(exists, sequences, 0)
    return map_table(cells, compare_on_shard, sequences, exists, contents, out_by_stream=False)


def usable_cells(cells: Cells) -> Bool[Array, "S N"]:
    """Return which cells a token may get: empty cells and evictable cells."""
    return is_cell_empty(cells) | is_evictable(cells)


def find_fitting_sequences(cells: Cells, demand: Int32[Array, " Q"], one_ubatch: bool) -> Admission:
    """Return which sequences fit; sequences with a smaller demand get usable cells first."""
    num_usable = jnp.sum(usable_cells(cells), axis=1, dtype=jnp.int32)  # [S]
    if cells.window is not None and not one_ubatch:
        # Each ubatch may evict cells for the next one, so only the choice of slots can refuse them.
        return Admission(demand >= 0, jnp.repeat(num_usable, cells.sequences_per_stream))
    # The sums grow with the demand. A sequence that fits is therefore preceded only by sequences
    # that fit, and the cells suffice for all of them together.
    total = _sum_smallest_first(demand.reshape(cells.streams, -1))
    fits = (total <= num_usable[:, None]).reshape(-1)
    num_taken = jnp.where(fits, demand, 0).reshape(cells.streams, -1)
    remaining = jnp.repeat(
        num_usable - jnp.sum(num_taken, axis=1, dtype=jnp.int32), cells.sequences_per_stream
    )
    return Admission(fits, remaining)


def _sum_smallest_first(demand: jax.Array) -> jax.Array:
    """Return for each sequence the demand of all sequences up to it in its stream, `[S, Q / S]`."""
    if demand.shape[1] == 1:
        return demand
    if demand.size * demand.shape[1] <= MAX_COMPARISONS:
        # Axes: stream, sequence, other sequence. Equal demands are in the order of ids.
        ids = jnp.arange(demand.shape[1], dtype=jnp.int32)
        one, other = demand[:, :, None], demand[:, None]
        is_up_to = (other < one) | ((other == one) & (ids[None] <= ids[:, None])[None])
        return jnp.sum(jnp.where(is_up_to, other, 0), axis=2, dtype=jnp.int32)
    # The first sort is stable, and the second sort brings the sums back into the order of ids.
    ids = jax.lax.broadcasted_iota(jnp.int32, demand.shape, 1)
    demand, ids = jax.lax.sort((demand, ids), num_keys=1)
    _, total = jax.lax.sort((ids, jnp.cumsum(demand, axis=1, dtype=jnp.int32)), num_keys=1)
    return total


def can_allocate(
    cells: Cells,
    lengths: Int[np.ndarray, " Q"],
    at_once: int,
    num_shared_cells: Int[np.ndarray, " S"],
) -> Bool[np.ndarray, " S"]:
    """Return which streams have enough cells for sequences of `lengths`; use only NumPy."""
    # With a window, a stream needs at most `at_once` cells, in addition to the cells that the next
    # token of each sequence attends to.
    lengths = np.asarray(lengths, np.int64).reshape(cells.streams, -1)
    needed = lengths.sum(axis=1) - num_shared_cells
    if cells.window is not None:
        back = np.minimum(lengths, max_lookback(cells.window))
        needed = np.minimum(needed, back.sum(axis=1) + at_once)
    return needed <= cells.num_cells


def choose_slots(cells: Cells, ubatch: Ubatch) -> tuple[Int32[Array, "R T"], Bool[Array, ""]]:
    """Return a slot for each token of a ubatch, and whether every token has a cell.

    Empty cells are taken first, in the order of `placement`; then evictable cells, lowest position
    first. If any token gets no cell, every slot is N or more (no cell). llama.cpp: `find_slot`.
    """
    slots = map_rows_gather(cells, ubatch, _search_cells)
    ok = ~jnp.any(ubatch.valid & (slots >= cells.num_cells))
    return jnp.where(ok & ubatch.valid, slots, out_of_range_slots(slots)), ok


def _search_cells(cells: Cells, ubatch: Ubatch) -> jax.Array:
    """Choose slots in the streams of a device."""
    # If there is only one stream, its rows form one list, in any order.
    all_streams = ubatch.row_is_sequence or ubatch.spec.streams == 1
    evictable = None if cells.window is None else is_evictable(cells)
    streams = StreamCells(cells.owners, is_cell_empty(cells), evictable, cells.position)
    return cells.placement.choose_slots(streams, ubatch, all_streams)


def choose_cells(cells: Cells, open_cells: Bool[Array, "S N"]) -> Int32[Array, "S N"]:
    """Return the slots of N tokens in each stream, from cells where `open_cells` is True.

    The slots of the first n tokens do not depend on the others. If a stream has n open cells, the
    other slots are past the last cell.
    """
    ordinal = 1 + jnp.arange(cells.num_cells, dtype=jnp.int32)
    # An open cell that is not empty is evictable, because callers pass only usable cells.
    free, evictable = open_cells, None
    if cells.window is not None:
        free = open_cells & is_cell_empty(cells)
        evictable = open_cells != free
    streams = StreamCells(cells.owners, free, evictable, cells.position)
    ranked = jax.vmap(cells.placement.rank_cells)(streams)
    return jax.vmap(partial(choose_in_stream, ordinal=ordinal))(ranked)


def occupy(cells: C, ubatch: Ubatch) -> C:
    """Store the tokens of a ubatch in their slots (llama.cpp: `llama_kv_cache::apply_ubatch`)."""
    return map_rows(cells, ubatch, _occupy_streams)


def _occupy_streams(cells: C, ubatch: Ubatch) -> C:
    stream, slots = ubatch.row_stream[:, None], ubatch.slots
    cells = evict_cells(cells, stream, slots)
    content, owners = hash_tokens(ubatch), _owner_words(cells, ubatch)

    def to_rows(x: jax.Array) -> jax.Array:
        return expand_streams_to_rows(x, ubatch.row_stream, ubatch.row_is_sequence)[:, None]

    # Each hash includes version, slot, token, position and owners, so the sum in a stream depends
    # on all new cells, but not on the order of tokens in the ubatch.
    event = mix_linearly(to_rows(cells.version), content, slots, *jnp.unstack(owners, axis=-1))
    event = jnp.sum(jnp.where(slots < cells.num_cells, event, 0), axis=1, dtype=jnp.uint32)
    version = cells.version + _sum_by_stream(cells, ubatch, event)
    new = CellRecord(
        position=ubatch.positions,
        owners=owners,
        shift=jnp.int32(0),
        stamp=cell_stamps(to_rows(version), slots),
        content=content,
        user_fields=jax.tree.map(lambda x: jnp.zeros((), x.dtype), cells.user_fields),
    )
    incomplete = incomplete_layers(cells)  # False for streams that had no tokens
    cells = with_record(cells, scatter_tokens(cells.record, stream, slots, new))
    return replace(cells, version=version, incomplete=incomplete)


def _sum_by_stream(cells: Cells, ubatch: Ubatch, x: jax.Array) -> jax.Array:
    """Sum an array `[R]` over the rows of each stream; unsigned sums wrap around."""
    if not ubatch.row_is_sequence:
        return jnp.zeros(cells.streams, x.dtype).at[ubatch.row_stream].add(x)
    if len(x) == cells.streams:
        return x
    return jnp.sum(x.reshape(cells.streams, -1), axis=1, dtype=x.dtype)


def _owner_words(cells: Cells, ubatch: Ubatch) -> jax.Array:
    """Return the owner words of each token of a ubatch, `[R, T, W]` uint32."""
    if cells.sequences_per_stream == 1:
        return jnp.ones((*ubatch.sequences.shape, 1), jnp.uint32)
    words = jnp.arange(cells.owners.shape[1])

    def owner_bits(sequences: jax.Array) -> jax.Array:
        _, word, bit = locate_owner_bit(cells, sequences)
        return jnp.where(words[None, None] == word[..., None], jnp.uint32(1) << bit[..., None], 0)

    owners = owner_bits(ubatch.sequences)
    if ubatch.shared_with is not None:
        for sharer in jnp.unstack(ubatch.shared_with, axis=-1):  # -1 is padding
            owners |= jnp.where(sharer[..., None] >= 0, owner_bits(sharer), 0)
    return owners


def mark_incomplete(cells: C, ubatch: Ubatch, is_missing: Bool[Array, " L"]) -> C:
    """Record which layers of a stacked cache lack the keys of a ubatch."""
    assert cells.incomplete is not None
    grown = _sum_by_stream(cells, ubatch, placed_rows(ubatch).astype(jnp.int32)) > 0
    # `grown` is [S]: only streams that got tokens of the ubatch lack keys.
    lacking = grown & jnp.any(is_missing)
    # Other keys are stored than after a step that wrote all layers, so the stamps differ.
    event = jnp.sum(mix_linearly(jnp.arange(is_missing.size), is_missing), dtype=jnp.uint32)
    version = jnp.where(lacking, mix_linearly(cells.version, event), cells.version)
    of_rows = expand_streams_to_rows(version, ubatch.row_stream, ubatch.row_is_sequence)
    stamp = cell_stamps(of_rows[:, None], ubatch.slots)
    where = (ubatch.row_stream[:, None], ubatch.slots)
    return replace(
        cells,
        stamp=cells.stamp.at[where].set(stamp, **DROP, unique_indices=True),
        version=version,
        incomplete=cells.incomplete | (grown[:, None] & is_missing[None]),
    )


def mark_used(
    cells: C,
    slots: Int32[Array, "S N"],
    new_cells: CellRecord,
    is_incomplete: Bool[Array, "S L"] | None,
) -> C:
    """Store `new_cells` at `slots`; skip slots past the last cell.

    `is_incomplete[s, l]` is True if layer l lacks keys and values of new cells in stream s.
    """
    gets = jnp.any(slots < cells.num_cells, axis=1)[:, None]
    stream = jnp.arange(cells.streams, dtype=jnp.int32)[:, None]
    cells = evict_cells(cells, stream, slots)

    # The stamp of an overwritten cell must differ from its stamp in older tables.
    stamp = overwrite_stamps(gather_cells(cells.stamp, slots), new_cells.stamp)
    record = scatter_cells(cells.record, slots, replace(new_cells, stamp=stamp))
    incomplete = jax.tree.map(
        lambda old, new: old | (gets & new), incomplete_layers(cells), is_incomplete
    )
    return replace(with_record(cells, record), incomplete=incomplete)
