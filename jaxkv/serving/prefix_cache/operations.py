"""Forks out of what is held and into it, and what gives way for them."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxkv.api.edits import seq_cp, seq_keep, seq_rm
from jaxkv.api.queries import num_used_cells, seq_pos_max
from jaxkv.cache import Cache, split
from jaxkv.core.validate import check_count
from jaxkv.jit_helpers import jit_table
from jaxkv.serving.prefix_cache.matching import common_prefix_length, longest_match, resumable
from jaxkv.serving.prefix_cache.store import (
    CachedPrompt,
    MissReason,
    PrefixHit,
    PrefixStore,
    beside,
    check_made_for,
    checked,
    touched,
    with_text,
    without,
)


def fork_prefix(
    cache: Cache, store: PrefixStore, tokens: Any, seq: Any, *, donate: bool = False
) -> tuple[Cache, PrefixStore, PrefixHit]:
    """Let a sequence hold what a prompt begins with, as far as it was computed before.

    The sequence holds the first `length` tokens of the prompt then, whatever it held before: go on
    with `tokens[length:]`. That is at least one token, since logits are no part of a cache. Of the
    texts that are held the one with the most to reuse is forked, in the same stream if it has as
    much, and becomes the most recently used. How far it can be reused is what `can_resume` says: a
    window may have lost cells, and a recurrent cache goes on only where it keeps a state.

    Args:
      cache: the cache of the store.
      store: the store.
      tokens: `[n]` int, the whole prompt.
      seq: `[]` int, the sequence, which is no holder.
      donate: give up the buffers of the cache passed in where they must be copied, see `seq_cp`.

    Returns:
      The next cache, the next store, and how much there was, with the reason why it is no more.

    Raises:
      ValueError: when the cache is traced, or of other sizes than the store was made for, the
        sequence is none of it or a holder, or there is no token.
      TypeError: when tokens are no integers.

    Examples:
      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=64, sequences=3
      ... )
      >>> store = serving.prefix_cache.make_prefix_store(cache, store_sequences=[2])
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
      >>> cache, store, _ = serving.prefix_cache.store_prefix(cache, store, [1, 2, 3], 0)
      >>> cache, store, found = serving.prefix_cache.fork_prefix(cache, store, [1, 2, 9], 1)
      >>> found.length, found.miss.name, seq_pos_max(cache, 1).item(), num_used_cells(cache).item()
      (2, 'NONE', 1, 3)

      The last token is always computed, and nothing may be known of the first:

      >>> serving.prefix_cache.fork_prefix(cache, store, [1, 2, 3], 1)[2]
      PrefixHit(length=2, miss=<MissReason.NONE: 0>)
      >>> serving.prefix_cache.fork_prefix(cache, store, [2, 3], 1)[2]
      PrefixHit(length=0, miss=<MissReason.UNKNOWN: 1>)

    llama.cpp: the common prefix of a slot in its server, `cache_prompt`.
    """
    tokens, seq = checked(cache, store, tokens, seq)
    source, found = longest_match(cache, store, tokens, seq)
    return fork(cache, store, source, found, seq, donate=donate)


def fork(
    cache: Cache,
    store: PrefixStore,
    source: CachedPrompt | None,
    found: PrefixHit,
    seq: int,
    *,
    donate: bool,
) -> tuple[Cache, PrefixStore, PrefixHit]:
    """Let a sequence hold what `longest_match` has found, in place of what it held."""
    cache, _ = seq_rm(cache, seq)
    if source is None:
        return cache, store, found
    if not _can_copy(cache, source.holder, seq, found.length):
        return cache, store, PrefixHit(0, MissReason.OUT_OF_CELLS)
    cache, _ = seq_cp(cache, source.holder, seq, 0, found.length, donate=donate)
    return cache, touched(store, source), found


def store_prefix(
    cache: Cache, store: PrefixStore, tokens: Any, seq: Any, *, donate: bool = False
) -> tuple[Cache, PrefixStore, MissReason]:
    """Keep the first tokens of a sequence, which goes on as it is or may be removed.

    Remember a text where others will go on from it: at its end, or at the end of what many prompts
    begin with. A window keeps what is seen from there, and a recurrent cache the states that stand
    there. A text that is held already is not held again, and one that the new text continues gives
    way to it, unless it can be gone on with where the new one cannot. If no holder is empty, or
    the store holds more than its `cells`, the least recently used texts are let go of. Holders of
    the sequence's own stream are taken, or where it has none, any.

    Args:
      cache: the cache of the store.
      store: the store.
      tokens: `[n]` int, what the sequence was told from position 0 on, or the beginning of it. A
        text that slid (`generation.context_shift`) holds other tokens than it was told.
      seq: `[]` int, the sequence, which is no holder.
      donate: give up the buffers of the cache passed in where they must be copied, see `seq_cp`.

    Returns:
      The next cache, the next store, and NONE; or the reason why neither has changed.

    Raises:
      ValueError: when the sequence does not reach as far as the tokens, and as in `fork_prefix`.
      TypeError: when tokens are no integers.

    Examples:
      A window of two positions, and few cells: the first tokens are gone.

      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, window=window.sliding(2)),
      ...     cells=5,
      ...     sequences=2,
      ...     max_rollback=5,
      ... )
      >>> store = serving.prefix_cache.make_prefix_store(cache, store_sequences=[1])
      >>> for tokens in [[1, 2, 3, 4], [5, 6, 7]]:
      ...     cache = apply(cache, init_batch(cache, make_batch(tokens)))
      >>> cache, store, miss = serving.prefix_cache.store_prefix(cache, store, [1, 2], 0)
      >>> miss.name
      'CONTEXT_EVICTED'
      >>> cache, store, miss = serving.prefix_cache.store_prefix(
      ...     cache, store, [1, 2, 3, 4, 5, 6, 7], 0
      ... )
      >>> miss.name, serving.prefix_cache.held(cache, store)
      ('NONE', 5)
    """
    tokens, seq = checked(cache, store, tokens, seq)
    if (end := int(seq_pos_max(cache, seq)) + 1) < tokens.size:
        raise ValueError(
            f"wanted a sequence that holds these {tokens.size} tokens, got sequence {seq}, which "
            f"goes on at {end}: compute them first"
        )
    mine, whole = resumable(cache, seq, tokens)
    if whole is not MissReason.NONE:
        return cache, store, whole
    text = CachedPrompt(holder=seq, tokens=tokens)
    own, others = beside(store, seq), store
    for other in [one for one in store.texts if one.holder in own]:
        common = common_prefix_length(text.tokens, other.tokens)
        if common < min(tokens.size, other.tokens.size):
            continue
        theirs, _ = resumable(cache, other.holder, other.tokens)
        both = slice(0, common + 1)
        if common == tokens.size and np.all(theirs[both] | ~mine[both]):
            return cache, touched(store, other), MissReason.NONE
        if common == other.tokens.size and np.all(mine[both] | ~theirs[both]):
            others, own = without(store, other), (other.holder,)
            break
    return _kept(cache, others, text, own, donate) or (cache, store, MissReason.OUT_OF_CELLS)


def evict(cache: Cache, store: PrefixStore, *, cells: int) -> tuple[Cache, PrefixStore]:
    """Let go of the least recently used texts until the store holds few enough cells.

    Cells that a sequence beside the store shares stay in use for that one.

    Args:
      cache: the cache of the store.
      store: the store.
      cells: the most cells that it may hold afterwards; 0 for none.

    Raises:
      ValueError: when cells are below 0, and as in `fork_prefix`.

    Examples:
      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=64, sequences=2
      ... )
      >>> store = serving.prefix_cache.make_prefix_store(cache, store_sequences=[1])
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
      >>> cache, store, _ = serving.prefix_cache.store_prefix(cache, store, [1, 2, 3], 0)
      >>> cache, store = serving.prefix_cache.evict(cache, store, cells=0)
      >>> (
      ...     serving.prefix_cache.held(cache, store),
      ...     serving.prefix_cache.fork_prefix(cache, store, [1, 2, 3], 0)[2].miss.name,
      ... )
      (0, 'EVICTED')
    """
    most = check_count(cells, "cells", low=0)
    check_made_for(cache, store)
    while store.texts and held(cache, store) > most:
        cache, store = evict_one(cache, store, store.texts[0])
    return cache, store


def held(cache: Cache, store: PrefixStore) -> int:
    """Return how many cells the store holds, those that its texts share counted once.

    They are counted as `num_used_cells` counts, over all parts of a hybrid cache. Cells that a
    sequence beside the store shares are among them.

    Raises:
      ValueError: when the cache is traced, or of other sizes than the store was made for.
    """
    check_made_for(cache, store)
    others = np.setdiff1d(np.arange(store.spec.sequences), store.store_sequences)
    only, _ = seq_rm(cache, others)
    return int(num_used_cells(only))


def warm_up(cache: Cache, store: PrefixStore, *, donate: bool = False) -> Cache:
    """Compile what `fork_prefix`, `store_prefix` and `evict` need, before the first prompt comes.

    Nothing is compiled by them afterwards, whatever the length of a text. Call it while a sequence
    of each stream that is no holder is empty: where texts go to another stream, one that holds
    nothing is copied to it.

    Args:
      cache: the cache of the store.
      store: the store.
      donate: as `fork_prefix` and `store_prefix` will be called; then the cache passed in is given
        up.

    Returns:
      The cache, which holds what it held.

    Raises:
      ValueError: as in `fork_prefix`.

    Examples:
      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=64, sequences=3
      ... )
      >>> store = serving.prefix_cache.make_prefix_store(cache, store_sequences=[2])
      >>> num_used_cells(serving.prefix_cache.warm_up(cache, store)).item()
      0
    """
    held(cache, store)
    spec, holder = store.spec, store.store_sequences[0]
    others = [seq for seq in range(spec.sequences) if seq not in store.store_sequences]
    resumable(cache, holder, np.zeros(0, np.int32))
    seq_rm(seq_keep(cache, holder).cache, holder, 0)
    empty = [seq for seq in others if int(seq_pos_max(cache, seq)) < 0]
    stream = holder // spec.sequences_per_stream
    for seq in {one // spec.sequences_per_stream == stream: one for one in empty}.values():
        _can_copy(cache, holder, seq, 0)
        cache, _ = seq_cp(cache, holder, seq, 0, 0, donate=donate)
    return cache


def _kept(
    cache: Cache, store: PrefixStore, text: CachedPrompt, own: tuple[int, ...], donate: bool
) -> tuple[Cache, PrefixStore, MissReason] | None:
    """Fork a text of a sequence into one of some holders; None if there is no room for it."""
    size = text.tokens.size
    alone, _ = seq_rm(seq_keep(cache, text.holder).cache, text.holder, size)
    if int(num_used_cells(alone)) > store.cells:
        return None
    taken = {one.holder: one for one in store.texts}
    free = [holder for holder in own if holder not in taken]
    holder = free[0] if free else next(one.holder for one in store.texts if one.holder in own)
    if not free:
        cache, store = evict_one(cache, store, taken[holder])
    cache, _ = seq_rm(cache, holder)
    if not _can_copy(cache, text.holder, holder, size):
        return None
    cache, _ = seq_cp(cache, text.holder, holder, 0, size, donate=donate)
    return *evict(
        cache, with_text(store, replace(text, holder=holder)), cells=store.cells
    ), MissReason.NONE


def _can_copy(cache: Cache, src: int, dst: int, stop: int) -> jax.Array:
    """Return whether `seq_cp` of the first positions would be granted, asked of the table alone."""
    return _granted(split(cache)[0], *map(np.int32, (src, dst, 0, stop)))


@jit_table
def _granted(table: Any, *args: jax.Array) -> jax.Array:
    ok, _ = table.can_copy(*args)
    return ok


def evict_one(cache: Cache, store: PrefixStore, text: CachedPrompt) -> tuple[Cache, PrefixStore]:
    """Free the holder of a text, and note that it was there."""
    cache, _ = seq_rm(cache, text.holder)
    evicted = (*store.evicted, text.tokens)[-len(store.store_sequences) :]
    return cache, replace(without(store, text), evicted=evicted)
