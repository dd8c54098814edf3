"""A refusal is an answer: afterwards every bit of the memory is what it was.

Applied and computed all the same, whatever was refused (a plan, or a ubatch that has become stale)
enters no table and no buffers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, apply, init_batch, make_batch, seq_rm
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


def compute(memory, plan):
    """Run the model on every ubatch of a plan, refused or not."""
    for ubatch in plan.ubatches:
        memory, _ = think(memory, ubatch)
    return memory


@pytest.mark.parametrize("fault", FAULTS)
def test_init_batch_refused_says_why_and_changes_nothing(fault):
    sequences, positions, expected = FAULTS[fault]
    memory = filled(5, 3)
    batch = make_batch([1] * len(sequences), sequences=sequences, positions=positions)
    plan = init_batch(memory, batch, ubatch_size=4)
    assert not plan.ok
    for seq in range(3):
        reason, wanted, found = expected.get(seq, (Reason.FITS, 0, 0))
        assert (plan.reason[seq], plan.fits[seq]) == (reason, reason == Reason.FITS)
        if seq in expected:
            assert (plan.expected[seq], plan.found[seq]) == (wanted, found)
    for ubatch in plan.ubatches:  # each token goes past the end, to a place of its own
        assert (ubatch.slots >= 12).all()
        assert len(np.unique(ubatch.slots)) == ubatch.slots.size
    assert_identical(compute(memory, plan), memory)

    with pytest.raises(jaxkv.RefusedError) as refused:
        plan.check()
    lines = str(refused.value).splitlines()[1:]
    for line, (seq, (reason, wanted, found)) in zip(lines, expected.items(), strict=True):
        assert line.startswith(f"sequence {seq}: {reason.name}, ")
        numbers = {int(word.strip(":,")) for word in line.split() if word.strip(":,-").isdigit()}
        assert {wanted, found} <= numbers, line


def test_pending_rotation_refuses_the_sequences_that_own_it():
    memory = jaxkv.seq_add(filled(4, 3), 0, 0, -1, 2)
    plan = init_batch(memory, make_batch([[1, 1], [1]]))
    assert plan.reason.tolist() == [Reason.UPDATE_PENDING, Reason.FITS, Reason.FITS]
    with pytest.raises(jaxkv.RefusedError, match="sequence 0: UPDATE_PENDING, .*init_update"):
        plan.check()
    assert_identical(compute(memory, plan), memory)
    assert init_batch(memory, make_batch([1], sequences=1)).ok


def with_free(*cells):
    """A full memory of runs in which sequence 0 has let go of some cells."""
    memory = filled(12, kind=RUNS)
    for cell in cells:
        memory, _ = seq_rm(memory, 0, cell, cell + 1)
    return memory


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
def test_missing_run_of_any_ubatch_refuses_the_batch(free):
    """There is a cell for each of 8 tokens, but no run for each ubatch of 3, 3 and 2."""
    memory = with_free(*free)
    plan = init_batch(memory, make_batch([1] * 8, sequences=1), ubatch_size=3)
    assert plan.reason.tolist() == [Reason.FITS, Reason.FRAGMENTED, Reason.FITS]
    with pytest.raises(jaxkv.RefusedError, match="sequence 1: FRAGMENTED, it brings 8 "):
        plan.check()
    for ubatch in plan.ubatches:
        assert_identical(apply(memory, ubatch), memory)
    assert_identical(think(memory, plan.ubatches[0])[0], memory)


@pytest.mark.core
def test_fits_is_false_for_a_sequence_without_a_run():
    """Five cells are free, three of them neighbours; sequence 1 wants four, and 2 as many."""
    memory = with_free(0, 1, 2, 6, 7)
    batch = make_batch([1] * 8, sequences=[1] * 4 + [2] * 4)
    plan = init_batch(memory, batch, ubatch_size=4)
    assert plan.reason.tolist() == [Reason.FITS, Reason.FRAGMENTED, Reason.NO_ROOM]
    assert plan.fits.tolist() == [True, False, False]
    plan = init_batch(memory, batch.only([False, True, False]), ubatch_size=4)
    assert not plan.ok and plan.reason[1] == Reason.FRAGMENTED


# -------------------------------------------------------------------------- what has become stale


def eleven(memory):
    """A plan of three ubatches for sequence 0."""
    return init_batch(memory, make_batch([7] * 11), ubatch_size=4)


def unchanged_by(memory, ubatch) -> None:
    """Neither applying a ubatch nor computing it changes a bit."""
    assert_identical(apply(memory, ubatch), memory)
    assert_identical(think(memory, ubatch)[0], memory)


def test_ubatches_out_of_order_change_nothing():
    memory = filled(1)
    first, middle, last = eleven(memory).ubatches
    unchanged_by(memory, middle)
    unchanged_by(memory, last)
    memory, _ = think(memory, first)
    unchanged_by(memory, last)
    unchanged_by(memory, first)
    memory, _ = think(memory, middle)
    memory, _ = think(memory, last)
    assert jaxkv.seq_pos_max(memory, 0).item() == 11


def test_ubatch_stale_for_one_sequence_stops_all():
    """Two sequences in a ubatch; one of them has moved on. Neither gets in."""
    memory = filled(3, 3)
    (ubatch,) = init_batch(memory, make_batch([[5, 6], [7]])).ubatches
    memory, _ = seq_rm(memory, 1, 2, -1)
    unchanged_by(memory, ubatch)
    unchanged_by(filled(12), ubatch)


def test_commitment_is_stale_after_an_edit():
    memory, _ = seq_rm(filled(7), 0, 1, 3)
    moves = jaxkv.defrag_plan(memory)
    assert jaxkv.is_current(memory, moves)
    taken, _ = run(memory, make_batch([1], sequences=2))  # a destination
    gone, _ = seq_rm(memory, 0, 5, -1)  # a source
    other, _ = seq_rm(memory, 0, 0, 1)  # a cell that would have stayed
    moved = jaxkv.seq_add(memory, 0, 3, -1, -2)
    update = jaxkv.init_update(moved)
    assert jaxkv.is_current(moved, update)
    again = jaxkv.seq_add(moved, 0, 1, 2, 1)
    done = apply(moved, update)
    for plan, edited in (
        (moves, taken),
        (moves, gone),
        (moves, other),
        (update, again),
        (update, done),
    ):
        assert not jaxkv.is_current(edited, plan)
        assert_identical(apply(edited, plan), edited)


@pytest.mark.core
def test_commitment_stale_in_one_part_changes_no_part():
    """The later edit is one that the other part has nothing of."""
    sizes = dict(layers=1, kv_heads=HEADS, head_dim=SIZE, sequences=2, rope=ROPE)
    full = jaxkv.make_kv_cache(cells=16, **sizes)
    window = jaxkv.make_kv_cache(cells=8, window=sliding(3), **sizes)
    memory = jaxkv.make_hybrid_cache((full, (0,)), (window, (1,)))
    for text in [range(4)] * 3:  # the window gives up what is hidden
        memory, _ = run(memory, make_batch(text, sequences=0))
    memory = jaxkv.seq_add(memory, 0, 0, -1, 4)
    update = jaxkv.init_update(memory)
    tidied, _ = seq_rm(apply(memory, update), 0, 14, 15)
    moves = jaxkv.defrag_plan(tidied)
    for before, plan, edited in (
        (memory, update, jaxkv.seq_add(memory, 0, 4, 6, -1)),
        (tidied, moves, seq_rm(tidied, 0, 4, 6)[0]),
    ):
        assert all(part.pending for part in plan.parts)
        assert_identical(parts_of(edited)[1], parts_of(before)[1])
        assert_identical(apply(edited, plan), edited)
        assert jaxkv.is_current(before, plan) and not jaxkv.is_current(edited, plan)


@pytest.mark.core
def test_commitment_stale_in_one_stream_changes_no_stream():
    memory = filled(4, 4, kind=SPLIT)
    for seq in (0, 1):
        memory, _ = seq_rm(memory, seq, 1, 2)
    moves = jaxkv.defrag_plan(memory)
    assert moves.count.tolist() == [1, 1, 0]
    edited, _ = seq_rm(memory, 1, 3, 4)
    assert_identical(apply(edited, moves), edited)

    memory = jaxkv.seq_add(jaxkv.seq_add(memory, 0, 2, -1, -1), 1, 2, -1, -1)
    update = jaxkv.init_update(memory)
    assert jnp.any(update.shift != 0, axis=1).tolist() == [True, True, False]
    edited = jaxkv.seq_add(memory, 1, 1, -1, 1)
    assert_identical(apply(edited, update), edited)


@pytest.mark.core
def test_plan_for_another_memory_raises():
    """Other sizes, streams, windows, placements and kinds."""
    sizes = {"layers": 2, "kv_heads": 2, "head_dim": 4, "sequences": 3}
    recurrent = {"layers": 2, "states": {"x": ((2,), "float32")}, "sequences": 3}

    def cache(cells=12, **options):
        return jaxkv.make_kv_cache(cells=cells, **{**sizes, **options})

    memory, striped = cache(), cache(placement="striped", shards=2)
    states, hybrid = (
        jaxkv.make_recurrent_cache(**recurrent),
        jaxkv.make_hybrid_cache((memory, (0, 1))),
    )
    others = [
        cache(cells=13),
        cache(sequences=4),
        cache(streams=3),
        cache(window=sliding(3)),
        cache(placement="contiguous"),
        striped,
        states,
        hybrid,
    ]
    pairs = [(memory, other) for other in others] + [(other, memory) for other in others]
    pairs += [
        (striped, cache(placement="striped", shards=3)),
        (states, jaxkv.make_recurrent_cache(rollback=1, **recurrent)),
        (states, hybrid),
        (hybrid, jaxkv.make_hybrid_cache((memory, (0, 1)), (memory, (2, 3)))),
    ]
    x = jnp.zeros((1, 2, 2, 4))
    for one, other in pairs:
        (ubatch,) = jaxkv.init_full(other, ubatch_size=4).ubatches  # shapes tell the memory too
        update, moves = (jax.eval_shape(f, other) for f in (jaxkv.init_update, jaxkv.defrag_plan))
        for verb, *args in (
            (apply, one, ubatch),
            (apply, one, update),
            (apply, one, moves),
            (jaxkv.is_current, one, ubatch),
            (jaxkv.attend, one, 0, ubatch, x, x, x),
            (jaxkv.read_states, one, 0, ubatch),
            (jaxkv.go_back, other.table, one),
        ):
            with pytest.raises(ValueError, match="for this memory, .* got one for .*: plan again"):
                verb(*args)


# -------------------------------------------------------------------------------------- bad ids


VERBS = {
    "seq_rm": lambda memory, seq: seq_rm(memory, seq)[0],
    "seq_cp-from": lambda memory, seq: jaxkv.seq_cp(memory, seq, 1),
    "seq_cp-to": lambda memory, seq: jaxkv.seq_cp(memory, 0, seq),
    "seq_keep": jaxkv.seq_keep,
    "seq_add": lambda memory, seq: jaxkv.seq_add(memory, seq, 0, -1, 3),
    "seq_div": lambda memory, seq: jaxkv.seq_div(memory, seq, 0, -1, 2),
}


def test_verbs_of_unknown_ids_raise_or_change_nothing():
    memory = filled(4, 3)
    edited = jax.jit(lambda seq: {name: verb(memory, seq) for name, verb in VERBS.items()})
    for wrong in (-2, -1, 3, 31, 32, 35, 2**31 - 1):
        for name, after in edited(wrong).items():
            if (name, wrong) == ("seq_rm", -1):  # all sequences
                continue
            assert_identical(after, memory)
            with pytest.raises(
                ValueError, match=rf"wanted sequence ids from (0|-1) to 2, got {wrong};"
            ):
                VERBS[name](memory, wrong)


def test_seq_pos_of_unknown_ids_raises_or_is_minus_one():
    memory = filled(4, 3)
    ids = jnp.array([0, -1, 3, 32, 1])
    for question, held in (
        (jaxkv.seq_pos_min, [0, -1, -1, -1, 0]),
        (jaxkv.seq_pos_max, [3, -1, -1, -1, 2]),
    ):
        with pytest.raises(ValueError, match="wanted sequence ids from 0 to 2, got 3"):
            question(memory, [0, 3])
        assert jax.jit(question)(memory, ids).tolist() == held


def test_init_batch_of_unknown_sequences_raises_or_is_refused():
    memory = filled(4, 3)

    @jax.jit
    def traced(memory, ids):
        plan = init_batch(memory, make_batch(jnp.ones(3, jnp.int32), sequences=ids))
        return plan, apply(memory, plan)

    for wrong in (-1, 3, 99):
        with pytest.raises(ValueError, match=f"wanted sequence ids from 0 to 2, got {wrong}"):
            init_batch(memory, make_batch([1, 1], sequences=[0, wrong]))
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


def test_seq_div_by_less_than_one_raises_or_changes_nothing():
    memory = filled(4)
    divided = jax.jit(lambda divisor: jaxkv.seq_div(memory, 0, 0, -1, divisor))
    for divisor in (0, -1):
        with pytest.raises(ValueError, match=f"wanted divisor of at least 1, got {divisor}"):
            jaxkv.seq_div(memory, 0, 0, -1, divisor)
        assert_identical(divided(divisor), memory)


def cut_traced(memory, tokens):
    return jax.jit(lambda t: init_batch(memory, make_batch(t), ubatch_size=2))(tokens)


MISTAKES = [
    (lambda m: init_batch(m, make_batch([1], valid=[False])), ValueError, "no valid token"),
    (lambda m: init_batch(m, make_batch([1]), ubatch_size=0), ValueError, "at least 1, got 0"),
    (lambda m: apply(m, eleven(m)), ValueError, "3 ubatches cannot be applied at once"),
    (lambda m: cut_traced(m, jnp.arange(3)), ValueError, "at most 2 tokens, got 3"),
    (lambda m: jaxkv.defrag_plan(m, max_moves=0), ValueError, "max_moves of at least 1"),
    (lambda m: jaxkv.used(seq_rm(m, 0)), TypeError, "was `memory, ok = seq_rm"),
    (lambda m: jax.jit(lambda m: eleven(m).check())(m), TypeError, "plan.ok"),
    (lambda m: jaxkv.attend(m, 0, eleven(m), 0, 0, 0), TypeError, "wanted a ubatch, such as plan"),
    (lambda m: apply(m, m.table), TypeError, "wanted a ubatch or a plan, got"),
    (lambda m: jaxkv.go_back(m, m), TypeError, "wanted the table of an earlier memory"),
]


@pytest.mark.parametrize(("call", "error", "match"), MISTAKES)
def test_what_cannot_be_planned_or_applied_raises(call, error, match):
    with pytest.raises(error, match=match):
        call(filled(1))


@pytest.mark.parametrize("position", [2**31 - 1, 2**31 - 2])
def test_seq_rm_forgets_every_position_that_is_accepted(position):
    """The largest int32 ends open ranges, so it can be no position."""
    memory = SMALL.make()
    plan = init_batch(memory, make_batch([1], positions=[position]))
    assert plan.ok == (position < 2**31 - 1)
    if plan.ok:
        memory = apply(memory, plan)
        assert jaxkv.seq_pos_min(memory, 0).item() == position
        memory, _ = seq_rm(memory, 0)
    assert jaxkv.used(memory).item() == 0
