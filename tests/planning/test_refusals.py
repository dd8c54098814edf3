"""A refusal is an answer: afterwards every bit of the memory is what it was.

Applied and computed all the same, whatever was refused (a plan, or a ubatch that has become stale)
enters no table and no buffers.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, make_batch
from jaxkv.hybrid import parts_of
from jaxkv.window import sliding
from tests.memories import (
    HEADS,
    ROPE,
    RUNS,
    SIZE,
    SMALL,
    SPLIT,
    assert_identical,
    filled,
    run,
    think,
)


def compute(memory, plan):
    """Run the model on every ubatch of a plan, refused or not."""
    for ubatch in plan.ubatches:
        memory, _ = think(memory, ubatch)
    return memory


FAULTS = {
    # name: the batch's sequences, its positions, and which are refused, and how. Sequence 0 holds 5
    # tokens, 1 holds 3 and 2 none; 4 cells are free.
    "no-room": ([2] * 7, None, {2: (Reason.NO_ROOM, 7, 4)}),
    "no-room-for-one": ([2, 0, 2, 2, 2, 1, 1], None, {2: (Reason.NO_ROOM, 4, 1)}),
    "not-next": ([0, 0, 0], [6, 7, 8], {0: (Reason.NOT_NEXT, 5, 6)}),
    "position-held": ([0, 0, 0], [4, 5, 6], {0: (Reason.NOT_NEXT, 5, 4)}),
    "before-zero": ([2, 2, 2], [-1, 0, 1], {2: (Reason.NOT_NEXT, 0, -1)}),
    "gap": ([1, 1, 1], [3, 4, 6], {1: (Reason.GAP, 5, 6)}),
    "duplicate": ([1, 1, 1], [3, 3, 4], {1: (Reason.DUPLICATE, 4, 3)}),
    "decreasing": ([1, 1, 1], [3, 4, 3], {1: (Reason.DECREASING, 5, 3)}),
    "each-its-own": (
        [0, 1, 1, 2],
        [9, 3, 3, 7],
        {0: (Reason.NOT_NEXT, 5, 9), 1: (Reason.DUPLICATE, 4, 3)},
    ),
}


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_refused_batch_changes_nothing_and_says_why(fault):
    sequences, positions, expected = FAULTS[fault]
    memory = filled(5, 3)
    batch = make_batch([1] * len(sequences), sequences=sequences, positions=positions)
    plan = jaxkv.init_batch(memory, batch, ubatch_size=4)
    assert not plan.ok
    for seq in range(3):
        reason, wanted, found = expected.get(seq, (Reason.FITS, None, None))
        assert (plan.reason[seq], plan.fits[seq]) == (reason, reason == Reason.FITS)
        if seq in expected:
            assert (plan.expected[seq].item(), plan.found[seq].item()) == (wanted, found)
    for ubatch in plan.ubatches:  # each token goes past the end, to a place of its own
        assert (ubatch.slots >= 12).all()
        assert len(np.unique(ubatch.slots)) == ubatch.slots.size
    assert_identical(compute(memory, plan), memory)

    with pytest.raises(jaxkv.RefusedError) as refused:
        plan.check()
    lines = str(refused.value).splitlines()[1:]
    assert len(lines) == len(expected)
    for line, (seq, (reason, wanted, found)) in zip(lines, expected.items(), strict=True):
        assert line.startswith(f"sequence {seq}: {reason.name}, ")
        numbers = {int(word.strip(":,")) for word in line.split() if word.strip(":,-").isdigit()}
        assert {wanted, found} <= numbers, line


def test_pending_rotation_is_refused_for_tokens_that_would_see_it_and_no_others():
    memory = jaxkv.seq_add(filled(4, 3), 0, 0, -1, 2)
    plan = jaxkv.init_batch(memory, make_batch([[1, 1], [1]]))
    assert plan.reason.tolist() == [Reason.UPDATE_PENDING, Reason.FITS, Reason.FITS]
    with pytest.raises(jaxkv.RefusedError, match="sequence 0: UPDATE_PENDING, .*init_update"):
        plan.check()
    assert_identical(compute(memory, plan), memory)
    assert jaxkv.init_batch(memory, make_batch([1], sequences=1)).ok


@pytest.mark.core
@pytest.mark.parametrize(
    "free",
    [
        [0, 1, 3, 4, 6, 7, 9, 10],  # no run of 3 at all
        [0, 1, 2, 4, 5, 7, 8, 10],  # one
        [0, 1, 2, 3, 4, 5, 7, 9],  # two, and then none of 2
    ],
    ids=["first", "middle", "last"],
)
def test_missing_run_refuses_the_batch_whichever_ubatch_lacks_it(free):
    """There is a cell for each of 8 tokens, but no run for each ubatch of 3, 3 and 2."""
    memory = filled(12, kind=RUNS)
    for cell in free:
        memory, _ = jaxkv.seq_rm(memory, 0, cell, cell + 1)
    plan = jaxkv.init_batch(memory, make_batch([1] * 8, sequences=1), ubatch_size=3)
    assert plan.reason.tolist() == [Reason.FITS, Reason.FRAGMENTED, Reason.FITS]
    with pytest.raises(jaxkv.RefusedError, match="sequence 1: FRAGMENTED, it brings 8 "):
        plan.check()
    for ubatch in plan.ubatches:
        assert_identical(jaxkv.apply(memory, ubatch), memory)
    assert_identical(think(memory, plan.ubatches[0])[0], memory)


@pytest.mark.core
def test_of_what_finds_cells_only_what_finds_a_run_fits():
    """Five cells are free, three of them neighbours; sequence 1 wants four, and 2 as many."""
    memory = filled(12, kind=RUNS)
    for cell in (0, 1, 2, 6, 7):
        memory, _ = jaxkv.seq_rm(memory, 0, cell, cell + 1)
    batch = make_batch([1] * 8, sequences=[1] * 4 + [2] * 4)
    plan = jaxkv.init_batch(memory, batch, ubatch_size=4)
    assert plan.reason.tolist() == [Reason.FITS, Reason.FRAGMENTED, Reason.NO_ROOM]
    assert plan.fits.tolist() == [True, False, False]
    plan = jaxkv.init_batch(memory, batch.only([False, True, False]), ubatch_size=4)
    assert not plan.ok and plan.reason[1] == Reason.FRAGMENTED


# --------------------------------------------------------------------------------- stale ubatches


def unchanged_by(memory, ubatch) -> None:
    """Neither applying a ubatch nor computing it changes a bit."""
    assert_identical(jaxkv.apply(memory, ubatch), memory)
    assert_identical(think(memory, ubatch)[0], memory)


def planned(memory, count=3, sequences=0, ubatch_size=4):
    return jaxkv.init_batch(
        memory, make_batch([7] * count, sequences=sequences), ubatch_size=ubatch_size
    )


def test_ubatch_twice():
    memory = filled(4)
    (ubatch,) = planned(memory).ubatches
    memory, _ = think(memory, ubatch)
    unchanged_by(memory, ubatch)


def test_ubatch_whose_cells_were_taken():
    memory = filled(4)
    (late,) = planned(memory, sequences=1).ubatches
    memory, _ = run(memory, make_batch([3], sequences=2))
    unchanged_by(memory, late)


def test_ubatch_whose_sequence_went_on_elsewhere():
    """The chosen cell is still free, but the sequence is not where it was."""
    memory = filled(4, 5)
    (late,) = planned(memory, count=1).ubatches
    memory = jaxkv.seq_cp(memory, 1, 0, 4)
    assert jaxkv.seq_pos_max(memory, 0).item() == 4
    unchanged_by(memory, late)


def test_ubatch_whose_sequence_was_cut():
    memory = filled(4)
    (late,) = planned(memory).ubatches
    memory, _ = jaxkv.seq_rm(memory, 0, 3, -1)
    unchanged_by(memory, late)


def test_ubatches_out_of_order():
    memory = filled(1)
    plan = planned(memory, count=11)
    first, middle, last = plan.ubatches
    unchanged_by(memory, middle)
    unchanged_by(memory, last)
    memory, _ = think(memory, first)
    unchanged_by(memory, last)
    memory, _ = think(memory, middle)
    memory, _ = think(memory, last)
    assert jaxkv.seq_pos_max(memory, 0).item() == 11


def test_ubatch_of_another_table():
    (ubatch,) = planned(filled(4, 3)).ubatches
    unchanged_by(filled(5), ubatch)
    unchanged_by(filled(12), ubatch)


@pytest.mark.core
def test_plans_and_tables_of_another_memory_are_refused_by_name():
    """Other sizes, streams, windows, placements and kinds: each raises, and nothing is changed."""
    sizes = {"layers": 2, "kv_heads": 2, "head_dim": 4, "sequences": 3}
    memory = jaxkv.make_kv_cache(cells=12, **sizes)
    recurrent = {"layers": 2, "states": {"x": ((2,), "float32")}, "sequences": 3}
    others = [
        jaxkv.make_kv_cache(cells=13, **sizes),
        jaxkv.make_kv_cache(cells=12, **{**sizes, "sequences": 4}),
        jaxkv.make_kv_cache(cells=12, streams=3, **sizes),
        jaxkv.make_kv_cache(cells=12, window=jaxkv.window.sliding(3), **sizes),
        jaxkv.make_kv_cache(cells=12, placement="contiguous", **sizes),
        jaxkv.make_kv_cache(cells=12, placement="striped", shards=2, **sizes),
        jaxkv.make_kv_cache(cells=12, placement="striped", shards=3, **sizes),
        jaxkv.make_recurrent_cache(**recurrent),
        jaxkv.make_recurrent_cache(rollback=1, **recurrent),
        jaxkv.make_hybrid_cache((memory, (0, 1))),
        jaxkv.make_hybrid_cache((memory, (0, 1)), (memory, (2, 3))),
    ]
    values = jnp.zeros((1, 2, 2, 4))
    for one, other in itertools.permutations([memory, *others], 2):
        (ubatch,) = jaxkv.init_full(other, ubatch_size=4).ubatches  # shapes tell the memory too
        update, moves = (jax.eval_shape(f, other) for f in (jaxkv.init_update, jaxkv.defrag_plan))
        for use in (
            lambda: jaxkv.apply(one, ubatch),  # noqa: B023
            lambda: jaxkv.is_current(one, ubatch),  # noqa: B023
            lambda: jaxkv.attend(one, 0, ubatch, values, values, values),  # noqa: B023
            lambda: jaxkv.read_states(one, 0, ubatch),  # noqa: B023
            lambda: jaxkv.go_back(other.table, one),  # noqa: B023
            lambda: jaxkv.apply(one, update),  # noqa: B023
            lambda: jaxkv.apply(one, moves),  # noqa: B023
        ):
            with pytest.raises(ValueError, match="for this memory, .* got one for .*: plan again"):
                use()
    with pytest.raises(TypeError, match="wanted a ubatch, such as plan"):
        jaxkv.attend(memory, 0, planned(memory), values, values, values)
    with pytest.raises(TypeError, match="wanted a ubatch or a plan, got"):
        jaxkv.apply(memory, memory.table)
    with pytest.raises(TypeError, match="wanted the table of an earlier memory"):
        jaxkv.go_back(memory, memory)


def test_part_of_a_ubatch_that_is_stale_stops_all_of_it():
    """Two sequences in a ubatch; one of them has moved on. Neither gets in."""
    memory = filled(3, 3)
    (ubatch,) = jaxkv.init_batch(memory, make_batch([[5, 6], [7]])).ubatches
    memory, _ = jaxkv.seq_rm(memory, 1, 2, -1)
    unchanged_by(memory, ubatch)


def test_stale_defrag_and_update():
    memory, _ = jaxkv.seq_rm(filled(7), 0, 1, 3)
    defrag = jaxkv.defrag_plan(memory)
    assert jaxkv.is_current(memory, defrag)
    filled_up, _ = run(memory, make_batch([1], sequences=2))  # a destination is taken
    assert_identical(jaxkv.apply(filled_up, defrag), filled_up)
    gone, _ = jaxkv.seq_rm(memory, 0, 5, -1)  # a source is gone
    assert_identical(jaxkv.apply(gone, defrag), gone)
    other, _ = jaxkv.seq_rm(memory, 0, 0, 1)  # a cell is gone that would have stayed
    assert_identical(jaxkv.apply(other, defrag), other)
    assert not jaxkv.is_current(other, defrag)

    moved = jaxkv.seq_add(memory, 0, 3, -1, -2)
    update = jaxkv.init_update(moved)
    again = jaxkv.seq_add(moved, 0, 1, 2, 1)
    assert_identical(jaxkv.apply(again, update), again)
    assert jaxkv.is_current(moved, update) and not jaxkv.is_current(again, update)
    done = jaxkv.apply(moved, update)
    assert_identical(jaxkv.apply(done, update), done)


@pytest.mark.core
def test_of_several_parts_all_are_tidied_or_none():
    """A later edit that one part alone has anything of: a plan for both does nothing to either."""
    sizes = dict(layers=1, kv_heads=HEADS, head_dim=SIZE, sequences=2, rope=ROPE)
    full = jaxkv.make_kv_cache(cells=16, **sizes)
    window = jaxkv.make_kv_cache(cells=8, window=sliding(3), **sizes)
    memory = jaxkv.make_hybrid_cache((full, (0,)), (window, (1,)))
    for text in [range(6)] * 2:  # the window gives up what is hidden
        memory, _ = run(memory, make_batch(text, sequences=0))
    memory = jaxkv.seq_add(memory, 0, 0, -1, 4)
    update = jaxkv.init_update(memory)
    assert all(part.pending for part in update.parts)
    edited = jaxkv.seq_add(memory, 0, 4, 6, -1)
    _, window = parts_of(edited)
    assert_identical(window, parts_of(memory)[1])
    assert_identical(jaxkv.apply(edited, update), edited)

    memory, _ = jaxkv.seq_rm(jaxkv.apply(memory, update), 0, 14, 15)
    moves = jaxkv.defrag_plan(memory)
    assert all(part.pending for part in moves.parts)
    edited, _ = jaxkv.seq_rm(memory, 0, 4, 6)
    assert_identical(parts_of(edited)[1], parts_of(memory)[1])
    assert_identical(jaxkv.apply(edited, moves), edited)
    assert jaxkv.is_current(memory, moves) and not jaxkv.is_current(edited, moves)


@pytest.mark.core
def test_all_streams_are_tidied_or_none():
    memory = filled(4, 4, kind=SPLIT)
    for seq in (0, 1):
        memory, _ = jaxkv.seq_rm(memory, seq, 1, 2)
    moves = jaxkv.defrag_plan(memory)
    assert moves.count.tolist() == [1, 1, 0]
    edited, _ = jaxkv.seq_rm(memory, 1, 3, 4)
    assert_identical(jaxkv.apply(edited, moves), edited)

    memory = jaxkv.seq_add(jaxkv.seq_add(memory, 0, 2, -1, -1), 1, 2, -1, -1)
    update = jaxkv.init_update(memory)
    assert jnp.any(update.shift != 0, axis=1).tolist() == [True, True, False]
    edited = jaxkv.seq_add(memory, 1, 1, -1, 1)
    assert_identical(jaxkv.apply(edited, update), edited)


# -------------------------------------------------------------------------------------- bad ids


VERBS = {
    "seq_rm": lambda memory, seq: jaxkv.seq_rm(memory, seq)[0],
    "seq_cp-from": lambda memory, seq: jaxkv.seq_cp(memory, seq, 1),
    "seq_cp-to": lambda memory, seq: jaxkv.seq_cp(memory, 0, seq),
    "seq_keep": jaxkv.seq_keep,
    "seq_add": lambda memory, seq: jaxkv.seq_add(memory, seq, 0, -1, 3),
    "seq_div": lambda memory, seq: jaxkv.seq_div(memory, seq, 0, -1, 2),
}


TRACED = {name: jax.jit(verb) for name, verb in VERBS.items()}


@pytest.mark.parametrize("wrong", [-2, 3, 31, 32, 35, 2**31 - 1])
@pytest.mark.parametrize("verb", VERBS)
def test_ids_that_are_none(verb, wrong):
    memory = filled(4, 3)
    with pytest.raises(ValueError, match=rf"wanted sequence ids from (0|-1) to 2, got {wrong};"):
        VERBS[verb](memory, wrong)
    assert_identical(TRACED[verb](memory, wrong), memory)
    if verb != "seq_rm":
        assert_identical(TRACED[verb](memory, -1), memory)


def test_questions_about_ids_that_are_none():
    memory = filled(4, 3)
    for question in (jaxkv.seq_pos_min, jaxkv.seq_pos_max):
        with pytest.raises(ValueError, match="wanted sequence ids from 0 to 2, got 3"):
            question(memory, [0, 3])
        ids = jnp.array([0, -1, 3, 32, 1])
        held = {jaxkv.seq_pos_min: [0, -1, -1, -1, 0], jaxkv.seq_pos_max: [3, -1, -1, -1, 2]}
        assert jax.jit(question)(memory, ids).tolist() == held[question]


def test_batch_of_unknown_sequences():
    memory = filled(4, 3)
    for wrong in (-1, 3, 99):
        with pytest.raises(ValueError, match=f"wanted sequence ids from 0 to 2, got {wrong}"):
            jaxkv.init_batch(memory, make_batch([1, 1], sequences=[0, wrong]))

    @jax.jit
    def traced(memory, ids):
        plan = jaxkv.init_batch(memory, make_batch(jnp.ones(3, jnp.int32), sequences=ids))
        return plan, jaxkv.apply(memory, plan)

    for wrong in (-1, 3, 99):
        plan, after = traced(memory, jnp.array([0, wrong, 1]))
        assert not plan.ok
        assert_identical(after, memory)
        with pytest.raises(jaxkv.RefusedError, match="a sequence that the memory does not have"):
            plan.check()
    assert traced(memory, jnp.array([0, 2, 1]))[0].ok
    # -1 is no sequence either: the last one has no part in it.
    plans = [traced(memory, jnp.array([0, wrong, 2]))[0] for wrong in (-1, 3)]
    for name in ("reason", "fits", "expected", "found"):
        assert_identical(*(getattr(plan, name) for plan in plans))


@jax.jit
def divided(memory, divisor):
    return jaxkv.seq_div(memory, 0, 0, -1, divisor)


@pytest.mark.parametrize("divisor", [0, -1])
def test_divisors_below_one(divisor):
    memory = filled(4)
    with pytest.raises(ValueError, match=f"wanted divisor of at least 1, got {divisor}"):
        jaxkv.seq_div(memory, 0, 0, -1, divisor)
    assert_identical(divided(memory, divisor), memory)


def test_what_cannot_be_planned_or_applied_at_once():
    memory = filled(1)
    with pytest.raises(ValueError, match="no valid token"):
        jaxkv.init_batch(memory, make_batch([1, 2], valid=[False, False]))
    with pytest.raises(ValueError, match="wanted ubatch_size of at least 1, got 0"):
        jaxkv.init_batch(memory, make_batch([1]), ubatch_size=0)
    with pytest.raises(ValueError, match="3 ubatches cannot be applied at once"):
        jaxkv.apply(memory, planned(memory, count=11))
    with pytest.raises(ValueError, match="at most 2 tokens, got 3"):
        jax.jit(lambda t: jaxkv.init_batch(memory, make_batch(t), ubatch_size=2))(jnp.arange(3))
    with pytest.raises(ValueError, match="max_moves of at least 1"):
        jaxkv.defrag_plan(memory, max_moves=0)
    with pytest.raises(TypeError, match="was `memory, ok = seq_rm"):
        jaxkv.used(jaxkv.seq_rm(memory, 0))
    with pytest.raises(TypeError, match="plan.ok"):
        jax.jit(lambda memory: jaxkv.init_batch(memory, make_batch([1])).check())(memory)


def test_whatever_is_accepted_can_be_forgotten():
    """The largest int32 ends open ranges, so it can be no position."""
    far = 2**31 - 1
    for position in (far, far - 1):
        memory = SMALL.make()
        plan = jaxkv.init_batch(memory, make_batch([1], positions=[position]))
        if plan.ok:
            memory = jaxkv.apply(memory, plan)
            assert jaxkv.seq_pos_min(memory, 0).item() == position
            memory, _ = jaxkv.seq_rm(memory, 0)
            assert jaxkv.used(memory).item() == 0


@pytest.mark.core
@pytest.mark.parametrize("kind", [SMALL, RUNS], ids=lambda kind: kind.name)
def test_a_rival_for_the_same_places_writes_nothing(kind):
    """Two plans of one table choose the same cells; whichever comes second must not be heard."""
    memory = filled(2, kind=kind)
    plans = [jaxkv.init_batch(memory, make_batch(tokens)) for tokens in ([5, 6, 7], [7, 8, 9])]
    one, rival = (plan.ubatches[0] for plan in plans)
    memory, _ = think(memory, one)
    assert_identical(jaxkv.apply(memory, rival), memory)
    assert_identical(think(memory, rival)[0], memory)
