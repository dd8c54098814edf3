"""Edge cases of ollama's causal cache, numbered as in a list made from its code and tests.

Where jaxkv decides differently the test says so. `test_traps.py` has 04, 05 and 07 to 12, too,
`test_window.py` 01 and 14, `test_shift.py` 27. Those about encoders (16 to 18) and the slots of
ollama's server (19 to 24, 28, 29) have no place here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, make_batch
from tests.cells.plans import mask, plan_of
from tests.histories import positions_of, told
from tests.memories import RUNS, Kind, assert_identical, drawing, drawn

WINDOW = Kind("window", cells=8, sequences=2, windows=(jaxkv.window.sliding(4),))


@pytest.mark.core
def test_visible_tokens_of_one_batch_have_windows_of_their_own():
    """Edges 02 and 03: of two sequences in turns. ollama shows W + 1 positions, here it is W."""
    memory = drawn("0{0} 1{0} 2{0} 0{1} 3{0} 4{0}", WINDOW)
    plan = plan_of(memory, 4, [0, 1, 0, 1])
    table = jaxkv.apply(memory, plan).table
    rows = np.asarray(mask(table, plan.ubatches[0]))[0, :4]
    seen = [sorted(np.asarray(table.position)[0][row].tolist()) for row in rows]
    assert seen == [[2, 3, 4, 5], [0, 1], [3, 4, 5, 6], [0, 1, 2]]


@pytest.mark.core
def test_init_batch_contiguous_refuses_holes_until_defrag():
    """Edge 06. Scattered placement takes such holes."""
    memory = drawn("0{0} . 2{0} . 4{0} . 6{0} . 8{0} . 10{0} .", RUNS)
    assert plan_of(memory, 3).reason[0] == Reason.FRAGMENTED
    memory = jaxkv.apply(memory, jaxkv.defrag_plan(memory))
    assert plan_of(memory, 3).ok


def test_can_resume_in_a_window_up_to_what_was_taken():
    """Edge 13: one past the last always can go on, two past cannot, and what is empty can."""
    memory = WINDOW.make()
    assert jaxkv.can_resume(memory, 0, 0)
    wanted = {5: range(6), 9: range(4, 10), 12: range(7, 13)}
    for count in range(1, 13):
        memory = jaxkv.apply(memory, plan_of(memory, 1))
        if count in wanted:
            resumable = [p for p in range(count + 3) if jaxkv.can_resume(memory, 0, p)]
            assert resumable == [*wanted[count]]


def test_init_batch_takes_hidden_cells_of_an_idle_sequence():
    """Edge 15: after empty ones, only as many as needed, and never what its next token sees."""
    memory = drawn("0{0} 1{0} 2{0} 3{0} 4{0} 5{0}", WINDOW)
    memory = jaxkv.apply(memory, plan_of(memory, 4, 1))
    assert drawing(memory) == "2{1} 3{1} 2{0} 3{0} 4{0} 5{0} 0{1} 1{1}"
    assert jaxkv.can_resume(memory, 0, 6)
    assert plan_of(memory, 3, 1).reason[1] == Reason.NO_ROOM


@pytest.mark.core
def test_seq_cp_replaced_states_come_back_to_no_sequence():
    """Edge 25: ollama frees their place with the checkpoints in it, for the next to restore."""
    twin = told(kept=3, counts=(8, 4, 0))
    assert jaxkv.seq_rm(twin.memory, 1, 2)[1]
    twin.both("seq_cp", 0, [1])
    assert positions_of(twin.memory, 1) == [4, 5, 6, 7]
    for p0 in (2, 3, 4):  # where states of the old text stood
        assert not twin.seq_rm(1, p0)
    assert twin.decode([2, 2])  # takes cells that the old text had
    twin.compare()
    assert not jaxkv.can_resume(twin.memory, 2, 3) and twin.seq_rm(2, 1)
    assert twin.seq_rm(1, 5) and twin.decode([1])
    twin.compare()


@pytest.mark.core
def test_init_batch_rows_refused_by_states_leave_attention():
    """Edge 26: a row holds one sequence; ollama's attention has the tokens by then."""
    twin = told(kept=1, counts=(3, 2, 0), kinds="ar")

    @jax.jit
    def applied(memory, sequences):
        batch = make_batch(jnp.ones((2, 2), jnp.int32), sequences=sequences)
        plan = jaxkv.init_batch(memory, batch)
        return jaxkv.apply(memory, plan), plan.reason

    for sequences in ([[0, 1], [2, 2]], [[1, 1], [1, 1]]):
        after, reason = applied(twin.memory, jnp.array(sequences))
        assert Reason.MIXED_ROW in reason.tolist()
        assert_identical(after, twin.memory)
    twin.compare()
