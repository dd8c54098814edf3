"""Rotations at large positions and after many moves are as exact as near 0 and after one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Rope
from jaxkv.ops.storage.forms import storage_of
from jaxkv.ops.storage.quantised import Quantised
from tests.attention.formula import rotate_heads
from tests.helpers.caches import attention_cache
from tests.helpers.parametrize import mark_cases

MAX_CELLS = [0, 10_000, 131_072, 1_000_000, 2**24 + 1, 2**31 - 1000]
TOKENS = 8


@partial(jax.jit, static_argnames=("rope", "dtype", "rotate"))
def attend_from(start, q, k, v, *, rope, dtype="float32", rotate=False):
    """A cache of tokens from a start position, and their attention."""
    sizes = dict(layers=1, cells=TOKENS, kv_heads=k.shape[1], head_dim=k.shape[2])
    cache = attention_cache(**sizes, rope=rope, dtype=dtype, rotate=rotate)
    positions = start + jnp.arange(TOKENS, dtype=jnp.int32)
    batch = jaxkv.make_batch(np.arange(TOKENS), positions=positions)
    (ubatch,) = jaxkv.init_batch(cache, batch).ubatches
    q, k = (rope.rotate(x[None], positions[None]) for x in (q, k))
    step, out = jaxkv.attend(jaxkv.apply(cache, ubatch), 0, q, k, v[None])
    return step.cache, out


def heads(size):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (TOKENS, 2, size)) for key in keys]


@jax.jit
def rotate_times(cache, delta, times=1):
    def once(i, cache):  # first by delta, then alternately by 1 less and 1 more
        turn = jnp.where(i == 0, 0, 1 - 2 * (i % 2))
        cache = jaxkv.seq_add(cache, 0, 0, -1, delta=delta + turn).cache
        return jaxkv.apply(cache, jaxkv.init_update(cache))

    return jax.lax.fori_loop(0, times, once, cache)


def keys_of(cache):
    return np.asarray(storage_of(cache.buffers.k[0]).decode(), np.float64)[0].transpose(1, 0, 2)


def test_attend_is_the_same_at_any_first_position():
    rope, args = Rope.make(32), heads(32)
    cache, near = attend_from(0, *args, rope=rope)
    for start in MAX_CELLS:
        far, out = attend_from(start, *args, rope=rope)
        np.testing.assert_allclose(out, near, atol=1e-5, err_msg=str(start))
        back = rotate_times(far, -start)
        np.testing.assert_allclose(keys_of(back), keys_of(cache), atol=1e-5, err_msg=str(start))


ROPES = {
    "halves": Rope.make(32),
    "partial neighbours": Rope.make(16, interleaved=True),
    "yarn": Rope.make(32).yarn(factor=4.0, original=64, base=1e4),
    "two scales": Rope.make(160),
}
FORMS = ["bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize(
    ("dtype", "rope"),
    mark_cases(
        [
            *((dtype, "halves") for dtype in FORMS),
            *(("int8", rope) for rope in ("two scales", "partial neighbours", "yarn")),
        ],
        core=[("bfloat16", "halves"), ("int8", "partial neighbours")],
    ),
)
def test_update_501_times_is_as_exact_as_once(dtype, rope):
    """Trap 93. Rotating already rotated keys again would be 50 to 170 times worse."""
    rope = ROPES[rope]
    size = 160 if len(rope.frequencies) == 80 else 32
    q, k, v = heads(size)
    cache, _ = attend_from(1010, q, k, v, rope=rope, dtype=dtype)
    errors = {}
    for times in (0, 1, 501):
        positions = 1010 - 2 * times + jnp.arange(TOKENS)
        wanted = rope.rotate(k, positions)
        errors[times] = np.linalg.norm(keys_of(rotate_times(cache, -2, times)) - wanted)
    assert 0 < errors[501] < 1.5 * errors[1] and errors[1] < 3.2 * errors[0]


@pytest.mark.parametrize(("dtype", "rotate"), [("int8", True), ("int4", False), ("int4", True)])
def test_update_n_times_adds_n_rounding_errors_without_grid(dtype, rotate):
    """Independent errors have a norm that grows as the square root of their number."""
    rope, args = ROPES["halves"], heads(32)
    cache, _ = attend_from(1010, *args, rope=rope, dtype=dtype, rotate=rotate)
    errors = {}
    for times in (0, 1, 17):
        keys = keys_of(rotate_times(cache, -2, times))
        keys = rotate_heads(keys) if rotate else keys
        wanted = rope.rotate(args[1], 1010 - 2 * times + jnp.arange(TOKENS))
        errors[times] = np.linalg.norm(keys - wanted)
    assert 1.1 < errors[1] / errors[0] < 1.6 and 3 < errors[17] / errors[0] < 5


@pytest.mark.parametrize("size", [8, 128, 160])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_rotation_of_rotated_keys_keeps_their_scales(dtype, size):
    """Another scale is another grid, and the errors of the roundings would add up."""
    keys = jax.random.normal(jax.random.key(0), (500, 1, size))
    stored = Quantised.zeros(keys.shape, dtype).encode(keys)
    rotate = jax.jit(partial(Quantised.rotate, rope=Rope.make(size)))
    positions = np.array([0, 37, 5, 90, 11], np.int32)[:, None].repeat(500, axis=1)
    scales = []
    for start, stop in zip(positions[:-1], positions[1:], strict=True):
        stored = rotate(stored, start, stop)
        scales.append(np.asarray(stored.scales))
    changed = [(later != scales[0]).any(axis=-1).mean() for later in scales[1:]]
    # The grid of a float changes with the exponent of a pair, whose two groups have two scales.
    assert max(changed) <= (0.01 if (dtype, size) == ("float8_e4m3fn", 160) else 0)
