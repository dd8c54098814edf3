"""The encoding of keys and values in 8 bits, and memories that hold fewer bytes for a cell.

What such memories answer is in `test_storage_forms.py`.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models
from jaxkv import snapshot
from jaxkv.ops.quantised import decoded, encoded, zeros
from jaxkv.snapshot.file import written
from jaxkv.snapshot.whole import describe
from tests.attention.formula import coded
from tests.cases import in_lanes

DATA = Path(__file__).parent.parent / "data"
core = pytest.mark.core
HEADS, SIZE, PART = 2, 9, slice(4, 9)
ROPE = jaxkv.make_rope(4, base=100.0)
make = partial(jaxkv.make_kv_cache, layers=2, cells=12, kv_heads=HEADS, head_dim=SIZE, rope=ROPE)


@pytest.mark.parametrize(
    ("dtype", "size"),
    in_lanes(
        [(dtype, size) for dtype in ("int8", "float8_e4m3fn") for size in (7, 64, 160)],
        fast=[("int8", 64)],
        core=[("int8", 160), ("float8_e4m3fn", 160)],
    ),
)
def test_encoded_matches_numpy(size, dtype):
    """Also of zeros, of the largest and the smallest numbers, and of what is not finite."""
    rng = np.random.default_rng(size)
    x = rng.normal(size=(2, 50, size)).astype(np.float32)
    x *= np.float32(10.0) ** rng.integers(-30, 30, (2, 50, 1))
    x[0, 0], x[0, 1], x[1, 3] = 0, 3e38, -1e-45
    x[0, 2, 0], x[0, 3], x[0, 4, 1] = np.nan, np.nan, -np.inf
    found = jax.jit(encoded)(jnp.asarray(x), zeros((1,), dtype))
    codes, scales = coded(x, dtype)
    np.testing.assert_array_equal(found.scales, scales)
    np.testing.assert_array_equal(np.asarray(found.codes, np.float32), codes.astype(np.float32))
    assert found.codes.dtype == dtype and found.scales.dtype == jnp.float32
    assert np.isfinite(np.asarray(found.codes, np.float32)).all()
    read = np.asarray(decoded(found))
    assert (read[0, 0] == 0).all() and np.isnan(read[0, 2:5]).all()
    finite = np.isfinite(x).all(-1)
    error, limit = np.abs(read - x)[finite], np.abs(x).max(-1, keepdims=True)[finite]
    assert (error <= limit * (0.5 / 127 if dtype == "int8" else 1 / 16) * 1.001 + 1e-38).all()


def test_nbytes_of_storage_forms():
    int8, latent = make(dtype="int8"), make(value_dim=PART)
    assert int8.buffers.k[0].shape == (1, HEADS, 12, SIZE)
    assert "int8, " in repr(int8) and "float32" not in repr(int8)
    assert jaxkv.nbytes(int8.buffers) == 2 * 2 * HEADS * 12 * (SIZE + 4)
    assert jaxkv.nbytes(latent.buffers) == 2 * HEADS * 12 * SIZE * 4  # keys alone
    deepseek_v3 = jax.eval_shape(
        lambda: jaxkv.make_kv_cache(
            layers=61, cells=32_768, kv_heads=1, head_dim=576, value_dim=slice(64, 576),
            dtype=jnp.bfloat16,
        )
    )  # fmt: skip
    assert jaxkv.nbytes(deepseek_v3.buffers) / 2**30 < 2.15


def test_snapshot_codes_without_scales_raises():
    arrays = {
        f"buffers.{half}.{i}": np.zeros((0, HEADS, SIZE), np.int8) for half in "kv" for i in (0, 1)
    }
    description = {"memory": describe(make(dtype="int8")), "model": None}
    with pytest.raises(ValueError, match="a snapshot that describes a memory, .*buffers.k.0.codes"):
        snapshot.load(written(description, arrays))


@pytest.mark.nightly
def test_model_int8_memory_computes_nearly_the_same():
    model = models.load(DATA / "granite_hybrid")
    memory = model.make_memory(cells=8, dtype="int8")
    (ubatch,) = jaxkv.init_batch(memory, jaxkv.make_batch([1, 2, 3])).ubatches
    out = [
        model.forward(model.weights, jaxkv.apply(one, ubatch), ubatch)[1]
        for one in (memory, model.make_memory(cells=8))
    ]
    assert 0 < np.abs(out[0] - out[1]).max() < 0.05 * np.abs(out[1]).max()


@core
def test_model_int8_memory_keeps_dtype_of_states():
    model = models.load(DATA / "granite_hybrid")
    memory = jax.eval_shape(lambda: model.make_memory(cells=8, dtype="int8"))
    found = {np.dtype(x.dtype).name for x in jax.tree.leaves(memory.buffers)}
    assert found == {"int8", "float32"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_dim": slice(0, 9)}, "some and not all, got slice"),
        ({"value_dim": slice(4, 4)}, "some and not all"),
        ({"value_dim": slice(0, 8, 2)}, "neighbouring numbers"),
        ({"value_dim": (PART,)}, "all layers or 2, one each, got 1"),
        ({"value_dim": PART, "dtype": "int8"}, "16 bits or more"),
        ({"value_dim": slice(0, 5)}, "after the 4 numbers of a key that its rope turns"),
        ({"value_dim": slice(3, 8)}, "after the 4 numbers of a key that its rope turns"),
    ],
)
def test_make_kv_cache_bad_latent_values_raise(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_attend_latent_memory_with_values_raises():
    """And one without, where a layer has values of its own."""
    memory = make(value_dim=(PART, 5))
    (ubatch,) = jaxkv.init_batch(memory, jaxkv.make_batch([1])).ubatches
    q, k = (jnp.ones((*ubatch.valid.shape, n, SIZE)) for n in (2 * HEADS, HEADS))
    with pytest.raises(TypeError, match="numbers 4 to 8 are the values.*leave v out"):
        jaxkv.attend(memory, 0, ubatch, q, k, k[..., PART])
    with pytest.raises(TypeError, match="got keys alone"):
        jaxkv.attend(memory, 1, ubatch, q, k)
