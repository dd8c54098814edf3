"""Prefix store: prompts in sequences of a cache, and forks from and to these sequences."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxkv.api.edits import seq_cp, seq_keep, seq_rm
from jaxkv.api.insert import insert
from jaxkv.cache import Cache
from jaxkv.core.constants import END
from jaxkv.core.validate import check_count
from jaxkv.serving.copies import can_copy, can_insert, check_host_bytes, warm_up_copies
from jaxkv.serving.prefix_cache.arguments import (
    check_prompt,
    check_sequences,
    spec_of_concrete,
)
from jaxkv.serving.prefix_cache.host_prompts import HostPrompts, move_to_end
from jaxkv.serving.prefix_cache.matching import (
    find_longest_match,
    find_miss_reasons,
    resumes_wherever,
)
from jaxkv.serving.prefix_cache.prompts import (
    CachedPrompt,
    HostPrompt,
    MissReason,
    ModelInputs,
    PrefixHit,
    PrefixMatch,
    PrefixStats,
)
from jaxkv.spec import TableSpec

if TYPE_CHECKING:
    from jaxtyping import PyTree

    from jaxkv.core.types import Id, Ids


@dataclass(frozen=True, init=False, repr=False, eq=False)
class PrefixStore:
    """Immutable index, on the CPU, of prompts in some sequences of a cache.

    Each sequence of the store contains one prompt or is empty. The method `store` forks a prompt
    into a sequence of the store, and the method `fork` forks a stored prefix into another sequence.
    A fork within a stream shares the cells of the prefix; a fork between streams copies the cells.

    The methods `fork`, `store` and `evict` return a new cache and a new store. Use the new store
    only with the new cache; the earlier store stays valid for the earlier cache. Only methods of
    the store may edit the sequences of the store. Prompts are compared by token ids and `extra`.
    Methods raise a ValueError if a cache is traced, or has another spec than the store.

    With `host_bytes`, an evicted prompt moves to host memory, and `fork` copies it back. An earlier
    store still has its own prompts in host memory.

    prompts: The stored prompts in the cache, least recently used first.
    evicted: Inputs of the last `len(sequences)` prompts that were evicted and are not in host
      memory, most recently evicted last.
    stats: Counts of hits, misses and evictions (`PrefixStats`).

    llama.cpp: `cache_prompt` of the server.
    """

    sequences: tuple[int, ...]
    cells: int
    prompts: tuple[CachedPrompt, ...]
    evicted: tuple[ModelInputs, ...]
    stats: PrefixStats
    _host: HostPrompts
    _spec: TableSpec

    def __init__(
        self,
        cache: Cache,
        *,
        sequences: Iterable[int],
        cells: int | None = None,
        host_bytes: int | None = None,
    ):
        """Make an empty store.

        Args:
          cache: A cache; later calls require caches of the same spec.
          sequences: Ids of empty sequences for the store, preferably some from each stream.
          cells: Maximum number of cells of the store; by default no limit. Shared cells count once.
          host_bytes: Maximum number of bytes of evicted prompts in host memory; by default, evicted
            prompts are dropped. If the limit is exceeded, the least recently used prompts in host
            memory are dropped. Their memory is free once no earlier store refers to them.

        Raises:
          ValueError: If no sequence id is given, or an id is repeated or not in the cache.
          ValueError: If one of the sequences is not empty, or a limit is below 1.
          ValueError: If the cache is traced or has a part for encoder sources.
        """
        spec = spec_of_concrete(cache)
        if spec.has_cross_attention:
            raise ValueError(
                "expected a cache without cross-attention, got such layers; fork a sequence with "
                "the same encoder source (seq_cp)"
            )
        self._set_fields(
            sequences=check_sequences(cache, sequences),
            cells=END if cells is None else check_count(cells, "cells"),
            prompts=(),
            evicted=(),
            stats=PrefixStats(),
            _host=HostPrompts(max_bytes=check_host_bytes(host_bytes)),
            _spec=spec,
        )

    def __repr__(self) -> str:
        tokens = sum(prompt.tokens.size for prompt in self.prompts)
        limit = f", at most {self.cells} cells" if self.cells < END else ""
        host = f", {self._host}" if self.host_bytes else ""
        return (
            f"PrefixStore({len(self.prompts)} prompts of {tokens} tokens, "
            f"{len(self.sequences)} sequences{limit}{host})"
        )

    @property
    def all_prompts(self) -> tuple[CachedPrompt | HostPrompt, ...]:
        """All prompts, first those in host memory; in each memory least recently used first."""
        return (*self._host.prompts, *self.prompts)

    @property
    def host_bytes(self) -> int:
        """Maximum number of bytes of prompts in host memory; 0 if prompts do not move there."""
        return self._host.max_bytes

    @property
    def num_host_bytes(self) -> int:
        """Number of bytes of host memory that the store uses."""
        return self._host.num_bytes

    def fork(
        self,
        cache: Cache,
        tokens: Ids,
        seq: Id,
        *,
        extra: Mapping[str, PyTree] | None = None,
        donate: bool = False,
    ) -> PrefixResult:
        """Fork the longest stored prefix of a prompt into a sequence.

        After the fork, the sequence contains only the first `hit.length` tokens of the prompt.
        Compute the rest of the prompt next. The last token of the prompt is never forked, since
        logits are not stored. If several prefixes are equally long, a prefix in the stream of `seq`
        is preferred, and a prefix in host memory comes last. A prompt in host memory is copied to a
        sequence of the store, if necessary in place of the least recently used prompt, so that
        later forks share its cells. If it does not fit, the prefix is copied to `seq` alone. If no
        copy fits, `hit.length` is 0, and the sequence is empty.

        Args:
          cache: The cache of the store.
          tokens: `[n]`. The whole prompt.
          seq: Id of a sequence that is not in the store. Its old tokens are removed.
          extra: Additional model inputs `[n, ...]` of the tokens by name, see `make_batch`.
          donate: Donate the buffers of the cache if cells must be copied, see `seq_cp`.

        Returns:
          The next `cache` and `store`, and `hit`: `hit.length` is the number of forked tokens, an
          int, `hit.miss` is the `MissReason` why not more tokens were forked, and `hit.from_host`
          is True if the prefix was in host memory.

        Raises:
          ValueError: If no token is given, or the sequence is in the store or not in the cache.

        Examples:
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
          >>> cache = make_cache(spec, cells=64, sequences=3)
          >>> store = serving.PrefixStore(cache, sequences=[2])
          >>> cache = prefill(forward, params, cache, [1, 2, 3]).cache
          >>> cache, store, _ = store.store(cache, [1, 2, 3], seq=0)
          >>> cache, store, hit = store.fork(cache, [1, 2, 9], seq=1)
          >>> hit.length, hit.miss.name, cache.seq_pos_max(1).item(), cache.num_used_cells().item()
          (2, 'NONE', 1, 3)
          >>> cache, store = store.evict(cache, cells=0)
          >>> store.fork(cache, [1, 2, 9], seq=1).hit.miss.name
          'EVICTED'

          With host memory, the evicted prompt comes back:

          >>> store = serving.PrefixStore(cache, sequences=[2], host_bytes=1000)
          >>> cache, store, _ = store.store(cache, [1, 2, 3], seq=0)
          >>> cache, store = store.evict(cache, cells=0)
          >>> store.stats.moved_to_host, store.num_host_bytes
          (1, 64)
          >>> store.fork(cache, [1, 2, 9], seq=1).hit
          PrefixHit(length=2, miss=<MissReason.NONE: 0>, from_host=True)
        """
        inputs, to = self._check_inputs(cache, tokens, seq, extra)
        return self.fork_match(cache, self.longest_match(cache, inputs, to), to, donate=donate)

    def store(
        self,
        cache: Cache,
        tokens: Ids,
        seq: Id,
        *,
        extra: Mapping[str, PyTree] | None = None,
        donate: bool = False,
    ) -> PrefixResult:
        """Store the first tokens of a sequence as a prompt; the sequence is unchanged.

        If `hit.length` of the result is 0, cache and store are unchanged. With a window, the store
        keeps only the cells in the window at the end of a prompt. With recurrent states, the store
        keeps only the states at the end. Therefore store a prompt up to the position where other
        prompts will diverge, such as the end of a common prefix.

        A prompt that is already stored is not stored again. The new prompt replaces a stored prompt
        that is a prefix of the new prompt. But both are stored if, at some position, only the old
        prompt can be resumed. If the store has no empty sequence, or exceeds its limit of cells,
        the least recently used prompts are evicted. If the store has no sequence in the stream of
        `seq`, the prompt is copied to another stream.

        Args:
          cache: The cache of the store.
          tokens: `[n]`. Tokens of the sequence from position 0 on. None of the tokens may have been
            moved by `generation.context_shift`.
          seq: Id of a sequence that is not in the store.
          extra: Additional model inputs `[n, ...]` with which the tokens were computed, by name.
          donate: See `fork`.

        Returns:
          The next `cache` and `store`, and `hit`: `hit.length` is the number of stored tokens, an
          int, and `hit.miss` is the `MissReason` why the prompt was not stored.

        Raises:
          ValueError: If the sequence has fewer positions than tokens, or if `fork` would raise.
        """
        inputs, source = self._check_inputs(cache, tokens, seq, extra)
        if (end := int(cache.seq_pos_max(source)) + 1) < len(inputs):
            raise ValueError(
                f"expected a sequence that holds these {len(inputs)} tokens, got sequence {source} "
                f"with {end}; compute them first (prefill)"
            )
        here = find_miss_reasons(cache, source, inputs)
        if here[-1] != MissReason.NONE:
            return PrefixResult(cache, self, PrefixHit(0, MissReason(here[-1])))
        prompt = CachedPrompt(sequence=source, inputs=inputs)
        sequences, others = self._sequences_in_stream(source), self
        for past in [past for past in self.prompts if past.sequence in sequences]:
            common = inputs.common_prefix_length(past.inputs)
            if common < min(len(inputs), len(past.inputs)):
                continue
            there = find_miss_reasons(cache, past.sequence, past.inputs)
            if common == len(inputs) and resumes_wherever(there, here):
                hit = PrefixHit(len(inputs), MissReason.NONE)
                return PrefixResult(cache, self.touch(past), hit)
            if common == len(past.inputs) and resumes_wherever(here, there):
                others, sequences = self._without_prompt(past), (past.sequence,)
                break
        kept = others._fork_into_store(cache, prompt, sequences, donate)
        return kept or PrefixResult(cache, self, PrefixHit(0, MissReason.OUT_OF_CELLS))

    def evict(self, cache: Cache, *, cells: int) -> EvictResult:
        """Evict the least recently used prompts until the store uses at most `cells` cells.

        With `host_bytes`, evicted prompts move to host memory. Cells that are shared with sequences
        outside of the store stay in use.

        Args:
          cache: The cache of the store.
          cells: Maximum number of cells of the store afterwards; 0 evicts all prompts.

        Returns:
          The next `cache` and `store`.

        Raises:
          ValueError: If `cells` is below 0.
        """
        max_cells, store = check_count(cells, "cells", low=0), self
        self._check_made_for(cache)
        while store.num_used_cells(cache) > max_cells:
            cache, store = store.evict_prompt(cache, store.prompts[0])
        return EvictResult(cache, store)

    def num_used_cells(self, cache: Cache) -> int:
        """Return the number of cells of the store, in all parts of a hybrid cache.

        A shared cell counts once, also if it is shared with a sequence outside of the store.
        """
        self._check_made_for(cache)
        others = np.setdiff1d(np.arange(self._spec.sequences), self.sequences)
        only, _ = seq_rm(cache, others)
        return int(only.num_used_cells())

    def with_prompts(
        self, prompts: Mapping[int, Ids], *, extra: Mapping[int, Mapping[str, PyTree]] | None = None
    ) -> PrefixStore:
        """Return a store with the given prompts and none in host memory, as those of a snapshot.

        Args:
          prompts: Tokens `[n]` by sequence id, least recently used first, compared with no cache.
          extra: Additional model inputs, see `fork`, of each prompt by sequence id.

        Raises:
          ValueError: If a sequence id is not in the store.
        """
        inputs = {} if extra is None else extra
        if others := {*prompts, *inputs} - set(self.sequences):
            raise ValueError(
                f"expected sequences of the store, some of {self.sequences}, got {sorted(others)}; "
                f"load the prompts into those"
            )
        cached = tuple(
            CachedPrompt(sequence=seq, inputs=check_prompt(tokens, inputs.get(seq)))
            for seq, tokens in prompts.items()
        )
        host = HostPrompts(max_bytes=self.host_bytes)
        return self._replace_fields(prompts=cached, evicted=(), _host=host)

    def warm_up(
        self,
        cache: Cache,
        *,
        extra: Mapping[str, PyTree] | None = None,
        donate: bool = False,
    ) -> Cache:
        """Compile the programs of all methods for all prompt lengths; return the unchanged cache.

        To compile copies within a stream, the stream of the first store sequence must have an empty
        sequence outside of the store. To compile copies between streams, another stream must have
        an empty sequence outside of the store. Copies from host memory need one of these sequences.
        They commit the cache to its devices, and JAX compiles programs again for committed arrays,
        so compile other programs later, with the returned cache.

        Args:
          cache: The cache of the store.
          extra: Additional model inputs of later prompts, with no token, by name.
          donate: Value of `donate` in later calls. If True, the input cache becomes invalid.
        """
        self.num_used_cells(cache)
        first_seq, per_stream = self.sequences[0], self._spec.sequences_per_stream
        others = [seq for seq in range(self._spec.sequences) if seq not in self.sequences]
        nothing = ModelInputs(tokens=np.zeros(0, np.int32), extra=extra or {})
        find_miss_reasons(cache, first_seq, nothing)
        seq_rm(seq_keep(cache, first_seq).cache, first_seq, 0)
        empty = [seq for seq in others if int(cache.seq_pos_max(seq)) < 0]
        for seq in {seq // per_stream == first_seq // per_stream: seq for seq in empty}.values():
            can_copy(cache, first_seq, seq, 0)
            cache, _ = seq_cp(cache, first_seq, seq, 0, 0, donate=donate)
        if self.host_bytes and empty:
            cache = warm_up_copies(cache, empty[0], donate=donate)
        return cache

    def longest_match(self, cache: Cache, inputs: ModelInputs, seq: int) -> PrefixMatch:
        """Return the stored prompt that shares the longest resumable prefix with given inputs."""
        near = self._sequences_in_stream(seq)
        return find_longest_match(cache, self.all_prompts[::-1], self.evicted, inputs, near)

    def fork_match(
        self, cache: Cache, match: PrefixMatch, seq: int, *, donate: bool
    ) -> PrefixResult:
        """Replace the tokens of a sequence by the prefix that `longest_match` found."""
        (source, hit), (cache, _), store = match, seq_rm(cache, seq), self
        if isinstance(source, HostPrompt):
            cache, store, hit = self._fork_from_host(cache, source, hit, seq, donate)
        elif source is not None:
            cache, store, hit = self._fork_from_sequence(cache, source, hit, seq, donate)
        return PrefixResult(cache, store._replace_fields(stats=store.stats.add_fork(hit)), hit)

    def touch(self, prompt: CachedPrompt | HostPrompt) -> PrefixStore:
        """Return a store that lists a prompt as most recently used, if the prompt is stored."""
        prompts = move_to_end(self.prompts, prompt)
        return self._replace_fields(prompts=prompts, _host=self._host.touch(prompt))

    def evict_prompt(self, cache: Cache, prompt: CachedPrompt) -> EvictResult:
        """Empty the sequence of a prompt: move the prompt to host memory, or drop it."""
        host, dropped = self._host.add(cache, prompt)
        cache, _ = seq_rm(cache, prompt.sequence)
        is_moved = not any(inputs is prompt.inputs for inputs in dropped)
        store = self._without_prompt(prompt)._replace_fields(
            evicted=(*self.evicted, *dropped)[-len(self.sequences) :],
            stats=self.stats.add_eviction(moved_to_host=is_moved, dropped=len(dropped)),
            _host=host,
        )
        return EvictResult(cache, store)

    def _set_fields(self, **fields: object) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _replace_fields(self, **fields: object) -> PrefixStore:
        clone = copy.copy(self)
        clone._set_fields(**fields)
        return clone

    def _without_prompt(self, prompt: CachedPrompt) -> PrefixStore:
        return self._replace_fields(
            prompts=tuple(past for past in self.prompts if past is not prompt)
        )

    def _sequences_in_stream(self, seq: int) -> tuple[int, ...]:
        """Return the store sequences in the stream of `seq`; if none, all store sequences."""
        per_stream = self._spec.sequences_per_stream
        near = tuple(
            own_seq for own_seq in self.sequences if own_seq // per_stream == seq // per_stream
        )
        return near or self.sequences

    def _choose_sequence(self, sequences: tuple[int, ...]) -> tuple[int, CachedPrompt | None]:
        """Return an empty sequence; if none, that of the least recently used prompt, with this."""
        by_sequence = {past.sequence: past for past in self.prompts}
        free = [seq for seq in sequences if seq not in by_sequence]
        seq = free[0] if free else next(seq for seq in by_sequence if seq in sequences)
        return seq, by_sequence.get(seq)

    def _fork_from_sequence(
        self, cache: Cache, source: CachedPrompt, hit: PrefixHit, seq: int, donate: bool
    ) -> PrefixResult:
        """Fork the first tokens of a prompt into an empty sequence."""
        if not can_copy(cache, source.sequence, seq, hit.length):
            return PrefixResult(cache, self, PrefixHit(0, MissReason.OUT_OF_CELLS))
        cache, _ = seq_cp(cache, source.sequence, seq, 0, hit.length, donate=donate)
        return PrefixResult(cache, self.touch(source), hit)

    def _fork_from_host(
        self, cache: Cache, source: HostPrompt, hit: PrefixHit, seq: int, donate: bool
    ) -> PrefixResult:
        """Move a prompt from host memory to the store and fork it; if it does not fit, copy it."""
        store, (target, past) = self, self._choose_sequence(self._sequences_in_stream(seq))
        if can_insert(cache, source.cache, target):
            store = self._replace_fields(_host=self._host.without(source))
            if past:
                cache, store = store.evict_prompt(cache, past)
            cache, _ = insert(cache, source.cache, 0, target, donate=donate)
            prompt = CachedPrompt(sequence=target, inputs=source.inputs)
            store = store._replace_fields(prompts=(*store.prompts, prompt))
            cache, store, forked = store._fork_from_sequence(cache, prompt, hit, seq, donate)
            cache, store = store.evict(cache, cells=self.cells)
            if forked.length:
                return PrefixResult(cache, store, hit)
        begin, _ = seq_rm(source.cache, 0, hit.length)
        if not can_insert(cache, begin, seq):
            return PrefixResult(cache, store, PrefixHit(0, MissReason.OUT_OF_CELLS))
        cache, _ = insert(cache, begin, 0, seq, donate=donate)
        return PrefixResult(cache, store.touch(source), hit)

    def _fork_into_store(
        self, cache: Cache, prompt: CachedPrompt, sequences: tuple[int, ...], donate: bool
    ) -> PrefixResult | None:
        """Fork a prompt into one of the given sequences; return None if the prompt does not fit."""
        size = len(prompt.inputs)
        alone, _ = seq_rm(seq_keep(cache, prompt.sequence).cache, prompt.sequence, size)
        if int(alone.num_used_cells()) > self.cells:
            return None
        store, (seq, past) = self, self._choose_sequence(sequences)
        emptied, _ = seq_rm(cache, seq)
        if not can_copy(emptied, prompt.sequence, seq, size):
            return None
        if past:
            _, store = store.evict_prompt(cache, past)
        cache, _ = seq_cp(emptied, prompt.sequence, seq, 0, size, donate=donate)
        kept = CachedPrompt(sequence=seq, inputs=prompt.inputs)
        cache, store = store._replace_fields(prompts=(*store.prompts, kept)).evict(
            cache, cells=self.cells
        )
        return PrefixResult(cache, store, PrefixHit(size, MissReason.NONE))

    def _check_inputs(
        self, cache: Cache, tokens: Ids, seq: Id, extra: Mapping[str, PyTree] | None
    ) -> tuple[ModelInputs, int]:
        self._check_made_for(cache)
        source = int(cache.table.spec.sequence_id(seq))
        if source in self.sequences:
            raise ValueError(
                f"expected a sequence outside of the store, got {source}; pass one not in "
                f"{self.sequences}"
            )
        return check_prompt(tokens, extra), source

    def _check_made_for(self, cache: Cache) -> None:
        if spec_of_concrete(cache) != self._spec:
            raise ValueError(
                "expected the cache that the store was made for, or one of its spec, got another; "
                "make a store for this one, PrefixStore(cache, sequences=...)"
            )


class PrefixResult(NamedTuple):
    """Result of `PrefixStore.fork` and `PrefixStore.store`, with the next cache and store."""

    cache: Cache
    store: PrefixStore
    hit: PrefixHit


class EvictResult(NamedTuple):
    """Result of `PrefixStore.evict`: the next cache and the next store."""

    cache: Cache
    store: PrefixStore
