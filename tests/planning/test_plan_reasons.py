"""A refused plan leaves every bit of table and buffers unchanged, applied and computed too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Cache, PlanRefusedError, Reason, init_batch, make_batch, seq_rm
from tests.helpers.caches import assert_identical, fill_cache, run_ubatch
from tests.helpers.mistakes import assert_raises, mistakes
from tests.helpers.steps import apply_plan

pytestmark = pytest.mark.core

FAULTS = {
    # name: the batch's sequences, its positions, and the refused ones with reasons. Sequence 0 has
    # 5 tokens, 1 has 3 and 2 none; 4 cells are free.
    "no-room-for-one": ([2, 0, 2, 2, 2, 1, 1], None, {2: (Reason.OUT_OF_CELLS, 4, 1)}),
    "before-zero": ([2, 2, 2], [-1, 0, 1], {2: (Reason.NOT_CONTIGUOUS, 0, -1)}),
    "gap": ([1, 1, 1], [3, 4, 6], {1: (Reason.POSITION_GAP, 5, 6)}),
    "decreasing": ([1, 1, 1], [3, 4, 3], {1: (Reason.DECREASING_POSITION, 5, 3)}),
    "each-its-own": (  # the three of sequence 2 fit, because refused tokens take no cells
        [0, 1, 1, 2, 2, 2],
        [9, 3, 3, 7, 8, 9],
        {0: (Reason.NOT_CONTIGUOUS, 5, 9), 1: (Reason.DUPLICATE_POSITION, 4, 3)},
    ),
}


def assert_unchanged_by(cache, plan):
    after = cache
    for ubatch in plan.ubatches:
        after, logits = run_ubatch(after, ubatch)
        assert np.isfinite(logits).all()  # zeros from attention, as for padding
    assert_identical(after, cache)


@pytest.mark.parametrize("fault", FAULTS)
def test_init_batch_refused_says_why_and_changes_nothing(fault):  # trap 50
    sequences, positions, expected = FAULTS[fault]
    cache = fill_cache(5, 3)
    batch = make_batch([1] * len(sequences), sequences=sequences, positions=positions)
    plan = init_batch(cache, batch, ubatch_size=4)
    assert not plan.ok and [seq not in expected for seq in range(3)] == plan.fits.tolist()
    answers = np.stack([plan.reason, plan.expected, plan.actual], axis=1)
    assert {seq: tuple(answers[seq]) for seq in range(3) if answers[seq, 0]} == expected
    for ubatch in plan.ubatches:  # each token has a separate slot past the end
        assert (ubatch.slots >= 12).all()
        assert len(np.unique(ubatch.slots)) == ubatch.slots.size
    assert_unchanged_by(cache, plan)

    with pytest.raises(PlanRefusedError) as refused:
        plan.check()
    lines = str(refused.value).splitlines()[1:]
    for line, (seq, (reason, *numbers)) in zip(lines, expected.items(), strict=True):
        assert line.startswith(f"sequence {seq}: {reason.name}, ")
        assert {*map(str, numbers)} <= {word.strip(":,;") for word in line.split()}, line


EDITS = {
    "seq_rm": lambda cache, seq: seq_rm(cache, seq)[0],
    "seq_cp-from": lambda cache, seq: jaxkv.seq_cp(cache, seq, 1).cache,
    "seq_cp-to": lambda cache, seq: jaxkv.seq_cp(cache, 0, seq).cache,
    "seq_keep": lambda cache, seq: jaxkv.seq_keep(cache, seq).cache,
    "seq_add": lambda cache, seq: jaxkv.seq_add(cache, seq, 0, -1, delta=3).cache,
    "seq_div": lambda cache, seq: jaxkv.seq_div(cache, seq, 0, -1, divisor=2).cache,
}


def test_edits_of_unknown_ids_raise_or_change_nothing():  # trap 89
    cache = fill_cache(4, 3)
    edited = jax.jit(lambda seq: {name: verb(cache, seq) for name, verb in EDITS.items()})
    for wrong in (-2, -1, 3, 31, 32, 35, 2**31 - 1):
        for name, after in edited(wrong).items():
            if (name, wrong) == ("seq_rm", -1):  # all sequences
                continue
            assert_identical(after, cache)
            with pytest.raises(ValueError, match=rf"sequence ids from (0|-1) to 2, got {wrong};"):
                EDITS[name](cache, wrong)


def test_seq_pos_of_unknown_ids_raises_or_is_minus_one():
    cache, ids = fill_cache(4, 3), jnp.array([0, -1, 3, 32, 1])
    for question, held in ((Cache.seq_pos_min, 0), (Cache.seq_pos_max, 3)):
        with pytest.raises(ValueError, match="expected sequence ids from 0 to 2, got 3"):
            question(cache, [0, 3])
        assert jax.jit(question)(cache, ids).tolist()[:4] == [held, -1, -1, -1]


def test_init_batch_of_unknown_sequences_raises_or_is_refused():  # traps 77, 89
    cache = fill_cache(4, 3)

    @jax.jit
    def traced(cache, ids, positions=None):
        batch = make_batch(jnp.ones(3, jnp.int32), sequences=ids, positions=positions)
        plan = init_batch(cache, batch)
        return plan, apply_plan(cache, plan)

    for wrong in (-1, 3, 99):
        with pytest.raises(ValueError, match=f"expected sequence ids from 0 to 2, got {wrong}"):
            init_batch(cache, make_batch([1, 1], sequences=[0, wrong]))
        plan, after = traced(cache, jnp.array([0, wrong, 1]))
        assert not plan.fits.any() and set(plan.reason.tolist()) == {Reason.UNKNOWN_SEQUENCE}
        assert_identical(after, cache)
    assert traced(cache, jnp.array([0, 2, 1]))[0].ok
    plan, _ = traced(cache, jnp.array([0, 3, 2]), jnp.array([9, 0, 0]))
    first, *others = plan.reason.tolist()
    assert first == Reason.NOT_CONTIGUOUS and set(others) == {Reason.UNKNOWN_SEQUENCE}


def test_traced_negative_tokens_are_refused_and_padding_is_token_0():
    cache = fill_cache(4, 3)

    @jax.jit
    def traced(cache, tokens, valid):
        batch = make_batch(tokens, sequences=jnp.array([0, 1]), valid=valid)
        plan = jaxkv.plan_step(cache, tokens, active=valid)
        return init_batch(cache, batch), plan.ubatch, plan.ok

    plan, step, ok = traced(cache, jnp.array([1, -1]), jnp.array([True, True]))
    assert plan.reason.tolist() == [Reason.OK, Reason.NEGATIVE_TOKEN, Reason.OK]
    assert not ok and (step.slots >= 12).all()
    with pytest.raises(PlanRefusedError, match="sequence 1: NEGATIVE_TOKEN, .* negative one at 3"):
        plan.check()
    plan, step, ok = traced(cache, jnp.array([1, -1]), jnp.array([True, False]))
    assert plan.ok and ok and plan.ubatches[0].tokens.min() == step.tokens.min() == 0


def plan_eleven(cache, tokens=(7,) * 11, size=4):
    return init_batch(cache, make_batch(tokens), ubatch_size=size)


@pytest.mark.parametrize(("call", "outcome"), mistakes("planning"))
def test_what_cannot_be_planned_or_applied_raises(call, outcome):
    assert_raises(call, outcome, globals() | {"m": fill_cache(1)})
