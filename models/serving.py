"""Generation of texts from many prompts in a few sequences."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxkv import serving
from models.model import Model
from models.room import Streams, cells_for, make_with_room
from models.texts import Finish, Text, check_prompts

CHUNK = 128
"""Default of `ubatch_size`, the largest number of prompt tokens computed at once."""

FINISH: dict[serving.FinishReason, Finish] = {
    serving.FinishReason.STOP: "stop",
    serving.FinishReason.LENGTH: "length",
    serving.FinishReason.OUT_OF_CELLS: "full",
    serving.FinishReason.NO_TOKEN: "no token",
    serving.FinishReason.NONFINITE_LOGITS: "nonfinite logits",
    serving.FinishReason.CANCELLED: "interrupted",
}
"""Value of `Text.finish` for each reason of the engine."""


class TooLongError(ValueError):
    """Error if the cache is too small for a prompt with its text.

    enough: value of the argument `cells` with which this error does not occur.
    """

    def __init__(self, message: str, enough: int):
        super().__init__(message)
        self.enough = enough


class Serving:
    """Continuation of many prompts in a few sequences; no text depends on the other prompts.

    Args:
      model: model from `models.load`.
      prompts: token ids of each prompt.
      sequences: largest number of prompts that run at once.
      sampling: names and values of options of `generation.make_sampler`; the values are numbers.
      seed: seed that is used for every text.
      max_tokens: largest number of tokens of a text.
      cells: number of cells of each stream. The default is enough for the longest prompts that can
        run at once, with their texts.
      ubatch_size: largest number of prompt tokens computed at once. The default is the total number
        of tokens in the `sequences` longest prompts, rounded up to a power of two, but at most 128.
      streams: "split" for one stream for each sequence, "unified" for one stream for all sequences.

    Raises:
      TooLongError: If the cache is too small for a prompt with its text.
      ValueError: If there is no prompt, or a prompt is empty.
      ModelError: If the device has too little memory for the cache.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        *,
        sequences: int = 8,
        sampling: dict[str, Any] | None = None,
        seed: int = 0,
        max_tokens: int = 128,
        cells: int | None = None,
        ubatch_size: int | None = None,
        streams: Streams = "split",
    ):
        check_prompts(prompts)
        self.sequences = min(sequences, len(prompts))
        longest = sorted(prompts, key=len)[-self.sequences :]
        enough = cells_for(longest, max_tokens, streams)
        if ubatch_size is None:
            tokens = sum(map(len, longest))
            ubatch_size = min(1 << (tokens - 1).bit_length(), CHUNK)
        cells, pools = cells or enough, self.sequences if streams == "split" else 1
        cache = make_with_room(
            model.make_cache,
            cells=cells,
            sequences=self.sequences,
            streams=pools,
            ubatch_size=ubatch_size,
        )
        self.cells, self.nbytes = cells * pools, cache.nbytes
        self._rules = {"tokenizer": model.tokenizer, "stop_tokens": model.stop_tokens}
        self._prompts, self._ended = prompts, []
        self._engine = serving.Engine(
            model.forward,
            model.params,
            cache,
            stop_tokens=sorted(model.stop_tokens),
            prefill_chunk=ubatch_size,
            sampling_options=sampling or (),
        )
        fixed = {"max_new_tokens": max_tokens, "seed": seed, "sampling": sampling or {}}
        for i, prompt in enumerate(prompts, 1):
            try:
                self._engine.submit(serving.Request(prompt=prompt, **fixed))
            except ValueError as error:
                num_fed = max_tokens - 1
                where = "a stream" if streams == "split" else "the cache"
                raise TooLongError(
                    f"prompt {i} needs {len(prompt) + num_fed} cells ({len(prompt)} of the prompt, "
                    f"{num_fed} of the text) and {where} has {cells}",
                    enough,
                ) from error

    def compile(self) -> None:
        """Compile the programs of the engine."""
        self._engine.warm_up()

    def texts(self, on_step: Callable[[], None] = lambda: None) -> Iterator[tuple[int, Text]]:
        """Run until all texts have ended; when a text ends, yield its prompt's index and the text.

        `on_step` is called before each step. An exception from `on_step` ends the run.
        """
        while self._engine.busy:
            on_step()
            self._ended += self._engine.step()
            yield from self._take_ended()

    def rest(self) -> Iterator[tuple[int, Text]]:
        """After an interrupt, yield the texts that the method `texts` has not yielded.

        Texts that have not ended are incomplete; texts without tokens are left out. No step is run,
        since the interrupt may have occurred during a step.
        """
        yield from self._take_ended()
        for i, prompt in enumerate(self._prompts):
            tokens = self._engine.tokens_of(i)
            if tokens:
                yield i, Text.of(prompt, tokens, "interrupted", **self._rules)

    def _take_ended(self) -> Iterator[tuple[int, Text]]:
        while self._ended:
            result = self._ended.pop(0)
            prompt, finish = self._prompts[result.id], FINISH[result.reason]
            yield result.id, Text.of(prompt, result.tokens, finish, **self._rules)
