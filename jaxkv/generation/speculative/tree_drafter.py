"""Drafter that drafts several branches with a smaller model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.cache import merge
from jaxkv.core.pytree import pytree_dataclass, static_field
from jaxkv.generation.model_step import model_step
from jaxkv.generation.sampler import Sampler, adjust_logits, make_draw_keys, sample_tokens
from jaxkv.generation.speculative import token_tree
from jaxkv.generation.speculative.drafters import DraftTokens, check_state_size
from jaxkv.generation.speculative.model_drafter import DraftModel
from jaxkv.generation.state import DecodeState, last_positions
from jaxkv.planning.planners import plan_next

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, Key, PyTree


@pytree_dataclass
class TreeDraftModel(DraftModel):
    """Drafter of `draft_model` with several branches; `last_draft` contains the last draft."""

    last_draft: Int32[Array, "Z k n"]
    sequences: Int32[Array, "Z k"]
    num_branches: int = static_field()

    def propose(
        self,
        sampler: Sampler,
        state: DecodeState,
        active: Bool[Array, " Z"],
        at: Int32[Array, " Z"],
    ) -> tuple[TreeDraftModel, DraftTokens]:
        """Start k branches with k distinct tokens, and extend each branch token by token."""
        check_state_size(self, state)
        table = self.cache.table
        last = last_positions(table)[state.sequence]
        going = active & (last + 1 + (self.unfed >= 0) == at)
        tokens = jnp.stack([self.unfed, state.token], axis=1)
        valid = going[:, None] & jnp.stack([self.unfed >= 0, jnp.ones_like(going)], axis=1)
        plan = plan_next(table, tokens, state.sequence, valid, state.extra_of_tokens(2))
        cache, logits = model_step(self.forward, self.params, self.cache, plan.ubatches[0])
        logits = logits.reshape(*tokens.shape, -1)[:, -1].astype(jnp.float32)
        first = adjust_logits(sampler, logits, state.sampler_state)
        token = self._pick_distinct_tokens(
            sampler, first, make_draw_keys(state.key, state.draw_index, 2)
        )
        best = jnp.take_along_axis(first, token, axis=1)

        table, buffers = cache.table, cache.buffers
        sequences = token_tree.assign_branch_sequences(table, state.sequence, self.num_branches)
        cache = merge(token_tree.fork_branches(table, sequences, state.sequence), buffers)
        going = (going & plan.ok)[:, None] & (sequences < table.spec.sequences)
        going &= best > -jnp.inf
        adjusting = jax.tree.map(
            lambda x: jnp.repeat(x[:, None], self.num_branches, axis=1), state.sampler_state
        )
        adjust, follow = (
            jax.vmap(function, in_axes=1, out_axes=1)
            for function in (partial(adjust_logits, sampler), sampler.update)
        )

        def draft_next_tokens(carry: tuple, i: jax.Array) -> tuple:
            cache, adjusting, token, going = carry
            adjusting = follow(adjusting, token)
            fed = token.reshape(-1, 1), sequences.reshape(-1), going.reshape(-1, 1)
            plan = plan_next(cache.table, *fed, extra)
            cache, logits = model_step(self.forward, self.params, cache, plan.ubatches[0])
            logits = logits.reshape(*token.shape, -1).astype(jnp.float32)
            adjusted = adjust(logits, adjusting)
            keys = make_draw_keys(state.key, state.draw_index + i, 2)
            keys = jax.vmap(lambda key: jax.vmap(partial(jax.random.fold_in, key))(branches))(keys)
            token = sample_tokens(
                sampler, adjusted.reshape(-1, adjusted.shape[2]), keys.reshape(-1)
            )
            token = token.reshape(going.shape)
            going &= plan.ok & (token >= 0)
            return (cache, adjusting, token, going), (token, going, adjusted)

        branches = jnp.arange(self.num_branches, dtype=jnp.int32)
        repeat = partial(jnp.repeat, repeats=self.num_branches, axis=0)
        extra = jax.tree.map(repeat, state.extra_of_tokens(1))
        carry = cache, adjusting, token, going
        carry, rest = jax.lax.scan(
            draft_next_tokens, carry, jnp.arange(1, self.num_draft_tokens, dtype=jnp.int32)
        )
        first_draft = token, going, jnp.repeat(first[:, None], self.num_branches, axis=1)
        tokens, valid, adjusted = jax.tree.map(
            lambda x, others: jnp.moveaxis(jnp.concatenate([x[None], others]), 0, 2),
            first_draft,
            rest,
        )
        draft = replace(self, cache=carry[0], last_draft=tokens, sequences=sequences)
        return draft, DraftTokens(tokens, valid, adjusted if sampler.is_random else None)

    def _pick_distinct_tokens(
        self, sampler: Sampler, adjusted: Float[Array, "Z V"], keys: Key[Array, " Z"]
    ) -> Int32[Array, "Z k"]:
        """Return k distinct tokens: the best tokens, or draws without replacement."""
        if adjusted.shape[1] < self.num_branches:
            raise ValueError(
                f"expected at most as many branches as the {adjusted.shape[1]} tokens of the "
                f"vocabulary, got {self.num_branches}; pass num_branches={adjusted.shape[1]} or "
                "less"
            )
        if sampler.is_random:  # the top k with Gumbel noise are k draws without replacement
            noise = jax.vmap(lambda key: jax.random.gumbel(key, adjusted.shape[1:]))(keys)
            adjusted = adjusted + noise
        return jax.lax.top_k(adjusted, self.num_branches)[1].astype(jnp.int32)

    def update(
        self,
        sequences: Int32[Array, " Z"],
        at: Int32[Array, " Z"],
        fed: Int32[Array, "Z places"],
        num_cached: Int32[Array, " Z"],
        features: PyTree = None,
    ) -> DraftModel:
        """Keep the accepted branch, and update the drafter as with a single branch."""
        table, buffers = self.cache.table, self.cache.buffers
        place = jnp.arange(1, fed.shape[1], dtype=jnp.int32)
        same = (self.last_draft == fed[:, None, 1:]) | (place[None] >= num_cached[:, None])[:, None]
        branch = jnp.argmax(jnp.all(same, axis=2), axis=1).astype(jnp.int32)
        table = token_tree.keep_branch(table, sequences, self.sequences, branch)
        kept = replace(self, cache=merge(table, buffers))
        return super(TreeDraftModel, kept).update(sequences, at, fed, num_cached, features)
