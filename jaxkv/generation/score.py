"""Log-probabilities of given tokens. Common prefixes of texts or prompts are computed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.api.edits import seq_select
from jaxkv.batch import check_extra, make_batch
from jaxkv.cache import Cache, merge
from jaxkv.cache_spec import CacheSpec
from jaxkv.core.array_utils import DROP, FILL, is_concrete, is_traced
from jaxkv.core.compile_cache import cached_program
from jaxkv.core.partitioning import check_sharding_rules
from jaxkv.core.validate import check_int32
from jaxkv.generation.model_step import Forward, model_step
from jaxkv.generation.padding import check_token_lists, extra_of_lists, is_rows
from jaxkv.generation.sample_step import logprob_of
from jaxkv.generation.trie import (
    TrieLevel,
    number_inputs,
    trie_of_prompts,
    trie_of_texts,
    with_inputs,
)
from jaxkv.make import make_cache
from jaxkv.planning.planners import init_batch

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, PyTree, Shaped

    from jaxkv.core.partitioning import ShardingRules
    from jaxkv.generation.types import Prompts, SharedPrompts


def score(
    forward: Forward,
    params: PyTree,
    texts: Prompts,
    *,
    prompts: SharedPrompts | None = None,
    spec: CacheSpec,
    dtype: jax.typing.DTypeLike = jnp.float32,
    extra: Mapping[str, PyTree] | None = None,
    sharding_rules: ShardingRules | None = None,
) -> Float[Array, "Z n"]:
    """Return the log-probability of each token of each text.

    The result is differentiable with respect to `params`. Each prompt is computed once for all
    texts that follow the prompt. Common prefixes of concrete prompts are also computed once.
    Without prompts, common prefixes of concrete texts are computed once.

    Args:
      forward: Model function `(params, step) -> step, logits [O, V]`, see `prefill`.
      params: Model parameters, any pytree.
      texts: A list of tokens for each of Z texts, or an array `[Z, n]`. An array may be traced, and
        may contain -1 as padding at any index.
      prompts: A list of tokens for each of P prompts, or an array with -1 as padding. P divides Z:
        text i follows prompt `i // (Z // P)`.
      spec: Spec of the new cache. Each text gets a stream with the cells that it needs.
      dtype: Dtype of keys and values, see `make_cache`. Quantised keys and values have no gradient.
      extra: Additional model inputs of the tokens of all prompts, by name, see `make_batch`; for an
        array of prompts `[P, k, ...]`. Each token of a text has the inputs of the last token of its
        prompt, as in `generate`. Without prompts, these are inputs of the tokens of texts.
      sharding_rules: Mesh axes that split the cache on the mesh of `jax.set_mesh`.

    Returns:
      Log-probabilities `[Z, n]` in float32. The entries for padding are 0, and so is the entry for
      the first token of a text without a prompt. An entry is NaN if the logits that predict the
      token contain NaN or +inf. If texts, prompts or `extra` are traced, entries are also NaN for
      tokens past the vocabulary, and for texts with an empty prompt. If `texts` is an array, the
      result has the same shape. If `texts` is a list, n is at least the length of the longest text.

    Raises:
      ValueError: If there is no text, a prompt is empty, or an empty text has no prompt.
      ValueError: If the number of texts is not a multiple of the number of prompts.
      ValueError: If a list has a negative token, or a concrete token is past the vocabulary.
      ValueError: If traced texts or prompts are not arrays, or a text is not one list of tokens.
      ValueError: If the spec has cross-attention.

    Examples:
      A model that predicts the next number with a probability of 0.7:

      >>> def forward(params, step):
      ...     x = jnp.take(params, step.tokens, axis=0)[:, :, None]
      ...     step, _ = attend(step, 0, x, x, x)
      ...     x = jnp.log(jnp.roll(x, 1, axis=-1) * 0.6 + 0.1)
      ...     return step, x.reshape(-1, 4)[step.outputs]
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=4)
      >>> out = score(forward, jnp.eye(4), [[2, 3], [2, 2, 3]], prompts=[[0, 1]], spec=spec)
      >>> (10 * jnp.exp(out[:, :3])).round().tolist()
      [[7.0, 7.0, 10.0], [7.0, 1.0, 7.0]]

    Hugging Face: `compute_transition_scores`.
    """
    _check_spec(spec)
    if sharding_rules is not None:
        check_sharding_rules(sharding_rules)
    index, is_computable = None, True
    if is_concrete(texts, prompts, extra):
        levels, index = _levels_of_lists(texts, prompts, extra)
        largest = max(int(np.max(level.tokens)) for level in levels)
        if is_rows(texts):
            index = _index_of_rows(np.asarray(texts), levels[-1] if index is None else index)
    else:
        own_extra = extra if prompts is None else None
        rows, inputs = _pad_texts(texts, "texts", own_extra, allow_empty=prompts is not None)
        levels, largest = _levels_of_traced_rows(rows, inputs, prompts, extra), -1
        index = _index_of_rows(rows, levels[-1])
        if prompts is not None:  # an empty prompt has no logits
            is_computable = jnp.any(levels[0].tokens >= 0, axis=1)
            is_computable = jnp.repeat(is_computable, len(index) // len(is_computable))[:, None]
    program = cached_program(_build_score_program, forward)
    options = {"spec": spec, "dtype": jnp.dtype(dtype), "sharding_rules": sharding_rules}
    logprobs, vocabulary = program(params, levels, index, **options)
    if largest >= vocabulary.shape[1]:
        raise ValueError(
            f"expected tokens below {vocabulary.shape[1]}, the size of the vocabulary, got "
            f"{largest}; encode the texts by the tokenizer of this model"
        )
    return logprobs if is_computable is True else jnp.where(is_computable, logprobs, jnp.nan)


def _index_of_rows(
    rows: Int32[Array | np.ndarray, "Z n"], of: TrieLevel | Int32[np.ndarray, "Z m"]
) -> Int32[Array | np.ndarray, "Z n"]:
    """Return the index of each token of `rows` in the flat log-probabilities; -1 for padding."""
    xp = np if is_concrete(rows) else jnp
    valid = xp.asarray(rows) >= 0
    place = xp.maximum(xp.cumsum(valid, axis=1, dtype=np.int32) - 1, 0)
    if isinstance(of, TrieLevel):
        place += xp.arange(len(rows), dtype=np.int32)[:, None] * of.tokens.shape[1]
    else:
        place = np.take_along_axis(of, np.asarray(place), axis=1)
    return xp.where(valid, place, -1)


def _build_score_program(forward: Callable[[], Forward]) -> jax.stages.Wrapped:
    @partial(jax.jit, static_argnames=("spec", "dtype", "sharding_rules"))
    def program(
        params: PyTree,
        levels: list[TrieLevel],
        index: Int32[Array, "Z n"] | None,
        *,
        spec: CacheSpec,
        dtype: jnp.dtype,
        sharding_rules: ShardingRules | None,
    ) -> tuple:
        count = levels[0].parents.shape[0]
        cache = make_cache(
            spec,
            cells=sum(level.tokens.shape[1] for level in levels),
            sequences=count,
            streams=count,
            dtype=dtype,
            ubatch_size=max(level.tokens.size for level in levels),
        )
        if sharding_rules is not None:
            cache = merge(cache.table.with_sharding_rules(sharding_rules), cache.buffers)
        return _score_levels(forward(), params, cache, levels, index)

    return program


def _score_levels(
    forward: Forward,
    params: PyTree,
    cache: Cache,
    levels: list[TrieLevel],
    index: Int32[Array, "Z n"] | None,
) -> tuple[Float[Array, "Z n"], Array]:
    """Return log-probabilities, and an empty array `[0, V]` from which `score` reads V."""
    count = levels[0].parents.shape[0]
    ok, scores = jnp.array(True), []
    last_logits: Float[Array, "Q V"] | None = None
    for level in levels:
        if last_logits is not None:
            cache, forked = seq_select(cache, level.parents, jnp.arange(count))
            ok, last_logits = ok & forked, last_logits[level.parents]
        tokens = jnp.asarray(level.tokens)
        valid = tokens >= 0
        batch = make_batch(
            jnp.maximum(tokens, 0),
            sequences=jnp.maximum(level.sequences, 0),
            valid=valid,
            outputs=valid if level.is_scored else None,
            extra=level.extra,
        )
        plan = init_batch(cache, batch)
        cache, logits = model_step(forward, params, cache, plan.ubatch)
        ok, order, logits = ok & plan.ok, plan.ubatch.output_index, logits.astype(jnp.float32)
        place = _rows_of_logits(tokens, order)
        if level.is_scored:
            scores.append(_score_rows(level, logits, order, place, last_logits).reshape(-1))
        last_logits = _update_last_logits(level, logits, place, last_logits)
    if index is None:
        logprobs = scores[-1].reshape(levels[-1].tokens.shape)
    else:
        logprobs = jnp.where(index < 0, 0, jnp.concatenate(scores)[index])
    return jnp.where(ok, logprobs, jnp.nan), jnp.asarray(last_logits)[:0]


def _score_rows(
    level: TrieLevel,
    logits: Float[Array, "O V"],
    order: Int32[Array, " O"],
    place: Int32[Array, "R T"],
    last_logits: Float[Array, "Q V"] | None,
) -> Float[Array, "R T"]:
    """Return the log-probability of each token of a `TrieLevel`.

    The logits `logits[i]` predict the token after the token at flat index `order[i]`.
    """
    tokens = jnp.asarray(level.tokens)
    # Logits after token t score token t + 1 of the row. The first token of a row is scored by the
    # last logits of the sequence from an earlier level.
    following = jnp.pad(tokens[:, 1:], [(0, 0), (0, 1)], constant_values=-1).reshape(-1)
    following = following.at[order].get(**FILL, fill_value=-1)
    logprobs = logprob_of(logits, following, following >= 0)
    logprobs = logprobs[place[:, :-1]]
    first = jnp.zeros(tokens.shape[:1])
    if last_logits is not None:
        sequences = jnp.maximum(level.sequences, 0)
        first = logprob_of(last_logits[sequences], tokens[:, 0], tokens[:, 0] >= 0)
    logprobs = jnp.concatenate([first[:, None], logprobs], axis=1)
    return jnp.where(tokens >= 0, logprobs, 0)


def _update_last_logits(
    level: TrieLevel,
    logits: Float[Array, "O V"],
    place: Int32[Array, "R T"],
    last_logits: Float[Array, "Q V"] | None,
) -> Float[Array, "Q V"]:
    """Replace the rows of `last_logits` for sequences to which a level adds tokens."""
    tokens, count = jnp.asarray(level.tokens), level.parents.shape[0]
    last = jnp.maximum(jnp.sum(tokens >= 0, axis=1, keepdims=True) - 1, 0)
    row = jnp.take_along_axis(place, last, axis=1)[:, 0]
    into = jnp.where(level.sequences < 0, count, level.sequences)
    last_logits = jnp.zeros((count, logits.shape[1])) if last_logits is None else last_logits
    return last_logits.at[into].set(logits[row], **DROP)


def _rows_of_logits(tokens: Int32[Array, "R T"], order: Int32[Array, " O"]) -> Int32[Array, "R T"]:
    """Return, for each token, the index of its output row in the logits; 0 if it has none."""
    row = jnp.zeros(tokens.size, jnp.int32)
    return row.at[order].set(jnp.arange(order.size), **DROP).reshape(tokens.shape)


def _levels_of_lists(
    texts: Prompts, prompts: SharedPrompts | None, extra: Mapping[str, PyTree] | None
) -> tuple[list[TrieLevel], Int32[np.ndarray, "Z m"] | None]:
    """Return the levels of concrete texts, and the index of tokens if there are no prompts."""
    lists = check_token_lists(texts, "texts", allow_empty=prompts is not None)
    if prompts is None:
        shared, inputs = [], extra_of_lists(extra, texts, lists)
    else:
        shared = check_token_lists(prompts, "prompts")
        _check_counts(len(shared), len(lists))
        inputs = extra_of_lists(extra, prompts, shared)
        # Each token of a text has the inputs of the last token of its prompt.
        last = np.repeat(np.cumsum([*map(len, shared)]) - 1, len(lists) // len(shared))
        source = np.concatenate([np.arange(last[-1] + 1), np.repeat(last, [*map(len, lists)])])
        inputs = {name: np.asarray(x)[source] for name, x in inputs.items()}
    every, index = [*shared, *lists], None
    numbers, first = number_inputs(every, inputs) if inputs else (every, None)
    if prompts is None:
        levels, index = trie_of_texts(numbers)
    else:
        levels = trie_of_prompts(numbers[: len(shared)], numbers[len(shared) :])
    if first is None:
        return levels, index
    tokens = np.concatenate(every)
    return [with_inputs(level, tokens, inputs, first) for level in levels], index


def _levels_of_traced_rows(
    rows: Int32[Array | np.ndarray, "Z n"],
    inputs: dict[str, PyTree],
    prompts: SharedPrompts | None,
    extra: Mapping[str, PyTree] | None,
) -> list[TrieLevel]:
    rows, inputs = _move_padding_to_end(rows, inputs)
    count = len(rows)
    ids = np.arange(count, dtype=np.int32)
    if prompts is None:
        return [TrieLevel(tokens=rows, sequences=ids, parents=ids, extra=inputs, is_scored=True)]
    first, inputs = _move_padding_to_end(*_pad_texts(prompts, "prompts", extra))
    _check_counts(first.shape[0], count)
    group = count // first.shape[0]
    parents = ids // group * group
    last = jnp.maximum(jnp.sum(first >= 0, axis=1) - 1, 0)

    def repeat_last(x: jax.Array) -> jax.Array:
        ends = jnp.repeat(x[jnp.arange(len(x)), last], group, axis=0)
        return jnp.broadcast_to(ends[:, None], (*rows.shape, *ends.shape[1:]))

    return [
        TrieLevel(
            tokens=first,
            sequences=np.unique(parents),
            parents=ids,
            extra=inputs,
            is_scored=False,
        ),
        TrieLevel(
            tokens=rows,
            sequences=ids,
            parents=parents,
            extra=jax.tree.map(repeat_last, inputs),
            is_scored=True,
        ),
    ]


def _move_padding_to_end(
    rows: Int32[Array | np.ndarray, "Z n"], extra: dict[str, PyTree]
) -> tuple[Int32[Array, "Z n"], dict[str, PyTree]]:
    order = jnp.argsort(rows < 0, axis=1, stable=True)
    first = jnp.arange(rows.shape[0])[:, None]
    return jax.tree.map(lambda x: jnp.asarray(x)[first, order], (rows, extra))


def _check_spec(spec: object) -> None:
    if not isinstance(spec, CacheSpec):
        raise TypeError(f"expected a CacheSpec, got {type(spec)}; pass that of the model's cache")
    if "cross_attention" in (spec.kind, *(part.kind for part, _ in spec.parts)):
        raise ValueError(
            "expected a spec without cross-attention, got one with sources; call encode and "
            "prefill, and take the logits"
        )


def _check_counts(num_prompts: int, num_texts: int) -> None:
    if not num_prompts or not num_texts or num_texts % num_prompts:
        raise ValueError(
            f"expected equally many texts for each of {num_prompts} prompts, got {num_texts}; pass "
            "the texts of each prompt one after another"
        )


def _pad_texts(
    texts: Prompts, name: str, extra: Mapping[str, PyTree] | None, *, allow_empty: bool = False
) -> tuple[Int32[Array | np.ndarray, "Z n"], dict[str, Shaped[Array | np.ndarray, "Z n ..."]]]:
    """Return tokens with -1 as padding, and the additional inputs of all tokens."""
    if is_rows(texts):
        rows = check_int32(texts, f"the tokens of {name}")
        return rows, check_extra(extra, rows.shape)
    if is_traced(texts):
        raise ValueError(
            f"expected traced {name} as rows [Z, n], got {type(texts)}; pad lists with -1"
        )
    lists = check_token_lists(texts, name, allow_empty=allow_empty)
    width = max(1, *map(len, lists))
    rows = np.stack([np.pad(x, (0, width - len(x)), constant_values=-1) for x in lists])
    index = np.maximum(np.cumsum(rows >= 0).reshape(rows.shape) - 1, 0)
    inputs = extra_of_lists(extra, texts, lists)
    return rows, {name: jnp.asarray(x)[index] for name, x in inputs.items()}
