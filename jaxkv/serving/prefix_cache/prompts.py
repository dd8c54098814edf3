"""Stored prompts, and results of a search in a store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int32


class MissReason(IntEnum):
    """Why a prompt was not forked further, or not stored.

    NONE: It was forked as far as it agrees with a stored prompt, or it was stored.
    UNKNOWN: No stored prompt starts with its first token.
    EVICTED: A prompt with a longer common prefix was evicted.
    CONTEXT_EVICTED: A window evicted cells that its next token attends to, or they were removed.
    NO_STATE: A recurrent cache has no state at that position.
    OUT_OF_CELLS: It needs more cells than the store may use, or than are free for a copy.
    INCOMPLETE: The sequence lacks a token at a position from 0 on, or tokens were shifted.
    OTHER_TEXT: The sequence has other tokens, or computed them at other positions.
    """

    NONE = 0
    UNKNOWN = 1
    EVICTED = 2
    CONTEXT_EVICTED = 3
    NO_STATE = 4
    OUT_OF_CELLS = 5
    INCOMPLETE = 6
    OTHER_TEXT = 7


class PrefixHit(NamedTuple):
    """Length of a prompt prefix that was forked or stored.

    length: Number of tokens that are in the sequence after `fork`, or in the store after `store`.
    miss: Why it is not longer.
    """

    length: int
    miss: MissReason


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedPrompt:
    """A stored prompt.

    sequence: The sequence of the store that contains it.
    tokens: Its tokens from position 0 on.
    """

    sequence: int
    tokens: Int32[np.ndarray, " n"]


class PrefixMatch(NamedTuple):
    """The stored prompt with the longest resumable prefix.

    prompt: The stored prompt; None if no prompt matches.
    hit: Length of the prefix.
    """

    prompt: CachedPrompt | None
    hit: PrefixHit
