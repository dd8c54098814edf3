"""Engine that runs many requests in one cache, with a scheduler on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import jax

from jaxkv.cache import Cache, split
from jaxkv.core.donation import check_not_donated
from jaxkv.core.validate import check_count
from jaxkv.generation.constraints import Constraint
from jaxkv.generation.model_step import Edit, Forward
from jaxkv.plan import Reason
from jaxkv.serving.engine_prefixes import EnginePrefixes
from jaxkv.serving.model_runner import ModelRunner, RunnerOutput
from jaxkv.serving.prefix_cache.store import PrefixStore
from jaxkv.serving.request import (
    FinishReason,
    Request,
    RequestOutput,
    RequestState,
    check_config,
    check_request,
)
from jaxkv.serving.scheduler import Scheduler
from jaxkv.serving.swapping import Swapper

if TYPE_CHECKING:
    from jaxtyping import PyTree

    from jaxkv.generation.types import StopTokens

DEFAULT_OPTIONS = ("temperature", "top_k", "top_p", "min_p")
"""Default sampling options of requests; penalties are excluded, since they slow each step."""


class Engine:
    """Runs many requests in the Q sequences of a cache.

    Requests wait for a free sequence and free cells, first come, first served. The tokens of a
    request do not depend on other requests. An engine is not thread-safe: call `submit` and
    `cancel` between steps.

    If the model function raises during tracing, the engine is unchanged. If a compiled program
    fails or is interrupted, the cache is lost, and methods that need the cache raise a
    RuntimeError. Without the cache, `results` still yields the results of ended requests, and
    `tokens_of` still returns the generated tokens of each other request.

    Args:
      forward: Model function `(params, step) -> step, logits [O, V]`, see `prefill`.
      params: Model parameters, any pytree.
      cache: A cache that is empty except for the sequences of `prefix_store`. The input cache is
        donated; `engine.cache` is the current cache.
      stop_tokens: `[n]`. Tokens that end any request.
      prefill_chunk: Maximum number of prompt tokens that are computed at once. A running request
        waits for at most one chunk between two tokens.
      tokens_per_step: Maximum number of tokens that a request generates before the CPU reads them.
      reserve: If True, a request starts only after cells for its prompt and `max_new_tokens` are
        reserved. If False, a request starts when its prompt and the tokens of a step fit; if cells
        run out, the youngest request is preempted, and later recomputed, or see `host_bytes`.
      sampling_options: Names of the `make_sampler` options that requests can set; by default
        "temperature", "top_k", "top_p" and "min_p".
      penalty_last_n: Number of recent tokens to penalise.
      max_stop_tokens: Maximum number of stop tokens of a request.
      constraint: Constraint, such as a grammar, for requests with a `constraint_state`.
      extra: Additional model inputs of each token of requests without `extra`, by name without an
        axis of tokens, such as `{"rope_offsets": np.zeros(3, np.int32)}`; see `make_batch`.
      edit: Function `(cache, aux) -> cache`, called after each chunk of prompts and after each
        generated token, see `decode`. Requests wait for as many free cells as if
        `edit` evicted no token.
      prefix_sequences: Sequence ids for a new prefix store, `engine.prefix_store`. The longest
        stored prefix of a prompt is not computed again. The tokens of ended requests and common
        prefixes of prompts are stored. The least recently used prompts of the store are evicted
        if a request needs their cells to start or to continue.
      prefix_store: An existing store, instead of `prefix_sequences`; for example a store with a
        limit of cells or with host memory, or the store of an earlier engine.
      host_bytes: Maximum number of bytes of preempted requests in host memory, apart from the
        memory of `prefix_store`; default 0. A preempted request is copied to host memory and back,
        instead of recomputed, if the copies take less time (`serving.swapping.FLOPS_PER_BYTE`).

    Raises:
      ValueError: If the cache is not empty, was donated, or has a part for encoder sources.
      ValueError: If `max_stop_tokens` is below 0, or another number is below 1.
      ValueError: If `prefill_chunk` exceeds the ubatch size of the cache.
      ValueError: If a name in `sampling_options` is unknown.
      ValueError: If a function of the constraint returns a wrong shape or dtype.
      ValueError: If `prefix_store` was made for another cache, uses all sequences of the cache, or
        is passed with `prefix_sequences`.

    Examples:
      The model predicts the next number, and 3 is the stop token:

      >>> def forward(params, step):
      ...     x = jnp.take(params, step.tokens, axis=0)[:, :, None]
      ...     step, _ = attend(step, 0, x, x, x)
      ...     return step, jnp.roll(x, 1, axis=-1).reshape(-1, 4)[step.outputs]
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=4)
      >>> cache = make_cache(spec, cells=8, sequences=2)
      >>> engine = serving.Engine(forward, jnp.eye(4), cache, stop_tokens=[3], prefill_chunk=8)
      >>> request = serving.Request
      >>> ids = [engine.submit(request(prompt=[n], max_new_tokens=n + 1)) for n in (1, 3, 0)]
      >>> for result in engine.results():
      ...     print(result.id, result.tokens.tolist(), result.reason.name)
      0 [2, 3] STOP
      2 [1] LENGTH
      1 [0, 1, 2, 3] STOP
      >>> engine.generate([request(prompt=[1], max_new_tokens=5)])[0].tokens.tolist()
      [2, 3]
      >>> engine.submit(request(prompt=[0], max_new_tokens=2))
      4
      >>> for request_id, tokens, reason in engine.stream():
      ...     print(request_id, tokens, reason and reason.name)
      4 [1, 2] LENGTH
    """

    def __init__(
        self,
        forward: Forward,
        params: PyTree,
        cache: Cache,
        *,
        stop_tokens: StopTokens = (),
        prefill_chunk: int | None = None,
        tokens_per_step: int = 8,
        reserve: bool = True,
        sampling_options: Collection[str] = DEFAULT_OPTIONS,
        penalty_last_n: int = 64,
        max_stop_tokens: int = 4,
        constraint: Constraint | None = None,
        extra: Mapping[str, PyTree] | None = None,
        edit: Edit | None = None,
        prefix_sequences: Iterable[int] | None = None,
        prefix_store: PrefixStore | None = None,
        host_bytes: int | None = None,
    ):
        if not callable(forward):
            raise TypeError(
                f"expected a function forward, see prefill, got {type(forward)}; pass forward, "
                "params, cache"
            )
        table, _ = split(cache)
        check_not_donated(cache)
        if table.spec.has_cross_attention:
            raise ValueError(
                "expected a cache without cross-attention, got such layers; call encode and "
                "decode, since requests have no encoder source"
            )
        self._limits = check_config(
            table.spec,
            prefill_chunk=prefill_chunk,
            tokens_per_step=tokens_per_step,
            sampling_options=sampling_options,
            penalty_last_n=penalty_last_n,
            max_stop_tokens=max_stop_tokens,
            constraint=constraint,
            extra=extra,
        )
        self._runner = ModelRunner(
            forward, params, cache, edit=edit, stop_tokens=stop_tokens, limits=self._limits
        )
        if prefix_sequences is not None:
            if prefix_store is not None:
                raise ValueError(
                    "expected prefix_sequences or a prefix_store, got both; pass the store alone, "
                    "which has its sequences"
                )
            prefix_store = PrefixStore(cache, sequences=prefix_sequences)
        self._prefixes = EnginePrefixes(self._runner, prefix_store)
        self._swapper = Swapper(self._runner, params, host_bytes)
        self._schedule = Scheduler(
            table,
            limits=self._limits,
            reserve=reserve,
            prefixes=self._prefixes,
            swapper=self._swapper,
        )
        self._is_cache_lost = False
        self._next = 0
        self._done: list[RequestOutput] = []

    @property
    def cache(self) -> Cache:
        """The current cache; the next step donates its buffers."""
        self._check_cache()
        return self._runner.cache

    @property
    def prefix_store(self) -> PrefixStore | None:
        """The current prefix store of `engine.cache`; None if there is no store."""
        return self._prefixes.store

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs, or a result was not returned yet."""
        return bool(self._done or self._schedule.all_requests)

    def submit(self, request: Request) -> int:
        """Queue a request; return the id of the request, counted from 0.

        Raises:
          ValueError: If the prompt is empty, or a number is out of range.
          ValueError: If there are too many stop tokens, or a sampling option is not allowed.
          ValueError: If `extra` has other names, shapes or dtypes than `extra` of the engine.
          ValueError: If `constraint_state` has other shapes or dtypes than `Constraint.first`, or
            is passed to an engine without a constraint.
          ValueError: If even an empty cache has too few cells for the prompt, or, if `reserve` is
            True, for the prompt and `max_new_tokens` tokens.
        """
        self._check_cache()
        state = RequestState(id=self._next, request=check_request(request, self._limits))
        self._schedule.queue_request(state)
        self._next += 1
        return state.id

    def cancel(self, request_id: int) -> bool:
        """End a request now, and free its cells; return False if the request has already ended.

        The result of the request has the tokens generated so far.

        Raises:
          ValueError: If no request has the id `request_id`.
        """
        state = self._live_request(request_id)
        if state is None:
            return False
        self._check_cache()
        with self._record_cache_loss():
            self._finish_requests([(state, FinishReason.CANCELLED)])
        return True

    def tokens_of(self, request_id: int) -> list[int]:
        """Return the tokens generated so far; [] if the request ended. For errors see `cancel`."""
        state = self._live_request(request_id)
        return [] if state is None else list(state.tokens)

    def results(self) -> Iterator[RequestOutput]:
        """Run steps until all requests have ended, and yield the results of requests.

        Requests may be submitted and cancelled between two results.
        """
        while self.busy:
            if not self._done:
                self._run_step()
            while self._done:
                yield self._done.pop(0)

    def generate(
        self,
        requests: Iterable[Request],
        *,
        num_samples: int = 1,
        on_output: Callable[[RequestOutput, int], object] | None = None,
    ) -> list[RequestOutput]:
        """Submit requests, run steps until all of them have ended, and return their outputs.

        If the engine has a prefix store, the samples of a request share one computation of its
        prompt, provided that the prompt has at least 26 tokens.

        Args:
          requests: Requests to submit.
          num_samples: Number of samples of each request. Sample j of request i has the seed
            `request.seed + i * num_samples + j`.
          on_output: Called when a sample ends, with its output and the number of samples left.

        Returns:
          A list; sample j of request i is at index `i * num_samples + j`. Outputs of requests
          that were submitted earlier are returned by the next `step` or `results`.

        Raises:
          ValueError: If `num_samples` is below 1, or `submit` would raise; no request is submitted.
          Exception: If `on_output` raises. No request is cancelled; `results` yields all outputs.
        """
        num_samples, requests = check_count(num_samples, "num_samples"), list(requests)
        if on_output is not None and not callable(on_output):
            raise TypeError(f"expected a function on_output, got {type(on_output)}; pass one")
        ids: list[int] = []
        outputs: dict[int, RequestOutput] = {}
        others: list[RequestOutput] = []
        try:
            for i, request in enumerate(requests):
                check_request(request, self._limits)
                for j in range(num_samples):
                    seed = int(request.seed) + i * num_samples + j
                    ids.append(self.submit(replace(request, seed=seed % 2**32)))
        except BaseException:
            for request_id in ids:
                self.cancel(request_id)
            self._done = [output for output in self._done if output.id not in ids]
            raise
        try:
            for output in self.results() if ids else ():
                if output.id not in ids:
                    others.append(output)
                    continue
                outputs[output.id] = output
                if on_output is not None:
                    on_output(output, len(ids) - len(outputs))
                if len(outputs) == len(ids):
                    break
        except BaseException:
            others += outputs.values()  # not lost: `results` returns them
            raise
        finally:
            self._done = others + self._done
        return [outputs[request_id] for request_id in ids]

    def stream(self) -> Iterator[tuple[int, list[int], FinishReason | None]]:
        """Run steps until all requests have ended, and yield tokens as they are generated.

        Requests may be submitted and cancelled between two items.

        Yields:
          The id of a request, the new tokens of the request, and None. The last item of a request
          has a `FinishReason` instead of None, and may have no tokens.
        """
        sent: dict[int, int] = {}
        while self.busy:
            for result in self.step():
                yield result.id, result.tokens[sent.pop(result.id, 0) :].tolist(), result.reason
            for state in list(self._schedule.all_requests):
                if new := state.tokens[sent.get(state.id, 0) :]:
                    sent[state.id] = len(state.tokens)
                    yield state.id, list(map(int, new)), None

    def step(self) -> list[RequestOutput]:
        """Compute a chunk of prompts, then generate tokens; return results of ended requests."""
        self._run_step()
        done, self._done = self._done, []
        return done

    def warm_up(self) -> None:
        """Compile all programs."""
        self._check_cache()
        self._runner.warm_up()
        self._prefixes.warm_up()
        self._swapper.warm_up()

    def _check_cache(self) -> None:
        if self._is_cache_lost or not self._runner.has_cache:
            raise RuntimeError(
                "expected an engine with its cache, got one that has lost it: a step was cut short "
                "by an error or an interrupt, or engine.cache was donated. Make a new engine with "
                "a new cache; results() returns the ended requests, tokens_of the other tokens"
            )

    @contextmanager
    def _record_cache_loss(self) -> Iterator[None]:
        """Mark the cache as lost if the `with` block raises after a new cache was stored."""
        before = self._runner.cache
        try:
            yield
        except BaseException:
            self._is_cache_lost = self._runner.cache is not before
            raise

    def _live_request(self, request_id: int) -> RequestState | None:
        """Return the state of a request that waits or runs; None if the request has ended."""
        request_id = check_count(request_id, "the id of a request", low=0)
        if request_id >= self._next:
            raise ValueError(
                f"expected an id that submit returned, got {request_id}; pass the id of a "
                "submitted request"
            )
        return next(
            (state for state in self._schedule.all_requests if state.id == request_id), None
        )

    def _run_step(self) -> None:
        self._check_cache()
        with self._record_cache_loss():
            self._schedule.admit()
        if feeding := self._schedule.prefilling_requests:
            with self._record_cache_loss():
                self._run_chunk(feeding)
        if running := self._schedule.running_requests:
            with self._record_cache_loss():
                self._generate(running)

    def _run_chunk(self, states: list[RequestState]) -> None:
        """Compute a chunk of prompts; append a token to requests whose prompts end in the chunk."""
        counts, outcome = self._runner.run_chunk(states)
        if not any(counts):
            refused = [state for state in states if outcome.reasons[state.sequence]]
            self._preempt(refused)
            return
        for state, n in zip(states, counts, strict=True):
            state.num_computed_tokens += n
            if state.num_computed_tokens in state.branch_points:
                self._prefixes.store_prefix(state, state.num_computed_tokens)
        ready = [state for state in states if state.is_running]
        self._append_tokens(ready, dict.fromkeys((state.sequence for state in ready), 1), outcome)

    def _generate(self, states: list[RequestState]) -> None:
        max_tokens = self._choose_num_tokens(states)
        allowed = {state.sequence: min(state.num_remaining_tokens, max_tokens) for state in states}
        outcome = self._runner.generate(states, max_tokens)
        refused = self._append_tokens(states, allowed, outcome)
        if refused:
            self._preempt(refused)

    def _choose_num_tokens(self, running: list[RequestState]) -> int:
        """Return the number of tokens to generate in a step; 1 while prompts are computed."""
        if self._schedule.prefilling_requests:
            return 1
        lefts = [state.num_remaining_tokens for state in running]
        return min(
            self._limits.tokens_per_step, min(lefts) if self._schedule.has_waiting else max(lefts)
        )

    def _append_tokens(
        self, states: list[RequestState], allowed: dict[int, int], outcome: RunnerOutput
    ) -> list[RequestState]:
        """Append generated tokens to requests, and end requests.

        Return the requests whose plan was refused, except in streams in which a request ended.
        """
        ended, refused = [], []
        for state in states:
            row, samples = state.sequence, outcome.samples
            new = samples.tokens[row][samples.tokens[row] >= 0].tolist()
            state.tokens += new
            state.logprobs += samples.logprobs[row][: len(new)].tolist()
            if state.constraint_state is not None:
                state.constraint_state = jax.tree.map(
                    lambda x, row=row: x[row], outcome.rule_states
                )
            if new and new[-1] in self._runner.stop_tokens_of(state):
                ended.append((state, FinishReason.STOP))
            elif state.num_remaining_tokens == 0:
                ended.append((state, FinishReason.LENGTH))
            elif outcome.reasons[row] == Reason.NONFINITE_LOGITS:
                ended.append((state, FinishReason.NONFINITE_LOGITS))
            elif outcome.reasons[row]:
                refused.append(state)
            elif len(new) < allowed[row]:
                ended.append((state, FinishReason.NO_TOKEN))
        freed = {self._schedule.stream_of(state) for state, _ in ended}
        self._finish_requests(ended)
        return [state for state in refused if self._schedule.stream_of(state) not in freed]

    def _preempt(self, refused: list[RequestState]) -> None:
        """Evict a stored prompt, or preempt a request, in the stream of each refused request."""
        for stream in {self._schedule.stream_of(state) for state in refused}:
            *others, youngest = self._schedule.requests_in_stream(stream)
            if self._prefixes.evict_one(stream):
                continue
            if others:
                num_stored = self._prefixes.num_stored_prefix_tokens(youngest)
                self._swapper.swap_out(youngest, self._schedule.all_requests, num_stored)
                self._runner.remove_sequences([youngest.sequence])
                self._schedule.preempt(youngest)
            else:
                self._finish_requests([(youngest, FinishReason.OUT_OF_CELLS)])

    def _finish_requests(self, ended: list[tuple[RequestState, FinishReason]]) -> None:
        """Store the tokens of ended requests as prefixes, free the cells, and queue the results."""
        placed = [state for state, _ in ended if state.sequence >= 0]
        for state in placed:
            self._prefixes.store_ended_request(state)
        if placed:
            self._runner.remove_sequences([state.sequence for state in placed])
        for state, reason in ended:
            self._schedule.remove_request(state)
            self._done.append(state.to_output(reason))
