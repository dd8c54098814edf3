"""`attend` equals `write_kv`, `read_kv`, and attention over the result."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.cache import merge
from jaxkv.core.partitioning import WHOLE
from jaxkv.hybrid import compose_hybrid_cache
from jaxkv.kv.buffers import copy_cell_run, gather, scatter
from tests.attention.lives import CLOSE, applied, arrays_for, lived_in, seen
from tests.helpers import caches, edit_sequences
from tests.helpers.caches import HEADS, LATENT, LAYERS, SMALL, STACKED, assert_identical, lost
from tests.helpers.mistakes import assert_raises, mistakes
from tests.helpers.parametrize import in_lanes

pytestmark = pytest.mark.core

KINDS = [kind for kind in [*caches.ALL_KINDS, LATENT] if len(kind.windows) == 1]


CASES = [*product(KINDS, [True]), (SMALL, False), (caches.GROUPS_STRIPES, False)]
FEW = [*product((SMALL, caches.TILES, STACKED, LATENT), [True]), CASES[-1]]


@pytest.mark.parametrize(("kind", "causal"), in_lanes(CASES, FEW), ids=str)
def test_attend_is_write_view_and_formula(kind, causal):
    cache, ubatch = applied(lived_in(kind))
    for layer in range(LAYERS):
        q, k, v = arrays_for(ubatch, layer)
        v = None if kind.latent else v
        look = {} if causal else {"causal": False}
        after, wanted = jaxkv.attend(cache, layer, ubatch, q, k, v, causal=causal)
        cache = jaxkv.write_kv(cache, layer, ubatch, k, v)
        assert_identical(cache, after)
        np.testing.assert_allclose(seen(cache, layer, ubatch, q, **look), wanted, **CLOSE)
        looked, out = jaxkv.attend(cache, layer, ubatch, q, causal=causal)
        assert_identical(looked, cache)  # no write
        np.testing.assert_allclose(out, wanted, **CLOSE)


def test_attend_traced_or_array_scale_is_like_number():
    cache, ubatch = applied(lived_in(SMALL))
    attend = partial(jaxkv.attend, cache, 0, ubatch, *arrays_for(ubatch, 0))
    _, wanted = attend(scale=0.3)
    for found in (attend(scale=jnp.array(0.3)), jax.jit(lambda x: attend(scale=x))(0.3)):
        np.testing.assert_allclose(found[1], wanted, **CLOSE)


def test_write_and_view_stale_ubatch_writes_nothing_and_sees_nan():
    cache, ubatch = applied(lived_in(SMALL), sequences=[0])
    q, k, v = arrays_for(ubatch)
    edited, _ = jaxkv.seq_rm(cache, 0, 0, 1)
    assert_identical(jaxkv.write_kv(edited, 0, ubatch, k, v), edited)
    assert np.isnan(jaxkv.read_kv(edited, 0, ubatch).k).all()
    assert np.isnan(jaxkv.attend(edited, 0, ubatch, q)[1][np.asarray(ubatch.valid)]).all()


def test_write_and_view_find_part_of_hybrid_cache():
    states = edit_sequences.make(layers=1)
    cache = compose_hybrid_cache((states, [0]), (SMALL.make(), [1, 2]))
    cache, ubatch = applied(cache, [1])
    q, k, v = arrays_for(ubatch)
    cache = jaxkv.write_kv(cache, 1, ubatch, k, v)
    out = jaxkv.attend(cache, 1, ubatch, q)[1]
    np.testing.assert_allclose(seen(cache, 1, ubatch, q), out, **CLOSE)
    with pytest.raises(ValueError, match="layer"):
        jaxkv.read_kv(cache, 0, ubatch)
    states, ubatch = applied(states, [1])
    for call in (partial(jaxkv.write_kv, k=k, v=v), jaxkv.read_kv):
        with pytest.raises(TypeError, match="expected a cache with attention layers"):
            call(states, 0, ubatch)


# ---------------------------------------------------------------------------------------- arrays

S, N, D = 3, 40, 4
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")


@pytest.mark.parametrize("dtype", in_lanes(DTYPES, ["bfloat16", "float32"]))
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
    run = jax.jit(partial(copy_cell_run, WHOLE, size=9))
    src, dst, first, end = map(jnp.int32, (2, 0, 7, 16))
    wanted = array.at[0, :, 7:16].set(array[2, :, 7:16])
    assert_identical(run(array, src, dst, first, end=end), wanted)


def test_scatter_single_key_of_single_head():
    array, move = jnp.zeros((1, 1, N, D)), jax.jit(scatter)
    for slot, wanted in ((6, array.at[0, 0, 6].set(1.0)), (N, array)):
        got = move(array, jnp.array([[0]]), jnp.array([[slot]]), jnp.ones((1, 1, 1, D)))
        assert_identical(got, wanted)


def look(cache, layer):
    """Attend in a layer given as an integer, or traced."""
    cache, ubatch = applied(cache)
    attend = jaxkv.attend if type(layer) is int else jax.jit(jaxkv.attend)
    return attend(cache, layer, ubatch, *arrays_for(ubatch))[1]


def test_write_and_view_bad_arguments_raise():
    cache, ubatch = applied(lived_in(SMALL))
    gone = merge(cache.table, lost(cache.buffers))
    names = dict(zip("qkv", arrays_for(ubatch), strict=True), m=cache, u=ubatch, gone=gone)
    for call, outcome in mistakes("layers"):
        assert_raises(call, outcome, globals() | names)
    assert np.isfinite(look(STACKED.make(), 1)).all()  # a static layer


def test_stacked_cache_takes_traced_layer():
    """An index outside of the layers writes nothing and reads NaN."""
    cache, ubatch = applied(lived_in(STACKED))
    q, k, v = arrays_for(ubatch)

    @jax.jit
    def of_layer(cache, layer):
        cache = jaxkv.write_kv(cache, layer, ubatch, k, v)
        return cache, jaxkv.read_kv(cache, layer, ubatch), jaxkv.attend(cache, layer, ubatch, q)[1]

    _, view, out = of_layer(cache, 1)
    assert_identical(view, jaxkv.read_kv(jaxkv.write_kv(cache, 1, ubatch, k, v), 1, ubatch))
    assert np.isfinite(out).all()
    for layer in (LAYERS, -1, 2**31 - 1, -(2**31)):
        after, _, out = of_layer(cache, layer)
        assert_identical(after, cache)
        assert np.isnan(out[np.asarray(ubatch.valid)]).all()
    look = partial(jaxkv.attend, cache, ubatch=ubatch, q=q)
    _, together = jax.vmap(look)(jnp.arange(LAYERS))
    for layer in range(LAYERS):
        np.testing.assert_allclose(together[layer], look(layer)[1], **CLOSE)
