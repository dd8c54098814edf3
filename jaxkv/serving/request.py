"""Requests and results of an engine, and samplers of running requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv.batch import check_extra
from jaxkv.cache import Cache
from jaxkv.core.validate import check_count, check_int32
from jaxkv.generation.constraints import Constraint, check_constraint, check_initial_state
from jaxkv.generation.filters import OPTIONS, FilterSampler, make_sampler
from jaxkv.generation.padding import stop_tokens_as_list
from jaxkv.planning.planners import check_ubatch_size
from jaxkv.serving.prefix_cache.prompts import (
    CachedPrompt,
    HostPrompt,
    MissReason,
    ModelInputs,
    PrefixHit,
)
from jaxkv.spec import TableSpec

if TYPE_CHECKING:
    from jaxtyping import Float, Int32, PyTree, Shaped

    from jaxkv.generation.types import StopTokens

CHUNK = 128
"""Default maximum number of prompt tokens that are computed at once."""

NOTHING = PrefixHit(0, MissReason.UNKNOWN)
"""The `PrefixHit` of a request without a prefix store."""


class FinishReason(Enum):
    """Why a request ended.

    STOP: The last token is a stop token.
    LENGTH: The request has `max_new_tokens` tokens.
    OUT_OF_CELLS: The stream is full, and has no stored prompt or other request to remove.
    NO_TOKEN: No token was allowed.
    NONFINITE_LOGITS: A logit was NaN or +inf.
    CANCELLED: `Engine.cancel` ended the request.
    """

    STOP = "stop"
    LENGTH = "length"
    OUT_OF_CELLS = "full"
    NO_TOKEN = "no token"
    NONFINITE_LOGITS = "nonfinite logits"
    CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A prompt and the options of its generation.

    prompt: `[n]` int32. Tokens of the prompt, at least one.
    max_new_tokens: Maximum number of tokens to generate, at least 1.
    stop_tokens: Tokens that end the request, in addition to the stop tokens of the engine.
    seed: Seed of the draws. A draw depends only on the seed and the position.
    extra: Additional model inputs `[n, ...]` of the prompt by name, see `Engine`. Each generated
      token has the inputs of the last token of the prompt.
    sampling: Options of `generation.make_sampler`, one number for each option; greedy by default.
    constraint_state: State of the engine's `Constraint` after the prompt; None for no constraint.
    tag: Any value, returned with the result.
    """

    prompt: Any
    max_new_tokens: int
    stop_tokens: StopTokens = ()
    seed: int = 0
    extra: Mapping[str, PyTree] | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    constraint_state: PyTree = None
    tag: Any = None


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestOutput:
    """Result of a request.

    id: The id that `Engine.submit` returned.
    tokens: The generated tokens, including a stop token.
    logprobs: float32. Log-probabilities of the tokens under the unadjusted logits.
    prefix_hit: Number of tokens forked from the prefix store, and why not more were forked.
    """

    id: int
    tokens: Int32[np.ndarray, " n"]
    logprobs: Float[np.ndarray, " n"]
    reason: FinishReason
    prefix_hit: PrefixHit
    request: Request


@dataclass(kw_only=True, eq=False)
class RequestState:
    """A request that waits or runs; older requests have lower ids.

    sequence: Sequence id of the request; -1 while the request waits.
    num_computed_tokens: Number of tokens that were forked from the store or computed in chunks.
    num_required_tokens: Number of tokens that must be in the cache before the request runs.
    branch_points: Lengths of prefixes to store; other requests or stored prompts share them.
    swapped: Copy in host memory of the sequence of a preempted request that waits.
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
    source: CachedPrompt | HostPrompt | None = None
    constraint_state: PyTree = None
    swapped: Cache | None = None

    def __post_init__(self):
        self.constraint_state = self.request.constraint_state

    @property
    def is_running(self) -> bool:
        """Whether the request has a sequence, and the whole prompt is in the cache."""
        return self.sequence >= 0 and self.num_computed_tokens >= self.num_required_tokens

    @property
    def prefill_target(self) -> int:
        """Next value of `num_computed_tokens` at which a prefix is stored or generation starts."""
        return min(
            [cut for cut in self.branch_points if cut > self.num_computed_tokens]
            + [self.num_required_tokens]
        )

    @property
    def num_cached_tokens(self) -> int:
        """Number of cached tokens; the last token of a running request is not cached yet."""
        num_cached = self.num_computed_tokens
        if self.is_running:
            num_cached = max(num_cached, len(self.request.prompt) + len(self.tokens) - 1)
        return num_cached

    @property
    def num_remaining_tokens(self) -> int:
        """Number of tokens that may still be generated."""
        return self.request.max_new_tokens - len(self.tokens)

    @property
    def max_cached_tokens(self) -> int:
        """Maximum number of tokens in the cache; the last generated token is never written."""
        return len(self.request.prompt) + self.request.max_new_tokens - 1

    def begin_from_prefix(self, source: CachedPrompt | HostPrompt | None, hit: PrefixHit) -> None:
        """Start the request after the tokens that were forked from a stored prompt."""
        self.source, self.num_computed_tokens = source, hit.length
        self.num_required_tokens = len(self.request.prompt) + len(self.tokens)
        if not self.tokens:
            self.prefix_hit = hit

    def all_inputs(self) -> ModelInputs:
        """Return the tokens of the prompt and the generated tokens, and their additional inputs."""
        prompt, extra = self.request.prompt, self.request.extra
        return ModelInputs(tokens=prompt, extra=extra or {}).append(self.tokens)

    def last_tokens(self, count: int) -> list[int]:
        """Return the last `count` tokens, or all tokens if there are fewer."""
        return [*self.request.prompt[-count:].tolist(), *self.tokens[-count:]][-count:]

    def to_output(self, reason: FinishReason) -> RequestOutput:
        """Return the result of the request."""
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
    """Limits of requests, from arguments of `Engine`; the limits determine program shapes.

    extra: Additional model inputs of a token of a request without `extra`, by name.
    """

    prefill_chunk: int
    tokens_per_step: int
    sampling_options: frozenset[str]
    penalty_last_n: int
    max_stop_tokens: int
    constraint: Constraint | None = None
    extra: Mapping[str, Shaped[np.ndarray, " *x"]]


def check_config(
    spec: TableSpec,
    *,
    prefill_chunk: int | None,
    tokens_per_step: int,
    sampling_options: Collection[str],
    penalty_last_n: int,
    max_stop_tokens: int,
    constraint: Constraint | None,
    extra: Mapping[str, PyTree] | None,
) -> EngineConfig:
    """Return checked limits of an engine; the arguments are those of `Engine`."""
    max_chunk = check_ubatch_size(spec, None)
    if isinstance(sampling_options, str):
        raise TypeError(
            f"expected a list of options to allow, got {sampling_options!r}; pass a list such as "
            "['temperature']"
        )
    unknown = sorted(set(sampling_options) - set(OPTIONS))
    if unknown:
        raise ValueError(
            f"expected options to allow of {', '.join(OPTIONS)}, got {unknown[0]!r}; use one of "
            "these names"
        )
    return EngineConfig(
        prefill_chunk=min(CHUNK, max_chunk)
        if prefill_chunk is None
        else check_ubatch_size(spec, check_count(prefill_chunk, "prefill_chunk")),
        tokens_per_step=check_count(tokens_per_step, "tokens_per_step"),
        sampling_options=frozenset(sampling_options),
        penalty_last_n=check_count(penalty_last_n, "penalty_last_n"),
        max_stop_tokens=check_count(max_stop_tokens, "max_stop_tokens", low=0),
        constraint=None if constraint is None else check_constraint(constraint),
        extra={k: np.asarray(x) for k, x in check_extra(extra, ()).items()},
    )


def check_request(request: Request, limits: EngineConfig) -> Request:
    """Return a request with its numbers as int32; raise as `Engine.submit` does."""
    if not isinstance(request, Request):
        raise TypeError(
            f"expected a Request, got {type(request)}; make one with serving.Request(prompt=...)"
        )
    prompt = np.asarray(check_int32(request.prompt, "the tokens of a prompt", low=0))
    if prompt.ndim != 1 or not prompt.size:
        raise ValueError(
            f"expected a prompt [n] of at least one token, got the shape {prompt.shape}; pass a "
            "flat list of tokens"
        )
    stop_tokens = np.asarray(
        check_int32(stop_tokens_as_list(request.stop_tokens), "stop_tokens", low=0)
    )
    if stop_tokens.ndim != 1:
        raise ValueError(
            f"expected a list of stop tokens [n], got {request.stop_tokens!r}; pass a flat list "
            "of ints"
        )
    if stop_tokens.size > limits.max_stop_tokens:
        raise ValueError(
            f"expected at most {limits.max_stop_tokens} stop tokens of a request's own, got "
            f"{stop_tokens.size}; "
            f"make the engine with a larger max_stop_tokens="
        )
    if not isinstance(request.sampling, Mapping):
        raise TypeError(
            f"expected sampling options by name, got {request.sampling!r}; pass a dict such as "
            f"{{'temperature': 0.8}}"
        )
    for name, value in request.sampling.items():
        if name not in limits.sampling_options:
            known = name in OPTIONS
            remedy = "make the engine with it in sampling_options=" if known else "pass one of them"
            raise ValueError(
                f"expected sampling options of "
                f"{', '.join(sorted(limits.sampling_options)) or 'none'}, got {name!r}; {remedy}"
            )
        if np.ndim(value):
            raise ValueError(
                f"expected one number for {name}, got the shape {np.shape(value)}; pass a scalar"
            )
    sampling: dict[str, Any] = dict(request.sampling)
    make_sampler(**sampling)
    seed = check_count(request.seed, "seed", low=0, high=2**32 - 1)
    max_new_tokens = check_count(request.max_new_tokens, "max_new_tokens")
    state = check_initial_state(limits.constraint, request.constraint_state)
    return replace(
        request,
        prompt=prompt,
        extra=_check_extra(request.extra, limits.extra, prompt.size),
        max_new_tokens=max_new_tokens,
        stop_tokens=stop_tokens,
        seed=seed,
        sampling=sampling,
        constraint_state=state,
    )


def _check_extra(
    extra: Mapping[str, PyTree] | None, defaults: Mapping[str, Shaped[np.ndarray, " *x"]], n: int
) -> dict[str, Shaped[np.ndarray, "n ..."]]:
    """Return additional inputs of all n tokens of a prompt, with defaults for missing names."""
    arrays = check_extra(extra, (n,))
    if unknown := sorted(arrays.keys() - defaults.keys()):
        raise ValueError(
            f"expected extra of {', '.join(defaults) or 'no name'}, got {unknown[0]!r}; make "
            "the engine with its value for other requests in extra="
        )
    for name, array in arrays.items():
        expected, actual = ((x.dtype, x.shape) for x in (defaults[name], array[0]))
        if expected != actual:
            raise ValueError(
                f"expected extra[{name!r}] of dtype and shape {expected} for each token, as in the "
                f"engine, got {actual}; cast and reshape it"
            )
    return {
        name: np.asarray(arrays.get(name, np.broadcast_to(value, (n, *value.shape))))
        for name, value in defaults.items()
    }


def make_batch_sampler(
    requests: Sequence[Request | None], *, sampling_options: frozenset[str], penalty_last_n: int
) -> FilterSampler:
    """Return the sampler of Z sequences; `requests` has None for a sequence without a request.

    To limit the number of compiled programs, there are only three sets of filters: no filters;
    temperature with min_p; all filters.
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
    needs_ranking = (numbers["top_k"] > 0) | (numbers["top_p"] < 1)
    ranked = np.any((numbers["temperature"] > 0) & needs_ranking)
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
    """Return a list of sampling options, one for each set of filters of `make_batch_sampler`."""
    levels: list[dict[str, float]] = [{}]
    if "temperature" in sampling_options:
        levels.append({"temperature": 1.0})
        levels += [
            {"temperature": 1.0, name: number}
            for name, number in (("top_k", 1), ("top_p", 0.5))
            if name in sampling_options
        ][:1]
    return levels
