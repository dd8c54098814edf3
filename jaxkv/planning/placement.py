"""Choice of slots for the tokens of a ubatch, and construction of the `Plan`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.batch import Batch
from jaxkv.core.array_utils import DROP, FILL, divmod_nonnegative, indices_of_true
from jaxkv.core.constants import NO_SLOT
from jaxkv.jit_helpers import jit_table
from jaxkv.plan import Plan, Reason
from jaxkv.planning.checks import PlanBuilder, check_batch
from jaxkv.planning.layout import count_rows, gather_rows
from jaxkv.ubatch import Ubatch, mask_slots

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32

    from jaxkv.spec import TableSpec
    from jaxkv.table import CacheTable


@partial(jit_table, static_argnames="outputs")
def plan_single_ubatch(
    table: CacheTable,
    batch: Batch,
    ranks: tuple[Int32[Array, " M"], Int32[Array, " M"]],
    index: Int32[Array, "R T"],
    continues_later: Bool[Array, " Q"] | None = None,
    *,
    outputs: int,
) -> Plan:
    """Plan a flat batch as one ubatch; `ranks` is the result of `layout.rank_in_sequence`.

    The array `continues_later` is True for sequences with further tokens in later ubatches.
    """
    builder = check_batch(table, batch, ranks, one_ubatch=True)
    ubatch, mixed, _ = _choose_cells(builder, index, continues_later, outputs)
    # Sequences that pass the checks have cells.
    plan = finish_plan(replace(builder, reason=jnp.where(mixed, Reason.MIXED_ROW, builder.reason)))
    return replace(plan, ubatches=(mask_slots(plan.ok, ubatch),))


@partial(jit_table, static_argnames="outputs")
def place_ubatch(
    builder: PlanBuilder,
    index: Int32[Array, "R T"],
    continues_later: Bool[Array, " Q"] | None = None,
    *,
    outputs: int,
) -> tuple[PlanBuilder, Ubatch]:
    """Choose the slots of one of several ubatches; for arguments see `plan_single_ubatch`.

    If a token gets no cell, all sequences have the reason OUT_OF_CELLS.
    """
    ubatch, _, ok = _choose_cells(builder, index, continues_later, outputs)
    passed = jnp.all(builder.reason == Reason.OK)
    reason = jnp.where(passed & ~ok, Reason.OUT_OF_CELLS, builder.reason)
    return replace(builder, table=builder.table.occupy(ubatch), reason=reason), ubatch


@jit_table
def finish_plan(builder: PlanBuilder) -> Plan:
    """Return the `Plan`, to which the caller adds the ubatches."""
    fits = builder.reason == Reason.OK
    return Plan(
        ubatches=(),
        ok=jnp.all(fits),
        reason=builder.reason,
        fits=fits,
        expected=builder.expected,
        actual=builder.actual,
    )


def _choose_cells(
    builder: PlanBuilder, index: jax.Array, continues_later: jax.Array | None, outputs: int
) -> tuple[Ubatch, jax.Array, jax.Array]:
    """Return a ubatch, which sequences have a mixed row, and whether each token has a cell."""
    table, batch = builder.table, builder.batch
    rows = count_rows(table, *index.shape)
    index = jnp.pad(index, [(0, rows - len(index)), (0, 0)], constant_values=NO_SLOT)
    index, mixed = _order_rows(table.spec, batch, index)
    if continues_later is None:
        continues_later = jnp.zeros(table.spec.sequences, bool)
    ubatch = _build_ubatch(table, batch, index, continues_later, outputs)
    slots, ok = table.choose_slots(ubatch)
    return replace(ubatch, slots=slots), mixed, ok


def _order_rows(
    spec: TableSpec, batch: Batch, index: Int32[Array, "R T"]
) -> tuple[Int32[Array, "R T"], Bool[Array, " Q"]]:
    """Order rows by sequence id; return which sequences have `Reason.MIXED_ROW`, `[Q]` bool.

    A sequence has this reason if it shares a row with a sequence of a higher id, or if it has the
    highest id in several rows. If the cache allows rows with tokens of several sequences, rows are
    neither ordered nor checked. Otherwise, rows are checked, but are ordered only if R is Q.
    """
    count = spec.sequences
    none, index = jnp.zeros(count, bool), jnp.asarray(index)
    if not spec.single_sequence_rows:
        return index, none
    # `ids` is [R, T] with Q for padding; `row` has the highest id of each row, -1 for a row of
    # padding.
    ids = jnp.where(batch.valid, batch.sequences, count).at[index].get(**FILL, fill_value=count)
    row = jnp.max(jnp.where(ids < count, ids, -1), axis=1)
    row_sequence = jnp.where(row < 0, count, row)
    mixed = none.at[ids].max(ids != row[:, None], **DROP)
    mixed |= jnp.zeros(count, jnp.int32).at[row_sequence].add(1, **DROP) > 1
    if index.shape[0] == count:
        rows = jnp.arange(count, dtype=jnp.int32)
        row_of_sequence = jnp.full(count, count, jnp.int32).at[row_sequence].set(rows, **DROP)
        index = index.at[row_of_sequence].get(**FILL, fill_value=NO_SLOT)
    return index, mixed


def _build_ubatch(
    table: CacheTable,
    batch: Batch,
    index: Int32[Array, "R T"],
    continues_later: Bool[Array, " Q"],
    outputs: int,
) -> Ubatch:
    spec, part = table.spec, gather_rows(batch, index)
    row_is_sequence = spec.single_sequence_rows and index.shape[0] == spec.sequences
    if not spec.single_sequence_rows:
        row = jnp.zeros(index.shape[0], jnp.int32)
    elif row_is_sequence:
        row = jnp.arange(spec.sequences, dtype=jnp.int32)
    else:
        row = jnp.max(jnp.where(part.valid, part.sequences, 0), axis=1)
    stream, _ = divmod_nonnegative(row, spec.sequences_per_stream)
    pick, order = _select_outputs(part, index, outputs)
    return Ubatch(
        tokens=part.tokens,
        embeddings=part.embeddings,
        positions=part.positions,
        sequences=part.sequences,
        row_stream=stream,
        row_sequence=row,
        slots=None,
        valid=part.valid,
        continues_later=part.valid
        & continues_later.at[part.sequences].get(**FILL, fill_value=False),
        outputs=pick,
        output_index=order,
        version=table.version,
        spec=spec,
        row_is_sequence=row_is_sequence,
        shared_with=part.shared_with,
        extra=part.extra,
    )


def _select_outputs(
    part: Batch, index: Int32[Array, "R T"], outputs: int
) -> tuple[Int32[Array, " O"], Int32[Array, " O"]]:
    """Return indices `[O]` of the output tokens in the ubatch, and their indices in the batch."""
    order = jnp.where(part.outputs, index, NO_SLOT).reshape(-1)
    tokens = order.shape[0]
    if outputs >= tokens:  # every token may be an output: no selection is needed
        return jnp.arange(tokens, dtype=jnp.int32), order
    pick = indices_of_true(order != NO_SLOT, outputs)
    order = order.at[pick].get(**FILL, fill_value=NO_SLOT)
    return jnp.minimum(pick, tokens - 1), order
