"""Prompts that a store holds, and what it says of one that is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int32


class MissReason(IntEnum):
    """Why a prompt was not forked as far as it could be, or not stored.

    NONE: it was, as far as it agrees with one that is held.
    UNKNOWN: no prompt that is held begins with its first token.
    EVICTED: one that agrees with it further was held, and was evicted for others.
    CONTEXT_EVICTED: a window has taken cells that its next token would see, or they were removed.
    NO_STATE: a recurrent cache keeps no state that stands there.
    OUT_OF_CELLS: it takes more cells than the store may hold, or than a copy finds in its stream.
    INCOMPLETE: the sequence does not hold a token at each position from 0 on, or some were moved.
    OTHER_TEXT: the sequence holds other tokens than the prompt, or computed elsewhere in it.
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
    """How much of a prompt there was, or is.

    length: how many of its first tokens the sequence holds after `fork`, or the store after
      `store`.
    miss: why it is no more.
    """

    length: int
    miss: MissReason


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedPrompt:
    """A prompt that is held.

    sequence: the sequence of the store that holds it.
    tokens: from position 0 on.
    """

    sequence: int
    tokens: Int32[np.ndarray, " n"]


class PrefixMatch(NamedTuple):
    """What a prompt can go on from.

    prompt: one that is held; None if none is that it can go on from.
    hit: how far.
    """

    prompt: CachedPrompt | None
    hit: PrefixHit
