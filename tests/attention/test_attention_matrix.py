"""Each implementation of attention with each feature, against the formula in NumPy."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models
from jaxkv.ops.attention import api, attention, softmax, xla_cpu
from jaxkv.ops.attention.live import BLOCK, MASK, TILE, live_of
from jaxkv.ops.attention.reference import reference
from jaxkv.ops.attention.sight import mask_of
from jaxkv.ops.attention.softmax import Options
from jaxkv.ops.latent import Latent
from jaxkv.window import chunked, sliding, symmetric
from tests.attention.formula import PLAIN, case, formula, sight, visible
from tests.attention.ways import WAYS, WEIGH, attended
from tests.cases import in_lanes

DATA = Path(__file__).parent.parent / "data"
core = pytest.mark.core
# Said by jax from 0.11 on, about what the kernel for GPUs is written with.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)
LONG = 2 * TILE + 40

ALL = Options(scale=0.3, softcap=2.0, sinks=jnp.linspace(-1.0, 1.0, 3))
OPTIONS = {"other lists": Options(scale=0.3), "scale, softcap and sinks": ALL, "bias": ALL}
ONE_KEY_HEAD = {"heads": 3, "groups": 1}
CASES = {
    "plain": {},
    "large logits": {"factor": 100.0},
    "other lists": {"lists": [2, 0], "window": sliding(20), "until": True},
    "scale, softcap and sinks": {**ONE_KEY_HEAD, "value_dim": 9, "window": chunked(16)},
    "ahead": {"heads": 2, "causal": False, "window": symmetric(24)},
    "bias": {**ONE_KEY_HEAD, "bias": "function", "until": True, "window": chunked(16)},
    "bias array": {"lists": [2, 0], "bias": "array", "until": True, "window": symmetric(24)},
    "few tiles": {"cells": LONG, "holes": 0.7},
    "most tiles": {"cells": LONG, "holes": 0.0},
    "no tiles": {"cells": LONG, "holes": 1.0},
    "biased tiles": {"cells": LONG, "holes": 0.7, "bias": "array of all heads"},
    "one tile": {"cells": TILE, "streams": 1},
    "blocks": {"cells": LONG, "streams": 1, "tokens": BLOCK + 3, "holes": 0.6},
    "biased blocks": {"cells": LONG, "lists": [1], "tokens": BLOCK + 3, "bias": "array"},
    "biased large mask": {
        "cells": 17 * TILE, "streams": 1, "tokens": 2 * BLOCK, "heads": 1, "groups": 1,
        "bias": "function", "until": True,
    },
    "bfloat16": {"dtype": "bfloat16", "queries": "bfloat16"},
    "bfloat16 buffers": {"dtype": "bfloat16"},
    "bfloat16 queries, bias": {"queries": "bfloat16", "bias": "array"},
    "float16 buffers": {"dtype": "float16", "queries": "bfloat16"},
    "int8": {"dtype": "int8", "cells": LONG, "holes": 0.6},
    "int8 large heads": {"dtype": "int8", "size": 160},
    "float8_e4m3fn": {"dtype": "float8_e4m3fn"},
    "float8_e5m2": {"dtype": "float8_e5m2"},
    "latent": {"value_dim": Latent(2, 6)},
    "stacked": {"stacked": True, "lists": [2, 0]},
    "stacked, bias": {"stacked": True, "bias": "function", "until": True},
    "stacked int8": {"stacked": True, "dtype": "int8"},
}  # fmt: skip
KERNEL = "'pallas' wants"
REFUSED = {
    ("xla", "scale, softcap and sinks"): "'xla' has neither a softcap nor sinks",
    ("xla", "bias"): "'xla' has neither a softcap nor sinks",
    **{("tpu", name): "'pallas' adds no bias" for name in CASES if "bias" in name},
    **{
        (way, name): KERNEL
        for way in ("tpu", "gpu")
        for name in ("float16 buffers", "int8 large heads", "float8_e4m3fn", "float8_e5m2")
    },
    **{("gpu", name): KERNEL for name in CASES if "bias" in name},
}
ARRAYS_ALONE = {"on masks": ("bias", "int8", "float8", "latent", "stacked"), "gpu": ("latent",)}
ARRAYS_ALONE["elsewhere"] = ("latent",)
MATRIX = [
    (way, name)
    for way in WAYS
    for name in CASES
    if not any(word in name for word in ARRAYS_ALONE.get(way, ()))
]
FAST = [
    *((way, "plain") for way in WAYS),
    *(
        ("default", name)
        for name in ("scale, softcap and sinks", "bias array", "few tiles", "int8")
    ),
]
TILED = ("default", "tiles", "tpu", "gpu")  # whose programs depend on the number of cells
NIGHTLY = [
    (way, name)
    for way, name in MATRIX
    if ("tile" in name or "block" in name)
    and way not in TILED
    or (name in ("biased large mask", "float8_e5m2", "one tile") and way not in TILED[:2])
    or (name == "bfloat16 queries, bias" and way != "default")
]
CORE = [one for one in MATRIX if one not in NIGHTLY]


@pytest.mark.parametrize(("way", "name"), in_lanes(MATRIX, fast=FAST, core=CORE))
def test_attend_matches_formula(way, name):
    one, options = case(**CASES[name]), OPTIONS.get(name, PLAIN)
    if (way, name) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[way, name]):
            attended(way, *one, options)
        return
    got = attended(way, *one, options)
    assert got.dtype == one.q.dtype
    close = 2e-2 if jnp.bfloat16 in (got.dtype, one.k.dtype) else 5e-6
    close = 1e-4 if name == "large logits" else close
    np.testing.assert_allclose(
        np.asarray(got, np.float32), one.wanted(options), rtol=close, atol=close
    )
    assert not np.asarray(got[-1, -1], np.float32).any()  # padding


def test_matrix_takes_both_ways_of_the_processor():
    """Enough tiles for a choice: few of them live, and most of them."""
    for name, few in (("few tiles", True), ("most tiles", False)):
        live = live_of(sight(**CASES[name]))
        assert live.tiles.size > xla_cpu.SMALL
        assert live.turns > 0 and (live.turns < xla_cpu.FEW * live.tiles.size) == few
    assert 2 * BLOCK * 17 * TILE > MASK


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 1), (1, 1)])
def test_attention_grouped_heads_match_formula(heads, groups):
    one = case(heads=heads, groups=groups)
    np.testing.assert_allclose(attended("on masks", *one), one.wanted(), atol=2e-6)


def test_reference_matches_formula():
    """What benchmarks and other tests compare with."""
    one = case(heads=3, groups=1)
    k, v = (x[one.sight.streams] for x in one[1:3])
    np.testing.assert_allclose(
        reference(one.q, k, v, visible(one.sight), ALL), one.wanted(ALL), atol=2e-6
    )


# -------------------------------------------------------------------------- what is not a number


@pytest.mark.parametrize("way", in_lanes(WAYS, fast=["default", "on masks"], core=[*WAYS]))
def test_attend_nan_key_shows_where_seen_alone(way):
    """Hidden keys may hold anything, in live tiles and others; values are always finite."""
    q, k, v, looks = case(**CASES["few tiles"])
    mask = visible(looks)
    hidden = np.broadcast_to(~mask.any(1)[:, None, :, None], k.shape)
    clean = attended(way, q, k, v, looks)
    for value in (np.nan, np.inf, -np.inf):
        if way != "xla" or np.isnan(value):  # which takes the maximum of hidden logits, too
            dirty = attended(way, q, jnp.where(hidden, value, k), v, looks)
            np.testing.assert_array_equal(dirty, clean)
    large = 3e38 if way == "on masks" else 1e30  # sums over tiles of hidden cells are finite, too
    dirty = attended(way, q, k, jnp.where(hidden, large, v), looks)
    np.testing.assert_array_equal(dirty, clean)
    for p, _, cell in np.argwhere(mask)[[0, -1]]:
        broken = np.array(attended(way, q, k.at[p, 1, cell, 2].set(np.nan), v, looks))
        sees = mask[:, :, cell] & (np.arange(3) == p)[:, None]
        assert np.isnan(broken[sees][:, 2:]).all()  # the query heads of key head 1
        broken[sees, 2:] = np.asarray(clean)[sees, 2:]
        np.testing.assert_array_equal(broken, clean)


@core
@pytest.mark.parametrize("way", ["default", "tiles", "whole", "xla"])
def test_attend_nan_bias_shows_where_seen_alone(way):
    q, k, v, looks = case(**CASES["bias array"])
    mask = visible(looks)
    bias = np.where(looks.bias == -np.inf, 0, np.asarray(looks.bias))
    clean = attended(way, q, k, v, replace(looks, bias=jnp.asarray(bias)))
    for value in (np.nan, np.inf):
        dirty = np.where(mask[:, :, None], bias, value)
        cells = mask[0, 1].nonzero()[0]
        dirty[0, 1, 2, cells[0]] = value
        got = np.array(attended(way, q, k, v, replace(looks, bias=jnp.asarray(dirty))))
        assert np.isnan(got[0, 1, 2]).all()
        got[0, 1, 2] = clean[0, 1, 2]
        np.testing.assert_array_equal(got, clean)


@core
@pytest.mark.parametrize("way", ["default", "tiles", "tpu", "gpu", "elsewhere"])
def test_attend_nan_scale_shows_where_seen_alone(way):
    q, k, v, looks = case(**CASES["int8"])
    mask, clean = visible(looks), attended(way, q, k, v, looks)
    cell = np.argmax(mask[1].any(0))
    scales = k.scales.at[1, 1, cell].set(jnp.nan)
    got = np.array(attended(way, q, type(k)(codes=k.codes, scales=scales), v, looks))
    assert np.isnan(got[1, mask[1, :, cell], 2:]).all()
    got[1, mask[1, :, cell], 2:] = np.asarray(clean)[1, mask[1, :, cell], 2:]
    np.testing.assert_array_equal(got, clean)


@pytest.mark.parametrize("way", ["on masks", pytest.param("tpu", marks=core)])
def test_attend_overflowing_logits_hide_hidden_cells(way):
    """Cells that are seen have the weight, even where each of their logits is -inf."""
    q, k, v, looks = case()
    mask = visible(looks)
    shown = mask.any(1)[:, None, :, None]
    v = np.where(shown, v, 1e6)
    got = attended(way, q * 0 + 3e38, jnp.where(shown, -3e38, k), jnp.asarray(v), looks)
    wanted = formula(0 * q, 0 * k, v, mask)  # all weights are equal
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-6)


# ------------------------------------------------------------------------------------ exact sums


def test_attention_bfloat16_sums_in_float32():
    """Within one rounding of the result; sums in bfloat16 would be off by tens of percent."""
    rng = np.random.default_rng(3)
    k, v = (jnp.asarray(rng.normal(size=(2, 1, 600, 6)), jnp.bfloat16) for _ in range(2))
    out = attention(
        jnp.zeros((2, 3, 2, 6), jnp.bfloat16), k, 1 + abs(v), np.ones((2, 3, 600), bool)
    )
    assert out.dtype == jnp.bfloat16
    exact = np.asarray(1 + abs(v), np.float64).mean(2)[:, :, None]
    np.testing.assert_allclose(
        np.asarray(out, np.float64), np.broadcast_to(exact, out.shape), rtol=5e-3
    )


@core
def test_whole_sums_of_many_weights_are_exact():
    """An odd number of cells is not cut into parts: added up by one product they are 2e-6 off.

    Weighted values are such a product: how exact they are depends on the processor.
    """
    cells, heads = 131071, 9
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 1, n, 2)).astype(np.float32) for n in (heads, cells, cells))
    mask = np.ones((1, 1, cells), bool)
    total = jax.jit(xla_cpu.by_mask)(q, k, v, mask, Options()).total[0, 0]
    logits = np.einsum("hd,nd->hn", q[0, 0], k[0, 0], dtype=np.float64) / np.sqrt(2)
    wanted = np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
    np.testing.assert_allclose(np.asarray(total, np.float64), wanted, rtol=5e-7)


@core
@pytest.mark.parametrize("name", ["tpu", "gpu", "tiles"])
def test_weigh_open_sums_of_parts_join(name):
    one = case(4, cells=LONG)
    weigh = {**WEIGH, **api.IMPLEMENTATIONS, "tpu": api.IMPLEMENTATIONS["pallas"]}[name]

    @partial(jax.jit, static_argnums=1)
    def part(first, count):
        looks = one.sight.of_cells(first, count)
        k, v = (jax.lax.dynamic_slice_in_dim(x, first, count, 2) for x in one[1:3])
        return weigh(one.q, k, v, looks, Options())

    sums = softmax.joined(part(0, TILE + 100), part(TILE + 100, LONG - TILE - 100))
    got = api.finished(sums, one.q, Options())
    np.testing.assert_allclose(got, one.wanted(), rtol=1e-5, atol=2e-6)


# ------------------------------------------------------------------------------------- errors


def test_attend_unknown_implementation_raises():
    one = case()
    with pytest.raises(ValueError, match=r"wanted an implementation of \('tiles', .*got 'flash'"):
        api.attend(*one, Options(), "flash")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN may be there")
def test_attend_cudnn_missing_or_wrong_dtype_raises():
    half = {"dtype": "bfloat16", "queries": "bfloat16"}
    for options, error, match in (
        (half, RuntimeError, "cuDNN"),
        ({"dtype": "bfloat16"}, ValueError, "'cudnn' wants .* got float32, bfloat16 and bfloat16"),
        ({"dtype": "int8"}, ValueError, "'cudnn' wants .* got float32, int8 and int8: leave"),
        ({"bias": "array", **half}, ValueError, "'cudnn' adds no bias"),
    ):
        with pytest.raises(error, match=match):
            api.attend(*case(**options), Options(), "cudnn")


def test_attention_bad_shapes_raise():
    q, k, v, looks = case(heads=4, groups=2, value_dim=5)
    mask = mask_of(looks)
    for bad in ((q[:, :, :3], k, v), (q, k[:, :, :4], v), (q, k[..., :4], v), (q, k[:, :1], v)):
        with pytest.raises(ValueError, match=r"wanted q \[R, T, H, D\]"):
            attention(*bad, mask)
    with pytest.raises(ValueError, match="wanted a mask"):
        attention(q, k, v, mask[:, :2])


# --------------------------------------------------------------------------------------- models


def shapes_of_a_step(name, implementation):
    """Run a model as shapes; nothing is compiled."""
    model = models.load(DATA / name, implementation=implementation)
    memory = model.make_memory(cells=32)
    (ubatch,) = jaxkv.init_batch(memory, jaxkv.make_batch([1, 2])).ubatches
    step = jaxkv.loops.step_of(model.forward)
    return jax.eval_shape(step, model.weights, *jaxkv.split(memory), ubatch)


MODELS = ("llama_tied", "gemma3", "granite_hybrid", "recurrent_gemma")


@pytest.mark.parametrize("name", in_lanes(MODELS, fast=["llama_tied"]))
def test_model_passes_implementation_on(name):
    wanted = shapes_of_a_step(name, None)
    for implementation in ("whole", "xla"):
        chex.assert_trees_all_equal_shapes_and_dtypes(
            shapes_of_a_step(name, implementation), wanted
        )
    with pytest.raises(ValueError, match="wanted an implementation of .*got 'flash'"):
        shapes_of_a_step(name, "flash")


def test_model_without_attention_implementation_raises():
    with pytest.raises(models.ModelError, match="no attention to choose implementation='whole'"):
        models.load(DATA / "mamba2", implementation="whole")
