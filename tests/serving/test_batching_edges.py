"""An engine at its edges: few cells, requests that end in a step that refuses others, chunks."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.serving.engine import Engine, FinishReason, Request
from jaxkv.serving.prefill_chunks import PromptPart, chunk_shapes, cut_chunk
from jaxkv.serving.prefix_cache.prompts import ModelInputs
from jaxkv.serving.request import check_config, make_batch_sampler
from tests.helpers.caches import Kind, attention_cache
from tests.serving import servers
from tests.serving.servers import (
    POOL,
    STREAMS,
    count_placed,
    generate_alone,
    make_engine,
    run_requests,
)

pytestmark = pytest.mark.core


@pytest.mark.parametrize("kind", [POOL, STREAMS, Kind("one", cells=12, sequences=1)], ids=str)
@pytest.mark.parametrize("reserve", [True, False])
def test_submit_of_a_request_for_more_cells_than_a_stream_raises(kind, reserve):
    engine = make_engine(kind, reserve=reserve)
    with pytest.raises(ValueError, match=f"expected cells for {kind.cells + 1} tokens"):
        engine.submit(Request(prompt=[1] * (kind.cells + 1), max_new_tokens=1))
    with (
        pytest.raises(ValueError, match="prompt of 1, and all but the last")
        if reserve
        else (pytest.raises(ValueError, match="expected max_new_tokens of at least 1"))
    ):
        engine.submit(Request(prompt=[1], max_new_tokens=(kind.cells + 1) * reserve))
    assert not engine.busy
    (result,) = run_requests(engine, [Request(prompt=[1] * kind.cells, max_new_tokens=1)])
    assert result.tokens.size == 1 and result.reason in (FinishReason.LENGTH, FinishReason.STOP)


@pytest.mark.parametrize("ubatch_size, chunk", [(None, 128), (8, 8)])
def test_default_chunk_is_within_the_ubatch_size_of_the_cache(ubatch_size, chunk):
    spec = replace(POOL.make().table.spec, ubatch_size=ubatch_size)
    options = dict(sampling_options=(), penalty_last_n=1, max_stop_tokens=0)
    options |= dict(constraint=None, extra=None)
    assert (
        check_config(spec, prefill_chunk=None, tokens_per_step=1, **options).prefill_chunk == chunk
    )


def test_stop_tokens_of_a_request_up_to_the_maximum():
    engine = make_engine(POOL, max_stop_tokens=2)
    engine.submit(Request(prompt=[1], max_new_tokens=1, stop_tokens=[8, 9]))
    with pytest.raises(ValueError, match="stop"):
        engine.submit(Request(prompt=[1], max_new_tokens=1, stop_tokens=[7, 8, 9]))


def test_request_that_ends_leaves_its_cells_to_a_refused_one():
    """Both need a cell in one step, and only one is free: the text of both goes on or ends."""
    kind = Kind("tight", cells=10, sequences=2)
    engine = make_engine(kind, reserve=False, tokens_per_step=2, stop_tokens=[])
    first = engine.submit(Request(prompt=[1, 2], max_new_tokens=4))
    second = engine.submit(Request(prompt=[3, 4, 5], max_new_tokens=7))
    most, preempted, results = 0, 0, []
    while engine.busy:
        before = len(engine.tokens_of(second))
        results += engine.step()
        most = max(most, int(engine.cache.num_used_cells()))
        states = [text for text in engine._schedule.all_requests if text.id == second]
        preempted += bool(before) and any(text.sequence < 0 for text in states)
    assert most > 7 and preempted == 0
    for result, tokens in zip(sorted(results, key=lambda one: one.id), (4, 7), strict=True):
        wanted, *_ = generate_alone(result.request, stop_tokens=())
        assert result.tokens.tolist() == wanted.tolist() and result.tokens.size == tokens
    assert [result.id for result in results] == [first, second]


def test_requests_need_cells_for_as_many_tokens_as_they_may_generate():
    engine = make_engine(POOL, reserve=False)
    for seed in (1, 2):
        engine.submit(Request(prompt=servers.draw_tokens(12, seed), max_new_tokens=1))
    engine._schedule.admit()
    assert count_placed(engine) == 2


def test_requests_in_a_window_need_cells_for_a_token_of_each():
    """Each of 3 texts attends to 2 cells, and all get a token in one step."""
    kind = Kind("window", cells=10, sequences=4, windows=(jaxkv.Window.sliding(3),))
    engine = make_engine(kind, prefill_chunk=1)
    for seed in range(4):
        engine.submit(Request(prompt=servers.draw_tokens(6, seed), max_new_tokens=4))
    engine._schedule.admit()
    assert count_placed(engine) == 3


def test_request_waits_for_the_cells_of_a_chunk_in_a_window():
    kind = Kind("window", cells=11, sequences=2, windows=(jaxkv.Window.sliding(3),))
    for chunk, count in ((8, 1), (4, 2)):
        engine = make_engine(kind, prefill_chunk=chunk)
        for seed in range(2):
            engine.submit(Request(prompt=servers.draw_tokens(20, seed), max_new_tokens=4))
        engine.step()
        assert count_placed(engine) == count
        results = sorted(engine.results(), key=lambda result: result.id)
        cache = Kind("alone", cells=64, sequences=1, windows=kind.windows)
        for result in results:
            wanted, *_ = generate_alone(result.request, cache=cache.make())
            assert result.tokens.tolist() == wanted.tolist()


def test_chunk_costs_are_summed_over_prompts():
    spec = Kind("streams", cells=64, sequences=3, streams=3).make().table.spec
    texts = [ModelInputs(tokens=np.arange(n, dtype=np.int32)) for n in (16, 8, 8)]
    parts = [PromptPart(i, text) for i, text in enumerate(texts)]
    chunk, counts = cut_chunk(spec, chunk_shapes(spec, 32), parts)
    assert chunk.valid.shape == (3, 8) and counts == [8, 8, 8]


@pytest.mark.parametrize(
    "sampling, filters",
    [
        ({}, []),
        ({"temperature": 1.0}, ["temperature", "min_p"]),
        ({"temperature": 1.0, "top_k": 2}, ["temperature", "top_k", "top_p", "min_p"]),
        ({"temperature": 1.0, "top_p": 0.5}, ["temperature", "top_k", "top_p", "min_p"]),
    ],
)
def test_sampler_of_requests_has_the_filters_that_one_asks_for(sampling, filters):
    names = ["temperature", "top_k", "top_p", "min_p"]
    request = Request(prompt=[1], max_new_tokens=1, sampling=sampling)
    options = dict(sampling_options=frozenset(names), penalty_last_n=4)
    sampler = make_batch_sampler([None, request], **options)
    assert [name for name in names if getattr(sampler, name) is not None] == filters


@pytest.mark.parametrize("length, reason", [(8, "LENGTH"), (9, "NONFINITE_LOGITS")])
def test_prompt_of_two_chunks_ends_if_a_model_attends_ahead(length, reason):
    """Tokens of the first chunk would attend to tokens of the second."""

    def ahead(params, step):
        x = jnp.ones((*step.valid.shape, 1, 1))
        for layer in range(2):
            step, x = jaxkv.attend(step, layer, x, x, x, causal=False)
        return step, jnp.tile(x.reshape(-1, 1)[step.outputs], 3)

    cache = attention_cache(layers=2, kv_heads=1, head_dim=1, cells=16, sequences=1)
    engine = Engine(ahead, None, cache, prefill_chunk=8)
    (result,) = run_requests(engine, [Request(prompt=[1] * length, max_new_tokens=1)])
    assert result.reason == FinishReason[reason]


def test_stop_token_in_the_middle_of_a_step_ends_a_request():
    request = Request(prompt=[1, 2, 3], max_new_tokens=8, sampling={"temperature": 1.5}, seed=3)
    wanted, *_ = generate_alone(request, stop_tokens=[])
    stop = next(token for i, token in enumerate(wanted) if i > 1 and token not in wanted[:i])
    engine = make_engine(POOL, tokens_per_step=8, stop_tokens=[int(stop)])
    (result,) = run_requests(engine, [request])
    assert result.reason == FinishReason.STOP
    assert result.tokens.tolist() == wanted[: wanted.tolist().index(stop) + 1].tolist()


def test_refused_chunk_preempts_no_request_of_another_stream():
    """The running request takes the cells that the prompt beside it needs for its last chunks."""
    engine = make_engine(
        Kind("groups", cells=44, sequences=6, streams=2),
        reserve=False,
        tokens_per_step=1,
        stop_tokens=[],
    )
    requests = [Request(prompt=[1, 2, 3, 4], max_new_tokens=24)]
    requests += [Request(prompt=servers.draw_tokens(38, seed), max_new_tokens=2) for seed in (1, 2)]
    ids, waited = [engine.submit(request) for request in requests], set()
    results = []
    while engine.busy:
        results += engine.step()
        waited |= {text.id for text in engine._schedule.all_requests if text.sequence < 0}
    assert waited == {ids[1]} and {result.reason for result in results} == {FinishReason.LENGTH}
    for result in results:
        wanted, *_ = generate_alone(result.request, stop_tokens=())
        assert result.tokens.tolist() == wanted.tolist()
