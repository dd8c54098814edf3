"""Tries of texts: a common prefix of several texts is one row of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxkv.core.array_utils import bytes_of_rows, next_power_of_two
from jaxkv.core.pytree import pytree_dataclass, static_field

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Int32, PyTree, Shaped


MIN_SHARED = 16
"""Minimum number of tokens of a common prefix that gets its own row."""

MAX_LEVELS = 4
"""Maximum number of levels of a trie; each level is one model step."""


@pytree_dataclass
class TrieLevel:
    """Rows of tokens that one model step computes; each row continues one sequence.

    tokens: padded with -1 at the end of a row.
    sequences: sequence id of each row; -1 for a row of padding.
    parents: id from which each sequence is forked before the model step.
    extra: additional model inputs of each token by name, or None.
    """

    tokens: Int32[Array | np.ndarray, "R T"]
    sequences: Int32[Array | np.ndarray, " R"]
    parents: Int32[Array | np.ndarray, " Q"]
    extra: dict[str, Shaped[Array | np.ndarray, "R T ..."]] | None = None
    is_scored: bool = static_field()


class _Segment(NamedTuple):
    """Tokens that several texts share at the same indices."""

    texts: list[int]
    sequence: int
    start: int
    tokens: Int[np.ndarray, " _"]


def trie_of_texts(
    texts: Sequence[Int[np.ndarray, " _"]],
) -> tuple[list[TrieLevel], Int32[np.ndarray, "Q n"]]:
    """Return the levels of a trie of Q texts, and the index of each token of each text.

    The indices are into the flattened, concatenated levels; an index is -1 for padding.

    >>> levels, index = trie_of_texts([np.arange(24), np.arange(20)])
    >>> [(x.tokens.shape, x.sequences.tolist(), x.parents.tolist()) for x in levels]
    [((1, 24), [0], [0, 1]), ((1, 8), [0], [0, 1])]
    """
    count = len(texts)
    index = np.full((count, _round_length(max(map(len, texts)))), -1, np.int32)
    levels, num_tokens = [], 0
    for segments, parents in _segments_by_level(texts, range(count)):
        level = _make_level(segments, parents, count, is_scored=True)
        for row, (members, _, start, tokens) in enumerate(segments):
            first = num_tokens + row * level.tokens.shape[1]
            index[members, start : start + len(tokens)] = first + np.arange(len(tokens))
        levels.append(level)
        num_tokens += level.tokens.size
    return levels, index


def trie_of_prompts(
    prompts: Sequence[Int[np.ndarray, " _"]], texts: Sequence[Int[np.ndarray, " _"]]
) -> list[TrieLevel]:
    """Return one or more levels with the prompts, then one level with all texts.

    >>> levels = trie_of_prompts([np.arange(3)], [np.array([5]), np.array([6, 7])])
    >>> [(x.tokens.shape, x.sequences.tolist(), x.parents.tolist()) for x in levels]
    [((1, 8), [0], [0, 1]), ((2, 8), [0, 1], [0, 0])]
    """
    count = len(texts)
    group = count // len(prompts)
    first = [i // group * group for i in range(count)]
    levels = [
        _make_level(segments, parents, count, is_scored=False)
        for segments, parents in _segments_by_level(prompts, range(0, count, group))
    ]
    rows = [_Segment([i], i, 0, text) for i, text in enumerate(texts)]
    return [*levels, _make_level(rows, dict(enumerate(first)), count, is_scored=True)]


def number_inputs(
    texts: Sequence[Int32[np.ndarray, " _"]], extra: Mapping[str, PyTree]
) -> tuple[list[Int32[np.ndarray, " _"]], Int32[np.ndarray, " U"]]:
    """Number the distinct pairs of a token and its additional inputs.

    Return the number of each token of each text, and an index of a token with each number in the
    concatenated texts. A trie of the numbers shares a prefix if tokens and inputs are equal.

    >>> texts = [np.array([5, 6], np.int32)] * 2
    >>> [x.tolist() for x in number_inputs(texts, {"image": np.array([0, 1, 0, 2])})[0]]
    [[0, 1], [0, 2]]
    """
    tokens = np.concatenate([*texts]).astype(np.int32)
    arrays = [tokens, *(np.asarray(extra[name]) for name in sorted(extra))]
    rows = np.concatenate([bytes_of_rows(x) for x in arrays], axis=1)
    _, first, numbers = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    numbers = numbers.reshape(-1).astype(np.int32)
    return np.split(numbers, np.cumsum([len(text) for text in texts])[:-1]), first.astype(np.int32)


def with_inputs(
    level: TrieLevel,
    tokens: Int32[np.ndarray, " B"],
    extra: Mapping[str, PyTree],
    first: Int32[np.ndarray, " U"],
) -> TrieLevel:
    """Replace the numbers from `number_inputs` in a level by tokens and additional inputs."""
    index = first[np.maximum(level.tokens, 0)]
    return replace(
        level,
        tokens=np.where(level.tokens < 0, -1, tokens[index]),
        extra={name: np.asarray(x)[index] for name, x in extra.items()},
    )


def _segments_by_level(
    texts: Sequence[Int[np.ndarray, " _"]], sequences: Sequence[int]
) -> list[tuple[list[_Segment], dict[int, int]]]:
    """Return, for each level, the segments and a dict from sequence id to parent id."""
    order = sorted(range(len(texts)), key=lambda i: texts[i].tolist())
    # In sorted order, the common prefix of a run of texts is the shortest of the common prefixes of
    # neighbours.
    common = [0, *(_common_length(texts[i], texts[j]) for i, j in pairwise(order))]
    levels: list[tuple[list[_Segment], dict[int, int]]] = []
    # Texts order[first:last] share their first `start` tokens, cached in the sequence `parent`.
    groups: list[tuple[int, int, int, int | None]] = [(0, len(order), 0, None)]
    while groups:
        is_last = len(levels) == MAX_LEVELS - 1
        segments, parents, below = [], {}, []
        for first, last, start, parent in groups:
            apart = (i for i in range(first + 1, last) if is_last or common[i] - start < MIN_SHARED)
            for low, high in pairwise([first, *apart, last]):
                members = order[low:high]
                stop = min([len(texts[members[0]]), *common[low + 1 : high]])
                sequence = min(sequences[i] for i in members)
                if start < stop:
                    segments.append(
                        _Segment(members, sequence, start, texts[members[0]][start:stop])
                    )
                    parents[sequence] = sequence if parent is None else parent
                if len(members) > 1:
                    below.append((low, high, stop, sequence))
        if segments:
            levels.append((segments, parents))
        groups = below
    return levels


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if different.size else size


def _make_level(
    segments: list[_Segment], parents: Mapping[int, int], count: int, *, is_scored: bool
) -> TrieLevel:
    """Pad segments to a `TrieLevel`, so that few shapes are compiled."""
    shape = (
        min(next_power_of_two(len(segments)), count),
        _round_length(max(len(segment.tokens) for segment in segments)),
    )
    tokens, sequences = np.full(shape, -1, np.int32), np.full(shape[0], -1, np.int32)
    for row, segment in enumerate(segments):
        tokens[row, : len(segment.tokens)] = segment.tokens
        sequences[row] = segment.sequence
    forked = np.arange(count, dtype=np.int32)
    forked[list(parents)] = list(parents.values())
    return TrieLevel(tokens=tokens, sequences=sequences, parents=forked, is_scored=is_scored)


def _round_length(length: int) -> int:
    """Round a length up to the next number 2**n or 3 * 2**n, at least 8.

    >>> [_round_length(n) for n in (0, 9, 12, 13, 64, 65, 96, 100)]
    [8, 12, 12, 16, 64, 96, 96, 128]
    """
    above = max(next_power_of_two(length), 8)
    return above // 4 * 3 if above > 8 and length <= above // 4 * 3 else above
