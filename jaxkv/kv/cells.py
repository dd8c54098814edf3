"""The table of an attention cache: for each cell a position, its owners, and a rotation owed.

This table is the truth about a cache. It holds not one byte of keys or values, so every edit of it
(forgetting, forking, moving) costs the same whatever the model's size. What can be computed from it
(how many cells are used, the first and last position of a sequence) is computed, never stored.

Ranges of positions are `start` to `stop` - 1, `[]` int32: a negative start means 0, a
negative stop no end, and a stop of 0 an empty range. Ids are `[]` int32; one that is no sequence
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import divmod_nonnegative, indices_of_true, resolve_range_end
from jaxkv.core.constants import EMPTY, END
from jaxkv.core.hashing import chain_hashes, sum_hashes
from jaxkv.core.partitioning import ShardingRules
from jaxkv.window import Window

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Int32, UInt32

T = TypeVar("T")
C = TypeVar("C", bound="Cells")

WORD = 32
"""Sequences whose ownership is packed into one word."""

BLOCK = 128
"""Cells that a CPU compares with all sequences of a word at a time: what its registers hold."""

Placement = Literal["any", "contiguous", "striped", "tiled"]
"""Which cells a ubatch may get: any, by their numbers; one run of neighbours; any, in stripes; any,
in tiles."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """S independent tables of N cells, for Q sequences; `CellTable` is what verbs know of them.

    Sequence q lives in stream q // (Q // S). A cell has an owner exactly when it has a position,
    and an empty cell owes no rotation.

    position: position of the token in the cell; EMPTY (-1) if there is none.
    owners: one bit for each sequence that owns the cell, 32 to a word.
    shift: the position now less the position that the key was rotated for.
    evicted_below: one past the highest position that window reuse took from the sequence.
    cell_hash: a number for what the buffers hold for the cell, see `jaxkv.cell_hash`. It tells
      whether that is still what an earlier table knew.
    content: a hash of the cell's token and of the position at which its key was computed. Copies
      and moves carry it along, so that it tells which text a sequence holds.
    history: a number for all that entered the stream, before the last ubatch and with it; twice the
      same where a copy or a snapshot came last.
    written: the history that each layer holds. It is another one where a ubatch was applied and the
      layer was not written.
    placement: which cells a ubatch may get, static.
    shards: among how many runs of equal length cells are dealt, static; 1 unless they are striped.
    window: how far back tokens look, static; a cell that no next token sees may be taken.
    ubatch_size: the most tokens of a ubatch that N was chosen for, static; None for any.
    sharding_rules: which axes of a mesh split the cache, static; None where it is on one device.
    """

    position: Int32[Array, "S N"]
    owners: UInt32[Array, "S W N"]
    shift: Int32[Array, "S N"]
    evicted_below: Int32[Array, " Q"]
    cell_hash: UInt32[Array, "S N"]
    content: UInt32[Array, "S N"]
    history: UInt32[Array, "S 2"]
    written: UInt32[Array, "S L"]
    placement: Placement = field(metadata={"static": True})
    shards: int = field(metadata={"static": True})
    window: Window | None = field(metadata={"static": True})
    ubatch_size: int | None = field(metadata={"static": True})
    sharding_rules: ShardingRules | None = field(default=None, metadata={"static": True})

    @property
    def is_batch(self) -> bool:
        """Whether the arrays have an axis more, as `vmap` makes them."""
        return self.cell_hash.ndim != 2

    @property
    def streams(self) -> int:
        """S, the number of independent tables."""
        return self.position.shape[0]

    @property
    def num_cells(self) -> int:
        """N, the number of cells in each stream."""
        return self.position.shape[1]

    @property
    def sequences(self) -> int:
        """Q, the number of sequences that may own cells."""
        return self.evicted_below.shape[0]

    @property
    def sequences_per_stream(self) -> int:
        """Q // S, the number of sequences that share a stream."""
        return self.sequences // self.streams


@partial(jax.jit, static_argnames=("layers", "cells", "sequences", "streams"))
def empty_fields(*, layers: int, cells: int, sequences: int, streams: int) -> dict[str, jax.Array]:
    """Make the arrays of a table with every cell empty.

    Args:
      layers: L, the layers of the buffers.
      cells: N, the cells of each stream.
      sequences: Q, the number of sequence ids, 0 to Q - 1.
      streams: S, a divisor of Q.

    Returns:
      The array fields of `Cells`, by name.
    """
    words = -(-(sequences // streams) // WORD)
    return {
        "position": jnp.full((streams, cells), EMPTY, jnp.int32),
        "owners": jnp.zeros((streams, words, cells), jnp.uint32),
        "shift": jnp.zeros((streams, cells), jnp.int32),
        "evicted_below": jnp.zeros((sequences,), jnp.int32),
        "cell_hash": jnp.zeros((streams, cells), jnp.uint32),
        "content": jnp.zeros((streams, cells), jnp.uint32),
        "history": jnp.zeros((streams, 2), jnp.uint32),
        "written": jnp.zeros((streams, layers), jnp.uint32),
    }


def locate_owner_bit(
    cells: Cells, seq: Int[Array, "*n"]
) -> tuple[Int[Array, "*n"], Int[Array, "*n"], UInt32[Array, "*n"]]:
    """Return where the ownership of a sequence is written: its stream, its word and its bit.

    An id that is no sequence gets some home too, and must be masked.
    """
    stream, local = divmod_nonnegative(seq, cells.sequences_per_stream)
    word, bit = divmod_nonnegative(local, WORD)
    return stream, word, bit.astype(jnp.uint32)


def is_sequence(cells: Cells, seq: Int[Array, "*n"]) -> Bool[Array, "*n"]:
    """Return whether an integer names a sequence of this table."""
    return (seq >= 0) & (seq < cells.sequences)


def sequence_positions(cells: Cells, seq: Int32[Array, ""]) -> Int32[Array, " N"]:
    """Return the positions that one sequence holds, cell by cell of its stream.

    Returns:
      The position where the sequence owns the cell, EMPTY elsewhere.
    """
    stream, word, bit = locate_owner_bit(cells, seq)
    owns = (cells.owners[stream, word] >> bit) & 1 == 1
    return jnp.where(owns & is_sequence(cells, seq), cells.position[stream], EMPTY)


def seq_pos_min(cells: Cells, seq: Int32[Array, ""]) -> Int32[Array, ""]:
    """Return the smallest position that a sequence holds, -1 if none."""
    positions = sequence_positions(cells, seq)
    lowest = jnp.min(jnp.where(positions == EMPTY, END, positions))
    return jnp.where(lowest == END, EMPTY, lowest)


def seq_pos_max(cells: Cells, seq: Int32[Array, ""]) -> Int32[Array, ""]:
    """Return the largest position that a sequence holds, -1 if none."""
    return jnp.max(sequence_positions(cells, seq))


def last_positions(cells: Cells, asked: Bool[Array, " Q"]) -> Int32[Array, " Q"]:
    """Return the largest position that each sequence asked for holds, -1 if none.

    Args:
      cells: the table.
      asked: of others the answer may be -1.

    The sequences of a word lie side by side, so that all are compared with a cell at once: a pass
    for each word with a sequence that was asked for, instead of one for each sequence.
    """
    if cells.sequences_per_stream == 1:
        return jnp.max(cells.position, axis=1)
    streams, words, _ = cells.owners.shape
    asked = asked.reshape(streams, -1)
    asked = jnp.pad(asked, [(0, 0), (0, words * WORD - cells.sequences_per_stream)])
    asked = jnp.any(asked.reshape(streams, words, WORD), axis=(0, 2))
    # Elsewhere than on a processor turns of a loop cost more than they save.
    found = jax.lax.platform_dependent(
        cells.owners,
        cells.position,
        asked,
        cpu=partial(_last_positions_by_chunk, min(BLOCK, cells.num_cells)),
        default=partial(_last_positions_by_chunk, cells.num_cells),
    )
    return found.reshape(streams, -1)[:, : cells.sequences_per_stream].reshape(-1)


def _last_positions_by_chunk(
    size: int, owners: jax.Array, position: jax.Array, asked: jax.Array
) -> jax.Array:
    """Do it for some words, `[W]` bool, `size` cells at a time; `[S, W, WORD]` int32.

    `owners` and `position` are those of `Cells`.
    """
    streams, words, cells = owners.shape
    bit = jnp.arange(WORD, dtype=jnp.uint32)

    def update_word(word: jax.Array, found: jax.Array) -> jax.Array:
        def update_chunk(i: jax.Array, highest: jax.Array) -> jax.Array:
            start = jnp.minimum(i * size, cells - size)  # the last may overlap the one before
            corner = jnp.int32(0), word, start  # all of one type, also with x64
            here = jax.lax.dynamic_slice(owners, corner, (streams, 1, size))[:, 0]
            at = jax.lax.dynamic_slice_in_dim(position, start, size, axis=1)
            owned = (here[..., None] >> bit[None, None]) & 1 == 1  # [S, size, WORD]
            return jnp.maximum(highest, jnp.max(jnp.where(owned, at[..., None], EMPTY), axis=1))

        turns = jnp.int32(-(-cells // size))
        highest = jax.lax.fori_loop(jnp.int32(0), turns, update_chunk, found[:, word])
        return found.at[:, word].set(highest)

    return fold_over_true(asked, update_word, jnp.full((streams, words, WORD), EMPTY, jnp.int32))


def is_cell_empty(cells: Cells) -> jax.Array:
    """Return which cells are empty; `[S, N]` bool, also on the host."""
    return cells.position == EMPTY


def num_used_cells(cells: Cells) -> Int32[Array, ""]:
    """Return how many cells hold a token, over all streams."""
    return jnp.sum(~is_cell_empty(cells), dtype=jnp.int32)


def num_cells_saved_by_sharing(cells: Cells) -> Int32[Array, " S"]:
    """Return how many cells sharing spares in each stream, n - 1 for one of n owners."""
    owned = jnp.sum(jax.lax.population_count(cells.owners), axis=(1, 2), dtype=jnp.int32)
    return owned - jnp.sum(~is_cell_empty(cells), axis=1, dtype=jnp.int32)


def seq_rm(cells: C, seq: Int32[Array, ""], start: Int32[Array, ""], stop: Int32[Array, ""]) -> C:
    """Take one sequence (every sequence if `seq` is -1) off its cells in a range of positions.

    Args:
      cells: the table.
      seq: a sequence id, or -1. Any other integer changes nothing.
      start: first position of the range.
      stop: one past the last.

    Returns:
      The table after it. A cell that loses its last owner is empty.
    """
    seq_bits = jnp.where(seq == -1, ~jnp.uint32(0), sequence_bits(cells, seq))
    gone = seq_bits[..., None] & to_word_mask(is_in_range(cells, start, stop))
    # What the caller wants to be gone is not missed.
    asked = (seq == -1) | (jnp.arange(cells.sequences) == seq)
    begins = jnp.minimum(cells.evicted_below, jnp.maximum(start, 0))
    all_of_it = asked & (resolve_range_end(stop) >= cells.evicted_below)
    return replace(
        with_owners(cells, cells.owners & ~gone),
        evicted_below=jnp.where(all_of_it, begins, cells.evicted_below),
    )


def seq_cp(
    cells: C,
    src: Int32[Array, ""],
    dst: Int32[Array, "*n"],
    start: Int32[Array, ""],
    stop: Int32[Array, ""],
) -> C:
    """Make one or more sequences of the same stream owners of another's cells in a range.

    What `dst` held before stays its own: a merge, and doing it twice is doing it once.

    Args:
      cells: the table.
      src: the sequence that owns the cells already.
      dst: the sequences that will own them too.
      start: first position of the range.
      stop: one past the last.
    """
    shared = is_owned_by(cells, sequence_bits(cells, src)) & is_in_range(cells, start, stop)
    gained = jax.vmap(partial(sequence_bits, cells))(jnp.atleast_1d(dst))  # [n, S, W]
    gained = jax.lax.reduce_or(gained, axes=(0,))
    missed = jnp.where(is_sequence(cells, src), eviction_mark_of_copy(cells, src, start, stop), 0)
    return replace(
        with_owners(cells, cells.owners | (gained[..., None] & to_word_mask(shared))),
        evicted_below=cells.evicted_below.at[
            jnp.where(is_sequence(cells, dst), dst, cells.sequences)
        ].max(missed, mode="drop"),
    )


def eviction_mark_of_copy(
    cells: Cells, seq: Int32[Array, ""], start: Int32[Array, ""], stop: Int32[Array, ""]
) -> Int32[Array, ""]:
    """Return the eviction mark that a copy of a range of a sequence begins with."""
    mark = jnp.minimum(cells.evicted_below[seq], resolve_range_end(stop))
    return jnp.where(jnp.maximum(start, 0) < mark, mark, 0)


def seq_select(cells: C, parents: Int32[Array, " n"], targets: Int32[Array, " n"]) -> C:
    """Give each target the cells of its parent in place of its own, all at once.

    Args:
      cells: the table.
      parents: sequences, of the same stream as their targets.
      targets: each at most once; one that is no sequence is left out.
    """

    def add_owner(i: jax.Array, owners: jax.Array) -> jax.Array:
        shared = is_owned_by(cells, sequence_bits(cells, parents[i]))
        return owners | (sequence_bits(cells, targets[i])[..., None] & to_word_mask(shared))

    replaced = jax.lax.reduce_or(
        jax.vmap(partial(sequence_bits, cells))(targets), axes=(0,)
    )  # [S, W]
    others = cells.owners & ~replaced[..., None]
    owners = jax.lax.fori_loop(0, targets.size, add_owner, others)
    missed = cells.evicted_below[parents]
    evicted_below = cells.evicted_below.at[targets].set(missed, mode="drop")
    return replace(with_owners(cells, owners), evicted_below=evicted_below)


def seq_keep(cells: C, seq: Int32[Array, ""]) -> C:
    """Empty every cell that one sequence does not own, and make it the only owner of the rest."""
    only = with_owners(cells, cells.owners & sequence_bits(cells, seq)[..., None])
    only = replace(
        only, evicted_below=jnp.where(jnp.arange(cells.sequences) == seq, cells.evicted_below, 0)
    )
    return jax.tree.map(lambda new, old: jnp.where(is_sequence(cells, seq), new, old), only, cells)


def clear(cells: C) -> C:
    """Empty every cell; nothing is owed and nothing counts as evicted."""
    return replace(
        cells,
        position=jnp.full_like(cells.position, EMPTY),
        owners=jnp.zeros_like(cells.owners),
        shift=jnp.zeros_like(cells.shift),
        evicted_below=jnp.zeros_like(cells.evicted_below),
    )


def fold_over_true(asked: Bool[Array, " n"], look: Callable[[jax.Array, T], T], start: T) -> T:
    """Fold over the sequences asked for, or the words of them, one after another.

    A reduction over all pairs of sequences and cells at once costs a hundred times more in a large
    table.
    """
    ids = indices_of_true(asked, asked.size)
    return jax.lax.fori_loop(0, jnp.sum(asked), lambda i, carry: look(ids[i], carry), start)


def sequences_owning_cells(cells: Cells, where: Bool[Array, "S N"]) -> Bool[Array, " Q"]:
    """Return which sequences own one of some cells."""
    words = [jnp.where(where, cells.owners[:, w], 0) for w in range(cells.owners.shape[1])]
    some = jnp.stack([jax.lax.reduce_or(word, axes=(1,)) for word in words], axis=1)  # [S, W]
    stream, word, bit = locate_owner_bit(cells, jnp.arange(cells.sequences))
    return (some[stream, word] >> bit) & 1 == 1


def owns_same_cells(cells: Cells, partner: Int32[Array, " Q"]) -> Bool[Array, " Q"]:
    """Return whether sequences own the very same cells as others of their stream.

    Args:
      cells: the table.
      partner: the number of the other one within the stream, its own where none is asked about.
    """
    partner = partner.reshape(cells.streams, cells.sequences_per_stream)
    local_ids = jnp.arange(cells.sequences_per_stream, dtype=jnp.int32)[None]

    def owner_bits(local: jax.Array) -> jax.Array:
        word, bit = divmod_nonnegative(local, WORD)
        words = jnp.take_along_axis(cells.owners, word[:, None, None], axis=1)[:, 0]
        return (words >> bit.astype(jnp.uint32)[:, None]) & 1

    def compare(local: jax.Array, answers: jax.Array) -> jax.Array:
        own_bits = owner_bits(jnp.full(cells.streams, local))
        same = jnp.all(own_bits == owner_bits(partner[:, local]), axis=1)
        return answers.at[:, local].set(same)

    asked = jnp.any(partner != local_ids, axis=0)
    return fold_over_true(asked, compare, jnp.ones(partner.shape, bool)).reshape(-1)


def stream_hash(cells: Cells) -> UInt32[Array, " S"]:
    """Return a number of each stream's content.

    Equal digests, equal table: position, owners, shift and stamp of every cell, and what a window
    took from every sequence. It changes with every edit, and comes back when an edit is undone.
    Without a window it is a sum over cells, so the next digest follows from this one and the cells
    that change.
    """
    index = jnp.broadcast_to(jnp.arange(cells.num_cells), cells.position.shape)
    owners = jnp.moveaxis(cells.owners, 1, -1)
    cell = hash_cells(index, cells.position, cells.shift, cells.cell_hash, owners)
    found = jnp.sum(cell, axis=1, dtype=jnp.uint32)
    if cells.window is None:
        return found
    marks = cells.evicted_below.reshape(cells.streams, cells.sequences_per_stream)
    sequence = chain_hashes(
        jnp.broadcast_to(jnp.arange(cells.sequences_per_stream), marks.shape), marks
    )
    return sum_hashes(found, jnp.sum(sequence, axis=1, dtype=jnp.uint32))


def hash_cells(
    index: Int[Array, "*#n"],
    position: Int32[Array, "*#n"],
    shift: Int32[Array, "*#n"],
    cell_hash: UInt32[Array, "*#n"],
    owners: UInt32[Array, "*#n W"],
) -> UInt32[Array, "*#n"]:
    """Return what cells add to the digest of their stream.

    `owners` has their words along an axis more, the last one.
    """
    return chain_hashes(index, position, shift, cell_hash, *jnp.unstack(owners, axis=-1))


def rewind(cells: C, old: C) -> tuple[C, Bool[Array, ""]]:
    """Return an older table that knows what was written since; and `ok`.

    `ok` is whether nothing that the older table uses was written over or moved.
    """
    ok = jnp.all((cells.cell_hash == old.cell_hash) | is_cell_empty(old))
    before, after, past = cells.history[:, :1], cells.history[:, 1:], old.history[:, 1:]
    whole = (
        (cells.written == past)
        | ~is_layer_incomplete(cells)
        | (cells.written == before) & (past != after)
    )
    written = jnp.where(whole, past, cells.written)
    # The older table may know more than this one, which then cannot tell what is written of it.
    still = jnp.all(is_cell_empty(old) | ~is_cell_empty(cells), axis=1, keepdims=True)
    return replace(
        old, cell_hash=cells.cell_hash, written=jnp.where(still, written, old.written)
    ), ok


def is_layer_incomplete(cells: Cells) -> jax.Array:
    """Return which layers lack tokens that their stream holds; `[S, L]` bool, also on the host."""
    return (cells.written != cells.history[:, 1:]) & ~is_cell_empty(cells).all(
        axis=1, keepdims=True
    )


def advance_history_fields(
    history: UInt32[Array, "S 2"], is_incomplete: Bool[Array, "S L"]
) -> dict[str, UInt32[Array, "S _"]]:
    """Return the fields `history` and `written` of streams that tokens came to by no ubatch.

    Args:
      history: what it was.
      is_incomplete: the layers that lack tokens from now on.
    """
    # The sum makes it another one than 0 after two zeros.
    mark = chain_hashes(history[:, 0], history[:, 1] + 1)[:, None]
    return {
        "history": jnp.broadcast_to(mark, history.shape),
        "written": jnp.where(is_incomplete, mark + 1, mark),
    }


def hashes_after_rotation(cells: Cells, where: Bool[Array, "S N"]) -> UInt32[Array, "S N"]:
    """Return the stamps once the keys of some cells were rotated as they were owed.

    By how much goes into them: two branches that rotate a key differently hold different ones.
    """
    return jnp.where(where, chain_hashes(cells.cell_hash, cells.shift), cells.cell_hash)


def count_broken_invariants(cells: Cells) -> dict[str, Int32[Array, ""]]:
    """Return how often each invariant of a table is broken, by name."""
    owned = jnp.any(cells.owners != 0, axis=1)
    known_bits = jax.vmap(partial(sequence_bits, cells))(jnp.arange(cells.sequences))  # [Q, S, W]
    unknown = cells.owners & ~jax.lax.reduce_or(known_bits, axes=(0,))[..., None]
    wrong = {
        "position below -1": cells.position < EMPTY,
        "position without an owner": ~is_cell_empty(cells) & ~owned,
        "owner without a position": is_cell_empty(cells) & owned,
        "owner that is no sequence": unknown != 0,
        "rotation owed to an empty cell": is_cell_empty(cells) & (cells.shift != 0),
        "rotated for a negative position": ~is_cell_empty(cells) & (cells.position < cells.shift),
        "evicted below a negative position": cells.evicted_below < 0,
    }
    return {name: jnp.sum(where, dtype=jnp.int32) for name, where in wrong.items()}


def sequence_bits(cells: Cells, seq: Int[Array, ""]) -> UInt32[Array, "S W"]:
    """Return one sequence as words that can be laid over `owners`."""
    stream, word, bit = locate_owner_bit(cells, seq)
    streams, words, _ = cells.owners.shape
    here = (jnp.arange(streams)[:, None] == stream) & (jnp.arange(words)[None] == word)
    return jnp.where(here & is_sequence(cells, seq), jnp.uint32(1) << bit, jnp.uint32(0))


def is_owned_by(cells: Cells, words: UInt32[Array, "S W"]) -> Bool[Array, "S N"]:
    """Return which cells have an owner among `words`."""
    return jnp.any(cells.owners & words[..., None] != 0, axis=1)


def is_in_range(
    cells: Cells, start: Int32[Array, ""], stop: Int32[Array, ""]
) -> Bool[Array, "S N"]:
    """Return which cells hold a position of a range. Empty cells never do."""
    return (cells.position >= jnp.maximum(start, 0)) & (cells.position < resolve_range_end(stop))


def to_word_mask(cell: Bool[Array, "S N"]) -> UInt32[Array, "S 1 N"]:
    """Turn a bool for each cell into words of all ones or none."""
    return jnp.where(cell, ~jnp.uint32(0), jnp.uint32(0))[:, None]


def with_owners(cells: C, owners: UInt32[Array, "S W N"]) -> C:
    """Replace the owners; a cell with none left is empty and owes nothing."""
    kept = jnp.any(owners != 0, axis=1)
    return replace(
        cells,
        owners=owners,
        position=jnp.where(kept, cells.position, EMPTY),
        shift=jnp.where(kept, cells.shift, 0),
    )
