"""The table of a recurrent cache: which states it keeps, and in which cells.

A state stands after a token: it is what that token and all before it have left. Each sequence has a
current state and up to E earlier ones, as pairs of a position and a cell. So forking a sequence
shares cells, cutting its end drops pairs, and no state of a stream is ever moved or copied. What
was there before a state cannot be taken out of it, and the table says so rather than pretend.

Ranges of positions are `start` to `stop` - 1, `[]` int32: a negative start means 0, a
negative stop no end, and a stop of 0 an empty range. Ids are `[]` int32; one that is no sequence
changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import divmod_nonnegative, resolve_range_end
from jaxkv.core.constants import EMPTY, END
from jaxkv.core.hashing import chain_hashes, sum_hashes
from jaxkv.core.partitioning import ShardingRules
from jaxkv.table import SequenceStatus

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, UInt32

T = TypeVar("T", bound="States")


@dataclass(frozen=True, kw_only=True, eq=False)
class States:
    """The E + 1 newest states of each of Q sequences, in N = Q / S * (E + 1) cells of S streams.

    Sequence q lives in stream q // (Q // S). The pairs of a sequence are ordered, the oldest first
    and the current one last; where there are fewer, empty ones come before them. Positions rise
    from pair to pair.

    position: position of the token that a state stands after; EMPTY (-1) if there is no state.
    cell: the cell of the state in the sequence's stream, which sequences of the stream may share; N
      if there is none.
    cell_hash: the stamp of the token that the state of a cell stands after, see `jaxkv.cell_hash`.
    content: the sum of the hashes of all tokens that the state of a cell has seen, of each with the
      position that it had. Copies and moves carry it along, as `Cells.content`.
    holds: the stamp of the state that a layer's buffers really hold. The table takes a state in
      before it is computed, and each layer writes it once.
    sharding_rules: which axes of a mesh split the cache, static; None where it is on one device.
    shard_dims: for states that a mesh may split the name, the dimension and its parts, static.
    """

    position: Int32[Array, "Q E+1"]
    cell: Int32[Array, "Q E+1"]
    cell_hash: UInt32[Array, "S N"]
    content: UInt32[Array, "S N"]
    holds: UInt32[Array, "L S N"]
    sharding_rules: ShardingRules | None = field(default=None, metadata={"static": True})
    shard_dims: tuple[tuple[str, int, int], ...] = field(default=(), metadata={"static": True})

    @property
    def sequences(self) -> int:
        """Q, the number of sequences."""
        return self.position.shape[0]

    @property
    def is_batch(self) -> bool:
        """Whether the arrays have an axis more, as `vmap` makes them."""
        return self.cell_hash.ndim != 2

    @property
    def streams(self) -> int:
        """S, the number of independent pools of cells."""
        return self.cell_hash.shape[0]

    @property
    def sequences_per_stream(self) -> int:
        """Q // S, the number of sequences that share a stream."""
        return self.sequences // self.streams

    @property
    def num_earlier_states(self) -> int:
        """E, how many states are kept beside the current one."""
        return self.position.shape[1] - 1

    @property
    def num_cells(self) -> int:
        """N, the number of cells in each stream."""
        return self.cell_hash.shape[1]


@partial(jax.jit, static_argnames=("layers", "sequences", "streams", "max_rollback"))
def empty_fields(
    *, layers: int, sequences: int, streams: int, max_rollback: int
) -> dict[str, jax.Array]:
    """Make the arrays of a table without a state.

    Args:
      layers: L.
      sequences: Q.
      streams: S, a divisor of Q.
      max_rollback: E.

    Returns:
      The fields of `States`, by name.
    """
    pairs, cells = (sequences, max_rollback + 1), sequences // streams * (max_rollback + 1)
    return {
        "position": jnp.full(pairs, EMPTY, jnp.int32),
        "cell": jnp.full(pairs, cells, jnp.int32),
        "cell_hash": jnp.zeros((streams, cells), jnp.uint32),
        "content": jnp.zeros((streams, cells), jnp.uint32),
        "holds": jnp.zeros((layers, streams, cells), jnp.uint32),
    }


def streams_of_sequences(states: States) -> Int32[Array, "Q 1"]:
    """Return the stream of each sequence, to go with `cell`."""
    stream, _ = divmod_nonnegative(
        jnp.arange(states.sequences, dtype=jnp.int32), states.sequences_per_stream
    )
    return stream[:, None]


def stream_of(states: States, seq: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    """Return the stream of a sequence; some other where it is none."""
    return divmod_nonnegative(seq, states.sequences_per_stream)[0]


def is_sequence(states: States, seq: Int32[Array, "*n"]) -> Bool[Array, "*n"]:
    """Return whether an integer names a sequence of this table."""
    return (seq >= 0) & (seq < states.sequences)


def seq_pos_min(states: States, seq: Int32[Array, ""]) -> Int32[Array, ""]:
    """Return the lowest position that a sequence can be cut back to; -1 if none."""
    positions = states.position[seq]
    lowest = jnp.min(jnp.where(positions == EMPTY, END, positions))
    return jnp.where(is_sequence(states, seq) & (lowest != END), lowest, EMPTY)


def seq_pos_max(states: States, seq: Int32[Array, ""]) -> Int32[Array, ""]:
    """Return the position of the current state of a sequence; -1 if none."""
    return jnp.where(is_sequence(states, seq), states.position[seq, -1], EMPTY)


def compare_last_tokens(
    states: States, sequences: Int32[Array, " T"], contents: UInt32[Array, " T"]
) -> tuple[UInt32[Array, " T"], Bool[Array, " T"]]:
    """Return the contents of the current states of some sequences, and whether they are as asked.

    Args:
      states: the table.
      sequences: their ids.
      contents: one asked about for each sequence.

    Returns:
      The contents, 0 where there is no state; and whether they are.
    """
    place = stream_of(states, sequences), states.cell[sequences, -1]
    found = states.content.at[place].get(mode="fill", fill_value=0)
    found = jnp.where(is_sequence(states, sequences), found, 0)
    return found, found == contents


def is_occupied(states: States, cell: Int32[Array, "Q pairs"]) -> Bool[Array, "S N"]:
    """Return which cells a table of pairs, `[Q, E + 1]`, names."""
    return (
        jnp.zeros(states.cell_hash.shape, bool)
        .at[streams_of_sequences(states), cell]
        .set(True, mode="drop")
    )


def num_used_cells(states: States) -> Int32[Array, ""]:
    """Return how many cells hold a state, shared ones counted once."""
    return jnp.sum(is_occupied(states, states.cell), dtype=jnp.int32)


def stream_hash(states: States) -> UInt32[Array, " S"]:
    """Return a number of each stream's content.

    Equal digests, equal table: position and cell of every pair, and the stamps of all cells,
    free ones too, so that the same tokens told anew are stamped anew. What the layers have written
    does not count.
    """
    _, local_ids = divmod_nonnegative(
        jnp.arange(states.sequences, dtype=jnp.int32), states.sequences_per_stream
    )
    pairs = states.num_earlier_states + 1
    index = local_ids[:, None] * pairs + jnp.arange(pairs, dtype=jnp.int32)[None]
    pair = chain_hashes(index, states.position, states.cell)
    total = jnp.sum(pair, axis=1, dtype=jnp.uint32)
    cell = jnp.broadcast_to(jnp.arange(states.num_cells, dtype=jnp.int32), states.cell_hash.shape)
    stamp = jnp.sum(chain_hashes(cell, states.cell_hash), axis=1, dtype=jnp.uint32)
    total = jnp.sum(total.reshape(states.streams, -1), axis=1, dtype=jnp.uint32)
    return sum_hashes(total, stamp)


def sequence_status(states: States, present: Bool[Array, " Q"]) -> SequenceStatus:
    """Return what holds of the sequences in a batch."""
    nothing = jnp.zeros_like(present)
    last = jnp.where(present, states.position[:, -1], EMPTY)
    return SequenceStatus(last=last, missing=nothing, pending=nothing)


def can_resume(states: States, seq: Int32[Array, ""], pos: Int32[Array, ""]) -> Bool[Array, ""]:
    """Return whether a state stands before a position, or none is needed."""
    empty = states.position[seq, -1] == EMPTY
    stands = jnp.any(states.position[seq] == pos - 1) & (pos > 0)
    return is_sequence(states, seq) & (pos >= 0) & (empty | stands | (pos == 0))


def seq_rm(
    states: T, seq: Int32[Array, ""], start: Int32[Array, ""], stop: Int32[Array, ""]
) -> tuple[T, Bool[Array, ""]]:
    """Forget a range of one sequence, of every sequence if `seq` is -1; or refuse.

    A range in which the sequence has no token is granted and changes nothing. An end is cut off
    where a state stands right before it, and that becomes the current one. A whole sequence can
    always go. All else is refused: what a state has seen stays in it.

    Args:
      states: the table.
      seq: a sequence id, or -1. Any other integer changes nothing.
      start: first position of the range.
      stop: one past the last.

    Returns:
      The table after it; and False if one of the sequences had to refuse, and then nothing changed.
    """
    stays, ok = _find_remaining_states(states, seq, start, stop)
    return drop_pairs(states, stays | ~ok), ok


def _find_remaining_states(
    states: States, seq: jax.Array, start: jax.Array, stop: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the pairs that stay, `[Q, E + 1]` bool; and `ok`, `[]` bool."""
    asked = (seq == -1) | (jnp.arange(states.sequences) == seq)
    end = jnp.where(asked, states.position[:, -1], EMPTY)
    start, stop = jnp.maximum(start, 0), resolve_range_end(stop)
    touched = (start <= end) & (start < stop)  # never where nothing is asked for or held
    cut = touched & (end < stop)
    whole = cut & (start == 0)
    stands = cut & jnp.any(states.position == start - 1, axis=1)
    stays = ~cut[:, None] | (states.position < start)
    return stays, jnp.all(~touched | whole | stands)


def seq_keep(states: T, seq: Int32[Array, ""]) -> T:
    """Forget every sequence but one; an integer that is none changes nothing."""
    stays = (jnp.arange(states.sequences) == seq) | ~is_sequence(states, seq)
    return drop_pairs(states, stays[:, None])


def clear(states: T) -> T:
    """Forget everything."""
    return drop_pairs(states, jnp.array(False))


def seq_add(
    states: T,
    seq: Int32[Array, ""],
    start: Int32[Array, ""],
    stop: Int32[Array, ""],
    delta: Int32[Array, ""],
    gap: Int32[Array, ""] | None = None,
) -> tuple[T, Bool[Array, ""]]:
    """Move the positions of a sequence in a range by `delta`, those of its states too.

    Where a position would reach END, or turn negative, nothing moves, and the second answer is
    False: what a state has seen stays in it. An earlier state is dropped when it no longer stands
    before all later ones: then there is no end that could be cut off to return to it.
    """
    del gap  # of windows, and none takes a state
    ok = can_seq_add(states, seq, start, stop, delta)
    moves = _find_moving_states(states, seq, start, stop) & ok
    return _move_pairs(states, states.position + delta, moves, jnp.array(False)), ok


def can_seq_add(
    states: States,
    seq: Int32[Array, ""],
    start: Int32[Array, ""],
    stop: Int32[Array, ""],
    delta: Int32[Array, ""],
) -> Bool[Array, ""]:
    """Return whether all that moves by `delta` stays from 0 on and before END."""
    moves = _find_moving_states(states, seq, start, stop)
    highest = jnp.max(jnp.where(moves, states.position, EMPTY))
    start = jnp.maximum(start, 0)
    some = (start <= seq_pos_max(states, seq)) & (start < resolve_range_end(stop))
    return ((delta <= 0) | (highest < END - delta)) & (~some | (start + delta >= 0))


def seq_div(
    states: T,
    seq: Int32[Array, ""],
    start: Int32[Array, ""],
    stop: Int32[Array, ""],
    divisor: Int32[Array, ""],
) -> tuple[T, Bool[Array, ""]]:
    """Divide the positions of a sequence in a range, rounding down.

    Several tokens may then share a position, so earlier states in the range cannot be returned to:
    they are dropped. A divisor below 1 changes nothing, and the second answer is False.
    """
    moves = _find_moving_states(states, seq, start, stop) & (divisor > 1)
    earlier = moves & (jnp.arange(states.num_earlier_states + 1) < states.num_earlier_states)[None]
    position = states.position // jnp.maximum(divisor, 1)
    return _move_pairs(states, position, moves, earlier), divisor >= 1


def _find_moving_states(
    states: States, seq: jax.Array, start: jax.Array, stop: jax.Array
) -> jax.Array:
    """Return which pairs move with those of a sequence in a range; `[Q, E + 1]` bool."""
    inside = (states.position >= jnp.maximum(start, 0)) & (
        states.position < resolve_range_end(stop)
    )
    is_own = inside & (jnp.arange(states.sequences) == seq)[:, None]
    cells = is_occupied(states, jnp.where(is_own, states.cell, states.num_cells))
    return cells.at[streams_of_sequences(states), states.cell].get(mode="fill", fill_value=False)


def _move_pairs(states: T, position: jax.Array, moves: jax.Array, drop: jax.Array) -> T:
    """Move pairs, drop some of them, and drop those that cannot be returned to any more.

    Args:
      states: the table.
      position: `[Q, E + 1]` int32, where pairs that move come to.
      moves: `[Q, E + 1]` bool, the pairs that move.
      drop: `[]` or `[Q, E + 1]` bool, the pairs that are dropped.
    """
    is_present = states.position != EMPTY
    position = jnp.where(moves, position, states.position)
    later = jax.lax.cummin(jnp.where(is_present, position, END), axis=1, reverse=True)
    later = jnp.pad(later[:, 1:], [(0, 0), (0, 1)], constant_values=END)
    return drop_pairs(replace(states, position=position), ~drop & (position < later))


def rewind(states: T, old: T) -> tuple[T, Bool[Array, ""]]:
    """Return an older table that knows what was written since; and `ok`.

    `ok` is whether no cell that the older table uses was given to another state since, or written.
    """
    same = jnp.all(states.holds == old.holds, axis=0) & (states.cell_hash == old.cell_hash)
    back = replace(old, cell_hash=states.cell_hash, holds=states.holds)
    return back, jnp.all(same | ~is_occupied(old, old.cell))


def count_broken_invariants(states: States) -> dict[str, Int32[Array, ""]]:
    """Return how often each invariant of a table is broken, by name."""
    is_present, celled = states.position != EMPTY, states.cell < states.num_cells
    rises = states.position[:, 1:] > states.position[:, :-1]
    times = jax.vmap(
        lambda row: jnp.zeros((states.num_cells,), jnp.int32).at[row].add(1, mode="drop")
    )
    where = (streams_of_sequences(states), states.cell)
    put = jnp.full(states.cell_hash.shape, EMPTY).at[where].set(states.position, mode="drop")
    same = put.at[where].get(mode="fill", fill_value=EMPTY) == states.position
    wrong = {
        "position below -1": states.position < EMPTY,
        "position without a cell": is_present & ~celled,
        "cell without a position": celled & ~is_present,
        "cell before the first": states.cell < 0,
        "positions that do not rise": ~rises & is_present[:, :-1],
        "one cell twice": times(states.cell) > 1,
        "shared cell with two positions": is_present & celled & ~same,
    }
    return {name: jnp.sum(where, dtype=jnp.int32) for name, where in wrong.items()}


def drop_pairs(states: T, stays: jax.Array) -> T:
    """Drop pairs that do not stay, and close up towards the current one.

    `stays` is bool, in a shape that broadcasts to `[Q, E + 1]`.
    """
    stays = jnp.broadcast_to(stays, states.position.shape) & (states.position != EMPTY)
    order = jnp.argsort(stays, axis=1, stable=True)  # what is dropped comes first
    position = jnp.where(stays, states.position, EMPTY)
    cell = jnp.where(stays, states.cell, states.num_cells)
    return replace(
        states,
        position=jnp.take_along_axis(position, order, axis=1),
        cell=jnp.take_along_axis(cell, order, axis=1),
    )
