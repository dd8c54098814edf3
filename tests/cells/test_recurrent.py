"""The verbs of recurrent memories: exact to the token or refused, alone and beside attention.

Every state names all the tokens it has seen (`tests.histories`), so a state that is stale by one
token, another sequence's, or half written is seen at once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, make_batch
from tests.histories import (
    KINDS,
    STATES,
    bytes_of,
    kept_of,
    make,
    over_kinds,
    positions_of,
    states_of,
    tell,
    told,
    walk,
)
from tests.memories import assert_identical


def test_where_nothing_moves_it_moves_by_anything():
    memory = make()
    assert jaxkv.can_seq_add(memory, 0, 0, -1, 2**31 - 1)
    assert_identical(jaxkv.seq_add(memory, 0, 0, -1, 2**31 - 1), memory)


# ------------------------------------------------------------------------------- traps, one by one


@pytest.mark.core
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


@pytest.mark.core
def test_trap_61_removing_everything_is_clearing():
    twin = told(kept=1, counts=(4, 3))
    cleared = jaxkv.clear(twin.memory)
    assert twin.seq_rm(-1)
    assert_identical(twin.memory, cleared)
    twin.compare()
    for seq in (1, 0):
        assert twin.decode([seq, seq])
    twin.compare()


@pytest.mark.core
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


@pytest.mark.core
@pytest.mark.parametrize("wrong", [0, 3, -1])
def test_a_copy_between_streams_to_itself_or_to_none_changes_nothing(wrong):
    """The last sequence of all is where an index that is cut down to the last would write."""
    memory = told(kept=1, counts=(3, 2, 2), streams=3).memory
    assert_identical(jax.jit(jaxkv.seq_cp)(memory, 0, wrong), memory)


@pytest.mark.core
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


@pytest.mark.core
@pytest.mark.parametrize("kept", [0, 1])
def test_trap_69_who_takes_no_part_is_left_alone(kept):
    twin = told(kept=kept, counts=(3, 4, 2))
    idle = states_of(twin.memory, 1)
    table, before = jaxkv.split(twin.memory)
    cells = np.asarray(table.cell)[1]
    assert twin.decode([2, 0])
    assert states_of(twin.memory, 1) == idle
    table, after = jaxkv.split(twin.memory)
    assert np.array_equal(np.asarray(table.cell)[1], cells)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(np.asarray(old)[0, cells], np.asarray(new)[0, cells])
    twin.compare()


# -------------------------------------------------------------------------------- moving positions


@pytest.mark.core
def test_rows_of_a_refused_plan_read_zeros():
    """Also those of sequences that have a state."""
    memory = tell(make(1), [1, 2], [3])
    plan = jaxkv.init_batch(memory, make_batch([[4], [5]], positions=[9, 9]))
    assert not plan.ok
    for ubatch in plan.ubatches:
        states = jaxkv.read_states(jaxkv.apply(memory, ubatch), 0, ubatch)
        assert not any(map(np.any, states.values()))


@pytest.mark.core
def test_parts_move_all_or_none():
    """One part alone holds the position that would reach the last integer."""
    sizes = dict(layers=1, sequences=2)
    memory = jaxkv.make_hybrid_cache(
        (jaxkv.make_kv_cache(cells=8, kv_heads=1, head_dim=2, **sizes), (0,)),
        (jaxkv.make_recurrent_cache(states={"x": ((), jnp.float32)}, rollback=2, **sizes), (1,)),
    )
    memory = jaxkv.apply(memory, jaxkv.init_batch(memory, make_batch(range(6), sequences=0)))
    memory, ok = jaxkv.seq_rm(memory, 0, 4, 5)  # the state after it stays
    assert ok
    far = 2**31 - 1 - 4
    assert not jaxkv.can_seq_add(memory, 0, 0, 5, far)
    assert_identical(jaxkv.seq_add(memory, 0, 0, 5, far), memory)
    assert jaxkv.seq_pos_max(jaxkv.seq_add(memory, 0, 0, -1, 3), 0) == 8


@pytest.mark.core
def test_moving_takes_kept_states_along():
    twin = told(kept=3, counts=(8,))
    twin.both("seq_add", 0, 3, -1, -2)
    assert positions_of(twin.memory) == [2, 3, 4, 5]
    twin.compare()
    assert twin.seq_rm(0, 5)
    assert twin.decode([0])
    twin.compare()


@pytest.mark.core
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


@pytest.mark.core
@pytest.mark.parametrize("streams", [1, 3])
def test_a_shared_state_moves_as_cells_of_attention_do(streams):
    twin = told(kept=1, counts=(5, 0), streams=streams, kinds="ar")
    twin.both("seq_cp", 0, [1])
    twin.both("seq_add", 0, 0, -1, 3)
    assert jaxkv.seq_pos_max(twin.memory, [0, 1]).tolist() == [7, 7 if streams == 1 else 4]
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


@pytest.mark.core
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


@pytest.mark.core
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


@pytest.mark.core
def test_a_batch_that_the_recurrent_part_refuses_changes_neither():
    twin = told(kept=0, counts=(6, 0, 0), kinds="ar")
    twin.both("seq_cp", 0, [1], 0, 3)  # attention has three tokens, the recurrence no state
    twin.compare()
    assert not twin.decode([1])
    assert not twin.seq_rm(1, 2)
    assert twin.seq_rm(1)
    assert twin.decode([1])
    twin.compare()


@pytest.mark.core
def test_parts_that_end_apart_are_refused_and_never_half_applied():
    """Attention forgot a middle that the state has seen; cut back, the two end apart."""
    twin = told(kept=1, counts=(10,), kinds="ar")
    assert twin.seq_rm(0, 5, 9)
    twin.compare()
    assert twin.seq_rm(0, 9)
    assert jaxkv.seq_pos_max(twin.memory, 0) == 4
    assert not twin.decode([0])
    twin.compare()


@pytest.mark.core
def test_a_hybrid_of_hybrids_finds_the_part():
    """A hybrid memory as a part is asked by its own layers."""
    sizes = {"kv_heads": 2, "head_dim": 4, "sequences": 3}
    inner = jaxkv.make_hybrid_cache(
        (jaxkv.make_kv_cache(layers=1, cells=16, **sizes), (0,)),
        (
            jaxkv.make_kv_cache(layers=1, window=jaxkv.window.sliding(4), ubatch_size=4, **sizes),
            (1,),
        ),
    )
    memory = jaxkv.make_hybrid_cache((inner, (0, 2)), (make(1), (0, 1)))
    assert [jaxkv.rollback_of(memory, layer) for layer in (0, 1)] == [1, 1]
    memory = tell(memory, [1, 2, 3], [4], kinds="bra")
    assert kept_of(*jaxkv.split(jaxkv.hybrid.parts_of(memory)[1]))[0][-1] == (
        2,
        bytes_of([1, 2, 3], (0, 1)),
    )
    with pytest.raises(ValueError, match="a layer that one part serves, of .0, 1, 2., got 2"):
        jaxkv.rollback_of(memory, 2)
    assert "part 1, layers 0, 1\nsequence 0 1 2\nsequence 1 . 0\nsequence 2 . ." in jaxkv.show(
        memory
    )


def test_parts_where_verbs_would_mean_different_things_are_refused():
    """A fork shares cells in one stream and copies them between several."""
    sizes = {"layers": 1, "cells": 16, "kv_heads": 2, "head_dim": 4, "sequences": 3}
    pool, split = (jaxkv.make_kv_cache(**sizes, streams=streams) for streams in (1, 3))
    mixed, apart = (make(1, streams=streams, layers=1) for streams in (1, 3))
    inner = jaxkv.make_hybrid_cache((split, (0,)), (apart, (0,)))
    for parts, streams in (
        ((pool, split), "1, 3"),
        ((split, mixed), "3, 1"),
        ((apart, apart, pool), "3, 3, 1"),
        ((inner, mixed), "3, 1"),
    ):
        wanted = rf"same number of streams, got \[{streams}\]: .* with the same streams="
        with pytest.raises(ValueError, match=wanted):
            jaxkv.make_hybrid_cache(*((part, (0,)) for part in parts))
    assert jaxkv.make_hybrid_cache((inner, (0,)), (split, (1,)))


# -------------------------------------------------------------------------------- what callers get


def test_wrong_arguments():
    good = {"layers": 1, "states": STATES}
    for wrong, message in (
        ({"layers": 0}, "layers of at least 1, got 0"),
        ({"sequences": 0}, "sequences of at least 1, got 0"),
        ({"rollback": -1}, "rollback of at least 0, got -1"),
        ({"states": {}}, "at least one state"),
        ({"sequences": 3, "streams": 2}, r"deal out 3 sequences evenly, one of \[1, 3\], got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            jaxkv.make_recurrent_cache(**{**good, **wrong})
    memory = make(1)
    (ubatch,) = jaxkv.init_batch(memory, make_batch([1])).ubatches
    states = {n: np.zeros((1, 2, *s.shape[2:])) for n, s in memory.buffers[0].items()}
    for layer in (-1, 2):
        for call in (
            lambda layer: jaxkv.read_states(memory, layer, ubatch),
            lambda layer: jaxkv.write_states(memory, layer, ubatch, states),
            lambda layer: jaxkv.rollback_of(memory, layer),
        ):
            with pytest.raises(ValueError, match=f"a layer from 0 to 1, got {layer}"):
                jax.eval_shape(lambda call=call, layer=layer: call(layer))
    with pytest.raises(ValueError, match=r"wanted the states \['hash', 'trace'\], got \['hash'\]"):
        jax.eval_shape(lambda: jaxkv.write_states(memory, 0, ubatch, {"hash": states["hash"]}))
    with pytest.raises(ValueError, match=r"trace \[R, E \+ 1, ...\] of \(1, 2, 2\), got \(1, 2\)"):
        bad = {**states, "trace": states["trace"][:, 0]}
        jax.eval_shape(lambda: jaxkv.write_states(memory, 0, ubatch, bad))
    memory = make(3)  # a ubatch of one token leaves one state, and all four are wanted
    (ubatch,) = jaxkv.init_batch(memory, make_batch([1])).ubatches
    for count in (1, 3, 5):
        some = {n: jnp.zeros((1, count, *s.shape[2:])) for n, s in memory.buffers[0].items()}
        wanted = rf"of \(1, 4\), got \(1, {count}\): .* as steps_to_keep\(ubatch, 4\) says"
        with pytest.raises(ValueError, match=wanted):
            jaxkv.write_states(memory, 0, ubatch, some)
    attention = jaxkv.make_kv_cache(layers=1, cells=4, kv_heads=1, head_dim=2)
    (other,) = jaxkv.init_batch(attention, make_batch([1])).ubatches
    for call in (
        lambda: jaxkv.read_states(attention, 0, other),
        lambda: jaxkv.write_states(attention, 0, other, states),
        lambda: jaxkv.rollback_of(attention, 0),
    ):
        with pytest.raises(TypeError, match="with recurrent layers, got kind 'attention'"):
            call()
    with pytest.raises(TypeError, match="with attention layers, got kind 'recurrent'"):
        jaxkv.attend(memory, 0, ubatch, *[jnp.zeros((1, 1, 1, 2))] * 3)


def test_nothing_is_ever_pending():
    memory = tell(make(1), [1, 2])
    assert jaxkv.init_update(memory).pending == 0
    for plan in (jaxkv.init_update(memory), jaxkv.defrag_plan(memory)):
        assert_identical(jaxkv.apply(memory, plan), memory)
        assert_identical(jax.jit(jaxkv.apply)(memory, plan), memory)


def test_the_copy_of_a_dead_sequence_is_dead_up_to_the_same_position():
    memory = tell(make(), [1, 2, 3, 4, 5])
    memory = jaxkv.seq_cp(memory, 0, 1, 0, 3)  # no state stands there
    memory = jaxkv.seq_cp(memory, 1, 2)
    assert jaxkv.split(memory)[0].dead_until.tolist() == [0, 3, 3]
