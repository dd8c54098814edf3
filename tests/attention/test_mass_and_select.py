"""Attention mass, and attention to selected cells, equal the formula; with a mask of the cells."""

from dataclasses import fields, replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.kv import select as selected_cells
from jaxkv.kv.attend_lists import MASS_BLOCK
from jaxkv.kv.mask import list_shape
from jaxkv.ops.attention.visibility import compute_mask
from tests.attention.formula import PLAIN, formula, make_case, softmax_weights
from tests.attention.lives import draw_qkv, make_edited, start_step
from tests.attention.test_attention_matrix import ALL, CASES, OPTIONS
from tests.attention.ways import attend_with_mass
from tests.helpers import caches, hlo
from tests.helpers.caches import HEADS, LATENT, SIZE, SMALL, STACKED, attention_cache
from tests.helpers.meshes import KINDS, mesh_of, place_on_mesh
from tests.helpers.parametrize import mark_cases

core = pytest.mark.core
KEEP = {"atol": 3e-6, "rtol": 3e-6}
CLOSE = dict(rtol=0, atol=1e-6)

PATHS = [
    (way, name)
    for way in ("default", "tiles", "whole", "elsewhere")
    for name in CASES
    if way != "elsewhere" or not ("latent" in name or "bias" in name)
]
PATHS += [("pallas", "plain"), ("xla", "all options"), ("cudnn", "plain")]
STORED = "16", "float8", "int4", "stacked int8"
"""Words in the names of cases whose weights are those of other cases, of other keys."""
CORE = [
    (way, name) for way, name in PATHS if way == "default" or name in ("plain", "blocks", "bias")
]
CORE = [one for one in CORE if not any(word in one[1] for word in STORED)]
FAST = [("default", name) for name in ("plain", "all options", "bias array", "few tiles")]


@pytest.mark.parametrize(("way", "name"), mark_cases(PATHS, fast=FAST, core=CORE))
def test_mass_matches_formula(way, name):
    one, options = make_case(**CASES[name]), OPTIONS.get(name, PLAIN)
    out, mass = attend_with_mass(way, *one, options)
    close = 2e-2 if jnp.bfloat16 in (one.q.dtype, one.k.dtype) else 1e-5
    close = 1e-4 if "large logits" in name else close
    np.testing.assert_allclose(mass, one.wanted_mass(options), rtol=close, atol=close)
    wanted = np.asarray(one.wanted(options))
    np.testing.assert_allclose(np.asarray(out, np.float32), wanted, rtol=close, atol=close)


@core
@pytest.mark.parametrize("way", ["default", "tiles", "whole"])
def test_mass_derivatives_match_formula(way):
    q, k, v, looks = make_case(heads=4, lists=[2, 0])
    options = replace(ALL, sinks=jnp.linspace(-1.0, 1.0, 4))
    factors = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 40)), jnp.float32)

    def by_formula(q, k, sinks):
        mask = compute_mask(looks)
        given = replace(options, sinks=sinks)
        return softmax_weights(q, k[looks.streams], mask, given, xp=jnp).sum(2)

    def found(q, k, sinks):
        return attend_with_mass(way, q, k, v, looks, replace(options, sinks=sinks))[1]

    def slopes_of(mass):
        return jax.grad(lambda *x: jnp.sum(jnp.sin(mass(*x)) * factors), (0, 1, 2))

    slopes = [slopes_of(mass)(q, k, options.sinks) for mass in (found, by_formula)]
    for one, other in zip(*slopes, strict=True):
        assert np.abs(other).max() > 1e-2
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------- caches


def draw_select(step, count, seed=0):
    """Random cells of each token, with repeated cells and cells that do not exist."""
    shape = list_shape(step)
    cells = step.table.num_cells
    drawn = np.random.default_rng(seed).integers(-2, cells + 3, (*shape, count))
    drawn[..., -1] = drawn[..., 0]
    return jnp.asarray(drawn, jnp.int32)


def is_selected(select, cells):
    return (np.asarray(select)[..., None] == np.arange(cells)).any(2)


def by_mask(step, layer, q, select, options=PLAIN, bias=0.0, **look):
    """The output and the mass with a mask of the selected cells, or of all."""
    k, v, mask, _ = map(np.asarray, jaxkv.read_kv(step, layer, **look))
    mask = mask if select is None else mask & is_selected(select, mask.shape[2])
    lists = np.asarray(q).reshape(*mask.shape[:2], *q.shape[2:])
    out = formula(lists, k, v, mask, options, bias)
    return out.reshape(*q.shape[:3], -1), softmax_weights(lists, k, mask, options, bias).sum(2)


LIVES = [kind for kind in [*caches.ALL_KINDS, LATENT] if len(kind.windows) == 1]
FAST = [SMALL, caches.TILES, STACKED, LATENT]
CORE = [caches.WIDE, caches.GROUPS_STRIPES, caches.HEAD_ROWS]


@pytest.mark.parametrize("kind", mark_cases(LIVES, FAST, CORE), ids=str)
def test_mass_and_select_after_edits_match_formula(kind):
    step = start_step(make_edited(kind))
    q, k, v = draw_qkv(step)
    v = None if kind.latent else v
    for select, close in ((None, KEEP), (draw_select(step, 4), CLOSE)):
        after, out, mass = jaxkv.attend(step, 0, q, k, v, select=select, return_mass=True)
        wanted = by_mask(after, 0, q, select)
        assert np.abs(wanted[0]).max() > 0.1
        for found, one in zip((out, mass), wanted, strict=True):
            np.testing.assert_allclose(found, one, **close)
        np.testing.assert_allclose(jaxkv.attend(step, 0, q, k, v, select=select)[1], out, **close)


@core
def test_mass_of_decoder_tokens_over_sources_matches_formula():
    heads = dict(layers=1, kv_heads=HEADS, head_dim=4)
    parts = jaxkv.CacheSpec.attention(**heads), jaxkv.CacheSpec.cross_attention(**heads)
    spec = jaxkv.CacheSpec.hybrid(*zip(parts, ([0], [1]), strict=True))
    cache = jaxkv.make_cache(spec, cells=8, sequences=2)
    plan = jaxkv.init_batch(cache, jaxkv.make_batch([[1, 2, 3], [4, 5]]), encoder=True)
    step = jaxkv.apply(cache, plan)
    _, k, v = draw_qkv(step)
    cache = jaxkv.write_kv(step, 1, k, v).cache
    step = jaxkv.apply(cache, jaxkv.init_batch(cache, jaxkv.make_batch([[1, 2], [3]])))
    q = draw_qkv(step)[0]
    mass = jaxkv.attend(step, 1, q, return_mass=True)[2]
    np.testing.assert_allclose(mass, by_mask(step, 1, q, None)[1], **KEEP)


@core
def test_select_of_all_cells_is_attention_to_all():
    step = start_step(make_edited(SMALL))
    arrays = draw_qkv(step)
    shape = list_shape(step)
    every = jnp.broadcast_to(jnp.arange(step.table.num_cells)[::-1], (*shape, step.table.num_cells))
    out = jaxkv.attend(step, 0, *arrays, select=every)[1]
    np.testing.assert_allclose(out, jaxkv.attend(step, 0, *arrays)[1], **CLOSE)


@core
@pytest.mark.parametrize("implementation", ["tiles", "whole", "pallas", "xla"])
def test_select_in_each_implementation_matches_mask(implementation):
    step = start_step(make_edited(SMALL))
    q, k, v = draw_qkv(step)
    select = draw_select(step, 4)
    after, out = jaxkv.attend(step, 0, q, k, v, select=select, implementation=implementation)
    np.testing.assert_allclose(out, by_mask(after, 0, q, select)[0], **CLOSE)


def falls(query, key, head):
    return (key - query) * (head + 1.0)


@core
@pytest.mark.parametrize("look", [{"causal": False}, {"visible_until": 1}], ids=str)
@pytest.mark.parametrize("bias", ["function", "array"])
def test_mass_and_select_with_options_match_formula(look, bias):
    step = start_step(make_edited(SMALL))
    look = {n: x if n == "causal" else step.positions - x for n, x in look.items()}
    q, k, v = draw_qkv(step)
    given = dict(scale=0.7, softcap=2.0, sinks=jnp.linspace(-1, 1, 2 * HEADS))
    array = np.random.default_rng(2).normal(size=(*q.shape[:3], step.table.num_cells))
    array = jnp.asarray(array, jnp.float32)
    given_bias = falls if bias == "function" else array
    attend = partial(jaxkv.attend, step, 0, q, k, v, **given, **look, bias=given_bias)
    for select, close in ((None, KEEP), (draw_select(step, 4), CLOSE)):
        after, *found = attend(select=select, return_mass=True)
        *_, mask, positions = jaxkv.read_kv(after, 0, **look)
        at = step.positions.reshape(mask.shape[:2])[:, None, :, None]
        added = falls(at, positions[:, None, None], np.arange(2 * HEADS)[None, :, None, None])
        if bias == "array":
            added = array.reshape(*mask.shape[:2], *array.shape[2:]).swapaxes(1, 2)
        wanted = by_mask(after, 0, q, select, replace(PLAIN, **given), np.asarray(added), **look)
        assert wanted[1].sum() > 0.1
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, **close)


@core
@pytest.mark.parametrize("tokens", [MASS_BLOCK, 2 * MASS_BLOCK + 5])
def test_mass_of_long_prompt_sums_blocks_of_tokens(tokens):
    cache = attention_cache(layers=1, kv_heads=2, head_dim=4, cells=2 * MASS_BLOCK + 8)
    step = jaxkv.apply(cache, jaxkv.init_batch(cache, jaxkv.make_batch([1] * tokens)))
    q, k, v = draw_qkv(step)
    bias = np.random.default_rng(0).normal(size=(*q.shape[:3], 1)).astype(np.float32)
    bias = bias * np.linspace(0, 1, cache.table.num_cells, dtype=np.float32)
    attend = partial(jaxkv.attend, bias=bias)
    _, out = attend(step, 0, q, k, v)
    step, same, mass = attend(step, 0, q, k, v, return_mass=True)
    np.testing.assert_allclose(same, out, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(mass, by_mask(step, 0, q, None, bias=bias.swapaxes(1, 2))[1], **KEEP)


@core
def test_select_in_blocks_of_tokens_matches_mask(monkeypatch):
    """As for a long prompt, whose selected keys exceed the limit together."""
    step = start_step(make_edited(replace(SMALL, name="blocks", cells=11)), [0, 1, 2])
    q, k, v = draw_qkv(step)
    select = draw_select(step, 4)
    cell = 2 * HEADS * SIZE * 4
    monkeypatch.setattr(selected_cells, "MAX_BYTES", 4 * 4 * cell)  # for 4 of the tokens
    run = partial(jaxkv.attend, step, 0, k=k, v=v, select=select, return_mass=True)
    assert "scan[" in str(jax.make_jaxpr(run)(q))
    after, *found = run(q)
    for one, other in zip(found, by_mask(after, 0, q, select), strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


@core
def test_select_does_not_read_other_cells():
    step = start_step(make_edited(SMALL))
    q, k, v = draw_qkv(step)
    slot = int(step.ubatch.slots[0, 0])  # of a token that attends to itself
    other = jnp.full((*list_shape(step), 1), slot + 1, jnp.int32)
    run = partial(jaxkv.attend, step, 0, q, v=v)
    assert np.isnan(run(k=k.at[0, 0].set(jnp.nan))[1]).any()
    out, same = (run(k=x, select=other)[1] for x in (k, k.at[0, 0].set(jnp.nan)))
    np.testing.assert_array_equal(out, same)


@core
@pytest.mark.parametrize("stale", [True, False])
@pytest.mark.parametrize("streams", [1, 2])
def test_mass_and_select_are_nan_if_stale_and_zero_if_refused(stale, streams):
    cache = make_edited(caches.Kind("streams", cells=8, sequences=2, streams=streams))
    (ubatch,) = jaxkv.init_batch(cache, jaxkv.make_batch([[1], [2]])).ubatches
    if stale:
        cache, _ = jaxkv.seq_rm(cache, 0, 3, -1)
    else:
        ubatch = replace(ubatch, slots=jnp.full_like(ubatch.slots, 1 << 30))
    step = jaxkv.apply(cache, ubatch)
    lists = np.asarray(step.is_stale) if stale else slice(None)
    assert np.asarray(step.is_stale).any() == stale
    attend = partial(jaxkv.attend, step, 0, *draw_qkv(step))
    for select in (None, draw_select(step, 3)):
        _, out, mass = attend(select=select, return_mass=True)
        for one in (out, mass, attend(select=select)[1]):
            np.testing.assert_array_equal(one[lists], np.nan if stale else 0.0)


@core
def test_mass_of_nan_key_is_nan_in_heads_that_read_it():
    step = start_step(make_edited(SMALL))
    q, k, v = draw_qkv(step)
    mass = jaxkv.attend(step, 0, q, k.at[0, 0, 1, 0].set(jnp.nan), v, return_mass=True)[2]
    wanted = jaxkv.attend(step, 0, q, k, v, return_mass=True)[2]
    assert np.isnan(mass[:, HEADS:]).all()
    np.testing.assert_array_equal(mass[:, :HEADS], wanted[:, :HEADS])


@core
def test_mass_under_vmap_matches_each():
    step = start_step(make_edited(SMALL))
    q, k, v = draw_qkv(step)
    run = partial(jaxkv.attend, step, 0, return_mass=True)
    many = jnp.stack([q, 2 * q, -q])
    found = jax.jit(jax.vmap(lambda q: run(q, k, v)[2]))(many)
    for got, one in zip(found, many, strict=True):
        np.testing.assert_allclose(got, run(one, k, v)[2], **KEEP)


@core
def test_select_derivatives_match_mask():
    step = start_step(make_edited(SMALL))
    q, k, v = draw_qkv(step)
    select = draw_select(step, 4)
    after = jaxkv.write_kv(step, 0, k, v)
    mask = np.asarray(jaxkv.read_kv(after, 0).mask) & is_selected(select, step.table.num_cells)

    def by_formula(q, k, v):
        read = jaxkv.read_kv(jaxkv.write_kv(step, 0, k, v), 0)
        lists = q.reshape(*mask.shape[:2], *q.shape[2:])
        keys = jnp.where(mask.any(1)[:, None, :, None], read.k, 0)
        return formula(lists, keys, read.v, mask, xp=jnp).reshape(q.shape)

    def found(q, k, v):
        return jaxkv.attend(step, 0, q, k, v, select=select)[1]

    factors = jnp.linspace(1, 2, q.size).reshape(q.shape)

    def slopes_of(attend):
        return jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(attend(*x)) * factors), (0, 1, 2)))

    for one, other in zip(slopes_of(found)(q, k, v), slopes_of(by_formula)(q, k, v), strict=True):
        assert np.abs(other).max() > 1e-2
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@core
def test_select_under_vmap_matches_each():
    step = start_step(make_edited(SMALL))
    q, k, v = draw_qkv(step)
    many = jnp.stack([draw_select(step, 4, seed) for seed in range(3)])
    run = partial(jaxkv.attend, step, 0, q, k, v)
    found = jax.jit(jax.vmap(lambda cells: run(select=cells)[1]))(many)
    for got, cells in zip(found, many, strict=True):
        np.testing.assert_allclose(got, run(select=cells)[1], **CLOSE)


ON_MESH = {kind.name: kind for kind in KINDS if len(kind.windows) == 1}
PLACES = [*product(ON_MESH, ("rows", "lists"))]
FEW_PLACES = [("all", "rows"), ("all", "lists"), ("tiled", "rows")]


@pytest.mark.parametrize(("name", "how"), mark_cases(PLACES, core=FEW_PLACES))
def test_mass_and_select_on_mesh_match_one_device(name, how):
    """Rows that are no sequences, but lists, are computed on all devices."""
    kind = ON_MESH[name]
    plain = make_edited(caches.Kind(**{x.name: getattr(kind, x.name) for x in fields(caches.Kind)}))

    def run(cache):
        step = start_step(cache, range(kind.sequences) if how == "rows" else [1, 0])
        run = partial(jaxkv.attend, step, 0, *draw_qkv(step))
        select = partial(run, select=draw_select(step, 5))
        sinks = jnp.linspace(-1, 1, 2 * HEADS)
        mass = run(sinks=sinks, return_mass=True)[1:]
        return *mass, select()[1], *select(return_mass=True)[1:]

    wanted = run(plain)
    with jax.set_mesh(mesh_of(**dict(kind.axes))):
        found = run(place_on_mesh(plain))
    for got, one in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, one, rtol=1e-5, atol=3e-6)


# ---------------------------------------------------------------------------------- programs


def compile_select(tokens, cells, count):
    cache = jax.eval_shape(partial(attention_cache, layers=1, kv_heads=2, head_dim=8, cells=cells))
    (ubatch,) = jaxkv.init_full(cache, ubatch_size=tokens).ubatches
    shapes = [jax.ShapeDtypeStruct((1, tokens, n, 8), jnp.float32) for n in (4, 2, 2)]
    select = jax.ShapeDtypeStruct((1, tokens, count), jnp.int32)

    def run(cache, ubatch, select, q, k, v):
        step, *out = jaxkv.attend(jaxkv.apply(cache, ubatch), 0, q, k, v, select=select)
        return step.cache, *out

    run = jax.jit(run, donate_argnums=0)
    return run.lower(cache, ubatch, select, *shapes).compile()


@core
def test_select_holds_nothing_of_all_pairs():
    """Fewer bytes than a mask of all tokens and cells, and the same for twice as many cells."""
    tokens, count, cells = 16, 8, 1 << 17
    programs = [compile_select(tokens, n, count) for n in (cells, 2 * cells)]
    once, twice = map(hlo.temporary_bytes, programs)
    keys = tokens * count * 2 * 2 * 8 * 4
    assert once < 8 * keys + 8 * cells < tokens * cells  # the table of a plan is read
    assert twice - once < tokens * cells / 4


def program(return_mass, tokens, cells=4096):
    cache = jax.eval_shape(partial(attention_cache, layers=1, kv_heads=2, head_dim=8, cells=cells))
    (ubatch,) = jaxkv.init_full(cache, ubatch_size=tokens).ubatches
    shapes = [jax.ShapeDtypeStruct((1, tokens, n, 8), jnp.float32) for n in (4, 2, 2)]

    def run(cache, ubatch, q, k, v):
        return jaxkv.attend(jaxkv.apply(cache, ubatch), 0, q, k, v, return_mass=return_mass)

    return jax.jit(run).lower(cache, ubatch, *shapes).compile()


@core
def test_mass_holds_weights_of_one_block():
    """Logits and weights of a block, and not of all 512 tokens."""
    block = MASS_BLOCK * 4 * 4096 * 4
    extra = hlo.temporary_bytes(program(True, 512)) - hlo.temporary_bytes(program(False, 512))
    assert extra < 4 * block < 512 * 4 * 4096 * 4
