"""What is asked of an engine and what comes of it; and the samplers of texts that run together."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np

from jaxkv.loops.rows import listed
from jaxkv.loops.rules import Constraint, checked_rule, checked_state
from jaxkv.loops.sampling import OPTIONS, FilterSampler, make_sampler
from jaxkv.places import count, integers
from jaxkv.planning.init import checked_size
from jaxkv.prefix.store import Found, Miss, Text
from jaxkv.spec import TableSpec

CHUNK = 128
"""The most tokens of prompts that are computed at once, where neither caller nor cache say."""

NOTHING = Found(0, Miss.UNKNOWN)
"""What there is of a prompt where nothing is held."""


class Finish(Enum):
    """Why a text ended.

    STOP: its last token is one of its stop tokens.
    LENGTH: it has as many tokens as its limit.
    FULL: no cell is left and no other text can give way. Never with reservations.
    NO_TOKEN: no token was allowed to come next.
    NONFINITE_LOGITS: its logits hold NaN or +inf.
    CANCELLED: it was cancelled.
    """

    STOP = "stop"
    LENGTH = "length"
    FULL = "full"
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
    sampling: options of `loops.sampling.make_sampler`, one number each; without any the best token
      is taken.
    rule_state: what the engine's `Constraint` begins with after the prompt; None for a text that
      the rule is not for.
    tag: anything of the caller's; it comes back with the result.
    """

    prompt: Any  # [n]
    max_new_tokens: int
    stop_tokens: Sequence[int] = ()
    seed: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    rule_state: Any = None
    tag: Any = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """What came of a request.

    id: what `Engine.submit` returned for it.
    tokens: `[n]` int32, those that were generated, a stop token among them.
    logprobs: `[n]` float32, the logarithms of their probabilities by the model alone.
    reason: why the text ended.
    found: how much of the prompt there was in the engine's store, and need not be computed, with
      the reason why it is no more. Of a text that gave way, what there was before its first token.
    request: what was asked.
    """

    id: int
    tokens: np.ndarray  # [n]
    logprobs: np.ndarray  # [n]
    reason: Finish
    found: Found
    request: Request


@dataclass(kw_only=True, eq=False)
class Progress:
    """A request that waits or runs.

    id: of the request; a lower one is older.
    tokens: those that were generated.
    logprobs: one for each of them.
    sequence: where its text stands; -1 while it waits.
    placed: the tokens that are in the cache, as long as it does not run.
    wanted: the tokens that must be in the cache before it runs.
    cuts: how many of its tokens others begin with, so that it will be remembered there.
    found: what there was of it in the store before its first token.
    source: the text there that it went on from; None for none.
    rule_state: what the engine's rule has come to after these tokens; None without a rule.
    """

    id: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sequence: int = -1
    placed: int = 0
    wanted: int = 0
    cuts: set[int] = field(default_factory=set)
    found: Found = NOTHING
    source: Text | None = None
    rule_state: Any = None

    def __post_init__(self):
        self.rule_state = self.request.rule_state

    @property
    def runs(self) -> bool:
        """Whether it has a sequence, and all of its prompt is in the cache."""
        return self.sequence >= 0 and self.placed >= self.wanted

    @property
    def goal(self) -> int:
        """The tokens that are in the cache before anything else is done with it."""
        return min([cut for cut in self.cuts if cut > self.placed] + [self.wanted])

    @property
    def held(self) -> int:
        """The tokens that are in the cache: the last of a text that runs never is."""
        held = self.placed
        if self.runs:
            held = max(held, len(self.request.prompt) + len(self.tokens) - 1)
        return held

    @property
    def left(self) -> int:
        """How many more tokens may be generated."""
        return self.request.max_new_tokens - len(self.tokens)

    @property
    def most(self) -> int:
        """The tokens that it puts into the cache at most: its last one never is."""
        return len(self.request.prompt) + self.request.max_new_tokens - 1

    def begin(self, source: Text | None, found: Found) -> None:
        """Go on from so much of it, of a text in the store."""
        self.source, self.placed = source, found.length
        self.wanted = len(self.request.prompt) + len(self.tokens)
        if not self.tokens:
            self.found = found

    def all_tokens(self) -> np.ndarray:
        """Return its tokens, prompt and generated, `[n]` int32."""
        return np.append(self.request.prompt, np.asarray(self.tokens, np.int32))

    def last_tokens(self, count: int) -> list[int]:
        """Return the last tokens, at most so many."""
        return [*self.request.prompt[-count:].tolist(), *self.tokens[-count:]][-count:]

    def result(self, reason: Finish) -> Result:
        """Return what has come of it."""
        return Result(
            id=self.id,
            tokens=np.asarray(self.tokens, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            reason=reason,
            found=self.found,
            request=self.request,
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What requests may ask of an engine; the shapes of all that it computes depend on it.

    chunk: the most tokens of prompts that are computed at once.
    tokens_per_step: the most tokens of a text that are generated at once.
    allow: the sampling options that requests may have.
    last_n: how many tokens penalties count.
    most_stops: the most stop tokens of a request's own.
    constraint: what some of them may say.
    """

    chunk: int
    tokens_per_step: int
    allow: frozenset[str]
    last_n: int
    most_stops: int
    constraint: Constraint | None = None


def checked_limits(
    spec: TableSpec,
    *,
    chunk: int | None,
    tokens_per_step: int,
    allow: Collection[str],
    last_n: int,
    most_stops: int,
    constraint: Constraint | None,
) -> Limits:
    """Return the limits of an engine for a cache.

    Raises:
      ValueError: when `chunk` is more than the cache was sized for, a number is below 1
        (`most_stops` below 0), there is no such option to allow, or the rule does not give what
        it should.
      TypeError: when a number is no integer, or the rule is none.
    """
    most = checked_size(spec, None)
    if isinstance(allow, str):
        raise TypeError(f"wanted a list of options to allow, got {allow!r}")
    unknown = sorted(set(allow) - set(OPTIONS))
    if unknown:
        raise ValueError(f"wanted options to allow of {', '.join(OPTIONS)}, got {unknown[0]!r}")
    return Limits(
        chunk=min(CHUNK, most) if chunk is None else checked_size(spec, count(chunk, "chunk")),
        tokens_per_step=count(tokens_per_step, "tokens_per_step"),
        allow=frozenset(allow),
        last_n=count(last_n, "last_n"),
        most_stops=count(most_stops, "most_stops", low=0),
        constraint=None if constraint is None else checked_rule(constraint),
    )


def checked_request(request: Request, limits: Limits) -> Request:
    """Return a request with its numbers as int32, or raise and say what was wanted.

    Raises:
      TypeError: when it is no request, tokens, the limit or the seed are no integers, or the
        sampling options are no dict.
      ValueError: when the prompt is empty, a number is out of its range, there are too many stop
        tokens, an option is unknown, not allowed, or not one number, or the state of the rule has
        other shapes or dtypes than its first, or there is no rule.

    >>> limits = Limits(chunk=8, tokens_per_step=1, allow=frozenset(), last_n=1, most_stops=1)
    >>> checked_request(Request(prompt=[], max_new_tokens=1), limits)
    Traceback (most recent call last):
    ...
    ValueError: wanted a prompt [n] of at least one token, got the shape (0,)
    """
    if not isinstance(request, Request):
        raise TypeError(f"wanted a Request, got {type(request)}")
    prompt = np.asarray(integers(request.prompt, "the tokens of a prompt", low=0))
    if prompt.ndim != 1 or not prompt.size:
        raise ValueError(f"wanted a prompt [n] of at least one token, got the shape {prompt.shape}")
    stop_tokens = np.asarray(integers(listed(request.stop_tokens), "stop_tokens", low=0))
    if stop_tokens.ndim != 1:
        raise ValueError(f"wanted a list of stop tokens [n], got {request.stop_tokens!r}")
    if stop_tokens.size > limits.most_stops:
        raise ValueError(
            f"wanted at most {limits.most_stops} stop tokens of a request's own, got "
            f"{stop_tokens.size}: "
            f"make the engine with a larger most_stops="
        )
    if not isinstance(request.sampling, Mapping):
        raise TypeError(f"wanted sampling options by name, got {request.sampling!r}")
    for name, value in request.sampling.items():
        if name not in limits.allow:
            raise ValueError(
                f"wanted sampling options of {', '.join(sorted(limits.allow)) or 'none'}, got "
                f"{name!r}: make the engine with allow= of all that requests may have"
            )
        if np.ndim(value):
            raise ValueError(f"wanted one number for {name}, got the shape {np.shape(value)}")
    sampling = dict(request.sampling)
    make_sampler(**sampling)
    seed = count(request.seed, "seed", low=0, high=2**32 - 1)
    max_new_tokens = count(request.max_new_tokens, "max_new_tokens")
    state = checked_state(limits.constraint, request.rule_state)
    return replace(
        request,
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        stop_tokens=stop_tokens,
        seed=seed,
        sampling=sampling,
        rule_state=state,
    )


def sampler_of(
    requests: Sequence[Request | None], *, allow: frozenset[str], last_n: int
) -> FilterSampler:
    """Return the sampler of T texts, a number for each; None is a text that nothing is drawn for.

    A filter is present if any text needs it, in three combinations only, so that few programs are
    compiled. What a filter does to a text does not depend on that: it is off where its number says
    so.

    >>> hot, best = (
    ...     Request(prompt=[1], max_new_tokens=1, sampling=dict(temperature=t)) for t in (0.7, 0.0)
    ... )
    >>> sampler = sampler_of([hot, None, best], allow=frozenset(loops.sampling.OPTIONS), last_n=64)
    >>> sampler.temperature.tolist(), sampler.top_k
    ([0.699999988079071, 0.0, 0.0], None)
    """
    numbers = {
        name: np.array(
            [one.sampling.get(name, option.neutral) if one else option.neutral for one in requests]
        )
        for name, option in OPTIONS.items()
    }
    draws = np.any(numbers["temperature"] > 0)
    ranked = np.any((numbers["temperature"] > 0) & _ranks(numbers))
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
        name: numbers[name].astype(option.dtype) if on[name] and name in allow else None
        for name, option in OPTIONS.items()
    }
    return FilterSampler(**fields, last_n=last_n)


def sampling_levels(allow: frozenset[str]) -> list[dict[str, Any]]:
    """Return sampling options of requests that, one after another, take every kind of sampler."""
    levels: list[dict[str, Any]] = [{}]
    if "temperature" in allow:
        levels.append({"temperature": 1.0})
        levels += [
            {"temperature": 1.0, name: number}
            for name, number in (("top_k", 1), ("top_p", 0.5))
            if name in allow
        ][:1]
    return levels


def _ranks(numbers: dict[str, np.ndarray]) -> np.ndarray:
    """Return the texts that want a filter which ranks the whole vocabulary, `[T]` bool."""
    return (numbers["top_k"] > 0) | (numbers["top_p"] < 1)
