"""`seq_add` and `seq_div`: positions, and keys that an update rotates by pending shifts."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import make_batch
from jaxkv.cache import merge, split
from tests.helpers import edit_sequences
from tests.helpers.caches import (
    SMALL,
    Kind,
    apply_update,
    assert_identical,
    attention_cache,
    drawing,
    parse_cache,
)
from tests.helpers.steps import apply_batch

core = pytest.mark.core
BIG = 2**31 - 1
SHIFT = Kind("shift", cells=8, sequences=2)


def shift(cache, p0, p1, delta):
    cache, ok = jaxkv.seq_add(cache, 0, p0, p1, delta=delta)
    assert ok
    return cache


def test_seq_add_of_lists_equals_the_loop():
    cache = parse_cache("0{0} 1{0} 2{0} 0{1} 1{1}", SHIFT)
    ids, starts, ends, deltas = [0, 1, 0, 1], [1, 0, 2, 5], [-1, 1, -1, 9], [2, 2**31 - 2, -1, 7]
    after, flags = cache, []
    for seq, p0, p1, delta in zip(ids, starts, ends, deltas, strict=True):
        after, ok = jaxkv.seq_add(after, seq, p0, p1, delta=delta)
        flags.append(ok.item())
    result = jaxkv.seq_add(cache, ids, starts, ends, delta=deltas)
    assert_identical(result.cache, after)
    assert result.ok.tolist() == flags == [True, True, True, True]
    far = jax.jit(jaxkv.seq_add)(cache, np.array([0, 1]), [-2, 1], -1, delta=2**31 - 2)
    names = [jaxkv.Reason(code).name for code in far.reason.tolist()]
    assert names == ["ARGUMENT_OUT_OF_RANGE", "POSITION_OUT_OF_RANGE"]
    assert_identical(far.cache, cache)


@pytest.mark.parametrize(
    ("before", "verb", "after"),
    [
        # Trap 10: a shared cell moves for every owner.
        (
            "0{0,1} 1{0,1} 2{0,1} 3{0}", lambda m: shift(m, 2, -1, 5),
            "0{0,1} 1{0,1} 7{0,1}+5 8{0}+5",
        ),
        # Trap 11: a position that turns negative frees the cell for all.
        ("0{0,1} 1{0} 2{0}", lambda m: shift(m, 0, -1, -2), ". . 0{0}-2"),
        # Trap 12: shifts add up to one rotation.
        ("0{0} 1{0}", lambda m: shift(shift(m, 0, -1, 3), 0, -1, -1), "2{0}+2 3{0}+2"),
        # Trap 13: shifts that cancel leave none pending.
        ("0{0} 1{0}", lambda m: shift(shift(m, 0, -1, 3), 3, -1, -3), "0{0} 1{0}"),
        # Trap 14: a freed cell has no pending shift.
        ("0{0} 8{0}+3", lambda m: jaxkv.seq_rm(m, 0, 8)[0], "0{0}"),
        # Trap 15: after a division the shift is the new position minus the old one.
        (
            "3{0} 4{0} 5{0} 6{0} 7{0}", lambda m: jaxkv.seq_div(m, 0, 4, 8, divisor=2).cache,
            "3{0} 2{0}-2 2{0}-3 3{0}-3 3{0}-4",
        ),
        # Trap 16: two cells then share a position, and removing it removes both.
        ("0{0} 1{0} 1{0}-1 2{0}-1", lambda m: jaxkv.seq_rm(m, 0, 1, 2)[0], "0{0} . . 2{0}-1"),
    ],
)  # fmt: skip
def test_seq_add_and_seq_div_move_positions(before, verb, after):
    cache = parse_cache(before, SHIFT)
    moved = verb(cache)
    assert drawing(moved) == after
    assert jaxkv.init_update(moved).num_changes == after.count("+") + after.count("-")
    assert moved.buffers.k[0] is cache.buffers.k[0]
    if after == before:  # returns the same object
        assert apply_update(moved) is moved and jaxkv.init_batch(moved, jaxkv.make_batch([1])).ok


@core
@pytest.mark.parametrize("make", [SMALL.make, edit_sequences.make], ids=["cells", "states"])
def test_seq_add_or_token_to_int32_max_is_refused(make):
    """2**31 - 1 is one past the last position."""
    cache = make()
    assert not jaxkv.init_batch(cache, make_batch([1], positions=[BIG])).ok
    cache = apply_batch(cache, [1], positions=[BIG - 1])
    assert cache.seq_pos_min(0) == BIG - 1
    assert not jaxkv.init_batch(cache, make_batch([2])).ok
    assert not jaxkv.seq_rm(cache, 0)[0].num_used_cells()
    for delta in (1, 2, BIG):
        assert not cache.can_seq_add(0, 0, -1, delta=delta)
        same, ok = jaxkv.seq_add(cache, 0, 0, -1, delta=delta)
        assert not ok
        assert_identical(same, cache)
    assert cache.can_seq_add(0, 9, -1, delta=-5)
    moved, ok = jaxkv.seq_add(cache, 0, 9, -1, delta=-5)
    assert ok and moved.seq_pos_max(0) == BIG - 6


@core
def test_shifts_drop_earlier_states_at_the_position_of_a_later_one():
    cache = edit_sequences.make_filled_twin(kept=3, counts=(6,)).cache
    assert cache.table.position[0].tolist() == [2, 3, 4, 5]
    shifted, ok = jaxkv.seq_add(cache, 0, 5, -1, delta=-1)
    assert ok and shifted.table.position[0].tolist() == [-1, 2, 3, 4]
    divided, ok = jaxkv.seq_div(cache, 0, 4, -1, divisor=2)
    assert ok and divided.table.position[0].tolist() == [-1, -1, -1, 2]


# -------------------------------------------------------------------------------------------- keys

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
