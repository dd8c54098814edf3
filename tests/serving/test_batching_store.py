"""An engine with a store: what prompts begin with is computed once and held once, and gives way.

How much is computed is counted by the model itself (`Counting`), and cells by the table.
"""

import random
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models
from jaxkv import prefix
from jaxkv.loops.batching import Engine, Request
from jaxkv.prefix import Miss
from models.compiling import counting
from tests.cases import mostly_nightly
from tests.memories import VOCABULARY, Kind
from tests.serving import test_batching
from tests.serving.test_batching import STOP, assert_as_alone, forward, mixed, run

DATA = Path(__file__).parent.parent / "data"
POOL = Kind("pool", cells=64, sequences=6)
SMALL = test_batching.POOL  # what is compiled for it is there
GROUPS = Kind("groups", cells=48, sequences=6, streams=2)
GROUPS_WINDOW = replace(GROUPS, name="window", windows=(None, jaxkv.window.sliding(4)))
RUNS = replace(POOL, name="contiguous", placement="contiguous")
ALONE = Kind("alone", cells=64, sequences=1)


def engine_of(kind, holders, *, cells=None, **options):
    memory = kind.make()
    store = prefix.make_store(memory, holders=holders, cells=cells)
    options = dict(stop=STOP, chunk=8, steps=4) | options
    return Engine(forward, None, memory, store=store, **options)


def tokens(count, seed=0, vocabulary=VOCABULARY):
    return np.random.default_rng(seed).integers(0, vocabulary, count).tolist()


def ask(engine, prompt, limit=1, **options):
    (result,) = run(engine, [Request(prompt=prompt, limit=limit, **options)])
    return result


def texts(engine):
    """What is held, the least recently used first."""
    return [text.tokens.tolist() for text in engine.store.texts]


def assert_only_kept(engine):
    """Nothing but the store's texts is left."""
    held = prefix.held(engine.memory, engine.store)
    assert jaxkv.used(engine.memory) == held and not engine.busy
    assert not sum(jaxkv.check_invariants(engine.memory).values())


def placed(engine):
    """How many requests have a sequence."""
    return sum(one is not None for one in engine._schedule._placed)


# --------------------------------------------------------------------------------- what is reused


@pytest.mark.core
def test_a_prompt_that_begins_with_a_text_that_ended_computes_only_the_rest():
    engine, prompt = engine_of(SMALL, [3]), tokens(8)
    first = ask(engine, prompt, limit=4)
    text = [*prompt, *first.tokens.tolist()]
    assert first.found == (0, Miss.UNKNOWN)
    assert texts(engine) == [text[:-1]]  # the last token is never in the memory
    again = ask(engine, [*text, 1, 2])
    assert again.found == (len(text) - 1, Miss.NONE)
    assert ask(engine, prompt).found == (7, Miss.NONE)  # its last token gives the logits
    assert_as_alone([again], [again.request])
    assert_only_kept(engine)


@pytest.mark.core
def test_a_text_that_runs_is_shared_too():
    """Its prompt is remembered when another begins with it, so neither waits for the other."""
    engine, common = engine_of(POOL, [5]), tokens(30)
    long = engine.submit(Request(prompt=[*common, 1], limit=20))
    while not engine.tokens_of(long):
        engine.step()
    assert not texts(engine)
    other = engine.submit(Request(prompt=[*common, 2], limit=2))
    found = {result.id: result.found for result in engine.results()}
    assert found[other] == (30, Miss.NONE)
    assert_only_kept(engine)


@pytest.mark.core
def test_a_prompt_waits_for_one_on_its_way_in_only_where_that_saves_time():
    """A pass over the weights costs as much as some 24 tokens."""
    for shared, waits in ((30, True), (15, False)):
        engine, common = engine_of(POOL, [5]), tokens(shared)
        for last in ([1, 2, 3], [2, 3, 4], [3, 4, 1]):
            engine.submit(Request(prompt=[*common, *last], limit=2))
        engine.step()
        assert placed(engine) == (1 if waits else 3)
        found = [result.found.length for result in engine.results()]
        assert sorted(found) == ([0, shared, shared] if waits else [0, 0, 0])
        assert_only_kept(engine)


def test_what_is_cancelled_is_kept_as_far_as_it_came():
    engine, prompt = engine_of(SMALL, [3]), tokens(15)
    request = engine.submit(Request(prompt=prompt, limit=4))
    engine.step()
    assert engine.cancel(request) and len(engine.step()) == 1
    assert texts(engine) == [prompt[:8]]  # one chunk
    assert ask(engine, prompt).found == (8, Miss.NONE)


@pytest.mark.core
def test_a_store_that_holds_texts_already():
    """A memory and its store go from one engine to the next."""
    first, prompt = engine_of(POOL, [5]), tokens(20)
    ask(first, prompt)
    options = dict(stop=STOP, chunk=8, steps=4)
    second = Engine(forward, None, first.memory, store=first.store, **options)
    assert ask(second, [*prompt, 1]).found == (20, Miss.NONE)
    with pytest.raises(ValueError, match="an empty memory, got one with 21 cells in use"):
        Engine(forward, None, second.memory, **options)


# ---------------------------------------------------------------------------------- what gives way


@pytest.mark.core
def test_the_store_gives_way_to_a_request_and_no_sooner():
    engine = engine_of(SMALL, [2, 3])
    ask(engine, tokens(8, 1))
    ask(engine, tokens(8, 2))
    engine.submit(Request(prompt=tokens(4, 3), limit=5))  # the 8 cells that are left
    engine._schedule.admit()
    assert placed(engine) == 1 and len(texts(engine)) == 2
    engine.submit(Request(prompt=tokens(8, 4), limit=9))  # all that the first does not need
    engine._schedule.admit()
    assert placed(engine) == 2 and not texts(engine)
    results = list(engine.results())
    assert_as_alone(results, [result.request for result in results])
    assert_only_kept(engine)


@pytest.mark.core
def test_what_a_request_cannot_use_is_not_let_go_of():
    """It waits for a text that runs; meanwhile the store keeps what it has."""
    engine = engine_of(POOL, [5])
    ask(engine, tokens(10, 1))
    engine.submit(Request(prompt=tokens(20, 2), limit=30, sampling=dict(temperature=9.0)))
    engine.step()
    engine.submit(Request(prompt=tokens(20, 3), limit=20))
    engine.step()
    assert placed(engine) == 1 and texts(engine) == [tokens(10, 1)]
    assert len(list(engine.results())) == 2


@pytest.mark.core
def test_cells_that_are_shared_are_promised_once():
    """Three texts of 15 tokens, of which 12 are common, run beside each other in 24 cells."""
    engine, common = engine_of(SMALL, [3], stop=()), tokens(12)
    ask(engine, common)
    requests = [Request(prompt=[*common, last], limit=3) for last in (1, 2, 3)]
    for request in requests:
        engine.submit(request)
    engine._schedule.admit()
    assert placed(engine) == 3
    results = list(engine.results())
    assert [result.found.length for result in results] == [12] * 3
    assert_as_alone(results, requests, stop=())
    assert_only_kept(engine)


@pytest.mark.core
def test_an_unshared_store_never_costs_a_request_its_turn():
    """A request that takes every cell runs at once, whatever was kept."""
    engine = engine_of(POOL, [4, 5], stop=())
    ask(engine, tokens(30, 1))
    ask(engine, tokens(30, 2))
    result = ask(engine, tokens(30, 1) + tokens(10, 3), limit=25)  # 64 cells
    assert result.found == (30, Miss.NONE) and result.reason.name == "LENGTH"
    assert_only_kept(engine)


@pytest.mark.core
def test_without_reservations_the_store_gives_way_before_any_text():
    engine = engine_of(POOL, [4, 5], stop=(), reserve=False)
    ask(engine, tokens(20, 1))
    ask(engine, tokens(20, 2))
    ids = [engine.submit(Request(prompt=tokens(4, i), limit=25)) for i in (5, 6)]
    longest = 0
    while engine.busy:
        engine.step()
        longest = max(longest, placed(engine))
        waits = engine._schedule.any_waits
        assert not (waits and texts(engine))
    assert longest == len(ids)


@pytest.mark.core
def test_cells_of_the_store_are_limited_by_its_own_number():
    engine = engine_of(POOL, [4, 5], cells=25)
    ask(engine, tokens(20, 1))
    ask(engine, tokens(20, 2))
    assert texts(engine) == [tokens(20, 2)]
    ask(engine, tokens(30, 3))
    assert texts(engine) == [tokens(20, 2)]  # too long for it
    assert ask(engine, tokens(20, 1)).found == (0, Miss.EVICTED)


# ----------------------------------------------------------------------------------------- streams


@pytest.mark.core
def test_between_streams_it_is_copied_and_promises_hold():
    """The store has one holder, in stream 1: what ends in stream 0 is copied there."""
    engine, common = engine_of(GROUPS, [5], stop=()), tokens(30)
    first = ask(engine, [*common, 1], limit=3)
    assert first.found.length == 0 and len(texts(engine)) == 1
    requests = [Request(prompt=[*common, i], limit=6) for i in range(2, 6)]
    results = run(engine, requests)
    assert [result.found.length for result in results] == [30] * 4
    assert_as_alone(results, requests, stop=(), memory=ALONE.make())
    assert_only_kept(engine)
    ask(engine, tokens(10, 3), limit=38)  # all of a stream
    assert_only_kept(engine)


@pytest.mark.core
def test_a_stream_with_a_holder_is_chosen_where_its_text_is():
    engine = engine_of(GROUPS, [2, 5], stop=())
    prompt = tokens(20, 1)
    ask(engine, prompt)
    engine.submit(Request(prompt=tokens(9, 2), limit=15))
    engine.step()
    other = engine.submit(Request(prompt=[*prompt, 1], limit=2))
    engine.step()
    assert [q for q, one in enumerate(engine._schedule._placed) if one and one.id == other] == [1]
    assert len(list(engine.results())) == 2
    assert_only_kept(engine)


# ------------------------------------------------------------------------------------------- models


class Counting:
    """A model that counts the tokens that it computes."""

    def __init__(self, model):
        self.model, self.computed = model, 0

    def forward(self, weights, memory, ubatch):
        jax.debug.callback(self.add, jnp.sum(ubatch.valid))
        return self.model.forward(weights, memory, ubatch)

    def add(self, count):
        self.computed += int(count)


def model_with_store(name, *, sequences, holders, streams=1, **sizes):
    """An engine over a tiny model, which counts."""
    model = models.load(DATA / name)
    memory = model.make_memory(sequences=sequences, streams=streams, ubatch_size=64, **sizes)
    return model, Counting(model), memory, prefix.make_store(memory, holders=holders)


over_models = pytest.mark.parametrize(
    "name",
    mostly_nightly(
        ["llama_tied", "gemma3", "mamba2", "granite_hybrid"], few=["gemma3", "granite_hybrid"]
    ),
)


@pytest.mark.nightly
@over_models
def test_64_prompts_compute_512_common_tokens_once_and_hold_them_once(name):
    """8 side by side, in cells for the common ones once and for what 16 texts have of their own."""
    own, limit = 3, 10
    cells = 512 + 16 * (own + limit - 1)
    model, counted, memory, store = model_with_store(
        name, sequences=10, holders=[8, 9], cells=cells
    )
    engine = Engine(counted.forward, model.weights, memory, store=store, chunk=64, steps=4)
    common = tokens(512)
    for i in range(64):
        engine.submit(Request(prompt=[*common, i, *tokens(own - 1, i)], limit=limit))
    beside, results = 0, []
    while engine.busy:
        results += engine.step()
        beside = max(beside, placed(engine))
    jax.effects_barrier()
    assert sorted(result.found.length for result in results) == [0] + [512] * 63
    assert beside == 8
    assert counted.computed == 512 + 64 * (own + limit - 1)
    assert_only_kept(engine)


@pytest.mark.nightly
@over_models
def test_a_conversation_of_20_turns_computes_each_token_once(name):
    model, counted, memory, store = model_with_store(name, sequences=2, holders=[1], cells=256)
    engine = Engine(counted.forward, model.weights, memory, store=store, chunk=16, steps=4)
    text = []
    for turn in range(20):
        text += tokens(5, turn)
        result = ask(engine, text, limit=4)
        assert result.found == (max(len(text) - 6, 0), Miss.NONE if turn else Miss.UNKNOWN)
        text += result.tokens.tolist()
    jax.effects_barrier()
    assert counted.computed == len(text) - 1
    assert_only_kept(engine)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "streams", "reserve"),
    mostly_nightly(
        [
            ("llama_tied", 1, False),
            ("llama_tied", 10, True),
            ("gemma3", 1, True),
            ("mamba2", 10, False),
            ("granite_hybrid", 2, True),
        ],
        few=[("llama_tied", 10, True), ("granite_hybrid", 2, True)],
    ),
)
def test_64_requests_that_begin_alike_are_as_each_alone(name, streams, reserve):
    """Through 8 sequences with a store, and not a program after the warm-up."""
    requests = [
        replace(one, prompt=tokens(length, 99)[: 40 - len(one.prompt)] + one.prompt)
        for one, length in zip(mixed(64, most=40), [0, 30, 9, 28] * 16, strict=True)
    ]
    model = models.load(DATA / name)
    sharing = 10 // streams
    memory = model.make_memory(
        cells=40 * max(sharing // 2, 2), sequences=10, streams=streams, ubatch_size=16
    )
    store = prefix.make_store(memory, holders=[4, 9])
    options = dict(stop=STOP, chunk=16, steps=8, reserve=reserve)
    engine = Engine(model.forward, model.weights, memory, store=store, **options)
    engine.warm_up()
    with counting() as compiled:
        results = run(engine, requests)
        assert compiled() == 0
    assert sum(result.found.length for result in results) > 50
    empty = model.make_memory(cells=64, ubatch_size=16)
    assert_as_alone(results, requests, model=model.forward, weights=model.weights, memory=empty)
    assert_only_kept(engine)


@pytest.mark.core
@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize(
    "kind",
    mostly_nightly([RUNS, GROUPS_WINDOW], few=[GROUPS_WINDOW]),
    ids=lambda kind: kind.name,
)
def test_requests_that_come_at_any_time_are_as_without_a_store(kind, reserve):
    """A few at a time, beginning with more or less of two texts; one stream has no holder."""
    rng = random.Random(0)
    begun = [tokens(30, seed, 3) for seed in (1, 2)]
    requests = [
        Request(
            prompt=rng.choice(begun)[: rng.randrange(1, 31)] + tokens(rng.randrange(5), i),
            limit=rng.randrange(1, 6),
        )
        for i in range(24)
    ]

    def results_of(store):
        options = dict(stop=STOP, chunk=8, steps=4, reserve=reserve, store=store)
        engine, results = Engine(forward, None, kind.make(), **options), []
        waiting = list(requests)
        while waiting or engine.busy:
            for _ in range(min(len(waiting), 2)):
                engine.submit(waiting.pop(0))
            results += engine.step()
            assert not sum(jaxkv.check_invariants(engine.memory).values())
        if store:
            assert_only_kept(engine)
        return sorted(results, key=lambda result: result.id)

    plain = results_of(None)
    kept = results_of(prefix.make_store(kind.make(), holders=[5]))
    assert sum(result.found.length for result in kept) > 20
    for one, other in zip(kept, plain, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.reason == other.reason


@pytest.mark.core
@pytest.mark.parametrize(("name", "miss"), [("mamba2", Miss.NO_STATE), ("gemma3", Miss.LOST)])
def test_where_prompts_part_is_learnt_from_the_second_one(name, miss):
    """They come one after another, and what a text kept of itself begins only at its end."""
    model, _, memory, store = model_with_store(name, sequences=4, holders=[1, 2, 3], cells=2400)
    engine = Engine(model.forward, model.weights, memory, store=store, chunk=64, steps=4)
    common = tokens(200)
    found = [ask(engine, [*common, i, *tokens(500, i)]).found for i in range(3)]
    assert found[0] == (0, Miss.UNKNOWN)
    assert found[1] == (0, miss)
    assert found[2] == (200, Miss.NONE)


@pytest.mark.core
def test_nothing_compiles_after_a_warm_up():
    """Not for texts that are longer than any before, either."""
    engine = engine_of(SMALL, [2, 3])
    engine.warm_up()
    common = tokens(8)
    with counting() as compiled:
        run(engine, [Request(prompt=[*common, i], limit=3) for i in range(4)])
        ask(engine, [*common, *tokens(12, 7)], limit=3)
        assert compiled() == 0


def test_what_cannot_be_is_refused():
    memory = POOL.make()
    for store, error, message in [
        (3, TypeError, "wanted a store, make_store makes it, got <class 'int'>"),
        (prefix.make_store(GROUPS.make(), holders=[0]), ValueError, "that the store was made for"),
        (prefix.make_store(memory, holders=range(6)), ValueError, "got one with all 6 as holders"),
    ]:
        with pytest.raises(error, match=message):
            Engine(forward, None, memory, store=store)
