"""`attend` equals `write_kv`, `read_kv`, and attention over the result."""

from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.hybrid import compose_hybrid_cache
from jaxkv.kv.shards import Shard
from jaxkv.ops.storage.cell_arrays import gather, scatter
from tests.attention.lives import CLOSE, by_formula, draw_qkv, make_edited, start_step
from tests.helpers import caches, edit_sequences
from tests.helpers.caches import (
    HEADS,
    LATENT,
    LAYERS,
    SMALL,
    STACKED,
    assert_identical,
    delete_copy,
)
from tests.helpers.mistakes import assert_raises, mistakes
from tests.helpers.parametrize import mark_cases

pytestmark = pytest.mark.core

KINDS = [kind for kind in [*caches.ALL_KINDS, LATENT] if len(kind.windows) == 1]


CASES = [*product(KINDS, [True]), (SMALL, False), (caches.GROUPS_STRIPES, False)]
FEW = [*product((SMALL, caches.TILES, STACKED, LATENT), [True]), CASES[-1]]


@pytest.mark.parametrize(("kind", "causal"), mark_cases(CASES, FEW), ids=str)
def test_attend_is_write_view_and_formula(kind, causal):
    step = start_step(make_edited(kind))
    for layer in range(LAYERS):
        q, k, v = draw_qkv(step, layer)
        v = None if kind.latent else v
        look = {} if causal else {"causal": False}
        after, wanted = jaxkv.attend(step, layer, q, k, v, causal=causal)
        step = jaxkv.write_kv(step, layer, k, v)
        assert_identical(step, after)
        np.testing.assert_allclose(by_formula(step, layer, q, **look), wanted, **CLOSE)
        looked, out = jaxkv.attend(step, layer, q, causal=causal)
        assert_identical(looked, step)  # no write
        np.testing.assert_allclose(out, wanted, **CLOSE)


def test_attend_traced_or_array_scale_is_like_number():
    step = start_step(make_edited(SMALL))
    attend = partial(jaxkv.attend, step, 0, *draw_qkv(step, 0))
    _, wanted = attend(scale=0.3)
    for found in (attend(scale=jnp.array(0.3)), jax.jit(lambda x: attend(scale=x))(0.3)):
        np.testing.assert_allclose(found[1], wanted, **CLOSE)


def test_write_and_view_stale_ubatch_writes_nothing_and_sees_nan():
    cache = make_edited(SMALL)
    plan = jaxkv.init_batch(cache, jaxkv.make_batch([1, 2], sequences=0)).check()
    edited, _ = jaxkv.seq_rm(cache, 0, 0, 1)
    step = jaxkv.apply(edited, plan)
    q, k, v = draw_qkv(step)
    for layer in range(LAYERS):
        step = jaxkv.write_kv(step, layer, k, v)
        assert np.isnan(jaxkv.read_kv(step, layer).k).all()
        assert np.isnan(jaxkv.attend(step, layer, q)[1][np.asarray(step.valid)]).all()
    assert_identical(step.cache, edited)


def test_write_and_view_find_part_of_hybrid_cache():
    states = edit_sequences.make(layers=1)
    cache = compose_hybrid_cache((states, [0]), (SMALL.make(), [1, 2]))
    step = start_step(cache, [1])
    q, k, v = draw_qkv(step)
    step = jaxkv.write_kv(step, 1, k, v)
    out = jaxkv.attend(step, 1, q)[1]
    np.testing.assert_allclose(by_formula(step, 1, q), out, **CLOSE)
    with pytest.raises(ValueError, match="layer"):
        jaxkv.read_kv(step, 0)
    for call in (partial(jaxkv.write_kv, k=k, v=v), jaxkv.read_kv):
        with pytest.raises(TypeError, match="expected a cache with attention layers"):
            call(start_step(states, [1]), 0)


# ---------------------------------------------------------------------------------------- arrays

S, N, D = 3, 40, 4
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")


@pytest.mark.parametrize("dtype", mark_cases(DTYPES, ["bfloat16", "float32"]))
def test_scatter_gather_and_copy_run_move_bits(dtype):
    rng = np.random.default_rng(0)
    array, many = (jnp.asarray(rng.normal(size=(S, HEADS, N, D)), dtype) for _ in range(2))
    for streams, slots in (
        ([2], [5]),  # a single key for each head
        ([0, 2, 2, 1], [39, 0, N, N + 1]),  # two of these are outside
        ([[0], [2]], [[1, 4], [1, 1 << 30]]),  # rows of tokens, a stream each
    ):
        where = jnp.asarray(streams), jnp.asarray(slots)
        keys, wanted = many[0, 0, : where[1].size * HEADS], np.array(array)
        keys = keys.reshape(*where[1].shape, HEADS, D)
        for place, slot in np.ndenumerate(slots):
            if slot < N:
                wanted[np.broadcast_to(streams, np.shape(slots))[place], :, slot] = keys[place]
        got = jax.jit(scatter)(array, *where, keys)
        assert_identical(got, jnp.asarray(wanted))
        found = jax.jit(gather)(got, *where)
        assert_identical(found, jnp.where((where[1] < N)[..., None, None], keys, 0))
    run = jax.jit(partial(Shard().copy_run, size=9))
    src, dst, first, end = map(jnp.int32, (2, 0, 7, 16))
    wanted = array.at[0, :, 7:16].set(array[2, :, 7:16])
    assert_identical(run(array, src, dst, first, end=end), wanted)


def test_scatter_single_key_of_single_head():
    array, move = jnp.zeros((1, 1, N, D)), jax.jit(scatter)
    for slot, wanted in ((6, array.at[0, 0, 6].set(1.0)), (N, array)):
        got = move(array, jnp.array([[0]]), jnp.array([[slot]]), jnp.ones((1, 1, 1, D)))
        assert_identical(got, wanted)


def attend_layer(cache, layer):
    """Attend in a layer given as an integer, or traced."""
    step = start_step(cache)
    attend = jaxkv.attend if type(layer) is int else jax.jit(jaxkv.attend)
    return attend(step, layer, *draw_qkv(step))[1]


def test_write_and_view_bad_arguments_raise():
    step = start_step(make_edited(SMALL))
    gone = replace(step, buffers=delete_copy(step.buffers))
    names = dict(zip("qkv", draw_qkv(step), strict=True), step=step, gone=gone)
    for call, outcome in mistakes("layers"):
        assert_raises(call, outcome, globals() | names)
    assert np.isfinite(attend_layer(STACKED.make(), 1)).all()  # a static layer


def test_stacked_cache_takes_traced_layer():
    """An index outside of the layers writes nothing and reads NaN."""
    step = start_step(make_edited(STACKED))
    q, k, v = draw_qkv(step)

    @jax.jit
    def of_layer(step, layer):
        step = jaxkv.write_kv(step, layer, k, v)
        return step, jaxkv.read_kv(step, layer), jaxkv.attend(step, layer, q)[1]

    _, view, out = of_layer(step, 1)
    assert_identical(view, jaxkv.read_kv(jaxkv.write_kv(step, 1, k, v), 1))
    assert np.isfinite(out).all()
    for layer in (LAYERS, -1, 2**31 - 1, -(2**31)):
        after, _, out = of_layer(step, layer)
        assert_identical(after, step)
        assert np.isnan(out[np.asarray(step.valid)]).all()
    look = partial(jaxkv.attend, step, q=q, k=k, v=v)
    _, together = jax.vmap(look)(jnp.arange(LAYERS))
    for layer in range(LAYERS):
        np.testing.assert_allclose(together[layer], look(layer)[1], **CLOSE)
