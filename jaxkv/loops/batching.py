"""Requests of mixed lengths through the sequences of one memory: an engine for a server.

The host decides and the device computes: who gets which sequence, how many cells are promised, what
has ended. Everything that is sent to the device has one of a few shapes.
"""

from bisect import insort
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxkv.loops.chunks import Part, cut, empty_chunk, feed, shapes_of
from jaxkv.loops.forward import Forward
from jaxkv.loops.generation import decode
from jaxkv.loops.programs import check_there
from jaxkv.loops.requests import (
    Finish,
    Request,
    Result,
    checked_allow,
    checked_request,
    sampler_of,
    sampling_levels,
)
from jaxkv.loops.sampling import Sampler
from jaxkv.loops.state import begin, start
from jaxkv.memory import Memory, join, split
from jaxkv.places import count, integers
from jaxkv.plan import Reason
from jaxkv.planning.init import checked_size
from jaxkv.verbs.apply import apply
from jaxkv.verbs.ask import used
from jaxkv.verbs.edit import seq_rm
from jaxkv.verbs.tidy import defrag_plan

__all__ = ["Engine", "Finish", "Request", "Result", "serve"]

USUAL = ("temperature", "top_k", "top_p", "min_p")
"""The options that requests may have by default: penalties cost something in every step."""


@dataclass(kw_only=True, eq=False)
class _Text:
    """A request on its way.

    id: of the request; a lower one is older.
    tokens: those that were generated.
    logprobs: one for each of them.
    sequence: where it stands; None while it waits.
    placed: its tokens, prompt and generated, that are in the memory.
    wanted: those that must be before one is generated.
    """

    id: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sequence: int | None = None
    placed: int = 0
    wanted: int = 0

    @property
    def runs(self) -> bool:
        return self.sequence is not None and self.placed >= self.wanted

    @property
    def left(self) -> int:
        return self.request.limit - len(self.tokens)

    @property
    def most(self) -> int:
        """The tokens that it puts into the memory at most: its last one never is."""
        return len(self.request.prompt) + self.request.limit - 1

    def all_tokens(self) -> np.ndarray:
        return np.append(self.request.prompt, np.asarray(self.tokens, np.int32))


class Engine:
    """Runs requests through the Q sequences of a memory, more of them than there are sequences.

    A request waits for a sequence and for cells, first come first served. Its prompt goes in by
    chunks, between which the texts that run already go on. Each text is the one that it would be
    alone, whatever runs beside it.

    The engine owns the memory: its buffers are donated from step to step. It is no thread, and not
    to be called from several at once: `submit` and `cancel` between two steps.

    Args:
      forward: see `prefill`.
      weights: whatever the model wants.
      memory: an empty memory; it is given up, and `engine.memory` is the one of now. With one
        stream its cells are for all, with a stream each every sequence has its own.
      stop: `[n]` int32, the tokens that end every text.
      chunk: the most tokens of prompts that are computed at once. A running text waits for one
        chunk between two tokens at most.
      steps: the most tokens of each text that are generated before the host looks at them.
      reserve: whether a request is let in only when the cells for its prompt and limit are promised
        to no other. Otherwise it is let in when there is room for now, and where cells run out the
        youngest text gives way: it waits again, and is computed anew.
      allow: the sampling options that requests may have, see `loops.sampling.make_sampler`.
        Penalties must be asked for.
      last_n: how many tokens penalties count.
      most_stops: the most stop tokens that a request may have of its own.

    Raises:
      ValueError: when the memory is not empty or was donated, `chunk` is more than it was sized
        for, a number is below 1, or there is no such option to allow.

    Examples:
      A model that says the next number; 3 ends a text:

      >>> def forward(weights, memory, ubatch):
      ...     x = weights[ubatch.tokens][:, :, None]
      ...     memory, _ = attend(memory, 0, ubatch, x, x, x)
      ...     return memory, jnp.roll(x, 1, axis=-1).reshape(-1, 4)[ubatch.outputs]
      >>> memory = make_kv_cache(layers=1, cells=8, kv_heads=1, head_dim=4, sequences=2)
      >>> engine = loops.batching.Engine(forward, jnp.eye(4), memory, stop=[3], chunk=8)
      >>> request = loops.batching.Request
      >>> ids = [engine.submit(request(prompt=[n], limit=n + 1)) for n in (1, 3, 0)]
      >>> for result in engine.results():
      ...     print(result.id, result.tokens.tolist(), result.reason.name)
      0 [2, 3] STOP
      2 [1] LENGTH
      1 [0, 1, 2, 3] STOP

      What can never fit is refused at once, and nothing is left of what has ended:

      >>> engine.submit(request(prompt=[1, 2, 3], limit=7))
      Traceback (most recent call last):
      ...
      ValueError: wanted cells for 9 tokens, of a prompt of 3 and a limit of 7 less the last, \
which this memory never has: ask for less, or make a larger one
      >>> used(engine.memory).item()
      0
    """

    def __init__(
        self,
        forward: Forward,
        weights: Any,
        memory: Memory,
        *,
        stop: Any = (),
        chunk: int | None = None,
        steps: int = 8,
        reserve: bool = True,
        allow: Collection[str] = USUAL,
        last_n: int = 64,
        most_stops: int = 4,
    ):
        table, _ = split(memory)
        check_there(memory)
        if occupied := int(used(memory)):
            raise ValueError(
                f"wanted an empty memory, got one with {occupied} cells in use: clear(memory)"
            )
        self._facts = table.facts
        usual = min(128, checked_size(self._facts, None))
        size = checked_size(self._facts, usual if chunk is None else chunk)
        self._forward, self._weights, self._memory = forward, weights, memory
        self._shapes = shapes_of(self._facts, size)
        self._at_once = max(size, self._facts.sequences // self._facts.streams)
        self._steps = count(steps, "steps")
        self._reserve = reserve
        self._allow = checked_allow(allow)
        self._last_n = count(last_n, "last_n")
        self._most_stops = count(most_stops, "most_stops", low=0)
        self._stop = np.ravel(integers(stop, "stop", low=0))
        self._next = 0
        self._waiting: list[_Text] = []
        self._texts: list[_Text | None] = [None] * self._facts.sequences
        self._done: list[Result] = []

    @property
    def memory(self) -> Memory:
        """The memory as it is now; the next step takes its buffers."""
        return self._memory

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs, or a result has not been handed out."""
        return bool(self._waiting or self._done or any(self._texts))

    def submit(self, request: Request) -> int:
        """Let a request wait for its turn.

        Returns:
          Its id, counted up from 0.

        Raises:
          ValueError: when the prompt is empty, a number is out of its range, a sampling option is
            not allowed, or the memory would never have the cells: with reservations for prompt and
            limit, without them for the prompt.
          TypeError: when it is no request, or tokens, the limit or the seed are no integers.
        """
        request = checked_request(request, allow=self._allow, most_stops=self._most_stops)
        text = _Text(id=self._next, request=request)
        wanted = text.most if self._reserve else len(request.prompt)
        if not self._holds({0: wanted})[0]:
            limit = f" and a limit of {request.limit} less the last" if self._reserve else ""
            raise ValueError(
                f"wanted cells for {wanted} tokens, of a prompt of {len(request.prompt)}{limit}, "
                f"which this memory never has: ask for less, or make a larger one"
            )
        self._next += 1
        self._waiting.append(text)
        return text.id

    def cancel(self, request_id: int) -> bool:
        """End a request now; its cells are free at once, and its result has what there is so far.

        Returns:
          Whether it was still waiting or running.

        Raises:
          ValueError: when there was no such request.
        """
        request_id = count(request_id, "the id of a request", low=0)
        if request_id >= self._next:
            raise ValueError(f"wanted an id that submit returned, got {request_id}")
        for text in (*self._waiting, *filter(None, self._texts)):
            if text.id == request_id:
                self._end([(text, Finish.CANCELLED)])
                return True
        return False

    def tokens_of(self, request_id: int) -> list[int]:
        """Return the tokens generated so far for a request that waits or runs; else none."""
        texts = (*self._waiting, *filter(None, self._texts))
        return [token for text in texts if text.id == request_id for token in text.tokens]

    def results(self) -> Iterator[Result]:
        """Step until nothing is left to do, and yield results as they come.

        Requests may be submitted and cancelled between two results.
        """
        while self.busy:
            yield from self.step()

    def step(self) -> list[Result]:
        """Compute a chunk of prompts, then some tokens of each text that runs; return what ended.

        For servers with a loop of their own, which submit and cancel between steps.
        """
        self._admit()
        feeding = [text for text in self._texts if text and not text.runs]
        if feeding:
            self._feed(sorted(feeding, key=lambda text: text.id))
        if any(text and text.runs for text in self._texts):
            self._decode()
        done, self._done = self._done, []
        return done

    def warm_up(self) -> None:
        """Compile everything that any requests need, before the first one comes.

        Only where cells must be neighbours (`placement="contiguous"`), what brings them together is
        compiled when it is needed.
        """
        logits = [self._compute(empty_chunk(shape))[0] for shape in self._shapes]
        for sampling in sampling_levels(self._allow):
            like = Request(prompt=np.zeros(1, np.int32), limit=2, sampling=sampling)
            nothing = {0: _Text(id=-1, request=like, tokens=[0])}
            self._pick(nothing, logits[0], turns=0)
            self._generate(nothing, turns=0)
        self._remove([])
        jax.block_until_ready(split(self._memory)[1])

    # ---- who runs

    def _holds(self, lengths: dict[int, int]) -> np.ndarray:
        """Return whether texts of so many tokens, by sequence, fit; by stream, `[S]` bool."""
        tokens = np.zeros(self._facts.sequences, np.int64)
        tokens[[*lengths]] = [*lengths.values()]
        return split(self._memory)[0].can_hold(tokens, self._at_once)

    def _stream(self, sequence: int) -> int:
        return sequence // (self._facts.sequences // self._facts.streams)

    def _beside(self, stream: int) -> list[_Text]:
        """Return the texts in a stream, the oldest first."""
        texts = [text for q, text in enumerate(self._texts) if text and self._stream(q) == stream]
        return sorted(texts, key=lambda text: text.id)

    def _needs(self, text: _Text) -> int:
        """Return the cells that are counted for a text: all that it may take, or those of soon."""
        if self._reserve:
            return text.most
        soon = len(text.request.prompt) + len(text.tokens) + self._steps
        return min(soon, text.most)

    def _admit(self) -> None:
        """Give waiting requests sequences, in their order, as long as there is room."""
        while self._waiting:
            text = self._waiting[0]
            sequence = next((q for q in range(len(self._texts)) if self._has_room(q, text)), None)
            if sequence is None:
                return
            self._waiting.pop(0)
            text.sequence, text.placed = sequence, 0
            text.wanted = len(text.request.prompt) + len(text.tokens)
            self._texts[sequence] = text

    def _has_room(self, sequence: int, text: _Text) -> bool:
        if self._texts[sequence]:
            return False
        beside = self._beside(self._stream(sequence))
        if not beside:  # alone, it has what there is
            return True
        lengths = {one.sequence: self._needs(one) for one in beside}
        return bool(self._holds(lengths | {sequence: self._needs(text)})[self._stream(sequence)])

    def _make_way(self, refused: list[_Text], reasons: np.ndarray) -> None:
        """Let the youngest text of each stream that is full wait; end one that is alone there."""
        if Reason.FRAGMENTED in reasons:
            plan = defrag_plan(self._memory)
            if not plan.is_empty:
                self._memory = apply(self._memory, plan, donate=True)
                return
        for stream in {self._stream(text.sequence) for text in refused}:
            *others, youngest = self._beside(stream)
            if not others:
                self._end([(youngest, Finish.FULL)])
                continue
            self._release([youngest])
            insort(self._waiting, youngest, key=lambda text: text.id)

    def _end(self, ended: list[tuple[_Text, Finish]]) -> None:
        """Free what texts hold, and keep their results until they are handed out."""
        self._release([text for text, _ in ended if text.sequence is not None])
        for text, reason in ended:
            if text in self._waiting:
                self._waiting.remove(text)
            result = Result(
                id=text.id,
                tokens=np.asarray(text.tokens, np.int32),
                logprobs=np.asarray(text.logprobs, np.float32),
                reason=reason,
                request=text.request,
            )
            self._done.append(result)

    def _release(self, texts: list[_Text]) -> None:
        """Take the sequences and the cells of texts away."""
        if not texts:
            return
        self._remove([text.sequence for text in texts])
        for text in texts:
            self._texts[text.sequence] = None
            text.sequence = None

    # ---- what is computed

    def _feed(self, texts: list[_Text]) -> None:
        """Compute a chunk of the prompts of texts, and pick the first token of those that end."""
        parts = [
            Part(text.sequence, text.all_tokens()[text.placed : text.wanted]) for text in texts
        ]
        chunk, counts = cut(self._facts, self._shapes, parts)
        logits, plan = self._compute(chunk)
        ready = [
            text for text, n in zip(texts, counts, strict=True) if text.placed + n == text.wanted
        ]
        picked = self._pick({text.sequence: text for text in ready}, logits) if ready else None
        (ok, reasons), picked = jax.device_get((plan, picked))
        if not ok:
            self._make_way([text for text in texts if reasons[text.sequence]], reasons)
            return
        for text, n in zip(texts, counts, strict=True):
            text.placed += n
        self._take(ready, dict.fromkeys((text.sequence for text in ready), 1), picked)

    def _decode(self) -> None:
        """Generate some tokens of the texts that run."""
        running = [text for text in self._texts if text and text.runs]
        turns = self._turns(running)
        made = self._generate({text.sequence: text for text in running}, turns)
        picked, reasons = jax.device_get(made)
        allowed = {text.sequence: min(text.left, turns) for text in running}
        refused = self._take(running, allowed, picked, reasons)
        if refused:
            self._make_way(refused, reasons)

    def _turns(self, running: list[_Text]) -> int:
        """Return how many tokens to generate: few while prompts wait, for those or for a sequence.

        A text that ends leaves its sequence idle until the host looks.
        """
        lefts = [text.left for text in running]
        if any(text and not text.runs for text in self._texts):
            return 1
        return min(self._steps, min(lefts) if self._waiting else max(lefts))

    def _take(
        self,
        texts: list[_Text],
        allowed: dict[int, int],
        picked: Any,
        reasons: np.ndarray | None = None,
    ) -> list[_Text]:
        """Give texts the tokens that were picked, and end those that they end.

        Returns:
          The texts that were refused a cell, where none has come free since.
        """
        ended, refused = [], []
        for text in texts:
            row = text.sequence
            new = picked.tokens[row][picked.tokens[row] >= 0].tolist()
            text.tokens += new
            text.logprobs += picked.logprobs[row][: len(new)].tolist()
            if new and new[-1] in self._stops(text):
                ended.append((text, Finish.STOP))
            elif text.left == 0:
                ended.append((text, Finish.LENGTH))
            elif len(new) < allowed[row] and reasons is not None and reasons[row]:
                refused.append(text)
            elif len(new) < allowed[row]:
                ended.append((text, Finish.NO_TOKEN))
        freed = {self._stream(text.sequence) for text, _ in ended}
        self._end(ended)
        return [text for text in refused if self._stream(text.sequence) not in freed]

    def _stops(self, text: _Text) -> list[int]:
        return [*self._stop.tolist(), *np.asarray(text.request.stop).tolist()]

    def _compute(self, chunk: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Compute a chunk; the logits `[Q, V]`, and whether it had room with the reasons."""
        program = feed(self._forward)
        table, buffers, logits, plan = program(self._weights, *split(self._memory), chunk)
        self._memory = join(table, buffers)
        return logits, plan

    def _pick(self, texts: dict[int, _Text], logits: jax.Array, turns: int = 1) -> Any:
        """Pick the first token of texts, by sequence."""
        sampler, stop, options = self._options(texts, turns)
        _, picked = begin(sampler, self._memory, logits, stop, **options)
        return picked

    def _generate(self, texts: dict[int, _Text], turns: int) -> tuple[Any, jax.Array]:
        """Generate at most so many tokens of texts, by sequence; and say who was refused why."""
        sampler, stop, options = self._options(texts, turns)
        tokens = np.zeros(self._facts.sequences, np.int32)
        for row, text in texts.items():
            tokens[row] = text.tokens[-1]
        state = start(self._memory, tokens, sampler=sampler, **options)
        self._memory, state, picked = decode(
            self._forward,
            sampler,
            self._weights,
            self._memory,
            state,
            stop,
            steps=self._steps,
            donate=True,
        )
        return picked, state.reason

    def _options(
        self, texts: dict[int, _Text], turns: int
    ) -> tuple[Sampler, np.ndarray, dict[str, Any]]:
        """Return the sampler, the stop tokens and the other options of all sequences."""
        rows = self._facts.sequences
        requests = [texts[q].request if q in texts else None for q in range(rows)]
        stop = np.full((rows, len(self._stop) + self._most_stops), -1, np.int32)
        limit, seed = np.zeros(rows, np.int32), np.zeros(rows, np.uint32)
        recent = np.full((rows, self._last_n), -1, np.int32)
        for row, text in texts.items():
            own = self._stops(text)
            stop[row, : len(own)] = own
            limit[row], seed[row] = min(text.left, turns), text.request.seed
            last = text.all_tokens()[-self._last_n :]
            recent[row, self._last_n - len(last) :] = last
        sampler = sampler_of(requests, allow=self._allow, last_n=self._last_n)
        return sampler, stop, {"limit": limit, "seed": seed, "prompts": recent}

    def _remove(self, sequences: list[int]) -> None:
        """Forget all tokens of some sequences; one program, whichever they are."""
        rows = np.arange(self._facts.sequences, dtype=np.int32)
        ends = np.where(np.isin(rows, sequences), np.int32(-1), np.int32(0))
        self._memory, _ = seq_rm(self._memory, rows, np.zeros_like(rows), ends)


def serve(
    forward: Forward, weights: Any, memory: Memory, requests: Iterable[Request], **options: Any
) -> Iterator[Result]:
    """Run requests through a memory, and yield their results as they end.

    Args:
      forward: see `prefill`.
      weights: whatever the model wants.
      memory: an empty memory, which is given up.
      requests: what is asked; ids are 0, 1, 2 and so on. All are checked before the first runs.
      options: of `Engine`.
    """
    engine = Engine(forward, weights, memory, **options)
    for request in requests:
        engine.submit(request)
    return engine.results()
