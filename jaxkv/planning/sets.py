"""Tokens of several sequences: what must hold for them, and how their cells are counted.

A member is a token with one of its sequences. A batch of B tokens has `[M]` members: its tokens, or
where tokens may have n - 1 others B * n, token by token, of which those that are not there count as
padding.

The sequences of a token share all that comes before it: in the table they own the very same cells,
and in the batch the same token comes before it in each. Sets of sequences can only shrink from one
token to the next, so what a batch brings for the sequences of a first token is a tree.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import Batch
from jaxkv.places import divided, is_concrete
from jaxkv.spec import TableSpec


def check_sets(spec: TableSpec, batch: Batch) -> None:
    """Raise unless a cache may have the tokens of several sequences in a batch.

    Raises:
      ValueError: when it keeps states; or when a known set has an id that is none, or sequences of
        several streams.
    """
    if batch.shared_with is None:
        return
    if spec.max_rollback is not None:
        raise ValueError(
            f"wanted tokens of one sequence each, since a state belongs to one text, got a batch "
            f"with tokens of several for a cache of kind {spec.kind!r}: compute the token once "
            f"and fork (seq_cp)"
        )
    if not is_concrete(batch):
        return
    members, valid = (np.asarray(x).reshape(*batch.valid.shape, -1) for x in members_of(batch))
    spec.sequence_ids(members[valid])
    stream = members // spec.sequences_per_stream
    apart = valid & (stream != stream[..., :1])
    if apart.any():
        ids = members[apart.any(axis=-1)][0]
        raise ValueError(
            f"wanted the sequences of a token in one stream, got {ids[ids >= 0].tolist()}: give "
            f"each stream a token of its own"
        )


def members_of(batch: Batch) -> tuple[Any, Any]:
    """Return the sequence of each member, and whether it is there; both `[M]`, or `[R, T * n]`."""
    if batch.shared_with is None:
        return batch.sequences, batch.valid
    xp = np if is_concrete(batch) else jnp
    # The lowest one is meant to be there; if it is none of the cache, that is found out.
    more = xp.pad(
        batch.shared_with >= 0, [*((0, 0),) * batch.valid.ndim, (1, 0)], constant_values=True
    )
    ids = xp.concatenate([batch.sequences[..., None], batch.shared_with], axis=-1)
    there = xp.asarray(batch.valid)[..., None] & more
    shape = (*batch.valid.shape[:-1], -1)
    return ids.reshape(shape), there.reshape(shape)


def per_member(x: jax.Array, batch: Batch) -> jax.Array:
    """Return for each member what there is for its token, `[B]` to `[M]`."""
    return x if batch.shared_with is None else jnp.repeat(x, batch.shared_with.shape[-1] + 1)


def any_of(x: jax.Array, batch: Batch) -> jax.Array:
    """Return whether something holds for a member of each token, `[M]` to `[B]`."""
    return x if batch.shared_with is None else jnp.any(x.reshape(batch.valid.shape[0], -1), axis=1)


def first_of(x: jax.Array, batch: Batch) -> jax.Array:
    """Return what there is for the first member of each token, `[M]` to `[B]`."""
    return x if batch.shared_with is None else x.reshape(batch.valid.shape[0], -1)[:, 0]


def apart(
    table: Any, ids: jax.Array, ranks: tuple[jax.Array, jax.Array], batch: Batch
) -> jax.Array:
    """Return the members whose sequence does not share all that comes before with the first one.

    Args:
      table: of the cache.
      ids: `[M]` int32, the sequence of each member, Q for one that is not there.
      ranks: of the members, see `layout.turn_in_sequence`.
      batch: the tokens.

    Returns:
      `[M]` bool.
    """
    spec, count = table.spec, table.spec.sequences
    turn, before, ids = (x.reshape(batch.valid.shape[0], -1) for x in (*ranks, ids))
    begins = turn == 0
    token, _ = divided(before, ids.shape[1])
    token = jnp.where(begins, -1, token)
    first = jnp.broadcast_to(ids[:, :1], ids.shape)
    own = jnp.arange(count, dtype=jnp.int32)
    partner = own.at[jnp.where(begins, ids, count)].set(first, mode="drop")
    (there, number), (here, mine) = (divided(x, spec.sequences_per_stream) for x in (partner, own))
    same = (there == here) & table.owns_same_cells(jnp.where(there == here, number, mine))
    alike = (token == token[:, :1]) & (~begins | same.at[ids].get(mode="fill", fill_value=True))
    return ((ids < count) & ~alike).reshape(-1)


def wanted(
    ids: jax.Array, turn: jax.Array, fits: jax.Array, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """Count the tokens that each sequence brings, those that it shares with others once.

    Sequences that share a token find room together or not at all, so the lowest of them asks for
    all.

    Args:
      ids: `[M]` int32, the sequence of each member, Q for one that is not there.
      turn: `[M]` int32, the turn of each member in its sequence.
      fits: `[Q]` bool, the sequences that count.
      batch: the tokens.

    Returns:
      For each sequence the one that asks for it, `[Q]` int32; and how many tokens each asks for,
      `[Q]` int32.
    """
    count = fits.shape[0]
    ids, turn = (x.reshape(batch.valid.shape[0], -1) for x in (ids, turn))
    ids = jnp.where(fits.at[ids].get(mode="fill", fill_value=False), ids, count)
    lowest = jnp.min(ids, axis=1)
    root = jnp.arange(count, dtype=jnp.int32)
    root = root.at[jnp.where(turn == 0, ids, count)].set(
        jnp.broadcast_to(lowest[:, None], ids.shape), mode="drop"
    )
    asks = root.at[lowest].get(mode="fill", fill_value=count)
    return root, jnp.zeros(count, jnp.int32).at[asks].add(1, mode="drop")
