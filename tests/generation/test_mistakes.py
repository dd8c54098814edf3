"""What newcomers get wrong raises a sentence: what was wanted, what came, and what to do."""

import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import generation, make_batch, serving
from tests.caches import attention_cache
from tests.mistakes import assert_raises, mistakes

W = jnp.eye(8)


def make(**sizes):
    return attention_cache(**dict(layers=2, cells=16, kv_heads=2, head_dim=4, sequences=2) | sizes)


def model(q=lambda x: x, k=lambda x: x, layers=(0, 1), end=lambda m, logits, _: (m, logits)):
    """A model of two layers, in which one thing is changed."""

    def forward(params, cache, ubatch):
        old, x = cache, jnp.take(params, ubatch.tokens, axis=0)
        for layer in layers:
            h = x.reshape(*x.shape[:2], 2, 4)
            cache, out = jaxkv.attend(cache, layer, ubatch, q(h), k(h), h)
            x = x + out.reshape(x.shape)
        return end(cache, x.reshape(-1, 8)[ubatch.outputs] @ params.T, old)

    return forward


def run(batch=None, cache=None, plan=None, **changes):
    cache, batch = cache or make(), batch or make_batch([[1, 2, 3], [4]])
    return jaxkv.prefill(model(**changes), W, cache, batch, plan=plan)


def stale():
    cache, batch = make(), make_batch([1])
    plan = jaxkv.init_batch(cache, batch)
    return run(batch, jaxkv.apply(cache, plan), plan)


def beside_an_engine():
    cache = make()
    engine = serving.Engine(model(), W, cache)
    engine.submit(serving.Request(prompt=[1], max_new_tokens=2))
    engine.step()
    return run(cache=cache)


def drafted():
    narrow, warm = (
        model(end=lambda m, x, _: (m, x[:, :5])),
        generation.make_sampler(temperature=1),
    )
    cache = run().cache
    draft, state = (
        generation.draft_model(narrow, W, cache, batch_size=2),
        generation.init_decode(cache, tokens=[1, 2]).state,
    )
    return generation.speculate(model(), W, cache, state, drafter=draft, num_tokens=2, sampler=warm)


@pytest.mark.parametrize(("call", "outcome"), mistakes("newcomers"))
def test_newcomers_mistake_raises_a_sentence(call, outcome):
    assert_raises(call, outcome, globals())
