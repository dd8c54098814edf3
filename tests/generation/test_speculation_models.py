"""Speculation with whole models (nightly); `test_speculation.py` has quick cases."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import generation, make_batch
from tests.generation.tiny import BEST, assert_sound, init_state, last_of, list_texts, load_tiny

pytestmark = pytest.mark.nightly

EIGHT = [[7, 3, 11, 5, 7, 3, 11, 5, 7, 3], [2, 9, 13, 2, 9, 13, 2], [4, 6, 1, 8, 4, 6]]
DRAWN = np.random.default_rng(5)
EIGHT += [DRAWN.integers(1, 14, DRAWN.integers(2, 10)).tolist() for _ in range(5)]
BRANCHING = [[7, 3, 11, 5, 7, 3, 9, 5, 7, 3], [2, 9, 13, 2, 9, 4, 2, 9]]


def prefill_prompts(model, prompts, *, ids=None, params=None, **options):
    cache = model.make_cache(**{"sequences": len(prompts), "cells": 1024} | options)
    batch = make_batch(prompts, sequences=ids or [*range(len(prompts))])
    return jaxkv.prefill(model.forward, params or model.params, cache, batch)[:2]


def start_prompts(model, prompts, *, ids=None, **options):
    cache, logits = prefill_prompts(model, prompts, ids=ids, **options)
    options = dict(max_new_tokens=24, sequences=ids or [*range(len(prompts))], prompts=prompts)
    return cache, init_state(cache, logits=logits, sampler=BEST, **options)


def drafting(model, prompts, *, noise=0.0, make=generation.draft_model, **options):
    """A drafter whose params differ from the model's by noise, so that some drafts are right."""
    rng = np.random.default_rng(0)

    def near(x):
        return x + (noise * jnp.std(x) * rng.normal(size=x.shape)).astype(x.dtype)

    params = jax.tree.map(near, model.params)
    own, _ = prefill_prompts(model, prompts, params=params, **options)
    return make(model.forward, params, own, batch_size=len(prompts))


def assert_says_the_same(model, draft, cache, state, *, atol=2e-4):
    """Compare texts, states and caches after 24 tokens with those of `decode`; return all four."""
    run = dict(cache=cache, state=state, num_tokens=24)
    after, ended, *_ = wanted = jaxkv.decode(model.forward, model.params, **run)
    found, now, *_ = made = generation.speculate(model.forward, model.params, drafter=draft, **run)
    draft = made.drafter
    assert list_texts(made) == list_texts(wanted)
    np.testing.assert_allclose(made.logprobs, wanted.logprobs, atol=atol)
    assert now.token.tolist() == ended.token.tolist()
    picked = made.num_model_steps + made.num_accepted  # no stop token ends a draft
    assert picked.tolist() == [len(text) for text in list_texts(made)]
    every = range(cache.table.spec.sequences)
    assert last_of(found, every) == last_of(after, every)  # all drafts are rolled back
    assert found.num_used_cells() == after.num_used_cells()
    assert_sound(found)
    if hasattr(draft, "cache"):  # it may lack one token
        own = draft.cache.seq_pos_max(state.sequence) + (draft.unfed >= 0)
        assert own.tolist() == last_of(after, state.sequence)
        assert_sound(draft.cache)
    return found, after, made


@pytest.mark.parametrize(
    ("name", "kind", "pools"),
    [
        ("llama_tied", "itself", "pool"),
        ("gemma3", "another", "split"),
        ("gemma3n", "another", "pool"),
        ("gemma4", "another", "split"),
        ("mamba2", "itself", "pool"),
        ("granite_hybrid", "lookup", "pool"),
        ("granite_hybrid", "another", "split"),
        ("qwen3_next", "another", "split"),
        ("qwen3_5", "itself", "pool"),
        ("qwen3_5_moe", "another", "split"),
        ("llama4", "another", "split"),
        ("nemotron_h", "another", "split"),
        ("deepseek_v32", "another", "pool"),
        ("recurrent_gemma", "another", "pool"),
    ],
)
def test_speculate_of_a_model_says_what_decode_says(name, kind, pools):
    model, count = load_tiny(name), len(EIGHT)
    cells, streams = (40 * count, 1) if pools == "pool" else (40, count)
    cache, state = start_prompts(model, EIGHT, cells=cells, streams=streams, max_rollback=4)
    if kind == "lookup":
        draft = generation.prompt_lookup(EIGHT)
    else:
        draft = drafting(model, EIGHT, noise=0.02 * (kind == "another"), max_rollback=4)
    found, after, made = assert_says_the_same(model, draft, cache, state)
    if kind == "itself":
        assert (made.num_accepted >= made.num_drafted - 1).all()
        assert (made.num_model_steps <= 7).all()
    step = partial(jaxkv.prefill, model.forward, model.params, batch=make_batch([[1]] * count))
    np.testing.assert_allclose(step(cache=found)[1], step(cache=after)[1], atol=2e-4)


@pytest.mark.parametrize(
    ("name", "streams", "ids", "kind"),
    [("gemma3", 2, (2, 4), "lookup"), ("llama_tied", 1, (3, 0), "model")],
    ids=["groups of windows", "model"],
)
def test_tree_says_what_decode_says_in_fewer_steps(name, streams, ids, kind):
    model, six = load_tiny(name), dict(cells=160, sequences=6)
    cache, state = start_prompts(model, BRANCHING, ids=ids, streams=streams, **six)
    if kind == "lookup":
        tree, most = generation.prompt_lookup(BRANCHING, ngram=1, num_branches=3), 24 + 24
    else:
        draft = partial(drafting, model, BRANCHING, noise=0.4, ids=ids, **six)
        _, _, chain = assert_says_the_same(model, draft(), cache, state)
        most = chain.num_model_steps.sum()
        tree = draft(make=partial(generation.draft_model, num_branches=3))
    _, _, made = assert_says_the_same(model, tree, cache, state)
    assert made.num_model_steps.sum() < most


def test_tree_full_cache_leaves_other_sequences_alone():
    """The cells suffice for two of three branches, and run out in the middle of a draft."""
    model = load_tiny("llama_tied")
    forward, params = model.forward, model.params
    cache, state = start_prompts(model, BRANCHING, cells=45, sequences=6)
    kept = make_batch([[1], [2], [3]], sequences=[2, 4, 5])
    cache, *_ = jaxkv.prefill(forward, params, cache, kept)
    run = dict(cache=cache, state=state, num_tokens=24)
    _, ended, *_ = wanted = jaxkv.decode(forward, params, **run)
    assert wanted.tokens.min() < 0  # it ends early
    draft = generation.prompt_lookup(BRANCHING, ngram=1, num_branches=3)
    found, now, *_ = made = generation.speculate(forward, params, drafter=draft, **run)
    assert now.reason.tolist() == ended.reason.tolist() and made.num_accepted.sum() > 0
    for got, whole in zip(
        list_texts(made), list_texts(wanted), strict=True
    ):  # who gets the last cells
        assert got[: len(whole)] == whole[: len(got)]
    assert last_of(found, [2, 3, 4, 5]) == [0, -1, 0, 0]
