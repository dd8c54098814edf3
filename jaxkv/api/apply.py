"""`apply`, which commits a plan to a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, overload

import jax.numpy as jnp

from jaxkv.cache import Cache, merge, split
from jaxkv.core.array_utils import is_traced
from jaxkv.jit_helpers import jit_table
from jaxkv.plan import Plan
from jaxkv.stale import check_plan, is_ubatch_current
from jaxkv.step import Step
from jaxkv.table import CacheTable, MaintenancePlan
from jaxkv.ubatch import Ubatch, mask_slots, placed_rows

if TYPE_CHECKING:
    from jaxtyping import PyTree


@overload
def apply(cache: Cache, plan: Ubatch | Plan, *, donate: bool = False) -> Step: ...


@overload
def apply(cache: Cache, plan: MaintenancePlan, *, donate: bool = False) -> Cache: ...


def apply(
    cache: Cache, plan: Ubatch | Plan | MaintenancePlan, *, donate: bool = False
) -> Step | Cache:
    """Commit a ubatch, or the plan of an update or a defrag, to a cache.

    A ubatch changes the table. The result is a `Step`: a model passes the step to `attend` and
    `write_states`, which write the buffers. The plan of an update (`init_update`) or of a defrag
    (`defrag_plan`) changes table and buffers, and the result is the next cache.

    A refused plan (`Plan.ok` is False) or a stale plan (see `Cache.is_current`) has no effect. The
    result is then an equal cache, or a step whose `cache` is equal after all layers.

    Args:
      cache: any cache.
      plan: a ubatch, a plan of one ubatch, or the result of `init_update` or `defrag_plan`.
      donate: If True, an update or a defrag outside of `jit` reuses the buffers of the input cache,
        which becomes invalid. If False, the buffers are copied. `donate` has no effect for a
        ubatch or the plan of a batch: the step shares the buffers of the cache.

    Returns:
      A `Step` for a ubatch or the plan of a batch; a cache for an update or a defrag.

    Raises:
      ValueError: If the plan has several ubatches, since the model must run after each ubatch.
      ValueError: If the plan was made for a cache with another `TableSpec`, such as more cells.
      ValueError: If an update or a defrag needs buffers that were donated.

    Examples:
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=4)
      >>> step = apply(cache, init_batch(cache, make_batch([1, 2])))
      >>> x = jnp.ones((1, 2, 1, 2))
      >>> step, out = attend(step, 0, x, x, x)
      >>> step.cache.num_used_cells().item()
      2

    llama.cpp: `llama_memory_context_i::apply`.
    """
    table, buffers = split(cache)
    plan = check_plan(plan, table)
    if isinstance(plan, Ubatch):
        return replace(_begin_step(table, plan), buffers=buffers)
    if not is_traced(plan, table) and plan.is_empty:
        return cache
    return (_commit_donated if donate else _commit)(plan, table, buffers)


@jit_table
def _begin_step(table: CacheTable, ubatch: Ubatch) -> Step:
    """Return the step of a ubatch, without buffers."""
    placed = placed_rows(ubatch)
    is_current = is_ubatch_current(table, ubatch, placed)
    ubatch = mask_slots(is_current, ubatch)
    layers = table.num_stacked_layers
    # A reduction in place of `placed & ~is_current`, which XLA would compute again in each layer.
    is_stale = jnp.all(jnp.stack(jnp.broadcast_arrays(placed, ~is_current)), axis=0)
    return Step(
        table=table.occupy(ubatch),
        buffers=None,
        ubatch=ubatch,
        is_stale=is_stale,
        is_written=jnp.zeros(layers, bool) if layers else None,
    )


def _apply_maintenance(plan: MaintenancePlan, table: CacheTable, buffers: PyTree) -> Cache:
    moved, buffers = plan.commit(table, buffers, plan.is_current(table))
    return merge(moved.advance_version(table), buffers)


_commit = jit_table(_apply_maintenance)
_commit_donated = jit_table(_apply_maintenance, donate_argnames="buffers")
