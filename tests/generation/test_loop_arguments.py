"""Bad arguments of loops, samplers, engines and stores, and typical mistakes of new users.

Each raises one sentence and leaves the cache unchanged.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import generation, make_batch
from jaxkv.generation.filters import make_sampler
from jaxkv.serving import PrefixStore
from jaxkv.serving.engine import Constraint, Engine, Request
from tests.generation import tiny
from tests.generation.tiny import allow_parity, flip_parity, forward, init_state
from tests.helpers import caches
from tests.helpers.caches import Kind, fill_cache
from tests.helpers.mistakes import assert_raises, mistakes
from tests.helpers.steps import apply_plan

LOGITS, NONE = np.zeros((2, 8), np.float32), np.zeros((2, 0), np.int32)
POOL = Kind("pool", cells=24, sequences=4)
PAIR = Kind("pair", cells=8, sequences=2)
KEPT = dict(cells=16, sequences=2, max_rollback=2)
W = jnp.eye(8)


def donate_copy(cache):
    cache = jax.tree.map(jnp.copy, cache)
    generation.warm_up(forward, None, cache, ubatch_size=1, donate=True)
    return cache


def start_state(m, tokens=(1, 2), **changes):
    return replace(init_state(m, tokens=tokens), **changes)


def decode(m, state=None, **options):
    options = dict(num_tokens=2, donate=True) | options
    return tiny.decode(m, start_state(m) if state is None else state, **options)


def beam(m, logits=LOGITS[:1], **options):
    options = dict(num_beams=2, num_tokens=2, donate=True) | options
    return generation.beam(forward, None, m, logits, **options)


def speculate(m, draft, tokens=(1,)):
    return tiny.speculate(draft, m, init_state(m, tokens=tokens), num_tokens=1, donate=True)


def prefill(m, model):
    return jaxkv.prefill(model, None, m, make_batch([1]), donate=True)[:2]


def context_shift(m, seq=0, **options):
    options = dict(num_keep=0, num_discard=1, donate=True) | options
    return generation.context_shift(m, seq, **options)


def self_extend(m, done=0, **options):
    return generation.self_extend(m, 0, done, **dict(group=2, width=4, donate=True) | options)


def make_states():
    return caches.recurrent_cache(layers=1, states={"x": ((), jnp.float32)}, sequences=2)


def make_draft(m, **options):
    return generation.draft_model(forward, None, m, **options)


def propose(drafter, m):
    return drafter.propose(make_sampler(), start_state(m), np.ones(2, bool), np.ones(2, np.int32))


def branches(m, texts):
    return speculate(m, generation.prompt_lookup([[1]] * texts, num_branches=2), [1] * texts)


def answering(change):
    """A model with `change` applied to the caches before and after, and to the logits."""
    return lambda params, step: change(step, *forward(params, step))


class Bare:
    __slots__ = ()

    def __call__(self, params, step):
        return forward(params, step)


def add_rule(sampler=None, first=1, allowed=allow_parity, advance=flip_parity):
    rule = Constraint(first=first, allowed=allowed, advance=advance)
    return rule.constrain(make_sampler() if sampler is None else sampler)


traced = jax.jit(lambda **numbers: make_sampler(**numbers))
RULE = Constraint(
    first=0, allowed=lambda s: jnp.arange(caches.VOCABULARY) > s, advance=lambda s, token: token
)


def make_engine(cache=None, **options):
    return Engine(forward, None, POOL.make() if cache is None else cache, **options)


def make_store(cache=None, sequences=(2, 3), **options):
    cache = POOL.make() if cache is None else cache
    return PrefixStore(cache, sequences=sequences, **options)


@pytest.fixture(scope="module")
def cache():
    return jax.tree.map(jnp.copy, fill_cache(2, 3))


@pytest.mark.parametrize(("call", "outcome"), mistakes("loops"))
def test_loop_bad_argument_raises(call, outcome, cache):
    assert_raises(call, outcome, vars(tiny) | globals() | {"m": cache})
    assert not any(x.is_deleted() for x in jax.tree.leaves(cache))


def make_narrow(**sizes):
    sizes = dict(layers=2, cells=16, kv_heads=2, head_dim=4, sequences=2) | sizes
    return caches.attention_cache(**sizes)


def make_model(q=lambda x: x, k=lambda x: x, layers=(0, 1), end=lambda m, logits, _: (m, logits)):
    """A model of two layers, in which one thing is changed."""

    def forward(params, step):
        old, x = step, jnp.take(params, step.tokens, axis=0)
        for layer in layers:
            h = x.reshape(*x.shape[:2], 2, 4)
            step, out = jaxkv.attend(step, layer, q(h), k(h), h)
            x = x + out.reshape(x.shape)
        return end(step, x.reshape(-1, 8)[step.outputs] @ params.T, old)

    return forward


def prefill_model(batch=None, cache=None, plan=None, **changes):
    cache, batch = cache or make_narrow(), batch or make_batch([[1, 2, 3], [4]])
    return jaxkv.prefill(make_model(**changes), W, cache, batch, plan=plan)


def apply_stale_plan():
    cache, batch = make_narrow(), make_batch([1])
    plan = jaxkv.init_batch(cache, batch)
    return prefill_model(batch, apply_plan(cache, plan), plan)


def beside_an_engine():
    cache = make_narrow()
    engine = Engine(make_model(), W, cache)
    engine.submit(Request(prompt=[1], max_new_tokens=2))
    engine.step()
    return prefill_model(cache=cache)


def speculate_narrow():
    cache, narrow = prefill_model().cache, make_model(end=lambda m, x, _: (m, x[:, :5]))
    draft = generation.draft_model(narrow, W, cache, batch_size=2)
    options = dict(drafter=draft, num_tokens=2, sampler=make_sampler(temperature=1))
    return generation.speculate(make_model(), W, cache, init_state(cache, tokens=[1, 2]), **options)


@pytest.mark.parametrize(("call", "outcome"), mistakes("newcomers"))
def test_newcomers_mistake_raises_a_sentence(call, outcome):
    assert_raises(call, outcome, globals())


def test_submit_bad_request_raises():
    engine = Engine(forward, None, POOL.make(), prefill_chunk=8, constraint=RULE)

    def submit(**request):
        engine.submit(Request(**(dict(prompt=[1], max_new_tokens=1) | request)))

    for call, outcome in mistakes("requests"):
        assert_raises(call, outcome, {"submit": submit})
        assert not engine.busy, call
