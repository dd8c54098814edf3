"""Drafters that run a model with its own cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.api.edits import seq_rm
from jaxkv.cache import Cache
from jaxkv.core.donation import check_not_donated
from jaxkv.core.pytree import pytree_dataclass, static_field
from jaxkv.generation.model_step import Forward, run_model
from jaxkv.generation.padding import select_per_sequence
from jaxkv.generation.sampler import Sampler, adjust_logits, make_draw_keys, sample_tokens
from jaxkv.generation.speculative.drafters import (
    Drafter,
    DraftTokens,
    check_state_size,
    reshape_features,
)
from jaxkv.generation.state import DecodeState, last_positions
from jaxkv.planning.planners import plan_next

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree


@pytree_dataclass
class ModelDrafter(Drafter):
    """Base class of drafters that run a model with its own cache."""

    params: PyTree
    cache: Cache
    forward: Forward = static_field()
    num_draft_tokens: int = static_field()

    def check(self, cache: Cache) -> None:
        """Raise a ValueError if the draft cache was donated or has another number of sequences."""
        check_not_donated(self.cache, name="the draft's cache")
        expected, actual = (x.table.spec.sequences for x in (cache, self.cache))
        if expected != actual:
            raise ValueError(
                f"expected a draft whose cache has the {expected} sequences of the model's, got "
                f"one of {actual}; make its cache with sequences={expected}"
            )

    def draft_tokens(
        self,
        sampler: Sampler,
        state: DecodeState,
        tokens: Int32[Array, "Z w"],
        valid: Bool[Array, "Z w"],
        active: Bool[Array, " Z"],
        features: Float[Array, "Z w d"] | None = None,
    ) -> tuple[Cache, DraftTokens]:
        """Run the draft model on w tokens, then on each token that it drafted except the last.

        With `features`, the model gets features of the token before each token. After the first
        step, they are the third result of the model.
        """

        def step(
            carry: tuple,
            tokens: jax.Array,
            valid: jax.Array,
            features: jax.Array | None,
            i: jax.Array,
        ) -> tuple:
            cache, adjusting, _, going, _ = carry
            extra = state.extra_of_tokens(tokens.shape[1])
            if features is not None:
                extra = {**(extra or {}), "features": features}
            plan = plan_next(cache.table, tokens, state.sequence, valid & going[:, None], extra)
            ubatch = plan.ubatches[0]
            cache, logits, aux = run_model(self.forward, self.params, cache, ubatch)
            logits = logits.reshape(*tokens.shape, -1)[:, -1].astype(jnp.float32)
            if features is not None:
                features = reshape_features(aux, features[:, 0], *tokens.shape)[:, -1]
            adjusted = adjust_logits(sampler, logits, adjusting)
            token = sample_tokens(
                sampler, adjusted, make_draw_keys(state.key, state.draw_index + i, 2)
            )
            going &= plan.ok & (token >= 0)
            adjusting = select_per_sequence(going, sampler.update(adjusting, token), adjusting)
            return (cache, adjusting, token, going, features), (token, going, adjusted)

        carry = self.cache, state.sampler_state, state.token, active, None
        carry, first = step(carry, tokens, valid, features, jnp.int32(0))

        def draft_next_token(carry: tuple, i: jax.Array) -> tuple:
            token, features = jax.tree.map(lambda x: x[:, None], (carry[2], carry[4]))
            return step(carry, token, jnp.ones_like(active)[:, None], features, i)

        carry, rest = jax.lax.scan(
            draft_next_token, carry, jnp.arange(1, self.num_draft_tokens, dtype=jnp.int32)
        )
        made = jax.tree.map(
            lambda x, others: jnp.moveaxis(jnp.concatenate([x[None], others]), 0, 1),
            first,
            rest,
        )
        adjusted = made[2] if sampler.is_random else None
        return carry[0], DraftTokens(made[0], made[1], adjusted)


@pytree_dataclass
class DraftModel(ModelDrafter):
    """Drafter of `draft_model` with one branch.

    unfed: If the draft cache lacks exactly one token of the main cache, this token; otherwise -1.
    """

    unfed: Int32[Array, " Z"]

    @property
    def batch_size(self) -> int:
        """Z, the number of sequences."""
        return self.unfed.shape[0]

    def propose(
        self,
        sampler: Sampler,
        state: DecodeState,
        active: Bool[Array, " Z"],
        at: Int32[Array, " Z"],
    ) -> tuple[DraftModel, DraftTokens]:
        """Run the draft model token by token; the first step also computes `unfed` tokens."""
        check_state_size(self, state)
        last = last_positions(self.cache.table)[state.sequence]
        active = active & (last + 1 + (self.unfed >= 0) == at)
        tokens = jnp.stack([self.unfed, state.token], axis=1)
        valid = jnp.stack([self.unfed >= 0, jnp.ones_like(active)], axis=1)
        cache, draft = self.draft_tokens(sampler, state, tokens, valid, active)
        return replace(self, cache=cache), draft

    def update(
        self,
        sequences: Int32[Array, " Z"],
        at: Int32[Array, " Z"],
        fed: Int32[Array, "Z places"],
        num_cached: Int32[Array, " Z"],
        features: PyTree = None,
    ) -> DraftModel:
        """Remove rejected tokens; set `unfed` if the draft cache lacks exactly one token."""
        del features
        cache, _ = seq_rm(self.cache, sequences, at + num_cached)
        num_missing = at + num_cached - 1 - last_positions(cache.table)[sequences]
        last = jnp.take_along_axis(fed, jnp.maximum(num_cached - 1, 0)[:, None], axis=1)[:, 0]
        unfed = jnp.where(num_cached > 0, last, self.unfed)
        return replace(self, cache=cache, unfed=jnp.where(num_missing == 1, unfed, -1))
