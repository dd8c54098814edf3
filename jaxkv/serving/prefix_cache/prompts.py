"""Stored prompts, and results of a search in a prefix store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int32


class MissReason(IntEnum):
    """Why a longer prefix of a prompt was not forked, or a prompt was not stored.

    NONE: No miss: the longest common prefix was forked, or the new prompt was stored.
    UNKNOWN: No stored prompt starts with the first token of the prompt.
    EVICTED: A stored prompt with a longer common prefix was evicted.
    CONTEXT_EVICTED: Cells that the next token attends to were removed, or evicted by a window.
    NO_STATE: A recurrent cache has no state at the end of the common prefix.
    OUT_OF_CELLS: The store's limit of cells is exceeded, or a copy to another stream does not fit.
    INCOMPLETE: The sequence lacks a token at a position of the prompt, or tokens were shifted.
    OTHER_TOKENS: The sequence has other tokens, or its tokens were computed at other positions.
    """

    NONE = 0
    UNKNOWN = 1
    EVICTED = 2
    CONTEXT_EVICTED = 3
    NO_STATE = 4
    OUT_OF_CELLS = 5
    INCOMPLETE = 6
    OTHER_TOKENS = 7


class PrefixHit(NamedTuple):
    """Length of a forked or stored prefix, and the reason why the prefix is not longer."""

    length: int
    miss: MissReason


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedPrompt:
    """A stored prompt: its tokens from position 0 on, and the id of its sequence."""

    sequence: int
    tokens: Int32[np.ndarray, " n"]


class PrefixMatch(NamedTuple):
    """Result of a search: the stored prompt with the longest resumable prefix, and the hit."""

    prompt: CachedPrompt | None
    hit: PrefixHit
