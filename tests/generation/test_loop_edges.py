"""Loops at their edges: more sequences than tokens, plans in jit, padding, no allowed token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import generation, make_batch
from jaxkv.generation.beam import Hypotheses, advance_search, init_beam_state, is_filled
from tests.generation.tiny import forward
from tests.helpers.caches import SPLIT, fill_cache

pytestmark = pytest.mark.core


def test_warm_up_of_more_sequences_than_tokens_compiles_a_token_each():
    traced = []

    def counted(params, step):
        traced.append(step.valid.shape)
        return forward(params, step)

    cache = SPLIT.make()
    generation.warm_up(counted, None, cache, ubatch_size=1, sequences=(0, 1))
    assert traced == [(1, 1)]
    jaxkv.prefill(counted, None, cache, make_batch([[1], [2]]), ubatch_size=1)
    assert traced == [(1, 1)]


def test_prefill_of_a_plan_that_is_an_argument_of_jit():
    cache, batch = fill_cache(2), make_batch([1, 2, 3], sequences=1)
    plan = jaxkv.init_batch(cache, batch)
    wanted = jaxkv.prefill(forward, None, cache, batch, plan=plan).logits
    run = jax.jit(lambda cache, plan: jaxkv.prefill(forward, None, cache, batch, plan=plan).logits)
    np.testing.assert_allclose(run(cache, plan)[:1], wanted, atol=1e-6)


def test_prefill_of_a_refused_plan_raises_its_reason_for_any_batch():
    cache, long = fill_cache(2), make_batch([5] * 99)
    with pytest.raises(jaxkv.PlanRefusedError, match="OUT_OF_CELLS"):
        jaxkv.prefill(forward, None, cache, make_batch([1]), plan=jaxkv.init_batch(cache, long))


SPEC = jaxkv.CacheSpec.attention(layers=1, kv_heads=1, head_dim=1)
TABLE = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
TEXTS = [[0, 3, 0, 5], [2], [0, 3, 1, 0, 0]]


def by_previous(params, step):
    x = jnp.zeros((*step.valid.shape, 1, 1))
    step, _ = jaxkv.attend(step, 0, x, x, x)
    return step, jnp.asarray(params)[step.tokens.reshape(-1)[step.outputs]]


@pytest.mark.parametrize("prompts", [None, [[4], [1, 0, 6], [7, 7]]], ids=["texts", "prompts"])
def test_score_of_rows_with_padding_anywhere(prompts):
    """Token 0 is no padding; the first token of a text without a prompt has no probability."""
    rows = np.int32([[-1, 0, 3, -1, 0, 5], [-1, -1, -1, 2, -1, -1], [0, 3, 1, -1, 0, 0]])
    chances = jax.nn.log_softmax(TABLE)
    wanted = np.zeros(rows.shape, np.float32)
    for i, text in enumerate(TEXTS):
        before = [None, *text] if prompts is None else [prompts[i][-1], *text]
        wanted[i][rows[i] >= 0] = [
            0 if last is None else chances[last, token]
            for last, token in zip(before, text, strict=False)
        ]

    def score(rows):
        return jaxkv.score(by_previous, TABLE, rows, prompts=prompts, spec=SPEC)

    for found in (score(rows), jax.jit(score)(rows)):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    lists = score(TEXTS)
    for i, text in enumerate(TEXTS):
        np.testing.assert_allclose(lists[i, : len(text)], wanted[i][rows[i] >= 0], atol=1e-5)


def test_score_computes_logits_of_the_last_token_of_a_prompt_alone():
    sizes = []

    def counted(params, step):
        sizes.append(step.outputs.size)
        return by_previous(params, step)

    jaxkv.score(counted, TABLE, [[1, 2]], prompts=[[0] * 17], spec=SPEC)
    assert sizes == [8, 8]  # the fewest that a ubatch has


def test_beam_search_of_more_beams_than_tokens_leaves_beams_empty():
    search, none = init_beam_state(3, 1), np.zeros(0, np.int32)
    _, after = advance_search(search, jnp.zeros((3, 2)), none, jnp.float32(1))
    assert after.living.tokens[:, 0].tolist() == [0, 1, -1]


def test_beam_search_drops_a_beam_without_an_allowed_token():
    search = init_beam_state(2, 3)
    scores = jnp.array([-1.0, -2.0])
    living = Hypotheses(jnp.array([[7, -1, -1], [3, -1, -1]]), scores, jnp.array([1, 1]))
    search = search._replace(living=living, length=jnp.int32(1))
    logits = jnp.array([[-jnp.inf] * 4, [0.0, 0.0, -jnp.inf, -jnp.inf]])
    with jax.disable_jit():  # compiled for a CPU, top_k leaves NaN out
        parents, after = advance_search(search, logits, np.zeros(0, np.int32), jnp.float32(1))
    assert parents.tolist() == [1, 1] and after.living.tokens[:, 1].tolist() == [0, 1]
    np.testing.assert_allclose(after.living.scores, [-2 - np.log(2)] * 2, atol=1e-6)
    _, none = advance_search(search, logits[:1].repeat(2, 0), np.zeros(0, np.int32), jnp.float32(1))
    assert not is_filled(none.living).any() and not is_filled(none.ended).any()
