"""What can be wrong with a batch before cells are chosen for it.

Here M is the members of a batch, see `jaxkv.planning.sets`.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.batch import Batch
from jaxkv.places import END
from jaxkv.plan import Reason
from jaxkv.planning import sets
from jaxkv.planning.sets import members_of, per_member
from jaxkv.tables import jit_table


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class PlanBuilder:
    """A plan in the making: what was found out about the batch, and the table so far.

    table: with the ubatches placed so far in it.
    batch: flat, with all positions and outputs.
    reason, expected, found: see `Plan`; what was found before cells were chosen.
    late: `[Q]` int32, the `reason`, or the one that came up while cells were chosen.
    wanted, left: `[Q]` int32, the cells that each asks for, and those that there are for it.
    together: `[Q]` bool, the sequences that are sure to be placed if they come without the others.
    """

    table: Any
    batch: Batch
    reason: jax.Array
    expected: jax.Array
    actual: jax.Array
    late: jax.Array
    wanted: jax.Array
    left: jax.Array
    together: jax.Array


@jit_table
def check(table: Any, batch: Batch, ranks: tuple[jax.Array, jax.Array]) -> PlanBuilder:
    """Look for everything that can be wrong before cells are chosen.

    Args:
      table: of any cache.
      batch: the tokens, flat.
      ranks: `[M]` int32 each, see `layout.turn_in_sequence`; of the members of the batch.
    """
    count = table.spec.sequences
    members, valid = members_of(batch)
    known = (members >= 0) & (members < count)
    foreign = jnp.any(valid & ~known)
    valid = valid & known
    batch = replace(batch, valid=sets.any_of(valid, batch))
    ids = jnp.where(valid, members, count)
    wanted = jnp.zeros(count, jnp.int32).at[ids].add(1, mode="drop")
    here = wanted > 0
    last, missing, pending = table.sequence_status(here)
    batch = _complete(batch, ids, ranks[0], wanted, last)
    apart = None if batch.shared_with is None else sets.apart(table, ids, ranks, batch)
    reason, expected, found = _faults(batch, ids, valid, ranks, last, apart)
    for code, at_fault in ((Reason.SHIFT_PENDING, pending), (Reason.CONTEXT_EVICTED, missing)):
        at_fault = here & at_fault & (reason == Reason.OK)
        reason = jnp.where(at_fault, code, reason)
        found = jnp.where(at_fault & (code == Reason.CONTEXT_EVICTED), last + 1, found)
    reason = jnp.where(foreign & (reason == Reason.OK), Reason.UNKNOWN_SEQUENCE, reason)

    # Sequences already refused do not count against capacity. One refused for room is told how many
    # cells were left.
    if batch.shared_with is None:
        fits, together, left = table.find_fitting(jnp.where(reason == Reason.OK, wanted, 0))
    else:
        root, wanted = sets.wanted(ids, ranks[0], reason == Reason.OK, batch)
        wanted, *room = wanted[root], *table.find_fitting(wanted)
        fits, together, left = (one[root] for one in room)
    reason = jnp.where(fits, reason, Reason.OUT_OF_CELLS)
    return PlanBuilder(
        table=table,
        batch=batch,
        reason=reason,
        expected=jnp.where(fits, expected, wanted),
        actual=jnp.where(fits, found, left),
        late=reason,
        wanted=wanted,
        left=left,
        together=together,
    )


def _complete(
    batch: Batch, ids: jax.Array, ranks: jax.Array, wanted: jax.Array, last: jax.Array
) -> Batch:
    """Fill in what was left open: positions after the last, outputs of the last tokens.

    Args:
      batch: the tokens, flat.
      ids: `[M]` int32, the sequence of each member, Q for one that is not there.
      ranks: `[M]` int32, the turn of each member in its sequence.
      wanted: `[Q]` int32, how many tokens each sequence brings.
      last: `[Q]` int32, the position that it goes on after.
    """
    positions, outputs = batch.positions, batch.outputs
    if positions is None:
        positions = last.at[ids].get(mode="fill", fill_value=-1) + 1 + ranks
        positions = sets.first_of(positions, batch)
    if outputs is None:
        outputs = ranks + 1 == wanted.at[ids].get(mode="fill", fill_value=0)
        outputs = sets.any_of(outputs, batch)
    return replace(batch, positions=positions, outputs=outputs & batch.valid)


def _faults(
    batch: Batch,
    ids: jax.Array,
    valid: jax.Array,
    numbers: tuple[jax.Array, jax.Array],
    last: jax.Array,
    apart: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Check tokens and positions, and that the sequences of a token share what is before it.

    Args:
      batch: the tokens, flat.
      ids: `[M]` int32, the sequence of each member, Q for one that is not there.
      valid: `[M]` bool, the members that are there.
      numbers: `[M]` int32 each, see `layout.turn_in_sequence`.
      last: `[Q]` int32, the position that each sequence goes on after.
      apart: `[M]` bool, see `sets.apart`; None where each token has one sequence.

    Returns:
      For each sequence, `[Q]` int32 each, a `Reason`, and what was expected and found at its first
      fault: positions, or where sequences have diverged another one of the token, and its position.
    """
    ranks, before = numbers
    position = per_member(batch.positions, batch)
    after = last.at[ids].get(mode="fill", fill_value=-1)
    previous = jnp.where(ranks == 0, after, position[before])
    anywhere = (ranks == 0) & (after < 0) & (position >= 0)  # an empty sequence starts anywhere
    right = ~valid | ((anywhere | (position == previous + 1)) & (position < END))
    negative = jnp.zeros_like(valid)
    if batch.tokens is not None:
        negative = valid & (per_member(batch.tokens, batch) < 0)
    right &= ~negative
    reason = jnp.select(
        [right, negative, ranks == 0, position == previous, position < previous],
        [
            Reason.OK,
            Reason.NEGATIVE_TOKEN,
            Reason.NOT_CONTIGUOUS,
            Reason.DUPLICATE_POSITION,
            Reason.DECREASING_POSITION,
        ],
        Reason.POSITION_GAP,
    ).astype(jnp.int32)
    wanted = previous + 1
    if apart is not None:
        right, reason = right & ~apart, jnp.where(apart, Reason.DIVERGED, reason)
        wanted = jnp.where(apart, per_member(batch.sequences, batch), wanted)
    count, end = last.shape[0], ids.shape[0]
    # The first token at fault speaks for its sequence.
    index = jnp.where(right, end, jnp.arange(end, dtype=jnp.int32))
    worst = jnp.full(count, end, jnp.int32).at[ids].min(index, mode="drop")
    answer = ((reason, Reason.OK), (wanted, 0), (position, 0))
    reason, expected, found = (x.at[worst].get(mode="fill", fill_value=fill) for x, fill in answer)
    return reason, expected, found
