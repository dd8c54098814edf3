"""Defragmentation: used cells move into gaps, in the order of `jaxkv.kv.placement`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import FILL, indices_of_true, search_sorted
from jaxkv.core.hashing import mix
from jaxkv.core.loops import differentiable_fori_loop
from jaxkv.core.pytree import pytree_dataclass, static_field
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.cells import C, Cells, is_cell_empty, with_owners
from jaxkv.kv.placement import Placement, StreamCells, cells_at_ranks
from jaxkv.kv.record import gather_cells, scatter_cells, with_record
from jaxkv.kv.shards import Shard, map_kv
from jaxkv.kv.shift import CHUNK
from jaxkv.ops.storage.layer_stack import CellArray, map_arrays
from jaxkv.spec import TableSpec
from jaxkv.table import MaintenancePlan

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, PyTree


@pytree_dataclass
class DefragPlan(MaintenancePlan):
    """Plan that closes gaps by moving up to M = max(N // 2, 1) runs of cells in each stream.

    source: First cell of each run; the last run in fill order comes first.
    destination: Cell that the first cell of each run moves to.
    length: Number of cells of each run; 0 for entries after the last run.
    free: Whether each cell was empty when the plan was made. If the set of empty cells has changed
      when the plan is applied, the plan has no effect.
    """

    source: Int32[Array, "S M"]
    destination: Int32[Array, "S M"]
    length: Int32[Array, "S M"]
    free: Bool[Array, "S N"]
    spec: TableSpec = static_field()

    @property
    def num_changes(self) -> Int32[Array, ""]:
        """Number of cells to move."""
        return jnp.sum(self.length, dtype=jnp.int32)

    def is_current(self, table: Cells) -> Bool[Array, ""]:
        """Return whether the empty cells of the table are the same as when the plan was made."""
        return jnp.all(self.free == is_cell_empty(table))

    def commit(self, table: C, buffers: Buffers, ok: Bool[Array, ""]) -> tuple[C, Buffers]:
        """Move the cells of the plan if `ok` is True."""
        size = table.num_cells
        chunks = jnp.where(ok, -(-jnp.sum(self.length, axis=1) // CHUNK), 0)  # [S]

        def move_chunk(i: jax.Array, table: C) -> C:
            # Sources have ranks of U or more, and destinations have ranks below U (see
            # `plan_moves`). No chunk therefore writes a cell that a later chunk reads.
            source, destination = _list_chunk_moves(self, size, i)

            moved = gather_cells(table.record, source)
            # The stamp of an overwritten cell must differ from its stamp in older tables.
            moved = replace(moved, stamp=mix(moved.stamp + 1))
            free = jnp.zeros_like(moved.owners)
            table = replace(table, owners=scatter_cells(table.owners, source, free))
            return with_record(table, scatter_cells(table.record, destination, moved))

        buffers = map_kv(
            table,
            buffers,
            partial(_move_keys_and_values, size),
            self,
            chunks,
            num_split_args=2,
        )
        table = jax.lax.fori_loop(0, jnp.max(chunks), move_chunk, table)
        # Sources have lost their owners but still have positions, which `with_owners` removes.
        return with_owners(table, table.owners), buffers


def plan_moves(cells: Cells, max_moves: int | None, spec: TableSpec) -> DefragPlan:
    """Plan all moves that close gaps, or the first `max_moves` moves in each stream.

    If a stream has U used cells, used cells with a rank of U or more move to empty cells with a
    rank below U. For tiled placement, the same rule applies to used and empty tiles instead of
    cells.
    """
    streams = StreamCells(cells.owners, is_cell_empty(cells), None, cells.position)
    plan = jax.vmap(partial(_plan_stream_moves, spec, cells.placement))(streams)
    tile = cells.placement.tile(cells.num_cells)
    if max_moves is None:
        return plan
    last = min(max_moves, plan.length.shape[1]) - 1
    is_kept = jnp.arange(plan.length.shape[1])[None] <= last
    if tile is not None:
        # The runs of a tile are neighbours, and a tile that is moved in part could not be joined
        # again, so the other runs of the last tile are kept too.
        is_kept |= plan.source // tile == plan.source[:, last, None] // tile
    return replace(plan, length=jnp.where(is_kept, plan.length, 0))


def _plan_stream_moves(spec: TableSpec, placement: Placement, stream: StreamCells) -> DefragPlan:
    """Plan the moves of one stream."""
    size = stream.free.size
    # Each move takes one used and one empty cell, so a stream of N cells has at most N // 2 moves.
    max_moves, tile = max(size // 2, 1), placement.tile(size)
    order, leave, enter = placement.find_moves(stream)
    source, gap = (cells_at_ranks(indices_of_true(x, max_moves), order) for x in (leave, enter))
    pair = jnp.arange(max_moves)
    pairs = jnp.sum(enter)
    # The cells of a run are contiguous, at the source and at the destination. A moved tile starts a
    # new run.
    is_next = (jnp.diff(source, prepend=-1) == 1) & (jnp.diff(gap, prepend=-1) == 1) & (pair > 0)
    if tile is not None:
        is_next &= source % tile > 0
    starts = (pair < pairs) & ~is_next
    runs = jnp.sum(starts, dtype=jnp.int32)
    start = indices_of_true(starts, max_moves)
    # A run ends at the start of the next run. After the last run, `start` is padded with
    # `max_moves`, which is at least `pairs`.
    end = jnp.minimum(jnp.append(start[1:], max_moves), pairs)
    length = jnp.where(pair < runs, end - start, 0)
    # The last cells in fill order move first, so that the first moves free the last cells.
    order = jnp.where(pair < runs, runs - 1 - pair, pair)
    start, length = start[order], length[order]

    def take_at_run_starts(cells: jax.Array) -> jax.Array:
        return cells.at[start].get(**FILL, fill_value=size)

    return DefragPlan(
        source=take_at_run_starts(source),
        destination=take_at_run_starts(gap),
        length=length.astype(jnp.int32),
        free=stream.free,
        spec=spec,
    )


def _move_keys_and_values(
    size: int, shard: Shard, plan: DefragPlan, chunks: jax.Array, arrays: PyTree
) -> PyTree:
    """Move keys and values in chunks; read each chunk completely before writing it."""
    shard = shard._replace(streams=())  # moves stay within the streams of a device

    def move_chunk(i: jax.Array, arrays: PyTree, plan: DefragPlan) -> PyTree:
        source, destination = _list_chunk_moves(plan, size, i)
        stream = jnp.arange(len(source))[:, None]

        def move_array(x: CellArray) -> CellArray:
            return shard.scatter(x, stream, destination, shard.gather(x, stream, source))

        return map_arrays(move_array, arrays)

    return differentiable_fori_loop(move_chunk, jnp.max(chunks), -(-size // CHUNK), arrays, plan)


def _list_chunk_moves(plan: DefragPlan, size: int, i: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the source and destination cells of the i-th chunk of each stream, `[S, CHUNK]`."""
    move = i * CHUNK + jnp.arange(CHUNK)  # index among the moved cells of a stream

    def of_stream(plan: DefragPlan) -> tuple[jax.Array, jax.Array]:
        ends = jnp.cumsum(plan.length)
        # Run r has the moves from `ends[r - 1]` up to `ends[r] - 1`, so the run of a move is the
        # number of runs whose end is at most the move.
        run = search_sorted(ends, move + 1)
        inside = move - (ends - plan.length).at[run].get(**FILL, fill_value=0)
        is_move = move < ends[-1]
        past = size + jnp.arange(CHUNK)  # distinct, because writes require unique indices
        source = plan.source.at[run].get(**FILL, fill_value=0) + inside
        destination = plan.destination.at[run].get(**FILL, fill_value=0) + inside
        return jnp.where(is_move, source, past), jnp.where(is_move, destination, past)

    return jax.vmap(of_stream)(plan)
