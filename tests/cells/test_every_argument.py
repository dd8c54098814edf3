"""Every small argument of every verb, on tables that a short random life has left.

The machines of `test_stateful` go far and see few arguments at each place. Here each verb is
computed for all of them at once, traced, and the tables that come of it are compared with those of
the oracle. Buffers are not compared.
"""

import random
from functools import cache
from itertools import permutations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests import histories, twins
from tests.memories import GROUPS_STRIPES, Kind, cells_of
from tests.oracle import Oracle

RANGES = [*product(range(-1, 5), range(-1, 6))]
WINDOW_SPLIT = Kind(
    "window-split", cells=7, sequences=2, streams=2, windows=(jaxkv.window.chunked(3),)
)
TWINS = {
    "window-split": lambda: twins.Twin(WINDOW_SPLIT),
    "groups-striped-window": lambda: twins.Twin(GROUPS_STRIPES),
    "states-split": lambda: histories.Twin("r", kept=2, streams=3),
    "states-groups": lambda: histories.Twin("r", kept=1, sequences=4, streams=2),
}


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


resuming = jax.jit(jax.vmap(jaxkv.can_resume, in_axes=(None, 0, 0)))


def edited(oracle, verb, args):
    """What an oracle holds after a verb, and whether that was granted; an unknown id does nothing.

    In `seq_rm` alone -1 stands for all sequences.
    """
    oracle, count = oracle.fork(), oracle.sequences
    ids = args[: {"seq_cp": 2, "seq_select": 2}.get(verb, 1)]
    if any(not (0 <= seq < count or (seq == -1 and verb == "seq_rm")) for seq in ids):
        return oracle, True
    if verb == "seq_select":
        args = args[:2], pairs_of(count)[args[2]]
    if verb == "seq_cp":
        args = args[0], args[1:2], *args[2:]
    return oracle, getattr(oracle, verb)(*args) is not False or verb != "seq_rm"


def of_oracle(oracle):
    """The table of an oracle, in a form that is compared with `of_table`."""
    if isinstance(oracle, Oracle):
        cells = {place: (c.position, c.owners, c.shift) for place, c in oracle.cells.items()}
        return cells, [*oracle.evicted_below.values()]
    positions = [[state.position for state in states] for states in oracle.states.values()]
    return positions, [*oracle.dead_until.values()], oracle.used()


def of_table(tables, i):
    """Cells and marks of one of many tables; or positions, dead ends and how many states."""
    table = jax.tree.map(lambda x: x[i], tables)
    if hasattr(table, "owners"):
        return cells_of(table), table.evicted_below.tolist()
    there = table.position >= 0
    assert not there[:, :-1][~there[:, 1:]].any()  # the current one is the last
    sharing = len(there) // len(table.stamp)
    where = {(seq // sharing, int(table.cell[seq, pair])) for seq, pair in np.argwhere(there)}
    positions = [mine[has].tolist() for mine, has in zip(table.position, there, strict=True)]
    return positions, table.dead_until.tolist(), len(where)


def lives(twin, count):
    """Lead a memory and its oracle through a short random life, and stop now and then."""
    rng = random.Random(1)
    for _ in range(3):  # a window takes cells from it
        twin.decode([0] * 4)
    for _ in range(3):
        for _ in range(2):
            twin.decode([rng.randrange(count) for _ in range(rng.choice([1, 2, 3]))])
        twin.seq_cp(rng.randrange(count), [rng.randrange(count)], 0, rng.choice([-1, 1, 2]))
        yield
        start = rng.randint(0, 2)
        twin.seq_rm(rng.randrange(count), start, start + rng.randint(1, 3))
        if rng.random() < 0.5:
            twin.both("seq_add", rng.randrange(count), 1, -1, rng.choice([-1, 2]))
            yield
            twin.update()


@pytest.mark.core
@pytest.mark.parametrize("name", TWINS)
def test_verbs_match_oracle_all_small_arguments(name):
    twin = TWINS[name]()
    count = twin.kind.sequences
    for _ in lives(twin, count):
        (oracle,) = twin.oracles.fork()
        if isinstance(oracle, Oracle):
            oracle.contents.clear()  # copies cost little without them
        for verb in ("seq_rm", "seq_cp", "seq_keep", "seq_add", "seq_div", "seq_select"):
            rows = arguments(verb, count)
            tables, granted = jax.device_get(every(verb)(*jaxkv.split(twin.memory), rows))
            for i, args in enumerate(rows.tolist()):
                after, ok = edited(oracle, verb, args)
                assert of_table(tables, i) == of_oracle(after), (verb, args)
                assert granted[i] == ok, (verb, args)
        asked = np.array([*product(range(count), range(-1, 10))], np.int32)
        answers = resuming(twin.memory, *asked.T).tolist()
        assert answers == [oracle.can_resume(*one) for one in asked.tolist()]


@pytest.mark.core
def test_plan_dead_sequence_is_lost_until_forgotten():
    """At each end that a copy may leave it with, the first one too."""
    twin, batch = histories.told(0, [3]), jaxkv.make_batch([5], sequences=1)
    for end in (1, 2):
        dead = jaxkv.seq_cp(twin.memory, 0, 1, 0, end)
        plan = jaxkv.init_batch(dead, batch)
        assert plan.reason[1] == jaxkv.Reason.LOST
        assert (plan.found[1], plan.fits[0]) == (end, True)
        again, ok = jaxkv.seq_rm(dead, 1)
        assert ok and jaxkv.init_batch(again, batch).ok
        assert jaxkv.init_batch(jaxkv.seq_keep(dead, 0), batch).ok
        for start, moved in ((0, end + 4), (end - 1, end + 4), (end, end)):
            later = jaxkv.seq_add(dead, 1, start, -1, 4)
            assert jaxkv.init_batch(later, batch).found[1] == moved
