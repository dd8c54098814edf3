"""Speculative decoding: one model step verifies several draft tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.api.edits import seq_rm
from jaxkv.cache import Cache, merge, split
from jaxkv.core.array_utils import DROP
from jaxkv.core.tree_types import TreeWithTypes, attach_node_types
from jaxkv.core.validate import check_count
from jaxkv.generation.model_program import ModelProgram
from jaxkv.generation.model_step import Forward, model_step, run_model
from jaxkv.generation.results import DecodeResult
from jaxkv.generation.sample_step import check_stop_tokens, empty_samples
from jaxkv.generation.sampler import Sampler
from jaxkv.generation.speculative import token_tree
from jaxkv.generation.speculative.acceptance import verify_branches, verify_draft
from jaxkv.generation.speculative.drafters import (
    Drafter,
    DraftTokens,
    check_drafter,
    check_rollback,
    reshape_features,
)
from jaxkv.generation.state import (
    DecodeState,
    check_sampler_state,
    check_state,
    end_edited_sequences,
    last_positions,
    update_last_token_hashes,
)
from jaxkv.jit_helpers import replicate
from jaxkv.plan import Plan, Reason
from jaxkv.planning.planners import plan_next

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Array, Bool, Float, Int32, PyTree, Shaped

    from jaxkv.generation.types import StopTokens


class _DraftedTokens(NamedTuple):
    """Sampled tokens and counts so far, as in `DecodeResult`."""

    tokens: Int32[Array, "Z n"]
    logprobs: Float[Array, "Z n"]
    num_model_steps: Int32[Array, " Z"]
    num_drafted: Int32[Array, " Z"]
    num_accepted: Int32[Array, " Z"]


class _Setup(NamedTuple):
    """Constants of `speculate`; `sequences` has the ids of branches, or is None if k is 1."""

    forward: Forward
    sampler: Sampler
    params: PyTree
    stop_tokens: Int32[Array | np.ndarray, "#Z n"]
    sequences: Int32[Array, "Z k"] | None = None


class _Progress(NamedTuple):
    """State of the loop of `speculate`; `at` is the position of the last sampled token."""

    cache: Cache
    state: DecodeState
    drafter: Drafter
    made: _DraftedTokens
    at: Int32[Array, " Z"]
    drafting: Bool[Array, " Z"]


class _StepResult(NamedTuple):
    """Result of one step: n + 1 sampled tokens, of which the first `num_tokens` are used.

    `features` are those of the fed tokens, or None if the drafter has none.
    """

    tokens: Int32[Array, "Z places"]
    logprobs: Float[Array, "Z places"]
    num_tokens: Int32[Array, " Z"]
    accepted: Int32[Array, " Z"]
    state: DecodeState
    drafting: Bool[Array, " Z"]
    features: PyTree


def speculate(
    forward: Forward,
    params: PyTree,
    cache: Cache,
    state: DecodeState,
    *,
    drafter: Drafter,
    num_tokens: int,
    sampler: Sampler | None = None,
    stop_tokens: StopTokens = (),
    donate: bool = False,
) -> DecodeResult:
    """Generate tokens as `decode` does, but verify several draft tokens in each model step.

    Greedy samples equal those of `decode`, except where logits are equal up to rounding. Random
    samples have the same distribution as those of `decode` (Leviathan et al., 2023,
    arXiv:2211.17192). Rejected tokens are removed from the cache and the draft cache. If there are
    too few free cells for a draft, the sequence continues without drafts. If the next token has no
    free cell, the sequence ends as in `decode`.

    In each step, one branch uses the drafted sequence, and each other branch uses an empty sequence
    of the same stream. If a stream has too few empty sequences when a call starts, some drafts in
    the stream have fewer than k branches.

    Args:
      forward: Model function `(params, step) -> step, logits [O, V]`, see `prefill`. For a drafter
        with features, it returns the features of the same tokens as third result.
      params: Model parameters, any pytree.
      cache: The cache after the prompts. With recurrent states, `max_rollback` must be at least
        `num_draft_tokens`, and only one branch is possible.
      state: State of each sequence, from `init_decode`; see `decode`.
      drafter: A `Drafter`, from `prompt_lookup`, `draft_model` or `head_drafter`, or your own. Each
        call copies the buffers of the drafter.
      num_tokens: Maximum number of tokens to generate for each sequence, static.
      sampler: See `decode`.
      stop_tokens: See `decode`.
      donate: If True, reuse the buffers of the input cache, which becomes invalid; see `prefill`.

    Returns:
      A `DecodeResult`, as from `decode`. The array `tokens` is `[Z, num_tokens]` int32, with -1
      after the end of a sequence, and without the token that `init_decode` sampled.
      `num_model_steps`, `num_drafted` and `num_accepted` `[Z]` int32 are counts for each sequence;
      `drafter` is the drafter for the next call.

    Raises:
      ValueError: If `decode` would raise, or the cache stores too few states to roll back a draft.
      ValueError: With several branches, if the cache has recurrent states, fewer than `Z * k`
        sequences, or only one sequence in each stream.
      ValueError: If the sampler draws at random, and the draft model has another vocabulary size.
      ValueError: If drafter and state differ in Z, caches differ in Q, or a cache was donated.
      ValueError: If a drafter with features has several branches, or the third result of the model
        does not have the shapes of the features.

    Examples:
      The model counts modulo 3, and nine tokens take three steps:

      >>> def forward(params, step):
      ...     x = jnp.take(params, step.tokens, axis=0)[:, :, None]
      ...     step, _ = attend(step, 0, x, x, x)
      ...     return step, jnp.roll(x, 1, axis=-1).reshape(-1, 3)[step.outputs]
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=3), cells=32)
      >>> result = prefill(forward, jnp.eye(3), cache, make_batch([0, 1, 2, 0]))
      >>> cache, state = result.cache, generation.init_decode(result.cache, logits=result).state
      >>> drafter = generation.prompt_lookup([[0, 1, 2, 0]])
      >>> options = dict(drafter=drafter, num_tokens=9)
      >>> out = generation.speculate(forward, jnp.eye(3), cache, state, **options)
      >>> out.tokens.tolist(), out.num_model_steps.item(), out.num_accepted.item()
      ([[2, 0, 1, 2, 0, 1, 2, 0, 1]], 3, 6)

    llama.cpp: `examples/speculative` and `examples/prompt_lookup`.
    """
    num_tokens = check_count(num_tokens, "num_tokens")
    check_rollback(cache, check_drafter(drafter).num_draft_tokens, "the cache")
    token_tree.check_branches(
        split(cache)[0].spec, drafter.batch_size, drafter.num_branches, "a cache"
    )
    state = check_state(split(cache)[0].spec, state)
    sampler = check_sampler_state(sampler, state)
    batch_size = state.token.shape[0]
    if drafter.batch_size != batch_size:
        raise ValueError(
            f"expected a draft of {batch_size} sequences, got one of {drafter.batch_size}; make it "
            f"for {batch_size} sequences"
        )
    if drafter.num_branches > 1 and drafter.features is not None:
        raise ValueError(
            f"expected one branch from a drafter with features, got {drafter.num_branches}; make "
            "it with num_branches=1"
        )
    drafter.check(cache)
    if not batch_size:
        return DecodeResult(cache, state, *_empty_drafted_tokens(0, num_tokens), drafter=drafter)
    args = attach_node_types((drafter, sampler)), state, check_stop_tokens(stop_tokens, batch_size)
    cache, next_state, drafter, made = _SPECULATE(
        forward, params, cache, *args, donate=donate, num_tokens=num_tokens
    )
    # The ids in the input state can be read before the program ends; those in the output cannot.
    next_state = replace(next_state, sequence=state.sequence)
    return DecodeResult(cache, next_state, *made, drafter=drafter)


def _speculate(
    forward: Forward,
    params: PyTree,
    cache: Cache,
    by: TreeWithTypes[tuple[Drafter, Sampler]],
    state: DecodeState,
    stop_tokens: Int32[Array | np.ndarray, "#Z n"],
    *,
    num_tokens: int,
) -> tuple[Cache, DecodeState, Drafter, _DraftedTokens]:
    drafter, sampler = by.value
    setup = _Setup(forward, sampler, params, stop_tokens)
    batch_size, tries = state.token.shape[0], drafter.num_draft_tokens
    if drafter.num_branches > 1:
        table = cache.table
        sequences = token_tree.assign_branch_sequences(table, state.sequence, drafter.num_branches)
        setup = setup._replace(sequences=sequences)

    def should_continue(progress: _Progress) -> jax.Array:
        return jnp.any(progress.state.active & (_num_sampled(progress.made) < num_tokens))

    def body(progress: _Progress) -> _Progress:
        made, state, at = progress.made, progress.state, progress.at
        done = _num_sampled(made)
        active = state.active & (done < num_tokens)
        is_drafting = active & progress.drafting
        drafter, draft = progress.drafter.propose(setup.sampler, state, is_drafting, at)
        # A step samples one more token than the draft has.
        room = jnp.minimum(num_tokens - done, state.remaining) - 1
        may = is_drafting[:, None] & (jnp.arange(tries, dtype=jnp.int32)[None] < room[:, None])
        if setup.sequences is None:
            draft = draft._replace(valid=draft.valid & may)
            after, num_drafted = draft.tokens, jnp.sum(draft.valid, axis=1, dtype=jnp.int32)
            cache, result = _run_draft_width_step(setup, draft, active, progress)
        else:
            is_present = setup.sequences < progress.cache.table.spec.sequences
            draft = draft._replace(valid=draft.valid & may[:, None] & is_present[..., None])
            nodes = token_tree.find_tree_nodes(draft)
            num_drafted = jnp.sum(nodes.first, axis=(1, 2), dtype=jnp.int32)
            cache, result = _run_draft_width_step(setup, draft, active, progress)
            after = result.tokens[:, :-1]
        fed = jnp.concatenate([state.token[:, None], after], axis=1)
        num_drafted = jnp.where(result.num_tokens > 0, num_drafted, 0)
        # A sequence that ends with invalid logits has a log-probability of NaN, but no token.
        broken = active & (result.state.reason == Reason.NONFINITE_LOGITS)
        num_logprobs = result.num_tokens + broken
        return _Progress(
            cache=cache,
            state=result.state,
            drafter=drafter.update(state.sequence, at, fed, result.num_tokens, result.features),
            made=_DraftedTokens(
                tokens=_append_rows(made.tokens, done, result.tokens, result.num_tokens),
                logprobs=_append_rows(made.logprobs, done, result.logprobs, num_logprobs),
                num_model_steps=made.num_model_steps + active,
                num_drafted=made.num_drafted + num_drafted,
                num_accepted=made.num_accepted + result.accepted,
            ),
            at=at + result.num_tokens,
            drafting=result.drafting,
        )

    made = _empty_drafted_tokens(batch_size, num_tokens)
    state, drafter = jax.tree.map(jnp.asarray, (state, drafter))
    state = end_edited_sequences(cache.table, state)
    at = last_positions(cache.table)[state.sequence] + 1
    progress = _Progress(cache, state, drafter, made, at, jnp.ones(batch_size, bool))
    progress = jax.lax.while_loop(should_continue, body, progress)
    table = progress.cache.table
    state, made = replicate(table, (update_last_token_hashes(table, progress.state), progress.made))
    return progress.cache, state, progress.drafter, made


_SPECULATE = ModelProgram(_speculate, "num_tokens")


def _empty_drafted_tokens(batch_size: int, num_tokens: int) -> _DraftedTokens:
    none = jnp.zeros(batch_size, jnp.int32)
    return _DraftedTokens(
        *empty_samples(batch_size, num_tokens),
        num_model_steps=none,
        num_drafted=none,
        num_accepted=none,
    )


def _num_sampled(made: _DraftedTokens) -> Int32[Array, " Z"]:
    return jnp.sum(made.tokens >= 0, axis=1, dtype=jnp.int32)


def _append_rows(
    rows: Shaped[Array, "Z steps"],
    start: Int32[Array, " Z"],
    new: Shaped[Array, "Z n"],
    num_new: Int32[Array, " Z"],
) -> Shaped[Array, "Z steps"]:
    """Copy the first `num_new` values of each row of `new` into `rows`, from index `start` on."""
    column = jnp.arange(new.shape[1], dtype=jnp.int32)[None]
    # Values after the first `num_new` get a column past the end, and are dropped.
    where = jnp.where(column < num_new[:, None], start[:, None] + column, rows.shape[1])
    return rows.at[jnp.arange(rows.shape[0])[:, None], where].set(new, **DROP)


def _run_draft_width_step(
    setup: _Setup, draft: DraftTokens, active: Bool[Array, " Z"], progress: _Progress
) -> tuple[Cache, _StepResult]:
    """Run a step with n draft tokens, or with none if no sequence has a draft."""
    # Each width is a loop of zero or one iterations, since `lax.cond` would copy the cache.
    batch_size, tries = draft.tokens.shape[0], draft.tokens.shape[-1]
    empty_result = _StepResult(
        tokens=jnp.zeros((batch_size, tries + 1), jnp.int32),
        logprobs=jnp.zeros((batch_size, tries + 1), jnp.float32),
        num_tokens=jnp.zeros(batch_size, jnp.int32),
        accepted=jnp.zeros(batch_size, jnp.int32),
        state=progress.state,
        drafting=progress.drafting,
        features=jax.tree.map(
            lambda x: jnp.zeros((batch_size, tries + 1, *x.shape[1:]), x.dtype),
            progress.drafter.features,
        ),
    )
    narrow = ~jnp.any(draft.valid)
    alone = draft if setup.sequences is None else jax.tree.map(lambda x: x[:, 0], draft)

    def step_of_width(width: int, carry: tuple) -> tuple:
        part = draft if width else jax.tree.map(lambda x: x[:, :0], alone)
        cache, result = _feed_and_verify(setup, part, active, progress._replace(cache=carry[0]))
        more = [(0, 0), (0, tries - width)]
        padded = jax.tree.map(
            lambda x: jnp.pad(x, more + [(0, 0)] * (x.ndim - 2)),
            (result.tokens, result.logprobs, result.features),
        )
        fields = dict(zip(("tokens", "logprobs", "features"), padded, strict=True))
        return cache, result._replace(**fields), jnp.array(False)

    carry = progress.cache, empty_result, narrow
    carry = jax.lax.while_loop(lambda carry: carry[2], partial(step_of_width, 0), carry)
    carry = *carry[:2], ~narrow
    cache, result, _ = jax.lax.while_loop(
        lambda carry: carry[2], partial(step_of_width, tries), carry
    )
    return cache, result


def _feed_and_verify(
    setup: _Setup, draft: DraftTokens, active: Bool[Array, " Z"], progress: _Progress
) -> tuple[Cache, _StepResult]:
    """Run the model on drafts, and remove rejected draft tokens from the cache."""
    state = progress.state
    has_draft = jnp.any(draft.valid, axis=tuple(range(1, draft.valid.ndim)))
    feed = _feed_draft if draft.tokens.ndim == 2 else _feed_branches
    cache, plan, ok, samples, draft, features = feed(setup, draft, active, progress)
    tokens, logprobs, is_accepted_so_far, adjusting = samples
    width = tokens.shape[1]
    stopped = jnp.any(tokens[:, :, None] == setup.stop_tokens[:, None], axis=2) | (tokens < 0)
    column = jnp.arange(width, dtype=jnp.int32)[None]
    ended = jnp.min(jnp.where(stopped & is_accepted_so_far, column, width), axis=1)
    is_accepted_so_far &= column <= ended[:, None]
    num_sampled = jnp.sum(is_accepted_so_far & (tokens >= 0), axis=1, dtype=jnp.int32)
    broken = jnp.any(is_accepted_so_far & jnp.isnan(logprobs), axis=1)
    as_drafted = is_accepted_so_far[:, :-1] & draft.valid & (tokens[:, :-1] == draft.tokens)
    last = jnp.take_along_axis(tokens, jnp.maximum(num_sampled - 1, 0)[:, None], axis=1)[:, 0]
    remaining = state.remaining - num_sampled

    # Rejected draft tokens are removed. A place without an allowed token has no token, but the
    # token before it is in the cache.
    if width > 1:
        kept = progress.at + jnp.sum(is_accepted_so_far, axis=1, dtype=jnp.int32)
        cut = jnp.where(ok, kept, 0), jnp.where(ok, -1, 0)  # 0 to 0 is an empty range
        cache, _ = seq_rm(cache, state.sequence, *cut)
    # A refused step leaves the cache unchanged. A sequence that did not fit gets no more drafts; if
    # the sequence had no draft, it ends.
    refused = ~plan.fits[state.sequence]
    dead = refused & ~has_draft
    state = replace(
        state,
        token=jnp.where(num_sampled > 0, last, state.token),
        active=state.active & ~(ok & ((ended < width) | (remaining <= 0))) & ~dead,
        remaining=remaining,
        reason=jnp.where(
            dead,
            plan.reason[state.sequence],
            jnp.where(broken, Reason.NONFINITE_LOGITS, state.reason),
        ),
        draw_index=state.draw_index + num_sampled,
        sampler_state=adjusting,
    )
    return cache, _StepResult(
        tokens=tokens,
        logprobs=logprobs,
        num_tokens=num_sampled,
        accepted=jnp.sum(as_drafted, axis=1, dtype=jnp.int32),
        state=state,
        drafting=progress.drafting & ~(refused & has_draft),
        features=features,
    )


def _feed_draft(
    setup: _Setup, draft: DraftTokens, active: Bool[Array, " Z"], progress: _Progress
) -> tuple[Cache, Plan, Bool[Array, " Z"], tuple, DraftTokens, PyTree]:
    """Run the model on drafts of one branch; the third result is `active & plan.ok`."""
    table, state = progress.cache.table, progress.state
    fed = jnp.concatenate([state.token[:, None], draft.tokens], axis=1)
    valid = jnp.concatenate([active[:, None], draft.valid], axis=1)
    plan = plan_next(table, fed, state.sequence, valid, state.extra_of_tokens(fed.shape[1]))
    cache, logits, aux = run_model(setup.forward, setup.params, progress.cache, plan.ubatches[0])
    logits = logits.reshape(*fed.shape, -1).astype(jnp.float32)
    _check_vocabulary(draft, logits)
    ok = active & plan.ok
    samples = verify_draft(setup.sampler, logits, draft, state, ok)
    features = reshape_features(aux, progress.drafter.features, *fed.shape)
    return cache, plan, ok, samples, draft, features


def _check_vocabulary(draft: DraftTokens, logits: Float[Array, "Z n V"]) -> None:
    if draft.adjusted is not None and draft.adjusted.shape[-1] != logits.shape[-1]:
        raise ValueError(
            f"expected a draft of {logits.shape[-1]} tokens, the vocabulary of the model, got one "
            f"of {draft.adjusted.shape[-1]}; take a draft model with that vocabulary, or lookup"
        )


def _feed_branches(
    setup: _Setup, draft: DraftTokens, active: Bool[Array, " Z"], progress: _Progress
) -> tuple[Cache, Plan, Bool[Array, " Z"], tuple, DraftTokens, None]:
    """Run the model once for all branches of a draft, and keep one branch."""
    state, sequences = progress.state, setup.sequences
    assert sequences is not None
    table = token_tree.fork_branches(progress.cache.table, sequences, state.sequence)
    plan = token_tree.plan_tree(table, state, draft, active, sequences)
    cache = merge(table, progress.cache.buffers)
    cache, logits = model_step(setup.forward, setup.params, cache, plan.ubatches[0])
    logits = logits.reshape(state.token.shape[0], -1, logits.shape[1]).astype(jnp.float32)
    _check_vocabulary(draft, logits)
    ok = active & plan.ok
    *samples, branch = verify_branches(setup.sampler, logits, draft, state, ok)
    own_branch = jnp.argmax(sequences == state.sequence[:, None], axis=1).astype(jnp.int32)
    kept_branch = jnp.where(ok, branch, own_branch)
    table = token_tree.keep_branch(cache.table, state.sequence, sequences, kept_branch)
    cache = merge(table, cache.buffers)
    tokens, valid = (
        jnp.take_along_axis(x, branch[:, None, None], axis=1)[:, 0]
        for x in (draft.tokens, draft.valid)
    )
    return cache, plan, ok, tuple(samples), DraftTokens(tokens, valid, None), None
