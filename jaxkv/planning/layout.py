"""Which token of a batch is computed when, in rows padded to few shapes.

A batch whose values are known is laid out on the host. A traced one, its `turn_in_sequence`,
`tokens_first` and `in_rows` are computed on the device.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import Batch
from jaxkv.places import NO_SLOT, is_concrete, next_power_of_two
from jaxkv.planning.sets import check_sets, members_of
from jaxkv.planning.splits import SplitBy, sequence_split, simple_split, split_known
from jaxkv.spec import TableSpec

FEW = 8
"""Smallest bucket of outputs: 8 outputs cost what 1 does, and fewer shapes are compiled."""


def layout(
    spec: TableSpec, batch: Batch, ubatch_size: int, split_by: SplitBy | None
) -> tuple[Batch, list[Any], int]:
    """Decide which token is computed when; by shapes alone where the batch is traced.

    Args:
      spec: of the cache.
      batch: the tokens.
      ubatch_size: the most tokens that are computed at once.
      split_by: how they are cut; None leaves it to the cache.

    Returns:
      The batch as a flat list of a bucketed length; for each ubatch the indices into it, `[R, T]`
      int32, NO_SLOT for padding; and how many outputs the ubatch with the most of them has, in a
      bucket too.
    """
    check_sets(spec, batch)
    if split_by is None:
        split_by = "equal" if spec.single_sequence_rows else "simple"
    if is_concrete(batch):
        return _layout_known(spec, batch, ubatch_size, split_by)
    _check_some(batch.valid.size)
    if batch.valid.ndim == 2:
        index = jnp.arange(batch.valid.size, dtype=jnp.int32).reshape(batch.valid.shape)
        index = jnp.take_along_axis(index, tokens_first(batch.valid), axis=1)
        batch = jax.tree.map(lambda x: x.reshape(index.size, *x.shape[2:]), batch)
        return batch, [index], index.size
    count = batch.valid.shape[0]
    if spec.single_sequence_rows:
        raise ValueError(
            f"a traced batch must come in rows [R, T] here, one for each sequence, got a list of "
            f"{count} tokens; plan it outside of jit, or take plan_step for one token each"
        )
    if count > ubatch_size:
        raise ValueError(
            f"a traced batch must fit one ubatch: wanted at most {ubatch_size} tokens, got "
            f"{count}; plan it outside of jit, or raise ubatch_size"
        )
    (index,) = simple_split(np.zeros(count, np.int32), ubatch_size)
    most = index.size if batch.outputs is not None else next_power_of_two(max(spec.sequences, FEW))
    return _pad(batch, index.size), [index], most


def _layout_known(
    spec: TableSpec, batch: Batch, ubatch_size: int, split_by: SplitBy
) -> tuple[Batch, list[np.ndarray], int]:
    """Lay out a batch whose values are known; returns what `layout` does."""
    batch, there = _known(spec, batch)
    named = batch.sequences[there]
    after = None if batch.shared_with is None else follows(named, batch.shared_with[there])
    parts = split_known(split_by, named, ubatch_size, after)
    parts = [_few_rows(part, spec) for part in parts]
    if batch.outputs is None:
        members, valid = members_of(batch)
        most = np.unique(members[valid]).size
    else:
        flags = np.append(batch.outputs[there], False)
        most = max(flags[np.minimum(part, there.size)].sum() for part in parts)
    parts = [_indices(there, part) for part in parts]
    return (
        _pad(batch, next_power_of_two(batch.valid.size)),
        parts,
        next_power_of_two(max(int(most), FEW)),
    )


def layout_whole(spec: TableSpec, batch: Batch) -> tuple[Batch, Any]:
    """Lay a batch out as one ubatch, however long, for what must not be cut.

    Args:
      spec: of the cache.
      batch: the tokens, each of one sequence, and which of them are outputs.

    Returns:
      The flat batch and the indices into it, `[R, T]` int32, as of `layout`: a row for each
      sequence, so that no encoder compares tokens of two. Traced, the rows are those of the batch.
    """
    if not is_concrete(batch):
        flat, (index,), _ = layout(spec, batch, batch.valid.size, None)
        return flat, index
    flat, there = _known(spec, batch)
    rows = sequence_split(flat.sequences[there], next_power_of_two(there.size))
    longest = max(row.shape[1] for row in rows)
    padded = [
        np.pad(row, [(0, 0), (0, longest - row.shape[1])], constant_values=NO_SLOT) for row in rows
    ]
    part = _few_rows(np.concatenate(padded), spec)
    return _pad(flat, next_power_of_two(flat.valid.size)), _indices(there, part)


def _known(spec: TableSpec, batch: Batch) -> tuple[Batch, np.ndarray]:
    """Return a batch whose values are known as a flat list, and which tokens of it are there.

    The latter are `[n]` integers, the indices of the valid tokens, in their order.
    """
    axes, count = batch.valid.ndim, batch.valid.size
    batch = jax.tree.map(lambda x: np.asarray(x).reshape(count, *x.shape[axes:]), batch)
    there = np.flatnonzero(batch.valid)
    _check_some(there.size)
    spec.sequence_ids(batch.sequences[there])
    return batch, there


def _check_some(tokens: int) -> None:
    if not tokens:
        raise ValueError(
            "nothing to plan: the batch has no valid token (batch.keep_sequences(plan.fits) has "
            "none left where no sequence fits)"
        )


def _indices(there: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Turn the numbers of a split, which counts tokens that are there, into batch indices.

    `there` is `[n]`, see `_known`; `part` and what is returned are `[R, T]` int32.
    """
    index = np.append(there, NO_SLOT).astype(np.int32)
    return index[np.minimum(part, there.size)]


def _few_rows(part: np.ndarray, spec: TableSpec) -> np.ndarray:
    """Pad the rows of a ubatch to a power of two, or to all sequences, so that few shapes occur.

    `part` and what is returned are `[R, T]` int32, NO_SLOT for padding.
    """
    wanted = next_power_of_two(len(part))
    if spec.single_sequence_rows:
        wanted = max(min(wanted, spec.sequences), len(part))
    return np.pad(part, [(0, wanted - len(part)), (0, 0)], constant_values=NO_SLOT)


def _pad(batch: Batch, size: int) -> Batch:
    """Pad a flat batch, `[B]` to `[size]`, with tokens that are not valid."""
    xp = np if is_concrete(batch) else jnp
    extra = size - batch.valid.shape[0]
    return jax.tree.map(lambda x: xp.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1)), batch)


def tokens_first(valid: jax.Array) -> jax.Array:
    """Return an order of each row, `[R, T]` int32, that brings padding behind the tokens.

    A row of a recurrent cache needs it, wherever its padding came.
    """
    return jnp.argsort(~valid, axis=1, stable=True).astype(jnp.int32)


def turn_in_sequence(sequences: Any, valid: Any) -> tuple[Any, Any]:
    """Return the turn of each token in its sequence, in the order they come.

    Args:
      sequences: `[B]` int32; NumPy in, NumPy out, so that a batch known to the host costs nothing.
      valid: `[B]` bool; the numbers of other tokens mean nothing.

    Returns:
      `[B]` int32, how many tokens of its sequence come before a token; and `[B]`
      int32, the index of the nearest one, the token's own if there is none.

    >>> turn_in_sequence(np.array([7, 8, 7, 7]), np.ones(4, bool))
    (array([0, 0, 1, 2], dtype=int32), array([0, 1, 0, 2], dtype=int32))
    """
    xp = np if is_concrete(sequences, valid) else jnp
    index = xp.arange(sequences.shape[0], dtype=np.int32)
    ids = xp.where(valid, sequences, NO_SLOT)
    order = xp.argsort(ids, stable=True).astype(np.int32)
    ids = ids[order]
    ranks = index - xp.searchsorted(ids, ids).astype(np.int32)
    before = xp.where(ranks == 0, order, order[index - 1])
    back = xp.argsort(order)
    return ranks[back], before[back]


def follows(sequences: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the token that each token of several sequences follows, `[B]` int32; -1 for none.

    >>> follows(np.array([0, 0, 1]), np.array([[1], [-1], [-1]]))
    array([-1,  0,  0], dtype=int32)
    """
    ids = np.concatenate([sequences[:, None], others], axis=1)
    ranks, before = (
        x.reshape(ids.shape) for x in turn_in_sequence(ids.reshape(-1), ids.reshape(-1) >= 0)
    )
    return np.where(ranks[:, 0] == 0, -1, before[:, 0] // ids.shape[1]).astype(np.int32)


def in_rows(batch: Batch, index: jax.Array) -> Batch:
    """Lay tokens of a flat batch out in rows; `index`, `[R, T]`, is NO_SLOT for padding.

    Padding is token 0: that of another text may be one which the vocabulary has not.
    """

    def take(field: jax.Array) -> jax.Array:
        return field[jnp.minimum(index, field.shape[0] - 1)]

    laid = jax.tree.map(take, batch)
    valid = laid.valid & (index != NO_SLOT)
    tokens = None if laid.tokens is None else jnp.where(valid, laid.tokens, 0)
    return replace(laid, tokens=tokens, valid=valid)
