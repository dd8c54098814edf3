"""Biases under transformations and in large arrays: derivatives, vmap, tiles, programs.

That they are added at all, wherever a life leads, is in `tests/attention/test_bias.py`.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

import jaxkv
from jaxkv import make_batch
from jaxkv.ops.attention import pallas_gpu
from jaxkv.ops.attention.api import attend, finished
from jaxkv.ops.attention.bias import OfPlaces
from jaxkv.ops.attention.live import BLOCK, TILE
from jaxkv.ops.attention.sight import bias_of, mask_of, with_array
from jaxkv.ops.attention.softmax import Options
from models.compiling import counting
from tests import hlo
from tests.attention.test_bias import BIASES, CLOSE, TABLE, D, H, K, Q, Relative, Texts, alibi, bent
from tests.cases import mostly_nightly
from tests.meshes import RULES, mesh_of, placed
from tests.sights import sight_of_mask

core = pytest.mark.core


def plain(q, k, v, mask, added, scale, softcap, sinks):
    """`[P, T, H, D]`, written down for derivatives; `added` is `[P, H, T, N]`."""
    k, v = (jnp.repeat(x, H // K, axis=1) for x in (k, v))
    logits = jnp.einsum("pthd,phnd->phtn", q, k) * scale
    logits = softcap * jnp.tanh(logits / softcap) + added
    mask = jnp.broadcast_to(mask[:, None], logits.shape)
    highest = jnp.max(logits, axis=3, keepdims=True, where=mask, initial=-50.0)
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, logits - highest, 0.0)), 0.0)
    total = weights.sum(3) + jnp.exp(sinks[None, :, None] - highest[..., 0])
    total = jnp.where(mask.any(3), total, 1.0)
    return jnp.einsum("phtn,phnd->pthd", weights / total[..., None], v)


def applied(streams=2, sequences=(0, 2, 3), tokens=4):
    """A memory with tokens, the ubatch of more, and arrays for it."""
    texts = Texts(streams=streams)
    for _ in range(2):
        batch = make_batch([[1] * tokens] * len(sequences), sequences=[*sequences])
        (ubatch,) = jaxkv.init_batch(texts.memory, batch).check().ubatches
        texts.memory = jaxkv.apply(texts.memory, ubatch)
        arrays = [
            jnp.asarray(texts.rng.normal(size=(*ubatch.valid.shape, n, D)), jnp.float32)
            for n in (H, K, K)
        ]
        texts.memory = jaxkv.write(texts.memory, 0, ubatch, *arrays[1:])
    return texts.memory, ubatch, arrays


@core
@pytest.mark.parametrize("streams", mostly_nightly([1, 2], few=[2]))
def test_the_order_of_scale_softcap_bias_and_sinks_and_derivatives(streams):
    """To queries, to the weights of functions, and to an array; `bent` has none where it hides."""
    memory, ubatch, (q, *_) = applied(streams)
    options = {"scale": 0.7, "softcap": 3.0, "sinks": jnp.linspace(-1.0, 1.0, H)}
    k, v, mask, position = jaxkv.view(memory, 0, ubatch)
    at = ubatch.positions.reshape(mask.shape[:2])
    key = jnp.where(mask, position[:, None], at[..., None])[:, None]
    valid = ubatch.valid[..., None, None]

    def ours(q, bias):
        out = jaxkv.attend(memory, 0, ubatch, q, bias=bias, **options)[1]
        return jnp.sum(jnp.where(valid, jnp.sin(out), 0.0))

    def theirs(q, bias):
        if callable(bias):
            added = bias(at[:, None, :, None], key, jnp.arange(H)[None, :, None, None])
        else:
            added = jnp.broadcast_to(bias, (*ubatch.valid.shape, H, mask.shape[2]))
            added = added.reshape(*mask.shape[:2], H, -1).swapaxes(1, 2)
        lists = q.reshape(*mask.shape[:2], H, D)
        out = plain(lists, k, v, mask, added, *options.values())
        return jnp.sum(jnp.where(valid, jnp.sin(out.reshape(q.shape)), 0.0))

    whole = jax.random.normal(jax.random.key(1), (*ubatch.valid.shape, H, mask.shape[2]))
    shared = whole[:1, :1, :1]
    for bias in (*(BIASES[name] for name in ("t5", "weights")), whole, shared):
        found, wanted = (jax.value_and_grad(f, (0, 1))(q, bias) for f in (ours, theirs))
        assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(wanted[1][1])) > 1e-3
        for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        one, other = (
            jax.jvp(f, (q, bias), (q, jax.tree.map(jnp.ones_like, bias))) for f in (ours, theirs)
        )
        np.testing.assert_allclose(one, other, rtol=1e-5)


@core
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_derivatives_are_clean_of_what_a_bias_hides(implementation):
    memory, ubatch, (q, *_) = applied(1)

    def loss(q, bias):
        out = jaxkv.attend(memory, 0, ubatch, q, bias=bias, implementation=implementation)[1]
        return jnp.sum(jnp.where(ubatch.valid[..., None, None], jnp.sin(out), 0.0))

    array = jnp.zeros((1, 1, H, 32)).at[:, :, 1].set(-jnp.inf).at[:, :, 2, 3].set(-jnp.inf)
    of_q, of_array = jax.grad(loss, (0, 1))(q, array)
    assert np.isfinite(of_q).all() and np.isfinite(of_array).all()
    assert not np.asarray(of_q)[:, :, 1].any() and not np.asarray(of_array)[:, :, 1].any()
    assert np.abs(of_array[:, :, 2]).max() > 1e-4 and not of_array[0, 0, 2, 3]


@core
@pytest.mark.parametrize("streams", [1, 2])
def test_a_batch_of_memories_is_each_alone(streams):
    """With weights that they share, weights of their own, an array each, and how far each sees."""
    made = [applied(streams) for _ in range(2)]
    memories = jax.tree.map(lambda *x: jnp.stack(x), *(memory for memory, *_ in made))
    ubatch, (q, *_) = made[0][1:]
    q = jnp.stack([q, 2 * q])
    tables = jnp.stack([TABLE, -TABLE])
    arrays = jax.random.normal(jax.random.key(0), (2, *ubatch.valid.shape, H, 32))
    until = jnp.stack([ubatch.positions, ubatch.positions + 1])

    def of(memory, q, bias, until):
        return jaxkv.attend(memory, 0, ubatch, q, bias=bias, until=until)[1]

    for bias, axis in ((BIASES["t5"], None), (Relative(tables), 0), (arrays, 0), (arrays[0], None)):
        out = jax.vmap(of, (0, 0, axis, 0))(memories, q, bias, until)
        for i, (memory, *_) in enumerate(made):
            own = bias if axis is None else jax.tree.map(lambda x, i=i: x[i], bias)
            np.testing.assert_allclose(out[i], of(memory, q[i], own, until[i]), **CLOSE)


@core
def test_weights_that_a_batch_shares_get_the_sum_of_their_derivatives():
    memory, ubatch, (q, *_) = applied()
    q = jnp.stack([q, 2 * q])

    def loss(table, q):
        out = jaxkv.attend(memory, 0, ubatch, q, bias=Relative(table))[1]
        return jnp.sum(jnp.where(ubatch.valid[..., None, None], jnp.sin(out), 0.0))

    found = jax.grad(lambda table: jax.vmap(loss, (None, 0))(table, q).sum())(TABLE)
    wanted = sum(jax.grad(loss)(TABLE, one) for one in q)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def large(tokens, *, seen=0.4, lists=(2, 0), streams=3, cells=2 * TILE + 40, last=900):
    """Arrays, and a sight in which whole tiles are not seen, with ends and a bias."""
    rng = np.random.default_rng(0)
    shapes = ((len(lists), tokens, H, D), *2 * ((streams, K, cells, D),))
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    tiles = rng.random((len(lists), -(-cells // TILE))) < seen
    tiles[:, 0] = True
    mask = np.repeat(tiles, TILE, axis=1)[:, None, :cells] & (
        rng.random((len(lists), tokens, cells)) < 0.5
    )
    sight = replace(
        sight_of_mask(mask, lists, streams),
        position=jnp.asarray(rng.integers(0, 900, (streams, cells)), jnp.int32),
        at=jnp.asarray(rng.integers(0, last, (len(lists), tokens)), jnp.int32),
        until=jnp.asarray(rng.integers(0, 900, (len(lists), tokens)), jnp.int32),
        bias=OfPlaces(function=BIASES["t5"], heads=jnp.arange(H)),
    )
    return q, k, v, sight


def formula(q, k, v, sight):
    added = bias_of(sight)
    added = jnp.zeros(()) if added is None else added
    k, v = k[sight.streams], v[sight.streams]
    return plain(q, k, v, mask_of(sight), added, D**-0.5, 1e9, jnp.full(H, -jnp.inf))


@core
@pytest.mark.parametrize(
    ("implementation", "tokens", "options"),
    [
        (None, 2, {"lists": (0, 1, 2), "seen": 0.9}),  # all at once
        (None, 2, {"lists": (0, 1, 2), "seen": 0.1}),  # the same program, by tiles
        ("tiles", BLOCK + 3, {}),
        # A mask that is made tile by tile, of what lies ahead alone.
        ("tiles", BLOCK + 3, {"cells": 17 * TILE, "last": 1}),
        ("whole", BLOCK + 3, {}),
        ("xla", BLOCK + 3, {}),
    ],
)
def test_tiles_and_blocks_of_tokens(implementation, tokens, options):
    q, k, v, sight = large(tokens, **options)
    wanted = formula(q, k, v, sight)
    for one in (sight, with_array(sight)):
        out = attend(q, k, v, one, Options(), implementation)
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=2e-6)


@core
def test_a_long_prompt_holds_no_bias_of_all_pairs():
    arrays = jax.eval_shape(lambda: large(2 * BLOCK, lists=(0,), streams=1, cells=64 * TILE))
    program = attend.lower(*arrays, Options()).compile()
    assert hlo.temporary_bytes(program) < 2 * BLOCK * 64 * TILE  # a byte for each pair


@core
def test_a_function_is_compiled_once():
    """Other weights, and the same function wrapped anew, are the same program."""
    memory, ubatch, (q, *_) = applied()

    def run(weights):
        jaxkv.attend(memory, 0, ubatch, q, bias=Partial(bent, weights))
        jaxkv.attend(memory, 0, ubatch, q, bias=alibi)

    tables = np.asarray(TABLE)
    run(tables[0])
    with counting() as heard:
        run(tables[1])
    assert heard() == 0


@core
@pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"  # said from jax 0.11 on
)
def test_the_kernel_for_gpus_sees_ahead():
    q, k, v, sight = large(BLOCK + 3)
    sight = replace(sight, bias=None)
    sums = pallas_gpu.weigh(q, k, v, sight, Options(), interpret=True)
    wanted = formula(q, k, v, sight)
    np.testing.assert_allclose(finished(sums, q, Options()), wanted, **CLOSE)


@core
@pytest.mark.parametrize("kind", ["t5", "array"])
def test_derivatives_on_a_mesh_are_those_of_one_device(kind):
    def loss(bias, memory, ubatch, q):
        out = jaxkv.attend(memory, 0, ubatch, q, bias=bias)[1]
        return jnp.sum(jnp.where(ubatch.valid[..., None, None], jnp.sin(out), 0.0))

    memory, ubatch, (q, *_) = applied(2, range(Q))
    array = jax.random.normal(jax.random.key(1), (*ubatch.valid.shape, H, 32))
    bias = array if kind == "array" else BIASES["t5"]
    wanted = jax.grad(loss)(bias, memory, ubatch, q)
    with jax.set_mesh(mesh_of(data=2, tensor=2, cells=2)):
        found = jax.jit(jax.grad(loss))(bias, placed(memory, RULES), ubatch, q)
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert np.abs(other).max() > 1e-3
        np.testing.assert_allclose(np.asarray(one), other, rtol=1e-5, atol=1e-5)
