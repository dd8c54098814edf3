"""Memories of 8 bits, of latent values, and of layers in one array, beside plain ones of float32.

A plain memory is told the numbers that the other one stores; both are led through the same life.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxkv
from jaxkv import make_batch, snapshot
from jaxkv.ops.latent import Latent
from jaxkv.ops.quantised import decoded
from tests.attention.formula import rounded
from tests.cases import in_lanes
from tests.meshes import mesh_of, placed

core = pytest.mark.core
LAYERS, HEADS, SIZE, PART = 2, 2, 8, slice(4, 8)
ROPE = jaxkv.make_rope(4, base=100.0)  # the numbers before PART
FORMS = {
    "int8": {"dtype": "int8"},
    "float8": {"dtype": "float8_e4m3fn"},
    "latent": {"value_dim": PART},
    "stacked": {"stacked": True},
    "stacked int8": {"stacked": True, "dtype": "int8"},
    "stacked latent": {"stacked": True, "value_dim": PART},
}
SIZES = {
    "one stream": {"cells": 24},
    "groups": {"cells": 24, "streams": 2},
    "window": {"cells": 16, "streams": 4, "window": jaxkv.window.sliding(4)},
    "tiled": {"cells": 32, "placement": "tiled"},
    "striped": {"cells": 24, "streams": 2, "placement": "striped", "shards": 2},
}
make = partial(
    jaxkv.make_kv_cache, layers=LAYERS, kv_heads=HEADS, head_dim=SIZE, sequences=4, rope=ROPE
)


@jax.jit
def attended(memory, ubatch, q, k, v):
    """Apply a ubatch and attend in all layers, in a scan where they are stacked."""
    memory = jaxkv.apply(memory, ubatch)

    def of_layer(memory, arrays):
        number, q, k, v = arrays
        return jaxkv.attend(memory, number, ubatch, q, k, v)

    if memory.buffers.stacked:
        return jax.lax.scan(of_layer, memory, (jnp.arange(LAYERS), q, k, v))
    outs = []
    for number in range(LAYERS):
        arrays = jax.tree.map(lambda x, number=number: x[number], (q, k, v))
        memory, out = of_layer(memory, (number, *arrays))
        outs.append(out)
    return memory, jnp.stack(outs)


def held(memory):
    """Keys and values of all layers as numbers, `[L, S, K, N, D]` each."""
    halves = []
    for half in (memory.buffers.k, memory.buffers.v):
        arrays = [x if isinstance(x, Latent) else np.asarray(decoded(x), np.float32) for x in half]
        if isinstance(arrays[0], Latent):
            halves.append(halves[0][..., PART])
            continue
        layers = [x.reshape(-1, memory.buffers.depth, *x.shape[1:]) for x in arrays]
        halves.append(np.concatenate([x.swapaxes(0, 1) for x in layers]))
    return halves


class Pair:
    """A memory of some form, and a plain one."""

    def __init__(self, form, sizes, place=lambda memory: memory, seed=0):
        self.form, self.sizes = FORMS[form], SIZES[sizes]
        self.plain_form = {"value_dim": 4} if self.is_latent else {}
        self.ours = place(make(**self.form, **self.sizes))
        self.plain = make(**self.plain_form, **self.sizes)
        self.rng = np.random.default_rng(seed)

    @property
    def is_latent(self):
        return "value_dim" in self.form

    def stored(self, x):
        return rounded(x, self.form["dtype"]) if "dtype" in self.form else np.asarray(x)

    def new(self, ubatch):
        """Queries, keys and values of all layers, and what is stored of the latter."""
        shape = (LAYERS, *ubatch.valid.shape)
        q, k, v = (
            self.rng.normal(size=(*shape, heads, SIZE)).astype(np.float32)
            for heads in (2 * HEADS, HEADS, HEADS)
        )
        if self.is_latent:
            return q, (k, None), (k, k[..., PART])
        return q, (k, v), (self.stored(k), self.stored(v))

    def tell(self, *counts, sequences=None):
        batch = make_batch([[1] * n for n in counts], sequences=sequences)
        ours, plain = (
            jaxkv.init_batch(memory, batch, ubatch_size=4).check().ubatches
            for memory in (self.ours, self.plain)
        )
        for ubatch, other in zip(ours, plain, strict=True):
            q, given, stored = self.new(ubatch)
            self.ours, out = attended(self.ours, ubatch, q, *given)
            self.plain, wanted = attended(self.plain, other, q, *stored)
            np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=5e-6)
        self.compare()

    def edit(self, verb, *args):
        for name in ("ours", "plain"):
            done = verb(getattr(self, name), *args)
            setattr(self, name, done[0] if isinstance(done, tuple) else done)
        self.compare()

    def commit(self, plan):
        """Carry out an update or a defrag. What was rotated is stored anew."""
        self.ours, self.plain = (
            jaxkv.apply(memory, plan(memory)) for memory in (self.ours, self.plain)
        )
        table, buffers = jaxkv.split(self.plain)
        k = tuple(jnp.asarray(self.stored(x)) for x in buffers.k)
        self.plain = jaxkv.join(table, replace(buffers, k=k))
        self.compare()

    def compare(self):
        """The tables are the same, and so is what the cells in use hold."""
        for field in ("position", "owners", "shift"):
            one, other = (getattr(memory.table, field) for memory in (self.ours, self.plain))
            np.testing.assert_array_equal(one, other)
        used = np.asarray(self.ours.table.position)[:, None, :, None] >= 0
        for one, other in zip(held(self.ours), held(self.plain), strict=True):
            np.testing.assert_allclose(
                np.where(used, one, 0), np.where(used, other, 0), rtol=1e-5, atol=2e-6
            )

    def live(self):
        """Prompts, forks, a cut, a shift, copies between streams, a defrag and steps."""
        for _ in range(2):
            self.tell(2, 2, sequences=[0, 2])
        self.edit(jaxkv.seq_cp, 0, [1, 3], 0, 3)
        self.edit(jaxkv.seq_rm, 0, 3, -1)
        self.edit(jaxkv.seq_add, 1, 1, -1, 2)
        self.commit(jaxkv.init_update)
        self.edit(jaxkv.seq_select, [2, 1], [1, 2])
        self.edit(jaxkv.seq_rm, 0)
        self.commit(jaxkv.defrag_plan)
        self.tell(2, 2, sequences=[1, 2])


LIVES = [
    ("int8", "groups"),
    ("int8", "window"),
    ("int8", "one stream"),
    ("float8", "groups"),
    ("latent", "groups"),
    ("latent", "window"),
    ("stacked", "one stream"),
    ("stacked", "groups"),
    ("stacked int8", "tiled"),
    ("stacked latent", "window"),
]


@pytest.mark.parametrize(
    ("form", "sizes"),
    in_lanes(
        LIVES,
        fast=[],
        core=[
            ("int8", "groups"),
            ("latent", "window"),
            ("stacked", "groups"),
            ("stacked int8", "tiled"),
        ],
    ),
)
def test_storage_form_life_matches_plain_memory(form, sizes):
    Pair(form, sizes).live()


MESHES = [
    ("int8", "striped", AxisType.Auto, {"data": 2, "tensor": 2, "cells": 2}),
    ("latent", "groups", AxisType.Auto, {"data": 2, "cells": 2}),
    ("latent", "one stream", AxisType.Auto, {"cells": 4}),
    ("stacked", "window", AxisType.Auto, {"data": 2, "cells": 2}),
    ("stacked", "one stream", AxisType.Explicit, {"tensor": 2, "cells": 2}),
    ("stacked int8", "groups", AxisType.Explicit, {"data": 2, "tensor": 2}),
]


@pytest.mark.parametrize(
    ("form", "sizes", "mode", "axes"),
    in_lanes(MESHES, fast=[], core=[MESHES[0], MESHES[1], MESHES[3]]),
)
def test_storage_form_life_on_mesh_matches_plain_memory(form, sizes, mode, axes):
    with jax.set_mesh(mesh_of(mode, **axes)):
        pair = Pair(form, sizes, placed)
        split = jax.tree.leaves(pair.ours.buffers.k)[0].addressable_shards[0].data.shape
        whole = pair.ours.buffers.k[0].shape
        streams = pair.sizes.get("streams", 1)
        assert split[0] * axes.get("data", 1) == len(pair.ours.table.position) * whole[0] // streams
        assert split[1] * axes.get("tensor", 1) == HEADS
        assert split[2] * axes.get("cells", 1) == pair.sizes["cells"]
        pair.live()


@pytest.mark.parametrize("form", in_lanes(FORMS, fast=[], core=["latent", "stacked int8"]))
def test_snapshot_storage_form_goes_on_as_plain_memory(form):
    """Also where a memory of other sizes takes it in; files do not know of stacked layers."""
    pair = Pair(form, "groups")
    pair.tell(3, 2, 2)
    ours, plain = (snapshot.to_bytes(memory) for memory in (pair.ours, pair.plain))
    apart = {name: value for name, value in pair.form.items() if name != "stacked"}
    if "dtype" in apart:
        found = snapshot.inspect(ours).arrays["buffers.k.0.codes"]
        assert found == (apart["dtype"], (7, HEADS, SIZE))
    pair.ours = snapshot.load(ours)
    assert not pair.ours.buffers.stacked
    pair.compare()
    sizes = {"cells": 20, "streams": 1}
    pair.plain = snapshot.load_into(plain, make(**pair.plain_form, **sizes))
    for other in (apart, pair.form):
        pair.ours = snapshot.load_into(ours, make(**other, **sizes))
        pair.compare()
    pair.tell(1, 1, sequences=[2, 0])
    wrong, match = [{"value_dim": 4}, {"value_dim": slice(4, 7)}], "value_dim|values in keys"
    if not pair.is_latent:
        dtypes = {"float32", "int8", "float8_e4m3fn"} - {apart.get("dtype", "float32")}
        wrong, match = [{"dtype": dtype} for dtype in dtypes], "the dtype of this one, .* got one"
    for options in wrong:
        with pytest.raises(ValueError, match=match):
            snapshot.load_into(ours, make(**options, **sizes))


@pytest.mark.parametrize("form", in_lanes(FORMS, fast=[], core=["int8", "stacked latent"]))
def test_vmap_over_memories_of_a_storage_form_matches_each(form):
    pairs = [Pair(form, "groups", seed=seed) for seed in range(2)]
    memories, arrays, wanted = [], [], []
    for pair in pairs:
        pair.tell(3, 2, 2)
        (ubatch,) = jaxkv.init_batch(pair.ours, make_batch([[1], [2]], sequences=[3, 1])).ubatches
        q, given, _ = pair.new(ubatch)
        memories.append(pair.ours)
        arrays.append((ubatch, q, *given))
        wanted.append(attended(*(memories[-1], *arrays[-1])))
    batch = jax.tree.map(lambda *x: jnp.stack(x), *memories)
    found = jax.vmap(attended)(batch, *jax.tree.map(lambda *x: jnp.stack(x), *arrays))
    for i, (memory, out) in enumerate(wanted):
        after = jax.tree.map(lambda x, i=i: x[i], found[0])
        np.testing.assert_allclose(found[1][i], out, atol=2e-6)
        jax.tree.map(partial(np.testing.assert_allclose, atol=2e-6), held(after), held(memory))


@core
@pytest.mark.parametrize("form", ["int8", "latent", "stacked"])
def test_attend_derivatives_of_storage_form_match_plain_memory(form):
    """Quantised keys and values have none; those of queries go through what is stored."""
    pair = Pair(form, "groups")
    pair.tell(3, 2, 2)
    (ubatch,) = jaxkv.init_batch(pair.ours, make_batch([[1], [2]], sequences=[3, 1])).ubatches
    q, given, stored = (jax.tree.map(jnp.asarray, x) for x in pair.new(ubatch))

    def loss(memory, of_k, q, k):
        return jnp.sum(jnp.sin(attended(memory, ubatch, q, *of_k(k))[1]))

    def plain(k):
        return (k, k[..., PART]) if pair.is_latent else (k, stored[1])

    found = jax.grad(loss, (2, 3))(pair.ours, lambda k: (k, given[1]), q, given[0])
    wanted = jax.grad(loss, (2, 3))(pair.plain, plain, q, stored[0])
    if form == "int8":
        assert not found[1].any()
        found, wanted = found[:1], wanted[:1]
    for one, other in zip(found, wanted, strict=True):
        assert np.abs(other).max() > 1e-2
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


BROKEN = [
    ({}, "k", np.nan, 0),
    ({}, "v", np.inf, 0),
    ({"dtype": "bfloat16"}, "k", -np.inf, 0),
    ({"dtype": "float16"}, "v", 7e4, 0),  # finite, but not in float16
    (FORMS["int8"], "k", np.nan, 0),
    (FORMS["int8"], "v", np.inf, 0),
    (FORMS["latent"], "k", np.inf, 0),
    (FORMS["latent"], "k", np.inf, 6),
    (FORMS["stacked int8"], "k", np.inf, 0),
]


@pytest.mark.parametrize(
    ("form", "half", "bad", "where"),
    in_lanes(BROKEN, fast=[], core=BROKEN),
    ids=str,
)
def test_attend_nonfinite_head_becomes_nan_key_and_zero_value(form, half, bad, where):
    """It shows in the tokens that see it, in the query heads that read it, and nowhere else."""
    memory = make(cells=8, **form)
    (ubatch,) = jaxkv.init_batch(memory, make_batch([[1, 2, 3], [4, 5, 6]])).ubatches
    rng = np.random.default_rng(0)
    shape = (LAYERS, *ubatch.valid.shape)
    q, k, v = (rng.normal(size=(*shape, n, SIZE)).astype(np.float32) for n in (4, 2, 2))
    latent = "value_dim" in form
    clean, wanted = attended(memory, ubatch, q, k, None if latent else v)
    {"k": k, "v": v}[half][0, 0, 4, 1, where] = bad  # layer 0, token 1 of sequence 1, head 1
    broken, out = attended(memory, ubatch, q, k, None if latent else v)

    place, other = (0, 0, 1, 4), held(clean)
    keys, values = held(broken)
    assert np.isnan(keys[place]).tolist() == [not latent or i < PART.start for i in range(SIZE)]
    assert not values[place].any()
    keys[place], values[place] = (x[place] for x in other)
    jax.tree.map(np.testing.assert_array_equal, [keys, values], other)
    out, wanted = np.array(out), np.asarray(wanted)
    assert np.isnan(out[0, 0, 4:6, 2:]).all()
    out[0, 0, 4:6, 2:] = wanted[0, 0, 4:6, 2:]
    np.testing.assert_allclose(out, wanted, atol=2e-6)

    moved = jaxkv.seq_add(broken, 1, 0, -1, 3)
    keys, values = held(jaxkv.apply(moved, jaxkv.init_update(moved)))
    assert np.isnan(keys[place][: PART.start]).all() and np.isfinite(values).all()
    assert np.isnan(keys).any(-1).sum() == 1


def test_layout_stacked_layers_are_split_as_layers_apart():
    mesh = mesh_of(data=2, tensor=2)
    rules = jaxkv.sharding.Rules()
    shapes = [
        jax.eval_shape(partial(make, cells=24, streams=4, stacked=stacked))
        for stacked in (True, False)
    ]
    stacked, apart = (jaxkv.sharding.layout(one, mesh, rules) for one in shapes)
    assert stacked == apart
    one = jax.eval_shape(partial(make, cells=24, stacked=True))  # one stream is split by nothing
    specs = jaxkv.sharding.shardings(one, mesh, rules).buffers.k[0].spec
    assert not specs[0] and specs[1] == "tensor"
