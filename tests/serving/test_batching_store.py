"""An engine with a store: common prefixes are computed and stored once, and evicted if needed."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxkv.serving import MissReason, PrefixStore
from jaxkv.serving.engine import Constraint, Engine, FinishReason, Request
from jaxkv.serving.prefix_cache.prompts import PrefixHit
from tests.generation.tiny import forward, load_tiny
from tests.helpers.caches import VOCABULARY
from tests.helpers.parametrize import mark_cases
from tests.serving import servers
from tests.serving.servers import (
    GROUPS,
    POOL,
    ROOMY,
    count_placed,
    draw_tokens,
    make_engine,
    run_prompt,
    stored_texts,
)

pytestmark = pytest.mark.core
LEARN = [("mamba2", MissReason.NO_STATE), ("gemma3", MissReason.CONTEXT_EVICTED)]


def test_engine_store_reuses_text_that_ended():
    engine, prompt = make_engine(POOL, [3]), draw_tokens(8)
    first = run_prompt(engine, prompt, max_new_tokens=4)
    text = [*prompt, *first.tokens.tolist()]
    assert first.prefix_hit == PrefixHit(0, MissReason.UNKNOWN)
    assert stored_texts(engine) == [text[:-1]]  # the last token is never in the cache
    again = run_prompt(engine, [*text, 1, 2])
    assert again.prefix_hit == PrefixHit(len(text) - 1, MissReason.NONE)
    assert run_prompt(engine, prompt).prefix_hit == PrefixHit(
        7, MissReason.NONE
    )  # its last token gives the logits
    servers.assert_as_alone([again], [again.request])
    servers.assert_only_kept(engine)


def test_engine_store_reuses_text_that_runs():
    """Its prompt is stored when another request has the same prefix, so neither waits."""
    engine, common = make_engine(ROOMY, [5], tokens_per_step=1), draw_tokens(30)
    long = engine.submit(Request(prompt=[*common, 1], max_new_tokens=20))
    while not engine.tokens_of(long):
        engine.step()
    assert not stored_texts(engine)
    other = engine.submit(Request(prompt=[*common, 2], max_new_tokens=4))
    engine.step()
    assert stored_texts(engine) == [common]
    found = {result.id: result.prefix_hit for result in engine.results()}
    assert found[other] == PrefixHit(30, MissReason.NONE)
    servers.assert_only_kept(engine)


def test_engine_store_reuses_all_cached_tokens_of_a_text_that_runs():
    """The last generated token is not cached yet."""
    engine, prompt = make_engine(ROOMY, [5], tokens_per_step=2), draw_tokens(30)
    engine.submit(Request(prompt=prompt, max_new_tokens=20))
    while len(engine.tokens_of(0)) < 3:
        engine.step()
    text = [*prompt, *engine.tokens_of(0)]
    other = engine.submit(Request(prompt=[*text, 1], max_new_tokens=2))
    results = {result.id: result for result in engine.results()}
    assert results[other].prefix_hit == PrefixHit(len(text) - 1, MissReason.NONE)
    servers.assert_as_alone([results[other]], [results[other].request])
    servers.assert_only_kept(engine)


def test_engine_store_keeps_the_prompt_of_a_text_without_tokens():
    rule = Constraint(
        first=0, allowed=lambda state: jnp.zeros(VOCABULARY, bool), advance=lambda state, t: state
    )
    engine, prompt = make_engine(ROOMY, [5], constraint=rule), draw_tokens(6)
    result = run_prompt(engine, prompt, max_new_tokens=4, constraint_state=0)
    assert (result.reason, result.tokens.size) == (FinishReason.NO_TOKEN, 0)
    assert stored_texts(engine) == [prompt]
    servers.assert_only_kept(engine)


def test_store_replaces_a_stored_prefix_and_finds_another_first_token():
    server = servers.Server((cache := ROOMY.make()), PrefixStore(cache, sequences=[4, 5]))
    text = draw_tokens(9)
    server.go_on(text)
    assert server.remember(text[:4]) is server.remember(text) is MissReason.NONE
    assert [prompt.tokens.tolist() for prompt in server.store.prompts] == [text]
    assert server.remember(text[:4]) is MissReason.NONE  # a beginning of the stored prompt
    assert [prompt.tokens.tolist() for prompt in server.store.prompts] == [text]
    assert server.remember([(text[0] + 1) % VOCABULARY, *text[1:]]) is MissReason.OTHER_TOKENS


def test_engine_store_prompt_waits_where_that_saves_time():
    """It waits for a running prefix: a pass over the params costs as much as 24 tokens."""
    for shared, waits in ((25, True), (24, False)):
        engine, common = make_engine(replace(ROOMY, cells=96), [5]), draw_tokens(shared)
        for last in ([1, 2, 3], [2, 3, 4], [3, 4, 1]):
            engine.submit(Request(prompt=[*common, *last], max_new_tokens=2))
        engine.step()
        assert count_placed(engine) == (1 if waits else 3)
        found = [result.prefix_hit.length for result in engine.results()]
        assert sorted(found) == ([0, shared, shared] if waits else [0, 0, 0])
        servers.assert_only_kept(engine)


def test_engine_store_prompt_starts_once_its_prefix_is_computed():
    engine, common = make_engine(ROOMY, [5]), draw_tokens(32)
    engine.submit(Request(prompt=[*common, *draw_tokens(9, 1)], max_new_tokens=2))
    for _ in range(4):  # of four chunks
        engine.step()
    engine.submit(Request(prompt=[*common, *draw_tokens(9, 2)], max_new_tokens=2))
    engine.step()
    assert count_placed(engine) == 2 and stored_texts(engine) == [common]
    assert [result.prefix_hit.length for result in engine.results()] == [0, 32]
    servers.assert_only_kept(engine)


def test_engine_store_keeps_what_a_cancelled_prompt_computed():
    engine, prompt = make_engine(POOL, [3]), draw_tokens(15)
    request = engine.submit(Request(prompt=prompt, max_new_tokens=4))
    engine.step()
    assert engine.cancel(request) and len(engine.step()) == 1
    assert stored_texts(engine) == [prompt[:8]]  # one chunk
    assert run_prompt(engine, prompt).prefix_hit == PrefixHit(8, MissReason.NONE)


def test_engine_takes_cache_and_store_of_another():
    first, prompt = make_engine(ROOMY, [5]), draw_tokens(20)
    run_prompt(first, prompt)
    options = dict(stop_tokens=servers.STOP, prefill_chunk=8, tokens_per_step=4)
    second = Engine(forward, None, first.cache, prefix_store=first.prefix_store, **options)
    assert run_prompt(second, [*prompt, 1]).prefix_hit == PrefixHit(20, MissReason.NONE)


def test_engine_store_gives_way_to_a_request_and_no_sooner():
    """At last a request that needs all cells runs immediately, from its stored prefix."""
    engine = make_engine(POOL, [2, 3])
    run_prompt(engine, draw_tokens(8, 1))
    run_prompt(engine, draw_tokens(8, 2))
    engine.submit(Request(prompt=draw_tokens(4, 3), max_new_tokens=5))  # the 8 free cells
    engine._schedule.admit()
    assert count_placed(engine) == 1 and len(stored_texts(engine)) == 2
    rest = Request(
        prompt=draw_tokens(8, 4), max_new_tokens=9
    )  # all cells that the first does not need
    engine.submit(rest)
    engine._schedule.admit()
    assert count_placed(engine) == 2 and not stored_texts(engine)
    results = list(engine.results())
    servers.assert_as_alone(results, [result.request for result in results])
    text = stored_texts(engine)[-1]
    last = run_prompt(engine, [*text, 1], max_new_tokens=POOL.cells - len(text))
    assert last.prefix_hit == PrefixHit(len(text), MissReason.NONE)
    servers.assert_only_kept(engine)


def test_engine_store_keeps_what_a_request_cannot_use():
    engine = make_engine(ROOMY, [5])
    run_prompt(engine, draw_tokens(10, 1))
    engine.submit(
        Request(prompt=draw_tokens(20, 2), max_new_tokens=30, sampling=dict(temperature=9.0))
    )
    engine.step()
    engine.submit(Request(prompt=draw_tokens(20, 3), max_new_tokens=20))
    engine.step()
    assert count_placed(engine) == 1 and stored_texts(engine) == [draw_tokens(10, 1)]
    assert len(list(engine.results())) == 2


def test_engine_store_promises_shared_cells_once():
    engine, common = make_engine(POOL, [3], stop_tokens=()), draw_tokens(12)
    run_prompt(engine, common)
    for last in (1, 2, 3):
        engine.submit(Request(prompt=[*common, last], max_new_tokens=3))
    engine._schedule.admit()
    assert count_placed(engine) == 3
    assert [result.prefix_hit.length for result in engine.results()] == [12] * 3
    servers.assert_only_kept(engine)


def test_engine_store_gives_way_before_any_text():
    engine = make_engine(ROOMY, [4, 5], stop_tokens=(), reserve=False)
    for seed in (1, 2):
        run_prompt(engine, draw_tokens(20, seed))
    for seed in (5, 6):
        engine.submit(Request(prompt=draw_tokens(4, seed), max_new_tokens=25))
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, count_placed(engine))
        assert not (engine._schedule.has_waiting and stored_texts(engine))
    assert most == 2


def test_engine_store_copies_between_streams():
    """The store has one holder, in stream 1: texts that end in stream 0 are copied there."""
    engine, common = make_engine(GROUPS, [5], stop_tokens=()), draw_tokens(30)
    first = run_prompt(engine, [*common, 1], max_new_tokens=3)
    assert first.prefix_hit.length == 0 and len(stored_texts(engine)) == 1
    requests = [Request(prompt=[*common, i], max_new_tokens=6) for i in range(2, 6)]
    results = servers.run_requests(engine, requests)
    assert [result.prefix_hit.length for result in results] == [30] * 4
    servers.assert_as_alone(results, requests, stop_tokens=())
    servers.assert_only_kept(engine)
    run_prompt(engine, draw_tokens(10, 3), max_new_tokens=38)  # all of a stream
    servers.assert_only_kept(engine)


def test_engine_store_prefers_the_stream_of_the_text():
    engine, prompt = make_engine(GROUPS, [2, 5], stop_tokens=()), draw_tokens(20, 1)
    run_prompt(engine, prompt)
    engine.submit(Request(prompt=draw_tokens(9, 2), max_new_tokens=15))
    engine.step()
    other = engine.submit(Request(prompt=[*prompt, 1], max_new_tokens=2))
    engine.step()
    assert [q for q, one in enumerate(engine._schedule._placed) if one and one.id == other] == [1]
    assert len(list(engine.results())) == 2
    servers.assert_only_kept(engine)


class Counting:
    def __init__(self, name, *, holders, **sizes):
        self.model, self.computed = load_tiny(name), 0
        cache = self.model.make_cache(ubatch_size=64, **sizes)
        store = PrefixStore(cache, sequences=holders)
        options = dict(prefix_store=store, prefill_chunk=64, tokens_per_step=4)
        self.engine = Engine(self.forward, self.model.params, cache, **options)

    def forward(self, params, step):
        jax.debug.callback(self.add, jnp.sum(step.valid))
        return self.model.forward(params, step)

    def add(self, count):
        self.computed += int(count)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["llama_tied", "gemma3", "gemma4", "mamba2", "granite_hybrid", "qwen3_5"]
)
def test_engine_store_computes_common_tokens_once(name):
    """64 prompts, 8 at once, with cells for 512 common tokens and the rest of 16 texts."""
    own, max_new_tokens = 3, 10
    cells = 512 + 16 * (own + max_new_tokens - 1)
    counted, common = Counting(name, sequences=10, holders=[8, 9], cells=cells), draw_tokens(512)
    engine = counted.engine
    for i in range(64):
        prompt = [*common, i, *draw_tokens(own - 1, i)]
        engine.submit(Request(prompt=prompt, max_new_tokens=max_new_tokens))
    beside, results = 0, []
    while engine.busy:
        results += engine.step()
        beside = max(beside, count_placed(engine))
    jax.effects_barrier()
    assert sorted(result.prefix_hit.length for result in results) == [0] + [512] * 63
    assert beside == 8
    assert counted.computed == 512 + 64 * (own + max_new_tokens - 1)
    text = [*results[-1].request.prompt, *results[-1].tokens.tolist()]
    assert run_prompt(engine, [*text, 1, 2]).prefix_hit == PrefixHit(len(text) - 1, MissReason.NONE)
    servers.assert_only_kept(engine)


@pytest.mark.parametrize(("name", "miss"), mark_cases(LEARN, fast=LEARN[:1]))
def test_engine_store_learns_where_prompts_part(name, miss):
    engine = Counting(name, sequences=4, holders=[1, 2, 3], cells=2400).engine
    common = draw_tokens(200)
    found = [run_prompt(engine, [*common, i, *draw_tokens(500, i)]).prefix_hit for i in range(3)]
    assert found == [
        PrefixHit(0, MissReason.UNKNOWN),
        PrefixHit(0, miss),
        PrefixHit(200, MissReason.NONE),
    ]
