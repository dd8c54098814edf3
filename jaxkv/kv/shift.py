"""Moving positions now, and rotating the keys that moved later: both halves of a shift.

A key was rotated for the position it had when it was written. Moving it is a note in the table. The
note is always the position now less the position the key was rotated for, so several moves add up
to one rotation, and those that cancel to none.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxkv.kv.buffers import Rows
from jaxkv.kv.cells import Cells, bits, end_of, owned_by, restamped, with_owners, within
from jaxkv.rope import rotate

CHUNK = 256
"""Rows that are held at a time while many are rotated or moved."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """The plan of what is pending: the rotation that each key is owed.

    shift: `[S, N]` int32, the table's notes when the plan was made. Applied to a table whose notes
      are others, the plan changes nothing.
    pending: `[]` int32, how many keys are rotated.
    """

    shift: jax.Array  # [S, N]
    pending: jax.Array  # []


def add(cells: Cells, seq: jax.Array, start: jax.Array, stop: jax.Array, delta: jax.Array) -> Cells:
    """Move the cells of a sequence in a range of positions by `delta`, for every owner.

    A cell whose position turns negative is freed.
    """
    moves = owned_by(cells, bits(cells, seq)) & within(cells, start, stop)
    cells = _move_lost(cells, seq, start, stop, lambda position: position + delta)
    return _move(cells, moves, cells.position + delta)


def divide(
    cells: Cells, seq: jax.Array, start: jax.Array, stop: jax.Array, divisor: jax.Array
) -> Cells:
    """Divide the positions of a sequence in a range, rounding down, for every owner.

    A divisor below 1 changes nothing.
    """
    moves = owned_by(cells, bits(cells, seq)) & within(cells, start, stop) & (divisor >= 1)
    divisor = jnp.maximum(divisor, 1)
    cells = _move_lost(cells, seq, start, stop, lambda position: position // divisor)
    # No position that moves is negative, so rounding towards 0 is rounding down, at half the cost.
    return _move(cells, moves, jax.lax.div(cells.position, jnp.full_like(cells.position, divisor)))


def _move_lost(
    cells: Cells,
    seq: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    moved: Callable[[jax.Array], jax.Array],
) -> Cells:
    """What a window took from a sequence moves as if it were still there."""
    end = cells.lost - 1  # the last position that was taken
    moves = (jnp.arange(cells.sequences) == seq) & (end >= jnp.maximum(start, 0))
    moves &= end < end_of(stop)
    return replace(cells, lost=jnp.where(moves, jnp.maximum(moved(end) + 1, 0), cells.lost))


def _move(cells: Cells, moves: jax.Array, position: jax.Array) -> Cells:
    moved = replace(
        cells,
        position=jnp.where(moves, position, cells.position),
        shift=jnp.where(moves, cells.shift + position - cells.position, cells.shift),
    )
    stays = (moved.position >= 0)[:, None]
    return with_owners(moved, jnp.where(stays, moved.owners, 0))


def update_of(cells: Cells) -> Update:
    """Plan the rotations that are pending."""
    return Update(shift=cells.shift, pending=jnp.sum(cells.shift != 0, dtype=jnp.int32))


def carry_out(cells: Cells, rows: Rows, update: Update) -> tuple[Cells, Rows]:
    """Rotate the keys that are owed a rotation, those only, and clear their notes.

    Keys are turned by the difference of positions, so nothing that a rope multiplies by is applied
    a second time. Values carry no position.
    """
    fresh = jnp.all(update.shift == cells.shift)
    owed = (cells.shift != 0) & fresh
    streams, size = owed.shape
    count = jnp.sum(owed, dtype=jnp.int32)
    index = jnp.nonzero(owed.reshape(-1), size=owed.size, fill_value=owed.size)[0]
    index = jnp.pad(index, (0, CHUNK), constant_values=owed.size)  # so that every chunk is whole

    def chunk(i: jax.Array, keys: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        cell = jax.lax.dynamic_slice_in_dim(index, i * CHUNK, CHUNK)
        stream, slot = cell // size, cell % size
        by = cells.shift.reshape(-1).at[cell].get(mode="fill", fill_value=0)
        # A cell that only fills the chunk up goes past the end, each to a place of its own.
        slot = jnp.where(cell < owed.size, slot, size + jnp.arange(CHUNK))
        turned = []
        for k, rope in zip(keys, rows.ropes, strict=True):
            if rope is not None:
                where = (stream[:, None], jnp.arange(k.shape[1])[None], slot[:, None])
                row = k.at[where].get(mode="fill", fill_value=0)  # [CHUNK, K, D]
                row = rotate(row, by, replace(rope, attention_factor=1.0))
                k = k.at[where].set(row, mode="drop", unique_indices=True)
            turned.append(k)
        return tuple(turned)

    keys = jax.lax.fori_loop(0, -(-count // CHUNK), chunk, rows.k)
    cells = replace(
        cells,
        shift=jnp.where(owed, 0, cells.shift),
        stamp=restamped(cells, owed),
    )
    return cells, replace(rows, k=keys)
