"""Find the sequences of a refused batch that fit together, by plans of subsets.

With a window, the number of free cells does not decide which sequences fit: a ubatch frees cells
behind the window for later ubatches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import Batch
from jaxkv.core.constants import NO_SLOT
from jaxkv.jit_helpers import jit_table
from jaxkv.plan import Plan, Reason
from jaxkv.planning.checks import check_batch, token_sequence_pairs
from jaxkv.planning.layout import MIN_OUTPUTS, flat_batch, rank_in_sequence
from jaxkv.planning.placement import place_ubatch

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Int32

    from jaxkv.spec import TableSpec
    from jaxkv.table import CacheTable


def needs_only_free_cells(spec: TableSpec) -> bool:
    """Return whether a batch fits if and only if its tokens are at most as many as free cells."""
    has_window = dict(spec.details).get("window") is not None
    return not has_window and all(map(needs_only_free_cells, spec.parts))


def place_one_by_one(
    table: CacheTable, batch: Batch, plan: Plan, plan_part: Callable[[Batch], Plan]
) -> Plan:
    """Return a refused plan in which the field `fits` marks sequences that fit together.

    The sequences are tried one by one, the sequence with the fewest new tokens first. A sequence
    fits if the plan of this sequence and all earlier sequences that fit is not refused.
    """
    demand = _count_tokens(table.spec, _sequences_of_tokens(batch))
    reason, fits = np.array(plan.reason), np.zeros(table.spec.sequences, bool)
    for seq in np.argsort(demand, kind="stable"):
        if demand[seq] and reason[seq] in (Reason.OK, Reason.OUT_OF_CELLS):
            fits[seq] = True
            # The sequences before `seq` fit together, so any reason in this plan is due to `seq`.
            reason[seq] = np.max(plan_part(batch.keep_sequences(fits)).reason)
            fits[seq] = reason[seq] == Reason.OK
    decided = _refuse_others(table, replace(plan, ubatches=()), demand, fits, reason)
    return replace(decided, ubatches=plan.ubatches)


def place_at_most_one(table: CacheTable, batch: Batch, plan: Plan, ubatch_size: int) -> Plan:
    """Return a traced plan; if it is refused, the field `fits` marks at most one sequence.

    The sequence is the one with the fewest new tokens among the sequences that fit alone. One loop
    plans each sequence alone; each subset of several sequences would require another program.
    """
    flat, _ = flat_batch(table.spec, batch)
    members = _sequences_of_tokens(flat)
    demand = _count_tokens(table.spec, members)
    order = np.argsort(demand, kind="stable")[np.sum(demand == 0) :]
    width = min(ubatch_size, demand.max())
    # Each row has the tokens of one sequence, padded to whole ubatches of `width` tokens. Sequences
    # without tokens are first in the order, and are omitted.
    index = np.full((order.size, -(-demand.max() // width) * width), NO_SLOT, np.int32)
    for row, seq in zip(index, order, strict=True):
        row[: demand[seq]] = np.flatnonzero(np.any(members == seq, axis=1))

    def place_alone(seq_and_index: tuple[jax.Array, jax.Array]) -> jax.Array:
        seq, index = seq_and_index
        own = flat.keep_sequences(jnp.arange(table.spec.sequences) == seq)
        ranks = rank_in_sequence(*token_sequence_pairs(own))
        builder, _ = jax.lax.scan(
            lambda builder, part: (place_ubatch(builder, part, outputs=MIN_OUTPUTS)[0], None),
            check_batch(table, own, ranks, one_ubatch=False),
            index.reshape(-1, 1, width),
        )
        return builder.reason[seq]

    def refuse() -> Plan:
        reason = jax.lax.map(place_alone, (jnp.asarray(order, jnp.int32), jnp.asarray(index)))
        fits = reason == Reason.OK
        # Only the first sequence that fits is kept: others may fit alone but not with it.
        fits &= jnp.cumsum(fits) == 1
        return _refuse_others(
            table,
            replace(plan, ubatches=()),
            demand,
            jnp.zeros(table.spec.sequences, bool).at[order].set(fits),
            plan.reason.at[order].set(reason),
        )

    decided = jax.lax.cond(plan.ok, lambda: replace(plan, ubatches=()), refuse)
    return replace(decided, ubatches=plan.ubatches)


def _sequences_of_tokens(batch: Batch) -> Int[np.ndarray, "B n"]:
    """Return the sequence ids of each token of a concrete batch; -1 is padding."""
    members, valid = token_sequence_pairs(batch)
    return np.where(valid, members, -1).reshape(batch.valid.size, -1)


def _count_tokens(spec: TableSpec, members: Int[np.ndarray, "B n"]) -> Int32[np.ndarray, " Q"]:
    return np.bincount(members[members >= 0], minlength=spec.sequences).astype(np.int32)


@jit_table
def _refuse_others(
    table: CacheTable,
    plan: Plan,
    demand: Int32[Array, " Q"],
    fits: Bool[Array, " Q"],
    reason: Int32[Array, " Q"],
) -> Plan:
    """Return a plan without ubatches that refuses all sequences with tokens except `fits`."""
    reason = jnp.where(reason == Reason.OK, jnp.int32(Reason.OUT_OF_CELLS), reason)
    reason = jnp.where(fits | (demand == 0), Reason.OK, reason)
    lacks = reason == Reason.OUT_OF_CELLS
    num_free = table.find_fitting_sequences(jnp.zeros_like(demand), one_ubatch=True).num_remaining
    taken = jnp.where(fits, demand, 0).reshape(table.spec.streams, -1)
    taken = jnp.sum(taken, axis=1, dtype=jnp.int32)
    remaining = jnp.maximum(num_free - jnp.repeat(taken, table.spec.sequences_per_stream), 0)
    return replace(
        plan,
        reason=reason,
        fits=reason == Reason.OK,
        expected=jnp.where(lacks, demand, plan.expected),
        actual=jnp.where(lacks, remaining, plan.actual),
    )
