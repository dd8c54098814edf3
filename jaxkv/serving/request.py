"""What is asked of an engine and what comes of it; and the samplers of texts that run together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv.core.validate import check_count, check_int32
from jaxkv.generation.constraints import Constraint, check_constraint, check_initial_state
from jaxkv.generation.filters import OPTIONS, FilterSampler, make_sampler
from jaxkv.generation.padding import stop_tokens_as_list
from jaxkv.planning.planners import check_ubatch_size
from jaxkv.serving.prefix_cache.prompts import CachedPrompt, MissReason, PrefixHit
from jaxkv.spec import TableSpec

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int32, Num, PyTree

    from jaxkv.generation.types import StopTokens

CHUNK = 128
"""The most tokens of prompts that are computed at once, where neither caller nor cache say."""

NOTHING = PrefixHit(0, MissReason.UNKNOWN)
"""What there is of a prompt where nothing is held."""


class FinishReason(Enum):
    """Why a text ended.

    STOP: its last token is one of its stop tokens.
    LENGTH: it has as many tokens as its limit.
    OUT_OF_CELLS: no cell is left and no other text can give way. Never with reservations.
    NO_TOKEN: no token was allowed to come next.
    NONFINITE_LOGITS: its logits hold NaN or +inf.
    CANCELLED: it was cancelled.
    """

    STOP = "stop"
    LENGTH = "length"
    OUT_OF_CELLS = "full"
    NO_TOKEN = "no token"
    NONFINITE_LOGITS = "nonfinite logits"
    CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A prompt to be continued, and how.

    prompt: `[n]` int32, its tokens, at least one.
    max_new_tokens: the most tokens to generate, at least 1.
    stop_tokens: tokens that end the text, beside those of the engine.
    seed: of its draws, all that they depend on beside the position.
    sampling: options of `generation.make_sampler`, one number each; without any the best token
      is taken.
    constraint_state: what the engine's `Constraint` begins with after the prompt; None for a text
      that the rule is not for.
    tag: anything of the caller's; it comes back with the result.
    """

    prompt: Any
    max_new_tokens: int
    stop_tokens: StopTokens = ()
    seed: int = 0
    sampling: Mapping[str, float] = field(default_factory=dict)
    constraint_state: PyTree = None
    tag: Any = None


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestOutput:
    """What came of a request.

    id: what `Engine.submit` returned for it.
    tokens: those that were generated, a stop token among them.
    logprobs: float32, the logarithms of their probabilities by the model alone.
    reason: why the text ended.
    prefix_hit: how much of the prompt there was in the engine's store, and need not be computed,
      with the reason why it is no more. Of a text that gave way, what there was before its first
      token.
    request: what was asked.
    """

    id: int
    tokens: Int32[np.ndarray, " n"]
    logprobs: Float[np.ndarray, " n"]
    reason: FinishReason
    prefix_hit: PrefixHit
    request: Request


@dataclass(kw_only=True, eq=False)
class RequestState:
    """A request that waits or runs.

    id: of the request; a lower one is older.
    tokens: those that were generated.
    logprobs: one for each of them.
    sequence: where its text stands; -1 while it waits.
    num_computed_tokens: the tokens that are in the cache, as long as it does not run.
    num_required_tokens: the tokens that must be in the cache before it runs.
    branch_points: how many of its tokens others begin with, so that it will be remembered there.
    prefix_hit: what there was of it in the store before its first token.
    source: the text there that it went on from; None for none.
    constraint_state: what the engine's rule has come to after these tokens; None without a rule.
    """

    id: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sequence: int = -1
    num_computed_tokens: int = 0
    num_required_tokens: int = 0
    branch_points: set[int] = field(default_factory=set)
    prefix_hit: PrefixHit = NOTHING
    source: CachedPrompt | None = None
    constraint_state: PyTree = None

    def __post_init__(self):
        self.constraint_state = self.request.constraint_state

    @property
    def is_running(self) -> bool:
        """Whether it has a sequence, and all of its prompt is in the cache."""
        return self.sequence >= 0 and self.num_computed_tokens >= self.num_required_tokens

    @property
    def prefill_target(self) -> int:
        """The tokens that are in the cache before anything else is done with it."""
        return min(
            [cut for cut in self.branch_points if cut > self.num_computed_tokens]
            + [self.num_required_tokens]
        )

    @property
    def num_cached_tokens(self) -> int:
        """The tokens that are in the cache: the last of a text that runs never is."""
        num_cached = self.num_computed_tokens
        if self.is_running:
            num_cached = max(num_cached, len(self.request.prompt) + len(self.tokens) - 1)
        return num_cached

    @property
    def num_remaining_tokens(self) -> int:
        """How many more tokens may be generated."""
        return self.request.max_new_tokens - len(self.tokens)

    @property
    def max_cached_tokens(self) -> int:
        """The tokens that it puts into the cache at most: its last one never is."""
        return len(self.request.prompt) + self.request.max_new_tokens - 1

    def begin_from_prefix(self, source: CachedPrompt | None, found: PrefixHit) -> None:
        """Go on from so much of it, of a text in the store."""
        self.source, self.num_computed_tokens = source, found.length
        self.num_required_tokens = len(self.request.prompt) + len(self.tokens)
        if not self.tokens:
            self.prefix_hit = found

    def all_tokens(self) -> Int32[np.ndarray, " n"]:
        """Return its tokens, prompt and generated."""
        return np.append(self.request.prompt, np.asarray(self.tokens, np.int32))

    def last_tokens(self, count: int) -> list[int]:
        """Return the last tokens, at most so many."""
        return [*self.request.prompt[-count:].tolist(), *self.tokens[-count:]][-count:]

    def to_output(self, reason: FinishReason) -> RequestOutput:
        """Return what has come of it."""
        return RequestOutput(
            id=self.id,
            tokens=np.asarray(self.tokens, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            reason=reason,
            prefix_hit=self.prefix_hit,
            request=self.request,
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What requests may ask of an engine; the shapes of all that it computes depend on it.

    prefill_chunk: the most tokens of prompts that are computed at once.
    tokens_per_step: the most tokens of a text that are generated at once.
    sampling_options: the sampling options that requests may have.
    penalty_last_n: how many tokens penalties count.
    max_stop_tokens: the most stop tokens of a request's own.
    constraint: what some of them may say.
    """

    prefill_chunk: int
    tokens_per_step: int
    sampling_options: frozenset[str]
    penalty_last_n: int
    max_stop_tokens: int
    constraint: Constraint | None = None


def check_config(
    spec: TableSpec,
    *,
    prefill_chunk: int | None,
    tokens_per_step: int,
    sampling_options: Collection[str],
    penalty_last_n: int,
    max_stop_tokens: int,
    constraint: Constraint | None,
) -> EngineConfig:
    """Return the limits of an engine for a cache.

    Raises:
      ValueError: when `prefill_chunk` is more than the cache was sized for, a number is below 1
        (`max_stop_tokens` below 0), there is no such option to allow, or the rule does not give
        what it should.
      TypeError: when a number is no integer, or the rule is none.
    """
    max_chunk = check_ubatch_size(spec, None)
    if isinstance(sampling_options, str):
        raise TypeError(f"expected a list of options to allow, got {sampling_options!r}")
    unknown = sorted(set(sampling_options) - set(OPTIONS))
    if unknown:
        raise ValueError(f"expected options to allow of {', '.join(OPTIONS)}, got {unknown[0]!r}")
    return EngineConfig(
        prefill_chunk=min(CHUNK, max_chunk)
        if prefill_chunk is None
        else check_ubatch_size(spec, check_count(prefill_chunk, "prefill_chunk")),
        tokens_per_step=check_count(tokens_per_step, "tokens_per_step"),
        sampling_options=frozenset(sampling_options),
        penalty_last_n=check_count(penalty_last_n, "penalty_last_n"),
        max_stop_tokens=check_count(max_stop_tokens, "max_stop_tokens", low=0),
        constraint=None if constraint is None else check_constraint(constraint),
    )


def check_request(request: Request, limits: EngineConfig) -> Request:
    """Return a request with its numbers as int32, or raise and say what was wanted.

    Raises:
      TypeError: when it is no request, tokens, the limit or the seed are no integers, or the
        sampling options are no dict.
      ValueError: when the prompt is empty, a number is out of its range, there are too many stop
        tokens, an option is unknown, not allowed, or not one number, or the state of the rule has
        other shapes or dtypes than its first, or there is no rule.

    >>> limits = EngineConfig(
    ...     prefill_chunk=8,
    ...     tokens_per_step=1,
    ...     sampling_options=frozenset(),
    ...     penalty_last_n=1,
    ...     max_stop_tokens=1,
    ... )
    >>> check_request(Request(prompt=[], max_new_tokens=1), limits)
    Traceback (most recent call last):
    ...
    ValueError: expected a prompt [n] of at least one token, got the shape (0,)
    """
    if not isinstance(request, Request):
        raise TypeError(f"expected a Request, got {type(request)}")
    prompt = np.asarray(check_int32(request.prompt, "the tokens of a prompt", low=0))
    if prompt.ndim != 1 or not prompt.size:
        raise ValueError(
            f"expected a prompt [n] of at least one token, got the shape {prompt.shape}"
        )
    stop_tokens = np.asarray(
        check_int32(stop_tokens_as_list(request.stop_tokens), "stop_tokens", low=0)
    )
    if stop_tokens.ndim != 1:
        raise ValueError(f"expected a list of stop tokens [n], got {request.stop_tokens!r}")
    if stop_tokens.size > limits.max_stop_tokens:
        raise ValueError(
            f"expected at most {limits.max_stop_tokens} stop tokens of a request's own, got "
            f"{stop_tokens.size}: "
            f"make the engine with a larger max_stop_tokens="
        )
    if not isinstance(request.sampling, Mapping):
        raise TypeError(f"expected sampling options by name, got {request.sampling!r}")
    for name, value in request.sampling.items():
        if name not in limits.sampling_options:
            raise ValueError(
                f"expected sampling options of "
                f"{', '.join(sorted(limits.sampling_options)) or 'none'}, got {name!r}: "
                f"make the engine with sampling_options= of all that requests may have"
            )
        if np.ndim(value):
            raise ValueError(f"expected one number for {name}, got the shape {np.shape(value)}")
    sampling: dict[str, Any] = dict(request.sampling)
    make_sampler(**sampling)
    seed = check_count(request.seed, "seed", low=0, high=2**32 - 1)
    max_new_tokens = check_count(request.max_new_tokens, "max_new_tokens")
    state = check_initial_state(limits.constraint, request.constraint_state)
    return replace(
        request,
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        stop_tokens=stop_tokens,
        seed=seed,
        sampling=sampling,
        constraint_state=state,
    )


def make_batch_sampler(
    requests: Sequence[Request | None], *, sampling_options: frozenset[str], penalty_last_n: int
) -> FilterSampler:
    """Return the sampler of T texts, a number for each; None is a text that nothing is drawn for.

    A filter is present if any text needs it, in three combinations only, so that few programs are
    compiled. What a filter does to a text does not depend on that: it is off where its number says
    so.

    >>> hot, best = (
    ...     Request(prompt=[1], max_new_tokens=1, sampling=dict(temperature=t)) for t in (0.7, 0.0)
    ... )
    >>> sampler = make_batch_sampler(
    ...     [hot, None, best], sampling_options=frozenset(OPTIONS), penalty_last_n=64
    ... )
    >>> sampler.temperature.tolist(), sampler.top_k
    ([0.699999988079071, 0.0, 0.0], None)
    """
    numbers = {
        name: np.array(
            [
                request.sampling.get(name, option.neutral) if request else option.neutral
                for request in requests
            ]
        )
        for name, option in OPTIONS.items()
    }
    draws = np.any(numbers["temperature"] > 0)
    ranked = np.any((numbers["temperature"] > 0) & _needs_ranking(numbers))
    on = {
        "temperature": draws,
        "top_k": ranked,
        "top_p": ranked,
        "min_p": draws,
        "repeat_penalty": True,
        "frequency_penalty": True,
        "presence_penalty": True,
    }
    fields = {
        name: numbers[name].astype(option.dtype) if on[name] and name in sampling_options else None
        for name, option in OPTIONS.items()
    }
    return FilterSampler(**fields, penalty_last_n=penalty_last_n)


def sampler_variants(sampling_options: frozenset[str]) -> list[dict[str, float]]:
    """Return sampling options of requests that, one after another, take every kind of sampler."""
    levels: list[dict[str, float]] = [{}]
    if "temperature" in sampling_options:
        levels.append({"temperature": 1.0})
        levels += [
            {"temperature": 1.0, name: number}
            for name, number in (("top_k", 1), ("top_p", 0.5))
            if name in sampling_options
        ][:1]
    return levels


def _needs_ranking(numbers: dict[str, Num[np.ndarray, " T"]]) -> Bool[np.ndarray, " T"]:
    """Return the texts that want a filter which ranks the whole vocabulary."""
    return (numbers["top_k"] > 0) | (numbers["top_p"] < 1)
