"""Whether a plan is stale: made for a table that has changed since."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.jit_helpers import jit_table
from jaxkv.plan import Plan
from jaxkv.spec import check_spec
from jaxkv.table import CacheTable, MaintenancePlan, check_made_for
from jaxkv.ubatch import Ubatch, expand_streams_to_rows, placed_rows

if TYPE_CHECKING:
    from jaxtyping import Array, Bool


def check_plan(plan: object, table: CacheTable) -> Ubatch | MaintenancePlan:
    """Return the ubatch or plan to apply; raise if it was made for another `TableSpec`."""
    if isinstance(plan, Plan):
        if len(plan.ubatches) != 1:
            raise ValueError(
                f"expected a plan of one ubatch, got one of {len(plan.ubatches)}; apply each of "
                f"plan.ubatches, and run the model after each"
            )
        (plan,) = plan.ubatches
    if isinstance(plan, Ubatch):
        check_made_for(table, plan)
    elif isinstance(plan, MaintenancePlan):
        check_spec(plan.spec, table.spec, "a plan that was made")
    else:
        raise TypeError(
            f"expected a ubatch or a plan, got {type(plan)}; pass a Ubatch, a Plan or the result "
            "of init_update or defrag_plan"
        )
    return plan


@jit_table
def is_current(table: CacheTable, plan: Ubatch | MaintenancePlan) -> Bool[Array, ""]:
    """Return whether a plan is current, see `Cache.is_current`."""
    return (
        plan.is_current(table)
        if isinstance(plan, MaintenancePlan)
        else is_ubatch_current(table, plan, placed_rows(plan))
    )


def is_ubatch_current(
    table: CacheTable, ubatch: Ubatch, placed: Bool[Array, " R"]
) -> Bool[Array, ""]:
    """Return whether a row has a slot, and no stream of such rows has changed since planning."""
    same = jax.tree.map(lambda version, planned: version == planned, table.version, ubatch.version)
    current = reduce(
        jnp.logical_and,
        [
            expand_streams_to_rows(leaf, ubatch.row_stream, ubatch.row_is_sequence)
            for leaf in jax.tree.leaves(same)
        ],
    )
    # One maximum needs one all-reduce on a mesh; 0: no cell in the row, 1: current, 2: stale.
    return jnp.max(jnp.where(placed, jnp.where(current, 1, 2), 0)) == 1
