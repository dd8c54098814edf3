"""Windows: the cells that tokens attend to, evicted cells, and limits of rollback.

Traps are numbered as in `docs/reference/llama_cpp_traps.md`.
"""

from dataclasses import replace
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, make_batch
from jaxkv.window import Window, can_see
from tests.cells.plans import BLOCKS, NEAR, list_resumable, plan_of
from tests.helpers.caches import (
    Kind,
    assert_identical,
    attention_cache,
    drawing,
    parse_cache,
    run_batch,
)
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import add_tokens, apply_plan

core = pytest.mark.core
SIX = "0{0} 1{0} 2{0} 3{0} 4{0} 5{0}"
MIXED = "2{0} 0{0} 1{0} 3{0} 4{0} 5{0}"
POOL = Kind("pool", cells=4, sequences=2, windows=(Window.sliding(1),))
SHORT = Kind("short", cells=3, sequences=3, windows=NEAR.windows)
SINGLE = Kind("one cell of two words", cells=1, sequences=64, windows=NEAR.windows)
EACH = Kind("one-each", cells=4, sequences=2, streams=2, windows=POOL.windows)


def test_sees_symmetric_window_at_the_last_position():
    at = jnp.int32(2**31 - 4) + jnp.arange(3, dtype=jnp.int32)
    assert can_see(Window.symmetric(4), at[:, None], at[None], causal=False).all()


@pytest.mark.parametrize(
    ("kind", "cells", "count", "after", "evicted_below"),
    [
        # Trap 25: the lowest positions first, so that the rest is dense. llama.cpp evicts in the
        # order of cells.
        (NEAR, MIXED, 1, "2{0} 6{0} 1{0} 3{0} 4{0} 5{0}", [1, 0, 0]),
        (NEAR, MIXED, 3, "8{0} 6{0} 7{0} 3{0} 4{0} 5{0}", [3, 0, 0]),
        # Trap 24: window 4, next is 6: positions up to 2 may be evicted, 3 may not.
        (NEAR, SIX, 4, None, None),
        # Trap 27: a shared prefix, hidden from its owners. llama.cpp never evicts a shared cell.
        (
            NEAR, "0{0,1} 1{0,1} 2{0,1} 3{0,1} 4{0,1} 5{0,1}", 2,
            "6{0} 7{0} 2{0,1} 3{0,1} 4{0,1} 5{0,1}", [2, 2, 0],
        ),
        # A cell visible to one owner stays: 1 continues at 2 and attends to 0 and 1; 0 can lose 2.
        (NEAR, "0{0,1} 1{0,1} 2{0} 3{0} 4{0} 5{0}", 2, None, None),
        (NEAR, "0{0,1} 1{0,1} 2{0} 3{0} 4{0} 5{0}", 1, "0{1} 1{1} 6{0} 3{0} 4{0} 5{0}", [3, 0, 0]),
        pytest.param(SHORT, "0{0} 1{0} 2{0}", 1, None, None, marks=core),  # all are visible
    ],
)  # fmt: skip
def test_init_batch_takes_cells_that_no_next_token_sees(kind, cells, count, after, evicted_below):
    cache = parse_cache(cells, kind)
    plan = plan_of(cache, count)
    if after is None:
        assert plan.reason[0] == Reason.OUT_OF_CELLS and not plan.reason[1:].any()
        return
    cache = apply_plan(cache, plan)
    assert drawing(cache) == after and cache.table.evicted_below.tolist() == evicted_below


@core
def test_plan_step_of_one_token_without_a_cell_is_refused():
    plan = jaxkv.plan_step(parse_cache("0{0} 1{0} 2{0}", SHORT), [1])
    assert plan.reason.tolist() == [Reason.OUT_OF_CELLS, Reason.OK, Reason.OK]
    assert jaxkv.plan_step(parse_cache("0{40}", SINGLE), [1]).reason[0] == Reason.OUT_OF_CELLS


def test_apply_takes_hidden_cells_of_a_neighbour():
    """Trap 28. The neighbour's next token attends to all its cells; a longer rollback is refused.

    Before that it can roll back to any position (trap 97), and an empty sequence starts anywhere.
    """
    cache = parse_cache(SIX, NEAR)
    assert list_resumable(cache) == [*range(7)] and list_resumable(cache, seq=1) == [*range(10)]
    assert all(plan_of(jaxkv.seq_rm(cache, 0, pos)[0]).ok for pos in range(6))
    cache = apply_plan(cache, plan_of(cache, 2, 1))
    assert drawing(cache) == "0{1} 1{1} 2{0} 3{0} 4{0} 5{0}"
    assert list_resumable(cache) == [0, 5, 6]
    assert cache.seq_pos_min([0, 1]).tolist() == [2, 0]


def test_evicted_sequence_continues_after_its_last_token_and_moves():
    cache = add_tokens(POOL.make(), [1] * 4, each=1)
    cache = apply_plan(cache, plan_of(cache, 4, 1))
    assert drawing(cache) == "0{1} 1{1} 2{1} 3{1}" and list_resumable(cache) == [0, 4]
    moved, ok = jaxkv.seq_add(cache, 0, 0, -1, delta=2)
    assert ok and list_resumable(moved) == [0, 6]
    # A copy with an uncertain end is refused, although the target's own end is certain.
    holed = jaxkv.seq_add(add_tokens(cache, [1] * 4, 1, each=1), 1, 7, 8, delta=-7).cache
    assert drawing(holed).count("0{1}-7") == 1 and holed.table.evicted_below.tolist() == [4, 4]
    assert not jaxkv.seq_cp(holed, 1, 0, 0, 4).ok


def test_hybrid_cache_resumes_where_all_parts_do():
    parts = [replace(NEAR, cells=8, windows=(jaxkv.Window.sliding(size),)) for size in (8, 3)]
    both = replace(NEAR, cells=8, windows=tuple(kind.windows[0] for kind in parts))
    ends = [
        list_resumable(add_tokens(kind.make(), [1] * 12, each=1), visible_until=13)
        for kind in (*parts, both)
    ]
    assert ends == [[0, 11, 12], [0, *range(6, 13)], [0, 11, 12]]


@core
def test_edits_of_an_evicted_chunk_leave_a_certain_next_position_or_are_refused():
    cache = apply_plan(parse_cache(SIX, BLOCKS), plan_of(parse_cache(SIX, BLOCKS), 4, 1))
    assert drawing(cache) == "0{1} 1{1} 2{1} 3{1} 4{0} 5{0}"
    for _, ok in (jaxkv.seq_rm(cache, 0, 4), jaxkv.seq_cp(cache, 0, 2, 0, 4)):
        assert not ok
    # All tokens of 0 are evicted, so each copy continues at 4, also after a cut of its own tokens.
    cache = parse_cache("0{0} 1{0} 2{0} 3{0} 0{2} 1{2} 2{2}", replace(BLOCKS, cells=7))
    cache, ok = jaxkv.seq_cp(apply_plan(cache, plan_of(cache, 4, 1)), 0, 2)
    assert ok and cache.can_resume(2, 4)
    cache, ok = jaxkv.seq_rm(cache, 2, 2, 3)
    assert ok


def test_apply_plan_made_before_marks_changed_is_stale():
    """Removing evicted positions changes no cell, only the mark."""
    cache = add_tokens(NEAR.make(), [1] * 8, each=1)
    assert drawing(cache) == "6{0} 7{0} 2{0} 3{0} 4{0} 5{0}"
    assert list_resumable(cache) == [0, 5, 6, 7, 8]
    assert plan_of(cache).check().ubatches[0].positions[0, 0] == 8
    edited, _ = jaxkv.seq_rm(cache, 0, 0, 2)
    assert drawing(edited) == drawing(cache) and list_resumable(edited) == [*range(9)]
    assert_identical(apply_plan(edited, plan_of(cache)), edited)


@core
@pytest.mark.parametrize("kind", [POOL, EACH], ids=str)
def test_marks_never_fall_when_moved_cells_are_taken(kind):
    """A cell moved to a position before the evicted ones is evicted like others."""
    cache = jaxkv.seq_add(add_tokens(kind.make(), [1] * 6, each=1), 0, 3, -1, delta=-3).cache
    cache = jaxkv.apply(cache, jaxkv.init_update(cache))
    assert sorted(drawing(cache).rstrip(" |").split()) == ["0{0}", "1{0}", "2{0}", "2{0}"]
    assert list_resumable(cache) == [0, 1, 2, 3]
    cache = add_tokens(cache, [1], each=1)
    assert sorted(drawing(cache).rstrip(" |").split()) == [".", "2{0}", "2{0}", "3{0}"]
    assert list_resumable(cache) == [0, 3, 4]


WINDOWS = Window.sliding(4), Window.chunked(4), Window.symmetric(6)
SIZED = [(Window.chunked(4), 2, 2), *product(WINDOWS, (1, 2), (8,))]


@pytest.mark.parametrize(("window", "streams", "each"), mark_cases(SIZED, core=SIZED[:1]))
def test_make_cache_sized_by_window_matches_a_large_one(window, streams, each):
    """Cells for window, ubatch and rollback suffice for a sequence of any length.

    It comes in batches of `each` tokens, of which two are rolled back.
    """
    sizes = dict(layers=2, kv_heads=2, head_dim=4, sequences=2, streams=streams, window=window)
    sizes["rope"] = jaxkv.Rope.make(4, base=100.0)
    small = attention_cache(**sizes, ubatch_size=4, max_rollback=2)
    large = attention_cache(**sizes, cells=96)
    assert small.buffers.k[0].shape[2] == (window.width + 6) * 2 // streams
    rng = np.random.default_rng(0)
    for i in range(32 // each):
        batch = make_batch(rng.integers(1, 9, 2 * each), sequences=np.arange(2 * each) % 2)
        small, one = run_batch(small, batch)
        large, other = run_batch(large, batch)
        np.testing.assert_allclose(one, other, atol=1e-5)
        if i % 3 == 2:
            last = large.seq_pos_max(1)
            small, large = (jaxkv.seq_rm(cache, 1, last - 1)[0] for cache in (small, large))


def test_sequence_alone_in_a_stream_needs_as_many_cells_as_its_window():
    kind = Kind("exact", cells=4, sequences=2, streams=2, windows=NEAR.windows)
    cache = add_tokens(add_tokens(kind.make(), [1] * 9, each=1), [1] * 6, seq=1, each=1)
    assert cache.seq_pos_max([0, 1]).tolist() == [8, 5]
    assert cache.num_used_cells() == 8
