"""Prefixes that are computed once: which sequences of a memory hold which texts, and forks of them.

A store has some sequences of a memory for itself, its holders. `remember` forks a text into one of
them, and `reuse` forks what a prompt begins with out of one, so within a stream nothing is copied,
and what several texts share is held once. Between streams it is copied.

A store is a value of the host: it says which holder has which tokens, and nothing of it is on a
device. It goes with the memory that was returned beside it, as a table goes with its buffers; both
are values, so an older pair can be gone back to. A token is an integer: where something else is
told to a model as well, such as an image, give it a number of its own.

Leave holders alone. What moves the cells of a text (`seq_add`) moves those of a holder that shares
them: `can_seq_add` says so, and `evict` lets go of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkv.hybrid import HybridTable
from jaxkv.memory import Facts, Memory, check_once, split
from jaxkv.places import END, bucket, count, integers, is_concrete
from jaxkv.tables import program
from jaxkv.verbs.ask import can_seq_cp, seq_pos_max, used
from jaxkv.verbs.edit import seq_cp, seq_keep, seq_rm
from jaxkv.verbs.ids import sequence

__all__ = ["Found", "Miss", "Store", "Text", "evict", "held", "make_store", "remember", "reuse"]


class Miss(IntEnum):
    """Why a text was not reused as far as it could be, or not remembered.

    NONE: it was, as far as it agrees with one that is held.
    UNKNOWN: no text that is held begins with its first token.
    EVICTED: one that agrees with it further was held, and was let go of for others.
    LOST: a window has taken cells that its next token would see, or they were removed.
    NO_STATE: a recurrent memory keeps no state that stands there.
    NO_ROOM: it takes more cells than the store may hold, or more than a copy finds in its stream.
    """

    NONE = 0
    UNKNOWN = 1
    EVICTED = 2
    LOST = 3
    NO_STATE = 4
    NO_ROOM = 5


class Found(NamedTuple):
    """What there was of a prompt.

    length: how many of its first tokens the sequence holds now; compute those after them.
    miss: why it is no more.
    """

    length: int
    miss: Miss


@dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """A text that is held.

    holder: the sequence that holds it.
    tokens: `[n]` int32, from position 0 on.
    """

    holder: int
    tokens: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Store:
    """Which texts the holders of a memory hold. Each has one, or is empty.

    holders: the sequences of the memory that belong to the store.
    cells: the most cells that they may hold, those that they share counted once.
    texts: what they hold, the least recently used first.
    evicted: the tokens of texts that were let go of, the latest last; as many as there are holders.
    facts: of the memory.
    """

    holders: tuple[int, ...]
    cells: int
    facts: Facts = field(repr=False)
    texts: tuple[Text, ...] = ()
    evicted: tuple[np.ndarray, ...] = ()

    def __repr__(self) -> str:
        """Return one line: how many texts there are, and their tokens."""
        tokens = sum(text.tokens.size for text in self.texts)
        limit = f", at most {self.cells} cells" if self.cells < END else ""
        return (
            f"Store({len(self.texts)} texts of {tokens} tokens, {len(self.holders)} holders{limit})"
        )


def make_store(memory: Memory, *, holders: Sequence[int], cells: int | None = None) -> Store:
    """Make a store without a text.

    Args:
      memory: any memory; what comes later has its sizes.
      holders: `[n]` int, the sequences that belong to the store from now on. They hold nothing.
        Where sequences share several streams, give it some of each: a fork within a stream copies
        nothing.
      cells: the most cells that all of them may hold together, those that they share counted once;
        by default no limit but those of the memory, and `evict` makes room.

    Raises:
      ValueError: when there is no holder, one is no sequence of the memory, comes twice or holds
        tokens, cells are below 1, or the memory is traced.
      TypeError: when ids or cells are no integers.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=64, sequences=4, kv_heads=1, head_dim=2)
      >>> prefix.make_store(memory, holders=[2, 3], cells=32)
      Store(0 texts of 0 tokens, 2 holders, at most 32 cells)
    """
    facts = _facts(memory)
    ids = np.atleast_1d(facts.sequence_ids(holders))
    check_once(ids)
    if ids.ndim > 1 or not ids.size:
        raise ValueError(f"wanted holders, one sequence or more, got {holders}")
    full = ids[np.asarray(seq_pos_max(memory, ids)) >= 0]
    if full.size:
        raise ValueError(
            f"wanted holders that hold nothing, got {full.tolist()} with tokens: remove them "
            f"(seq_rm), or pass others"
        )
    most = END if cells is None else count(cells, "cells")
    return Store(holders=tuple(ids.tolist()), cells=most, facts=facts)


def reuse(
    memory: Memory, store: Store, tokens: Any, seq: Any, *, donate: bool = False
) -> tuple[Memory, Store, Found]:
    """Let a sequence hold what a prompt begins with, as far as it was computed before.

    The sequence holds the first `length` tokens of the prompt then, whatever it held before: go on
    with `tokens[length:]`. That is at least one token, since logits are no part of a memory. Of the
    texts that are held the one with the most to reuse is forked, in the same stream if it has as
    much, and becomes the most recently used. How far it can be reused is what `can_resume` says: a
    window may have lost cells, and a recurrent memory goes on only where it keeps a state.

    Args:
      memory: the memory of the store.
      store: the store.
      tokens: `[n]` int, the whole prompt.
      seq: `[]` int, the sequence, which is no holder.
      donate: give up the buffers of the memory passed in where they must be copied, see `seq_cp`.

    Returns:
      The next memory, the next store, and how much there was, with the reason why it is no more.

    Raises:
      ValueError: when the memory is traced, or of other sizes than the store was made for, the
        sequence is none of it or a holder, or there is no token.
      TypeError: when tokens are no integers.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=64, sequences=3, kv_heads=1, head_dim=2)
      >>> store = prefix.make_store(memory, holders=[2])
      >>> memory = apply(memory, init_batch(memory, make_batch([1, 2, 3])))
      >>> memory, store, _ = prefix.remember(memory, store, [1, 2, 3], 0)
      >>> memory, store, found = prefix.reuse(memory, store, [1, 2, 9], 1)
      >>> found.length, found.miss.name, seq_pos_max(memory, 1).item(), used(memory).item()
      (2, 'NONE', 1, 3)

      The last token is always computed, and nothing may be known of the first:

      >>> prefix.reuse(memory, store, [1, 2, 3], 1)[2]
      Found(length=2, miss=<Miss.NONE: 0>)
      >>> prefix.reuse(memory, store, [2, 3], 1)[2]
      Found(length=0, miss=<Miss.UNKNOWN: 1>)

    llama.cpp: the common prefix of a slot in its server, `cache_prompt`.
    """
    tokens, seq = _checked(memory, store, tokens, seq)
    source, found = _longest(memory, store, tokens, seq)
    memory, _ = seq_rm(memory, seq)
    if source is None:
        return memory, store, found
    if not can_seq_cp(memory, source.holder, seq, 0, found.length):
        return memory, store, Found(0, Miss.NO_ROOM)
    memory = seq_cp(memory, source.holder, seq, 0, found.length, donate=donate)
    return memory, _with(_without(store, source), source), found


def remember(
    memory: Memory, store: Store, tokens: Any, seq: Any, *, donate: bool = False
) -> tuple[Memory, Store, Miss]:
    """Keep the first tokens of a sequence, which goes on as it is or may be removed.

    Remember a text where others will go on from it: at its end, or at the end of what many prompts
    begin with. A window keeps what is seen from there, and a recurrent memory the states that stand
    there. A text that is held already is not held again, and one that the new text continues gives
    way to it, unless it can be gone on with where the new one cannot. If no holder is empty, or
    the store holds more than its `cells`, the least recently used texts are let go of. Holders of
    the sequence's own stream are taken, or where it has none, any.

    Args:
      memory: the memory of the store.
      store: the store.
      tokens: `[n]` int, what the sequence holds from position 0 on, or the beginning of it.
      seq: `[]` int, the sequence, which is no holder.
      donate: give up the buffers of the memory passed in where they must be copied, see `seq_cp`.

    Returns:
      The next memory, the next store, and NONE; or the reason why neither has changed.

    Raises:
      ValueError: when the sequence does not reach as far as the tokens, and as in `reuse`.
      TypeError: when tokens are no integers.

    Examples:
      A window of two positions, and few cells: the first tokens are gone.

      >>> memory = make_kv_cache(
      ...     layers=1, cells=5, sequences=2, kv_heads=1, head_dim=2, window=window.sliding(2)
      ... )
      >>> store = prefix.make_store(memory, holders=[1])
      >>> for tokens in [[1, 2, 3, 4], [5, 6, 7]]:
      ...     memory = apply(memory, init_batch(memory, make_batch(tokens)))
      >>> memory, store, miss = prefix.remember(memory, store, [1, 2], 0)
      >>> miss.name
      'LOST'
      >>> memory, store, miss = prefix.remember(memory, store, [1, 2, 3, 4, 5, 6, 7], 0)
      >>> miss.name, prefix.held(memory, store)
      ('NONE', 5)
    """
    tokens, seq = _checked(memory, store, tokens, seq)
    if seq_pos_max(memory, seq) + 1 < tokens.size:
        raise ValueError(
            f"wanted a sequence that holds these {tokens.size} tokens, got sequence {seq}, which "
            f"goes on at {int(seq_pos_max(memory, seq)) + 1}: compute them first"
        )
    mine, whole = _resumable(memory, seq, tokens.size)
    if whole is not Miss.NONE:
        return memory, store, whole
    text = Text(holder=seq, tokens=tokens)
    own, others = _beside(store, seq), store
    for other in [one for one in store.texts if one.holder in own]:
        common = _common(text.tokens, other.tokens)
        if common < min(tokens.size, other.tokens.size):
            continue
        theirs, _ = _resumable(memory, other.holder, other.tokens.size)
        both = slice(0, common + 1)
        if common == tokens.size and np.all(theirs[both] | ~mine[both]):
            return memory, _with(_without(store, other), other), Miss.NONE
        if common == other.tokens.size and np.all(mine[both] | ~theirs[both]):
            others, own = _without(store, other), (other.holder,)
            break
    return _kept(memory, others, text, own, donate) or (memory, store, Miss.NO_ROOM)


def evict(memory: Memory, store: Store, *, cells: int) -> tuple[Memory, Store]:
    """Let go of the least recently used texts until the store holds few enough cells.

    Cells that a sequence beside the store shares stay in use for that one.

    Args:
      memory: the memory of the store.
      store: the store.
      cells: the most cells that it may hold afterwards; 0 for none.

    Raises:
      ValueError: when cells are below 0, and as in `reuse`.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=64, sequences=2, kv_heads=1, head_dim=2)
      >>> store = prefix.make_store(memory, holders=[1])
      >>> memory = apply(memory, init_batch(memory, make_batch([1, 2, 3])))
      >>> memory, store, _ = prefix.remember(memory, store, [1, 2, 3], 0)
      >>> memory, store = prefix.evict(memory, store, cells=0)
      >>> prefix.held(memory, store), prefix.reuse(memory, store, [1, 2, 3], 0)[2].miss.name
      (0, 'EVICTED')
    """
    most = count(cells, "cells", low=0)
    _check_made_for(memory, store)
    while store.texts and held(memory, store) > most:
        memory, store = _let_go(memory, store, store.texts[0])
    return memory, store


def held(memory: Memory, store: Store) -> int:
    """Return how many cells the store holds, those that its texts share counted once.

    They are counted as `used` counts, over all parts of a hybrid memory. Cells that a sequence
    beside the store shares are among them.

    Raises:
      ValueError: when the memory is traced, or of other sizes than the store was made for.
    """
    _check_made_for(memory, store)
    others = np.setdiff1d(np.arange(store.facts.sequences), store.holders)
    only, _ = seq_rm(memory, others)
    return int(used(only))


def _longest(
    memory: Memory, store: Store, tokens: np.ndarray, seq: int
) -> tuple[Text | None, Found]:
    """Return the text that a prompt can go on from furthest, and how far; None for none."""
    own = _beside(store, seq)
    agreeing = [(_common(text.tokens, tokens[:-1]), text) for text in reversed(store.texts)]
    agreeing = [(common, text) for common, text in agreeing if common]
    agreeing.sort(key=lambda one: (one[0], one[1].holder in own), reverse=True)
    source, best, miss = None, 0, Miss.UNKNOWN
    for i, (common, text) in enumerate(agreeing):
        if common <= best:
            break
        there, why = _resumable(memory, text.holder, common)
        miss = why if i == 0 else miss  # of the one that agrees furthest
        if (furthest := int(np.flatnonzero(there)[-1])) > best:
            source, best = text, furthest
    most = agreeing[0][0] if agreeing else 0
    if best == most > 0:
        miss = Miss.NONE
    once = max((_common(text, tokens[:-1]) for text in store.evicted), default=0)
    if once > most:
        miss = Miss.EVICTED
    return source, Found(best, miss)


def _kept(
    memory: Memory, store: Store, text: Text, own: tuple[int, ...], donate: bool
) -> tuple[Memory, Store, Miss] | None:
    """Fork a text of a sequence into one of some holders; None if there is no room for it."""
    size = text.tokens.size
    alone, _ = seq_rm(seq_keep(memory, text.holder), text.holder, size)
    if int(used(alone)) > store.cells:
        return None
    taken = {one.holder: one for one in store.texts}
    free = [holder for holder in own if holder not in taken]
    holder = free[0] if free else next(one.holder for one in store.texts if one.holder in own)
    if not free:
        memory, store = _let_go(memory, store, taken[holder])
    memory, _ = seq_rm(memory, holder)
    if not can_seq_cp(memory, text.holder, holder, 0, size):
        return None
    memory = seq_cp(memory, text.holder, holder, 0, size, donate=donate)
    return *evict(memory, _with(store, replace(text, holder=holder)), cells=store.cells), Miss.NONE


def _let_go(memory: Memory, store: Store, text: Text) -> tuple[Memory, Store]:
    """Free the holder of a text, and note that it was there."""
    memory, _ = seq_rm(memory, text.holder)
    evicted = (*store.evicted, text.tokens)[-len(store.holders) :]
    return memory, replace(_without(store, text), evicted=evicted)


def _with(store: Store, text: Text) -> Store:
    return replace(store, texts=(*store.texts, text))


def _without(store: Store, text: Text) -> Store:
    return replace(store, texts=tuple(one for one in store.texts if one is not text))


def _beside(store: Store, seq: int) -> tuple[int, ...]:
    """Return the holders in the stream of a sequence; all of them if it has none."""
    sharing = store.facts.sequences // store.facts.streams
    near = tuple(one for one in store.holders if one // sharing == seq // sharing)
    return near or store.holders


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many tokens two texts begin with alike."""
    size = min(one.size, other.size)
    apart = np.flatnonzero(one[:size] != other[:size])
    return int(apart[0]) if apart.size else size


def _resumable(memory: Memory, seq: int, last: int) -> tuple[np.ndarray, Miss]:
    """Return at which positions a sequence can go on, and why it cannot at the last one.

    Returns:
      `[last + 1]` bool, True for 0, where nothing is needed.
    """
    positions = np.arange(bucket(max(last + 1, 1024)), dtype=np.int32)  # few shapes
    all_parts, miss = np.ones(last + 1, bool), Miss.NONE
    for table in _tables(split(memory)[0]):
        there = np.asarray(_can_go_on(table, np.int32(seq), positions))[: last + 1]
        if not there[last] and miss is Miss.NONE:
            miss = Miss.LOST if table.facts.rollback is None else Miss.NO_STATE
        all_parts &= there
    return all_parts, miss


def _tables(table: Any) -> Iterator[Any]:
    """Yield the tables of the parts of a memory."""
    yield from table.parts if isinstance(table, HybridTable) else [table]


@program
def _can_go_on(table: Any, seq: jax.Array, positions: jax.Array) -> jax.Array:
    holds = positions <= table.last(seq) + 1
    there = jax.vmap(table.can_resume, in_axes=(None, 0))(seq, positions)
    return (positions == 0) | (holds & there)


def _facts(memory: Memory) -> Facts:
    """Return the facts of a memory whose values are known.

    Raises:
      ValueError: when it is traced.
    """
    table, _ = split(memory)
    if not is_concrete(table):
        raise ValueError("wanted a memory outside of jit, since a store is a value of the host")
    return table.facts


def _check_made_for(memory: Memory, store: Store) -> None:
    if not isinstance(store, Store):
        raise TypeError(f"wanted a store, make_store makes it, got {type(store)}")
    if _facts(memory) != store.facts:
        raise ValueError(
            "wanted the memory that the store was made for, or one of its sizes, got another: "
            "make_store(memory, holders=...)"
        )


def _checked(memory: Memory, store: Store, tokens: Any, seq: Any) -> tuple[np.ndarray, int]:
    """Return tokens as `[n]` int32, and a sequence that is no holder."""
    _check_made_for(memory, store)
    seq = int(sequence(split(memory)[0], seq))
    if seq in store.holders:
        raise ValueError(f"wanted a sequence that is no holder of the store, got {seq}")
    tokens = np.array(integers(tokens, "tokens"), np.int32)  # a copy, since the store keeps it
    if tokens.ndim != 1 or not tokens.size:
        raise ValueError(f"wanted tokens [n] of one prompt, got the shape {tokens.shape}")
    return tokens, seq
