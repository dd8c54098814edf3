"""The attention mass equals the weights of the formula, summed over the tokens of a list."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.kv.attend_lists import MASS_BLOCK
from jaxkv.ops.attention.visibility import compute_mask
from tests.attention.formula import PLAIN, make_case, softmax_weights
from tests.attention.lives import draw_qkv, make_edited, start_step
from tests.attention.test_attention_matrix import ALL, CASES, OPTIONS
from tests.attention.ways import attend_with_mass
from tests.helpers import caches, hlo
from tests.helpers.caches import HEADS, SMALL, attention_cache
from tests.helpers.parametrize import mark_cases

core = pytest.mark.core
KEEP = {"atol": 3e-6, "rtol": 3e-6}


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


def wanted_mass(step, layer, q, bias=0.0, options=PLAIN, **look):
    k, _, mask, _ = map(np.asarray, jaxkv.read_kv(step, layer, **look))
    lists = np.asarray(q).reshape(*mask.shape[:2], *q.shape[2:])
    return softmax_weights(lists, k, mask, options, bias).sum(2)


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
    np.testing.assert_allclose(mass, wanted_mass(step, 1, q), **KEEP)
    np.testing.assert_allclose(mass.sum((0, 2)), 3, rtol=1e-5)


def falls(query, key, head):
    return (key - query) * (head + 1.0)


@core
@pytest.mark.parametrize("look", [{"causal": False}, {"visible_until": 1}], ids=str)
def test_mass_with_options_matches_formula(look):
    step = start_step(make_edited(SMALL))
    look = {n: x if n == "causal" else step.positions - x for n, x in look.items()}
    q, k, v = draw_qkv(step)
    sinks = jnp.linspace(-1, 1, 2 * HEADS)
    given = dict(scale=0.7, softcap=2.0, sinks=sinks)
    step, _, mass = jaxkv.attend(step, 0, q, k, v, **given, **look, bias=falls, return_mass=True)
    options = PLAIN if not given else replace(PLAIN, **given)
    *_, mask, positions = jaxkv.read_kv(step, 0, **look)
    at = step.positions.reshape(mask.shape[:2])[:, None, :, None]
    bias = falls(at, positions[:, None, None], np.arange(2 * HEADS)[None, :, None, None])
    wanted = wanted_mass(step, 0, q, np.asarray(bias), options, **look)
    assert wanted.sum() > 1
    np.testing.assert_allclose(mass, wanted, **KEEP)


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
    np.testing.assert_allclose(mass, wanted_mass(step, 0, q, bias.swapaxes(1, 2)), **KEEP)


@core
def test_mass_is_zero_if_refused_and_nan_in_stale_lists():
    cache = make_edited(caches.Kind("streams", cells=8, sequences=2, streams=2))
    plan = jaxkv.init_batch(cache, jaxkv.make_batch([[1], [2]]))
    edited, _ = jaxkv.seq_rm(cache, 0, 6, -1)
    refused = replace(plan.ubatches[0], slots=jnp.full_like(plan.ubatches[0].slots, 1 << 30))
    for changed, ubatch, expected in ((edited, plan, np.nan), (cache, refused, 0.0)):
        step = jaxkv.apply(changed, ubatch)
        mass = jaxkv.attend(step, 0, *draw_qkv(step), return_mass=True)[2]
        stale = np.asarray(step.is_stale)
        assert stale.any() == np.isnan(expected)
        np.testing.assert_array_equal(mass[stale] if stale.any() else mass, expected)


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


# ---------------------------------------------------------------------------------- programs


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
