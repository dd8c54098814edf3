"""Token lists with padding in front, and selection of array entries by sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import check_extra
from jaxkv.core.array_utils import is_concrete
from jaxkv.core.validate import check_int32

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Int32, PyTree

    from jaxkv.core.types import Tokens
    from jaxkv.generation.types import Prompts, StopTokens

X = TypeVar("X")


def take_last_tokens(
    tokens: Int[Array | np.ndarray, "Z n"], length: int
) -> Int[Array | np.ndarray, "Z {length}"]:
    """Return the last `length` tokens of each row, padded in front with -1.

    >>> [take_last_tokens(np.array([row]), 2).tolist() for row in ([1, 2, 3], [1])]
    [[[2, 3]], [[-1, 1]]]
    """
    recent = tokens[:, max(tokens.shape[1] - length, 0) :]
    xp = np if is_concrete(recent) else jnp
    return xp.pad(recent, [(0, 0), (length - recent.shape[1], 0)], constant_values=-1)


def is_rows(texts: Prompts) -> bool:
    """Return whether texts are an array with two dimensions, and not a list."""
    return getattr(texts, "ndim", 0) == 2


def check_token_lists(
    texts: Prompts, name: str, *, allow_empty: bool = False
) -> list[Int32[np.ndarray, " _"]]:
    """Return concrete texts as arrays without padding."""
    tokens = f"the tokens of {name}"
    if not isinstance(texts, Iterable):
        raise TypeError(f"expected lists of tokens for {name}, got {type(texts)}; pass [[1, 2]]")
    if is_rows(texts):
        rows = check_int32(np.asarray(texts), tokens)
        lists = [row[row >= 0] for row in rows]
    else:
        advice = "pass rows with padding as an array"
        lists = [np.asarray(check_int32(text, tokens, low=0, advice=advice)) for text in texts]
    if not (lists or allow_empty) or any(text.ndim != 1 for text in lists):
        raise ValueError(
            f"expected a list of tokens for each of the {name}, got {texts!r:.60}; pass [tokens] "
            "for a single one"
        )
    for i, text in enumerate(lists):
        if not text.size and not allow_empty:
            raise ValueError(
                f"expected one token or more in each of the {name}, got none in {name}[{i}]; begin "
                "with the token that begins a text, or leave it out"
            )
    return lists


def extra_of_lists(
    extra: Mapping[str, PyTree] | None, texts: Prompts, lists: list[Int32[np.ndarray, " _"]]
) -> dict[str, PyTree]:
    """Return the additional inputs of the tokens of all lists, `[B, ...]`; see `make_batch`.

    The lists are the result of `check_token_lists` for the concrete texts.
    """
    if not is_rows(texts):
        return check_extra(extra, (sum(map(len, lists)),))
    rows = np.asarray(texts)
    return {name: np.asarray(x)[rows >= 0] for name, x in check_extra(extra, rows.shape).items()}


def pad_prompts(
    prompts: Prompts, max_length: int | None = None
) -> Int32[Array | np.ndarray, "Z m"]:
    """Return the last `max_length` tokens of each prompt as an array, padded in front with -1."""
    if is_rows(prompts):
        rows = check_int32(prompts, "the tokens of prompts")
    else:
        lists = check_token_lists(prompts, "prompts", allow_empty=True)
        longest = max(map(len, lists), default=0)
        lists = [np.pad(tokens, (longest - len(tokens), 0), constant_values=-1) for tokens in lists]
        rows = np.stack(lists) if lists else np.zeros((0, 0), np.int32)
    return rows if max_length is None else take_last_tokens(rows, max_length)


def stop_tokens_as_list(stop_tokens: StopTokens) -> Tokens:
    """Return a set of stop tokens as a sorted list; return a list or an array unchanged."""
    return sorted(stop_tokens) if isinstance(stop_tokens, (set, frozenset)) else stop_tokens


def select_per_sequence(which: Bool[Array, " Z"], new: X, old: X) -> X:
    """Select new array entries for sequences whose mask is True, and old entries for others."""

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(which.reshape(-1, *[1] * (jnp.ndim(old) - 1)), new, old)

    return jax.tree.map(choose, new, old)
