"""`make_cache` makes of a spec what the maker of each kind makes, and caches know their specs."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import (
    CacheSpec,
    make_cache,
    make_cross_attention_cache,
    make_hybrid_cache,
    make_kv_cache,
    make_recurrent_cache,
    make_rope,
)
from tests.caches import assert_identical
from tests.meshes import RULES, mesh_of
from tests.mistakes import assert_raises, mistakes

ROPE, FAST = make_rope(4), make_rope(4, base=100.0)
NEAR = jaxkv.window.sliding(6)
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


SHAPES = dict(kv_heads=(2, 4), head_dim=(8, 4), value_dim=(4, 6), rope=(ROPE, None))


def kv(**options):
    return make_kv_cache(**SIZES | options, **POOLS)


def window(**options):
    return kv(window=NEAR, **options)


def states(max_rollback):
    return make_recurrent_cache(
        layers=2, states=STATES, shard_dims={"y": (0, 4)}, max_rollback=max_rollback, **POOLS
    )


def sources(cells, dtype="float32"):
    return make_cross_attention_cache(**SIZES, cells=cells, dtype=dtype, **POOLS)


def hybrid(full, near, far, kept):
    return make_hybrid_cache((full, (0, 4)), (near, (1, 3)), (far, (5, 6)), (kept, (2, 0)))


def nested():
    inner = make_hybrid_cache((window(cells=8), (0, 2)), (states(3), (1, 3)))
    return make_hybrid_cache((inner, (0, 1, 2, 3)))


INT8, HALF = dict(dtype="int8"), dict(dtype=jnp.bfloat16)
CASES = {
    "attention": (ATTENTION, dict(cells=16), partial(kv, cells=16, rope=ROPE)),
    "int8": (ATTENTION, dict(cells=16, **INT8), partial(kv, cells=16, rope=ROPE, **INT8)),
    "bfloat16": (ATTENTION, dict(cells=16, **HALF), partial(kv, cells=16, rope=ROPE, **HALF)),
    "stacked": (
        ATTENTION,
        dict(cells=16, stacked=True),
        partial(kv, cells=16, rope=ROPE, stacked=True),
    ),
    "contiguous": (
        ATTENTION,
        dict(cells=16, placement="contiguous"),
        partial(kv, cells=16, rope=ROPE, placement="contiguous"),
    ),
    "striped": (
        ATTENTION,
        dict(cells=16, placement="striped:4"),
        partial(kv, cells=16, rope=ROPE, placement="striped", shards=4),
    ),
    "tiled": (
        ATTENTION,
        dict(cells=16, placement="tiled"),
        partial(kv, cells=16, rope=ROPE, placement="tiled"),
    ),
    "shapes of each layer": (
        SHAPED,
        dict(cells=16),
        partial(
            kv, kv_heads=(2, 4), head_dim=(8, 4), value_dim=(4, 6), rope=(ROPE, None), cells=16
        ),
    ),
    "latent": (
        LATENT,
        dict(cells=16, **HALF),
        partial(kv, kv_heads=1, value_dim=slice(4, 8), rope=ROPE, cells=16, **HALF),
    ),
    "window": (WINDOW, {}, window),
    "window that needs less": (WINDOW, dict(cells=4096), window),
    "window that needs more": (WINDOW, dict(cells=16), partial(window, cells=16)),
    "window of all": (
        WINDOW,
        dict(cells=4096, max_rollback=4096),
        partial(window, cells=4096),
    ),
    "window by sizes": (
        WINDOW,
        dict(ubatch_size=3, max_rollback=2, placement="striped:4"),
        partial(window, ubatch_size=3, max_rollback=2, placement="striped", shards=4),
    ),
    "recurrent": (RECURRENT, {}, partial(states, 0)),
    "recurrent with earlier states": (
        RECURRENT,
        dict(cells=16, max_rollback=3),
        partial(states, 3),
    ),
    "hybrid": (
        HYBRID,
        dict(cells=16),
        lambda: hybrid(kv(cells=16, rope=ROPE), window(cells=16), sources(16), states(0)),
    ),
    "hybrid of parts apart": (
        HYBRID,
        dict(
            cells=(16, None, 8, None),
            dtype=("int8", "float16", "bfloat16", None),
            ubatch_size=(1, 4, 1, 1),
            max_rollback=(0, 2, 0, 3),
            placement=("striped:4", "contiguous", "any", "any"),
            stacked=(True, False, False, False),
        ),
        lambda: hybrid(
            kv(cells=16, rope=ROPE, dtype="int8", placement="striped", shards=4, stacked=True),
            window(ubatch_size=4, max_rollback=2, dtype="float16", placement="contiguous"),
            sources(8, "bfloat16"),
            states(3),
        ),
    ),
    "hybrid of a hybrid": (
        NESTED,
        dict(cells=((8, None),), max_rollback=((32, 3),)),
        nested,
    ),
}


def assert_alike(made, wanted):
    assert jax.tree.structure(made) == jax.tree.structure(wanted)  # static fields too
    assert type(made.table) is type(wanted.table)
    assert made.table.spec == wanted.table.spec
    assert_identical(made, wanted)


@pytest.mark.parametrize("name", CASES)
def test_make_cache_is_what_maker_of_kind_makes(name):
    spec, options, old = CASES[name]
    assert_alike(make_cache(spec, **options, **POOLS), old())


@pytest.mark.parametrize("name", CASES)
def test_make_cache_on_mesh_is_what_make_sharded_makes(name):
    spec, options, old = CASES[name]
    mesh = mesh_of(data=2, tensor=2, cells=2)
    for rules in (None, RULES):
        made = make_cache(spec, **options, **POOLS, mesh=mesh, sharding_rules=rules)
        wanted = jaxkv.sharding.make_sharded(old, mesh, rules)
        assert_alike(made, wanted)
        pairs = zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True)
        assert all(one.sharding == other.sharding for one, other in pairs)
        assert made.spec == spec


@pytest.mark.parametrize("name", CASES)
def test_spec_of_cache_makes_one_like_it(name):
    spec, options, old = CASES[name]
    assert old().spec == spec
    assert hash(old().spec) == hash(spec)
    assert jax.eval_shape(old).spec == spec
    assert_alike(make_cache(old().spec, **options, **POOLS), old())
    assert jax.tree.map(lambda x: jnp.stack([x, x]), old()).spec == spec  # a batch of caches


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
    assert repr(WINDOW) == f"CacheSpec.attention({sizes}, window=sliding(6))"
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
