"""Other ways from prompts to texts: the most probable ones, and many through few sequences."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import jaxkv
from jaxkv import loops
from models.generate import cells_for
from models.model import Model
from models.room import check_room
from models.texts import Finish, Text

FINISH: dict[loops.batching.Finish, Finish] = {
    loops.batching.Finish.STOP: "stop",
    loops.batching.Finish.LENGTH: "length",
    loops.batching.Finish.FULL: "full",
}
"""Why a text ended, in the words of `Text`."""


def search_texts(
    model: Model,
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int = 128,
    cells: int | None = None,
    ubatch_size: int = 512,
) -> list[tuple[Text, float]]:
    """Search for the most probable texts after a prompt (beam search).

    Args:
      model: see `models.load`.
      prompt: its tokens, at least one.
      width: how many texts are followed side by side.
      max_tokens: the most tokens of a text.
      cells: of the memory, by default what the prompt and the texts need.
      ubatch_size: the most tokens of the prompt that are computed at once.

    Returns:
      The texts, the best one first, each with its log-probability by token.

    Raises:
      RefusedError: when the prompt does not fit the memory.
      ModelError: when the memory does not fit the device.
    """
    cells = cells or cells_for([prompt], max_tokens, samples=width)
    memory = _made(model, cells, width, ubatch_size=ubatch_size)
    run = model.forward, model.weights
    batch = jaxkv.make_batch(np.asarray(prompt, np.int32))
    memory, logits = jaxkv.prefill(*run, memory, batch, ubatch_size=ubatch_size, donate=True)
    stop = np.asarray(sorted(model.stop_tokens), np.int32)
    _, beams = loops.beam(
        *run, memory, logits, width=width, steps=max_tokens, stop=stop, donate=True
    )
    full = int(beams.reason) != jaxkv.Reason.FITS
    tokens, lengths = np.asarray(beams.tokens), np.maximum(beams.lengths, 1)
    ranks = np.asarray(beams.scores) / lengths
    return [
        (_text(model, prompt, row[row >= 0].tolist(), "full" if full else "length"), float(rank))
        for row, rank in zip(tokens, ranks, strict=True)
        if np.isfinite(rank)
    ]


def serve_texts(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    sequences: int = 8,
    sampling: dict[str, Any] | None = None,
    seed: int = 0,
    max_tokens: int = 128,
    cells: int | None = None,
) -> Iterator[tuple[int, Text]]:
    """Continue many prompts in few sequences, each with a stream of its own.

    Args:
      model: see `models.load`.
      prompts: their tokens, at least one each.
      sequences: how many run at once.
      sampling: options of `loops.sampling.make_sampler`.
      seed: of the draws of each text, which do not depend on the others.
      max_tokens: the most tokens of a text.
      cells: of each stream, by default what the longest prompt and its text need.

    Returns:
      As they end, which prompt it was and its text.

    Raises:
      ValueError: when a prompt does not fit.
      ModelError: when the memory does not fit the device.
    """
    sequences = min(sequences, len(prompts))
    cells = cells or cells_for(prompts, max_tokens, "split")
    memory = _made(model, cells, sequences, streams=sequences)
    requests = [
        loops.batching.Request(
            prompt=prompt, limit=max_tokens, seed=seed, sampling=sampling or {}, tag=i
        )
        for i, prompt in enumerate(prompts)
    ]
    stop = sorted(model.stop_tokens)
    for result in loops.batching.serve(model.forward, model.weights, memory, requests, stop=stop):
        prompt = prompts[result.request.tag]
        yield result.id, _text(model, prompt, result.tokens.tolist(), FINISH[result.reason])


def _made(model: Model, cells: int, sequences: int, **options: Any) -> Any:
    """Make a memory, if the device has room for it."""

    def make() -> Any:
        return model.make_memory(cells=cells, sequences=sequences, **options)

    check_room(make, f"A memory of {cells * options.get('streams', 1):,} cells")
    return make()


def _text(model: Model, prompt: Sequence[int], tokens: list[int], finish: Finish) -> Text:
    """Return a text of its tokens; a stop token at their end is none of it."""
    if tokens and tokens[-1] in model.stop_tokens:
        tokens, finish = tokens[:-1], "stop"
    text = model.tokenizer.decode(tokens)
    return Text(
        prompt_tokens=[int(token) for token in prompt], tokens=tokens, text=text, finish=finish
    )
