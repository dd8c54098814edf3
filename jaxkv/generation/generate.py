"""From prompts to texts in one call: `prefill`, `init_decode` and `decode` in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxkv.api.edits import seq_select
from jaxkv.batch import make_batch
from jaxkv.cache import Cache
from jaxkv.cache_spec import CacheSpec
from jaxkv.core.validate import check_count, check_int32
from jaxkv.generation.decode import decode
from jaxkv.generation.model_step import Forward
from jaxkv.generation.prefill import prefill
from jaxkv.generation.results import DecodeResult
from jaxkv.generation.sample_step import init_decode
from jaxkv.generation.sampler import Sampler
from jaxkv.generation.speculative.drafters import Drafter
from jaxkv.generation.speculative.speculate import speculate
from jaxkv.make import make_cache
from jaxkv.plan import PlanRefusedError

if TYPE_CHECKING:
    from jaxtyping import Int32, PyTree

    from jaxkv.generation.types import Prompts, Seeds, StopTokens

ROWS = {"tokens": -1, "logprobs": 0}
"""Fields of a result with a number for each token, and the number that pads them."""
COUNTS = ("num_model_steps", "num_drafted", "num_accepted")
"""Fields of a result with a count for each text."""
ROUND = 64
"""Cells of a stream are a multiple of it, so that prompts of nearly one length share programs."""


def generate(
    forward: Forward,
    params: PyTree,
    prompts: Prompts,
    *,
    spec: CacheSpec | None = None,
    cache: Cache | None = None,
    max_new_tokens: int = 128,
    stop_tokens: StopTokens = (),
    sampler: Sampler | None = None,
    seed: Seeds = 0,
    num_samples: int = 1,
    drafter: Drafter | None = None,
    on_tokens: Callable[[int, list[int]], object] | None = None,
    tokens_per_call: int = 16,
) -> DecodeResult:
    """Generate texts after prompts.

    It returns what `prefill`, `init_decode` and `decode` (`speculate` with a drafter) return when
    they are called in a row. Text `i * num_samples + j`, in the sequence of that number, is sample
    j of prompt i.

    Args:
      forward: see `prefill`; pass the same function every time, since programs are kept by it.
      params: model parameters, any pytree.
      prompts: a list of tokens for each prompt, none empty.
      spec: of the cache to make, with a stream for each text and cells for its prompt and
        `max_new_tokens`.
      cache: a cache to continue from, in place of `spec`: the prompts follow what its first
        sequences hold. It is left as it is, and copied once.
      max_new_tokens: the most tokens to sample for each text.
      stop_tokens: the tokens that end a text, see `decode`.
      sampler: of `make_sampler` or one of your own; by default the most probable token is taken.
      seed: of all draws, see `init_decode`.
      num_samples: how many texts to sample after each prompt, which is computed once.
      drafter: drafts several tokens for each step of the model, see `speculate`; of all texts.
      on_tokens: called with the number of a text and its new tokens, as soon as they are on the
        host. The result is the same.
      tokens_per_call: with `on_tokens`, the most tokens of a text between two calls.

    Returns:
      Cache, state, and tokens and logarithms of their probabilities, `[T, max_new_tokens]`; a text
      that has ended is padded, and `lists()` leaves the padding out.

    Raises:
      PlanRefusedError: when the prompts, or their samples, do not fit in `cache`.
      ValueError: unless a spec or a cache is given, and not both; when there is no prompt, or a
        prompt has no token; and as in `decode`.
      TypeError: when tokens are no integers.

    Examples:
      A model that says the next number; 3 ends a text:

      >>> def forward(params, cache, ubatch):
      ...     x = jnp.take(params, ubatch.tokens, axis=0)[:, :, None]
      ...     cache, _ = attend(cache, 0, ubatch, x, x, x)
      ...     return cache, jnp.roll(x, 1, axis=-1).reshape(-1, 4)[ubatch.outputs]
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=4)
      >>> out = generate(
      ...     forward, jnp.eye(4), [[0, 1], [3]], spec=spec, max_new_tokens=5, stop_tokens=[3]
      ... )
      >>> out.lists(), out.tokens.shape
      ([[2, 3], [0, 1, 2, 3]], (2, 5))

    llama.cpp: `examples/batched`. Hugging Face: `generate`.
    """
    max_new_tokens = check_count(max_new_tokens, "max_new_tokens")
    num_samples = check_count(num_samples, "num_samples")
    tokens_per_call = check_count(tokens_per_call, "tokens_per_call")
    lists = _check_prompts(prompts)
    count = len(lists) * num_samples
    is_own_cache = cache is None
    if spec is not None and cache is None:
        drafted = 0 if drafter is None else drafter.num_draft_tokens
        cells = max(map(len, lists)) + max_new_tokens + drafted
        cells = -(-cells // ROUND) * ROUND
        sizes = {"sequences": count, "streams": count, "max_rollback": drafted or None}
        cache = make_cache(spec, cells=cells, **sizes)
    elif spec is not None or cache is None:
        arguments = "neither" if spec is None else "both"
        raise ValueError(
            f"expected spec= or cache=, got {arguments}; pass the spec of the model's cache"
        )

    first = range(0, count, num_samples)
    batch = make_batch(lists, sequences=[*first])
    result = prefill(forward, params, cache, batch, donate=is_own_cache)
    cache, logits = result.cache, result.logits
    assert logits is not None
    if num_samples > 1:
        parents = np.repeat(first, num_samples)
        cache, ok = seq_select(cache, parents, np.arange(count), donate=True)
        if not ok:
            raise PlanRefusedError(
                f"expected cells for {num_samples} samples of each prompt, got too few in their "
                f"streams; make a cache with more cells"
            )
        logits = jnp.repeat(logits, num_samples, axis=0)
    out = init_decode(
        cache,
        logits=logits,
        sequences=np.arange(count),
        sampler=sampler,
        stop_tokens=stop_tokens,
        max_new_tokens=max_new_tokens,
        seed=seed,
        prompts=[tokens for tokens in lists for _ in range(num_samples)],
    )
    parts, num_remaining = [_report_tokens(out, on_tokens)], max_new_tokens - 1
    while num_remaining and bool(jnp.any(out.state.active)):
        size = num_remaining if on_tokens is None else min(tokens_per_call, num_remaining)
        options = {"num_tokens": size, "sampler": sampler, "stop_tokens": stop_tokens}
        args = forward, params, out.cache, out.state
        if drafter is None:
            out = decode(*args, **options, donate=True)
        else:
            out = speculate(*args, drafter=drafter, **options, donate=True)
            drafter = out.drafter
        parts.append(_report_tokens(out, on_tokens))
        num_remaining -= size
    return out._replace(**_join_calls(parts, num_remaining), drafter=drafter)


def _check_prompts(prompts: Prompts) -> list[Int32[np.ndarray, " n"]]:
    """Return the tokens of each prompt, or raise."""
    lists = [np.asarray(check_int32(prompt, "the tokens of a prompt", low=0)) for prompt in prompts]
    if not lists or any(tokens.ndim != 1 or not tokens.size for tokens in lists):
        raise ValueError(
            f"expected one prompt or more, each a list of one token or more, got {prompts!r}; a "
            f"single prompt is [tokens]"
        )
    return lists


def _report_tokens(
    out: DecodeResult, on_tokens: Callable[[int, list[int]], object] | None
) -> dict[str, Any]:
    """Call `on_tokens` for each text that has new tokens; return what was sampled, by field.

    Caches are left out: those of earlier calls, and of their drafters, are not kept.
    """
    if on_tokens is not None:
        for text, tokens in enumerate(out.lists()):
            if tokens:
                on_tokens(text, tokens)
    return {name: getattr(out, name) for name in (*ROWS, *COUNTS)}


def _join_calls(parts: list[dict[str, Any]], num_remaining: int) -> dict[str, Any]:
    """Return the fields of several calls as those of one, padded by `num_remaining` tokens."""
    joined: dict[str, Any] = {
        name: jnp.pad(
            jnp.concatenate([part[name] for part in parts], axis=1),
            [(0, 0), (0, num_remaining)],
            constant_values=padding,
        )
        for name, padding in ROWS.items()
    }
    for name in COUNTS:
        counts = [part[name] for part in parts if part[name] is not None]
        joined[name] = sum(counts) if counts else None
    return joined
