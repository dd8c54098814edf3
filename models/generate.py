"""Generation of texts from several prompts in one cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import jaxkv
from models.compiling import Progress, counting
from models.model import Model
from models.room import cells_for, make_with_room
from models.run import Options, Run, num_used_cells_of_fullest
from models.texts import OnText, Text, Writer, check_prompts


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Generated texts, in the order of prompts and samples, with statistics.

    prompt_tokens: number of tokens of all prompts; samples of a prompt count once.
    compile_seconds: time of compilation, which is not part of the other times.
    prompt_seconds: time to compute the prompts and to sample the first token of each text.
    decode_seconds: time to generate the tokens after the first tokens.
    decoded: number of tokens after the first tokens, including stop tokens.
    tried: number of draft tokens; the field `accepted` is the number of accepted draft tokens.
    cells: number of cells of all streams in layers with full attention.
    used: number of used cells after generation, in the cache part where this number is largest.
    nbytes: bytes of the whole cache.
    compiles: number of programs compiled after the warm-up, expected to be 0.
    interrupted: whether an interrupt ended the generation.
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
    on_compile: Progress | None = None,
) -> Generated:
    """Continue prompts in one cache; a text does not depend on the other prompts.

    All programs are compiled first, so that the times exclude compilation. A KeyboardInterrupt
    after the prompts were computed is caught, and ends all unfinished texts.

    Args:
      model: model from `models.load`.
      prompts: token ids of each prompt.
      options: options of generation, see `models.run.Options`.
      on_text: called with each new piece of a text.
      on_compile: called with the number of compiled programs and the number of all programs.

    Raises:
      PlanRefusedError: If the cache is too small for the prompts; raised before compilation.
      ModelError: If the device has too little memory for the cache; raised before allocation.
      ValueError: If there is no prompt, or a prompt is empty.
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
