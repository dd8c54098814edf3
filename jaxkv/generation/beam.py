"""Beam search on the device, with k beams and hypotheses of at most n tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.api.edits import seq_rm, seq_select
from jaxkv.batch import check_extra
from jaxkv.cache import Cache, split
from jaxkv.core.array_utils import is_concrete, is_traced
from jaxkv.core.validate import check_count, check_int32
from jaxkv.generation.model_program import ModelProgram
from jaxkv.generation.model_step import Forward, model_step
from jaxkv.generation.padding import stop_tokens_as_list
from jaxkv.generation.results import BeamResult
from jaxkv.generation.sample_step import check_prompts_present
from jaxkv.generation.sampler import has_invalid_logits
from jaxkv.generation.state import last_positions
from jaxkv.jit_helpers import replicate
from jaxkv.plan import Reason
from jaxkv.planning.planners import plan_next
from jaxkv.spec import TableSpec, are_in_same_streams, check_distinct

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Num, PyTree, Shaped

    from jaxkv.core.types import Ids
    from jaxkv.generation.types import StopTokens


class Hypotheses(NamedTuple):
    """Tokens, scores and lengths of k hypotheses, as in `BeamResult`."""

    tokens: Int32[Array, "k n"]
    scores: Float[Array, " k"]
    lengths: Int32[Array, " k"]


class BeamState(NamedTuple):
    """State of a beam search, with unfinished (`living`) and finished (`ended`) hypotheses."""

    living: Hypotheses
    ended: Hypotheses
    length: Int32[Array, ""]
    reason: Int32[Array, ""]


def init_beam_state(num_beams: int, num_tokens: int) -> BeamState:
    """Return the initial state of a beam search, with one empty hypothesis."""
    none = Hypotheses(
        tokens=jnp.full((num_beams, num_tokens), -1, jnp.int32),
        scores=jnp.full(num_beams, -jnp.inf, jnp.float32),
        lengths=jnp.zeros(num_beams, jnp.int32),
    )
    # The first step extends only this hypothesis; k equal ones would give k equal extensions.
    living = none._replace(scores=none.scores.at[0].set(0))
    return BeamState(living, none, jnp.int32(0), jnp.int32(Reason.OK))


def is_filled(hypotheses: Hypotheses) -> Bool[Array, " k"]:
    """Return which of the k entries of `hypotheses` contain a hypothesis."""
    return hypotheses.scores != -jnp.inf


def _normalised_scores(
    hypotheses: Hypotheses, length_penalty: Float[Array, ""]
) -> Float[Array, " k"]:
    return (
        hypotheses.scores / jnp.maximum(hypotheses.lengths, 1).astype(jnp.float32) ** length_penalty
    )


def select_best(
    first: Hypotheses, second: Hypotheses, length_penalty: Float[Array, ""]
) -> Hypotheses:
    """Return the k hypotheses with the highest normalised scores, from 2 * k hypotheses."""
    both = jax.tree.map(lambda *parts: jnp.concatenate(parts), first, second)
    _, index = jax.lax.top_k(_normalised_scores(both, length_penalty), first.scores.size)
    return jax.tree.map(lambda x: x[index], both)


def can_improve(search: BeamState, length_penalty: Float[Array, ""]) -> Bool[Array, ""]:
    """Return whether an unfinished hypothesis can still become one of the k best."""
    # Scores never increase, so the present score at the most favourable length is an upper bound.
    living, steps = search.living, search.living.tokens.shape[1]
    length = jnp.where(length_penalty >= 0, steps, search.length)
    reach = _normalised_scores(
        living._replace(lengths=jnp.full_like(living.lengths, length)), length_penalty
    )
    beaten = reach <= jnp.min(_normalised_scores(search.ended, length_penalty))
    more = (search.length < steps) & (search.reason == Reason.OK)
    return more & jnp.any(is_filled(living) & ~beaten)


def advance_search(
    search: BeamState,
    logits: Float[Array, "k V"],
    stop_tokens: Int32[Array | np.ndarray, " n"],
    length_penalty: Float[Array, ""],
) -> tuple[Int32[Array, " k"], BeamState]:
    """Extend each beam by one token; return the parent of each new beam, and the new state."""
    living, width = search.living, search.living.scores.size
    logits = logits.astype(jnp.float32)
    broken = jnp.any(is_filled(living) & has_invalid_logits(logits))
    logprobs = jax.nn.log_softmax(logits)
    # If no token is allowed, log_softmax is NaN; -inf ends the hypothesis.
    logprobs = jnp.where(is_filled(living)[:, None] & (logits > -jnp.inf), logprobs, -jnp.inf)
    scores = living.scores[:, None] + logprobs
    # At most k extensions of a hypothesis are selected, in addition to those with stop tokens.
    size = min(width + stop_tokens.size, scores.shape[1])
    # Entry i of the flat arrays extends beam i // size.
    scores, token = (x.reshape(-1) for x in jax.lax.top_k(scores, size))
    ended = jnp.any(token[:, None] == stop_tokens[None], axis=1)

    def extend_beams(order: jax.Array, scores: jax.Array) -> tuple[jax.Array, Hypotheses]:
        index = jax.lax.top_k(order, width)[1]
        scores, is_living = scores[index], scores[index] != -jnp.inf
        # An empty beam has its own sequence as parent, so that no cell is copied.
        parents = jnp.where(is_living, index // size, jnp.arange(width)).astype(jnp.int32)
        new = jnp.where(is_living, token[index], -1)
        tokens = living.tokens[parents].at[:, search.length].set(new)
        return parents, Hypotheses(tokens, scores, jnp.where(is_living, search.length + 1, 0))

    going = jnp.where(ended, -jnp.inf, scores)
    parents, living_now = extend_beams(going, going)
    # The order is by all scores, so a finished hypothesis is kept only if it is among the k best
    # extensions.
    _, ended_now = extend_beams(scores, jnp.where(ended, scores, -jnp.inf))
    kept = select_best(search.ended, ended_now, length_penalty)
    grown_search = BeamState(living_now, kept, search.length + 1, search.reason)
    reason = jnp.int32(Reason.NONFINITE_LOGITS)
    return jax.tree.map(
        partial(jnp.where, broken),
        (jnp.arange(width, dtype=jnp.int32), search._replace(reason=reason)),
        (parents, grown_search),
    )


def beam(
    forward: Forward,
    params: PyTree,
    cache: Cache,
    logits: Float[ArrayLike, " V"] | Float[ArrayLike, "1 V"],
    *,
    num_beams: int,
    num_tokens: int,
    stop_tokens: StopTokens = (),
    sequences: Ids | None = None,
    length_penalty: Num[ArrayLike, ""] = 1.0,
    extra: Mapping[str, PyTree] | None = None,
    donate: bool = False,
) -> BeamResult:
    """Search for the k most probable hypotheses of at most n tokens after a prompt.

    The score of a hypothesis is the log-probability of its tokens, and the normalised score is
    `score / length ** length_penalty`. Each step extends each beam by each token of the vocabulary,
    except tokens with a logit of -inf:

    - The k best extensions without a stop token are the next beams.
    - An extension with a stop token is a finished hypothesis if it is among the k best of all
      extensions; otherwise it is discarded.

    The result has the k hypotheses with the highest normalised scores, from all finished hypotheses
    and the beams of the last step.

    The search ends after n tokens, or when no further token of a beam can change the result. The
    search also ends if a plan is refused (for example, because no cell is free), or if a logit is
    NaN or +inf; the field `reason` of the result contains the cause.

    Args:
      forward: Model function `(params, step) -> step, logits [O, V]`, see `prefill`.
      params: Model parameters, any pytree.
      cache: A cache in which the first beam sequence contains the prompt.
      logits: Logits of the last token of the prompt.
      num_beams: k, the number of beams, static.
      num_tokens: n, the maximum number of tokens of a hypothesis, static.
      stop_tokens: A list or set of tokens that end a hypothesis; -1 is padding.
      sequences: `[k]`. Sequence ids of the beams, 0 to k - 1 by default. If 1 < S < Q, all ids must
        be in one stream. When the search starts, forks of the first beam sequence replace the
        other beam sequences.
      length_penalty: Exponent of the length in the normalised score. 0 ignores the length, and
        higher values prefer longer hypotheses.
      extra: Additional model inputs of each token of a hypothesis, by name, without an axis of
        tokens, see `make_batch`.
      donate: If True, reuse the buffers of the input cache, which becomes invalid; see `prefill`.

    Returns:
      A `BeamResult` with the best hypothesis first. Its fields are `cache` and these arrays:

      - `tokens` `[k, n]` int32: the tokens of each hypothesis, with -1 after the end.
      - `scores` `[k]` float32: the score of each hypothesis, not normalised. If the search found
        fewer than k hypotheses, the last entries are -inf. At these indices, `tokens` is -1, and
        `lengths` and `num_cached` are 0.
      - `lengths` `[k]` int32: the number of tokens of each hypothesis, including a stop token.
      - `num_cached` `[k]` int32: the number of tokens of each hypothesis that are in the cache.
      - `reason` `[]` int32: a `Reason`, such as OUT_OF_CELLS, or OK.

      Beam sequence i contains the prompt and the first `num_cached[i]` tokens of hypothesis i. If
      hypothesis i is finished, these tokens are the longest prefix that it shares with the cached
      tokens of a beam of the last step. To continue hypothesis i, compute its tokens from
      `num_cached[i]` on.

      If the tokens after this prefix cannot be removed from beam sequence i, the sequence is empty
      and `num_cached[i]` is -1. This happens if no recurrent state is stored at the end of the
      prefix, or if the next token would attend to evicted cells.

    Raises:
      ValueError: If logits are not floats `[V]` or `[1, V]`, or stop tokens are not one list.
      ValueError: If the logits have another vocabulary size than the logits of `forward`.
      ValueError: If `length_penalty` is not one number, or is concrete and not finite.
      ValueError: If the number of ids is not k, or a concrete id is repeated or not in the cache.
      ValueError: If 1 < S < Q, and the ids are traced or in several streams.
      ValueError: If `num_beams` or `num_tokens` is below 1, or Q is below `num_beams`.
      ValueError: If k * min(k + number of stop tokens, V) is 2**31 or more.
      ValueError: Outside of `jit`, if the first beam sequence is empty or the cache was donated.
      ValueError: If the model function returns wrong results, see `generation.model_step`.

    Examples:
      The model predicts t + 1 after token t, or less probably t + 2. Token 3 is the stop token:

      >>> def forward(params, step):
      ...     x = jnp.take(params, step.tokens, axis=0)[:, :, None]
      ...     step, _ = attend(step, 0, x, x, x)
      ...     says = 2 * jnp.roll(x, 1, axis=-1) + jnp.roll(x, 2, axis=-1)
      ...     return step, says.reshape(-1, 4)[step.outputs]
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=4)
      >>> cache = make_cache(spec, cells=8, sequences=2)
      >>> cache, logits, *_ = prefill(forward, jnp.eye(4), cache, make_batch([0]))
      >>> options = dict(num_beams=2, num_tokens=3, stop_tokens=[3], length_penalty=0.0)
      >>> beams = beam(forward, jnp.eye(4), cache, logits, **options)
      >>> beams.tokens.tolist(), beams.lengths.tolist()
      ([[1, 2, 3], [1, 3, -1]], [3, 2])
      >>> beams.num_cached.tolist(), beams.cache.seq_pos_max([0, 1]).tolist()
      ([2, 1], [2, 1])

    Hugging Face: `generate` with `num_beams`, `length_penalty` and `early_stopping="never"`; its
    `sequences_scores` are the normalised scores. llama.cpp: the removed `llama_beam_search`.
    """
    num_beams = check_count(num_beams, "num_beams")
    num_tokens = check_count(num_tokens, "num_tokens")
    row = _logits_as_row(logits)
    ending = check_int32(stop_tokens_as_list(stop_tokens), "stop_tokens")
    if np.ndim(ending) != 1:
        raise ValueError(
            f"expected stop tokens [n], got the shape {np.shape(ending)}; pass a flat list"
        )
    ids = _check_sequences(split(cache)[0].spec, sequences, num_beams)
    extensions = num_beams * min(num_beams + np.size(ending), row.shape[1])
    if extensions >= 2**31:
        raise ValueError(
            f"expected fewer than 2**31 extensions of all beams, got {extensions}; pass a smaller "
            "num_beams"
        )
    inputs = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (num_beams, *x.shape)), check_extra(extra, ()) or None
    )
    args = row, ending, ids, _check_length_penalty(length_penalty), inputs
    if not is_traced(params, cache, args):
        check_prompts_present(cache.seq_pos_max(ids[:1]), ids[:1], np.ones(1, bool))
    options = {"donate": donate, "num_tokens": num_tokens}
    return BeamResult(*_SEARCH(forward, params, cache, *args, **options))


def _logits_as_row(logits: Float[ArrayLike, " V"] | Float[ArrayLike, "1 V"]) -> Float[Array, "1 V"]:
    shape = np.shape(logits)
    if len(shape) not in (1, 2) or shape[:-1] not in ((), (1,)) or not shape[-1]:
        raise ValueError(
            f"expected logits [V] or [1, V], those of one token, got {list(shape)}; pass the "
            "logits of one prompt"
        )
    array = jnp.asarray(logits)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"expected logits of floats, got {array.dtype}; cast them")
    return array.reshape(1, -1)


def _check_length_penalty(length_penalty: Num[ArrayLike, ""]) -> Float[Array, ""]:
    is_known = is_concrete(length_penalty)
    array = np.asarray(length_penalty) if is_known else jnp.asarray(length_penalty)
    if not (jnp.issubdtype(array.dtype, jnp.number) and jnp.isrealobj(array)):
        raise TypeError(
            f"expected a number for length_penalty, got {length_penalty!r}; pass a float"
        )
    if array.ndim or (is_known and not np.isfinite(array)):
        raise ValueError(
            f"expected one finite number for length_penalty, got {length_penalty}; pass a float"
        )
    return jnp.asarray(length_penalty, jnp.float32)


def _check_sequences(
    spec: TableSpec, sequences: Ids | None, num_beams: int
) -> Int32[Array | np.ndarray, " {num_beams}"]:
    if num_beams > spec.sequences:
        raise ValueError(
            f"expected num_beams of at most {spec.sequences}, a sequence for each beam, "
            f"got {num_beams}; make the cache with sequences={num_beams}"
        )
    ids = np.arange(num_beams, dtype=np.int32) if sequences is None else sequences
    ids = spec.sequence_ids(ids)
    if np.shape(ids) != (num_beams,):
        raise ValueError(
            f"expected sequences [{num_beams}], one for each beam, got {np.shape(ids)}; pass "
            f"{num_beams} ids"
        )
    check_distinct(ids)
    if spec.has_shared_streams and not are_in_same_streams(spec, ids[:1], ids):
        shown_ids = np.asarray(ids).tolist() if is_concrete(ids) else "traced ones"
        raise ValueError(
            f"expected sequences of one stream of {spec.sequences_per_stream} for the beams, "
            f"since another may lack the cells for a copy, got {shown_ids}; pass sequences="
        )
    return ids


def _run_search(
    forward: Forward,
    params: PyTree,
    cache: Cache,
    logits: Float[Array, "1 V"],
    stop_tokens: Int32[Array | np.ndarray, " n"],
    sequences: Int32[Array | np.ndarray, " k"],
    length_penalty: Float[Array, ""],
    extra: dict[str, Shaped[Array, "k ..."]] | None,
    *,
    num_tokens: int,
) -> tuple:
    """Return the fields of `BeamResult`."""
    sequences = jnp.asarray(sequences)
    vocabulary = logits.shape[1]
    begins = last_positions(cache.table)[sequences[0]] + 1
    rows = jnp.arange(sequences.size, dtype=jnp.int32)
    cache, _ = seq_select(cache, sequences[jnp.zeros_like(rows)], sequences)

    def body(carry: tuple[Cache, BeamState]) -> tuple[Cache, BeamState]:
        cache, search = carry
        table = cache.table
        token = search.living.tokens[:, search.length - 1]
        next_tokens = token[:, None], sequences, is_filled(search.living)[:, None]
        plan = plan_next(table, *next_tokens, jax.tree.map(lambda x: x[:, None], extra))
        cache, logits = model_step(forward, params, cache, plan.ubatches[0])
        if logits.shape[1] != vocabulary:
            raise ValueError(
                f"expected logits of {logits.shape[1]} tokens, the vocabulary of forward, got "
                f"{vocabulary}; pass the logits of a prefill of this model"
            )
        parents, chosen = advance_search(search, logits, stop_tokens, length_penalty)
        cache, _ = seq_select(cache, sequences[jnp.where(plan.ok, parents, rows)], sequences)
        refused = search._replace(reason=jnp.max(plan.reason[sequences]))
        return cache, jax.tree.map(partial(jnp.where, plan.ok), chosen, refused)

    first = init_beam_state(rows.size, num_tokens)
    logits = jnp.broadcast_to(logits, (rows.size, logits.shape[1]))
    _, search = advance_search(first, logits, stop_tokens, length_penalty)
    cache, search = jax.lax.while_loop(
        lambda carry: can_improve(carry[1], length_penalty), body, (cache, search)
    )
    best = select_best(search.ended, search.living, length_penalty)
    cache, num_cached = _select_cached_prefixes(cache, search, best, sequences, begins)
    return cache, *replicate(cache.table, (*best, num_cached, search.reason))


_SEARCH = ModelProgram(_run_search, "num_tokens")


def _select_cached_prefixes(
    cache: Cache,
    search: BeamState,
    best: Hypotheses,
    sequences: Int32[Array, " k"],
    begins: Int32[Array, ""],
) -> tuple[Cache, Int32[Array, " k"]]:
    """Replace beam sequence i by the longest cached prefix of hypothesis i, for all i."""
    # The last token of the living beams is not in the cache, so at most `length - 1` tokens are.
    # Axes of `same`: hypothesis, beam, token. A product along tokens is 1 up to the first
    # difference.
    place = jnp.arange(best.tokens.shape[1])[None]
    fed = place < jnp.minimum(best.lengths, search.length - 1)[:, None]
    same = best.tokens[:, None] == search.living.tokens[None]  # [k, k, n]
    shared = jnp.sum(jnp.cumprod(same & fed[:, None], axis=2), axis=2, dtype=jnp.int32)
    num_shared = jnp.max(shared, axis=1)
    cache, _ = seq_select(cache, sequences[jnp.argmax(shared, axis=1)], sequences)
    # `cut` is False if a state is not stored, or if the next token would attend to evicted cells.
    cache, cut = seq_rm(cache, sequences, begins + num_shared)
    cache, _ = seq_rm(cache, sequences, 0, jnp.where(cut, 0, -1))  # 0 to 0 is an empty range
    return cache, jnp.where(cut, num_shared, -1)
