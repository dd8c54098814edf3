"""Planning the next tokens of several sequences, and cutting some of them off again."""

from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models
from jaxkv import Reason, make_batch
from jaxkv.planning.step import plan_next
from tests.memories import SMALL, SPLIT, WINDOW, assert_identical, filled

DATA = Path(__file__).parent.parent / "data"
MODELS = ("llama_tied", "mamba2", "granite_hybrid", "recurrent_gemma")
FIRST = [
    MODELS[1],
    *(pytest.param(name, marks=pytest.mark.nightly) for name in MODELS[:1] + MODELS[2:]),
]

load = cache(lambda name: models.load(DATA / name))


@cache
def feeding(name):
    model = load(name)

    @jax.jit
    def feed(memory, tokens, sequences, valid):
        ubatch, ok = jaxkv.plan_tokens(memory, tokens, sequences, valid)
        memory, logits = model.forward(model.weights, jaxkv.apply(memory, ubatch), ubatch)
        return memory, logits.reshape(*valid.shape, -1), ok

    return feed


@pytest.mark.nightly
@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("name", FIRST)
def test_tokens_together_give_the_logits_of_one_after_another(name, streams):
    """Padding stands before, between and after them; sequences come in any order, or not at all."""
    feed = feeding(name)
    tokens = np.array([[7, 3, 9, 5], [2, 8, 4, 6], [1, 1, 1, 1]])
    valid = np.array([[0, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0]], bool)
    for sequences in ([2, 0, 1], [1, 2, 0]):
        start = load(name).make_memory(cells=8 * 3 // streams, sequences=3, streams=streams)
        memory, together, ok = feed(start, tokens, np.array(sequences), valid)
        alone = start
        for i in range(4):
            column = np.eye(4, dtype=bool)[i][None] & valid
            alone, logits, fine = feed(alone, tokens, np.array(sequences), column)
            where = valid[:, i]
            np.testing.assert_allclose(together[where, i], logits[where, i], atol=2e-4)
            assert fine
        assert ok
        ends = partial(jaxkv.seq_pos_max, seq=sequences)
        assert ends(memory).tolist() == ends(alone).tolist() == [1, 2, -1]


@pytest.mark.core
def test_what_is_refused_changes_nothing():
    memory = filled(2, 9)
    for count, ids in ((2, [0, 1]), (1, [1, 1])):
        plan = jax.jit(partial(jaxkv.plan_tokens, memory))
        ubatch, ok = plan(jnp.ones((2, count), int), jnp.array(ids), jnp.ones((2, count), bool))
        assert not ok
        assert_identical(jaxkv.apply(memory, ubatch), memory)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1], [2]], [0], [[True], [True]]), r"valid of one shape \[T, n\], and sequences \[T\]"),
        (([1, 2], [0, 1], [True, True]), r"got \(2,\), \(2,\) and \(2,\)"),
        (([[1], [2]], [1, 1], [[True], [True]]), r"each sequence at most once, got \[1, 1\]"),
        (([[1]], [3], [[True]]), "wanted sequence ids from 0 to 2, got 3; a memory is made"),
        (([[1, 1]], [3], [[True, False]]), "wanted sequence ids from 0 to 2, got 3"),
        (([[1.5]], [0], [[True]]), "wanted integers for tokens"),
        (([[1]], [0], [[2]]), "wanted bool for valid"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        jaxkv.plan_tokens(filled(2), *arguments)


@pytest.mark.core
def test_a_plan_says_which_texts_fit():
    memory = filled(SPLIT.cells, 1, kind=SPLIT)
    ids, valid = jnp.arange(3), jnp.ones((3, 1), bool)
    plan = plan_next(jaxkv.split(memory)[0], jnp.ones((3, 1), jnp.int32), ids, valid)
    assert plan.reason.tolist() == [Reason.NO_ROOM, Reason.FITS, Reason.FITS]
    assert plan.fits.tolist() == [False, True, True] and not plan.ok
    plan = plan_next(
        jaxkv.split(memory)[0], jnp.ones((2, 1), jnp.int32), ids[1:2].repeat(2), valid[:2]
    )
    assert plan.reason.tolist() == [Reason.FITS, Reason.DUPLICATE, Reason.FITS]
    assert plan.fits.tolist() == [True, False, True] and not plan.ok


# ---- many cuts, many parents


@pytest.mark.parametrize(
    "kind",
    [SMALL, *(pytest.param(kind, marks=pytest.mark.core) for kind in (SPLIT, WINDOW))],
    ids=lambda kind: kind.name,
)
def test_many_cuts_are_one_after_another(kind):
    memory = filled(3, 2, 4, kind=kind)
    cuts = [(1, 1, -1), (2, -1, 2), (2, 3, -1)]
    wanted = memory
    for cut in cuts:
        wanted, ok = jaxkv.seq_rm(wanted, *cut)
        assert ok
    found, ok = jaxkv.seq_rm(memory, *zip(*cuts, strict=True))
    assert_identical(found, wanted)
    assert ok.tolist() == [True] * 3
    found, ok = jaxkv.seq_rm(memory, [0, 1, 2], 1)
    assert jaxkv.seq_pos_max(found, [0, 1, 2]).tolist() == [0, 0, 0] and ok.shape == (3,)


@pytest.mark.core
def test_of_many_cuts_some_are_refused():
    memory = load("mamba2").make_memory(sequences=3, rollback=1)
    model = load("mamba2")
    batch = make_batch([[1, 2, 3], [4, 5, 6], [7]])
    memory, _ = jaxkv.prefill(model.forward, model.weights, memory, batch)
    memory, ok = jaxkv.seq_rm(memory, [0, 1, 2], [1, 2, 0])
    assert ok.tolist() == [False, True, True]
    assert jaxkv.seq_pos_max(memory, [0, 1, 2]).tolist() == [2, 1, -1]


def test_cuts_of_other_shapes_are_refused():
    for cut in (([0, 1], [1, 2, 3]), ([[0]],)):
        with pytest.raises(ValueError, match=r"wanted seq, p0 and p1 of one shape \[n\], or \[\]"):
            jaxkv.seq_rm(filled(2), *cut)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 1], [1]), r"parents and sequences of one shape \[n\], got \(2,\) and \(1,\)"),
        ((0, 1), r"got \(\) and \(\)"),
        (([0, 1], [2, 2]), r"each sequence at most once, got \[2, 2\]"),
        (([3], [0]), "wanted sequence ids from 0 to 2, got 3"),
        (([0], [-1]), "wanted sequence ids from 0 to 2, got -1"),
    ],
)
def test_parents_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        jaxkv.seq_select(filled(2), *arguments)


@pytest.mark.core
@pytest.mark.parametrize("kind", [SMALL, SPLIT], ids=lambda kind: kind.name)
def test_traced_parents_that_are_none_change_nothing(kind):
    memory = filled(3, 2, 4, kind=kind)
    select = jax.jit(jaxkv.seq_select)
    for parents, ids in (([3, -1, 1], [0, 1, 1]), ([0, 0, 2], [3, -1, 2])):
        assert_identical(select(memory, jnp.array(parents), jnp.array(ids)), memory)
    last = select(memory, jnp.array([0, 2]), jnp.array([1, 1]))  # of two the last one counts
    assert jaxkv.seq_pos_max(last, 1) == 3


@pytest.mark.core
def test_a_donated_selection_is_in_place():
    memory = jax.tree.map(jnp.copy, filled(3, 2, 4, kind=SPLIT))
    wanted = jaxkv.seq_select(memory, [1, 0], [0, 1])
    found = jaxkv.seq_select(memory, [1, 0], [0, 1], donate=True)
    assert_identical(found, wanted)
    assert all(x.is_deleted() for x in jax.tree.leaves(jaxkv.split(memory)[1]))
