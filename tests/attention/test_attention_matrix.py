"""Each implementation of attention with each feature, against the formula in NumPy."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models
from jaxkv.ops.attention import attention, dispatch, softmax, xla_cpu
from jaxkv.ops.attention.active_tiles import BLOCK, TILE
from jaxkv.ops.attention.reference import reference
from jaxkv.ops.attention.softmax import AttentionOptions
from jaxkv.ops.storage.latent import ValueSlice
from jaxkv.window import Window
from tests.attention.formula import PLAIN, formula, make_case, visible_mask
from tests.attention.ways import TRITON, WAYS, WEIGH, attend, attend_jitted
from tests.helpers.mistakes import assert_raises, mistakes
from tests.helpers.parametrize import mark_cases

DATA = Path(__file__).parent.parent / "data"
core = pytest.mark.core
pytestmark = TRITON
LONG = 2 * TILE + 40

ALL = AttentionOptions(scale=0.3, softcap=2.0, sinks=jnp.linspace(-1.0, 1.0, 3))
OPTIONS = {"other lists": AttentionOptions(scale=0.3), "all options": ALL, "bias": ALL}
ONE_KEY_HEAD = {"heads": 3, "groups": 1, "window": Window.chunked(16)}
CASES = {
    "plain": {},
    "ahead, large logits": {
        "cells": TILE, "heads": 2, "factor": 100.0, "causal": False, "window": Window.symmetric(24)
    },
    "other lists": {"lists": [2, 0], "window": Window.sliding(20), "visible_until": True},
    "all options": {**ONE_KEY_HEAD, "value_dim": 9},
    "bias": {**ONE_KEY_HEAD, "bias": "function", "visible_until": True},
    "bias array": {
        "seed": 1, "lists": [2, 0], "bias": "array", "visible_until": True,
        "window": Window.symmetric(6),
    },
    "few tiles": {"cells": LONG, "holes": 0.7},
    "most tiles": {"cells": LONG, "holes": 0.0},
    "no tiles": {"cells": LONG, "holes": 1.0},
    "biased tiles": {"cells": LONG, "holes": 0.7, "bias": "array of all heads"},
    "blocks": {"cells": LONG, "streams": 1, "tokens": BLOCK + 3, "holes": 0.6},
    "biased blocks": {"cells": LONG, "lists": [1], "tokens": BLOCK + 3, "bias": "array"},
    "biased large mask": {
        "cells": 17 * TILE, "streams": 1, "tokens": 2 * BLOCK, "heads": 1, "groups": 1,
        "bias": "function", "visible_until": True,
    },
    "bfloat16": {"dtype": "bfloat16", "queries": "bfloat16"},
    "bfloat16 buffers": {"dtype": "bfloat16"},
    "bfloat16 queries, bias": {"queries": "bfloat16", "bias": "array"},
    "float16 buffers": {"dtype": "float16", "queries": "bfloat16"},
    "int8": {"dtype": "int8", "cells": LONG, "holes": 0.6},
    "float8_e4m3fn, two scales": {"dtype": "float8_e4m3fn", "size": 160},
    "float8_e5m2": {"dtype": "float8_e5m2"},
    "stacked latent": {"stacked": True, "value_dim": ValueSlice(2, 6), "lists": [2, 0]},
    "stacked, bias": {"stacked": True, "bias": "function", "visible_until": True},
    "stacked int8": {"stacked": True, "dtype": "int8"},
    "int4, two scales": {"dtype": "int4", "size": 40, "cells": LONG, "holes": 0.6},
    "stacked int4": {"stacked": True, "dtype": "int4"},
    "float32 and int4": {"dtype": ("float32", "int4"), "cells": LONG, "holes": 0.6},
}  # fmt: skip
FOUR_BITS = [name for name in CASES if "int4" in name]
NO_KERNEL = ("float16 buffers", "float8_e4m3fn, two scales", "float8_e5m2", *FOUR_BITS)
REFUSED = [("xla", "all options"), ("xla", "bias")]
REFUSED += [("tpu", name) for name in CASES if "bias" in name or name in NO_KERNEL]
REFUSED += [("gpu", name) for way, name in REFUSED if way == "tpu"]
ARRAYS_ALONE = {"on masks": ("bias", "int8", "int4", "float8", "stacked")}
ARRAYS_ALONE |= dict.fromkeys(WEIGH, ("latent",))
MATRIX = [
    (way, name)
    for way in WAYS
    for name in CASES
    if not any(word in name for word in ARRAYS_ALONE.get(way, ()))
]
FAST = [("default", name) for name in ("plain", "all options", "bias array", "few tiles", "int8")]
DTYPES = ("bfloat16", "bfloat16 queries, bias", "float16 buffers", "float8_e5m2")
APART = {
    "on masks": ("plain", "all options", "ahead, large logits"),
    "tiles": ("plain", "all options", "bias", "few tiles", "no tiles", "biased tiles", "blocks"),
}
"""Cases in which the default way runs another program than the named one."""


def in_core(way, name):
    """Whether a way has code specific to a case, or raises for it."""
    if way == "default" or (way, name) in REFUSED:
        return True
    if way in APART:
        return name in APART[way]
    if any(word in name for word in ("tile", "block", "large mask")):
        return way in ("tpu", "gpu")  # their programs depend on the number of cells
    return name not in DTYPES


@pytest.mark.parametrize(
    ("way", "name"), mark_cases(MATRIX, fast=FAST, core=[one for one in MATRIX if in_core(*one)])
)
def test_attend_matches_formula(way, name):  # traps 53, 96
    one, options = make_case(**CASES[name]), OPTIONS.get(name, PLAIN)
    if (way, name) in REFUSED:
        why = "with softcap and sinks" if way == "xla" else "for 'pallas'|with bias, got 'pallas'"
        with pytest.raises(ValueError, match=why):
            attend_jitted(way, *one, options)
        return
    got = attend_jitted(way, *one, options)
    assert got.dtype == one.q.dtype
    close = 2e-2 if jnp.bfloat16 in (got.dtype, one.k.dtype) else 5e-6
    exact = way == "default" and got.dtype == jnp.float32  # 16 bits of queries and weights or more
    close = 1e-4 if "large logits" in name or (exact and close > 1e-4) else close
    got = np.asarray(got, np.float32)
    np.testing.assert_allclose(got, one.wanted(options), rtol=close, atol=close)
    assert not got[-1, -1].any()  # padding


def test_reference_matches_formula():
    one = make_case(heads=3, groups=1)
    k, v = (x[one.visibility.streams] for x in one[1:3])
    found, mass = reference(one.q, k, v, visible_mask(one.visibility), ALL)
    np.testing.assert_allclose(found, one.wanted(ALL), atol=2e-6)
    np.testing.assert_allclose(mass, one.wanted_mass(ALL), atol=2e-6)


def assert_nan_where(sees, got, clean):
    """Outputs `[P, T, H, D]` are NaN where `sees` is True, and unchanged elsewhere."""
    sees = np.broadcast_to(sees[..., None], got.shape)
    np.testing.assert_array_equal(got, np.where(sees, np.nan, clean))


SECOND_HALF = np.array([False, False, True, True])
"""The query heads of key head 1."""


@pytest.mark.parametrize("way", mark_cases(WAYS, fast=["default"], core=[*WAYS]))
def test_attend_nan_key_shows_where_seen_alone(way):  # trap 59
    """Hidden keys may be non-finite, in active tiles and in others; values are always finite."""
    q, k, v, looks = make_case(**CASES["few tiles"])
    mask = visible_mask(looks)
    hidden = np.broadcast_to(~mask.any(1)[:, None, :, None], k.shape)
    clean = attend_jitted(way, q, k, v, looks)
    for value in (np.nan, np.inf, -np.inf):
        if way != "xla" or np.isnan(value):  # XLA takes the maximum over hidden logits too
            dirty = attend_jitted(way, q, jnp.where(hidden, value, k), v, looks)
            np.testing.assert_array_equal(dirty, clean)
    large = 3e38 if way == "on masks" else 1e30  # large but finite, also summed over tiles
    dirty = attend_jitted(way, q, k, jnp.where(hidden, large, v), looks)
    np.testing.assert_array_equal(dirty, clean)
    for p, _, cell in np.argwhere(mask)[[0, -1]]:
        sees = mask[:, :, cell] & (np.arange(3) == p)[:, None]
        broken = attend_jitted(way, q, k.at[p, 1, cell, 2].set(np.nan), v, looks)
        assert_nan_where(sees[..., None] & SECOND_HALF, broken, clean)


@core
@pytest.mark.parametrize("way", ["default", "tiles", "whole", "xla"])
def test_attend_nan_bias_shows_where_seen_alone(way):
    q, k, v, looks = make_case(**CASES["bias array"])
    mask = visible_mask(looks)
    bias = np.nan_to_num(looks.bias, neginf=0)
    clean = attend_jitted(way, q, k, v, replace(looks, bias=jnp.asarray(bias)))
    for value in (np.nan, np.inf):
        dirty, sees = np.where(mask[:, :, None], bias, value), np.zeros(clean.shape[:3], bool)
        dirty[0, 1, 2, mask[0, 1].argmax()], sees[0, 1, 2] = value, True
        broken = attend_jitted(way, q, k, v, replace(looks, bias=jnp.asarray(dirty)))
        assert_nan_where(sees, broken, clean)


@core
@pytest.mark.parametrize("way", ["default", "tpu", "gpu", "elsewhere"])
def test_attend_nan_scale_shows_where_seen_alone(way):
    q, k, v, looks = make_case(**CASES["int8"])
    mask = visible_mask(looks)
    cell, sees = np.argmax(mask[1].any(0)), np.zeros(q.shape[:3], bool)
    sees[1] = mask[1, :, cell, None] & SECOND_HALF
    broken = type(k)(codes=k.codes, scales=k.scales.at[1, 1, cell].set(jnp.nan))
    clean = attend_jitted(way, q, k, v, looks)
    assert_nan_where(sees, attend_jitted(way, q, broken, v, looks), clean)


@pytest.mark.parametrize("way", ["on masks", pytest.param("tpu", marks=core)])
def test_attend_overflowing_logits_hide_hidden_cells(way):
    """Visible cells get the weight, even where each of their logits is -inf."""
    q, k, v, looks = make_case()
    mask = visible_mask(looks)
    shown = mask.any(1)[:, None, :, None]
    v = np.where(shown, v, 1e6)
    got = attend_jitted(way, q * 0 + 3e38, jnp.where(shown, -3e38, k), jnp.asarray(v), looks)
    wanted = formula(0 * q, 0 * k, v, mask)  # all weights are equal
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-6)


def test_attention_bfloat16_sums_in_float32():
    """Within one rounding of the result; sums in bfloat16 would have errors of tens of percent."""
    rng = np.random.default_rng(3)
    k, v = (jnp.asarray(rng.normal(size=(2, 1, 600, 6)), jnp.bfloat16) for _ in range(2))
    out = attention(jnp.zeros((2, 3, 2, 6), k.dtype), k, 1 + abs(v), np.ones((2, 3, 600), bool))
    assert out.dtype == jnp.bfloat16
    exact = np.asarray(1 + abs(v), np.float64).mean(2)[:, :, None]
    exact = np.broadcast_to(exact, out.shape)
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=5e-3)


@core
def test_whole_sums_of_many_weights_are_exact():
    """An odd number of cells is not split: one product over all of them would have errors of 2e-6.

    Weighted values are such a product, and their error depends on the CPU.
    """
    cells, heads = 131071, 9
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 1, n, 2)).astype(np.float32) for n in (heads, cells, cells))
    mask = np.ones((1, 1, cells), bool)
    total = jax.jit(xla_cpu.attend_by_mask)(q, k, v, mask, AttentionOptions()).denom[0, 0]
    logits = np.einsum("hd,nd->hn", q[0, 0], k[0, 0], dtype=np.float64) / np.sqrt(2)
    wanted = np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
    np.testing.assert_allclose(np.asarray(total, np.float64), wanted, rtol=5e-7)


@core
@pytest.mark.parametrize("name", ["tpu", "gpu", "tiles"])
def test_weigh_open_sums_of_parts_join(name):
    one = make_case(4, cells=LONG)
    weigh = {**WEIGH, **dispatch.IMPLEMENTATIONS, "tpu": dispatch.IMPLEMENTATIONS["pallas"]}[name]

    @partial(jax.jit, static_argnums=1)
    def part(first, count):
        looks = one.visibility.slice_cells(first, count)
        k, v = (jax.lax.dynamic_slice_in_dim(x, first, count, 2) for x in one[1:3])
        return weigh(one.q, k, v, looks, AttentionOptions())

    sums = softmax.merge_softmax(part(0, TILE + 100), part(TILE + 100, LONG - TILE - 100))
    got = dispatch.finalize(sums, one.q, AttentionOptions())
    np.testing.assert_allclose(got, one.wanted(), rtol=1e-5, atol=2e-6)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN may be there")
def test_attend_unknown_or_unfit_implementation_raises():
    half = {"dtype": "bfloat16", "queries": "bfloat16"}
    for row in mistakes("attention"):
        assert_raises(*row, globals() | {"half": half, "attend": attend})


MODELS = ("llama_tied", "gemma3", "granite_hybrid", "recurrent_gemma", "mamba2")


@pytest.mark.parametrize("name", mark_cases(MODELS, fast=["llama_tied", "mamba2"]))
def test_model_passes_implementation_on(name):
    expected = (
        "expected a model with implementation"
        if name == "mamba2"
        else "expected an implementation of .*"
    )
    with pytest.raises((ValueError, models.ModelError), match=f"{expected}.*'flash'"):
        model = models.load(DATA / name, implementation="flash")
        cache = model.make_cache(cells=32)
        (ubatch,) = jaxkv.init_full(cache, ubatch_size=2).ubatches
        step = jax.eval_shape(jaxkv.apply, cache, ubatch)
        jax.eval_shape(model.forward, model.params, step)
