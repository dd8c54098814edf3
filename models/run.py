"""A run of a model over prompts: what is compiled ahead, the prompts, and the texts after them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import loops
from models.compiling import compile_all
from models.model import Model
from models.texts import Writer

RECENT = 1024
"""The last tokens of a text that guesses are looked up in."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What stays the same while prompts are continued, as T texts: samples beside each other.

    model: see `models.load`.
    sampler: what adjusts logits.
    seed: of the first sample of each prompt.
    samples: texts of each prompt. Those of prompt p are sequences p * samples and on.
    tries: the most tokens that are guessed at a time, 0 for none.
    prompts: their tokens.
    ubatch_size: the most tokens of prompts that are computed at once.
    stop: `[n]` int32, the tokens that end a text.
    max_tokens: the most tokens of a text.
    steps: tokens of a dispatch, 0 where one token a text is all.
    """

    model: Model
    sampler: loops.sampling.Sampler
    seed: int
    samples: int
    tries: int
    prompts: Sequence[Sequence[int]]
    ubatch_size: int
    stop: np.ndarray
    max_tokens: int
    steps: int

    @property
    def batch(self) -> jaxkv.Batch:
        """The prompts, each in the sequence of its first sample."""
        first = np.arange(len(self.prompts)) * self.samples
        prompts = [np.asarray(prompt, np.int32) for prompt in self.prompts]
        return jaxkv.make_batch(prompts, sequences=first)

    @property
    def texts(self) -> list[Sequence[int]]:
        """The prompt of each text."""
        return [prompt for prompt in self.prompts for _ in range(self.samples)]

    def compile(
        self, memory: Any, plan: jaxkv.Plan, tell: Callable[[int, int], None] | None
    ) -> Any:
        """Compile all that the run needs; returns the memory: its buffers are donated on the way.

        Args:
          memory: empty.
          plan: of the prompts.
          tell: called with the number of programs that are compiled and of those there are.
        """
        step, jobs, blanks = loops.step_of(self.model.forward), [], {}
        for ubatch in plan.ubatches:
            shape = ubatch.tokens.shape, ubatch.outputs.shape
            if shape not in blanks:
                # jit finds what is compiled here: it keeps what it lowered for equal arguments.
                lowered = step.lower(self.model.weights, *jaxkv.split(memory), ubatch)
                jobs.append(lowered.compile)
                out = lowered.out_info[2]
                blanks[shape] = jnp.zeros(out.shape, out.dtype)
        if self.steps:
            # A loop in which no text goes on ends before its first step.
            options = {"limit": 0, "sampler": self.sampler, "prompts": self.texts}
            idle = loops.start(memory, np.zeros(len(self.texts), np.int32), **options)
            jobs.append(lambda: self.generate(memory, idle, self.draft()))
        done = compile_all(jobs, tell)
        if self.steps:
            memory = done[-1][0]
        # Run the small programs once, on zero logits and an empty memory.
        blank = plan.collect([blanks[u.tokens.shape, u.outputs.shape] for u in plan.ubatches])
        memory, _, _ = self.begin(memory, blank)
        used_of(memory)
        return jax.block_until_ready((memory, self.model.weights))[0]

    def feed(self, memory: Any) -> tuple[Any, loops.DecodeState, np.ndarray]:
        """Put the prompts into the memory; returns it, and the first token of each text."""
        memory, logits = jaxkv.prefill(
            self.model.forward,
            self.model.weights,
            memory,
            self.batch,
            ubatch_size=self.ubatch_size,
            donate=True,
        )
        return self.begin(memory, logits)

    def begin(self, memory: Any, logits: jax.Array) -> tuple[Any, loops.DecodeState, np.ndarray]:
        """Fork each prompt for its samples, and pick their first tokens."""
        if self.samples > 1:
            for first in range(0, len(self.texts), self.samples):
                others = np.arange(first + 1, first + self.samples)
                memory = jaxkv.seq_cp(memory, first, others, donate=True)
            logits = jnp.repeat(logits, self.samples, axis=0)
        seeds = (self.seed + np.arange(len(self.texts)) % self.samples) % 2**32
        options = {"limit": self.max_tokens, "seed": seeds, "prompts": self.texts}
        state, first = loops.begin(self.sampler, memory, logits, self.stop, **options)
        return memory, state, np.asarray(first.tokens)

    def draft(self) -> Any:
        """What guesses, None if nothing does."""
        if not self.tries:
            return None
        return loops.lookup(self.texts, tries=self.tries, recent=RECENT)

    def generate(self, memory: Any, state: loops.DecodeState, draft: Any) -> tuple:
        """Generate the tokens of a dispatch: the memory, the state, the draft and the tokens."""
        model, more = self.model, {"steps": self.steps, "donate": True}
        if draft is None:
            memory, state, picked = jaxkv.decode(
                model.forward, self.sampler, model.weights, memory, state, self.stop, **more
            )
            return memory, state, None, picked
        return loops.speculate(
            model.forward, draft, self.sampler, model.weights, memory, state, self.stop, **more
        )

    def go_on(
        self, memory: Any, state: loops.DecodeState, writers: Sequence[Writer]
    ) -> tuple[Any, "Tally"]:
        """Generate until every text has ended; an interrupt ends those that have not.

        Returns:
          The memory, and what was generated.
        """
        draft, tally = self.draft(), Tally()
        try:
            while any(writer.finish is None for writer in writers):
                memory, state, draft, picked = self.generate(memory, state, draft)
                refused = np.asarray(state.reason) != jaxkv.Reason.FITS
                rows = np.asarray(picked.tokens)
                if draft is not None:
                    tally.tried += int(np.asarray(picked.tried).sum())
                    tally.accepted += int(np.asarray(picked.accepted).sum())
                for writer, row, full in zip(writers, rows, refused, strict=True):
                    tally.decoded += writer.write(row[row >= 0])
                    if full and writer.finish is None:
                        writer.end("full")
        except KeyboardInterrupt:
            tally.interrupted = True
            for writer in writers:
                if writer.finish is None:
                    writer.finish = "interrupted"
        return memory, tally


@dataclass
class Tally:
    """What was generated: tokens picked, stop tokens included; guesses, and whether it was cut."""

    decoded: int = 0
    tried: int = 0
    accepted: int = 0
    interrupted: bool = False


def used_of(memory: Any) -> int:
    """Return the cells in use, of a memory of parts those of the fullest: windows hold fewer."""
    return max(int(jaxkv.used(part)) for part in jaxkv.hybrid.parts_of(memory))
