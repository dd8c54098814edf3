"""Requests of mixed lengths through the sequences of one memory: an engine for a server.

The host decides and the device computes: who gets which sequence, how many cells are promised, what
has ended. Everything that is sent to the device has one of a few shapes.
"""

from bisect import insort
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np

from jaxkv.loops.donation import check_there
from jaxkv.loops.forward import Forward
from jaxkv.loops.picking import Picked
from jaxkv.loops.requests import Finish, Request, Result, Text, checked_request
from jaxkv.loops.runner import Runner
from jaxkv.memory import Memory, split
from jaxkv.places import count
from jaxkv.plan import Reason
from jaxkv.planning.init import checked_size
from jaxkv.verbs.ask import used

__all__ = ["Engine", "Finish", "Request", "Result", "serve"]

USUAL = ("temperature", "top_k", "top_p", "min_p")
"""The options that requests may have by default: penalties cost something in every step."""

CHUNK = 128
"""The most tokens of prompts that are computed at once, where neither caller nor memory say."""


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
        facts = split(memory)[0].facts
        check_there(memory)
        if occupied := int(used(memory)):
            raise ValueError(
                f"wanted an empty memory, got one with {occupied} cells in use: clear(memory)"
            )
        most = checked_size(facts, None)
        size = min(CHUNK, most) if chunk is None else checked_size(facts, count(chunk, "chunk"))
        self._runner = Runner(
            forward,
            weights,
            memory,
            stop=stop,
            chunk=size,
            steps=steps,
            allow=allow,
            last_n=last_n,
            most_stops=most_stops,
        )
        self._sharing = facts.sequences // facts.streams
        self._at_once = max(size, self._sharing)
        self._reserve = reserve
        self._next = 0
        self._waiting: list[Text] = []
        self._texts: list[Text | None] = [None] * facts.sequences
        self._done: list[Result] = []

    @property
    def memory(self) -> Memory:
        """The memory as it is now; the next step takes its buffers."""
        return self._runner.memory

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
        request = checked_request(
            request, allow=self._runner.allow, most_stops=self._runner.most_stops
        )
        text = Text(id=self._next, request=request)
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
        running = [text for text in self._texts if text and text.runs]
        if running:
            self._decode(running)
        done, self._done = self._done, []
        return done

    def warm_up(self) -> None:
        """Compile everything that any requests need, before the first one comes.

        Only where cells must be neighbours (`placement="contiguous"`), what brings them together is
        compiled when it is needed.
        """
        self._runner.warm_up()

    # ---- who runs

    def _holds(self, lengths: dict[int, int]) -> np.ndarray:
        """Return whether texts of so many tokens, by sequence, fit; by stream, `[S]` bool."""
        tokens = np.zeros(len(self._texts), np.int64)
        tokens[[*lengths]] = [*lengths.values()]
        return split(self.memory)[0].can_hold(tokens, self._at_once)

    def _beside(self, stream: int) -> list[Text]:
        """Return the texts in a stream, the oldest first."""
        first = stream * self._sharing
        texts = self._texts[first : first + self._sharing]
        return sorted(filter(None, texts), key=lambda text: text.id)

    def _needs(self, text: Text) -> int:
        """Return the cells that are counted for a text: all that it may take, or those of soon."""
        if self._reserve:
            return text.most
        soon = len(text.request.prompt) + len(text.tokens) + self._runner.steps
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

    def _has_room(self, sequence: int, text: Text) -> bool:
        """Return whether a sequence is free, and its stream has the cells that a text needs."""
        if self._texts[sequence]:
            return False
        stream = sequence // self._sharing
        beside = self._beside(stream)
        lengths = {one.sequence: self._needs(one) for one in beside}
        # Alone it has what there is, which is enough for its prompt.
        return not beside or bool(self._holds(lengths | {sequence: self._needs(text)})[stream])

    def _make_way(self, refused: list[Text], reasons: np.ndarray) -> None:
        """Let the youngest text of each stream that is full wait; end one that is alone there."""
        if Reason.FRAGMENTED in reasons and self._runner.close_gaps():
            return
        for stream in {text.sequence // self._sharing for text in refused}:
            *others, youngest = self._beside(stream)
            if others:
                self._release([youngest])
                insort(self._waiting, youngest, key=lambda text: text.id)
            else:
                self._end([(youngest, Finish.FULL)])

    def _end(self, ended: list[tuple[Text, Finish]]) -> None:
        """Free what texts hold, and keep their results until they are handed out."""
        self._waiting = [text for text in self._waiting if all(text is not one for one, _ in ended)]
        self._release([text for text, _ in ended if text.sequence >= 0])
        self._done += [text.result(reason) for text, reason in ended]

    def _release(self, texts: list[Text]) -> None:
        """Take the sequences and the cells of texts away."""
        if not texts:
            return
        self._runner.remove([text.sequence for text in texts])
        for text in texts:
            self._texts[text.sequence], text.sequence = None, -1

    # ---- what is computed

    def _feed(self, texts: list[Text]) -> None:
        """Compute a chunk of the prompts of texts, and take the first token of those that end."""
        counts, picked, reasons = self._runner.feed(texts)
        refused = [text for text in texts if reasons[text.sequence]]
        if refused:
            self._make_way(refused, reasons)
            return
        for text, n in zip(texts, counts, strict=True):
            text.placed += n
        if picked is not None:
            ready = [text for text in texts if text.runs]
            self._take(ready, dict.fromkeys((text.sequence for text in ready), 1), picked, reasons)

    def _decode(self, texts: list[Text]) -> None:
        """Generate some tokens of the texts that run."""
        turns = self._turns(texts)
        allowed = {text.sequence: min(text.left, turns) for text in texts}
        picked, reasons = self._runner.generate(texts, turns)
        refused = self._take(texts, allowed, picked, reasons)
        if refused:
            self._make_way(refused, reasons)

    def _turns(self, running: list[Text]) -> int:
        """Return how many tokens to generate before something else is looked at.

        One while a prompt is on its way in, since its sequence generates nothing meanwhile; and not
        past the end of a text while requests wait for its sequence.
        """
        if any(text and not text.runs for text in self._texts):
            return 1
        lefts = [text.left for text in running]
        return min(self._runner.steps, min(lefts) if self._waiting else max(lefts))

    def _take(
        self, texts: list[Text], allowed: dict[int, int], picked: Picked, reasons: np.ndarray
    ) -> list[Text]:
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
            if new and new[-1] in self._runner.stops_of(text):
                ended.append((text, Finish.STOP))
            elif text.left == 0:
                ended.append((text, Finish.LENGTH))
            elif reasons[row]:
                refused.append(text)
            elif len(new) < allowed[row]:
                ended.append((text, Finish.NO_TOKEN))
        freed = {text.sequence // self._sharing for text, _ in ended}
        self._end(ended)
        return [text for text in refused if text.sequence // self._sharing not in freed]


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
