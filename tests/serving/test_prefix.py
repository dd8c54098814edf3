"""A prefix store: each token is computed and stored once, and a fork continues like a computed
text.

Where only the table matters, tokens are applied and no model runs. `Server` counts the computed
tokens: the rest of each prompt after its stored prefix.
"""

import os
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import jaxkv
from jaxkv import generation, snapshot
from jaxkv.hybrid import compose_hybrid_cache
from jaxkv.serving import MissReason as Miss
from jaxkv.serving import PrefixStore
from jaxkv.serving.prefix_cache.prompts import PrefixHit
from tests.generation.tiny import assert_sound
from tests.helpers import edit_sequences
from tests.helpers.caches import GROUPS, Kind, assert_identical, drawing
from tests.helpers.edit_sequences import list_states, state_bytes
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import add_tokens, apply_batch, apply_plan
from tests.serving.servers import Server, draw_tokens, make_server, make_states
from tests.snapshot.saved import randomize

pytestmark = pytest.mark.core

POOL = Kind("pool", cells=40, sequences=6)
WINDOW = replace(POOL, windows=(jaxkv.Window.sliding(6),))
STREAMS = Kind("streams", cells=12, sequences=3, streams=3)


def make_hybrid(max_rollback=0):
    return compose_hybrid_cache((POOL.make(), [0, 1]), (make_states(max_rollback), [2]))


MAKES = {"full": POOL.make, "window": WINDOW.make, "states": make_states, "hybrid": make_hybrid}
over_kinds = pytest.mark.parametrize("kind", mark_cases(MAKES, fast=["hybrid"]))


@over_kinds
def test_prefix_in_a_conversation_computes_each_token_once(kind):
    server, text = make_server(MAKES[kind](), [3]), []
    for turn in range(5):
        text += draw_tokens(4, turn)
        found = server.ask(text)
        assert found == PrefixHit(len(text) - 4, Miss.NONE if turn else Miss.UNKNOWN)
        answer = draw_tokens(4, 100 + turn)
        server.go_on(answer)
        text += answer
        assert server.remember(text) is Miss.NONE
        server.forget()  # frees the sequence until the next turn
    assert server.computed == len(text) == 40
    assert len(server.store.prompts) == 1
    assert server.cache.num_used_cells() == server.held


def test_store_keeps_no_text_with_a_hole_or_a_move():
    """And forks none: of a holder with a hole only the tokens before it are used."""
    cache, text = POOL.make(), [1, 2, 3, 4, 5, 6]
    store = PrefixStore(cache, sequences=[3])
    cache = apply_batch(cache, text)
    for edited, _ in (jaxkv.seq_rm(cache, 0, 2, 4), jaxkv.seq_add(cache, 0, 0, -1, delta=3)):
        same, kept, (_, miss, _) = store.store(edited, text, 0)
        assert miss is Miss.INCOMPLETE and not kept.prompts
        assert_identical(same, edited)
    cache, store, (_, miss, _) = store.store(cache, text, 0)
    assert miss is Miss.NONE
    for cut, found in (
        ((2, 4), PrefixHit(2, Miss.INCOMPLETE)),
        ((0, -1), PrefixHit(0, Miss.CONTEXT_EVICTED)),
    ):
        cache, _ = jaxkv.seq_rm(cache, 3, *cut)
        assert store.fork(cache, [*text, 7], 1).hit == found


def test_fork_of_a_moved_recurrent_holder_finds_nothing():
    cache, text = make_states(), [1, 2, 3, 4]
    store = PrefixStore(cache, sequences=[1])
    cache = apply_batch(cache, text)
    cache, store, (_, miss, _) = store.store(cache, text, 0)
    assert miss is Miss.NONE and store.fork(cache, [*text, 7], 0).hit[0] == 4
    cache, ok = jaxkv.seq_add(cache, 1, 0, -1, delta=3)
    assert ok and store.fork(cache, [*text, 7], 0).hit[0] == 0


def test_store_knows_the_text_that_a_sequence_holds():
    text, empty = [1, 2, 3, 4, 5, 6], POOL.make(None)
    other = add_tokens(empty, [1, 2, 3, 9])
    slid, ok = generation.context_shift(add_tokens(empty, text), 0, num_keep=2, num_discard=2)
    slid = jaxkv.apply(slid, jaxkv.init_update(slid))
    placed = apply_batch(empty, text, extra={"place": np.zeros(6)})
    store = PrefixStore(empty, sequences=[3])
    assert ok
    for cache, claimed in ((slid, [1, 2, 5, 6]), (other, text[:4]), (placed, text)):
        assert store.store(cache, claimed, 0).hit.miss is Miss.OTHER_TOKENS
    cache, _ = jaxkv.seq_cp(add_tokens(add_tokens(empty, [9, 9], 1), text), 0, 2)
    cache = apply_plan(jaxkv.seq_rm(cache, 1)[0], jaxkv.defrag_plan(jaxkv.seq_rm(cache, 1)[0]))
    cache, store, (_, miss, _) = store.store(cache, text, 2)
    assert miss is Miss.NONE
    refilled = add_tokens(jaxkv.seq_rm(cache, 3)[0], [1, 2, 9, 4, 5, 6], 3)
    for holding in (refilled, add_tokens(empty, [1, 2, 9, 4, 5, 6], 3)):
        assert store.fork(holding, [*text, 7], 1).hit == PrefixHit(2, Miss.OTHER_TOKENS)
    assert store.fork(cache, [*text, 7], 1).hit == PrefixHit(6, Miss.NONE)


def test_store_knows_the_text_that_a_state_has_seen():
    text = [1, 2, 3, 4, 5, 6]
    cache = edit_sequences.make(kept=1, streams=3)
    store = PrefixStore(cache, sequences=[2])
    for part in (text[:2], text[2:3], text[3:]):
        cache = edit_sequences.run_batch(cache, jaxkv.make_batch(part, sequences=0))
    for claimed in ([1, 2, 3, 4, 5, 7], [2, 1, 3, 4, 5, 6]):
        assert store.store(cache, claimed, 0).hit.miss is Miss.OTHER_TOKENS
    moved, _ = jaxkv.seq_add(cache, 0, 0, -1, delta=1)
    moved, ok = jaxkv.seq_add(moved, 0, 1, -1, delta=-1)  # back again: its content is the same
    cache = jaxkv.snapshot.load(jaxkv.snapshot.save(moved))
    cache, kept, (_, miss, _) = store.store(cache, text, 0)
    assert ok and miss is Miss.NONE
    assert kept.fork(cache, [*text, 7], 1).hit == PrefixHit(6, Miss.NONE)
    cache, _ = jaxkv.seq_rm(cache, 2)
    refilled = edit_sequences.run_batch(cache, jaxkv.make_batch([9, *text[1:]], sequences=2))
    assert kept.fork(refilled, [*text, 7], 1).hit == PrefixHit(0, Miss.OTHER_TOKENS)


@over_kinds
def test_prefix_by_5_prompts_holds_common_tokens_once(kind):
    common = draw_tokens(16)
    server = make_server(MAKES[kind](), [5], common)
    for seq in range(5):
        assert server.ask([*common, 20 + seq, 30], seq) == PrefixHit(16, Miss.NONE)
    assert server.computed == 5 * 2
    cells, each = {"states": (1, 1), "hybrid": (16 + 1, 2 + 1)}.get(kind, (16, 2))
    assert server.held == cells and server.cache.num_used_cells() == cells + 5 * each


def test_prefix_of_a_state_has_seen_the_prefix():
    def write_states(cache, some, seq):
        return edit_sequences.run_batch(cache, jaxkv.make_batch(some, sequences=seq))

    cache = edit_sequences.make(kept=1, streams=3)
    server = Server(cache, PrefixStore(cache, sequences=[2]), add_tokens=write_states)
    server.ask([1, 2, 3])
    server.remember([1, 2, 3])
    assert server.ask([1, 2, 3], 1) == PrefixHit(2, Miss.NONE)
    assert server.ask([1, 2, 3, 4], 1) == PrefixHit(3, Miss.NONE)
    assert list_states(server.cache, 1)[-1] == (3, state_bytes([1, 2, 3, 4], range(2)))


# ---- the cases of ollama's runner/ollamarunner/cache_test.go, until v0.30

FIND_SLOT = {  # holders; stored texts; a prompt, its match; the texts afterwards
    "Empty": ([1, 2], [], [1], PrefixHit(0, Miss.UNKNOWN), [[1]]),
    "Extend": ([1, 2, 3], [[1, 2, 3], [1, 5]], [1, 2, 3, 4], PrefixHit(3, Miss.NONE), None),
    "New": ([1, 2], [[1]], [2], PrefixHit(0, Miss.UNKNOWN), [[1], [2]]),  # the empty one is used
    # ollama cuts the slot to [1] if no other is free. Here it is whole until it is evicted.
    "Fork": ([3], [[1, 2]], [1, 9], PrefixHit(1, Miss.NONE), [[1, 9]]),
    "Evict": ([1, 2], [[2, 3], [1]], [7, 8], PrefixHit(0, Miss.UNKNOWN), [[1], [7, 8]]),
    # In ollama ties go to the lowest slot; here to the most recently used text.
    "Equal": (
        [1, 2],
        [[1, 2, 3], [1, 2, 4]],
        [1, 2, 9],
        PrefixHit(2, Miss.NONE),
        [[1, 2, 4], [1, 2, 9]],
    ),
    "Used": ([1, 2], [[1, 1], [2]], [1, 3], PrefixHit(1, Miss.NONE), [[1, 1], [1, 3]]),
    "exact match leaves one input": (
        [3],
        [[1, 2, 3]],
        [1, 2, 3],
        PrefixHit(2, Miss.NONE),
        [[1, 2, 3]],
    ),
}


@pytest.mark.parametrize("case", mark_cases(FIND_SLOT, fast=["Extend", "Used"], core=FIND_SLOT))
def test_prefix_finds_what_ollama_finds(case):
    holders, texts, prompt, wanted, after = FIND_SLOT[case]
    server = make_server(POOL.make(), holders, *texts)
    assert server.ask(prompt) == wanted
    assert server.computed == len(prompt) - wanted[0]
    server.remember(prompt)
    assert after is None or server.texts == after


def test_prefix_needs_what_the_window_of_a_text_shows():
    kind = Kind("", cells=10, sequences=2, windows=(jaxkv.Window.sliding(3),))
    server = make_server(kind.make(), [1], range(8))
    server.ask(range(20, 27))  # uses hidden cells of the holder
    server.forget()
    found = {
        5: PrefixHit(0, Miss.CONTEXT_EVICTED),
        6: PrefixHit(5, Miss.NONE),
        9: PrefixHit(8, Miss.NONE),
    }
    for asked, wanted in found.items():
        assert server.found([*range(8), 50][:asked]) == wanted, asked


def test_prefix_needs_a_state_that_is_kept():
    server = make_server(make_states(max_rollback=1), [3], range(8))
    for text, wanted in [
        (range(9), PrefixHit(8, Miss.NONE)),
        (range(8), PrefixHit(7, Miss.NONE)),
        (range(7), PrefixHit(0, Miss.NO_STATE)),
        ([*range(7), 50, 51], PrefixHit(7, Miss.NONE)),
    ]:
        assert server.found(text) == wanted


def test_prefix_in_a_hybrid_needs_all_of_its_parts():
    server = make_server(make_hybrid(), [1, 2], range(8))
    assert server.ask([*range(6), 50]) == PrefixHit(0, Miss.NO_STATE)
    assert server.remember(range(6)) is Miss.NO_STATE
    for texts in ((range(8), range(6)), (range(6), range(8))):
        server = make_server(make_hybrid(), [1, 2], *texts)
        assert len(server.texts) == 2  # the longer one does not replace the shorter
    assert server.ask([*range(6), 50]) == PrefixHit(6, Miss.NONE)
    assert server.ask([*range(7), 50]) == PrefixHit(6, Miss.NO_STATE)
    assert server.ask([*range(8), 50]) == PrefixHit(8, Miss.NONE)


def test_prefix_miss_has_a_reason_each_for_evicted_unknown_and_lost():
    server = make_server(POOL.make(), [3], [1, 2, 3], [5, 6])
    assert server.texts == [[5, 6]]
    assert server.found([1, 2]) == PrefixHit(0, Miss.EVICTED)
    assert server.found([4, 2]) == PrefixHit(0, Miss.UNKNOWN)
    server.cache = jaxkv.clear(server.cache)
    assert server.ask([5, 6, 7]) == PrefixHit(0, Miss.CONTEXT_EVICTED)


def test_remember_counts_shared_cells_once():
    server = make_server(POOL.make(), [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], cells=8)
    assert server.held == 6 and len(server.texts) == 2
    server.ask([7, 8, 9])
    assert server.remember([7, 8, 9]) is Miss.NONE
    assert server.texts == [[1, 2, 3, 4, 6], [7, 8, 9]] and server.held == 8
    server.cache, server.store = server.store.evict(server.cache, cells=3)
    assert server.texts == [[7, 8, 9]]


def test_remember_too_long_or_held_text_displaces_nothing():
    server = make_server(POOL.make(), [1, 2], [1, 2], [3], cells=4)
    server.ask(range(10, 15))
    before = server.cache
    assert server.remember(range(10, 15)) is Miss.OUT_OF_CELLS
    assert server.cache is before and server.texts == [[1, 2], [3]]
    assert server.remember(range(10, 14)) is Miss.NONE
    assert server.remember(range(10, 12)) is Miss.NONE
    assert server.texts == [[10, 11, 12, 13]] and server.held == 4


def test_remember_in_groups_prefers_holders_of_the_stream():
    server = make_server(GROUPS.make(), [1, 3], [1, 2, 3])
    assert server.ask([1, 2, 3, 4], seq=2) == PrefixHit(3, Miss.NONE)  # copied
    assert server.remember([1, 2, 3], seq=2) is Miss.NONE
    assert drawing(server.cache) == "0{1} 1{1} 2{1} | 0{2,3} 1{2,3} 2{2,3} 3{2}"
    assert server.ask([1, 2, 3], seq=0) == PrefixHit(2, Miss.NONE)  # shared
    assert drawing(server.cache).startswith("0{0,1} 1{0,1} 2{1} 2{0} |")


def test_prefix_copy_without_room_is_a_miss():
    server = make_server(GROUPS.make(), [1], range(8))
    server.go_on(range(20, 28), seq=3)
    assert server.cache.table.spec.has_shared_streams
    cache, store, found = server.store.fork(server.cache, range(9), 2)
    assert found == PrefixHit(0, Miss.OUT_OF_CELLS) and store.prompts == server.store.prompts
    assert_identical(cache, server.cache)
    small = make_server(GROUPS.make(), [1])
    small.go_on(range(8), seq=2)
    small.go_on(range(20, 24), seq=0)
    before = small.cache
    assert small.remember(range(8), seq=2) is Miss.OUT_OF_CELLS
    assert small.cache is before and not small.texts


def test_store_is_a_value_with_tokens_of_its_own():
    text = np.array([1, 2, 3], np.int32)
    server = make_server(POOL.make(), [3], text)
    text[:] = 7
    before = replace(server)
    server.ask([5, 6])
    server.remember([5, 6])
    assert before.found([1, 2, 3, 4]) == PrefixHit(3, Miss.NONE)


RANDOM = {
    "full": POOL.make,
    "window": replace(POOL, cells=24, windows=(jaxkv.Window.sliding(3),)).make,
    "streams": replace(POOL, cells=24, streams=3).make,
    "states": lambda: make_states(max_rollback=1),
    "hybrid": make_hybrid,
}


@pytest.mark.parametrize("kind", mark_cases(RANDOM, fast=["hybrid"]))
@settings(max_examples=20)
@given(data=st.data())
def test_prefix_random_prompts_matches_computed(kind, data):
    cache = RANDOM[kind]()
    max_new_tokens = data.draw(st.sampled_from([None, 6, 12]))
    server = Server(cache, PrefixStore(cache, sequences=[1, 5], cells=max_new_tokens))
    for _ in range(data.draw(st.integers(1, 8))):
        text = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=10))
        seq = data.draw(st.sampled_from([0, 4]))
        lengths = [len(os.path.commonprefix([one, text[:-1]])) for one in server.texts]
        longest = max(lengths, default=0)
        found = server.ask(text, seq)
        assert found.length <= longest
        reused = found.length == longest > 0
        assert (found.miss is Miss.NONE) == reused or found.miss is Miss.EVICTED
        if kind == "full":
            assert found.length == longest
        assert server.cache.seq_pos_max(seq) == len(text) - 1
        assert server.cache.can_resume(seq, len(text))
        if data.draw(st.booleans()):
            server.remember(text, seq)
        assert server.held <= (max_new_tokens or 1000)
        assert len({text.sequence for text in server.store.prompts}) == len(server.texts) <= 2
        assert_sound(server.cache)


def test_with_prompts_takes_what_a_snapshot_loads():
    server = make_server(POOL.make(), [2, 3], [1, 2, 3, 4])  # in sequence 2
    data = snapshot.save(randomize(server.cache), sequences=[2])
    cache = snapshot.load(data, into=POOL.make(), sequences={2: 3})
    store = PrefixStore(POOL.make(), sequences=[2, 3]).with_prompts({3: [1, 2, 3, 4]})
    cache, _, hit = store.fork(cache, [1, 2, 3, 5], seq=1)
    assert hit == PrefixHit(3, Miss.NONE) and cache.seq_pos_max(1) == 2
