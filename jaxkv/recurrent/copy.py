"""Copies of recurrent sequences: cells are shared in a stream, and copied between streams."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import DROP, FILL, resolve_range_end
from jaxkv.core.constants import EMPTY
from jaxkv.core.hashing import overwrite_stamps
from jaxkv.plan import Reason
from jaxkv.recurrent.buffers import Place, read_cells, write_cells
from jaxkv.recurrent.states import (
    States,
    T,
    drop_pairs,
    empty_fields,
    is_occupied,
    is_sequence,
    seq_first_positions,
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
    start = jnp.maximum(start, seq_first_positions(states)[src])
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
    fork: States, buffers: Buffers | None, src: jax.Array, dst: jax.Array, states: T
) -> tuple[T, Buffers | None]:
    """Assign the (position, cell) pairs of `src` in `fork` to targets.

    Targets in other streams get copies of the states.
    """
    pairs = fork.position[src], fork.cell[src]
    if buffers is None:
        return _set_pairs(states, dst, *pairs), None
    is_cross_stream = is_sequence(states, dst) & (stream_of(states, src) != stream_of(states, dst))
    states, origin, target = _plan_copies(states, states, src, dst, pairs, is_cross_stream)
    return states, write_cells(states, buffers, target, read_cells(states, buffers, origin))


def plan_insert(
    states: T, source: States, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
) -> tuple[T, Place, Place]:
    """Replace each target by its parent, a sequence of another table; skip targets of Q or more.

    If the table stores fewer states of a sequence than `source`, only the newest are copied. Also
    returns the cells `[n, E + 1]` to copy, in both tables.
    """
    count, size = states.num_earlier_states + 1, source.num_cells
    missing = [(0, 0), (max(count - source.num_earlier_states - 1, 0), 0)]
    pairs = (
        jnp.pad(source.position[parents, -count:], missing, constant_values=EMPTY),
        jnp.pad(source.cell[parents, -count:], missing, constant_values=size),
    )
    return _plan_copies(states, source, parents, targets, pairs, is_sequence(states, targets))


def insert(
    states: T,
    buffers: Buffers,
    source: States,
    source_buffers: Buffers,
    parents: Int32[Array, " n"],
    targets: Int32[Array, " n"],
) -> tuple[T, Buffers]:
    """Replace each target by its parent, see `plan_insert`, and copy the states."""
    states, origin, target = plan_insert(states, source, parents, targets)
    return states, write_cells(states, buffers, target, read_cells(source, source_buffers, origin))


def can_insert(
    states: States, source: States, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
) -> EditCheck:
    """Return that `insert` is possible, because a stream has E + 1 cells for each sequence."""
    del states, source, parents, targets
    return join_checks()


def make_empty_like(
    states: T, buffers: Buffers, sequences: int, num_cells: tuple[int, ...]
) -> tuple[T, Buffers]:
    """Return an empty table and buffers of one stream, with as many earlier states."""
    del num_cells  # of attention layers
    fields = empty_fields(sequences=sequences, streams=1, max_rollback=states.num_earlier_states)
    table = replace(states, **fields)

    def zeros(x: jax.Array) -> jax.Array:
        return jnp.zeros((1, table.num_cells, *x.shape[2:]), x.dtype)

    return table, jax.tree.map(zeros, buffers)


def _set_pairs(states: T, dst: jax.Array, position: jax.Array, cell: jax.Array) -> T:
    return replace(
        states,
        position=states.position.at[dst].set(position, **DROP),
        cell=states.cell.at[dst].set(cell, **DROP),
    )


def _plan_copies(
    states: T,
    source: States,
    src: jax.Array,
    dst: jax.Array,
    pairs: tuple[jax.Array, jax.Array],
    is_copied: jax.Array,
) -> tuple[T, Place, Place]:
    """Assign the (position, cell) pairs of `src` in `source` to targets.

    If `is_copied[i]` is True, target i gets copies of the states, in other cells. Also returns the
    cells `[n, E + 1]` to copy, in both tables.
    """
    position, cell = pairs
    cells, copies = _cells_of_targets(states, source, src, dst, cell, is_copied)
    origin = stream_of(source, src)[:, None], cell
    target = stream_of(states, dst)[:, None], jnp.where(copies, cells, states.num_cells)
    of_source = {
        name: getattr(source, name).at[origin].get(**FILL, fill_value=0)
        for name in ("stamp", "content", "first_position")
    }
    # The cell has a new state, so older tables must have another hash for the cell.
    old = states.stamp.at[target].get(**FILL, fill_value=0)
    of_source["stamp"] = overwrite_stamps(old, of_source["stamp"])
    fields = {
        name: getattr(states, name).at[target].set(new, **DROP) for name, new in of_source.items()
    }
    return _set_pairs(replace(states, **fields), dst, position, cells), origin, target


def _cells_of_targets(
    states: States,
    source: States,
    src: jax.Array,
    dst: jax.Array,
    cell: jax.Array,
    is_copied: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the cells of each target after a copy, and whether each cell is a new copy.

    The states of target i are copied from the cells `cell[i]` of another stream if `is_copied[i]`
    is True; otherwise the target has these cells. A pair without a state has the number of a cell
    past the last one, also in the result.
    """
    size, is_stored = states.num_cells, cell < source.num_cells
    if states.sequences_per_stream == 1:  # a target frees all cells of its stream
        cells = jnp.where(is_stored, jnp.arange(size, dtype=jnp.int32), size)
        return cells, is_stored
    stream = stream_of(states, dst)

    # Below, the pairs of all targets are in one list of m entries. A state that several targets of
    # a stream get is copied for the `first` entry of them.
    def repeat(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[:, None], cell.shape).reshape(-1)

    streams, entry = repeat(stream), cell.reshape(-1)
    is_entry = repeat(is_copied) & is_stored.reshape(-1)
    is_same_stream = (streams[:, None] == streams[None]) & is_entry[:, None] & is_entry[None]
    origin = repeat(stream_of(source, src)) * source.num_cells + entry
    first = jnp.argmax(is_same_stream & (origin[:, None] == origin[None]), axis=1)
    index = jnp.arange(first.size, dtype=jnp.int32)
    copies = is_entry & (first == index)
    # Targets lose their old cells before free cells are counted.
    kept = states.cell.at[dst].set(jnp.where(is_copied[:, None], size, cell), **DROP)
    # Free cells of each stream come first, at least as many as entries of the stream; entry n takes
    # free cell n.
    order = jnp.argsort(is_occupied(states, kept), axis=1, stable=True).astype(jnp.int32)
    ahead = is_same_stream & (index[:, None] > index[None])
    rank = jnp.sum(ahead, axis=1, dtype=jnp.int32)
    new_cells = jnp.where(
        is_entry, order.at[streams, rank].get(**FILL, fill_value=size)[first], size
    )
    new_cells = new_cells.reshape(cell.shape)
    return jnp.where(is_copied[:, None], new_cells, cell), copies.reshape(cell.shape)
