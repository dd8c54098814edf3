"""Biases and `until` through the life of a memory, against the formula in NumPy.

What each implementation makes of a bias is in `test_attention_matrix.py`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.tree_util import Partial

import jaxkv
from jaxkv import make_batch
from models.compiling import counting
from tests.attention.lives import CLOSE, applied, arrays_for, between, lived_in, seen
from tests.cases import in_lanes
from tests.memories import GROUPS, SMALL, SPLIT, WINDOW, Kind
from tests.meshes import mesh_of, placed

core = pytest.mark.core
H, K, D = 4, 2, 4
BUCKETS, FARTHEST = 8, 20


def alibi(query, key, head):
    """Press et al.: logits fall with distance, in each head at a rate of its own."""
    return -(0.5 ** (head + 1.0)) * abs(query - key)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Relative:
    """T5: a table of distances, near ones each for itself and far ones together; `[BUCKETS, H]`."""

    table: jax.Array

    def __call__(self, query, key, head):
        away, exact = jnp.maximum(query - key, 0), BUCKETS // 2
        far = jnp.log(jnp.maximum(away, 1) / exact) / np.log(FARTHEST / exact)
        far = exact + (far * (BUCKETS - exact)).astype(jnp.int32)
        return self.table[jnp.where(away < exact, away, jnp.minimum(far, BUCKETS - 1)), head]


def bent(weights, query, key, head):
    """A function with no value where a cell lies far ahead of its token."""
    return weights[head] * jnp.log1p((query - key).astype(jnp.float32))


TABLE = jnp.asarray(np.random.default_rng(5).normal(size=(BUCKETS, H)), jnp.float32)
BIASES = {"alibi": alibi, "t5": Relative(TABLE), "weights": Partial(bent, TABLE[0])}


def compare(kind, name, *, form="function", sequences=(0, 1), place=lambda memory: memory, **close):
    """Attend with a bias, and with `until`, from two tokens more of some sequences."""
    memory, ubatch = applied(lived_in(kind), sequences)
    q, k, v = arrays_for(ubatch)
    ahead = jnp.arange(ubatch.valid.size, dtype=jnp.int32).reshape(ubatch.valid.shape) % 3 - 1
    ahead = jnp.minimum(ahead, 0) if name == "weights" else ahead  # where it is a number
    for until in (None, ubatch.positions + ahead):
        added = between(BIASES[name], memory, ubatch, until)
        bias = BIASES[name]
        if form == "array":
            bias = added.swapaxes(1, 2).reshape(*ubatch.valid.shape, H, -1)
        _, out = jaxkv.attend(place(memory), 0, ubatch, q, k, v, bias=bias, until=until)
        after = jaxkv.write(memory, 0, ubatch, k, v)
        wanted = seen(after, 0, ubatch, q, np.nan_to_num(added), until=until)
        np.testing.assert_allclose(out, wanted, **(close or CLOSE))


CASES = [
    (SMALL, "t5", "function"),
    (SMALL, "t5", "array"),
    (SMALL, "alibi", "function"),
    (SMALL, "weights", "function"),
    (GROUPS, "t5", "function"),
    (GROUPS, "t5", "array"),
    (SPLIT, "t5", "array"),
    (WINDOW, "t5", "function"),
]


@pytest.mark.parametrize(
    ("kind", "name", "form"),
    in_lanes(CASES, fast=[CASES[1]], core=[CASES[3], CASES[5], CASES[7]]),
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_attend_bias_and_until_match_formula(kind, name, form):
    """Trap 55: a bias follows positions that were shifted."""
    compare(kind, name, form=form)


def test_view_until_shows_as_far():
    memory = SMALL.make()
    (ubatch,) = jaxkv.init_batch(memory, make_batch([[1] * 3, [1]])).ubatches
    until = jnp.where(ubatch.sequences == 0, 1, ubatch.positions)
    mask = jaxkv.view(jaxkv.apply(memory, ubatch), 0, ubatch, until=until).mask[0, :, :4]
    wanted = [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]]
    np.testing.assert_array_equal(mask, np.array(wanted, bool))


MESHES = [
    (AxisType.Auto, {"tensor": 2, "cells": 4}, Kind("pool", cells=12, sequences=4)),
    (AxisType.Auto, {"data": 2, "tensor": 2, "cells": 2}, GROUPS),
    (AxisType.Explicit, {"data": 2, "tensor": 2}, GROUPS),
]


@pytest.mark.parametrize("form", ["function", "array"])
@pytest.mark.parametrize(
    ("mode", "axes", "kind"), in_lanes(MESHES, fast=[], core=MESHES[1:]), ids=str
)
def test_attend_bias_on_mesh_matches_formula(mode, axes, kind, form):
    """Heads have their own numbers and columns, cells their own part of an array."""
    with jax.set_mesh(mesh_of(mode, **axes)):
        compare(kind, "t5", form=form, sequences=(0, 1, 2, 3), place=placed)


@core
def test_attend_bias_float64_is_exact():
    with jax.enable_x64(True):
        memory = jaxkv.make_kv_cache(
            layers=1, cells=16, kv_heads=K, head_dim=D, sequences=2, dtype=jnp.float64
        )
        memory, ubatch = applied(memory)
        q, k, v = arrays_for(ubatch, dtype=jnp.float64)
        memory, out = jaxkv.attend(memory, 0, ubatch, q, k, v, bias=BIASES["t5"])
        assert out.dtype == jnp.float64
        added = np.nan_to_num(between(BIASES["t5"], memory, ubatch))
        np.testing.assert_allclose(out, seen(memory, 0, ubatch, q, added), rtol=0, atol=1e-12)


# ------------------------------------------------------------------------ arguments and programs


@core
def test_attend_bias_weight_may_be_a_number():
    memory, ubatch = applied(SMALL.make())
    q, *_ = arrays_for(ubatch)
    number, array = (
        jaxkv.attend(
            memory, 0, ubatch, q, q[:, :, :K], q[:, :, :K],
            bias=Partial(lambda w, query, key, head: w * key, w),
        )
        for w in (0.5, jnp.float32(0.5))
    )  # fmt: skip
    np.testing.assert_array_equal(number[1], array[1])


@core
def test_attend_bias_function_compiles_once():
    """Other weights, and the same function wrapped anew, are the same program."""
    memory, ubatch = applied(SMALL.make())
    q, *_ = arrays_for(ubatch)

    def run(weights):
        jaxkv.attend(memory, 0, ubatch, q, bias=Partial(bent, weights))
        jaxkv.attend(memory, 0, ubatch, q, bias=alibi)

    tables = np.asarray(TABLE)
    run(tables[0])
    with counting() as heard:
        run(tables[1])
    assert heard() == 0


def test_attend_bad_bias_or_until_raises():
    memory, ubatch = applied(SMALL.make())
    q, *_ = arrays_for(ubatch)
    shape = ubatch.valid.shape

    def call(**options):
        return jaxkv.attend(memory, 0, ubatch, q, **options)

    zeros = jnp.zeros((1, 1, H, SMALL.cells))
    until = jnp.zeros(shape, jnp.int32)
    for error, message, options in (
        (ValueError, r"broadcasts to \[R, T, H, N\] of \(1, \d, 4, 12\), got \(1, 1, 2, 12\)",
         {"bias": zeros[:, :, :2]}),
        (ValueError, r"broadcasts to \[R, H, T, N\] of \(1, 4, 4, 12\), got \(\)",
         {"bias": lambda query, key, head: 1.0 * jnp.max(key)}),
        (TypeError, "wanted a bias of floats, got int32",
         {"bias": lambda query, key, head: query - key}),
        (TypeError, "wanted a bias of floats, got bool", {"bias": zeros > 0}),
        (TypeError, "wanted a bias as a function or as an array, got <class 'float'>",
         {"bias": 1.0}),
        (TypeError, "returns an array, got 2", {"bias": lambda query, key, head: (query, key)}),
        (ValueError, "wanted until or causal=False, got both", {"until": until, "causal": False}),
        (ValueError, r"wanted until \[R, T\] of .*, got \(1, 1\)", {"until": until[:, :1]}),
        (TypeError, "wanted integers for until, got float32", {"until": until * 1.0}),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call(**options)

    def of(weights):
        return call(bias=lambda query, key, head: weights[head] * (query - key))[1].sum()

    for transformed in (jax.jit(of), jax.grad(of)):
        with pytest.raises(TypeError, match="closes over traced arrays: pass .*Partial"):
            transformed(TABLE[0])
