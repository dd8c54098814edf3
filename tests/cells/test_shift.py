"""Moving positions, and rotating keys by what they are owed."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.rope import linear, yarn
from tests.memories import Kind, assert_identical, drawing, drawn

core = pytest.mark.core
PLAIN = jaxkv.make_rope(6, base=100.0)
ROPES = {
    "plain": PLAIN,
    "none": None,
    "interleaved": jaxkv.make_rope(6, base=100.0, interleaved=True),
    "partial": jaxkv.make_rope(4, base=100.0),
    "partial interleaved": jaxkv.make_rope(4, base=100.0, interleaved=True),
    "linear": linear(PLAIN, factor=4.0),
    "yarn": yarn(PLAIN, factor=4.0, original=64, base=100.0),
}
"""One for each layer; of keys of 6 numbers."""
ALL = tuple(ROPES.values())
SHIFT = Kind("shift", cells=8, sequences=2)
rotate = jax.jit(jaxkv.rotate, static_argnames="rope")


@cache
def rotated(*, tokens=6, cells=8, ropes=(PLAIN,), dtype="float32"):
    """A memory of tokens 0, 1, 2 ... of sequence 0, and their keys before rotation, `[T, K, D]`."""
    memory = jaxkv.make_kv_cache(
        layers=len(ropes), cells=cells, kv_heads=2, head_dim=6, sequences=2, rope=ropes, dtype=dtype
    )
    table, buffers = jaxkv.split(memory)
    position = jnp.arange(cells, dtype=jnp.int32)
    there = (position < tokens)[None]
    table = replace(
        table,
        position=jnp.where(there, position, table.position),
        owners=there[None].astype(jnp.uint32),
    )
    raw = jax.random.normal(jax.random.key(0), (cells, 2, 6))
    keys = [turned(raw, position, rope) for rope in ropes]
    keys, values = (
        tuple(x.astype(dtype).transpose(1, 0, 2)[None] for x in half)
        for half in (keys, [raw] * len(keys))
    )
    return jaxkv.join(table, replace(buffers, k=keys, v=values)), np.asarray(raw)[:tokens]


def turned(keys, positions, rope):
    return keys if rope is None else rotate(keys[None], positions[None], rope)[0]


def keys_of(memory, layer, count=6):
    return np.asarray(memory.buffers.k[layer])[0, :, :count].transpose(1, 0, 2)


def updated(memory):
    return jaxkv.apply(memory, jaxkv.init_update(memory))


# ---- keys


@pytest.mark.parametrize(
    "ropes", [(PLAIN,), pytest.param(ALL, marks=core)], ids=["one", "one for each layer"]
)
def test_update_equals_rotating_from_scratch(ropes):
    """Numbers that a rope does not turn (trap 92), and values, stay as they are.

    The attention factor of YaRN is applied once (trap 91).
    """
    memory, raw = rotated(ropes=ropes)
    moved = jaxkv.seq_add(jaxkv.seq_div(memory, 0, 2, 5, 3), 0, 1, -1, 7)
    after = updated(moved)
    assert jaxkv.init_update(moved).pending == 5 and not after.table.shift.any()
    stays = np.asarray(moved.table.shift[0, :6] == 0)
    for layer, rope in enumerate(ropes):
        keys, before = keys_of(after, layer), keys_of(memory, layer)
        wanted = turned(raw, after.table.position[0, :6], rope)
        np.testing.assert_allclose(keys, wanted, atol=2e-6)
        np.testing.assert_array_equal(keys[stays], before[stays])
        first = 0 if rope is None else 2 * len(rope.frequencies)
        np.testing.assert_array_equal(keys[..., first:], raw[..., first:])
        assert (keys[~stays] != before[~stays]).any() == (rope is not None)
    assert_identical(after.buffers.v, memory.buffers.v)


@core
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-5), ("bfloat16", 0.2)])
def test_update_many_times_there_and_back_drifts_little(dtype, bound):
    """Trap 93: 200 rotations of keys of norm about 3; bfloat16 rounds each to 8 bits."""
    memory, _ = rotated(dtype=dtype)

    @jax.jit
    def there_and_back(memory):
        def once(memory, _):
            for delta in (1, -1):
                memory = updated(jaxkv.seq_add(memory, 0, 0, -1, delta))
            return memory, None

        return jax.lax.scan(once, memory, length=100)[0]

    after = there_and_back(memory)
    np.testing.assert_array_equal(after.table.position, memory.table.position)
    drift = keys_of(after, 0).astype(np.float32) - keys_of(memory, 0).astype(np.float32)
    assert 0 < np.abs(drift).max() < bound


@core
def test_update_rotates_more_keys_than_a_chunk():
    memory, raw = rotated(cells=700, tokens=600)
    after = updated(jaxkv.seq_add(memory, 0, 10, -1, 3))
    wanted = turned(raw, after.table.position[0, :600], PLAIN)
    np.testing.assert_allclose(keys_of(after, 0, 600), wanted, atol=3e-4)  # angles up to 600


# ---- positions


@pytest.mark.parametrize(
    ("before", "verb", "after"),
    [
        # Trap 10: a shared cell moves for every owner.
        (
            "0{0,1} 1{0,1} 2{0,1} 3{0}", lambda m: jaxkv.seq_add(m, 0, 2, -1, 5),
            "0{0,1} 1{0,1} 7{0,1}+5 8{0}+5",
        ),
        # Trap 11: a position that turns negative frees the cell for all.
        ("0{0,1} 1{0} 2{0}", lambda m: jaxkv.seq_add(m, 0, 0, -1, -2), ". . 0{0}-2"),
        # Trap 12: moves add up to one rotation.
        (
            "0{0} 1{0}", lambda m: jaxkv.seq_add(jaxkv.seq_add(m, 0, 0, -1, 3), 0, 0, -1, -1),
            "2{0}+2 3{0}+2",
        ),
        # Trap 13: moves that cancel owe nothing.
        (
            "0{0} 1{0}", lambda m: jaxkv.seq_add(jaxkv.seq_add(m, 0, 0, -1, 3), 0, 3, -1, -3),
            "0{0} 1{0}",
        ),
        # Trap 14: a freed cell owes nothing.
        ("0{0} 8{0}+3", lambda m: jaxkv.seq_rm(m, 0, 8)[0], "0{0}"),
        # Trap 15: after a division what is owed is the new position less the old one.
        (
            "3{0} 4{0} 5{0} 6{0} 7{0}", lambda m: jaxkv.seq_div(m, 0, 4, 8, 2),
            "3{0} 2{0}-2 2{0}-3 3{0}-3 3{0}-4",
        ),
        # Trap 16: two cells then share a position, and removing it removes both.
        ("0{0} 1{0} 1{0}-1 2{0}-1", lambda m: jaxkv.seq_rm(m, 0, 1, 2)[0], "0{0} . . 2{0}-1"),
    ],
)  # fmt: skip
def test_seq_add_and_seq_div_move_positions(before, verb, after):
    memory = drawn(before, SHIFT)
    moved = verb(memory)
    assert drawing(moved) == after
    assert jaxkv.init_update(moved).pending == after.count("+") + after.count("-")
    assert moved.buffers.k[0] is memory.buffers.k[0]
    if after == before:  # nothing to do costs nothing
        assert updated(moved) is moved and jaxkv.init_batch(moved, jaxkv.make_batch([1])).ok


def test_init_batch_that_would_see_a_moved_key_is_refused():
    """Trap 73, trap 34. Sequence 1 sees no moved key and goes on."""
    moved = drawn("2{0}+2 3{0}+2 0{1}", SHIFT)
    plan = jaxkv.init_batch(moved, jaxkv.make_batch([[1], [2]]))
    assert plan.reason.tolist() == [jaxkv.Reason.UPDATE_PENDING, jaxkv.Reason.FITS]
    assert plan.fits.tolist() == [False, True]
    with pytest.raises(jaxkv.RefusedError, match="init_update"):
        plan.check()
    assert jaxkv.init_batch(moved, jaxkv.make_batch([1], sequences=1)).ok
