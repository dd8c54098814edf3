"""Drafter from a small head that reads features of the verifying model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxkv.api.edits import seq_rm
from jaxkv.cache import Cache
from jaxkv.core.donation import check_not_donated
from jaxkv.core.pytree import pytree_dataclass
from jaxkv.core.validate import check_count
from jaxkv.generation.model_step import Forward
from jaxkv.generation.sampler import Sampler
from jaxkv.generation.speculative.drafters import (
    DraftTokens,
    check_rollback,
    check_state_size,
)
from jaxkv.generation.speculative.model_drafter import ModelDrafter
from jaxkv.generation.state import DecodeState, last_positions
from jaxkv.kv.layer_kv import check_floats

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree


@pytree_dataclass
class HeadDrafter(ModelDrafter):
    """Drafter of `head_drafter`.

    features: Features of the last token in the main cache.
    missing: Tokens of the main cache that the cache of the head lacks; -1 for padding.
    missing_features: Features of the token before each missing token.
    has_last: Whether the cache of the head has the last sampled token.
    """

    features: Float[Array, "Z d"]
    missing: Int32[Array, "Z n"]
    missing_features: Float[Array, "Z n d"]
    has_last: Bool[Array, " Z"]

    @property
    def batch_size(self) -> int:
        """Z, the number of sequences."""
        return self.features.shape[0]

    def propose(
        self,
        sampler: Sampler,
        state: DecodeState,
        active: Bool[Array, " Z"],
        at: Int32[Array, " Z"],
    ) -> tuple[HeadDrafter, DraftTokens]:
        """Run the head token by token; the first step also computes `missing` tokens."""
        del at
        check_state_size(self, state)
        tokens = jnp.concatenate([self.missing, state.token[:, None]], axis=1)
        features = jnp.concatenate([self.missing_features, self.features[:, None]], axis=1)
        valid = jnp.concatenate([self.missing >= 0, jnp.ones_like(active)[:, None]], axis=1)
        end = last_positions(self.cache.table)[state.sequence] + 1
        end += jnp.sum(valid, axis=1, dtype=jnp.int32)
        cache, draft = self.draft_tokens(sampler, state, tokens, valid, active, features)
        has_last = active & (last_positions(cache.table)[state.sequence] >= end - 1)
        # Features of draft tokens are those of the head. `update` gets those of the model.
        cache, _ = seq_rm(cache, state.sequence, end)
        missing = jnp.where(has_last[:, None], -1, self.missing)
        return replace(self, cache=cache, missing=missing, has_last=has_last), draft

    def update(
        self,
        sequences: Int32[Array, " Z"],
        at: Int32[Array, " Z"],
        fed: Int32[Array, "Z places"],
        num_cached: Int32[Array, " Z"],
        features: PyTree = None,
    ) -> HeadDrafter:
        """Store the features of the last cached token, and the accepted tokens as missing."""
        del at
        last = last_positions(self.cache.table)[sequences]
        # The last sampled token is drafted from again if the model did not store it.
        is_undone = self.has_last & (num_cached == 0)
        cache, _ = seq_rm(self.cache, sequences, jnp.where(is_undone, last, last + 1))
        is_stored = (num_cached > 0)[:, None]
        is_missing = jnp.arange(1, fed.shape[1], dtype=jnp.int32)[None] < num_cached[:, None]
        index = jnp.maximum(num_cached - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(features, index, axis=1)[:, 0]
        return replace(
            self,
            cache=cache,
            features=jnp.where(is_stored, newest, self.features),
            missing=jnp.where(is_stored, jnp.where(is_missing, fed[:, 1:], -1), self.missing),
            missing_features=jnp.where(
                is_stored[..., None], features[:, :-1], self.missing_features
            ),
            has_last=jnp.zeros_like(self.has_last),
        )


def head_drafter(
    head: Forward,
    params: PyTree,
    cache: Cache,
    features: Float[Array, "Z d"],
    *,
    num_draft_tokens: int = 3,
) -> HeadDrafter:
    """Make a drafter from a small head over features of the model, as EAGLE and MTP.

    The model returns `step, logits, features`. The features, such as the last hidden states, are
    `[O, d]` with a row for each row of logits. The head is a model function with its own cache. For
    each token, it gets the token in `step.tokens` `[R, T]`, and the features of the token before in
    `step.extra["features"]` `[R, T, d]`. It returns `step, logits [O, V], features [O, d]`: the
    logits of the next token, and its features of the current token, from which the next draft token
    is computed. After each step of the model, the features of accepted tokens are those of the
    model (Li et al., 2024, arXiv:2401.15077).

    Args:
      head: The head, a model function `(params, step) -> step, logits [O, V], features [O, d]`.
      params: Parameters of the head, any pytree.
      cache: Cache of the head, with as many sequences as the main cache. It should contain each
        prompt without its first token, in the same sequence: `prefill` of the head with a batch
        whose `extra={"features": ...}` are the features of the token before each token. It may be
        empty, but then fewer drafts are accepted. With recurrent states, `max_rollback` must be
        at least `num_draft_tokens`.
      features: Features of each prompt's last token, in the order of the state (`speculate`) or of
        the prompts (`generate`); zeros if they are unknown. `prefill` does not return them:
        call `plan = init_batch(cache, make_batch(prompts, outputs=[True] * n))` for the n tokens of
        all prompts, then `step, logits, features = forward(params, apply(cache, ubatch))` for each
        ubatch of the plan, with `cache = step.cache`. `plan.gather_outputs` of the list of features
        of all ubatches returns one row for each token, in the order of the batch.
      num_draft_tokens: n, the maximum number of tokens of a draft, static.

    Returns:
      A drafter for `speculate` or `generate`. If the cache of the head has too few free cells,
      sequences continue without drafts. Repeat each edit of the main cache in `drafter.cache`:
      otherwise drafts are less often accepted.

    Raises:
      ValueError: If `num_draft_tokens` or Z is below 1, or `features` are not `[Z, d]`.
      ValueError: If the cache stores too few recurrent states, or was donated.
      TypeError: If `head` is not a function, or `features` are not floats.

    Examples:
      The features of a token are its logits, and the head returns them as they are:

      >>> def forward(params, step):
      ...     x = jnp.take(params, step.tokens, axis=0)[:, :, None]
      ...     step, _ = attend(step, 0, x, x, x)
      ...     logits = jnp.roll(x, 1, axis=-1).reshape(-1, 3)[step.outputs]
      ...     return step, logits, logits
      >>> def head(params, step):
      ...     x = step.extra["features"][:, :, None]
      ...     step, _ = attend(step, 0, x, x, x)
      ...     logits = jnp.roll(x, 1, axis=-1).reshape(-1, 3)[step.outputs]
      ...     return step, logits, logits
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=3)
      >>> empty, features = make_cache(spec, cells=32), jnp.eye(3)[:1]  # those of token 2
      >>> drafter = generation.head_drafter(head, None, empty, features)
      >>> options = dict(spec=spec, max_new_tokens=8, drafter=drafter)
      >>> out = generate(forward, jnp.eye(3), [[2]], **options)
      >>> out.tokens.tolist(), out.num_accepted.item()
      ([[0, 1, 2, 0, 1, 2, 0, 1]], 5)
    """
    num_draft_tokens = check_count(num_draft_tokens, "num_draft_tokens")
    if not callable(head):
        raise TypeError(f"expected a function, got {type(head)}; pass the head first")
    array = jnp.asarray(check_floats("features", features))
    if array.ndim != 2:
        raise ValueError(
            f"expected features [Z, d], got the shape {array.shape}; pass those of the last token "
            "of each prompt"
        )
    check_rollback(cache, num_draft_tokens, "the cache of the head")
    check_not_donated(cache, name="the cache of the head")
    batch_size, size = array.shape
    check_count(batch_size, "number of sequences of features")
    none = jnp.full(batch_size, -1, jnp.int32)
    return HeadDrafter(
        params=params,
        cache=cache,
        forward=head,
        num_draft_tokens=num_draft_tokens,
        features=array,
        missing=jnp.broadcast_to(none[:, None], (batch_size, num_draft_tokens)),
        missing_features=jnp.zeros((batch_size, num_draft_tokens, size), array.dtype),
        has_last=jnp.zeros(batch_size, bool),
    )
