"""Undoing what was applied: exact where what cells held is untouched, refused everywhere else."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.memories import assert_identical

ROPE = jaxkv.make_rope(4)


def make(**options):
    return jaxkv.make_kv_cache(
        layers=2, cells=16, kv_heads=2, head_dim=4, sequences=2, rope=ROPE, **options
    )


def attended(memory, ubatch):
    """A tiny model: what a token writes depends on its number and on what it sees."""
    x = jnp.sin(ubatch.tokens[..., None, None] + jnp.arange(8.0).reshape(1, 1, 2, 4))
    for layer in range(2):
        turned = jaxkv.rotate(x, ubatch.positions, ROPE)
        memory, out = jaxkv.attend(memory, layer, ubatch, turned, turned, x)
        x = x + out
    return memory, x.reshape(-1, 8)[ubatch.outputs]


@partial(jax.jit, donate_argnames="buffers")
def step(table, buffers, ubatch):
    """Only the buffers are donated, so the caller keeps the old table."""
    memory, logits = attended(jaxkv.apply(jaxkv.join(table, buffers), ubatch), ubatch)
    return *jaxkv.split(memory), logits


def run(memory, batch, *, ubatch_size=4, stop_before=None):
    plan = jaxkv.init_batch(memory, batch, ubatch_size=ubatch_size).check()
    logits = []
    for i, ubatch in enumerate(plan.ubatches):
        if i == stop_before:
            raise KeyboardInterrupt
        table, buffers, out = step(*jaxkv.split(memory), ubatch)
        memory = jaxkv.join(table, buffers)
        run.latest = memory
        logits.append(out)
    return memory, plan.collect(logits)


@pytest.mark.core
@pytest.mark.parametrize("stop_before", [1, 2])
def test_an_abort_between_ubatches_leaves_no_trace(stop_before):
    first, second = jaxkv.make_batch([3, 1, 4, 1, 5]), jaxkv.make_batch([9, 2, 6])
    clean, _ = run(make(), first)
    want, logits = run(clean, second)

    memory, _ = run(make(), first)
    table, _ = jaxkv.split(memory)
    with pytest.raises(KeyboardInterrupt):
        run(memory, jaxkv.make_batch(list(range(9))), stop_before=stop_before)
    memory, ok = jaxkv.go_back(table, run.latest)
    assert ok
    assert jaxkv.seq_pos_max(memory, 0) == 4
    memory, again = run(memory, second)
    np.testing.assert_array_equal(again, logits)
    np.testing.assert_array_equal(memory.table.position, want.table.position)


@pytest.mark.core
def test_edits_of_the_table_are_undone():
    memory, _ = run(make(), jaxkv.make_batch([[3, 1, 4], [1, 5]]))
    table, _ = jaxkv.split(memory)
    later, _ = jaxkv.seq_rm(jaxkv.seq_cp(memory, 0, 1), 0, 1, 2)
    later = jaxkv.seq_add(later, 1, 0, -1, 5)
    back, ok = jaxkv.go_back(table, later)
    assert ok
    assert_identical(back, memory)


def refilled(memory):
    """Free a cell and fill it again with the same position of the same sequence."""
    memory, _ = jaxkv.seq_rm(memory, 0, 2, 3)
    return run(memory, jaxkv.make_batch([7]))[0]


def rotated_there_and_back(memory):
    for delta in (2, -2):
        memory = jaxkv.seq_add(memory, 0, 0, -1, delta)
        memory = jaxkv.apply(memory, jaxkv.init_update(memory))
    return memory


def moved(memory):
    memory, _ = jaxkv.seq_rm(memory, 0, 0, 1)
    return jaxkv.apply(memory, jaxkv.defrag_plan(memory))


@pytest.mark.parametrize(
    "change", [pytest.param(refilled, marks=pytest.mark.core), rotated_there_and_back, moved]
)
def test_what_touched_the_buffers_is_detected_and_refused(change):
    memory, _ = run(make(), jaxkv.make_batch([3, 1, 4]))
    table, _ = jaxkv.split(memory)
    later = change(memory)
    back, ok = jaxkv.go_back(table, later)
    assert not ok
    assert_identical(back, later)


def test_a_branch_that_rotated_its_keys_otherwise_is_refused():
    """Both moved the same cells and carried it out, by 5 and by 3: their keys are not the same."""
    memory, _ = run(make(), jaxkv.make_batch([1, 2, 3]))
    one, other = (
        jaxkv.apply(moved, jaxkv.init_update(moved))
        for moved in (jaxkv.seq_add(memory, 0, 0, -1, by) for by in (5, 3))
    )
    back, ok = jaxkv.go_back(jaxkv.split(one)[0], other)
    assert not ok
    assert_identical(back, other)


def test_cells_that_were_empty_may_be_anything():
    """What a defrag moved into and out of cells that the old table does not use is no harm."""
    memory, _ = run(make(), jaxkv.make_batch([3, 1, 4]))
    table, _ = jaxkv.split(memory)
    later, _ = run(memory, jaxkv.make_batch([1, 2, 3, 4], sequences=1))
    later, _ = jaxkv.seq_rm(later, 1, 0, 2)
    later = jaxkv.apply(later, jaxkv.defrag_plan(later))
    back, ok = jaxkv.go_back(table, later)
    assert ok
    np.testing.assert_array_equal(back.table.position, table.position)


def test_going_back_twice_needs_the_stamps_of_now():
    """After going back the table still knows what was written meanwhile."""
    memory, _ = run(make(), jaxkv.make_batch([3, 1, 4]))
    empty, _ = jaxkv.split(make())
    table, _ = jaxkv.split(memory)
    back, ok = jaxkv.go_back(empty, memory)
    assert ok and jaxkv.used(back) == 0
    other, _ = run(back, jaxkv.make_batch([9, 9, 9]))
    _, ok = jaxkv.go_back(table, other)
    assert not ok


def test_what_was_written_between_is_known_after_going_back_too():
    """A cell that was given up on the way is free in the table between, and was written since."""
    memory, _ = run(make(), jaxkv.make_batch([1, 2, 3]))
    full, _ = jaxkv.split(memory)
    memory, _ = jaxkv.seq_rm(memory, 0, 2)
    cut, _ = jaxkv.split(memory)
    now, _ = run(memory, jaxkv.make_batch([7]))  # in the cell of the 3
    back, ok = jaxkv.go_back(cut, now)
    assert ok
    _, ok = jaxkv.go_back(full, back)
    assert not ok


def test_a_plan_is_refused_where_the_order_of_things_changed():
    memory, _ = run(make(), jaxkv.make_batch([3, 1, 4]))
    plan = jaxkv.init_batch(memory, jaxkv.make_batch([1, 2, 3, 4, 5, 6, 7]), ubatch_size=4)
    first, second = plan.ubatches
    assert_identical(jaxkv.apply(memory, second), memory)  # before its turn
    once = jaxkv.apply(memory, first)
    assert_identical(jaxkv.apply(once, first), once)  # twice
    other = jaxkv.apply(memory, jaxkv.init_batch(memory, jaxkv.make_batch([7], sequences=1)))
    assert_identical(jaxkv.apply(other, first), other)  # its cells are taken
    cut, _ = jaxkv.seq_rm(memory, 0, 2, 3)
    assert_identical(jaxkv.apply(cut, first), cut)  # the sequence ends elsewhere
    # A neighbour came and went: the stream is not what the plan was made for.
    gone, _ = jaxkv.seq_rm(other, 1)
    assert_identical(jaxkv.apply(gone, first), gone)
    assert jaxkv.used(jaxkv.apply(memory, first)) == 7


def test_a_stale_ubatch_writes_nothing():
    memory, _ = run(make(), jaxkv.make_batch([3, 1, 4]))
    plan = jaxkv.init_batch(memory, jaxkv.make_batch([5, 6, 7]))
    other, _ = run(memory, jaxkv.make_batch([7, 8, 9], sequences=1))
    after, _ = jax.jit(attended)(jaxkv.apply(other, plan), plan.ubatches[0])
    assert_identical(after, other)


@pytest.mark.core
def test_make_room_says_whether_it_helped():
    memory = make(placement="contiguous")
    memory, _ = run(memory, jaxkv.make_batch([[1] * 6, [2] * 6]), ubatch_size=16)
    memory, _ = jaxkv.seq_rm(memory, 0, 0, 2)
    memory = jaxkv.seq_add(memory, 0, 2, -1, -2)
    wanted = jaxkv.make_batch([1] * 5)
    plan = jaxkv.init_batch(memory, wanted)
    assert plan.reason[0] == jaxkv.Reason.UPDATE_PENDING
    after, plan, helped = jaxkv.make_room(memory, wanted)
    assert plan.ok and helped
    assert jaxkv.init_update(after).pending == 0
    after, plan, helped = jaxkv.make_room(after, wanted)
    assert plan.ok and not helped  # it fitted before
    _, plan, helped = jaxkv.make_room(after, jaxkv.make_batch([1] * 9))
    assert not plan.ok and not helped
    assert plan.reason[0] == jaxkv.Reason.NO_ROOM


@pytest.mark.core
@pytest.mark.parametrize(
    "pieces", [[3, 2], *(pytest.param(runs, marks=pytest.mark.core) for runs in ([3], [16]))]
)
def test_contiguous_runs_are_neighbours(pieces):
    memory = make(placement="contiguous")
    for seq, length in enumerate(pieces):
        plan = jaxkv.init_batch(
            memory, jaxkv.make_batch([0] * length, sequences=seq), ubatch_size=16
        )
        (ubatch,) = plan.check().ubatches
        slots = np.asarray(ubatch.slots)[np.asarray(ubatch.valid)]
        assert (np.diff(slots) == 1).all()
        memory = jaxkv.apply(memory, plan)
