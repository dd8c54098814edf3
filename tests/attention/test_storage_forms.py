"""Caches of 8 bits, latents, stacked layers and rows of heads, against plain float32 caches.

The plain cache contains the numbers that the other one stores, and gets the same edits.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxkv
from jaxkv import make_batch, snapshot
from jaxkv.cache import merge
from jaxkv.core.pytree import pytree_dataclass
from jaxkv.kv.make import _make_arrays
from jaxkv.ops.storage import forms
from jaxkv.ops.storage.forms import storage_of
from jaxkv.ops.storage.hadamard import rotate_by_hadamard
from jaxkv.ops.storage.head_rows import split_rows_of_cells
from jaxkv.ops.storage.int4 import Int4
from jaxkv.ops.storage.latent import ValueSlice
from jaxkv.ops.storage.quantised import Quantised
from jaxkv.ops.storage.storage import Storage
from jaxkv.sharding.make import shardings
from jaxkv.snapshot.assemble import describe
from jaxkv.snapshot.file import file_bytes
from tests.attention.formula import (
    quantise,
    quantise_to_int4,
    read_int4,
    rotate_heads,
    round_to_storage,
)
from tests.generation.tiny import load_tiny
from tests.helpers.caches import apply_update, attention_cache
from tests.helpers.meshes import mesh_of, place_on_mesh
from tests.helpers.mistakes import assert_raises, mistakes
from tests.helpers.parametrize import mark_cases

core = pytest.mark.core
LAYERS, HEADS, SIZE, PART = 2, 2, 8, slice(4, 8)
FORMS = {
    "int8": {"dtype": "int8"},
    "float8": {"dtype": "float8_e4m3fn"},
    "latent": {"value_dim": PART},
    "stacked": {"stacked": True},
    "stacked int8": {"stacked": True, "dtype": "int8"},
    "stacked latent": {"stacked": True, "value_dim": PART},
    "rows": {"lanes": 20},  # two heads, and zeros
    "stacked rows": {"stacked": True, "lanes": 16},
    "int4": {"dtype": "int4"},
    "rotated int8": {"dtype": "int8", "rotate": True},
    "stacked pair": {"stacked": True, "dtype": ("int8", "int4"), "rotate": True},
    "padded int4": {"dtype": "int4", "lanes": 66},  # with two more scales
    "padded int8": {"dtype": "int8", "lanes": 130},  # with a second scale, always 0
    "padded latent": {"value_dim": PART, "lanes": 12},
}
SIZES = {
    "one stream": {},
    "groups": {"streams": 2},
    "window": {"cells": 16, "streams": 4, "window": jaxkv.Window.sliding(4)},
    "tiled": {"cells": 32, "placement": "tiled"},
    "striped": {"streams": 2, "placement": "striped:2"},
}


def make_form(cells=24, **options):
    rope = jaxkv.Rope.make(4, base=100.0)  # of the numbers before PART
    sizes = dict(layers=LAYERS, cells=cells, kv_heads=HEADS, head_dim=SIZE, sequences=4, rope=rope)
    return attention_cache(**sizes, **options)


@jax.jit
def attend_all_layers(cache, ubatch, q, k, v):
    """Apply a ubatch and attend in all layers, in a scan where they are stacked."""
    step, outs = jaxkv.apply(cache, ubatch), []

    def of_layer(step, arrays):
        return jaxkv.attend(step, arrays[0], *arrays[1:])

    if step.buffers.stacked:
        step, outs = jax.lax.scan(of_layer, step, (jnp.arange(LAYERS), q, k, v))
        return step.cache, outs
    for layer in range(LAYERS):
        arrays = jax.tree.map(lambda x, layer=layer: x[layer], (q, k, v))
        step, out = of_layer(step, (layer, *arrays))
        outs.append(out)
    return step.cache, jnp.stack(outs)


def read_numbers(cache):
    """Keys and values of all layers as numbers, `[L, S, K, N, D]` each."""
    halves = []
    for half in (cache.buffers.k, cache.buffers.v):
        if isinstance(half[0], ValueSlice):
            halves.append(halves[0][..., PART])
            continue
        layers = [jnp.asarray(np.asarray(storage_of(x).decode(), np.float32)) for x in half]
        layers = [split_rows_of_cells(x, cache.buffers.heads_per_row, SIZE) for x in layers]
        layers = [rotate_heads(x) for x in layers] if cache.buffers.rotated else layers
        layers = [x.reshape(-1, cache.buffers.layers_per_array, *x.shape[1:]) for x in layers]
        halves.append(np.concatenate([x.swapaxes(0, 1) for x in layers]))
    return halves


def make_plain(cache):
    """A float32 cache on one device with the same numbers, one array per layer."""
    table, buffers = cache.table, cache.buffers
    k, v = (tuple(map(jnp.asarray, half)) for half in read_numbers(cache))
    table = replace(table.with_sharding_rules(None), incomplete=None)
    table = jax.tree.map(np.asarray, table)
    sizes = tuple(of._replace(values=of.value_dim) for of in buffers.head_sizes)
    plain = replace(buffers, k=k, v=v, head_sizes=sizes, stacked=False, rotated=False)
    return merge(table, plain)


def dtypes_of(form):
    """Names of the dtypes of keys and values."""
    dtype = form["dtype"]
    return dtype if isinstance(dtype, tuple) else (dtype, dtype)


def arrays_for(ubatch, form, seed=0):
    """Queries, new keys and values of all layers, and the keys and values after storage."""
    rng, shape = np.random.default_rng(seed), (LAYERS, *ubatch.valid.shape)
    heads = (2 * HEADS, HEADS, HEADS)
    q, k, v = (rng.normal(size=(*shape, h, SIZE)).astype(np.float32) for h in heads)
    if "value_dim" in form:
        return q, (k, None), (k, k[..., PART])
    if form.get("dtype") in (None, "bfloat16", "float16"):
        return q, (k, v), (k, v)
    dtypes, rotate = dtypes_of(form), form.get("rotate", False)
    stored = (
        round_to_storage(x, dtype, rotate=rotate) for x, dtype in zip((k, v), dtypes, strict=True)
    )
    return q, (k, v), tuple(stored)


def assert_alike(cache, plain, atol=2e-6):
    """The tables are equal, and so are the numbers of used cells."""
    for name in ("position", "owners", "shift"):
        np.testing.assert_array_equal(*(getattr(one.table, name) for one in (cache, plain)))
    used = np.asarray(cache.table.position)[:, None, :, None] >= 0
    for one, other in zip(read_numbers(cache), read_numbers(plain), strict=True):
        other = np.where(used, other, 0)
        np.testing.assert_allclose(np.where(used, one, 0), other, rtol=1e-5, atol=atol)


def plan_ubatches(cache, rows, sequences):
    batch = make_batch(rows, sequences=sequences)
    return jaxkv.init_batch(cache, batch, ubatch_size=4).check().ubatches


def attend_and_compare(cache, form, rows=((1, 1), (1, 1)), sequences=(1, 2)):
    """A cache with more tokens; their attention is compared with that of a plain cache."""
    plain, rows = make_plain(cache), [*map(list, rows)]
    pairs = zip(*(plan_ubatches(one, rows, [*sequences]) for one in (cache, plain)), strict=True)
    for seed, (ubatch, other) in enumerate(pairs):
        q, given, same = arrays_for(ubatch, form, seed)
        cache, out = attend_all_layers(cache, ubatch, q, *given)
        plain, wanted = attend_all_layers(plain, other, q, *same)
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=5e-6)
    assert_alike(cache, plain)
    return cache


ROUNDED = {"int8": 0.06, "float8_e4m3fn": 0.7, "int4": 0.6}
"""Error bounds for keys of up to 4 after a rotation, see `jaxkv.ops.storage.rotation`."""

EDITS = [
    lambda m: jaxkv.seq_cp(m, 0, [1, 3], 0, 3).cache,
    lambda m: jaxkv.seq_rm(m, 0, 3, -1)[0],
    lambda m: jaxkv.seq_add(m, 1, 1, -1, delta=2).cache,
    apply_update,
    lambda m: jaxkv.seq_select(m, [2, 1], [1, 2]).cache,
    lambda m: jaxkv.seq_rm(m, 0)[0],
    lambda m: jaxkv.apply(m, jaxkv.defrag_plan(m)),
]


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
LIVES = [
    ("int8", "groups", AUTO, {}),
    ("latent", "window", AUTO, {}),
    ("stacked int8", "tiled", AUTO, {}),
    ("stacked int8", "striped", AUTO, {"data": 2, "tensor": 2, "cells": 2}),
    ("stacked pair", "striped", AUTO, {"data": 2, "tensor": 2, "cells": 2}),
    ("rotated int8", "groups", EXPLICIT, {"data": 2, "tensor": 2}),
    ("int4", "tiled", AUTO, {}),
    ("float8", "groups", AUTO, {}),
    ("stacked latent", "window", AUTO, {}),
    ("int8", "groups", EXPLICIT, {"data": 2, "tensor": 2}),
    ("stacked", "window", AUTO, {"data": 2, "cells": 2}),
    ("latent", "groups", AUTO, {"data": 2, "cells": 2}),
    ("rows", "tiled", AUTO, {}),
    ("stacked rows", "groups", EXPLICIT, {"data": 2, "cells": 2}),
]


@pytest.mark.parametrize("form, sizes, mode, axes", mark_cases(LIVES, core=[LIVES[-2]]), ids=str)
def test_storage_form_life_matches_plain_cache(form, sizes, mode, axes):
    cache, form = make_form(**FORMS[form], **SIZES[sizes]), FORMS[form]
    with jax.set_mesh(mesh_of(mode, **axes)) if axes else nullcontext():
        if axes:
            cache = place_on_mesh(cache)
            array = jax.tree.leaves(cache.buffers.k)[0]
            split = np.divide(array.shape, array.addressable_shards[0].data.shape)
            wanted = [axes.get(name, 1) for name in ("data", "tensor", "cells")]
            assert split.tolist() == [*wanted, 1]
        for _ in range(2):
            cache = attend_and_compare(cache, form, sequences=[0, 2])
        for verb in EDITS:
            plain = verb(make_plain(cache))
            cache = verb(cache)
            rounded = ROUNDED[dtypes_of(form)[0]] if "dtype" in form else 2e-6
            bound = rounded if verb is apply_update else 2e-6
            assert_alike(cache, plain, bound)
        attend_and_compare(cache, form)


@pytest.mark.parametrize("name", mark_cases(FORMS, core=["latent", "rows"]))
def test_snapshot_storage_form_goes_on_as_plain_cache(name):
    """Also loaded into a cache of other sizes; files do not record that layers are stacked."""
    form = FORMS[name]
    cache = attend_and_compare(
        make_form(**form, streams=2), form, [[1, 2, 3], [4, 5], [6, 7]], (1, 2, 0)
    )
    data, plain = snapshot.save(cache), snapshot.save(make_plain(cache))
    if "dtype" in form:
        arrays, (dtype, _) = snapshot.inspect(data).arrays, dtypes_of(form)
        codes = ("packed", ("int8", (7, HEADS, SIZE // 2)))
        codes = codes if dtype == "int4" else ("codes", (dtype, (7, HEADS, SIZE)))
        assert arrays[f"buffers.k.0.{codes[0]}"] == codes[1]
    loaded = snapshot.load(data)
    assert not loaded.buffers.stacked and loaded.buffers.k[0].shape[1:] == (HEADS, 24, SIZE)
    assert_alike(loaded, make_plain(cache))
    latent = "value_dim" in form
    plain = snapshot.load(plain, into=make_form(**({"value_dim": 4} if latent else {}), cells=20))
    for other in ({**form, "stacked": False}, form):
        loaded = snapshot.load(data, into=make_form(**other, cells=20))
        assert_alike(loaded, plain)
    attend_and_compare(loaded, form)
    wrong = [{"value_dim": 4}, {"value_dim": slice(4, 7)}] if latent else [{"dtype": "bfloat16"}]
    if "dtype" in form:
        wrong.append({"dtype": form["dtype"], "rotate": "rotate" not in form})
    for options in wrong:
        why = "value_dim|values in keys|the dtype of this one|the rotate of this one"
        with pytest.raises(ValueError, match=why):
            snapshot.load(data, into=make_form(**options, cells=20))


@pytree_dataclass
class Halves(Storage):
    """Halves of 16-bit numbers: another form, whose array does not have the shape of the keys."""

    halves: jax.Array

    dtype = jnp.dtype(jnp.bfloat16)
    decoded_dtype = dtype

    @classmethod
    def zeros(cls, shape, dtype):
        return cls(halves=jnp.zeros((*shape[:-1], 2 * shape[-1]), jnp.uint8))

    @property
    def shape(self):
        return (*self.halves.shape[:-1], self.halves.shape[-1] // 2)

    def encode(self, x):
        halves = jax.lax.bitcast_convert_type(x, jnp.uint8)
        return Halves(halves=halves.reshape(*x.shape[:-1], -1))

    def decode(self):
        pairs = jnp.asarray(self.halves).reshape(*self.shape, 2)
        return jax.lax.bitcast_convert_type(pairs, self.dtype)

    def rotate(self, start, stop, rope):
        return self.encode(storage_of(self.decode()).rotate(start, stop, rope))

    def split_rows(self, heads_per_row, head_dim):
        return self


@core
def test_new_storage_form_gives_results_of_its_dtype(monkeypatch):
    """Only `forms.py` knows the form; edits, attention and snapshots follow."""
    cells = 22  # of no other cache, since programs are reused for equal arguments
    plain = make_form(cells, dtype="bfloat16", streams=2)
    monkeypatch.setattr(forms, "ENCODED_FORMS", (*forms.ENCODED_FORMS, Halves))
    for module in ("kv.make", "snapshot.cells"):
        monkeypatch.setattr(f"jaxkv.{module}.form_of_dtype", lambda dtype: Halves)
    _make_arrays.clear_cache()
    cache, form = make_form(cells, dtype="bfloat16", streams=2), {"dtype": "bfloat16"}
    assert isinstance(cache.buffers.k[0], Halves) and cache.nbytes == plain.nbytes
    batch = make_batch([[1, 2, 3], [4, 5]], sequences=[0, 2])
    (ubatch,) = jaxkv.init_batch(cache, batch).ubatches
    q, given, _ = arrays_for(ubatch, form)
    (cache, out), (plain, wanted) = (
        attend_all_layers(one, ubatch, q, *given) for one in (cache, plain)
    )
    np.testing.assert_allclose(out, wanted, rtol=1e-2, atol=1e-2)
    for edit in EDITS:
        cache, plain = edit(cache), edit(plain)
        assert_alike(cache, plain, 0)
    assert_alike(snapshot.load(snapshot.save(cache)), plain, 0)


def test_snapshot_codes_without_scales_raises():
    codes = np.zeros((0, HEADS, SIZE), np.int8)
    arrays = {f"buffers.{half}.{i}": codes for half in "kv" for i in (0, 1)}
    arrays["table.cell"] = np.zeros(0, np.int32)
    description = {"cache": describe(make_form(dtype="int8")), "model": None}
    description |= {"sequences": [], "tokens": []}
    with pytest.raises(ValueError, match="a snapshot that describes a cache, .*buffers.k.0.codes"):
        snapshot.load(file_bytes(description, arrays))


@core
@pytest.mark.parametrize("name", ["stacked int8", "stacked pair"])
def test_vmap_over_caches_of_a_storage_form_matches_each(name):
    form, inputs = FORMS[name], []
    for sequences in ((1, 2), (0, 3)):
        cache = attend_and_compare(make_form(**form, streams=2), form, sequences=sequences)
        (ubatch,) = plan_ubatches(cache, [[1], [2]], [3, 1])
        q, given, _ = arrays_for(ubatch, form, seed=sequences[0])
        inputs.append((cache, ubatch, q, *given))
    found = jax.vmap(attend_all_layers)(*jax.tree.map(lambda *x: jnp.stack(x), *inputs))
    for i, one in enumerate(inputs):
        cache, out = attend_all_layers(*one)
        after, got = jax.tree.map(lambda x, i=i: x[i], found)
        for halves in zip([got, *read_numbers(after)], [out, *read_numbers(cache)], strict=True):
            np.testing.assert_allclose(*halves, atol=2e-6)


@core
@pytest.mark.parametrize("name", ["int8", "stacked pair", "latent", "stacked", "rows"])
def test_attend_derivatives_of_storage_form_match_plain_cache(name):
    """Quantised keys and values have no derivative; those of queries use the stored numbers."""
    form = FORMS[name]
    cache = attend_and_compare(make_form(**form, streams=2), form)
    (ubatch,) = plan_ubatches(cache, [[1], [2]], [3, 1])
    q, given, same = jax.tree.map(jnp.asarray, arrays_for(ubatch, form, seed=9))

    def loss(cache, v, q, k):
        v = k[..., PART] if v is PART else v
        return jnp.sum(jnp.sin(attend_all_layers(cache, ubatch, q, k, v)[1]))

    derive = jax.grad(loss, (2, 3))
    found = derive(cache, given[1], q, given[0])
    wanted = derive(make_plain(cache), PART if name == "latent" else same[1], q, same[0])
    if "dtype" in form:
        assert not found[1].any()
        found, wanted = found[:1], wanted[:1]
    for one, other in zip(found, wanted, strict=True):
        assert np.abs(other).max() > 1e-2
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


BROKEN = [
    ({}, "v", np.inf, 0),
    ({"dtype": "float16"}, "v", 7e4, 0),  # finite, but overflows float16
    (FORMS["int8"], "k", np.nan, 0),
    (FORMS["latent"], "k", np.inf, 0),
    (FORMS["latent"], "k", np.inf, 6),
    (FORMS["stacked int8"], "v", -np.inf, 0),
    (FORMS["int4"], "k", np.inf, 0),
    (FORMS["rotated int8"], "v", np.inf, 0),
]


@core
@pytest.mark.parametrize(("form", "half", "bad", "where"), BROKEN, ids=str)
def test_attend_nonfinite_element_is_nan_in_key_and_zero_in_value(form, half, bad, where):
    """It shows in tokens that attend to it, in query heads that read it, and nowhere else."""
    cache, latent = make_form(**form), "value_dim" in form
    (ubatch,) = jaxkv.init_batch(cache, make_batch([[1, 2, 3], [4, 5, 6]])).ubatches
    q, (k, v), _ = arrays_for(ubatch, form)
    clean, wanted = attend_all_layers(cache, ubatch, q, k, v)
    k, v = k.copy(), None if latent else v.copy()  # keep the passed arrays unchanged
    {"k": k, "v": v}[half][0, 0, 4, 1, where] = bad  # layer 0, token 1 of sequence 1, head 1
    broken, out = attend_all_layers(cache, ubatch, q, k, v)

    place, other = (0, 0, 1, 4), read_numbers(clean)
    keys, values = read_numbers(broken)
    whole = latent or form.get("dtype") in ("int8", "int4")
    nan = [i < PART.start if latent else whole or i == where for i in range(SIZE)]
    assert np.isnan(keys[place]).tolist() == nan
    lost = [
        latent or (half == "v" and ("rotate" in form or i == where)) or number == 0
        for i, number in enumerate(other[1][place])
    ]
    assert (values[place] == 0).tolist() == lost
    keys[place], values[place] = (x[place] for x in other)
    jax.tree.map(np.testing.assert_array_equal, [keys, values], other)
    out, wanted = np.array(out), np.asarray(wanted)
    assert np.isnan(out[0, 0, 4:6, 2:]).all()
    out[0, 0, 4:6, 2:] = wanted[0, 0, 4:6, 2:]
    np.testing.assert_allclose(out, wanted, atol=2e-6)

    moved = jaxkv.seq_add(broken, 1, 0, -1, delta=3).cache
    keys, values = read_numbers(apply_update(moved))
    assert np.isnan(keys[place][: PART.start]).any() and np.isfinite(values).all()
    assert np.isnan(keys).any(-1).sum() == 1


def draw_edges(size):
    """Random heads with zeros, the largest and smallest numbers, and non-finite ones."""
    rng = np.random.default_rng(size)
    x = rng.normal(size=(2, 50, size)).astype(np.float32)
    x *= np.float32(10.0) ** rng.integers(-30, 30, (2, 50, 1))
    x[0, 0], x[0, 1], x[1, 3] = 0, 3e38, -1e-45
    x[0, 2, 0], x[0, 3], x[0, 4, 1] = np.nan, np.nan, -np.inf
    return x


CODES = [("int8", 160), ("float8_e4m3fn", 160), ("int8", 64), ("float8_e4m3fn", 7)]


@pytest.mark.parametrize(("dtype", "size"), mark_cases(CODES, fast=CODES[:1], core=CODES[1:2]))
def test_encoded_matches_numpy(size, dtype):
    x = draw_edges(size)
    found = jax.jit(Quantised.zeros((1,), dtype).encode)(jnp.asarray(x))
    codes, scales = quantise(x, dtype)
    np.testing.assert_array_equal(found.scales, scales)
    np.testing.assert_array_equal(np.asarray(found.codes, np.float32), codes.astype(np.float32))
    assert found.codes.dtype == dtype and found.scales.dtype == jnp.float32
    read, finite = np.asarray(found.decode()), np.isfinite(x).all(-1)
    assert np.isnan(read[0, 2:5]).all()
    error, limit = np.abs(read - x)[finite], np.abs(x).max(-1, keepdims=True)[finite]
    assert (error <= limit * (0.5 / 127 if dtype == "int8" else 1 / 16) * 1.001 + 1e-38).all()


@pytest.mark.parametrize("size", [64, 70])
def test_int4_matches_numpy(size):
    x = draw_edges(size)
    found = jax.jit(Int4.zeros((1,), "int4").encode)(jnp.asarray(x))
    packed, scales = quantise_to_int4(x)
    np.testing.assert_array_equal(found.packed, packed)
    bits = np.asarray(found.scales).view(jnp.bfloat16)
    np.testing.assert_array_equal(bits.astype(np.float32), scales.astype(np.float32))
    read, finite = np.asarray(found.decode()), np.isfinite(x).all(-1)
    np.testing.assert_array_equal(read, read_int4(packed, scales))
    assert np.isnan(read[0, 2:5]).all()
    finite[0, 1] = False  # larger than the largest stored number
    assert np.isfinite(read[0, 1]).all()
    # A number of the other sign than the largest number has codes up to 7 in place of 8.
    error, limit = np.abs(read - x)[finite], np.abs(x).max(-1, keepdims=True)[finite]
    assert (error <= limit / 8 * 1.04 + 1e-38).all()
    assert np.median(error / np.maximum(limit, 1e-38)) < 1 / 32


def test_rotation_of_heads_matches_matrix_and_keeps_products():
    x = np.random.default_rng(0).normal(size=(2, 5, 64)).astype(np.float32)
    found = rotate_by_hadamard(jnp.asarray(x))
    np.testing.assert_allclose(found, rotate_heads(x), atol=5e-6)
    np.testing.assert_allclose(rotate_by_hadamard(found), x, atol=5e-6)
    np.testing.assert_allclose(found[0] @ found[1].T, x[0] @ x[1].T, atol=2e-5)
    half = rotate_by_hadamard(jnp.asarray(x, jnp.bfloat16))
    np.testing.assert_allclose(np.asarray(half, np.float32), rotate_heads(x), atol=0.03)


FORM_PAIRS = [("int4", "rotated int8"), ("rotated int8", "padded int4"), ("int8", "rotated int8")]
FORM_PAIRS += [("stacked pair", "int4"), ("int4", "padded int4"), ("rotated int8", "int8")]


@pytest.mark.parametrize(("source", "target"), mark_cases(FORM_PAIRS, fast=FORM_PAIRS[:2]))
def test_insert_between_storage_forms_rounds_stored_numbers(source, target):
    form = FORMS[target]
    other = attend_and_compare(make_form(**FORMS[source]), FORMS[source])
    cache = jaxkv.insert(make_form(**form, cells=6), other, 2, 1).check()
    cells = np.flatnonzero(np.asarray(other.table.owners)[0, 0] & 4)
    dtypes, rotate = dtypes_of(form), form.get("rotate", False)
    for numbers, found, dtype in zip(read_numbers(other), read_numbers(cache), dtypes, strict=True):
        wanted = numbers[:, :, :, cells]
        if dtypes_of(FORMS[source]) != dtypes or rotate != FORMS[source].get("rotate", False):
            wanted = round_to_storage(wanted, dtype, rotate=rotate)
        np.testing.assert_allclose(found[:, :, :, : len(cells)], wanted, atol=2e-6)


@pytest.mark.parametrize("implementation", ["tiles", "whole", "xla", "pallas"])
def test_attend_to_rotated_heads_is_equal_in_all_implementations(implementation):
    form = FORMS["rotated int8"]
    cache = make_form(**form)
    (ubatch,) = plan_ubatches(cache, [[1, 2], [3]], [0, 2])
    q, (k, v), _ = arrays_for(ubatch, form)
    step = jaxkv.apply(cache, ubatch)
    wanted, found = (
        jaxkv.attend(step, 0, q[0], k[0], v[0], implementation=name)[1]
        for name in (None, implementation)
    )
    np.testing.assert_allclose(found, wanted, atol=5e-6)


def test_nbytes_of_storage_forms():
    int8, latent = make_form(dtype="int8"), make_form(value_dim=PART)
    assert "int8, " in repr(int8) and "float32" not in repr(int8)
    assert int8.buffers.nbytes == 2 * 2 * HEADS * 24 * (SIZE + 4)
    assert make_form(dtype="int4").buffers.nbytes == 2 * 2 * HEADS * 24 * (SIZE // 2 + 2)
    assert latent.buffers.nbytes == 2 * HEADS * 24 * SIZE * 4  # keys alone


def test_layout_stacked_layers_are_split_as_layers_apart():
    mesh, rules = mesh_of(data=2, tensor=2), jaxkv.sharding.ShardingRules()
    shapes = [jax.eval_shape(partial(make_form, streams=4, stacked=on)) for on in (True, False)]
    one, other = (jaxkv.sharding.device_bytes(x, mesh, rules) for x in shapes)
    assert replace(one, table=0) == replace(other, table=0)
    one = jax.eval_shape(partial(make_form, stacked=True))  # one stream, which nothing splits
    specs = shardings(one, mesh, rules).buffers.k[0].spec
    assert not specs[0] and specs[1] == "tensor"


@core
def test_model_int8_cache_keeps_dtype_of_states():
    model = load_tiny("granite_hybrid")
    cache = jax.eval_shape(lambda: model.make_cache(cells=8, dtype="int8"))
    found = {np.dtype(x.dtype).name for x in jax.tree.leaves(cache.buffers)}
    assert found == {"int8", "float32"}


def test_latent_bad_values_raise():
    cache = make_form(value_dim=(PART, 5))
    step = jaxkv.apply(cache, jaxkv.init_batch(cache, make_batch([1])))
    q, k = (jnp.ones((*step.valid.shape, n, SIZE)) for n in (2 * HEADS, HEADS))
    for row in mistakes("latents"):
        assert_raises(*row, globals() | locals())
