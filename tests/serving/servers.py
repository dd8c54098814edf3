"""Helpers for tests of servers: requests, the text of each alone, engines, and a manual server."""

import functools
import random
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import generation, make_batch
from jaxkv.generation import Constraint
from jaxkv.generation.filters import OPTIONS, FilterSampler
from jaxkv.serving import MissReason, PrefixStore
from jaxkv.serving.engine import Engine, FinishReason, Request
from tests.generation.tiny import assert_sound, forward
from tests.helpers.caches import VOCABULARY, Kind, recurrent_cache
from tests.helpers.steps import add_tokens

POOL = Kind("pool", cells=24, sequences=4)
STREAMS = Kind("streams", cells=12, sequences=4, streams=4)
ROOMY = Kind("roomy", cells=64, sequences=6)
GROUPS = Kind("groups", cells=48, sequences=6, streams=2)
ALONE = Kind("alone", cells=64, sequences=1)
STOP = [5]
RULE = Constraint(  # allowed tokens depend on all earlier ones
    first=0,
    allowed=lambda state: jnp.arange(VOCABULARY) % 3 == state,
    advance=lambda state, token: (state + token + 1) % 3,
)


def draw_tokens(count, seed=0, vocabulary=VOCABULARY):
    return np.random.default_rng(seed).integers(0, vocabulary, count).tolist()


def make_requests(count, *, seed=0, most=12):
    """Requests of many lengths, some greedy, each with a seed, and some with stop tokens."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        length = rng.randint(1, most - 4)
        sampling = dict(temperature=rng.choice([0.8, 1.5])) if i % 2 else {}
        if i % 4 == 3:
            sampling |= dict(top_k=5, top_p=0.9, min_p=0.05)
        prompt = [rng.randrange(VOCABULARY) for _ in range(length)]
        options = dict(max_new_tokens=rng.randint(1, most - length), sampling=sampling)
        options["stop_tokens"] = [rng.randrange(VOCABULARY)] if i % 3 == 0 else ()
        made.append(Request(prompt=prompt, seed=i, tag=i, **options))
    return made


def prepend_tokens(requests, *, most):
    lengths = [0, 30, 9, 28] * len(requests)
    return [
        replace(one, prompt=draw_tokens(length, 99)[: most - len(one.prompt)] + one.prompt)
        for one, length in zip(requests, lengths, strict=False)
    ]


@functools.cache
def make_prefill(model):
    """A prompt in a cache of one sequence: one program for all lengths."""

    @jax.jit
    def fed(params, cache, tokens, valid):
        found = jaxkv.prefill(model, params, cache, make_batch(tokens, valid=valid))
        return found.cache, found.logits, found.ok

    return fed


def generate_alone(request, *, model=forward, params=None, cache=None, stop_tokens=STOP, last_n=64):
    """A request in the plain loops, in a separate cache: tokens, log-probabilities, reason."""
    cache = ALONE.make() if cache is None else cache
    stop_tokens = [*stop_tokens, *request.stop_tokens]
    stop_tokens = np.array(stop_tokens + [-1] * (2 - len(stop_tokens)), np.int32)
    # Filters are present and neutral: one program for all requests.
    filters = {
        name: option.dtype(request.sampling.get(name, option.neutral))
        for name, option in OPTIONS.items()
    }
    sampler = FilterSampler(**filters, penalty_last_n=last_n)
    if request.constraint_state is not None:
        rule = dict(allowed=RULE.allowed, advance=RULE.advance)
        sampler = Constraint(first=jnp.int32(request.constraint_state), **rule).constrain(sampler)
    tokens, valid = np.zeros((1, 48), np.int32), np.zeros((1, 48), bool)
    tokens[0, : len(request.prompt)], valid[0, : len(request.prompt)] = request.prompt, True
    cache, logits, ok = make_prefill(model)(params, cache, tokens, valid)
    assert ok
    recent = np.full((1, 64), -1)
    recent[0, 64 - len(request.prompt) :] = request.prompt
    picking = dict(sampler=sampler, stop_tokens=stop_tokens)
    options = dict(max_new_tokens=request.max_new_tokens, seed=[request.seed], sequences=[0])
    options |= dict(logits=logits[:1], prompts=recent)
    first = generation.init_decode(cache, **options, **picking)
    rest = jaxkv.decode(model, params, cache, first.state, num_tokens=40, **picking)
    tokens = np.concatenate([first.tokens[0], rest.tokens[0]])
    logprobs = np.concatenate([first.logprobs[0], rest.logprobs[0]])
    logprobs, tokens = logprobs[tokens >= 0], tokens[tokens >= 0]
    reason = FinishReason.STOP if tokens[-1] in stop_tokens else FinishReason.LENGTH
    return tokens, logprobs, reason


def assert_as_alone(results, requests, **options):
    for result, request in zip(results, requests, strict=True):
        tokens, logprobs, reason = generate_alone(request, **options)
        assert result.tokens.tolist() == tokens.tolist(), request
        assert result.reason == reason and result.request.tag == request.tag
        np.testing.assert_allclose(result.logprobs, logprobs, atol=2e-4)


def make_engine(kind, holders=None, *, model=forward, cells=None, **options):
    cache = kind.make()
    store = holders and PrefixStore(cache, sequences=holders, cells=cells)
    options = dict(stop_tokens=STOP, prefill_chunk=8, tokens_per_step=4) | options
    return Engine(model, None, cache, prefix_store=store, **options)


@functools.cache
def make_warm_engine(kind, **options):
    """A warm engine, empty at the end of each test."""
    engine = make_engine(kind, **options)
    engine.warm_up()
    return engine


def run_requests(engine, requests):
    ids = [engine.submit(request) for request in requests]
    found = {result.id: result for result in engine.results()}
    assert sorted(found) == ids
    return [found[one] for one in ids]


def run_prompt(engine, prompt, max_new_tokens=1, **options):
    (result,) = run_requests(
        engine, [Request(prompt=prompt, max_new_tokens=max_new_tokens, **options)]
    )
    return result


def stored_texts(engine):
    return [text.tokens.tolist() for text in engine.prefix_store.prompts]


def count_placed(engine):
    return sum(one is not None for one in engine._schedule._placed)


def assert_only_kept(engine):
    held = engine.prefix_store.num_used_cells(engine.cache) if engine.prefix_store else 0
    assert engine.cache.num_used_cells() == held and not engine.busy
    assert_sound(engine.cache)


def make_states(max_rollback=0):
    sizes = dict(sequences=6, max_rollback=max_rollback)
    return recurrent_cache(layers=1, states={"x": ((), jnp.float32)}, **sizes)


@dataclass
class Server:
    """A cache with a store, and the number of computed tokens."""

    cache: Any
    store: PrefixStore
    computed: int = 0
    add_tokens: Any = field(default=add_tokens)

    def ask(self, tokens, seq=0):
        """Reuse the stored prefix of a prompt and compute the rest."""
        self.cache, self.store, found = self.store.fork(self.cache, tokens, seq)
        self.go_on(tokens[found.length :], seq)
        return found

    def found(self, tokens):
        return self.store.fork(self.cache, tokens, 0).hit

    def go_on(self, tokens, seq=0):
        self.cache = self.add_tokens(self.cache, tokens, seq)
        self.computed += len(tokens)

    def remember(self, tokens, seq=0):
        self.cache, self.store, (_, miss, _) = self.store.store(self.cache, tokens, seq)
        return miss

    def forget(self, seq=0):
        self.cache, _ = jaxkv.seq_rm(self.cache, seq)

    @property
    def held(self):
        return self.store.num_used_cells(self.cache)

    @property
    def texts(self):
        return [text.tokens.tolist() for text in self.store.prompts]


def make_server(cache, holders, *texts, cells=None, host_bytes=None, **options):
    store = PrefixStore(cache, sequences=holders, cells=cells, host_bytes=host_bytes)
    server = Server(cache, store, **options)
    for text in texts:
        server.ask(text)
        assert server.remember(text) is MissReason.NONE
    server.forget()
    server.computed = 0
    return server
