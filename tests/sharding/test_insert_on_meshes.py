"""Sequences that go between meshes and one device: the same bits as on one device."""

from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxkv
from jaxkv import extract, insert, sharding
from models.compiling import counting
from tests.helpers import edit_sequences
from tests.helpers.caches import GROUPS, HEAD_ROWS, Kind, assert_identical, fill_cache
from tests.helpers.meshes import RULES
from tests.helpers.parametrize import mark_cases

MODES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
CODES_TILES = Kind("tiled-int8", 16, 4, "tiled", 2, dtype="int8")
STRIPES = Kind("striped-by-4", 16, sequences=4, placement="striped:4", stacked=True)
TWELVE = replace(GROUPS, cells=12)
KINDS = {
    # The source, the target and the axes of their meshes.
    "streams and heads": (GROUPS, replace(GROUPS, cells=16), dict(data=2, tensor=2)),
    "split cells": (TWELVE, STRIPES, dict(cells=4)),
    "from split cells": (STRIPES, TWELVE, dict(cells=4)),
    "streams and split cells": (replace(STRIPES, streams=2), CODES_TILES, dict(data=2, cells=2)),
    "rows of heads": (HEAD_ROWS, replace(HEAD_ROWS, lanes=1, stacked=True), dict(data=2, tensor=2)),
}


def mesh_on(devices, mode, axes):
    types = (mode,) * len(axes)
    return jax.make_mesh((*axes.values(),), (*axes,), types, devices=devices)


def assert_same(one, other):
    """Equal bits of all arrays, on any devices."""
    assert_identical(*(jax.tree.leaves(jax.device_get(cache)) for cache in (one, other)))


@pytest.mark.parametrize(
    ("name", "mode"), mark_cases(product(KINDS, MODES), core=[("split cells", "explicit")])
)
def test_insert_on_mesh_and_from_another_mesh_equals_one_device(name, mode):
    kind, other, axes = KINDS[name]
    first, second = (
        mesh_on(devices, MODES[mode], axes) for devices in (jax.devices()[:4], jax.devices()[4:])
    )
    source, cache = fill_cache(3, 2, 4, kind=kind), fill_cache(2, 1, 2, kind=other)
    source = jaxkv.seq_cp(source, 0, 1, 0, 2).check()  # of one stream, or of one device
    away = extract(source, [2, 0, 1], cells=12).check()
    wanted = insert(cache, away, [1, 2, 0], [1, 0, 2]).check()
    on_first = sharding.move(source, first, sharding_rules=RULES)
    with jax.set_mesh(first):
        away_on_first = extract(on_first, [2, 0, 1], cells=12).check()
        assert_same(away_on_first, away)
        on_same = sharding.move(cache, first, sharding_rules=RULES)
        same = insert(on_same, on_first, [0, 1, 2], [1, 0, 2]).check()
    assert_same(same.table.position, insert(cache, source, [0, 1, 2], [1, 0, 2])[0].table.position)
    with jax.set_mesh(second):
        on_second = sharding.move(cache, second, sharding_rules=RULES)
        for one in (away_on_first, away):  # from the other mesh, and from one device
            found = insert(on_second, one, [1, 2, 0], [1, 0, 2], donate=False).check()
            assert_same(found, wanted)
            for new, old in zip(*map(jax.tree.leaves, (found, on_second)), strict=True):
                assert new.sharding.is_equivalent_to(old.sharding, old.ndim)
        full = insert(found, away, 1, 3)
        assert_same(full, insert(wanted, away, 1, 3))
    assert_same(insert(cache, away_on_first, [1, 2, 0], [1, 0, 2]).cache, wanted)


@pytest.mark.parametrize("mode", mark_cases(MODES, core=["auto"]))
def test_insert_of_states_from_another_mesh_equals_one_device(mode):
    options = dict(kinds="ar", sequences=4, streams=2, cells=12)
    source = edit_sequences.make_filled_twin(2, [5, 3, 4], **options).cache
    cache = edit_sequences.make_filled_twin(1, [2, 2, 2], **options).cache
    wanted = insert(cache, extract(source, [0, 2], cells=9).check(), [1, 0], [0, 3]).check()
    first, second = (
        mesh_on(devices, MODES[mode], axes)
        for devices, axes in (
            (jax.devices()[:2], dict(data=2)),
            (jax.devices()[4:], dict(data=2, tensor=2)),
        )
    )
    with jax.set_mesh(first):
        away = extract(sharding.move(source, first), [0, 2], cells=9).check()
    with jax.set_mesh(second):
        found = insert(sharding.move(cache, second), away, [1, 0], [0, 3], donate=True).check()
        assert_same(found, wanted)
        assert not any(map(int, found.check().values()))


@pytest.mark.core
def test_move_to_host_memory_and_back_keeps_all_bits():
    cache, device = fill_cache(3, 2, kind=GROUPS), jax.devices()[0]
    waiting = sharding.move(cache, device, memory_kind="pinned_host")
    assert {x.sharding.memory_kind for x in jax.tree.leaves(waiting)} == {"pinned_host"}
    assert_same(waiting, cache)
    back = sharding.move(waiting, device)
    assert_identical(back, cache)
    assert_same(insert(cache, waiting, 0, 2).cache, insert(cache, cache, 0, 2).cache)
    mesh = mesh_on(jax.devices()[:2], AxisType.Auto, dict(tensor=2))
    for kinds in product((None, "pinned_host"), repeat=2):
        moved = sharding.move(waiting, mesh, memory_kind=kinds[0])
        moved = sharding.move(moved, jax.devices()[1], memory_kind=kinds[1])
        assert_same(moved, cache)
        assert moved.table.sharding_rules is None
        assert {x.sharding.device_set.pop() for x in jax.tree.leaves(moved)} == {jax.devices()[1]}


@pytest.mark.core
def test_insert_from_host_memory_compiles_no_program_of_a_committed_cache_again():
    """It commits another cache, and JAX compiles programs again for committed arrays."""
    cache, device = fill_cache(3, 2), jax.devices()[0]
    waiting = sharding.move(cache, device, memory_kind="pinned_host")
    for one, times in ((cache, 1), (jax.device_put(cache, device), 0)):
        run = jax.jit(partial(jax.tree.map, jnp.copy))
        run(one)
        inserted = insert(one, waiting, 0, 2).cache
        with counting() as compiled:
            run(inserted)
        assert compiled() == times


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
def test_traced_insert_on_mesh_between_rules_equals_one_device(mode):
    """In one program, with a source whose rules split heads and a cache whose rules split cells."""
    mesh = mesh_on(jax.devices()[:4], MODES[mode], dict(a=2, b=2))
    source, cache = fill_cache(3, 2, 4, kind=GROUPS), fill_cache(2, 1, kind=STRIPES)
    rules = sharding.ShardingRules(streams="a", kv_heads="b"), sharding.ShardingRules(cells="a")

    def run(cache, source, ids):
        return insert(cache, source, ids, jnp.array([0, 3])).cache

    with jax.set_mesh(mesh):
        own, other = (
            sharding.move(one, mesh, sharding_rules=rule)
            for one, rule in zip((cache, source), rules[::-1], strict=True)
        )
        found = jax.jit(run)(own, other, np.array([2, 0]))
    assert_same(found, run(cache, source, np.array([2, 0])))
