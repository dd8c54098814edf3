"""Values that are a part of the keys: as in a memory that holds them twice, for half the bytes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import make_batch, snapshot
from tests.cases import mostly_nightly
from tests.meshes import mesh_of, placed

H, D, PART = 3, 9, slice(4, 9)
ROPE = jaxkv.make_rope(4)
CLOSE = dict(rtol=0, atol=2e-6)
make = partial(
    jaxkv.make_kv_cache, layers=2, cells=16, kv_heads=1, head_dim=D, sequences=3, rope=ROPE
)


def is_latent(memory):
    return not isinstance(memory.buffers.v[0], jax.Array)


def step(memory, ubatch, seed, **options):
    """Write and attend in both layers; options are for the latent one."""
    q, k = numbers(ubatch, seed)
    outs = []
    for layer in (0, 1):
        new = k + layer
        given = (new,) if is_latent(memory) else (new, new[..., PART])
        options = options if is_latent(memory) else {}
        memory, out = jaxkv.attend(memory, layer, ubatch, q, *given, **options)
        outs.append(out)
    return memory, outs


def numbers(ubatch, seed):
    """Queries `[R, T, H, D]` and rotated keys `[R, T, 1, D]`."""
    q, k = jax.random.split(jax.random.key(seed))
    shape = ubatch.valid.shape
    q, k = jax.random.normal(q, (*shape, H, D)), jax.random.normal(k, (*shape, 1, D))
    return q, jaxkv.rotate(k, ubatch.positions, ROPE)


class Pair:
    """A latent memory, and one with values of its own that are told the same."""

    def __init__(self, **sizes):
        self.both = [make(value_dim=PART, **sizes), make(value_dim=5, **sizes)]
        self.seed = 0

    def tell(self, *texts, sequences=None, size=3, **options):
        batch = make_batch([*texts], sequences=sequences)
        plans = [jaxkv.init_batch(memory, batch, ubatch_size=size).check() for memory in self.both]
        for ubatches in zip(*(plan.ubatches for plan in plans), strict=True):
            self.seed += 1
            found = [
                step(jaxkv.apply(memory, ubatch), ubatch, self.seed, **options)
                for memory, ubatch in zip(self.both, ubatches, strict=True)
            ]
            self.both = [memory for memory, _ in found]
            for got, wanted in zip(*(outs for _, outs in found), strict=True):
                np.testing.assert_allclose(got, wanted, **CLOSE)

    def do(self, verb, *args):
        self.both = [verb(memory, *args) for memory in self.both]

    def story(self):
        self.tell([1] * 7, [2] * 2, [3])
        self.do(lambda memory: jaxkv.seq_rm(memory, 0, 5)[0])
        self.do(jaxkv.seq_cp, 0, 2)
        self.tell([4], [5], sequences=[0, 2])
        self.do(lambda memory: jaxkv.seq_rm(memory, 2, 1, 2)[0])
        self.do(jaxkv.seq_add, 2, 2, -1, -1)
        self.do(lambda memory: jaxkv.apply(memory, jaxkv.init_update(memory)))
        self.do(lambda memory: jaxkv.apply(memory, jaxkv.defrag_plan(memory)))
        self.tell([6, 7], sequences=[2])
        return self


@pytest.mark.core
@pytest.mark.parametrize(
    "sizes",
    mostly_nightly(
        [{}, {"streams": 3}, {"window": jaxkv.window.sliding(4)}],
        few=[{"streams": 3}, {"window": jaxkv.window.sliding(4)}],
    ),
    ids=str,
)
def test_it_answers_as_one_with_values_of_their_own(sizes):
    latent, plain = Pair(**sizes).story().both
    keys = sum(x.nbytes for x in latent.buffers.k)
    assert jaxkv.nbytes(latent) == jaxkv.nbytes(plain) - keys * 5 // 9


def test_the_bytes_of_deepseek_v3():
    """61 layers, 512 latent numbers and 64 that are rotated, 32k tokens in bfloat16: 2.14 GiB."""
    shapes = jax.eval_shape(
        lambda: jaxkv.make_kv_cache(
            layers=61, cells=32_768, kv_heads=1, head_dim=576, value_dim=slice(64, 576),
            dtype=jnp.bfloat16,
        )
    )  # fmt: skip
    assert sum(x.size * 2 for x in jax.tree.leaves(shapes.buffers)) / 2**30 < 2.15


def seen(memory, x):
    """A prompt of two tokens in sequence 0 and one in sequence 1, whose key is x."""
    (ubatch,) = jaxkv.init_batch(memory, make_batch([[1, 2], [3]])).ubatches
    memory = jaxkv.apply(memory, ubatch)
    q, k = numbers(ubatch, 0)
    k = jnp.where((ubatch.sequences == 1)[..., None, None], x, k)
    return ubatch, *jaxkv.attend(memory, 0, ubatch, q, k)


@pytest.mark.parametrize("where", [pytest.param(0, marks=pytest.mark.core), 6])
def test_a_key_that_is_not_finite_shows_where_it_is_seen_alone(where):
    key = jnp.zeros(D).at[where].set(jnp.inf)
    ubatch, memory, out = seen(make(value_dim=PART), key)
    broken = np.isnan(out).all((2, 3))
    np.testing.assert_array_equal(broken, ubatch.valid & (ubatch.sequences == 1))
    assert np.isfinite(out[~broken & np.asarray(ubatch.valid)]).all()
    assert np.isfinite(jaxkv.view(memory, 0, ubatch).v).all()


def test_write_and_view():
    memory = make(value_dim=PART)
    (ubatch,) = jaxkv.init_batch(memory, make_batch([1, 2])).ubatches
    memory = jaxkv.apply(memory, ubatch)
    q, k = numbers(ubatch, 0)
    after, out = jaxkv.attend(memory, 0, ubatch, q, k)
    memory = jaxkv.write(memory, 0, ubatch, k)
    np.testing.assert_array_equal(memory.buffers.k[0], after.buffers.k[0])
    keys, values, mask, _ = jaxkv.view(memory, 0, ubatch)
    np.testing.assert_array_equal(values, keys[..., PART])
    formula = jaxkv.ops.attention.attention(q.reshape(1, -1, H, D), keys, values, mask)
    np.testing.assert_allclose(out.reshape(formula.shape), formula, **CLOSE)
    np.testing.assert_array_equal(jaxkv.attend(memory, 0, ubatch, q)[1], out)


@pytest.mark.core
@pytest.mark.parametrize("implementation", ["tiles", "whole", "pallas", "xla"])
def test_each_implementation(implementation):
    options = {"rope": None} if implementation == "pallas" else {}
    pair = Pair(**options)
    pair.tell([1] * 5, [2], implementation=implementation)
    pair.tell([3], sequences=[1], implementation=implementation)


@pytest.mark.core
def test_derivatives_are_those_of_values_of_their_own():
    (ubatch,) = jaxkv.init_batch(make(), make_batch([1, 2, 3])).ubatches
    q, k = numbers(ubatch, 0)
    weights = jnp.arange(5.0).reshape(1, 1, 1, 5)

    def loss(q, k, memory):
        memory = jaxkv.apply(memory, ubatch)
        new = (
            (k,) if memory.buffers.v[0] == make(value_dim=PART).buffers.v[0] else (k, k[..., PART])
        )
        return jnp.sum(jaxkv.attend(memory, 0, ubatch, q, *new)[1] * weights)

    grad = jax.grad(loss, argnums=(0, 1))
    for got, wanted in zip(
        grad(q, k, make(value_dim=PART)), grad(q, k, make(value_dim=5)), strict=True
    ):
        np.testing.assert_allclose(got, wanted, **CLOSE)


@pytest.mark.core
@pytest.mark.parametrize(
    ("streams", "axes"),
    mostly_nightly(
        [(1, {"cells": 4}), (2, {"data": 2, "cells": 2})], few=[(2, {"data": 2, "cells": 2})]
    ),
    ids=str,
)
def test_on_a_mesh(streams, axes):
    with jax.set_mesh(mesh_of(**axes)):
        pair = Pair(sequences=4, streams=streams)
        pair.both[0] = placed(pair.both[0])
        pair.story()


@pytest.mark.core
def test_saved_and_loaded(tmp_path):
    pair = Pair()
    pair.tell([1] * 5, [2])
    (latent, plain), path = pair.both, tmp_path / "saved"
    snapshot.save(path, latent)
    loaded = snapshot.load(path)
    into = snapshot.load_into(path, make(value_dim=PART, cells=20))
    for other in (loaded, into):
        pair.both = [other, plain]
        pair.tell([3, 4], sequences=[1])
    for wrong in (plain, make(value_dim=slice(4, 8))):
        with pytest.raises(ValueError, match="value_dim|values in keys"):
            snapshot.load_into(path, wrong)


@pytest.mark.core
@pytest.mark.parametrize("tokens", [1, 12])
def test_a_step_copies_no_keys(tokens):
    """Neither for the values that are a part of them, nor for a loop over tiles."""
    memory = make(
        value_dim=slice(64, 576), layers=1, cells=8192, head_dim=576, rope=None, sequences=1
    )
    plan = jax.eval_shape(lambda m: jaxkv.init_batch(m, make_batch([1] * tokens)), memory)
    ubatch = plan.ubatches[0]
    q, k = (jax.ShapeDtypeStruct((*ubatch.valid.shape, n, 576), jnp.float32) for n in (2, 1))
    lowered = jax.jit(
        lambda memory, u, q, k: jaxkv.attend(memory, 0, u, q, k), donate_argnums=0
    ).lower(memory, ubatch, q, k)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < memory.buffers.k[0].nbytes // 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_dim": slice(0, 9)}, "some and not all, got slice"),
        ({"value_dim": slice(4, 4)}, "some and not all"),
        ({"value_dim": slice(0, 8, 2)}, "neighbouring numbers"),
        ({"value_dim": (PART,)}, "all layers or 2, one each, got 1"),
        ({"value_dim": PART, "dtype": "int8"}, "16 bits or more"),
        ({"value_dim": slice(0, 5)}, "after the 4 numbers of a key that its rope turns"),
        ({"value_dim": slice(3, 8)}, "after the 4 numbers of a key that its rope turns"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_values_of_their_own_are_refused_there_and_wanted_elsewhere():
    memory, plain = make(value_dim=PART), make(value_dim=(PART, 5))
    (ubatch,) = jaxkv.init_batch(memory, make_batch([1])).ubatches
    q, k = numbers(ubatch, 0)
    with pytest.raises(TypeError, match="numbers 4 to 8 are the values.*leave v out"):
        jaxkv.attend(memory, 0, ubatch, q, k, k[..., PART])
    with pytest.raises(TypeError, match="got keys alone"):
        jaxkv.attend(plain, 1, ubatch, q, k)
