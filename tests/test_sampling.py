"""Picking tokens: what may be drawn, how often, and what a draw depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.loops.sampling import make_sampler

LOGITS = jnp.log(jnp.array([0.4, 0.05, 0.3, 0.15, 0.1]))  # best first: 0, 2, 3, 4, 1


@jax.jit
def pick(sampler, logits, sequences, positions):
    return sampler(logits, sequences, positions)


def draws(count=400, **options):
    """Draw at many positions; returns how often each token came."""
    sampler = make_sampler(**{"temperature": 1.0, **options})
    rows = np.broadcast_to(LOGITS, (count, 5))
    tokens = pick(sampler, rows, np.zeros(count, np.int32), np.arange(count, dtype=np.int32))
    return np.bincount(tokens, minlength=5)


def test_temperature_zero_picks_the_best():
    assert draws(temperature=0.0).tolist() == [400, 0, 0, 0, 0]


def test_draws_follow_the_probabilities():
    share = draws(count=20000) / 20000
    np.testing.assert_allclose(share, jnp.exp(LOGITS), atol=0.015)


def test_temperature_sharpens_and_flattens():
    assert draws(temperature=0.3)[0] > draws()[0] > draws(temperature=3.0)[0]


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 2, 3}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.35}, {0}),  # the best alone has enough
        ({"top_p": 0.6}, {0, 2}),
        ({"top_p": 0.86}, {0, 2, 3, 4}),
        ({"min_p": 0.5}, {0, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 2, "top_p": 0.5}, {0}),  # of 0.4 and 0.3 the best has more than half
        ({"top_k": 3, "min_p": 0.3, "temperature": 5.0}, {0, 2, 3}),
    ],
    ids=str,
)
def test_filters_leave_exactly(options, allowed):
    assert set(np.flatnonzero(draws(**options))) == allowed


def test_a_draw_depends_on_the_seed_the_sequence_and_the_position_alone():
    sampler = make_sampler(seed=3, temperature=1.5)
    logits = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
    sequences, positions = np.array([5, 1, 0, 2], np.int32), np.array([9, 9, 30, 7], np.int32)
    together = pick(sampler, logits, sequences, positions)
    for i in (3, 1, 0, 2):
        one = slice(i, i + 1)
        assert pick(sampler, logits[one], sequences[one], positions[one])[0] == together[i]

    same = np.broadcast_to(logits[:1], (200, 50))
    zeros, many = np.zeros(200, np.int32), np.arange(200, dtype=np.int32)
    assert len(set(pick(sampler, same, zeros, many).tolist())) > 10
    assert len(set(pick(sampler, same, many, zeros).tolist())) > 10
    other = make_sampler(seed=4, temperature=1.5)
    found = [np.asarray(pick(one, same, zeros, many)) for one in (sampler, other)]
    assert (found[0] != found[1]).any()


def test_a_new_seed_or_temperature_is_no_new_program():
    @jax.jit
    def counted(sampler, logits):
        traces.append(1)
        return sampler(logits, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))

    traces: list[int] = []
    for seed, temperature in ((0, 1.0), (1, 1.0), (1, 0.7)):
        counted(make_sampler(seed=seed, temperature=temperature), LOGITS[None])
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 2.0), ("min_p", 1.5)],
)
def test_numbers_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        make_sampler(**{name: value})
