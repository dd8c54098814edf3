"""`make_cache` creates the arrays that a spec describes, and caches return their specs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import CacheSpec, Rope, make_cache
from jaxkv.hybrid import HybridTable
from jaxkv.kv.make import default_placement
from jaxkv.kv.table import CellTable
from jaxkv.sharding.make import shardings
from tests.helpers.meshes import RULES, mesh_of
from tests.helpers.mistakes import assert_raises, mistakes

ROPE, FAST = Rope.make(4), Rope.make(4, base=100.0)
NEAR = jaxkv.Window.sliding(6)
HEADS = dict(kv_heads=2, head_dim=8)
SIZES = dict(layers=2, **HEADS)
STATES = {"y": ((4, 2), jnp.float32), "x": ((3,), jnp.bfloat16)}
POOLS = dict(sequences=4, streams=2)

ATTENTION = CacheSpec.attention(**SIZES, rope=ROPE)
WINDOW = CacheSpec.attention(**SIZES, window=NEAR)
SOURCES = CacheSpec.cross_attention(**SIZES)
RECURRENT = CacheSpec.recurrent(2, STATES, {"y": (0, 4)})
SHAPED = CacheSpec.attention(2, (2, 4), [8, 4], value_dim=[4, 6], rope=(ROPE, None))
LATENT = CacheSpec.attention(2, 1, 8, value_dim=slice(4, None), rope=ROPE)
HYBRID = CacheSpec.hybrid(
    (ATTENTION, (0, 4)), (WINDOW, [1, 3]), (SOURCES, (5, 6)), (RECURRENT, (2, 0))
)
NESTED = CacheSpec.hybrid((CacheSpec.hybrid((WINDOW, (0, 2)), (RECURRENT, (1, 3))), (0, 1, 2, 3)))


APART = dict(
    cells=(16, None, 8, None),
    dtype=("int8", ("float16", "int4"), "bfloat16", None),
    ubatch_size=(1, 4, 1, 1),
    max_rollback=(0, 2, 0, 3),
    placement=("striped:4", "tiled", "any", "any"),
    stacked=(True, False, False, False),
)


def cells(count, arrays=None, *, ubatch_size=None, placement="any"):
    """An attention part; its arrays default to keys and values of two layers."""
    arrays = arrays or [f"float32[2,2,{count},8]"] * 4
    return count, ubatch_size, placement, arrays


def states(count):
    return count, [f"bfloat16[2,{count},3]", f"float32[2,{count},4,2]"] * 2


UNLIKE = [f"float32[2,{sizes}]" for sizes in ("2,16,8", "4,16,4", "2,16,4", "4,16,6")]
OF_INT8 = ["int8[2,2,16,8]", "float32[2,2,16,1]"] * 4
OF_INT4 = ["int8[2,2,16,4]", "int16[2,2,16,1]"] * 4
STACKED_INT8 = ["int8[4,2,16,8]", "float32[4,2,16,1]"] * 2
FLOAT16_INT4 = ["float16[2,2,64,8]"] * 2 + ["int8[2,2,64,4]", "int16[2,2,64,1]"] * 2
STACKED = dict(stacked=True, dtype=jnp.bfloat16)
STRIPED = dict(placement="striped:4")
BY_SIZES = dict(ubatch_size=3, max_rollback=2, placement="striped:4")
SMALLER = dict(cells=((8, None),), max_rollback=((32, 3),))
CASES = {  # spec, options, and the expected parts
    "attention": (ATTENTION, dict(cells=16), [cells(16)]),
    "int8": (ATTENTION, dict(cells=16, dtype="int8"), [cells(16, OF_INT8)]),
    "int4": (ATTENTION, dict(cells=16, dtype="int4"), [cells(16, OF_INT4)]),
    "int8 and int4": (
        ATTENTION,
        dict(cells=16, dtype=("int8", "int4"), rotate=True),
        [cells(16, [*OF_INT8[:2] * 2, *OF_INT4[:2] * 2])],
    ),
    "stacked": (ATTENTION, dict(cells=16) | STACKED, [cells(16, ["bfloat16[4,2,16,8]"] * 2)]),
    "tiled": (ATTENTION, dict(cells=16, placement="tiled"), [cells(16, placement="tiled")]),
    "striped": (ATTENTION, dict(cells=16, placement="striped:4"), [cells(16, **STRIPED)]),
    "shapes of each layer": (SHAPED, dict(cells=16), [cells(16, UNLIKE)]),
    "latent": (LATENT, dict(cells=16), [cells(16, ["float32[2,1,16,8]"] * 2)]),
    "window": (WINDOW, {}, [cells(1100, ubatch_size=512)]),
    "window that needs less": (WINDOW, dict(cells=4096), [cells(1100, ubatch_size=512)]),
    "window that needs more": (WINDOW, dict(cells=16), [cells(16)]),
    "window of all": (WINDOW, dict(cells=4096, max_rollback=4096), [cells(4096)]),
    "window by sizes": (WINDOW, BY_SIZES, [cells(24, ubatch_size=3, **STRIPED)]),
    "recurrent": (RECURRENT, {}, [states(2)]),
    "recurrent with earlier states": (RECURRENT, dict(cells=16, max_rollback=3), [states(8)]),
    "hybrid": (HYBRID, dict(cells=16), [cells(16)] * 3 + [states(2)]),
    "hybrid of parts apart": (
        HYBRID,
        APART,
        [
            cells(16, STACKED_INT8, **STRIPED),
            cells(64, FLOAT16_INT4, ubatch_size=4, placement="tiled"),
            cells(8, ["bfloat16[2,2,8,8]"] * 4),
            states(8),
        ],
    ),
    "hybrid of a hybrid": (NESTED, SMALLER, [cells(8), states(8)]),
}


def leaves_of(cache):
    """A cache that is not a hybrid, or each part."""
    if not isinstance(cache.table, HybridTable):
        return [cache]
    return [leaf for part in cache.parts for leaf in leaves_of(part)]


def describe(cache):
    def of(table, buffers):
        arrays = [f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in jax.tree.leaves(buffers)]
        if not isinstance(table, CellTable):
            return table.num_cells, arrays
        return table.num_cells, table.ubatch_size, table.placement.name, arrays

    return [of(leaf.table, leaf.buffers) for leaf in leaves_of(cache)]


@pytest.mark.parametrize("name", CASES)
def test_make_cache_makes_empty_table_and_buffers_of_its_spec(name):
    spec, options, wanted = CASES[name]
    cache = make_cache(spec, **options, **POOLS)
    assert describe(cache) == wanted
    tables = [leaf.table for leaf in leaves_of(cache)]
    assert all(table.spec.sequences == 4 and table.streams == 2 for table in tables)
    assert not any(np.any(np.asarray(x, float)) for x in jax.tree.leaves(cache.buffers))
    assert cache.num_used_cells() == 0
    assert cache.spec == spec and hash(cache.spec) == hash(spec)
    assert jax.eval_shape(lambda: cache).spec == spec
    assert jax.tree.map(lambda x: jnp.stack([x, x]), cache).spec == spec  # a batch of caches
    again = make_cache(cache.spec, **options, **POOLS)
    assert jax.tree.structure(again) == jax.tree.structure(cache)  # static fields too


@pytest.mark.parametrize(
    "cells, sequences, streams, expected",
    [
        (4096, 8, 1, "tiled"),
        (4096, 16, 2, "tiled"),
        (4032, 8, 1, "any"),
        (4100, 8, 1, "any"),  # not whole tiles
        (4096, 7, 1, "any"),
        (4096, 8, 8, "any"),
    ],
)
def test_default_placement_of_large_pools_is_tiled(cells, sequences, streams, expected):
    sizes = dict(cells=cells, sequences=sequences, streams=streams)
    assert jax.eval_shape(lambda: make_cache(ATTENTION, **sizes)).table.placement.name == expected
    if not cells % 64:
        chosen = jax.eval_shape(lambda: make_cache(ATTENTION, placement="any", **sizes))
        assert chosen.table.placement.name == "any"
    assert default_placement(cells, sharing=sequences // streams, platform="tpu").name == "any"
    mesh = jax.make_mesh((1,), ("tensor",))
    rules = jaxkv.sharding.ShardingRules()
    shapes = jaxkv.sharding.shapes(lambda: make_cache(ATTENTION, **sizes), mesh, rules)
    assert shapes.table.placement.name == "any"


@pytest.mark.parametrize("name", CASES)
def test_make_cache_on_mesh_lies_as_its_rules_say(name):
    spec, options, wanted = CASES[name]
    mesh = mesh_of(data=2, tensor=2, cells=2)
    whole = make_cache(spec, **options, **POOLS)
    for rules in (jaxkv.sharding.ShardingRules(), RULES):
        made = make_cache(spec, **options, **POOLS, mesh=mesh, sharding_rules=rules)
        assert describe(made) == wanted and made.spec == spec
        chex.assert_trees_all_equal(made.buffers, whole.buffers)
        where = shardings(jax.eval_shape(lambda: whole), mesh, rules)
        pairs = zip(jax.tree.leaves(made), jax.tree.leaves(where), strict=True)
        assert all(one.sharding == other for one, other in pairs)


def test_specs_are_equal_however_they_are_written():
    attention = CacheSpec.attention(2, 2, 8, rope=ROPE)
    for kv_heads, head_dim, value_dim in [((2, 2), 8, 8), (2, [8, 8], None), (2, 8, (8, 8))]:
        other = CacheSpec.attention(2, kv_heads, head_dim, value_dim, rope=(ROPE, ROPE))
        assert other == attention and hash(other) == hash(attention)
    assert attention != CacheSpec.attention(2, 2, 8, rope=None) != CacheSpec.attention(2, 2, 8)
    assert attention != CacheSpec.attention(2, 2, 8, rope=(ROPE, FAST))
    one = CacheSpec.recurrent(1, {"x": ((2,), "float32"), "y": ((), jnp.int32)})
    shape = jax.ShapeDtypeStruct((), jnp.int32)
    other = CacheSpec.recurrent(1, {"y": shape, "x": ((2,), jnp.float32)}, {})
    assert one == other and hash(one) == hash(other)
    assert CacheSpec.attention(2, 1, 8, slice(-4, 8), rope=ROPE) == LATENT


def test_specs_print_what_they_were_made_of():
    sizes = "layers=2, kv_heads=2, head_dim=8"
    assert repr(WINDOW) == f"CacheSpec.attention({sizes}, window=Window.sliding(6))"
    assert repr(SHAPED) == (
        "CacheSpec.attention(layers=2, kv_heads=(2, 4), head_dim=(8, 4), value_dim=(4, 6), "
        "rope=(<Rope of 2 pairs, slowest 0.01>, None))"
    )
    assert repr(LATENT).endswith("value_dim=slice(4, 8), rope=<Rope of 2 pairs, slowest 0.01>)")
    assert repr(RECURRENT) == (
        "CacheSpec.recurrent(layers=2, states={'x': ((3,), 'bfloat16'), 'y': ((4, 2), 'float32')}, "
        "shard_dims={'y': (0, 4)})"
    )
    assert repr(SOURCES) == f"CacheSpec.cross_attention({sizes})"
    assert repr(HYBRID) == (
        f"CacheSpec.hybrid(({ATTENTION}, (0, 4)), ({WINDOW}, (1, 3)), ({SOURCES}, (5, 6)), "
        f"({RECURRENT}, (2, 0)))"
    )


@pytest.mark.parametrize(("call", "outcome"), mistakes("specs"))
def test_wrong_spec_or_size_raises(call, outcome):
    assert_raises(call, outcome, globals())
