"""Log-probabilities of given tokens equal those of each text computed alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.generation.trie import MIN_SHARED, trie_of_texts
from models.compiling import counting
from tests.generation.tiny import DATA, load_tiny
from tests.helpers.mistakes import assert_raises, mistakes
from tests.helpers.parametrize import mark_cases

pytestmark = pytest.mark.core

MODELS = sorted(path.parent.name for path in DATA.glob("*/config.json"))
SPEC = jaxkv.CacheSpec.attention(layers=1, kv_heads=1, head_dim=1)
TABLE = jax.nn.softmax(2 * jax.random.normal(jax.random.key(0), (16, 16)))
RNG = np.random.default_rng(0)


def draw_texts(*lengths):
    return [RNG.integers(0, 16, length).tolist() for length in lengths]


FIRST, THEN, OTHER = draw_texts(MIN_SHARED + 2, MIN_SHARED + 1, 7)
TREE = [[*FIRST, 1, 2], [*FIRST, *THEN, 1], [*FIRST, *THEN, 2, 3, 4], OTHER, FIRST, OTHER]
"""Texts with two common beginnings, one after the other, a short one, and two equal texts."""
PROMPTS, ANSWERS = draw_texts(5, 9), [*draw_texts(3, 7, 0, 4)]


CASES = {"tree": (TREE, None), "prompts": (ANSWERS, PROMPTS)}
EVERY = [(name, case) for name in MODELS for case in CASES if not name.startswith("t5")]
CORE = [("granite_hybrid", "prompts")]


def score_alone(forward, spec, params, texts, prompts=None):
    """Log-probabilities of each text computed alone, in a stream of a cache."""
    starts = [[]] * len(texts)
    if prompts is not None:
        starts = [prompts[i // (len(texts) // len(prompts))] for i in range(len(texts))]
    whole = [start + text for start, text in zip(starts, texts, strict=True)]
    tokens = np.zeros((len(texts), max(map(len, whole))), np.int32)
    valid = np.zeros(tokens.shape, bool)
    for i, text in enumerate(whole):
        tokens[i, : len(text)], valid[i, : len(text)] = text, True
    cache = jaxkv.make_cache(spec, cells=64, sequences=len(texts), streams=len(texts))
    batch = jaxkv.make_batch(jnp.asarray(tokens), valid=jnp.asarray(valid), outputs=valid)
    logits = jaxkv.prefill(forward, params, cache, batch).logits[: valid.sum()]
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    found, first = [], 0
    for start, text in zip(starts, texts, strict=True):
        length = len(start) + len(text)
        rows = jnp.arange(first, first + length - 1)
        row = logprobs[rows, jnp.array([*start, *text][1:], jnp.int32)]
        found.append(row[len(start) - 1 :] if start else jnp.pad(row, (1, 0)))
        first += length
    width = max(map(len, texts))
    return jnp.stack([jnp.pad(row, (0, width - len(row))) for row in found])


@pytest.mark.parametrize("name, case", mark_cases(EVERY, core=CORE))
def test_score_and_its_gradient_equal_texts_alone(name, case):
    model, (texts, prompts) = load_tiny(name), CASES[case]
    weights = RNG.normal(size=(len(texts), max(map(len, texts)))).astype(np.float32)

    def loss(scoring, params):
        logprobs = scoring(params, texts, prompts=prompts)[:, : weights.shape[1]]
        return jnp.sum(logprobs * weights), logprobs

    spec, forward = model.cache_spec, model.forward
    ours = partial(loss, partial(jaxkv.score, forward, spec=spec))
    theirs = partial(loss, partial(score_alone, forward, spec))
    (_, found), slopes = jax.jit(jax.value_and_grad(ours, has_aux=True))(model.params)
    (_, wanted), steps = jax.jit(jax.value_and_grad(theirs, has_aux=True))(model.params)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    # States are sums over other chunks, so their decays differ by more.
    near = 3e-4 if "recurrent" in (spec.kind, *(part.kind for part, _ in spec.parts)) else 1e-4
    sizes = jax.tree.map(lambda x: float(jnp.abs(x).max()), steps)
    # A derivative by a factor before a norm is 0 but for rounding (`layer_scalar` of Gemma 4).
    rounding = 1e-6 * max(jax.tree.leaves(sizes)) + 1e-7
    for one, other, size in zip(*map(jax.tree.leaves, (slopes, steps, sizes)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=near * size + rounding)


def by_previous(params, step):
    """Predict the next token from a token and the one before it."""
    x = jnp.take(params, step.tokens, axis=0)[..., None, :1]
    step, mean = jaxkv.attend(step, 0, x, x, x)
    rows = step.tokens.reshape(-1)[step.outputs]
    return step, jnp.log(jnp.take(params, rows, axis=0)) + mean.reshape(-1, 1)[step.outputs]


scored = partial(jaxkv.score, by_previous, spec=SPEC)


def test_trie_has_each_token_of_a_common_prefix_once():
    texts = [np.array(text) for text in TREE]
    levels, index = trie_of_texts(texts)
    tokens = np.concatenate([level.tokens.reshape(-1) for level in levels])
    for text, row in zip(texts, index, strict=True):
        assert tokens[row[row >= 0]].tolist() == text.tolist()
    prefixes = {tuple(text[: i + 1]) for text in TREE for i in range(len(text))}
    extra = len(OTHER)  # short beginnings are computed again
    assert np.sum(tokens >= 0) == len(prefixes) + extra
    assert [level.tokens.shape[0] for level in levels] == [4, 2, 2]


def test_trie_of_a_long_chain_has_few_levels():
    text = np.arange(400) % 7
    levels, index = trie_of_texts([text[: 20 * i] for i in range(1, 20)])
    assert len(levels) == 4
    tokens = np.concatenate([level.tokens.reshape(-1) for level in levels])
    for i, row in enumerate(index):
        assert tokens[row[row >= 0]].tolist() == text[: 20 * (i + 1)].tolist()


@pytest.mark.nightly
@pytest.mark.parametrize("prompts", [None, PROMPTS], ids=["texts", "prompts"])
def test_score_of_traced_rows_is_nan_without_a_prompt_or_such_a_token(prompts):
    rows = np.full((4, 9), 3, np.int32)
    rows[1, 5:] = -1
    run, constant = partial(scored, TABLE, prompts=prompts), jnp.asarray(rows)
    found = jax.jit(run)(rows)
    np.testing.assert_allclose(jax.jit(lambda: run(constant))(), found, atol=1e-6)
    if prompts is not None:
        both = np.array([[-1] * 9, PROMPTS[1]])
        for texts in (rows, constant):
            again = jax.jit(lambda both, texts=texts: scored(TABLE, texts, prompts=both))(both)
            assert np.isnan(again[:2]).all()
            np.testing.assert_allclose(again[2:], found[2:], atol=1e-6)
    rows[0, 1] = 99
    assert np.isnan(jax.jit(run)(rows)[0, 1])


@pytest.mark.nightly
def test_score_under_transformations():
    tables = jnp.stack([TABLE, TABLE[::-1]])
    run = partial(scored, texts=ANSWERS, prompts=PROMPTS)
    for table, found in zip(tables, jax.vmap(run)(tables), strict=True):
        np.testing.assert_allclose(found, run(table), atol=1e-6)
    again = jax.checkpoint(by_previous)

    def total(forward, table):
        return jnp.sum(jaxkv.score(forward, table, ANSWERS, prompts=PROMPTS, spec=SPEC))

    slopes = jax.grad(partial(total, again))(TABLE)
    np.testing.assert_allclose(slopes, jax.grad(partial(total, by_previous))(TABLE), rtol=1e-5)
    half = run(TABLE.astype(jnp.bfloat16), dtype=jnp.bfloat16)
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, run(TABLE), atol=0.1)


def test_score_of_similar_batches_compiles_once():
    scored(TABLE, ANSWERS, prompts=PROMPTS), scored(TABLE, draw_texts(13, 14, 15, 14))
    with counting() as compiled:
        for lengths in ([4, 5, 6, 3], [8, 1, 1, 2], [3, 3, 3, 3]):
            scored(TABLE, draw_texts(*lengths), prompts=draw_texts(10, 9))
            scored(TABLE, draw_texts(*[13 + length % 4 for length in lengths]))
        assert compiled() == 0


@pytest.mark.parametrize("call, outcome", mistakes("score"))
def test_score_bad_argument_raises(call, outcome):
    sources = jaxkv.CacheSpec.cross_attention(layers=1, kv_heads=1, head_dim=1)
    assert_raises(call, outcome, globals() | locals())
