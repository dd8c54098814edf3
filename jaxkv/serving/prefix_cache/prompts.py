"""Stored prompts, results of a search in a prefix store, and counts of a store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from jaxkv.cache import Cache
from jaxkv.core.array_utils import nbytes

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int32, UInt8


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
    """Length of a forked or stored prefix, and the reason why the prefix is not longer.

    from_host: Whether the prefix was in host memory.
    """

    length: int
    miss: MissReason
    from_host: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedPrompt:
    """A stored prompt: its tokens from position 0 on, and the id of its sequence."""

    sequence: int
    tokens: Int32[np.ndarray, " n"]


@dataclass(frozen=True, kw_only=True, eq=False)
class HostPrompt:
    """A stored prompt in host memory.

    tokens: The tokens from position 0 on.
    miss_reasons: The result of `find_miss_reasons` for the tokens.
    cache: A cache with the prompt in sequence 0; its buffers are in host memory.
    """

    tokens: Int32[np.ndarray, " n"]
    miss_reasons: UInt8[np.ndarray, " n+1"]
    cache: Cache

    @property
    def num_bytes(self) -> int:
        """Number of bytes in host memory."""
        return nbytes(self.cache.buffers)


class PrefixMatch(NamedTuple):
    """Result of a search: the stored prompt with the longest resumable prefix, and the hit."""

    prompt: CachedPrompt | HostPrompt | None
    hit: PrefixHit


@dataclass(frozen=True, kw_only=True)
class PrefixStats:
    """Counts of a prefix store since it was made.

    hits: Forks of at least one token.
    hits_from_host: Hits whose prefix was in host memory.
    misses: Calls of `fork` that forked no token.
    forked_tokens: Tokens of all hits.
    moved_to_host: Evicted prompts that were moved to host memory.
    dropped: Prompts that were evicted from the cache or host memory, and are not stored any more.
    """

    hits: int = 0
    hits_from_host: int = 0
    misses: int = 0
    forked_tokens: int = 0
    moved_to_host: int = 0
    dropped: int = 0

    def add_fork(self, hit: PrefixHit) -> PrefixStats:
        """Return the counts after a fork."""
        return replace(
            self,
            hits=self.hits + (hit.length > 0),
            hits_from_host=self.hits_from_host + (hit.length > 0 and hit.from_host),
            misses=self.misses + (hit.length == 0),
            forked_tokens=self.forked_tokens + hit.length,
        )

    def add_eviction(self, *, moved_to_host: int, dropped: int) -> PrefixStats:
        """Return the counts after an eviction."""
        return replace(
            self,
            moved_to_host=self.moved_to_host + moved_to_host,
            dropped=self.dropped + dropped,
        )
