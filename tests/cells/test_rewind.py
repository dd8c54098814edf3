"""Rewinding: exact if the old cells are unchanged, refused otherwise."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.cache import merge, split
from tests.cells.pools import TWO, fill_cache
from tests.helpers import edit_sequences
from tests.helpers.caches import Kind, assert_identical, drawing, parse_cache
from tests.helpers.edit_sequences import list_states, make, plan_tokens, run_rows, run_ubatch
from tests.helpers.steps import add_tokens, apply_batch, apply_plan

POOL = Kind("pool", cells=16, sequences=2)


def refill_cell(cache, token=7):
    """Free a cell and fill it again with the same position of the same sequence."""
    return add_tokens(jaxkv.seq_rm(cache, 0, 2, 3)[0], [token])


def rotate(cache, *deltas):
    for delta in deltas:
        cache = jaxkv.seq_add(cache, 0, 0, -1, delta=delta).cache
        cache = jaxkv.apply(cache, jaxkv.init_update(cache))
    return cache


def move_cells(cache):
    cache, _ = jaxkv.seq_rm(cache, 0, 0, 1)
    return jaxkv.apply(cache, jaxkv.defrag_plan(cache))


@pytest.mark.parametrize(
    ("past", "change"),
    [
        (None, refill_cell),
        (None, lambda cache: refill_cell(cache, 4)),  # the token of the old table
        (None, lambda cache: rotate(cache, 2, -2)),
        (None, move_cells),
        # Both moved the same cells and rotated them, by 5 and by 3: their keys differ.
        (lambda cache: rotate(cache, 5), lambda cache: rotate(cache, 3)),
        # Hashes stay after a rewind: the empty cells of that table were written since.
        (None, lambda cache: add_tokens(jaxkv.rewind(cache, to=POOL.make().table)[0], [9] * 3)),
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
    cache = add_tokens(POOL.make(), [3, 1, 4])
    table = (past(cache) if past else cache).table
    later = change(cache)
    back, ok = jaxkv.rewind(later, to=table)
    assert not ok
    assert_identical(back, later)


def test_rewind_ignores_cells_that_were_empty():
    """A defrag may move cells into and out of cells that the old table does not use."""
    cache = add_tokens(POOL.make(), [3, 1, 4])
    table = cache.table
    later, _ = jaxkv.seq_rm(add_tokens(cache, [1, 2, 3, 4], seq=1), 1, 0, 2)
    later = jaxkv.apply(later, jaxkv.defrag_plan(later))
    back, ok = jaxkv.rewind(later, to=table)
    assert ok
    np.testing.assert_array_equal(back.table.position, table.position)


def test_rewind_twice_knows_what_was_written_between():
    """A cell removed in between is free in the second table, and was written since."""
    cache = add_tokens(POOL.make(), [1, 2, 3])
    full = cache.table
    cache, _ = jaxkv.seq_rm(cache, 0, 2)
    cut = cache.table
    back, ok = jaxkv.rewind(add_tokens(cache, [7]), to=cut)  # in the cell of the 3
    assert ok and not jaxkv.rewind(back, to=full)[1]


@partial(jax.jit, donate_argnames="buffers")
def run_donated(table, buffers, ubatch):
    return split(run_ubatch(merge(table, buffers), ubatch, "ar")[0])


@pytest.mark.core
def test_rewind_with_donated_buffers_finds_shared_states():
    """Trap 71: states that a second sequence shares are never overwritten."""
    twin = edit_sequences.make_filled_twin(kept=1, counts=(3, 0, 0), kinds="ar")
    alone = twin.cache.table
    twin.edit("seq_cp", 0, [2])
    known = edit_sequences.stored_states(twin.cache.parts[-1])
    shared, buffers = split(jax.tree.map(jnp.copy, twin.cache))
    table, (plan, _) = shared, twin.plan([0] * 11, in_parts=True)
    for ubatch in plan.ubatches:
        table, buffers = run_donated(table, buffers, ubatch)
    for past in (alone, shared):  # the same cells
        twin.cache, ok = jaxkv.rewind(merge(table, buffers), to=past)
        assert ok and not twin.cache.is_current(plan.ubatches[0])  # its cells were written since
    assert edit_sequences.stored_states(twin.cache.parts[-1]) == known


@pytest.mark.core
def test_rewind_then_the_same_step_gives_the_same():
    """A step of another stream does not prevent it."""
    for streams, others in ((1, []), (3, [3])):
        cache = run_rows(make(3, streams=streams), [1, 2])
        ubatch = plan_tokens(cache, [3])
        later, passed = run_ubatch(run_rows(cache, [], others) if others else cache, ubatch)
        back, ok = jaxkv.rewind(later, to=cache.table)
        assert ok
        assert_identical(apply_plan(back, ubatch), back)  # stale: its cells were written since
        again, same = run_ubatch(back, plan_tokens(back, [3]))
        assert_identical(same, passed)
        assert list_states(again) == list_states(later)


@pytest.mark.core
def test_rewind_takes_a_token_from_all_its_sequences():
    """Trap 70: llama.cpp rolls an aborted token back in one of its sequences only."""
    cache = parse_cache("0{0,1} 1{0,1}")
    later = apply_batch(cache, [1], sequences=[[0, 1]])
    assert later.seq_pos_max([0, 1]).tolist() == [2, 2]
    back, ok = jaxkv.rewind(later, to=cache.table)
    assert ok and drawing(back) == drawing(cache)


@pytest.mark.core
def test_rewind_to_another_copy_in_the_same_cells_is_refused():
    cache = fill_cache(TWO, 2, 2)
    one, other = (jaxkv.seq_cp(cache, seq, 3).cache for seq in (0, 1))
    assert drawing(one).split("|")[1] == drawing(other).split("|")[1]
    assert jaxkv.rewind(one, to=one.table)[1] and not jaxkv.rewind(other, to=one.table)[1]
