"""Keys and values as they are stored: always finite, and moved bit for bit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.kv.buffers import copy_run, gather, scatter
from jaxkv.mesh import WHOLE

S, K, N, D = 3, 2, 40, 4
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn]
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: jnp.dtype(x).name)


def numbers(shape, dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def assert_bits(one, other):
    one, other = (np.asarray(x) for x in (one, other))
    np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


@over_dtypes
@pytest.mark.parametrize(("streams", "slots"), [
    ([2], [5]),  # a single key for each head
    ([0, 2, 2], [39, 0, 7]),
    ([1, 1, 0], [N, 3, N + 1]),  # of which two go nowhere
    ([[0], [2]], [[1, 4], [1, 1 << 30]]),  # rows of tokens, a stream each
])  # fmt: skip
def test_keys_are_written_and_read_where_they_belong(streams, slots, dtype):
    streams, slots = np.array(streams), np.array(slots)
    array, keys = numbers((S, K, N, D), dtype), numbers((*slots.shape, K, D), dtype, 1)
    wanted = np.array(array)
    for (where, slot), stream in zip(
        np.ndenumerate(slots), np.broadcast_to(streams, slots.shape).flat, strict=True
    ):
        if slot < N:
            wanted[stream, :, slot] = np.asarray(keys)[where]
    got = jax.jit(scatter)(array, jnp.asarray(streams), jnp.asarray(slots), keys)
    assert_bits(got, wanted)
    read = jax.jit(gather)(got, jnp.asarray(streams), jnp.asarray(slots))
    assert_bits(read, jnp.where((slots < N)[..., None, None], keys, 0))


def test_a_single_key_of_a_single_head_is_written():
    array = jnp.zeros((1, 1, N, D))
    got = jax.jit(scatter)(array, jnp.array([[0]]), jnp.array([[6]]), jnp.ones((1, 1, 1, D)))
    assert_bits(got, array.at[0, 0, 6].set(1.0))
    none = jax.jit(scatter)(array, jnp.array([[0]]), jnp.array([[N]]), jnp.ones((1, 1, 1, D)))
    assert_bits(none, array)


@over_dtypes
def test_a_run_of_cells_is_copied_to_another_stream(dtype):
    array = numbers((S, K, N, D), dtype)
    run = partial(copy_run, WHOLE, size=9)
    src, dst, first, end = map(jnp.int32, (2, 0, 7, 16))
    got = jax.jit(run)(array, src, dst, first, end=end)
    assert_bits(got, array.at[0, :, 7:16].set(array[2, :, 7:16]))


# ---------------------------------------------------------------------- what is not a finite number


def attended(k, v, *, dtype=jnp.float32, implementation=None):
    """Two sequences of three tokens in a pool, the second of which is broken in head 1."""
    memory = jaxkv.make_kv_cache(
        layers=1, cells=8, kv_heads=K, head_dim=D, sequences=2, dtype=dtype
    )
    plan = jaxkv.init_batch(memory, jaxkv.make_batch([[1, 2, 3], [4, 5, 6]]))
    (ubatch,) = plan.ubatches
    shape = ubatch.valid.shape
    q, *kv = (numbers((*shape, heads, D), jnp.float32, i) for i, heads in enumerate((2 * K, K, K)))
    index = (0, 4, 1, 2)  # the second token of sequence 1, head 1
    kv = [x.at[index].set(bad) if bad is not None else x for x, bad in zip(kv, (k, v), strict=True)]
    memory, out = jaxkv.attend(
        jaxkv.apply(memory, plan), 0, ubatch, q, *kv, implementation=implementation
    )
    return memory.buffers, np.asarray(out)[0]


@pytest.mark.parametrize("half", ["k", "v"])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [(np.nan, jnp.float32), (np.inf, jnp.float32), (-np.inf, jnp.bfloat16), (7e4, jnp.float16)],
)
def test_a_head_that_is_not_finite_is_stored_as_a_key_that_says_so(half, value, dtype):
    """Also where it is finite itself, but not in the dtype of the buffers."""
    bad = {"k": None, "v": None, half: value}
    clean, _ = attended(None, None, dtype=dtype)
    buffers, _ = attended(**bad, dtype=dtype)
    k, v = (np.array(x[0], np.float32) for x in (buffers.k, buffers.v))
    assert np.isnan(k[0, 1, 4]).all() and (v[0, 1, 4] == 0).all()
    k[0, 1, 4], v[0, 1, 4] = clean.k[0][0, 1, 4], clean.v[0][0, 1, 4]
    np.testing.assert_array_equal(k, np.asarray(clean.k[0], np.float32))
    np.testing.assert_array_equal(v, np.asarray(clean.v[0], np.float32))


@pytest.mark.parametrize("half", ["k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("implementation", [None, "tiles", "whole", "xla"])
def test_it_shows_in_the_tokens_that_see_it_and_in_no_other(half, value, implementation):
    _, clean = attended(None, None, implementation=implementation)
    _, out = attended(**{"k": None, "v": None, half: value}, implementation=implementation)
    assert np.isnan(out[4:6, 2:]).all()  # the broken token and the next, query heads of head 1
    out = np.array(out)
    out[4:6, 2:] = clean[4:6, 2:]
    np.testing.assert_array_equal(out, clean)
