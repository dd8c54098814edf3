"""Cutting a batch into ubatches: which of its tokens are computed together.

Each function takes the sequence of every token, `[B]`, and the most tokens of a ubatch, and returns
one index array `[R, T]` for each ubatch: the batch index of each token, NOWHERE for padding. T is a
power of two up to `ubatch_size`, so that few shapes are ever compiled; no ubatch holds more than
`ubatch_size` tokens that are not padding. Tokens of one sequence keep their order.
"""

from typing import Literal

import numpy as np

from jaxkv.places import NOWHERE, bucket

SplitBy = Literal["simple", "equal", "sequence"]
"""The ways to cut a batch."""


def split_known(split_by: SplitBy, sequences: np.ndarray, ubatch_size: int) -> list[np.ndarray]:
    """Cut a batch in the way that is asked for.

    Raises:
      ValueError: when there is no such way.

    >>> split_known("even", np.array([0, 0]), 1)
    Traceback (most recent call last):
    ...
    ValueError: wanted split_by of 'simple', 'equal' or 'sequence', got 'even'
    """
    ways = {"simple": simple_split, "equal": equal_split, "sequence": sequence_split}
    if split_by not in ways:
        raise ValueError(f"wanted split_by of 'simple', 'equal' or 'sequence', got {split_by!r}")
    return ways[split_by](sequences, ubatch_size)


def simple_split(sequences: np.ndarray, ubatch_size: int) -> list[np.ndarray]:
    """Cut in the order the tokens come, whatever their sequences; one row.

    >>> ids = np.array([0, 0, 0, 1, 1])
    >>> [(part != NOWHERE).sum().item() for part in simple_split(ids, 4)]
    [4, 1]

    llama.cpp: `split_simple`.
    """
    index = np.arange(len(sequences), dtype=np.int32)
    starts = range(0, len(sequences), ubatch_size)
    return [_rows([index[i : i + ubatch_size]], ubatch_size) for i in starts]


def sequence_split(sequences: np.ndarray, ubatch_size: int) -> list[np.ndarray]:
    """Cut so that a ubatch holds tokens of one sequence only; one row.

    >>> ids = np.array([0, 1, 0, 1, 1])
    >>> [part[part != NOWHERE].tolist() for part in sequence_split(ids, 2)]
    [[0, 2], [1, 3], [4]]

    llama.cpp: `split_seq`.
    """
    parts = []
    for index in _by_sequence(sequences):
        starts = range(0, len(index), ubatch_size)
        parts += [_rows([index[i : i + ubatch_size]], ubatch_size) for i in starts]
    return parts


def equal_split(sequences: np.ndarray, ubatch_size: int) -> list[np.ndarray]:
    """Cut so that a ubatch holds equally many tokens of several sequences; one row for each.

    Sequences take part in the order of their first token that is left, as many as there is room
    for, and each gives as many tokens as the shortest of them has and `ubatch_size` allows.

    >>> ids = np.array([0, 0, 0, 0, 1, 1])
    >>> [part.tolist() for part in equal_split(ids, 8)]
    [[[0, 1], [4, 5]], [[2, 3]]]

    llama.cpp: `split_equal`.
    """
    left = _by_sequence(sequences)
    parts = []
    while left:
        left.sort(key=lambda index: index[0])
        taking = left[:ubatch_size]
        length = min(ubatch_size // len(taking), min(map(len, taking)))
        parts.append(_rows([index[:length] for index in taking], ubatch_size))
        left = [index[length:] for index in taking] + left[ubatch_size:]
        left = [index for index in left if len(index)]
    return parts


def _by_sequence(sequences: np.ndarray) -> list[np.ndarray]:
    """List the tokens of each sequence, in the order in which sequences appear."""
    _, firsts = np.unique(sequences, return_index=True)
    return [np.flatnonzero(sequences == sequences[i]).astype(np.int32) for i in sorted(firsts)]


def _rows(rows: list[np.ndarray], ubatch_size: int) -> np.ndarray:
    """Pad rows of equal length to a bucket."""
    length = len(rows[0])
    part = np.full((len(rows), min(bucket(length), ubatch_size)), NOWHERE, np.int32)
    part[:, :length] = rows
    return part
