"""What the loops return: named tuples of constant length, the cache first."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxkv.cache import Cache
from jaxkv.generation.state import DecodeState

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32

    from jaxkv.generation.speculative.drafters import Drafter


class PrefillResult(NamedTuple):
    """What `prefill` and `encode` return.

    cache: the cache after the batch.
    logits: those of the output tokens, in the order of the batch; None after `encode`.
    sequences: the sequence of each row of logits, of several the lowest; None after `encode`.
    ok: whether the batch was computed. Outside of a transformation a refusal is raised.
    reason: a `Reason` for each sequence, see `Plan`.
    """

    cache: Cache
    logits: Float[Array, "n V"] | None
    sequences: Int32[Array | np.ndarray, " n"] | None
    ok: Bool[Array, ""]
    reason: Int32[Array, " Q"]


class DecodeResult(NamedTuple):
    """What `generate`, `init_decode`, `decode` and `speculate` return, of T texts and n steps.

    cache: the cache after the tokens.
    state: how far each text has come; `decode` and `speculate` continue from it.
    tokens: those that were sampled, -1 where a text had ended; None where `init_decode` was given
      the tokens.
    logprobs: float32, the logarithms of their probabilities by the model alone, before a sampler
      adjusted anything; 0 where a text had ended, so that their sum is that of the text. NaN where
      logits hold NaN or +inf, which ends a text without a token.
    num_model_steps: of `speculate`: the steps of the model that a text took part in, a refused one
      included; else None.
    num_drafted: of `speculate`: the tokens that were drafted; else None.
    num_accepted: of `speculate`: those that were accepted, a stop token included; else None.
    drafter: of `speculate`: the drafter to continue with; else None.
    """

    cache: Cache
    state: DecodeState
    tokens: Int32[Array, "T n"] | None
    logprobs: Float[Array, "T n"] | None
    num_model_steps: Int32[Array, " T"] | None = None
    num_drafted: Int32[Array, " T"] | None = None
    num_accepted: Int32[Array, " T"] | None = None
    drafter: Drafter | None = None

    @property
    def finish_reason(self) -> Int32[Array, " T"]:
        """A `Reason` for each text: OK unless an error or a refusal ended it."""
        return self.state.reason

    def lists(self) -> list[list[int]]:
        """Return the tokens of each text, without the padding.

        >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=4), cells=8)
        >>> cache = apply(cache, init_batch(cache, make_batch([1])))
        >>> generation.init_decode(cache, logits=jnp.array([[0.0, 2.0]])).lists()
        [[1]]
        """
        return [[token for token in row if token >= 0] for row in np.asarray(self.tokens).tolist()]


class BeamResult(NamedTuple):
    """The W best texts of `beam`, the best first.

    cache: the cache after the search, with the texts in the sequences of the beams.
    tokens: -1 where a text has ended.
    scores: float32, the logarithm of the probability of each text after the prompt, which is the
      sum over its tokens; -inf where fewer texts were found.
    lengths: the tokens of each text, its stop token included.
    num_cached: how many tokens of a text its sequence holds after the prompt; -1 where the sequence
      holds nothing, not even the prompt.
    reason: a `Reason`: why the cache refused a step, or NONFINITE_LOGITS of a beam, either of which
      ended the search; else OK.
    """

    cache: Cache
    tokens: Int32[Array, "W n"]
    scores: Float[Array, " W"]
    lengths: Int32[Array, " W"]
    num_cached: Int32[Array, " W"]
    reason: Int32[Array, ""]
