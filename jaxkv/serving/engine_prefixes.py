"""Prefix store of an engine, for the cache in the `ModelRunner` of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from jaxkv.jit_helpers import jit_method
from jaxkv.serving.copies import commit
from jaxkv.serving.model_runner import ModelRunner
from jaxkv.serving.prefill_chunks import PASS
from jaxkv.serving.prefix_cache.prompts import CachedPrompt, PrefixHit, PrefixMatch
from jaxkv.serving.prefix_cache.store import PrefixStore
from jaxkv.serving.request import NOTHING, RequestState
from jaxkv.table import CacheTable

if TYPE_CHECKING:
    from jaxtyping import PyTree

    from jaxkv.cache import Cache


class CacheAndStore(NamedTuple):
    """A cache, and the prefix store with sequences in this cache; None if there is no store."""

    cache: Cache
    store: PrefixStore | None


class EnginePrefixes:
    """Optional prefix store of an engine; forks and stores prefixes in the cache of the engine."""

    def __init__(self, runner: ModelRunner, store: PrefixStore | None):
        self._runner, self.store = runner, store
        table = runner.cache.table
        if not isinstance(store, PrefixStore | None):
            raise TypeError(
                f"expected a PrefixStore, got {type(store).__name__}; make one of the cache, or "
                f"pass prefix_sequences="
            )
        kept = 0 if store is None else store.num_used_cells(runner.cache)
        if occupied := int(runner.cache.num_used_cells()) - kept:
            raise ValueError(
                f"expected an empty cache, got one with {occupied} cells in use; clear(cache)"
            )
        if store and len(store.sequences) == table.spec.sequences:
            raise ValueError(
                f"expected a store that leaves sequences to requests, got one with all "
                f"{table.spec.sequences}; pass fewer, or make a cache with more"
            )
        if store and store.host_bytes:
            runner.cache = commit(runner.cache)
        shapes = jax.eval_shape(table.num_cells_saved_by_sharing)
        self.nothing = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        self._sharing = table.spec.sequences_per_stream

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences of the store, which requests cannot use."""
        return self.store.sequences if self.store else ()

    def num_stored_tokens(self, stream: int) -> dict[int, int]:
        """Return the number of tokens of each stored prompt in a stream, by sequence id."""
        return {state.sequence: state.tokens.size for state in self._prompts_in_stream(stream)}

    @property
    def cache_and_store(self) -> CacheAndStore:
        """The current cache and store; `rewind` can restore them until a cell is written."""
        return CacheAndStore(self._runner.cache, self.store)

    def rewind(self, past: CacheAndStore) -> None:
        """Restore an earlier value of `cache_and_store`."""
        self._runner.cache, self.store = past

    def num_cells_saved_by_sharing(self) -> PyTree:
        """Return `CacheTable.num_cells_saved_by_sharing` on the CPU; zeros without a store."""
        if self.store is None:
            return self.nothing
        return jax.device_get(_num_cells_saved_by_sharing(self._runner.cache.table))

    def warm_up(self) -> None:
        """Compile the programs of all methods."""
        if self.store:
            self.num_cells_saved_by_sharing()
            extra = self._runner.empty_extra(0)
            self._runner.cache = self.store.warm_up(self._runner.cache, extra=extra, donate=True)

    def find_match(
        self, state: RequestState, others: Sequence[RequestState], sequence: int
    ) -> PrefixMatch | None:
        """Return the longest stored prefix of the tokens of a request.

        Return None if the request must wait until another request has computed a longer prefix that
        both requests share.
        """
        if self.store is None or state.swapped:
            return PrefixMatch(None, NOTHING)
        inputs = state.all_inputs()
        match = self.store.longest_match(self._runner.cache, inputs, sequence)
        shared = [
            (
                state.all_inputs().common_prefix_length(inputs[:-1]),
                state.num_cached_tokens,
                state,
            )
            for state in others
        ]
        num_shared, _, nearest = max(shared, key=lambda entry: entry[:2], default=(0, 0, state))
        if num_shared - match.hit.length > PASS:
            if not nearest.is_running and nearest.num_computed_tokens < num_shared:
                nearest.branch_points.add(num_shared)
                return None
            self.store_prefix(nearest, min(num_shared, nearest.num_cached_tokens))
            match = self.store.longest_match(self._runner.cache, inputs, sequence)
        lengths = [
            prompt.inputs.common_prefix_length(inputs[:-1]) for prompt in self.store.all_prompts
        ]
        furthest = max([num_shared, *lengths])
        state.branch_points = {furthest} if furthest - match.hit.length > PASS else set()
        return match

    def is_in_same_stream(self, match: PrefixMatch, sequence: int) -> bool:
        """Return whether a match and a sequence are in one stream; a fork then copies no cells."""
        prompt = match.prompt
        if not isinstance(prompt, CachedPrompt):
            return False
        return prompt.sequence // self._sharing == sequence // self._sharing

    def fork_prefix(self, match: PrefixMatch, sequence: int) -> PrefixHit:
        """Fork a matched prefix into a sequence; return length 0 if too few cells are free."""
        if self.store is None:
            return match.hit
        self._runner.cache, self.store, hit = self.store.fork_match(
            self._runner.cache, match, sequence, donate=True
        )
        return hit

    def num_stored_prefix_tokens(self, state: RequestState) -> int:
        """Return the number of cached tokens of a request that are also in the store."""
        if self.store is None:
            return 0
        inputs = state.all_inputs()
        return self.store.longest_match(self._runner.cache, inputs, state.sequence).hit.length

    def store_prefix(self, state: RequestState, length: int) -> None:
        """Store the first tokens of a request, if these tokens can be resumed."""
        if self.store is None or not length:
            return
        inputs = state.all_inputs()[:length]
        self._runner.cache, self.store, _ = self.store.store(
            self._runner.cache, inputs.tokens, state.sequence, extra=inputs.extra, donate=True
        )

    def store_ended_request(self, state: RequestState) -> None:
        """Store the tokens of an ended request; mark its source prompt as recently used."""
        if self.store and state.source:
            self.store = self.store.touch(state.source)
        self.store_prefix(state, state.num_cached_tokens)

    def evict_one(self, stream: int) -> bool:
        """Evict the least recently used prompt of a stream; return False if there is no prompt."""
        states = self._prompts_in_stream(stream)
        if self.store and states:
            self._runner.cache, self.store = self.store.evict_prompt(self._runner.cache, states[0])
        return bool(states)

    def _prompts_in_stream(self, stream: int) -> list[CachedPrompt]:
        prompts = self.store.prompts if self.store else ()
        return [prompt for prompt in prompts if prompt.sequence // self._sharing == stream]


_num_cells_saved_by_sharing = jit_method(CacheTable.num_cells_saved_by_sharing)
