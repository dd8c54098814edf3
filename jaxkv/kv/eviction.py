"""Eviction of cells outside of windows, and a test that sequences can continue after an edit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import DROP, divmod_nonnegative, resolve_range_end
from jaxkv.core.constants import EMPTY
from jaxkv.kv.cells import (
    WORD,
    C,
    Cells,
    evicted_below_of_copy,
    fold_over_true,
    is_cell_empty,
    is_sequence,
    last_positions,
    locate_owner_bit,
    sequence_positions,
    sequences_owning_cells,
    to_word_mask,
    with_owners,
)
from jaxkv.plan import Reason
from jaxkv.table import EditCheck, join_checks
from jaxkv.window import first_seen

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Int32


def is_evictable(cells: Cells) -> Bool[Array, "S N"]:
    """Return which used cells are evictable.

    A cell is evictable if it is outside the window of the next token of each of its owners. Without
    a window, no cell is evictable.
    """
    if cells.window is None:
        return jnp.zeros(cells.position.shape, bool)
    # `end` is the last position of a sequence, which may be evicted, so its next token is at
    # `end + 1`. Later tokens attend to no lower positions than the next token (see `first_seen`).
    if cells.sequences_per_stream == 1:
        end = jnp.maximum(jnp.max(cells.position, axis=1), cells.evicted_below - 1)
        return ~is_cell_empty(cells) & (cells.position < first_seen(cells.window, end + 1)[:, None])

    # A cell is evictable if no owner still needs it. One iteration checks the sequences with one
    # local id in all streams: `positions` is [S, N], and `end` is [S].
    evicted_below = cells.evicted_below.reshape(cells.streams, -1)

    def mark_seen_cells(local: jax.Array, seen: jax.Array) -> jax.Array:
        positions, _ = _positions_by_local_id(cells, local)
        end = jnp.maximum(jnp.max(positions, axis=1), evicted_below[:, local] - 1)
        return seen | (
            (positions != EMPTY) & (positions >= first_seen(cells.window, end + 1)[:, None])
        )

    unseen = jnp.zeros(cells.position.shape, bool)
    return ~is_cell_empty(cells) & ~fold_over_true(
        _local_ids_owning(cells, ~is_cell_empty(cells)), mark_seen_cells, unseen
    )


def evict_cells(cells: C, stream: Int[Array, "*#n"], slots: Int[Array, "*#n"]) -> C:
    """Evict the used cells at `slots`; their owners also lose all cells at lower positions.

    Slots past the last cell are skipped. Without a window, `slots` has no used cell.
    """
    if cells.window is None:
        return cells
    evicted = jnp.zeros(cells.position.shape, bool).at[stream, slots].set(True, **DROP)
    # The remaining cells of an owner have no gap, and start at position `evicted_below`.
    if cells.sequences_per_stream == 1:
        # In a stream without an evicted cell, `end` is EMPTY, and no cell is removed.
        end = jnp.max(jnp.where(evicted, cells.position, EMPTY), axis=1)
        cells = replace(cells, evicted_below=jnp.maximum(cells.evicted_below, end + 1))
        removed = (cells.position < cells.evicted_below[:, None]) & (end > EMPTY)[:, None]
        return with_owners(cells, jnp.where(removed[:, None], 0, cells.owners))

    def evict_owner(local: jax.Array, cells: C) -> C:
        positions, words = _positions_by_local_id(cells, local)
        evicted_below = cells.evicted_below.reshape(cells.streams, -1)
        lost = jnp.max(jnp.where(evicted, positions, EMPTY), axis=1)
        end = jnp.maximum(evicted_below[:, local], lost + 1)
        # Sequence `local` of another stream may own no evicted cell.
        removed = (positions != EMPTY) & (positions < end[:, None]) & (lost > EMPTY)[:, None]
        # The bit of the local id, [1, W, 1], is cleared in the removed cells, [S, 1, N].
        owners = cells.owners & ~(words[None, :, None] & to_word_mask(removed))
        evicted_below = evicted_below.at[:, local].set(end).reshape(-1)
        return replace(cells, owners=owners, evicted_below=evicted_below)

    cells = fold_over_true(_local_ids_owning(cells, evicted), evict_owner, cells)
    return with_owners(cells, cells.owners)


def _local_ids_owning(cells: Cells, where: jax.Array) -> jax.Array:
    """Return for each local id whether at least one sequence with this id owns cells in `where`.

    The local id of a sequence is the index of the sequence in its stream.
    """
    return jnp.any(sequences_owning_cells(cells, where).reshape(cells.streams, -1), axis=0)


def _positions_by_local_id(cells: Cells, local: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the position of each cell, `[S, N]`, and the owner words of a local id, `[W]`.

    Positions are EMPTY in cells that the sequence with this local id does not own. Only the bit of
    `local` is set in the words.
    """
    word, bit = divmod_nonnegative(local, WORD)
    owners = jax.lax.dynamic_index_in_dim(cells.owners, word, axis=1, keepdims=False)
    bit = jnp.uint32(1) << bit.astype(jnp.uint32)
    words = jnp.where(jnp.arange(cells.owners.shape[1]) == word, bit, 0)
    return jnp.where(owners & bit != 0, cells.position, EMPTY), words


def can_resume(cells: Cells, seq: Int32[Array, ""], pos: Int32[Array, ""]) -> Bool[Array, ""]:
    """Return whether a sequence can continue at `pos` after tokens from `pos` on are removed."""
    # The window of the next token must contain no evicted position.
    # `cut` is `evicted_below` after the removal, which also removes evicted positions from `pos`
    # on. If no cell reaches `mark - 1`, the last token was evicted and was at `mark - 1`. The
    # removal keeps this token if `cut` is `mark`.
    positions, mark = sequence_positions(cells, seq), cells.evicted_below[seq]
    highest = jnp.max(positions)
    last_kept = jnp.max(jnp.where(positions < pos, positions, EMPTY))
    cut = jnp.minimum(mark, jnp.maximum(pos, 0))
    goes_on = _can_continue(cells, cut, last_kept, (highest < mark - 1) & (cut == mark))
    # The sequence has no token between `next_one` and `pos`, so a token at `pos` would leave a gap.
    # An empty sequence may start anywhere.
    next_one = jnp.maximum(last_kept, cut - 1) + 1
    return is_sequence(cells, seq) & (pos >= 0) & goes_on & ((next_one == 0) | (next_one == pos))


def accept_edit(cells: C, edited: C, highest_evicted: Int32[Array, " Q"]) -> tuple[C, EditCheck]:
    """Return `edited` if every sequence can continue, otherwise `cells`.

    A sequence can continue if two conditions are met. Its next token attends to no evicted
    position. Its last token is in a cell, or is its highest evicted token. The token that was at
    position `evicted_below - 1` before the edit is at `highest_evicted` after the edit.
    """
    if cells.window is None:
        return edited, join_checks()
    everyone = jnp.ones(cells.sequences, bool)
    before, after = last_positions(cells, everyone), last_positions(edited, everyone)
    mark, moved = cells.evicted_below, edited.evicted_below
    same = (before == after) & (mark == moved)
    # If `before < mark - 1`, the last token was evicted and was at `mark - 1`. It remains the
    # highest evicted token only if the edit moved it to `moved - 1`.
    ok = jnp.all(
        same
        | _can_continue(cells, moved, after, (before < mark - 1) & (highest_evicted == moved - 1))
    )
    accepted = jax.tree.map(lambda new, old: jnp.where(ok, new, old), edited, cells)
    return accepted, join_checks((ok, Reason.CONTEXT_EVICTED))


def can_resume_after_copy(
    cells: Cells,
    src: Int32[Array, ""],
    dst: Int32[Array, "*n"],
    start: Int32[Array, ""],
    stop: Int32[Array, ""],
) -> tuple[Bool[Array, ""], Int32[Array, " m"]]:
    """Return whether all targets of a copy can continue, and the last position of each target."""
    dst = jnp.atleast_1d(dst)
    positions, evicted_below = sequence_positions(cells, src), cells.evicted_below
    copied = (positions >= jnp.maximum(start, 0)) & (positions < resolve_range_end(stop))
    highest = jnp.max(jnp.where(copied, positions, EMPTY))
    mark = evicted_below_of_copy(cells, src, start, stop)
    certain = (jnp.max(positions) < evicted_below[src] - 1) & (mark == evicted_below[src])

    # `theirs` is the stream of `src`, and `ours` has the streams of the targets. A copy from
    # another stream replaces all cells of its target.
    (theirs, *_), (ours, *_) = locate_owner_bit(cells, src), locate_owner_bit(cells, dst)
    replaced = is_sequence(cells, src) & (theirs != ours)
    own_mark = jnp.where(replaced | ~is_sequence(cells, dst), 0, evicted_below[dst])
    own_last = jnp.where(
        replaced, EMPTY, jax.vmap(lambda seq: jnp.max(sequence_positions(cells, seq)))(dst)
    )
    end, below = jnp.maximum(own_last, highest), jnp.maximum(own_mark, mark)
    # The higher of the two marks remains. The last token of the target is therefore certain if it
    # is certain in the sequence from which this mark comes.
    certain = jnp.where(mark >= own_mark, certain, own_last < own_mark - 1)
    untouched = ~is_sequence(cells, dst) | ~is_sequence(cells, src) | (dst == src)
    same = (end == own_last) & (below == own_mark)
    ok = jnp.all(untouched | same | _can_continue(cells, below, end, certain))
    ok |= cells.window is None
    return ok, jnp.maximum(end, below - 1)


def _can_continue(
    cells: Cells, evicted_below: jax.Array, end: jax.Array, certain: jax.Array
) -> jax.Array:
    """Return which sequences can continue, see `accept_edit`."""
    # `end` is the last position in a cell. If `certain`, the last token was at `evicted_below - 1`.
    # `evicted_below - 1` is only an upper bound of the evicted positions, because a move of a part
    # of them may leave it too high. If no cell reaches it and it is not certain, the next position
    # is unknown.
    complete = evicted_below <= first_seen(cells.window, jnp.maximum(end, evicted_below - 1) + 1)
    return (evicted_below == 0) | (complete & ((end >= evicted_below - 1) | certain))


def is_context_evicted(cells: Cells, position: Int32[Array, " Q"]) -> Bool[Array, " Q"]:
    """Return for each sequence whether a token at `position` attends to an evicted position."""
    return cells.evicted_below > first_seen(cells.window, position)
