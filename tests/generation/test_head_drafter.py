"""`head_drafter`: drafts of a head over features equal those of a head without a cache."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import generation
from tests.generation import tiny
from tests.helpers.caches import attention_cache
from tests.helpers.parametrize import mark_cases

pytestmark = pytest.mark.core

VOCABULARY, SIZE, DRAFT = 5, 6, 3
WEIGHTS = {
    name: jnp.asarray(np.random.default_rng(i).normal(size=(VOCABULARY, SIZE)), jnp.float32)
    for i, name in enumerate(("embed", "unembed"))
}
PROMPTS = [[1, 2, 3, 4], [3, 0, 1]]


def read_logits(params, step, x):
    rows = x.reshape(-1, SIZE)[step.outputs]
    return rows @ params["unembed"].T, rows


def forward(params, step):
    """A model of one layer, whose features are its outputs."""
    x = params["embed"][step.tokens][:, :, None]
    step, out = jaxkv.attend(step, 0, x, x, x)
    return step, *read_logits(params, step, jnp.tanh(x + out))


def head(params, step):
    """A head that attends to the sums of embeddings and features."""
    features = step.extra["features"][:, :, None]
    x = jnp.tanh(0.2 * params["embed"][step.tokens][:, :, None] + features)
    step, out = jaxkv.attend(step, 0, x, x, x)
    return step, *read_logits(params, step, jnp.tanh(features + 0.3 * out))


def make(**sizes):
    return attention_cache(layers=1, kv_heads=1, head_dim=SIZE, **{"cells": 64, **sizes})


def run_once(model, *texts):
    return tiny.run_once(model, WEIGHTS, make, *texts)


def init(cache, drafter_cache):
    """Prefill a model and its head with the prompts; return a cache, a state and a drafter."""
    done = jaxkv.prefill(forward, WEIGHTS, cache, PROMPTS)
    state = generation.init_decode(done.cache, logits=done).state
    features = [run_once(forward, prompt)[1] for prompt in PROMPTS]
    batch = jaxkv.make_batch(
        [prompt[1:] for prompt in PROMPTS],
        extra={"features": jnp.concatenate([x[:-1] for x in features])},
    )
    own = jaxkv.prefill(head, WEIGHTS, drafter_cache, batch).cache
    last = jnp.stack([x[-1] for x in features])
    drafter = generation.head_drafter(head, WEIGHTS, own, last, num_draft_tokens=DRAFT)
    return done.cache, state, drafter


def speculate_plainly(text, count):
    return tiny.speculate_plainly(
        partial(run_once, forward), partial(run_once, head), text, count=count, draft=DRAFT
    )


@pytest.mark.parametrize("streams", mark_cases([1, 2], fast=[2]))
def test_drafts_of_head_equal_those_without_caches(streams):
    """The second call continues with the features of the first, and in the same program."""
    sizes = dict(sequences=2, streams=streams)
    cache, state, drafter = init(make(**sizes), make(**sizes))
    texts, shapes, traces = [*PROMPTS], [], []

    def counted(params, step):
        shapes.append(step.valid.shape)
        return forward(params, step)

    for _ in range(2):
        options = dict(drafter=drafter, num_tokens=10)
        out = generation.speculate(counted, WEIGHTS, cache, state, **options)
        traces.append(len(shapes))
        for i, text in enumerate(texts):
            tokens, counts = speculate_plainly(text, 11)
            assert [int(state.token[i]), *out.tokens[i].tolist()] == tokens
            found = out.num_model_steps[i], out.num_drafted[i], out.num_accepted[i]
            assert [*map(int, found)] == counts
            assert 0 < counts[2] < counts[1]  # both outcomes occur
            texts[i] = [*text, *tokens[:-1]]
        cache, state, drafter = out.cache, out.state, out.drafter
    assert traces[0] == traces[1]


def test_full_cache_of_head_ends_drafts_and_not_the_text():
    cache, state, drafter = init(make(sequences=2), make(sequences=2, cells=12))
    out = generation.speculate(forward, WEIGHTS, cache, state, drafter=drafter, num_tokens=13)
    for i, prompt in enumerate(PROMPTS):
        assert [int(state.token[i]), *out.tokens[i].tolist()] == speculate_plainly(prompt, 14)[0]
    assert 0 < out.num_drafted.sum() < 40


def test_random_drafts_of_head_are_verified_with_their_own_chances():
    """All draft tokens are accepted if the head has the chances of the model."""

    def uniform(params, step):
        return write_nothing(step), jnp.zeros((step.outputs.size, VOCABULARY)), rows_of(step)

    def write_nothing(step):
        x = jnp.zeros((*step.valid.shape, 1, SIZE))
        return jaxkv.attend(step, 0, x, x, x)[0]

    def rows_of(step):
        return jnp.zeros((step.outputs.size, SIZE))

    cache = jaxkv.prefill(uniform, WEIGHTS, make(sequences=2), PROMPTS).cache
    sampler = generation.make_sampler(temperature=1.0)
    state = generation.init_decode(cache, tokens=[1, 2], sampler=sampler).state
    drafter = generation.head_drafter(uniform, None, make(sequences=2), jnp.zeros((2, SIZE)))
    options = dict(drafter=drafter, num_tokens=16, sampler=sampler)
    out = generation.speculate(uniform, WEIGHTS, cache, state, **options)
    assert out.num_accepted.tolist() == out.num_drafted.tolist() == [12, 12]
    assert len(set(np.asarray(out.tokens).ravel().tolist())) == VOCABULARY


def test_wrong_features_raise():
    cache, state, drafter = init(make(sequences=2), make(sequences=2))

    def without_features(params, step):
        return forward(params, step)[:2]

    with pytest.raises(ValueError, match=r"expected features of shape \(2, 6\) as the third"):
        generation.speculate(without_features, WEIGHTS, cache, state, drafter=drafter, num_tokens=4)
    with pytest.raises(ValueError, match=r"expected features \[Z, d\], got the shape \(6,\)"):
        generation.head_drafter(head, WEIGHTS, make(), jnp.zeros(6))
    with pytest.raises(TypeError, match="expected floats for features, got int32"):
        generation.head_drafter(head, WEIGHTS, make(), jnp.zeros((2, 6), int))
    other = generation.head_drafter(head, WEIGHTS, make(), jnp.zeros((2, 6)))
    with pytest.raises(ValueError, match="expected a draft whose cache has the 2 sequences"):
        generation.speculate(forward, WEIGHTS, cache, state, drafter=other, num_tokens=4)
