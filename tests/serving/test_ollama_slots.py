"""How ollama's server finds what it has computed: common prefixes, slots, and what is discarded.

Cases of its `runner/ollamarunner/cache_test.go`, until v0.30, and of a list made from its code.
A slot there is a holder here and, while it runs, a sequence. Where jaxkv decides differently the
test says so. These cannot be expressed:

- inputs that must stay in one batch (SameBatch, edge 19), and a prompt that is cut to fit: a prompt
  that never fits is refused here;
- a fork for a request that wants no caching (22): an engine has a store or has none;
- the error that asks for inputs to be processed again, and its queue (23, 28): a refusal changes
  nothing here, so there is nothing to process again;
- images as inputs, compared by a hash: a token is a number, and an image is given one.
"""

from dataclasses import replace

import numpy as np
import pytest

import jaxkv
from jaxkv import loops, prefix
from jaxkv.loops.batching import Request
from jaxkv.prefix import Miss
from jaxkv.prefix.matching import agreement
from tests.memories import Kind, filled
from tests.serving.test_batching_store import SMALL, ask, engine_of, placed, texts, tokens
from tests.serving.test_prefix import POOL, serving, states


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [([1, 2, 3], [1, 2, 3], 3), ([1], [1, 2, 3], 1), ([1, 2, 9], [1, 2, 3], 2), ([], [1], 0)],
)
def test_count_common(one, other, common):
    """ "Equal", "Prefix", "Mixed", "Empty"."""
    assert agreement(np.array(one), np.array(other)) == common


# -------------------------------------------------------------------------------- which slot it is


def test_find_slot_empty():
    """Nothing is held: nothing is found, and a holder that is empty is taken."""
    server = serving(POOL.make(), [1, 2])
    assert server.ask([1]) == (0, Miss.UNKNOWN)
    server.remember([1])
    assert [text.holder for text in server.store.texts] == [1]


def test_find_slot_extend():
    """The one that agrees furthest goes on, though another was used later."""
    server = serving(POOL.make(), [1, 2, 3], [1, 2, 3], [1, 5])
    assert server.ask([1, 2, 3, 4]) == (3, Miss.NONE)


def test_find_slot_new():
    """An empty holder is taken before one that holds another text."""
    server = serving(POOL.make(), [1, 2], [1])
    server.ask([2])
    server.remember([2])
    assert server.texts == [[1], [2]]


def test_find_slot_fork():
    """There a free slot with [1, 2] is cut for [1] where no other is free. Here it stays whole."""
    server = serving(POOL.make(), [3], [1, 2])
    assert server.ask([1, 9]) == (1, Miss.NONE)
    assert server.texts == [[1, 2]] and server.ask([1, 2, 9]) == (2, Miss.NONE)


def test_find_slot_evict():
    """Where none agrees the least recently used one gives way."""
    server = serving(POOL.make(), [1, 2], [1], [2, 3])
    server.ask([1, 5])
    server.ask([7, 8])
    server.remember([7, 8])
    assert server.texts == [[1], [7, 8]]


def test_find_slot_equal():
    """There ties go to the lowest slot; here to the text that was used last."""
    server = serving(POOL.make(), [1, 2], [1, 2, 3], [1, 2, 4])
    server.ask([1, 2, 9])
    assert server.texts == [[1, 2, 3], [1, 2, 4]]


def test_an_exact_match_leaves_one_input():
    server = serving(POOL.make(), [3], [1, 2, 3])
    assert server.ask([1, 2, 3]) == (2, Miss.NONE)
    assert server.computed == 1


# ------------------------------------------------------------------------------- where it goes on


@pytest.mark.core
def test_a_window_that_has_slid_too_far_begins_anew():
    """CanResume says no: nothing is reused, and what the slot had is forgotten."""
    kind = Kind("", cells=10, sequences=2, windows=(jaxkv.window.sliding(3),))
    server = serving(kind.make(), [1], range(8))
    server.ask(range(20, 27))  # takes what the window of the holder hides
    found = prefix.reuse(server.memory, server.store, [0, 1, 2, 3, 50], 0)[2]
    assert found == (0, Miss.LOST)


@pytest.mark.core
def test_a_checkpoint_before_the_common_prefix_is_restored():
    """PrepareRestore: the last state that stands before, and what follows it is computed."""
    server = serving(states(rollback=3), [3], range(8))
    assert server.ask([*range(6), 50, 51]) == (6, Miss.NONE)
    assert server.ask([*range(5), 50, 51]) == (5, Miss.NONE)
    assert server.ask([*range(4), 50, 51]) == (0, Miss.NO_STATE)


@pytest.mark.core
def test_edge_25_a_state_of_another_text_never_comes_back():
    """There checkpoints of a slot outlive its text."""
    server = serving(states(rollback=2), [3], [1, 2, 3], [4, 5, 6, 7])
    assert server.texts == [[4, 5, 6, 7]]
    assert server.ask([1, 2, 9]) == (0, Miss.EVICTED)


# ---------------------------------------------------------------------------------- several users


def test_conversations_in_turn_find_each_their_own():
    """As many holders as conversations; with fewer each turn lets go of the other."""
    for holders, wanted in (([3, 4], (7, Miss.NONE)), ([3], (0, Miss.EVICTED))):
        server = serving(POOL.make(), holders)
        said = {0: tokens(4, 1), 1: tokens(4, 2)}
        for turn in range(3):
            for user, text in said.items():
                found = server.ask(text, user)
                if turn == 1:
                    assert found == (4 if wanted[0] else 0, wanted[1])
                server.remember(text, user)
                said[user] = [*text, *tokens(4, 10 * turn + user)]
        assert len(server.texts) == len(holders)


@pytest.mark.core
def test_edge_20_requests_wait_where_every_slot_is_busy():
    """There a semaphore stands before the search, which would fail."""
    engine = engine_of(SMALL, [2, 3])
    for i in range(4):
        engine.submit(Request(prompt=[1, 2, i], limit=3))
    engine._schedule.admit()
    assert placed(engine) == 2
    assert len(list(engine.results())) == 4


def test_edge_21_a_text_that_runs_is_forked():
    server = serving(POOL.make(), [3])
    server.ask([1, 2, 3, 4])
    server.go_on([5, 6])
    assert server.remember([1, 2, 3]) is Miss.NONE  # it runs on
    assert server.ask([1, 2, 3, 9], 1) == (3, Miss.NONE)
    assert jaxkv.used(server.memory) == 6 + 1


def test_edge_29_a_text_that_has_ended_has_no_token_too_many():
    """There the batch after its end may be on its way. The last token of a text is in no memory."""
    engine = engine_of(SMALL, [3])
    result = ask(engine, tokens(5), limit=6)
    assert texts(engine) == [[*tokens(5), *result.tokens.tolist()[:-1]]]


def test_a_cache_that_is_full_of_other_texts_goes_on():
    """There the run loop ends with a panic."""
    engine = engine_of(SMALL, [2, 3])
    for seed in range(4):
        assert len(ask(engine, tokens(20, seed), limit=3).tokens)


# ------------------------------------------------------------------------------- what is discarded


@pytest.mark.core
@pytest.mark.parametrize(
    ("cells", "keep", "held", "dropped"),
    [(16, 2, 16, 7), (16, 2, 12, 3), (16, 0, 16, 8), (16, 15, 16, 1)],
)
def test_shift_discard(cells, keep, held, dropped):
    """It wants half of what is not kept to be free, one cell at least; here the caller says."""
    assert max((cells - keep) // 2, 1) - (cells - held) == dropped
    memory = filled(held, kind=replace(SMALL, cells=cells))
    memory, ok = loops.slide(memory, 0, keep=keep, drop=dropped)
    assert ok and jaxkv.used(memory) == held - dropped
    assert jaxkv.seq_pos_max(memory, 0) == held - dropped - 1


@pytest.mark.core
def test_edge_21_what_a_text_shares_moves_only_without_the_store():
    """There all of it is computed again. Here nothing is changed, and the store may let go."""
    server = serving(POOL.make(), [3], [1, 2, 3, 4])
    server.ask([1, 2, 3, 4, 5])
    assert not jaxkv.can_seq_add(server.memory, 0, 2, -1, -1)
    memory, ok = loops.slide(server.memory, 0, keep=1, drop=1)
    assert not ok and jaxkv.seq_pos_max(memory, 0) == 4
    memory, _ = prefix.evict(server.memory, server.store, cells=0)
    memory, ok = loops.slide(memory, 0, keep=1, drop=1)
    assert ok and jaxkv.seq_pos_max(memory, 0) == 3


@pytest.mark.core
def test_edge_24_nothing_is_discarded_of_a_state():
    """There keys are forgotten and the state has seen them still."""
    with pytest.raises(ValueError, match="a state cannot forget what it has seen"):
        loops.slide(states(), 0, keep=0, drop=2)
