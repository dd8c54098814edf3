"""Undoing what was applied: exact where what cells held is untouched, refused everywhere else."""

from functools import partial

import jax
import numpy as np
import pytest

import jaxkv
from tests.memories import Kind, assert_identical, drawn, think

core = pytest.mark.core
POOL = Kind("pool", cells=16, sequences=2)
RUNS = Kind("contiguous", cells=16, sequences=2, placement="contiguous")


def told(memory, *tokens, seq=0):
    """Apply tokens of a sequence, 4 at most, padded to as many; keys and values stay zero."""
    padded = np.pad(tokens, (0, 4 - len(tokens)))
    batch = jaxkv.make_batch(padded, sequences=seq, valid=np.arange(4) < len(tokens))
    return jaxkv.apply(memory, jaxkv.init_batch(memory, batch, ubatch_size=4).check())


@partial(jax.jit, donate_argnames="buffers")
def step(table, buffers, ubatch):
    """Only the buffers are donated, so the caller keeps the old table."""
    memory, logits = think(jaxkv.join(table, buffers), ubatch)
    return *jaxkv.split(memory), logits


@core
def test_go_back_after_an_abort_between_ubatches_leaves_no_trace():
    """Logits of what follows are the same, bit for bit."""

    def run(memory, tokens, most=None):
        batch = jaxkv.make_batch(tokens)
        for ubatch in jaxkv.init_batch(memory, batch, ubatch_size=4).check().ubatches[:most]:
            table, buffers, logits = step(*jaxkv.split(memory), ubatch)
            memory = jaxkv.join(table, buffers)
        return memory, np.asarray(logits)

    _, wanted = run(run(POOL.make(), [3, 1, 4, 1])[0], [9, 2, 6, 5])
    memory, _ = run(POOL.make(), [3, 1, 4, 1])
    table, _ = jaxkv.split(memory)
    for most in (1, 2):
        aborted, _ = run(memory, range(12), most)
        memory, ok = jaxkv.go_back(table, aborted)
        assert ok and jaxkv.seq_pos_max(memory, 0) == 3
    np.testing.assert_array_equal(run(memory, [9, 2, 6, 5])[1], wanted)


def test_go_back_undoes_edits_of_the_table():
    memory = told(told(POOL.make(), 3, 1, 4), 1, 5, seq=1)
    table, _ = jaxkv.split(memory)
    later, _ = jaxkv.seq_rm(jaxkv.seq_cp(memory, 0, 1), 0, 1, 2)
    later = jaxkv.seq_add(later, 1, 0, -1, 5)
    back, ok = jaxkv.go_back(table, later)
    assert ok
    assert_identical(back, memory)


def refilled(memory):
    """Free a cell and fill it again with the same position of the same sequence."""
    return told(jaxkv.seq_rm(memory, 0, 2, 3)[0], 7)


def rotated(memory, *deltas):
    for delta in deltas:
        memory = jaxkv.seq_add(memory, 0, 0, -1, delta)
        memory = jaxkv.apply(memory, jaxkv.init_update(memory))
    return memory


def moved(memory):
    memory, _ = jaxkv.seq_rm(memory, 0, 0, 1)
    return jaxkv.apply(memory, jaxkv.defrag_plan(memory))


@pytest.mark.parametrize(
    ("past", "change"),
    [
        (None, refilled),
        (None, lambda memory: rotated(memory, 2, -2)),
        (None, moved),
        # Both moved the same cells and carried it out, by 5 and by 3: their keys are not the same.
        (lambda memory: rotated(memory, 5), lambda memory: rotated(memory, 3)),
        # Stamps stay after going back: the empty cells of that table were written meanwhile.
        (None, lambda memory: told(jaxkv.go_back(POOL.make().table, memory)[0], 9, 9, 9)),
    ],
    ids=["refilled", "rotated there and back", "moved", "rotated otherwise", "from an empty table"],
)
def test_go_back_is_refused_where_cells_were_written_or_rotated(past, change):
    memory = told(POOL.make(), 3, 1, 4)
    table, _ = jaxkv.split(past(memory) if past else memory)
    later = change(memory)
    back, ok = jaxkv.go_back(table, later)
    assert not ok
    assert_identical(back, later)


def test_go_back_ignores_cells_that_were_empty():
    """What a defrag moved into and out of cells that the old table does not use is no harm."""
    memory = told(POOL.make(), 3, 1, 4)
    table, _ = jaxkv.split(memory)
    later, _ = jaxkv.seq_rm(told(memory, 1, 2, 3, 4, seq=1), 1, 0, 2)
    later = jaxkv.apply(later, jaxkv.defrag_plan(later))
    back, ok = jaxkv.go_back(table, later)
    assert ok
    np.testing.assert_array_equal(back.table.position, table.position)


def test_go_back_twice_knows_what_was_written_between():
    """A cell that was given up on the way is free in the table between, and was written since."""
    memory = told(POOL.make(), 1, 2, 3)
    full, _ = jaxkv.split(memory)
    memory, _ = jaxkv.seq_rm(memory, 0, 2)
    cut, _ = jaxkv.split(memory)
    back, ok = jaxkv.go_back(cut, told(memory, 7))  # in the cell of the 3
    assert ok and not jaxkv.go_back(full, back)[1]


# ---- plans that are stale


def test_apply_ubatches_out_of_order_or_after_edits_change_nothing():
    memory = told(POOL.make(), 3, 1, 4)
    plan = jaxkv.init_batch(memory, jaxkv.make_batch(range(7)), ubatch_size=4)
    first, second = plan.ubatches
    assert_identical(jaxkv.apply(memory, second), memory)  # before its turn
    once = jaxkv.apply(memory, first)
    assert_identical(jaxkv.apply(once, first), once)  # twice
    other = told(memory, 7, seq=1)
    cut, _ = jaxkv.seq_rm(memory, 0, 2, 3)
    gone, _ = jaxkv.seq_rm(other, 1)
    for edited in (other, cut, gone):  # its cells are taken; it ends elsewhere; a neighbour left
        assert_identical(jaxkv.apply(edited, first), edited)
    assert jaxkv.used(jaxkv.apply(memory, first)) == 7


@core
def test_attend_stale_ubatch_writes_nothing():
    memory = told(POOL.make(), 3, 1, 4)
    plan = jaxkv.init_batch(memory, jaxkv.make_batch([5, 6, 7, 8]), ubatch_size=4)
    other = told(memory, 7, 8, 9, seq=1)
    assert_identical(think(other, plan.ubatches[0])[0], other)


# ---- contiguous cells


@core
def test_make_room_says_whether_it_helped():
    memory = drawn(". . 0{0}-2 1{0}-2 2{0}-2 3{0}-2 0{1} 1{1} 2{1} 3{1} 4{1} 5{1}", RUNS)
    wanted = jaxkv.make_batch([1] * 5)
    assert jaxkv.init_batch(memory, wanted).reason[0] == jaxkv.Reason.UPDATE_PENDING
    after, plan, helped = jaxkv.make_room(memory, wanted)
    assert plan.ok and helped and jaxkv.init_update(after).pending == 0
    after, plan, helped = jaxkv.make_room(after, wanted)
    assert plan.ok and not helped  # it fitted before
    _, plan, helped = jaxkv.make_room(after, jaxkv.make_batch([1] * 8))
    assert not plan.ok and not helped and plan.reason[0] == jaxkv.Reason.NO_ROOM


@core
def test_init_batch_contiguous_slots_are_neighbours():
    memory = RUNS.make()
    for seq, length in enumerate((5, 8)):
        batch = jaxkv.make_batch([0] * length, sequences=seq)
        (ubatch,) = jaxkv.init_batch(memory, batch).check().ubatches
        slots = np.asarray(ubatch.slots)[np.asarray(ubatch.valid)]
        assert len(slots) == length and (np.diff(slots) == 1).all()
        memory = jaxkv.apply(memory, ubatch)
