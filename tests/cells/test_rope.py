"""Rotary embeddings against complex numbers in NumPy and float64."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import Rope

POSITIONS = np.array([[0, 1, 5], [63, 64, 2000]], np.int32)


def reference(x, positions, frequencies, *, interleaved=False, factor=1.0):
    """Multiply pairs of numbers as complex ones."""
    x, pairs = np.asarray(x, np.float64), len(frequencies)
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        z = turned[..., 0::2] + 1j * turned[..., 1::2]
    else:
        z = turned[..., :pairs] + 1j * turned[..., pairs:]
    z = factor * z * np.exp(1j * positions[..., None, None] * np.asarray(frequencies))
    if interleaved:
        turned = np.stack([z.real, z.imag], axis=-1).reshape(turned.shape)
    else:
        turned = np.concatenate([z.real, z.imag], axis=-1)
    return np.concatenate([turned, rest], axis=-1)


def heads(size=8, dtype=np.float32):
    return np.random.default_rng(0).normal(size=(*POSITIONS.shape, 3, size)).astype(dtype)


NEAR = np.minimum(POSITIONS, 64)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 4, 2])
def test_rotate_is_complex_multiplication(rotated, interleaved):
    rope = Rope.make(rotated, base=10000.0, interleaved=interleaved)
    frequencies = [10000.0 ** (-2 * i / rotated) for i in range(rotated // 2)]
    for positions, atol in ((POSITIONS, 2e-3), (NEAR, 2e-5)):
        expected = reference(heads(), positions, frequencies, interleaved=interleaved)
        found = rope.rotate(heads(), positions)
        np.testing.assert_allclose(found, expected, atol=atol)
        np.testing.assert_array_equal(found[..., rotated:], heads()[..., rotated:])


def test_rotate_keeps_dtype_and_traces():
    x, rope = jnp.asarray(heads(), jnp.bfloat16), Rope.make(8)
    out = jax.jit(rope.rotate)(x, POSITIONS)
    assert out.dtype == jnp.bfloat16
    wide = rope.rotate(x.astype(jnp.float32), POSITIONS)
    np.testing.assert_allclose(out.astype(jnp.float32), wide, rtol=1e-2, atol=1e-2)


def test_llama3_stretches_long_wavelengths():
    """Wavelengths above 8192 become 8 times as long, those below 2048 are unchanged."""
    plain = np.array([500000.0 ** (-2 * i / 128) for i in range(64)])
    smooth = np.clip((8192 * plain / (2 * np.pi) - 1) / (4 - 1), 0, 1)
    expected = (1 - smooth) * plain / 8 + smooth * plain
    assert {0, 1} < {*smooth.tolist()}, "the three ranges are not all there"
    options = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original=8192)
    rope = Rope.make(128, base=500000.0).llama3(**options)
    np.testing.assert_allclose(rope.frequencies, expected, rtol=1e-12)


def test_llama3_with_equal_limits_is_a_step():
    options = dict(factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original=8192)
    plain = Rope.make(128, base=500000.0)
    turns = 8192 * np.array(plain.frequencies) / (2 * np.pi)
    divisor = np.array(plain.frequencies) / plain.llama3(**options).frequencies
    np.testing.assert_array_equal(divisor, np.where(turns > 1, 1.0, 16.0))
    assert {*divisor.tolist()} == {1.0, 16.0}


def yarn_reference(size, base, factor, original, fast=32.0, slow=1.0):
    """Section 3.2 of the paper; the ramp is over pairs instead of turns, as its authors' code."""
    frequencies = base ** (-2 * np.arange(size // 2, dtype=np.float64) / size)
    turns = original * frequencies / (2 * np.pi)
    # The fractional index of the pair that makes exactly n turns.
    first, last = (
        size / 2 * (np.log(original) - np.log(n) - np.log(2 * np.pi)) / np.log(base)
        for n in (fast, slow)
    )
    first, last = np.floor(first), np.ceil(last)
    keep = np.array([1 - (i - first) / (last - first) for i in range(size // 2)])
    keep = np.maximum(np.minimum(keep, 1.0), 0.0)
    return keep * frequencies + (1 - keep) * frequencies / factor, turns, frequencies


@pytest.mark.parametrize(
    ("size", "base", "factor", "original"),
    [(128, 10000.0, 16.0, 4096), (64, 1e6, 4.0, 32768), (128, 150000.0, 32.0, 4096)],
)
def test_yarn_matches_the_paper(size, base, factor, original):
    rope = Rope.make(size, base=base).yarn(factor=factor, original=original, base=base)
    expected, turns, plain = yarn_reference(size, base, factor, original)
    np.testing.assert_allclose(rope.frequencies, expected, rtol=1e-10)
    # The two ends of the ramp are exactly as in the paper.
    got, fast, slow = np.array(rope.frequencies), turns > 40, turns < 0.8
    np.testing.assert_allclose(got[fast], plain[fast], rtol=1e-12)
    np.testing.assert_allclose(got[slow], plain[slow] / factor, rtol=1e-12)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(factor) + 1)


def test_yarn_multiplies_by_attention_factor():
    rope = Rope.make(8).yarn(factor=4.0, original=64, base=10000.0)
    given = Rope.make(8).yarn(factor=4.0, original=64, base=10000.0, attention_factor=0.7)
    for one, factor in ((rope, 0.1 * math.log(4) + 1), (given, 0.7)):
        expected = reference(heads(), NEAR, rope.frequencies, factor=factor)
        np.testing.assert_allclose(one.rotate(heads(), NEAR), expected, atol=2e-5)
    assert Rope.make(8).yarn(factor=1.0, original=64, base=10000.0).attention_factor == 1.0


RECORDED = np.load(Path(__file__).parent.parent / "data" / "rope_of_axes.npz")
LAYOUTS = {"alternating": (0, 1, 2, 0, 1, 2, 0, 1), "sections": (0, 0, 1, 1, 1, 2, 2, 2)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotate_on_several_axes_matches_transformers(layout):
    """Of Qwen3.5 (alternating) and of Qwen2-VL (sections)."""
    x, positions = RECORDED["x"], RECORDED["positions"]
    rope = Rope.make(16, base=100.0)
    found = rope.rotate(x, positions, LAYOUTS[layout])
    np.testing.assert_allclose(found, RECORDED[layout], atol=2e-5)
    other = rope.rotate(x, positions[:, [0, 2, 1]], LAYOUTS[layout])
    assert np.abs(other - RECORDED[layout]).max() > 0.1  # the order of the axes has an effect


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotate_with_equal_positions_on_all_axes_is_plain(interleaved):
    rope = Rope.make(6, interleaved=interleaved)
    equal = np.repeat(POSITIONS[..., None], 2, axis=-1)
    found = rope.rotate(heads(), equal, axes=(1, 0, 1))
    np.testing.assert_array_equal(found, rope.rotate(heads(), POSITIONS))


@pytest.mark.parametrize("interleaved", [False, True])
def test_plain_rotation_moves_a_key_on_all_axes(interleaved):
    """A shift of the cache therefore needs no axes."""
    rope, axes = Rope.make(8, interleaved=interleaved), (0, 2, 1, 2)
    positions = np.random.default_rng(1).integers(0, 90, (*POSITIONS.shape, 3)).astype(np.int32)
    by = np.array([[5, -40, 0], [7, 63, 1]], np.int32)
    moved = rope.rotate(rope.rotate(heads(), positions, axes), by)
    wanted = rope.rotate(heads(), positions + by[..., None], axes)
    np.testing.assert_allclose(moved, wanted, atol=2e-6)
