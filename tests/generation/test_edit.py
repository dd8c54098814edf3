"""The argument `edit` of loops: a function of the cache and `aux`, called after each step."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import generation, serving
from tests.generation.tiny import CHANCES, init_state
from tests.helpers.caches import assert_identical, attention_cache

SINKS, RECENT = 2, 3


def make(**sizes):
    return attention_cache(layers=1, kv_heads=1, head_dim=4, **{"cells": 16, **sizes})


def forward(params, step):
    """Attend with the tokens' rows of a table; the logits depend on all visible cells."""
    x = params[step.tokens][:, :, None]
    step, out = jaxkv.attend(step, 0, x, x, x)
    logits = -(out.reshape(-1, 4) @ params.T)[step.outputs]
    return step, logits, {"sequences": step.sequences, "tokens": step.tokens}


PARAMS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)


def keep_sinks(cache, aux):
    """Keep the first and the last tokens of each sequence (StreamingLLM)."""
    assert set(aux) == {"sequences", "tokens"}
    positions = cache.cell_positions()  # [Q, N]: each sequence has a stream
    last = cache.seq_pos_max()[:, None]
    return jaxkv.evict(cache, (positions < SINKS) | (positions > last - RECENT)).cache


def own_loop(cache, tokens, count):
    cache, logits, *_ = jaxkv.prefill(forward, PARAMS, cache, tokens)
    texts = []
    for _ in range(count):
        cache = keep_sinks(cache, dict.fromkeys(("sequences", "tokens")))
        token = jnp.argmax(logits, axis=1).astype(jnp.int32)
        texts.append(token)
        plan = jaxkv.plan_step(cache, token)
        cache, logits = generation.model_step(forward, PARAMS, cache, plan.ubatch)
    return jnp.stack(texts, axis=1)


@pytest.mark.core
def test_edited_loops_equal_an_own_loop():
    prompts = [[0, 1, 2, 3, 3, 1, 0], [2, 2]]
    cache = make(sequences=2, streams=2)
    expected = own_loop(cache, prompts, 12)
    large = make(sequences=2, streams=2, cells=32)
    plain = jaxkv.generate(forward, PARAMS, prompts, cache=large, max_new_tokens=12)
    assert (plain.tokens != expected).any()  # the evicted cells matter
    options = dict(cache=cache, max_new_tokens=12, edit=keep_sinks)
    out = jaxkv.generate(forward, PARAMS, prompts, **options)
    np.testing.assert_array_equal(out.tokens, expected)
    assert out.cache.num_used_cells() == 2 * (SINKS + RECENT)
    engine = serving.Engine(forward, PARAMS, large, prefill_chunk=16, edit=keep_sinks)
    requests = [serving.Request(prompt=prompt, max_new_tokens=12) for prompt in prompts]
    results = engine.generate(requests)
    np.testing.assert_array_equal([result.tokens for result in results], expected)


def test_step_without_cells_is_not_edited():
    """The loop ends with OUT_OF_CELLS, and the cache is as before the refused step."""

    def clear(cache, aux):
        return jaxkv.evict(cache, jnp.zeros((1, 2), bool)).cache

    cache = jaxkv.prefill(forward, PARAMS, make(cells=2), [0, 1]).cache
    state = init_state(cache, tokens=[1])
    out = jaxkv.decode(forward, PARAMS, cache, state, num_tokens=2, edit=clear)
    assert out.finish_reason == jaxkv.Reason.OUT_OF_CELLS
    assert_identical(out.cache, cache)


def test_edit_is_traced_once_and_may_change_nothing():
    counts = []

    def count(cache, aux):
        counts.append(aux)
        return cache

    cache = jaxkv.prefill(forward, PARAMS, make(), [0, 1]).cache
    state = init_state(cache, tokens=[1])
    for _ in range(2):
        out = jaxkv.decode(forward, PARAMS, cache, state, num_tokens=2, edit=count)
    assert len(counts) == 1
    plain = jaxkv.decode(forward, PARAMS, cache, state, num_tokens=2)
    assert_identical(plain.cache, out.cache)


def test_forward_without_aux_gives_none_to_the_edit():
    def edit(cache, aux):
        assert aux is None
        return cache

    def plain_forward(params, step):
        return forward(params, step)[:2]

    jaxkv.prefill(plain_forward, PARAMS, make(), [0, 1], edit=edit)


@pytest.mark.parametrize(
    "edit",
    [lambda cache, aux: jaxkv.seq_rm(cache, 0), lambda cache, aux: make(cells=8)],
    ids=["a result", "other sizes"],
)
def test_edit_that_returns_no_cache_of_these_sizes_raises(edit):
    with pytest.raises(TypeError, match="expected the edited cache from edit, got"):
        jaxkv.prefill(forward, PARAMS, make(), [0, 1], edit=edit)


def test_generate_with_a_drafter_and_an_edit_raises():
    drafter = generation.prompt_lookup([[0]], num_draft_tokens=1)
    with pytest.raises(ValueError, match="expected a drafter or an edit, got both"):
        jaxkv.generate(
            forward, CHANCES, [[0]], cache=make(), drafter=drafter, edit=lambda cache, aux: cache
        )
