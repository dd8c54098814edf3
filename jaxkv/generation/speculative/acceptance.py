"""Acceptance of draft tokens, and sampling of replacement tokens."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.generation.padding import select_per_sequence
from jaxkv.generation.sample_step import logprob_of
from jaxkv.generation.sampler import Sampler, adjust_logits, make_draw_keys, sample_tokens
from jaxkv.generation.speculative.drafters import DraftTokens
from jaxkv.generation.state import DecodeState

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, Key, PyTree


def verify_draft(
    sampler: Sampler,
    logits: Float[Array, "Z places V"],
    draft: DraftTokens,
    state: DecodeState,
    ok: Bool[Array, " Z"],
) -> tuple[Int32[Array, "Z places"], Float[Array, "Z places"], Bool[Array, "Z places"], PyTree]:
    """Accept or replace each of n draft tokens, and sample one token after the draft.

    The returned mask is True for a token if all draft tokens before the token were accepted. The
    returned sampler state is updated only with the returned tokens for which the mask is True.
    """
    places = logits.shape[1]
    more = [(0, 0), (0, 1)]
    valid = jnp.pad(draft.valid, more)
    draft_tokens = jnp.pad(draft.tokens, more)
    drawn_from = draft.adjusted
    if drawn_from is not None:
        drawn_from = jnp.moveaxis(jnp.pad(drawn_from, [*more, (0, 0)]), 1, 0)

    def verify_place(carry: tuple, place: tuple) -> tuple:
        is_accepted_so_far, adjusting = carry
        i, logits, draft_token, valid, drawn_from = place
        adjusted = adjust_logits(sampler, logits, adjusting)
        if sampler.is_random:
            number = state.draw_index + i
            keys = make_draw_keys(state.key, number, 1)
            accepted, rest = _accept_draft_tokens(adjusted, draft_token, drawn_from, keys)
            adjusted = jnp.where(valid[:, None], rest, adjusted)
            token = sample_tokens(sampler, adjusted, make_draw_keys(state.key, number, 0))
            token = jnp.where(valid & accepted, draft_token, token)
        else:
            token = sample_tokens(sampler, adjusted, state.key)
        adjusting = select_per_sequence(
            is_accepted_so_far & (token >= 0), sampler.update(adjusting, token), adjusting
        )
        samples = token, logprob_of(logits, token, is_accepted_so_far), is_accepted_so_far
        return (is_accepted_so_far & valid & (token == draft_token), adjusting), samples

    places = jnp.arange(places, dtype=jnp.int32)
    by_place = (jnp.moveaxis(x, 1, 0) for x in (logits, draft_tokens, valid))
    carry = ok, state.sampler_state
    (_, adjusting), samples = jax.lax.scan(verify_place, carry, (places, *by_place, drawn_from))
    tokens, logprobs, is_accepted_so_far = (jnp.moveaxis(x, 0, 1) for x in samples)
    return tokens, logprobs, is_accepted_so_far, adjusting


def verify_branches(
    sampler: Sampler,
    logits: Float[Array, "Z nodes V"],
    draft: DraftTokens,
    state: DecodeState,
    ok: Bool[Array, " Z"],
) -> tuple[
    Int32[Array, "Z places"],
    Float[Array, "Z places"],
    Bool[Array, "Z places"],
    PyTree,
    Int32[Array, " Z"],
]:
    """Verify k branches of n draft tokens as `verify_draft` does; also return the selected branch.

    The logits of a sequence are in the order of the outputs of `token_tree.plan_tree`.
    """
    length = draft.tokens.shape[2]
    pad = [(0, 0), (0, 0), (0, 1)]
    offers = (jnp.moveaxis(jnp.pad(x, pad), 2, 0) for x in (draft.tokens, draft.valid))
    drawn_from = draft.adjusted
    if drawn_from is not None:
        drawn_from = jnp.moveaxis(jnp.pad(drawn_from, [*pad, (0, 0)]), 2, 0)

    def verify_place(carry: tuple, place: tuple) -> tuple:
        is_accepted_so_far, alive, adjusting = carry
        i, offered, valid, drawn_from = place
        # A token that branches share was computed only in the first of these branches.
        branch = jnp.argmax(alive, axis=1).astype(jnp.int32)
        # Output 0 is that of the last sampled token; output 1 + b * length + j is that of token j
        # in branch b.
        node = jnp.where(i == 0, 0, branch * length + i)
        here = jnp.take_along_axis(logits, node[:, None, None], axis=1)[:, 0]
        adjusted = adjust_logits(sampler, here, adjusting)
        number = state.draw_index + i
        if drawn_from is None or not sampler.is_random:
            token = sample_tokens(sampler, adjusted, make_draw_keys(state.key, number))
        else:
            q = jnp.take_along_axis(drawn_from, branch[:, None, None], axis=1)[:, 0]
            keys = make_draw_keys(state.key, number, 1)
            accepted, rest = _find_first_accepted(adjusted, offered, alive & valid, q, keys)
            token = sample_tokens(sampler, rest, make_draw_keys(state.key, number, 0))
            token = jnp.where(accepted >= 0, accepted, token)
        adjusting = select_per_sequence(
            is_accepted_so_far & (token >= 0), sampler.update(adjusting, token), adjusting
        )
        samples = token, logprob_of(here, token, is_accepted_so_far), is_accepted_so_far
        follows = alive & valid & (offered == token[:, None])
        is_accepted_so_far &= jnp.any(follows, axis=1)
        return (
            is_accepted_so_far,
            jnp.where(is_accepted_so_far[:, None], follows, alive),
            adjusting,
        ), samples

    carry = ok, jnp.ones(draft.tokens.shape[:2], bool), state.sampler_state
    places = jnp.arange(length + 1, dtype=jnp.int32)
    (_, alive, adjusting), samples = jax.lax.scan(
        verify_place, carry, (places, *offers, drawn_from)
    )
    tokens, logprobs, is_accepted_so_far = (jnp.moveaxis(x, 0, 1) for x in samples)
    return (
        tokens,
        logprobs,
        is_accepted_so_far,
        adjusting,
        jnp.argmax(alive, axis=1).astype(jnp.int32),
    )


def _find_first_accepted(
    adjusted: Float[Array, "Z V"],
    offered: Int32[Array, "Z k"],
    asked: Bool[Array, "Z k"],
    drawn_from: Float[Array, "Z V"],
    keys: Key[Array, " Z"],
) -> tuple[Int32[Array, " Z"], Float[Array, "Z V"]]:
    """Return the first accepted token of k draft tokens, and logits of a replacement token.

    The token is -1 if none is accepted. Otherwise the logits are not meaningful. After each
    rejection, the model probabilities p become max(p - q, 0), normalised. Then the probability of
    the rejected token in the draft probabilities q becomes 0, and q is normalised, since draft
    tokens are drawn without replacement (Jeon et al., 2024, arXiv:2402.14160).
    """
    p, q = jax.nn.softmax(adjusted, axis=1), jax.nn.softmax(drawn_from, axis=1)
    accepted = jnp.full(asked.shape[0], -1, jnp.int32)
    for i in range(asked.shape[1]):
        draft_token = offered[:, i]
        at_draft_token = partial(jnp.take_along_axis, indices=draft_token[:, None], axis=1)
        chance = jax.vmap(lambda key, i=i: jax.random.uniform(jax.random.fold_in(key, i)))(keys)
        asks = asked[:, i] & (accepted < 0)
        is_accepted = asks & (chance * at_draft_token(q)[:, 0] < at_draft_token(p)[:, 0])
        accepted = jnp.where(is_accepted, draft_token, accepted)
        is_draft_token = jax.nn.one_hot(draft_token, q.shape[1], dtype=bool)
        p, q = (
            jnp.where(asks[:, None], _normalise_residual(rest, x), x)
            for rest, x in ((jnp.maximum(p - q, 0), p), (jnp.where(is_draft_token, 0, q), q))
        )
    # Without an allowed token, the softmax is NaN, and the logits stay -inf.
    some = jnp.max(adjusted, axis=1, keepdims=True) > -jnp.inf
    return accepted, jnp.where(some, jnp.log(p), adjusted)


def _normalise_residual(
    residual: Float[Array, "Z V"], fallback: Float[Array, "Z V"]
) -> Float[Array, "Z V"]:
    """Scale the probabilities `residual` to a sum of 1; return `fallback` if the sum is 0."""
    total = jnp.sum(residual, axis=1, keepdims=True)
    return jnp.where(total > 0, residual / jnp.where(total > 0, total, 1), fallback)


def _accept_draft_tokens(
    adjusted: Float[Array, "Z V"],
    draft_token: Int32[Array, " Z"],
    drawn_from: Float[Array, "Z V"] | None,
    keys: Key[Array, " Z"],
) -> tuple[Bool[Array, " Z"], Float[Array, "Z V"]]:
    """Return which draft tokens are accepted, and the logits of replacement tokens.

    A token with draft probability q and model probability p is accepted with probability
    min(1, p / q), or replaced by a draw from max(p - q, 0). Without `drawn_from`, q is one-hot.
    """
    # A token is drafted and accepted with the probability q * min(1, p / q) = min(p, q). All
    # rejections together have the probability sum(max(p - q, 0)), so replacements add
    # max(p - q, 0). The sum of both is p.
    p = jax.nn.softmax(adjusted, axis=1)
    if drawn_from is None:
        q = jax.nn.one_hot(draft_token, p.shape[1], dtype=p.dtype)
    else:
        q = jax.nn.softmax(drawn_from, axis=1)
    at_draft_token = partial(jnp.take_along_axis, indices=draft_token[:, None], axis=1)
    chance = jax.vmap(lambda key: jax.random.uniform(key))(keys)
    # `chance` is below 1, so p >= q > 0 always accepts; p = 0 never does. A division by q is
    # avoided.
    accepted = chance * at_draft_token(q)[:, 0] < at_draft_token(p)[:, 0]
    rest = jnp.maximum(p - q, 0)
    # The logits need not be normalised: a constant added to all logits does not change the draw.
    some = jnp.any(rest > 0, axis=1, keepdims=True)  # all are 0 if p equals q up to rounding
    return accepted, jnp.where(some, jnp.log(rest), adjusted)
