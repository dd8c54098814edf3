"""Beam search for several prompts, one prompt at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import jax
import numpy as np

import jaxkv
from jaxkv import generation
from models.compiling import Progress, compile_all, lower_steps
from models.model import Model
from models.room import cells_for, make_with_room
from models.texts import Text, check_prompts, finish_of


@dataclass(frozen=True, kw_only=True)
class Found:
    """Results of a beam search.

    texts: texts found, best text first.
    logprobs: for each text, the mean log-probability of its tokens.
    prompt_seconds: time to compute the prompt.
    seconds: time of the search after the prompt.
    """

    texts: list[Text]
    logprobs: list[float]
    prompt_seconds: float
    seconds: float


class Search:
    """Beam search for each prompt; an iteration yields one `Found` for each prompt.

    Args:
      model: model from `models.load`.
      prompts: token ids of each prompt.
      width: number of beams.
      max_tokens: largest number of tokens of a text.
      cells: number of cells of the cache; the default is enough for any one prompt with its texts.
      ubatch_size: largest number of prompt tokens computed at once.

    Raises:
      PlanRefusedError: If the cache is too small for a prompt.
      ValueError: If there is no prompt, or a prompt is empty.
      ModelError: If the device has too little memory for the cache.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        *,
        width: int,
        max_tokens: int = 128,
        cells: int | None = None,
        ubatch_size: int = 512,
    ):
        check_prompts(prompts)
        self.cells = cells or max(
            cells_for([prompt], max_tokens, samples=width) for prompt in prompts
        )
        self._model, self._prompts = model, prompts
        self._ubatch_size = ubatch_size
        stop = np.asarray(sorted(model.stop_tokens), np.int32)
        options = {"num_beams": width, "num_tokens": max_tokens, "stop_tokens": stop}
        self._search = jax.jit(partial(generation.beam, model.forward, **options), donate_argnums=1)
        self._batches = [jaxkv.make_batch(np.asarray(prompt, np.int32)) for prompt in prompts]
        self._cache = make_with_room(
            model.make_cache, cells=self.cells, sequences=width, ubatch_size=ubatch_size
        )
        self._plans = [
            jaxkv.init_batch(self._cache, batch, ubatch_size=ubatch_size).check()
            for batch in self._batches
        ]
        self.nbytes = self._cache.nbytes

    def compile(self, on_progress: Progress | None = None) -> None:
        """Compile the programs; for the argument `on_progress` see `compile_all`."""
        model = self._model
        jobs, blanks = lower_steps(model, self._cache, self._plans)
        jobs.append(self._search.lower(model.params, self._cache, blanks[0]).compile)
        compile_all(jobs, on_progress)
        self._cache = jax.block_until_ready(jaxkv.clear(self._cache))

    def __iter__(self) -> Iterator[Found]:
        for prompt, batch in zip(self._prompts, self._batches, strict=True):
            began = perf_counter()
            cache, logits, *_ = jaxkv.prefill(
                self._model.forward,
                self._model.params,
                jaxkv.clear(self._cache),
                batch,
                ubatch_size=self._ubatch_size,
                donate=True,
            )
            jax.block_until_ready(logits)
            middle = perf_counter()
            self._cache, *rest = self._search(self._model.params, cache, logits)
            beams = generation.BeamResult(self._cache, *jax.device_get(rest))
            took = perf_counter() - middle
            yield self._found(prompt, beams, prompt_seconds=middle - began, seconds=took)

    def _found(
        self, prompt: Sequence[int], beams: generation.BeamResult, **seconds: float
    ) -> Found:
        model = self._model
        reason = int(beams.reason)
        finish = "length" if reason == jaxkv.Reason.OK else finish_of(reason)
        rules = {"tokenizer": model.tokenizer, "stop_tokens": model.stop_tokens}
        exists = beams.scores != -np.inf
        if not exists.any():  # no token was allowed
            return Found(
                texts=[Text.of(prompt, [], "no token", **rules)], logprobs=[0.0], **seconds
            )
        return Found(
            texts=[Text.of(prompt, row[row >= 0], finish, **rules) for row in beams.tokens[exists]],
            logprobs=(beams.scores[exists] / np.maximum(beams.lengths[exists], 1)).tolist(),
            **seconds,
        )
