"""Table of an attention cache: position, owners and pending shift of each cell.

Positions in a range are at least `start` and below `stop`. A negative `start` means 0, and a
negative `stop` means no end. Edits have no effect if the sequence id is outside `[0, Q)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import DROP, divmod_nonnegative, indices_of_true, resolve_range_end
from jaxkv.core.constants import EMPTY, END, WORD
from jaxkv.core.hashing import chain_hashes, hash_rows, next_version
from jaxkv.core.partitioning import Sharded
from jaxkv.core.pytree import pytree_dataclass, static_field
from jaxkv.kv.placement import Placement
from jaxkv.kv.record import INITIAL, CellRecord, FieldSpecs, zero_fields
from jaxkv.window import Window

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Int32, UInt32

T = TypeVar("T")
C = TypeVar("C", bound="Cells")

BLOCK = 128
"""Number of cells whose comparison with 32 sequences fits into a CPU's registers."""


@pytree_dataclass
class Cells(CellRecord, Sharded):
    """Table of S streams of N cells for Q sequences; the base class of `CellTable`.

    Sequence q is in stream q // (Q // S). A cell has an owner if and only if it has a position.

    evicted_below: One past the highest evicted position of each sequence.
    version: Number of each stream; every ubatch and every edit that changes the stream changes it.
    incomplete: Whether each layer lacks keys of tokens of each stream; None if the cache is not
      stacked, because then `Step.cache` raises if a layer was not written.
    placement: Order in which cells are taken, static.
    ubatch_size: Largest number of tokens of a ubatch, static; None for no limit.
    """

    evicted_below: Int32[Array, " Q"]
    version: UInt32[Array, " S"]
    incomplete: Bool[Array, "S L"] | None
    placement: Placement = static_field()
    window: Window | None = static_field()
    ubatch_size: int | None = static_field()

    @property
    def is_batch(self) -> bool:
        """Whether the arrays have a leading batch axis, added by `jax.vmap`."""
        return self.stamp.ndim != 2

    @property
    def streams(self) -> int:
        """Number of streams, S."""
        return self.position.shape[0]

    @property
    def num_cells(self) -> int:
        """Number of cells in each stream, N."""
        return self.position.shape[1]

    @property
    def sequences(self) -> int:
        """Number of sequences, Q."""
        return self.evicted_below.shape[0]

    @property
    def sequences_per_stream(self) -> int:
        """Number of sequences in each stream, Q // S."""
        return self.sequences // self.streams


@partial(jax.jit, static_argnames=("stacked_layers", "cells", "sequences", "streams", "fields"))
def empty_fields(
    *, stacked_layers: int, cells: int, sequences: int, streams: int, fields: FieldSpecs = ()
) -> dict[str, Any]:
    """Return the arrays of `Cells` for a table of empty cells, by field name."""
    shapes = {"owners": (streams, -(-(sequences // streams) // WORD), cells)}
    record = {
        name: jnp.full(shapes.get(name, (streams, cells)), value) for name, value in INITIAL.items()
    }
    return {
        **record,
        "user_fields": zero_fields(fields, streams, cells),
        "evicted_below": jnp.zeros((sequences,), jnp.int32),
        "version": jnp.zeros((streams,), jnp.uint32),
        "incomplete": jnp.zeros((streams, stacked_layers), bool) if stacked_layers else None,
    }


def locate_owner_bit(
    cells: Cells, seq: Int[Array, "*n"]
) -> tuple[Int[Array, "*n"], Int[Array, "*n"], UInt32[Array, "*n"]]:
    """Return the stream of a sequence, and the word and bit of the sequence in `owners`."""
    stream, local = divmod_nonnegative(seq, cells.sequences_per_stream)
    word, bit = divmod_nonnegative(local, WORD)
    return stream, word, bit.astype(jnp.uint32)


def is_sequence(cells: Cells, seq: Int[Array, "*n"]) -> Bool[Array, "*n"]:
    """Return whether a sequence id is in `[0, Q)`."""
    return (seq >= 0) & (seq < cells.sequences)


def sequence_positions(cells: Cells, seq: Int32[Array, ""]) -> Int32[Array, " N"]:
    """Return the positions of cells that a sequence owns, and EMPTY for all other cells."""
    stream, word, bit = locate_owner_bit(cells, seq)
    owns = (cells.owners[stream, word] >> bit) & 1 == 1
    return jnp.where(owns & is_sequence(cells, seq), cells.position[stream], EMPTY)


def seq_pos_min(cells: Cells, seq: Int32[Array, ""]) -> Int32[Array, ""]:
    """Return the smallest position of a sequence; -1 for an empty sequence."""
    positions = sequence_positions(cells, seq)
    lowest = jnp.min(jnp.where(positions == EMPTY, END, positions))
    return jnp.where(lowest == END, EMPTY, lowest)


def seq_pos_max(cells: Cells, seq: Int32[Array, ""]) -> Int32[Array, ""]:
    """Return the largest position of a sequence; -1 for an empty sequence."""
    return jnp.max(sequence_positions(cells, seq))


def last_positions(cells: Cells, asked: Bool[Array, " Q"]) -> Int32[Array, " Q"]:
    """Return the last position of each sequence with `asked` True; -1 for an empty sequence."""
    if cells.sequences_per_stream == 1:
        return jnp.max(cells.position, axis=1)
    streams, words, _ = cells.owners.shape
    # With several words, the loop skips a word if `asked` is False for its 32 sequences in all
    # streams: `asked` becomes [W].
    asked = asked.reshape(streams, -1)
    asked = jnp.pad(asked, [(0, 0), (0, words * WORD - cells.sequences_per_stream)])
    asked = jnp.any(asked.reshape(streams, words, WORD), axis=(0, 2))
    bit = jnp.arange(min(WORD, cells.sequences_per_stream), dtype=jnp.uint32)
    # Chunks are faster on a CPU only; elsewhere the iterations of the loop take longer.
    last = jax.lax.platform_dependent(
        *(cells.owners, cells.position, asked, bit),
        cpu=partial(_last_positions_by_chunk, min(BLOCK, cells.num_cells)),
        default=partial(_last_positions_by_chunk, cells.num_cells),
    )
    return last.reshape(streams, -1)[:, : cells.sequences_per_stream].reshape(-1)


def _last_positions_by_chunk(
    size: int, owners: jax.Array, position: jax.Array, asked: jax.Array, bit: jax.Array
) -> jax.Array:
    """Return the last position for each word and bit, `[S, W, bits]`, from chunks of `size`."""
    streams, words, cells = owners.shape

    def update_word(word: jax.Array, last: jax.Array) -> jax.Array:
        def update_chunk(i: jax.Array, highest: jax.Array) -> jax.Array:
            start = jnp.minimum(i * size, cells - size)  # the last chunk may overlap
            corner = jnp.int32(0), word, start  # equal dtypes, also with x64
            here = jax.lax.dynamic_slice(owners, corner, (streams, 1, size))[:, 0]
            at = jax.lax.dynamic_slice_in_dim(position, start, size, axis=1)
            owned = (here[..., None] >> bit[None, None]) & 1 == 1  # [S, size, bits]
            return jnp.maximum(highest, jnp.max(jnp.where(owned, at[..., None], EMPTY), axis=1))

        chunks = jnp.int32(-(-cells // size))
        highest = jax.lax.fori_loop(jnp.int32(0), chunks, update_chunk, last[:, word])
        return last.at[:, word].set(highest)

    empty = jnp.full((streams, words, bit.size), EMPTY, jnp.int32)
    if words == 1:
        return update_word(jnp.int32(0), empty)
    return fold_over_true(asked, update_word, empty)


def is_cell_empty(cells: Cells) -> jax.Array:
    """Return whether each cell is empty, `[S, N]` bool; NumPy arrays give a NumPy result."""
    return cells.position == EMPTY


def num_used_cells(cells: Cells) -> Int32[Array, ""]:
    """Return the number of used cells of all streams together."""
    return jnp.sum(~is_cell_empty(cells), dtype=jnp.int32)


def num_cells_saved_by_sharing(cells: Cells) -> Int32[Array, " S"]:
    """Return how many cells each stream saves by sharing: n - 1 for each cell with n owners."""
    owned = jnp.sum(jax.lax.population_count(cells.owners), axis=(1, 2), dtype=jnp.int32)
    return owned - jnp.sum(~is_cell_empty(cells), axis=1, dtype=jnp.int32)


def seq_rm(cells: C, seq: Int32[Array, ""], start: Int32[Array, ""], stop: Int32[Array, ""]) -> C:
    """Remove `seq` (all sequences if -1) from the owners of cells with positions in a range."""
    seq_bits = jnp.where(seq == -1, ~jnp.uint32(0), sequence_bits(cells, seq))
    # Bits [S, W, 1] and cells [S, 1, N] broadcast to all owner words, [S, W, N].
    removed = seq_bits[..., None] & to_word_mask(is_in_range(cells, start, stop))
    # Positions that the caller removes no longer count as evicted.
    asked = (seq == -1) | (jnp.arange(cells.sequences) == seq)
    # If a range ends below `evicted_below`, evicted positions remain above the range.
    begins = jnp.minimum(cells.evicted_below, jnp.maximum(start, 0))
    all_of_it = asked & (resolve_range_end(stop) >= cells.evicted_below)
    return replace(
        with_owners(cells, cells.owners & ~removed),
        evicted_below=jnp.where(all_of_it, begins, cells.evicted_below),
    )


def remove_owners(cells: C, keep: Bool[Array, "S N"], is_asked: Bool[Array, " Q"]) -> C:
    """Remove the sequences with `is_asked` True from the owners of cells with `keep` False."""
    ids = jnp.arange(cells.sequences, dtype=jnp.int32)
    words = union_of_sequence_bits(cells, jnp.where(is_asked, ids, cells.sequences))
    return with_owners(cells, cells.owners & ~(words[..., None] & to_word_mask(~keep)))


def seq_cp(
    cells: C,
    src: Int32[Array, ""],
    dst: Int32[Array, "*n"],
    start: Int32[Array, ""],
    stop: Int32[Array, ""],
) -> C:
    """Make the sequences `dst` owners of the cells of `src` in a range.

    All sequences must be in the same stream.
    """
    shared = is_owned_by(cells, sequence_bits(cells, src)) & is_in_range(cells, start, stop)
    gained = union_of_sequence_bits(cells, jnp.atleast_1d(dst))
    evicted = evicted_below_of_copy(cells, src, start, stop)
    return replace(
        with_owners(cells, cells.owners | (gained[..., None] & to_word_mask(shared))),
        evicted_below=cells.evicted_below.at[
            jnp.where(is_sequence(cells, dst), dst, cells.sequences)
        ].max(evicted, **DROP),
    )


def evicted_below_of_copy(
    cells: Cells, seq: Int32[Array, "*n"], start: Int32[Array, ""], stop: Int32[Array, ""]
) -> Int32[Array, "*n"]:
    """Return `evicted_below` of a new sequence that is a copy of a range of `seq`."""
    # The copy lacks the evicted positions of the range, which end at `mark`. If the range begins at
    # `mark` or later, it has no evicted position.
    mark = jnp.minimum(cells.evicted_below[seq], resolve_range_end(stop))
    return jnp.where(is_sequence(cells, seq) & (jnp.maximum(start, 0) < mark), mark, 0)


def seq_select(cells: C, parents: Int32[Array, " n"], targets: Int32[Array, " n"]) -> C:
    """Replace each target's cells by those of its parent; a parent may also be a target."""
    # Targets are distinct; a target of Q or more is skipped.

    # Parents are read from the old table, so two sequences can be swapped.
    def add_owner(i: jax.Array, owners: jax.Array) -> jax.Array:
        shared = is_owned_by(cells, sequence_bits(cells, parents[i]))
        return owners | (sequence_bits(cells, targets[i])[..., None] & to_word_mask(shared))

    replaced = union_of_sequence_bits(cells, targets)
    others = cells.owners & ~replaced[..., None]
    owners = jax.lax.fori_loop(0, targets.size, add_owner, others)
    evicted = cells.evicted_below[parents]
    evicted_below = cells.evicted_below.at[targets].set(evicted, **DROP)
    return replace(with_owners(cells, owners), evicted_below=evicted_below)


def seq_keep(cells: C, seq: Int32[Array, ""]) -> C:
    """Remove all sequences except `seq`; cells that `seq` does not own become empty."""
    only = with_owners(cells, cells.owners & sequence_bits(cells, seq)[..., None])
    only = replace(
        only, evicted_below=jnp.where(jnp.arange(cells.sequences) == seq, cells.evicted_below, 0)
    )
    return jax.tree.map(lambda new, old: jnp.where(is_sequence(cells, seq), new, old), only, cells)


def clear(cells: C) -> C:
    """Empty all cells; set `evicted_below` to 0."""
    cells = with_owners(cells, jnp.zeros_like(cells.owners))
    return replace(cells, evicted_below=jnp.zeros_like(cells.evicted_below))


def fold_over_true(asked: Bool[Array, " n"], function: Callable[[jax.Array, T], T], start: T) -> T:
    """Fold `function(index, carry)` over the indices of True elements, in increasing order."""
    # In a large table, a reduction of all pairs of sequences and cells takes 100 times longer.
    ids = indices_of_true(asked, asked.size)
    return jax.lax.fori_loop(0, jnp.sum(asked), lambda i, carry: function(ids[i], carry), start)


def sequences_owning_cells(cells: Cells, where: Bool[Array, "S N"]) -> Bool[Array, " Q"]:
    """Return whether each sequence owns at least one of the given cells."""
    # The union of the owner words of the given cells has a bit for each owner. Its bits are
    # expanded to [S, W, 32], and the bits after the last sequence of each stream are dropped.
    words = [jnp.where(where, cells.owners[:, w], 0) for w in range(cells.owners.shape[1])]
    some = jnp.stack([jax.lax.reduce_or(word, axes=(1,)) for word in words], axis=1)  # [S, W]
    bits = (some[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)[None, None]) & 1 == 1
    return bits.reshape(cells.streams, -1)[:, : cells.sequences_per_stream].reshape(-1)


def owns_same_cells(cells: Cells, partner: Int32[Array, " Q"]) -> Bool[Array, " Q"]:
    """Return whether each sequence q owns the same cells as sequence `partner[q]` of its stream."""
    partner = partner.reshape(cells.streams, cells.sequences_per_stream)
    local_ids = jnp.arange(cells.sequences_per_stream, dtype=jnp.int32)[None]

    # The argument has one local id for each stream, [S]; the result is whether each cell has this
    # owner, [S, N].
    def owner_bits(local: jax.Array) -> jax.Array:
        word, bit = divmod_nonnegative(local, WORD)
        words = jnp.take_along_axis(cells.owners, word[:, None, None], axis=1)[:, 0]
        return (words >> bit.astype(jnp.uint32)[:, None]) & 1

    def compare(local: jax.Array, answers: jax.Array) -> jax.Array:
        own_bits = owner_bits(jnp.full(cells.streams, local))
        same = jnp.all(own_bits == owner_bits(partner[:, local]), axis=1)
        return answers.at[:, local].set(same)

    # A local id is skipped if each sequence with this id is its own partner.
    asked = jnp.any(partner != local_ids, axis=0)
    return fold_over_true(asked, compare, jnp.ones(partner.shape, bool)).reshape(-1)


def advance_version(cells: C, old: Cells) -> C:
    """Return the table after an edit of `old`, with new versions of the changed streams."""

    def hash_streams(cells: Cells) -> jax.Array:
        owners = jnp.unstack(cells.owners, axis=1)
        evicted = cells.evicted_below.reshape(cells.streams, -1)
        return chain_hashes(
            hash_rows(cells.position, cells.shift, cells.stamp, *owners), hash_rows(evicted)
        )

    return replace(cells, version=next_version(old.version, hash_streams(old), hash_streams(cells)))


def rewind(cells: C, old: C) -> tuple[C, Bool[Array, ""]]:
    """Return `old` with new stamps and versions, and whether its keys are still stored."""
    # If the stamps of a cell are equal, the cell still has the keys and values of `old`.
    ok = jnp.all((cells.stamp == old.stamp) | is_cell_empty(old))
    return advance_version(replace(old, stamp=cells.stamp), cells), ok


def incomplete_layers(cells: Cells) -> Bool[Array, "S L"] | None:
    """Return `cells.incomplete`, but False for streams without tokens."""
    if cells.incomplete is None:
        return None
    is_used = ~is_cell_empty(cells).all(axis=1, keepdims=True)
    return cells.incomplete & is_used


def stamps_after_rotation(cells: Cells, where: Bool[Array, "S N"]) -> UInt32[Array, "S N"]:
    """Return the array `stamp` after a rotation of the keys in the given cells."""
    # The shift is hashed, so that two tables that rotate a key differently get different stamps.
    return jnp.where(where, chain_hashes(cells.stamp, cells.shift), cells.stamp)


def violations_by_invariant(cells: Cells) -> dict[str, Int32[Array, ""]]:
    """Return the number of violations of each invariant of the table, by name."""
    owned = jnp.any(cells.owners != 0, axis=1)
    known_bits = union_of_sequence_bits(cells, jnp.arange(cells.sequences))
    unknown = cells.owners & ~known_bits[..., None]
    wrong = {
        "position below -1": cells.position < EMPTY,
        "position without an owner": ~is_cell_empty(cells) & ~owned,
        "owner without a position": is_cell_empty(cells) & owned,
        "owner that is no sequence": unknown != 0,
        "shift of an empty cell": is_cell_empty(cells) & (cells.shift != 0),
        "rotated for a negative position": ~is_cell_empty(cells) & (cells.position < cells.shift),
        "evicted below a negative position": cells.evicted_below < 0,
    }
    return {name: jnp.sum(where, dtype=jnp.int32) for name, where in wrong.items()}


def sequence_bits(cells: Cells, seq: Int[Array, ""]) -> UInt32[Array, "S W"]:
    """Return owner words with only the bit of `seq` set; 0 for a `seq` outside `[0, Q)`."""
    stream, word, bit = locate_owner_bit(cells, seq)
    streams, words, _ = cells.owners.shape
    here = (jnp.arange(streams)[:, None] == stream) & (jnp.arange(words)[None] == word)
    return jnp.where(here & is_sequence(cells, seq), jnp.uint32(1) << bit, jnp.uint32(0))


def union_of_sequence_bits(cells: Cells, ids: Int[Array, " n"]) -> UInt32[Array, "S W"]:
    """Return owner words with the bits of all given sequences set; skip ids outside `[0, Q)`."""
    return jax.lax.reduce_or(jax.vmap(partial(sequence_bits, cells))(ids), axes=(0,))


def is_owned_by(cells: Cells, words: UInt32[Array, "S W"]) -> Bool[Array, "S N"]:
    """Return whether each cell has an owner whose bit is set in the given words."""
    return jnp.any(cells.owners & words[..., None] != 0, axis=1)


def is_in_range(
    cells: Cells, start: Int32[Array, ""], stop: Int32[Array, ""]
) -> Bool[Array, "S N"]:
    """Return whether the position of each cell is in a range; False for empty cells."""
    return (cells.position >= jnp.maximum(start, 0)) & (cells.position < resolve_range_end(stop))


def to_word_mask(cell: Bool[Array, "S N"]) -> UInt32[Array, "S 1 N"]:
    """Return a uint32 number for each flag: all bits set for True, 0 for False."""
    return jnp.where(cell, ~jnp.uint32(0), jnp.uint32(0))[:, None]


def with_owners(cells: C, owners: UInt32[Array, "S W N"]) -> C:
    """Replace the array `owners`; a cell without owners becomes empty and gets a shift of 0."""
    kept = jnp.any(owners != 0, axis=1)
    return replace(
        cells,
        owners=owners,
        position=jnp.where(kept, cells.position, EMPTY),
        shift=jnp.where(kept, cells.shift, 0),
    )
