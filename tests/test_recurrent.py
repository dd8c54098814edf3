"""Recurrent memories: exact to the token or refused, alone and beside attention.

Every state names all the tokens it has seen (`tests.histories`), so a state that is stale by one
token, another sequence's, or half written is seen at once.
"""

from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import jaxkv
from jaxkv import Reason, make_batch
from tests import hlo
from tests.histories import (
    STATES,
    WIDTH,
    Twin,
    bytes_of,
    compute,
    kept_of,
    make,
    plan_rows,
    positions_of,
    run,
    tell,
    walk,
)
from tests.memories import assert_identical


def told(kept=0, counts=(10,), **options):
    """A twin whose sequences 0, 1, ... were told so many tokens."""
    twin = Twin(kept=kept, **options)
    counts = list(counts)
    while any(counts):
        now = [min(count, WIDTH) for count in counts]
        assert twin.decode([seq for seq, count in enumerate(now) for _ in range(count)])
        counts = [count - some for count, some in zip(counts, now, strict=True)]
    twin.compare()
    return twin


def states_of(memory, seq=0):
    """Positions and bytes of what a sequence of a memory without attention keeps."""
    return kept_of(*jaxkv.split(memory))[seq]


# ------------------------------------------------------------------------------- traps, one by one


def test_trap_60_a_cut_is_granted_where_a_state_stands():
    twin = told(kept=0)  # T = 9
    assert not twin.seq_rm(0, 5)
    assert twin.seq_rm(0, 10)
    assert twin.seq_rm(0, 0, 5)
    assert twin.seq_rm(0, 3, 6)
    # llama.cpp refuses this; here -1 is every sequence, and to each the range changes nothing.
    assert twin.seq_rm(-1, 0, 5)
    assert not twin.seq_rm(-1, 5)
    twin.compare()
    assert positions_of(twin.memory) == [9]
    assert twin.seq_rm(0, 0, 10)
    assert positions_of(twin.memory) == []
    twin.compare()


def test_trap_61_removing_everything_is_clearing():
    twin = told(kept=1, counts=(4, 3))
    cleared = jaxkv.clear(twin.memory)
    assert twin.seq_rm(-1)
    assert_identical(twin.memory, cleared)
    twin.compare()
    for seq in (1, 0):
        assert twin.decode([seq, seq])
    twin.compare()


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


def test_trap_66_cutting_one_of_two_that_share_leaves_the_other():
    twin = told(kept=1, counts=(6, 0))
    twin.both("seq_cp", 0, [1])
    other = states_of(twin.memory, 1)
    assert twin.seq_rm(0, 5)
    assert states_of(twin.memory, 1) == other
    assert jaxkv.seq_pos_max(twin.memory, [0, 1]).tolist() == [4, 5]
    for seq in (0, 1, 0):
        assert twin.decode([seq])
        twin.compare()


def test_trap_67_a_copied_range_counts_by_its_end():
    """A state holds all before it; what no state stands at the end of is lost, and says so."""
    twin = told(kept=1, counts=(6, 0, 0))
    twin.both("seq_cp", 0, [1], 2, 5)
    assert positions_of(twin.memory, 1) == [4]
    twin.compare()
    twin.both("seq_cp", 0, [2], 2, 4)
    twin.compare()
    assert jaxkv.seq_pos_max(twin.memory, 2) == -1
    assert not jaxkv.can_resume(twin.memory, 2, 4)
    assert not twin.decode([2])
    plan = jaxkv.init_batch(twin.memory, make_batch([[1], [1], [1]]))
    assert plan.reason.tolist() == [Reason.FITS, Reason.FITS, Reason.LOST]
    assert twin.seq_rm(2, 0)
    assert twin.decode([2, 2, 1])
    twin.compare()
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match="wanted sequence ids from 0 to 2"):
            jaxkv.seq_cp(twin.memory, 0, wrong)
        traced = jax.jit(jaxkv.seq_cp)
        assert_identical(traced(twin.memory, 0, wrong), twin.memory)
        assert_identical(traced(twin.memory, wrong, 0), twin.memory)


@pytest.mark.parametrize("kept", [0, 3])
def test_trap_68_a_fork_that_goes_on_leaves_its_origin(kept):
    """And no cell is ever lacking, however all of them share and part again."""
    twin = told(kept=kept, counts=(5, 0, 0))
    twin.both("seq_cp", 0, [1, 2])
    assert jaxkv.used(twin.memory) == kept + 1
    origin = states_of(twin.memory)
    for count in (1, 4, 2):
        assert twin.decode([1] * count)
        assert states_of(twin.memory) == origin
        twin.compare()
    for round in range(5):
        twin.both("seq_cp", round % 3, [(round + 1) % 3])
        for seq in (0, 2, 1):
            assert twin.decode([seq] * (4 - round % 4 // 2 * 2))
            twin.compare()
    assert jaxkv.used(twin.memory) == 3 * (kept + 1)


@pytest.mark.parametrize("kept", [0, 1])
def test_trap_69_who_takes_no_part_is_left_alone(kept):
    twin = told(kept=kept, counts=(3, 4, 2))
    idle = states_of(twin.memory, 1)
    table, rows = jaxkv.split(twin.memory)
    cells = np.asarray(table.cell)[1]
    assert twin.decode([2, 0])
    assert states_of(twin.memory, 1) == idle
    table, after = jaxkv.split(twin.memory)
    assert np.array_equal(np.asarray(table.cell)[1], cells)
    for old, new in zip(jax.tree.leaves(rows), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(np.asarray(old)[cells], np.asarray(new)[cells])
    twin.compare()


KINDS = {
    "recurrent": {"kinds": "rr"},
    "attention": {"kinds": "ar"},
    "window": {"kinds": "ra", "window": jaxkv.standard(4)},
    "parallel": {"kinds": "ba"},
}
over_kinds = pytest.mark.parametrize("kind", KINDS)


@over_kinds
@pytest.mark.parametrize("stop_before", [1, 2])
def test_trap_71_and_72_an_abort_leaves_the_state_before_the_batch(kind, stop_before):
    """The memory before is a value; where rows were given up, going back is exact or refused."""
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


@partial(jax.jit, donate_argnames="rows", static_argnames="kinds")
def step(table, rows, ubatch, kinds):
    """Only the rows are donated, so the caller keeps the old table."""
    memory, _ = walk(jaxkv.join(table, rows), ubatch, kinds)
    return jaxkv.split(memory)


@pytest.mark.parametrize("kind", ["recurrent", "attention"])
def test_trap_71_with_donated_rows_what_is_shared_survives(kind):
    """States that a second sequence holds are never written over, so going back is granted."""
    twin = told(kept=1, counts=(3, 0, 0), **KINDS[kind])
    alone = jaxkv.split(twin.memory)[0]
    twin.both("seq_cp", 0, [2])
    table, rows = jaxkv.split(jax.tree.map(jnp.copy, twin.memory))
    old = table
    plan, _ = twin.plan([0] * 11, in_parts=True)
    for ubatch in plan.ubatches:
        table, rows = step(table, rows, ubatch, KINDS[kind]["kinds"])
    known = kept_of(*twin.parts()[:2])
    twin.memory, ok = jaxkv.go_back(old, jaxkv.join(table, rows))
    assert ok
    assert kept_of(*twin.parts()[:2]) == known
    _, ok = jaxkv.go_back(alone, jaxkv.join(table, rows))
    assert ok  # the same cells: what is shared is there for all


def test_going_back_is_refused_where_states_were_written_over():
    memory = tell(make(sequences=1), [1, 2])
    table, _ = jaxkv.split(memory)
    later = tell(memory, [3])
    back, ok = jaxkv.go_back(table, later)
    assert not ok
    assert_identical(back, later)


def test_going_back_and_computing_the_same_ubatch_again_gives_the_same():
    memory = tell(make(), [1, 2])  # a cell is free
    (ubatch,) = jaxkv.init_batch(memory, make_batch([3])).ubatches
    later, passed = walk(memory, ubatch)
    back, ok = jaxkv.go_back(jaxkv.split(memory)[0], later)
    assert ok
    again, same = walk(back, ubatch)
    assert_identical(same, passed)
    assert states_of(again) == states_of(later)


def test_trap_86_a_hybrid_begins_where_it_can_be_cut_back_to():
    for kept, first in ((0, 9), (1, 8)):
        twin = told(kept=kept, counts=(10,), kinds="ar")
        assert jaxkv.seq_pos_min(twin.memory, 0) == first
        assert jaxkv.seq_pos_max(twin.memory, 0) == 9
        assert twin.seq_rm(0, first + 1)
        assert not twin.seq_rm(0, first)
        twin.compare()


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_trap_94_a_fresh_state_is_selected_not_multiplied(number):
    memory = make(kept=1)
    table, rows = jaxkv.split(memory)
    poison = [dict(row, trace=jnp.full_like(row["trace"], number)) for row in rows]
    memory = tell(jaxkv.join(table, tuple(poison)), [1, 2, 3], [4])
    assert states_of(memory) == [(p, bytes_of([1, 2, 3][: p + 1], (0, 1))) for p in (1, 2)]
    assert states_of(memory, 1) == [(0, bytes_of([4], (0, 1)))]


# ------------------------------------------------------------------------------------- rollback


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


def test_a_sequence_may_begin_anywhere():
    memory = run(make(kept=1), make_batch([1, 2, 3], positions=[100, 101, 102]))
    assert positions_of(memory) == [101, 102]
    assert not jaxkv.can_seq_rm(memory, 0, 50)
    memory = run(memory, make_batch([4]))
    assert states_of(memory)[-1] == (103, bytes_of([1, 2, 3, 4], (0, 1)))


# -------------------------------------------------------------------------------- moving positions


def test_moving_takes_kept_states_along():
    twin = told(kept=3, counts=(8,))
    twin.both("seq_add", 0, 3, -1, -2)
    assert positions_of(twin.memory) == [2, 3, 4, 5]
    twin.compare()
    assert twin.seq_rm(0, 5)
    assert twin.decode([0])
    twin.compare()


@pytest.mark.parametrize(
    "p0, p1, delta, left",
    [
        (6, -1, -2, [4, 5]),  # the older ones are no longer before the others
        (7, 8, -3, [4]),
        (5, 7, 4, [4, 7]),  # kept states that would stand after the current one
        (5, 6, -6, [4, 6, 7]),  # forgotten by itself
        (7, 8, -8, [4, 5, 6]),  # the current one is forgotten: the end is cut off
        (6, -1, -8, [4, 5]),
        (0, -1, -6, [0, 1]),
        (0, -1, -8, []),
    ],
)
def test_states_that_leave_the_line_are_dropped(p0, p1, delta, left):
    twin = told(kept=3, counts=(8,))
    twin.both("seq_add", 0, p0, p1, delta)
    assert positions_of(twin.memory) == left
    twin.compare()
    assert twin.decode([0, 0])
    twin.compare()


def test_a_current_state_that_is_forgotten_with_none_before_it_is_lost():
    twin = told(kept=3, counts=(8,))
    twin.both("seq_add", 0, 3, -1, -20)
    assert positions_of(twin.memory) == []
    assert not twin.decode([0])
    assert not twin.seq_rm(0, 2)
    twin.both("seq_cp", 0, [0])
    twin.compare()
    assert twin.seq_rm(0)
    assert twin.decode([0])
    twin.compare()


@pytest.mark.parametrize("apart", [False, True])
def test_a_shared_state_moves_as_cells_of_attention_do(apart):
    twin = told(kept=1, counts=(5, 0), apart=apart, kinds="ar")
    twin.both("seq_cp", 0, [1])
    twin.both("seq_add", 0, 0, -1, 3)
    assert jaxkv.seq_pos_max(twin.memory, [0, 1]).tolist() == [7, 4 if apart else 7]
    twin.update()
    twin.compare()
    for seq in (0, 1):
        assert twin.decode([seq])
    twin.compare()


@pytest.mark.parametrize("divisor, left", [(1, [4, 5, 6, 7]), (2, [3]), (9, [0])])
def test_dividing_drops_what_cannot_be_returned_to(divisor, left):
    twin = told(kept=3, counts=(8,))
    twin.both("seq_div", 0, 0, -1, divisor)
    assert positions_of(twin.memory) == left
    twin.compare()
    assert twin.decode([0])
    twin.compare()


# ------------------------------------------------------------------------- hybrids, all or nothing


@over_kinds
def test_a_cut_that_one_part_refuses_changes_neither(kind):
    twin = told(kept=1, counts=(6, 3, 2), **KINDS[kind])
    before = twin.memory
    assert not twin.seq_rm(0, 3)
    assert not twin.seq_rm(-1, 1)
    after, ok = jax.jit(jaxkv.seq_rm)(before, 0, jnp.int32(3))
    assert not ok
    assert_identical(after, before)
    after, ok = jax.jit(jaxkv.seq_rm)(before, 0, jnp.int32(5))
    assert ok
    assert twin.seq_rm(0, 5)
    assert_identical(after, twin.memory)
    twin.compare()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "parallel"])
def test_a_batch_that_attention_refuses_changes_neither(kind):
    twin = told(kept=1, counts=(8, 5, 2), **KINDS[kind])
    assert not twin.decode([0, 1, 2])
    before, kinds = twin.memory, KINDS[kind]["kinds"]

    @jax.jit
    def traced(memory, tokens):
        ubatch, ok = jaxkv.plan_step(memory, tokens, jnp.arange(3), tokens > 0)
        return *walk(memory, ubatch, kinds), ok

    after, _, ok = traced(before, jnp.array([5, 6, 0]))
    assert not ok
    assert_identical(after, before)
    after, _, ok = traced(before, jnp.array([5, 0, 0]))
    assert ok
    assert jaxkv.seq_pos_max(after, [0, 1, 2]).tolist() == [8, 4, 1]


def test_a_batch_that_the_recurrent_part_refuses_changes_neither():
    twin = told(kept=0, counts=(6, 0, 0), kinds="ar")
    twin.both("seq_cp", 0, [1], 0, 3)  # attention has three tokens, the recurrence no state
    twin.compare()
    assert not twin.decode([1])
    assert not twin.seq_rm(1, 2)
    assert twin.seq_rm(1)
    assert twin.decode([1])
    twin.compare()


def test_parts_that_end_apart_are_refused_and_never_half_applied():
    """Attention forgot a middle that the state has seen; cut back, the two end apart."""
    twin = told(kept=1, counts=(10,), kinds="ar")
    assert twin.seq_rm(0, 5, 9)
    twin.compare()
    assert twin.seq_rm(0, 9)
    assert jaxkv.seq_pos_max(twin.memory, 0) == 4
    assert not twin.decode([0])
    twin.compare()


@pytest.mark.slow
def test_a_hybrid_of_hybrids_finds_the_part():
    """A composite as a part is asked by its own layers."""
    sizes = {"heads": 2, "size": 4, "sequences": 3}
    inner = jaxkv.make_hybrid_cache(
        (jaxkv.make_kv_cache(layers=1, cells=16, **sizes), (0,)),
        (jaxkv.make_kv_cache(layers=1, window=jaxkv.standard(4), ubatch_size=4, **sizes), (1,)),
    )
    memory = jaxkv.make_hybrid_cache((inner, (0, 2)), (make(1), (0, 1)))
    assert [jaxkv.states_kept(memory, layer) for layer in (0, 1)] == [1, 1]
    memory = tell(memory, [1, 2, 3], [4], kinds="bra")
    assert kept_of(memory.parts[1].table, memory.parts[1].rows)[0][-1] == (
        2,
        bytes_of([1, 2, 3], (0, 1)),
    )
    with pytest.raises(ValueError, match="a layer that one part serves, of .0, 1, 2., got 2"):
        jaxkv.states_kept(memory, 2)
    assert "part 1, layers 0, 1\nsequence 0 1 2\nsequence 1 . 0\nsequence 2 . ." in jaxkv.show(
        memory
    )


# -------------------------------------------------------------------------------- stale ubatches


def planned(memory, *rows):
    """Plan tokens for sequences 0, 1, 2 as one ubatch."""
    table = np.zeros((2, 3, WIDTH), np.int32)
    for seq, row in enumerate(rows):
        table[:, seq, : len(row)] = row, [1] * len(row)
    return plan_rows(memory, *table).ubatches[0]


def unchanged_by(memory, ubatch, kinds="rr"):
    """Neither applying a ubatch nor computing it changes a bit."""
    assert_identical(jaxkv.apply(memory, ubatch), memory)
    assert_identical(walk(memory, ubatch, kinds)[0], memory)


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("count", [1, 4])
def test_a_ubatch_twice_or_late_or_rivalled_writes_nothing(kept, count):
    memory = tell(make(kept), [1, 2, 3])
    ubatch, rival = (planned(memory, [token] * count) for token in (7, 8))
    after, _ = walk(memory, ubatch)
    unchanged_by(after, ubatch)
    unchanged_by(after, rival)
    unchanged_by(tell(after, [9]), ubatch)
    unchanged_by(jaxkv.seq_rm(memory, 0)[0], ubatch)
    unchanged_by(make(kept), ubatch)
    forked = jaxkv.seq_cp(memory, 0, [1, 2])
    for token in (5, 6):  # the cells that were free are taken
        forked = tell(forked, [], [token] * 4, [token] * 4)
    unchanged_by(forked, ubatch)


def test_ubatches_out_of_order_change_nothing():
    memory = tell(make(1), [1])
    first, second = jaxkv.init_batch(memory, make_batch([2] * 8), ubatch_size=4).ubatches
    unchanged_by(memory, second)
    memory, _ = walk(memory, first)
    unchanged_by(memory, first)
    memory, _ = walk(memory, second)
    assert states_of(memory)[-1] == (8, bytes_of([1] + [2] * 8, (0, 1)))


def test_what_was_never_applied_reads_zeros_and_is_written_nowhere():
    memory = tell(make(), [1, 2])
    ubatch = planned(memory, [3])
    after, _ = jax.jit(compute)(memory, ubatch)
    assert_identical(after, memory)
    assert not jnp.any(jaxkv.read_states(memory, 0, ubatch)["hash"])


def test_two_rows_of_one_sequence_are_refused():
    """In a memory of one sequence, where rows name no stream."""
    memory = make(1, sequences=1)
    rows = jnp.zeros((2, 2), jnp.int32)
    plan = jax.jit(lambda m, t: jaxkv.init_batch(m, make_batch(t)))(memory, rows)
    assert not plan.ok
    assert plan.reason[0] == Reason.MIXED_ROW
    assert_identical(walk(memory, plan.ubatches[0])[0], memory)


# ------------------------------------------------------------------------------ what callers get


def test_padding_advances_nothing():
    """Rows of 5 tokens are padded to 8, and a row may be empty."""
    memory = make(1)
    ubatch = planned(memory, [1] * 5, [2] * 5)
    memory, passed = walk(memory, ubatch)
    for seq in range(2):
        history = [seq + 1] * 5
        assert states_of(memory, seq) == [(p, bytes_of(history[: p + 1], (0, 1))) for p in (3, 4)]
    assert states_of(memory, 2) == []
    after = np.asarray(passed[0]["hash"])[:, 5:]
    np.testing.assert_array_equal(after, np.broadcast_to(after[:, :1], after.shape))


def test_holes_in_a_row_do_not_count():
    """Rows that the caller lays out may have padding anywhere."""
    memory = make(3)
    tokens, valid = np.zeros((3, WIDTH), int), np.zeros((3, WIDTH), bool)
    valid[0, [1, 3, 4, 7]] = valid[1, 6] = True
    plan = plan_rows(memory, tokens, valid).check()
    (ubatch,) = plan.ubatches
    assert jaxkv.tails(ubatch, 3).tolist() == [[2, 3, 4], [0, 0, 1], [0, 0, 0]]
    table = jaxkv.apply(memory, ubatch).table
    assert table.position.tolist() == [[0, 1, 2, 3], [-1, -1, -1, 0], [-1] * 4]
    stamps = np.asarray(ubatch.stamps)
    assert np.asarray(table.stamp)[table.cell[0]].tolist() == stamps[0, [1, 3, 4, 7]].tolist()


@pytest.mark.slow
def test_any_split_gives_the_same():
    """Together in rows, cut into ubatches of other shapes, or one sequence after another."""
    tokens = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13]]
    wanted = kept_of(*jaxkv.split(tell(make(1), *tokens)))
    for seq, history in enumerate(tokens):
        assert wanted[seq][-1][1] == bytes_of(history, (0, 1))
    for size in (3, 32):
        memory = run(make(1), make_batch(tokens), ubatch_size=size)
        assert kept_of(*jaxkv.split(memory)) == wanted
    alone = make(1)
    for seq in (2, 0, 1):
        alone = tell(alone, *[tokens[seq] if s == seq else [] for s in range(3)])
    assert kept_of(*jaxkv.split(alone)) == wanted


def test_an_old_memory_is_a_checkpoint():
    """Nothing is ever changed in place, so keeping a memory is keeping a reference."""
    memory = tell(make(), [1, 2, 3])
    checkpoint = memory
    for token in range(4):
        memory = tell(memory, [token])
    assert states_of(tell(checkpoint, [9])) == [(3, bytes_of([1, 2, 3, 9], (0, 1)))]
    # Within one memory, and with donated rows, a sequence that is not used keeps a state.
    memory = tell(make(), [1, 2, 3])
    memory = jaxkv.seq_cp(memory, 0, 1)
    for token in range(4):
        memory = tell(memory, [token])
    memory = tell(jaxkv.seq_cp(memory, 1, 0), [9])
    assert states_of(memory) == [(3, bytes_of([1, 2, 3, 9], (0, 1)))]


def test_wrong_arguments():
    good = {"layers": 1, "states": STATES}
    for wrong, message in (
        ({"layers": 0}, "layers of at least 1, got 0"),
        ({"sequences": 0}, "sequences of at least 1, got 0"),
        ({"kept": -1}, "kept of at least 0, .*, got -1"),
        ({"states": {}}, "at least one state"),
        ({"sequences": 3, "streams": 2}, "streams of 1 or 3, one a sequence, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            jaxkv.make_recurrent_cache(**{**good, **wrong})
    memory = make(1)
    (ubatch,) = jaxkv.init_batch(memory, make_batch([1])).ubatches
    states = {n: jnp.zeros((1, 2, *s.shape)) for n, s in memory.rows[0].items() for s in [s[0]]}
    for layer in (-1, 2):
        for call in (
            lambda layer: jaxkv.read_states(memory, layer, ubatch),
            lambda layer: jaxkv.write_states(memory, layer, ubatch, states),
            lambda layer: jaxkv.states_kept(memory, layer),
        ):
            with pytest.raises(ValueError, match=f"a layer from 0 to 1, got {layer}"):
                call(layer)
    with pytest.raises(ValueError, match=r"wanted the states \['hash', 'trace'\], got \['hash'\]"):
        jaxkv.write_states(memory, 0, ubatch, {"hash": states["hash"]})
    with pytest.raises(ValueError, match=r"trace \[R, E \+ 1, ...\] of \(1, 2, 2\), got \(1, 2\)"):
        jaxkv.write_states(memory, 0, ubatch, {**states, "trace": states["trace"][:, 0]})
    attention = jaxkv.make_kv_cache(layers=1, cells=4, heads=1, size=2)
    with pytest.raises(TypeError, match="wanted a memory"):
        jaxkv.read_states(attention, 0, ubatch)


def test_nothing_is_ever_pending():
    memory = tell(make(1), [1, 2])
    assert jaxkv.init_update(memory).pending == 0
    for plan in (jaxkv.init_update(memory), jaxkv.defrag_plan(memory)):
        assert_identical(jaxkv.apply(memory, plan), memory)
        assert_identical(jax.jit(jaxkv.apply)(memory, plan), memory)


# -------------------------------------------------------------------------------- transformations


def everything(memory, seq, other, p0, p1):
    """Each verb and question, with one set of arguments."""
    return {
        "seq_rm": jaxkv.seq_rm(memory, seq, p0, p1),
        "seq_rm of all": jaxkv.seq_rm(memory, -1, p0, p1),
        "seq_cp": jaxkv.seq_cp(memory, seq, other, p0, p1),
        "seq_keep": jaxkv.seq_keep(memory, seq),
        "seq_add": jaxkv.seq_add(memory, seq, p0, p1, 1 - other),
        "seq_div": jaxkv.seq_div(memory, seq, p0, p1, other + 1),
        "clear": jaxkv.clear(memory),
        "seq_pos_min": jaxkv.seq_pos_min(memory, seq),
        "seq_pos_max": jaxkv.seq_pos_max(memory, seq),
        "used": jaxkv.used(memory),
        "can_seq_rm": jaxkv.can_seq_rm(memory, seq, p0, p1),
        "can_resume": jaxkv.can_resume(memory, seq, p0),
        "check_invariants": jaxkv.check_invariants(memory),
        "go_back": jaxkv.go_back(jaxkv.split(memory)[0], jaxkv.clear(memory)),
    }


ARGUMENTS = [(0, 1, 4, -1), (2, 0, -1, -1), (1, 2, 1, 0), (0, 1, 3, 5)]


def lives():
    """Three memories of different pasts."""
    one = told(kept=1, counts=(6, 2, 3))
    two = told(kept=1, counts=(6, 0, 3))
    two.both("seq_cp", 0, [1])
    three = told(kept=1, counts=(5, 1, 0))
    return [twin.memory for twin in (one, two, three)]


@pytest.mark.slow
def test_compiled_with_traced_arguments_is_as_called():
    compiled = jax.jit(everything)
    for memory in lives()[:2]:
        for args in ARGUMENTS:
            plain = everything(memory, *args)
            for name, result in compiled(memory, *args).items():
                assert_identical(result, plain[name])


@pytest.mark.slow
def test_vmap_over_memories_is_a_loop():
    memories, args = lives(), ARGUMENTS[:3]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *memories)
    together = jax.jit(jax.vmap(everything))(stacked, *map(jnp.array, zip(*args, strict=True)))
    for i, (memory, one) in enumerate(zip(memories, args, strict=True)):
        for name, alone in everything(memory, *one).items():
            assert_identical(jax.tree.map(lambda x, i=i: x[i], together[name]), alone)


def decode(memory, tokens, valid):
    """One token for each sequence: plan, apply, compute."""
    ubatch, ok = jaxkv.plan_step(memory, tokens, jnp.arange(3), valid)
    memory, passed = compute(jaxkv.apply(memory, ubatch), ubatch)
    return memory, (passed, ok)


@pytest.mark.slow
def test_a_step_in_scan_and_vmap_is_a_step():
    tokens = jnp.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    valid = jnp.array([[1, 1, 1], [1, 0, 1], [0, 0, 0]], bool)
    memories = lives()
    plain = []
    for memory in memories:
        for step in zip(tokens, valid, strict=True):
            memory, _ = decode(memory, *step)
        plain.append(memory)
    loop = jax.jit(lambda m: jax.lax.scan(lambda m, x: decode(m, *x), m, (tokens, valid))[0])
    for memory, expected in zip(memories, plain, strict=True):
        assert_identical(loop(memory), expected)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *memories)
    together = jax.jit(jax.vmap(loop))(stacked)
    for i, expected in enumerate(plain):
        assert_identical(jax.tree.map(lambda x, i=i: x[i], together), expected)


def test_lengths_share_programs():
    """Lengths of one bucket, ids and fills are values: nothing is compiled for them."""
    counted = jax.jit(lambda memory, ubatch: walk(memory, ubatch)[0])
    memory = make(1, 3)
    for i, count in enumerate((5, 6, 7, 8, 5)):
        batch = make_batch([1] * count, sequences=i % 3)
        (ubatch,) = jaxkv.init_batch(memory, batch, ubatch_size=8).ubatches
        memory = counted(memory, ubatch)
        memory, _ = jaxkv.seq_rm(memory, i % 3, jaxkv.seq_pos_max(memory, i % 3))
    assert counted._cache_size() == 1


@pytest.mark.slow
def test_gradients_flow_through_states():
    memory = make(0)
    (ubatch,) = jaxkv.init_batch(memory, make_batch([1])).ubatches
    table, rows = jaxkv.split(jaxkv.apply(memory, ubatch))
    numbers = [row["hash"] for row in rows]

    def loss(traces, x):
        parts = [dict(hash=n, trace=t) for n, t in zip(numbers, traces, strict=True)]
        memory = jaxkv.join(table, tuple(parts))
        state = jaxkv.read_states(memory, 0, ubatch)
        new = {"hash": state["hash"], "trace": state["trace"] * 3 + x}
        memory = jaxkv.write_states(memory, 0, ubatch, new)
        return jnp.sum(memory.rows[0]["trace"] ** 2)

    gradient = jax.grad(loss, argnums=1)([row["trace"] for row in rows], jnp.ones((1, 2)))
    np.testing.assert_array_equal(gradient, [[2.0, 2.0]])


LARGE = {"x": ((64, 1024), jnp.float32)}  # 256 KB a state


@pytest.mark.parametrize("kept", [0, 3])
def test_a_donated_step_copies_no_layer(kept):
    """It holds the states of its rows, and never those of all cells."""
    make_large = partial(
        jaxkv.make_recurrent_cache, layers=2, states=LARGE, sequences=64, kept=kept
    )
    memory = jax.eval_shape(make_large)

    def one(memory, tokens):
        ubatch, _ = jaxkv.plan_step(memory, tokens, jnp.array([5, 9]), jnp.array([True, True]))
        memory = jaxkv.apply(memory, ubatch)
        for layer in range(2):
            x = jaxkv.read_states(memory, layer, ubatch)["x"]
            after = jnp.stack([x] * kept + [x / 2 + ubatch.tokens[..., None]], axis=1)
            memory = jaxkv.write_states(memory, layer, ubatch, {"x": after})
        return memory

    compiled = jax.jit(one, donate_argnums=0).lower(memory, jnp.zeros(2, jnp.int32)).compile()
    layer = 64 * (kept + 1) * 64 * 1024 * 4
    assert hlo.temporary_bytes(compiled) < layer / 2
    assert hlo.large_moves(compiled, layer // 2) == []
    for verb in (
        lambda m: jaxkv.seq_rm(m, 0, 1, 5)[0],
        lambda m: jaxkv.seq_cp(m, 0, [1, 2]),
        lambda m: jaxkv.seq_add(m, 0, 4, -1, -2),
        lambda m: jaxkv.seq_div(m, 0, 0, -1, 2),
        lambda m: jaxkv.go_back(jaxkv.split(m)[0], m)[0],
    ):
        compiled = jax.jit(verb, donate_argnums=0).lower(memory).compile()
        assert hlo.temporary_bytes(compiled) < layer / 100
        assert hlo.large_moves(compiled, layer // 2) == []


# ------------------------------------------------------------------------------- random verbs

edges = st.integers(-2, 12)
ids = st.integers(0, 10**6)
MACHINES = [
    {"kinds": "rr", "kept": 3},
    {"kinds": "ba", "kept": 1},
    {"kinds": "ra", "kept": 1, "window": jaxkv.standard(4)},
    {"kinds": "ar", "kept": 0},
    {"kinds": "br", "kept": 1, "apart": True, "cells": 9},
]


class Verbs(RuleBasedStateMachine):
    """The verbs of hybrids, in any order, and what must be remembered after each."""

    machines = MACHINES

    @initialize(number=ids)
    def begin(self, number: int) -> None:
        self.twin = Twin(**self.machines[number % len(self.machines)])
        self.past = self.twin.fork()
        self.late = None

    @rule(counts=st.lists(st.sampled_from([0, 0, 1, 1, 2, 5]), min_size=3, max_size=3))
    def decode(self, counts: list[int]) -> None:
        """Several sequences at once, each in its row."""
        if any(counts):
            self.twin.decode([seq for seq, count in enumerate(counts) for _ in range(count)])

    @rule(number=ids)
    def decode_in_parts(self, number: int) -> None:
        self.twin.decode([number % 3] * 7, in_parts=True)

    @rule(number=ids, in_parts=st.booleans())
    def plan(self, number: int, in_parts: bool) -> None:
        """Plan, and leave it for later."""
        sequences = [number % 3] * 7 if in_parts else [number % 3, (number + 1) % 3]
        self.late = self.twin.plan(sequences, in_parts=in_parts)

    @precondition(lambda self: self.late is not None)
    @rule(backwards=st.booleans())
    def try_late_plan(self, backwards: bool) -> None:
        """Run an old plan, perhaps from its last ubatch: what is stale changes nothing."""
        plan, parts = self.late
        pairs = [*zip(plan.ubatches, parts, strict=True)] if plan.ok else []
        for ubatch, part in reversed(pairs) if backwards else pairs:
            self.twin.step(ubatch, part)

    @rule(number=ids, back=st.integers(0, 5))
    def cut(self, number: int, back: int) -> None:
        """Take back the last few tokens."""
        seq = number % 3
        self.twin.seq_rm(seq, max(self.twin.histories.reached(seq) + 1 - back, 0))

    @rule(number=ids, p0=edges, p1=edges)
    def seq_rm(self, number: int, p0: int, p1: int) -> None:
        self.twin.seq_rm(number % 4 - 1, p0, p1)

    @rule(src=ids, dsts=st.lists(ids, min_size=2, max_size=2), p0=edges, p1=edges)
    def seq_cp(self, src: int, dsts: list[int], p0: int, p1: int) -> None:
        self.twin.both("seq_cp", src % 3, [dst % 3 for dst in dsts], p0, p1)

    @rule(src=ids, dst=ids)
    def fork(self, src: int, dst: int) -> None:
        """What callers do with `seq_cp`: a whole sequence, onto one that is forgotten first."""
        if src % 3 != dst % 3:
            self.twin.seq_rm(dst % 3)
            self.twin.both("seq_cp", src % 3, [dst % 3])

    @rule(number=ids)
    def seq_keep(self, number: int) -> None:
        self.twin.both("seq_keep", number % 3)

    @rule(number=ids, p0=edges, p1=edges, delta=st.integers(-5, 5))
    def seq_add(self, number: int, p0: int, p1: int, delta: int) -> None:
        self.twin.both("seq_add", number % 3, p0, p1, delta)

    @rule(number=ids, p0=edges, p1=edges, divisor=st.integers(1, 3))
    def seq_div(self, number: int, p0: int, p1: int, divisor: int) -> None:
        self.twin.both("seq_div", number % 3, p0, p1, divisor)

    @rule()
    def update(self) -> None:
        self.twin.update()

    @rule()
    def clear(self) -> None:
        self.twin.both("clear")

    @rule()
    def remember(self) -> None:
        self.past = self.twin.fork()

    @rule()
    def go_back(self) -> None:
        self.twin.go_back(self.past)

    @rule()
    def back_to_the_value(self) -> None:
        """An old memory is a value: it is still there, states and all."""
        self.twin.return_to(self.past)

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "twin"):
            self.twin.compare()


class FewVerbs(Verbs):
    """The same, with what is compiled for other tests too."""

    machines = MACHINES[:3]


class TestVerbs(FewVerbs.TestCase):
    """The fast part: few runs, the same every time."""

    settings = settings(max_examples=15, stateful_step_count=25)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestVerbsAtLength(Verbs.TestCase):
    """The slow part: many longer runs."""

    settings = settings(max_examples=300, stateful_step_count=40, derandomize=True)
