"""The most probable texts after prompts, one prompt after another in one cache."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import jax
import numpy as np

import jaxkv
from jaxkv import generation
from models.compiling import compile_all, lower_steps
from models.model import Model
from models.room import cells_for, make_with_room
from models.texts import Text, check_prompts


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search has found.

    texts: the best one first.
    logprobs: the log-probability of each by token.
    prompt_seconds: until the prompt was computed.
    seconds: of the search after it.
    """

    texts: list[Text]
    logprobs: list[float]
    prompt_seconds: float
    seconds: float


class Search:
    """Searches for the most probable texts after each prompt (beam search).

    To iterate over it is to search: it gives what is found for one prompt after another.

    Args:
      model: see `models.load`.
      prompts: their tokens, at least one each.
      width: how many texts are followed side by side.
      max_tokens: the most tokens of a text.
      cells: of the cache, by default what any of the prompts and its texts need.
      ubatch_size: the most tokens of a prompt that are computed at once.

    Raises:
      PlanRefusedError: when a prompt does not fit the cache.
      ValueError: when there is no prompt, or one is empty.
      ModelError: when the cache does not fit the device.
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

    def compile(self, tell: Callable[[int, int], None] | None = None) -> None:
        """Compile all that the searches need.

        Args:
          tell: called with the number of programs that are compiled and of those there are.
        """
        model = self._model
        jobs, blanks = lower_steps(model, self._cache, self._plans)
        jobs.append(self._search.lower(model.params, self._cache, blanks[0]).compile)
        compile_all(jobs, tell)
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
        finish = "length" if beams.reason == jaxkv.Reason.OK else "full"
        rules = {"tokenizer": model.tokenizer, "stop_tokens": model.stop_tokens}
        exists = beams.scores != -np.inf
        return Found(
            texts=[Text.of(prompt, row[row >= 0], finish, **rules) for row in beams.tokens[exists]],
            logprobs=(beams.scores[exists] / np.maximum(beams.lengths[exists], 1)).tolist(),
            **seconds,
        )
