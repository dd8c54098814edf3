"""Picking tokens: what may be drawn, how often, and what a draw depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sampling import make_sampler

LOGITS = jnp.log(jnp.array([0.4, 0.05, 0.3, 0.15, 0.1]))  # best first: 0, 2, 3, 4, 1


def draws(count=400, **options):
    """Draw at many positions; returns how often each token came."""
    sampler = make_sampler(**{"temperature": 1.0, **options})
    rows = jnp.broadcast_to(LOGITS, (count, 5))
    tokens = sampler(rows, jnp.zeros(count, jnp.int32), jnp.arange(count))
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
    logits = jax.random.normal(jax.random.key(0), (4, 50))
    sequences, positions = jnp.array([5, 1, 0, 2]), jnp.array([9, 9, 30, 7])
    together = sampler(logits, sequences, positions)
    for i in (3, 1, 0, 2):
        one = slice(i, i + 1)
        assert sampler(logits[one], sequences[one], positions[one])[0] == together[i]

    same = jnp.broadcast_to(logits[:1], (200, 50))
    zeros, many = jnp.zeros(200, jnp.int32), jnp.arange(200)
    assert len(set(sampler(same, zeros, many).tolist())) > 10
    assert len(set(sampler(same, many, zeros).tolist())) > 10
    other = make_sampler(seed=4, temperature=1.5)
    assert (other(same, zeros, many) != sampler(same, zeros, many)).any()


def test_a_new_seed_or_temperature_is_no_new_program():
    @jax.jit
    def pick(sampler, logits):
        traces.append(1)
        return sampler(logits, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))

    traces: list[int] = []
    for seed, temperature in ((0, 1.0), (1, 1.0), (1, 0.7)):
        pick(make_sampler(seed=seed, temperature=temperature), LOGITS[None])
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 2.0), ("min_p", 1.5)],
)
def test_numbers_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        make_sampler(**{name: value})
