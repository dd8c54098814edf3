"""A store of prompts: which sequences of a cache hold them, and forks out of it and into it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from jaxkv.api.edits import seq_cp, seq_keep, seq_rm
from jaxkv.cache import Cache, split
from jaxkv.core.array_utils import is_concrete
from jaxkv.core.constants import END
from jaxkv.core.validate import check_count, check_int32
from jaxkv.jit_helpers import jit_table
from jaxkv.serving.prefix_cache.matching import common_prefix_length, find_resumable_positions
from jaxkv.serving.prefix_cache.prompts import CachedPrompt, MissReason, PrefixHit, PrefixMatch
from jaxkv.spec import TableSpec, check_distinct

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32

    from jaxkv.core.types import Id, Ids
    from jaxkv.table import CacheTable


@dataclass(frozen=True, init=False, repr=False, eq=False)
class PrefixStore:
    """Prompts that are computed once: an immutable value of the host, nothing of it on a device.

    Some sequences of a cache are the store's, and each holds one prompt or nothing. `store` forks a
    prompt into one of them, and `fork` forks what a prompt begins with out of one. Within a stream
    nothing is copied, and what several prompts share is held once; between streams it is copied.

    A store belongs to the cache that was returned beside it. Both are values, so an older pair can
    be gone back to. Only its methods may edit its sequences. `seq_add` moves cells for all their
    owners: where `Cache.can_seq_add` says that a prompt of the store shares them, `evict` first. A
    token is an integer: give an image, or anything else that the model gets, a number of its own.

    sequences: the sequences of the cache that are the store's.
    cells: the most cells that they may hold, those that they share counted once.
    prompts: what they hold, the least recently used first.
    evicted: the tokens of prompts that were evicted, the latest last, at most one for each
      sequence.

    llama.cpp: the common prefix of a slot in its server, `cache_prompt`.
    """

    sequences: tuple[int, ...]
    cells: int
    prompts: tuple[CachedPrompt, ...]
    evicted: tuple[Int32[np.ndarray, " n"], ...]
    _spec: TableSpec

    def __init__(self, cache: Cache, *, sequences: Iterable[int], cells: int | None = None):
        """Make a store that holds nothing.

        Args:
          cache: any cache; those that come later have its spec.
          sequences: the sequences that are the store's from now on. They hold nothing.
            Where a cache has several streams, take some of each.
          cells: the most cells that they may hold together; by default no limit but the cache's.

        Raises:
          ValueError: when there is no sequence, one is none of the cache, comes twice or holds
            tokens, cells are below 1, or the cache is traced or has a part for sources.
          TypeError: when ids or cells are no integers.

        Examples:
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
          >>> cache = make_cache(spec, cells=64, sequences=4)
          >>> serving.PrefixStore(cache, sequences=[2, 3], cells=32)
          PrefixStore(0 prompts of 0 tokens, 2 sequences, at most 32 cells)
        """
        spec = _spec_of(cache)
        if spec.has_cross_attention:
            raise ValueError(
                "expected a cache without a part for sources, since prompts that begin alike may "
                "look at other ones, got one with it; fork a sequence of the same source (seq_cp)"
            )
        if not isinstance(sequences, np.ndarray | jax.Array):
            sequences = list(sequences) if isinstance(sequences, Iterable) else sequences
        ids = np.atleast_1d(spec.sequence_ids(sequences))
        check_distinct(ids)
        if ids.ndim > 1 or not ids.size:
            raise ValueError(f"expected one sequence or more, got {sequences}; pass some ids")
        full = ids[np.asarray(cache.seq_pos_max(ids)) >= 0]
        if full.size:
            raise ValueError(
                f"expected sequences that hold nothing, got {full.tolist()} with tokens; remove "
                f"them (seq_rm), or pass others"
            )
        self._set_fields(
            sequences=tuple(ids.tolist()),
            cells=END if cells is None else check_count(cells, "cells"),
            prompts=(),
            evicted=(),
            _spec=spec,
        )

    def __repr__(self) -> str:
        """Return one line: how many prompts there are, and their tokens."""
        tokens = sum(prompt.tokens.size for prompt in self.prompts)
        limit = f", at most {self.cells} cells" if self.cells < END else ""
        return (
            f"PrefixStore({len(self.prompts)} prompts of {tokens} tokens, "
            f"{len(self.sequences)} sequences{limit})"
        )

    def fork(self, cache: Cache, tokens: Ids, seq: Id, *, donate: bool = False) -> PrefixResult:
        """Fork the longest prefix of a prompt that is held into a sequence.

        The sequence holds the first `hit.length` tokens of the prompt then, whatever it held
        before: go on with `tokens[hit.length:]`. That is at least one token, since logits are no
        part of a cache. Of the prompts that are held the one with the most to reuse is forked, in
        the same stream if it has as much, and becomes the most recently used. How far it can be
        reused is what `can_resume` says: a window may have lost cells, and a recurrent cache goes
        on only where it keeps a state.

        Args:
          cache: the cache of the store.
          tokens: `[n]`, the whole prompt.
          seq: the sequence, which is none of the store's.
          donate: give up the buffers of the cache where they must be copied, see `seq_cp`.

        Raises:
          ValueError: when the cache is traced, or has another spec than the store was made for, the
            sequence is none of it or the store's, or there is no token.
          TypeError: when tokens are no integers.

        Examples:
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
          >>> cache = make_cache(spec, cells=64, sequences=3)
          >>> store = serving.PrefixStore(cache, sequences=[2])
          >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
          >>> cache, store, _ = store.store(cache, [1, 2, 3], seq=0)
          >>> cache, store, hit = store.fork(cache, [1, 2, 9], seq=1)
          >>> hit.length, hit.miss.name, cache.seq_pos_max(1).item(), cache.num_used_cells().item()
          (2, 'NONE', 1, 3)

          The last token is always computed, and nothing may be known of the first:

          >>> store.fork(cache, [1, 2, 3], seq=1).hit
          PrefixHit(length=2, miss=<MissReason.NONE: 0>)
          >>> store.fork(cache, [2, 3], seq=1).hit
          PrefixHit(length=0, miss=<MissReason.UNKNOWN: 1>)
        """
        text, to = self._check_tokens(cache, tokens, seq)
        return self.fork_match(cache, self.longest_match(cache, text, to), to, donate=donate)

    def store(self, cache: Cache, tokens: Ids, seq: Id, *, donate: bool = False) -> PrefixResult:
        """Store the first tokens of a sequence, which goes on as it is or may be removed.

        Store a prompt where others will go on from it: at its end, or at the end of what many
        prompts begin with. A window keeps what is seen from there, and a recurrent cache the states
        that stand there. A prompt that is held already is not held again, and one that the new one
        continues gives way to it, unless it can be gone on with where the new one cannot. If no
        sequence of the store is empty, or it would hold more than its `cells`, the least recently
        used prompts are evicted. Sequences of the same stream are taken, or where the store has
        none there, any.

        Args:
          cache: the cache of the store.
          tokens: `[n]`, what the sequence was told from position 0 on, or the beginning of it.
            A text that slid (`generation.context_shift`) holds other tokens than it was told.
          seq: the sequence, which is none of the store's.
          donate: give up the buffers of the cache where they must be copied, see `seq_cp`.

        Returns:
          With `hit` as of a prompt that is held. If its length is 0, nothing has changed.

        Raises:
          ValueError: when the sequence does not reach as far as the tokens, and as `fork` does.
          TypeError: when tokens are no integers.

        Examples:
          A window of two positions, and few cells: the first tokens are gone.

          >>> spec = CacheSpec.attention(1, 1, 2, window=Window.sliding(2))
          >>> cache = make_cache(spec, cells=5, sequences=2)
          >>> store = serving.PrefixStore(cache, sequences=[1])
          >>> for tokens in [[1, 2, 3, 4], [5, 6, 7]]:
          ...     cache = apply(cache, init_batch(cache, make_batch(tokens)))
          >>> cache, store, hit = store.store(cache, [1, 2], seq=0)
          >>> hit.miss.name
          'CONTEXT_EVICTED'
          >>> cache, store, hit = store.store(cache, [1, 2, 3, 4, 5, 6, 7], seq=0)
          >>> hit.length, store.num_used_cells(cache)
          (7, 5)
        """
        text, source = self._check_tokens(cache, tokens, seq)
        if (end := int(cache.seq_pos_max(source)) + 1) < text.size:
            raise ValueError(
                f"expected a sequence that holds these {text.size} tokens, got sequence {source}, "
                f"which goes on at {end}; compute them first (prefill)"
            )
        resumable_here, whole = find_resumable_positions(cache, source, text)
        if whole is not MissReason.NONE:
            return PrefixResult(cache, self, PrefixHit(0, whole))
        prompt = CachedPrompt(sequence=source, tokens=text)
        sequences, others = self._sequences_in_stream(source), self
        for past in [past for past in self.prompts if past.sequence in sequences]:
            common = common_prefix_length(text, past.tokens)
            if common < min(text.size, past.tokens.size):
                continue
            resumable_there, _ = find_resumable_positions(cache, past.sequence, past.tokens)
            both = slice(0, common + 1)
            if common == text.size and np.all(resumable_there[both] | ~resumable_here[both]):
                hit = PrefixHit(text.size, MissReason.NONE)
                return PrefixResult(cache, self.touch(past), hit)
            if common == past.tokens.size and np.all(resumable_here[both] | ~resumable_there[both]):
                others, sequences = self._without_prompt(past), (past.sequence,)
                break
        kept = others._fork_into_store(cache, prompt, sequences, donate)
        return kept or PrefixResult(cache, self, PrefixHit(0, MissReason.OUT_OF_CELLS))

    def evict(self, cache: Cache, *, cells: int) -> EvictResult:
        """Evict the least recently used prompts until the store holds few enough cells.

        Cells that a sequence beside the store shares stay in use for that one.

        Args:
          cache: the cache of the store.
          cells: the most cells that it may hold afterwards; 0 for none.

        Raises:
          ValueError: when cells are below 0, and as `fork` does.

        Examples:
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
          >>> cache = make_cache(spec, cells=64, sequences=2)
          >>> store = serving.PrefixStore(cache, sequences=[1])
          >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
          >>> cache, store, _ = store.store(cache, [1, 2, 3], seq=0)
          >>> cache, store = store.evict(cache, cells=0)
          >>> store.num_used_cells(cache), store.fork(cache, [1, 2, 3], seq=0).hit.miss.name
          (0, 'EVICTED')
        """
        max_cells, store = check_count(cells, "cells", low=0), self
        self._check_made_for(cache)
        while store.prompts and store.num_used_cells(cache) > max_cells:
            cache, store = store.evict_prompt(cache, store.prompts[0])
        return EvictResult(cache, store)

    def num_used_cells(self, cache: Cache) -> int:
        """Return how many cells the store holds, those that its prompts share counted once.

        They are counted as `Cache.num_used_cells` counts, over all parts of a hybrid cache. Cells
        that a sequence beside the store shares are among them.

        Raises:
          ValueError: when the cache is traced, or has another spec than the store was made for.
        """
        self._check_made_for(cache)
        others = np.setdiff1d(np.arange(self._spec.sequences), self.sequences)
        only, _ = seq_rm(cache, others)
        return int(only.num_used_cells())

    def with_prompts(self, prompts: Mapping[int, Ids]) -> PrefixStore:
        """Return the store with prompts that its sequences hold, such as those of a snapshot.

        Args:
          prompts: by sequence, `[n]`, the tokens that it holds, the least recently used first.

        Raises:
          ValueError: when a sequence is not the store's.
          TypeError: when tokens are no integers.
        """
        if others := set(prompts) - set(self.sequences):
            raise ValueError(
                f"expected sequences of the store, some of {self.sequences}, got {sorted(others)}; "
                f"load the prompts into those"
            )
        cached = [
            CachedPrompt(sequence=seq, tokens=np.array(check_int32(tokens, "tokens"), np.int32))
            for seq, tokens in prompts.items()
        ]
        return self._replace_fields(prompts=tuple(cached), evicted=())

    def warm_up(self, cache: Cache, *, donate: bool = False) -> Cache:
        """Compile what `fork`, `store` and `evict` need, before the first prompt comes.

        They compile nothing afterwards, whatever the length of a prompt. Call it while a sequence
        of each stream that is not the store's is empty: where prompts go to another stream, one
        that holds nothing is copied to it.

        Args:
          cache: the cache of the store.
          donate: as `fork` and `store` will be called; then the cache passed in is given up.

        Returns:
          The cache, which holds what it held.

        Raises:
          ValueError: as `fork` does.

        Examples:
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
          >>> cache = make_cache(spec, cells=64, sequences=3)
          >>> store = serving.PrefixStore(cache, sequences=[2])
          >>> store.warm_up(cache).num_used_cells().item()
          0
        """
        self.num_used_cells(cache)
        first_seq, per_stream = self.sequences[0], self._spec.sequences_per_stream
        others = [seq for seq in range(self._spec.sequences) if seq not in self.sequences]
        find_resumable_positions(cache, first_seq, np.zeros(0, np.int32))
        seq_rm(seq_keep(cache, first_seq).cache, first_seq, 0)
        empty = [seq for seq in others if int(cache.seq_pos_max(seq)) < 0]
        for seq in {seq // per_stream == first_seq // per_stream: seq for seq in empty}.values():
            _can_copy(cache, first_seq, seq, 0)
            cache, _ = seq_cp(cache, first_seq, seq, 0, 0, donate=donate)
        return cache

    def longest_match(self, cache: Cache, tokens: Int32[np.ndarray, " n"], seq: int) -> PrefixMatch:
        """Return the prompt that another can go on from furthest, and how far."""
        sequences = self._sequences_in_stream(seq)
        agreeing = [
            (common_prefix_length(prompt.tokens, tokens[:-1]), prompt)
            for prompt in reversed(self.prompts)
        ]
        agreeing = [(common, prompt) for common, prompt in agreeing if common]
        agreeing.sort(key=lambda pair: (pair[0], pair[1].sequence in sequences), reverse=True)
        source, best, miss = None, 0, MissReason.UNKNOWN
        for i, (common, prompt) in enumerate(agreeing):
            if common <= best:
                break
            can_resume, why = find_resumable_positions(
                cache, prompt.sequence, prompt.tokens[:common]
            )
            miss = why if i == 0 else miss  # of the one that agrees furthest
            if (furthest := int(np.flatnonzero(can_resume)[-1])) > best:
                source, best = prompt, furthest
        longest = agreeing[0][0] if agreeing else 0
        if best == longest > 0:
            miss = MissReason.NONE
        once = max((common_prefix_length(text, tokens[:-1]) for text in self.evicted), default=0)
        if once > longest:
            miss = MissReason.EVICTED
        return PrefixMatch(source, PrefixHit(best, miss))

    def fork_match(
        self, cache: Cache, match: PrefixMatch, seq: int, *, donate: bool
    ) -> PrefixResult:
        """Let a sequence hold what `longest_match` found, in place of what it held."""
        (source, hit), (cache, _) = match, seq_rm(cache, seq)
        if source is None:
            return PrefixResult(cache, self, hit)
        if not _can_copy(cache, source.sequence, seq, hit.length):
            return PrefixResult(cache, self, PrefixHit(0, MissReason.OUT_OF_CELLS))
        cache, _ = seq_cp(cache, source.sequence, seq, 0, hit.length, donate=donate)
        return PrefixResult(cache, self.touch(source), hit)

    def touch(self, prompt: CachedPrompt) -> PrefixStore:
        """Return a store whose most recently used prompt is one of its own, if it is."""
        if not any(past is prompt for past in self.prompts):
            return self
        return self._replace_fields(prompts=(*self._without_prompt(prompt).prompts, prompt))

    def evict_prompt(self, cache: Cache, prompt: CachedPrompt) -> EvictResult:
        """Free the sequence of a prompt, and note that it was there."""
        cache, _ = seq_rm(cache, prompt.sequence)
        evicted = (*self.evicted, prompt.tokens)[-len(self.sequences) :]
        return EvictResult(cache, self._without_prompt(prompt)._replace_fields(evicted=evicted))

    def _set_fields(self, **fields: object) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _replace_fields(self, **fields: object) -> PrefixStore:
        """Return a store with other fields."""
        clone = copy.copy(self)
        clone._set_fields(**fields)
        return clone

    def _without_prompt(self, prompt: CachedPrompt) -> PrefixStore:
        """Return a store without a prompt."""
        return self._replace_fields(
            prompts=tuple(past for past in self.prompts if past is not prompt)
        )

    def _sequences_in_stream(self, seq: int) -> tuple[int, ...]:
        """Return the store's sequences in the stream of a sequence; all of them if it has none."""
        per_stream = self._spec.sequences_per_stream
        near = tuple(
            own_seq for own_seq in self.sequences if own_seq // per_stream == seq // per_stream
        )
        return near or self.sequences

    def _fork_into_store(
        self, cache: Cache, prompt: CachedPrompt, sequences: tuple[int, ...], donate: bool
    ) -> PrefixResult | None:
        """Fork a prompt of a sequence into one of `sequences`; None if it does not fit."""
        size = prompt.tokens.size
        alone, _ = seq_rm(seq_keep(cache, prompt.sequence).cache, prompt.sequence, size)
        if int(alone.num_used_cells()) > self.cells:
            return None
        store, by_sequence = self, {past.sequence: past for past in self.prompts}
        free = [seq for seq in sequences if seq not in by_sequence]
        seq = free[0] if free else next(seq for seq in by_sequence if seq in sequences)
        if not free:
            cache, store = store.evict_prompt(cache, by_sequence[seq])
        cache, _ = seq_rm(cache, seq)
        if not _can_copy(cache, prompt.sequence, seq, size):
            return None
        cache, _ = seq_cp(cache, prompt.sequence, seq, 0, size, donate=donate)
        kept = CachedPrompt(sequence=seq, tokens=prompt.tokens)
        cache, store = store._replace_fields(prompts=(*store.prompts, kept)).evict(
            cache, cells=self.cells
        )
        return PrefixResult(cache, store, PrefixHit(size, MissReason.NONE))

    def _check_tokens(
        self, cache: Cache, tokens: Ids, seq: Id
    ) -> tuple[Int32[np.ndarray, " n"], int]:
        """Return tokens, and a sequence that is not the store's."""
        self._check_made_for(cache)
        source = int(cache.table.spec.sequence_id(seq))
        if source in self.sequences:
            raise ValueError(
                f"expected a sequence beside those of the store, got {source}; pass one not of "
                f"{self.sequences}"
            )
        prompt = np.array(check_int32(tokens, "tokens"), np.int32)  # a copy, as the store keeps it
        if prompt.ndim != 1 or not prompt.size:
            raise ValueError(
                f"expected tokens [n] of one prompt of at least one token, got the shape "
                f"{prompt.shape}; pass one list of token ids"
            )
        return prompt, source

    def _check_made_for(self, cache: Cache) -> None:
        """Raise unless the store was made for a cache of this spec."""
        if _spec_of(cache) != self._spec:
            raise ValueError(
                "expected the cache that the store was made for, or one of its spec, got another; "
                "make a store for this one, PrefixStore(cache, sequences=...)"
            )


class PrefixResult(NamedTuple):
    """What `PrefixStore.fork` and `PrefixStore.store` return.

    cache: the next cache.
    store: the next store.
    hit: how much of the prompt there was, or is, and why it is no more.
    """

    cache: Cache
    store: PrefixStore
    hit: PrefixHit


class EvictResult(NamedTuple):
    """What `PrefixStore.evict` returns.

    cache: the next cache.
    store: the next store.
    """

    cache: Cache
    store: PrefixStore


def _spec_of(cache: Cache) -> TableSpec:
    """Return the spec of the table of a cache whose values are known.

    Raises:
      ValueError: when it is traced.
    """
    table, _ = split(cache)
    if not is_concrete(table):
        raise ValueError(
            "expected a cache outside of jit, since a store is a value of the host, got a traced "
            "one; call the store between jitted steps"
        )
    return table.spec


def _can_copy(cache: Cache, src: int, dst: int, stop: int) -> Bool[Array, ""]:
    """Return whether `seq_cp` of the first positions would be granted, asked of the table alone."""
    return _table_can_copy(cache.table, *map(np.int32, (src, dst, 0, stop)))


@jit_table
def _table_can_copy(table: CacheTable, *args: Int32[Array, ""]) -> Bool[Array, ""]:
    ok, _ = table.can_seq_cp(*args)
    return ok
