"""Filters and penalties of logits. Option values are arrays, so new values need no compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.array_utils import DROP, is_concrete
from jaxkv.core.pytree import pytree_dataclass, static_field
from jaxkv.core.validate import check_count, check_int32
from jaxkv.generation.padding import take_last_tokens
from jaxkv.generation.sampler import Sampler

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Bool, Float, Int, Int32, Num, PyTree, Shaped, UInt32

    from jaxkv.generation.types import Numbers


class SamplingOption(NamedTuple):
    """Numeric option of `make_sampler`. The value `neutral` has no effect."""

    neutral: float
    dtype: type[np.number]
    is_valid: Callable[[Any], Any]
    range_text: str


OPTIONS = {
    "temperature": SamplingOption(0.0, np.float32, lambda x: x >= 0, "at least 0 and finite"),
    "top_k": SamplingOption(0, np.int32, lambda x: x >= 0, "at least 0"),
    "top_p": SamplingOption(1.0, np.float32, lambda x: (x > 0) & (x <= 1), "above 0 and at most 1"),
    "min_p": SamplingOption(0.0, np.float32, lambda x: (x >= 0) & (x <= 1), "from 0 to 1"),
    "repeat_penalty": SamplingOption(1.0, np.float32, lambda x: x > 0, "above 0 and finite"),
    "frequency_penalty": SamplingOption(0.0, np.float32, lambda x: x == x, "finite"),
    "presence_penalty": SamplingOption(0.0, np.float32, lambda x: x == x, "finite"),
}
"""Options of `make_sampler` except `penalty_last_n`, in the order of the arguments."""

EVERY = np.iinfo(np.int32).max
"""A number that is larger than any vocabulary."""


@pytree_dataclass
class FilterSampler(Sampler):
    """Sampler from `make_sampler`; filters and penalties with the value None are skipped."""

    temperature: Float[Array | np.ndarray, "*n"] | None
    top_k: Int32[Array | np.ndarray, "*n"] | None
    top_p: Float[Array | np.ndarray, "*n"] | None
    min_p: Float[Array | np.ndarray, "*n"] | None
    repeat_penalty: Float[Array | np.ndarray, "*n"] | None
    frequency_penalty: Float[Array | np.ndarray, "*n"] | None
    presence_penalty: Float[Array | np.ndarray, "*n"] | None
    penalty_last_n: int = static_field()

    @property
    def is_random(self) -> bool:
        """Whether `temperature` is not None, so that tokens are drawn at random."""
        return self.temperature is not None

    @property
    def _has_penalty(self) -> bool:
        penalties = self.repeat_penalty, self.frequency_penalty, self.presence_penalty
        return any(penalty is not None for penalty in penalties)

    def init(self, prompts: Int[Array | np.ndarray, "Z n"]) -> PyTree:
        """Return the last `penalty_last_n` tokens of each prompt, padded in front with -1."""
        for name in OPTIONS:
            shape = np.shape(getattr(self, name))
            if shape not in ((), (len(prompts),)):
                raise ValueError(
                    f"expected {name} [] or [{len(prompts)}], one for each sequence, got {shape}; "
                    "pass a scalar, or one for each sequence"
                )
        if not self._has_penalty:
            return ()
        return take_last_tokens(prompts, self.penalty_last_n)

    def adjust(self, logits: Float[Array, "Z V"], state: PyTree) -> Float[Array, "Z V"]:
        """Apply penalties, filters and temperature, in this order, to float32 logits."""
        if self._has_penalty:
            logits = self._subtract_penalties(logits, state)
        if self.temperature is None:
            return logits
        # If the number of a sequence is neutral, a filter keeps all its tokens, for any logits.
        if self.top_k is not None:
            num_kept = jnp.where(self.top_k > 0, self.top_k, EVERY)
            kept = is_among_best(logits, jnp.ones_like(logits, jnp.int32), num_kept)
            logits = _mask_logits(logits, kept | _as_column(self.top_k == 0))
        if self.top_p is not None:
            mass = jnp.where(self.top_p < 1, self.top_p, jnp.inf)
            kept = is_among_best(logits, jax.nn.softmax(logits), mass)
            logits = _mask_logits(logits, kept | _as_column(self.top_p == 1))
        best = jnp.max(logits, axis=1, keepdims=True)
        best = jnp.where(best == -jnp.inf, 0, best)  # if no token is allowed
        if self.min_p is not None:
            kept = logits >= best + _as_column(jnp.log(self.min_p))
            logits = _mask_logits(logits, kept | _as_column(self.min_p == 0))
        temperature = _as_column(self.temperature)
        # For a temperature of 0, only the first token with the highest logit stays.
        alone = jnp.arange(logits.shape[1])[None] == jnp.argmax(logits, axis=1, keepdims=True)
        alone = _mask_logits(jnp.zeros_like(logits), alone & (logits != -jnp.inf))
        cooled = (logits - best) / jnp.where(temperature > 0, temperature, 1)
        # Masked logits stay -inf: divided by a very large temperature they would be NaN.
        cooled = _mask_logits(cooled, logits != -jnp.inf)
        return jnp.where(temperature > 0, cooled, alone)

    def update(self, state: PyTree, tokens: Int32[Array, " Z"]) -> PyTree:
        """Append the new token to the recent tokens of each sequence, and drop the oldest token."""
        if not self._has_penalty:
            return state
        return jnp.concatenate([state[:, 1:], tokens[:, None]], axis=1)

    def _subtract_penalties(
        self, logits: Float[Array, "Z V"], recent: Int32[Array | np.ndarray, "Z last_n"]
    ) -> Float[Array, "Z V"]:
        rows = jnp.arange(recent.shape[0])[:, None]
        where = jnp.where(recent < 0, logits.shape[1], recent)
        times = jnp.zeros(logits.shape, jnp.float32).at[rows, where].add(1, **DROP)
        if self.repeat_penalty is not None:
            repeat = _as_column(self.repeat_penalty)
            # Both cases lower the logit for a penalty above 1.
            weaker = jnp.where(logits > 0, logits / repeat, logits * repeat)
            logits = jnp.where(times > 0, weaker, logits)
        if self.frequency_penalty is not None:
            logits = logits - times * _as_column(self.frequency_penalty)
        if self.presence_penalty is not None:
            logits = logits - (times > 0) * _as_column(self.presence_penalty)
        return logits


def make_sampler(
    *,
    temperature: Numbers = OPTIONS["temperature"].neutral,
    top_k: Numbers = OPTIONS["top_k"].neutral,
    top_p: Numbers = OPTIONS["top_p"].neutral,
    min_p: Numbers = OPTIONS["min_p"].neutral,
    repeat_penalty: Numbers = OPTIONS["repeat_penalty"].neutral,
    frequency_penalty: Numbers = OPTIONS["frequency_penalty"].neutral,
    presence_penalty: Numbers = OPTIONS["presence_penalty"].neutral,
    penalty_last_n: int = 64,
) -> FilterSampler:
    """Make a sampler from filters and penalties.

    Each argument except `penalty_last_n` is one number for all sequences, or a list or array with a
    number for each of Z sequences. Traced numbers are not checked.

    Args:
      temperature: Divisor of logits, at least 0. If the temperature is 0, the token with the
        highest logit is chosen, and `top_k`, `top_p` and `min_p` have no effect.
      top_k: Keep the k tokens with the highest logits; 0 keeps all tokens.
      top_p: Keep the most probable tokens until their total probability reaches `top_p` (above 0,
        at most 1). Probabilities are normalised over the tokens that `top_k` keeps.
      min_p: Keep each token whose probability is at least the highest probability multiplied by
        `min_p` (from 0 to 1).
      repeat_penalty: Number above 0. For recent tokens, positive logits are divided by the number,
        and negative logits are multiplied by it.
      frequency_penalty: Number to subtract from a logit for each recent occurrence of the token.
      presence_penalty: Number to subtract once from the logit of a recent token.
      penalty_last_n: Number of recent tokens to penalise (with the prompt), at least 1, static.

    Returns:
      A sampler that applies penalties, top-k, top-p, min-p and the temperature, in this order, as
      llama.cpp does. Before the sampler divides by a temperature above 0, it subtracts the highest
      logit from all logits. Top-k and top-p also keep all tokens whose logit equals the lowest kept
      logit. `sampler.init(prompts)` returns the recent tokens, `[Z, penalty_last_n]`, or `()`
      without penalties. This state is the second argument of `sampler.adjust`, which returns the
      adjusted logits `[Z, V]`.

    Raises:
      ValueError: If a number is out of its range after conversion to float32 or int32.

    Examples:
      >>> sampler = make_sampler(temperature=0.7, top_k=2)
      >>> state = sampler.init(np.array([[1, 2]]))  # the prompt of one sequence
      >>> sampler.adjust(jnp.array([[0.0, 0.7, 1.4]]), state).round(3).tolist()
      [[-inf, -1.0, 0.0]]

    llama.cpp: `llama_sampler_chain_default` with samplers of the same names.
    """
    numbers = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repeat_penalty": repeat_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
    }
    made = {name: _check_option(name, value) for name, value in numbers.items()}
    return FilterSampler(**made, penalty_last_n=check_count(penalty_last_n, "penalty_last_n"))


def _check_option(name: str, value: object) -> Any:
    """Return a checked option as an array; return None for an option without effect."""
    off, dtype, right, span = OPTIONS[name]
    if dtype == np.int32:
        array = check_int32(value, name, low=0)
    else:
        array = np.asarray(value) if is_concrete(value) else jnp.asarray(value)
        if not (jnp.issubdtype(array.dtype, jnp.number) and jnp.isrealobj(array)):
            raise TypeError(f"expected numbers for {name}, got {value!r}; pass a float or an int")
        with np.errstate(over="ignore"):
            array = array.astype(dtype)
    is_known = is_concrete(array)
    if array.ndim > 1 or (is_known and not np.all(right(array) & np.isfinite(array))):
        raise ValueError(
            f"expected {name} {span}, a scalar or one for each sequence, got {value}; pass such "
            "numbers"
        )
    return None if is_known and np.all(array == off) else array


def _mask_logits(logits: Float[Array, "Z V"], stays: Bool[Array, "Z V"]) -> Float[Array, "Z V"]:
    return jnp.where(stays, logits, -jnp.inf)


def _as_column(value: Shaped[ArrayLike, "*n"]) -> Shaped[Array, "m 1"]:
    """Reshape `[Z]` to `[Z, 1]`, or `[]` to `[1, 1]`."""
    return jnp.asarray(value).reshape(-1, 1)


def is_among_best(
    logits: Float[Array | np.ndarray, "Z V"],
    weights: Num[Array | np.ndarray, "Z V"],
    min_weight: Num[Array, "*n"],
) -> Bool[Array, "Z V"]:
    """Return a mask of the highest logits; the sum of their weights is at least `min_weight`.

    The mask has as few True values as possible, except that equal logits have equal mask values. If
    the sum of all weights is below `min_weight`, the mask is True everywhere.
    """
    rank = _to_ordered_integers(logits)
    top = jnp.uint32(1 << 31)

    # The threshold is the largest integer such that the tokens at or above it have enough weight. A
    # higher threshold never has more weight, so 32 steps find the bits from the top down, without a
    # sort.
    def decide_threshold_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        higher = threshold | (top >> i.astype(jnp.uint32))
        weight = jnp.sum(jnp.where(rank >= higher[:, None], weights, 0), axis=1)
        return jnp.where(weight >= min_weight, higher, threshold)

    threshold = jax.lax.fori_loop(0, 32, decide_threshold_bit, jnp.zeros(rank.shape[0], jnp.uint32))
    return rank >= threshold[:, None]


def _to_ordered_integers(x: Float[Array | np.ndarray, "*n"]) -> UInt32[Array, "*n"]:
    x = jnp.where(x == 0, 0, x.astype(jnp.float32))  # -0.0 becomes 0.0
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # Bits of positive floats ascend with the floats, and bits of negative floats descend. The
    # latter are inverted, and the top bit puts the former above them.
    top = jnp.uint32(1 << 31)
    return jnp.where(bits & top, ~bits, bits | top)
