"""Drafters: immutable pytrees that draft the next tokens of sequences for `speculate`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxkv.cache import Cache, split
from jaxkv.core.pytree import pytree_dataclass, static_field
from jaxkv.core.validate import check_count
from jaxkv.generation.padding import pad_prompts
from jaxkv.generation.sampler import Sampler
from jaxkv.generation.state import DecodeState

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree

    from jaxkv.generation.types import Prompts


class DraftTokens(NamedTuple):
    """Draft tokens of Z sequences.

    tokens: Branches may share their first tokens.
    valid: False for padding. All tokens after padding are also padding.
    adjusted: Logits of the draws; None if the tokens are not drawn at random. If branches share a
      prefix, their next tokens are drawn without replacement.
    """

    tokens: Int32[Array, "Z *k n"]
    valid: Bool[Array, "Z *k n"]
    adjusted: Float[Array, "Z *k n V"] | None


class Drafter(ABC):
    """Base class of drafters: those of `prompt_lookup`, `draft_model`, `head_drafter`, and yours.

    num_draft_tokens: n, the maximum number of tokens of a draft, static.
    num_branches: k, the number of branches of a draft, static; 1 by default.
    features: Features of the last cached token of each sequence, arrays `[Z, ...]`; else None.

    If `features` is not None, `num_branches` must be 1, and `update` gets the features of all fed
    tokens. They are the third result of the verifying model, a pytree of arrays `[O, ...]` with a
    row for each row of logits.
    """

    num_draft_tokens: int
    num_branches: int = 1
    features: PyTree = None

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Z, the number of sequences."""

    def check(self, cache: Cache) -> None:
        """Raise a ValueError if drafts for a cache are impossible; the default never raises."""
        del cache

    @abstractmethod
    def propose(
        self,
        sampler: Sampler,
        state: DecodeState,
        active: Bool[Array, " Z"],
        at: Int32[Array, " Z"],
    ) -> tuple[Self, DraftTokens]:
        """Propose tokens after the last sampled token of each sequence.

        Args:
          sampler: Sampler of both the draft model and the verifying model.
          state: State of the sequences.
          active: Which sequences get a draft.
          at: Position of the last sampled token, which is not in a cache yet.

        Returns:
          The drafter for `update`, and the `DraftTokens`: `tokens` int32 and `valid` bool, `[Z, n]`
          or `[Z, k, n]`, and `adjusted`. If draft tokens are drawn at random, `adjusted` contains
          the logits of the draws, float32 `[Z, n, V]` or `[Z, k, n, V]`; otherwise it is None.

        Raises:
          ValueError: If the state has another number of sequences than the drafter.
        """

    @abstractmethod
    def update(
        self,
        sequences: Int32[Array, " Z"],
        at: Int32[Array, " Z"],
        fed: Int32[Array, "Z places"],
        num_cached: Int32[Array, " Z"],
        features: PyTree = None,
    ) -> Self:
        """Return the drafter after a step of the target model.

        Args:
          sequences: Ids of the sequences.
          at: Position of `fed[:, 0]`.
          fed: `[Z, n + 1]`. The last sampled token, then the n draft tokens of the selected branch.
          num_cached: Number of fed tokens that are now in the cache; 0 if no token was sampled.
          features: Features of the fed tokens, arrays `[Z, n + 1, ...]`; None if the drafter has
            none. Features of tokens that are not in the cache have no meaning.
        """


@pytree_dataclass
class PromptLookup(Drafter):
    """Drafter of `prompt_lookup`; `recent` is padded in front with -1."""

    recent: Int32[Array, "Z C"]
    ngram: int = static_field()
    num_draft_tokens: int = static_field()
    num_branches: int = static_field()

    @property
    def batch_size(self) -> int:
        """Z, the number of sequences."""
        return self.recent.shape[0]

    def propose(
        self,
        sampler: Sampler,
        state: DecodeState,
        active: Bool[Array, " Z"],
        at: Int32[Array, " Z"],
    ) -> tuple[PromptLookup, DraftTokens]:
        """Draft the tokens that followed earlier occurrences of the last `ngram` tokens."""
        check_state_size(self, state)
        del sampler, at
        text = jnp.concatenate([self.recent, state.token[:, None]], axis=1)
        length, n = text.shape[1], self.ngram
        pad = jnp.pad(text, [(0, 0), (0, self.num_draft_tokens)], constant_values=-1)
        # Entry p of element i: whether token p + i is token i of the last n tokens. An occurrence
        # begins at p if this is true for all i, and token p is not padding.
        same = [text[:, i : length - n + i] == text[:, length - n + i, None] for i in range(n)]
        is_match = jnp.all(jnp.stack(same), axis=0) & (text[:, : length - n] >= 0)
        tokens, valid = [], []
        for _ in range(self.num_branches):
            number = jnp.arange(length - n, dtype=jnp.int32)[None]
            place = jnp.max(jnp.where(is_match, number, -1), axis=1)
            after = jnp.maximum(place, 0)[:, None] + n + jnp.arange(self.num_draft_tokens)[None]
            tokens.append(jnp.take_along_axis(pad, after, axis=1))
            valid.append((active & (place >= 0))[:, None] & (tokens[-1] >= 0))
            if self.num_branches > 1:  # find an occurrence with another continuation
                came = [pad[:, n + i : length + i] for i in range(self.num_draft_tokens)]
                is_match &= jnp.any(jnp.stack(came, axis=2) != tokens[-1][:, None], axis=2)
        if self.num_branches == 1:
            return self, DraftTokens(tokens[0], valid[0], None)
        return self, DraftTokens(jnp.stack(tokens, axis=1), jnp.stack(valid, axis=1), None)

    def update(
        self,
        sequences: Int32[Array, " Z"],
        at: Int32[Array, " Z"],
        fed: Int32[Array, "Z places"],
        num_cached: Int32[Array, " Z"],
        features: PyTree = None,
    ) -> PromptLookup:
        """Append the newly cached tokens to the recent tokens."""
        del sequences, at, features
        text = jnp.concatenate([self.recent, fed], axis=1)
        # Columns from `num_cached` to `num_cached + C - 1` have the last C tokens up to the last
        # cached token.
        index = jnp.arange(self.recent.shape[1])[None] + num_cached[:, None]
        return replace(self, recent=jnp.take_along_axis(text, index, axis=1))


def prompt_lookup(
    prompts: Prompts,
    *,
    ngram: int = 2,
    num_draft_tokens: int = 3,
    recent: int = 512,
    num_branches: int = 1,
) -> PromptLookup:
    """Make a drafter that copies the tokens after an earlier occurrence of the last `ngram` tokens.

    The drafter helps if outputs repeat earlier tokens, as in edits, summaries and code. If the last
    `ngram` tokens of a sequence did not occur earlier, the sequence gets no draft in that step, and
    the step generates one token.

    Args:
      prompts: Tokens of each sequence: a list of lists, or an array `[Z, n]` padded in front with
        -1.
      ngram: Number of last tokens to find earlier in the sequence, static.
      num_draft_tokens: Maximum number of tokens of a draft, static.
      recent: C, the number of recent tokens to search, static.
      num_branches: k, the maximum number of branches (distinct continuations), static.

    Returns:
      A drafter for `speculate`. The field `recent` `[Z, C]` int32 contains the last C tokens of
      each of Z sequences, padded in front with -1.

    Raises:
      ValueError: If a number argument is below 1, or `recent` is not greater than `ngram`.
      ValueError: If `prompts` are not one list of tokens for each sequence, or an array `[Z, n]`.
      ValueError: If a list has a negative token.

    Examples:
      >>> drafter = generation.prompt_lookup([[1, 2, 3, 4, 1]], recent=8)
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=4), cells=8)
      >>> state = generation.init_decode(cache, tokens=[2]).state
      >>> best = generation.make_sampler()
      >>> active, at = jnp.array([True]), jnp.array([5])
      >>> _, draft = drafter.propose(best, state, active, at)
      >>> draft.tokens.tolist(), draft.valid.tolist()
      ([[3, 4, 1]], [[True, True, True]])

    llama.cpp: `examples/prompt_lookup`.
    """
    ngram = check_count(ngram, "ngram")
    num_draft_tokens = check_count(num_draft_tokens, "num_draft_tokens")
    recent = check_count(recent, "recent")
    num_branches = check_count(num_branches, "num_branches")
    if recent <= ngram:
        raise ValueError(
            f"expected recent of more than ngram = {ngram} tokens, got {recent}; pass "
            f"recent={ngram + 1} or more"
        )
    rows = jnp.asarray(pad_prompts(prompts, recent))
    return PromptLookup(
        recent=rows, ngram=ngram, num_draft_tokens=num_draft_tokens, num_branches=num_branches
    )


def check_drafter(drafter: object) -> Drafter:
    """Return the argument if it is a drafter; otherwise raise a TypeError."""
    if not isinstance(drafter, Drafter):
        raise TypeError(
            f"expected a drafter, got {type(drafter)}; make one with "
            "generation.prompt_lookup(prompts)"
        )
    return drafter


def check_state_size(drafter: Drafter, state: DecodeState) -> None:
    """Raise a ValueError unless drafter and state have the same number of sequences."""
    batch_size = state.token.shape[0]
    if batch_size != drafter.batch_size:
        raise ValueError(
            f"expected a state of {drafter.batch_size} sequences, as of the drafter, got "
            f"{batch_size}; make a drafter for {batch_size} sequences"
        )


def check_rollback(cache: Cache, num_states: int, cache_name: str) -> None:
    """Raise a ValueError unless a cache can roll back `num_states` tokens."""
    spec = split(cache)[0].spec
    if spec.max_rollback is not None and spec.max_rollback < num_states:
        raise ValueError(
            f"expected {cache_name} to keep {num_states} earlier states or more, to roll back "
            f"rejected drafts, got {spec.kind} with max_rollback={spec.max_rollback}; make it "
            f"with max_rollback={num_states}"
        )


def reshape_features(aux: PyTree, like: PyTree, *places: int) -> PyTree:
    """Return the third result of a model, `[O, ...]`, with the axes `places` in place of O.

    `like` has the features of one token of each sequence, `[Z, ...]`. If None, the result is None.
    Raises a ValueError if `aux` has other shapes.
    """
    if like is None:
        return None
    shapes = jax.tree.map(lambda x: (math.prod(places), *x.shape[1:]), like)
    got = jax.tree.map(jnp.shape, aux)
    if got != shapes:
        raise ValueError(
            f"expected features of shape {shapes} as the third result of the model, got {got}; "
            "return step, logits, features with a row for each of step.outputs"
        )
    return jax.tree.map(
        lambda x, old: x.reshape(*places, *x.shape[1:]).astype(old.dtype), aux, like
    )
