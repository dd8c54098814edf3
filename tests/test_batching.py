"""Requests through fewer sequences than there are: each text is the one that it would be alone."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models
from jaxkv import loops, make_batch
from jaxkv.loops.batching import Engine, Finish, Request, serve
from jaxkv.loops.sampling import make_sampler
from models.compiling import counting
from tests.memories import SMALL, VOCABULARY, Kind, filled, think

DATA = Path(__file__).parent / "data"
POOL = Kind("pool", cells=24, sequences=4)
STREAMS = Kind("streams", cells=12, sequences=4, split=True)
ALONE = Kind("alone", cells=32, sequences=1)
STOP = [5]


def forward(weights, memory, ubatch):
    del weights
    return think(memory, ubatch)


def engine_of(memory, **options):
    return Engine(forward, None, jax.tree.map(jnp.copy, memory), **options)


def mixed(count, *, seed=0, vocabulary=VOCABULARY, most=12, sampled=True):
    """Requests of many lengths, some greedy, each with a seed and some with a stop of their own."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        length = rng.randint(1, most - 4)
        sampling = dict(temperature=rng.choice([0.8, 1.5])) if sampled and i % 2 else {}
        if i % 4 == 3 and sampled:
            sampling |= dict(top_k=5, top_p=0.9, min_p=0.05)
        made.append(
            Request(
                prompt=[rng.randrange(vocabulary) for _ in range(length)],
                limit=rng.randint(1, most - length),
                stop=[rng.randrange(vocabulary)] if i % 3 == 0 else (),
                seed=i,
                sampling=sampling,
                tag=i,
            )
        )
    return made


def alone(request, *, model=forward, weights=None, memory=None, stop=STOP):
    """A text by the loops themselves, in a memory of its own: tokens, log-probabilities, reason."""
    memory = ALONE.make() if memory is None else memory
    own = np.full((1, 2), -1)
    own[0, : len(request.stop)] = request.stop
    stop = np.concatenate([own, [[*stop]]], axis=1)
    filters = dict(temperature=1e-9, top_k=1000, top_p=0.999999, min_p=1e-9) | request.sampling
    sampler = make_sampler(**filters) if request.sampling else make_sampler()
    batch = make_batch(np.asarray(request.prompt), sequences=0)
    memory, logits = jaxkv.prefill(model, weights, memory, batch, ubatch_size=16)
    options = dict(limit=request.limit, seed=[request.seed], sequences=[0])
    state, first = loops.begin(sampler, memory, logits, stop, **options)
    _, state, rest = jaxkv.decode(model, sampler, weights, memory, state, stop, steps=24)
    tokens, logprobs = (
        np.concatenate([np.asarray(a)[0], np.asarray(b)[0]])
        for a, b in zip(first, rest, strict=True)
    )
    logprobs, tokens = logprobs[tokens >= 0], tokens[tokens >= 0]
    stopped = tokens[-1] in stop
    return tokens, logprobs, Finish.STOP if stopped else Finish.LENGTH


def assert_as_alone(results, requests, **options):
    assert sorted(result.id for result in results) == list(range(len(requests)))
    for result in results:
        tokens, logprobs, reason = alone(requests[result.id], **options)
        assert result.tokens.tolist() == tokens.tolist(), result.request
        assert result.reason == reason and result.request.tag == result.id
        np.testing.assert_allclose(result.logprobs, logprobs, atol=2e-4)


def assert_empty(engine):
    assert jaxkv.used(engine.memory) == 0 and not engine.busy
    assert not sum(jaxkv.check_invariants(engine.memory).values())


@pytest.mark.parametrize("kind", [POOL, STREAMS], ids=lambda kind: kind.name)
def test_each_text_is_that_of_its_request_alone(kind):
    """With half the cells that all would take; some stop, some reach their limits."""
    requests = mixed(20)
    engine = engine_of(kind.make(), stop=STOP, chunk=8, steps=4)
    for request in requests:
        engine.submit(request)
    results = list(engine.results())
    assert_as_alone(results, requests)
    assert_empty(engine)
    assert len(Counter(result.reason for result in results)) == 2
