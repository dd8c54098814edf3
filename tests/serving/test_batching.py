"""More requests than sequences: each text equals that of the request run alone."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.serving.engine import Engine, FinishReason, Request
from models.compiling import counting
from tests.generation.tiny import forward, load_tiny
from tests.helpers.caches import Kind
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import apply_plan
from tests.serving import servers
from tests.serving.servers import (
    POOL,
    STREAMS,
    assert_as_alone,
    assert_only_kept,
    generate_alone,
    make_warm_engine,
    run_requests,
)

pytestmark = pytest.mark.core

GROUPS_WINDOW = replace(servers.GROUPS, windows=(None, jaxkv.Window.sliding(4)))
CACHES = [(POOL, None), (STREAMS, None), (GROUPS_WINDOW, (5,)), (servers.ROOMY, (5,))]


@pytest.mark.parametrize(("kind", "holders"), mark_cases(CACHES, fast=CACHES[:1]), ids=str)
def test_engine_texts_are_as_each_alone(kind, holders):
    requests = (
        servers.prepend_tokens(servers.make_requests(20), most=20)
        if holders
        else servers.make_requests(20)
    )
    engine, waiting, results = make_warm_engine(kind, holders=holders), list(requests), []
    with counting() as compiled:
        for _ in range(8):
            engine.submit(waiting.pop(0))
        for result in engine.results():
            results.append(result)
            if waiting:
                engine.submit(waiting.pop(0))
        assert compiled() == 0
    results.sort(key=lambda result: result.id)
    assert_as_alone(results, requests, cache=replace(servers.ALONE, windows=kind.windows).make())
    assert_only_kept(engine)
    assert {result.reason for result in results} == {FinishReason.STOP, FinishReason.LENGTH}
    assert not holders or sum(result.prefix_hit.length for result in results) > 20


def test_engine_generate_returns_samples_in_order():
    earlier, *requests = servers.make_requests(5)
    engine, left = make_warm_engine(POOL), []
    first = engine.submit(earlier)
    outputs = engine.generate(
        iter(requests), num_samples=2, on_output=lambda _, count: left.append(count)
    )
    both = [one for one in requests for _ in range(2)]
    assert_as_alone(outputs, [replace(one, seed=one.seed + k) for k, one in enumerate(both)])
    assert sorted(left) == [*range(8)] and [one.id for one in engine.results()] == [first]


def test_engine_generate_that_raises_loses_nothing():
    requests, engine = servers.make_requests(4), make_warm_engine(POOL)
    cancelled = engine.submit(requests[0])
    assert engine.cancel(cancelled)
    with pytest.raises(ValueError, match="expected cells for"):
        engine.generate([*requests, Request(prompt=[1] * 99, max_new_tokens=1)])
    with pytest.raises(TypeError, match="expected a Request"):
        engine.generate([*requests, "request"])
    assert [(one.id, one.reason.name) for one in engine.results()] == [(cancelled, "CANCELLED")]
    assert not engine.busy

    def interrupt(output, count):
        engine.submit(requests[0])
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        engine.generate(requests, on_output=interrupt)
    assert len([*engine.results()]) == len(requests) + 1


@pytest.mark.nightly
def test_engine_texts_that_give_way_are_as_each_alone():
    """Without reservations the youngest requests wait again when running ones take all cells."""
    long = dict(max_new_tokens=18, sampling=dict(temperature=1.5))
    requests = [Request(prompt=[i, 3], seed=i, tag=i, **long) for i in range(6)]
    requests += servers.make_requests(10, seed=1)
    for i, state in {0: 0, 1: 1, 2: 2, 13: 1, 14: 1, 15: 1}.items():
        requests[i] = replace(requests[i], constraint_state=state)
    engine = make_warm_engine(POOL, reserve=False, constraint=servers.RULE)
    most, results = 0, []
    with counting() as compiled:
        for request in requests:
            engine.submit(request)
        while engine.busy:
            results += engine.step()
            begun = [(one, engine.tokens_of(i)) for i, one in enumerate(requests)]
            most = max(most, sum(len(one.prompt) + len(n) - 1 for one, n in begun if n))
        assert compiled() == 0 and most > POOL.cells
    assert_as_alone(sorted(results, key=lambda result: result.id), requests)
    assert_only_kept(engine)


def test_engine_without_reservations_fills_a_stream():
    engine = servers.make_engine(STREAMS, reserve=False)
    (result,) = run_requests(engine, [Request(prompt=[1, 2, 3], max_new_tokens=99)])
    assert result.reason == FinishReason.OUT_OF_CELLS
    assert len(result.tokens) == STREAMS.cells - 3 + 1
    wanted, _, _ = generate_alone(replace(result.request, max_new_tokens=len(result.tokens)))
    assert result.tokens.tolist() == wanted.tolist()
    assert_only_kept(engine)


def test_cancel_frees_cells_at_once():
    engine = make_warm_engine(POOL)
    endless = [Request(prompt=[1] * 6, max_new_tokens=16, tag=i) for i in range(3)]
    ids = [engine.submit(request) for request in endless]
    assert engine.step() == []
    assert engine.tokens_of(ids[0]) and engine.cache.num_used_cells() > 0  # others lack cells
    assert engine.cancel(ids[1]) and engine.cancel(ids[0])
    assert engine.cache.num_used_cells() == 0
    assert not engine.cancel(ids[0])
    results = list(engine.results())
    names = [(one.id, one.reason.name) for one in results]
    assert names == [(ids[1], "CANCELLED"), (ids[0], "CANCELLED"), (ids[2], "LENGTH")]
    assert len(results[0].tokens) == 0 < len(results[1].tokens)
    tokens, _, _ = generate_alone(endless[0])
    assert results[1].tokens.tolist() == tokens[: len(results[1].tokens)].tolist()
    long = engine.submit(Request(prompt=[1] * 20, max_new_tokens=2))
    assert engine.step() == [] and engine.tokens_of(long) == []
    assert engine.cache.num_used_cells() == 8
    assert engine.cancel(long)
    assert [one.reason for one in engine.results()] == [FinishReason.CANCELLED]
    assert_only_kept(engine)


def test_engine_running_texts_get_a_token_per_chunk():
    engine = servers.make_engine(STREAMS)
    short = engine.submit(Request(prompt=[1], max_new_tokens=11))
    engine.step()
    before = len(engine.tokens_of(short))
    engine.submit(Request(prompt=[2] * 10, max_new_tokens=1))
    while len(engine.step()) == 0:
        assert len(engine.tokens_of(short)) == before + 1
        before = len(engine.tokens_of(short))


def test_results_not_taken_are_handed_out_later():
    engine = make_warm_engine(POOL)
    ids = [engine.submit(Request(prompt=[1], max_new_tokens=1)) for _ in range(3)]
    first = next(engine.results())
    assert engine.busy and engine.cache.num_used_cells() == 0
    assert [first.id, *(result.id for result in engine.results())] == ids
    assert_only_kept(engine)


def test_stream_gives_pieces_of_all_texts_and_their_ends():
    engine, requests, ended = make_warm_engine(POOL), servers.make_requests(6), []
    pieces = {engine.submit(one): [] for one in requests}
    for number, tokens, reason in engine.stream():
        pieces[number].append(tokens)
        ended += [number] if reason is not None else []
    for one, said in zip(requests, pieces.values(), strict=True):
        assert sum(said, []) == generate_alone(one)[0].tolist()
    assert sorted(ended) == [*pieces] and max(map(len, pieces.values())) > 1


def test_submit_copies_options_and_prompt():
    engine, options, prompt = make_warm_engine(POOL), {"temperature": 0.0}, np.array([1, 2, 3])
    engine.submit(Request(prompt=prompt, max_new_tokens=6, sampling=options))
    options["temperature"], prompt[:] = -1.0, 0
    (result,) = engine.results()
    assert result.request.sampling == {"temperature": 0.0}
    wanted, _, _ = generate_alone(Request(prompt=[1, 2, 3], max_new_tokens=6))
    assert result.tokens.tolist() == wanted.tolist()


def test_engine_penalties_count_prompts():
    options = dict(repeat_penalty=1.6, presence_penalty=0.5)
    requests = [replace(one, sampling=options) for one in servers.make_requests(6, seed=3)]
    engine = servers.make_engine(POOL, sampling_options=options, penalty_last_n=4)
    for result, request in zip(run_requests(engine, requests), requests, strict=True):
        tokens, _, _ = generate_alone(request, last_n=4)
        assert result.tokens.tolist() == tokens.tolist()


def test_engine_no_allowed_token_ends_text():
    def mute(params, step):
        step, logits = forward(params, step)
        return step, jnp.full_like(logits, -jnp.inf)

    request = Request(prompt=[1, 2], max_new_tokens=3)
    (result,) = run_requests(servers.make_engine(POOL, model=mute), [request])
    assert result.reason == FinishReason.NO_TOKEN and result.tokens.size == 0


class Broken:
    """A model that raises: during tracing, or when it runs."""

    traced = run = False

    def forward(self, params, step):
        if self.traced:
            raise RuntimeError("traced")
        step, logits = forward(params, step)
        return step, jax.pure_callback(self.look, logits, logits, vmap_method="sequential")

    def look(self, logits):
        if self.run:
            raise KeyboardInterrupt
        return logits


def test_engine_error_while_tracing_changes_nothing():
    model = Broken()
    engine = servers.make_engine(POOL, model=model.forward)
    request = Request(prompt=[1, 2], max_new_tokens=5)
    engine.submit(request)
    model.traced = True
    with pytest.raises(RuntimeError, match="^traced"):
        engine.step()
    model.traced = False
    assert_as_alone(engine.results(), [request])
    assert_only_kept(engine)


LOST = "got one that has lost it: .* Make a new engine with a new cache; results.. .* tokens_of"
BROKEN = Broken()


@pytest.mark.parametrize("moment", ["program", "fetched", "donated"])
def test_engine_that_lost_its_cache_raises(moment, monkeypatch):
    engine = servers.make_engine(POOL, model=BROKEN.forward, stop_tokens=())
    engine.submit(Request(prompt=[1, 2], max_new_tokens=1))
    long = engine.submit(Request(prompt=[1, 2], max_new_tokens=9))
    next(engine.results())
    tokens = engine.tokens_of(long)
    ended = engine.submit(Request(prompt=[1], max_new_tokens=9))
    engine.cancel(ended)
    if moment == "donated":
        jax.tree.map(lambda leaf: leaf.delete(), engine.cache.buffers)
    else:
        with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, ValueError)):
            if moment == "program":
                patch.setattr(BROKEN, "run", True)
            else:
                patch.setattr(jax, "device_get", Broken.look.__get__(SimpleNamespace(run=True)))
            engine.step()
    submit = partial(engine.submit, Request(prompt=[1], max_new_tokens=1))
    cancel = partial(engine.cancel, long)
    for call in (engine.step, engine.warm_up, submit, cancel, lambda: engine.cache):
        with pytest.raises(RuntimeError, match=LOST):
            call()
    assert engine.busy and len(tokens) == 5 and engine.tokens_of(long) == tokens
    results = engine.results()
    assert next(results).id == ended
    with pytest.raises(RuntimeError, match=LOST):
        next(results)


@pytest.mark.parametrize("rule", mark_cases(["sliding", "chunked", "symmetric"], ["sliding"]))
@pytest.mark.parametrize("streams", mark_cases([1, 2], fast=[2]))
def test_can_hold_is_exact_for_windows(rule, streams):
    """If it is True no plan is ever refused; with a cell less, one may be."""
    windows, at_once, lengths = (jaxkv.Window(6, rule),), 4, [20, 17]
    enough = at_once + (3 if rule == "symmetric" else 5) * 2 // streams
    for cells in (enough, enough - 1):
        cache = Kind("", cells=cells, sequences=2, streams=streams, windows=windows).make()
        holds = cache.table.can_allocate(np.array(lengths), at_once, np.zeros(streams, int))
        assert holds.tolist() == [cells == enough] * streams
        refused = False
        for start in (0, *range(1, 20, 4)):  # later pieces then start at the end of a chunk
            for seq, length in enumerate(lengths):
                if count := min(4 if start else 1, max(length - start, 0)):
                    batch = jaxkv.make_batch([1] * count, sequences=seq)
                    plan = jaxkv.init_batch(cache, batch, ubatch_size=4)
                    refused |= not plan.ok
                    cache = apply_plan(cache, plan)
        assert refused == (cells < enough)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "streams", "reserve", "holders"),
    [
        ("llama_tied", 10, True, (4, 9)),
        ("gemma3", 1, True, (4, 9)),
        ("gemma4", 2, True, (4, 9)),
        ("mamba2", 10, False, (4, 9)),
        ("granite_hybrid", 1, False, None),
        ("granite_hybrid", 2, True, (4, 9)),
    ],
)
def test_engine_64_requests_of_a_model_are_as_alone(name, streams, reserve, holders):
    model = load_tiny(name)
    requests = servers.prepend_tokens(servers.make_requests(64, most=40), most=40)
    cells = 40 * max(10 // streams // 2, 2)
    cache = model.make_cache(cells=cells, sequences=10, streams=streams, ubatch_size=16)
    options = dict(stop_tokens=servers.STOP, prefill_chunk=16, tokens_per_step=8, reserve=reserve)
    engine = Engine(model.forward, model.params, cache, prefix_sequences=holders, **options)
    engine.warm_up()
    with counting() as compiled:
        results = run_requests(engine, requests)
        assert compiled() == 0
    empty = model.make_cache(cells=80, ubatch_size=16)
    assert_as_alone(results, requests, model=model.forward, params=model.params, cache=empty)
    assert_only_kept(engine)
    assert not holders or sum(result.prefix_hit.length for result in results) > 50
