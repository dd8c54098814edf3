"""Snapshots: a loaded cache continues like the saved one, in the same cells or in others."""

import functools
import random
from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import snapshot
from jaxkv.cache import merge, split
from jaxkv.kv.cells import Cells
from jaxkv.recurrent.states import is_occupied
from tests.cells.pools import texts_of
from tests.generation.tiny import assert_sound
from tests.helpers import caches, edit_sequences, reference_caches
from tests.helpers.caches import GROUPS, SMALL, Kind, assert_identical, drawing, parse_cache
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import apply_batch
from tests.snapshot.saved import randomize

STATES = {
    "states": {"kinds": "rr", "kept": 3},
    "states of streams": {"kinds": "rr", "kept": 1, "streams": 3},
    "states in groups": {"kinds": "r", "kept": 2, "sequences": 4, "streams": 2},
    "hybrid": {"kinds": "ra", "kept": 1, "window": jaxkv.Window.sliding(4)},
    "hybrid in groups": {"kinds": "ba", "kept": 1, "sequences": 4, "streams": 2, "cells": 14},
}
"""Caches with states, as options of `edit_sequences.Twin`."""

ONE = replace(SMALL, cells=40, sequences=4)
FULL = [
    replace(ONE, name="pool"),
    replace(ONE, streams=2, placement="striped:4", name="striped"),
    replace(ONE, streams=4, name="split"),
]
WINDOWS = [replace(one, windows=(jaxkv.Window.sliding(3),)) for one in FULL]
KINDS = [GROUPS, caches.WIDE, caches.WINDOW, FULL[1]]
DTYPES = ["bfloat16", "float8_e4m3", "float16", "float8_e4m3fn", "float8_e5m2"]
LAYOUTS = [(*one, name) for one in [(0, 1, 0), (1, 4, 2), (2, 1, 2), (0, 4, 0)] for name in STATES]


def make_scattered(kind, seed):
    """A cache of one part with any cells: holes, shared cells, pending shifts, lost positions."""
    rng = random.Random(seed)
    sharing, lines = kind.sequences // kind.streams, []
    for stream in range(kind.streams):
        free = {(seq, p) for seq in range(sharing) for p in range(8)}
        cells = []
        for _ in range(kind.cells - 2):
            p = rng.randrange(8)
            seqs = [seq for seq in range(sharing) if (seq, p) in free and rng.random() < 0.4]
            free -= {(seq, p) for seq in seqs}
            owners = ",".join(str(stream * sharing + seq) for seq in seqs)
            cells.append(f"{p}{{{owners}}}{rng.randint(-1, min(p, 1)):+}" if seqs else ".")
        lines.append(" ".join(cells))
    table, buffers = split(parse_cache(" | ".join(lines), kind))
    if kind.windows[0]:
        lost = np.random.default_rng(seed).integers(0, 9, kind.sequences).astype(np.int32)
        table = replace(table, evicted_below=jnp.asarray(lost))
    return randomize(merge(table, buffers), seed)


def belongings(cache, seq, kept=0):
    """For each part a sequence's positions, shifts and bytes.

    The last part has its states: the newest `kept`, 0 for all.
    """
    found = []
    for part in cache.parts:
        if isinstance(part.table, Cells):
            found.append((int(part.table.evicted_below[seq]), texts_of(part)[seq]))
        else:
            found.append(edit_sequences.stored_states(part)[seq][-kept:])
            found.append(edit_sequences.first_positions(part.table)[seq][-kept:])
    return found


def tables_without_stamps(cache):
    """The tables without stamps and versions; and incomplete layers, or the states of each."""
    fields = []
    for part in cache.parts:
        table = part.table
        if not isinstance(table, Cells):
            live = is_occupied(table, table.cell)
            content, first = (jnp.where(live, x, 0) for x in (table.content, table.first_position))
            table = replace(table, content=content, first_position=first)
        else:
            table = replace(table, content=jnp.where(table.position < 0, 0, table.content))
        fields.append(replace(table, stamp=0 * table.stamp, version=0 * table.version))
    return fields


def assert_same_cache(loaded, cache):
    assert_identical(tables_without_stamps(loaded), tables_without_stamps(cache))
    for seq in range(cache.table.spec.sequences):
        assert belongings(loaded, seq) == belongings(cache, seq)
    assert_sound(loaded)


def run_tokens(cache, kinds, seq, count):
    batch = jaxkv.make_batch([1 + i % 9 for i in range(count)], sequences=seq)
    return edit_sequences.run_batch(cache, batch, kinds=kinds)


@functools.cache
def make_edited_states(name, seed=0):
    return reference_caches.edit_randomly(edit_sequences.Twin(**STATES[name]), seed)


@pytest.mark.parametrize("kind", mark_cases(KINDS, fast=KINDS[:1], core=KINDS[1:]), ids=str)
def test_load_returns_the_saved_cache(kind, tmp_path):  # traps 75, 79
    cache = make_scattered(kind, 0)
    snapshot.save(cache, path=tmp_path / "all")
    loaded = snapshot.load(tmp_path / "all")
    assert jax.tree.structure(loaded) == jax.tree.structure(cache)
    assert_same_cache(loaded, cache)
    assert_same_cache(snapshot.load(snapshot.save(cache)), cache)


@pytest.mark.core
@pytest.mark.parametrize("name", mark_cases(STATES, fast=["hybrid in groups"]))
def test_load_of_states_goes_on_as_the_saved_cache(name):  # trap 83
    cache, kinds = make_edited_states(name), STATES[name]["kinds"]
    loaded = snapshot.load(snapshot.save(cache))
    assert_same_cache(loaded, cache)
    for seq in range(3):
        try:
            there = run_tokens(cache, kinds, seq, 3)
        except jaxkv.PlanRefusedError:
            continue
        assert_same_cache(run_tokens(loaded, kinds, seq, 3), there)


def test_load_makes_earlier_plans_and_tables_stale():
    cache = parse_cache("0{0} 1{0} 0{1}")
    (ubatch,) = jaxkv.init_batch(cache, jaxkv.make_batch([1])).ubatches
    data = snapshot.save(cache)
    for loaded in (snapshot.load(data), snapshot.load(data, into=cache)):
        assert not loaded.is_current(ubatch)
        assert not jaxkv.rewind(loaded, to=cache.table)[1]


@pytest.mark.parametrize(
    ("saved", "sequences", "target", "moves", "wanted"),
    [
        # One of two that share a cell; and both into others, which share it again.
        ("0{0,1} 1{0} . 1{1} 2{1}", [1], "", None, "0{1} 1{1} 2{1}"),
        ("0{0,1} 1{0} . 1{1}", [1, 0], "0{0} . 0{2} 1{0,2}", [2, 1], "0{0} 0{1,2} 1{1} 1{0} 1{2}"),
        ("0{0,1} 1{0} . 1{1}", [1, 0], "0{0} . 0{2} 1{0,2}", {0: 2}, "0{0} 0{2} 1{2} 1{0}"),
    ],
)
def test_load_into_takes_cells_and_leaves_others(saved, sequences, target, moves, wanted):
    data = snapshot.save(parse_cache(saved), sequences=sequences)
    assert drawing(snapshot.load(data, into=parse_cache(target), sequences=moves)) == wanted


@pytest.mark.core
def test_load_into_takes_cells_hidden_by_a_window():
    window = Kind("", cells=6, sequences=2, windows=(jaxkv.Window.sliding(2),))
    data = snapshot.save(parse_cache("0{0} 1{0}", window), sequences=[0])
    loaded = snapshot.load(data, into=parse_cache("0{1} 1{1} 2{1} 3{1} 4{1}", window))
    assert drawing(loaded) == "1{0} 1{1} 2{1} 3{1} 4{1} 0{0}"
    assert loaded.table.evicted_below.tolist() == [0, 1]


@pytest.mark.parametrize("dtype", mark_cases(DTYPES, fast=DTYPES[:1], core=DTYPES[1:]))
def test_load_returns_every_bit_of_a_dtype(dtype):
    kind = Kind("", cells=2, sequences=1, dtype=dtype)
    cache = randomize(parse_cache("0{0} 1{0}", kind))
    loaded = snapshot.load(snapshot.save(cache))
    assert loaded.buffers.k[0].dtype == dtype
    assert_identical(loaded.buffers, cache.buffers)


@pytest.mark.core
def test_load_returns_states_of_any_dtype_and_name():
    shapes = {"a.b": ((2,), jnp.int8), "c": ((), bool), "d": ((1, 3), jnp.complex64)}
    shapes |= {"e": ((2,), jnp.bfloat16), "0": ((3,), jnp.uint16)}
    cache = jaxkv.make_cache(jaxkv.CacheSpec.recurrent(layers=2, states=shapes), max_rollback=1)
    cache = apply_batch(cache, [1, 2])
    table, buffers = cache.table, cache.buffers
    draw = partial(np.random.default_rng(0).integers, 0, 2)
    buffers = jax.tree.map(lambda x: jnp.asarray(draw(x.shape), x.dtype), buffers)
    cache = merge(table, buffers)
    loaded = snapshot.load(snapshot.save(cache))
    assert_identical(loaded.buffers, cache.buffers)


@pytest.mark.parametrize(
    ("source", "target"),
    mark_cases(
        [*product(FULL, FULL), *product(WINDOWS, WINDOWS)],
        fast=[(FULL[0], FULL[1])],
        core=[(FULL[1], FULL[2]), (FULL[2], FULL[0]), (WINDOWS[1], WINDOWS[0])],
    ),
    ids=str,
)
def test_load_into_another_layout_moves_all_of_a_sequence(source, target):
    for seed in range(5):
        cache, other = make_scattered(source, seed), make_scattered(target, 100 + seed)
        rng = random.Random(seed)
        pairs = zip(rng.sample(range(4), 4), rng.sample(range(4), 4), strict=True)
        moves = dict([*pairs][: rng.randrange(5)])
        data = snapshot.save(cache, sequences=[*moves])
        loaded = snapshot.load(data, into=other, sequences=[*moves.values()])
        assert_sound(loaded)
        for old, new in moves.items():
            assert belongings(loaded, new) == belongings(cache, old)
        if target.windows == (None,):
            for seq in set(range(4)) - set(moves.values()):
                assert belongings(loaded, seq) == belongings(other, seq)


@pytest.mark.core
@pytest.mark.parametrize("seed, streams, kept, name", mark_cases(LAYOUTS, [(1, 4, 2, "states")]))
def test_load_into_another_layout_takes_newest_states(seed, streams, kept, name):
    options = STATES[name]
    cache, kinds = make_edited_states(name, seed), options["kinds"]
    other = {"sequences": 4, "streams": streams, "kept": kept, "cells": 40}
    dirty = run_tokens(edit_sequences.Twin(**{**options, **other}).cache, kinds, 3, 2)
    goes = [2, 0, 1, 3][: edit_sequences.Twin(**options).sequences]
    loaded = snapshot.load(snapshot.save(cache), into=dirty, sequences=goes)
    assert_sound(loaded)
    for old, new in {0: 2, 1: 0, 2: 1}.items():
        assert belongings(loaded, new) == belongings(cache, old, kept + 1)
