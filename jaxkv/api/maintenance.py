"""Rotation of shifted keys, defragmentation, and return to earlier tables."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.api.edits import EditResult, edit_result
from jaxkv.cache import Cache, merge, split
from jaxkv.core.validate import check_count
from jaxkv.jit_helpers import jit_method, jit_table
from jaxkv.plan import Reason
from jaxkv.spec import check_spec
from jaxkv.table import CacheTable, EditCheck, MaintenancePlan, join_checks


def init_update(cache: Cache) -> MaintenancePlan:
    """Plan the rotation of all shifted keys; `apply` then rotates them.

    Before the plan is applied, a batch is refused if a sequence of the batch owns a shifted key
    (`Reason.SHIFT_PENDING`). The rotation needs no free cell.

    Args:
      cache: any cache. In a cache without shifted keys, the plan has no keys to rotate.

    Returns:
      A plan for `apply`; a stale plan has no effect (`Cache.is_current`). The property
      `num_changes` `[]` int32 is the number of keys to rotate in all streams.

    Examples:
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, rope=Rope.make(2))
      >>> cache = make_cache(spec, cells=4)
      >>> cache = prefill(forward, params, cache, [1, 2, 3]).cache
      >>> cache, ok = seq_add(cache, 0, 1, -1, delta=4)
      >>> init_update(cache).num_changes.item()
      2
      >>> init_update(apply(cache, init_update(cache))).num_changes.item()
      0

    llama.cpp: `llama_memory_i::init_update`, the K-shift.
    """
    table, _ = split(cache)
    return _plan_shift(table)


def defrag_plan(cache: Cache, *, max_moves: int | None = None) -> MaintenancePlan:
    """Plan the moves that bring all used cells to the front of their stream.

    Used cells at the end of a stream move into the gaps, so the order of the used cells may change.
    With tiled placement, whole tiles are moved. States are not moved.

    Args:
      cache: any cache.
      max_moves: largest number of runs of neighbouring cells to move in each stream; None means no
        limit. With tiled placement, a tile is never moved in part: if one run of the tile is within
        the limit, all runs of the tile are moved.

    Returns:
      A plan for `apply`; a stale plan has no effect (`Cache.is_current`). The property
      `num_changes` `[]` int32 is the number of cells that this plan moves in all streams.

    Raises:
      TypeError: If `max_moves` is traced.
      ValueError: If `max_moves` is below 1.

    Examples:
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=6)
      >>> cache = prefill(forward, params, cache, [1, 2, 3, 4, 5]).cache
      >>> cache, _ = seq_rm(cache, 0, 1, 3)
      >>> print(show(apply(cache, defrag_plan(cache))))
      owner    0 0 0 . . .
      position 0 3 4 . . .

    llama.cpp: `defrag`, removed in newer versions.
    """
    if max_moves is not None:
        max_moves = check_count(max_moves, "max_moves")
    table, _ = split(cache)
    return _plan_defrag(table, max_moves=max_moves)


_plan_shift = jit_method(CacheTable.plan_shift)
_plan_defrag = jit_method(CacheTable.plan_defrag, static_argnames="max_moves")


def rewind(cache: Cache, *, to: CacheTable) -> EditResult:
    """Undo steps: return a cache with an earlier table and the buffers of a later cache.

    The flag `ok` is False (OVERWRITTEN) if a ubatch, a copy between streams or a defrag overwrote a
    cell of the earlier table. `ok` is also False if an update rotated the key of such a cell. Plans
    for later tables become stale.

    `rewind` compares the cells of both tables by hashes. The hash of a cell depends on all earlier
    steps and edits of its stream. If a cell was removed and written again, the cell counts as
    overwritten, even if it has the same token. If two equal ubatches are applied to the same cache,
    the hashes are equal, even if the keys were computed with different model parameters.

    Args:
      cache: the later cache.
      to: table of the earlier cache. The earlier buffers may be donated, but not the table.

    Returns:
      A cache, and the flag `ok` `[]` bool. The cache is the earlier cache if `ok` is True, and the
      later cache if `ok` is False.

    Raises:
      ValueError: If the earlier table has another `TableSpec`, such as another number of cells.
      ValueError: If the earlier table was donated.

    Examples:
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=4)
      >>> later = prefill(forward, params, cache, [1, 2]).cache
      >>> before, ok = rewind(later, to=cache.table)
      >>> before.num_used_cells().item(), ok.item()
      (0, True)
    """
    table, buffers = split(cache)
    if not isinstance(to, CacheTable):
        raise TypeError(f"expected the table of an earlier cache, got {type(to)}; pass cache.table")
    check_spec(to.spec, table.spec, "a table")
    restored, check = _rewind(table, to)
    return edit_result(merge(restored, buffers), check)


@jit_table
def _rewind(table: CacheTable, earlier: CacheTable) -> tuple[CacheTable, EditCheck]:
    back, ok = table.rewind(earlier)
    restored = jax.tree.map(lambda new, old: jnp.where(ok, new, old), back, table)
    return restored, join_checks((ok, Reason.OVERWRITTEN))
