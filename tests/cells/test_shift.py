"""Moving positions and rotating keys by what they are owed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.rope import linear, yarn

PLAIN = jaxkv.make_rope(8, base=100.0)
ROPES = {
    "plain": PLAIN,
    "interleaved": jaxkv.make_rope(8, base=100.0, interleaved=True),
    "partial": jaxkv.make_rope(4, base=100.0),
    "linear": linear(PLAIN, factor=4.0),
    "yarn": yarn(PLAIN, factor=4.0, original=64, base=100.0),
}
TOKENS = 6


def filled(rope, *, dtype=jnp.float32, cells=8, sequences=2, tokens=TOKENS, size=8):
    """A cache whose keys are known numbers, rotated for their positions as a model would."""
    memory = jaxkv.make_kv_cache(
        layers=2,
        cells=cells,
        kv_heads=2,
        head_dim=size,
        sequences=sequences,
        rope=rope,
        dtype=dtype,
    )
    raw = jax.random.normal(jax.random.key(0), (1, cells, 2, size))
    return written(memory, np.arange(cells) < tokens, raw), np.asarray(raw)[0, :tokens]


@jax.jit
def written(memory, valid, raw):
    """Plan and run a batch that brings these numbers; padded, it is one program for any length."""
    count = len(valid)
    batch = jaxkv.make_batch(jnp.arange(count), valid=valid)
    (ubatch,) = jaxkv.init_batch(memory, batch, ubatch_size=count).ubatches
    memory = jaxkv.apply(memory, ubatch)
    for layer, rope in enumerate(memory.buffers.ropes):
        k = jaxkv.rotate(raw, ubatch.positions, rope)
        memory, _ = jaxkv.attend(memory, layer, ubatch, k, k, raw)
    return memory


def expected(memory, raw, layer):
    """Rotate the numbers from scratch for the positions that cells 0, 1, 2 ... have now."""
    rope = memory.buffers.ropes[layer]
    return np.asarray(rotate(raw, memory.table.position[0, : len(raw)], rope))


rotate = jax.jit(jaxkv.rotate, static_argnames="rope")


def keys(memory, layer, tokens=TOKENS):
    return np.asarray(memory.buffers.k[layer][0, :, :tokens]).transpose(1, 0, 2)


def updated(memory):
    return jaxkv.apply(memory, jaxkv.init_update(memory))


@pytest.mark.core
@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize(
    "verb",
    [
        lambda m: jaxkv.seq_add(m, 0, 2, -1, 5),
        lambda m: jaxkv.seq_div(m, 0, 0, -1, 2),
        lambda m: jaxkv.seq_add(jaxkv.seq_div(m, 0, 1, 5, 3), 0, 0, -1, 7),
    ],
    ids=["add", "div", "both"],
)
def test_an_update_equals_rotating_from_scratch(name, verb):
    """For every layer's own rope: layer 1 has another than layer 0."""
    memory, raw = filled((ROPES[name], PLAIN))
    memory = updated(verb(memory))
    for layer in (0, 1):
        np.testing.assert_allclose(keys(memory, layer), expected(memory, raw, layer), atol=2e-6)
        np.testing.assert_array_equal(
            memory.buffers.v[layer][0, :, :TOKENS].transpose(1, 0, 2), raw
        )
    assert not memory.table.shift.any()


@pytest.mark.core
def test_only_keys_that_moved_are_touched():
    memory, _ = filled(PLAIN)
    after = updated(jaxkv.seq_add(memory, 0, 4, -1, 3))
    for layer in (0, 1):
        np.testing.assert_array_equal(keys(after, layer)[:4], keys(memory, layer)[:4])
        assert (keys(after, layer)[4:] != keys(memory, layer)[4:]).any(axis=(1, 2)).all()
        np.testing.assert_array_equal(after.buffers.v[layer], memory.buffers.v[layer])


def test_layers_without_a_rope_keep_their_keys():
    memory, _ = filled((None, PLAIN))
    after = updated(jaxkv.seq_add(memory, 0, 0, -1, 3))
    np.testing.assert_array_equal(after.buffers.k[0], memory.buffers.k[0])
    assert (after.buffers.k[1] != memory.buffers.k[1]).any()


def test_trap_10_a_shared_cell_moves_for_every_owner():
    memory, _ = filled(PLAIN, tokens=4)
    memory = jaxkv.seq_cp(memory, 0, 1, 0, 3)
    memory = jaxkv.seq_add(memory, 0, 2, -1, 5)
    assert jaxkv.seq_pos_max(memory, [0, 1]).tolist() == [8, 7]


def test_trap_11_a_position_that_turns_negative_frees_the_cell_for_all():
    memory, _ = filled(PLAIN, tokens=3)
    memory = jaxkv.seq_cp(memory, 0, 1, 0, 1)
    memory = jaxkv.seq_add(memory, 0, 0, -1, -2)
    assert memory.table.position[0].tolist() == [-1, -1, 0] + [-1] * 5
    assert jaxkv.seq_pos_max(memory, [0, 1]).tolist() == [0, -1]
    assert memory.table.shift[0].tolist() == [0, 0, -2] + [0] * 5


def test_trap_12_moves_add_up_to_one_rotation():
    memory, _ = filled(PLAIN)
    memory = jaxkv.seq_add(jaxkv.seq_add(memory, 0, 0, -1, 3), 0, 0, -1, -1)
    assert memory.table.shift[0, :TOKENS].tolist() == [2] * TOKENS
    assert jaxkv.init_update(memory).pending == TOKENS


def test_trap_13_moves_that_cancel_move_no_data():
    memory, _ = filled(PLAIN)
    back = jaxkv.seq_add(jaxkv.seq_add(memory, 0, 0, -1, 3), 0, 3, -1, -3)
    plan = jaxkv.init_update(back)
    assert plan.pending == 0
    assert jaxkv.apply(back, plan) is back  # nothing to do costs nothing
    assert jaxkv.init_batch(back, jaxkv.make_batch([1])).ok


def test_trap_14_a_freed_cell_owes_nothing():
    memory, _ = filled(PLAIN)
    memory = jaxkv.seq_add(memory, 0, 5, -1, 3)
    memory, _ = jaxkv.seq_rm(memory, 0, 8, -1)
    assert not memory.table.shift.any()
    assert jaxkv.init_update(memory).pending == 0


def test_trap_15_after_a_division_the_rotation_is_new_less_old():
    memory, _ = filled(PLAIN, tokens=8)
    memory = jaxkv.seq_div(memory, 0, 4, 8, 2)
    assert memory.table.position[0].tolist() == [0, 1, 2, 3, 2, 2, 3, 3]
    assert memory.table.shift[0].tolist() == [0, 0, 0, 0, -2, -3, -3, -4]


def test_trap_16_a_divisor_below_one_is_refused_or_changes_nothing():
    memory, _ = filled(PLAIN)
    for divisor in (0, -2):
        with pytest.raises(ValueError, match=f"at least 1, got {divisor}"):
            jaxkv.seq_div(memory, 0, 0, -1, divisor)
        traced = jax.jit(lambda m, d: jaxkv.seq_div(m, 0, 0, -1, d))(memory, divisor)
        np.testing.assert_array_equal(traced.table.position, memory.table.position)
        np.testing.assert_array_equal(traced.table.shift, memory.table.shift)
    # Two cells share a position after a division, and removing it removes both.
    memory, _ = jaxkv.seq_rm(jaxkv.seq_div(memory, 0, 0, -1, 2), 0, 1, 2)
    assert jaxkv.used(memory) == TOKENS - 2


def test_trap_73_and_34_a_batch_that_would_see_a_moved_key_is_refused():
    memory, _ = filled(PLAIN)
    memory = jaxkv.apply(memory, jaxkv.init_batch(memory, jaxkv.make_batch([1], sequences=1)))
    moved = jaxkv.seq_add(memory, 0, 0, -1, 2)
    plan = jaxkv.init_batch(moved, jaxkv.make_batch([[1], [2]]))
    assert plan.reason.tolist() == [jaxkv.Reason.UPDATE_PENDING, jaxkv.Reason.FITS]
    assert plan.fits.tolist() == [False, True]
    with pytest.raises(jaxkv.RefusedError, match="init_update"):
        plan.check()
    # Sequence 1 sees no moved key and goes on.
    assert jaxkv.init_batch(moved, jaxkv.make_batch([1], sequences=1)).ok


def test_trap_91_yarns_attention_factor_is_not_applied_again():
    memory, _ = filled(ROPES["yarn"])
    assert ROPES["yarn"].attention_factor > 1.1
    after = updated(jaxkv.seq_add(memory, 0, 0, -1, 9))
    norms = [np.linalg.norm(keys(m, 0), axis=-1) for m in (memory, after)]
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 2e-5), (jnp.bfloat16, 0.2)])
def test_trap_93_a_hundred_shifts_there_and_back_drift_little(dtype, bound):
    """200 rotations of keys of norm about 3; bfloat16 rounds each to 8 bits."""
    memory, raw = filled(PLAIN, dtype=dtype)
    start = memory

    @jax.jit
    def there_and_back(memory):
        for delta in (1, -1):
            memory = jaxkv.seq_add(memory, 0, 0, -1, delta)
            # The whole sequence moves down to where it was, and nothing turns negative.
            memory = jaxkv.apply(memory, jaxkv.init_update(memory))
        return memory

    for _ in range(100):
        memory = there_and_back(memory)
    np.testing.assert_array_equal(memory.table.position, start.table.position)
    drift = np.abs(keys(memory, 0).astype(np.float32) - keys(start, 0).astype(np.float32))
    assert 0 < drift.max() < bound


def test_an_update_for_another_table_changes_nothing():
    memory, _ = filled(PLAIN)
    plan = jaxkv.init_update(jaxkv.seq_add(memory, 0, 0, -1, 1))
    other = jaxkv.seq_add(memory, 0, 0, -1, 2)
    after = jaxkv.apply(other, plan)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
    once = jaxkv.apply(other, jaxkv.init_update(other))
    twice = jaxkv.apply(once, jaxkv.init_update(other))
    for a, b in zip(jax.tree.leaves(twice), jax.tree.leaves(once), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.core
def test_more_keys_than_a_chunk_are_all_rotated():
    memory, raw = filled(PLAIN, cells=700, tokens=600)
    memory = updated(jaxkv.seq_add(memory, 0, 10, -1, 3))
    want = expected(memory, raw, 0)
    np.testing.assert_allclose(keys(memory, 0, 600), want, atol=3e-4)  # angles up to 600


def test_a_shift_holds_in_a_vmap_over_memories():
    memory, _ = filled(PLAIN)
    many = jax.tree.map(lambda x: jnp.stack([x, x]), memory)

    def shifted(memory, delta):
        memory = jaxkv.seq_add(memory, 0, 0, -1, delta)
        return jaxkv.apply(memory, jaxkv.init_update(memory))

    both = jax.vmap(shifted)(many, jnp.array([1, 4]))
    for i, delta in enumerate((1, 4)):
        alone = shifted(memory, delta)
        one = jax.tree.map(lambda x, i=i: x[i], both)
        np.testing.assert_array_equal(one.table.position, alone.table.position)
        np.testing.assert_allclose(one.buffers.k[0], alone.buffers.k[0], atol=1e-6)


def test_seq_add_leaves_the_buffers_alone():
    memory, _ = filled(PLAIN)
    after = jaxkv.seq_add(memory, 0, 0, -1, 1)
    assert all(a is b for a, b in zip(after.buffers.k, memory.buffers.k, strict=True))


@pytest.mark.parametrize("interleaved", [False, pytest.param(True, marks=pytest.mark.core)])
def test_trap_92_of_a_key_that_is_rotated_in_part_only_that_part_is_turned(interleaved):
    """For keys of any size. llama.cpp's quantised keys are rotated as a whole, in blocks of 64."""
    memory, raw = filled(jaxkv.make_rope(4, base=100.0, interleaved=interleaved), size=6)
    moved = updated(jaxkv.seq_add(memory, 0, 1, -1, 3))
    before, after = keys(memory, 0), keys(moved, 0)
    np.testing.assert_allclose(after, expected(moved, raw, 0), atol=1e-6)
    np.testing.assert_array_equal(after[..., 4:], raw[..., 4:])
    assert not np.array_equal(before[1:, :, :4], after[1:, :, :4])
