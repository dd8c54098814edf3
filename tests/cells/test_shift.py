"""Moving positions, and rotating keys by pending shifts."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.cache import merge, split
from tests.helpers.caches import apply_update, assert_identical, attention_cache

core = pytest.mark.core
PLAIN = jaxkv.Rope.make(6, base=100.0)
ALL = (  # one for each layer; of keys of 6 numbers
    PLAIN,
    None,
    jaxkv.Rope.make(6, base=100.0, interleaved=True),
    jaxkv.Rope.make(4, base=100.0),
    jaxkv.Rope.make(4, base=100.0, interleaved=True),
    PLAIN.linear(factor=4.0),
    PLAIN.yarn(factor=4.0, original=64, base=100.0),
)


@functools.cache
def make_rotated_cache(*, tokens=6, cells=8, ropes=(PLAIN,)):
    """A cache of tokens 0, 1, 2 ... of sequence 0, and their keys before rotation, `[T, K, D]`."""
    sizes = dict(layers=len(ropes), cells=cells, kv_heads=2, head_dim=6, sequences=2)
    table, buffers = split(attention_cache(**sizes, rope=ropes))
    position = jnp.arange(cells, dtype=jnp.int32)
    there = (position < tokens)[None]
    position_of = jnp.where(there, position, table.position)
    table = replace(table, position=position_of, owners=there[None].astype(jnp.uint32))
    raw = jax.random.normal(jax.random.key(0), (cells, 2, 6))
    keys = tuple(rotate_keys(raw, position, rope).transpose(1, 0, 2)[None] for rope in ropes)
    values = (raw.transpose(1, 0, 2)[None],) * len(ropes)
    return merge(table, replace(buffers, k=keys, v=values)), np.asarray(raw)[:tokens]


def rotate_keys(keys, positions, rope):
    return keys if rope is None else rope.rotate(keys[None], positions[None])[0]


def keys_of(cache, layer, count=6):
    return np.asarray(cache.buffers.k[layer])[0, :, :count].transpose(1, 0, 2)


@pytest.mark.parametrize(
    "ropes", [(PLAIN,), pytest.param(ALL, marks=core)], ids=["one", "one for each layer"]
)
def test_update_equals_rotating_from_scratch(ropes):  # trap 95
    """Numbers outside of the rotated pairs (trap 92), and values, are unchanged.

    The attention factor of YaRN is applied once (trap 91).
    """
    cache, raw = make_rotated_cache(ropes=ropes)
    moved = jaxkv.seq_add(jaxkv.seq_div(cache, 0, 2, 5, divisor=3).cache, 0, 1, -1, delta=7).cache
    after = apply_update(moved)
    assert jaxkv.init_update(moved).num_changes == 5 and not after.table.shift.any()
    stays = np.asarray(moved.table.shift[0, :6] == 0)
    for layer, rope in enumerate(ropes):
        keys, before = keys_of(after, layer), keys_of(cache, layer)
        wanted = rotate_keys(raw, after.table.position[0, :6], rope)
        np.testing.assert_allclose(keys, wanted, atol=2e-6)
        np.testing.assert_array_equal(keys[stays], before[stays])
        first = 0 if rope is None else 2 * len(rope.frequencies)
        np.testing.assert_array_equal(keys[..., first:], raw[..., first:])
        assert (keys[~stays] != before[~stays]).any() == (rope is not None)
    assert_identical(after.buffers.v, cache.buffers.v)


def test_update_moves_keys_on_all_axes():
    """Keys with positions on three axes are stored under the plain rope of the spec."""
    cache, raw = make_rotated_cache()
    axes = 0, 1, 2
    positions = np.array([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]])
    keys = PLAIN.rotate(raw, positions.T, axes)
    table, buffers = split(cache)
    stored = buffers.k[0].at[0, :, :6].set(keys.transpose(1, 0, 2))
    cache = merge(table, replace(buffers, k=(stored,)))
    after = apply_update(jaxkv.seq_add(cache, 0, 2, -1, delta=7).cache)
    moved = positions + 7 * (np.arange(6) >= 2)
    np.testing.assert_allclose(keys_of(after, 0), PLAIN.rotate(raw, moved.T, axes), atol=2e-6)


@core
def test_update_rotates_more_keys_than_a_chunk():
    cache, raw = make_rotated_cache(cells=700, tokens=600)
    after = apply_update(jaxkv.seq_add(cache, 0, 10, -1, delta=3).cache)
    wanted = rotate_keys(raw, after.table.position[0, :600], PLAIN)
    np.testing.assert_allclose(keys_of(after, 0, 600), wanted, atol=3e-4)  # angles up to 600
