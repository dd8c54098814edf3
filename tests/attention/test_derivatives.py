"""Derivatives of attention are those of the formula, also of batches of memories."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

import jaxkv
from jaxkv.ops.attention.bias import OfPlaces
from jaxkv.ops.attention.live import TILE
from jaxkv.ops.attention.softmax import Options
from tests.attention.formula import PLAIN, bias_between, case, formula, places, slope, visible
from tests.attention.lives import applied, arrays_for, lived_in
from tests.attention.ways import WAYS
from tests.cases import in_lanes
from tests.memories import GROUPS
from tests.meshes import RULES, mesh_of, placed

core = pytest.mark.core
ALL = Options(scale=0.7, softcap=2.0, sinks=jnp.linspace(-1.0, 1.0, 4))
CASES = {
    "plain": ({}, PLAIN),
    "all options": ({"lists": [2, 0], "value_dim": 9}, ALL),
    "bias": ({"bias": "function", "until": True}, ALL),
    "bias array": ({"bias": "array", "lists": [2, 0]}, PLAIN),
    "bias of all heads": ({"bias": "array of all heads"}, ALL),
}


def by_formula(q, k, v, sight, options):
    k, v = k[sight.streams], v[sight.streams]
    return formula(q, k, v, visible(sight), options, bias_between(sight), xp=jnp)


def weighted(out):
    """A number whose derivative is another one for each number of an output."""
    return jnp.sum(jnp.sin(out) * jnp.linspace(1, 2, out.size).reshape(out.shape))


def weights_of(bias):
    return bias.function.args[0] if isinstance(bias, OfPlaces) else bias


def with_weights(bias, weights):
    return places(weights) if isinstance(bias, OfPlaces) else weights


def derived(way, one, options, k=None, v=None):
    """Derivatives by queries, keys, values, sinks and the bias: backwards, and along one way."""
    q, _, _, sight = one
    arrays = q, one.k if k is None else k, one.v if v is None else v
    arrays += options.sinks, weights_of(sight.bias)

    def loss(q, k, v, sinks, weights):
        looks = replace(sight, bias=with_weights(sight.bias, weights))
        return weighted(way(q, k, v, looks, replace(options, sinks=sinks)))

    every = tuple(range(len(arrays)))
    along = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0) + 1, arrays)
    both = jax.jit(lambda *x: (jax.grad(loss, every)(*x), jax.jvp(loss, x, along)))
    return both(*arrays)


MATRIX = [
    *(("default", name) for name in CASES),
    *((way, "plain") for way in ("tiles", "whole", "tpu", "xla")),
    ("on masks", "all options"),
    ("xla", "bias array"),
]


@pytest.mark.parametrize(
    ("way", "name"), in_lanes(MATRIX, fast=[("default", "plain")], core=MATRIX), ids=str
)
def test_attend_derivatives_match_formula(way, name):
    """Backwards and forwards; they read nothing of what is hidden from all tokens."""
    arguments, options = CASES[name]
    one = case(**arguments)
    seen = np.zeros((3, 40), bool)
    seen[np.asarray(one.sight.streams)] = visible(one.sight).any(1)
    hidden = ~seen[:, None, :, None]
    k, v = (jnp.where(hidden, jnp.nan, x) for x in (one.k, one.v))
    got = derived(partial(WAYS[way]), one, options, k=k, v=None if way == "xla" else v)[0]
    wanted, forward = derived(by_formula, one, options)
    assert all(np.abs(x).max() > 1e-2 for x in jax.tree.leaves(wanted))
    for one_leaf, other in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(one_leaf, other, rtol=1e-4, atol=1e-5)
    along = derived(WAYS[way], one, options)[1]
    np.testing.assert_allclose(along, forward, rtol=1e-4)


@core
def test_formula_derivatives_are_finite_differences():
    one, rng = case(lists=[2, 0]), np.random.default_rng(0)
    mask, streams = visible(one.sight), np.asarray(one.sight.streams)
    arrays = [np.asarray(one.q, np.float64), *(np.asarray(x)[streams] for x in one[1:3])]
    of = jax.grad(lambda *arrays: weighted(formula(*arrays, mask, ALL, xp=jnp)), (0, 1, 2))
    grads = jax.jit(of)(*(jnp.asarray(x, jnp.float32) for x in arrays))
    for i, grad in enumerate(grads):
        along = rng.normal(size=arrays[i].shape)

        def at(step, i=i, along=along):
            moved = [x + step * along if i == j else x for j, x in enumerate(arrays)]
            out = formula(*moved, mask, ALL)
            return np.sum(np.sin(out) * np.linspace(1, 2, out.size).reshape(out.shape))

        difference = (at(1e-4) - at(-1e-4)) / 2e-4
        np.testing.assert_allclose(np.sum(grad * along), difference, rtol=1e-3)


# ------------------------------------------------------------------------------------ batches


def stack(*trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


@core
def test_vmap_over_memories_computes_once_and_matches_each():
    """Both sides of a choice would be computed, if `vmap` made it one between two results."""
    cases = [
        case(seed, cells=2 * TILE + 40, holes=holes) for seed, holes in enumerate((0.7, 0.0, 1.0))
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
def test_vmap_over_biases_matches_each(bias, shared):
    """Weights of a function or an array, which memories share or have of their own."""
    cases = [case(seed, lists=[2, 0], until=True, bias=bias) for seed in range(2)]
    first = cases[0].sight.bias
    weights = [weights_of(one.sight.bias) * (1 if shared else i + 1) for i, one in enumerate(cases)]
    weights = [weights[0]] * 2 if shared else weights
    cases = [
        one._replace(sight=replace(one.sight, bias=with_weights(first, own)))
        for one, own in zip(cases, weights, strict=True)
    ]

    def alone(q, k, v, sight, weights):
        sight = replace(sight, bias=with_weights(first, weights))
        return WAYS["default"](q, k, v, sight, PLAIN)

    axes = (0, 0, 0, 0, None if shared else 0)
    bare = [(*one[:3], replace(one.sight, bias=None)) for one in cases]
    given = weights[0] if shared else stack(*weights)
    got = jax.jit(jax.vmap(alone, axes))(*stack(*bare), given)
    for found, one in zip(got, cases, strict=True):
        np.testing.assert_allclose(found, one.wanted(), rtol=1e-5, atol=2e-6)

    if bias == "function":  # derivatives of what memories share add up

        def loss(weights):
            return weighted(jax.vmap(alone, axes)(*stack(*bare), weights))

        def apart(weights):
            own = [weights] * 2 if shared else weights
            outs = [
                by_formula(*one[:3], replace(one.sight, bias=places(w)), PLAIN)
                for one, w in zip(cases, own, strict=True)
            ]
            return weighted(jnp.stack(outs))

        found, wanted = (jax.jit(jax.grad(f))(given) for f in (loss, apart))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@core
def test_vmap_of_derivatives_matches_each():
    cases = [case(seed, lists=[2, 0]) for seed in range(2)]

    def derive(way, *one):
        of = jax.grad(lambda *arrays: weighted(way(*arrays, one[3], PLAIN)), (0, 1, 2))
        return jax.jit(of)(*one[:3])

    together = jax.jit(jax.vmap(partial(derive, WAYS["default"])))(*stack(*cases))
    for i, one in enumerate(cases):
        for got, wanted in zip(together, derive(by_formula, *one), strict=True):
            np.testing.assert_allclose(got[i], wanted, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------- memories


def by_hand(memory, layer, ubatch, q, k, v):
    """Write, look, and attend to what is seen."""
    memory = jaxkv.write(memory, layer, ubatch, k, v)
    keys, values, mask, _ = jaxkv.view(memory, layer, ubatch)
    lists = q.reshape(*mask.shape[:2], *q.shape[2:])
    return memory, jaxkv.ops.attention.attention(lists, keys, values, mask).reshape(q.shape)


@core
def test_view_derivatives_match_attend():
    memory, ubatch = applied(lived_in(GROUPS))
    arrays = arrays_for(ubatch)

    def loss(way, *arrays):
        out = way(memory, 0, ubatch, *arrays)[1]
        return jnp.sum(jnp.where(ubatch.valid[..., None, None], out, 0) ** 2)

    found, wanted = (
        jax.jit(jax.grad(partial(loss, way), (0, 1, 2)))(*arrays) for way in (by_hand, jaxkv.attend)
    )
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@core
@pytest.mark.parametrize("kind", ["function", "array"])
def test_attend_bias_derivatives_on_mesh_match_one_device(kind):
    memory, ubatch = applied(lived_in(GROUPS), (0, 1, 2, 3))
    q, *_ = arrays_for(ubatch)
    array = jax.random.normal(jax.random.key(1), (*ubatch.valid.shape, 4, GROUPS.cells))
    bias = array if kind == "array" else Partial(slope, jnp.linspace(-1, 1, 4))

    def loss(bias, memory, ubatch, q):
        out = jaxkv.attend(memory, 0, ubatch, q, bias=bias)[1]
        return jnp.sum(jnp.where(ubatch.valid[..., None, None], jnp.sin(out), 0.0))

    wanted = jax.jit(jax.grad(loss))(bias, memory, ubatch, q)
    with jax.set_mesh(mesh_of(data=2, tensor=2, cells=2)):
        found = jax.jit(jax.grad(loss))(bias, placed(memory, RULES), ubatch, q)
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert np.abs(other).max() > 1e-3
        np.testing.assert_allclose(np.asarray(one), other, rtol=1e-5, atol=1e-5)
