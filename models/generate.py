"""Texts from prompts: several at once, side by side in one cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import jaxkv
from models.compiling import counting
from models.model import Model
from models.room import cells_for, make_with_room
from models.run import Options, Run, num_used_cells_of_fullest
from models.texts import OnText, Text, Writer, check_prompts


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
    cells: what the cache holds at most, not counting what windows let it forget.
    used: how many of them are in use at the end.
    nbytes: of the whole cache.
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
    options: Options,
    *,
    on_text: OnText | None = None,
    on_compile: Callable[[int, int], None] | None = None,
) -> Generated:
    """Continue prompts together, as sequences of one cache, each as it would go on alone.

    Everything is compiled before anything runs, so that times are those of running. An interrupt
    while texts grow ends them.

    Args:
      model: see `models.load`.
      prompts: their tokens, at least one each.
      options: how they are continued.
      on_text: called with each piece of text as soon as it is there.
      on_compile: called with the number of programs that are compiled and of those there are.

    Raises:
      PlanRefusedError: when the prompts do not fit the cache, before anything is compiled or run.
      ModelError: when the cache does not fit the device, before it is made.
      ValueError: when there is no prompt, or one is empty.
    """
    check_prompts(prompts)
    run = Run(model, prompts, options)
    texts, streams = len(run.texts), options.streams
    cells = options.cells or cells_for(
        prompts, options.max_tokens, streams, samples=options.samples
    )
    pools = texts if streams == "split" else 1
    cache = make_with_room(
        model.make_cache,
        cells=cells,
        sequences=texts,
        streams=pools,
        ubatch_size=options.ubatch_size,
        max_rollback=options.tries or None,
    )
    plan = jaxkv.init_batch(cache, run.batch, ubatch_size=options.ubatch_size).check()
    rules = model.tokenizer, model.stop_tokens, options.max_tokens, on_text
    writers = [Writer(i, *rules) for i in range(texts)]

    with counting() as compiled:
        began = perf_counter()
        cache = run.compile(cache, plan, on_compile)
        compile_seconds, warm = perf_counter() - began, compiled()

        began = perf_counter()
        first = run.feed(cache)
        prompt_seconds = perf_counter() - began

        began = perf_counter()
        cache, tally = run.go_on(first, writers)
        decode_seconds = perf_counter() - began

        used = num_used_cells_of_fullest(cache)
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
        nbytes=cache.nbytes,
        compiles=compiles,
        interrupted=tally.interrupted,
    )
