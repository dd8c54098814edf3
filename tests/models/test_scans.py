"""The recurrences, against a loop over the tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.ops import scans
from models.families.delta_rule import scan_gated_delta


def rows_of(length, kept):
    """Lengths of rows, the mask of tokens, and the counts of tokens after which states are kept."""
    lengths = np.array([length, max(length - 3, 0), 0])
    counts = np.maximum(lengths[:, None] - kept + np.arange(kept + 1)[None], 0)
    valid = (np.arange(length)[None] < lengths[:, None])[..., None]
    return lengths, valid, counts, np.random.default_rng(0)


@pytest.mark.parametrize(("length", "kept"), [(1, 2), (4, 2), (40, 0), (40, 3)])
def test_scan_ssd_equals_loop_over_tokens(length, kept):
    lengths, valid, counts, rng = rows_of(length, kept)
    heads, size, groups, numbers = 4, 5, 2, 6
    x = rng.normal(size=(3, length, heads, size))
    steps = np.where(valid, np.abs(rng.normal(size=(3, length, heads))), 0)
    rate = -np.abs(rng.normal(size=heads))
    b, c = rng.normal(size=(2, 3, length, groups, numbers))
    state = rng.normal(size=(3, heads, size, numbers))
    arrays = (jnp.asarray(a, jnp.float32) for a in (x, steps, rate, b, c, state))
    out, states = jax.jit(scans.scan_ssd, static_argnames="chunk")(*arrays, counts, chunk=16)
    for r in range(3):
        every, now = [state[r]], state[r]
        for t in range(lengths[r]):
            into, out_of = (np.repeat(y[r, t], heads // groups, axis=0) for y in (b, c))
            added = (steps[r, t][:, None] * x[r, t])[..., None] * into[:, None]
            now = np.exp(steps[r, t] * rate)[:, None, None] * now + added
            np.testing.assert_allclose(out[r, t], np.sum(now * out_of[:, None], -1), atol=3e-5)
            every.append(now)
        np.testing.assert_allclose(states[r], np.stack(every)[counts[r]], atol=3e-5)


@pytest.mark.parametrize(("length", "kept"), [(1, 2), (40, 3)])
def test_scan_gated_delta_equals_loop_over_tokens(length, kept):
    lengths, valid, counts, rng = rows_of(length, kept)
    heads, size, groups, numbers = 4, 5, 2, 6
    q, k = rng.normal(size=(2, 3, length, groups, numbers)) * numbers**-0.5
    v = rng.normal(size=(3, length, heads, size))
    log_decay = np.where(valid, -np.abs(rng.normal(size=(3, length, heads))), 0)
    beta = np.where(valid, rng.uniform(size=(3, length, heads)), 0)
    state = rng.normal(size=(3, heads, numbers, size))
    arrays = (jnp.asarray(a, jnp.float32) for a in (q, k, v, log_decay, beta, state))
    out, states = jax.jit(scan_gated_delta, static_argnames="chunk")(*arrays, counts, chunk=16)
    for r in range(3):
        every, now = [state[r]], state[r]
        for t in range(lengths[r]):
            query, key = (np.repeat(y[r, t], heads // groups, axis=0)[..., None] for y in (q, k))
            now = np.exp(log_decay[r, t])[:, None, None] * now
            missing = v[r, t] - np.sum(key * now, 1)
            now = now + key * (beta[r, t][:, None] * missing)[:, None]
            np.testing.assert_allclose(out[r, t], np.sum(query * now, 1), atol=3e-5)
            every.append(now)
        np.testing.assert_allclose(states[r], np.stack(every)[counts[r]], atol=3e-5)


def test_scan_ssd_kept_states_cost_no_temporaries():
    length, heads, size, numbers = 256, 2, 16, 32
    shapes = [(1, length, heads, size), (1, length, heads), (heads,)]
    shapes += [(1, length, 1, numbers)] * 2 + [(1, heads, size, numbers)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    bytes_ = []
    for kept in (0, 4):
        counts = jax.ShapeDtypeStruct((1, kept + 1), jnp.int32)
        compiled = jax.jit(scans.scan_ssd).lower(*arrays, counts).compile()
        bytes_.append(compiled.memory_analysis().temp_size_in_bytes)
    state = 4 * heads * size * numbers
    assert bytes_[1] - bytes_[0] < 16 * state < length * state / 8


@pytest.mark.parametrize(("length", "kept"), [(1, 2), (20, 3)])
def test_scan_diagonal_and_convolve_equal_loop(length, kept):
    lengths, valid, counts, rng = rows_of(length, kept)
    x = np.where(valid, rng.normal(size=(3, length, 4)), 0).astype(np.float32)
    decay = np.where(valid, rng.uniform(size=(3, length, 4)), 1).astype(np.float32)
    state, weight = rng.normal(size=(2, 3, 4)).astype(np.float32)
    tail, bias = rng.normal(size=(3, 2, 4)).astype(np.float32), np.ones(4, np.float32)
    out, states = jax.jit(scans.scan_diagonal)(decay, x, state, counts)
    mixed, tails = jax.jit(scans.convolve)(x, tail, weight, bias, counts)
    for r in range(3):
        every, now = [state[r]], state[r]
        inputs = np.concatenate([tail[r], x[r]])
        for t in range(lengths[r]):
            now = decay[r, t] * now + x[r, t]
            every.append(now)
            np.testing.assert_allclose(out[r, t], now, atol=1e-5)
            wanted = (inputs[t : t + 3] * weight).sum(0) + bias
            np.testing.assert_allclose(mixed[r, t], wanted, atol=1e-5)
        np.testing.assert_allclose(states[r], np.stack(every)[counts[r]], atol=1e-5)
        for i, count in enumerate(counts[r]):
            np.testing.assert_array_equal(tails[r, i], inputs[count : count + 2])
