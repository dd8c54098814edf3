"""A model that guesses several ways at once: its best tokens, and how each goes on."""

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import Cache, merge, split
from jaxkv.core.validate import check_count
from jaxkv.generation.model_step import Forward, model_step
from jaxkv.generation.sampler import Sampler, adjust_logits, draw, draw_key
from jaxkv.generation.speculative import token_tree
from jaxkv.generation.speculative.drafters import DraftModel, DraftTokens, draft_model
from jaxkv.generation.state import DecodeState, ends
from jaxkv.planning.planners import plan_next


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class TreeDraftModel(DraftModel):
    """What `tree_draft_model` makes. What its methods are given has the shapes that `Drafter` says.

    guessed: `[T, k, n]` int32, the tokens of the last guess.
    sequences: `[T, k]` int32, those of its branches in the cache of the draft, see `trees`.
    num_branches: see `Drafter`, static.
    """

    guessed: jax.Array  # [T, k, n]
    sequences: jax.Array  # [T, k]
    num_branches: int = field(metadata={"static": True})

    def propose(
        self, sampler: Sampler, state: DecodeState, active: jax.Array, at: jax.Array
    ) -> tuple["TreeDraftModel", DraftTokens]:
        """Take the best tokens that the model says, and let it go on from each with the best.

        With a sampler that draws, different tokens are drawn, and what comes after each.
        """
        table, _ = split(self.cache)
        last = ends(table)[state.sequence]
        going = active & (last + 1 + (self.unfed >= 0) == at)
        tokens = jnp.stack([self.unfed, state.token], axis=1)
        valid = going[:, None] & jnp.stack([self.unfed >= 0, jnp.ones_like(going)], axis=1)
        plan = plan_next(table, tokens, state.sequence, valid)
        cache, logits = model_step(self.forward, self.params, self.cache, plan.ubatches[0])
        logits = logits.reshape(*tokens.shape, -1)[:, -1].astype(jnp.float32)
        first = adjust_logits(sampler, logits, state.sampler_state)
        token = self._different(sampler, first, draw_key(state.key, state.draw_index, 2))
        best = jnp.take_along_axis(first, token, axis=1)

        table, buffers = split(cache)
        sequences = token_tree.branch_sequences(table, state.sequence, self.num_branches)
        cache = merge(token_tree.fork(table, sequences, state.sequence), buffers)
        going = (going & plan.ok)[:, None] & (sequences < table.spec.sequences)
        going &= best > -jnp.inf
        adjusting = jax.tree.map(
            lambda x: jnp.repeat(x[:, None], self.num_branches, axis=1), state.sampler_state
        )
        adjust, follow = (
            jax.vmap(one, in_axes=1, out_axes=1)
            for one in (partial(adjust_logits, sampler), sampler.update)
        )

        def again(carry: tuple, i: jax.Array) -> tuple:
            cache, adjusting, token, going = carry
            adjusting = follow(adjusting, token)
            fed = token.reshape(-1, 1), sequences.reshape(-1), going.reshape(-1, 1)
            plan = plan_next(split(cache)[0], *fed)
            cache, logits = model_step(self.forward, self.params, cache, plan.ubatches[0])
            logits = logits.reshape(*token.shape, -1).astype(jnp.float32)
            adjusted = adjust(logits, adjusting)
            keys = draw_key(state.key, state.draw_index + i, 2)
            keys = jax.vmap(lambda key: jax.vmap(partial(jax.random.fold_in, key))(turns))(keys)
            token = draw(sampler, adjusted.reshape(-1, adjusted.shape[2]), keys.reshape(-1))
            token = token.reshape(going.shape)
            going &= plan.ok & (token >= 0)
            return (cache, adjusting, token, going), (token, going, adjusted)

        turns = jnp.arange(self.num_branches, dtype=jnp.int32)
        carry = cache, adjusting, token, going
        carry, rest = jax.lax.scan(
            again, carry, jnp.arange(1, self.num_draft_tokens, dtype=jnp.int32)
        )
        begun = token, going, jnp.repeat(first[:, None], self.num_branches, axis=1)
        tokens, valid, adjusted = jax.tree.map(
            lambda one, others: jnp.moveaxis(jnp.concatenate([one[None], others]), 0, 2),
            begun,
            rest,
        )
        draft = replace(self, cache=carry[0], guessed=tokens, sequences=sequences)
        return draft, DraftTokens(tokens, valid, adjusted if sampler.is_random else None)

    def _different(self, sampler: Sampler, adjusted: jax.Array, keys: jax.Array) -> jax.Array:
        """Return different tokens of each text, `[T, k]` int32: the best, or drawn one by one."""
        if adjusted.shape[1] < self.num_branches:
            raise ValueError(
                f"wanted at most as many branches as the {adjusted.shape[1]} tokens of the "
                f"vocabulary, got {self.num_branches}"
            )
        if sampler.is_random:  # the highest with such a noise are draws without replacement
            noise = jax.vmap(lambda key: jax.random.gumbel(key, adjusted.shape[1:]))(keys)
            adjusted = adjusted + noise
        return jax.lax.top_k(adjusted, self.num_branches)[1].astype(jnp.int32)

    def update(
        self, sequences: jax.Array, at: jax.Array, fed: jax.Array, taken: jax.Array
    ) -> "TreeDraftModel":
        """Keep the branch that was taken, and go on as with a single one."""
        table, buffers = split(self.cache)
        turn = jnp.arange(1, fed.shape[1], dtype=jnp.int32)
        same = (self.guessed == fed[:, None, 1:]) | (turn[None] >= taken[:, None])[:, None]
        same = jnp.all(same, axis=2) & (self.sequences < table.spec.sequences)
        branch = jnp.argmax(same, axis=1).astype(jnp.int32)
        table = token_tree.keep(table, sequences, self.sequences, branch)
        kept = replace(self, cache=merge(table, buffers))
        return super(TreeDraftModel, kept).update(sequences, at, fed, taken)


def tree_draft_model(
    forward: Forward,
    params: Any,
    cache: Cache,
    *,
    batch_size: int = 1,
    num_draft_tokens: int = 3,
    num_branches: int = 2,
) -> TreeDraftModel:
    """Guess by a smaller model in several ways: the best tokens it says, and how each goes on.

    Where a model that guesses is often wrong at once, its second guess often is right. It computes
    as many tokens a step as there are branches, and the model that checks them all of them. Where
    texts are drawn, branches are too, and the texts keep the distribution of the model.

    Args:
      forward: see `draft_model`.
      params: see `draft_model`.
      cache: see `draft_model`; of attention alone, and with a sequence for each branch.
      batch_size: T, how many texts there are.
      num_draft_tokens: the most tokens of a branch, static.
      num_branches: k, how many first tokens are tried, static.

    Returns:
      The draft, for `speculate`; see `draft_model`.

    Raises:
      ValueError: as `draft_model` does; or when the cache keeps states, or has fewer than T * k
        sequences, or a stream for each.
      TypeError: when the model is no function.

    Examples:
      A cache of six sequences has room for two texts of three branches each:

      >>> def forward(params, cache, ubatch):
      ...     x = jnp.take(params, ubatch.tokens, axis=0)[:, :, None]
      ...     cache, x = attend(cache, 0, ubatch, x, x, x)
      ...     return cache, x.reshape(-1, 4)[ubatch.outputs] @ params.T
      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=4), cells=32, sequences=6
      ... )
      >>> draft = generation.tree_draft_model(
      ...     forward, jnp.eye(4), cache, batch_size=2, num_branches=3
      ... )
      >>> draft.guessed.shape
      (2, 3, 3)

    llama.cpp: `examples/speculative`, with `n_parallel`.
    """
    num_branches = check_count(num_branches, "num_branches")
    alone = draft_model(
        forward, params, cache, batch_size=batch_size, num_draft_tokens=num_draft_tokens
    )
    spec = split(cache)[0].spec
    token_tree.check_branches(spec, alone.batch_size, num_branches, "the draft's cache")
    return TreeDraftModel(
        **{one.name: getattr(alone, one.name) for one in fields(alone)},
        guessed=jnp.zeros((alone.batch_size, num_branches, alone.num_draft_tokens), jnp.int32),
        sequences=jnp.full((alone.batch_size, num_branches), spec.sequences, jnp.int32),
        num_branches=num_branches,
    )
