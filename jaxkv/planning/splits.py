"""Cutting a batch into ubatches: which of its tokens are computed together.

Each function takes the sequence of every token, `[B]`, and the most tokens of a ubatch, and returns
one index array `[R, T]` for each ubatch: the batch index of each token, NO_SLOT for padding. T is a
power of two up to `ubatch_size`, so that few shapes are ever compiled; no ubatch holds more than
`ubatch_size` tokens that are not padding. Tokens of one sequence keep their order.

A token of several sequences is dealt with as one of the lowest of them. So tokens of one sequence
may be listed under two, and nothing is computed before what it follows.
"""

from functools import partial
from typing import Literal

import numpy as np

from jaxkv.places import NO_SLOT, next_power_of_two

SplitBy = Literal["simple", "equal", "sequence"]
"""The ways to cut a batch."""


def split_known(
    split_by: SplitBy, sequences: np.ndarray, ubatch_size: int, after: np.ndarray | None = None
) -> list[np.ndarray]:
    """Cut a batch in the way that is asked for; see `equal_split` for `after`.

    Raises:
      ValueError: when there is no such way.

    >>> split_known("even", np.array([0, 0]), 1)
    Traceback (most recent call last):
    ...
    ValueError: wanted split_by of 'simple', 'equal' or 'sequence', got 'even'
    """
    ways = {
        "simple": simple_split,
        "equal": partial(equal_split, after=after),
        "sequence": sequence_split,
    }
    if split_by not in ways:
        raise ValueError(f"wanted split_by of 'simple', 'equal' or 'sequence', got {split_by!r}")
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
    return [_rows([index[i : i + ubatch_size]], ubatch_size) for i in starts]


def sequence_split(sequences: np.ndarray, ubatch_size: int) -> list[np.ndarray]:
    """Cut so that a ubatch holds tokens of one sequence only; one row.

    >>> ids = np.array([0, 1, 0, 1, 1])
    >>> [part[part != NO_SLOT].tolist() for part in sequence_split(ids, 2)]
    [[0, 2], [1, 3], [4]]

    llama.cpp: `split_seq`.
    """
    parts = []
    for index in _by_sequence(sequences):
        starts = range(0, len(index), ubatch_size)
        parts += [_rows([index[i : i + ubatch_size]], ubatch_size) for i in starts]
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
    left = _by_sequence(sequences)
    parts = []
    while left:
        left.sort(key=lambda index: index[0])
        taking = left[:ubatch_size]
        length = _equal_length(taking, ubatch_size)
        while after is not None:
            waiting = set(np.concatenate(left)) - set(np.concatenate([i[:length] for i in taking]))
            ready = [index for index in taking if after[index[0]] not in waiting]
            if len(ready) == len(taking):
                break
            taking, length = ready, _equal_length(ready, ubatch_size)
        parts.append(_rows([index[:length] for index in taking], ubatch_size))
        taken = {index[0] for index in taking}
        left = [index[length:] if index[0] in taken else index for index in left]
        left = [index for index in left if len(index)]
    return parts


def _equal_length(taking: list[np.ndarray], ubatch_size: int) -> int:
    """Return how many tokens each of some sequences, `[n]` int32 each, gives."""
    return min(ubatch_size // len(taking), min(map(len, taking)))


def _by_sequence(sequences: np.ndarray) -> list[np.ndarray]:
    """List the tokens of each sequence, `[n]` int32, in the order in which sequences appear."""
    _, firsts = np.unique(sequences, return_index=True)
    return [np.flatnonzero(sequences == sequences[i]).astype(np.int32) for i in sorted(firsts)]


def _rows(rows: list[np.ndarray], ubatch_size: int) -> np.ndarray:
    """Pad rows of equal length, `[n]` int32 each, to a bucket; `[R, T]` int32."""
    length = len(rows[0])
    part = np.full((len(rows), min(next_power_of_two(length), ubatch_size)), NO_SLOT, np.int32)
    part[:, :length] = rows
    return part
