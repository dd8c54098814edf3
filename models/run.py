"""A generation run: programs, prompts and texts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import generation
from jaxkv.generation.filters import Sampler, make_sampler
from models.compiling import Progress, compile_all, lower_steps
from models.model import Model
from models.room import Streams
from models.texts import Writer, finish_of

RECENT = 1024
"""Prompt lookup searches for drafts in this number of tokens at the end of a text."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of generation.

    sampler: sampler of tokens; the default selects the most likely token.
    seed: seed of the first text of each prompt. The other texts of the prompt have the seeds
      `seed + 1`, `seed + 2`, and so on.
    samples: number of texts for each prompt; the prompt is computed once.
    tries: largest number of draft tokens in a step. If 0, there are no drafts; otherwise, prompt
      lookup makes the drafts.
    max_tokens: largest number of generated tokens of each text.
    cells: number of cells of each stream; by default from `models.room.cells_for`.
    ubatch_size: largest number of prompt tokens computed at once.
    streams: "unified" for one stream with all texts, "split" for one stream for each text.
    steps_per_dispatch: largest number of tokens that one dispatch generates for each text.

    Raises:
      ValueError: If a number is too small, or the value of `streams` is unknown.
    """

    sampler: Sampler = field(default_factory=make_sampler)
    seed: int = 0
    samples: int = 1
    tries: int = 0
    max_tokens: int = 128
    cells: int | None = None
    ubatch_size: int = 512
    streams: Streams = "unified"
    steps_per_dispatch: int = 8

    def __post_init__(self):
        least = {"max_tokens": 1, "samples": 1, "tries": 0, "steps_per_dispatch": 1}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"expected {name} of at least {lowest}, got {getattr(self, name)}")
        if self.streams not in get_args(Streams):
            raise ValueError(f"expected streams 'unified' or 'split', got {self.streams!r}")


@dataclass(frozen=True)
class Run:
    """Generation of Z texts: `samples` texts for each prompt.

    Text t is in sequence t of the cache. The first text of prompt p is text `p * samples`.
    """

    model: Model
    prompts: Sequence[Sequence[int]]
    options: Options

    @property
    def batch(self) -> jaxkv.Batch:
        """Batch of prompts; each prompt is in the sequence of the first text for this prompt."""
        first = np.arange(len(self.prompts)) * self.options.samples
        prompts = [np.asarray(prompt, np.int32) for prompt in self.prompts]
        return jaxkv.make_batch(prompts, sequences=first)

    @property
    def texts(self) -> list[Sequence[int]]:
        """The prompt of each text, as token ids."""
        return [prompt for prompt in self.prompts for _ in range(self.options.samples)]

    @property
    def stop(self) -> np.ndarray:
        """Ids of the tokens that end a text, `[n]` int32."""
        return np.asarray(sorted(self.model.stop_tokens), np.int32)

    @property
    def steps(self) -> int:
        """Number of tokens that a dispatch generates for each text; 0 if `max_tokens` is 1.

        The first token is sampled after prefill. All dispatches have the same number of tokens,
        since a shorter last dispatch would need another program.
        """
        rest = self.options.max_tokens - 1
        dispatches = -(-rest // self.options.steps_per_dispatch)
        return -(-rest // dispatches) if dispatches else 0

    def compile(self, cache: Any, plan: jaxkv.Plan, on_progress: Progress | None) -> Any:
        """Compile the programs of the run; return an empty cache that replaces `cache`.

        Some programs run once, and may donate the buffers of `cache`. `on_progress` is called with
        the number of compiled programs and the number of all programs.
        """
        model = self.model
        jobs, (blank,) = lower_steps(model, cache, [plan])
        # Run the small programs once, on zero logits and an empty cache.
        cache, *_ = idle = self.begin(cache, blank, limit=0)
        if self.steps:
            # Without active texts the loop ends before its first step. The state is the output of
            # a program, as in `feed`, so that its sharding on a mesh is the same.
            jobs.append(lambda: self.generate(cache, idle.state, self.draft()))
        done = compile_all(jobs, on_progress)
        if self.steps:
            cache = done[-1].cache
        num_used_cells_of_fullest(cache)
        return jax.block_until_ready((cache, model.params))[0]

    def feed(self, cache: Any) -> generation.DecodeResult:
        """Prefill the prompts; return the cache and the first token of each text."""
        cache, logits, *_ = jaxkv.prefill(
            self.model.forward,
            self.model.params,
            cache,
            self.batch,
            ubatch_size=self.options.ubatch_size,
            donate=True,
        )
        return self.begin(cache, logits, limit=self.options.max_tokens)

    def begin(self, cache: Any, logits: jax.Array, *, limit: int) -> generation.DecodeResult:
        """Copy each prompt from its first sequence to its others; sample the first tokens."""
        samples = self.options.samples
        if samples > 1:
            for first in range(0, len(self.texts), samples):
                others = np.arange(first + 1, first + samples)
                cache, _ = jaxkv.seq_cp(cache, first, others, donate=True)
            logits = jnp.repeat(logits, samples, axis=0)
        seeds = (self.options.seed + np.arange(len(self.texts)) % samples) % 2**32
        options = {"max_new_tokens": limit, "seed": seeds, "prompts": self.texts}
        sampler, stop, ids = self.options.sampler, self.stop, np.arange(len(self.texts))
        return generation.init_decode(
            cache, logits=logits, sampler=sampler, stop_tokens=stop, sequences=ids, **options
        )

    def draft(self) -> Any:
        """Return the drafter; None if the option `tries` is 0."""
        if not self.options.tries:
            return None
        return generation.prompt_lookup(
            self.texts, num_draft_tokens=self.options.tries, recent=RECENT
        )

    def generate(
        self, cache: Any, state: generation.DecodeState, draft: Any
    ) -> generation.DecodeResult:
        """Generate the tokens of one dispatch."""
        args = self.model.forward, self.model.params, cache, state
        options = {"sampler": self.options.sampler, "stop_tokens": self.stop, "donate": True}
        if draft is None:
            return jaxkv.decode(*args, num_tokens=self.steps, **options)
        return generation.speculate(*args, drafter=draft, num_tokens=self.steps, **options)

    def go_on(
        self, first: generation.DecodeResult, writers: Sequence[Writer]
    ) -> tuple[Any, "Tally"]:
        """Generate tokens until every text has ended; an interrupt ends the remaining texts.

        Returns:
          The cache, and counts of the tokens after the first token of each text.
        """
        draft, tally = self.draft(), Tally()
        cache, state = first.cache, first.state
        try:
            write(writers, np.asarray(first.tokens), state)
            while any(writer.finish is None for writer in writers):
                out = self.generate(cache, state, draft)
                cache, state, draft = out.cache, out.state, out.drafter
                if draft is not None:
                    tally.tried += int(np.asarray(out.num_drafted).sum())
                    tally.accepted += int(np.asarray(out.num_accepted).sum())
                tally.decoded += write(writers, np.asarray(out.tokens), state)
        except KeyboardInterrupt:
            tally.interrupted = True
            for writer in writers:
                if writer.finish is None:
                    writer.finish = "interrupted"
        return cache, tally


def write(writers: Sequence[Writer], rows: np.ndarray, state: generation.DecodeState) -> int:
    """Append tokens `[Z, n]` to Z texts; return the number of tokens, including stop tokens.

    Negative entries are not tokens. Texts that are not active in `state` are then ended.
    """
    num_taken = 0
    for writer, row, goes_on, reason in zip(
        writers, rows, np.asarray(state.active), np.asarray(state.reason), strict=True
    ):
        num_taken += writer.write(row[row >= 0])
        if writer.finish is None and not goes_on:
            writer.end(finish_of(int(reason)))
    return num_taken


@dataclass
class Tally:
    """Counts of the tokens that follow the first token of each text.

    decoded: sampled tokens, including stop tokens.
    tried, accepted: draft tokens, and accepted draft tokens.
    interrupted: whether an interrupt ended the generation.
    """

    decoded: int = 0
    tried: int = 0
    accepted: int = 0
    interrupted: bool = False


def num_used_cells_of_fullest(cache: Any) -> int:
    """Return the largest number of used cells among the parts of a cache."""
    return max(int(part.num_used_cells()) for part in cache.parts)
