"""Picking tokens: what may be drawn, how often, and what a draw depends on."""

import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxkv.loops.drawing import adjusted_by
from jaxkv.loops.sampling import constrained, draw, make_sampler
from jaxkv.loops.thresholds import keep_best

LOGITS = jnp.log(jnp.array([0.4, 0.05, 0.3, 0.15, 0.1]))  # best first: 0, 2, 3, 4, 1


@jax.jit
def pick(sampler, logits, keys, state=()):
    return draw(sampler, sampler.adjust(logits, state), keys)


def keys_of(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


def draws(count=400, **options):
    """Draw many times; returns how often each token came."""
    sampler = make_sampler(**{"temperature": 1.0, **options})
    tokens = pick(sampler, np.broadcast_to(LOGITS, (count, 5)), keys_of(count))
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


@pytest.mark.core
@pytest.mark.parametrize("options", [{"top_k": [1, 3, 0]}, {"top_p": [0.35, 0.86, 1.0]}], ids=str)
def test_each_text_may_have_its_own_numbers(options):
    (name, values), rows = *options.items(), np.broadcast_to(LOGITS, (3, 5))
    sampler = make_sampler(temperature=[1.0, 0.5, 2.0], **options)
    together = sampler.adjust(jnp.asarray(rows), ())
    for i, value in enumerate(values):
        alone = make_sampler(temperature=[1.0, 0.5, 2.0][i], **{name: value})
        np.testing.assert_allclose(together[i], alone.adjust(LOGITS[None], ())[0], rtol=1e-6)
    mixed = make_sampler(temperature=[0.0, 1.0, 0.0])
    assert pick(mixed, rows, keys_of(3)).tolist()[::2] == [0, 0]


@pytest.mark.core
@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    logits=st.lists(
        st.sampled_from([-np.inf, -3.0, -0.0, 0.0, 1e-30, 0.5, 0.5000001, 2.0, 1e30]),
        min_size=7, max_size=7,
    ),
    k=st.integers(1, 9),
    p=st.sampled_from([0.1, 0.5, 0.9, 0.999]),
)  # fmt: skip
def test_the_best_are_those_of_a_sort(logits, k, p):
    """Equal ones are kept together, and a share is that of all that are better or as good."""
    row = np.array(logits, np.float32)
    kept = keep_best(row[None], jnp.ones((1, 7)), jnp.array([float(k)]))[0]
    worst = np.sort(row)[::-1][min(k, 7) - 1]
    np.testing.assert_array_equal(kept, row >= worst)
    if np.isfinite(row).any():
        share = np.asarray(jax.nn.softmax(row), np.float64)
        kept = keep_best(row[None], share[None].astype(np.float32), jnp.array([p]))[0]
        enough = [x for x in row if share[row >= x].sum() >= p - 1e-6]
        np.testing.assert_array_equal(kept, row >= max(enough))


def test_penalties_are_those_of_llama_cpp():
    """Logits of the tokens that came among the last n, of the prompt too."""
    options = dict(repeat_penalty=2.0, frequency_penalty=0.25, presence_penalty=1.0)
    sampler = make_sampler(**options, last_n=4)
    state = jnp.asarray(sampler.start(np.array([[9, 1, 2, 1], [-1, -1, -1, 3]])[:, :]))
    logits = jnp.array([[1.0, 4.0, -2.0, 0.5], [1.0, 4.0, -2.0, 0.5]])
    found = sampler.adjust(logits, state)
    wanted = [[1.0, 4 / 2 - 2 * 0.25 - 1, -2 * 2 - 0.25 - 1, 0.5], [1, 4, -2, 0.5 / 2 - 1.25]]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    for token in (0, 0, 0):  # of the first text 9, 1 and 2 are forgotten
        state = sampler.follow(state, jnp.array([token, token]))
    assert state.tolist() == [[1, 0, 0, 0], [3, 0, 0, 0]]


def test_prompts_shorter_and_longer_than_what_is_recent():
    sampler = make_sampler(presence_penalty=1.0, last_n=3)
    assert sampler.start(np.array([[1], [2]])).tolist() == [[-1, -1, 1], [-1, -1, 2]]
    assert sampler.start(np.arange(5)[None]).tolist() == [[2, 3, 4]]
    assert sampler.start(np.zeros((2, 0), np.int32)).tolist() == [[-1] * 3] * 2


def parity(state):
    return jnp.arange(5) % 2 == state


def other(state, token):
    return 1 - token % 2


def test_a_rule_sees_each_text_alone():
    rule = constrained(make_sampler(), first=1, allowed=parity, advance=other)
    state = rule.start(np.zeros((2, 0), np.int32))
    rows = jnp.broadcast_to(LOGITS, (2, 5))
    assert pick(rule, rows, keys_of(2), state).tolist() == [3, 3]  # the best odd one
    state = rule.follow(state, jnp.array([3, 2]))
    assert pick(rule, rows, keys_of(2), state).tolist() == [0, 3]


def strict(state, token):
    """A matcher on the host: it raises on what is no token."""
    assert 0 <= token < 5
    return np.int32(1 - token % 2)


def asked(state, token):
    shape = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.pure_callback(strict, shape, state, token, vmap_method="sequential")


def odd_or_even(state):
    return np.arange(5) % 2 == state


def masked(state):
    shape = jax.ShapeDtypeStruct((5,), bool)
    return jax.pure_callback(odd_or_even, shape, state, vmap_method="sequential")


def test_a_rule_may_ask_the_host():
    """It is never shown what is no token, and stays where none came."""
    rule = constrained(make_sampler(), first=jnp.int32(1), allowed=masked, advance=asked)
    state = rule.start(np.zeros((2, 0), np.int32))
    rows = jnp.broadcast_to(LOGITS, (2, 5))
    assert pick(rule, rows, keys_of(2), state).tolist() == [3, 3]
    state = rule.follow(state, jnp.array([3, -1]))
    assert pick(rule, rows, keys_of(2), state).tolist() == [0, 3]


def test_where_nothing_is_allowed_nothing_is_drawn():
    for temperature in (0.0, 1.0, [1.0]):
        rule = constrained(
            make_sampler(temperature=temperature, top_p=0.9, min_p=0.1),
            first=7,
            allowed=parity,
            advance=other,
        )
        state = rule.start(np.zeros((1, 0), np.int32))
        assert pick(rule, LOGITS[None], keys_of(1), state).tolist() == [-1]


def test_a_rule_of_another_shape_is_named():
    with pytest.raises(ValueError, match=r"wanted \[V\] bool from allowed, got 'float32\[3\]'"):
        constrained(make_sampler(), first=1, allowed=lambda s: jnp.ones(3), advance=other)
    with pytest.raises(ValueError, match=r"of first from advance, 'int32\[\]', got 'bool\[\]'"):
        constrained(make_sampler(), first=1, allowed=parity, advance=lambda s, token: token > 0)
    with pytest.raises(ValueError, match="at least one array in first"):
        constrained(make_sampler(), first=(), allowed=parity, advance=other)
    rule = constrained(make_sampler(), first=1, allowed=lambda s: s == jnp.arange(3), advance=other)
    with pytest.raises(ValueError, match=r"wanted bool \(5,\) from allowed, got \(3,\)"):
        rule.adjust(LOGITS[None], rule.start(np.zeros((1, 0), np.int32)))


def test_a_new_number_is_no_new_program():
    @jax.jit
    def counted(sampler, logits):
        traces.append(1)
        return sampler.adjust(logits, ())

    traces: list[int] = []
    for temperature, top_p in ((1.0, 0.5), (0.7, 0.9)):
        counted(make_sampler(temperature=temperature, top_p=top_p), LOGITS[None])
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_p", 2.0),
        ("min_p", 1.5),
        ("repeat_penalty", 0.0),
        ("presence_penalty", float("inf")),
        ("temperature", float("inf")),
        ("frequency_penalty", 1e39),  # more than float32 holds
        ("repeat_penalty", 1e39),
        ("top_p", 1e-46),  # less than float32 holds
        ("temperature", [1.0, -1.0]),
        ("top_p", float("nan")),
    ],
)
def test_numbers_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{value}") + "$") as error:
        make_sampler(**{name: value})
    assert f"{name} must be" in str(error.value)


def test_what_is_no_number_of_its_kind_is_refused():
    with pytest.raises(ValueError, match="wanted top_k from 0 to 2147483647, got 4294967297"):
        make_sampler(top_k=2**32 + 1)
    with pytest.raises(ValueError, match="wanted top_k from 0 to 2147483647, got -1"):
        make_sampler(top_k=-1)
    with pytest.raises(TypeError, match="wanted integers for top_k, got float64"):
        make_sampler(top_k=1.5)
    with pytest.raises(TypeError, match="wanted numbers for min_p, got '0.1'"):
        make_sampler(min_p="0.1")
    assert make_sampler(temperature=jnp.bfloat16(0.5)).temperature == 0.5


@pytest.mark.parametrize("temperature", [1.0, 1e38])
def test_what_is_hidden_stays_hidden_at_any_temperature(temperature):
    sampler = make_sampler(temperature=temperature, top_k=2)
    left = jax.jit(lambda sampler: sampler.adjust(LOGITS[None], ()))(sampler)
    wanted = make_sampler(temperature=1.0, top_k=2).adjust(LOGITS[None], ())
    np.testing.assert_array_equal(left == -jnp.inf, wanted == -jnp.inf)
    assert not np.isnan(left).any()


@pytest.mark.core
@pytest.mark.parametrize(("odd", "wanted"), [(jnp.inf, 1), (jnp.nan, -1)])
def test_a_filter_that_is_off_leaves_a_text_alone_whatever_its_logits(odd, wanted):
    """So a text is what it is alone, beside texts with other filters, and what is odd is seen."""
    logits = jnp.array([[0.0, odd, 2.0, 3.0, 1.0]] * 2)
    both = make_sampler(temperature=[0, 1], top_k=[0, 2], top_p=[1, 0.9], min_p=[0, 0.1])
    token = draw(both, adjusted_by(both, logits, ()), keys_of(2))
    alone = draw(make_sampler(), adjusted_by(make_sampler(), logits[:1], ()), keys_of(1))
    assert token[0] == alone[0] == wanted


@pytest.mark.parametrize("make", [make_sampler, jax.jit(lambda **numbers: make_sampler(**numbers))])
def test_numbers_for_other_texts_are_refused(make):
    sampler = make(temperature=jnp.ones(3), top_k=2)
    for texts in (1, 2):
        with pytest.raises(
            ValueError,
            match=re.escape(f"temperature [] or [{texts}], one for each text, got (3,)") + "$",
        ):
            sampler.start(np.zeros((texts, 0), np.int32))
    assert sampler.start(np.zeros((3, 0), np.int32)) == ()


def test_a_sampler_is_made_inside_of_a_program():
    """Numbers that are not known are there, and not checked."""

    @jax.jit
    def adjusted(temperature, k):
        return make_sampler(temperature=temperature, top_k=k).adjust(LOGITS[None], ())

    for temperature, k in ((0.5, 2), (0.0, 0)):
        wanted = make_sampler(temperature=temperature, top_k=k or 5).adjust(LOGITS[None], ())
        if temperature:
            np.testing.assert_allclose(adjusted(temperature, k), wanted, rtol=1e-5)
        else:
            assert np.isfinite(adjusted(temperature, k)).tolist() == [[True] + [False] * 4]
    with pytest.raises(TypeError, match="wanted integers for top_k, got float32"):
        adjusted(0.5, 2.0)
    with pytest.raises(ValueError, match="temperature must be at least 0 and finite, one number"):
        adjusted(jnp.ones((2, 2)), 1)
