"""Random edits on caches of every kind and on their oracles; see `state_machine`."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

import jaxkv
from tests.cells.state_machine import AttentionMachine, StateMachine
from tests.helpers.caches import (
    ALL_KINDS,
    CODES,
    GROUPS_LAST_FIT,
    LAST_FIT_WINDOW,
    LATENT,
    SMALL,
    Kind,
)
from tests.helpers.parametrize import mark_cases

pytestmark = pytest.mark.core

OWN = [GROUPS_LAST_FIT, LAST_FIT_WINDOW]
NEAR = jaxkv.Window.sliding(4)
WIDE_TILES = Kind("tiled-two-owner-words", 24, sequences=40, placement="tiled", windows=(NEAR,))
KINDS = {kind.name: kind for kind in [*ALL_KINDS, CODES, LATENT, *OWN, WIDE_TILES]}
GROUPS = {"sequences": 4, "streams": 2}
STATES = {
    "recurrent": {"kinds": "rr", "kept": 3},
    "recurrent of streams": {"kinds": "rr", "kept": 1, "streams": 3},
    "hybrid with a window": {"kinds": "ra", "kept": 1, "window": NEAR},
    "hybrid of streams": {"kinds": "br", "kept": 1, "streams": 3, "cells": 9},
    "recurrent in groups": GROUPS | {"kinds": "r", "kept": 2},
    "hybrid in groups": GROUPS | {"kinds": "ar", "kept": 1, "cells": 12},
    "groups with a window": GROUPS | {"kinds": "ra", "kept": 1, "cells": 14, "window": NEAR},
    "both in a layer": {"kinds": "ba", "kept": 1},
    "the current state alone": {"kinds": "ar", "kept": 0},
}
"""Caches with states, as options of `edit_sequences.Twin`."""


def run_machine(machine, runs, steps):
    options = settings(max_examples=runs, stateful_step_count=steps, derandomize=True)
    run_state_machine_as_test(machine, settings=options)


def test_edits_match_oracle_of_one_pool():  # traps 19, 20, 21, 23, 42, 51, 58, 73, 87
    options = dict(counts=(3, 7), moves=(2, 2), looks_ahead=False)
    run_machine(lambda: AttentionMachine(SMALL, **options), runs=15, steps=20)


@pytest.mark.parametrize("kind", mark_cases(OWN, core=OWN[:1]), ids=str)
def test_edits_match_oracles_of_an_own_placement(kind):
    run_machine(lambda: AttentionMachine(kind, moves=(2, 2), in_rows=True), runs=5, steps=20)


@pytest.mark.parametrize(
    "name",
    mark_cases(["hybrid with a window", "groups with a window"], core=["hybrid with a window"]),
)
def test_edits_match_oracles_of_a_hybrid_with_states(name):  # traps 69, 85, 86
    run_machine(lambda: StateMachine(STATES[name]), runs=10, steps=20)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", KINDS)
def test_edits_match_oracles_of_every_kind(name):  # traps 26, 96
    run_machine(lambda: AttentionMachine(KINDS[name], sets=True), runs=100, steps=20)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", STATES)
def test_edits_match_oracles_of_every_kind_with_states(name):
    run_machine(lambda: StateMachine(STATES[name]), runs=60, steps=40)
