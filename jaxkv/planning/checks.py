"""Checks of a batch before slots are chosen, for each pair of a token and one of its sequences.

M, the number of pairs, is B, or B * n if tokens have up to n sequences. The argument `ids` is the
sequence id of each pair, Q for padding.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import Batch
from jaxkv.core.array_utils import DROP, FILL, divmod_nonnegative, is_concrete
from jaxkv.core.constants import END
from jaxkv.core.pytree import pytree_dataclass
from jaxkv.jit_helpers import jit_table
from jaxkv.plan import Reason

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Bool, Int32, PyTree, Shaped

    from jaxkv.spec import TableSpec
    from jaxkv.table import CacheTable


@pytree_dataclass
class PlanBuilder:
    """A plan in progress.

    table: Table after the ubatches whose slots are chosen so far.
    reason: `Reason` of each sequence, from the checks before slots are chosen. If all sequences
      pass these checks, but a ubatch has no slots, all have OUT_OF_CELLS.
    """

    table: CacheTable
    batch: Batch
    reason: Int32[Array, " Q"]
    expected: Int32[Array, " Q"]
    actual: Int32[Array, " Q"]


@partial(jit_table, static_argnames="one_ubatch")
def check_batch(
    table: CacheTable,
    batch: Batch,
    ranks: tuple[Int32[Array, " M"], Int32[Array, " M"]],
    *,
    one_ubatch: bool,
) -> PlanBuilder:
    """Check all properties of a batch that can be checked before slots are chosen."""
    count = table.spec.sequences
    members, valid = token_sequence_pairs(batch)
    is_known = (members >= 0) & (members < count)
    foreign = jnp.any(valid & ~is_known)
    valid = valid & is_known
    batch = replace(batch, valid=any_per_token(valid, batch))
    ids = jnp.where(valid, members, count)
    demand = jnp.zeros(count, jnp.int32).at[ids].add(1, **DROP)
    here = demand > 0
    last, context_evicted, shift_pending = table.sequence_status(here)
    batch = _fill_in_defaults(batch, ids, ranks[0], demand, last)
    has_diverged = (
        None if batch.shared_with is None else find_diverged_pairs(table, ids, ranks, batch)
    )
    reason, expected, actual = _find_faults(batch, ids, valid, ranks, last, has_diverged)
    for code, at_fault in (
        (Reason.SHIFT_PENDING, shift_pending),
        (Reason.CONTEXT_EVICTED, context_evicted),
    ):
        at_fault &= reason == Reason.OK
        reason = jnp.where(at_fault, code, reason)
        actual = jnp.where(at_fault & (code == Reason.CONTEXT_EVICTED), last + 1, actual)
    reason = jnp.where(foreign & (reason == Reason.OK), Reason.UNKNOWN_SEQUENCE, reason)

    # Refused sequences require no cells. If a sequence is out of cells, `actual` is the number of
    # remaining cells.
    if batch.shared_with is None:
        fits, remaining = table.find_fitting_sequences(
            jnp.where(reason == Reason.OK, demand, 0), one_ubatch
        )
    else:
        root, demand = num_required_cells(ids, ranks[0], reason == Reason.OK, batch)
        demand, *room = demand[root], *table.find_fitting_sequences(demand, one_ubatch)
        fits, remaining = (x[root] for x in room)
    return PlanBuilder(
        table=table,
        batch=batch,
        reason=jnp.where(fits, reason, Reason.OUT_OF_CELLS),
        expected=jnp.where(fits, expected, demand),
        actual=jnp.where(fits, actual, remaining),
    )


def _fill_in_defaults(
    batch: Batch, ids: jax.Array, ranks: jax.Array, demand: jax.Array, last: jax.Array
) -> Batch:
    """Fill in the default positions and outputs of a batch."""
    positions, outputs = batch.positions, batch.outputs
    if positions is None:
        positions = last.at[ids].get(**FILL, fill_value=-1) + 1 + ranks
        positions = first_per_token(positions, batch)
    if outputs is None:
        outputs = ranks + 1 == demand.at[ids].get(**FILL, fill_value=0)
        outputs = any_per_token(outputs, batch)
    return replace(batch, positions=positions, outputs=outputs & batch.valid)


def _find_faults(
    batch: Batch,
    ids: jax.Array,
    valid: jax.Array,
    ranks: tuple[jax.Array, jax.Array],
    last: jax.Array,
    has_diverged: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the `Reason`, expected position and actual position of each sequence's first fault."""
    rank, before = ranks
    position = repeat_per_sequence(batch.positions, batch)
    after = last.at[ids].get(**FILL, fill_value=-1)
    previous = jnp.where(rank == 0, after, position[before])
    # The arrays below are [M], with an entry for each pair of a token and a sequence; `worst` is
    # [Q].
    anywhere = (rank == 0) & (after < 0) & (position >= 0)  # an empty sequence starts anywhere
    right = ~valid | ((anywhere | (position == previous + 1)) & (position < END))
    negative = jnp.zeros_like(valid)
    if batch.tokens is not None:
        negative = valid & (repeat_per_sequence(batch.tokens, batch) < 0)
    right &= ~negative
    reason = jnp.select(
        [right, negative, rank == 0, position == previous, position < previous],
        [
            Reason.OK,
            Reason.NEGATIVE_TOKEN,
            Reason.NOT_CONTIGUOUS,
            Reason.DUPLICATE_POSITION,
            Reason.DECREASING_POSITION,
        ],
        Reason.POSITION_GAP,
    ).astype(jnp.int32)
    expected = previous + 1
    if has_diverged is not None:
        right, reason = right & ~has_diverged, jnp.where(has_diverged, Reason.DIVERGED, reason)
        expected = jnp.where(has_diverged, repeat_per_sequence(batch.sequences, batch), expected)
    count, end = last.shape[0], ids.shape[0]
    # The first fault of a sequence is reported.
    index = jnp.where(right, end, jnp.arange(end, dtype=jnp.int32))
    worst = jnp.full(count, end, jnp.int32).at[ids].min(index, **DROP)
    answer = ((reason, Reason.OK), (expected, 0), (position, 0))
    reason, expected, actual = (x.at[worst].get(**FILL, fill_value=fill) for x, fill in answer)
    return reason, expected, actual


def check_shared_tokens(spec: TableSpec, batch: Batch) -> None:
    """Raise a ValueError unless the cache supports the shared tokens of a batch."""
    if batch.shared_with is None:
        return
    if spec.max_rollback is not None:
        raise ValueError(
            f"expected tokens of one sequence each for a cache of kind {spec.kind!r}, got tokens "
            f"of several; compute the token once and fork (seq_cp)"
        )
    if not is_concrete(batch):
        return
    members, valid = (
        np.asarray(x).reshape(*batch.valid.shape, -1) for x in token_sequence_pairs(batch)
    )
    spec.sequence_ids(members[valid])
    stream = members // spec.sequences_per_stream
    in_other_stream = valid & (stream != stream[..., :1])
    if in_other_stream.any():
        ids = members[in_other_stream.any(axis=-1)][0]
        raise ValueError(
            f"expected the sequences of a token in one stream, got {ids[ids >= 0].tolist()}; give "
            f"each stream another token"
        )


def token_sequence_pairs(
    batch: Batch,
) -> tuple[PyTree[Int32[ArrayLike, "*M"]], PyTree[Bool[ArrayLike, "*M"]]]:
    """Return the sequence id of each pair of a token and a sequence, and a flag for each pair.

    The flag is False if the pair is padding.
    """
    if batch.shared_with is None:
        return batch.sequences, batch.valid
    xp = np if is_concrete(batch) else jnp
    # The first id of a token counts even if it is invalid; a later check reports it.
    more = xp.pad(
        batch.shared_with >= 0, [*((0, 0),) * batch.valid.ndim, (1, 0)], constant_values=True
    )
    ids = xp.concatenate([batch.sequences[..., None], batch.shared_with], axis=-1)
    valid = xp.asarray(batch.valid)[..., None] & more
    shape = (*batch.valid.shape[:-1], -1)
    return ids.reshape(shape), valid.reshape(shape)


def repeat_per_sequence(x: Shaped[Array, " B"], batch: Batch) -> Shaped[Array, " M"]:
    """Repeat the value of each token for each of its sequences."""
    return x if batch.shared_with is None else jnp.repeat(x, batch.shared_with.shape[-1] + 1)


def any_per_token(x: Bool[Array, " M"], batch: Batch) -> Bool[Array, " B"]:
    """Return for each token whether `x` is True for any of its sequences."""
    return x if batch.shared_with is None else jnp.any(x.reshape(batch.valid.shape[0], -1), axis=1)


def first_per_token(x: Shaped[Array, " M"], batch: Batch) -> Shaped[Array, " B"]:
    """Return for each token the value of its first sequence."""
    return x if batch.shared_with is None else x.reshape(batch.valid.shape[0], -1)[:, 0]


def find_diverged_pairs(
    table: CacheTable,
    ids: Int32[Array, " M"],
    ranks: tuple[Int32[Array, " M"], Int32[Array, " M"]],
    batch: Batch,
) -> Bool[Array, " M"]:
    """Return whether each sequence of a token has diverged from the first sequence of the token.

    Two sequences have diverged if the batch has different previous tokens for them. If the batch
    has no previous token for either, they have diverged unless they own the same cells.
    """
    spec, count = table.spec, table.spec.sequences
    # Axes: token, sequence of the token. `before` is an index among pairs, so its quotient is the
    # previous token of the sequence.
    rank, before, ids = (x.reshape(batch.valid.shape[0], -1) for x in (*ranks, ids))
    begins = rank == 0
    token, _ = divmod_nonnegative(before, ids.shape[1])
    token = jnp.where(begins, -1, token)
    first = jnp.broadcast_to(ids[:, :1], ids.shape)
    sequences = jnp.arange(count, dtype=jnp.int32)
    # At its first token in the batch, a sequence is compared with the first sequence of this token,
    # its partner. The stored cells of both must be equal.
    partner = sequences.at[jnp.where(begins, ids, count)].set(first, **DROP)
    (partner_stream, number), (own_stream, own_number) = (
        divmod_nonnegative(x, spec.sequences_per_stream) for x in (partner, sequences)
    )
    same = (partner_stream == own_stream) & table.owns_same_cells(
        jnp.where(partner_stream == own_stream, number, own_number)
    )
    matches = (token == token[:, :1]) & (~begins | same.at[ids].get(**FILL, fill_value=True))
    return ((ids < count) & ~matches).reshape(-1)


def num_required_cells(
    ids: jax.Array, rank: jax.Array, fits: jax.Array, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """Return the lowest id in the group of each sequence, and the number of cells of each group.

    Sequences form a group if they share their first token in the batch. At the lowest id of a
    group, the second array has the number of cells that the group requires. At all other ids, it
    has 0.
    """
    # The sequences of a group fit together or not at all.
    count = fits.shape[0]
    ids, rank = (x.reshape(batch.valid.shape[0], -1) for x in (ids, rank))
    ids = jnp.where(fits.at[ids].get(**FILL, fill_value=False), ids, count)
    lowest = jnp.min(ids, axis=1)
    root = jnp.arange(count, dtype=jnp.int32)
    # Axes of `ids` and `rank`: token, sequence of the token. Sequences that do not fit are padding.
    # Each token counts once, in the group of its lowest sequence.
    root = root.at[jnp.where(rank == 0, ids, count)].set(
        jnp.broadcast_to(lowest[:, None], ids.shape), **DROP
    )
    asks = root.at[lowest].get(**FILL, fill_value=count)
    return root, jnp.zeros(count, jnp.int32).at[asks].add(1, **DROP)
