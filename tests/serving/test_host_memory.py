"""Stored prompts in host memory: they come back unchanged, and never exceed the limit."""

import random

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import sharding
from jaxkv.cache import merge, split
from jaxkv.core.array_utils import nbytes
from jaxkv.serving import MissReason as Miss
from jaxkv.serving import PrefixStore
from jaxkv.serving.prefix_cache.matching import find_miss_reasons
from jaxkv.serving.prefix_cache.prompts import ModelInputs, PrefixHit, PrefixStats
from tests.generation.tiny import assert_sound, load_tiny
from tests.helpers.caches import GROUPS, Kind, assert_identical, drawing
from tests.helpers.parametrize import mark_cases
from tests.serving.servers import Server, draw_tokens, make_server

pytestmark = pytest.mark.core

POOL = Kind("pool", cells=40, sequences=6)
CELL = 2 * 2 * 2 * 4 * 4  # bytes: layers, keys and values, heads, numbers of a head, float32
FROM_HOST = True
NAMES = ["granite_hybrid", "llama_tied", "gemma3", "mamba2", "qwen3_5"]


def inputs_of(tokens):
    return ModelInputs(tokens=np.array(tokens, np.int32))


def texts_of(prompts):
    return [prompt.tokens.tolist() for prompt in prompts]


def host_texts(store):
    return texts_of(store.all_prompts[: len(store.all_prompts) - len(store.prompts)])


def compute(model, cache, tokens, seq):
    batch = jaxkv.make_batch(tokens, sequences=seq)
    return jaxkv.prefill(model.forward, model.params, cache, batch)[:2]


@pytest.mark.parametrize("name", mark_cases(NAMES, fast=NAMES[:1]))
def test_prompt_from_host_gives_equal_logits_and_earlier_stores_stay_valid(name):
    model, prompt = load_tiny(name), draw_tokens(20)
    cache = model.make_cache(cells=64, sequences=4, ubatch_size=32)
    store = PrefixStore(cache, sequences=[3], host_bytes=10**7)
    cache, _ = compute(model, cache, prompt, 0)
    cache, store, _ = store.store(cache, prompt, 0)
    cache, _ = jaxkv.seq_rm(cache, 0)
    away = store.evict(cache, cells=0)
    assert away.cache.num_used_cells() == 0 < away.store.num_host_bytes
    assert away.store.stats == PrefixStats(moved_to_host=1)
    wanted, buffers = None, cache.buffers
    for some, one, from_host in [(*away, True), (cache, store, False), (*away, True)]:
        assert one.fork(some, [7, *prompt], 1).hit == PrefixHit(0, Miss.UNKNOWN)
        some, one, hit = one.fork(some, [*prompt, 1, 2], 1)
        assert hit == PrefixHit(20, Miss.NONE, from_host)
        (kept,) = one.prompts
        assert not find_miss_reasons(some, 1, inputs_of(prompt))[-1]
        assert kept.sequence == 3 and one.num_host_bytes == 0
        some, logits = compute(model, some, [1, 2], 1)
        wanted = logits if wanted is None else wanted
        np.testing.assert_array_equal(logits, wanted)
    assert all(x is y for x, y in zip(*map(jax.tree.leaves, (buffers, cache.buffers)), strict=True))


def test_host_prompts_are_dropped_least_recently_used_first():
    texts = [[i, 1, 2, 3] for i in range(4)]
    server = make_server(POOL.make(), [5], *texts[:3], host_bytes=8 * CELL)
    assert (server.texts, host_texts(server.store)) == ([texts[2]], texts[:2])
    assert server.ask([*texts[0], 9]) == PrefixHit(4, Miss.NONE, FROM_HOST)
    assert (server.texts, host_texts(server.store)) == ([texts[0]], [texts[1], texts[2]])
    server.ask(texts[3])
    server.remember(texts[3])
    assert (server.texts, host_texts(server.store)) == ([texts[3]], [texts[2], texts[0]])
    assert server.found([*texts[1], 9]) == PrefixHit(0, Miss.EVICTED)
    assert server.store.num_host_bytes == 8 * CELL
    assert repr(server.store).endswith("2 prompts of 8 tokens in 1024 of 1024 host bytes)")
    counts = dict(hits=1, hits_from_host=1, misses=4, forked_tokens=4)
    assert server.store.stats == PrefixStats(moved_to_host=4, dropped=1, **counts)
    without = server.store.with_prompts({5: texts[3]})
    assert without.num_host_bytes == 0 and len(without.all_prompts) == 1


def test_prompt_larger_than_the_limit_is_dropped():
    server = make_server(POOL.make(), [5], [1, 2], range(10, 15), host_bytes=7 * CELL)
    server.cache, server.store = server.store.evict(server.cache, cells=0)
    assert host_texts(server.store) == [[1, 2]]  # the 5 cells are rounded up to 8
    assert server.found([10, 11]) == PrefixHit(0, Miss.EVICTED)
    assert server.store.stats.dropped == 1


def test_forks_of_a_prompt_from_host_share_its_cells():
    server = make_server(POOL.make(), [4, 5], range(8), host_bytes=10**6)
    server.cache, server.store = server.store.evict(server.cache, cells=0)
    for seq in range(4):
        found = server.ask([*range(8), 20 + seq], seq)
        assert found == PrefixHit(8, Miss.NONE, seq == 0)
    assert server.cache.num_used_cells() == 8 + 4 and server.computed == 4
    assert server.store.stats.hits_from_host == 1


def test_device_prompt_is_preferred_to_an_equal_host_prompt():
    server = make_server(POOL.make(), [5], [1, 2, 3, 4, 5], [1, 2, 3, 6], host_bytes=10**6)
    assert host_texts(server.store) == [[1, 2, 3, 4, 5]]
    assert server.found([1, 2, 3, 7]) == PrefixHit(3, Miss.NONE)
    assert server.found([1, 2, 3, 4, 7]) == PrefixHit(4, Miss.NONE, FROM_HOST)


def test_host_prompt_replaces_its_prefixes():
    server = make_server(POOL.make(), [5], [1, 2, 3], [7, 8], host_bytes=10**6)
    for text in ([1, 2, 3, 4, 5], [1, 2]):
        server.go_on(text)  # computed again
        server.remember(text)
        server.forget()
        server.cache, server.store = server.store.evict(server.cache, cells=0)
        assert host_texts(server.store) == [[7, 8], [1, 2, 3, 4, 5]]
    assert server.store.stats.dropped == 0


def test_host_prompt_that_fits_no_store_sequence_is_copied_to_the_target():
    """GROUPS has two streams of 10 cells; the only store sequence is in stream 0."""
    server = make_server(GROUPS.make(), [1], range(8), host_bytes=10**6)
    server.cache, server.store = server.store.evict(server.cache, cells=0)
    server.go_on(range(20, 26), seq=0)
    assert server.ask(range(9), 2) == PrefixHit(8, Miss.NONE, FROM_HOST)
    assert not server.texts and host_texts(server.store) == [[*range(8)]]
    assert drawing(server.cache).endswith("| 0{2} 1{2} 2{2} 3{2} 4{2} 5{2} 6{2} 7{2} 8{2}")
    before = server.cache
    server.cache, server.store, hit = server.store.fork(server.cache, range(9), 3)
    assert hit == PrefixHit(0, Miss.OUT_OF_CELLS) and host_texts(server.store) == [[*range(8)]]
    assert_identical(server.cache, before)


def test_host_prompt_in_another_stream_is_forked_by_a_copy():
    server = make_server(GROUPS.make(), [1], range(4), host_bytes=10**6)
    server.cache, server.store = server.store.evict(server.cache, cells=0)
    assert server.ask(range(5), 2) == PrefixHit(4, Miss.NONE, FROM_HOST)
    assert server.texts == [[*range(4)]] and not server.store.num_host_bytes
    assert server.cache.num_used_cells() == 4 + 5
    assert_sound(server.cache)


def test_host_prompts_respect_the_cells_of_the_store():
    server = make_server(POOL.make(), [4, 5], [1, 2, 3, 4], [5, 6, 7], cells=5, host_bytes=10**6)
    assert (server.texts, host_texts(server.store)) == ([[5, 6, 7]], [[1, 2, 3, 4]])
    assert server.ask([1, 2, 3, 4, 9]) == PrefixHit(4, Miss.NONE, FROM_HOST)
    assert (server.texts, host_texts(server.store)) == ([[1, 2, 3, 4]], [[5, 6, 7]])
    assert server.held <= 5


@pytest.mark.parametrize("seed", mark_cases(range(6), fast=[0]))
def test_random_prompts_with_host_memory_keep_the_limits(seed):
    rng, cache, limit = random.Random(seed), POOL.make(), 20 * CELL
    store = PrefixStore(cache, sequences=[3, 4, 5], cells=14, host_bytes=limit)
    server, lost = Server(cache, store), 0
    for _ in range(25):
        text = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
        common = [
            prompt.inputs.common_prefix_length(inputs_of(text[:-1]))
            for prompt in server.store.all_prompts
        ]
        assert server.ask(text, 0).length == max(common, default=0)
        assert find_miss_reasons(server.cache, 0, inputs_of(text))[-1] == Miss.NONE
        if rng.random() < 0.8:
            server.remember(text)
        server.forget()
        prompts = server.store.all_prompts[: -len(server.store.prompts) or None]
        sizes = [nbytes(one.cache.buffers) for one in prompts]
        assert server.store.num_host_bytes == sum(sizes) <= limit and server.held <= 14
        assert all(int(one.cache.seq_pos_max(0)) + 1 == one.tokens.size for one in prompts)
        assert lost <= (lost := server.store.stats.dropped)
        assert_sound(server.cache)
    assert lost and server.store.stats.hits_from_host


def run_conversations(count, *, host_bytes):
    """Conversations of three turns with one of four beginnings, in turn; computed tokens."""
    holders = range(4, 4 + count // 4)
    cache = Kind("", cells=400, sequences=4 + len(holders)).make()
    cells = count // 4 * (12 + 3 * 6)  # a quarter of all conversations
    server = make_server(cache, holders, cells=cells, host_bytes=host_bytes)
    texts = [draw_tokens(12, 100 + i % 4) for i in range(count)]
    for turn in range(3):
        for i, text in enumerate(texts):
            text += draw_tokens(3, 1000 + 10 * i + turn)
            server.ask(text)
            server.go_on(answer := draw_tokens(3, 2000 + 10 * i + turn))
            text += answer
            assert server.remember(text) is Miss.NONE
            server.forget()
    return server.computed


@pytest.mark.nightly
def test_host_memory_halves_the_computed_tokens_of_conversations():
    alone, both = (run_conversations(16, host_bytes=size) for size in (None, 10**7))
    assert both <= 4 * 12 + 16 * 3 * 6  # each token once
    assert both <= alone / 2


@pytest.mark.parametrize("on_mesh", [False, True])
def test_insert_takes_a_source_with_its_buffers_alone_in_host_memory(on_mesh):
    mesh = jax.make_mesh((2,), ("tensor",)) if on_mesh else None
    where = {"mesh": mesh} if on_mesh else {}
    spec = jaxkv.CacheSpec.attention(layers=1, kv_heads=2, head_dim=4)
    cache = jaxkv.make_cache(spec, cells=8, sequences=3, **where)
    with jax.set_mesh(mesh) if on_mesh else jax.default_device(jax.devices()[0]):
        server = make_server(cache, [2], [1, 2, 3], host_bytes=10**6)
        server.cache, server.store = server.store.evict(server.cache, cells=0)
        (prompt,) = server.store.all_prompts
        table, buffers = split(prompt.cache)
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(buffers)}
        assert kinds == {"pinned_host"}
        assert table.sharding_rules == cache.table.sharding_rules
        moved, ok = jaxkv.insert(server.cache, merge(table, buffers), 0, 1)
        assert ok and moved.seq_pos_max(1) == 2
        assert server.ask([1, 2, 3, 4]) == PrefixHit(3, Miss.NONE, FROM_HOST)
        for x, y in zip(*map(jax.tree.leaves, (server.cache, cache)), strict=True):
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        assert not on_mesh or isinstance(cache.table.sharding_rules, sharding.ShardingRules)
