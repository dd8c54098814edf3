"""Making a drafter of a smaller model, which guesses in one way or in several."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxkv.cache import Cache, split
from jaxkv.core.donation import check_not_donated
from jaxkv.core.validate import check_count
from jaxkv.generation.model_step import Forward
from jaxkv.generation.speculative.drafters import DraftModel, check_rollback
from jaxkv.generation.speculative.token_tree import check_branches
from jaxkv.generation.speculative.tree_drafter import TreeDraftModel

if TYPE_CHECKING:
    from jaxtyping import PyTree


def draft_model(
    forward: Forward,
    params: PyTree,
    cache: Cache,
    *,
    batch_size: int = 1,
    num_draft_tokens: int = 3,
    num_branches: int = 1,
) -> DraftModel:
    """Guess by a smaller model of the same vocabulary, which has a cache of its own.

    Several branches begin with the best tokens that it says, and each goes on from there: where a
    model that guesses is often wrong at once, its second guess often is right. It computes as many
    tokens a step as there are branches, and the model that checks them all of them. Where texts are
    drawn, branches are too, and the texts keep the distribution of the model.

    Args:
      forward: the model, see `prefill`; pass the same function every time.
      params: its parameters, any pytree.
      cache: its cache after the same prompts, in the same sequences. One that keeps states must
        keep `num_draft_tokens` earlier ones; for several branches it is of attention alone, with a
        sequence for each branch.
      batch_size: T, how many texts there are.
      num_draft_tokens: the most tokens of a guess, static.
      num_branches: k, how many first tokens are tried, static.

    Returns:
      The drafter, for `speculate`. Where its cache has no room for all texts that go on, they go on
      without guesses, and so does a text that its cache does not hold as far as the other one;
      what is done to one cache by hand must be done to the other.

    Raises:
      ValueError: when a number is below 1, the cache keeps too few states, or it was donated; of
        several branches when it keeps states, or has fewer than T * k sequences, or a stream for
        each.
      TypeError: when the model is no function.

    Examples:
      A cache of six sequences has room for two texts of three branches each:

      >>> def forward(params, cache, ubatch):
      ...     x = jnp.take(params, ubatch.tokens, axis=0)[:, :, None]
      ...     cache, x = attend(cache, 0, ubatch, x, x, x)
      ...     return cache, x.reshape(-1, 4)[ubatch.outputs] @ params.T
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=4)
      >>> cache = make_cache(spec, cells=32, sequences=6)
      >>> drafter = generation.draft_model(forward, jnp.eye(4), cache, batch_size=2, num_branches=3)
      >>> drafter.guessed.shape
      (2, 3, 3)

    llama.cpp: `examples/speculative`, with `n_parallel` for the branches.
    """
    batch_size = check_count(batch_size, "batch_size")
    num_draft_tokens = check_count(num_draft_tokens, "num_draft_tokens")
    num_branches = check_count(num_branches, "num_branches")
    if not callable(forward):
        raise TypeError(f"expected a function, got {type(forward)}")
    check_rollback(cache, num_draft_tokens, "the draft's cache")
    check_not_donated(cache, name="the draft's cache")
    model = DraftModel(
        params=params,
        cache=cache,
        unfed=jnp.full(batch_size, -1, jnp.int32),
        forward=forward,
        num_draft_tokens=num_draft_tokens,
    )
    if num_branches == 1:
        return model
    spec = split(cache)[0].spec
    check_branches(spec, batch_size, num_branches, "the draft's cache")
    return TreeDraftModel(
        **{field.name: getattr(model, field.name) for field in fields(model)},
        guessed=jnp.zeros((batch_size, num_branches, num_draft_tokens), jnp.int32),
        sequences=jnp.full((batch_size, num_branches), spec.sequences, jnp.int32),
        num_branches=num_branches,
    )
