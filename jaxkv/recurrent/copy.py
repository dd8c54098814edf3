"""Copies of recurrent sequences: cells are shared in a stream, and copied between streams."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import DROP, FILL, resolve_range_end
from jaxkv.core.constants import EMPTY
from jaxkv.core.hashing import hash_overwritten_cells
from jaxkv.plan import Reason
from jaxkv.recurrent.buffers import copy_cells
from jaxkv.recurrent.states import (
    States,
    T,
    drop_pairs,
    first_positions,
    is_occupied,
    is_sequence,
    seq_pos_max,
    stream_of,
)
from jaxkv.table import EditCheck, join_checks

if TYPE_CHECKING:
    from jaxtyping import Array, Int32

    from jaxkv.recurrent.buffers import Buffers


def seq_cp(
    states: T,
    buffers: Buffers | None,
    src: Int32[Array, ""],
    dst: Int32[Array, "*n"],
    start: Int32[Array, ""],
    stop: Int32[Array, ""],
) -> tuple[T, Buffers | None]:
    """Replace the states of each target by those states of `src` that precede the end of a range.

    Targets in other streams get copies, which require `buffers`. If `src` has no token in the
    range, targets in the stream of `src` are unchanged, and targets in other streams become empty.
    """
    end = _last_in_range(states, src, start, stop)
    fork = drop_pairs(states, states.position <= end)
    dst = jnp.atleast_1d(dst)
    is_copied = is_sequence(states, src) & _is_replaced(states, src, dst, end)
    dst = jnp.where(is_copied & is_sequence(states, dst), dst, states.sequences)
    return _assign_states(fork, buffers, jnp.broadcast_to(src, dst.shape), dst, states)


def can_seq_cp(
    states: States,
    src: Int32[Array, ""],
    dst: Int32[Array, "*n"],
    start: Int32[Array, ""],
    stop: Int32[Array, ""],
) -> tuple[EditCheck, Int32[Array, " m"]]:
    """Return whether `seq_cp` is possible, and the last position of each target after the copy."""
    end, dst = _last_in_range(states, src, start, stop), jnp.atleast_1d(dst)
    is_replaced = (
        is_sequence(states, src) & is_sequence(states, dst) & _is_replaced(states, src, dst, end)
    )
    is_stored = (end == EMPTY) | jnp.any(states.position[src] == end)
    own_end = jax.vmap(lambda seq: seq_pos_max(states, seq))(dst)
    check = join_checks((is_stored | ~jnp.any(is_replaced), Reason.STATE_NOT_STORED))
    return check, jnp.where(is_replaced, end, own_end)


def _last_in_range(states: States, src: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
    """Return the last position of the sequence `src` in a range; -1 if the range has no token."""
    start = jnp.maximum(start, first_positions(states)[src])
    end = jnp.minimum(resolve_range_end(stop) - 1, seq_pos_max(states, src))
    return jnp.where(start <= end, end, EMPTY)


def _is_replaced(states: States, src: jax.Array, dst: jax.Array, end: jax.Array) -> jax.Array:
    """Return which targets change if `src` is copied up to the position `end`, `[n]` bool."""
    is_cross_stream = stream_of(states, dst) != stream_of(states, src)
    return (dst != src) & ((end != EMPTY) | is_cross_stream)


def seq_select(
    states: T, buffers: Buffers | None, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
) -> tuple[T, Buffers | None]:
    """Replace each sequence in `targets` by the sequence at the same index of `parents`."""
    return _assign_states(states, buffers, parents, targets, states)


def _assign_states(
    source: States, buffers: Buffers | None, src: jax.Array, dst: jax.Array, states: T
) -> tuple[T, Buffers | None]:
    """Assign the (position, cell) pairs of `src` to targets; copy states to other streams."""
    position, cell = source.position[src], source.cell[src]
    if buffers is not None:
        states, buffers, cell = _copy_states(states, buffers, src, dst, cell)
    states = replace(
        states,
        position=states.position.at[dst].set(position, **DROP),
        cell=states.cell.at[dst].set(cell, **DROP),
    )
    return states, buffers


def _copy_states(
    states: T, buffers: Buffers, src: jax.Array, dst: jax.Array, cell: jax.Array
) -> tuple[T, Buffers, jax.Array]:
    """Copy the states of `src`, in cells `cell`, to those targets that are in other streams.

    Returns the table, the buffers, and the cells of all targets.
    """
    cells, copies = _cells_of_targets(states, src, dst, cell)
    origin = (stream_of(states, src)[:, None], cell)
    where = (stream_of(states, dst)[:, None], jnp.where(copies, cells, states.num_cells))
    source = states.stamp.at[origin].get(**FILL, fill_value=0)
    # The cell has a new state, so older tables must have another hash for the cell.
    stamp = hash_overwritten_cells(states.stamp.at[where].get(**FILL, fill_value=0), source)
    content = states.content.at[origin].get(**FILL, fill_value=0)
    first = states.first_position.at[origin].get(**FILL, fill_value=0)
    states = replace(
        states,
        stamp=states.stamp.at[where].set(stamp, **DROP),
        content=states.content.at[where].set(content, **DROP),
        first_position=states.first_position.at[where].set(first, **DROP),
    )
    return states, copy_cells(states, buffers, origin, where), cells


def _cells_of_targets(
    states: States, src: jax.Array, dst: jax.Array, cell: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the cells of each target after a copy, and whether each cell is a new copy."""
    size = states.num_cells
    if states.sequences_per_stream == 1:  # a target frees all cells of its stream
        cells = jnp.where(cell < size, jnp.arange(size, dtype=jnp.int32), size)
        return cells, cell < size
    stream, index = stream_of(states, dst), jnp.arange(src.size, dtype=jnp.int32)
    is_cross_stream = is_sequence(states, dst) & (stream_of(states, src) != stream)
    is_same_stream = stream[:, None] == stream[None]
    is_same_copy = (
        is_same_stream
        & is_cross_stream[:, None]
        & is_cross_stream[None]
        & (src[:, None] == src[None])
    )
    # Targets of one stream with the same parent share copies, which are made for the `first` of
    # them.
    first = jnp.argmax(is_same_copy, axis=1)
    copies = (is_cross_stream & (first == index))[:, None] & (cell < size)
    # Targets in other streams lose their old cells before free cells are counted.
    kept = states.cell.at[dst].set(jnp.where(is_cross_stream[:, None], size, cell), **DROP)
    # Free cells of each stream come first; copies take them in order.
    order = jnp.argsort(is_occupied(states, kept), axis=1, stable=True).astype(jnp.int32)
    ahead = is_same_stream & (index[:, None] > index[None])
    count = jnp.sum(copies, axis=1, dtype=jnp.int32)
    before = jnp.sum(jnp.where(ahead, count[None], 0), axis=1, dtype=jnp.int32)
    # `place` is the index of each copy among the free cells of its stream, after the copies for
    # earlier targets.
    place = before[:, None] + jnp.cumsum(copies, axis=1, dtype=jnp.int32) - 1
    new_cells = order.at[stream[:, None], place].get(**FILL, fill_value=size)
    new_cells = jnp.where(copies, new_cells, size)
    return jnp.where(is_cross_stream[:, None], new_cells[first], cell), copies
