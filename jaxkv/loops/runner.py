"""What an engine computes: programs over its memory, each with a row for every sequence.

All that is known of texts is on the host, and is sent along with each call; the device holds the
memory and nothing else. So no program depends on who runs where.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from jaxkv.loops.chunks import Chunk, Part, cut, empty_chunk, feed, shapes_of
from jaxkv.loops.forward import Forward
from jaxkv.loops.generation import decode
from jaxkv.loops.picking import Picked, begin
from jaxkv.loops.requests import Request, Text, checked_allow, sampler_of, sampling_levels
from jaxkv.loops.sampling import Sampler
from jaxkv.loops.state import start
from jaxkv.memory import Memory, join, split
from jaxkv.places import count, integers
from jaxkv.verbs.apply import apply
from jaxkv.verbs.edit import seq_rm
from jaxkv.verbs.tidy import defrag_plan


class Runner:
    """Computes chunks of prompts and tokens of texts over a memory that it owns.

    Args:
      forward: see `prefill`.
      weights: whatever the model wants.
      memory: given up; `runner.memory` is the one of now.
      stop: `[n]` int32, the tokens that end every text.
      chunk: the most tokens of prompts that are computed at once.
      steps: the most tokens of a text that are generated at once.
      allow: the sampling options that requests may have.
      last_n: how many tokens penalties count.
      most_stops: the most stop tokens of a request's own.
    """

    def __init__(
        self,
        forward: Forward,
        weights: Any,
        memory: Memory,
        *,
        stop: Any,
        chunk: int,
        steps: int,
        allow: Collection[str],
        last_n: int,
        most_stops: int,
    ):
        self._forward, self._weights, self.memory = forward, weights, memory
        self.facts = split(memory)[0].facts
        self._shapes = shapes_of(self.facts, chunk)
        self.steps = count(steps, "steps")
        self.allow = checked_allow(allow)
        self._last_n = count(last_n, "last_n")
        self.most_stops = count(most_stops, "most_stops", low=0)
        self._stop = np.ravel(integers(stop, "stop", low=0))

    def warm_up(self) -> None:
        """Run every program once, with nothing to do."""
        logits = [self._compute(empty_chunk(shape))[0] for shape in self._shapes]
        for sampling in sampling_levels(self.allow):
            like = Request(prompt=np.zeros(1, np.int32), limit=2, sampling=sampling)
            nothing = [Text(id=-1, request=like, tokens=[0], sequence=0)]
            self._pick(nothing, logits[0], turns=0)
            self.generate(nothing, turns=0)
        self.remove([])
        jax.block_until_ready(split(self.memory)[1])

    def feed(self, texts: Sequence[Text]) -> tuple[list[int], Picked | None, np.ndarray]:
        """Compute a chunk of the prompts of texts, the first of them foremost.

        Returns:
          How many tokens of each text went in; the first tokens of the texts whose prompts end with
          them, by sequence, `[Q, 1]`, or None if none does; and `[Q]` int32, a `Reason` for each
          sequence that was refused, and then nothing went in.
        """
        parts = [
            Part(text.sequence, text.all_tokens()[text.placed : text.wanted]) for text in texts
        ]
        chunk, counts = cut(self.facts, self._shapes, parts)
        logits, plan = self._compute(chunk)
        ready = [
            text for text, n in zip(texts, counts, strict=True) if text.placed + n == text.wanted
        ]
        picked = self._pick(ready, logits, turns=1) if ready else None
        (ok, reason), picked = jax.device_get((plan, picked))
        return counts if ok else [0] * len(counts), picked, reason

    def generate(self, texts: Sequence[Text], turns: int) -> tuple[Picked, np.ndarray]:
        """Generate at most so many tokens of texts.

        Returns:
          What was picked, by sequence, `[Q, steps]`; and `[Q]` int32, a `Reason` for each sequence
          whose next token was refused.
        """
        sampler, stop, options = self._options(texts, turns)
        tokens = np.zeros(self.facts.sequences, np.int32)
        for text in texts:
            tokens[text.sequence] = text.tokens[-1]
        state = start(self.memory, tokens, sampler=sampler, **options)
        self.memory, state, picked = decode(
            self._forward,
            sampler,
            self._weights,
            self.memory,
            state,
            stop,
            steps=self.steps,
            donate=True,
        )
        return jax.device_get((picked, state.reason))

    def remove(self, sequences: Sequence[int]) -> None:
        """Forget all tokens of some sequences; one program, whichever they are."""
        rows = np.arange(self.facts.sequences, dtype=np.int32)
        ends = np.where(np.isin(rows, sequences), np.int32(-1), np.int32(0))
        self.memory, _ = seq_rm(self.memory, rows, np.zeros_like(rows), ends)

    def close_gaps(self) -> bool:
        """Bring cells together; return whether there was a gap."""
        plan = defrag_plan(self.memory)
        if plan.is_empty:
            return False
        self.memory = apply(self.memory, plan, donate=True)
        return True

    def stops_of(self, text: Text) -> list[int]:
        """Return the tokens that end a text."""
        return [*self._stop.tolist(), *np.asarray(text.request.stop).tolist()]

    def _compute(self, chunk: Chunk) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Compute a chunk; the logits `[Q, V]`, and whether it had room, with the reasons."""
        program = feed(self._forward)
        table, buffers, logits, plan = program(self._weights, *split(self.memory), chunk)
        self.memory = join(table, buffers)
        return logits, plan

    def _pick(self, texts: Sequence[Text], logits: jax.Array, turns: int) -> Picked:
        """Pick the first token of texts, of logits `[Q, V]`."""
        sampler, stop, options = self._options(texts, turns)
        return begin(sampler, self.memory, logits, stop, **options)[1]

    def _options(
        self, texts: Sequence[Text], turns: int
    ) -> tuple[Sampler, np.ndarray, dict[str, Any]]:
        """Return the sampler, the stop tokens and the other options of all sequences."""
        rows = self.facts.sequences
        requests: list[Request | None] = [None] * rows
        stop = np.full((rows, len(self._stop) + self.most_stops), -1, np.int32)
        limit, seed = np.zeros(rows, np.int32), np.zeros(rows, np.uint32)
        recent = np.full((rows, self._last_n), -1, np.int32)
        for text in texts:
            row, own, last = text.sequence, self.stops_of(text), text.last_tokens(self._last_n)
            requests[row] = text.request
            stop[row, : len(own)] = own
            limit[row], seed[row] = min(text.left, turns), text.request.seed
            recent[row, self._last_n - len(last) :] = last
        sampler = sampler_of(requests, allow=self.allow, last_n=self._last_n)
        return sampler, stop, {"limit": limit, "seed": seed, "prompts": recent}
