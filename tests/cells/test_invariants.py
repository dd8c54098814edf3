"""What is wrong with a table is counted by name: each invariant broken once, and nothing else."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.histories import told
from tests.memories import GROUPS, SMALL, WIDE, WINDOW, drawn, filled


def counted(memory):
    return {name: int(n) for name, n in jaxkv.check_invariants(memory).items() if n}


ROTATED = "rotated for a negative position"


def put(array, *where, value):
    return array.at[where].set(value)


@pytest.mark.parametrize(
    ("field", "where", "value", "wrong"),
    [
        ("position", (0, 5), -2, "position below -1"),
        ("position", (0, 5), 3, "position without an owner"),
        ("owners", (0, 0, 5), 1, "owner without a position"),
        ("owners", (0, 0, 1), 1 | 1 << 3, "owner that is no sequence"),
        ("shift", (0, 5), 2, "rotation owed to an empty cell"),
        ("shift", (0, 1), 2, ROTATED),
        ("evicted_below", (2,), -1, "evicted below a negative position"),
    ],
)
def test_what_is_wrong_with_cells_is_named(field, where, value, wrong):
    memory = filled(2, 1)
    assert counted(memory) == {}
    table, buffers = jaxkv.split(memory)
    broken = replace(table, **{field: put(getattr(table, field), *where, value=value)})
    found = counted(jaxkv.join(broken, buffers))
    if value == -2:  # a position at all is too much there, and it is less than what is owed
        assert found.pop("position without an owner") == found.pop(ROTATED) == 1
    assert found == {wrong: 1}


@pytest.mark.core
@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ([("position", (0, 0), -2)], "position below -1"),
        ([("cell", (0, 0), 9)], "position without a cell"),
        ([("cell", (1, 0), 5)], "cell without a position"),
        ([("cell", (0, 0), -1)], "cell before the first"),
        ([("position", (0, 0), 3)], "positions that do not rise"),
        ([("position", (0, 0), 4)], "positions that do not rise"),
        ([("cell", (0, 0), None)], "one cell twice"),
        ([("dead_until", (0,), -1)], "dead until a negative position"),
        ([("dead_until", (0,), 2)], "state of a dead sequence"),
    ],
)
def test_what_is_wrong_with_states_is_named(changes, wrong):
    memory = told(2, [4]).memory  # states after 1, 2 and 3
    assert counted(memory) == {}
    table, buffers = jaxkv.split(memory)
    for field, where, value in changes:
        value = table.cell[0, 1] if value is None else value
        table = replace(table, **{field: put(getattr(table, field), *where, value=value)})
    assert counted(jaxkv.join(table, buffers))[wrong] >= 1


def test_a_state_shared_at_two_positions_is_named():
    memory = jaxkv.seq_cp(told(0, [4]).memory, 0, 1)
    assert counted(memory) == {}
    table, buffers = jaxkv.split(memory)
    table = replace(table, position=put(table.position, 1, 0, value=2))
    assert counted(jaxkv.join(table, buffers)) == {"shared cell with two positions": 1}


def test_nothing_is_wrong_with_an_empty_table():
    assert counted(SMALL.make()) == {}
    assert jnp.array(0) == sum(jaxkv.check_invariants(told(0, [0]).memory).values())


def test_sharing_spares_a_cell_for_each_owner_but_one():
    """By stream, and in words beside the first; an engine promises cells by it."""
    table = drawn("0{0,1} . 1{0} | 0{3} 1{3,2} 2{2,3}", GROUPS).table
    assert table.spared().tolist() == [1, 2]
    assert drawn("0{0,1,39} 1{0,39}", WIDE).table.spared().tolist() == [3]
    # 8 tokens and 3, of which 2 are shared; a window looks back at 2 of each, beside 4 at once.
    lengths, spared = np.array([8, 3, 0]), np.array([2])
    for kind, cells, fits in (
        (SMALL, 9, True),
        (SMALL, 8, False),
        (WINDOW, 8, True),
        (WINDOW, 7, False),
    ):
        small = replace(kind, cells=cells).make().table
        assert small.can_hold(lengths, 4, spared) == fits
