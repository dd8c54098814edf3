"""Prefixes: each token is computed once, held once, and what is forked goes on as if computed.

Where only the table matters tokens are applied and no model runs. How much was computed is counted
by `Server`, which tells a memory the rest of a prompt after what was reused.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxkv
from jaxkv import loops, prefix
from jaxkv.prefix import Miss
from jaxkv.prefix.matching import agreement
from models.compiling import counting
from tests import histories, memories
from tests.histories import bytes_of, states_of
from tests.memories import GROUPS, RUNS, SMALL, STRIPES, Kind, assert_identical, drawing

POOL = Kind("pool", cells=200, sequences=66)
STREAMS = Kind("streams", cells=40, sequences=3, streams=3)


def states(rollback=0):
    return jaxkv.make_recurrent_cache(
        layers=1, states={"x": ((), jnp.float32)}, sequences=66, rollback=rollback
    )


def hybrid():
    return jaxkv.make_hybrid_cache((POOL.make(), [0, 1]), (states(), [2]))


MAKES = {
    "full": POOL.make,
    "window": replace(POOL, windows=(jaxkv.window.sliding(6),)).make,
    "states": states,
    "hybrid": hybrid,
}
over_kinds = pytest.mark.parametrize(
    "kind", ["full", *(pytest.param(kind, marks=pytest.mark.core) for kind in list(MAKES)[1:])]
)


def told(memory, tokens, seq):
    """Apply tokens four at a time, so that few shapes are planned."""
    for start in range(0, len(tokens), 4):
        part = list(tokens[start : start + 4])
        batch = jaxkv.make_batch(
            part + [0] * (4 - len(part)), sequences=seq, valid=np.arange(4) < len(part)
        )
        plan = jaxkv.init_batch(memory, batch).check()
        for ubatch in plan.ubatches:
            memory = jaxkv.apply(memory, ubatch)
    return memory


@dataclass
class Server:
    """A memory with a store, and how many tokens it was told."""

    memory: Any
    store: prefix.Store
    computed: int = 0
    tell: Any = field(default=told)

    def ask(self, tokens, seq=0):
        """Reuse what there is of a prompt and compute the rest."""
        self.memory, self.store, found = prefix.reuse(self.memory, self.store, tokens, seq)
        self.go_on(tokens[found.length :], seq)
        return found

    def go_on(self, tokens, seq=0):
        self.memory = self.tell(self.memory, tokens, seq)
        self.computed += len(tokens)

    def remember(self, tokens, seq=0):
        self.memory, self.store, miss = prefix.remember(self.memory, self.store, tokens, seq)
        return miss

    @property
    def held(self):
        return prefix.held(self.memory, self.store)

    @property
    def texts(self):
        """What is held, the least recently used first, as lists."""
        return [text.tokens.tolist() for text in self.store.texts]


def serving(memory, holders, *texts, cells=None):
    """A server that holds texts, each told anew, and nothing else."""
    server = Server(memory, prefix.make_store(memory, holders=holders, cells=cells))
    for text in texts:
        server.ask(text)
        assert server.remember(text) is Miss.NONE
    server.memory, _ = jaxkv.seq_rm(server.memory, 0)
    server.computed = 0
    return server


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()


# ------------------------------------------------------------------------- computed once, held once


@over_kinds
def test_a_conversation_of_20_turns_computes_each_token_once(kind):
    server, text = serving(MAKES[kind](), [3]), []
    for turn in range(20):
        text += tokens(4, turn)
        found = server.ask(text)
        assert found == (len(text) - 4, Miss.NONE if turn else Miss.UNKNOWN)
        answer = tokens(4, 100 + turn)
        server.go_on(answer)
        text += answer
        assert server.remember(text) is Miss.NONE
        server.memory, _ = jaxkv.seq_rm(server.memory, 0)  # others may take it until the next turn
    assert server.computed == len(text) == 160
    assert len(server.store.texts) == 1
    assert jaxkv.used(server.memory) == server.held


@over_kinds
def test_64_prompts_compute_what_is_common_once_and_hold_it_once(kind):
    common = tokens(64)
    server = serving(MAKES[kind](), [65], common)
    alone = server.held
    assert alone == {"full": 64, "window": 64, "states": 1, "hybrid": 64 + 1}[kind]
    for seq in range(64):
        assert server.ask([*common, 1000 + seq, 2000], seq) == (64, Miss.NONE)
    assert server.computed == 64 * 2
    assert server.held == alone
    each = {"full": 2, "window": 2, "states": 1, "hybrid": 2 + 1}[kind]  # its tokens, its state
    assert jaxkv.used(server.memory) == alone + 64 * each


def test_texts_that_part_hold_what_they_share_once():
    server = serving(POOL.make(), [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 6], [7, 8])
    assert server.held == jaxkv.used(server.memory) == 5 + 1 + 2


# -------------------------------------------------------------- what is reused is what it was


@pytest.mark.parametrize(
    "kind",
    [
        SMALL,
        *(
            pytest.param(k, marks=pytest.mark.core)
            for k in (
                RUNS,
                STRIPES,
                replace(SMALL, windows=(jaxkv.window.sliding(3),)),
                replace(STREAMS, cells=12),
            )
        ),
    ],
    ids=lambda kind: kind.name,
)
def test_a_fork_answers_as_a_text_that_was_computed(kind):
    def run(memory, some, seq=0):
        return memories.run(memory, jaxkv.make_batch(some, sequences=seq))

    memory = kind.make()
    server = Server(memory, prefix.make_store(memory, holders=[2]))
    server.memory, _ = run(server.memory, [1, 2, 3, 4])
    assert server.remember([1, 2, 3, 4]) is Miss.NONE
    server.memory, _, found = prefix.reuse(server.memory, server.store, [1, 2, 3, 4, 5], 1)
    assert found.length == 4
    _, logits = run(server.memory, [5], 1)
    alone, _ = run(kind.make(), [1, 2, 3, 4])
    _, wanted = run(alone, [5])
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize("streams", [1, 3])
def test_a_state_that_was_forked_has_seen_the_prefix(streams):
    def tell(memory, some, seq):
        return histories.run(memory, jaxkv.make_batch(some, sequences=seq))

    memory = histories.make(kept=1, streams=streams)
    server = Server(memory, prefix.make_store(memory, holders=[2]), tell=tell)
    server.ask([1, 2, 3])
    server.remember([1, 2, 3])
    assert server.ask([1, 2, 3], 1) == (2, Miss.NONE)
    assert server.ask([1, 2, 3, 4], 1) == (3, Miss.NONE)
    assert states_of(server.memory, 1)[-1] == (3, bytes_of([1, 2, 3, 4], range(2)))


# ---------------------------------------------------------------------------- the reason for a miss


def test_the_end_of_a_text_that_parts_is_not_reused():
    server = serving(POOL.make(), [3], [1, 2, 3, 4])
    assert server.ask([1, 2, 5, 4]) == (2, Miss.NONE)
    assert server.ask([2, 3]) == (0, Miss.UNKNOWN)
    assert jaxkv.seq_pos_max(server.memory, [0, 3]).tolist() == [1, 3]


@pytest.mark.core
def test_what_a_window_has_taken_cannot_be_gone_on_from():
    kind = Kind("", cells=10, sequences=2, windows=(jaxkv.window.sliding(3),))
    server = serving(kind.make(), [1], range(8))
    server.ask(range(20, 27))  # takes what the window of the holder hides
    server.memory, _ = jaxkv.seq_rm(server.memory, 0)
    for asked, wanted in {5: (0, Miss.LOST), 6: (5, Miss.NONE), 9: (8, Miss.NONE)}.items():
        found = prefix.reuse(server.memory, server.store, [*range(8), 50, 51][:asked], 0)[2]
        assert found == wanted, asked


@pytest.mark.core
def test_no_state_stands_there():
    server = serving(states(rollback=1), [3], range(8))
    asked = {9: (8, Miss.NONE), 8: (7, Miss.NONE), 7: (0, Miss.NO_STATE)}
    for count, wanted in asked.items():
        found = prefix.reuse(server.memory, server.store, range(count), 0)[2]
        assert found == wanted
    found = prefix.reuse(server.memory, server.store, [*range(7), 50, 51], 0)[2]
    assert found == (7, Miss.NONE)


@pytest.mark.core
def test_a_hybrid_goes_on_where_all_of_its_parts_can():
    server = serving(hybrid(), [1, 2], range(8))
    assert server.ask([*range(6), 50]) == (0, Miss.NO_STATE)
    assert server.remember(range(6)) is Miss.NO_STATE
    server = serving(hybrid(), [1, 2], range(6), range(8))
    assert len(server.texts) == 2  # the longer one cannot stand in for the shorter
    assert server.ask([*range(6), 50]) == (6, Miss.NONE)
    assert server.ask([*range(7), 50]) == (6, Miss.NO_STATE)
    assert server.ask([*range(8), 50]) == (8, Miss.NONE)


def test_what_was_let_go_of_is_told_from_what_was_never_there():
    server = serving(POOL.make(), [3], [1, 2, 3], [5, 6])
    assert server.texts == [[5, 6]]
    found = [prefix.reuse(server.memory, server.store, text, 0)[2] for text in ([1, 2], [4, 2])]
    assert found == [(0, Miss.EVICTED), (0, Miss.UNKNOWN)]


def test_a_memory_that_was_cleared_has_lost_its_texts():
    server = serving(POOL.make(), [3], [1, 2, 3])
    server.memory = jaxkv.clear(server.memory)
    assert server.ask([1, 2, 3]) == (0, Miss.LOST)


# ---------------------------------------------------------------------------------- what is let go


def test_the_least_recently_used_text_gives_its_holder():
    server = serving(POOL.make(), [1, 2], [1, 1], [2, 2])
    server.ask([1, 1, 1])
    server.ask([3, 3])
    server.remember([3, 3])
    assert server.texts == [[1, 1], [3, 3]]


def test_cells_are_counted_and_shared_ones_once():
    server = serving(POOL.make(), [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], cells=8)
    assert server.held == 6 and len(server.texts) == 2
    server.ask([7, 8, 9])
    assert server.remember([7, 8, 9]) is Miss.NONE
    assert server.texts == [[1, 2, 3, 4, 6], [7, 8, 9]] and server.held == 8
    server.memory, server.store = prefix.evict(server.memory, server.store, cells=3)
    assert server.texts == [[7, 8, 9]]


def test_a_text_that_is_too_long_displaces_nothing():
    server = serving(POOL.make(), [1, 2], [1, 2], [3], cells=4)
    server.ask(range(10, 15))
    before = server.memory
    assert server.remember(range(10, 15)) is Miss.NO_ROOM
    assert server.memory is before and server.texts == [[1, 2], [3]]
    assert server.remember(range(10, 14)) is Miss.NONE
    assert server.texts == [[10, 11, 12, 13]] and server.held == 4


def test_a_text_that_is_held_already_is_not_held_again():
    server = serving(POOL.make(), [1, 2], [1, 2, 3])
    server.go_on([1, 2, 3])  # computed by itself
    for part in ([1, 2, 3], [1, 2]):
        assert server.remember(part) is Miss.NONE
    assert server.texts == [[1, 2, 3]]
    server.memory, _ = jaxkv.seq_rm(server.memory, 0)
    assert jaxkv.used(server.memory) == 3


# ------------------------------------------------------------------------------------------ streams


@pytest.mark.core
def test_between_streams_it_is_copied_and_replaces_what_was_there():
    server = serving(STREAMS.make(), [1], [1, 2, 3, 4])
    server.go_on([5, 6], seq=2)
    assert server.ask([1, 2, 9], seq=2) == (2, Miss.NONE)
    assert drawing(server.memory) == " | 0{1} 1{1} 2{1} 3{1} | 0{2} 1{2} 2{2}"


@pytest.mark.core
def test_in_groups_each_stream_has_holders_of_its_own():
    server = serving(GROUPS.make(), [1, 3], [1, 2, 3])
    assert server.ask([1, 2, 3, 4], seq=2) == (3, Miss.NONE)  # copied
    assert server.remember([1, 2, 3], seq=2) is Miss.NONE
    assert drawing(server.memory) == "0{1} 1{1} 2{1} | 0{2,3} 1{2,3} 2{2,3} 3{2}"
    assert server.ask([1, 2, 3], seq=0) == (2, Miss.NONE)  # shared
    assert drawing(server.memory).startswith("0{0,1} 1{0,1} 2{1} 2{0} |")


@pytest.mark.core
def test_a_copy_without_room_is_a_miss():
    server = serving(GROUPS.make(), [1], range(8))
    server.go_on(range(20, 28), seq=3)
    assert server.memory.table.facts.in_groups
    memory, store, found = prefix.reuse(server.memory, server.store, range(9), 2)
    assert found == (0, Miss.NO_ROOM) and store is server.store
    assert_identical(memory, server.memory)
    small = serving(GROUPS.make(), [1])
    small.go_on(range(8), seq=2)
    small.go_on(range(20, 24), seq=0)
    before = small.memory
    assert small.remember(range(8), seq=2) is Miss.NO_ROOM
    assert small.memory is before and not small.texts


@pytest.mark.core
def test_a_copy_may_have_the_buffers():
    server = serving(STREAMS.make(), [1], [1, 2, 3, 4])
    buffers = server.memory.buffers
    memory, store, _ = prefix.reuse(server.memory, server.store, [1, 2, 9], 2, donate=True)
    assert buffers.k[0].is_deleted()
    buffers = memory.buffers
    memory, store = prefix.evict(memory, store, cells=0)
    prefix.remember(memory, store, [1, 2], 2, donate=True)
    assert buffers.k[0].is_deleted()


# --------------------------------------------------------------------------------------- compiling


def forward(weights, memory, ubatch):
    del weights
    return memories.think(memory, ubatch)


@pytest.mark.core
@pytest.mark.parametrize("kind", [SMALL, STREAMS, GROUPS], ids=lambda kind: kind.name)
def test_nothing_compiles_after_a_warm_up(kind):
    """In a loop of one's own; the second text is longer than any before, and copied twice."""
    memory = kind.make()
    holder, seq = kind.sequences - 1, 0
    store = prefix.make_store(memory, holders=[holder])
    memory = loops.warm_up(forward, None, memory, ubatch_size=4, longest=9)
    memory = prefix.warm_up(memory, store)
    with counting() as compiled:
        for text in ([1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [5]):
            memory, store, found = prefix.reuse(memory, store, text, seq)
            batch = jaxkv.make_batch(text[found.length :], sequences=seq)
            memory, _ = jaxkv.prefill(forward, None, memory, batch, ubatch_size=4)
            memory, store, _ = prefix.remember(memory, store, text, seq)
        memory, store = prefix.evict(memory, store, cells=0)
        assert compiled() == 0
    assert jaxkv.used(memory) == 1


# ------------------------------------------------------------------------------------------- values


def test_an_older_pair_goes_on_as_if_nothing_had_come_after_it():
    server = serving(POOL.make(), [3], [1, 2, 3])
    memory, store = server.memory, server.store
    server.ask([5, 6])
    server.remember([5, 6])
    assert prefix.reuse(memory, store, [1, 2, 3, 4], 0)[2] == (3, Miss.NONE)


def test_a_store_keeps_its_own_tokens():
    text = np.array([1, 2, 3], np.int32)
    server = serving(POOL.make(), [3], text)
    text[:] = 7
    assert server.ask([1, 2, 3, 4]) == (3, Miss.NONE)


def test_what_is_wrong_is_said():
    memory = told(POOL.make(), [1, 2], 0)
    store = prefix.make_store(memory, holders=[2, 3])
    for call, error, message in [
        (lambda: prefix.make_store(memory, holders=[0]), ValueError, "hold nothing, got .0."),
        (lambda: prefix.make_store(memory, holders=[]), ValueError, "one sequence or more"),
        (lambda: prefix.make_store(memory, holders=[2, 2]), ValueError, "at most once"),
        (lambda: prefix.make_store(memory, holders=[66]), ValueError, "sequence ids"),
        (lambda: prefix.make_store(memory, holders=[2], cells=0), ValueError, "cells"),
        (lambda: prefix.reuse(memory, store, [1], 2), ValueError, "no holder of the store, got 2"),
        (lambda: prefix.reuse(memory, store, [], 0), ValueError, "tokens"),
        (lambda: prefix.reuse(memory, store, [1.5], 0), TypeError, "tokens"),
        (lambda: prefix.reuse(memory, memory, [1], 0), TypeError, "wanted a store"),
        (lambda: prefix.reuse(SMALL.make(), store, [1], 0), ValueError, "that the store was made"),
        (lambda: prefix.remember(memory, store, [1, 2, 3], 0), ValueError, "goes on at 2"),
        (lambda: prefix.remember(memory, store, [1], 1), ValueError, "goes on at 0"),
        (lambda: prefix.evict(memory, store, cells=-1), ValueError, "cells"),
        (lambda: jax.jit(lambda m: prefix.held(m, store))(memory), ValueError, "outside of jit"),
    ]:
        with pytest.raises(error, match=message):
            call()


# ------------------------------------------------------------------------------------------ random


@pytest.mark.core
@pytest.mark.parametrize("kind", ["full", "window", "streams", "states", "hybrid"])
@settings(max_examples=20)
@given(data=st.data())
def test_whatever_comes_a_prompt_is_what_it_would_be_alone(kind, data):
    """What is reused is bounded by what was remembered, and every sequence holds its prompt."""
    memory = {
        "full": POOL.make,
        "window": replace(POOL, cells=24, windows=(jaxkv.window.sliding(3),)).make,
        "streams": replace(POOL, cells=24, streams=33).make,
        "states": lambda: states(rollback=1),
        "hybrid": hybrid,
    }[kind]()
    limit = data.draw(st.sampled_from([None, 6, 12]))
    server = Server(memory, prefix.make_store(memory, holders=[1, 65], cells=limit))
    for _ in range(data.draw(st.integers(1, 8))):
        text = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=10))
        seq = data.draw(st.sampled_from([0, 64]))
        longest = max(
            (agreement(np.array(one), np.array(text[:-1])) for one in server.texts), default=0
        )
        found = server.ask(text, seq)
        assert found.length <= longest
        assert (found.miss is Miss.NONE) == (found.length == longest > 0) or (
            found.miss is Miss.EVICTED
        )
        if kind == "full":
            assert found.length == longest
        assert jaxkv.seq_pos_max(server.memory, seq) == len(text) - 1
        assert jaxkv.can_resume(server.memory, seq, len(text))
        if data.draw(st.booleans()):
            server.remember(text, seq)
        assert server.held <= (limit or 1000)
        assert len({text.holder for text in server.store.texts}) == len(server.texts) <= 2
        assert not any(map(int, jaxkv.check_invariants(server.memory).values()))
