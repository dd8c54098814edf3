"""Snapshots: what is saved and loaded goes on as if it had stayed, in the same cells or in others.

What a sequence has is compared position by position, with the bytes of its keys, values and states
(`belongings`): that is all that can be noticed of it. The oracle of a loaded memory is the memory
that was saved.
"""

import random
import re
from dataclasses import replace
from functools import cache

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxkv
from jaxkv import snapshot
from jaxkv.kv.cells import Cells
from jaxkv.recurrent.states import occupied
from tests import histories, memories
from tests.cases import in_lanes, mostly_nightly
from tests.memories import (
    CHUNKS,
    GROUPS,
    GROUPS_RUNS,
    RUNS,
    SMALL,
    SPLIT,
    TWO,
    TWO_SPLIT,
    WIDE,
    WINDOW,
    Kind,
    assert_identical,
    drawing,
    drawn,
    filled,
    parts_of,
)
from tests.twins import lived_in

EVERY = [SMALL, RUNS, WIDE, SPLIT, WINDOW, CHUNKS, TWO, TWO_SPLIT, GROUPS, GROUPS_RUNS]
SOME = [WIDE, TWO_SPLIT]
STATES = {
    "states": {"kinds": "rr", "kept": 3},
    "states of streams": {"kinds": "rr", "kept": 1, "streams": 3},
    "states in groups": {"kinds": "r", "kept": 2, "sequences": 4, "streams": 2},
    "hybrid": {"kinds": "ra", "kept": 1, "window": jaxkv.window.sliding(4)},
    "hybrid in groups": {"kinds": "ba", "kept": 1, "sequences": 4, "streams": 2, "cells": 14},
}
"""Memories with states, as options of `histories.Twin`."""


def belongings(memory, seq, kept=0):
    """All that a sequence has: in each part its positions, what is owed, and the bytes beside.

    Of its states the newest `kept`, 0 for all. Those are the last part.
    """
    found = []
    for table, buffers in parts_of(memory) if not is_states(memory) else [jaxkv.split(memory)]:
        if not isinstance(table, Cells):
            dead = int(table.dead_until[seq])
            found.append((dead, histories.kept_of(table, buffers)[seq][-kept:]))
            continue
        stream, local = divmod(seq, table.sharing)
        owned = np.asarray(table.owners)[stream, local // 32] >> (local % 32) & 1 == 1
        cells = np.flatnonzero(owned)
        arrays = [np.asarray(x)[stream][:, cells] for x in (*buffers.k, *buffers.v)]
        mine = sorted(
            (
                int(table.position[stream, cell]),
                int(table.shift[stream, cell]),
                tuple(x[:, i].tobytes() for x in arrays),
            )
            for i, cell in enumerate(cells)
        )
        found.append((int(table.evicted_below[seq]), mine))
    return found


def is_states(memory):
    return jaxkv.split(memory)[0].facts.kind == "recurrent"


def unstamped(memory):
    """The tables of a memory without stamps; and which layer holds which state."""
    fields = []
    for part in jaxkv.hybrid.parts_of(memory):
        table, _ = jaxkv.split(part)
        if isinstance(table, Cells):
            fields.append(replace(table, stamp=0 * table.stamp))
        else:
            held = (table.holds == table.stamp[None]) & occupied(table, table.cell)[None]
            fields.append(replace(table, stamp=0 * table.stamp, holds=held))
    return fields


def assert_same_memory(loaded, memory):
    assert_identical(unstamped(loaded), unstamped(memory))
    for seq in range(jaxkv.split(memory)[0].facts.sequences):
        assert belongings(loaded, seq) == belongings(memory, seq)
    assert not any(map(int, jaxkv.check_invariants(loaded).values()))


@cache
def told(name, seed=0):
    """A memory with states after a short random life."""
    rng, twin = random.Random(seed), histories.Twin(**STATES[name])
    ids = range(twin.sequences)
    for _ in range(4):
        for seq in rng.sample(ids, 2):
            try:
                twin.memory = tell(twin.memory, twin.kinds, seq, rng.randint(1, 5))
            except jaxkv.RefusedError:
                twin.memory, _ = jaxkv.seq_rm(twin.memory, seq)
        src, dst = rng.choice(ids), rng.choice(ids)
        if jaxkv.can_seq_cp(twin.memory, src, dst):
            twin.memory = jaxkv.seq_cp(twin.memory, src, dst)
    return twin.memory


def tell(memory, kinds, seq, count, first=0):
    tokens = [1 + (first + i) % 9 for i in range(count)]
    return histories.run(memory, jaxkv.make_batch(tokens, sequences=seq), kinds=kinds)


# ---------------------------------------------------------------------------------- the same cells


@pytest.mark.parametrize(
    "kind",
    in_lanes(EVERY, fast=[SMALL], core=SOME),
    ids=lambda kind: kind.name,
)
def test_loaded_it_is_the_memory_that_was_saved(kind, tmp_path):
    memory = lived_in(kind)
    snapshot.save(tmp_path / "all", memory)
    loaded = snapshot.load(tmp_path / "all")
    assert jax.tree.structure(loaded) == jax.tree.structure(memory)
    assert_same_memory(loaded, memory)
    assert_same_memory(snapshot.load(snapshot.to_bytes(memory)), memory)
    batch = jaxkv.make_batch([3, 4], sequences=1)
    plans = [jaxkv.init_batch(one, batch, ubatch_size=4) for one in (memory, loaded)]
    assert_identical(plans[0].reason, plans[1].reason)
    if plans[0].ok:
        (there, wanted), (here, found) = (memories.run(one, batch) for one in (memory, loaded))
        assert_identical(found, wanted)
        assert_same_memory(here, there)


@pytest.mark.core
@pytest.mark.parametrize("name", mostly_nightly(STATES, few=["hybrid in groups"]))
def test_states_are_loaded_into_the_cells_that_they_had(name):
    memory, kinds = told(name), STATES[name]["kinds"]
    loaded = snapshot.load(snapshot.to_bytes(memory))
    assert_same_memory(loaded, memory)
    for seq in range(3):
        try:
            there = tell(memory, kinds, seq, 2)
        except jaxkv.RefusedError:
            continue
        assert_same_memory(tell(loaded, kinds, seq, 2), there)


@pytest.mark.core
def test_a_state_that_was_never_written_is_not_there_after_loading():
    memory = jaxkv.make_recurrent_cache(layers=2, states=histories.STATES)
    plan = jaxkv.init_batch(memory, jaxkv.make_batch([1, 2]))
    loaded = snapshot.load(snapshot.to_bytes(jaxkv.apply(memory, plan)))
    plan = jaxkv.init_batch(loaded, jaxkv.make_batch([3]))
    states = jaxkv.read_states(jaxkv.apply(loaded, plan), 1, plan.ubatches[0])
    assert np.isnan(states["trace"]).all()


@pytest.mark.core
def test_what_a_table_notes_is_saved():
    """Rotations that are owed, what windows took, states that are gone, or never written."""
    memory = drawn("5{0}+2 . 3{1}-1", WINDOW)
    table, buffers = jaxkv.split(memory)
    memory = jaxkv.join(replace(table, evicted_below=jnp.array([4, 3, 9])), buffers)
    data = snapshot.to_bytes(memory, sequences=[2, 0])
    assert snapshot.inspect(data).arrays["buffers.k.0"][1][0] == 1
    loaded = snapshot.load_into(data, WINDOW.make())
    assert drawing(loaded) == "5{0}+2" and loaded.table.evicted_below.tolist() == [4, 0, 9]

    memory = jaxkv.make_recurrent_cache(layers=2, states=histories.STATES, sequences=2)
    memory = jaxkv.apply(memory, jaxkv.init_batch(memory, jaxkv.make_batch([1])))
    table = replace(memory.table, dead_until=jnp.array([0, 7]))
    loaded = snapshot.load(snapshot.to_bytes(jaxkv.join(table, memory.buffers))).table
    assert loaded.dead_until.tolist() == [0, 7] and loaded.cell.tolist() == table.cell.tolist()
    assert not (loaded.holds == loaded.stamp[None])[:, 0, 0].any()


@pytest.mark.core
def test_what_is_owed_is_saved_with_the_keys_that_owe_it():
    """llama.cpp saves new positions and keys that were not rotated."""
    memory = filled(5, 3)
    memory, _ = jaxkv.seq_rm(memory, 0, 1, 2)
    memory = jaxkv.seq_add(memory, 0, 2, -1, -1)
    loaded = snapshot.load(snapshot.to_bytes(memory))
    assert not jaxkv.init_batch(loaded, jaxkv.make_batch([1])).ok
    rotated = [jaxkv.apply(one, jaxkv.init_update(one)) for one in (memory, loaded)]
    assert_same_memory(rotated[1], rotated[0])


def test_plans_from_before_are_stale_and_so_is_the_table():
    memory = filled(5, 3)
    (ubatch,) = jaxkv.init_batch(memory, jaxkv.make_batch([1])).ubatches
    data = snapshot.to_bytes(memory)
    loaded = snapshot.load(data)
    assert not jaxkv.is_current(loaded, ubatch)
    again = snapshot.load_into(data, memory)
    assert not jaxkv.is_current(again, ubatch)
    assert not jaxkv.go_back(jaxkv.split(memory)[0], again)[1]


# -------------------------------------------------------------------------------------- some of it


def test_one_sequence_is_saved_with_what_it_shares():
    memory = drawn("0{0,1} 1{0} . 1{1} 2{1}")
    loaded = snapshot.load(snapshot.to_bytes(memory, sequences=[1]))
    assert drawing(loaded) == "0{1} . . 1{1} 2{1}"


def test_sequences_go_into_others_and_share_again():
    memory = drawn("0{0,1} 1{0} . 1{1}")
    data = snapshot.to_bytes(memory, sequences=[1, 0])
    target = drawn("0{0} . 0{2} 1{0,2} . .")
    loaded = snapshot.load_into(data, target, sequences=[2, 1])
    assert drawing(loaded) == "0{0} 0{1,2} 1{1} 1{0} 1{2}"
    loaded = snapshot.load_into(data, target, sequences={0: 2})
    assert drawing(loaded) == "0{0} 0{2} 1{2} 1{0}"


def test_what_is_shared_comes_into_each_stream():
    data = snapshot.to_bytes(drawn("0{0,1,2} 1{0,1}"))
    assert drawing(snapshot.load_into(data, SPLIT.make())) == "0{0} 1{0} | 0{1} 1{1} | 0{2}"
    groups = snapshot.load_into(data, GROUPS.make(), sequences=[3, 1, 2])
    assert drawing(groups) == "0{1} 1{1} | 0{2,3} 1{3}"


def test_an_empty_sequence_leaves_its_target_empty():
    target = drawn("0{0} 0{1} 1{1}")
    assert drawing(snapshot.load_into(snapshot.to_bytes(SMALL.make()), target)) == ""
    data = snapshot.to_bytes(SMALL.make(), sequences=[2])
    assert drawing(snapshot.load_into(data, target, sequences=[1])) == "0{0}"


def test_neighbours_or_a_refusal():
    data = snapshot.to_bytes(drawn("0{0} 1{0} 2{0}"), sequences=[0])
    target = drawn("0{1} . . 0{2} . . 1{2} . 2{2} . 3{2} .", RUNS)
    before = jaxkv.split(target)[0]
    with pytest.raises(jaxkv.NoRoomError, match=r"wanted 3 cells of stream 0 .* got 2"):
        snapshot.load_into(data, target)
    assert_identical(jaxkv.split(target)[0], before)
    loaded = snapshot.load_into(data, target, sequences=[1])
    assert drawing(loaded).startswith("0{1} 1{1} 2{1} 0{2}")
    closed = jaxkv.apply(target, jaxkv.defrag_plan(target))
    assert jaxkv.seq_pos_max(snapshot.load_into(data, closed), [0, 1, 2]).tolist() == [2, 0, 3]


def test_too_many_cells_are_refused():
    data = snapshot.to_bytes(drawn(" ".join(f"{i}{{0}}" for i in range(12))))
    with pytest.raises(jaxkv.NoRoomError, match="wanted 12 cells of stream 0 .* got 10"):
        snapshot.load_into(data, GROUPS.make(), sequences={0: 0})


def test_cells_that_a_window_hides_are_taken_as_by_a_batch():
    window = Kind("", cells=6, sequences=2, windows=(jaxkv.window.sliding(2),))
    data = snapshot.to_bytes(drawn("0{0} 1{0}", window), sequences=[0])
    loaded = snapshot.load_into(data, drawn("0{1} 1{1} 2{1} 3{1} 4{1}", window))
    assert drawing(loaded) == "1{0} 1{1} 2{1} 3{1} 4{1} 0{0}"
    assert loaded.table.evicted_below.tolist() == [0, 1]


@pytest.mark.core
def test_fewer_states_are_the_newest():
    memory = histories.run(histories.make(kept=3), jaxkv.make_batch([1, 2, 3, 4, 5]))
    data = snapshot.to_bytes(memory, sequences=[0])
    for kept in (0, 1, 3, 5):
        loaded = snapshot.load_into(data, histories.make(kept=kept, streams=3), sequences=[2])
        wanted = histories.states_of(memory, 0)[-kept - 1 :]
        assert histories.states_of(loaded, 2) == wanted
        assert jaxkv.used(loaded).item() == len(wanted)


# ----------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3"]
)
def test_every_bit_of_every_dtype(dtype):
    make = jaxkv.make_kv_cache(layers=2, cells=5, kv_heads=2, head_dim=3, value_dim=1, dtype=dtype)
    rng, (table, buffers) = np.random.default_rng(0), jaxkv.split(make)
    buffers = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), buffers)
    memory = jaxkv.join(table, buffers)
    memory = jaxkv.apply(memory, jaxkv.init_batch(memory, jaxkv.make_batch([1, 2, 3, 4])))
    loaded = snapshot.load(snapshot.to_bytes(memory))
    assert loaded.buffers.k[0].dtype == dtype
    for one, other in zip(jax.tree.leaves(loaded.buffers), jax.tree.leaves(buffers), strict=True):
        assert_identical(one[:, :, :4], other[:, :, :4])


@pytest.mark.core
def test_states_of_any_dtype_and_name():
    shapes = {"a.b": ((2,), jnp.int8), "c": ((), bool), "d": ((1, 3), jnp.complex64)}
    shapes |= {"e": ((2,), jnp.bfloat16), "0": ((3,), jnp.uint16)}
    memory = jaxkv.make_recurrent_cache(layers=2, states=shapes, rollback=1)
    table, buffers = jaxkv.split(memory)
    rng = np.random.default_rng(0)
    buffers = jax.tree.map(lambda x: rng.integers(0, 2, x.shape).astype(x.dtype), buffers)
    memory = jaxkv.join(table, jax.tree.map(jnp.asarray, buffers))
    memory = jaxkv.apply(memory, jaxkv.init_batch(memory, jaxkv.make_batch([1, 2])))
    loaded = snapshot.load(snapshot.to_bytes(memory))
    assert_identical(loaded.buffers, memory.buffers)


# --------------------------------------------------------------------------------- other layouts


ONE = replace(SMALL, cells=40, sequences=4)
FULL = [
    replace(ONE, name="one stream"),
    replace(ONE, streams=2, placement="striped", shards=4, name="striped"),
    replace(ONE, streams=4, placement="contiguous", name="neighbours"),
]
WINDOWS = [replace(one, windows=(jaxkv.window.sliding(3),)) for one in FULL]
BOTH = [replace(one, windows=(None, jaxkv.window.chunked(4))) for one in FULL]
ids = st.integers(0, 3)
OPS = st.one_of(
    st.tuples(st.just("tell"), ids, st.integers(1, 5)),
    st.tuples(st.just("seq_rm"), ids, st.integers(0, 6), st.integers(-1, 8)),
    st.tuples(st.just("seq_cp"), ids, ids),
    st.tuples(st.just("seq_add"), ids, st.integers(0, 4), st.just(-1), st.integers(-3, 3)),
    st.tuples(st.just("update")),
)


def done(memory, op):
    """A memory after a verb, and the logits if it was told something; itself where refused."""
    name, *args = op
    if name == "tell":
        seq, count = args
        batch = jaxkv.make_batch([1 + i for i in range(count)], sequences=seq)
        if jaxkv.init_batch(memory, batch, ubatch_size=4).ok:
            return memories.run(memory, batch)
    elif name == "seq_rm":
        return jaxkv.seq_rm(memory, *args)[0], None
    elif name == "seq_cp" and jaxkv.can_seq_cp(memory, *args):
        return jaxkv.seq_cp(memory, *args), None
    elif name == "seq_add" and jaxkv.can_seq_add(memory, *args):
        return jaxkv.seq_add(memory, *args), None
    elif name == "update":
        return jaxkv.apply(memory, jaxkv.init_update(memory)), None
    return memory, None


def lives(memory, ops):
    for op in ops:
        memory, _ = done(memory, op)
    return memory


@pytest.mark.core
@pytest.mark.parametrize(
    "kinds",
    mostly_nightly([FULL, WINDOWS, BOTH], few=[BOTH]),
    ids=["full", "window", "hybrid"],
)
@settings(max_examples=8)
@given(data=st.data())
def test_it_goes_on_in_any_other_layout(kinds, data):
    source, target = (data.draw(st.sampled_from(kinds)) for _ in range(2))
    memory = lives(source.make(), data.draw(st.lists(OPS, max_size=8)))
    dirty = lives(target.make(), data.draw(st.lists(OPS, max_size=5)))
    moves = dict(
        zip(
            data.draw(st.permutations(range(4))), data.draw(st.permutations(range(4))), strict=False
        )
    )
    moves = {old: moves[old] for old in data.draw(st.sets(ids))}
    saved = snapshot.to_bytes(memory, sequences=[*moves])
    try:
        loaded = snapshot.load_into(saved, dirty, sequences=[*moves.values()])
    except jaxkv.NoRoomError:
        assert source.placement == target.placement == "contiguous" or jaxkv.used(dirty) > 0
        return
    assert not any(map(int, jaxkv.check_invariants(loaded).values()))
    for old, new in moves.items():
        assert belongings(loaded, new) == belongings(memory, old)
    for seq in set(range(4)) - set(moves.values()):
        if kinds is FULL:
            assert belongings(loaded, seq) == belongings(dirty, seq)
    loaded, memory = (done(one, ("update",))[0] for one in (loaded, memory))
    for old, new in moves.items():
        count = data.draw(st.integers(1, 4))
        there, wanted = done(memory, ("tell", old, count))
        here, found = done(loaded, ("tell", new, count))
        if wanted is not None and found is not None:
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
            assert_identical(found.argmax(axis=-1), wanted.argmax(axis=-1))
            memory, loaded = there, here


@pytest.mark.core
@pytest.mark.parametrize("kind", [FULL[1], WINDOWS[0], BOTH[2]], ids=lambda kind: kind.name)
@settings(max_examples=15)
@given(before=st.lists(OPS, max_size=8), after=st.lists(OPS, max_size=6))
def test_saved_and_loaded_in_the_middle_of_a_life(kind, before, after):
    memory = lives(kind.make(), before)
    loaded = snapshot.load(snapshot.to_bytes(memory))
    for op in after:
        (memory, wanted), (loaded, found) = done(memory, op), done(loaded, op)
        assert_identical(found, wanted)
    assert_same_memory(loaded, memory)


@pytest.mark.core
@pytest.mark.parametrize("name", mostly_nightly(STATES, few=["hybrid in groups"]))
@settings(max_examples=6)
@given(seed=st.integers(0, 2), streams=st.sampled_from([1, 4]), kept=st.sampled_from([0, 2]))
def test_states_go_on_in_any_other_layout(name, seed, streams, kept):
    options = STATES[name]
    memory, kinds = told(name, seed), options["kinds"]
    other = {"sequences": 4, "streams": streams, "kept": kept, "cells": 40}
    dirty = tell(histories.Twin(**{**options, **other}).memory, kinds, 3, 2)
    loaded = snapshot.load_into(
        snapshot.to_bytes(memory),
        dirty,
        sequences=[2, 0, 1, 3][: histories.Twin(**options).sequences],
    )
    assert not any(map(int, jaxkv.check_invariants(loaded).values()))
    for old, new in {0: 2, 1: 0, 2: 1}.items():
        assert belongings(loaded, new) == belongings(memory, old, kept + 1)
        try:
            there = tell(memory, kinds, old, 3)
        except jaxkv.RefusedError as error:
            if "NO_ROOM" in str(error):  # that is a matter of sizes, and the other has more
                continue
            with pytest.raises(jaxkv.RefusedError, match=re.escape(str(error)[:20])):
                tell(loaded, kinds, new, 3)
            continue
        here = tell(loaded, kinds, new, 3)
        assert belongings(here, new, 1)[-1] == belongings(there, old, 1)[-1]
