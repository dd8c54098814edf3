"""Generation from prompts in one call."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.api.edits import seq_select
from jaxkv.batch import make_batch
from jaxkv.cache import Cache, split
from jaxkv.cache_spec import CacheSpec
from jaxkv.core.array_utils import is_traced, take_rows
from jaxkv.core.validate import check_count
from jaxkv.generation.decode import decode
from jaxkv.generation.model_step import Edit, Forward, compiled_step
from jaxkv.generation.padding import check_token_lists, extra_of_lists
from jaxkv.generation.prefill import run_plan
from jaxkv.generation.results import DecodeResult
from jaxkv.generation.sample_step import check_stop_tokens, init_decode
from jaxkv.generation.sampler import Sampler
from jaxkv.generation.speculative.drafters import Drafter, check_drafter
from jaxkv.generation.speculative.speculate import speculate
from jaxkv.generation.state import check_seed, is_key
from jaxkv.make import make_cache
from jaxkv.plan import PlanRefusedError, Reason
from jaxkv.planning.planners import init_batch

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Float, Int32, Integer, Key, PyTree

    from jaxkv.generation.types import Prompts, Seeds, StopTokens

ROWS = {"tokens": -1, "logprobs": 0}
"""Fields of `DecodeResult` with one value for each token, and the padding of each field."""
COUNTS = ("num_model_steps", "num_drafted", "num_accepted")
"""Fields of `DecodeResult` with a count for each sequence."""
ROUND = 64
"""The number of cells is a multiple of `ROUND`, so that similar lengths share programs."""


def generate(
    forward: Forward,
    params: PyTree,
    prompts: Prompts,
    *,
    spec: CacheSpec | None = None,
    cache: Cache | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
    max_new_tokens: int = 128,
    stop_tokens: StopTokens = (),
    sampler: Sampler | None = None,
    seed: Seeds = 0,
    num_samples: int = 1,
    drafter: Drafter | None = None,
    edit: Edit | None = None,
    extra: Mapping[str, PyTree] | None = None,
    on_tokens: Callable[[int, list[int]], object] | None = None,
    tokens_per_call: int = 16,
) -> DecodeResult:
    """Generate tokens after prompts.

    This function calls `prefill`, then `init_decode`, then `decode`. With a drafter, the function
    calls `speculate` instead of `decode`. Sequence `i * num_samples + j` is sample j of prompt i.

    Args:
      forward: Model function `(params, step) -> step, logits [O, V]`, see `prefill`.
      params: Model parameters, any pytree.
      prompts: P lists of tokens, each with at least one token, or an array `[P, n]` with -1 as
        padding.
      spec: Spec of a new cache. The cache gets a stream for each sequence. Each stream has at least
        enough cells for the longest prompt and `max_new_tokens` new tokens.
      cache: A cache to continue from, instead of a spec. Prompt i continues sequence
        `i * num_samples`; the sequences of the other samples of the prompt become forks of this
        sequence. The input cache stays valid; its buffers are copied once.
      dtype: Dtype of keys and values in a new cache, see `make_cache`.
      max_new_tokens: Maximum number of tokens to sample for each sequence.
      stop_tokens: Tokens that end a sequence, see `decode`.
      sampler: A sampler, such as from `make_sampler`; greedy by default.
      seed: An integer from 0 to 2**32 - 1 or a key of `jax.random`, or a list of seeds, one for
        each sample of each prompt. A sample does not depend on the number of other samples.
      num_samples: Number of samples of each prompt; each prompt is computed once.
      drafter: A `Drafter`, which drafts several tokens of each sequence per step; see `speculate`.
      edit: Function `(cache, aux) -> cache`, called after the prompts and after each step of
        `decode`, see there; not allowed with a drafter.
      extra: Additional model inputs of the tokens of all prompts, by name, see `make_batch`. Each
        generated token has the inputs of the last token of its prompt.
      on_tokens: Function called with a sequence id and a list of new tokens of the sequence.
      tokens_per_call: Maximum number of tokens of a sequence between two calls of `on_tokens`. With
        a drafter, random samples and the counts of draft tokens depend on `tokens_per_call`.

    Returns:
      A `DecodeResult` for Z = P * num_samples sequences, as from `decode`: `lists()` returns the
      tokens, and `tokens` is `[Z, max_new_tokens]` int32 with -1 as padding. A stop token is
      included. A sequence ends with `jaxkv.Reason.OUT_OF_CELLS` in `finish_reason` if no cell is
      free for its last token, which is included too. If a `finish_reason` is not OK, `generate`
      issues one UserWarning.

    Raises:
      PlanRefusedError: If the plan of the prompts is refused, or samples do not fit into the cache.
      ValueError: If both or neither of the arguments `spec` and `cache` are passed.
      ValueError: If both a drafter and an edit are passed.
      ValueError: If there is no prompt or an empty prompt, or a list contains a negative token.
      ValueError: If `prompts` is one list of tokens; pass `[tokens]`.
      ValueError: If a token of a prompt or a stop token is not below the width V of the logits.
      ValueError: If a count is below 1, a seed is out of range, or the number of seeds is wrong.
      ValueError: If an argument with arrays is traced.
      ValueError: If `cache` has too few sequences.
      ValueError: If `make_cache`, `decode` or `speculate` would raise.

    Examples:
      The model predicts the next number, and 3 is the stop token:

      >>> def forward(params, step):
      ...     x = jnp.take(params, step.tokens, axis=0)[:, :, None]
      ...     step, _ = attend(step, 0, x, x, x)
      ...     return step, jnp.roll(x, 1, axis=-1).reshape(-1, 4)[step.outputs]
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=4)
      >>> options = dict(spec=spec, max_new_tokens=5, stop_tokens=[3])
      >>> generate(forward, jnp.eye(4), [[0, 1], [3]], **options).lists()
      [[2, 3], [0, 1, 2, 3]]

    llama.cpp: `examples/batched`. Hugging Face: `generate`.
    """
    max_new_tokens = check_count(max_new_tokens, "max_new_tokens")
    num_samples = check_count(num_samples, "num_samples")
    tokens_per_call = check_count(tokens_per_call, "tokens_per_call")
    if drafter is not None:
        check_drafter(drafter)
        if edit is not None:
            raise ValueError("expected a drafter or an edit, got both; pass one of them")
    if is_traced(params, prompts, extra, cache, seed, sampler, stop_tokens):
        raise ValueError(
            "expected concrete arguments of generate, got traced ones; call prefill, init_decode "
            "and decode inside of jit, and score for gradients"
        )
    lists = check_token_lists(prompts, "prompts")
    count = len(lists) * num_samples
    is_own_cache = cache is None
    if spec is not None and cache is None:
        drafted = 0 if drafter is None else drafter.num_draft_tokens
        cells = max(map(len, lists)) + max_new_tokens + drafted
        cache = _make_cache(spec, dtype, cells, count, max_rollback=drafted or None)
    elif spec is not None or cache is None:
        arguments = "neither" if spec is None else "both"
        raise ValueError(
            f"expected spec= or cache=, got {arguments}; pass the spec of the model's cache"
        )
    if (sequences := split(cache)[0].spec.sequences) < count:
        raise ValueError(
            f"expected a cache of {count} sequences, one for each sample of each prompt, got "
            f"{sequences}; make it with sequences={count}"
        )
    inputs = extra_of_lists(extra, prompts, lists)
    cache, logits = _prefill_samples(
        forward, params, cache, lists, inputs, num_samples, stop_tokens, edit, donate=is_own_cache
    )
    last_tokens = np.repeat(np.cumsum([len(tokens) for tokens in lists]) - 1, num_samples)
    out = init_decode(
        cache,
        logits=logits,
        sequences=np.arange(count),
        sampler=sampler,
        stop_tokens=stop_tokens,
        max_new_tokens=max_new_tokens,
        seed=_keys_of_samples(check_seed(seed, count), count, num_samples=num_samples),
        prompts=[tokens for tokens in lists for _ in range(num_samples)],
        extra=jax.tree.map(lambda x: x[last_tokens], inputs),
    )
    parts, num_remaining = [_take_results(out, on_tokens)], max_new_tokens - 1
    while np.asarray(out.state.active).any():
        size = num_remaining if on_tokens is None else min(tokens_per_call, num_remaining)
        options = {"num_tokens": size, "sampler": sampler, "stop_tokens": stop_tokens}
        args = forward, params, out.cache, out.state
        if drafter is None:
            out = decode(*args, **options, edit=edit, donate=True)
        else:
            out = speculate(*args, drafter=drafter, **options, donate=True)
            drafter = out.drafter
        parts.append(_take_results(out, on_tokens))
        num_remaining -= size
    _warn_of_early_ends(np.asarray(out.finish_reason))
    return out._replace(**_join_calls(parts, num_remaining), drafter=drafter)


def _make_cache(
    spec: CacheSpec,
    dtype: jax.typing.DTypeLike,
    cells: int,
    sequences: int,
    *,
    max_rollback: int | None,
) -> Cache:
    """Make a cache with a stream for each sequence; `cells` is rounded up, see `ROUND`."""
    cells = -(-cells // ROUND) * ROUND
    sizes = {"sequences": sequences, "streams": sequences, "max_rollback": max_rollback}
    return make_cache(spec, cells=cells, dtype=dtype, **sizes)


def _prefill_samples(
    forward: Forward,
    params: PyTree,
    cache: Cache,
    prompts: list[np.ndarray],
    extra: dict[str, PyTree],
    num_samples: int,
    stop_tokens: StopTokens,
    edit: Edit | None,
    *,
    donate: bool,
) -> tuple[Cache, Float[Array, "Z V"]]:
    """Compute each prompt once; return the cache and the logits of all samples."""
    count = len(prompts) * num_samples
    first = range(0, count, num_samples)
    plan = init_batch(cache, make_batch(prompts, sequences=[*first], extra=extra)).check()
    # `run_plan` reuses the trace.
    args = params, cache.table, cache.buffers, plan.ubatches[0]
    *_, logits = jax.eval_shape(compiled_step(forward), *args)
    _check_vocabulary(logits.shape[1], np.concatenate(prompts), "the tokens of prompts")
    _check_vocabulary(logits.shape[1], check_stop_tokens(stop_tokens, count), "stop_tokens")
    cache, by_ubatch = run_plan(forward, params, cache, plan, edit=edit, donate=donate)
    logits = plan.gather_outputs(by_ubatch)
    if num_samples == 1:
        return cache, logits
    forked = seq_select(cache, np.repeat(first, num_samples), np.arange(count), donate=True)
    if not forked.ok:
        raise PlanRefusedError(
            f"expected cells for {num_samples} samples of each prompt, got too few in their "
            f"streams; make a cache with more cells"
        )
    return forked.cache, take_rows([logits], np.repeat(np.arange(len(prompts)), num_samples))


def _check_vocabulary(size: int, tokens: Int32[ArrayLike, "*n"], name: str) -> None:
    """Raise ValueError for a token that the model cannot predict."""
    largest = np.max(np.asarray(tokens), initial=-1)
    if largest >= size:
        raise ValueError(
            f"expected {name} below {size}, the size of the vocabulary, got {largest}; encode "
            "texts by the tokenizer of this model"
        )


def _warn_of_early_ends(codes: Int32[np.ndarray, " Z"]) -> None:
    early = Counter(Reason(code).name for code in codes if code != Reason.OK)
    if early:
        counts = ", ".join(f"{count} {name}" for name, count in early.items())
        warnings.warn(
            f"expected sequences that end with a stop token or at max_new_tokens, got {counts} of "
            f"{codes.size} sequences; for OUT_OF_CELLS pass a cache with more cells, for "
            "NONFINITE_LOGITS check the params and `forward`",
            stacklevel=3,
        )


def _keys_of_samples(seed: Seeds, count: int, *, num_samples: int) -> Seeds:
    if np.ndim(seed) or num_samples == 1:
        return seed
    return _fold_samples(seed, np.divmod(np.arange(count, dtype=np.int32), num_samples))


@jax.jit
def _fold_samples(
    seed: Integer[Array, ""] | Key[Array, ""],
    indices: tuple[Int32[Array, " Z"], Int32[Array, " Z"]],
) -> Key[Array, " Z"]:
    """Fold the prompt index of each sample into the seed, then the sample index unless it is 0."""
    fold = jax.vmap(jax.random.fold_in)
    prompt, sample = indices
    keys = fold(
        jnp.broadcast_to(seed if is_key(seed) else jax.random.key(seed), prompt.shape), prompt
    )
    return jnp.where(sample == 0, keys, fold(keys, sample))


def _take_results(
    out: DecodeResult, on_tokens: Callable[[int, list[int]], object] | None
) -> dict[str, Any]:
    """Pass the tokens of a call to `on_tokens`, and return the result fields of the call."""
    if on_tokens is not None:
        for sequence, tokens in enumerate(out.lists()):
            if tokens:
                on_tokens(sequence, tokens)
    return {name: getattr(out, name) for name in (*ROWS, *COUNTS)}


@partial(jax.jit, static_argnames="num_remaining")
def _join_calls(parts: list[dict[str, Any]], num_remaining: int) -> dict[str, Any]:
    """Join the result fields of several calls, and append `num_remaining` tokens of padding."""
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
