"""Edge cases of ollama's causal cache, numbered as in a list made from its code and tests.

Where jaxkv decides differently the test says so. Those about encoders (16 to 18) and the slots of
its server (19 to 24, 28, 29) have no place here.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, make_batch
from jaxkv.kv.mask import visible
from tests.histories import positions_of, told
from tests.memories import RUNS, SMALL, Kind, assert_identical, drawing, drawn, filled, run, sign

WINDOW = Kind("window", cells=8, sequences=2, windows=(jaxkv.window.sliding(4),))


def plan_of(memory, tokens, sequences=0):
    """Plan up to 8 tokens, padded to as many, so that each memory needs one program."""
    padded = np.zeros((3, 8), np.int32)
    padded[:, : len(tokens)] = tokens, np.broadcast_to(sequences, len(tokens)), [1] * len(tokens)
    return plan_padded(memory, *padded)


@jax.jit
def plan_padded(memory, tokens, sequences, valid):
    return jaxkv.init_batch(memory, make_batch(tokens, sequences=sequences, valid=valid != 0))


@pytest.mark.core
def test_edge_01_a_window_counts_the_token_itself():
    """ollama shows W + 1 positions, llama.cpp and this library W."""
    memory = drawn("0{0} 1{0} 2{0} 3{0} 4{0}", WINDOW)
    plan = plan_of(memory, [1])
    memory = jaxkv.apply(memory, plan)
    seen = visible(memory.table, plan.ubatches[0])[0, 0]
    assert memory.table.position[0][seen].tolist() == [2, 3, 4, 5]


def test_edge_02_03_tokens_at_different_places_of_their_windows():
    """Two sequences in turns: what is kept is what the earliest token of each still sees."""
    memory = drawn("0{0} 1{0} 2{0} 0{1} 3{0} 4{0}", WINDOW)
    plan = plan_of(memory, [1, 2, 3, 4], sequences=[0, 1, 0, 1])
    memory, (mask,), _ = sign(memory, plan.ubatches[0])
    position = np.asarray(memory.table.position)[0]
    seen = [sorted(position[row].tolist()) for row in np.asarray(mask)[0, :4]]
    assert seen == [[2, 3, 4, 5], [0, 1], [3, 4, 5, 6], [0, 1, 2]]


def test_edge_04_keys_that_were_never_written_are_not_read():
    memory = jaxkv.make_kv_cache(layers=1, cells=8, kv_heads=1, head_dim=2)
    table, buffers = jaxkv.split(memory)
    buffers = replace(
        buffers, k=tuple(k + np.nan for k in buffers.k), v=tuple(v + 3e38 for v in buffers.v)
    )
    memory = jaxkv.join(table, buffers)
    plan = plan_of(memory, [1, 2])
    x = np.ones((1, 8, 1, 2), np.float32)
    attend = jax.jit(jaxkv.attend, static_argnames="layer")
    _, out = attend(jaxkv.apply(memory, plan), 0, plan.ubatches[0], x, x, x)
    np.testing.assert_array_equal(out[:, :2], x[:, :2])


@pytest.mark.parametrize("kind", [Kind("full", cells=8, sequences=2), WINDOW], ids=lambda k: k.name)
def test_edge_05_what_is_full_writes_nothing_and_serves_less(kind):
    """ollama has slid its windows by then, and the run loop panics."""
    memory = drawn("0{0} 1{0} 2{0} 3{0} 4{0} 5{0}", kind)
    plan = plan_of(memory, [1] * 8, sequences=1)
    assert not plan.ok
    assert_identical(jaxkv.apply(memory, plan), memory)
    assert plan_of(memory, [1, 1], sequences=1).ok


@pytest.mark.core
def test_edge_06_holes_that_do_not_touch_satisfy_a_batch():
    cells = "0{0} . 2{0} . 4{0} . 6{0} . 8{0} . 10{0} ."
    assert drawing(jaxkv.apply(drawn(cells), plan_of(drawn(cells), [1, 2, 3]))).startswith(
        "0{0} 11{0} 2{0} 12{0} 4{0} 13{0}"
    )
    memory = drawn(cells, RUNS)
    assert plan_of(memory, [1, 2, 3]).reason[0] == Reason.FRAGMENTED
    memory = jaxkv.apply(memory, jaxkv.defrag_plan(memory))
    assert plan_of(memory, [1, 2, 3]).ok


def test_edge_07_cells_are_as_many_as_were_asked_for():
    """ollama rounds up to its padding. Nothing is rounded here, and all of them can be used."""
    memory = jaxkv.make_kv_cache(layers=1, cells=5, kv_heads=1, head_dim=2)
    assert memory.buffers.k[0].shape[2] == 5
    assert plan_of(memory, [1] * 5).ok and not plan_of(memory, [1] * 6).ok


def test_edge_08_the_middle_of_what_is_shared_can_be_removed():
    """ollama refuses where a moved cell is shared, half-way through. Here removing and moving are
    two verbs: the first concerns one owner, the second every owner of the cell."""
    memory = drawn("0{0,1} 1{0,1} 2{0,1} 3{0,1}")
    memory, ok = jaxkv.seq_rm(memory, 0, 1, 2)
    assert ok
    assert drawing(memory) == "0{0,1} 1{1} 2{0,1} 3{0,1}"
    assert drawing(jaxkv.seq_add(memory, 0, 2, -1, -1)) == "0{0,1} 1{1} 1{0,1}-1 2{0,1}-1"


def test_edge_09_an_empty_range_is_nothing_though_what_follows_is_shared():
    """ollama refuses because of the shared cells after it, or turns them by an angle of zero."""
    memory = drawn("0{0} 1{0} 2{0,1} 3{0,1}")
    for verb in (jaxkv.can_seq_rm, lambda *args: jaxkv.seq_rm(*args)[1]):
        assert verb(memory, 0, 1, 1) and verb(memory, 0, 2, 2)
    for p0 in (0, 1, 2, 4):
        after, _ = jaxkv.seq_rm(memory, 0, p0, p0)
        assert_identical(after, memory)
        assert_identical(jaxkv.seq_add(memory, 0, p0, p0, 3), memory)
        assert_identical(jaxkv.seq_add(memory, 0, p0, -1, 0), memory)
    assert jaxkv.init_update(memory).pending == 0


@pytest.mark.parametrize("rope", [None, jaxkv.make_rope(4)], ids=["no rope", "rope"])
def test_edge_10_an_end_that_is_past_the_last_token_needs_no_rotation(rope):
    """Without a way to rotate keys, ollama refuses a finite range unless it begins at 0."""
    memory = SMALL.make(rope)
    memory = jaxkv.apply(memory, plan_of(memory, [1, 2, 3, 4]))
    for p0, p1, left in ((0, 4, ""), (0, 9, ""), (2, 9, "0{0} 1{0}"), (4, 9, None), (7, 9, None)):
        after, ok = jaxkv.seq_rm(memory, 0, p0, p1)
        assert ok and jaxkv.init_update(after).pending == 0
        assert drawing(after) == ("0{0} 1{0} 2{0} 3{0}" if left is None else left)


def test_edge_11_copies_onto_itself_and_from_an_empty_sequence():
    """ollama: the first erases the sequence, the second empties the destination. Copies merge here,
    so that neither changes anything, and nothing of the destination is lost."""
    memory = drawn("0{0} 1{0} 0{1}")
    assert_identical(jaxkv.seq_cp(memory, 0, 0), memory)
    assert_identical(jaxkv.seq_cp(memory, 2, 1), memory)
    assert drawing(jaxkv.seq_cp(memory, 0, 1)) == "0{0,1} 1{0,1} 0{1}"


@pytest.mark.core
def test_edge_12_a_shared_cell_is_free_when_its_last_owner_leaves():
    memory = jaxkv.seq_cp(filled(4), 0, [1, 2])
    for seq, left in ((0, 4), (1, 4), (2, 0)):
        memory, _ = jaxkv.seq_rm(memory, seq)
        assert jaxkv.used(memory) == left


@pytest.mark.core
@pytest.mark.parametrize(
    ("stored", "resumable"),
    [(5, [0, 1, 2, 3, 4, 5]), (9, [4, 5, 6, 7, 8, 9]), (12, [7, 8, 9, 10, 11, 12])],
)
def test_edge_13_where_one_can_go_on(stored, resumable):
    """A fresh sequence can start anywhere; one past the last always can go on, two past cannot."""
    memory = WINDOW.make()
    assert jaxkv.can_resume(memory, 0, 0)
    for i in range(stored):
        memory, _ = run(memory, make_batch([i % 9 + 1]))
    assert [p for p in range(stored + 3) if jaxkv.can_resume(memory, 0, p)] == resumable


@pytest.mark.core
def test_edge_14_a_cache_that_forgets_nothing_has_its_window_all_the_same():
    kind = Kind("roomy", cells=20, sequences=1, windows=(jaxkv.window.sliding(4),))
    memory = kind.make()
    for _ in range(3):
        plan = plan_of(memory, [1, 2, 3])
        memory, (mask,), _ = sign(memory, plan.ubatches[0])
        assert np.asarray(mask)[0, :3].sum(-1).max() <= 4
    assert jaxkv.used(memory) == 9 and all(jaxkv.can_resume(memory, 0, p) for p in range(10))


def test_edge_15_an_idle_sequence_gives_what_it_does_not_see():
    """Only as much as is needed, and never what its next token looks at."""
    memory = drawn("0{0} 1{0} 2{0} 3{0} 4{0} 5{0}", WINDOW)
    memory = jaxkv.apply(memory, plan_of(memory, [1] * 4, sequences=1))
    assert drawing(memory) == "2{1} 3{1} 2{0} 3{0} 4{0} 5{0} 0{1} 1{1}"
    assert jaxkv.can_resume(memory, 0, 6)
    assert plan_of(memory, [1] * 3, sequences=1).reason[1] == Reason.NO_ROOM


@pytest.mark.core
@pytest.mark.parametrize("kinds", ["rr", "ar"])
def test_edge_25_states_that_a_copy_has_replaced_come_back_to_no_sequence(kinds):
    """ollama frees the target's place with its checkpoints in it, for the next one to restore."""
    twin = told(kept=3, counts=(8, 4, 0), kinds=kinds)
    assert jaxkv.can_seq_rm(twin.memory, 1, 2)
    twin.both("seq_cp", 0, [1])
    if kinds == "rr":
        assert positions_of(twin.memory, 1) == [4, 5, 6, 7]
    for p0 in (2, 3, 4):  # where states of the old text stood
        assert not twin.seq_rm(1, p0)
    assert twin.decode([2, 2])  # takes cells that the old text had
    twin.compare()
    assert not jaxkv.can_resume(twin.memory, 2, 3) and twin.seq_rm(2, 1)
    assert twin.seq_rm(1, 5) and twin.decode([1])
    twin.compare()


@pytest.mark.core
def test_edge_26_a_layout_that_a_part_refuses_leaves_no_token_in_another():
    """A recurrent part wants a row for each sequence; ollama's attention has the tokens by then."""
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


def test_edge_27_keys_between_those_that_move_are_not_touched():
    """ollama turns whole spans, the others by an angle of zero. Here only what moved is rotated."""
    memory = filled(4, 4)
    before = [np.asarray(k) for k in memory.buffers.k]
    memory = jaxkv.seq_add(memory, 0, 0, -1, 3)
    memory = jaxkv.apply(memory, jaxkv.init_update(memory))
    for old, new in zip(before, memory.buffers.k, strict=True):
        assert old[0, :, 4:8].tobytes() == np.asarray(new)[0, :, 4:8].tobytes()
        assert not np.array_equal(old[0, :, :4], np.asarray(new)[0, :, :4])
