"""Preempted requests in host memory, and an engine with stored prompts in host memory."""

import gc
import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv.core.array_utils import nbytes
from jaxkv.serving import MissReason, PrefixStore, swapping
from jaxkv.serving.engine import Engine, FinishReason, Request
from jaxkv.serving.prefix_cache.prompts import PrefixHit
from models.compiling import counting
from tests.generation.tiny import load_tiny
from tests.helpers.caches import Kind
from tests.helpers.parametrize import mark_cases
from tests.serving import servers
from tests.serving.servers import RULE, draw_tokens

pytestmark = pytest.mark.core

CELL = 2 * 2 * 2 * 4 * 4
PARAMS = jnp.zeros(10**6)


def count_prompt_tokens(engine):
    """Return a list that gets the number of tokens of each chunk."""
    run_chunk, counts = engine._runner.run_chunk, []

    def count(states):
        outcome = run_chunk(states)
        counts.append(sum(outcome[0]))
        return outcome

    engine._runner.run_chunk = count
    return counts


def swapped_bytes(engine):
    states = engine._schedule.all_requests
    return sum(nbytes(state.swapped.buffers) for state in states if state.swapped)


def run_all(engine, requests):
    """Run requests; their results, and the largest number of bytes of swapped requests."""
    results, most = [], 0
    for request in requests:
        engine.submit(request)
    while engine.busy:
        results += engine.step()
        most = max(most, swapped_bytes(engine))
    return sorted(results, key=lambda result: result.id), most


def make_requests(count=8):
    """Requests of 20 tokens each, some with a constraint."""
    options = dict(max_new_tokens=14, sampling=dict(temperature=1.0))
    return [
        Request(prompt=draw_tokens(6, i), seed=i, tag=i, constraint_state=i % 3, **options)
        if i % 2
        else Request(prompt=draw_tokens(6, i), seed=i, tag=i, **options)
        for i in range(count)
    ]


POOL = Kind("pool", cells=32, sequences=5)
GROUPS = replace(servers.GROUPS, cells=30, windows=(None, jaxkv.Window.sliding(4)))
SWAPS = [(POOL, 10**6), (POOL, 24 * CELL), (GROUPS, 10**6)]


@pytest.mark.parametrize(("kind", "limit"), mark_cases(SWAPS, fast=SWAPS[:1]), ids=str)
def test_swapped_requests_are_as_alone_within_the_limit(kind, limit):
    requests, computed = make_requests(), {}
    for host_bytes in (None, limit):
        options = dict(reserve=False, constraint=RULE, host_bytes=host_bytes, prefill_chunk=8)
        options |= dict(stop_tokens=servers.STOP, sampling_options=["temperature"])
        engine = Engine(servers.forward, PARAMS, kind.make(), **options)
        engine.warm_up()
        computed[host_bytes] = count_prompt_tokens(engine)
        with counting() as compiled:
            results, most = run_all(engine, requests)
            assert compiled() == 0
        assert most <= (host_bytes or 0) and (most > 0) == (host_bytes is not None)
        empty = replace(servers.ALONE, windows=kind.windows).make()
        servers.assert_as_alone(results, requests, cache=empty)
        servers.assert_only_kept(engine)
    prompts = sum(len(request.prompt) for request in requests)
    assert prompts <= sum(computed[limit]) < sum(computed[None])
    assert sum(computed[limit]) == prompts or limit < 10**6  # each token once


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama_tied", "gemma3", "granite_hybrid"])
def test_swapped_requests_of_a_model_are_as_alone(name, monkeypatch):
    monkeypatch.setitem(swapping.FLOPS_PER_BYTE, "cpu", 1)
    model, requests = load_tiny(name), make_requests(5)
    requests = [replace(request, constraint_state=None) for request in requests]
    cache = model.make_cache(cells=32, sequences=4, ubatch_size=8)
    options = dict(reserve=False, host_bytes=10**8, prefill_chunk=8, stop_tokens=servers.STOP)
    engine = Engine(model.forward, model.params, cache, **options)
    results, most = run_all(engine, requests)
    assert most > 0
    empty = model.make_cache(cells=80, ubatch_size=8)
    servers.assert_as_alone(
        results, requests, model=model.forward, params=model.params, cache=empty
    )


@pytest.mark.parametrize(("num_params", "is_swapped"), [(4799 * 2, False), (4801 * 2, True)])
def test_request_is_swapped_if_copies_cost_less_than_tokens(num_params, is_swapped):
    """16 tokens in 16 cells: 128 bytes a token, times 150 operations: 19,200."""
    assert swapping.FLOPS_PER_BYTE["cpu"] == 150
    engine = servers.make_engine(POOL, tokens_per_step=1, reserve=False)
    swapper = swapping.Swapper(engine._runner, jnp.zeros(num_params), 10**6)
    engine.submit(Request(prompt=draw_tokens(15), max_new_tokens=8))
    while engine.cache.num_used_cells() < 16:
        engine.step()
    (state,) = engine._schedule.all_requests
    assert state.num_cached_tokens == 16
    swapper.swap_out(state, [state], 0)
    assert (state.swapped is not None) == is_swapped
    swapper.swap_out(state, [], 15)
    assert state.swapped is None  # a prefix store has nearly all tokens


def preempt_one(**options):
    """An engine with a swapped request, and its state."""
    engine = servers.make_engine(POOL, reserve=False, stop_tokens=(), host_bytes=10**6, **options)
    engine._swapper._flops_per_token = 10**6
    for i in range(2):
        engine.submit(Request(prompt=draw_tokens(8, i), max_new_tokens=25))
    while not swapped_bytes(engine):
        engine.step()
    return engine, engine._schedule._waiting[0]


def test_swapped_requests_share_the_limit():
    engine, state = preempt_one()
    swapper, (other,) = engine._swapper, engine._schedule.running_requests
    used, size = swapped_bytes(engine), 32 * CELL
    for limit, fits in ((used + size, True), (used + size - 1, False)):
        swapper._max_bytes, other.swapped = limit, None
        swapper.swap_out(other, [state, other], 0)
        assert (other.swapped is not None) == fits


def test_cancelled_request_frees_its_host_memory():
    engine, state = preempt_one()
    tokens, copied = list(state.tokens), weakref.ref(state.swapped)
    assert engine.cancel(state.id) and not swapped_bytes(engine)
    del state
    gc.collect()
    assert copied() is None
    results = {result.id: result for result in engine.results()}
    assert results[1].reason is FinishReason.CANCELLED
    assert results[1].tokens.tolist() == tokens and len(results[0].tokens) == 25
    servers.assert_only_kept(engine)


def test_engine_that_lost_its_cache_keeps_the_tokens_of_swapped_requests():
    engine, state = preempt_one()
    jax.tree.map(lambda leaf: leaf.delete(), engine.cache.buffers)
    with pytest.raises(RuntimeError, match="has lost it"):
        engine.step()
    assert engine.tokens_of(state.id) == state.tokens != []


def test_swapped_request_keeps_the_prefix_hit_of_its_prompt():
    engine = servers.make_engine(POOL, [4], stop_tokens=(), host_bytes=10**6)
    prompt = draw_tokens(8)
    engine._schedule.reserves = False
    engine._swapper._flops_per_token = 10**6
    servers.run_prompt(engine, prompt)
    requests = [Request(prompt=[*prompt, i], max_new_tokens=24, tag=i) for i in range(2)]
    results, most = run_all(engine, requests)
    assert most > 0 and [result.prefix_hit.length for result in results] == [8, 8]
    assert engine.prefix_store.stats.hits == 2  # none for the swapped request
    servers.assert_as_alone(results, requests, stop_tokens=())
    servers.assert_only_kept(engine)


def test_prompt_from_host_leaves_the_reserved_cells_free():
    """It has 20 tokens, of which the request shares 6; both need more cells than there are."""
    store = PrefixStore(cache := POOL.make(), sequences=[4], host_bytes=10**6)
    options = dict(stop_tokens=(), prefill_chunk=8, prefix_store=store)
    engine, text = Engine(servers.forward, None, cache, **options), draw_tokens(20, 1)
    for prompt in (text, draw_tokens(20, 2)):
        servers.run_prompt(engine, prompt)
    engine.submit(request := Request(prompt=[*text[:6], 1], max_new_tokens=16))
    engine._schedule.admit()
    assert servers.count_placed(engine) == 1 and engine._schedule._has_enough_cells(0)
    assert not servers.stored_texts(engine)
    (result,) = engine.results()
    assert result.prefix_hit == PrefixHit(6, MissReason.NONE, True)
    servers.assert_as_alone([result], [request], stop_tokens=())
    servers.assert_only_kept(engine)


KINDS = [(POOL, [4]), (replace(servers.GROUPS, cells=40), [2, 5])]


@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize(("kind", "holders"), mark_cases(KINDS, fast=KINDS[:1]), ids=str)
def test_engine_with_stored_prompts_in_host_memory(kind, holders, reserve):
    """Six conversations in turn, with cells for two: most continue from host memory."""
    cache, limit = kind.make(), 6 * 32 * CELL
    store = PrefixStore(cache, sequences=holders, host_bytes=limit)
    options = dict(stop_tokens=(), prefill_chunk=8, tokens_per_step=4, reserve=reserve)
    engine = Engine(servers.forward, None, cache, prefix_store=store, **options)
    engine.warm_up()
    texts = [draw_tokens(9, i) for i in range(6)]
    for turn in range(3):
        requests = [Request(prompt=[*text], max_new_tokens=4) for text in texts]
        with counting() as compiled:
            results = servers.run_requests(engine, requests)
            assert compiled() == 0
        servers.assert_as_alone(results, requests, stop_tokens=())
        servers.assert_only_kept(engine)
        assert engine.prefix_store.num_host_bytes <= limit
        if turn:
            hits = [result.prefix_hit for result in results]
            assert [hit.length for hit in hits] == [len(text) - 2 for text in texts]
            assert sum(hit.from_host for hit in hits) >= 4
        for text, result in zip(texts, results, strict=True):
            text += [*result.tokens.tolist(), 1]
