"""Memories on meshes: the same values as on one device."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from jax.sharding import AxisType
from jax.tree_util import Partial

import jaxkv
from jaxkv import sharding
from jaxkv.sharding import Rules
from tests.attention.formula import slope
from tests.cases import in_lanes
from tests.cells import state_machine
from tests.memories import Kind, assert_identical
from tests.meshes import KINDS, RULES, edited, mesh_of, near, placed
from tests.sharding.tiny import assert_close


def run(machine, runs, steps):
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=runs, stateful_step_count=steps, derandomize=True),
    )


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_random_verbs_on_mesh_match_oracle(kind):
    """Tokens of several sequences stand in no rows, so that more is compiled for them."""
    sets = kind.name in ("window", "groups-striped-window")
    options = dict(counts=(3, 7), moves=(2, 2), sets=sets, in_rows=kind.streams > 1 and not sets)
    with jax.set_mesh(mesh_of(**dict(kind.axes))):
        run(lambda: state_machine.Verbs(kind, **options), runs=10, steps=20)


class StateVerbs(state_machine.StateVerbs):
    """The verbs of memories with states, on the mesh at hand."""

    def __init__(self, options):
        super().__init__(options)
        self.twin.memory = placed(self.twin.memory)
        self.past = self.twin.fork()


STATES = {
    "recurrent": ({"kinds": "rr", "kept": 1, "sequences": 4, "streams": 4}, {"data": 4}),
    "hybrid": (
        {"kinds": "ar", "kept": 2, "sequences": 4, "streams": 2, "cells": 12},
        {"data": 2, "tensor": 2},
    ),
    "hybrid with a window": (
        {"kinds": "rb", "kept": 1, "sequences": 4, "streams": 4, "cells": 8, "window": near},
        {"data": 2, "cells": 2},
    ),
}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", STATES)
def test_random_verbs_of_states_on_mesh_match_oracle(name):
    options, axes = STATES[name]
    with jax.set_mesh(mesh_of(**axes)):
        run(lambda: StateVerbs(options), runs=6, steps=30)


# --------------------------------------------------------------------------- against one device

MODES = [
    (AxisType.Explicit, 2, {"data": 2, "tensor": 2, "cells": 2}),
    (AxisType.Auto, 4, {"data": 4, "tensor": 2}),
    (AxisType.Explicit, 1, {"cells": 4, "tensor": 2}),
]


@pytest.mark.parametrize(
    ("mode", "streams", "axes"), in_lanes(MODES, fast=[], core=MODES[:1]), ids=str
)
def test_verbs_and_steps_on_mesh_match_one_device(mode, streams, axes):
    plain = Kind("plain", cells=16, sequences=4, streams=streams).make()
    wanted, outs = edited(plain)
    with jax.set_mesh(mesh_of(mode, **axes)):
        memory = placed(plain)
        got, theirs = edited(memory)
        assert got.buffers.k[0].sharding.is_equivalent_to(memory.buffers.k[0].sharding, 4)
    assert_close((theirs, got.buffers), (outs, wanted.buffers), atol=1e-5)
    assert_identical(jaxkv.split(got)[0].with_rules(None), wanted.table)


@pytest.mark.core
def test_init_batch_one_stream_each_device_same_slots():
    """Sequences of a stream come first by their number, in whatever order their rows are."""
    memory = Kind("groups", cells=8, sequences=4, streams=2).make()
    batch = jaxkv.make_batch([[1], [2]], sequences=[3, 2])
    (wanted,) = jaxkv.init_batch(memory, batch).ubatches
    assert wanted.slots.tolist() == [[1], [0]]
    with jax.set_mesh(mesh_of(data=2)):
        assert_identical(jaxkv.init_batch(placed(memory), batch).ubatches[0], wanted)


@pytest.mark.parametrize(
    ("streams", "axes"),
    [
        pytest.param(4, {"data": 2, "tensor": 2, "cells": 2}, marks=pytest.mark.core),
        pytest.param(1, {"cells": 4}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_derivatives_on_mesh_match_one_device(streams, axes):
    """By queries, keys, values, sinks, and a bias: that of the first layer has weights."""

    def loss(arrays, memory, ubatch):
        q, k, v, sinks, weights, array = arrays
        memory = jaxkv.apply(memory, ubatch)
        for layer, bias in enumerate([Partial(slope, weights), array]):
            memory, out = jaxkv.attend(memory, layer, ubatch, q, k, v, sinks=sinks, bias=bias)
            q, v = q + out, v + out[:, :, ::2]
        return jnp.sum(jnp.where(ubatch.valid[..., None, None], jnp.sin(q), 0.0))

    # So few cells that all devices hold some that are used.
    memory = Kind("full", cells=32 // streams, sequences=4, streams=streams).make()
    texts = [list(range(i, 6 + i)) for i in range(4)]
    (ubatch,) = jaxkv.init_batch(memory, jaxkv.make_batch(texts)).check().ubatches
    shape, rng = ubatch.valid.shape, np.random.default_rng(0)
    sizes = (*shape, 4, 4), (*shape, 2, 4), (*shape, 2, 4), (4,), (4,), (*shape, 4, 32 // streams)
    arrays = [rng.normal(size=size).astype(np.float32) for size in sizes]
    wanted = jax.jit(jax.value_and_grad(loss))(arrays, memory, ubatch)
    with jax.set_mesh(mesh_of(**axes)):
        found = jax.jit(jax.value_and_grad(loss))(arrays, placed(memory), ubatch)
    assert all(np.abs(x).max() > 0.1 for x in jax.tree.leaves(wanted[1]))
    assert_close(found, wanted, atol=1e-5)


# ------------------------------------------------------------------------------------- arguments

SIZES = {"layers": 2, "cells": 16, "kv_heads": 2, "head_dim": 4}


def test_attend_and_plans_with_rules_want_a_mesh():
    table, buffers = jaxkv.split(jaxkv.make_kv_cache(**SIZES))
    memory = jaxkv.join(table.with_rules(RULES), buffers)
    with pytest.raises(ValueError, match=r"wanted a mesh .* got none: .*jax.set_mesh"):
        jaxkv.plan_step(memory, jnp.array([1]), jnp.array([0]), jnp.array([True]))
    (ubatch,) = jaxkv.init_full(jaxkv.join(table, buffers), ubatch_size=1).ubatches
    q = jnp.ones((1, 1, 2, 4))
    with pytest.raises(ValueError, match=r"wanted a mesh .* got none: .*jax.set_mesh"):
        jaxkv.attend(memory, 0, ubatch, q, q, q)


def test_allocate_refuses_cells_that_do_not_divide():
    make = partial(jaxkv.make_kv_cache, **{**SIZES, "cells": 18})
    with pytest.raises(ValueError, match="cells that 4 devices divide .* got 18: take 20"):
        sharding.allocate(make, mesh_of(cells=4), RULES)


def test_allocate_one_axis_for_two_things_raises():
    make = partial(jaxkv.make_kv_cache, **SIZES, sequences=2, streams=2)
    rules = sharding.Rules(streams="data", kv_heads="data")
    with pytest.raises(ValueError, match="got 'data' for streams and kv_heads"):
        sharding.allocate(make, mesh_of(data=2), rules)


def test_fitted_splits_cells_of_heads_that_do_not_divide():
    memory = jax.eval_shape(partial(jaxkv.make_kv_cache, **{**SIZES, "kv_heads": 6}))
    mesh = mesh_of(tensor=4)
    layout = sharding.layout(memory, mesh, RULES)
    assert layout.whole == ("kv_heads (6) are not split by tensor",)
    assert layout.buffers == jaxkv.nbytes(memory.buffers)
    finer, rules = sharding.fitted(memory, mesh, RULES)
    assert dict(finer.shape) == {"tensor": 2, "cells": 2} and rules == RULES
    assert sharding.layout(memory, finer, rules).buffers == layout.buffers // 4
    copies, rules = sharding.fitted(memory, mesh, RULES, surplus="replicate")
    assert dict(copies.shape) == {"tensor": 2, "copies": 2} and rules == RULES
    with pytest.raises(ValueError, match="surplus='cells'"):
        sharding.fitted(memory, mesh, RULES, surplus="refuse")


def test_layout_check_refuses_more_than_there_is_room():
    memory = jax.eval_shape(partial(jaxkv.make_kv_cache, **SIZES))
    layout = sharding.layout(memory, mesh_of(tensor=2), RULES)
    assert layout.check(layout.total) is layout
    with pytest.raises(ValueError, match="wanted at most .* on each of 2 devices"):
        layout.check(layout.total - 1)
    with pytest.raises(ValueError, match=r"wanted heads a multiple of kv_heads \[2\], got 3"):
        sharding.layout(memory, mesh_of(tensor=2), RULES, heads=3)


def test_make_hybrid_cache_wants_parts_with_the_same_rules():
    table, buffers = jaxkv.split(jaxkv.make_kv_cache(**{**SIZES, "layers": 1}))
    part = jaxkv.join(replace(table, rules=Rules()), buffers)
    assert jaxkv.make_hybrid_cache((part, (0,)), (part, (1,))).table.rules == Rules()
    with pytest.raises(ValueError, match="wanted parts that a mesh splits by the same rules"):
        jaxkv.make_hybrid_cache((part, (0,)), (jaxkv.join(table, buffers), (1,)))
