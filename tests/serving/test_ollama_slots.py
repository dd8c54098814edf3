"""How ollama's server finds what it has computed: common prefixes, slots, and what is discarded.

Cases of its `runner/ollamarunner/cache_test.go`, until v0.30, and of a list made from its code.
A slot there is a holder here and, while it runs, a sequence. Where jaxkv decides differently the
test says so. In `test_prefix.py` are a checkpoint before the common prefix, a window that has slid
too far (`needs`), and a text that runs and is forked (edge 21, `in_groups`); in `test_batching.py`
requests that wait where every slot is busy (edge 20); in `test_sliding.py` what is discarded
(ShiftDiscard, edge 24), where the caller says how much. These cannot be expressed:

- inputs that must stay in one batch (SameBatch, edge 19), and a prompt that is cut to fit: a prompt
  that never fits is refused here;
- a fork for a request that wants no caching (22): an engine has a store or has none;
- the error that asks for inputs to be processed again, and its queue (23, 28): a refusal changes
  nothing here, so there is nothing to process again;
- images as inputs, compared by a hash: a token is a number, and an image is given one.
"""

import numpy as np
import pytest

import jaxkv
from jaxkv import loops, prefix
from jaxkv.prefix import Miss
from jaxkv.prefix.matching import agreement
from tests.cases import in_lanes
from tests.serving.servers import POOL, ask, engine_of, kept, serving, states, tokens


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [([1, 2, 3], [1, 2, 3], 3), ([1], [1, 2, 3], 1), ([1, 2, 9], [1, 2, 3], 2), ([], [1], 0)],
    ids=["Equal", "Prefix", "Mixed", "Empty"],
)
def test_count_common(one, other, common):
    assert agreement(np.array(one), np.array(other)) == common


FIND_SLOT = {  # holders; texts that are held; a prompt, what is found of it; the texts afterwards
    "Empty": ([1, 2], [], [1], (0, Miss.UNKNOWN), [[1]]),
    "Extend": ([1, 2, 3], [[1, 2, 3], [1, 5]], [1, 2, 3, 4], (3, Miss.NONE), None),
    "New": ([1, 2], [[1]], [2], (0, Miss.UNKNOWN), [[1], [2]]),  # the empty one is taken
    # There the slot is cut to [1] where no other is free. Here it is whole until it gives way.
    "Fork": ([3], [[1, 2]], [1, 9], (1, Miss.NONE), [[1, 9]]),
    "Evict": ([1, 2], [[2, 3], [1]], [7, 8], (0, Miss.UNKNOWN), [[1], [7, 8]]),
    # There ties go to the lowest slot; here to the text that was used last.
    "Equal": ([1, 2], [[1, 2, 3], [1, 2, 4]], [1, 2, 9], (2, Miss.NONE), [[1, 2, 4], [1, 2, 9]]),
    "exact match leaves one input": ([3], [[1, 2, 3]], [1, 2, 3], (2, Miss.NONE), [[1, 2, 3]]),
}


@pytest.mark.parametrize("case", in_lanes(FIND_SLOT, fast=["Extend"], core=FIND_SLOT))
def test_find_slot(case):
    holders, texts, prompt, wanted, after = FIND_SLOT[case]
    server = serving(POOL.make(), holders, *texts)
    assert server.ask(prompt) == wanted
    assert server.computed == len(prompt) - wanted[0]
    server.remember(prompt)
    assert after is None or server.texts == after


@pytest.mark.core
def test_edge_25_states_of_an_evicted_text_never_come_back():
    """There checkpoints of a slot outlive its text."""
    server = serving(states(rollback=2), [3], [1, 2, 3], [4, 5, 6, 7])
    assert server.texts == [[4, 5, 6, 7]]
    assert server.ask([1, 2, 9]) == (0, Miss.EVICTED)


@pytest.mark.parametrize(("holders", "found"), [([2, 3], (4, Miss.NONE)), ([3], (0, Miss.EVICTED))])
def test_conversations_in_turn_find_their_own_text(holders, found):
    """As many holders as conversations; with fewer each turn lets go of the other."""
    server = serving(POOL.make(), holders)
    for turn in range(2):
        for user, seed in enumerate((1, 2)):
            text = tokens(4 + 2 * turn, seed)
            assert server.ask(text, user) == (found if turn else (0, Miss.UNKNOWN))
            server.remember(text, user)
    assert len(server.texts) == len(holders)


@pytest.mark.core
def test_edge_29_full_cache_keeps_texts_without_their_last_token():
    """There the batch after an end may be on its way, and a full cache ends the run loop."""
    engine = engine_of(POOL, [2, 3])
    for seed in range(4):
        result = ask(engine, tokens(20, seed), limit=3)
        assert kept(engine) == [[*tokens(20, seed), *result.tokens.tolist()[:-1]]]


@pytest.mark.core
def test_edge_21_slide_of_shared_text_changes_nothing():
    """There all of it is computed again. Here the store may let go first."""
    server = serving(POOL.make(), [3], [1, 2, 3, 4])
    server.ask([1, 2, 3, 4, 5])
    assert not jaxkv.can_seq_add(server.memory, 0, 2, -1, -1)
    memory, ok = loops.slide(server.memory, 0, keep=1, drop=1)
    assert not ok and jaxkv.seq_pos_max(memory, 0) == 4
    memory, _ = prefix.evict(server.memory, server.store, cells=0)
    memory, ok = loops.slide(memory, 0, keep=1, drop=1)
    assert ok and jaxkv.seq_pos_max(memory, 0) == 3
