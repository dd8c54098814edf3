"""Edits of positions, and the later rotation of keys whose positions changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import FILL, divmod_nonnegative, resolve_range_end, search_sorted
from jaxkv.core.constants import EMPTY, END
from jaxkv.core.loops import differentiable_fori_loop
from jaxkv.core.pytree import pytree_dataclass, static_field
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.cells import (
    C,
    Cells,
    fold_over_true,
    is_in_range,
    is_owned_by,
    is_sequence,
    locate_owner_bit,
    sequence_bits,
    sequence_positions,
    sequences_owning_cells,
    stamps_after_rotation,
    with_owners,
)
from jaxkv.kv.eviction import accept_edit
from jaxkv.kv.shards import Shard, map_kv
from jaxkv.ops.storage.cell_arrays import gather, scatter
from jaxkv.ops.storage.forms import storage_of
from jaxkv.ops.storage.hadamard import rotate_by_hadamard
from jaxkv.ops.storage.head_rows import join_heads
from jaxkv.ops.storage.layer_stack import CellArray, map_arrays
from jaxkv.ops.storage.storage import Stored
from jaxkv.plan import Reason
from jaxkv.rope import NotGiven, Rope
from jaxkv.spec import TableSpec
from jaxkv.table import EditCheck, MaintenancePlan, join_checks

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, PyTree

CHUNK = 256
"""Number of cells that are rotated or moved at once."""


@pytree_dataclass
class ShiftPlan(MaintenancePlan):
    """Plan of the rotation of all keys with a pending shift.

    shift: Pending shifts of the table when the plan was made. The plan has no effect on a table
      with other shifts.
    """

    shift: Int32[Array, "S N"]
    spec: TableSpec = static_field()

    @property
    def num_changes(self) -> Int32[Array, ""]:
        """Number of keys to rotate."""
        return jnp.sum(self.shift != 0, dtype=jnp.int32)

    def is_current(self, table: Cells) -> Bool[Array, ""]:
        """Return whether the table has the pending shifts for which the plan was made."""
        return jnp.all(self.shift == table.shift)

    def commit(self, table: C, buffers: Buffers, ok: Bool[Array, ""]) -> tuple[C, Buffers]:
        """Rotate the keys of the plan if `ok` is True."""
        return rotate_shifted_keys(table, buffers, ok)


def seq_add(
    cells: C,
    seq: Int32[Array, ""],
    start: Int32[Array, ""],
    stop: Int32[Array, ""],
    delta: Int32[Array, ""],
    gap: Int32[Array, ""] | None = None,
) -> tuple[C, EditCheck]:
    """Add `delta` to positions of a sequence's cells in a range, for all owners of the cells.

    A cell with a negative new position is freed. If a position would reach END, or an owner could
    not continue (see `eviction.accept_edit`), the edit is refused.
    If `gap` is given, the caller must ensure that the sequence has no tokens, present or evicted,
    at positions in `[gap, start)`.
    """
    moves = sequence_cells_in_range(cells, seq, start, stop)
    evicted = _highest_evicted(cells, seq, start, stop)
    ok = _in_bounds(cells, moves, evicted, delta)
    below = jnp.maximum(start, 0) if gap is None else jnp.minimum(start, gap)
    evicted_below, highest_evicted = _move_evicted_below(
        cells, seq, evicted, below, lambda position: position + delta
    )
    moved, goes_on = accept_edit(
        cells,
        _move_positions(replace(cells, evicted_below=evicted_below), moves, cells.position + delta),
        highest_evicted,
    )
    moved = jax.tree.map(lambda new, old: jnp.where(ok, new, old), moved, cells)
    return moved, join_checks((ok, Reason.POSITION_OUT_OF_RANGE), goes_on)


def can_seq_add(
    cells: Cells,
    seq: Int32[Array, ""],
    start: Int32[Array, ""],
    stop: Int32[Array, ""],
    delta: Int32[Array, ""],
) -> Bool[Array, ""]:
    """Return whether `seq_add` keeps the positions of each owner unique and below END."""
    moves = sequence_cells_in_range(cells, seq, start, stop)
    after = _move_positions(cells, moves, cells.position + delta)

    def check_owner(seq: jax.Array, ok: jax.Array) -> jax.Array:
        positions = jnp.sort(sequence_positions(after, seq))
        return ok & ~jnp.any((positions[1:] == positions[:-1]) & (positions[1:] != EMPTY))

    evicted = _highest_evicted(cells, seq, start, stop)
    ok = _in_bounds(cells, moves, evicted, delta)
    return fold_over_true(sequences_owning_cells(cells, moves), check_owner, ok)


def seq_div(
    cells: C,
    seq: Int32[Array, ""],
    start: Int32[Array, ""],
    stop: Int32[Array, ""],
    divisor: Int32[Array, ""],
) -> tuple[C, EditCheck]:
    """Divide positions of a sequence's cells in a range, rounding down, for all owners."""
    ok = divisor >= 1
    moves = sequence_cells_in_range(cells, seq, start, stop) & ok
    divisor = jnp.maximum(divisor, 1)
    evicted = _highest_evicted(cells, seq, start, stop)
    start = jnp.maximum(start, 0)
    evicted_below, highest_evicted = _move_evicted_below(
        cells, seq, evicted, start, lambda position: position // divisor
    )
    # Moved positions are not negative, so `div` rounds down, at half the cost of `//`.
    position = jax.lax.div(cells.position, jnp.full_like(cells.position, divisor))
    moved, goes_on = accept_edit(
        cells,
        _move_positions(replace(cells, evicted_below=evicted_below), moves, position),
        highest_evicted,
    )
    return moved, join_checks((ok, Reason.ARGUMENT_OUT_OF_RANGE), goes_on)


def sequence_cells_in_range(
    cells: Cells, seq: Int32[Array, ""], start: Int32[Array, ""], stop: Int32[Array, ""]
) -> Bool[Array, "S N"]:
    """Return which cells a sequence owns at positions in a range."""
    return is_owned_by(cells, sequence_bits(cells, seq)) & is_in_range(cells, start, stop)


def _in_bounds(
    cells: Cells, moves: jax.Array, evicted: tuple[jax.Array, jax.Array], delta: jax.Array
) -> jax.Array:
    """Return whether all moved positions, including evicted positions, stay below END."""
    highest, inside = evicted
    highest = jnp.max(jnp.where(inside, highest, EMPTY))
    highest = jnp.maximum(highest, jnp.max(jnp.where(moves, cells.position, EMPTY)))
    return (delta <= 0) | (highest < END - delta)


def _highest_evicted(
    cells: Cells, seq: jax.Array, start: jax.Array, stop: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return each sequence's highest evicted position below `stop`, and whether it moves."""
    # An evicted cell may have been shared, so its position moves for all sequences of the stream.
    highest = jnp.minimum(cells.evicted_below, resolve_range_end(stop)) - 1
    (stream, *_), (own_stream, *_) = (
        locate_owner_bit(cells, jnp.arange(cells.sequences)),
        locate_owner_bit(cells, seq),
    )
    return highest, is_sequence(cells, seq) & (stream == own_stream) & (
        highest >= jnp.maximum(start, 0)
    )


def _move_evicted_below(
    cells: Cells,
    seq: jax.Array,
    evicted: tuple[jax.Array, jax.Array],
    below: jax.Array,
    move: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Return `evicted_below` and the position of the highest evicted token after a move."""
    mark = cells.evicted_below
    highest, inside = evicted
    # The owners of evicted cells are not stored. For other sequences of the stream, it is therefore
    # unknown which evicted tokens move, and `evicted_below` may only rise.
    moved = jnp.maximum(move(highest) + 1, 0)
    # If the highest evicted token does not move, `evicted_below` does not decrease.
    all_move = inside & (jnp.arange(cells.sequences) == seq) & (highest == mark - 1)
    # If all evicted tokens from `start` on move, the evicted tokens that stay are below `below`.
    stays = jnp.where(all_move, jnp.minimum(mark, below), mark)
    evicted_below = jnp.where(inside, jnp.maximum(moved, stays), mark)
    return evicted_below, jnp.where(all_move, move(highest), mark - 1)


def _move_positions(cells: C, moves: jax.Array, position: jax.Array) -> C:
    moved = replace(
        cells,
        position=jnp.where(moves, position, cells.position),
        shift=jnp.where(moves, cells.shift + position - cells.position, cells.shift),
    )
    stays = (moved.position >= 0)[:, None]
    return with_owners(moved, jnp.where(stays, moved.owners, 0))


def rotate_shifted_keys(cells: C, buffers: Buffers, ok: Bool[Array, ""]) -> tuple[C, Buffers]:
    """If `ok` is True, rotate keys with a pending shift, and set their shifts to 0."""
    # Rotation by a difference of positions does not apply the attention factor of a rope twice.
    pending = (cells.shift != 0) & ok
    by = jnp.where(pending, cells.shift, 0)
    num_arrays = len(buffers.k)
    ropes = buffers.ropes[:num_arrays]
    head_dims = [sizes.head_dim for sizes in buffers.head_sizes[:num_arrays]]
    # The stored key is rotated for the position before all pending shifts.
    start = cells.position - cells.shift
    buffers = map_kv(
        cells,
        buffers,
        partial(_rotate_keys, ropes, buffers.heads_per_row, head_dims, buffers.rotated),
        start,
        by,
        num_split_args=2,
    )
    cells = replace(
        cells,
        shift=jnp.where(pending, 0, cells.shift),
        stamp=stamps_after_rotation(cells, pending),
    )
    return cells, buffers


def _rotate_keys(
    ropes: tuple[Rope | NotGiven | None, ...],
    heads_per_row: int,
    head_dims: list[int],
    rotated: bool,
    shard: Shard,
    start: jax.Array,
    by: jax.Array,
    arrays: PyTree,
) -> PyTree:
    """Rotate keys from positions `start` to `start + by`; the two arguments are `[S, N]` int32."""
    keys, values = arrays
    size = keys[0].shape[2]
    start, by = (shard.slice_cells(x, size) for x in (start, by))  # a device rotates its own cells
    start, by = start.reshape(-1), by.reshape(-1)
    count = jnp.cumsum(by != 0, dtype=jnp.int32)  # inclusive

    def rotate_chunk(
        i: jax.Array,
        keys: tuple[Stored, ...],
        start: jax.Array,
        by: jax.Array,
        count: jax.Array,
    ) -> tuple[Stored, ...]:
        # `count` covers the cells of all streams, S * N. The n-th cell to rotate, from 1, is the
        # first cell at which `count` is n; S * N if there are fewer cells to rotate.
        number = i * CHUNK + jnp.arange(1, CHUNK + 1, dtype=jnp.int32)
        cell = search_sorted(count, number)
        stream, slot = divmod_nonnegative(cell, size)
        begin, rotation = (x.at[cell].get(**FILL, fill_value=0) for x in (start, by))
        # Padding of a chunk gets distinct slots past the last cell, since writes need unique slots.
        slot = jnp.where(cell < by.size, slot, size + jnp.arange(CHUNK))

        def read_rows(x: CellArray) -> jax.Array:
            return gather(x, stream, slot)

        def write_heads(x: CellArray, new: jax.Array) -> CellArray:
            return scatter(x, stream, slot, join_heads(new, heads_per_row, x.shape[-1]))

        turned = []
        for k, rope, head_dim in zip(keys, ropes, head_dims, strict=True):
            if isinstance(rope, Rope):
                rows = map_arrays(read_rows, k)
                key = storage_of(rows).split_rows(heads_per_row, head_dim)  # [CHUNK, K, D]
                rope = replace(rope, attention_factor=1.0)
                if rotated:
                    moved = rope.rotate(rotate_by_hadamard(storage_of(key).decode()), rotation)
                    key = storage_of(key).encode(rotate_by_hadamard(moved))
                else:
                    key = storage_of(key).rotate(begin, begin + rotation, rope)
                k = map_arrays(write_heads, k, key)
            turned.append(k)
        return tuple(turned)

    steps, limit = -(-count[-1] // CHUNK), -(-by.size // CHUNK)
    return differentiable_fori_loop(rotate_chunk, steps, limit, keys, start, by, count), values
