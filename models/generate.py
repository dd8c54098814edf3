"""Texts from prompts: several at once, side by side in one memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import loops
from jaxkv.loops.sampling import Sampler
from models.compiling import compile_all, counting
from models.model import Model
from models.room import check_room
from models.texts import OnText, Text, Writer

Streams = Literal["unified", "split"]
"""Whether all texts share the cells of the memory, or each has its own."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Texts, in the order of their prompts, and what making them took.

    compile_seconds: until everything was compiled; the other times begin after it.
    prompt_seconds: until the first token of each text was picked.
    decode_seconds: from then to the end.
    decoded: tokens picked in that time, stop tokens included.
    cells: what the memory holds at most, not counting what windows let it forget.
    used: how many of them are in use at the end.
    nbytes: of the whole memory.
    compiles: programs compiled after the warm-up; 0, or something is wrong.
    """

    texts: list[Text]
    compile_seconds: float
    prompt_seconds: float
    decode_seconds: float
    decoded: int
    cells: int
    used: int
    nbytes: int
    compiles: int


def generate_texts(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    sampler: Sampler,
    seed: int = 0,
    max_tokens: int = 128,
    cells: int | None = None,
    ubatch_size: int = 512,
    streams: Streams = "unified",
    steps_per_dispatch: int = 8,
    on_text: OnText | None = None,
    on_compile: Callable[[int, int], None] | None = None,
) -> Generated:
    """Continue prompts together, as sequences of one memory, each as it would go on alone.

    Everything is compiled before anything runs, so that times are those of running.

    Args:
      model: see `models.load`.
      prompts: their tokens, at least one each.
      sampler: what adjusts logits before a token is drawn.
      seed: of the draws of each text, which do not depend on the other prompts.
      max_tokens: the most tokens to generate for each prompt.
      cells: of the memory, of each stream where it is split; by default what the prompts and texts
        need, see `cells_for`.
      ubatch_size: the most tokens of a prompt that are computed at once.
      streams: "unified", one pool of cells for all texts, or "split", a stream for each.
      steps_per_dispatch: tokens of each text that are generated before the host looks at them.
      on_text: called with each piece of text as soon as it is there.
      on_compile: called with the number of programs that are compiled and of those there are.

    Raises:
      RefusedError: when the prompts do not fit the memory, before anything is compiled or run.
      ModelError: when the memory does not fit the device, before it is made.
      ValueError: when there is no prompt, one is empty, or a number is below 1.
    """
    _check(prompts, max_tokens, steps_per_dispatch, streams)
    if cells is None:
        cells = cells_for(prompts, max_tokens, streams)
    pools = len(prompts) if streams == "split" else 1
    make = partial(
        model.make_memory,
        cells=cells,
        sequences=len(prompts),
        streams=pools,
        ubatch_size=ubatch_size,
    )
    check_room(make, f"A memory of {cells * pools:,} cells")
    memory = make()
    run = _Run(
        model=model,
        sampler=sampler,
        seed=seed,
        prompts=prompts,
        batch=jaxkv.make_batch([np.asarray(prompt, np.int32) for prompt in prompts]),
        ubatch_size=ubatch_size,
        stop=np.asarray(sorted(model.stop_tokens), np.int32),
        max_tokens=max_tokens,
        steps=_steps(max_tokens, steps_per_dispatch),
    )
    plan = jaxkv.init_batch(memory, run.batch, ubatch_size=ubatch_size).check()
    rules = model.tokenizer, model.stop_tokens, max_tokens, on_text
    writers = [Writer(i, *rules) for i in range(len(prompts))]

    with counting() as compiled:
        began = perf_counter()
        memory = _compile(run, memory, plan, on_compile)
        compile_seconds, warm = perf_counter() - began, compiled()

        began = perf_counter()
        memory, state, first = _feed(run, memory)
        prompt_seconds = perf_counter() - began

        began = perf_counter()
        for writer, token in zip(writers, np.asarray(first), strict=True):
            writer.write(token)
        memory, decoded = _go_on(run, memory, state, writers)
        decode_seconds = perf_counter() - began

        used = _used(memory)
        compiles = compiled() - warm
    texts = [
        writer.outcome([int(token) for token in prompt])
        for prompt, writer in zip(prompts, writers, strict=True)
    ]
    return Generated(
        texts=texts,
        compile_seconds=compile_seconds,
        prompt_seconds=prompt_seconds,
        decode_seconds=decode_seconds,
        decoded=decoded,
        cells=cells * pools,
        used=used,
        nbytes=jaxkv.nbytes(memory),
        compiles=compiles,
    )


def cells_for(
    prompts: Sequence[Sequence[int]], max_tokens: int, streams: Streams = "unified"
) -> int:
    """Count the cells that prompts and their texts need, rounded up to a multiple of 256.

    Where the memory is split it is the longest that counts, since every stream has as many.

    Examples:
      >>> cells_for([[1, 2, 3], [4, 5]], 128), cells_for([[1, 2, 3], [4, 5]], 128, "split")
      (512, 256)
    """
    # The last token of a text is never put into the memory.
    needed = [len(prompt) + max_tokens - 1 for prompt in prompts]
    most = max(needed) if streams == "split" else sum(needed)
    return -(-most // 256) * 256


def _check(
    prompts: Sequence[Sequence[int]], max_tokens: int, steps_per_dispatch: int, streams: str
) -> None:
    for name, got in {"max_tokens": max_tokens, "steps_per_dispatch": steps_per_dispatch}.items():
        if got < 1:
            raise ValueError(f"{name} must be at least 1, got {got}")
    if not prompts or not all(map(len, prompts)):
        raise ValueError("wanted prompts of at least one token each, got none, or one without any")
    if streams not in ("unified", "split"):
        raise ValueError(f'streams must be "unified" or "split", got {streams!r}')


def _steps(max_tokens: int, steps_per_dispatch: int) -> int:
    """Returns the tokens of a dispatch; 0 where there is none.

    The first token comes with the prompts. The rest is cut evenly: a shorter last dispatch would be
    another program, so it runs over the end by a few tokens at most instead.
    """
    dispatches = -(-(max_tokens - 1) // steps_per_dispatch)
    return -(-(max_tokens - 1) // dispatches) if dispatches else 0


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What stays the same while prompts are continued.

    stop: `[n]` int32, the tokens that end a text.
    max_tokens: the most tokens of a text.
    steps: tokens of a dispatch, 0 where one token a text is all.
    """

    model: Model
    sampler: Sampler
    seed: int
    prompts: Sequence[Sequence[int]]
    batch: jaxkv.Batch
    ubatch_size: int
    stop: np.ndarray
    max_tokens: int
    steps: int

    def begin(self, memory: Any, logits: jax.Array) -> tuple[loops.DecodeState, loops.Picked]:
        """The tokens that come after the prompts."""
        seeds = np.full(len(self.prompts), self.seed)
        options = {"limit": self.max_tokens, "seed": seeds, "prompts": self.prompts}
        return loops.begin(self.sampler, memory, logits, self.stop, **options)

    def decode(self, memory: Any, state: loops.DecodeState) -> tuple:
        return jaxkv.decode(
            self.model.forward,
            self.sampler,
            self.model.weights,
            memory,
            state,
            self.stop,
            steps=self.steps,
            donate=True,
        )


def _compile(
    run: _Run, memory: Any, plan: jaxkv.Plan, tell: Callable[[int, int], None] | None
) -> Any:
    """Compile all that the run needs; returns the memory, whose buffers were donated on the way."""
    step, jobs, blanks = loops.step_of(run.model.forward), [], {}
    for ubatch in plan.ubatches:
        shape = ubatch.tokens.shape, ubatch.outputs.shape
        if shape not in blanks:
            # jit finds what is compiled here, since it keeps what it lowered for equal arguments.
            lowered = step.lower(run.model.weights, *jaxkv.split(memory), ubatch)
            jobs.append(lowered.compile)
            out = lowered.out_info[2]
            blanks[shape] = jnp.zeros(out.shape, out.dtype)
    if run.steps:
        # A loop in which no text goes on ends before its first step.
        none = np.zeros(len(run.prompts), np.int32)
        options = {"limit": 0, "sampler": run.sampler, "prompts": run.prompts}
        idle = loops.start(memory, none, **options)
        jobs.append(lambda: run.decode(memory, idle))
    done = compile_all(jobs, tell)
    if run.steps:
        memory = done[-1][0]
    # What is small is run, on logits of zeros.
    blank = plan.collect([blanks[u.tokens.shape, u.outputs.shape] for u in plan.ubatches])
    run.begin(memory, blank)
    _used(memory)
    jax.block_until_ready((memory, run.model.weights))
    return memory


def _feed(run: _Run, memory: Any) -> tuple[Any, loops.DecodeState, np.ndarray]:
    """Put the prompts into the memory; returns it and how the texts begin."""
    memory, logits = jaxkv.prefill(
        run.model.forward,
        run.model.weights,
        memory,
        run.batch,
        ubatch_size=run.ubatch_size,
        donate=True,
    )
    state, first = run.begin(memory, logits)
    return memory, state, np.asarray(first.tokens)


def _go_on(
    run: _Run, memory: Any, state: loops.DecodeState, writers: Sequence[Writer]
) -> tuple[Any, int]:
    """Generate until every text has ended; returns the memory and how many tokens were picked."""
    decoded = 0
    while any(writer.finish is None for writer in writers):
        memory, state, picked = run.decode(memory, state)
        refused = np.asarray(state.reason) != jaxkv.Reason.FITS
        for writer, row, full in zip(writers, np.asarray(picked.tokens), refused, strict=True):
            decoded += writer.write(row[row >= 0])
            if full and writer.finish is None:
                writer.end("full")
    return memory, decoded


def _used(memory: Any) -> int:
    """Return the cells in use, of a memory of parts those of the fullest: windows hold fewer."""
    return max(int(jaxkv.used(part)) for part in jaxkv.hybrid.parts_of(memory))
