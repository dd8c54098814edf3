"""Results of the generation loops: named tuples whose first field is the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxkv.cache import Cache
from jaxkv.generation.state import DecodeState
from jaxkv.plan import result_repr

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32

    from jaxkv.generation.speculative.drafters import Drafter


class PrefillResult(NamedTuple):
    """Result of `prefill` and `encode`."""

    cache: Cache
    logits: Float[Array, "n V"] | None
    sequences: Int32[Array | np.ndarray, " n"] | None
    ok: Bool[Array, ""]
    reason: Int32[Array, " Q"]

    __repr__ = result_repr


class DecodeResult(NamedTuple):
    """Result of generating n tokens for each of Z sequences.

    Without a drafter, `num_model_steps`, `num_drafted`, `num_accepted` and `drafter` are None.

    state: State of each sequence, to continue with `decode` or `speculate`.
    tokens: Sampled tokens; -1 after the end of a sequence. The last token of a sequence is not in
      the cache yet. None in the result of `init_decode` with the argument `tokens`.
    logprobs: Log-probabilities of the tokens under the unadjusted logits; 0 after the end. If a
      logit of NaN or +inf ended the sequence, the first entry after its tokens is NaN.
    num_model_steps: For each sequence, the number of model steps in which the sequence was active,
      including steps whose plan was refused.
    num_accepted: Number of accepted draft tokens, stop tokens included.
    """

    cache: Cache
    state: DecodeState
    tokens: Int32[Array, "Z n"] | None
    logprobs: Float[Array, "Z n"] | None
    num_model_steps: Int32[Array, " Z"] | None = None
    num_drafted: Int32[Array, " Z"] | None = None
    num_accepted: Int32[Array, " Z"] | None = None
    drafter: Drafter | None = None

    __repr__ = result_repr

    @property
    def finish_reason(self) -> Int32[Array, " Z"]:
        """A `Reason` for each sequence."""
        return self.state.reason

    def lists(self) -> list[list[int]]:
        """Return the tokens of each sequence as a list without padding.

        Raises:
          TypeError: If the result is from `init_decode` with the argument `tokens`.
        """
        return [[token for token in row if token >= 0] for row in np.asarray(self.tokens).tolist()]


class BeamResult(NamedTuple):
    """Result of `beam`: the k best hypotheses of at most n tokens, best first."""

    cache: Cache
    tokens: Int32[Array, "k n"]
    scores: Float[Array, " k"]
    lengths: Int32[Array, " k"]
    num_cached: Int32[Array, " k"]
    reason: Int32[Array, ""]

    __repr__ = result_repr
