"""Drafters from a smaller model, with one branch or several."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxkv.cache import Cache, split
from jaxkv.core.donation import check_not_donated
from jaxkv.core.pytree import field_values
from jaxkv.core.validate import check_count
from jaxkv.generation.model_step import Forward
from jaxkv.generation.speculative.drafters import check_rollback
from jaxkv.generation.speculative.model_drafter import DraftModel
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
    """Make a drafter from a smaller model with the same vocabulary.

    With a greedy sampler, the k branches of a draft start with the k most probable tokens. Several
    branches help if the second best token is often right. If the sampler draws at random, draft
    tokens are also drawn at random, and the samples of `speculate` still follow the distribution of
    the verifying model.

    Args:
      forward: The draft model `(params, step) -> step, logits [O, V]`, see `prefill`.
      params: Parameters of the draft model, any pytree.
      cache: Cache of the draft model, with as many sequences as the main cache (the cache of
        `speculate` or `generate`), and with the prompts in the same sequences (`prefill`). With
        recurrent states, `max_rollback` must be at least `num_draft_tokens`.
      batch_size: Z, the number of sequences.
      num_draft_tokens: Maximum number of tokens of a draft, static.
      num_branches: k, the number of branches, static. If k is above 1, both caches need at least
        `Z * k` sequences, and several sequences in each stream.

    Returns:
      A drafter for `speculate`. If the cache of the draft model has too few free cells, the active
      sequences continue without drafts. A sequence gets no draft if it has different lengths in the
      draft cache and the main cache, for example after an edit of only one of them. Repeat each
      edit of the main cache in the draft cache (`drafter.cache`). With several branches,
      `drafter.last_draft` `[Z, k, num_draft_tokens]` int32 contains the last draft.

    Raises:
      ValueError: If `batch_size`, `num_draft_tokens` or `num_branches` is below 1.
      ValueError: If the cache stores too few recurrent states, or was donated.
      ValueError: With several branches, if the cache has recurrent states, fewer than `Z * k`
        sequences, or only one sequence in each stream.

    Examples:
      Two sequences, each with three branches, need a cache of six sequences:

      >>> def forward(params, step):
      ...     x = jnp.take(params, step.tokens, axis=0)[:, :, None]
      ...     step, x = attend(step, 0, x, x, x)
      ...     return step, x.reshape(-1, 4)[step.outputs] @ params.T
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=4)
      >>> cache = make_cache(spec, cells=32, sequences=6)
      >>> drafter = generation.draft_model(forward, jnp.eye(4), cache, batch_size=2, num_branches=3)
      >>> drafter.last_draft.shape  # [Z, k, num_draft_tokens]
      (2, 3, 3)

    llama.cpp: `examples/speculative`, where `n_parallel` is the number of branches.
    """
    batch_size = check_count(batch_size, "batch_size")
    num_draft_tokens = check_count(num_draft_tokens, "num_draft_tokens")
    num_branches = check_count(num_branches, "num_branches")
    if not callable(forward):
        raise TypeError(f"expected a function, got {type(forward)}; pass forward first")
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
        **field_values(model),
        last_draft=jnp.zeros((batch_size, num_branches, num_draft_tokens), jnp.int32),
        sequences=jnp.full((batch_size, num_branches), spec.sequences, jnp.int32),
        num_branches=num_branches,
    )
