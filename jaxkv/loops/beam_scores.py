"""Which texts a beam search goes on with, and when it ends: of scores alone, without a cache.

In this file W is the width of a search, the number of its beams, and n the most tokens of a text.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.loops.drawing import are_broken
from jaxkv.plan import Reason


class Texts(NamedTuple):
    """W texts: their tokens, scores and lengths as in `BeamResult`."""

    tokens: jax.Array  # [W, n]
    scores: jax.Array  # [W]
    lengths: jax.Array  # [W]


class Search(NamedTuple):
    """How far a search has come.

    living: the texts that go on, all of one length, in the order of their scores.
    ended: the best of those that ended, in the order of their ranks.
    length: `[]` int32, of a text that goes on.
    reason: `[]` int32, see `BeamResult`.
    """

    living: Texts
    ended: Texts
    length: jax.Array
    reason: jax.Array


def begun(num_beams: int, num_tokens: int) -> Search:
    """Return a search that has one text, of no tokens."""
    none = Texts(
        tokens=jnp.full((num_beams, num_tokens), -1, jnp.int32),
        scores=jnp.full(num_beams, -jnp.inf, jnp.float32),
        lengths=jnp.zeros(num_beams, jnp.int32),
    )
    living = none._replace(scores=none.scores.at[0].set(0))
    return Search(living, none, jnp.int32(0), jnp.int32(Reason.OK))


def exist(texts: Texts) -> jax.Array:
    """Return which texts exist, `[W]` bool."""
    return texts.scores != -jnp.inf


def _ranks(texts: Texts, length_penalty: jax.Array) -> jax.Array:
    """Return what texts are ranked by, `[W]` float32."""
    return texts.scores / jnp.maximum(texts.lengths, 1).astype(jnp.float32) ** length_penalty


def best(first: Texts, second: Texts, length_penalty: jax.Array) -> Texts:
    """Return the W best of 2 * W texts by rank; among equals the first. The penalty is `[]`."""
    both = jax.tree.map(lambda *parts: jnp.concatenate(parts), first, second)
    _, index = jax.lax.top_k(_ranks(both, length_penalty), first.scores.size)
    return jax.tree.map(lambda x: x[index], both)


def goes_on(search: Search, length_penalty: jax.Array) -> jax.Array:
    """Return whether a text that goes on may still be among the best; `[]` bool.

    No score rises. Its rank is highest at the greatest length, or, with a penalty below 0, now.
    """
    living, steps = search.living, search.living.tokens.shape[1]
    length = jnp.where(length_penalty >= 0, steps, search.length)
    reach = _ranks(living._replace(lengths=jnp.full_like(living.lengths, length)), length_penalty)
    beaten = reach <= jnp.min(_ranks(search.ended, length_penalty))
    more = (search.length < steps) & (search.reason == Reason.OK)
    return more & jnp.any(exist(living) & ~beaten)


def choose(
    search: Search, logits: jax.Array, stop_tokens: jax.Array, length_penalty: jax.Array
) -> tuple[jax.Array, Search]:
    """Continue the living texts by one token, with the logits of each, `[W, V]`.

    Returns:
      `[W]` int32, for each text that lives now the one that it continues; and the search. Where
      the logits of a living text are broken, the search is as it was, with that as its reason.
    """
    living, width = search.living, search.living.scores.size
    logits = logits.astype(jnp.float32)
    broken = jnp.any(exist(living) & are_broken(logits))
    logprobs = jax.nn.log_softmax(logits)
    # If no token is allowed, log_softmax is NaN; -inf ends the text.
    logprobs = jnp.where(exist(living)[:, None] & (logits > -jnp.inf), logprobs, -jnp.inf)
    scores = living.scores[:, None] + logprobs
    # Of one text no more than these can be wanted: W that go on, and those that end.
    size = min(width + stop_tokens.size, scores.shape[1])
    scores, token = (x.reshape(-1) for x in jax.lax.top_k(scores, size))
    ended = jnp.any(token[:, None] == stop_tokens[None], axis=1)

    def grown(order: jax.Array, scores: jax.Array) -> tuple[jax.Array, Texts]:
        index = jax.lax.top_k(order, width)[1]
        scores, there = scores[index], scores[index] != -jnp.inf
        # An empty beam keeps its own sequence as parent, so nothing is copied.
        parents = jnp.where(there, index // size, jnp.arange(width)).astype(jnp.int32)
        new = jnp.where(there, token[index], -1)
        tokens = living.tokens[parents].at[:, search.length].set(new)
        return parents, Texts(tokens, scores, jnp.where(there, search.length + 1, 0))

    going = jnp.where(ended, -jnp.inf, scores)
    parents, living_now = grown(going, going)
    _, ended_now = grown(scores, jnp.where(ended, scores, -jnp.inf))
    kept = best(search.ended, ended_now, length_penalty)
    grown_search = Search(living_now, kept, search.length + 1, search.reason)
    reason = jnp.int32(Reason.NONFINITE_LOGITS)
    return jax.tree.map(
        partial(jnp.where, broken),
        (jnp.arange(width, dtype=jnp.int32), search._replace(reason=reason)),
        (parents, grown_search),
    )
