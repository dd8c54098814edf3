"""Stored prompts, results of a search in a prefix store, and counts of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxkv.cache import Cache
from jaxkv.core.array_utils import bytes_of_rows, nbytes

if TYPE_CHECKING:
    from jaxtyping import Int32, Shaped, UInt8


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
class ModelInputs:
    """Tokens from position 0 on, and their additional model inputs by name, see `make_batch`."""

    tokens: Int32[np.ndarray, " n"]
    extra: Mapping[str, Shaped[np.ndarray, "n ..."]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.tokens.size

    def __getitem__(self, part: slice) -> ModelInputs:
        extra = {name: x[part] for name, x in self.extra.items()}
        return ModelInputs(tokens=self.tokens[part], extra=extra)

    def append(self, tokens: Sequence[int]) -> ModelInputs:
        """Return the inputs with further tokens, which have the additional inputs of the last."""
        index = np.minimum(np.arange(len(self) + len(tokens)), len(self) - 1)
        return ModelInputs(
            tokens=np.append(self.tokens, np.asarray(tokens, np.int32)),
            extra={name: x[index] for name, x in self.extra.items()},
        )

    def common_prefix_length(self, other: ModelInputs) -> int:
        """Return the length of the common prefix with other inputs; floats have equal bits."""
        size = min(len(self), len(other))
        forms, other_forms = (
            {name: (x.dtype, x.shape[1:]) for name, x in inputs.extra.items()}
            for inputs in (self, other)
        )
        if forms != other_forms:
            return 0
        differs = self.tokens[:size] != other.tokens[:size]
        for name, x in self.extra.items():
            rows = bytes_of_rows(x[:size]) != bytes_of_rows(other.extra[name][:size])
            differs |= rows.any(axis=1)
        differences = np.flatnonzero(differs)
        return int(differences[0]) if differences.size else size


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredPrompt:
    """Base class of stored prompts."""

    inputs: ModelInputs

    @property
    def tokens(self) -> Int32[np.ndarray, " n"]:
        """The tokens from position 0 on."""
        return self.inputs.tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedPrompt(StoredPrompt):
    """A stored prompt: its inputs, and the id of its sequence."""

    sequence: int


@dataclass(frozen=True, kw_only=True, eq=False)
class HostPrompt(StoredPrompt):
    """A stored prompt in host memory.

    inputs: The inputs of the prompt.
    miss_reasons: The result of `find_miss_reasons` for the inputs.
    cache: A cache with the prompt in sequence 0; its buffers are in host memory.
    """

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
