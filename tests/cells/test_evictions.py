"""What a window has taken is remembered, forgotten, copied and moved with its sequence.

A mark for each sequence says up to where its past is gone. It is asked here in public words only:
where a sequence can go on, and whether a batch is planned.
"""

import pytest

import jaxkv
from jaxkv import Reason, make_batch
from tests.cells.windows import FOUR, plan_of, resumable, starts_at, told
from tests.memories import Kind, assert_identical, drawing, drawn

core = pytest.mark.core
GROUPS = Kind("groups", cells=6, sequences=4, streams=2, windows=FOUR.windows)
POOL = Kind("pool", cells=4, sequences=2, windows=(jaxkv.window.sliding(1),))
EACH = Kind("one-each", cells=4, sequences=2, streams=2, windows=POOL.windows)


def evicted(seq=0):
    """Eight tokens of a sequence, of which the window has taken two."""
    return told(FOUR.make(), 8, seq)


def test_can_resume_where_all_that_is_seen_is_there():
    memory = evicted()
    assert drawing(memory) == "6{0} 7{0} 2{0} 3{0} 4{0} 5{0}"
    assert resumable(memory) == [5, 6, 7, 8] and starts_at(memory, 0) == 8


def test_clear_and_seq_keep_forget_marks_of_what_they_remove():
    memory = evicted(seq=1)
    for emptied in (jaxkv.clear(memory), jaxkv.seq_keep(memory, 0)):
        assert resumable(emptied, 1) == resumable(FOUR.make()) and starts_at(emptied, 1) == 0
    kept = jaxkv.seq_keep(memory, 1)
    assert resumable(kept, 1) == [5, 6, 7, 8] and starts_at(kept, 1) == 8


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
def test_seq_rm_of_what_was_taken_makes_it_not_missed(p0, p1, first):
    """Positions 0 and 1 were taken, and a token looks at three before its own."""
    memory, ok = jaxkv.seq_rm(evicted(), 0, p0, p1)
    assert ok and resumable(memory) == [*range(first, 9)]


def test_apply_plan_made_before_marks_changed_is_stale():
    """Removing what was taken already changes no cell."""
    memory = evicted()
    plan = plan_of(memory)
    edited, _ = jaxkv.seq_rm(memory, 0, 0, 2)
    assert drawing(edited) == drawing(memory)
    assert_identical(jaxkv.apply(edited, plan), edited)


@pytest.mark.parametrize(
    ("p0", "p1", "wanted"),
    [
        (-1, -1, [5, 6, 7, 8]),
        (0, 4, []),  # its next token, at 4, would miss 1
        (0, 1, []),
        (1, 1, [*range(10)]),  # nothing is copied, though 0 and 1 are lost
        (4, 8, [*range(9)]),
    ],
)
def test_seq_cp_copies_what_its_range_has_lost(p0, p1, wanted):
    memory = jaxkv.seq_cp(evicted(), 0, 1, p0, p1)
    assert resumable(memory, 1) == wanted and resumable(memory, 0) == [5, 6, 7, 8]
    assert plan_of(memory, 1, seq=1).reason[1] == (Reason.FITS if wanted else Reason.LOST)


@core
@pytest.mark.parametrize("kind", [POOL, EACH], ids=lambda kind: kind.name)
def test_marks_never_fall_when_moved_cells_are_taken(kind):
    """A cell that was moved before what was taken already is taken in its turn."""

    def told_one(memory):
        return jaxkv.apply(memory, jaxkv.init_batch(memory, make_batch([[1]], sequences=[0])))

    memory = kind.make()
    for _ in range(6):
        memory = told_one(memory)
    memory = jaxkv.seq_add(memory, 0, 3, -1, -3)
    memory = jaxkv.apply(memory, jaxkv.init_update(memory))
    assert sorted(drawing(memory).rstrip(" |").split()) == ["0{0}", "1{0}", "2{0}", "2{0}"]
    before = resumable(memory)
    assert before == [2, 3]
    memory = told_one(memory)
    assert sorted(drawing(memory).rstrip(" |").split()) == [".", "2{0}", "2{0}", "3{0}"]
    assert resumable(memory) == [*before, 4]


@core
def test_init_batch_token_that_sees_all_cells_finds_no_room():
    kind = Kind("short", cells=3, sequences=3, windows=FOUR.windows)
    assert plan_of(drawn("0{0} 1{0} 2{0}", kind)).reason.tolist() == [Reason.NO_ROOM, 0, 0]


@core
def test_apply_takes_nothing_in_another_stream():
    """Sequences 0 and 2 are the first of their streams, and those are looked at together."""

    def told_ids(memory, *ids):
        for seq in ids:
            batch = make_batch([[1]], sequences=[seq])
            memory = jaxkv.apply(memory, jaxkv.init_batch(memory, batch).check())
        return memory

    memory, _ = jaxkv.seq_rm(told_ids(GROUPS.make(), *[2] * 8), 2, 3, 7)
    memory = told_ids(memory, 3, 3)
    memory = jaxkv.seq_cp(memory, 3, 2, 0, 2)  # below what the window has taken from sequence 2
    held = drawing(memory).split("|")[1]
    memory = told_ids(memory, *[0] * 8)
    assert drawing(memory).split("|")[1] == held and "0{2,3}" in held


def test_init_batch_counts_hidden_cells_from_what_was_taken():
    """Where all that is left was moved before it, the next token comes after what was taken."""
    memory = jaxkv.seq_add(told(FOUR.make(), 12), 0, 8, -1, -8)
    memory, _ = jaxkv.seq_rm(memory, 0, 6)
    assert drawing(memory) == ". . 0{0}-8 1{0}-8 2{0}-8 3{0}-8"
    # From position 6 a token would see 3 and on, so that three cells are free beside the empty two.
    assert [plan_of(memory, count, seq=1).ok.item() for count in (5, 6)] == [True, False]


def test_go_back_is_refused_once_a_ubatch_took_cells():
    """Trap 72. llama.cpp has lost them; here the memory before is a value and still has them."""
    memory = told(FOUR.make(), 6)
    aborted = jaxkv.apply(memory, plan_of(memory, 2))
    assert drawing(aborted) == "6{0} 7{0} 2{0} 3{0} 4{0} 5{0}"
    table, _ = jaxkv.split(memory)
    back, ok = jaxkv.go_back(table, aborted)
    assert not ok
    assert_identical(back, aborted)
    assert drawing(memory) == "0{0} 1{0} 2{0} 3{0} 4{0} 5{0}" and resumable(memory) == [*range(7)]
    for left in (6, 3, 1):  # it can be cut anywhere, as if nothing had been tried
        assert starts_at(jaxkv.seq_rm(memory, 0, left)[0], 0) == left


@core
@pytest.mark.parametrize("delta", [4, -3])
def test_seq_add_moves_marks_of_every_owner(delta):
    """A fork shares the cells that move, and what was taken from both was shared too."""
    memory = jaxkv.seq_add(jaxkv.seq_cp(evicted(), 0, 1), 0, 0, -1, delta)
    memory = jaxkv.apply(memory, jaxkv.init_update(memory))
    assert resumable(memory, 0, 14) == resumable(memory, 1, 14)
    assert starts_at(memory, 0) == starts_at(memory, 1) == 8 + delta
    memory, _ = jaxkv.seq_rm(memory, 1, 4 + delta)
    # Moved down, what was taken stands before 0, where no token looks for it.
    assert plan_of(memory, 1, seq=1).reason[1] == (Reason.LOST if delta > 0 else Reason.FITS)
