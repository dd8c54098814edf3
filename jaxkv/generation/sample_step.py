"""Sampling of the first token of each sequence, and of each next token in a loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxkv.cache import Cache, split
from jaxkv.core.array_utils import is_traced
from jaxkv.core.tree_types import TreeWithTypes, attach_node_types
from jaxkv.core.validate import check_int32
from jaxkv.generation.filters import make_sampler
from jaxkv.generation.padding import select_per_sequence, stop_tokens_as_list
from jaxkv.generation.results import DecodeResult, PrefillResult
from jaxkv.generation.sampler import (
    Sampler,
    adjust_logits,
    check_sampler,
    has_invalid_logits,
    make_draw_keys,
    sample_tokens,
)
from jaxkv.generation.state import DecodeState, make_decode_state
from jaxkv.jit_helpers import jit_table
from jaxkv.plan import Reason

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Bool, Float, Int32, PyTree

    from jaxkv.core.types import Ids
    from jaxkv.generation.types import Prompts, Seeds, StopTokens
    from jaxkv.table import CacheTable


class SampledTokens(NamedTuple):
    """Tokens and log-probabilities, as in `DecodeResult`."""

    tokens: Int32[Array, "Z n"]
    logprobs: Float[Array, "Z n"]


def init_decode(
    cache: Cache,
    *,
    logits: PrefillResult | Float[ArrayLike, "Z V"] | Sequence[Sequence[float]] | None = None,
    tokens: Ids | None = None,
    sequences: Ids | None = None,
    sampler: Sampler | None = None,
    stop_tokens: StopTokens = (),
    max_new_tokens: Ids | None = None,
    seed: Seeds = 0,
    prompts: Prompts | None = None,
    extra: Mapping[str, PyTree] | None = None,
) -> DecodeResult:
    """Make the initial state of sequences; sample first tokens from `logits`, or use `tokens`.

    Args:
      cache: The cache that contains the prompts.
      logits: The result of `prefill`, or logits `[Z, V]` of the last prompt token of each sequence.
        For forks of a prompt, repeat the logits of the prompt (`jnp.repeat`).
      tokens: `[Z]`. First tokens to use instead of `logits`. The tokens are not in the cache yet.
      sequences: `[Z]`. Sequence ids; not allowed with the result of `prefill`, which has ids.
        Required if `logits` is an array `[Z, V]` and Z is above 1. With `tokens`, or if Z is 1, the
        default is 0 to Z - 1.
      sampler: A sampler, such as from `make_sampler`; greedy by default.
      stop_tokens: Tokens that end a sequence, see `decode`; not applied to given tokens.
      max_new_tokens: `[]` or `[Z]`. Maximum number of tokens to sample for each sequence, including
        a first token that is sampled from `logits`. Unlimited by default.
      seed: `[]` or `[Z]` integers, or keys of `jax.random`. A single seed is folded with each
        sequence id, so that equal prompts get different samples. With a seed for each sequence,
        the draws of a sequence depend only on its seed and its start position.
      prompts: Prompt tokens of each sequence, for the penalties of a sampler: an array padded in
        front with -1, or a list of lists.
      extra: Additional model inputs `[Z, ...]` by name, see `make_batch`. Each next token of a
        sequence has the inputs of its sequence.

    Returns:
      A `DecodeResult` with the unchanged cache, the state for `decode`, and the first tokens
      `[Z, 1]`, -1 for a sequence that ended without a token. If tokens were passed, the result has
      None in place of `tokens` and `logprobs`.

    Raises:
      ValueError: If both or neither of the arguments `logits` and `tokens` are passed.
      ValueError: If logits are not floats `[Z, V]`, or Z is above 1 without sequence ids.
      ValueError: If sequence ids are passed with the result of `prefill`.
      ValueError: If logits have more rows than the cache has sequences. The cause can be a
        `prefill` inside of `jit`, whose logits have rows of padding.
      ValueError: If logits are passed for a sequence that is empty in a concrete cache.
      ValueError: If arguments, including the sampler, are for different numbers of sequences.
      ValueError: If a concrete token or limit is below 0, or a concrete seed is not a uint32.
      ValueError: If a concrete sequence id is repeated or not in the cache.

    Examples:
      Sequence 1 is a fork of sequence 0. The token 2 is the stop token:

      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=4)
      >>> cache = make_cache(spec, cells=8, sequences=2)
      >>> cache = prefill(forward, params, cache, [1]).cache
      >>> cache, ok = seq_cp(cache, 0, 1)
      >>> logits = jnp.repeat(jnp.array([[0.0, 2.0, 1.0, 1.5]]), 2, axis=0)
      >>> sampler = generation.make_sampler(temperature=1.0)
      >>> out = generation.init_decode(
      ...     cache, logits=logits, sequences=[0, 1], sampler=sampler, stop_tokens=[2], seed=5
      ... )
      >>> out.tokens.tolist(), out.state.active.tolist()
      ([[2], [1]], [False, True])
    """
    if (logits is None) == (tokens is None):
        arguments = "neither" if logits is None else "both"
        raise ValueError(
            f"expected logits= or tokens=, got {arguments}; pass the logits of prefill"
        )
    sampler = make_sampler() if sampler is None else check_sampler(sampler)
    begin = partial(
        make_decode_state,
        cache,
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        seed=seed,
        prompts=prompts,
        extra=extra,
    )
    if tokens is not None:
        state = begin(tokens, sequences)
        sampler_state = sampler.update(state.sampler_state, state.token)
        return DecodeResult(cache, replace(state, sampler_state=sampler_state), None, None)
    if isinstance(logits, PrefillResult):
        if sequences is not None:
            raise ValueError(
                "expected the result of prefill, or logits and their sequences, got the result and "
                "sequences; pass result.logits to pair them otherwise"
            )
        sequences, logits = logits.sequences, logits.logits
    logits = jnp.asarray(logits)
    if logits.ndim != 2 or not logits.shape[1] or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(
            f"expected logits [Z, V] of floats, got {logits.dtype} {list(logits.shape)}; pass "
            "the logits of a PrefillResult"
        )
    num_sequences = split(cache)[0].spec.sequences
    if logits.shape[0] > num_sequences:
        raise ValueError(
            f"expected logits of at most {num_sequences} sequences, those of the cache, got "
            f"{logits.shape[0]} rows; prefill pads them inside of jit, so pass logits[:Z]"
        )
    if sequences is None and logits.shape[0] > 1:
        raise ValueError(
            f"expected the sequence of each of {logits.shape[0]} rows of logits, got none; pass "
            f"the PrefillResult in place of its logits, or sequences="
        )
    none = np.zeros(logits.shape[0], np.int32)
    state = begin(none, sequences)
    if not is_traced(state.draw_index, state.sequence, state.active):
        check_prompts_present(np.asarray(state.draw_index) - 2, state.sequence, state.active)
    table = cache.table
    return DecodeResult(
        cache,
        *sample_first_tokens(
            table, sampler, logits, check_stop_tokens(stop_tokens, len(none)), state
        ),
    )


def empty_samples(batch_size: int, num_tokens: int) -> SampledTokens:
    """Return tokens of -1 and log-probabilities of 0, `[Z, num_tokens]`."""
    shape = batch_size, num_tokens
    return SampledTokens(jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32))


def check_prompts_present(
    last: Int32[Array | np.ndarray, " Z"],
    sequences: Int32[Array | np.ndarray, " Z"],
    active: Bool[Array | np.ndarray, " Z"],
) -> None:
    """Raise a ValueError if an active sequence is empty (its last position is -1)."""
    empty = np.asarray(active) & (np.asarray(last) < 0)
    if empty.any():
        raise ValueError(
            f"expected the prompt of each sequence, got nothing in sequence "
            f"{np.asarray(sequences)[empty][0]}; pass sequences="
        )


def sample_first_tokens(
    table: CacheTable,
    sampler: Sampler,
    logits: Float[Array, "Z V"],
    stop_tokens: Int32[Array | np.ndarray, "#Z n"],
    state: DecodeState,
) -> tuple[DecodeState, Int32[Array, "Z 1"], Float[Array, "Z 1"]]:
    """Sample first tokens; return the state, the tokens and their log-probabilities."""
    return _sample_first_tokens(table, attach_node_types(sampler), logits, stop_tokens, state)


@jit_table
def _sample_first_tokens(
    table: CacheTable,
    sampler: TreeWithTypes[Sampler],
    logits: Float[Array, "Z V"],
    stop_tokens: Int32[Array, "#Z n"],
    state: DecodeState,
) -> tuple[DecodeState, Int32[Array, "Z 1"], Float[Array, "Z 1"]]:
    del table  # `jit_table` reads its mesh
    # `draw_index` is for the token after `state.token`, but here `state.token` itself is drawn.
    state = replace(state, draw_index=state.draw_index - 1)
    state, token, logprob = sample_next_tokens(
        sampler.value, logits, state, stop_tokens, state.remaining > 0
    )
    return state, token[:, None], logprob[:, None]


def sample_next_tokens(
    sampler: Sampler,
    logits: Float[Array, "Z V"],
    state: DecodeState,
    stop_tokens: Int32[Array | np.ndarray, "#Z n"],
    active: Bool[Array, " Z"],
) -> tuple[DecodeState, Int32[Array, " Z"], Float[Array, " Z"]]:
    """Sample a token for each active sequence; return the state, tokens and log-probabilities.

    The token is -1 if the sequence is inactive, no token is allowed, or a logit is NaN or +inf.
    """
    logits = logits.astype(jnp.float32)
    adjusted = adjust_logits(sampler, logits, state.sampler_state)
    token = sample_tokens(sampler, adjusted, make_draw_keys(state.key, state.draw_index))
    is_sampled = active & (token >= 0)
    sampler_state = sampler.update(state.sampler_state, token)
    remaining = state.remaining - is_sampled
    ended = jnp.any(token[:, None] == stop_tokens, axis=1) | (remaining <= 0) | (token < 0)
    state = replace(
        state,
        token=jnp.where(is_sampled, token, state.token),
        active=state.active & ~(active & ended),
        remaining=remaining,
        reason=mark_nonfinite_logits(logits, active, state.reason),
        draw_index=state.draw_index + is_sampled,
        sampler_state=select_per_sequence(is_sampled, sampler_state, state.sampler_state),
    )
    return state, jnp.where(is_sampled, token, -1), logprob_of(logits, token, active)


def logprob_of(
    logits: Float[Array, "Z V"], tokens: Int32[Array, " Z"], active: Bool[Array, " Z"]
) -> Float[Array, " Z"]:
    """Return log-probabilities; 0 for inactive sequences, NaN if a logit is NaN or +inf."""
    token_logits = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=1)[:, 0]
    # The maximum is subtracted first: a float32 sum of large logits would lose their differences.
    largest = jnp.max(logits, axis=1)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    every = jnp.log(jnp.sum(jnp.exp(logits - largest[:, None]), axis=1))
    logprob = jnp.where(tokens >= 0, token_logits - largest - every, 0)
    return jnp.where(active, jnp.where(has_invalid_logits(logits), jnp.nan, logprob), 0)


def mark_nonfinite_logits(
    logits: Float[Array, "Z V"], active: Bool[Array, " Z"], reason: Int32[Array, " Z"]
) -> Int32[Array, " Z"]:
    """Set the reason NONFINITE_LOGITS for active sequences with a logit of NaN or +inf."""
    return jnp.where(active & has_invalid_logits(logits), Reason.NONFINITE_LOGITS, reason)


def check_stop_tokens(stop_tokens: StopTokens, count: int) -> Int32[Array | np.ndarray, "Z n"]:
    """Return checked stop tokens as `[1, n]` or `[Z, n]`."""
    rows = check_int32(stop_tokens_as_list(stop_tokens), "stop_tokens")
    if np.ndim(rows) == 1:
        return rows[None]
    if np.ndim(rows) != 2 or rows.shape[0] not in (1, count):
        raise ValueError(
            f"expected stop tokens [n] or [{count}, n], got {np.shape(rows)}; pass a flat list, "
            "or a list for each sequence"
        )
    return rows
