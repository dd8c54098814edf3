"""Which token of a batch is computed when, in rows padded to few shapes.

A batch whose values are known is laid out on the host. A traced one, its `rank_in_sequence`,
`order_tokens_first` and `gather_rows` are computed on the device.

Each `..._split` takes the sequence of every token, `[B]`, and the most tokens of a ubatch, and
returns one index array `[R, T]` for each ubatch: the batch index of each token, NO_SLOT for
padding. T is a power of two up to `ubatch_size`, so that few shapes are ever compiled; no ubatch
holds more than `ubatch_size` tokens that are not padding. Tokens of one sequence keep their order.

A token of several sequences is dealt with as one of the lowest of them. So tokens of one sequence
may be listed under two, and nothing is computed before what it follows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import Batch
from jaxkv.core.array_utils import is_concrete, next_power_of_two
from jaxkv.core.constants import NO_SLOT
from jaxkv.planning.checks import check_shared_tokens, token_sequence_pairs
from jaxkv.spec import TableSpec

if TYPE_CHECKING:
    from jaxtyping import ArrayLike, Bool, Int, Int32, PyTree


SplitBy = Literal["simple", "equal", "sequence"]
"""The ways to cut a batch."""

FEW = 8
"""Smallest bucket of outputs: 8 outputs cost what 1 does, and fewer shapes are compiled."""


def lay_out_batch(
    spec: TableSpec, batch: Batch, ubatch_size: int, split_by: SplitBy | None
) -> tuple[Batch, list[PyTree[Int32[ArrayLike, "R T"]]], int]:
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
    check_shared_tokens(spec, batch)
    if split_by is None:
        split_by = "equal" if spec.single_sequence_rows else "simple"
    if is_concrete(batch):
        return _lay_out_known_batch(spec, batch, ubatch_size, split_by)
    _check_nonempty(batch.valid.size)
    if batch.valid.ndim == 2:
        index = jnp.arange(batch.valid.size, dtype=jnp.int32).reshape(batch.valid.shape)
        index = jnp.take_along_axis(index, order_tokens_first(batch.valid), axis=1)
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
            f"a traced batch must fit one ubatch: expected at most {ubatch_size} tokens, got "
            f"{count}; plan it outside of jit, or raise ubatch_size"
        )
    (index,) = simple_split(np.zeros(count, np.int32), ubatch_size)
    num_outputs = (
        index.size if batch.outputs is not None else next_power_of_two(max(spec.sequences, FEW))
    )
    return _pad_batch(batch, index.size), [index], num_outputs


def _lay_out_known_batch(
    spec: TableSpec, batch: Batch, ubatch_size: int, split_by: SplitBy
) -> tuple[Batch, list[PyTree], int]:
    """Lay out a batch whose values are known; returns what `lay_out_batch` does."""
    batch, valid_index = _flat_batch(spec, batch)
    sequences = batch.sequences[valid_index]
    after = (
        None
        if batch.shared_with is None
        else preceding_tokens(sequences, batch.shared_with[valid_index])
    )
    parts = split_batch(split_by, sequences, ubatch_size, after)
    parts = [_pad_row_count(part, spec) for part in parts]
    if batch.outputs is None:
        members, valid = token_sequence_pairs(batch)
        num_outputs = np.unique(members[valid]).size
    else:
        flags = np.append(batch.outputs[valid_index], False)
        num_outputs = max(flags[np.minimum(part, valid_index.size)].sum() for part in parts)
    parts = [_to_batch_indices(valid_index, part) for part in parts]
    return (
        _pad_batch(batch, next_power_of_two(batch.valid.size)),
        parts,
        next_power_of_two(max(int(num_outputs), FEW)),
    )


def layout_single_ubatch(
    spec: TableSpec, batch: Batch
) -> tuple[Batch, PyTree[Int32[ArrayLike, "R T"]]]:
    """Lay a batch out as one ubatch, however long, for what must not be cut.

    Args:
      spec: of the cache.
      batch: the tokens, each of one sequence, and which of them are outputs.

    Returns:
      The flat batch and the indices into it, `[R, T]` int32, as of `lay_out_batch`: a row for each
      sequence, so that no encoder compares tokens of two. Traced, the rows are those of the batch.
    """
    if not is_concrete(batch):
        flat, (index,), _ = lay_out_batch(spec, batch, batch.valid.size, None)
        return flat, index
    flat, valid_index = _flat_batch(spec, batch)
    rows = sequence_split(flat.sequences[valid_index], next_power_of_two(valid_index.size))
    longest = max(row.shape[1] for row in rows)
    padded = [
        np.pad(row, [(0, 0), (0, longest - row.shape[1])], constant_values=NO_SLOT) for row in rows
    ]
    part = _pad_row_count(np.concatenate(padded), spec)
    return _pad_batch(flat, next_power_of_two(flat.valid.size)), _to_batch_indices(
        valid_index, part
    )


def _flat_batch(spec: TableSpec, batch: Batch) -> tuple[Batch, np.ndarray]:
    """Return a batch whose values are known as a flat list, and which tokens of it are there.

    The latter are `[n]` integers, the indices of the valid tokens, in their order.
    """
    axes, count = batch.valid.ndim, batch.valid.size
    batch = jax.tree.map(lambda x: np.asarray(x).reshape(count, *x.shape[axes:]), batch)
    valid_index = np.flatnonzero(batch.valid)
    _check_nonempty(valid_index.size)
    spec.sequence_ids(batch.sequences[valid_index])
    return batch, valid_index


def _check_nonempty(tokens: int) -> None:
    if not tokens:
        raise ValueError(
            "nothing to plan: the batch has no valid token (batch.keep_sequences(plan.fits) has "
            "none left where no sequence fits)"
        )


def _to_batch_indices(valid_index: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Turn the numbers of a split, which counts tokens that are there, into batch indices.

    `valid_index` is `[n]`, see `_flat_batch`; `part` and what is returned are `[R, T]` int32.
    """
    index = np.append(valid_index, NO_SLOT).astype(np.int32)
    return index[np.minimum(part, valid_index.size)]


def _pad_row_count(part: np.ndarray, spec: TableSpec) -> np.ndarray:
    """Pad the rows of a ubatch to a power of two, or to all sequences, so that few shapes occur.

    `part` and what is returned are `[R, T]` int32, NO_SLOT for padding.
    """
    num_rows = next_power_of_two(len(part))
    if spec.single_sequence_rows:
        num_rows = max(min(num_rows, spec.sequences), len(part))
    return np.pad(part, [(0, num_rows - len(part)), (0, 0)], constant_values=NO_SLOT)


def _pad_batch(batch: Batch, size: int) -> Batch:
    """Pad a flat batch, `[B]` to `[size]`, with tokens that are not valid."""
    xp = np if is_concrete(batch) else jnp
    extra = size - batch.valid.shape[0]
    return jax.tree.map(lambda x: xp.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1)), batch)


def order_tokens_first(valid: jax.Array) -> jax.Array:
    """Return an order of each row, `[R, T]` int32, that brings padding behind the tokens.

    A row of a recurrent cache needs it, wherever its padding came.
    """
    return jnp.argsort(~valid, axis=1, stable=True).astype(jnp.int32)


def rank_in_sequence(
    sequences: PyTree[Int[ArrayLike, "*M"]], valid: PyTree[Bool[ArrayLike, "*M"]]
) -> tuple[PyTree[Int32[ArrayLike, "*M"]], PyTree[Int32[ArrayLike, "*M"]]]:
    """Return the turn of each token in its sequence, in the order they come.

    Args:
      sequences: `[B]` int32; NumPy in, NumPy out, so that a batch known to the host costs nothing.
      valid: `[B]` bool; the numbers of other tokens mean nothing.

    Returns:
      `[B]` int32, how many tokens of its sequence come before a token; and `[B]`
      int32, the index of the nearest one, the token's own if there is none.

    >>> rank_in_sequence(np.array([7, 8, 7, 7]), np.ones(4, bool))
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


def preceding_tokens(sequences: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the token that each token of several sequences follows, `[B]` int32; -1 for none.

    >>> preceding_tokens(np.array([0, 0, 1]), np.array([[1], [-1], [-1]]))
    array([-1,  0,  0], dtype=int32)
    """
    ids = np.concatenate([sequences[:, None], others], axis=1)
    ranks, before = (
        x.reshape(ids.shape) for x in rank_in_sequence(ids.reshape(-1), ids.reshape(-1) >= 0)
    )
    return np.where(ranks[:, 0] == 0, -1, before[:, 0] // ids.shape[1]).astype(np.int32)


def gather_rows(batch: Batch, index: jax.Array) -> Batch:
    """Lay tokens of a flat batch out in rows; `index`, `[R, T]`, is NO_SLOT for padding.

    Padding is token 0: that of another text may be one which the vocabulary has not.
    """

    def gather_field(field: jax.Array) -> jax.Array:
        return field[jnp.minimum(index, field.shape[0] - 1)]

    laid = jax.tree.map(gather_field, batch)
    valid = laid.valid & (index != NO_SLOT)
    tokens = None if laid.tokens is None else jnp.where(valid, laid.tokens, 0)
    return replace(laid, tokens=tokens, valid=valid)


def split_batch(
    split_by: SplitBy, sequences: np.ndarray, ubatch_size: int, after: np.ndarray | None = None
) -> list[np.ndarray]:
    """Cut a batch in the way that is asked for; see `equal_split` for `after`.

    Raises:
      ValueError: when there is no such way.

    >>> split_batch("even", np.array([0, 0]), 1)
    Traceback (most recent call last):
    ...
    ValueError: expected split_by of 'simple', 'equal' or 'sequence', got 'even'
    """
    ways = {
        "simple": simple_split,
        "equal": partial(equal_split, after=after),
        "sequence": sequence_split,
    }
    if split_by not in ways:
        raise ValueError(f"expected split_by of 'simple', 'equal' or 'sequence', got {split_by!r}")
    return ways[split_by](sequences, ubatch_size)


def simple_split(sequences: np.ndarray, ubatch_size: int) -> list[np.ndarray]:
    """Cut in the order the tokens come, whatever their sequences; one row.

    >>> ids = np.array([0, 0, 0, 1, 1])
    >>> [(part != NO_SLOT).sum().item() for part in simple_split(ids, 4)]
    [4, 1]

    llama.cpp: `split_simple`.
    """
    index = np.arange(len(sequences), dtype=np.int32)
    starts = range(0, len(sequences), ubatch_size)
    return [_pad_row_lengths([index[i : i + ubatch_size]], ubatch_size) for i in starts]


def sequence_split(sequences: np.ndarray, ubatch_size: int) -> list[np.ndarray]:
    """Cut so that a ubatch holds tokens of one sequence only; one row.

    >>> ids = np.array([0, 1, 0, 1, 1])
    >>> [part[part != NO_SLOT].tolist() for part in sequence_split(ids, 2)]
    [[0, 2], [1, 3], [4]]

    llama.cpp: `split_seq`.
    """
    parts = []
    for index in _indices_by_sequence(sequences):
        starts = range(0, len(index), ubatch_size)
        parts += [_pad_row_lengths([index[i : i + ubatch_size]], ubatch_size) for i in starts]
    return parts


def equal_split(
    sequences: np.ndarray, ubatch_size: int, *, after: np.ndarray | None = None
) -> list[np.ndarray]:
    """Cut so that a ubatch holds equally many tokens of several sequences; one row for each.

    Sequences take part in the order of their first token that is left, as many as there is room
    for, and each gives as many tokens as the shortest of them has and `ubatch_size` allows. One
    whose first token follows another that is not computed yet, nor in this ubatch, waits.

    Args:
      sequences: `[B]` int32.
      ubatch_size: the most tokens of a ubatch.
      after: `[B]` int32, the token that each follows, -1 for none; None where it is always one of
        the same sequence.

    >>> ids = np.array([0, 0, 0, 0, 1, 1])
    >>> [part.tolist() for part in equal_split(ids, 8)]
    [[[0, 1], [4, 5]], [[2, 3]]]

    Here sequence 1 goes on after the second token of sequence 0:

    >>> after = np.array([-1, 0, 1, 2, 1, 4])
    >>> [part.tolist() for part in equal_split(ids, 8, after=after)]
    [[[0, 1], [4, 5]], [[2, 3]]]
    >>> [part.tolist() for part in equal_split(ids, 2, after=after)]
    [[[0, 1]], [[2], [4]], [[3], [5]]]

    llama.cpp: `split_equal`.
    """
    rest = _indices_by_sequence(sequences)
    parts = []
    while rest:
        rest.sort(key=lambda index: index[0])
        taking = rest[:ubatch_size]
        length = _num_tokens_from_each(taking, ubatch_size)
        while after is not None:
            waiting = set(np.concatenate(rest)) - set(np.concatenate([i[:length] for i in taking]))
            ready = [index for index in taking if after[index[0]] not in waiting]
            if len(ready) == len(taking):
                break
            taking, length = ready, _num_tokens_from_each(ready, ubatch_size)
        parts.append(_pad_row_lengths([index[:length] for index in taking], ubatch_size))
        starts = {index[0] for index in taking}
        rest = [index[length:] if index[0] in starts else index for index in rest]
        rest = [index for index in rest if len(index)]
    return parts


def _num_tokens_from_each(taking: list[np.ndarray], ubatch_size: int) -> int:
    """Return how many tokens each of some sequences, `[n]` int32 each, gives."""
    return min(ubatch_size // len(taking), min(map(len, taking)))


def _indices_by_sequence(sequences: np.ndarray) -> list[np.ndarray]:
    """List the tokens of each sequence, `[n]` int32, in the order in which sequences appear."""
    _, firsts = np.unique(sequences, return_index=True)
    return [np.flatnonzero(sequences == sequences[i]).astype(np.int32) for i in sorted(firsts)]


def _pad_row_lengths(rows: list[np.ndarray], ubatch_size: int) -> np.ndarray:
    """Pad rows of equal length, `[n]` int32 each, to a bucket; `[R, T]` int32."""
    length = len(rows[0])
    part = np.full((len(rows), min(next_power_of_two(length), ubatch_size)), NO_SLOT, np.int32)
    part[:, :length] = rows
    return part
