"""Choice of cells for the tokens of a ubatch, and storage of the tokens in these cells."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxkv.core.array_utils import DROP, MAX_COMPARISONS, out_of_range_slots, search_sorted
from jaxkv.core.constants import EMPTY, END
from jaxkv.core.hashing import cell_stamps, mix_linearly
from jaxkv.kv.cells import (
    C,
    Cells,
    incomplete_layers,
    is_cell_empty,
    last_positions,
    locate_owner_bit,
    sequences_owning_cells,
)
from jaxkv.kv.eviction import evict_cells, is_context_evicted, is_evictable
from jaxkv.kv.fill_order import cells_at_ranks, to_fill_order
from jaxkv.kv.sharded import gather_over_axes, map_rows
from jaxkv.kv.tiles import choose_in_tiles
from jaxkv.plan import Reason
from jaxkv.table import Admission, SequenceStatus
from jaxkv.ubatch import Ubatch, expand_streams_to_rows, hash_tokens, placed_rows
from jaxkv.window import max_lookback

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Int32


class TokenLists(NamedTuple):
    """P lists of tokens, each in one stream; attention reads keys once for each list.

    all_streams: Whether P is S and list p contains all tokens of stream p.
    """

    streams: Int32[Array, " P"]
    all_streams: bool


def group_rows_by_stream(cells: Cells, ubatch: Ubatch) -> TokenLists:
    """Group tokens into lists: by stream if the streams of rows are static, otherwise by row."""
    # If row r is sequence r, the rows of each stream are contiguous. Otherwise each row is a list,
    # because the streams of rows are traced.
    if cells.streams == 1 or ubatch.row_is_sequence:
        return TokenLists(jnp.arange(cells.streams, dtype=jnp.int32), all_streams=True)
    return TokenLists(ubatch.row_stream, all_streams=False)


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


def usable_cells(cells: Cells) -> Bool[Array, "S N"]:
    """Return which cells a token may get: empty cells and evictable cells."""
    return is_cell_empty(cells) | is_evictable(cells)


def find_fitting_sequences(cells: Cells, demand: Int32[Array, " Q"], one_ubatch: bool) -> Admission:
    """Return which sequences fit; sequences with a smaller demand get usable cells first."""
    # With contiguous placement, `fits` ignores fragmentation.
    open_cells = usable_cells(cells)
    num_usable = jnp.sum(open_cells, axis=1, dtype=jnp.int32)  # [S]
    if cells.window is not None and not one_ubatch:
        all_fit, remaining = demand >= 0, jnp.repeat(num_usable, cells.sequences_per_stream)
        return Admission(all_fit, all_fit, remaining)
    total = _sum_smallest_first(demand.reshape(cells.streams, -1))
    fits = (total <= num_usable[:, None]).reshape(-1)
    num_taken = jnp.where(fits, demand, 0).reshape(cells.streams, -1)
    remaining = jnp.repeat(
        num_usable - jnp.sum(num_taken, axis=1, dtype=jnp.int32), cells.sequences_per_stream
    )
    if cells.placement == "contiguous" and one_ubatch:
        in_one_run = (total <= longest_run(open_cells)[:, None]).reshape(-1)
        return Admission(fits, in_one_run, remaining)
    return Admission(fits, fits, remaining)


def longest_run(open_cells: Bool[Array, "S N"]) -> Int32[Array, " S"]:
    """Return the length of the longest run of True in each stream."""
    here = 1 + jnp.arange(open_cells.shape[1], dtype=jnp.int32)
    here = jnp.broadcast_to(here, open_cells.shape)
    closed = jax.lax.cummax(jnp.where(open_cells, 0, here), axis=1)  # 1 + last closed index
    return jnp.max(here - closed, axis=1)


def _sum_smallest_first(demand: jax.Array) -> jax.Array:
    """Return for each sequence the demand of all sequences up to it in its stream, `[S, Q / S]`."""
    if demand.shape[1] == 1:
        return demand
    if demand.size * demand.shape[1] <= MAX_COMPARISONS:
        number = jnp.arange(demand.shape[1], dtype=jnp.int32)
        one, other = demand[:, :, None], demand[:, None]
        is_before = number[None] <= number[:, None]
        is_up_to = (other < one) | ((other == one) & is_before[None])
        return jnp.sum(jnp.where(is_up_to, other, 0), axis=2, dtype=jnp.int32)
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


def choose_slots(cells: Cells, ubatch: Ubatch) -> tuple[Int32[Array, "R T"], Int[Array, "R T"]]:
    """Return a slot and a `Reason` for each token of a ubatch (llama.cpp: `find_slot`).

    Contiguous placement takes the first run of usable cells that is long enough. Other placements
    take empty cells first, in the order of `placement`; then evictable cells, lowest position
    first. If any token gets no cell, every slot is N or more (no cell). Tokens without a cell
    have the reason OUT_OF_CELLS, or FRAGMENTED if there are enough cells but no run is long enough.
    """
    slots, is_fragmented = map_rows(cells, ubatch, _search_cells, lambda _: P())
    fault = jnp.where(is_fragmented, Reason.FRAGMENTED, Reason.OUT_OF_CELLS)
    unplaced = ubatch.valid & (slots >= cells.num_cells)
    placed = ~jnp.any(unplaced) & ubatch.valid
    return jnp.where(placed, slots, out_of_range_slots(slots)), jnp.where(
        unplaced, fault, Reason.OK
    )


def _search_cells(
    cells: Cells, ubatch: Ubatch, rows: tuple[str, ...], shared_axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Choose slots in the streams of a device; all-gather slots and `is_fragmented` flags."""
    # If there is only one stream, its rows form one list, in any order.
    all_streams = ubatch.row_is_sequence or ubatch.spec.streams == 1
    if cells.placement == "tiled":
        slots = choose_in_tiles(cells, ubatch, all_streams)
        split = jnp.zeros(slots.shape, bool)
    else:
        slots, split = _choose_in_order(cells, ubatch, all_streams)
    if shared_axes:  # each token takes the result of its stream's device
        slots = jnp.where(ubatch.valid, slots, out_of_range_slots(slots))
        split = ubatch.valid & split
        slots, whole = jax.lax.pmin((slots, (~split).astype(jnp.int32)), shared_axes)
        split = whole == 0
    return gather_over_axes((slots, split), rows)


def _choose_in_order(
    cells: Cells, ubatch: Ubatch, all_streams: bool
) -> tuple[jax.Array, jax.Array]:
    open_cells = usable_cells(cells)
    if all_streams and ubatch.valid.size == cells.streams:
        slots = _choose_single_cell(cells, open_cells).reshape(ubatch.valid.shape)
        return slots, jnp.zeros(slots.shape, bool)
    streams = jnp.arange(cells.streams, dtype=jnp.int32) if all_streams else ubatch.row_stream
    valid = ubatch.valid.reshape(streams.size, -1)
    number = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    total = number[:, -1]
    if not all_streams and cells.sequences_per_stream > 1:
        beside = streams[:, None] == streams[None]
        ahead = beside & (ubatch.row_sequence[:, None] > ubatch.row_sequence[None])
        number += jnp.sum(jnp.where(ahead, total[None], 0), axis=1, dtype=jnp.int32)[:, None]
        total = jnp.sum(jnp.where(beside, total[None], 0), axis=1, dtype=jnp.int32)
    position = cells.position
    if not all_streams:
        open_cells, position = open_cells[streams], position[streams]
    slots, split = jax.vmap(partial(choose_in_stream, cells))(open_cells, position, number, total)
    slots = slots.reshape(ubatch.valid.shape)
    split = jnp.broadcast_to(split[:, None], (split.size, slots.size // split.size))
    return slots, split.reshape(slots.shape)


def _choose_single_cell(cells: Cells, open_cells: jax.Array) -> jax.Array:
    """Return the slot of the only token of each stream, `[S]`; N if no cell is open."""
    size, shards = cells.num_cells, cells.shards
    open_cells, position = to_fill_order(open_cells, shards), to_fill_order(cells.position, shards)
    if cells.window is not None and cells.placement != "contiguous":
        lowest = jnp.min(jnp.where(open_cells, position, END), axis=1)
        open_cells &= position == lowest[:, None]
    first = jnp.min(jnp.where(open_cells, jnp.arange(size, dtype=jnp.int32), size), axis=1)
    return cells_at_ranks(first, size, shards)


def choose_in_stream(
    cells: Cells,
    open_cells: Bool[Array, " N"],
    position: Int32[Array, " N"],
    number: Int32[Array, " T"],
    total: Int32[Array, ""],
) -> tuple[Int32[Array, " T"], Bool[Array, ""]]:
    """Choose slots in a stream for `total` tokens.

    Tokens are numbered from 1; `number` contains the number of each token. A token that gets no
    cell has a slot past the last cell. The returned flag is True if placement is contiguous and at
    least `total` cells are open, in one or in several runs.
    """
    size, shards = cells.num_cells, cells.shards
    open_cells, position = to_fill_order(open_cells, shards), to_fill_order(position, shards)
    count = jnp.cumsum(open_cells, dtype=jnp.int32)  # inclusive
    if cells.placement == "contiguous":
        return _find_first_run(count, total) + number - 1, total <= count[-1]
    if cells.window is None:
        return cells_at_ranks(search_sorted(count, number), size, shards), jnp.array(False)
    # An empty cell has the lowest position, -1.
    order = jnp.argsort(jnp.where(open_cells, position, END), stable=True).astype(jnp.int32)
    order = cells_at_ranks(jnp.append(order, jnp.int32(size)), size, shards)
    return order[jnp.where(number <= count[-1], number - 1, size)], jnp.array(False)


def _find_first_run(counts: jax.Array, length: jax.Array) -> jax.Array:
    """Return the first cell of the first run of `length` open cells; N if there is no such run."""
    cells = counts.shape[0]
    start = jnp.arange(cells)
    before = jnp.where(start > 0, counts[start - 1], 0)
    after = counts[jnp.minimum(start + length - 1, cells - 1)]
    whole = (after - before == length) & (start + length <= cells)
    return jnp.where(jnp.any(whole), jnp.argmax(whole), cells).astype(jnp.int32)


def occupy(cells: C, ubatch: Ubatch) -> C:
    """Store the tokens of a ubatch in their slots (llama.cpp: `llama_kv_cache::apply_ubatch`)."""
    return map_rows(cells, ubatch, lambda cells, ubatch, *_: _occupy_streams(cells, ubatch), P)


def _occupy_streams(cells: C, ubatch: Ubatch) -> C:
    where = (ubatch.row_stream[:, None], ubatch.slots)
    if cells.window is not None:
        nothing = jnp.zeros(cells.position.shape, bool)
        cells = evict_cells(cells, nothing.at[where].set(True, **DROP))
    content, owners = hash_tokens(ubatch), _owner_words(cells, ubatch)
    is_placed = ubatch.slots < cells.num_cells
    event = mix_linearly(content, ubatch.slots, *jnp.unstack(owners, axis=-1))
    count, event = (
        _sum_by_stream(cells, ubatch, jnp.sum(x, axis=1, dtype=jnp.uint32))
        for x in (is_placed, jnp.where(is_placed, event, 0))
    )
    version = jnp.where(count > 0, mix_linearly(cells.version, event), cells.version)
    stamp = expand_streams_to_rows(version, ubatch.row_stream, ubatch.row_is_sequence)[:, None]
    words = jnp.arange(owners.shape[2])
    put = {**DROP, "unique_indices": True}
    return replace(
        cells,
        position=cells.position.at[where].set(ubatch.positions, **put),
        owners=cells.owners.at[where[0][..., None], words[None, None], where[1][..., None]].set(
            owners, **put
        ),
        shift=cells.shift.at[where].set(0, **put),
        stamp=cells.stamp.at[where].set(cell_stamps(stamp, ubatch.slots), **put),
        content=cells.content.at[where].set(content, **put),
        version=version,
        incomplete=incomplete_layers(cells),
    )


def _sum_by_stream(cells: Cells, ubatch: Ubatch, x: jax.Array) -> jax.Array:
    """Sum an array `[R]` over the rows of each stream; unsigned sums wrap around."""
    if ubatch.row_is_sequence:
        return jnp.sum(x.reshape(cells.streams, -1), axis=1, dtype=x.dtype)
    return jnp.zeros(cells.streams, x.dtype).at[ubatch.row_stream].add(x)


def _owner_words(cells: Cells, ubatch: Ubatch) -> jax.Array:
    """Return the owner words of each token of a ubatch, `[R, T, W]` uint32."""
    words = jnp.arange(cells.owners.shape[1])

    def owner_bits(sequences: jax.Array) -> jax.Array:
        _, word, bit = locate_owner_bit(cells, sequences)
        return jnp.where(words[None, None] == word[..., None], jnp.uint32(1) << bit[..., None], 0)

    owners = owner_bits(ubatch.sequences)
    if ubatch.shared_with is not None:
        for sharer in jnp.unstack(ubatch.shared_with, axis=-1):
            owners |= jnp.where(sharer[..., None] >= 0, owner_bits(jnp.maximum(sharer, 0)), 0)
    return owners


def mark_incomplete(cells: C, ubatch: Ubatch, is_missing: Bool[Array, " L"]) -> C:
    """Record which layers of a stacked cache lack the keys of a ubatch."""
    assert cells.incomplete is not None
    grown = _sum_by_stream(cells, ubatch, placed_rows(ubatch).astype(jnp.int32)) > 0
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
