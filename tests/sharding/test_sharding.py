"""Memories on meshes: the same values as on one device, and no more sent than is said."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from jax.sharding import AxisType

import jaxkv
from jaxkv import sharding
from jaxkv.sharding import Rules
from tests.cases import mostly_nightly
from tests.cells import state_machine
from tests.memories import assert_identical
from tests.meshes import KINDS, RULES, edited, mesh_of, near, placed


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name",
    mostly_nightly(
        [kind.name for kind in KINDS],
        few=["all", "groups-striped-window"],
    ),
)
def test_verbs_on_a_mesh(name):
    (kind,) = (kind for kind in KINDS if kind.name == name)
    with jax.set_mesh(mesh_of(**dict(kind.axes))):
        run_state_machine_as_test(
            lambda: state_machine.Verbs(
                kind, counts=(3, 7), moves=(2, 2), in_rows=kind.streams > 1
            ),
            settings=settings(max_examples=10, stateful_step_count=20, derandomize=True),
        )


class StateVerbs(state_machine.StateVerbs):
    """The verbs of memories with states, on the mesh at hand."""

    def __init__(self, options):
        super().__init__(options)
        self.twin.memory = placed(self.twin.memory)
        self.past = self.twin.fork()


STATES = {
    "recurrent": ({"kinds": "rr", "kept": 1, "sequences": 4, "streams": 4}, {"data": 4}),
    "in groups": ({"kinds": "r", "kept": 2, "sequences": 4, "streams": 2}, {"data": 2}),
    "hybrid": (
        {"kinds": "ar", "kept": 1, "sequences": 4, "streams": 2, "cells": 12},
        {"data": 2, "tensor": 2},
    ),
    "hybrid with a window": (
        {"kinds": "rb", "kept": 1, "sequences": 4, "streams": 4, "cells": 8, "window": near},
        {"data": 2, "cells": 2},
    ),
}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", mostly_nightly(STATES, few=["hybrid with a window"]))
def test_verbs_of_states_on_a_mesh(name):
    options, axes = STATES[name]
    with jax.set_mesh(mesh_of(**axes)):
        run_state_machine_as_test(
            lambda: StateVerbs(options),
            settings=settings(max_examples=6, stateful_step_count=30, derandomize=True),
        )


# ------------------------------------------------------------------------- modes, by one device

LAYOUTS = [
    (2, {"data": 2, "tensor": 2, "cells": 2}),
    (4, {"data": 4, "tensor": 2}),
    (1, {"cells": 4, "tensor": 2}),
]
SIZES = {"layers": 2, "cells": 16, "kv_heads": 2, "head_dim": 4, "rope": jaxkv.make_rope(4)}


@pytest.mark.nightly
def test_a_device_with_one_stream_chooses_the_cells_of_any_other():
    """Sequences of a stream come first by their number, in whatever order their rows are."""
    memory = jaxkv.make_kv_cache(sequences=4, streams=2, **SIZES)
    batch = jaxkv.make_batch([[1], [2]], sequences=[3, 2])
    (wanted,) = jaxkv.init_batch(memory, batch).ubatches
    assert wanted.slots.tolist() == [[1], [0]]
    with jax.set_mesh(mesh_of(data=2)):
        assert_identical(jaxkv.init_batch(placed(memory), batch).ubatches[0], wanted)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mode", "streams", "axes"),
    mostly_nightly(
        [
            (mode, streams, axes)
            for mode in (AxisType.Auto, AxisType.Explicit)
            for streams, axes in LAYOUTS
        ],
        few=[(AxisType.Explicit, *LAYOUTS[0])],
    ),
    ids=str,
)
def test_axes_may_be_automatic_or_explicit(mode, streams, axes):
    plain = jaxkv.make_kv_cache(sequences=4, streams=streams, **SIZES)
    wanted, outs = edited(plain)
    with jax.set_mesh(mesh_of(mode, **axes)):
        memory = placed(plain)
        got, theirs = edited(memory)
        assert got.buffers.k[0].sharding.is_equivalent_to(memory.buffers.k[0].sharding, 4)
    for one, other in zip(outs, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert_identical(jaxkv.split(got)[0].with_rules(None), wanted.table)
    for one, other in zip(*map(jax.tree.leaves, (got.buffers, wanted.buffers)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_memory_with_rules_asks_for_its_mesh():
    mesh = mesh_of(tensor=2)
    memory = sharding.allocate(partial(jaxkv.make_kv_cache, **SIZES), mesh, RULES)
    step = jnp.array([1]), jnp.array([0]), jnp.array([True])
    with jax.set_mesh(mesh):
        ubatch, _ = jaxkv.plan_step(memory, *step)
    q = jnp.ones((1, 1, 2, 4))
    with pytest.raises(ValueError, match=r"wanted a mesh .* got none: .*jax.set_mesh"):
        jaxkv.attend(memory, 0, ubatch, q, q, q)


def test_processes_agree_about_one_memory_with_values():
    memory = sharding.allocate(partial(jaxkv.make_kv_cache, **SIZES), mesh_of(tensor=2), RULES)
    sharding.agree(jax.device_get(memory))
    with pytest.raises(TypeError, match="wanted values to compare, got traced ones: .* of jit"):
        jax.jit(sharding.agree)(memory)
    with pytest.raises(TypeError, match="wanted a memory with values, got the shapes of one"):
        sharding.agree(jax.eval_shape(lambda: memory))
    with pytest.raises(ValueError, match="wanted one memory, got a batch of them"):
        sharding.agree(jax.tree.map(lambda x: x[None], memory))
    memory.table.stamp.delete()
    with pytest.raises(ValueError, match="whose buffers were donated"):
        sharding.agree(memory)


def test_cells_that_do_not_divide_are_refused_with_a_number_that_does():
    make = partial(jaxkv.make_kv_cache, **{**SIZES, "cells": 18})
    with pytest.raises(ValueError, match="cells that 4 devices divide .* got 18: take 20"):
        sharding.allocate(make, mesh_of(cells=4), RULES)


def test_heads_that_do_not_divide_are_whole_and_fitted_finds_room_for_the_rest():
    make = partial(jaxkv.make_kv_cache, **{**SIZES, "kv_heads": 6})
    mesh = mesh_of(tensor=4)
    layout = sharding.layout(jax.eval_shape(make), mesh, RULES)
    assert "kv_heads (6) are not split by tensor" in str(layout)
    assert layout.buffers == jaxkv.nbytes(jax.eval_shape(make).buffers)
    finer, rules = sharding.fitted(jax.eval_shape(make), mesh, RULES)
    assert dict(finer.shape) == {"tensor": 2, "cells": 2} and rules.cells == "cells"
    assert sharding.layout(jax.eval_shape(make), finer, rules).buffers == layout.buffers // 4
    with pytest.raises(ValueError, match="surplus='cells'"):
        sharding.fitted(jax.eval_shape(make), mesh, RULES, surplus="refuse")


def test_a_hybrid_memory_of_parts_that_are_on_a_mesh():
    """It has their rules, and all of them have the same."""

    def make():
        return jaxkv.make_kv_cache(layers=1, cells=4, kv_heads=2, head_dim=2)

    part = sharding.allocate(make, mesh_of(tensor=2), Rules())
    assert jaxkv.make_hybrid_cache((part, (0,)), (part, (1,))).table.rules == Rules()
    with pytest.raises(ValueError, match="wanted parts that a mesh splits by the same rules"):
        jaxkv.make_hybrid_cache((part, (0,)), (make(), (1,)))
