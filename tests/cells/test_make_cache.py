"""`make_cache` makes of a spec what it says, and caches know their specs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import CacheSpec, make_cache, make_rope
from jaxkv.hybrid import HybridTable
from jaxkv.kv.table import CellTable
from jaxkv.sharding.make import shardings
from tests.meshes import RULES, mesh_of
from tests.mistakes import assert_raises, mistakes

ROPE, FAST = make_rope(4), make_rope(4, base=100.0)
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


INT8 = dict(dtype="int8")
APART = dict(
    cells=(16, None, 8, None),
    dtype=("int8", "float16", "bfloat16", None),
    ubatch_size=(1, 4, 1, 1),
    max_rollback=(0, 2, 0, 3),
    placement=("striped:4", "contiguous", "any", "any"),
    stacked=(True, False, False, False),
)
LAYER = "float32[2,2,{},8]"
PLAIN = (16, None, "any", 1, [LAYER.format(16)] * 4)
NEEDED = (1100, 512, "any", 1, [LAYER.format(1100)] * 4)
FEW = (16, None, "any", 1, [LAYER.format(16)] * 4)
CASES = {  # spec, options, and for each part: cells, ubatch_size, placement, stripes, its arrays
    "attention": (ATTENTION, dict(cells=16), [PLAIN]),
    "int8": (
        ATTENTION,
        dict(cells=16, **INT8),
        [(16, None, "any", 1, ["int8[2,2,16,8]", "float32[2,2,16,1]"] * 4)],
    ),
    "stacked": (
        ATTENTION,
        dict(cells=16, stacked=True, dtype=jnp.bfloat16),
        [(16, None, "any", 1, ["bfloat16[4,2,16,8]"] * 2)],
    ),
    "contiguous": (
        ATTENTION,
        dict(cells=16, placement="contiguous"),
        [(16, None, "contiguous", 1, [LAYER.format(16)] * 4)],
    ),
    "striped": (
        ATTENTION,
        dict(cells=16, placement="striped:4"),
        [(16, None, "striped", 4, [LAYER.format(16)] * 4)],
    ),
    "tiled": (
        ATTENTION,
        dict(cells=16, placement="tiled"),
        [(16, None, "tiled", 1, [LAYER.format(16)] * 4)],
    ),
    "shapes of each layer": (
        SHAPED,
        dict(cells=16),
        [
            (
                16,
                None,
                "any",
                1,
                [f"float32[2,{x}]" for x in ("2,16,8", "4,16,4", "2,16,4", "4,16,6")],
            )
        ],
    ),
    "latent": (LATENT, dict(cells=16), [(16, None, "any", 1, ["float32[2,1,16,8]"] * 2)]),
    "window": (WINDOW, {}, [NEEDED]),
    "window that needs less": (WINDOW, dict(cells=4096), [NEEDED]),
    "window that needs more": (WINDOW, dict(cells=16), [FEW]),
    "window of all": (
        WINDOW,
        dict(cells=4096, max_rollback=4096),
        [(4096, None, "any", 1, [LAYER.format(4096)] * 4)],
    ),
    "window by sizes": (
        WINDOW,
        dict(ubatch_size=3, max_rollback=2, placement="striped:4"),
        [(24, 3, "striped", 4, [LAYER.format(24)] * 4)],
    ),
    "recurrent": (RECURRENT, {}, [(2, ["bfloat16[2,2,3]", "float32[2,2,4,2]"] * 2)]),
    "recurrent with earlier states": (
        RECURRENT,
        dict(cells=16, max_rollback=3),
        [(8, ["bfloat16[2,8,3]", "float32[2,8,4,2]"] * 2)],
    ),
    "hybrid": (
        HYBRID,
        dict(cells=16),
        [PLAIN, FEW, PLAIN, (2, ["bfloat16[2,2,3]", "float32[2,2,4,2]"] * 2)],
    ),
    "hybrid of parts apart": (
        HYBRID,
        APART,
        [
            (16, None, "striped", 4, ["int8[4,2,16,8]", "float32[4,2,16,1]"] * 2),
            (24, 4, "contiguous", 1, ["float16[2,2,24,8]"] * 4),
            (8, None, "any", 1, ["bfloat16[2,2,8,8]"] * 4),
            (8, ["bfloat16[2,8,3]", "float32[2,8,4,2]"] * 2),
        ],
    ),
    "hybrid of a hybrid": (
        NESTED,
        dict(cells=((8, None),), max_rollback=((32, 3),)),
        [
            (8, None, "any", 1, [LAYER.format(8)] * 4),
            (8, ["bfloat16[2,8,3]", "float32[2,8,4,2]"] * 2),
        ],
    ),
}


def leaves_of(table, buffers):
    """The tables of a cache that are no hybrid, each with its buffers."""
    if not isinstance(table, HybridTable):
        return [(table, buffers)]
    pairs = zip(table.parts, buffers, strict=True)
    return [leaf for pair in pairs for leaf in leaves_of(*pair)]


def found(cache):
    def of(table, buffers):
        arrays = [f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in jax.tree.leaves(buffers)]
        if not isinstance(table, CellTable):
            return table.num_cells, arrays
        return table.num_cells, table.ubatch_size, table.placement, table.shards, arrays

    return [of(*pair) for pair in leaves_of(cache.table, cache.buffers)]


@pytest.mark.parametrize("name", CASES)
def test_make_cache_makes_empty_table_and_buffers_of_its_spec(name):
    spec, options, wanted = CASES[name]
    cache = make_cache(spec, **options, **POOLS)
    assert found(cache) == wanted
    assert all(
        table.spec.sequences == 4 and table.streams == 2
        for table, _ in leaves_of(cache.table, cache.buffers)
    )
    assert not any(np.any(np.asarray(x, float)) for x in jax.tree.leaves(cache.buffers))
    assert cache.num_used_cells() == 0
    assert cache.spec == spec and hash(cache.spec) == hash(spec)
    assert jax.eval_shape(lambda: cache).spec == spec
    assert jax.tree.map(lambda x: jnp.stack([x, x]), cache).spec == spec  # a batch of caches
    again = make_cache(cache.spec, **options, **POOLS)
    assert jax.tree.structure(again) == jax.tree.structure(cache)  # static fields too


@pytest.mark.parametrize("name", CASES)
def test_make_cache_on_mesh_lies_as_its_rules_say(name):
    spec, options, wanted = CASES[name]
    mesh = mesh_of(data=2, tensor=2, cells=2)
    whole = make_cache(spec, **options, **POOLS)
    for rules in (jaxkv.sharding.ShardingRules(), RULES):
        made = make_cache(spec, **options, **POOLS, mesh=mesh, sharding_rules=rules)
        assert found(made) == wanted and made.spec == spec
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
    other = CacheSpec.recurrent(
        1, {"y": jax.ShapeDtypeStruct((), jnp.int32), "x": ((2,), jnp.float32)}, {}
    )
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


def test_make_cache_raises_before_any_part_is_made():
    large = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2**20)
    spec = CacheSpec.hybrid((large, [0]), (RECURRENT, [1, 2]))
    with pytest.raises(ValueError, match="max_rollback"):
        make_cache(spec, cells=2**29, max_rollback=-1)
