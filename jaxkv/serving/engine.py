"""Requests of mixed lengths through the sequences of one cache: an engine for a server.

The host decides and the device computes: who gets which sequence, how many cells are promised, what
has ended. Everything that is sent to the device has one of a few shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxkv.cache import Cache, split
from jaxkv.core.donation import check_not_donated
from jaxkv.core.validate import check_count
from jaxkv.generation.constraints import Constraint
from jaxkv.generation.model_step import Forward
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

if TYPE_CHECKING:
    from jaxtyping import Array, Int32, PyTree

    from jaxkv.generation.types import StopTokens

DEFAULT_OPTIONS = ("temperature", "top_k", "top_p", "min_p")
"""The options that requests may have by default: penalties cost something in every step."""


class Engine:
    """Runs requests through the Q sequences of a cache, more of them than there are sequences.

    A request waits for a sequence and for cells, first come first served. Its prompt goes in by
    chunks, between which the texts that run already go on. Each text equals the one its request
    would give alone.

    The engine owns the cache: its buffers are donated from step to step. It is no thread, and not
    to be called from several at once: `submit` and `cancel` between two steps.

    An error of `forward` while it is traced, where nothing was computed, leaves the engine as it
    was. An error or interrupt later takes its cache: texts and cells may not belong together any
    more. Then whatever needs the cache raises a RuntimeError, `results` once it has handed out
    what had ended. `tokens_of` still has the tokens of the others; they go on in a new engine.

    Args:
      forward: see `prefill`.
      params: whatever the model wants.
      cache: an empty cache; it is given up, and `engine.cache` is the current cache. The cells
        of a stream are for all of its sequences. It may hold what `prefix_store` holds.
      stop_tokens: `[n]`, the tokens that end every text.
      prefill_chunk: the most tokens of prompts that are computed at once. A running text waits for
        one chunk between two tokens at most.
      tokens_per_step: the most tokens of each text that are generated before the host looks at
        them.
      reserve: whether a request is let in only when the cells for its prompt and limit are promised
        to no other. Otherwise it is let in when there is room for now, and where cells run out the
        youngest text gives way: it waits again, and is computed anew.
      sampling_options: the sampling options that requests may have, see
        `generation.make_sampler`. Penalties must be asked for.
      penalty_last_n: how many tokens penalties count.
      max_stop_tokens: the most stop tokens that a request may have of its own.
      constraint: what may come next in the texts whose requests have a `constraint_state`, such as
        a grammar. It is looked at in every step, whichever texts run, and its states go to the host
        and back with each call: keep them small.
      prefix_sequences: sequences of the cache for a `PrefixStore`, which is
        `engine.prefix_store` then. A prompt that begins with one in it computes only the rest. Each
        text is stored when it ends, and where prompts part that begin alike; a prompt waits for one
        that is on its way in and has more of it. The least recently used are evicted before a
        request waits.
      prefix_store: in place of `prefix_sequences`, a store that was made for this cache, such as
        one with a limit of cells, or that of an earlier engine beside its cache.

    Raises:
      ValueError: when the cache is not empty, was donated or has a part for sources,
        `prefill_chunk` is more than it was sized for, a number is below 1, there is no such option
        to allow, the rule does not give what it should, or the store was made for another cache or
        leaves no sequence, or was given beside `prefix_sequences`.
      TypeError: when `forward` is no function, the rule none, or the store none.

    Examples:
      A model that says the next number; 3 ends a text:

      >>> def forward(params, cache, ubatch):
      ...     x = jnp.take(params, ubatch.tokens, axis=0)[:, :, None]
      ...     cache, _ = attend(cache, 0, ubatch, x, x, x)
      ...     return cache, jnp.roll(x, 1, axis=-1).reshape(-1, 4)[ubatch.outputs]
      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=4), cells=8, sequences=2
      ... )
      >>> engine = serving.Engine(
      ...     forward, jnp.eye(4), cache, stop_tokens=[3], prefill_chunk=8
      ... )
      >>> request = serving.Request
      >>> ids = [engine.submit(request(prompt=[n], max_new_tokens=n + 1)) for n in (1, 3, 0)]
      >>> for result in engine.results():
      ...     print(result.id, result.tokens.tolist(), result.reason.name)
      0 [2, 3] STOP
      2 [1] LENGTH
      1 [0, 1, 2, 3] STOP

      What can never fit is refused at once, and nothing is left of what has ended:

      >>> engine.submit(request(prompt=[1, 2, 3], max_new_tokens=7))
      Traceback (most recent call last):
      ...
      ValueError: expected cells for 9 tokens, of a prompt of 3 and a limit of 7 less the last, \
which this cache never has: ask for less, or make a larger one
      >>> engine.cache.num_used_cells().item()
      0

      With sequences for prefixes a prompt is computed once, but for its last token, which gives
      the logits:

      >>> engine = serving.Engine(
      ...     forward, jnp.eye(4), engine.cache, prefix_sequences=[1], prefill_chunk=8
      ... )
      >>> for _ in range(2):
      ...     _ = engine.submit(request(prompt=[0, 1, 2], max_new_tokens=2))
      ...     print(next(engine.results()).prefix_hit)
      PrefixHit(length=0, miss=<MissReason.UNKNOWN: 1>)
      PrefixHit(length=2, miss=<MissReason.NONE: 0>)
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
        prefix_sequences: Iterable[int] | None = None,
        prefix_store: PrefixStore | None = None,
    ):
        if not callable(forward):
            raise TypeError(f"expected a function forward, see prefill, got {type(forward)}")
        table, _ = split(cache)
        check_not_donated(cache)
        if table.spec.has_cross_attention:
            raise ValueError(
                "expected a cache without a part for sources, which requests do not bring, got one "
                "with it: encode and decode run texts with sources side by side"
            )
        self._limits = check_config(
            table.spec,
            prefill_chunk=prefill_chunk,
            tokens_per_step=tokens_per_step,
            sampling_options=sampling_options,
            penalty_last_n=penalty_last_n,
            max_stop_tokens=max_stop_tokens,
            constraint=constraint,
        )
        self._runner = ModelRunner(
            forward, params, cache, stop_tokens=stop_tokens, limits=self._limits
        )
        if prefix_sequences is not None:
            if prefix_store is not None:
                raise ValueError(
                    "expected prefix_sequences or a prefix_store, got both; pass the store alone, "
                    "which has its sequences"
                )
            prefix_store = PrefixStore(cache, sequences=prefix_sequences)
        self._prefixes = EnginePrefixes(self._runner, prefix_store)
        self._schedule = Scheduler(
            table, limits=self._limits, reserve=reserve, prefixes=self._prefixes
        )
        self._cut_short = False
        self._next = 0
        self._done: list[RequestOutput] = []

    @property
    def cache(self) -> Cache:
        """The cache as it is now; the next step takes its buffers."""
        self._check_cache()
        return self._runner.cache

    @property
    def prefix_store(self) -> PrefixStore | None:
        """The store as it is now, beside `engine.cache`; None without one."""
        return self._prefixes.store

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs, or a result has not been handed out."""
        return bool(self._done or self._schedule.all_requests)

    def submit(self, request: Request) -> int:
        """Queue a request.

        Returns:
          Its id, counted up from 0.

        Raises:
          ValueError: when the prompt is empty, a number is out of its range, a sampling option is
            not allowed, the state of the rule is of other shapes than its first, or the cache
            would never have the cells: with reservations for prompt and limit, without them for the
            prompt.
          TypeError: when it is no request, tokens, the limit or the seed are no integers, or the
            sampling options are no dict.
        """
        self._check_cache()
        text = RequestState(id=self._next, request=check_request(request, self._limits))
        self._schedule.queue_request(text)
        self._next += 1
        return text.id

    def cancel(self, request_id: int) -> bool:
        """End a request now; its cells are free at once, and its result has what there is so far.

        Returns:
          Whether it was still waiting or running.

        Raises:
          ValueError: when there was no such request.
          TypeError: when the id is no integer.
        """
        text = self._live_request(request_id)
        if text is None:
            return False
        self._check_cache()
        with self._note_if_cut_short():
            self._finish_requests([(text, FinishReason.CANCELLED)])
        return True

    def tokens_of(self, request_id: int) -> list[int]:
        """Return the tokens generated so far for a request that waits or runs.

        One that has ended has none here; its result has them.

        Raises:
          ValueError: when there was no such request.
          TypeError: when the id is no integer.
        """
        text = self._live_request(request_id)
        return [] if text is None else list(text.tokens)

    def results(self) -> Iterator[RequestOutput]:
        """Step until nothing is left to do, and yield results as they come.

        Requests may be submitted and cancelled between two results.
        """
        while self.busy:
            if not self._done:
                self._run_step()
            while self._done:
                yield self._done.pop(0)

    def stream(self) -> Iterator[tuple[int, list[int], FinishReason | None]]:
        """Step until nothing is left to do, and yield tokens as they are generated.

        Requests may be submitted and cancelled between two items.

        Yields:
          The id of a request, its new tokens, and None; a reason in the last item of a request,
          whose tokens may be none.

        Examples:
          >>> def forward(params, cache, ubatch):
          ...     x = jnp.take(params, ubatch.tokens, axis=0)[:, :, None]
          ...     cache, _ = attend(cache, 0, ubatch, x, x, x)
          ...     return cache, jnp.roll(x, 1, axis=-1).reshape(-1, 4)[ubatch.outputs]
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=4)
          >>> cache = make_cache(spec, cells=16, sequences=2)
          >>> engine = serving.Engine(forward, jnp.eye(4), cache, tokens_per_step=2)
          >>> engine.submit(serving.Request(prompt=[0], max_new_tokens=4))
          0
          >>> for request_id, tokens, reason in engine.stream():
          ...     print(request_id, tokens, reason and reason.name)
          0 [1, 2, 3] None
          0 [0] LENGTH
        """
        sent: dict[int, int] = {}
        while self.busy:
            for result in self.step():
                yield result.id, result.tokens[sent.pop(result.id, 0) :].tolist(), result.reason
            for text in list(self._schedule.all_requests):
                if new := text.tokens[sent.get(text.id, 0) :]:
                    sent[text.id] = len(text.tokens)
                    yield text.id, list(map(int, new)), None

    def step(self) -> list[RequestOutput]:
        """Compute a chunk of prompts, then some tokens of each text that runs; return what ended.

        For servers with a loop of their own, which submit and cancel between steps.
        """
        self._run_step()
        done, self._done = self._done, []
        return done

    def warm_up(self) -> None:
        """Compile everything that any requests need, before the first one comes.

        Only where cells must be neighbours (`placement="contiguous"`), what brings them together is
        compiled when it is needed.
        """
        self._check_cache()
        self._runner.warm_up()
        self._prefixes.warm_up()

    def _check_cache(self) -> None:
        """Raise a RuntimeError if the cache is lost."""
        if self._cut_short or not self._runner.has_cache:
            raise RuntimeError(
                "expected an engine with its cache, got one that has lost it: a step was cut short "
                "by an error or an interrupt, or engine.cache was donated. Make a new engine with "
                "a new cache; results() still has what had ended, tokens_of the other tokens"
            )

    @contextmanager
    def _note_if_cut_short(self) -> Iterator[None]:
        """Note when what is computed is cut short: the cache is another, and the texts are not."""
        before = self._runner.cache
        try:
            yield
        except BaseException:
            self._cut_short = self._runner.cache is not before
            raise

    def _live_request(self, request_id: int) -> RequestState | None:
        """Return a request that waits or runs, None if it has ended."""
        request_id = check_count(request_id, "the id of a request", low=0)
        if request_id >= self._next:
            raise ValueError(f"expected an id that submit returned, got {request_id}")
        return next((text for text in self._schedule.all_requests if text.id == request_id), None)

    def _run_step(self) -> None:
        """Do what one step does; results are kept until they are handed out."""
        self._check_cache()
        with self._note_if_cut_short():
            self._schedule.admit()
        if feeding := self._schedule.prefilling_texts:
            with self._note_if_cut_short():
                self._run_chunk(feeding)
        if running := self._schedule.running_texts:
            with self._note_if_cut_short():
                self._generate(running)

    def _run_chunk(self, texts: list[RequestState]) -> None:
        """Compute a chunk of the prompts of texts, and take the first token of those that end."""
        counts, outcome = self._runner.run_chunk(texts)
        if not any(counts):
            refused = [text for text in texts if outcome.reasons[text.sequence]]
            self._preempt(refused, outcome.reasons)
            return
        for text, n in zip(texts, counts, strict=True):
            text.num_computed_tokens += n
            if text.num_computed_tokens in text.branch_points:
                self._prefixes.store_prefix(text, text.num_computed_tokens)
        ready = [text for text in texts if text.is_running]
        self._append_tokens(ready, dict.fromkeys((text.sequence for text in ready), 1), outcome)

    def _generate(self, texts: list[RequestState]) -> None:
        """Generate some tokens of the texts that run."""
        turns = self._choose_num_tokens(texts)
        allowed = {text.sequence: min(text.num_remaining_tokens, turns) for text in texts}
        outcome = self._runner.generate(texts, turns)
        refused = self._append_tokens(texts, allowed, outcome)
        if refused:
            self._preempt(refused, outcome.reasons)

    def _choose_num_tokens(self, running: list[RequestState]) -> int:
        """Return how many tokens to generate before something else is looked at.

        One while a prompt is on its way in, since its sequence generates nothing meanwhile; and not
        past the end of a text while requests wait for its sequence.
        """
        if self._schedule.prefilling_texts:
            return 1
        lefts = [text.num_remaining_tokens for text in running]
        return min(
            self._limits.tokens_per_step, min(lefts) if self._schedule.has_waiting else max(lefts)
        )

    def _append_tokens(
        self, texts: list[RequestState], allowed: dict[int, int], outcome: RunnerOutput
    ) -> list[RequestState]:
        """Give texts the tokens that were picked, and end those that they end.

        Returns:
          The texts that were refused a cell, where none has come free since.
        """
        ended, refused = [], []
        for text in texts:
            row, samples = text.sequence, outcome.samples
            new = samples.tokens[row][samples.tokens[row] >= 0].tolist()
            text.tokens += new
            text.logprobs += samples.logprobs[row][: len(new)].tolist()
            if text.constraint_state is not None:
                text.constraint_state = jax.tree.map(lambda x, row=row: x[row], outcome.rule_states)
            if new and new[-1] in self._runner.stop_tokens_of(text):
                ended.append((text, FinishReason.STOP))
            elif text.num_remaining_tokens == 0:
                ended.append((text, FinishReason.LENGTH))
            elif outcome.reasons[row] == Reason.NONFINITE_LOGITS:
                ended.append((text, FinishReason.NONFINITE_LOGITS))
            elif outcome.reasons[row]:
                refused.append(text)
            elif len(new) < allowed[row]:
                ended.append((text, FinishReason.NO_TOKEN))
        freed = {self._schedule.stream_of(text) for text, _ in ended}
        self._finish_requests(ended)
        return [text for text in refused if self._schedule.stream_of(text) not in freed]

    def _preempt(
        self, refused: list[RequestState], reasons: Int32[Array | np.ndarray, " Q"]
    ) -> None:
        """Let the youngest text of each stream that is full wait; end one that is alone there.

        `reasons` are those of `RunnerOutput`.
        """
        if Reason.FRAGMENTED in reasons and self._runner.close_gaps():
            return
        for stream in {self._schedule.stream_of(text) for text in refused}:
            *others, youngest = self._schedule.texts_in_stream(stream)
            if self._prefixes.evict_one(stream):
                continue
            if others:
                self._runner.remove_sequences([youngest.sequence])
                self._schedule.preempt(youngest)
            else:
                self._finish_requests([(youngest, FinishReason.OUT_OF_CELLS)])

    def _finish_requests(self, ended: list[tuple[RequestState, FinishReason]]) -> None:
        """Free what texts hold, and keep their results until they are handed out."""
        placed = [text for text, _ in ended if text.sequence >= 0]
        for text in placed:
            self._prefixes.store_finished_text(text)
        if placed:
            self._runner.remove_sequences([text.sequence for text in placed])
        for text, reason in ended:
            self._schedule.remove_request(text)
            self._done.append(text.to_output(reason))
