"""Rotations that keys are owed, gaps between cells, room for a batch, and earlier tables."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.api.apply import apply
from jaxkv.api.edits import EditResult
from jaxkv.batch import Batch
from jaxkv.cache import Cache, merge, split
from jaxkv.core.validate import check_count
from jaxkv.jit_helpers import jit_method, jit_table
from jaxkv.planning.planners import init_batch
from jaxkv.spec import check_spec
from jaxkv.table import CacheTable, MaintenancePlan

if TYPE_CHECKING:
    from jaxtyping import Array, Bool


def init_update(cache: Cache) -> MaintenancePlan:
    """Plan what is pending: the rotation of every key that was moved.

    Returns:
      A plan for `apply`. Its `pending`, `[]` int32, says how many keys will be rotated; when it
      is 0 applying costs nothing. A stale one changes nothing, see `is_current`.

    Examples:
      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, rope=make_rope(2)), cells=4
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
      >>> cache, ok = seq_add(cache, 0, 1, -1, delta=4)
      >>> init_update(cache).pending.item()
      2

    llama.cpp: `llama_memory_i::init_update`, the K-shift.
    """
    table, _ = split(cache)
    return _plan_shift(table)


def defrag_plan(cache: Cache, *, max_moves: int | None = None) -> MaintenancePlan:
    """Plan the moves that bring all used cells to the front.

    In tiled placement whole tiles move, those with any used cell to the front, and gaps within
    them stay: they are for the next tokens of the sequence whose tile it is.

    Args:
      cache: any cache.
      max_moves: the most runs of cells to move in each stream, for doing it bit by bit; None for
        all. In tiled placement the last tile is always moved whole. Repeated until nothing is left
        to move, any number of at least 1 ends in the same order.

    Returns:
      A plan for `apply`. Its `pending`, `[]` int32, says how many cells will move. Of keys and
      values it has runs of `source`, `destination` and `length`, the highest cells first. A stale
      one changes nothing, see `is_current`.

    Raises:
      ValueError: when `max_moves` is below 1.

    Examples:
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=6)
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3, 4, 5])))
      >>> cache, _ = seq_rm(cache, 0, 1, 3)
      >>> plan = defrag_plan(cache)
      >>> [x[0, 0].item() for x in (plan.source, plan.destination, plan.length)]
      [3, 1, 2]
      >>> print(show(apply(cache, plan)))
      owner    0 0 0 . . .
      position 0 3 4 . . .

    llama.cpp: `defrag`, as it was until it was removed.
    """
    if max_moves is not None:
        max_moves = check_count(max_moves, "max_moves")
    table, _ = split(cache)
    return _plan_defrag(table, max_moves=max_moves)


def compact(
    cache: Cache,
    *,
    batch: Batch | None = None,
    ubatch_size: int | None = None,
    max_moves: int | None = None,
    donate: bool = False,
) -> EditResult:
    """Rotate the keys of shifted cells, then close the gaps between cells.

    With a batch, only what is needed for the batch to fit: nothing, the rotation, or both. No token
    is removed.

    Args:
      cache: any cache.
      batch: tokens that are to fit; None to do both.
      ubatch_size: the most tokens that are computed at once, see `init_batch`.
      max_moves: the most runs of cells that are moved, see `defrag_plan`.
      donate: give up the buffers of the cache passed in, see `apply`.

    Returns:
      The cache, and whether the batch fits in it, `[]` bool; True without a batch.

    Raises:
      jax.errors.TracerBoolConversionError: inside of `jit` with a batch, since it decides by what
        it finds.

    Examples:
      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=4, placement="contiguous"
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
      >>> cache, _ = seq_rm(cache, 0, 0, 1)
      >>> batch = make_batch([4, 5])
      >>> init_batch(cache, batch).ok.item(), compact(cache, batch=batch).ok.item()
      (False, True)
    """

    def can_plan_batch(cache: Cache) -> Bool[Array, ""]:
        return (
            jnp.array(True)
            if batch is None
            else init_batch(cache, batch, ubatch_size=ubatch_size).ok
        )

    ok = can_plan_batch(cache)
    for tidy in (init_update, partial(defrag_plan, max_moves=max_moves)):
        if batch is None or not ok:
            cache = apply(cache, tidy(cache), donate=donate)
            ok = can_plan_batch(cache)
    return EditResult(cache, ok)


_plan_shift = jit_method(CacheTable.plan_shift)
_plan_defrag = jit_method(CacheTable.plan_defrag, static_argnames="max_moves")


def rewind(cache: Cache, *, to: CacheTable) -> EditResult:
    """Return to an earlier table, with the buffers of a later cache: undo what was applied since.

    Exact when the buffers still hold what the old table knew: since then the table was edited, and
    ubatches went into cells that were empty in it. It is refused where a cell that the old table
    uses was written over (by a ubatch, a copy between streams or a defrag, into a cell freed since)
    or rotated (by an update). Plans that were made meanwhile are stale: plan again. The table knows
    the tokens, and not the model: cells of the same tokens that other weights, or other arguments
    of `attend`, have filled since are taken for the old ones.

    Args:
      cache: the later cache.
      to: the table of the earlier one, `cache.table`. It must not have been donated: donate the
        buffers alone, and merge inside of the step.

    Returns:
      The cache as it was, and `ok`, `[]` bool: False if it was refused, and then the cache is the
      later one, unchanged.

    Raises:
      TypeError: when `to` is no table.
      ValueError: when it is one of a cache of other sizes or of another kind.

    Examples:
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=4)
      >>> table = cache.table
      >>> later = apply(cache, init_batch(cache, make_batch([1, 2])))
      >>> cache, ok = rewind(later, to=table)
      >>> cache.num_used_cells().item(), ok.item()
      (0, True)

      What was written over cannot come back:

      >>> table = later.table
      >>> other = apply(clear(later), init_batch(clear(later), make_batch([3])))
      >>> rewind(other, to=table).ok.item()
      False
    """
    table, buffers = split(cache)
    if not isinstance(to, CacheTable):
        raise TypeError(f"expected the table of an earlier cache, got {type(to)}")
    check_spec(to.spec, table.spec, "a table")
    restored, ok = _rewind(table, to)
    return EditResult(merge(restored, buffers), ok)


@jit_table
def _rewind(table: CacheTable, earlier: CacheTable) -> tuple[CacheTable, Bool[Array, ""]]:
    """Return the table `earlier` if it can be returned to, else `table`; and `ok`, `[]` bool."""
    back, ok = table.rewind(earlier)
    return jax.tree.map(lambda new, old: jnp.where(ok, new, old), back, table), ok
