"""Going back in recurrent memories: cuts to a state that was kept, undone steps, kept memories.

See `tests.histories` for the model whose states name all the tokens that they have seen.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import make_batch
from tests.histories import (
    KINDS,
    Twin,
    bytes_of,
    kept_of,
    make,
    over_kinds,
    planned,
    positions_of,
    run,
    states_of,
    tell,
    told,
    walk,
)
from tests.memories import WIDTH, assert_identical

# -------------------------------------------------------------------------------- cuts, one by one


def test_trap_62_decoding_goes_on_from_the_state_it_was_cut_back_to():
    twin = told(kept=3)
    assert twin.seq_rm(0, 8)
    assert jaxkv.seq_pos_max(twin.memory, 0) == 7
    assert twin.decode([0])
    twin.compare()
    assert positions_of(twin.memory) == [6, 7, 8]


def test_trap_63_cuts_compose():
    twin = told(kept=3)
    assert twin.seq_rm(0, 8)
    assert twin.seq_rm(0, 7)
    assert positions_of(twin.memory) == [6]
    twin.compare()
    assert not twin.seq_rm(0, 6)
    assert twin.decode([0, 0])
    twin.compare()


def test_trap_64_kept_states_outlive_single_steps():
    twin = told(kept=3, counts=(8,))
    assert twin.decode([0])
    assert twin.seq_rm(0, 8)
    assert jaxkv.seq_pos_max(twin.memory, 0) == 7
    twin.compare()  # the state after 7, not one that is stale by a step
    assert twin.seq_rm(0, 6)
    twin.compare()


def test_trap_65_the_whole_last_batch_can_be_taken_back():
    twin = told(kept=3, counts=(5,))
    before = states_of(twin.memory)[-1]
    assert twin.decode([0, 0])
    assert twin.seq_rm(0, 5)
    assert states_of(twin.memory)[-1] == before
    twin.compare()


@pytest.mark.core
def test_trap_86_a_hybrid_begins_where_it_can_be_cut_back_to():
    for kept, first in ((0, 9), (1, 8)):
        twin = told(kept=kept, counts=(10,), kinds="ar")
        assert jaxkv.seq_pos_min(twin.memory, 0) == first
        assert jaxkv.seq_pos_max(twin.memory, 0) == 9
        assert twin.seq_rm(0, first + 1)
        assert not twin.seq_rm(0, first)
        twin.compare()


# ---------------------------------------------------------------------------------------- rollback


@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("prompt", [0, 3])
def test_rollback_is_exact_or_refused(kept, prompt):
    """By every count, after batches of every length: as if it had never gone there, or refused."""
    start = told(kept=kept, counts=(prompt, 2)).fork()
    for count in sorted({1, 2, kept, kept + 1, kept + 4} - {0}):
        for back in range(kept + 3):
            if back > count + prompt:
                continue
            twin = Twin(kept=kept)
            twin.return_to(start)
            twin.tokens = prompt + 2
            left = prompt + count - back
            assert twin.decode([0] * count)
            granted = twin.seq_rm(0, left)
            assert granted == (back <= min(kept, prompt + count - 1) or left == 0)
            twin.compare()
            if not granted:
                continue
            # One that never went there says the same from now on.
            tokens = [*range(1, prompt + 1), *range(prompt + 3, prompt + 3 + count)][:left]
            clean = tell(make(kept), tokens[:WIDTH]) if left else make(kept)
            clean = tell(clean, tokens[WIDTH:]) if left > WIDTH else clean
            assert states_of(twin.memory)[-1:] == states_of(clean)[-1:]
            after, expected = (tell(memory, [50, 51, 52]) for memory in (twin.memory, clean))
            least = min(3, kept + 1)
            assert states_of(after)[-least:] == states_of(expected)[-least:]


@pytest.mark.parametrize("kept", [1, 3])
def test_rollback_again_and_again(kept):
    twin = told(kept=kept, counts=(4,))
    for count in (kept, kept + 1, 7):
        for back in (1, kept, kept, 1):
            assert twin.decode([0] * count)
            end = jaxkv.seq_pos_max(twin.memory, 0).item() + 1
            assert twin.seq_rm(0, end - back)
            assert twin.seq_rm(0, end - back)  # beyond the end: nothing
            assert twin.seq_rm(0, end - back - 1) == (back < kept)
            twin.compare()


def test_can_resume_where_a_state_stands_before():
    twin = told(kept=3, counts=(6, 0))
    for pos in range(-1, 9):
        assert jaxkv.can_resume(twin.memory, 0, pos).item() == (pos in (0, 3, 4, 5, 6))
        assert jaxkv.can_resume(twin.memory, 1, pos).item() == (pos >= 0)


@pytest.mark.core
def test_a_sequence_may_begin_anywhere():
    memory = run(make(kept=1), make_batch([1, 2, 3], positions=[100, 101, 102]))
    assert positions_of(memory) == [101, 102]
    assert not jaxkv.can_seq_rm(memory, 0, 50)
    memory = run(memory, make_batch([4]))
    assert states_of(memory)[-1] == (103, bytes_of([1, 2, 3, 4], (0, 1)))


# ------------------------------------------------------------------------------------ steps undone


@pytest.mark.core
@over_kinds
@pytest.mark.parametrize("stop_before", [1, 2])
def test_trap_71_and_72_an_abort_leaves_the_state_before_the_batch(kind, stop_before):
    """The memory before is a value; where buffers were given up, going back is exact or refused."""
    twin = told(kept=1, counts=(3, 2, 0), **KINDS[kind])
    past = twin.fork()
    plan, parts = twin.plan([0] * 11, in_parts=True)
    for ubatch, part in [*zip(plan.ubatches, parts, strict=True)][:stop_before]:
        assert twin.step(ubatch, part)
    twin.compare()
    failed = twin.fork()
    twin.go_back(past)
    twin.compare()
    twin.return_to(failed)
    twin.return_to(past)
    twin.compare()
    assert twin.decode([0] * 5 + [1] * 3)
    twin.compare()


@partial(jax.jit, donate_argnames="buffers", static_argnames="kinds")
def step(table, buffers, ubatch, kinds):
    """Only the buffers are donated, so the caller keeps the old table."""
    memory, _ = walk(jaxkv.join(table, buffers), ubatch, kinds)
    return jaxkv.split(memory)


@pytest.mark.core
@pytest.mark.parametrize("kind", ["recurrent", "attention"])
def test_trap_71_with_donated_buffers_what_is_shared_survives(kind):
    """States that a second sequence holds are never written over, so going back is granted."""
    twin = told(kept=1, counts=(3, 0, 0), **KINDS[kind])
    alone = jaxkv.split(twin.memory)[0]
    twin.both("seq_cp", 0, [2])
    table, buffers = jaxkv.split(jax.tree.map(jnp.copy, twin.memory))
    old = table
    plan, _ = twin.plan([0] * 11, in_parts=True)
    for ubatch in plan.ubatches:
        table, buffers = step(table, buffers, ubatch, KINDS[kind]["kinds"])
    known = kept_of(*twin.parts()[:2])
    twin.memory, ok = jaxkv.go_back(old, jaxkv.join(table, buffers))
    assert ok
    assert kept_of(*twin.parts()[:2]) == known
    _, ok = jaxkv.go_back(alone, jaxkv.join(table, buffers))
    assert ok  # the same cells: what is shared is there for all


def test_going_back_is_refused_where_states_were_written_over():
    memory = tell(make(sequences=1), [1, 2])
    table, _ = jaxkv.split(memory)
    later = tell(memory, [3])
    back, ok = jaxkv.go_back(table, later)
    assert not ok
    assert_identical(back, later)


def test_going_back_and_planning_the_same_again_gives_the_same():
    memory = tell(make(), [1, 2])  # a cell is free
    (ubatch,) = jaxkv.init_batch(memory, make_batch([3])).ubatches
    later, passed = walk(memory, ubatch)
    back, ok = jaxkv.go_back(jaxkv.split(memory)[0], later)
    assert ok
    assert_identical(jaxkv.apply(back, ubatch), back)  # what was written since is known: stale
    (ubatch,) = jaxkv.init_batch(back, make_batch([3])).ubatches
    again, same = walk(back, ubatch)
    assert_identical(same, passed)
    assert states_of(again) == states_of(later)


# -------------------------------------------------------------------------- memories that are kept


@partial(jax.jit, donate_argnames="memory", static_argnames="kinds")
def consume(memory, ubatch, kinds="rr"):
    """The whole memory is donated, as most loops do it."""
    return walk(memory, ubatch, kinds)[0]


@pytest.mark.core
@over_kinds
def test_a_kept_memory_goes_on_as_if_there_had_been_nothing_between(kind):
    kinds = KINDS[kind]["kinds"]
    memory, other = (told(kept=1, counts=(3, 2, 0), **KINDS[kind]).memory for _ in range(2))
    wanted = tell(other, [50, 51], [60], kinds=kinds)
    checkpoint = memory
    memory, ok = jaxkv.seq_rm(memory, 0, 2)
    assert ok
    memory = tell(jaxkv.seq_cp(memory, 0, 2), [70], [], [71], kinds=kinds)
    for token in (72, 73):  # what a step without donation returned may be donated
        memory = consume(memory, planned(memory, [token]), kinds)
    assert_identical(tell(checkpoint, [50, 51], [60], kinds=kinds), wanted)
    copied, ubatch = jax.tree.map(jnp.copy, checkpoint), planned(checkpoint, [50, 51], [60])
    assert_identical(consume(copied, ubatch, kinds), wanted)
    assert_identical(tell(checkpoint, [50, 51], [60], kinds=kinds), wanted)
    forked = jaxkv.seq_cp(checkpoint, 0, 2)  # it has the same buffers
    consume(forked, planned(forked, [80]), kinds)
    assert all(x.is_deleted() for x in jax.tree.leaves(jaxkv.split(checkpoint)[1]))


def test_a_sequence_that_is_not_used_keeps_a_state_of_a_donated_memory():
    memory = jaxkv.seq_cp(tell(make(), [1, 2, 3]), 0, 1)
    for token in range(4):
        memory = consume(memory, planned(memory, [token]))
    assert positions_of(memory) == [6]
    memory = tell(jaxkv.seq_cp(memory, 1, 0), [9])
    assert states_of(memory) == [(3, bytes_of([1, 2, 3, 9], (0, 1)))]


def test_going_back_does_not_mind_what_was_written_in_another_stream():
    memory = tell(make(sequences=2, streams=2), [1, 2])
    table, _ = jaxkv.split(memory)
    back, ok = jaxkv.go_back(table, tell(memory, [], [3]))
    assert ok
    assert positions_of(back) == positions_of(memory) == [1]
    assert states_of(back) == states_of(memory)
