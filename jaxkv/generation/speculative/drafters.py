"""Drafts: cheap guesses at what a model will say next, for `speculate` to check several at once.

A draft is a pytree: what it knows of the texts, and perhaps a cache of its own. It is a value;
each turn gives the next one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxkv.api.edits import seq_rm
from jaxkv.cache import Cache, split
from jaxkv.core.donation import check_not_donated
from jaxkv.core.validate import check_count
from jaxkv.generation.model_step import Forward, model_step
from jaxkv.generation.padding import pad_prompts, select_per_text
from jaxkv.generation.sampler import Sampler, adjust_logits, make_draw_keys, sample_tokens
from jaxkv.generation.state import DecodeState, last_positions
from jaxkv.planning.planners import plan_next

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree

    from jaxkv.generation.types import Prompts


class DraftTokens(NamedTuple):
    """What may come next, for T texts.

    tokens: `[T, n]`; or `[T, k, n]`, k branches, which may begin alike.
    valid: the tokens that are guessed; where one is not, none after it is.
    adjusted: float32, the logits that the tokens were drawn from, as a sampler left them, those of
      branches that begin alike without replacement, the first one first; None where nothing was
      drawn, and a place offers these tokens and no other.
    """

    tokens: Int32[Array, "T *k n"]
    valid: Bool[Array, "T *k n"]
    adjusted: Float[Array, "T *k n V"] | None


class Drafter(ABC):
    """Guesses tokens; `prompt_lookup` and `draft_model` make two kinds, and subclasses are others.

    num_draft_tokens: n, the most tokens of a guess, static.
    num_branches: k, how many ways each guess offers to go on, static; by default 1.
    """

    num_draft_tokens: int
    num_branches: int = 1

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """T, how many texts it guesses for."""

    def check(self, cache: Cache) -> None:
        """Raise a ValueError unless it can guess for texts of a cache; by default it can."""
        del cache

    @abstractmethod
    def propose(
        self,
        sampler: Sampler,
        state: DecodeState,
        active: Bool[Array, " T"],
        at: Int32[Array, " T"],
    ) -> tuple[Self, DraftTokens]:
        """Guess what comes after the last token of each text.

        Args:
          sampler: what adjusts logits; so that a model guesses by the same rules.
          state: how far the texts have come.
          active: the texts to guess for.
          at: the position of each text's last token, which is in no cache yet.
        """

    @abstractmethod
    def update(
        self,
        sequences: Int32[Array, " T"],
        at: Int32[Array, " T"],
        fed: Int32[Array, "T places"],
        num_cached: Int32[Array, " T"],
    ) -> Self:
        """Take in what came of a guess.

        Args:
          sequences: of the texts.
          at: the position of `fed[:, 0]`.
          fed: the last token of each text and the n of the guess after it; of several branches the
            one that was kept.
          num_cached: how many of them are in the cache of the text now, 0 for a text that ended.
        """


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class PromptLookup(Drafter):
    """What `prompt_lookup` makes. What its methods are given has the shapes that `Drafter` says.

    recent: the last C tokens of each text, as far as they are in its cache; the newest last, -1
      where there were fewer.
    ngram: how many tokens must occur again, static.
    num_draft_tokens: see `Drafter`, static.
    num_branches: see `Drafter`, static.
    """

    recent: Int32[Array, "T C"]
    ngram: int = field(metadata={"static": True})
    num_draft_tokens: int = field(metadata={"static": True})
    num_branches: int = field(metadata={"static": True})

    @property
    def batch_size(self) -> int:
        """T, how many texts it guesses for."""
        return self.recent.shape[0]

    def propose(
        self,
        sampler: Sampler,
        state: DecodeState,
        active: Bool[Array, " T"],
        at: Int32[Array, " T"],
    ) -> tuple[PromptLookup, DraftTokens]:
        """Guess that what came after the same tokens before comes again, the last times first."""
        del sampler, at
        text = jnp.concatenate([self.recent, state.token[:, None]], axis=1)
        length, n = text.shape[1], self.ngram
        pad = jnp.pad(text, [(0, 0), (0, self.num_draft_tokens)], constant_values=-1)
        # A place where the last n tokens occur: all of them are there, and one comes after them.
        same = [text[:, i : length - n + i] == text[:, length - n + i, None] for i in range(n)]
        found = jnp.all(jnp.stack(same), axis=0) & (text[:, : length - n] >= 0)
        tokens, valid = [], []
        for _ in range(self.num_branches):
            number = jnp.arange(length - n, dtype=jnp.int32)[None]
            place = jnp.max(jnp.where(found, number, -1), axis=1)
            after = jnp.maximum(place, 0)[:, None] + n + jnp.arange(self.num_draft_tokens)[None]
            tokens.append(jnp.take_along_axis(pad, after, axis=1))
            valid.append((active & (place >= 0))[:, None] & (tokens[-1] >= 0))
            if self.num_branches > 1:  # the next one is a place where something else came
                came = [pad[:, n + i : length + i] for i in range(self.num_draft_tokens)]
                found &= jnp.any(jnp.stack(came, axis=2) != tokens[-1][:, None], axis=2)
        if self.num_branches == 1:
            return self, DraftTokens(tokens[0], valid[0], None)
        return self, DraftTokens(jnp.stack(tokens, axis=1), jnp.stack(valid, axis=1), None)

    def update(
        self,
        sequences: Int32[Array, " T"],
        at: Int32[Array, " T"],
        fed: Int32[Array, "T places"],
        num_cached: Int32[Array, " T"],
    ) -> PromptLookup:
        """Append what is in the cache now."""
        del sequences, at
        text = jnp.concatenate([self.recent, fed], axis=1)
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
    """Guess by looking up where the last tokens of a text occurred before.

    It costs next to nothing and helps where texts repeat themselves or their prompts: edits,
    summaries, code. Where nothing is found, nothing is guessed, and the step is one token wide.

    Args:
      prompts: for each text, in an array or a list of lists, its tokens so far.
      ngram: how many tokens must occur again, static.
      num_draft_tokens: the most tokens of a guess, static.
      recent: C, how many of the last tokens are looked through, static.
      num_branches: in how many ways a guess may go on, static: what came the last time, and the
        last times before when something else came.

    Returns:
      The draft, for `speculate`.

    Raises:
      ValueError: when a number is below 1, or `recent` is no more than `ngram`.

    Examples:
      >>> draft = generation.prompt_lookup([[1, 2, 3, 4, 1]], recent=8)
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=4), cells=8)
      >>> state = generation.init_decode(cache, tokens=[2]).state
      >>> best = generation.make_sampler()
      >>> _, guess = draft.propose(best, state, jnp.array([True]), jnp.array([5]))
      >>> guess.tokens.tolist(), guess.valid.tolist()
      ([[3, 4, 1]], [[True, True, True]])

      Two branches, since 1, 2 went on in two ways:

      >>> draft = generation.prompt_lookup(
      ...     [[1, 2, 3, 1, 2, 4, 1]], num_draft_tokens=2, recent=8, num_branches=2
      ... )
      >>> draft.propose(best, state, jnp.array([True]), jnp.array([7]))[1].tokens.tolist()
      [[[4, 1], [3, 1]]]

    llama.cpp: `examples/prompt_lookup`.
    """
    ngram, num_draft_tokens, recent = (
        check_count(ngram, "ngram"),
        check_count(num_draft_tokens, "num_draft_tokens"),
        check_count(recent, "recent"),
    )
    num_branches = check_count(num_branches, "num_branches")
    if recent <= ngram:
        raise ValueError(f"expected recent of more than ngram = {ngram} tokens, got {recent}")
    rows = jnp.asarray(pad_prompts(prompts, recent))
    return PromptLookup(
        recent=rows, ngram=ngram, num_draft_tokens=num_draft_tokens, num_branches=num_branches
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class DraftModel(Drafter):
    """What `draft_model` makes. What its methods are given has the shapes that `Drafter` says.

    params: of the model.
    cache: its own, in which the texts have the sequences that they have in the other one.
    unfed: the one token that the cache still lacks of what the other one holds, -1 where it lacks
      none, or more.
    forward: the model, static.
    num_draft_tokens: see `Drafter`, static.
    """

    params: PyTree
    cache: Cache
    unfed: Int32[Array, " T"]
    forward: Forward = field(metadata={"static": True})
    num_draft_tokens: int = field(metadata={"static": True})

    @property
    def batch_size(self) -> int:
        """T, as it was made for."""
        return self.unfed.shape[0]

    def check(self, cache: Cache) -> None:
        """Raise a ValueError unless its cache is there and has the sequences of the other one."""
        check_not_donated(self.cache, name="the draft's cache")
        expected, actual = (x.table.spec.sequences for x in (cache, self.cache))
        if expected != actual:
            raise ValueError(
                f"expected a draft whose cache has the {expected} sequences of the model's, got "
                f"one of {actual}"
            )

    def propose(
        self,
        sampler: Sampler,
        state: DecodeState,
        active: Bool[Array, " T"],
        at: Int32[Array, " T"],
    ) -> tuple[DraftModel, DraftTokens]:
        """Run the model, one token after another; the first step catches up with what it lacks.

        A text that its cache does not hold as far as the other one is not guessed for.
        """
        last = last_positions(self.cache.table)[state.sequence]
        active = active & (last + 1 + (self.unfed >= 0) == at)
        tokens = jnp.stack([self.unfed, state.token], axis=1)
        valid = active[:, None] & jnp.stack([self.unfed >= 0, jnp.ones_like(active)], axis=1)
        carry = self.cache, state.sampler_state, state.token, active

        def step(carry: tuple, tokens: jax.Array, valid: jax.Array, i: jax.Array) -> tuple:
            cache, adjusting, _, going = carry
            plan = plan_next(cache.table, tokens, state.sequence, valid & going[:, None])
            cache, logits = model_step(self.forward, self.params, cache, plan.ubatches[0])
            logits = logits.reshape(*tokens.shape, -1)[:, -1].astype(jnp.float32)
            adjusted = adjust_logits(sampler, logits, adjusting)
            token = sample_tokens(
                sampler, adjusted, make_draw_keys(state.key, state.draw_index + i, 2)
            )
            going &= plan.ok & (token >= 0)
            adjusting = select_per_text(going, sampler.update(adjusting, token), adjusting)
            return (cache, adjusting, token, going), (token, going, adjusted)

        carry, first = step(carry, tokens, valid, jnp.int32(0))

        def draft_next_token(carry: tuple, i: jax.Array) -> tuple:
            return step(carry, carry[2][:, None], jnp.ones_like(active)[:, None], i)

        carry, rest = jax.lax.scan(
            draft_next_token, carry, jnp.arange(1, self.num_draft_tokens, dtype=jnp.int32)
        )
        made = jax.tree.map(
            lambda x, others: jnp.moveaxis(jnp.concatenate([x[None], others]), 0, 1),
            first,
            rest,
        )
        adjusted = made[2] if sampler.is_random else None
        return replace(self, cache=carry[0]), DraftTokens(made[0], made[1], adjusted)

    def update(
        self,
        sequences: Int32[Array, " T"],
        at: Int32[Array, " T"],
        fed: Int32[Array, "T places"],
        num_cached: Int32[Array, " T"],
    ) -> DraftModel:
        """Remove rejected tokens. If all were accepted, the last one is not in its cache yet."""
        cache, _ = seq_rm(self.cache, sequences, at + num_cached)
        num_missing = at + num_cached - 1 - last_positions(cache.table)[sequences]
        last = jnp.take_along_axis(fed, jnp.maximum(num_cached - 1, 0)[:, None], axis=1)[:, 0]
        unfed = jnp.where(num_cached > 0, last, self.unfed)
        return replace(self, cache=cache, unfed=jnp.where(num_missing == 1, unfed, -1))


def check_rollback(cache: Cache, num_states: int, cache_name: str) -> None:
    """Raise a ValueError unless so many tokens can be taken back in every part of a cache."""
    spec = split(cache)[0].spec
    if spec.max_rollback is not None and spec.max_rollback < num_states:
        raise ValueError(
            f"expected {cache_name} to keep {num_states} earlier states or more, to take back what "
            f"was guessed wrong, got {spec.kind} with max_rollback={spec.max_rollback}: make it "
            f"with max_rollback={num_states}"
        )
