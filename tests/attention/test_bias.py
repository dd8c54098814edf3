"""Biases and `visible_until` in caches after edits, also on meshes, against NumPy."""

from contextlib import nullcontext
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.tree_util import Partial

import jaxkv
from models.compiling import counting
from tests.attention.lives import CLOSE, by_formula, draw_qkv, make_edited, read_bias, start_step
from tests.helpers.caches import GROUPS, SMALL, SPLIT, WINDOW, Kind
from tests.helpers.meshes import mesh_of, place_on_mesh
from tests.helpers.mistakes import assert_raises, mistakes
from tests.helpers.parametrize import mark_cases

pytestmark = pytest.mark.core

H, BUCKETS, FARTHEST = 4, 8, 20


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Relative:
    """T5: a table of distances, `[BUCKETS, H]`; near ones have separate rows, far ones share."""

    table: jax.Array

    def __call__(self, query, key, head):
        away, exact = jnp.maximum(query - key, 0), BUCKETS // 2
        far = jnp.log(jnp.maximum(away, 1) / exact) / np.log(FARTHEST / exact)
        far = exact + (far * (BUCKETS - exact)).astype(jnp.int32)
        return self.table[jnp.where(away < exact, away, jnp.minimum(far, BUCKETS - 1)), head]


TABLE = jnp.asarray(np.random.default_rng(5).normal(size=(BUCKETS, H)), jnp.float32)
T5 = Relative(TABLE)


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ALL, SOME = (0, 1, 2, 3), (0, 1)
EVERYTHING = {"data": 2, "tensor": 2, "cells": 2}
POOL = Kind("pool", cells=16, sequences=4)
CASES = [
    (SMALL, "array", AUTO, {}, SOME),
    (GROUPS, "array", AUTO, {}, SOME),
    (WINDOW, "function", AUTO, {}, SOME),
    (GROUPS, "function", AUTO, EVERYTHING, ALL),
    (GROUPS, "function", EXPLICIT, EVERYTHING, (3, 0)),
    (SPLIT, "function", AUTO, {}, SOME),
    (GROUPS, "array", EXPLICIT, {"data": 2, "tensor": 2}, ALL),
    (POOL, "array", AUTO, {"tensor": 2, "cells": 4}, ALL),
]


@pytest.mark.parametrize(
    "kind, form, mode, axes, sequences", mark_cases(CASES, [CASES[0], CASES[4]]), ids=str
)
def test_attend_bias_and_until_match_formula(kind, form, mode, axes, sequences):
    """Trap 55: a bias uses shifted positions.

    On a mesh shards of heads have their head numbers, and shards of cells their part of an array.
    """
    with jax.set_mesh(mesh_of(mode, **axes)) if axes else nullcontext():
        cache = make_edited(kind)
        batch = jaxkv.make_batch([[1, 2]] * len(sequences), sequences=[*sequences])
        plan = jaxkv.init_batch(cache, batch).check()
        step = jaxkv.apply(cache, plan)
        mine = jaxkv.apply(place_on_mesh(cache), plan) if axes else step
        q, k, v = draw_qkv(step)
        after = jaxkv.write_kv(step, 0, k, v)
        ahead = jnp.arange(step.valid.size, dtype=jnp.int32).reshape(step.valid.shape) % 3 - 1
        there = jnp.where(step.valid, step.positions, -1)
        last = jnp.full(kind.sequences, -1).at[step.sequences].max(there)[step.sequences]
        for visible_until in (None, jnp.minimum(step.positions + ahead, last)):
            added = read_bias(T5, after, visible_until)
            array = added.swapaxes(1, 2).reshape(*step.valid.shape, H, -1)
            bias = T5 if form == "function" else array
            ours, out = jaxkv.attend(mine, 0, q, k, v, bias=bias, visible_until=visible_until)
            wanted = by_formula(after, 0, q, np.nan_to_num(added), visible_until=visible_until)
            np.testing.assert_allclose(out, wanted, **CLOSE)
        looked = jaxkv.write_kv(mine, 0, k, v)
        views = [jaxkv.read_kv(one, 0) for one in (ours, looked, after)]
        jax.tree.map(np.testing.assert_array_equal, *views[:2])
        jax.tree.map(np.testing.assert_array_equal, *views[1:])


def test_attend_bias_function_compiles_once():
    """Another weight, and the same function in another `Partial`, reuse the program."""
    step = start_step(SMALL.make())
    q, k, v = draw_qkv(step)

    def slope(weight, query, key, head):
        return weight * (query - key)

    def look(weight):
        return jaxkv.attend(step, 0, q, k, v, bias=Partial(slope, weight))[1]

    found = look(jnp.float32(0.5))
    with counting() as heard:
        look(jnp.float32(0.7))
        assert heard() == 0
    np.testing.assert_array_equal(found, look(0.5))  # a weight may be a Python number


def test_attend_bad_bias_or_until_raises():
    step = start_step(SMALL.make())
    q, k, v = draw_qkv(step)

    def call(**options):
        return jaxkv.attend(step, 0, q, k, v, **options)

    def of(weights):
        return call(bias=lambda query, key, head: weights[head] * (query - key))[1].sum()

    zeros = jnp.zeros((1, 1, H, SMALL.cells))
    visible_until = jnp.zeros(step.valid.shape, jnp.int32)
    for row in mistakes("biases"):
        assert_raises(*row, globals() | locals())
