"""Which texts are held, and by which sequences: a value of the host."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from jaxkv.api.arguments import sequence
from jaxkv.api.queries import seq_pos_max
from jaxkv.cache import Cache, split
from jaxkv.core.array_utils import is_concrete
from jaxkv.core.constants import END
from jaxkv.core.validate import check_count, check_int32
from jaxkv.spec import TableSpec, check_once


class MissReason(IntEnum):
    """Why a text was not reused as far as it could be, or not remembered.

    NONE: it was, as far as it agrees with one that is held.
    UNKNOWN: no text that is held begins with its first token.
    EVICTED: one that agrees with it further was held, and was let go of for others.
    CONTEXT_EVICTED: a window has taken cells that its next token would see, or they were removed.
    NO_STATE: a recurrent cache keeps no state that stands there.
    OUT_OF_CELLS: it takes more cells than the store may hold, or than a copy finds in its stream.
    INCOMPLETE: the sequence does not hold a token at each position from 0 on, or some were moved.
    OTHER_TEXT: the sequence holds tokens that are not the text's, or were computed elsewhere in it.
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
    """What there was of a prompt.

    length: how many of its first tokens the sequence holds now; compute those after them.
    miss: why it is no more.
    """

    length: int
    miss: MissReason


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedPrompt:
    """A text that is held.

    holder: the sequence that holds it.
    tokens: `[n]` int32, from position 0 on.
    """

    holder: int
    tokens: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixStore:
    """Which texts the holders of a cache hold. Each has one, or is empty.

    store_sequences: the sequences of the cache that belong to the store.
    cells: the most cells that they may hold, those that they share counted once.
    texts: what they hold, the least recently used first.
    evicted: the tokens of texts that were let go of, the latest last; as many as there are holders.
    spec: of the cache.
    """

    store_sequences: tuple[int, ...]
    cells: int
    spec: TableSpec = field(repr=False)
    texts: tuple[CachedPrompt, ...] = ()
    evicted: tuple[np.ndarray, ...] = ()

    def __repr__(self) -> str:
        """Return one line: how many texts there are, and their tokens."""
        tokens = sum(text.tokens.size for text in self.texts)
        limit = f", at most {self.cells} cells" if self.cells < END else ""
        return (
            f"PrefixStore({len(self.texts)} texts of {tokens} tokens, "
            f"{len(self.store_sequences)} sequences{limit})"
        )


def make_prefix_store(
    cache: Cache, *, store_sequences: Sequence[int], cells: int | None = None
) -> PrefixStore:
    """Make a store without a text.

    Args:
      cache: any cache; what comes later has its sizes.
      store_sequences: `[n]` int, the sequences that belong to the store from now on. They hold
        nothing. Where sequences share several streams, give it some of each: a fork within a stream
        copies nothing.
      cells: the most cells that all of them may hold together, those that they share counted once;
        by default no limit but those of the cache, and `evict` makes room.

    Raises:
      ValueError: when there is no holder, one is no sequence of the cache, comes twice or holds
        tokens, cells are below 1, or the cache is traced or has a part for sources.
      TypeError: when ids or cells are no integers.

    Examples:
      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=64, sequences=4
      ... )
      >>> serving.prefix_cache.make_prefix_store(cache, store_sequences=[2, 3], cells=32)
      PrefixStore(0 texts of 0 tokens, 2 sequences, at most 32 cells)
    """
    spec = _facts(cache)
    if spec.has_cross_attention:
        raise ValueError(
            "wanted a cache without a part for sources, since texts that begin alike may look at "
            "other ones, got one with it: fork what has the same source (seq_cp)"
        )
    ids = np.atleast_1d(spec.sequence_ids(store_sequences))
    check_once(ids)
    if ids.ndim > 1 or not ids.size:
        raise ValueError(f"wanted holders, one sequence or more, got {store_sequences}")
    full = ids[np.asarray(seq_pos_max(cache, ids)) >= 0]
    if full.size:
        raise ValueError(
            f"wanted holders that hold nothing, got {full.tolist()} with tokens: remove them "
            f"(seq_rm), or pass others"
        )
    most = END if cells is None else check_count(cells, "cells")
    return PrefixStore(store_sequences=tuple(ids.tolist()), cells=most, spec=spec)


def with_text(store: PrefixStore, text: CachedPrompt) -> PrefixStore:
    """Return a store with one more text, the most recently used."""
    return replace(store, texts=(*store.texts, text))


def touched(store: PrefixStore, text: CachedPrompt) -> PrefixStore:
    """Return a store whose most recently used text is one of its own; any other changes nothing."""
    there = any(one is text for one in store.texts)
    return with_text(without(store, text), text) if there else store


def without(store: PrefixStore, text: CachedPrompt) -> PrefixStore:
    """Return a store without a text."""
    return replace(store, texts=tuple(one for one in store.texts if one is not text))


def beside(store: PrefixStore, seq: int) -> tuple[int, ...]:
    """Return the holders in the stream of a sequence; all of them if it has none."""
    sharing = store.spec.sequences_per_stream
    near = tuple(one for one in store.store_sequences if one // sharing == seq // sharing)
    return near or store.store_sequences


def checked(cache: Cache, store: PrefixStore, tokens: Any, seq: Any) -> tuple[np.ndarray, int]:
    """Return tokens as `[n]` int32, and a sequence that is no holder."""
    check_made_for(cache, store)
    seq = int(sequence(split(cache)[0], seq))
    if seq in store.store_sequences:
        raise ValueError(f"wanted a sequence that is no holder of the store, got {seq}")
    tokens = np.array(check_int32(tokens, "tokens"), np.int32)  # a copy, since the store keeps it
    if tokens.ndim != 1 or not tokens.size:
        raise ValueError(
            f"wanted tokens [n] of one prompt of at least one token, got the shape {tokens.shape}"
        )
    return tokens, seq


def check_made_for(cache: Cache, store: PrefixStore) -> None:
    """Raise unless a store was made for a cache of these sizes."""
    if not isinstance(store, PrefixStore):
        raise TypeError(f"wanted a store, make_prefix_store makes it, got {type(store)}")
    if _facts(cache) != store.spec:
        raise ValueError(
            "wanted the cache that the store was made for, or one of its sizes, got another: "
            "make_prefix_store(cache, store_sequences=...)"
        )


def _facts(cache: Cache) -> TableSpec:
    """Return the spec of a cache whose values are known.

    Raises:
      ValueError: when it is traced.
    """
    table, _ = split(cache)
    if not is_concrete(table):
        raise ValueError("wanted a cache outside of jit, since a store is a value of the host")
    return table.spec
