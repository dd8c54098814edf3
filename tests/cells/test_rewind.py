"""Rewinding: exact if the old cells are unchanged, refused otherwise."""

import numpy as np
import pytest

import jaxkv
from tests.cells.plans import plan_of
from tests.helpers.caches import Kind, assert_identical
from tests.helpers.steps import settle

POOL = Kind("pool", cells=16, sequences=2)


def told(cache, *tokens, seq=0):
    """Apply tokens of a sequence; keys and values stay zero."""
    return settle(cache, plan_of(cache, tokens, seq).check())


def refilled(cache, token=7):
    """Free a cell and fill it again with the same position of the same sequence."""
    return told(jaxkv.seq_rm(cache, 0, 2, 3)[0], token)


def rotated(cache, *deltas):
    for delta in deltas:
        cache = jaxkv.seq_add(cache, 0, 0, -1, delta=delta).cache
        cache = jaxkv.apply(cache, jaxkv.init_update(cache))
    return cache


def moved(cache):
    cache, _ = jaxkv.seq_rm(cache, 0, 0, 1)
    return jaxkv.apply(cache, jaxkv.defrag_plan(cache))


@pytest.mark.parametrize(
    ("past", "change"),
    [
        (None, refilled),
        (None, lambda cache: refilled(cache, 4)),  # the token of the old table
        (None, lambda cache: rotated(cache, 2, -2)),
        (None, moved),
        # Both moved the same cells and rotated them, by 5 and by 3: their keys differ.
        (lambda cache: rotated(cache, 5), lambda cache: rotated(cache, 3)),
        # Hashes stay after a rewind: the empty cells of that table were written since.
        (None, lambda cache: told(jaxkv.rewind(cache, to=POOL.make().table)[0], 9, 9, 9)),
    ],
    ids=[
        "refilled",
        "the same token",
        "rotated there and back",
        "moved",
        "rotated otherwise",
        "from an empty table",
    ],
)
def test_rewind_is_refused_where_cells_were_written_or_rotated(past, change):
    cache = told(POOL.make(), 3, 1, 4)
    table = (past(cache) if past else cache).table
    later = change(cache)
    back, ok = jaxkv.rewind(later, to=table)
    assert not ok
    assert_identical(back, later)


def test_rewind_ignores_cells_that_were_empty():
    """A defrag may move cells into and out of cells that the old table does not use."""
    cache = told(POOL.make(), 3, 1, 4)
    table = cache.table
    later, _ = jaxkv.seq_rm(told(cache, 1, 2, 3, 4, seq=1), 1, 0, 2)
    later = jaxkv.apply(later, jaxkv.defrag_plan(later))
    back, ok = jaxkv.rewind(later, to=table)
    assert ok
    np.testing.assert_array_equal(back.table.position, table.position)


def test_rewind_twice_knows_what_was_written_between():
    """A cell removed in between is free in the second table, and was written since."""
    cache = told(POOL.make(), 1, 2, 3)
    full = cache.table
    cache, _ = jaxkv.seq_rm(cache, 0, 2)
    cut = cache.table
    back, ok = jaxkv.rewind(told(cache, 7), to=cut)  # in the cell of the 3
    assert ok and not jaxkv.rewind(back, to=full)[1]
