"""Loops and stores on a mesh: the results of one device, and no late compilation."""

import jax
import pytest
from jax.sharding import AxisType

import jaxkv
from jaxkv import generation
from jaxkv.serving import PrefixStore
from jaxkv.serving.engine import Engine, Request
from models.compiling import counting
from tests.helpers.meshes import place_on_mesh
from tests.sharding.tiny import KINDS, assert_close, make_tiny, model_of, params, replicate

AXES = {"data": 2, "tensor": 2, "cells": 2}
AUTO, EXPLICIT = (AxisType.Auto,) * 3, (AxisType.Explicit,) * 3
HOLDERS = [1, 3]

pytestmark = pytest.mark.nightly


def after_a_warm_up(forward, params, cache):
    cache = generation.warm_up(forward, params, cache, ubatch_size=4, longest=6)
    cache = generation.warm_up(forward, params, cache, ubatch_size=4, donate=True)
    logits = []
    with counting(traces=True) as compiled:
        for seq, prompt in enumerate([[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 12]]):
            batch = jaxkv.make_batch(prompt, sequences=seq)
            cache, out, *_ = jaxkv.prefill(forward, params, cache, batch, ubatch_size=4)
            logits.append(out)
        assert compiled() == 0
    return logits


def after_beams_and_slides(forward, params, cache):
    batch = jaxkv.make_batch([[1, 2, 3, 1, 2], [4, 5, 6, 4, 5]], sequences=[0, 2])
    cache, logits, *_ = jaxkv.prefill(forward, params, cache, batch)
    search = {"num_beams": 2, "num_tokens": 2, "sequences": [0, 1]}
    searched, *_ = beams = generation.beam(forward, params, cache, logits[:1], **search)
    slid, ok = generation.context_shift(cache, 2, num_keep=1, num_discard=2)
    extended, well, done = generation.self_extend(cache, 0, 0, group=2, width=4)
    assert ok and well
    return beams.tokens, beams.num_cached, done, searched, slid, extended


def after_a_store(forward, params, cache):
    """Logits after a prefix that another stream may hold, and the store's results."""
    store = PrefixStore(cache, sequences=HOLDERS)
    batch = jaxkv.make_batch([1, 2, 3, 4])
    cache, *_ = jaxkv.prefill(forward, params, cache, batch)
    cache, store, (_, miss, _) = store.store(cache, [1, 2, 3, 4], 0)
    seen = [miss, store.num_used_cells(cache)]
    for seq in (0, 2):
        cache, store, found = store.fork(cache, [1, 2, 3, 4, 5, 6], seq)
        batch = jaxkv.make_batch([5, 6], sequences=seq)
        cache, logits, *_ = jaxkv.prefill(forward, params, cache, batch)
        seen += [found, logits]
    cache, store = store.evict(cache, cells=0)
    return [*seen, cache.num_used_cells()]


def after_requests(forward, params, cache):
    store = PrefixStore(cache, sequences=HOLDERS)
    options = dict(prefill_chunk=8, tokens_per_step=2, sampling_options=())
    engine = Engine(forward, params, cache, prefix_store=store, **options)
    engine.warm_up()
    found = []
    with counting() as compiled:
        for last in ([], [5], [5, 6], [7]):
            engine.submit(Request(prompt=[1, 2, 3, 4, *last], max_new_tokens=2))
            (result,) = engine.results()
            found.append((result.prefix_hit, result.tokens))
        assert compiled() == 0
    return found


def check(story, kind, modes):
    layers, options = kind
    forward = model_of(layers)
    wanted = story(forward, params(), make_tiny(layers, **options))
    with jax.set_mesh(jax.make_mesh((*AXES.values(),), (*AXES,), modes)):
        assert_close(
            story(forward, replicate(params()), place_on_mesh(make_tiny(layers, **options))), wanted
        )


@pytest.mark.parametrize(
    ("story", "modes"),
    [(after_a_warm_up, EXPLICIT), (after_a_store, AUTO), (after_requests, EXPLICIT)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_loops_on_mesh_match_one_device(story, kind, modes):
    check(story, KINDS[kind], modes)


def test_beam_context_shift_self_extend_on_mixed_mesh_match_one_device():
    kind = "a", {"streams": 2, "rope": jaxkv.Rope.make(4)}
    check(after_beams_and_slides, kind, (EXPLICIT[0], AUTO[0], EXPLICIT[0]))
