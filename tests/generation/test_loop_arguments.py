"""Bad arguments of loops, samplers, engines and stores: each raises, and nothing changes."""

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
from tests import caches
from tests.caches import Kind, filled
from tests.generation.tiny import BEST, forward, load, other, parity
from tests.mistakes import assert_raises, mistakes

LOGITS, NONE = np.zeros((2, 8), np.float32), np.zeros((2, 0), np.int32)
POOL = Kind("pool", cells=24, sequences=4)
PAIR = Kind("pair", cells=8, sequences=2)


def donated(cache):
    cache = jax.tree.map(jnp.copy, cache)
    generation.warm_up(forward, None, cache, ubatch_size=1, donate=True)
    return cache


def started(m, tokens=(1, 2), **changes):
    return replace(generation.init_decode(m, tokens=tokens).state, **changes)


def decode(m, state=None, sampler=BEST, num_tokens=2):
    state = started(m) if state is None else state
    return jaxkv.decode(
        forward, None, m, state, num_tokens=num_tokens, donate=True, sampler=sampler
    )


def beam(m, logits=LOGITS[:1], num_beams=2, num_tokens=2, **options):
    return generation.beam(
        forward, None, m, logits, num_beams=num_beams, num_tokens=num_tokens, donate=True, **options
    )


def speculate(m, draft, tokens=(1,), model=forward, params=None):
    state = generation.init_decode(m, tokens=tokens).state
    return generation.speculate(
        model, params, m, state, drafter=draft, num_tokens=1, donate=True, sampler=BEST
    )


def prefill(m, model):
    return jaxkv.prefill(model, None, m, make_batch([1]), donate=True)[:2]


def context_shift(m, seq=0, **options):
    return generation.context_shift(
        m, seq, **dict(num_keep=0, num_discard=1, donate=True) | options
    )


def self_extend(m, done=0, **options):
    return generation.self_extend(m, 0, done, **dict(group=2, width=4, donate=True) | options)


def states():
    return jaxkv.make_cache(
        jaxkv.CacheSpec.recurrent(layers=1, states={"x": ((), jnp.float32)}), sequences=2
    )


def draft(m, **options):
    return generation.draft_model(forward, None, m, **options)


def branches(m, texts):
    return speculate(m, generation.prompt_lookup([[1]] * texts, num_branches=2), [1] * texts)


def answering(change):
    """A model of which the cache before, that after and the logits are changed."""
    return lambda params, cache, ubatch: change(cache, *forward(params, cache, ubatch))


class Bare:
    __slots__ = ()

    def __call__(self, params, cache, ubatch):
        return forward(params, cache, ubatch)


def ruled(sampler=None, first=1, allowed=parity, advance=other):
    rule = Constraint(first=first, allowed=allowed, advance=advance)
    return rule.constrain(make_sampler() if sampler is None else sampler)


traced = jax.jit(lambda **numbers: make_sampler(**numbers))
RULE = Constraint(
    first=0, allowed=lambda s: jnp.arange(caches.VOCABULARY) > s, advance=lambda s, token: token
)


def engine(cache=None, **options):
    return Engine(forward, None, POOL.make() if cache is None else cache, **options)


def store(cache=None, sequences=(2, 3), **options):
    cache = POOL.make() if cache is None else cache
    return PrefixStore(cache, sequences=sequences, **options)


@pytest.fixture(scope="module")
def cache():
    return jax.tree.map(jnp.copy, filled(2, 3))


@pytest.mark.parametrize(("call", "outcome"), mistakes("loops"))
def test_loop_bad_argument_raises(call, outcome, cache):
    assert_raises(call, outcome, globals() | {"m": cache})
    assert not any(x.is_deleted() for x in jax.tree.leaves(cache))


def test_speculate_too_few_states_raises():
    cache = load("granite_hybrid").make_cache(cells=16, sequences=2, max_rollback=2)
    wanted = "to keep 3 earlier states or more, .* with max_rollback=2: make it with max_rollback=3"
    with pytest.raises(ValueError, match=f"wanted the cache {wanted}"):
        speculate(cache, generation.prompt_lookup([[1]]))
    with pytest.raises(ValueError, match=f"wanted the draft's cache {wanted}"):
        generation.draft_model(forward, None, cache)
    with pytest.raises(
        ValueError, match="attention alone for num_branches=2, since a state belongs"
    ):
        speculate(cache, generation.prompt_lookup([[1]], num_draft_tokens=2, num_branches=2))


def test_submit_bad_request_raises():
    engine = Engine(forward, None, POOL.make(), prefill_chunk=8, constraint=RULE)

    def submit(**request):
        engine.submit(Request(**(dict(prompt=[1], max_new_tokens=1) | request)))

    for call, outcome in mistakes("requests"):
        assert_raises(call, outcome, {"submit": submit})
        assert not engine.busy, call
