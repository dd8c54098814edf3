"""Memories on meshes: the same values as on one device, and no more sent than is said."""

import math
from dataclasses import dataclass

import jax
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from jax.sharding import AxisType

import jaxkv
from jaxkv import sharding
from jaxkv.sharding import Rules
from tests import memories, test_recurrent_verbs, test_stateful
from tests.memories import Kind

RULES = Rules(cells="cells")
over_modes = pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit], ids=str)


def mesh_of(mode=AxisType.Auto, **axes):
    count = math.prod(axes.values())
    types = (mode,) * len(axes)
    return jax.make_mesh((*axes.values(),), (*axes,), types, devices=jax.devices()[:count])


def placed(memory, rules=RULES):
    """The same memory on the mesh at hand."""
    table, buffers = jaxkv.split(memory)
    memory = jaxkv.join(table.with_rules(rules), buffers)
    return jax.device_put(memory, sharding.shardings(memory, jax.sharding.get_mesh(), rules))


# ----------------------------------------------------------------------- verbs, against oracles


@dataclass(frozen=True)
class OnMesh(Kind):
    """A memory under test that lies on a mesh."""

    axes: tuple[tuple[str, int], ...] = ()

    def make(self, rope=memories.ROPE):
        return placed(super().make(rope))


near = jaxkv.window.sliding(3)
KINDS = [
    OnMesh("data", cells=8, sequences=4, streams=4, axes=(("data", 4),)),
    OnMesh("tensor", cells=12, sequences=3, axes=(("tensor", 2),)),
    OnMesh("cells", cells=12, sequences=3, axes=(("cells", 4),)),
    OnMesh("all", cells=8, sequences=4, streams=4, axes=(("data", 2), ("tensor", 2), ("cells", 2))),
    OnMesh("window", cells=12, sequences=3, windows=(near,), axes=(("tensor", 2), ("cells", 2))),
    OnMesh(
        "full-and-window",
        cells=14,
        sequences=4,
        streams=4,
        windows=(None, near),
        axes=(("data", 2), ("cells", 2)),
    ),
    OnMesh("groups", cells=10, sequences=4, streams=2, axes=(("data", 2), ("tensor", 2))),
    OnMesh(
        "groups-contiguous",
        cells=10,
        sequences=4,
        streams=2,
        placement="contiguous",
        axes=(("data", 2), ("cells", 2)),
    ),
    OnMesh(
        "groups-window",
        cells=10,
        sequences=8,
        streams=4,
        windows=(near,),
        axes=(("data", 2), ("cells", 2)),
    ),
]


def run_verbs(kind, examples):
    with jax.set_mesh(mesh_of(**dict(kind.axes))):
        run_state_machine_as_test(
            lambda: test_stateful.Verbs(
                kind, counts=(3, 7), moves=(2, 2), in_rows=kind.streams > 1
            ),
            settings=settings(max_examples=examples, stateful_step_count=20, derandomize=True),
        )


def test_verbs_on_a_mesh():
    run_verbs(KINDS[3], 3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_verbs_at_length_on_a_mesh(kind):
    run_verbs(kind, 60)


class StateVerbs(test_recurrent_verbs.Verbs):
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", STATES)
def test_verbs_of_states_on_a_mesh(name):
    options, axes = STATES[name]
    with jax.set_mesh(mesh_of(**axes)):
        run_state_machine_as_test(
            lambda: StateVerbs(options),
            settings=settings(max_examples=20, stateful_step_count=30, derandomize=True),
        )
