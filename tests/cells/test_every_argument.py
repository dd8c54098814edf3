"""Every small argument of every verb and plan, on tables that a short life has left.

The random machines of `test_stateful` and `test_recurrent_verbs` go far and see few arguments at
each place. Here each verb is computed for all of them at once, and the tables that come of it are
compared with those of the oracles. What buffers hold is not looked at.
"""

import random
from functools import cache
from itertools import permutations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests import histories, memories
from tests.cases import mostly_nightly
from tests.memories import (
    GROUPS,
    GROUPS_STRIPES,
    GROUPS_WINDOW,
    RUNS,
    SMALL,
    WINDOW,
    Kind,
    plan_rows,
)
from tests.oracle import Fault, Oracle, Token
from tests.twins import Twin

RANGES = [*product(range(-1, 6), range(-1, 7))]
TWO_SPLIT = Kind("two-streams", cells=6, sequences=2, streams=2)
WINDOW_SPLIT = Kind(
    "window-split", cells=7, sequences=2, streams=2, windows=(jaxkv.window.chunked(3),)
)
CELLS = [SMALL, RUNS, TWO_SPLIT, WINDOW, WINDOW_SPLIT, GROUPS, GROUPS_WINDOW, GROUPS_STRIPES]
CELLS = {kind.name: kind for kind in CELLS}
STATES = [
    {"kept": 0},
    {"kept": 2},
    {"kept": 1, "sequences": 2, "streams": 2},
    {"kept": 2, "streams": 3},
    {"kept": 1, "sequences": 4, "streams": 2},
]


def arguments(verb, count):
    """All small arguments of a verb, for a memory of so many sequences; unknown ids too."""
    ids, none = range(count), [-2, count]
    ways = {
        "seq_rm": product([-1, *ids, *none], RANGES),
        "seq_cp": product([*ids, none[1]], [*ids, none[1]], RANGES),
        "seq_keep": product([*ids, *none]),
        "seq_add": product(ids, RANGES, range(-3, 4)),
        "seq_div": product(ids, RANGES, range(1, 4)),
        "seq_select": product(ids, ids, range(len(pairs_of(count)))),  # two parents, their targets
    }
    flat = ([*map(np.ravel, one)] for one in ways[verb])
    return np.array([np.concatenate(one) for one in flat], np.int32)


def pairs_of(count):
    """Two different sequences, in all ways."""
    return [*map(list, permutations(range(count), 2))]


def ordered(verb, args, count):
    """Bring arguments into the order of the verb."""
    if verb == "seq_select":
        *parents, which = args
        return parents, pairs_of(count)[which]
    if verb == "seq_cp":
        src, dst, p0, p1 = args
        return src, [dst], p0, p1
    return tuple(args)


@cache
def every(verb):
    """Compute a verb for many arguments at once: the tables, and whether each was granted."""

    def one(table, buffers, args):
        memory = jaxkv.join(table, buffers)
        if verb == "seq_rm":
            memory, ok = jaxkv.seq_rm(memory, *args)
            return jaxkv.split(memory)[0], ok
        if verb == "seq_select":
            pairs = jnp.array(pairs_of(table.facts.sequences))
            memory = jaxkv.seq_select(memory, args[:2], pairs[args[2]])
        else:
            memory = getattr(jaxkv, verb)(memory, *args)
        return jaxkv.split(memory)[0], True

    return jax.jit(jax.vmap(one, in_axes=(None, None, 0)))


def lives(twin, count, seed):
    """Lead a memory and its oracle through a short random life, and stop now and then."""
    rng = random.Random(seed)
    several = getattr(twin, "both", None)

    def do(verb, *args):
        return several(verb, *args) if several else getattr(twin, verb)(*args)

    for _ in range(4):
        for _ in range(2):
            twin.decode([rng.randrange(count) for _ in range(rng.choice([1, 2, 3]))])
        do("seq_cp", rng.randrange(count), [rng.randrange(count)], 0, rng.choice([-1, 1, 2]))
        yield twin
        start = rng.randint(0, 2)
        twin.seq_rm(rng.randrange(count), start, start + rng.randint(1, 3))
        if rng.random() < 0.5:
            do("seq_add", rng.randrange(count), 1, -1, rng.choice([-1, 2]))
            yield twin
            twin.update()


# ---- attention


def of_oracle(oracle):
    """The table of an oracle: position, owners and shift by cell, and what is evicted."""
    cells = {place: (c.position, frozenset(c.owners), c.shift) for place, c in oracle.cells.items()}
    return cells, [*oracle.evicted_below.values()]


def of_cells(tables, i):
    table = jax.tree.map(lambda x: x[i], tables)
    cells = memories.cells_of(table)
    return {p: (at, frozenset(own), by) for p, (at, own, by) in cells.items()}, (
        table.evicted_below.tolist()
    )


def does_nothing(verb, args, count):
    """Whether an id is none; -1 stands for all in `seq_rm` alone."""
    ids = args[: {"seq_cp": 2, "seq_select": 2}.get(verb, 1)]
    return any(not (0 <= seq < count or (seq == -1 and verb == "seq_rm")) for seq in ids)


@pytest.mark.core
@pytest.mark.parametrize(
    "name", mostly_nightly(CELLS, few=["window-split", "groups-striped-window"])
)
def test_verbs_of_attention(name):
    kind = CELLS[name]
    count = kind.sequences
    for twin in lives(Twin(kind), count, seed=1):
        light = twin.oracle.fork()  # without what buffers hold, so that copies cost little
        light.contents.clear()
        for verb in ("seq_rm", "seq_cp", "seq_keep", "seq_add", "seq_div", "seq_select"):
            rows = arguments(verb, count)
            tables, _ = jax.device_get(every(verb)(*jaxkv.split(twin.memory), rows))
            for i, args in enumerate(rows.tolist()):
                oracle = light.fork()
                if not does_nothing(verb, args, count):
                    getattr(oracle, verb)(*ordered(verb, args, count))
                assert of_cells(tables, i) == of_oracle(oracle), (
                    verb,
                    args,
                    jaxkv.show(twin.memory),
                )


@cache
def planning():
    """Plan many batches in rows at once, and take them in."""

    def one(memory, tokens, valid, positions):
        plan = plan_rows(memory, tokens, valid, positions)
        after = jaxkv.apply(memory, plan.ubatches[0])
        return (plan.ok, plan.fits, plan.reason, plan.expected, plan.found), jaxkv.split(after)[0]

    return jax.jit(jax.vmap(one, in_axes=(None, 0, 0, 0)))


@pytest.mark.core
@pytest.mark.parametrize("name", mostly_nightly(CELLS, few=["contiguous", "groups-window"]))
def test_plans_of_attention(name):
    kind = CELLS[name]
    """Few and many tokens of each sequence, the first or the second of them out of place."""
    count = kind.sequences
    slips = [(0, 0), (1, 0), (-1, 0), (2, 0), (0, 1), (0, -1), (0, -2)]
    for twin in lives(Twin(kind, in_rows=True), count, seed=2):
        batches = []
        for counts, slip, who in product(product([0, 1, 2, 5], repeat=count), slips, range(count)):
            if any(counts) and (slip == (0, 0)) <= (who == 0) and (counts[who] or who == 0):
                batches.append([*tokens_of(twin.oracle, counts, slip, who)])
        batches = batches[:: max(len(batches) // 250, 1)]
        rows = np.stack([twin.rows(batch) for batch in batches])
        answers, tables = jax.device_get(planning()(twin.memory, *np.moveaxis(rows, 1, 0)))
        for i, batch in enumerate(batches):
            oracle = twin.oracle.fork()
            plan = oracle.plan(batch, ubatch_size=None)
            ok, fits, reason, expected, found = (answer[i] for answer in answers)
            faults = {
                seq: Fault(jaxkv.Reason(int(reason[seq])).name, int(expected[seq]), int(found[seq]))
                for seq in range(count)
                if not fits[seq]
            }
            assert faults == plan.faults, (batch, jaxkv.show(twin.memory))
            assert ok == plan.ok and (fits == (reason == jaxkv.Reason.FITS)).all()
            if ok:
                assert not expected.any() and not found.any()
                assert oracle.apply(plan.parts[0])
            assert of_cells(tables, i) == of_oracle(oracle)


def tokens_of(oracle: Oracle, counts, slip, who):
    number = 100
    for seq, length in enumerate(counts):
        for i in range(length):
            by = slip[i] if seq == who and i < 2 else 0
            yield Token(seq, oracle.reached(seq) + 1 + i + by, number)
            number += 1


# ---- states


def of_histories(past):
    """Positions by sequence, what is dead, and how many states there are, shared ones once."""
    positions = [[state.position for state in states] for states in past.states.values()]
    return positions, [*past.dead_until.values()], past.used()


def of_states(tables, i):
    position, cell = tables.position[i], tables.cell[i]
    there = position >= 0
    assert not there[:, :-1][~there[:, 1:]].any()  # the current one is the last
    sharing = len(position) // tables.stamp.shape[1]
    pairs = zip(*np.nonzero(there), strict=True)
    where = {(seq // sharing, int(cell[seq, pair])) for seq, pair in pairs}
    positions = [mine[has].tolist() for mine, has in zip(position, there, strict=True)]
    return positions, tables.dead_until[i].tolist(), len(where)


@pytest.mark.core
@pytest.mark.parametrize("options", mostly_nightly(STATES, few=STATES[3:]), ids=str)
def test_verbs_of_states(options):
    twin = histories.Twin("r", **options)
    count = twin.sequences
    for _ in lives(twin, count, seed=3):
        for verb in ("seq_rm", "seq_cp", "seq_keep", "seq_add", "seq_div", "seq_select"):
            rows = arguments(verb, count)
            tables, granted = jax.device_get(every(verb)(*jaxkv.split(twin.memory), rows))
            for i, args in enumerate(rows.tolist()):
                past, ok = twin.histories.fork(), True
                if not does_nothing(verb, args, count):
                    ok = getattr(past, verb)(*ordered(verb, args, count))
                where = verb, args, jaxkv.show(twin.memory), twin.histories.dead_until
                assert of_states(tables, i) == of_histories(past), where
                assert granted[i] == (ok is not False), where
        answers = jax.device_get(resuming()(twin.memory, *grid(count)))
        for seq, pos, can in zip(*grid(count), answers, strict=True):
            assert can == twin.histories.can_resume(int(seq), int(pos))


def grid(count):
    return np.array([*product(range(count), range(-1, 8))], np.int32).T


@cache
def resuming():
    return jax.jit(jax.vmap(jaxkv.can_resume, in_axes=(None, 0, 0)))


def test_a_dead_sequence_is_refused_until_it_is_forgotten():
    """At each end that a copy may leave it with, the first one too."""
    twin = histories.told(0, [3])
    for end in (1, 2):
        dead = jaxkv.seq_cp(twin.memory, 0, 1, 0, end)
        plan = jaxkv.init_batch(dead, jaxkv.make_batch([5], sequences=1))
        assert jaxkv.Reason(int(plan.reason[1])) == jaxkv.Reason.LOST
        assert (plan.found[1], plan.fits[0]) == (end, True)
        again, ok = jaxkv.seq_rm(dead, 1)
        assert ok and jaxkv.init_batch(again, jaxkv.make_batch([5], sequences=1)).ok
        kept = jaxkv.seq_keep(dead, 0)
        assert jaxkv.init_batch(kept, jaxkv.make_batch([5], sequences=1)).ok


@pytest.mark.core
def test_the_end_of_a_dead_sequence_moves_with_a_range_that_holds_it():
    dead = jaxkv.seq_cp(histories.told(0, [3]).memory, 0, 1, 0, 2)  # its state stood at 1
    for start, end in ((0, 6), (1, 6), (2, 2)):
        moved = jaxkv.seq_add(dead, 1, start, -1, 4)
        assert jaxkv.init_batch(moved, jaxkv.make_batch([5], sequences=1)).found[1] == end
