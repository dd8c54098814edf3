"""Sampling: allowed tokens, their frequencies, and the inputs of a draw."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxkv.generation import Constraint
from jaxkv.generation.filters import OPTIONS, is_among_best, make_sampler
from jaxkv.generation.sampler import adjust_logits, sample_tokens
from tests.generation.tiny import allow_parity, flip_parity

pytestmark = pytest.mark.core

LOGITS = jnp.log(jnp.array([0.4, 0.05, 0.3, 0.15, 0.1]))  # best first: 0, 2, 3, 4, 1
NONE = np.zeros((2, 0), np.int32)
ALLOWED = [
    ({"top_k": 1}, {0}),
    ({"top_k": 3}, {0, 2, 3}),
    ({"top_k": 99}, {0, 1, 2, 3, 4}),
    ({"top_p": 0.35}, {0}),  # the best suffices
    ({"top_p": 0.6}, {0, 2}),
    ({"top_p": 0.86}, {0, 2, 3, 4}),
    ({"min_p": 0.5}, {0, 2}),
    ({"min_p": 1.0}, {0}),
    ({"top_k": 2, "top_p": 0.5}, {0}),  # of 0.4 and 0.3 the best has more than half
    ({"top_k": 3, "min_p": 0.3, "temperature": 5.0}, {0, 2, 3}),
]


@jax.jit
def draw_tokens(sampler, logits, keys, state=()):
    return sample_tokens(sampler, sampler.adjust(logits, state), keys)


def keys_of(count):
    return jax.random.split(jax.random.key(0), count)


@jax.jit
def count_draws(numbers):
    """Count the tokens of 20,000 draws. All filters run: their numbers are traced."""
    sampler = make_sampler(**numbers)
    logits = jnp.broadcast_to(LOGITS, (20_000, 5))
    state = sampler.init(np.zeros((20_000, 0), np.int32))
    drawn = sample_tokens(sampler, sampler.adjust(logits, state), keys_of(20_000))
    return jnp.bincount(drawn, length=5)


def draw_shares(**options):
    numbers = {"temperature": 1.0, **options}
    numbers = {name: one.dtype(numbers.get(name, one.neutral)) for name, one in OPTIONS.items()}
    return np.asarray(count_draws(numbers)) / 20_000


def test_draws_have_probabilities_at_any_temperature():
    assert draw_shares(temperature=0.0).tolist() == [1, 0, 0, 0, 0]
    for temperature in (1.0, 0.3, 3.0):
        wanted = jax.nn.softmax(LOGITS / temperature)
        np.testing.assert_allclose(draw_shares(temperature=temperature), wanted, atol=0.015)


def test_filters_leave_exactly():
    for options, allowed in ALLOWED:
        assert set(np.flatnonzero(draw_shares(**options))) == allowed, options


def test_filters_each_text_has_its_own_numbers():
    rows = np.broadcast_to(LOGITS, (3, 5))
    options = dict(temperature=[1.0, 0.5, 2.0], top_k=[1, 3, 0], top_p=[1.0, 0.86, 0.5])
    together = make_sampler(**options).adjust(jnp.asarray(rows), ())
    for i in range(3):
        alone = make_sampler(**{name: values[i] for name, values in options.items()})
        np.testing.assert_allclose(together[i], alone.adjust(LOGITS[None], ())[0], rtol=1e-6)
    mixed = make_sampler(temperature=[0.0, 1.0, 0.0])
    assert draw_tokens(mixed, rows, keys_of(3)).tolist()[::2] == [0, 0]


@given(
    logits=st.lists(
        st.sampled_from([-np.inf, -3.0, -0.0, 0.0, 1e-30, 0.5, 0.5000001, 2.0, 1e30]),
        min_size=7, max_size=7,
    ),
    k=st.integers(1, 9),
    p=st.sampled_from([0.1, 0.5, 0.9, 0.999]),
)  # fmt: skip
def test_keep_best_matches_sort(logits, k, p):
    """Equal logits are kept together; a share is the sum of all better or equal ones."""
    row = np.array(logits, np.float32)
    kept = is_among_best(row[None], jnp.ones((1, 7)), jnp.array([float(k)]))[0]
    worst = np.sort(row)[::-1][min(k, 7) - 1]
    np.testing.assert_array_equal(kept, row >= worst)
    if np.isfinite(row).any():
        share = np.asarray(jax.nn.softmax(row), np.float64)
        kept = is_among_best(row[None], share[None].astype(np.float32), jnp.array([p]))[0]
        enough = [x for x in row if share[row >= x].sum() >= p - 1e-6]
        np.testing.assert_array_equal(kept, row >= max(enough))


def test_penalties_are_those_of_llama_cpp():
    options = dict(repeat_penalty=2.0, frequency_penalty=0.25, presence_penalty=1.0)
    sampler = make_sampler(**options, penalty_last_n=4)
    state = jnp.asarray(sampler.init(np.array([[9, 1, 2, 1], [-1, -1, -1, 3]])))
    found = sampler.adjust(jnp.array([[1.0, 4.0, -2.0, 0.5]] * 2), state)
    wanted = [[1.0, 4 / 2 - 2 * 0.25 - 1, -2 * 2 - 0.25 - 1, 0.5], [1, 4, -2, 0.5 / 2 - 1.25]]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    for token in (0, 0, 0):  # 9, 1 and 2 leave the first text's range
        state = sampler.update(state, jnp.array([token, token]))
    assert state.tolist() == [[1, 0, 0, 0], [3, 0, 0, 0]]


def test_sampler_reads_bfloat16_and_starts_with_ends_of_prompts():
    assert make_sampler(temperature=jnp.bfloat16(0.5)).temperature == 0.5
    sampler = make_sampler(presence_penalty=1.0, penalty_last_n=3)
    assert sampler.init(np.array([[1], [2]])).tolist() == [[-1, -1, 1], [-1, -1, 2]]
    assert sampler.init(np.arange(5)[None]).tolist() == [[2, 3, 4]]
    assert sampler.init(NONE).tolist() == [[-1] * 3] * 2


def test_filters_hide_at_any_temperature():
    sampler = make_sampler(temperature=1e38, top_k=2)
    left = jax.jit(lambda sampler: sampler.adjust(LOGITS[None], ()))(sampler)
    assert np.isneginf(left).tolist() == [[False, True, False, True, True]]
    assert not np.isnan(left).any()


def test_make_sampler_of_the_ends_of_ranges():
    sampler = make_sampler(min_p=1, top_p=1, top_k=0)
    assert (sampler.min_p, sampler.top_p, sampler.top_k) == (1, None, None)


def test_temperature_of_zero_for_one_text_divides_by_no_zero():
    sampler = make_sampler(temperature=[0, 1])
    with jax.debug_nans(True):
        sampler.adjust(jnp.stack([LOGITS, LOGITS]), ())


@pytest.mark.parametrize("odd", [jnp.inf, jnp.nan])
def test_filters_turned_off_for_one_text_leave_it_alone(odd):
    logits = jnp.array([[0.0, odd, 2.0, 3.0, 1.0]] * 2)
    both = make_sampler(temperature=[0, 1], top_k=[0, 2], top_p=[1, 0.9], min_p=[0, 0.1])
    adjusted = adjust_logits(both, logits, ())
    assert np.isnan(adjusted[0]).all()  # and not -inf, as a filter would leave
    token = sample_tokens(both, adjusted, keys_of(2))
    alone = sample_tokens(make_sampler(), adjust_logits(make_sampler(), logits[:1], ()), keys_of(1))
    assert token[0] == alone[0] == -1


def call_on_host(answer, shape, dtype):
    shape = jax.ShapeDtypeStruct(shape, dtype)
    return lambda *args: jax.pure_callback(answer, shape, *args, vmap_method="sequential")


def advance_checked(state, token):
    assert 0 <= token < 5
    return np.int32(1 - token % 2)


PARITY_ON_HOST = call_on_host(lambda state: np.arange(5) % 2 == state, (5,), bool)
RULES = [
    (allow_parity, flip_parity),
    (PARITY_ON_HOST, call_on_host(advance_checked, (), jnp.int32)),
]


def test_constrained_sees_each_text_alone():
    """Its `advance` gets no invalid token; without one the state is unchanged."""
    rows = jnp.broadcast_to(LOGITS, (2, 5))
    for allowed, advance in RULES:
        rule = Constraint(first=jnp.int32(1), allowed=allowed, advance=advance)
        rule = rule.constrain(make_sampler())
        state = rule.init(NONE)
        assert draw_tokens(rule, rows, keys_of(2), state).tolist() == [3, 3]  # the best odd one
        state = rule.update(state, jnp.array([3, -1]))
        assert draw_tokens(rule, rows, keys_of(2), state).tolist() == [0, 3]
    for temperature in (0.0, 1.0):  # no token is allowed
        sampler = make_sampler(temperature=temperature, top_p=0.9, min_p=0.1)
        rule = Constraint(first=7, allowed=allow_parity, advance=flip_parity).constrain(sampler)
        assert draw_tokens(rule, rows, keys_of(2), rule.init(NONE)).tolist() == [-1, -1]
