"""Tokens of several sequences: computed once, and each text reads as if it stood alone."""

import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, make_batch
from jaxkv.kv.mask import visible
from tests import histories
from tests.cases import mostly_nightly
from tests.memories import (
    GROUPS,
    GROUPS_RUNS,
    HEADS,
    LAYERS,
    ROPE,
    SIZE,
    SMALL,
    SPLIT,
    WEIGHTS,
    WIDE,
    WINDOW,
    assert_identical,
    drawing,
    drawn,
    run,
    think,
)
from tests.meshes import KINDS as MESH_KINDS
from tests.meshes import mesh_of
from tests.sets import nearly_right
from tests.twins import Twin

TREE = [[0, 1, 2], [0, 1, 2], [0, 1], [2], [0], [1], [2]]
"""A trunk of two tokens, and three branches, the first two of which part a token later."""


def dense(tokens, window=None):
    """The logits of each token of one text by the plain formula of `think`, in float32 NumPy."""
    weights = jax.tree.map(np.asarray, WEIGHTS)
    places, scale = np.arange(len(tokens)), np.float32(SIZE**-0.5)
    sees = places[None] <= places[:, None]
    if window is not None:
        sees &= places[None] > places[:, None] - window
    x = weights["embedding"][np.array(tokens)]
    for layer in range(LAYERS):
        q, k, v = ((x @ weights[name][layer]).reshape(len(tokens), -1, SIZE) for name in "qkv")
        q, k = (np.asarray(jaxkv.rotate(heads[None], places[None], ROPE))[0] for heads in (q, k))
        k, v = (np.repeat(heads, q.shape[1] // HEADS, axis=1) for heads in (k, v))
        logits = np.where(sees[None], np.einsum("qhd,khd->hqk", q, k) * scale, -np.inf)
        logits = np.exp(logits - logits.max(axis=-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", logits / logits.sum(axis=-1, keepdims=True), v)
        x = np.tanh(x + out.reshape(x.shape) @ weights["out"][layer])
    return x @ weights["embedding"].T


def close(logits, wanted):
    """Equal but for rounding of float32, to the largest of them."""
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


def batch_of(sets, tokens=None, **options):
    """A batch of 8 tokens, padding included, with up to 3 sequences each: one shape for all."""
    count = len(sets)
    table = np.full((8, 3), -1)
    for row, one in zip(table, sets, strict=False):
        row[: len(one)] = one
    tokens = np.arange(1, 1 + count) if tokens is None else tokens
    tokens = np.pad(tokens, (0, 8 - count))
    return make_batch(tokens, sequences=jnp.asarray(table), valid=np.arange(8) < count, **options)


def texts_of(sets):
    """Which tokens of a batch each sequence has."""
    return {
        seq: [i for i, one in enumerate(sets) if seq in one]
        for seq in sorted(set().union(*map(set, sets)))
    }


# --------------------------------------------------------------------------------------- making


def test_what_sequences_may_be():
    """An id or several for each token, or for each list of tokens; or an array with one more axis.

    In any order, the lowest speaks for all; how many others there are is a power of two.
    """
    wanted = [0, 0, 1], [[1, -1], [-1, -1], [2, 3]]
    for sequences in (
        [[1, 0], 0, (3, 1, 2)],
        [{0, 1}, [0], np.array([2, 3, 1])],
        np.array([[0, 1, -1], [-1, 0, -1], [3, 2, 1]]),
        jnp.array([[0, 1, -1], [-1, 0, -1], [3, 2, 1]]),
    ):
        batch = make_batch([5, 6, 7], sequences=sequences)
        assert (batch.sequences.tolist(), batch.others.tolist()) == wanted
    batch = make_batch([[5, 6], [7]], sequences=[[0, 2, 3, 4], 1])
    assert batch.sequences.tolist() == [0, 0, 1]
    assert batch.others.tolist() == [[2, 3, 4, -1], [2, 3, 4, -1], [-1] * 4]
    rows = make_batch(np.array([[5, 6], [7, 8]]), sequences=np.array([[[0, 1]] * 2, [[2, -1]] * 2]))
    assert rows.sequences.tolist() == [[0, 0], [2, 2]] and rows.others[:, 0].tolist() == [[1], [-1]]
    # Where each token has one there are no sets: plans are those of any other batch.
    assert make_batch([5, 6], sequences=[[0], [1]]).others is None
    assert make_batch([[5, 6], [7, 8]], sequences=[4, 2]).others is None


def test_mistakes_are_named():
    cases = [
        ({"tokens": [5, 6], "sequences": [[0, 1], []]}, "a sequence at least in each"),
        ({"tokens": [5, 6], "sequences": [[0, 1], [2, 2]]}, r"once, got \[2, 2\]"),
        ({"tokens": [5, 6], "sequences": [[0, -1], [0]]}, "sequences from 0 to .*-1"),
        ({"tokens": [5, 6], "sequences": [[0, 1]]}, r"wanted \(2,\), got \(1, 2\)"),
        ({"tokens": [[5], [6]], "sequences": [[0, 1]]}, "or list of ids, for each of 2"),
        ({"tokens": [5], "sequences": [[[0, 1]]]}, "sequences"),
        ({"tokens": np.ones((2, 2), int), "sequences": [[0, 1], [2]]}, "filled up with -1, got"),
    ]
    for wrong, message in cases:
        with pytest.raises(ValueError, match=message):
            make_batch(**wrong)
    states = histories.make()
    for memory, ids, message in (
        (GROUPS.make(), [1, 2], r"sequences of a token in one stream, got \[1, 2\]"),
        (SPLIT.make(), [0, 1], r"in one stream, got \[0, 1\]"),
        (SMALL.make(), [0, 3], "sequence ids from 0 to 2, got 3"),
        (states, [0, 1], "a state belongs to one text, .* a memory of kind 'recurrent'"),
        (
            jaxkv.make_hybrid_cache((states, (0, 1)), (SMALL.make(), (2, 3))),
            [0, 1],
            "of kind 'hybrid'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            jaxkv.init_batch(memory, make_batch([5], sequences=[ids]))


def test_only_keeps_a_token_for_those_that_stay():
    batch = make_batch([5, 6, 7, 8], sequences=[[0, 1, 2], [0, 1], [0], [1]])
    for fits, wanted in (
        ([True, False, True], ([0, 0, 0, -1], [[2, -1], [-1, -1], [-1, -1], [-1, -1]])),
        ([False, True, True], ([1, 1, -1, 1], [[2, -1], [-1, -1], [-1, -1], [-1, -1]])),
    ):
        for only in (jaxkv.Batch.only, jax.jit(jaxkv.Batch.only)):
            rest = only(batch, np.array(fits))
            assert (rest.sequences.tolist(), rest.others.tolist()) == wanted
            assert rest.valid.tolist() == [seq >= 0 for seq in wanted[0]]


# ------------------------------------------------------------------------------------- computing


@pytest.mark.core
def test_a_tree_is_computed_once_and_each_text_reads_as_if_alone():
    """Against the dense formula; shared tokens take one cell."""
    tokens = np.arange(3, 10)
    memory, logits = run(SMALL.make(), batch_of(TREE, tokens, outputs=[True] * 8), ubatch_size=8)
    assert drawing(memory) == "0{0,1,2} 1{0,1,2} 2{0,1} 2{2} 3{0} 3{1} 3{2}"
    for index in texts_of(TREE).values():
        close(logits[np.array(index)], dense(tokens[index]))


PARTED = "0{0,1} 1{0} 1{1}"


def test_sequences_that_parted_are_refused_and_nothing_changes():
    """llama.cpp compares the ends of sequences alone; these end alike and hold other cells."""
    cases = [
        (PARTED, [[0, 1]], {1: (0, 2)}),
        ("0{0,1} 1{0,1} 2{0}", [[0, 1]], {1: (0, 3)}),
        ("0{0,1} 1{0,1}", [[0], [0, 1]], {1: (0, 3)}),  # not in the batch
        ("0{0,1} 1{0,1}", [[0], [1], [0, 1]], {1: (0, 3)}),
        (". .", [[0], [0, 1]], {1: (0, 1)}),  # it begins where the other one goes on
        (PARTED, [[1, 2], [0]], {2: (1, 2)}),
        (". 0{0}", [[0, 1, 2]], {1: (0, 1), 2: (0, 1)}),
    ]
    for cells, sets, wanted in cases:
        memory = drawn(cells)
        plan = jaxkv.init_batch(memory, batch_of(sets), ubatch_size=8)
        assert not plan.ok
        for seq in range(3):
            expected, found = wanted.get(seq, (0, 0))
            reason = Reason.DIVERGED if seq in wanted else Reason.FITS
            answer = plan.reason[seq], plan.expected[seq], plan.found[seq]
            assert tuple(map(int, answer)) == (reason, expected, found), cells
        assert_identical(jaxkv.apply(memory, plan.ubatches[0]), memory)
    with pytest.raises(jaxkv.RefusedError, match="sequence 1: DIVERGED, its token at 2 belongs to"):
        jaxkv.init_batch(drawn(PARTED), batch_of([[0, 1]]), ubatch_size=8).check()


def test_what_shares_tokens_fits_together_or_not_at_all():
    """Three cells are free: the tree of four does not fit, sequence 2 does."""
    memory = drawn(" ".join(f"{i}{{0,1}}" for i in range(9)))
    batch = batch_of([[0, 1], [0], [0], [1], [2]])
    plan = jaxkv.init_batch(memory, batch, ubatch_size=8)
    assert plan.fits.tolist() == [False, False, True]
    assert plan.expected.tolist() == [4, 4, 0] and plan.found.tolist() == [2, 2, 0]
    assert jaxkv.init_batch(memory, batch.only(plan.fits), ubatch_size=8).ok
    # Counted once, a shared prompt fits where two copies of it would not.
    assert jaxkv.init_batch(memory, batch_of([[0, 1]] * 3), ubatch_size=8).ok


def test_tokens_see_one_text_before_and_none_after():
    batch = batch_of([[0, 1], [0]])
    (ubatch,) = jaxkv.init_batch(SMALL.make(), batch, ubatch_size=8).ubatches
    memory = jaxkv.apply(SMALL.make(), ubatch)
    sees = visible(memory.table, ubatch)[0, :2, :3]
    assert sees.tolist() == [[True, False, False], [True, True, False]]
    with pytest.raises(ValueError, match="wanted causal attention without until, or tokens of one"):
        visible(memory.table, ubatch, causal=False)


# -------------------------------------------------------------------------------------- at length


@pytest.mark.core
@pytest.mark.parametrize("kind", [WINDOW, GROUPS], ids=lambda kind: kind.name)
def test_trees_in_windows_and_groups_read_as_if_alone(kind):
    """Prompts of five tokens, a fork, a tree on it, a cut, and another tree, in ubatches of 3."""
    rng, window = np.random.default_rng(1), 3 if kind is WINDOW else None
    prompt = rng.integers(1, 16, 5).tolist()
    memory, _ = run(kind.make(), make_batch([prompt], sequences=[[0, 1]]), ubatch_size=3)
    for sets in ([[0, 1], [0], [1], [1]], [[0, 1], [1, 0], [1], [0]]):
        tokens = rng.integers(1, 16, len(sets))
        batch = make_batch(tokens, sequences=sets, outputs=[True] * len(sets))
        memory, logits = run(memory, batch, ubatch_size=3)
        for index in texts_of(sets).values():
            text = [*prompt, *tokens[index]]
            close(logits[np.array(index)], dense(text, window)[len(prompt) :])
        prompt += [token for token, one in zip(tokens, sets, strict=True) if len(one) > 1]
        memory, _ = jaxkv.seq_rm(memory, [0, 1], len(prompt))  # they go on from what they share


@pytest.mark.core
@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_tree_in_several_ubatches(size):
    batch = make_batch(np.arange(3, 10), sequences=TREE, outputs=[True] * 7)
    _, logits = run(SMALL.make(), batch, ubatch_size=size)
    for index in texts_of(TREE).values():
        close(logits[np.array(index)], dense(np.arange(3, 10)[index]))


@pytest.mark.core
def test_a_traced_batch_is_planned_alike():
    sets = np.array([[0, 1, 2], [0, 1, -1], [2, -1, -1], [1, -1, -1], [0, -1, -1]])
    tokens = np.arange(1, 6, dtype=np.int32)

    @jax.jit
    def plan(memory, tokens, sets):
        return jaxkv.init_batch(memory, make_batch(tokens, sequences=sets), ubatch_size=8)

    known = jaxkv.init_batch(SMALL.make(), make_batch(tokens, sequences=sets), ubatch_size=8)
    traced = plan(SMALL.make(), tokens, sets)
    assert traced.ok and known.ok
    after = [drawing(jaxkv.apply(SMALL.make(), one)) for one in (traced, known)]
    assert after[0] == after[1] == "0{0,1,2} 1{0,1} 1{2} 2{1} 2{0}"
    for wrong, reason, seq in (
        (np.where(sets == 2, 3, sets), Reason.UNKNOWN_SEQUENCE, 0),
        (np.where(sets == 1, 0, sets), Reason.DIVERGED, 0),  # a sequence twice at one token
    ):
        refused = plan(SMALL.make(), tokens, wrong)
        assert not refused.ok and refused.reason[seq] == reason
    # Sequences of several streams cannot share a cell.
    batch = partial(make_batch, np.array([[1], [2]]))
    rows = jax.jit(lambda memory, sets: jaxkv.init_batch(memory, batch(sequences=sets)))
    refused = rows(GROUPS.make(), np.array([[[0, 3]], [[1, -1]]]))
    assert refused.reason.tolist() == [0, 0, 0, Reason.DIVERGED]


@pytest.mark.core
def test_a_stale_plan_knows_other_owners():
    """The same tokens for other sets are another plan: what one left, the other does not take."""
    memory = SMALL.make()
    both, one = (
        jaxkv.init_batch(memory, make_batch([5, 6], sequences=sets), ubatch_size=4).ubatches[0]
        for sets in ([[0, 1], [0, 1]], [[0, 1], [0]])
    )
    after, logits = think(memory, both)
    assert jnp.isfinite(logits).all()
    x = jnp.ones((*one.valid.shape, 2 * HEADS, SIZE))
    _, out = jaxkv.attend(after, 0, one, x, x[:, :, :HEADS], x[:, :, :HEADS])
    assert jnp.isnan(out).all()


def life(twin, rng, steps):
    """Lead a memory and its oracles through forks, cuts and batches, most of which are right."""
    kind, answers = twin.kind, set()
    sharing = kind.sequences // kind.streams
    for _ in range(steps):
        first = rng.randrange(kind.streams) * sharing
        pool = [first + i for i in range(sharing)] if sharing < 5 else [0, 1, 31, 32, 39]
        seq, act = rng.choice(pool), rng.random()
        if act < 0.3:
            for other in set(forks := [rng.choice(pool) for _ in range(2)]) - {seq}:
                twin.seq_rm(other)
            twin.seq_cp(seq, forks)
        elif act < 0.4:
            twin.seq_rm(seq, start := rng.randint(0, 6), start + rng.randint(1, 3))
        elif act < 0.5:
            twin.seq_rm(seq, rng.randint(0, 4))
        else:
            answers |= {twin.decode(nearly_right(twin, rng, pool, rng.choice([3, 7])))}
        twin.compare()
    return answers


KINDS = [SMALL, WIDE, WINDOW, GROUPS_RUNS]


@pytest.mark.core
@pytest.mark.parametrize(
    "kind", mostly_nightly(KINDS, few=[WIDE, GROUPS_RUNS]), ids=lambda kind: kind.name
)
def test_random_lives(kind):
    """Plans, masks, contents and refusals are those of the oracle."""
    answers = [life(Twin(kind), random.Random(seed), 12) for seed in range(3)]
    assert set().union(*answers) == {True, False}


@pytest.mark.core
def test_a_life_on_a_mesh():
    """Streams, cells and heads are split; each device marks what falls into its share."""
    kind = next(kind for kind in MESH_KINDS if kind.name == "groups-striped-window")
    with jax.set_mesh(mesh_of(**dict(kind.axes))):
        life(Twin(kind), random.Random(3), 6)
