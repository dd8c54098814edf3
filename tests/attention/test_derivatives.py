"""Derivatives of attention equal those of the formula, also under `vmap`."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.ops.attention.active_tiles import TILE
from jaxkv.ops.attention.bias import PositionBias
from jaxkv.ops.attention.dispatch import attention
from jaxkv.ops.attention.softmax import AttentionOptions
from tests.attention.formula import PLAIN, bias_between, formula, make_case, places, visible_mask
from tests.attention.ways import WAYS
from tests.helpers.caches import attention_cache
from tests.helpers.parametrize import mark_cases

core = pytest.mark.core
ALL = AttentionOptions(scale=0.7, softcap=2.0, sinks=jnp.linspace(-1.0, 1.0, 4))
CASES = {
    "plain": ({}, PLAIN),
    "all options": ({"lists": [2, 0], "value_dim": 9}, ALL),
    "bias": ({"bias": "function", "visible_until": True}, ALL),
    "bias array": ({"bias": "array", "lists": [2, 0]}, PLAIN),
    "bias of all heads": ({"bias": "array of all heads"}, ALL),
}


def by_formula(q, k, v, visibility, options):
    k, v = k[visibility.streams], v[visibility.streams]
    return formula(q, k, v, visible_mask(visibility), options, bias_between(visibility), xp=jnp)


def weights_of(bias):
    return bias.function.value.args[0] if isinstance(bias, PositionBias) else bias


def loss(way, q, k, v, visibility, weights, options=PLAIN):
    """A scalar with a different derivative for each number of the output."""
    bias = places(weights) if isinstance(visibility.bias, PositionBias) else weights
    out = way(q, k, v, replace(visibility, bias=bias), options)
    return jnp.sum(jnp.sin(out) * jnp.linspace(1, 2, out.size).reshape(out.shape))


def derive_all(way, q, k, v, visibility, options):
    """Derivatives by queries, keys, values, sinks and bias: reverse mode, one forward direction."""
    arrays = q, k, v, options.sinks, weights_of(visibility.bias)

    def of(q, k, v, sinks, weights):
        return loss(way, q, k, v, visibility, weights, replace(options, sinks=sinks))

    along = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0) + 1, arrays)
    every = jax.grad(of, range(len(arrays)))
    return jax.jit(lambda *x: (every(*x), jax.jvp(of, x, along)[1]))(*arrays)


def assert_close(found, wanted):
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert np.abs(other).max() > 1e-2
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


MATRIX = [
    *(("default", name) for name in CASES),
    *((way, "plain") for way in ("tiles", "whole", "tpu", "xla")),
    ("on masks", "all options"),
    ("xla", "bias array"),
]


@pytest.mark.parametrize(("way", "name"), mark_cases(MATRIX, MATRIX[:1], MATRIX), ids=str)
def test_attend_derivatives_match_formula(way, name):
    """Reverse and forward mode; cells hidden from all tokens are not read."""
    arguments, options = CASES[name]
    q, k, v, visibility = make_case(**arguments)
    wanted = derive_all(by_formula, q, k, v, visibility, options)
    seen = np.zeros((3, 40), bool)
    seen[np.asarray(visibility.streams)] = visible_mask(visibility).any(1)
    k, dirty = (jnp.where(seen[:, None, :, None], x, jnp.nan) for x in (k, v))
    found = derive_all(WAYS[way], q, k, v if way == "xla" else dirty, visibility, options)
    assert_close(found, wanted)


def stack(*trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


@core
def test_vmap_over_caches_computes_once_and_matches_each():
    """`vmap` must not turn `cond` into a `select`, which computes both branches."""
    cases = [
        make_case(seed, cells=2 * TILE + 40, holes=holes) for seed, holes in enumerate([0.7, 0, 1])
    ]
    alone = partial(WAYS["default"], options=ALL)
    together = jax.jit(jax.vmap(alone)).lower(*stack(*cases)).compile()
    for got, one in zip(together(*stack(*cases)), cases, strict=True):
        np.testing.assert_allclose(got, one.wanted(ALL), rtol=1e-5, atol=2e-6)
    batched, single = together.as_text(), jax.jit(alone).lower(*cases[0]).compile().as_text()
    assert batched.count(" conditional(") == single.count(" conditional(") == 1
    assert batched.count(" while(") == single.count(" while(") > 0


@core
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("bias", ["function", "array"])
def test_vmap_over_biases_and_derivatives_match_each(bias, shared):
    """Weights or arrays of a bias, shared by all caches (derivatives add up) or one for each."""
    cases = [make_case(seed, lists=[2, 0], visible_until=True, bias=bias) for seed in range(2)]
    together, first = stack(*cases), weights_of(cases[0].visibility.bias)
    weights = first if shared else jnp.stack([first, 2 * weights_of(cases[1].visibility.bias)])

    def at_once(weights, *arrays):
        axes = (0, 0, 0, 0, None if shared else 0)
        alone = partial(loss, WAYS["default"])
        return jnp.sum(jax.vmap(alone, axes)(*arrays, together.visibility, weights))

    def apart(weights, *arrays):
        own = [weights] * 2 if shared else weights
        rows = zip(*arrays, [one.visibility for one in cases], own, strict=True)
        return sum(loss(by_formula, *row) for row in rows)

    derive = [jax.jit(jax.value_and_grad(f, range(4))) for f in (at_once, apart)]
    found, wanted = (f(weights, *together[:3]) for f in derive)
    assert_close(found, wanted)
    alone = jax.jit(at_once)(weights, *together[:3])  # without derivatives it is another program
    np.testing.assert_allclose(alone, wanted[0], rtol=1e-5)


# ----------------------------------------------------------------------------------- caches

QKV = np.random.default_rng(0).normal(size=(3, 1, 4, 2, 4)).astype(np.float32)


def attend_tokens(cache, q, k, v):
    cache = cache or attention_cache(layers=1, cells=8, kv_heads=2, head_dim=4)
    plan = jaxkv.init_batch(cache, jaxkv.make_batch([1] * q.shape[1]))
    step, out = jaxkv.attend(jaxkv.apply(cache, plan), 0, q, k, v)
    return step.cache, out


@core
def test_grad_through_write_and_view_matches_attend():
    """Includes the gradient through the keys of an earlier ubatch."""
    first, last = QKV[:, :, :2], QKV[:, :, 2:]

    def attends(cache, q, k, v):
        return attend_tokens(cache, q, k, v)[1]

    def by_hand(cache, q, k, v):
        plan = jaxkv.init_batch(cache, jaxkv.make_batch([1] * 2))
        step = jaxkv.write_kv(jaxkv.apply(cache, plan), 0, k, v)
        k, v, mask, _ = jaxkv.read_kv(step, 0)
        q = jnp.pad(q, [(0, 0), (0, mask.shape[1] - 2), (0, 0), (0, 0)])
        return jaxkv.ops.attention.attention(q, k, v, mask)

    def learn(way, first, last):
        return jnp.sum(way(attend_tokens(None, *first)[0], *last)[:, :2] ** 2)

    ways = attends, by_hand
    found, wanted = (jax.jit(jax.grad(partial(learn, way), (0, 1)))(first, last) for way in ways)
    assert not found[0][0].any()  # earlier queries
    assert_close((found[0][1:], found[1]), (wanted[0][1:], wanted[1]))


@core
def test_grad_of_forgotten_nan_is_unchanged():
    def learn(q, k, v, rest):
        cache, _ = attend_tokens(None, q, k + rest, v + rest)
        return jnp.sum(attend_tokens(jaxkv.clear(cache), q[:, :1], k[:, :1], v[:, :1])[1] ** 2)

    derive = jax.jit(jax.grad(learn, argnums=(0, 1, 2)))
    for a, b in zip(derive(*QKV, jnp.nan), derive(*QKV, 0.0), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.abs(b).max() > 1e-3


@pytest.mark.nightly
def test_grad_of_jit_checkpoint_and_scan_agree():
    """Here the step is traced first, and differentiated after that trace ended."""

    def learn(q, k, v):
        return jnp.sum(attend_tokens(None, q, k, v)[1] ** 2)

    def scanned(*arrays):
        _, losses = jax.lax.scan(lambda _, x: (_, learn(*arrays) * x), None, jnp.arange(2.0))
        return jnp.sum(losses)

    wanted = jax.jit(jax.grad(learn, argnums=(0, 1, 2)))(*QKV)
    for staged in (jax.jit(learn), jax.checkpoint(learn), scanned):
        assert_close(jax.grad(staged, argnums=(0, 1, 2))(*QKV), wanted)


@core
@pytest.mark.parametrize("implementation", ["whole", "tiles", "xla"])
def test_grad_of_latents_beside_a_broken_text_is_finite(implementation):
    """Values that are a slice of the keys are cleaned with the keys."""
    sizes = dict(layers=1, cells=4, kv_heads=1, head_dim=4, sequences=2)
    cache = attention_cache(**sizes, value_dim=slice(2, 4))

    def attend_text(cache, seq, x):
        (ubatch,) = jaxkv.init_batch(cache, jaxkv.make_batch([1], sequences=seq)).ubatches
        step, out = jaxkv.attend(jaxkv.apply(cache, ubatch), 0, x, x, implementation=implementation)
        return step.cache, out

    cache, _ = attend_text(cache, 0, jnp.full((1, 1, 1, 4), jnp.nan))
    slope = jax.grad(lambda x: attend_text(cache, 1, x)[1].sum())(jnp.ones((1, 1, 1, 4)))
    assert slope[0, 0, 0].tolist() == [0, 0, 1, 1]


@core
@pytest.mark.parametrize("implementation", [None, "whole", "tiles"])
def test_grad_of_queries_beside_a_nan_key_in_a_pool_is_that_without(implementation):
    """Only tokens that attend to the NaN get NaN."""
    cache = attention_cache(layers=1, kv_heads=1, head_dim=4, cells=8, sequences=2)
    step = jaxkv.apply(cache, jaxkv.plan_step(cache, jnp.array([1, 2])).ubatch)
    q, k, v = jax.random.normal(jax.random.key(0), (3, *step.valid.shape, 1, 4))

    def derive(number):
        def loss(q, k, v):
            k = k.at[0, 0, 0, 1].set(number)  # seen by sequence 0
            _, out = jaxkv.attend(step, 0, q, k, v, implementation=implementation)
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    broken, whole = derive(jnp.nan), derive(0.5)
    for found, wanted in zip(jax.tree.leaves(broken), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(found.reshape(2, 4)[1], wanted.reshape(2, 4)[1])
    (by_q, *_), out = broken
    assert jnp.isnan(by_q.reshape(2, 4)[0]).all() and jnp.isnan(out.reshape(2, 4)[0]).all()


@core
@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, None, None, None), (2, None, 1, 0)], ids=str)
def test_vmap_of_attention_on_plain_arrays_matches_each(axes):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(3, 2, 2, n, 4)).astype(np.float32) for n in (2, 5, 5)]
    arrays.append(rng.random((3, 2, 2, 5)) > 0.3)
    args = [x[0] if i is None else np.moveaxis(x, 0, i) for x, i in zip(arrays, axes, strict=True)]
    found = jax.jit(jax.vmap(attention, in_axes=axes))(*args)
    for row, out in enumerate(found):
        one = [x[0 if i is None else row] for x, i in zip(arrays, axes, strict=True)]
        np.testing.assert_allclose(out, attention(*one), atol=1e-6)
