"""The verbs of recurrent memories: exact to the token or refused, alone and beside attention.

Every state names all the tokens it has seen (`tests.histories`), so a state that is stale by one
token, another sequence's, or half written is seen at once.
"""

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason
from tests.cases import in_lanes
from tests.cells.plans import plan_of
from tests.histories import (
    bytes_of,
    kept_of,
    make,
    planned,
    positions_of,
    states_of,
    tell,
    told,
)
from tests.memories import SMALL, assert_identical, contents_of

core = pytest.mark.core
over_kept = pytest.mark.parametrize("kept", in_lanes([0, 3], fast=[], core=[0]))

# ------------------------------------------------------------------------------ forgetting, sharing


def test_seq_rm_granted_where_a_state_stands():
    """Trap 60."""
    twin = told(kept=3)  # positions 0 to 9
    assert not twin.seq_rm(0, 6)
    assert twin.seq_rm(0, 10) and twin.seq_rm(0, 4, 4) and twin.seq_rm(-1, 10)
    # What a state has seen stays in it.
    for start, stop in ((0, 5), (3, 6), (8, 9)):
        assert not twin.seq_rm(0, start, stop) and not twin.seq_rm(-1, start, stop)
    assert not twin.seq_rm(-1, 5)
    assert positions_of(twin.memory) == [6, 7, 8, 9]
    assert twin.seq_rm(0, 0, 10)
    assert positions_of(twin.memory) == []
    twin.compare()


def test_seq_rm_of_everything_is_clear():
    """Trap 61."""
    twin = told(kept=3, counts=(4, 3))
    cleared = jaxkv.clear(twin.memory)
    assert twin.seq_rm(-1)
    assert_identical(twin.memory, cleared)
    assert twin.decode([1, 1]) and twin.decode([0, 0])
    twin.compare()


def test_seq_rm_of_one_sharer_leaves_the_other():
    """Trap 66."""
    twin = told(kept=3, counts=(6, 0))
    twin.both("seq_cp", 0, [1])
    other = states_of(twin.memory, 1)
    assert twin.seq_rm(0, 5)
    assert states_of(twin.memory, 1) == other
    assert jaxkv.seq_pos_max(twin.memory, [0, 1]).tolist() == [4, 5]
    for seq in (0, 1, 0):
        assert twin.decode([seq])
        twin.compare()


def test_seq_cp_copies_the_state_at_the_end_of_a_range():
    """Trap 67: where none stands there, the targets are lost until they are forgotten."""
    twin = told(kept=3, counts=(6, 0, 0))
    twin.both("seq_cp", 0, [1], 2, 5)
    assert positions_of(twin.memory, 1) == [2, 3, 4]
    twin.both("seq_cp", 0, [2], 1, 2)
    twin.compare()
    plan, _ = twin.plan([0, 1, 2])
    assert plan.reason.tolist() == [Reason.FITS, Reason.FITS, Reason.LOST]
    assert jaxkv.seq_pos_max(twin.memory, 2) == -1 and not jaxkv.can_resume(twin.memory, 2, 2)
    twin.both("seq_cp", 2, [1])  # lost as its source is
    assert jaxkv.split(twin.memory)[0].dead_until.tolist() == [0, 2, 2]
    assert not twin.decode([1]) and not twin.seq_rm(1, 1)
    assert twin.seq_rm(1, 0) and twin.decode([1, 1, 0])
    twin.compare()


@core
def test_seq_cp_traced_to_itself_or_unknown_changes_nothing():
    """Between streams, where an index that is cut down would write to the last sequence."""
    memory = told(kept=3, counts=(3, 2, 2), streams=3).memory
    copied = jax.jit(jaxkv.seq_cp)
    for src, dst in ((0, 0), (0, 3), (0, -1), (3, 0), (-1, 0)):
        assert_identical(copied(memory, src, dst), memory)


@over_kept
def test_seq_cp_fork_that_goes_on_leaves_its_origin(kept):
    """Trap 68; and no cell is ever lacking, however all of them share and part again."""
    twin = told(kept=kept, counts=(5, 0, 0))
    twin.both("seq_cp", 0, [1, 2])
    assert jaxkv.used(twin.memory) == kept + 1
    origin = states_of(twin.memory)
    for count in (1, 4, 2):
        assert twin.decode([1] * count)
        assert states_of(twin.memory) == origin
    for turn in range(5):
        twin.both("seq_cp", turn % 3, [(turn + 1) % 3])
        for seq in (0, 2, 1):
            assert twin.decode([seq] * (4 - turn % 4 // 2 * 2))
        twin.compare()
    assert jaxkv.used(twin.memory) == 3 * (kept + 1)


@over_kept
def test_write_states_leaves_cells_of_idle_sequences(kept):
    """Trap 69."""
    twin = told(kept=kept, counts=(3, 4, 2))
    table, before = jaxkv.split(twin.memory)
    cells = np.asarray(table.cell)[1]
    assert twin.decode([2, 0])
    table, after = jaxkv.split(twin.memory)
    assert np.array_equal(np.asarray(table.cell)[1], cells)
    cells = cells[cells < table.num_cells]
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(np.asarray(old)[0, cells], np.asarray(new)[0, cells])
    twin.compare()


def test_init_update_and_defrag_plan_have_nothing_to_do():
    memory = tell(make(3), [1, 2])
    assert jaxkv.init_update(memory).pending == 0
    for plan in (jaxkv.init_update(memory), jaxkv.defrag_plan(memory)):
        assert_identical(jaxkv.apply(memory, plan), memory)


# ------------------------------------------------------------------------- hybrids, all or nothing


@core
def test_seq_add_moves_all_parts_or_none():
    """One part alone holds the position that would reach the last integer."""
    twin = told(kept=1, counts=(6, 0), kinds="ar")
    twin.both("seq_cp", 0, [1])
    far = 2**31 - 1 - 3  # states stand after positions 4 and 5
    assert not jaxkv.can_seq_add(twin.memory, 0, 0, 4, far)
    assert_identical(jaxkv.seq_add(twin.memory, 0, 0, 4, far), twin.memory)
    twin.both("seq_add", 0, 0, -1, 3)  # for both that share
    assert jaxkv.seq_pos_max(twin.memory, [0, 1]).tolist() == [8, 8]
    twin.update()
    twin.compare()
    assert twin.decode([0]) and twin.decode([1])
    twin.compare()


@core
def test_seq_rm_refused_by_states_leaves_attention():
    twin = told(kept=1, counts=(6, 3, 2), kinds="ar")
    before = twin.memory
    assert not twin.seq_rm(0, 3) and not twin.seq_rm(-1, 1)
    traced = jax.jit(jaxkv.seq_rm)
    after, ok = traced(before, 0, 3)
    assert not ok
    assert_identical(after, before)
    after, ok = traced(before, 0, 5)
    assert ok and twin.seq_rm(0, 5)
    assert_identical(after, twin.memory)
    twin.compare()


@core
def test_make_hybrid_cache_of_hybrids_finds_each_layer():
    sizes = {"cells": 16, "kv_heads": 2, "head_dim": 4, "sequences": 3}
    full = jaxkv.make_kv_cache(layers=1, **sizes)
    window = jaxkv.make_kv_cache(layers=1, window=jaxkv.window.sliding(4), **sizes)
    inner = jaxkv.make_hybrid_cache((full, (0,)), (window, (1,)))
    memory = jaxkv.make_hybrid_cache((inner, (1, 0)), (make(1, layers=1), (1,)))
    assert jaxkv.rollback_of(memory, 1) == 1
    memory = tell(memory, [1, 2, 3], [4], kinds="ab")
    inner, states = jaxkv.hybrid.parts_of(memory)
    assert kept_of(*jaxkv.split(states))[0][-1] == (2, bytes_of([1, 2, 3], [1]))
    for part, layer in zip(jaxkv.hybrid.parts_of(inner), (1, 0), strict=True):
        assert len(contents_of(jaxkv.split(part)[1], [layer])) == 4
    with pytest.raises(ValueError, match="a layer that one part serves, of .[01], [01]., got 0"):
        jaxkv.rollback_of(memory, 0)
    drawn = "part 1, layers 1\nsequence 0 1 2\nsequence 1 . 0\nsequence 2 . ."
    assert drawn in jaxkv.show(memory)


# ----------------------------------------------------------------------------------- bad arguments


def test_write_states_wrong_layer_states_or_shapes_raise():
    memory = make(3)
    ubatch = planned(memory, [1])
    states = {n: np.zeros((3, 4, *s.shape[2:])) for n, s in memory.buffers[0].items()}

    def write(memory=memory, layer=0, **changed):
        jax.eval_shape(lambda: jaxkv.write_states(memory, layer, ubatch, {**states, **changed}))

    for layer in (-1, 2):
        for call in (
            lambda layer: jaxkv.read_states(memory, layer, ubatch),
            lambda layer: write(layer=layer),
            lambda layer: jaxkv.rollback_of(memory, layer),
        ):
            with pytest.raises(ValueError, match=f"a layer from 0 to 1, got {layer}"):
                call(layer)
    with pytest.raises(ValueError, match=r"wanted the states \['hash', 'trace'\], got .*'more'"):
        write(more=states["hash"])
    with pytest.raises(ValueError, match=r"trace \[R, E \+ 1, ...\] of \(3, 4, 2\), got \(3, 2\)"):
        write(trace=states["trace"][:, 0])
    for count in (1, 3, 5):  # a row of one token leaves one state, and all four are wanted
        some = {n: np.zeros((3, count, *s.shape[2:])) for n, s in states.items()}
        wanted = rf"of \(3, 4\), got \(3, {count}\): .* as steps_to_keep\(ubatch, 4\) says"
        with pytest.raises(ValueError, match=wanted):
            write(**some)


def test_states_of_attention_and_attention_of_states_raise():
    memory, states = SMALL.make(), make(3)
    (ubatch,) = plan_of(memory, 1).ubatches
    for call in (
        lambda: jaxkv.read_states(memory, 0, ubatch),
        lambda: jaxkv.write_states(memory, 0, ubatch, {}),
        lambda: jaxkv.rollback_of(memory, 0),
    ):
        with pytest.raises(TypeError, match="with recurrent layers, got kind 'attention'"):
            call()
    with pytest.raises(TypeError, match="with attention layers, got kind 'recurrent'"):
        jaxkv.attend(states, 0, planned(states, [1]), *[np.zeros((3, 8, 1, 2))] * 3)
