"""Giving sequences the states of others: shared within a stream, copied between streams."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import resolve_range_end
from jaxkv.core.constants import EMPTY
from jaxkv.core.hashing import hash_overwritten_cells
from jaxkv.recurrent.buffers import copy_cells
from jaxkv.recurrent.states import (
    States,
    T,
    drop_pairs,
    is_occupied,
    is_sequence,
    seq_pos_max,
    stream_of,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32

    from jaxkv.recurrent.buffers import Buffers


def seq_cp(
    states: T,
    buffers: Buffers | None,
    src: Int32[Array, ""],
    dst: Int32[Array, "*n"],
    start: Int32[Array, ""],
    stop: Int32[Array, ""],
) -> tuple[T, Buffers | None]:
    """Give sequences the states of another, as it was at the end of a range.

    Sequences of one stream share cells from then on, and no buffer is touched. In another stream,
    targets get copies. What comes before the range is in the states already, so where it begins
    does not matter. A state stands at its end (`can_seq_cp`). What a target held before is
    replaced, but if the range holds nothing of the source it stays, as it does in an attention
    cache; unless it lies in another stream.

    Args:
      states: the table.
      buffers: None will do within a stream.
      src: the sequence that is copied.
      dst: the targets; `src` itself stays as it is.
      start: first position of the range.
      stop: one past the last.
    """
    end = _last_in_range(states, src, start, stop)
    fork = drop_pairs(states, states.position <= end)
    dst = jnp.atleast_1d(dst)
    does = is_sequence(states, src) & _is_replaced(states, src, dst, end)
    dst = jnp.where(does & is_sequence(states, dst), dst, states.sequences)
    return _assign_states(fork, buffers, jnp.broadcast_to(src, dst.shape), dst, states)


def can_seq_cp(
    states: States,
    src: Int32[Array, ""],
    dst: Int32[Array, "*n"],
    start: Int32[Array, ""],
    stop: Int32[Array, ""],
) -> tuple[Bool[Array, ""], Int32[Array, " m"]]:
    """Return whether a state stands at the end of a range; and the targets' ends.

    Where no target gets anything, none is needed.
    """
    end, dst = _last_in_range(states, src, start, stop), jnp.atleast_1d(dst)
    gets = is_sequence(states, src) & is_sequence(states, dst) & _is_replaced(states, src, dst, end)
    stands = (end == EMPTY) | jnp.any(states.position[src] == end)
    own_end = jax.vmap(lambda seq: seq_pos_max(states, seq))(dst)
    return stands | ~jnp.any(gets), jnp.where(gets, end, own_end)


def _last_in_range(states: States, src: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
    """Return the last position of a range that a sequence has, `[]` int32; -1 if there is none."""
    start, end = (
        jnp.maximum(start, 0),
        jnp.minimum(resolve_range_end(stop) - 1, seq_pos_max(states, src)),
    )
    return jnp.where(start <= end, end, EMPTY)


def _is_replaced(states: States, src: jax.Array, dst: jax.Array, end: jax.Array) -> jax.Array:
    """Return which targets, `[n]`, a copy up to a position replaces; `[n]` bool."""
    is_cross_stream = stream_of(states, dst) != stream_of(states, src)
    return (dst != src) & ((end != EMPTY) | is_cross_stream)


def seq_select(
    states: T, buffers: Buffers | None, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
) -> tuple[T, Buffers | None]:
    """Give each target the states of its parent in place of its own, all at once.

    Args:
      states: the table.
      buffers: None will do within a stream.
      parents: sequences.
      targets: each at most once; one that is no sequence is left out.
    """
    return _assign_states(states, buffers, parents, targets, states)


def _assign_states(
    source: States, buffers: Buffers | None, src: jax.Array, dst: jax.Array, states: T
) -> tuple[T, Buffers | None]:
    """Give targets, `[n]`, the pairs that sequences `src`, `[n]`, have in a table `source`."""
    position, cell = source.position[src], source.cell[src]
    if buffers is not None:
        states, buffers, cell = _copy_states(states, buffers, src, dst, cell)
    states = replace(
        states,
        position=states.position.at[dst].set(position, mode="drop"),
        cell=states.cell.at[dst].set(cell, mode="drop"),
    )
    return states, buffers


def _copy_states(
    states: T, buffers: Buffers, src: jax.Array, dst: jax.Array, cell: jax.Array
) -> tuple[T, Buffers, jax.Array]:
    """Copy the states of sequences, `[n]` with `[n, E + 1]` cells, where targets lie apart.

    All are read before one is written.

    Returns:
      The table with the stamps, the buffers, and the cells of each target, `[n, E + 1]`.
    """
    cells, copies = _cells_of_targets(states, src, dst, cell)
    origin = (stream_of(states, src)[:, None], cell)
    where = (stream_of(states, dst)[:, None], jnp.where(copies, cells, states.num_cells))
    source = states.cell_hash.at[origin].get(mode="fill", fill_value=0)
    # A place that is written anew: stamped so that a table that knew what stood there notices.
    stamp = hash_overwritten_cells(
        states.cell_hash.at[where].get(mode="fill", fill_value=0), source
    )
    is_written = (
        states.holds.at[:, *origin].get(mode="fill", fill_value=0) == source[None]
    )  # [L, n, E + 1]
    holds = jnp.where(is_written, stamp[None], 0)

    content = states.content.at[origin].get(mode="fill", fill_value=0)
    states = replace(
        states,
        cell_hash=states.cell_hash.at[where].set(stamp, mode="drop"),
        content=states.content.at[where].set(content, mode="drop"),
        holds=states.holds.at[:, *where].set(holds, mode="drop"),
    )
    return states, copy_cells(states, buffers, origin, where), cells


def _cells_of_targets(
    states: States, src: jax.Array, dst: jax.Array, cell: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the cells that targets will have, `[n, E + 1]`; and which are copies, in that shape.

    Within a stream a target has those of its source. In another one it takes cells that are free
    once all targets have let go of theirs: there are always enough, since each takes E + 1 at most.
    Targets of one stream that have the same parent share a copy, as they do in an attention cache:
    the first of these targets takes the cells for it.
    """
    size = states.num_cells
    if states.sequences_per_stream == 1:  # a target lets go of all cells of its stream
        cells = jnp.where(cell < size, jnp.arange(size, dtype=jnp.int32), size)
        return cells, cell < size
    stream, turn = stream_of(states, dst), jnp.arange(src.size, dtype=jnp.int32)
    is_cross_stream = is_sequence(states, dst) & (stream_of(states, src) != stream)
    beside = stream[:, None] == stream[None]
    like = beside & is_cross_stream[:, None] & is_cross_stream[None] & (src[:, None] == src[None])
    first = jnp.argmax(like, axis=1)
    copies = (is_cross_stream & (first == turn))[:, None] & (cell < size)
    kept = states.cell.at[dst].set(jnp.where(is_cross_stream[:, None], size, cell), mode="drop")
    # The free cells of each stream come first, and each copy takes the next ones.
    order = jnp.argsort(is_occupied(states, kept), axis=1, stable=True).astype(jnp.int32)
    ahead = beside & (turn[:, None] > turn[None])
    count = jnp.sum(copies, axis=1, dtype=jnp.int32)
    before = jnp.sum(jnp.where(ahead, count[None], 0), axis=1, dtype=jnp.int32)
    place = before[:, None] + jnp.cumsum(copies, axis=1, dtype=jnp.int32) - 1
    new_cells = order.at[stream[:, None], place].get(mode="fill", fill_value=size)
    new_cells = jnp.where(copies, new_cells, size)
    return jnp.where(is_cross_stream[:, None], new_cells[first], cell), copies
