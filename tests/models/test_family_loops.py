"""Loops and edits of caches with whole models, against the greedy tokens of transformers."""

from functools import partial

import numpy as np
import pytest

import jaxkv
from jaxkv import make_batch, snapshot
from jaxkv.serving import PrefixStore
from tests.models.test_families import load_record

pytestmark = pytest.mark.nightly

NAMES = ["llama4", "nemotron_h", "deepseek_v32"]
over_names = pytest.mark.parametrize("name", NAMES)
NEW = 32  # greedy tokens at the end of each text


def compute(model, cache, tokens, sequence):
    batch = make_batch([tokens], sequences=[sequence], outputs=np.ones(len(tokens), bool))
    return jaxkv.prefill(model.forward, model.params, cache, batch, ubatch_size=16)[:2]


def assert_rest_matches(record, cache, sequence, text):
    """Feed the last tokens of a text, of which the cache has the others; compare the logits."""
    _, found = compute(record.model, cache, record.tokens[text][-NEW:], sequence)
    np.testing.assert_allclose(found, record.logits[text][-NEW:], rtol=0, atol=record.within)


@over_names
def test_generate_writes_the_greedy_tokens_of_transformers(name):
    record = load_record(name)
    model, prompts = record.model, [text[:-NEW].tolist() for text in record.tokens]
    cache = model.make_cache(cells=512, sequences=3)
    made = jaxkv.generate(model.forward, model.params, prompts, cache=cache, max_new_tokens=NEW)
    np.testing.assert_array_equal(made.tokens, [text[-NEW:] for text in record.tokens])


@over_names
@pytest.mark.parametrize("streams", [1, 3])
def test_logits_match_after_fork_undo_and_snapshot(name, streams):
    record = load_record(name)
    model, prompt = record.model, record.tokens[0][:-NEW]
    make = partial(model.make_cache, cells=256, sequences=3, streams=streams, max_rollback=6)
    cache, _ = compute(model, make(), prompt, 0)
    cache, *_ = jaxkv.seq_cp(cache, 0, 1)
    cache, _ = compute(model, cache, [5, 6, 7, 8], 1)
    loaded = snapshot.load(snapshot.save(cache), into=make())
    for one in (cache, loaded):
        one, ok = jaxkv.seq_rm(one, 1, len(prompt))
        assert ok
        for sequence in (0, 1):
            assert_rest_matches(record, one, sequence, 0)


@over_names
def test_logits_match_after_a_stored_prefix(name):
    record = load_record(name)
    model, prompt = record.model, record.tokens[0][:-NEW].tolist()
    cache = model.make_cache(cells=256, sequences=4, ubatch_size=32)
    store = PrefixStore(cache, sequences=[3])
    cache, _ = compute(model, cache, prompt, 0)
    cache, store, _ = store.store(cache, prompt, 0)
    cache, ok = jaxkv.seq_rm(cache, 0)
    assert ok
    cache, store, hit = store.fork(cache, record.tokens[0].tolist(), 1)
    assert hit.length == len(prompt)
    assert_rest_matches(record, cache, 1, 0)
