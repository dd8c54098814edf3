"""Every small argument of every edit, on tables after a short random run.

The machines of `test_stateful` run longer with few arguments at each step. Here one traced program
computes an edit for all arguments, and tables (not buffers) are compared with those of the oracle.
"""

import functools
import random
from itertools import permutations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.helpers import edit_sequences, reference_caches
from tests.helpers.caches import GROUPS_STRIPES, Kind, cells_of, edit
from tests.helpers.parametrize import mark_cases
from tests.helpers.reference_cache import Oracle

RANGES = [*product(range(-1, 5), range(-1, 6))]
WINDOW_SPLIT = Kind("window-split", 7, 2, streams=2, windows=(jaxkv.Window.chunked(3),))
TWINS = {
    "window-split": lambda: reference_caches.Twin(WINDOW_SPLIT),
    "groups-striped-window": lambda: reference_caches.Twin(GROUPS_STRIPES),
    "states-split": lambda: edit_sequences.Twin("r", kept=2, streams=3),
    "states-groups": lambda: edit_sequences.Twin("r", kept=1, sequences=4, streams=2),
}


def arguments(verb, count):
    """All small arguments of an edit for a cache of `count` sequences, unknown ids included."""
    ids, none = range(count), [-2, count]
    ways = {
        "seq_rm": product([-1, *ids, *none], RANGES),
        "seq_cp": product([-1, *ids, none[1]], [-1, *ids, none[1]], RANGES),
        "seq_keep": product([*ids, *none]),
        "seq_add": product(ids, RANGES, range(-3, 4)),
        "seq_div": product(ids, RANGES, range(1, 4)),
        "seq_select": product(ids, ids, range(len(pairs_of(count)))),  # parents, target pair
    }
    flat = ([*map(np.ravel, one)] for one in ways[verb])
    return np.array([np.concatenate(one) for one in flat], np.int32)


def pairs_of(count):
    return [*map(list, permutations(range(count), 2))]


@functools.cache
def make_batched_edit(verb):
    """Compute an edit for many arguments at once: the tables, and whether each was granted."""

    def one(cache, args):
        if verb == "seq_select":
            args = args[:2], jnp.array(pairs_of(cache.table.spec.sequences))[args[2]]
        cache, ok = edit(verb, cache, *args)
        return cache.table, ok

    return jax.jit(jax.vmap(one, in_axes=(None, 0)))


resuming = jax.jit(jax.vmap(jaxkv.Cache.can_resume, in_axes=(None, 0, 0)))


def edit_oracle(oracle, verb, args):
    """Apply an edit to a fork of an oracle; an unknown id changes no cell.

    -1 means all sequences in `seq_rm` only.
    """
    oracle, count = oracle.fork(), oracle.sequences
    ids = args[: {"seq_cp": 2, "seq_select": 2}.get(verb, 1)]
    if any(not (0 <= seq < count or (seq == -1 and verb == "seq_rm")) for seq in ids):
        return oracle, True
    if verb == "seq_select":
        args = args[:2], pairs_of(count)[args[2]]
    if verb == "seq_cp":
        args = args[0], args[1:2], *args[2:]
    return oracle, getattr(oracle, verb)(*args) is not False


def of_oracle(oracle):
    """The table of an oracle, comparable with `of_table`."""
    if isinstance(oracle, Oracle):
        return {place: (c.position, c.owners, c.shift) for place, c in oracle.cells.items()}
    states = oracle.states.values()
    positions, begins = (
        [[getattr(state, name) for state in mine] for mine in states]
        for name in ("position", "begin")
    )
    return positions, begins, oracle.used()


def of_table(table):
    """The used cells of a table; or the positions, first positions and number of states."""
    if hasattr(table, "owners"):
        return cells_of(table)
    there = table.position >= 0
    assert not there[:, :-1][~there[:, 1:]].any()  # the current state is last
    sharing = len(there) // len(table.stamp)
    where = {(seq // sharing, int(table.cell[seq, pair])) for seq, pair in np.argwhere(there)}
    positions = [mine[has].tolist() for mine, has in zip(table.position, there, strict=True)]
    return positions, [*edit_sequences.first_positions(table).values()], len(where)


def ends_of(table):
    """The last position of each sequence of a table."""
    if not hasattr(table, "owners"):
        return table.position[:, -1].tolist()
    held = [[-1] for _ in table.evicted_below]
    for position, owners, _ in cells_of(table).values():
        for seq in owners:
            held[seq].append(position)
    return np.maximum([*map(max, held)], table.evicted_below - 1).tolist()


def lives(twin, count, begin):
    """Apply a short random run to a cache and its oracle; yield at intervals.

    begin: the first positions of sequence 0, None from 0 on.
    """
    rng = random.Random(1)
    twin.decode([0] * 4, begin)
    for _ in range(2):  # a window evicts some of their cells
        twin.decode([0] * 4)
    for _ in range(3):
        for _ in range(2):
            twin.decode([rng.randrange(count) for _ in range(rng.choice([1, 2, 3]))])
        twin.seq_cp(rng.randrange(count), [rng.randrange(count)], 0, rng.choice([-1, 1, 2]))
        yield
        start = rng.randint(0, 2)
        twin.seq_rm(rng.randrange(count), start, start + rng.randint(1, 3))
        if rng.random() < 0.5:
            twin.edit("seq_add", rng.randrange(count), 1, -1, rng.choice([-1, 2]))
            yield
            twin.update()


@pytest.mark.parametrize("name", mark_cases(TWINS, core=["window-split"]))
def test_edits_match_oracle_all_small_arguments(name):  # traps 53, 60, 61, 66, 67
    twin = TWINS[name]()
    count = twin.kind.sequences
    begin = [2, 3, 4, 5] if name == "states-groups" else None
    for _ in lives(twin, count, begin):
        (oracle,) = twin.oracles.fork()
        has_lost = any(map(oracle.has_lost, range(oracle.streams)))
        for verb in ("seq_rm", "seq_cp", "seq_keep", "seq_add", "seq_div", "seq_select"):
            rows = arguments(verb, count)
            tables, granted = jax.device_get(make_batched_edit(verb)(twin.cache, rows))
            for i, args in enumerate(rows.tolist()):
                table = jax.tree.map(lambda x, i=i: x[i], tables)
                after, ok = edit_oracle(oracle, verb, args)
                if not granted[i]:
                    assert not ok or has_lost, (verb, args)
                    assert of_table(table) == of_oracle(oracle), (verb, args)
                    continue
                assert ok and of_table(table) == of_oracle(after), (verb, args)
                assert ends_of(table) == [*map(after.reached, range(count))], (verb, args)
                assert all(map(after.is_whole, range(count))), (verb, args)
        asked = np.array([*product(range(count), range(-1, 10))], np.int32)
        answers = resuming(twin.cache, *asked.T).tolist()
        for one, answer in zip(asked.tolist(), answers, strict=True):
            assert answer == oracle.can_resume(*one) or (has_lost and not answer), one
