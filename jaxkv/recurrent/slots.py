"""Where the states that a ubatch leaves will be kept: choose cells, then occupy them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.batch import Ubatch, hash_tokens
from jaxkv.core.array_utils import out_of_range_slots
from jaxkv.core.constants import MAX_CELLS
from jaxkv.plan import Reason
from jaxkv.recurrent.states import States, T, is_occupied, stream_hash

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, UInt32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class StateSlots:
    """The cells chosen for the states of a ubatch; an index past the last cell is nowhere.

    source: the cell of the state that a row goes on from; nowhere if it starts afresh.
    cells: the cells of the states after the last tokens of a row, oldest first.
    source_stamp: the stamp of the state in `source`.
    """

    source: Int32[Array, " R"]
    cells: Int32[Array, "R E+1"]
    source_stamp: UInt32[Array, " R"]


def choose_slots(states: States, ubatch: Ubatch) -> tuple[StateSlots, Int32[Array, "R T"]]:
    """Choose a cell for each state that a ubatch will leave; change nothing.

    A row of n tokens leaves the states after its last min(n, E + 1), and its sequence lets go of as
    many of the oldest. So there is always room. Cells that are empty already are taken first, and
    then those that are let go of: what stood there is read before it is written over.

    Args:
      states: the table.
      ubatch: the tokens, a row for each sequence; its `slots` are not looked at.

    Returns:
      The slots; and for each token a `Reason`, OK for all of them. Two rows of one sequence, of
      which the second would have to wait for the first, are refused by planning.
    """
    placed = jnp.any(ubatch.valid, axis=1)
    new = placed[:, None] & (ubatch.state_write_steps(states.num_earlier_states + 1) > 0)
    cells = jnp.where(new, _lowest_free(states, ubatch, new, placed), out_of_range_slots(new))
    cell = states.cell[ubatch.row_sequence, -1]
    source = jnp.where(placed, cell, out_of_range_slots(cell))
    stamp = states.cell_hash.at[ubatch.row_stream, source].get(mode="fill", fill_value=0)
    fits = jnp.full(ubatch.valid.shape, Reason.OK, jnp.int32)
    return StateSlots(source=source, cells=cells, source_stamp=stamp), fits


def _lowest_free(states: States, ubatch: Ubatch, new: jax.Array, placed: jax.Array) -> jax.Array:
    """Return a cell for each new state: the free ones of its stream in turn; `[R, E + 1]` int32.

    `new`, `[R, E + 1]` bool, says which states are new, and `placed`, `[R]` bool, which rows are
    taken in.
    """
    steps = _num_new_states(states, ubatch, placed)[:, None]
    stays = jnp.arange(states.num_earlier_states + 1)[None] >= steps  # pairs that are not let go of
    is_kept = is_occupied(states, jnp.where(stays, states.cell, states.num_cells))
    rank = jnp.where(is_kept, 2, jnp.where(is_occupied(states, states.cell), 1, 0))
    order = jnp.argsort(rank, axis=1, stable=True).astype(jnp.int32)  # [S, N]
    count = jnp.sum(new, axis=1, dtype=jnp.int32)
    row, stream = jnp.arange(count.size), ubatch.row_stream
    ahead = (stream[:, None] == stream[None]) & (row[:, None] > row[None])
    first = jnp.sum(jnp.where(ahead, count[None], 0), axis=1, dtype=jnp.int32)
    turn = first[:, None] + jnp.cumsum(new, axis=1, dtype=jnp.int32) - 1
    return order[stream[:, None], jnp.maximum(turn, 0)]


def occupy(states: T, ubatch: Ubatch) -> T:
    """Take in the states that a ubatch will leave, where they were planned to go."""
    slots: StateSlots = ubatch.slots
    new = slots.cells < MAX_CELLS
    steps = _num_new_states(states, ubatch, new[:, -1])
    pair = jnp.arange(states.num_earlier_states + 1)[None]
    shifted = jnp.minimum(pair + steps[:, None], states.num_earlier_states)
    seq = jnp.where(new, ubatch.row_sequence[:, None], states.sequences)

    def shift_and_set(old: jax.Array, value: jax.Array) -> jax.Array:
        old = jnp.take_along_axis(old, shifted, axis=1)
        return old.at[seq, pair].set(value, mode="drop")

    before = states.content.at[ubatch.row_stream, slots.source].get(mode="fill", fill_value=0)
    token_contents = jnp.where(ubatch.valid, hash_tokens(ubatch), 0)
    content = before[:, None] + jnp.cumsum(token_contents, axis=1, dtype=jnp.uint32)
    where = (ubatch.row_stream[:, None], slots.cells)
    put = {"mode": "drop", "unique_indices": True}
    return replace(
        states,
        position=shift_and_set(
            states.position, _take_at_kept_states(states, ubatch, ubatch.positions)
        ),
        cell=shift_and_set(states.cell, slots.cells),
        cell_hash=states.cell_hash.at[where].set(
            _take_at_kept_states(states, ubatch, ubatch.cell_hashes), **put
        ),
        content=states.content.at[where].set(_take_at_kept_states(states, ubatch, content), **put),
    )


def current_rows(states: States, ubatch: Ubatch) -> Bool[Array, " R"]:
    """Return the rows whose stream is as the ubatch left it or without a slot."""
    same = (stream_hash(states) == ubatch.hash_after)[ubatch.row_stream]
    return same | (ubatch.slots.cells[:, -1] >= MAX_CELLS)


@partial(jax.jit, static_argnames="layer")
def can_read_source(states: States, layer: int, ubatch: Ubatch) -> Bool[Array, " R"]:
    """Return the rows whose source can be read, those that start afresh among them.

    Not those of a stale ubatch, nor those whose source a layer never wrote, or has written over:
    computed a second time, a ubatch finds the states that it went on from only if it has not taken
    their cells itself.
    """
    source = (ubatch.row_stream, ubatch.slots.source)
    layer_stamp = states.holds[layer].at[source].get(mode="fill", fill_value=0)
    refused = (
        ubatch.slots.source >= MAX_CELLS
    )  # its rows read zeros, as one does that starts afresh
    return current_rows(states, ubatch) & (refused | (layer_stamp == ubatch.slots.source_stamp))


@partial(jax.jit, static_argnames="layer")
def writable_cells(states: States, layer: int, ubatch: Ubatch) -> Int32[Array, "R pairs"]:
    """Return the cells that a layer may write, `[R, E + 1]` int32, nowhere for the others.

    The states of a stale ubatch are written nowhere, and those that a layer holds already are not
    written again.
    """
    where = (ubatch.row_stream[:, None], ubatch.slots.cells)
    stamp = states.cell_hash.at[where].get(mode="fill", fill_value=0)
    layer_stamp = states.holds[layer].at[where].get(mode="fill", fill_value=0)
    writes = current_rows(states, ubatch)[:, None] & (layer_stamp != stamp)
    return jnp.where(writes, ubatch.slots.cells, out_of_range_slots(ubatch.slots.cells))


@partial(jax.jit, static_argnames="layer")
def note_written(states: T, layer: int, ubatch: Ubatch, cells: Int32[Array, "R pairs"]) -> T:
    """Note that a layer holds the states of a ubatch now; `cells` are those of `writable_cells`."""
    where = (ubatch.row_stream[:, None], cells)
    stamp = states.cell_hash.at[where].get(mode="fill", fill_value=0)
    holds = states.holds.at[layer, *where].set(stamp, mode="drop", unique_indices=True)
    return replace(states, holds=holds)


def _num_new_states(states: States, ubatch: Ubatch, placed: jax.Array) -> jax.Array:
    """Return how many states each sequence gets, `[Q]` int32, of rows that are placed, `[R]`."""
    count = jnp.sum(
        ubatch.state_write_steps(states.num_earlier_states + 1) > 0, axis=1, dtype=jnp.int32
    )
    seq = jnp.where(placed, ubatch.row_sequence, states.sequences)
    return jnp.zeros((states.sequences,), jnp.int32).at[seq].set(count, mode="drop")


def _take_at_kept_states(states: States, ubatch: Ubatch, field: jax.Array) -> jax.Array:
    """Return a field, `[R, T]`, of the tokens that states stand after; `[R, E + 1]`."""
    turn = jnp.cumsum(ubatch.valid, axis=1, dtype=jnp.int32)
    kept = ubatch.state_write_steps(states.num_earlier_states + 1)
    index = jnp.sum(turn[:, None] < kept[..., None], axis=2, dtype=jnp.int32)  # [R, E + 1]
    return jnp.take_along_axis(field, index, axis=1)
