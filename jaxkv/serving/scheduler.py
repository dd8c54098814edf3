"""Request scheduler on the CPU: assigns sequences, queues and preempts requests."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

import numpy as np

from jaxkv.serving.engine_prefixes import EnginePrefixes, PrefixMatch
from jaxkv.serving.request import EngineConfig, RequestState
from jaxkv.serving.swapping import Swapper
from jaxkv.table import CacheTable

if TYPE_CHECKING:
    from jaxtyping import Bool, PyTree


class Scheduler:
    """Assigns sequences of a cache to requests; evicts stored prompts if requests need cells."""

    def __init__(
        self,
        table: CacheTable,
        *,
        limits: EngineConfig,
        reserve: bool,
        prefixes: EnginePrefixes,
        swapper: Swapper,
    ):
        self._table, self._steps, self.reserves = table, limits.tokens_per_step, reserve
        self._prefixes, self._swapper = prefixes, swapper
        self._sharing = table.spec.sequences_per_stream
        self._at_once = max(limits.prefill_chunk, self._sharing)
        self._waiting: list[RequestState] = []
        self._stuck: RequestState | None = None  # did not fit, and no cell was freed since
        self._placed: list[RequestState | None] = [None] * table.spec.sequences

    @property
    def all_requests(self) -> list[RequestState]:
        """The requests that wait or have a sequence."""
        return [*self._waiting, *filter(None, self._placed)]

    @property
    def has_waiting(self) -> bool:
        """Whether a request waits for a sequence."""
        return bool(self._waiting)

    @property
    def prefilling_requests(self) -> list[RequestState]:
        """The requests with a sequence and an incomplete prompt, oldest first."""
        return _sort_by_age([state for state in self._placed if state and not state.is_running])

    @property
    def running_requests(self) -> list[RequestState]:
        """The requests that generate tokens."""
        return [state for state in self._placed if state and state.is_running]

    def stream_of(self, state: RequestState) -> int:
        """Return the stream of a request's sequence."""
        return state.sequence // self._sharing

    def requests_in_stream(self, stream: int) -> list[RequestState]:
        """Return the requests whose sequences are in a stream, oldest first."""
        first = stream * self._sharing
        return _sort_by_age([*filter(None, self._placed[first : first + self._sharing])])

    def queue_request(self, state: RequestState) -> None:
        """Queue a request; raise a ValueError if even an empty cache has too few cells."""
        request = state.request
        length = state.max_cached_tokens if self.reserves else len(request.prompt)
        if not self._can_allocate({0: length}, self._prefixes.nothing)[0]:
            new = f", and all but the last of {request.max_new_tokens} new tokens"
            raise ValueError(
                f"expected cells for {length} tokens (a prompt of {len(request.prompt)}"
                f"{new if self.reserves else ''}), got a cache of fewer cells; lower "
                f"max_new_tokens, or make the cache larger"
            )
        self._waiting.append(state)

    def admit(self) -> None:
        """Assign sequences to waiting requests in order, until a request does not fit."""
        for stream in range(self._table.spec.streams):  # running requests need cells first
            self._evict_until_enough(stream)
        while self._waiting and self._waiting[0] is not self._stuck:
            state, free = self._waiting[0], self._free_sequences()
            if not free:
                return
            match = self._prefixes.find_match(state, [*filter(None, self._placed)], free[0])
            if match is None:  # the request waits for another request
                return
            if not self._assign_sequence(state, free, match):
                self._stuck = state
                return
            self._waiting.pop(0)

    def remove_request(self, state: RequestState) -> None:
        """Remove a request that waits or has a sequence."""
        self._stuck = None
        if state.sequence >= 0:
            self._placed[state.sequence], state.sequence = None, -1
        else:
            self._waiting.remove(state)

    def preempt(self, state: RequestState) -> None:
        """Free the sequence of a request; queue the request between older and younger requests."""
        self.remove_request(state)
        insort(self._waiting, state, key=lambda state: state.id)

    def _free_sequences(self) -> list[int]:
        """Return the lowest free sequence of each stream; omit streams that have none."""
        free = [q for q, state in enumerate(self._placed) if not state]
        free = [q for q in free if q not in self._prefixes.sequences]
        return [*{q // self._sharing: q for q in reversed(free)}.values()][::-1]

    def _assign_sequence(self, state: RequestState, free: list[int], match: PrefixMatch) -> bool:
        """Assign a free sequence, if necessary after evictions; return whether the request fits."""
        free = sorted(
            free, key=lambda sequence: not self._prefixes.is_in_same_stream(match, sequence)
        )
        # Streams with enough cells are tried before a stored prompt is evicted in any stream.
        # Within each round, a stream that shares the prefix comes first, since other streams need a
        # copy.
        return any(
            self._try_assign_sequence(state, sequence, match, may_evict)
            for may_evict in (False, True)
            for sequence in free
        )

    def _try_assign_sequence(
        self, state: RequestState, sequence: int, match: PrefixMatch, may_evict: bool
    ) -> bool:
        """Assign a sequence and return True if the request fits; else restore cache and store."""
        past = self._prefixes.cache_and_store
        near = self._prefixes.is_in_same_stream(match, sequence)
        self._placed[sequence], state.sequence = state, sequence
        hit = self._prefixes.fork_prefix(match, sequence) if near else match.hit
        while not self._has_enough_cells(self.stream_of(state)):
            if not (may_evict and self._prefixes.evict_one(self.stream_of(state))):
                self._prefixes.rewind(past)
                self._placed[sequence], state.sequence = None, -1
                return False
        if self._swapper.swap_in(state):
            return True
        if not near:
            hit = self._prefixes.fork_prefix(match, sequence)
            self._evict_until_enough(self.stream_of(state))  # a prompt from host memory needs cells
        state.begin_from_prefix(match.prompt, hit)
        return True

    def _evict_until_enough(self, stream: int) -> None:
        """Evict stored prompts of a stream until its requests have enough cells."""
        while not self._has_enough_cells(stream) and self._prefixes.evict_one(stream):
            pass

    def _has_enough_cells(self, stream: int) -> bool:
        """Return whether a stream has enough cells for its requests and stored prompts."""
        beside = self.requests_in_stream(stream)
        kept = self._prefixes.num_stored_tokens(stream)
        if not kept and len(beside) < 2:
            return True  # a single request fits, as checked when queued
        lengths = {state.sequence: self._num_required_cells(state) for state in beside}
        return bool(
            self._can_allocate(lengths | kept, self._prefixes.num_cells_saved_by_sharing())[stream]
        )

    def _num_required_cells(self, state: RequestState) -> int:
        """Return the number of cells for a request: in total if `reserves`, else for one step."""
        if self.reserves:
            return state.max_cached_tokens
        soon = len(state.request.prompt) + len(state.tokens) + self._steps
        return min(soon, state.max_cached_tokens)

    def _can_allocate(
        self, lengths: dict[int, int], num_shared_cells: PyTree
    ) -> Bool[np.ndarray, " S"]:
        """Return which streams have enough cells; `lengths`: number of tokens by sequence id."""
        tokens = np.zeros(len(self._placed), np.int64)
        tokens[[*lengths]] = [*lengths.values()]
        return self._table.can_allocate(tokens, self._at_once, num_shared_cells)


def _sort_by_age(states: list[RequestState]) -> list[RequestState]:
    return sorted(states, key=lambda state: state.id)
