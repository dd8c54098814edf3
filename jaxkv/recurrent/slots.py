"""Choose cells for new recurrent states, and find the cells that a layer can read or write."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import DROP, FILL, out_of_range_slots
from jaxkv.core.constants import END, MAX_CELLS
from jaxkv.core.hashing import cell_stamps, mix_linearly
from jaxkv.core.pytree import pytree_dataclass
from jaxkv.recurrent.states import States, T, is_occupied
from jaxkv.ubatch import Ubatch, hash_tokens

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32


@pytree_dataclass
class StateSlots:
    """Cell indices for the states of a ubatch; an index past the last cell means no state.

    source: Cell index of the state before the first token of each row.
    cells: Cell indices of the states after the last tokens of each row, oldest state first.
    """

    source: Int32[Array, " R"]
    cells: Int32[Array, "R E+1"]


def choose_slots(states: States, ubatch: Ubatch) -> tuple[StateSlots, Bool[Array, ""]]:
    """Return a cell for each new state of a ubatch, and True (no token lacks a cell).

    A row of n tokens stores a state after each of its last min(n, E + 1) tokens. Each new state
    frees the oldest stored state of the sequence, so cells never run out.
    """
    placed = jnp.any(ubatch.valid, axis=1)
    new = placed[:, None] & (ubatch.state_write_steps(states.num_earlier_states + 1) > 0)
    cells = jnp.where(new, _lowest_free(states, ubatch, new, placed), out_of_range_slots(new))
    cell = states.cell[ubatch.row_sequence, -1]
    source = jnp.where(placed, cell, out_of_range_slots(cell))
    return StateSlots(source=source, cells=cells), jnp.array(True)


def _lowest_free(states: States, ubatch: Ubatch, new: jax.Array, placed: jax.Array) -> jax.Array:
    """Return a cell for each new state: empty cells first, then the cells of freed states."""
    # Pairs are sorted from old to new, and n new states free the first n pairs of their sequence.
    steps = _num_new_states(states, ubatch, placed)[:, None]
    stays = jnp.arange(states.num_earlier_states + 1)[None] >= steps  # pairs that are not freed
    is_kept = is_occupied(states, jnp.where(stays, states.cell, states.num_cells))
    rank = jnp.where(is_kept, 2, jnp.where(is_occupied(states, states.cell), 1, 0))
    # Ranks: 0 for an empty cell, 1 for the cell of a freed state, 2 for the cell of a kept state.
    order = jnp.argsort(rank, axis=1, stable=True).astype(jnp.int32)  # [S, N]
    count = jnp.sum(new, axis=1, dtype=jnp.int32)
    row, stream = jnp.arange(count.size), ubatch.row_stream
    # The new states of a row take cells after those of earlier rows of its stream: axes
    # [row, other row].
    ahead = (stream[:, None] == stream[None]) & (row[:, None] > row[None])
    first = jnp.sum(jnp.where(ahead, count[None], 0), axis=1, dtype=jnp.int32)
    rank = first[:, None] + jnp.cumsum(new, axis=1, dtype=jnp.int32) - 1
    return order[stream[:, None], jnp.maximum(rank, 0)]


def occupy(states: T, ubatch: Ubatch) -> T:
    """Write the positions, cell indices and stamps of a ubatch's new states into the table."""
    slots: StateSlots = ubatch.slots
    new = slots.cells < MAX_CELLS
    steps = _num_new_states(states, ubatch, new[:, -1])
    pair = jnp.arange(states.num_earlier_states + 1)[None]
    # Pairs move to the left by the number of new states, which are then written into the last
    # pairs. Entries of `value` [R, E + 1] without a new state get the sequence id Q and are
    # dropped.
    shifted = jnp.minimum(pair + steps[:, None], states.num_earlier_states)
    seq = jnp.where(new, ubatch.row_sequence[:, None], states.sequences)

    def shift_and_set(old: jax.Array, value: jax.Array) -> jax.Array:
        old = jnp.take_along_axis(old, shifted, axis=1)
        return old.at[seq, pair].set(value, **DROP)

    # The content of a state is a sum over all its tokens, so a cumulative sum continues the sum of
    # the state before the row. Padding adds 0.
    before = states.content.at[ubatch.row_stream, slots.source].get(**FILL, fill_value=0)
    token_contents = jnp.where(ubatch.valid, hash_tokens(ubatch), 0)
    content = before[:, None] + jnp.cumsum(token_contents, axis=1, dtype=jnp.uint32)
    before = states.first_position.at[ubatch.row_stream, slots.source].get(**FILL, fill_value=END)
    first = jnp.min(jnp.where(ubatch.valid, ubatch.positions, END), axis=1)
    where = (ubatch.row_stream[:, None], slots.cells)
    put = {**DROP, "unique_indices": True}
    row = mix_linearly(
        states.version[ubatch.row_stream],
        ubatch.row_sequence,
        jnp.sum(token_contents, axis=1, dtype=jnp.uint32),
        jnp.sum(jnp.where(new, mix_linearly(pair, slots.cells), 0), axis=1, dtype=jnp.uint32),
    )
    version = states.version.at[ubatch.row_stream].add(jnp.where(new[:, -1], row, 0))
    stamp = cell_stamps(version[ubatch.row_stream][:, None], slots.cells)
    return replace(
        states,
        position=shift_and_set(
            states.position, _take_at_new_states(states, ubatch, ubatch.positions)
        ),
        cell=shift_and_set(states.cell, slots.cells),
        stamp=states.stamp.at[where].set(stamp, **put),
        version=version,
        content=states.content.at[where].set(_take_at_new_states(states, ubatch, content), **put),
        first_position=states.first_position.at[where].set(
            jnp.minimum(before, first)[:, None], **put
        ),
    )


def _num_new_states(states: States, ubatch: Ubatch, placed: jax.Array) -> jax.Array:
    """Return the number of new states of each sequence; rows with `placed` False do not count."""
    count = jnp.sum(
        ubatch.state_write_steps(states.num_earlier_states + 1) > 0, axis=1, dtype=jnp.int32
    )
    seq = jnp.where(placed, ubatch.row_sequence, states.sequences)
    return jnp.zeros((states.sequences,), jnp.int32).at[seq].set(count, **DROP)


def _take_at_new_states(states: States, ubatch: Ubatch, field: jax.Array) -> jax.Array:
    """Return the values of a field `[R, T]` at the last token of each new state, `[R, E + 1]`."""
    rank = jnp.cumsum(ubatch.valid, axis=1, dtype=jnp.int32)
    kept = ubatch.state_write_steps(states.num_earlier_states + 1)
    # The last token of a new state is in the column in which the number of valid tokens reaches
    # `kept`. Its index is the number of columns with a lower number. Axes: row, new state, column.
    index = jnp.sum(rank[:, None] < kept[..., None], axis=2, dtype=jnp.int32)  # [R, E + 1]
    return jnp.take_along_axis(field, index, axis=1)
