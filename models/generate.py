"""Texts from prompts: several at once, side by side in one memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Literal

import numpy as np

import jaxkv
from jaxkv.loops.sampling import Sampler
from models.compiling import counting
from models.model import Model
from models.room import check_room
from models.run import Run, used_of
from models.texts import OnText, Text, Writer

Streams = Literal["unified", "split"]
"""Whether all texts share the cells of the memory, or each has its own."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Texts, in the order of their prompts and samples, and what making them took.

    prompt_tokens: of all prompts; samples share theirs.
    compile_seconds: until everything was compiled; the other times begin after it.
    prompt_seconds: until the first token of each text was picked.
    decode_seconds: from then to the end.
    decoded: tokens picked in that time, stop tokens included.
    tried: tokens that were guessed, where there was speculation.
    accepted: those of them that held.
    cells: what the memory holds at most, not counting what windows let it forget.
    used: how many of them are in use at the end.
    nbytes: of the whole memory.
    compiles: programs compiled after the warm-up; 0, or something is wrong.
    interrupted: whether it was interrupted; the texts are what there was of them.
    """

    texts: list[Text]
    prompt_tokens: int
    compile_seconds: float
    prompt_seconds: float
    decode_seconds: float
    decoded: int
    tried: int
    accepted: int
    cells: int
    used: int
    nbytes: int
    compiles: int
    interrupted: bool


def generate_texts(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    sampler: Sampler,
    seed: int = 0,
    samples: int = 1,
    tries: int = 0,
    max_tokens: int = 128,
    cells: int | None = None,
    ubatch_size: int = 512,
    streams: Streams = "unified",
    steps_per_dispatch: int = 8,
    on_text: OnText | None = None,
    on_compile: Callable[[int, int], None] | None = None,
) -> Generated:
    """Continue prompts together, as sequences of one memory, each as it would go on alone.

    Everything is compiled before anything runs, so that times are those of running. An interrupt
    while texts grow ends them.

    Args:
      model: see `models.load`.
      prompts: their tokens, at least one each.
      sampler: what adjusts logits before a token is drawn.
      seed: of the draws of the first sample of each prompt, which depend on nothing else; the next
        samples have the next seeds.
      samples: how many texts are made of each prompt, which is computed once.
      tries: the most tokens that are guessed at a time, by looking up where the last ones occurred
        before; 0 for none.
      max_tokens: the most tokens to generate for each text.
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
      ValueError: when there is no prompt, one is empty, or a number is below its least.
    """
    least = {"max_tokens": 1, "samples": 1, "tries": 0, "steps_per_dispatch": 1}
    given = dict(zip(least, (max_tokens, samples, tries, steps_per_dispatch), strict=True))
    _check(prompts, streams, given, least)
    if cells is None:
        cells = cells_for(prompts, max_tokens, streams, samples=samples)
    texts = len(prompts) * samples
    pools = texts if streams == "split" else 1
    make = partial(
        model.make_memory,
        cells=cells,
        sequences=texts,
        streams=pools,
        ubatch_size=ubatch_size,
        rollback=tries or None,
    )
    check_room(make, f"A memory of {cells * pools:,} cells")
    memory = make()
    run = Run(
        model=model,
        sampler=sampler,
        seed=seed,
        samples=samples,
        tries=tries,
        prompts=prompts,
        ubatch_size=ubatch_size,
        stop=np.asarray(sorted(model.stop_tokens), np.int32),
        max_tokens=max_tokens,
        steps=_steps(max_tokens, steps_per_dispatch),
    )
    plan = jaxkv.init_batch(memory, run.batch, ubatch_size=ubatch_size).check()
    rules = model.tokenizer, model.stop_tokens, max_tokens, on_text
    writers = [Writer(i, *rules) for i in range(texts)]

    with counting() as compiled:
        began = perf_counter()
        memory = run.compile(memory, plan, on_compile)
        compile_seconds, warm = perf_counter() - began, compiled()

        began = perf_counter()
        memory, state, first = run.feed(memory)
        prompt_seconds = perf_counter() - began

        began = perf_counter()
        for writer, token in zip(writers, first, strict=True):
            writer.write(token)
        memory, tally = run.go_on(memory, state, writers)
        decode_seconds = perf_counter() - began

        used = used_of(memory)
        compiles = compiled() - warm
    return Generated(
        texts=[
            writer.outcome([int(token) for token in prompt])
            for prompt, writer in zip(run.texts, writers, strict=True)
        ],
        prompt_tokens=sum(map(len, prompts)),
        compile_seconds=compile_seconds,
        prompt_seconds=prompt_seconds,
        decode_seconds=decode_seconds,
        decoded=tally.decoded,
        tried=tally.tried,
        accepted=tally.accepted,
        cells=cells * pools,
        used=used,
        nbytes=jaxkv.nbytes(memory),
        compiles=compiles,
        interrupted=tally.interrupted,
    )


def cells_for(
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    streams: Streams = "unified",
    *,
    samples: int = 1,
) -> int:
    """Count the cells that prompts and their texts need, rounded up to a multiple of 256.

    Where the memory is split it is the longest that counts, since every stream has as many; where
    it is not, the samples of a prompt share its cells.

    Examples:
      >>> cells_for([[1, 2, 3], [4, 5]], 128), cells_for([[1, 2, 3], [4, 5]], 128, "split")
      (512, 256)
      >>> cells_for([[1] * 500], 128, samples=4)
      1024
    """
    # The last token of a text is never put into the memory.
    own = max_tokens - 1
    if streams == "split":
        needed = max(map(len, prompts)) + own
    else:
        needed = sum(len(prompt) + samples * own for prompt in prompts)
    return -(-needed // 256) * 256


def _check(
    prompts: Sequence[Sequence[int]], streams: str, given: dict[str, int], least: dict[str, int]
) -> None:
    for name, got in given.items():
        if got < least[name]:
            raise ValueError(f"{name} must be at least {least[name]}, got {got}")
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
