"""Picking tokens on the device, against the same filters in plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sampling import make_sampler
from models.texts import compiles

V = 50
LOGITS = np.random.default_rng(0).normal(size=V).astype(np.float32) * 2
FILTERS = [
    dict(),
    dict(top_k=5),
    dict(top_p=0.6),
    dict(min_p=0.2),
    dict(top_k=10, top_p=0.7),
    dict(top_k=10, top_p=0.9, min_p=0.15),
    dict(top_k=1),
    dict(top_p=1e-6),
    dict(min_p=1.0),
    dict(top_k=1000),
]


def draw(sample, logits, count, *, sequence=0):
    """Many draws from the same logits: positions are all that tells them apart."""
    rows = jnp.broadcast_to(jnp.asarray(logits), (count, len(logits)))
    return np.asarray(jax.jit(sample)(rows, jnp.full(count, sequence), jnp.arange(count)))


def expected(logits, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The probability of each token after the filters, in their order."""
    kept = list(np.argsort(-logits, kind="stable"))[: top_k or None]

    def share(ids, temperature=1.0):
        weights = np.exp((logits[ids] - logits[ids].max()).astype(np.float64) / temperature)
        return weights / weights.sum()

    total, nucleus = 0.0, []
    for id, p in zip(kept, share(kept), strict=True):
        if total < top_p:
            nucleus.append(id)
        total += p
    p = share(nucleus)
    kept = [id for id, one in zip(nucleus, p, strict=True) if one >= min_p * p.max()]
    out = np.zeros(len(logits))
    out[kept] = share(kept, temperature)
    return out


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_come_as_often_as_they_should(filters):
    count = 4000
    sample = make_sampler(seed=3, temperature=1.5, **filters)
    often = np.bincount(draw(sample, LOGITS, count), minlength=V) / count
    wanted = expected(LOGITS, temperature=1.5, **filters)
    assert set(np.flatnonzero(often)) <= set(np.flatnonzero(wanted))
    np.testing.assert_allclose(often, wanted, atol=5 * np.sqrt(0.25 / count))
    assert (often[wanted > 0.02] > 0).all()


def test_the_temperature_comes_last():
    """A high one makes everything likely, and must not let in what the filters left out."""
    filters = dict(top_k=20, top_p=0.8, min_p=0.1)
    allowed = set(np.flatnonzero(expected(LOGITS, temperature=1, **filters)))
    drawn = draw(make_sampler(temperature=100.0, **filters), LOGITS, 2000)
    assert set(drawn) == allowed and len(allowed) > 2


def test_temperature_zero_takes_the_best_whatever_else_is_said():
    sample = make_sampler(temperature=0, seed=5, top_k=3, top_p=0.5, min_p=0.1)
    assert (draw(sample, LOGITS, 4) == LOGITS.argmax()).all()
    tokens = sample(jnp.asarray(LOGITS)[None], jnp.array([0]), jnp.array([0]))
    assert tokens.shape == (1,) and tokens.dtype == jnp.int32


@pytest.mark.parametrize("filters", FILTERS[:6], ids=str)
def test_a_draw_does_not_depend_on_batch_mates(filters):
    sample = jax.jit(make_sampler(seed=11, temperature=0.9, **filters))
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(6, V)), jnp.float32)
    sequences, positions = jnp.arange(6) % 3, jnp.arange(6) + 40
    together = np.asarray(sample(rows, sequences, positions))
    for i in range(6):
        one = sample(rows[i : i + 1], sequences[i : i + 1], positions[i : i + 1])
        assert one[0] == together[i]
    order = np.array([4, 2, 0, 5, 1, 3])
    assert (
        np.asarray(sample(rows[order], sequences[order], positions[order])) == together[order]
    ).all()


@pytest.mark.parametrize("filters", [dict(), dict(top_k=8, top_p=0.9)], ids=str)
def test_seed_sequence_and_position_each_change_the_draws(filters):
    def draws(seed, sequence):
        return draw(
            make_sampler(seed=seed, temperature=2, **filters), LOGITS, 64, sequence=sequence
        )

    base = draws(0, 0)
    assert len(set(base)) > 3  # by position
    assert (draws(0, 0) == base).all()
    assert (draws(1, 0) != base).any() and (draws(0, 1) != base).any()


def test_a_draw_survives_two_close_logits_changing_places():
    """Which they do when rounding differs, as it does between batches of different shapes."""
    near = np.array([1.0, 1.0 + 1e-6, 0.5, 0.2], np.float32)
    swapped = near[[1, 0, 2, 3]]
    sample = make_sampler(seed=2, temperature=1, top_k=3)
    assert (draw(sample, near, 200) == draw(sample, swapped, 200)).mean() > 0.99


def test_other_values_are_the_same_program():
    pick = jax.jit(lambda sample, rows, ids, at: sample(rows, ids, at))
    args = jnp.asarray(LOGITS)[None], jnp.array([0]), jnp.array([0])
    pick(make_sampler(seed=1, temperature=0.5, top_k=7, top_p=0.8, min_p=0.1), *args)
    before = compiles()
    pick(make_sampler(seed=2, temperature=0.9, top_k=7, top_p=0.5, min_p=0.0), *args)
    assert compiles() == before
    pick(make_sampler(seed=2, temperature=0.9, top_k=8), *args)
    assert compiles() > before


def test_the_seed_of_a_greedy_sampler_is_no_program_of_its_own():
    trees = [jax.tree.structure(make_sampler(top_k=k, top_p=p)) for k, p in [(0, 1.0), (4, 0.5)]]
    assert trees[0] == trees[1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(seed=-1), "seed must be a whole number from 0 to 4294967295, got -1"),
        (dict(seed=2**32), "got 4294967296"),
        (dict(temperature=-0.1), "temperature must be a number of at least 0, got -0.1"),
        (dict(temperature=float("nan")), "got nan"),
        (dict(top_k=-1), "top_k must be a whole number of at least 0, got -1"),
        (dict(top_p=0), "top_p must be a number above 0 and at most 1, got 0"),
        (dict(top_p=2), "got 2"),
        (dict(min_p=1.5), "min_p must be a number from 0 to 1, got 1.5"),
    ],
    ids=str,
)
def test_refusals(wrong, message):
    with pytest.raises(ValueError, match=message):
        make_sampler(**wrong)
