"""User fields: numbers of each cell that follow the cell's keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Window, snapshot
from jaxkv.ops.storage.forms import storage_of
from tests.helpers.caches import (
    HEADS,
    LAYERS,
    ROPE,
    SIZE,
    assert_identical,
    attention_cache,
    fill_cache,
    run_batch,
)
from tests.helpers.meshes import RULES
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import add_tokens
from tests.sharding import tiny

FIELDS = {"score": ((), "float32"), "heads": ((HEADS,), "int32"), "seen": ((), "bool")}
LAYOUTS = {
    "pool": dict(cells=16, sequences=4),
    "streams": dict(cells=8, sequences=4, streams=4),
    "groups": dict(cells=12, sequences=4, streams=2),
    "window": dict(cells=12, sequences=4, streams=2, window=Window.sliding(3)),
    "tiled": dict(cells=16, sequences=4, placement="tiled"),
    "stacked int8": dict(cells=12, sequences=4, streams=2, dtype="int8", stacked=True),
}


def make(fields=FIELDS, **options):
    sizes = dict(layers=LAYERS, kv_heads=HEADS, head_dim=SIZE, rope=ROPE)
    return attention_cache(**sizes, fields=fields, **options)


def values_of_keys(cache):
    """Values for all fields that identify the value of each cell in layer 0."""
    # Values are not rotated by shifts. A stacked array has all layers of each stream in order.
    values = storage_of(cache.buffers.v[0]).decode()[:: cache.buffers.layers_per_array]
    by_head = jnp.round(1e5 * values[..., 0]).astype(jnp.int32)
    return dict(score=values[:, 0, :, 1], heads=by_head, seen=values[:, 0, :, 2] > 0)


def assert_fields_of_keys(cache):
    used = np.asarray(cache.table.position >= 0)
    assert used.any()
    for name, wanted in values_of_keys(cache).items():
        # [S, N] or [S, K, N]
        got, wanted = (np.moveaxis(np.asarray(x), -1, 1) for x in (cache.fields[name], wanted))
        np.testing.assert_array_equal(got[used], wanted[used])


def fill(cache, texts=((1, 2, 3), (4, 5), (6, 7, 8, 9))):
    cache, _ = run_batch(cache, jaxkv.make_batch([list(text) for text in texts]))
    return cache.with_fields(**values_of_keys(cache))


@pytest.mark.parametrize("layout", mark_cases(LAYOUTS, core=["stacked int8"]))
def test_fields_follow_their_cells(layout):
    cache = fill(make(**LAYOUTS[layout]))
    assert_fields_of_keys(cache)
    assert cache.spec.fields == tuple(
        (name, shape, np.dtype(dtype)) for name, (shape, dtype) in sorted(FIELDS.items())
    )
    cache = jaxkv.seq_cp(cache, 2, 3).check()
    assert_fields_of_keys(cache)
    cache = jaxkv.seq_select(cache, [1, 0], [0, 1]).check()
    assert_fields_of_keys(cache)
    cache = jaxkv.seq_rm(cache, 1).check()
    cache = jaxkv.apply(cache, jaxkv.defrag_plan(cache))
    assert_fields_of_keys(cache)
    cache = jaxkv.seq_add(cache, 0, 0, None, delta=2).check()
    cache = jaxkv.apply(cache, jaxkv.init_update(cache))
    assert_fields_of_keys(cache)
    away = jaxkv.extract(cache, [3, 0], cells=8).check()
    assert_fields_of_keys(away)
    assert_fields_of_keys(jaxkv.insert(cache, away, [0, 1], [1, 2]).check())
    loaded = snapshot.load(snapshot.save(cache))
    assert loaded.spec == cache.spec
    assert_fields_of_keys(loaded)
    saved = snapshot.save(cache, sequences=[0, 3])
    into = snapshot.load(saved, into=make(**LAYOUTS[layout]), sequences=[2, 1])
    assert_fields_of_keys(into)


def test_new_tokens_have_fields_of_zero():
    cache = fill(make(cells=9, sequences=3))
    cache = jaxkv.seq_rm(cache, 1).check()
    later, _ = run_batch(cache, jaxkv.make_batch([1, 2], sequences=1))
    new = np.asarray(later.cell_positions(1) >= 0)
    assert new.sum() == 2
    for name, field in later.fields.items():
        assert not np.asarray(field)[..., new].any(), name
        old = np.asarray(cache.fields[name])
        np.testing.assert_array_equal(np.asarray(field)[..., ~new], old[..., ~new])


@pytest.mark.core
def test_caches_without_a_field_give_zeros_and_lose_it():
    cache, plain = fill(make(cells=12, sequences=4)), make(fields=None, cells=12, sequences=4)
    plain, _ = run_batch(plain, jaxkv.make_batch([[1, 2], [3]]))
    got = jaxkv.insert(cache, plain, 0, 3).check()
    of_new = np.asarray(got.cell_positions(3) >= 0)
    assert of_new.any() and not np.asarray(got.fields["score"])[:, of_new].any()
    assert jaxkv.insert(plain, cache, 0, 3).check().fields == {}
    got = snapshot.load(snapshot.save(cache, sequences=[2]), into=plain, sequences=[3])
    assert got.fields == {} and got.seq_pos_max(3) == 3
    other = make(fields={"score": ((), "int32")}, cells=12, sequences=4)
    with pytest.raises(ValueError, match="expected a source whose field 'score' has shape and"):
        jaxkv.insert(other, cache, 0, 3)


@pytest.mark.core
def test_fields_in_jit_and_on_a_mesh_equal_those_of_one_device():
    cache = fill(make(**LAYOUTS["groups"]))

    def edit(cache):
        cache = cache.with_fields(score=cache.fields["score"] * 2)
        cache = jaxkv.seq_cp(cache, 0, 3).cache
        return jaxkv.apply(jaxkv.seq_rm(cache, 1).cache, jaxkv.defrag_plan(cache))

    wanted = edit(cache)
    assert_identical(jax.jit(edit)(cache), wanted)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    moved = jaxkv.sharding.move(cache, mesh, sharding_rules=RULES)
    with jax.set_mesh(mesh):
        got = jax.jit(edit)(moved)
    assert_identical(*(jax.device_get(x.fields) for x in (got, wanted)))


def test_fields_of_a_hybrid_are_tuples_with_an_entry_for_each_part():
    sizes = dict(kv_heads=1, head_dim=2)
    one = jaxkv.CacheSpec.attention(1, **sizes, fields={"score": ((), "float32")})
    other = jaxkv.CacheSpec.attention(1, **sizes, window=Window.sliding(4))
    spec = jaxkv.CacheSpec.hybrid((one, [0]), (other, [1]))
    cache = add_tokens(jaxkv.make_cache(spec, cells=(8, 8)), [1, 2, 3])
    score, none = cache.fields["score"]
    assert score.shape == (1, 8) and none is None and cache.spec == spec
    cache = cache.with_fields(score=(score + 3, None))
    assert (cache.parts[0].fields["score"] == 3).all()
    assert_identical(
        snapshot.load(snapshot.save(cache)).fields["score"][0][:, :3], score[:, :3] + 3
    )
    for wrong in (score, (score, score)):
        with pytest.raises(ValueError, match="expected (a tuple with an array|one of the fields)"):
            cache.with_fields(score=wrong)
    with pytest.raises(ValueError, match="expected no fields for a cache of kind 'recurrent'"):
        tiny.make_tiny("r").with_fields(score=score)


def test_layers_in_groups_keep_different_tokens():
    sizes = dict(kv_heads=(1, 2, 2), head_dim=2, rope=(ROPE_OF_2, None, ROPE_OF_2))
    spec = jaxkv.CacheSpec.attention(3, **sizes).group_layers([2, 0], [1])
    (first, _), (second, _) = spec.parts
    assert first == jaxkv.CacheSpec.attention(2, (2, 1), 2, rope=ROPE_OF_2)
    assert second == jaxkv.CacheSpec.attention(1, 2, 2, rope=None)
    cache = add_tokens(jaxkv.make_cache(spec, cells=(8, 6)), [1, 2, 3, 4, 5])
    masks = tuple(part.cell_positions() != i for i, part in enumerate(cache.parts))
    cache = add_tokens(jaxkv.evict(cache, masks).check(), [6])
    positions = [sorted(part.cell_positions(0).tolist())[-5:] for part in cache.parts]
    assert positions == [[1, 2, 3, 4, 5], [0, 2, 3, 4, 5]]


ROPE_OF_2 = jaxkv.Rope.make(2, base=100.0)


def test_snapshots_of_a_cache_without_fields_are_unchanged():
    assert b'"fields"' not in snapshot.save(fill_cache(3))
