"""What a window has taken is remembered, forgotten, copied and moved with its sequence.

A mark for each sequence says up to where its past is gone. It is asked here in public words only:
where a sequence can go on, and whether a batch is planned.
"""

import pytest

import jaxkv
from jaxkv import Reason, make_batch
from tests.memories import Kind, assert_identical, drawing, run, think

FOUR = Kind("four", cells=6, sequences=3, windows=(jaxkv.window.sliding(4),))
ONE = Kind("one-each", cells=4, sequences=2, streams=2, windows=(jaxkv.window.sliding(1),))
ONE_OF_POOL = Kind("pool", cells=4, sequences=2, windows=(jaxkv.window.sliding(1),))


GROUPS = Kind("groups", cells=6, sequences=4, streams=2, windows=(jaxkv.window.sliding(4),))


def evicted(kind=FOUR, seq=0, count=8, memory=None):
    """A memory whose window has taken the first of so many tokens, told one after another."""
    memory = kind.make() if memory is None else memory
    for i in range(count):
        memory, _ = run(memory, make_batch([i + 1], sequences=seq))
    return memory


def resumable(memory, seq=0, until=10):
    """The positions at which a token of a sequence would see all that it should."""
    return [pos for pos in range(until) if jaxkv.can_resume(memory, seq, pos)]


def starts_at(memory, seq):
    """Where a plan puts the next token of a sequence."""
    plan = jaxkv.init_batch(memory, make_batch([1], sequences=seq)).check()
    return plan.ubatches[0].positions[0, 0].item()


def test_what_was_taken_limits_where_one_can_go_on():
    memory = evicted()
    assert drawing(memory) == "6{0} 7{0} 2{0} 3{0} 4{0} 5{0}"
    assert resumable(memory) == [5, 6, 7, 8] and starts_at(memory, 0) == 8


def test_clearing_forgets_what_was_taken():
    memory = jaxkv.clear(evicted())
    assert resumable(memory) == resumable(FOUR.make())
    assert starts_at(memory, 0) == 0


def test_keeping_one_forgets_what_was_taken_from_the_others_alone():
    memory = evicted(seq=1)
    mine, others = jaxkv.seq_keep(memory, 1), jaxkv.seq_keep(memory, 0)
    assert resumable(mine, 1) == resumable(memory, 1) == [5, 6, 7, 8]
    assert starts_at(mine, 1) == 8
    assert resumable(others, 1) == resumable(FOUR.make(), 1)
    assert starts_at(others, 1) == 0


@pytest.mark.parametrize(
    ("p0", "p1", "first"),
    [
        (0, 2, 0),  # all that was taken, and no more
        (0, 3, 0),
        (1, 2, 4),  # 0 is missed by tokens up to 3
        (0, 1, 5),  # 1 is missed by tokens up to 4
        (2, 3, 5),  # nothing of what was taken
    ],
)
def test_what_is_removed_on_purpose_is_not_missed(p0, p1, first):
    """Positions 0 and 1 were taken, and a token looks at three before its own."""
    memory, ok = jaxkv.seq_rm(evicted(), 0, p0, p1)
    assert ok
    assert resumable(memory) == [*range(first, 9)]


def test_a_plan_is_of_what_was_taken_too():
    """Removing what was taken already changes not one cell, and yet what follows may be another."""
    memory = evicted()
    plan = jaxkv.init_batch(memory, make_batch([1]))
    edited, _ = jaxkv.seq_rm(memory, 0, 0, 2)
    assert drawing(edited) == drawing(memory)
    assert_identical(jaxkv.apply(edited, plan), edited)


@pytest.mark.parametrize(
    ("p0", "p1", "wanted"),
    [
        (-1, -1, [5, 6, 7, 8]),
        (0, 4, []),  # its next token, at 4, would miss 1
        (0, 1, []),
        (4, 8, [*range(9)]),
    ],
)
def test_a_copy_has_lost_what_its_range_has_lost(p0, p1, wanted):
    memory = jaxkv.seq_cp(evicted(), 0, 1, p0, p1)
    assert resumable(memory, 1) == wanted
    assert resumable(memory, 0) == [5, 6, 7, 8]
    plan = jaxkv.init_batch(memory, make_batch([1], sequences=1))
    assert plan.reason[1] == (Reason.FITS if wanted else Reason.LOST)


@pytest.mark.core
@pytest.mark.parametrize(
    "kind",
    [pytest.param(ONE_OF_POOL, id="pool"), pytest.param(ONE, id="one", marks=pytest.mark.core)],
)
def test_taking_a_cell_that_was_moved_back_gives_nothing_back(kind):
    """Moved before what was taken already, a cell is taken in its turn: the mark never falls."""
    memory = evicted(kind, count=6)
    memory = jaxkv.seq_add(memory, 0, 3, -1, -3)
    memory = jaxkv.apply(memory, jaxkv.init_update(memory))
    assert sorted(drawing(memory).rstrip(" |").split()) == ["0{0}", "1{0}", "2{0}", "2{0}"]
    before = resumable(memory)
    assert before == [2, 3]
    memory, _ = run(memory, make_batch([9]))
    assert sorted(drawing(memory).rstrip(" |").split()) == [".", "2{0}", "2{0}", "3{0}"]
    assert resumable(memory) == [*before, 4]


def test_a_token_that_sees_all_cells_finds_no_room():
    memory = evicted(Kind("short", cells=3, sequences=1, windows=FOUR.windows), count=3)
    plan = jaxkv.init_batch(memory, make_batch([1]))
    assert plan.reason.tolist() == [Reason.NO_ROOM]


@pytest.mark.core
def test_a_cell_that_is_taken_in_one_stream_takes_nothing_in_another():
    """Sequences 0 and 2 are the first of their streams, and those are looked at together."""
    memory, _ = jaxkv.seq_rm(evicted(GROUPS, seq=2), 2, 3, 7)
    memory, _ = run(memory, make_batch([1, 2], sequences=3))
    memory = jaxkv.seq_cp(memory, 3, 2, 0, 2)  # below what the window has taken from sequence 2
    held = drawing(memory).split("|")[1]
    memory = evicted(memory=memory)
    assert drawing(memory).split("|")[1] == held and "0{2,3}" in held


def test_what_is_hidden_is_counted_from_what_was_taken():
    """Where all that is left was moved before it, the next token comes after what was taken."""
    memory = jaxkv.seq_add(evicted(count=12), 0, 8, -1, -8)
    memory, _ = jaxkv.seq_rm(memory, 0, 6)
    assert drawing(memory) == ". . 0{0}-8 1{0}-8 2{0}-8 3{0}-8"
    # From position 6 a token would see 3 and on, so that three cells are free beside the empty two.
    fits = [jaxkv.init_batch(memory, make_batch([1] * n, sequences=1)).ok for n in (5, 6)]
    assert fits == [True, False]


@pytest.mark.core
def test_trap_72_an_abort_leaves_what_its_first_ubatch_has_overwritten():
    """llama.cpp has lost it. Here the memory before is a value and still has it; and with the old
    table alone, going back is refused rather than short."""
    memory = evicted(count=6)
    before = drawing(memory)
    plan = jaxkv.init_batch(memory, make_batch([1] * 5), ubatch_size=2).check()
    assert len(plan.ubatches) == 3
    aborted, _ = think(memory, plan.ubatches[0])
    assert drawing(aborted) == "6{0} 7{0} 2{0} 3{0} 4{0} 5{0}"
    table, _ = jaxkv.split(memory)
    back, ok = jaxkv.go_back(table, aborted)
    assert not ok
    assert_identical(back, aborted)
    assert drawing(memory) == before == "0{0} 1{0} 2{0} 3{0} 4{0} 5{0}"
    assert resumable(memory) == [*range(7)]
    for left in (6, 3, 1):  # it can be cut anywhere, as if nothing had been tried
        cut, _ = jaxkv.seq_rm(memory, 0, left)
        assert starts_at(cut, 0) == left


@pytest.mark.core
@pytest.mark.parametrize("delta", [4, -3])
def test_what_was_taken_moves_for_every_owner_of_a_cell_that_moves(delta):
    """A fork shares the cells that move, and what was taken from both was shared too."""
    memory = jaxkv.seq_cp(evicted(), 0, 1)
    memory = jaxkv.seq_add(memory, 0, 0, -1, delta)
    memory = jaxkv.apply(memory, jaxkv.init_update(memory))
    assert resumable(memory, 0, 14) == resumable(memory, 1, 14)
    assert starts_at(memory, 0) == starts_at(memory, 1) == 8 + delta
    memory, _ = jaxkv.seq_rm(memory, 1, 4 + delta)
    plan = jaxkv.init_batch(memory, make_batch([1], sequences=1))
    # Moved down, what was taken stands before 0, where no token looks for it.
    assert plan.reason[1] == (Reason.LOST if delta > 0 else Reason.FITS)
