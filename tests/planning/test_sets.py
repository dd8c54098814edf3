"""Tokens of several sequences: computed once, with the results of separate sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import PlanRefusedError, Reason, make_batch
from tests.helpers import caches
from tests.helpers.caches import (
    GROUPS,
    SMALL,
    WINDOW,
    assert_identical,
    drawing,
    parse_cache,
    run_batch,
    run_ubatch,
)
from tests.helpers.mistakes import assert_raises, mistakes
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import apply_plan

core = pytest.mark.core


def batch_of(sets, tokens=None):
    """A batch of 8 tokens, padding included, of up to 3 sequences each, with all outputs."""
    count = len(sets)
    table = np.full((8, 3), -1)
    for row, one in zip(table, sets, strict=False):
        row[: len(one)] = one
    tokens = np.pad(np.arange(1, 1 + count) if tokens is None else tokens, (0, 8 - count))
    there = np.arange(8) < count
    return make_batch(tokens, sequences=jnp.asarray(table), valid=there, outputs=[True] * 8)


def test_make_batch_sequences_of_a_token_in_any_form():  # trap 52
    """Sorted, the lowest in `sequences`; the number of others is a power of two."""
    array = [[0, 1, -1], [-1, 0, -1], [3, 2, 1]]
    for sequences in ([[1, 0], 0, (3, 1, 2)], [{0, 1}, [0], np.array([2, 3, 1])], jnp.array(array)):
        batch = make_batch([5, 6, 7], sequences=sequences)
        assert batch.sequences.tolist() == [0, 0, 1]
        assert batch.shared_with.tolist() == [[1, -1], [-1, -1], [2, 3]]
    batch = make_batch([[5, 6], [7]], sequences=[[0, 2, 3, 4], 1])  # of a list of lists
    assert batch.sequences.tolist() == [0, 0, 1]
    assert batch.shared_with.tolist() == [[2, 3, 4, -1], [2, 3, 4, -1], [-1] * 4]
    rows = make_batch(np.array([[5], [7]]), sequences=np.array([[[0, 1]], [[2, -1]]]))
    assert rows.sequences.tolist() == [[0], [2]] and rows.shared_with.tolist() == [[[1]], [[-1]]]
    assert make_batch([5, 6], sequences=[[0], [1]]).shared_with is None  # as with single ids


def plan_shared_token(cache, *ids):
    return jaxkv.init_batch(cache, make_batch([5], sequences=[[*ids]]))


@pytest.mark.parametrize(("call", "outcome"), mistakes("sets"))
def test_sequences_that_cannot_share_a_token_raise(call, outcome):  # trap 39
    assert_raises(call, outcome, globals())


def test_batch_only_keeps_a_token_for_those_that_stay():
    batch = make_batch([5, 6, 7, 8], sequences=[[0, 1, 2], [0, 1], [0], [1]])
    for fits, first in (([True, False, True], [0, 0, 0, -1]), ([False, True, True], [1, 1, -1, 1])):
        for only in (jaxkv.Batch.keep_sequences, jax.jit(jaxkv.Batch.keep_sequences)):
            rest = only(batch, np.array(fits))
            assert rest.sequences.tolist() == first
            assert rest.shared_with.tolist() == [[2, -1], [-1, -1], [-1, -1], [-1, -1]]
            assert rest.valid.tolist() == [seq >= 0 for seq in first]


PARTED = "0{0,1} 1{0} 1{1}"


@core
@pytest.mark.parametrize(
    ("cells", "sets", "wanted"),
    [
        (PARTED, [[0, 1]], {1: (0, 2)}),
        ("0{0,1} 1{0,1} 2{0}", [[0, 1]], {1: (0, 3)}),
        ("0{0,1} 1{0,1}", [[0], [0, 1]], {1: (0, 3)}),  # not in the batch
        ("0{0,1} 1{0,1}", [[0], [1], [0, 1]], {1: (0, 3)}),
        (". .", [[0], [0, 1]], {1: (0, 1)}),  # it starts where the other one continues
        (PARTED, [[1, 2], [0]], {2: (1, 2)}),
        (". 0{0}", [[0, 1, 2]], {1: (0, 1), 2: (0, 1)}),
        (f"{PARTED} | 0{{2,3}}", [[0, 1]], {1: (0, 2)}),  # in one of two streams
    ],
)
def test_init_batch_token_of_sequences_that_parted_is_refused(cells, sets, wanted):  # traps 40, 41
    """llama.cpp compares only the last positions of sequences; these may be equal."""
    cache = parse_cache(cells, GROUPS if "|" in cells else SMALL)
    plan = jaxkv.init_batch(cache, batch_of(sets), ubatch_size=8)
    answers = np.stack([plan.reason, plan.expected, plan.actual], axis=1).tolist()
    assert answers == [
        [Reason.DIVERGED, *wanted[q]] if q in wanted else [0] * 3
        for q in range(cache.table.sequences)
    ]
    assert_identical(apply_plan(cache, plan.ubatches[0]), cache)
    with pytest.raises(PlanRefusedError, match="DIVERGED, expected its token at . to share all"):
        plan.check()


@core
def test_init_batch_shared_tokens_fit_together_or_not_at_all():
    """Three cells are free: the tree of four does not fit, sequence 2 does."""
    cache = parse_cache(" ".join(f"{i}{{0,1}}" for i in range(9)))
    batch = batch_of([[0, 1], [0], [0], [1], [2]])
    plan = jaxkv.init_batch(cache, batch, ubatch_size=8)
    assert plan.fits.tolist() == [False, False, True]
    assert plan.expected.tolist() == [4, 4, 0] and plan.actual.tolist() == [2, 2, 0]
    assert jaxkv.init_batch(cache, batch.keep_sequences(plan.fits), ubatch_size=8).ok
    # A shared prompt counts once and fits where two copies would not.
    assert jaxkv.init_batch(cache, batch_of([[0, 1]] * 3), ubatch_size=8).ok


@core
def test_init_batch_traced_sets_match_known_ones():
    sets = np.array([[0, 1, 2], [0, 1, -1], [2, -1, -1], [1, -1, -1], [0, -1, -1]])

    @jax.jit
    def plan(cache, sets):
        batch = make_batch(np.ones(sets.shape[:-1], np.int32), sequences=sets)
        return jaxkv.init_batch(cache, batch, ubatch_size=8)

    known = jaxkv.init_batch(SMALL.make(), batch_of(sets), ubatch_size=8)
    for one in (plan(SMALL.make(), sets), known):
        after = drawing(apply_plan(SMALL.make(), one))
        assert one.ok and after == "0{0,1,2} 1{0,1} 1{2} 2{1} 2{0}"
    for kind, wrong, seq, reason in (
        (SMALL, np.where(sets == 2, 3, sets), 0, Reason.UNKNOWN_SEQUENCE),
        (SMALL, np.where(sets == 1, 0, sets), 0, Reason.DIVERGED),  # a repeated sequence
        (GROUPS, np.array([[[0, 3]], [[1, -1]]]), 3, Reason.DIVERGED),  # of two streams
    ):
        refused = plan(kind.make(), wrong)
        assert not refused.ok and refused.reason[seq] == reason


@pytest.mark.parametrize(
    ("kind", "size"),
    mark_cases([(WINDOW, 8), (GROUPS, 3)], core=[(GROUPS, 3)]),
    ids=["window", "groups"],
)
def test_run_trees_after_a_fork_read_as_if_alone(kind, size):  # trap 44
    """A prompt of two sequences, a tree after it, a cut, and another tree."""
    rng = np.random.default_rng(1)
    prompt = rng.integers(1, 16, 4).tolist()
    cache, _ = run_batch(kind.make(), batch_of([[0, 1]] * 4, prompt), ubatch_size=size)
    for sets in ([[0, 1], [0], [1], [1]], [[1, 0], [0], [1], [0]]):
        tokens = rng.integers(1, 16, len(sets))
        cache, logits = run_batch(cache, batch_of(sets, tokens), ubatch_size=size)
        for seq in (0, 1):
            index = [i for i, one in enumerate(sets) if seq in one]
            alone = batch_of([[0]] * (len(prompt) + len(index)), [*prompt, *tokens[index]])
            wanted = run_batch(kind.make(), alone, ubatch_size=8)[1][len(prompt) :]
            np.testing.assert_allclose(logits[np.array(index)], wanted[: len(index)], atol=1e-5)
        prompt.append(tokens[0])
        cache, _ = jaxkv.seq_rm(cache, [0, 1], len(prompt))  # back to the shared prompt


@core
def test_attend_stale_plan_of_other_owners_reads_nan():
    """The same tokens for other sets are another plan."""
    both, one = (
        jaxkv.init_batch(SMALL.make(), batch_of(sets), ubatch_size=8).ubatches[0]
        for sets in ([[0, 1], [0, 1]], [[0, 1], [0]])
    )
    after, logits = run_ubatch(SMALL.make(), both)
    assert jnp.isfinite(logits).all()
    q = jnp.ones((*one.valid.shape, 2 * caches.HEADS, caches.SIZE))
    k = q[:, :, ::2]
    assert jnp.isnan(jaxkv.attend(jaxkv.apply(after, one), 0, q, k, k)[1][:, :2]).all()
