"""Requests through fewer sequences than there are: each text is the one that it would be alone."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models
from jaxkv import loops, make_batch
from jaxkv.loops.batching import Engine, Finish, Request, Rule, serve
from jaxkv.loops.sampling import OPTIONS, Filters, constrained
from models.compiling import counting
from tests.cases import mostly_nightly
from tests.memories import VOCABULARY, Kind, filled, think

DATA = Path(__file__).parent.parent / "data"
POOL = Kind("pool", cells=24, sequences=4)
STREAMS = Kind("streams", cells=12, sequences=4, streams=4)
ALONE = Kind("alone", cells=32, sequences=1)
STOP = [5]
RULE = Rule(  # what may come next depends on all tokens so far
    first=0,
    allowed=lambda state: jnp.arange(VOCABULARY) % 3 == state,
    advance=lambda state, token: (state + token + 1) % 3,
)


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


@cache
def in_one_piece(model):
    """A prompt in a memory of one sequence: one program for all lengths."""

    @jax.jit
    def fed(weights, memory, tokens, valid):
        return jaxkv.prefill(model, weights, memory, make_batch(tokens, valid=valid))

    return fed


def alone(request, *, model=forward, weights=None, memory=None, stop=STOP, last_n=64):
    """A text by the loops themselves, in a memory of its own: tokens, log-probabilities, reason."""
    memory = ALONE.make() if memory is None else memory
    stop = np.array([*stop, *request.stop] + [-1] * (2 - len(stop) - len(request.stop)), np.int32)
    # Filters that are there and off: one program for all requests.
    filters = {
        name: option.dtype(request.sampling.get(name, option.off))
        for name, option in OPTIONS.items()
    }
    sampler = Filters(**filters, last_n=last_n)
    if request.rule_state is not None:
        rule = dict(allowed=RULE.allowed, advance=RULE.advance)
        sampler = constrained(sampler, first=jnp.int32(request.rule_state), **rule)
    tokens, valid = np.zeros((1, 48), np.int32), np.zeros((1, 48), bool)
    tokens[0, : len(request.prompt)], valid[0, : len(request.prompt)] = request.prompt, True
    memory, logits, ok = in_one_piece(model)(weights, memory, tokens, valid)
    assert ok
    recent = np.full((1, 64), -1)
    recent[0, 64 - len(request.prompt) :] = request.prompt
    options = dict(limit=request.limit, seed=[request.seed], sequences=[0], prompts=recent)
    state, first = loops.begin(sampler, memory, logits[:1], stop, **options)
    _, state, rest = jaxkv.decode(model, sampler, weights, memory, state, stop, steps=40)
    tokens, logprobs = (
        np.concatenate([np.asarray(a)[0], np.asarray(b)[0]])
        for a, b in zip(first, rest, strict=True)
    )
    logprobs, tokens = logprobs[tokens >= 0], tokens[tokens >= 0]
    reason = Finish.STOP if tokens[-1] in stop else Finish.LENGTH
    return tokens, logprobs, reason


def assert_as_alone(results, requests, **options):
    for result, request in zip(results, requests, strict=True):
        tokens, logprobs, reason = alone(request, **options)
        assert result.tokens.tolist() == tokens.tolist(), request
        assert result.reason == reason and result.request.tag == request.tag
        np.testing.assert_allclose(result.logprobs, logprobs, atol=2e-4)


def assert_empty(engine):
    assert jaxkv.used(engine.memory) == 0 and not engine.busy
    assert not sum(jaxkv.check_invariants(engine.memory).values())


@cache
def warm(kind, **options):
    """An engine that is warm, and empty whenever a test ends."""
    engine = engine_of(kind.make(), **(dict(stop=STOP, chunk=8, steps=4) | options))
    engine.warm_up()
    return engine


def run(engine, requests):
    """Run requests; results by the place of each request."""
    ids = [engine.submit(request) for request in requests]
    found = {result.id: result for result in engine.results()}
    assert sorted(found) == ids
    return [found[one] for one in ids]


@pytest.mark.core
@pytest.mark.parametrize("kind", [POOL, STREAMS], ids=lambda kind: kind.name)
def test_each_text_is_that_of_its_request_alone(kind):
    """With half the cells that all would take, and not a program after the warm-up."""
    requests = mixed(20)
    engine = warm(kind)
    with counting() as compiled:
        results = run(engine, requests)
        assert compiled() == 0
    assert_as_alone(results, requests)
    assert_empty(engine)
    assert {result.reason for result in results} == {Finish.STOP, Finish.LENGTH}


@pytest.mark.core
def test_texts_that_give_way_are_computed_anew():
    """Without reservations the youngest wait again, and no text is another, with a rule or not.

    Together the texts that have begun take more cells than there are, so some gave way.
    """
    hot = dict(temperature=1.5)
    requests = [Request(prompt=[i, 3], limit=18, seed=i, sampling=hot, tag=i) for i in range(6)]
    requests = [replace(one, rule_state=i) for i, one in enumerate(requests[:3])] + requests[3:]
    requests += mixed(10, seed=1)
    requests[-3:] = [replace(one, rule_state=1) for one in requests[-3:]]
    engine = warm(POOL, reserve=False, rule=RULE)
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
    assert_empty(engine)


@pytest.mark.core
def test_a_rule_that_cannot_be_is_refused():
    memory = POOL.make()
    for rule, message in [
        (3, "wanted a Rule, got <class 'int'>"),
        (replace(RULE, allowed=None), "wanted a function allowed, got <class 'NoneType'>"),
        (replace(RULE, allowed=lambda state: state), r"wanted \[V\] bool from allowed, got 'int32"),
        (replace(RULE, first=()), "at least one array in first, got none"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            engine_of(memory, rule=rule)
    request = Request(prompt=[1], limit=1, rule_state=[0, 1])
    with pytest.raises(ValueError, match="first, 'int32.*got .*'int32"):
        engine_of(memory, rule=RULE).submit(request)
    with pytest.raises(ValueError, match="no rule_state without a rule: make the engine with rule"):
        engine_of(memory).submit(request)
    narrow = replace(RULE, allowed=lambda state: jnp.arange(4) > state)
    with pytest.raises(ValueError, match=r"wanted bool \(16,\) from allowed, got \(4,\)"):
        engine_of(memory, rule=narrow).warm_up()


@pytest.mark.core
def test_without_reservations_a_text_may_run_into_the_end_of_its_cells():
    """It has what fits: the last token of a text takes no cell."""
    engine = warm(STREAMS, reserve=False)
    (result,) = run(engine, [Request(prompt=[1, 2, 3], limit=99)])
    assert result.reason == Finish.FULL and len(result.tokens) == STREAMS.cells - 3 + 1
    wanted, _, _ = alone(replace(result.request, limit=len(result.tokens)))
    assert result.tokens.tolist() == wanted.tolist()
    assert_empty(engine)


@pytest.mark.core
def test_a_request_is_cancelled_wherever_it_is():
    """Waiting, in the middle of its prompt, or running; its cells are free at once."""
    engine = warm(POOL)
    endless = [Request(prompt=[1] * 6, limit=16, tag=i) for i in range(3)]
    ids = [engine.submit(request) for request in endless]
    assert engine.step() == []
    assert engine.tokens_of(ids[0]) and jaxkv.used(engine.memory) > 0  # the others have no room
    assert engine.cancel(ids[1]) and engine.cancel(ids[0])
    assert jaxkv.used(engine.memory) == 0
    assert not engine.cancel(ids[0])
    results = list(engine.results())
    assert [(one.id, one.reason.name) for one in results] == [
        (ids[1], "CANCELLED"),
        (ids[0], "CANCELLED"),
        (ids[2], "LENGTH"),
    ]
    tokens, _, _ = alone(endless[0])
    assert len(results[0].tokens) == 0 and len(results[1].tokens) > 0
    assert results[1].tokens.tolist() == tokens[: len(results[1].tokens)].tolist()
    assert_empty(engine)


@pytest.mark.core
def test_a_prompt_that_is_cancelled_half_way():
    engine = warm(POOL)
    request = engine.submit(Request(prompt=[1] * 20, limit=2))
    assert engine.step() == [] and engine.tokens_of(request) == []
    assert jaxkv.used(engine.memory) == 8
    assert engine.cancel(request)
    assert [one.reason for one in engine.results()] == [Finish.CANCELLED]
    assert_empty(engine)


@pytest.mark.core
def test_running_texts_go_on_beside_a_long_prompt():
    """Exactly one token for each chunk."""
    engine = warm(STREAMS)
    short = engine.submit(Request(prompt=[1], limit=11))
    engine.step()
    before = len(engine.tokens_of(short))
    engine.submit(Request(prompt=[2] * 10, limit=1))
    while len(engine.step()) == 0:
        assert len(engine.tokens_of(short)) == before + 1
        before = len(engine.tokens_of(short))
    list(engine.results())
    assert_empty(engine)


@pytest.mark.core
def test_requests_come_while_others_run():
    engine = engine_of(POOL.make(), stop=STOP, chunk=8, steps=4)
    requests = mixed(8, seed=2)
    waiting = list(requests[1:])
    engine.submit(requests[0])
    results = {}
    for result in engine.results():
        results[result.id] = result
        if waiting:
            engine.submit(waiting.pop(0))
    assert_as_alone([results[i] for i in range(len(requests))], requests)
    assert_empty(engine)


@pytest.mark.core
def test_results_that_are_not_taken_stay_there():
    """Three texts end in one step, and the iterator is dropped after the first."""
    engine = warm(POOL)
    ids = [engine.submit(Request(prompt=[1], limit=1)) for _ in range(3)]
    taken = [next(engine.results()).id]
    assert engine.busy and jaxkv.used(engine.memory) == 0
    taken += [result.id for result in engine.results()]
    assert taken == ids
    assert_empty(engine)


class Broken:
    """A model that raises: while it is traced, or when it runs."""

    traced = run = False

    def forward(self, weights, memory, ubatch):
        if self.traced:
            raise RuntimeError("traced")
        memory, logits = forward(weights, memory, ubatch)
        return memory, jax.pure_callback(self.look, logits, logits, vmap_method="sequential")

    def look(self, logits):
        if self.run:
            raise KeyboardInterrupt
        return logits


@pytest.mark.core
def test_an_error_while_a_model_is_traced_changes_nothing():
    model = Broken()
    engine = Engine(model.forward, None, POOL.make(), stop=STOP, chunk=8, steps=4)
    request = Request(prompt=[1, 2], limit=5)
    engine.submit(request)
    model.traced = True
    with pytest.raises(RuntimeError, match="^traced"):
        engine.step()
    model.traced = False
    assert_as_alone(engine.results(), [request])
    assert_empty(engine)


LOST = "got one that has lost it: .* Make a new engine with a new memory; results.. .* tokens_of"


@pytest.mark.core
@pytest.mark.parametrize(
    "moment",
    ["program", *(pytest.param(one, marks=pytest.mark.core) for one in ("fetched", "donated"))],
)
def test_an_engine_that_lost_its_memory_says_so(moment, monkeypatch):
    """Cut short while a program runs, or while its results are fetched; or donated elsewhere."""
    model = Broken()
    engine = Engine(model.forward, None, POOL.make(), stop=[], chunk=8, steps=4)
    engine.submit(Request(prompt=[1, 2], limit=1))
    long = engine.submit(Request(prompt=[1, 2], limit=9))
    next(engine.results())
    tokens = engine.tokens_of(long)
    ended = engine.submit(Request(prompt=[1], limit=9))
    engine.cancel(ended)
    if moment == "donated":
        jax.tree.map(lambda leaf: leaf.delete(), jaxkv.split(engine.memory)[1])
    else:
        with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, ValueError)):
            if moment == "program":
                model.run = True
            else:
                patch.setattr(jax, "device_get", Broken.look.__get__(SimpleNamespace(run=True)))
            engine.step()
    calls = [
        engine.step,
        engine.warm_up,
        lambda: engine.submit(Request(prompt=[1], limit=1)),
        lambda: engine.cancel(long),
        lambda: engine.memory,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=LOST):
            call()
    assert engine.busy and len(tokens) == 5 and engine.tokens_of(long) == tokens
    results = engine.results()
    assert next(results).id == ended
    with pytest.raises(RuntimeError, match=LOST):
        next(results)


@pytest.mark.core
def test_penalties_where_they_are_asked_for():
    """They count the tokens of the prompt."""
    options = dict(repeat_penalty=1.6, presence_penalty=0.5)
    requests = [replace(one, sampling=options) for one in mixed(6, seed=3)]
    results = serve(
        forward, None, POOL.make(), requests, stop=STOP, chunk=8, allow=options, last_n=4
    )
    for result in results:
        tokens, _, _ = alone(requests[result.id], last_n=4)
        assert result.tokens.tolist() == tokens.tolist()


@pytest.mark.core
def test_options_are_those_of_when_a_request_came():
    """The caller may go on with its dict, and its arrays."""
    engine = Engine(forward, None, POOL.make(), chunk=8)
    options, prompt = {}, np.array([1, 2, 3])
    for temperature in (0.0, 3.0):
        options["temperature"] = temperature
        engine.submit(Request(prompt=prompt, limit=6, seed=5, sampling=options))
    options["temperature"], prompt[:] = -1.0, 0
    made = sorted(engine.results(), key=lambda result: result.id)
    for result, temperature in zip(made, (0.0, 3.0), strict=True):
        assert result.request.sampling == {"temperature": temperature}
        one = Request(prompt=[1, 2, 3], limit=6, seed=5, sampling={"temperature": temperature})
        np.testing.assert_array_equal(result.tokens, alone(one, stop=())[0])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (dict(prompt=[]), r"a prompt \[n\] of at least one token, got the shape \(0,\)"),
        (dict(prompt=[[1]]), r"got the shape \(1, 1\)"),
        (dict(prompt=[1.5]), "integers for the tokens of a prompt, got float64"),
        (dict(prompt=[-1]), "the tokens of a prompt from 0 to"),
        (dict(limit=0), "limit of at least 1, got 0"),
        (dict(limit=1.5), "an integer for limit, got 1.5"),
        (dict(seed=-1), "seed of at least 0, got -1"),
        (dict(seed=2**32), "seed of at most 4294967295, got 4294967296"),
        (dict(stop=[1] * 5), r"at most 4 stop tokens .* got 5: .*most_stops="),
        (dict(stop=3), r"wanted a list of stop tokens \[n\], got 3"),
        (dict(sampling=None), "wanted sampling options by name, got None"),
        (dict(sampling=dict(heat=1.0)), "sampling options of min_p.*, got 'heat': .* allow="),
        (dict(sampling=dict(repeat_penalty=2.0)), "got 'repeat_penalty'"),
        (dict(sampling=dict(top_k=[1, 2])), r"one number for top_k, got the shape \(2,\)"),
        (dict(sampling=dict(top_p=0.0)), "top_p must be above 0"),
        (dict(limit=99), "cells for 99 tokens, of a prompt of 1 and a limit of 99 less the last"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_is_refused(request_, message):
    engine = engine_of(POOL.make(), stop=STOP, chunk=8)
    with pytest.raises((TypeError, ValueError), match=message):
        engine.submit(Request(**(dict(prompt=[1], limit=1) | request_)))
    assert not engine.busy


@pytest.mark.core
def test_a_prompt_that_never_fits_is_refused_without_reservations_too():
    engine = warm(STREAMS, reserve=False)
    with pytest.raises(ValueError, match="cells for 13 tokens, of a prompt of 13, which"):
        engine.submit(Request(prompt=[1] * 13, limit=1))
    assert not engine.busy


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: engine_of(filled(2)), "an empty memory, got one with 2 cells in use"),
        (lambda m: engine_of(m, chunk=0), "chunk of at least 1, got 0"),
        (lambda m: engine_of(m, steps=0), "steps of at least 1, got 0"),
        (lambda m: engine_of(m, allow=["heat"]), "to allow of temperature, .* got 'heat'"),
        (lambda m: engine_of(m).submit([1]), "wanted a Request, got <class 'list'>"),
        (lambda m: engine_of(m).cancel(0), "an id that submit returned, got 0"),
        (lambda m: engine_of(m).tokens_of(99), "an id that submit returned, got 99"),
        (lambda m: engine_of(m).tokens_of("0"), "an integer for the id of a request, got '0'"),
        (lambda m: Engine(3, None, m), "wanted a function forward, see prefill, got <class 'int'>"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(POOL.make())


# ---- what streams can hold


@pytest.mark.core
@pytest.mark.parametrize("rule", ["sliding", "chunked", "symmetric"])
@pytest.mark.parametrize(
    "split", mostly_nightly([False, True], few=[True]), ids=["pool", "streams"]
)
def test_what_a_window_can_hold(rule, split):
    """Where it says that texts fit, none is ever refused; with a cell less, one may be."""
    window = jaxkv.window.Window(6, rule)
    back = 3 if rule == "symmetric" else 5
    sequences, at_once = 2, 4
    streams = sequences if split else 1
    enough = at_once + back * (1 if split else sequences)
    lengths = [20, 17]
    for cells in (enough, enough - 1):
        kind = Kind("", cells=cells, sequences=sequences, streams=streams, windows=(window,))
        memory = kind.make()
        holds = jaxkv.split(memory)[0].can_hold(np.array(lengths), at_once, np.zeros(streams))
        assert holds.tolist() == [cells == enough] * streams
        placed, refused = [0, 0], False
        while placed != lengths and not refused:
            for seq in range(sequences):
                # The first piece is such that a later one begins at the end of a chunk.
                n = min(at_once if placed[seq] else 1, lengths[seq] - placed[seq])
                if n:
                    batch = make_batch([1] * n, sequences=seq)
                    plan = jaxkv.init_batch(memory, batch, ubatch_size=4)
                    refused |= not plan.ok
                    memory = jaxkv.apply(memory, plan)
                    placed[seq] += n
        assert refused == (cells < enough)


# ---- models


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "streams", "reserve"),
    mostly_nightly(
        [
            ("llama_tied", 1, True),
            ("llama_tied", 8, False),
            ("mistral_window", 8, True),
            ("gemma3", 1, True),
            ("mamba2", 1, True),
            ("mamba2", 8, True),
            ("granite_hybrid", 1, False),
            ("granite_hybrid", 8, True),
        ],
        few=[("llama_tied", 1, True), ("mistral_window", 8, True), ("granite_hybrid", 1, False)],
    ),
)
def test_64_requests_through_8_sequences_with_half_the_cells(name, streams, reserve):
    model = models.load(DATA / name)
    requests = mixed(64, most=40)
    cells = 160 if streams == 1 else 40
    memory = model.make_memory(cells=cells, sequences=8, streams=streams, ubatch_size=16)
    options = dict(stop=STOP, chunk=16, steps=8, reserve=reserve)
    engine = Engine(model.forward, model.weights, memory, **options)
    engine.warm_up()
    with counting() as compiled:
        results = run(engine, requests)
        assert compiled() == 0
    empty = model.make_memory(cells=64, ubatch_size=16)
    assert_as_alone(results, requests, model=model.forward, weights=model.weights, memory=empty)
    assert_empty(engine)


@pytest.mark.core
def test_cells_that_must_be_neighbours(monkeypatch):
    """They are brought together when there is no run of them, and no text gives way for that."""
    kind = replace(POOL, placement="contiguous")
    requests = mixed(24, seed=4)
    engine = warm(kind)
    close_gaps, put_back = engine._runner.close_gaps, engine._schedule.put_back
    closed, gave_way = [], []
    monkeypatch.setattr(
        engine._runner, "close_gaps", lambda: closed.append(close_gaps()) or closed[-1]
    )
    monkeypatch.setattr(
        engine._schedule, "put_back", lambda text: (gave_way.append(text.id), put_back(text))
    )
    assert_as_alone(run(engine, requests), requests)
    assert closed and all(closed) and not gave_way
    assert_empty(engine)


def mute(weights, memory, ubatch):
    memory, logits = forward(weights, memory, ubatch)
    return memory, jnp.full_like(logits, -jnp.inf)


@pytest.mark.core
def test_a_text_that_is_allowed_no_token_ends():
    (result,) = serve(mute, None, POOL.make(), [Request(prompt=[1, 2], limit=3)], chunk=8)
    assert result.reason == Finish.NO_TOKEN and result.tokens.size == 0
