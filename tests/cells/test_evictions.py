"""What a window has taken is remembered: marks of sequences say up to where their past is gone.

How verbs forget, copy and move marks is compared with the oracle in `test_every_argument`.
"""

import pytest

import jaxkv
from jaxkv import Reason, make_batch
from tests.cells.plans import NEAR, one_by_one, plan_of, resumable, starts_at
from tests.memories import Kind, assert_identical, drawing, drawn

core = pytest.mark.core
GROUPS = Kind("groups", cells=6, sequences=4, streams=2, windows=NEAR.windows)
POOL = Kind("pool", cells=4, sequences=2, windows=(jaxkv.window.sliding(1),))
EACH = Kind("one-each", cells=4, sequences=2, streams=2, windows=POOL.windows)


def in_turn(memory, *ids):
    """Apply a token of each sequence."""
    for seq in ids:
        batch = make_batch([[1]], sequences=[seq])
        memory = jaxkv.apply(memory, jaxkv.init_batch(memory, batch).check())
    return memory


def test_apply_plan_made_before_marks_changed_is_stale():
    """Removing what was taken already changes no cell."""
    memory = one_by_one(NEAR.make(), 8)
    assert drawing(memory) == "6{0} 7{0} 2{0} 3{0} 4{0} 5{0}"
    assert resumable(memory) == [5, 6, 7, 8] and starts_at(memory) == 8
    edited, _ = jaxkv.seq_rm(memory, 0, 0, 2)
    assert drawing(edited) == drawing(memory) and resumable(edited) == [*range(9)]
    assert_identical(jaxkv.apply(edited, plan_of(memory)), edited)


@core
@pytest.mark.parametrize("kind", [POOL, EACH], ids=lambda kind: kind.name)
def test_marks_never_fall_when_moved_cells_are_taken(kind):
    """A cell that was moved before what was taken already is taken in its turn."""
    memory = jaxkv.seq_add(in_turn(kind.make(), *[0] * 6), 0, 3, -1, -3)
    memory = jaxkv.apply(memory, jaxkv.init_update(memory))
    assert sorted(drawing(memory).rstrip(" |").split()) == ["0{0}", "1{0}", "2{0}", "2{0}"]
    assert resumable(memory) == [2, 3]
    memory = in_turn(memory, 0)
    assert sorted(drawing(memory).rstrip(" |").split()) == [".", "2{0}", "2{0}", "3{0}"]
    assert resumable(memory) == [2, 3, 4]


@core
def test_init_batch_token_that_sees_all_cells_finds_no_room():
    kind = Kind("short", cells=3, sequences=3, windows=NEAR.windows)
    assert plan_of(drawn("0{0} 1{0} 2{0}", kind)).reason.tolist() == [Reason.NO_ROOM, 0, 0]


@core
def test_apply_takes_nothing_in_another_stream():
    """Sequences 0 and 2 are the first of their streams, and those are looked at together."""
    memory, _ = jaxkv.seq_rm(in_turn(GROUPS.make(), *[2] * 8), 2, 3, 7)
    memory = in_turn(memory, 3, 3)
    memory = jaxkv.seq_cp(memory, 3, 2, 0, 2)  # below what the window has taken from sequence 2
    held = drawing(memory).split("|")[1]
    memory = in_turn(memory, *[0] * 8)
    assert drawing(memory).split("|")[1] == held and "0{2,3}" in held


def test_init_batch_counts_hidden_cells_from_what_was_taken():
    """Where all that is left was moved before it, the next token comes after what was taken."""
    memory = jaxkv.seq_add(one_by_one(NEAR.make(), 12), 0, 8, -1, -8)
    memory, _ = jaxkv.seq_rm(memory, 0, 6)
    assert drawing(memory) == ". . 0{0}-8 1{0}-8 2{0}-8 3{0}-8"
    # From position 6 a token would see 3 and on, so that three cells are free beside the empty two.
    assert [plan_of(memory, count, 1).ok.item() for count in (5, 6)] == [True, False]


def test_go_back_is_refused_once_a_ubatch_took_cells():
    """Trap 72. llama.cpp has lost them; here the memory before is a value and still has them."""
    memory = one_by_one(NEAR.make(), 6)
    aborted = jaxkv.apply(memory, plan_of(memory, 2))
    assert drawing(aborted) == "6{0} 7{0} 2{0} 3{0} 4{0} 5{0}"
    back, ok = jaxkv.go_back(jaxkv.split(memory)[0], aborted)
    assert not ok
    assert_identical(back, aborted)
    assert drawing(memory) == "0{0} 1{0} 2{0} 3{0} 4{0} 5{0}" and resumable(memory) == [*range(7)]
    for left in (6, 3, 1):  # it can be cut anywhere, as if nothing had been tried
        assert starts_at(jaxkv.seq_rm(memory, 0, left)[0]) == left
