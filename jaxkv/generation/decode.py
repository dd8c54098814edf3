"""Token generation for several sequences in one loop on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import Cache, split
from jaxkv.core.tree_types import TreeWithTypes, attach_node_types
from jaxkv.core.validate import check_count
from jaxkv.generation.model_program import ModelProgram
from jaxkv.generation.model_step import Edit, Forward, model_step
from jaxkv.generation.results import DecodeResult
from jaxkv.generation.sample_step import (
    SampledTokens,
    check_stop_tokens,
    empty_samples,
    sample_next_tokens,
)
from jaxkv.generation.sampler import Sampler
from jaxkv.generation.state import (
    DecodeState,
    check_sampler_state,
    check_state,
    end_edited_sequences,
    update_last_token_hashes,
)
from jaxkv.jit_helpers import replicate
from jaxkv.planning.planners import plan_next

if TYPE_CHECKING:
    from jaxtyping import Array, Int32, PyTree

    from jaxkv.generation.types import StopTokens


def decode(
    forward: Forward,
    params: PyTree,
    cache: Cache,
    state: DecodeState,
    *,
    num_tokens: int,
    sampler: Sampler | None = None,
    stop_tokens: StopTokens = (),
    edit: Edit | None = None,
    donate: bool = False,
) -> DecodeResult:
    """Generate up to `num_tokens` tokens for each sequence, in one device loop.

    A sequence ends in these cases:

    - A stop token is sampled; the stop token is not written to the cache.
    - The limit `max_new_tokens` of `init_decode` is reached.
    - No token is allowed, or a logit is NaN or +inf.
    - The plan of the next token is refused, for example because no cell is free. The `jaxkv.Reason`
      is in `finish_reason`. Other sequences continue. Cells to which a sequence can still attend
      are not overwritten.
    - An edit changed the last cached token after the state was made (`Reason.EDITED`).

    Later calls do not continue an ended sequence; to continue it, call `init_decode` again.

    Args:
      forward: Model function `(params, step) -> step, logits [O, V]`, see `prefill`.
      params: Model parameters, any pytree.
      cache: The cache that contains the prompts, or the cache in the result of an earlier call.
      state: State of each sequence, from `init_decode` or the result of an earlier call.
      num_tokens: Maximum number of tokens to generate for each sequence, static.
      sampler: The sampler passed to `init_decode`, or a sampler that differs from it only in
        numbers, such as the temperature. Greedy by default.
      stop_tokens: Tokens that end a sequence: `[n]` for all sequences, or `[Z, n]` with a list for
        each sequence; -1 is padding.
      edit: Function `(cache, aux) -> cache`, called after each model step inside of the loop, for
        example to evict cells. `aux` is the third result of a model function that returns
        `step, logits, aux`, and None for others. A step whose plan was refused is not edited. A
        refused edit leaves the cache unchanged, and the loop continues.
      donate: If True, reuse the buffers of the input cache, which becomes invalid; see `prefill`.

    Returns:
      A `DecodeResult`. The fields `cache` and `state` are for the next call.

      - `tokens` `[Z, num_tokens]` int32 are the tokens sampled in this call, a stop token included,
        with -1 after the end of a sequence. The method `lists()` omits the padding. The token that
        `init_decode` sampled is not included.
      - `logprobs` `[Z, num_tokens]` float32 are the log-probabilities under the unadjusted logits.
      - `finish_reason` `[Z]` int32 is a `jaxkv.Reason` for each sequence. The reason is OK unless a
        refused plan, an edit, or a logit of NaN or +inf ended the sequence. `state.active` `[Z]` is
        False for sequences that have ended.

    Raises:
      ValueError: If arrays of the state and of the sampler are for different numbers of sequences.
      ValueError: If the state was made for another kind of sampler.
      ValueError: If a concrete sequence id is repeated or not in the cache.
      ValueError: If `num_tokens` is below 1, the cache was donated, or stop tokens are misshapen.
      ValueError: If the model function returns wrong results, see `generation.model_step`.

    Examples:
      The model predicts the next number. 3 is the stop token, and sequence 1 may get two tokens:

      >>> def forward(params, step):
      ...     x = jnp.take(params, step.tokens, axis=0)[:, :, None]
      ...     step, _ = attend(step, 0, x, x, x)
      ...     return step, jnp.roll(x, 1, axis=-1).reshape(-1, 4)[step.outputs]
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=4)
      >>> cache = make_cache(spec, cells=8, sequences=2)
      >>> state = generation.init_decode(cache, tokens=[1, 3], max_new_tokens=[9, 2]).state
      >>> out = decode(forward, jnp.eye(4), cache, state, num_tokens=3, stop_tokens=[3])
      >>> out.lists(), out.state.active.tolist(), out.cache.seq_pos_max([0, 1]).tolist()
      ([[2, 3], [0, 1]], [False, False], [1, 1])
    """
    num_tokens = check_count(num_tokens, "num_tokens")
    state = check_state(split(cache)[0].spec, state)
    sampler = check_sampler_state(sampler, state)
    if not state.token.shape[0]:
        return DecodeResult(cache, state, *empty_samples(0, num_tokens))
    ending = check_stop_tokens(stop_tokens, state.token.shape[0])
    args = attach_node_types(sampler), state, ending
    cache, next_state, samples = _DECODE(
        forward, params, cache, *args, edit=edit, donate=donate, num_tokens=num_tokens
    )
    # The ids in the input state can be read before the program ends; those in the output cannot.
    return DecodeResult(cache, replace(next_state, sequence=state.sequence), *samples)


def _decode(
    forward: Forward,
    params: PyTree,
    cache: Cache,
    sampler: TreeWithTypes[Sampler],
    state: DecodeState,
    stop_tokens: Int32[Array | np.ndarray, "Z n"],
    *,
    num_tokens: int,
    edit: Edit | None = None,
) -> tuple[Cache, DecodeState, SampledTokens]:
    def should_continue(carry: tuple) -> jax.Array:
        _, state, _, i = carry
        return (i < num_tokens) & jnp.any(state.active)

    def body(carry: tuple) -> tuple:
        cache, state, samples, i = carry
        table = cache.table
        next_tokens = state.token[:, None], state.sequence, state.active[:, None]
        plan = plan_next(table, *next_tokens, state.extra_of_tokens(1))
        cache, logits = model_step(forward, params, cache, plan.ubatches[0], edit=edit)
        active = state.active & plan.ok
        state, token, logprob = sample_next_tokens(
            sampler.value, logits, state, stop_tokens, active
        )
        new = SampledTokens(token, logprob)
        samples = jax.tree.map(lambda all_, column: all_.at[:, i].set(column), samples, new)
        # A refused step leaves the cache unchanged. A sequence that does not fit ends; the other
        # sequences repeat the step. Sequences without a token in the step fit.
        refused = ~plan.fits[state.sequence]
        state = replace(
            state,
            active=state.active & ~refused,
            reason=jnp.where(refused, plan.reason[state.sequence], state.reason),
        )
        return cache, state, samples, i + plan.ok

    state = end_edited_sequences(cache.table, jax.tree.map(jnp.asarray, state))
    carry = cache, state, empty_samples(state.token.shape[0], num_tokens), jnp.int32(0)
    cache, state, samples, _ = jax.lax.while_loop(should_continue, body, carry)
    table = cache.table
    return cache, *replicate(table, (update_last_token_hashes(table, state), samples))


_DECODE = ModelProgram(_decode, "num_tokens")
