"""Layout of a batch in ubatches: index arrays `[R, T]` of batch indices, NO_SLOT for padding.

Tokens of a sequence stay in order. A token of several sequences is in the row of the sequence with
the lowest id.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import Batch
from jaxkv.core.array_utils import is_concrete, next_power_of_two
from jaxkv.core.constants import NO_SLOT
from jaxkv.core.partitioning import current_mesh
from jaxkv.planning.checks import check_shared_tokens, token_sequence_pairs
from jaxkv.spec import TableSpec

if TYPE_CHECKING:
    from jaxtyping import ArrayLike, Bool, Int, Int32, PyTree

    from jaxkv.table import CacheTable

SplitBy = Literal["simple", "equal", "sequence"]
"""How a batch is cut into ubatches, see `init_batch`."""

MIN_OUTPUTS = 8
"""Smallest padded number of outputs: 8 outputs cost as much as 1, and fewer shapes are compiled."""


CHEAP_SIZE = 64
"""Size of a ubatch up to which padding costs less than the compilation of another shape."""


def lay_out_batch(
    spec: TableSpec, batch: Batch, ubatch_size: int, split_by: SplitBy | None
) -> tuple[Batch, list[PyTree[Int32[ArrayLike, "R T"]]], int]:
    """Assign the tokens of a batch to ubatches; a traced batch becomes one ubatch.

    Returns the padded flat batch, the batch indices `[R, T]` of each ubatch, and an upper bound of
    the number of outputs of a ubatch.
    """
    check_shared_tokens(spec, batch)
    if is_concrete(batch):
        return _lay_out_concrete_batch(spec, batch, ubatch_size, split_by)
    _check_nonempty(batch.valid.size)
    if batch.valid.ndim == 2:
        index = jnp.arange(batch.valid.size, dtype=jnp.int32).reshape(batch.valid.shape)
        index = jnp.take_along_axis(index, order_tokens_first(batch.valid), axis=1)
        num_outputs = _max_outputs(spec, batch)
        batch = jax.tree.map(lambda x: x.reshape(index.size, *x.shape[2:]), batch)
        return batch, [index], num_outputs
    count = batch.valid.shape[0]
    if spec.single_sequence_rows:
        raise ValueError(
            f"expected rows [R, T] of a traced batch, one for each sequence, got a list of {count} "
            f"tokens; plan it outside of jit, or call plan_step for one token each"
        )
    if count > ubatch_size:
        raise ValueError(
            f"expected at most {ubatch_size} tokens of a traced batch, one ubatch, got {count}; "
            f"plan it outside of jit, or pass ubatch_size={count}"
        )
    (index,) = simple_split(np.zeros(count, np.int32), ubatch_size)
    return _pad_batch(batch, index.size), [index], _max_outputs(spec, batch)


def _max_outputs(spec: TableSpec, batch: Batch) -> int:
    most = size = batch.valid.size
    if batch.outputs is None:
        ids = [ids for ids in (batch.sequences, batch.shared_with) if ids is not None]
        known = (
            np.unique(np.concatenate([np.asarray(x).reshape(-1) for x in ids]))
            if is_concrete(ids)
            else None
        )
        most = spec.sequences if known is None else np.sum(known >= 0)
    elif is_concrete(batch.outputs):
        most = np.sum(np.asarray(batch.outputs))
    return min(next_power_of_two(max(int(most), MIN_OUTPUTS)), size)


def _lay_out_concrete_batch(
    spec: TableSpec, batch: Batch, ubatch_size: int, split_by: SplitBy | None
) -> tuple[Batch, list[PyTree], int]:
    batch, valid_index = flat_batch(spec, batch)
    sequences = batch.sequences[valid_index]
    after = (
        None
        if batch.shared_with is None
        else preceding_tokens(sequences, batch.shared_with[valid_index])
    )
    by_default: SplitBy = "equal" if spec.single_sequence_rows else "simple"
    parts = split_batch(split_by or by_default, sequences, ubatch_size, after)
    fits = valid_index.size <= ubatch_size and after is None and _needs_same_cells_in_any_cut(spec)
    if split_by is None and spec.single_sequence_rows and fits and len(parts) > 1:
        padded = _pad_rows_to_longest(_indices_by_sequence(sequences), ubatch_size)
        # One ubatch replaces several if it has at most a quarter more elements than the ubatches
        # together.
        few = 1.25 * sum(part.size for part in parts)
        if padded.size <= max(min(few, ubatch_size), CHEAP_SIZE):
            parts = [padded]
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
        next_power_of_two(max(int(num_outputs), MIN_OUTPUTS)),
    )


def _needs_same_cells_in_any_cut(spec: TableSpec) -> bool:
    """Return whether a batch requires equally many cells for any division into ubatches."""
    evicts = dict(spec.details).get("window") is not None and spec.ubatch_size is None
    return not evicts and all(map(_needs_same_cells_in_any_cut, spec.parts))


def layout_single_ubatch(
    spec: TableSpec, batch: Batch
) -> tuple[Batch, PyTree[Int32[ArrayLike, "R T"]]]:
    """Arrange a batch as one ubatch of any length, for batches that must not be cut."""
    # Each sequence has its own row, so an encoder never mixes tokens of two sequences.
    if not is_concrete(batch):
        flat, (index,), _ = lay_out_batch(spec, batch, batch.valid.size, None)
        return flat, index
    flat, valid_index = flat_batch(spec, batch)
    size = next_power_of_two(valid_index.size)
    rows = _pad_rows_to_longest(_indices_by_sequence(flat.sequences[valid_index]), size)
    part = _pad_row_count(rows, spec)
    return _pad_batch(flat, next_power_of_two(flat.valid.size)), _to_batch_indices(
        valid_index, part
    )


def flat_batch(spec: TableSpec, batch: Batch) -> tuple[Batch, np.ndarray]:
    """Flatten a concrete batch; also return the batch indices of valid tokens, `[n]`."""
    axes, count = batch.valid.ndim, batch.valid.size
    batch = jax.tree.map(lambda x: np.asarray(x).reshape(count, *x.shape[axes:]), batch)
    valid_index = np.flatnonzero(batch.valid)
    _check_nonempty(valid_index.size)
    spec.sequence_ids(batch.sequences[valid_index])
    return batch, valid_index


def _check_nonempty(tokens: int) -> None:
    if not tokens:
        raise ValueError(
            "expected a batch with a valid token, got none; check any(plan.fits) before "
            "batch.keep_sequences(plan.fits)"
        )


def _to_batch_indices(valid_index: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Convert `part`, indices `[R, T]` into `valid_index`, to batch indices."""
    index = np.append(valid_index, NO_SLOT).astype(np.int32)
    return index[np.minimum(part, valid_index.size)]


def _pad_row_count(part: np.ndarray, spec: TableSpec) -> np.ndarray:
    """Add rows of padding up to a power of two, so that few shapes are compiled."""
    num_rows = next_power_of_two(len(part))
    if spec.single_sequence_rows:
        num_rows = min(num_rows, spec.sequences)
    return np.pad(part, [(0, num_rows - len(part)), (0, 0)], constant_values=NO_SLOT)


def _pad_batch(batch: Batch, size: int) -> Batch:
    xp = np if is_concrete(batch) else jnp
    extra = size - batch.valid.shape[0]
    return jax.tree.map(lambda x: xp.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1)), batch)


def count_rows(table: CacheTable, rows: int, tokens: int) -> int:
    """Return the number of rows of a ubatch `[rows, tokens]` on the current mesh.

    If the cache has states and devices split the streams, the result is Q: each device computes the
    rows of its streams, and sends no state. The number of rows is unchanged if a device would
    compute more rows of several tokens than before.
    """
    spec = table.spec
    mesh = None if spec.max_rollback is None else current_mesh(table.sharding_rules)
    if mesh is None or table.sharding_rules is None:
        return rows
    axes = table.sharding_rules.split(mesh, streams=spec.streams)["streams"]
    devices = math.prod(mesh.shape[axis] for axis in axes)
    is_cheap = tokens == 1 or spec.sequences <= devices * rows
    return max(rows, spec.sequences) if devices > 1 and is_cheap else rows


def order_tokens_first(valid: jax.Array) -> jax.Array:
    """Return indices that move padding to the end of each row, `[R, T]`, for recurrent caches."""
    return jnp.argsort(~valid, axis=1, stable=True).astype(jnp.int32)


def rank_in_sequence(
    sequences: PyTree[Int[ArrayLike, "*M"]], valid: PyTree[Bool[ArrayLike, "*M"]]
) -> tuple[PyTree[Int32[ArrayLike, "*M"]], PyTree[Int32[ArrayLike, "*M"]]]:
    """Return for each token the number of earlier tokens of the same sequence.

    The second result is the index of the previous token of the same sequence; the first token of a
    sequence gets its own index. Results of tokens that are not valid are undefined.

    >>> rank_in_sequence(np.array([7, 8, 7, 7]), np.ones(4, bool))
    (array([0, 0, 1, 2], dtype=int32), array([0, 1, 0, 2], dtype=int32))
    """
    xp = np if is_concrete(sequences, valid) else jnp
    index = xp.arange(sequences.shape[0], dtype=np.int32)
    # A stable sort by sequence keeps the order of tokens; padding comes last. The rank is the
    # distance to the first token of the sequence, which `searchsorted` finds. `back` undoes the
    # sort.
    ids = xp.where(valid, sequences, NO_SLOT)
    order = xp.argsort(ids, stable=True).astype(np.int32)
    ids = ids[order]
    ranks = index - xp.searchsorted(ids, ids).astype(np.int32)
    before = xp.where(ranks == 0, order, order[index - 1])
    back = xp.argsort(order)
    return ranks[back], before[back]


def preceding_tokens(sequences: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return, for token i, the index of the previous token that belongs to `sequences[i]`.

    The result is -1 if there is no such token. Token i belongs to `sequences[i]` and to the
    sequences in `others[i]` that are not negative.

    >>> preceding_tokens(np.array([2, 0, 0, 1]), np.array([[-1], [1], [-1], [-1]]))
    array([-1, -1,  1,  1], dtype=int32)
    """
    ids = np.concatenate([sequences[:, None], others], axis=1)
    ranks, before = (
        x.reshape(ids.shape) for x in rank_in_sequence(ids.reshape(-1), ids.reshape(-1) >= 0)
    )
    return np.where(ranks[:, 0] == 0, -1, before[:, 0] // ids.shape[1]).astype(np.int32)


def gather_rows(batch: Batch, index: jax.Array) -> Batch:
    """Arrange the tokens of a flat batch in rows: `index` has the batch index of each token."""

    def gather_field(field: jax.Array) -> jax.Array:
        return field.at[index].get(mode="clip", wrap_negative_indices=False)

    laid = jax.tree.map(gather_field, batch)
    valid = laid.valid & (index != NO_SLOT)
    tokens = None if laid.tokens is None else jnp.where(valid, laid.tokens, 0)
    return replace(laid, tokens=tokens, valid=valid)


def split_batch(
    split_by: SplitBy, sequences: np.ndarray, ubatch_size: int, after: np.ndarray | None = None
) -> list[np.ndarray]:
    """Cut a batch with the function named by `split_by`; raise a ValueError for unknown names.

    >>> split_batch("even", np.array([0, 0]), 1)
    Traceback (most recent call last):
    ValueError: expected split_by of 'simple', 'equal' or 'sequence', got 'even'; pass ...
    """
    ways = {
        "simple": simple_split,
        "equal": partial(equal_split, after=after),
        "sequence": sequence_split,
    }
    if split_by not in ways:
        raise ValueError(
            f"expected split_by of 'simple', 'equal' or 'sequence', got {split_by!r}; pass one "
            "of them"
        )
    return ways[split_by](sequences, ubatch_size)


def simple_split(sequences: np.ndarray, ubatch_size: int) -> list[np.ndarray]:
    """Cut a batch in token order; each ubatch is one row (llama.cpp: `split_simple`).

    >>> ids = np.array([0, 0, 0, 1, 1])
    >>> [(part != NO_SLOT).sum().item() for part in simple_split(ids, 4)]
    [4, 1]
    """
    index = np.arange(len(sequences), dtype=np.int32)
    starts = range(0, len(sequences), ubatch_size)
    return [_pad_row_lengths([index[i : i + ubatch_size]], ubatch_size) for i in starts]


def sequence_split(sequences: np.ndarray, ubatch_size: int) -> list[np.ndarray]:
    """Cut a batch into ubatches of one row and one sequence each (llama.cpp: `split_seq`).

    >>> ids = np.array([0, 1, 0, 1, 1])
    >>> [part[part != NO_SLOT].tolist() for part in sequence_split(ids, 2)]
    [[0, 2], [1, 3], [4]]
    """
    parts = []
    for index in _indices_by_sequence(sequences):
        starts = range(0, len(index), ubatch_size)
        parts += [_pad_row_lengths([index[i : i + ubatch_size]], ubatch_size) for i in starts]
    return parts


def equal_split(
    sequences: np.ndarray, ubatch_size: int, *, after: np.ndarray | None = None
) -> list[np.ndarray]:
    """Cut a batch into ubatches with rows of equal length; each row has tokens of one sequence.

    A ubatch has at most `ubatch_size` sequences: those whose next tokens come first in the batch.
    The length of all rows is the smallest number of remaining tokens of these sequences, but at
    most `ubatch_size` // R. The argument `after` is the result of `preceding_tokens`. With `after`,
    a ubatch has no tokens of a sequence if the token that precedes them would be in a later ubatch.
    llama.cpp: `split_equal`.

    >>> ids = np.array([0, 0, 0, 0, 1, 1])
    >>> [part.tolist() for part in equal_split(ids, 8)]
    [[[0, 1], [4, 5]], [[2, 3]]]

    The first two tokens of sequence 0 also belong to sequence 1:

    >>> after = np.array([-1, 0, 1, 2, 1, 4])
    >>> [part.tolist() for part in equal_split(ids, 2, after=after)]
    [[[0, 1]], [[2], [4]], [[3], [5]]]
    """
    rest = _indices_by_sequence(sequences)
    parts = []
    while rest:
        rest.sort(key=lambda index: index[0])
        taking = rest[:ubatch_size]
        length = _num_tokens_from_each(taking, ubatch_size)
        # Without some sequences, the others may get longer rows, so the check is repeated. The
        # sequence of the lowest remaining token is always ready: the token before it has a lower
        # index, and is therefore in an earlier ubatch.
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
    return min(ubatch_size // len(taking), min(map(len, taking)))


def _indices_by_sequence(sequences: np.ndarray) -> list[np.ndarray]:
    """Return the token indices of each sequence, `[n]` int32, in order of first appearance."""
    _, firsts = np.unique(sequences, return_index=True)
    return [np.flatnonzero(sequences == sequences[i]).astype(np.int32) for i in sorted(firsts)]


def _pad_rows_to_longest(rows: list[np.ndarray], ubatch_size: int) -> np.ndarray:
    """Pad rows to the longest length, rounded up to a power of two, at most `ubatch_size`."""
    longest = min(next_power_of_two(max(map(len, rows))), ubatch_size)
    return np.stack([np.pad(x, (0, longest - len(x)), constant_values=NO_SLOT) for x in rows])


def _pad_row_lengths(rows: list[np.ndarray], ubatch_size: int) -> np.ndarray:
    """Pad rows of equal length to a power of two, at most `ubatch_size`; return `[R, T]`."""
    length = len(rows[0])
    part = np.full((len(rows), min(next_power_of_two(length), ubatch_size)), NO_SLOT, np.int32)
    part[:, :length] = rows
    return part
