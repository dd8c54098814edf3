"""Table of a recurrent cache: positions and cells of the states of each sequence.

Each sequence has a current state and up to E earlier states, listed as (position, cell) pairs.
Edits within a stream do not copy states. For ranges and sequence ids see `CacheTable`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.array_utils import DROP, FILL, divmod_nonnegative, resolve_range_end
from jaxkv.core.constants import EMPTY, END, WORD
from jaxkv.core.hashing import chain_hashes, hash_rows, next_version
from jaxkv.core.partitioning import Sharded
from jaxkv.core.pytree import pytree_dataclass, static_field
from jaxkv.draw.cell_view import CellView
from jaxkv.plan import Reason
from jaxkv.table import EditCheck, SequenceStatus, join_checks

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, UInt32

T = TypeVar("T", bound="States")


@pytree_dataclass
class States(Sharded):
    """The E + 1 newest states of each of Q sequences, in S streams of N = Q / S * (E + 1) cells.

    Sequence q is in stream q // (Q // S). Each sequence has E + 1 (position, cell) pairs: first
    empty pairs, then earlier states by increasing position, and the current state at the end.

    position: Position of the last token in each state; EMPTY (-1) if there is no state.
    cell: Cell index of each state within the stream of the sequence; N if there is no state.
    stamp: Number of the state in each cell: a hash of the version of its stream after the ubatch,
      and of the index of the cell.
    version: Number of each stream; every ubatch and every edit that changes the stream changes it.
    content: Sum of the hashes of all tokens in the state of each cell. The hash of a token includes
      the token's position before any shift.
    first_position: No token in the state of each cell has a lower position.
    shard_dims: Static. A tuple (name, dimension, n) for each state that a mesh may split along
      this dimension, between its n equal blocks.
    """

    position: Int32[Array, "Q E+1"]
    cell: Int32[Array, "Q E+1"]
    stamp: UInt32[Array, "S N"]
    version: UInt32[Array, " S"]
    content: UInt32[Array, "S N"]
    first_position: Int32[Array, "S N"]
    shard_dims: tuple[tuple[str, int, int], ...] = static_field(default=())

    @property
    def sequences(self) -> int:
        """Number of sequences in the cache, Q."""
        return self.position.shape[0]

    @property
    def is_batch(self) -> bool:
        """True if the arrays have a leading batch axis, which `vmap` adds."""
        return self.stamp.ndim != 2

    @property
    def streams(self) -> int:
        """Number of streams in the cache, S."""
        return self.stamp.shape[0]

    @property
    def sequences_per_stream(self) -> int:
        """Number of sequences in each stream, Q // S."""
        return self.sequences // self.streams

    @property
    def num_earlier_states(self) -> int:
        """Largest number of stored states before the current state of a sequence, E."""
        return self.position.shape[1] - 1

    @property
    def num_cells(self) -> int:
        """Number of cells in each stream, N."""
        return self.stamp.shape[1]


@partial(jax.jit, static_argnames=("sequences", "streams", "max_rollback"))
def empty_fields(*, sequences: int, streams: int, max_rollback: int) -> dict[str, jax.Array]:
    """Return the array fields of an empty `States`, by field name; `max_rollback` is E."""
    pairs, cells = (sequences, max_rollback + 1), sequences // streams * (max_rollback + 1)
    return {
        "position": jnp.full(pairs, EMPTY, jnp.int32),
        "cell": jnp.full(pairs, cells, jnp.int32),
        "stamp": jnp.zeros((streams, cells), jnp.uint32),
        "version": jnp.zeros((streams,), jnp.uint32),
        "content": jnp.zeros((streams, cells), jnp.uint32),
        "first_position": jnp.zeros((streams, cells), jnp.int32),
    }


def streams_of_sequences(states: States) -> Int32[Array, "Q 1"]:
    """Return the stream of each sequence as a column, which broadcasts with `cell`."""
    stream, _ = divmod_nonnegative(
        jnp.arange(states.sequences, dtype=jnp.int32), states.sequences_per_stream
    )
    return stream[:, None]


def stream_of(states: States, seq: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    """Return the stream of each sequence; the result is arbitrary for ids outside `[0, Q)`."""
    return divmod_nonnegative(seq, states.sequences_per_stream)[0]


def is_sequence(states: States, seq: Int32[Array, "*n"]) -> Bool[Array, "*n"]:
    """Return whether a sequence id is in `[0, Q)`."""
    return (seq >= 0) & (seq < states.sequences)


def seq_pos_min(states: States, seq: Int32[Array, ""]) -> Int32[Array, ""]:
    """Return the position of the oldest stored state of a sequence; -1 if the sequence is empty."""
    positions = states.position[seq]
    lowest = jnp.min(jnp.where(positions == EMPTY, END, positions))
    return jnp.where(is_sequence(states, seq) & (lowest != END), lowest, EMPTY)


def seq_pos_max(states: States, seq: Int32[Array, ""]) -> Int32[Array, ""]:
    """Return the position of the current state of a sequence; -1 if the sequence is empty."""
    return jnp.where(is_sequence(states, seq), states.position[seq, -1], EMPTY)


def seq_first_positions(states: States) -> Int32[Array, " Q"]:
    """Return the lowest `first_position` of each sequence's states; END if it is empty."""
    place = streams_of_sequences(states), states.cell
    return jnp.min(states.first_position.at[place].get(**FILL, fill_value=END), axis=1)


def compare_last_tokens(
    states: States, sequences: Int32[Array, " Z"], contents: UInt32[Array, " Z"]
) -> tuple[UInt32[Array, " Z"], Bool[Array, " Z"]]:
    """Return `content` of each sequence's current state, and whether it equals `contents`."""
    place = stream_of(states, sequences), states.cell[sequences, -1]
    last_content = states.content.at[place].get(**FILL, fill_value=0)
    last_content = jnp.where(is_sequence(states, sequences), last_content, 0)
    return last_content, last_content == contents


def is_occupied(states: States, cell: Int32[Array, "Q pairs"]) -> Bool[Array, "S N"]:
    """Return which cells of each stream are used, given the cell indices of each sequence."""
    return (
        jnp.zeros(states.stamp.shape, bool).at[streams_of_sequences(states), cell].set(True, **DROP)
    )


def num_used_cells(states: States) -> Int32[Array, ""]:
    """Return the number of cells that store a state; shared cells count once."""
    return jnp.sum(is_occupied(states, states.cell), dtype=jnp.int32)


def advance_version(states: T, old: States) -> T:
    """Return the table after an edit of `old`, with new versions of the changed streams."""

    def hash_streams(states: States) -> jax.Array:
        position, cell, first = (
            x.reshape(states.streams, -1)
            for x in (states.position, states.cell, states.first_position)
        )
        return chain_hashes(hash_rows(position, cell), hash_rows(first), hash_rows(states.stamp))

    return replace(
        states, version=next_version(old.version, hash_streams(old), hash_streams(states))
    )


def sequence_status(states: States, present: Bool[Array, " Q"]) -> SequenceStatus:
    """Return the status of sequences; `context_evicted` and `shift_pending` are always False."""
    nothing = jnp.zeros_like(present)
    last = jnp.where(present, states.position[:, -1], EMPTY)
    return SequenceStatus(last=last, context_evicted=nothing, shift_pending=nothing)


def can_resume(states: States, seq: Int32[Array, ""], pos: Int32[Array, ""]) -> Bool[Array, ""]:
    """Return True if no token is before `pos`, or if a state at `pos - 1` is stored."""
    whole = pos <= seq_first_positions(states)[seq]
    is_stored = jnp.any(states.position[seq] == pos - 1)
    return is_sequence(states, seq) & (pos >= 0) & (whole | is_stored)


def seq_rm(
    states: T, seq: Int32[Array, ""], start: Int32[Array, ""], stop: Int32[Array, ""]
) -> tuple[T, EditCheck]:
    """Remove a range of a sequence, or of all sequences if `seq` is -1.

    If the removal is refused because of one sequence, the states of all sequences are unchanged.
    """
    stays, ok = _find_remaining_states(states, seq, start, stop)
    return drop_pairs(states, stays | ~ok), join_checks((ok, Reason.STATE_NOT_STORED))


def _find_remaining_states(
    states: States, seq: jax.Array, start: jax.Array, stop: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return which pairs remain after `seq_rm`, `[Q, E + 1]` bool, and `ok`, `[]` bool."""
    asked = (seq == -1) | (jnp.arange(states.sequences) == seq)
    end = jnp.where(asked, states.position[:, -1], EMPTY)
    start, stop = jnp.maximum(start, 0), resolve_range_end(stop)
    first = seq_first_positions(states)
    low = jnp.maximum(start, first)
    touched = (low <= end) & (low < stop)  # False for ranges without tokens
    # A state cannot lose tokens before its last one. A range is therefore removed only with all
    # later tokens, and only if no token or a stored state is left before it.
    cut = touched & (end < stop)
    whole = cut & (start <= first)
    is_stored = cut & jnp.any(states.position == start - 1, axis=1)
    stays = ~cut[:, None] | (states.position < start)
    return stays, jnp.all(~touched | whole | is_stored)


def seq_keep(states: T, seq: Int32[Array, ""]) -> T:
    """Remove all sequences except `seq`; an id outside `[0, Q)` has no effect."""
    stays = (jnp.arange(states.sequences) == seq) | ~is_sequence(states, seq)
    return drop_pairs(states, stays[:, None])


def clear(states: T) -> T:
    """Remove all sequences."""
    return drop_pairs(states, jnp.array(False))


def seq_add(
    states: T,
    seq: Int32[Array, ""],
    start: Int32[Array, ""],
    stop: Int32[Array, ""],
    delta: Int32[Array, ""],
    gap: Int32[Array, ""] | None = None,
) -> tuple[T, EditCheck]:
    """Add `delta` to the positions of a range of a sequence.

    If sequences share the cell of a state, the position of the state changes for all of them. If a
    position would reach END or become negative, the edit is refused. An earlier state is dropped if
    a later state ends up at the same or a lower position.
    """
    del gap  # used with windows only
    ok = can_seq_add(states, seq, start, stop, delta)
    moves = _find_moving_states(states, seq, start, stop) & ok
    states = _move_first_positions(states, seq, start, stop, lambda x: x + delta, ok)
    moved = _shift_positions(states, states.position + delta, moves, jnp.array(False))
    return moved, join_checks((ok, Reason.POSITION_OUT_OF_RANGE))


def can_seq_add(
    states: States,
    seq: Int32[Array, ""],
    start: Int32[Array, ""],
    stop: Int32[Array, ""],
    delta: Int32[Array, ""],
) -> Bool[Array, ""]:
    """Return whether `seq_add` keeps all moved positions in `[0, END)`."""
    moves = _find_moving_states(states, seq, start, stop)
    highest = jnp.max(jnp.where(moves, states.position, EMPTY))
    start = jnp.maximum(start, seq_first_positions(states)[seq])
    some = (start <= seq_pos_max(states, seq)) & (start < resolve_range_end(stop))
    return ((delta <= 0) | (highest < END - delta)) & (~some | (start + delta >= 0))


def seq_div(
    states: T,
    seq: Int32[Array, ""],
    start: Int32[Array, ""],
    stop: Int32[Array, ""],
    divisor: Int32[Array, ""],
) -> tuple[T, EditCheck]:
    """Divide the positions of a sequence in a range by a divisor, rounding down."""
    moves = _find_moving_states(states, seq, start, stop) & (divisor > 1)
    earlier = moves & (jnp.arange(states.num_earlier_states + 1) < states.num_earlier_states)[None]
    number = jnp.maximum(divisor, 1)
    states = _move_first_positions(states, seq, start, stop, lambda x: x // number, divisor > 1)
    moved = _shift_positions(states, states.position // number, moves, earlier)
    return moved, join_checks((divisor >= 1, Reason.ARGUMENT_OUT_OF_RANGE))


def _find_moving_states(
    states: States, seq: jax.Array, start: jax.Array, stop: jax.Array
) -> jax.Array:
    """Return which pairs `[Q, E + 1]` have the same cell as a state of `seq` in the range."""
    inside = (states.position >= jnp.maximum(start, 0)) & (
        states.position < resolve_range_end(stop)
    )
    is_own = inside & (jnp.arange(states.sequences) == seq)[:, None]
    # Sequences that share a cell share its position, so the flags go from pairs to cells and back
    # to the pairs of all sequences.
    cells = is_occupied(states, jnp.where(is_own, states.cell, states.num_cells))
    return cells.at[streams_of_sequences(states), states.cell].get(**FILL, fill_value=False)


def _move_first_positions(
    states: T,
    seq: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    move: Callable[[jax.Array], jax.Array],
    ok: jax.Array,
) -> T:
    """Update `first_position` of the states of `seq` for tokens that move, if `ok` is True."""
    start, stop, position = jnp.maximum(start, 0), resolve_range_end(stop), states.position[seq]
    cell = jnp.where(ok & is_sequence(states, seq), states.cell[seq], states.num_cells)
    place = stream_of(states, seq), cell
    first = states.first_position.at[place].get(**FILL, fill_value=END)
    low = jnp.maximum(first, start)
    moves = (low <= position) & (low < stop)
    # The lowest position of tokens that stay.
    stays = jnp.where(first < start, first, jnp.where(stop <= position, stop, END))
    first = jnp.where(moves, jnp.minimum(move(low), stays), first)
    return replace(states, first_position=states.first_position.at[place].set(first, **DROP))


def _shift_positions(states: T, position: jax.Array, moves: jax.Array, drop: jax.Array) -> T:
    """Set positions where `moves` is True, then remove the pairs that are True in `drop`.

    Also remove a pair if a later pair of the sequence has the same or a lower position.
    """
    is_present = states.position != EMPTY
    position = jnp.where(moves, position, states.position)
    # `later` is the lowest position of all later pairs of the sequence; END for the last pair.
    later = jax.lax.cummin(jnp.where(is_present, position, END), axis=1, reverse=True)
    later = jnp.pad(later[:, 1:], [(0, 0), (0, 1)], constant_values=END)
    return drop_pairs(replace(states, position=position), ~drop & (position < later))


def rewind(states: T, old: T) -> tuple[T, Bool[Array, ""]]:
    """Return the table `old` with the stamps of `states` and new versions.

    The second result is True if the stamps are equal in `old` and `states` for all cells that `old`
    uses.
    """
    same = states.stamp == old.stamp
    back = replace(old, stamp=states.stamp)
    back = advance_version(back, states)
    return back, jnp.all(same | ~is_occupied(old, old.cell))


def violations_by_invariant(states: States) -> dict[str, Int32[Array, ""]]:
    """Return the number of violations of each invariant, by name of the invariant."""
    is_present, celled = states.position != EMPTY, states.cell < states.num_cells
    rises = states.position[:, 1:] > states.position[:, :-1]
    times = jax.vmap(lambda row: jnp.zeros((states.num_cells,), jnp.int32).at[row].add(1, **DROP))
    where = (streams_of_sequences(states), states.cell)
    put = jnp.full(states.stamp.shape, EMPTY).at[where].set(states.position, **DROP)
    same = put.at[where].get(**FILL, fill_value=EMPTY) == states.position
    first = states.first_position.at[where].get(**FILL, fill_value=EMPTY)
    wrong = {
        "position below -1": states.position < EMPTY,
        "position without a cell": is_present & ~celled,
        "cell without a position": celled & ~is_present,
        "cell before the first": states.cell < 0,
        "positions that do not rise": ~rises & is_present[:, :-1],
        "first position not from 0 to the position": celled
        & ((first < 0) | (first > states.position)),
        "one cell twice": times(states.cell) > 1,
        "shared cell with two positions": is_present & celled & ~same,
    }
    return {name: jnp.sum(where, dtype=jnp.int32) for name, where in wrong.items()}


def drop_pairs(states: T, stays: jax.Array) -> T:
    """Remove pairs with `stays` False, and move remaining pairs to the end of each row."""
    stays = jnp.broadcast_to(stays, states.position.shape) & (states.position != EMPTY)
    # A stable sort keeps the remaining pairs sorted by position.
    order = jnp.argsort(stays, axis=1, stable=True)  # dropped pairs first
    position = jnp.where(stays, states.position, EMPTY)
    cell = jnp.where(stays, states.cell, states.num_cells)
    return replace(
        states,
        position=jnp.take_along_axis(position, order, axis=1),
        cell=jnp.take_along_axis(cell, order, axis=1),
    )


def view_cells(states: States) -> CellView:
    """Return the cells; all arrays must be NumPy arrays."""
    cells, per_stream = (states.streams, states.num_cells), states.sequences_per_stream
    position = np.full(cells, EMPTY, np.int32)
    words = np.zeros((cells[0], -(-per_stream // WORD), cells[1]), np.uint32)
    for seq, pair in np.argwhere(states.position != EMPTY):
        stream, local = divmod(int(seq), per_stream)
        cell = states.cell[seq, pair]
        position[stream, cell] = states.position[seq, pair]
        words[stream, local // WORD, cell] |= np.uint32(1 << local % WORD)
    return CellView(
        position=position,
        words=words,
        shift=np.zeros(cells, np.int32),
        sequences=states.sequences,
    )
