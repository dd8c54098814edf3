"""`Cache.check` counts violated invariants of a table by name."""

from dataclasses import replace

import pytest

import jaxkv
from jaxkv.cache import merge
from tests.helpers import edit_sequences
from tests.helpers.caches import SMALL, fill_cache


def count_faults(cache):
    return {name: int(n) for name, n in cache.check().items() if n}


def replace_entry(cache, field, where, value):
    table, buffers = cache.table, cache.buffers
    array = getattr(table, field).at[where].set(value)
    return merge(replace(table, **{field: array}), buffers)


@pytest.mark.parametrize(
    ("field", "where", "value", "wrong"),
    [
        ("position", (0, 5), 3, ["position without an owner"]),
        (
            *("position", (0, 5), -2),
            ["position below -1", "position without an owner", "rotated for a negative position"],
        ),
        ("owners", (0, 0, 5), 1, ["owner without a position"]),
        ("owners", (0, 0, 1), 1 | 1 << 3, ["owner that is no sequence"]),
        ("shift", (0, 5), 2, ["shift of an empty cell"]),
        ("shift", (0, 1), 2, ["rotated for a negative position"]),
        ("evicted_below", (2,), -1, ["evicted below a negative position"]),
    ],
)
def test_check_invariants_names_what_is_wrong_with_cells(field, where, value, wrong):
    """Trap 57: llama.cpp keeps a cell without an owner as used for ever."""
    cache = fill_cache(2, 1)
    assert count_faults(SMALL.make()) == count_faults(cache) == {}
    assert count_faults(replace_entry(cache, field, where, value)) == dict.fromkeys(wrong, 1)


@pytest.mark.core
@pytest.mark.parametrize(
    ("field", "where", "value", "wrong"),
    [
        ("position", (0, 0), -2, "position below -1"),
        ("cell", (0, 0), 9, "position without a cell"),
        ("cell", (1, 0), 5, "cell without a position"),
        ("cell", (0, 0), -1, "cell before the first"),
        ("position", (0, 0), 3, "positions that do not rise"),
        ("position", (0, 0), 4, "positions that do not rise"),
        ("position", (1, 1), 4, "positions that do not rise"),
        ("first_position", (0, 1), -1, "first position not from 0 to the position"),
        ("first_position", (0, 1), 4, "first position not from 0 to the position"),
        ("cell", (0, 0), None, "one cell twice"),
        ("position", (2, 2), 4, "shared cell with two positions"),
    ],
)
def test_check_invariants_names_what_is_wrong_with_states(field, where, value, wrong):
    cache = jaxkv.seq_cp(
        edit_sequences.make_filled_twin(2, [4]).cache, 0, 2
    ).cache  # states after 1, 2 and 3
    assert count_faults(edit_sequences.make()) == count_faults(cache) == {}
    value = cache.table.cell[0, 1] if value is None else value
    assert count_faults(replace_entry(cache, field, where, value))[wrong] >= 1
