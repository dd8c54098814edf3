"""Closing gaps: complete, in chunks of any size, with the tokens of every sequence as they were."""

from functools import partial

import jax
import pytest

import jaxkv
from tests import hlo
from tests.cells.pools import noisy, texts_of
from tests.memories import Kind, assert_identical, drawing, drawn

core = pytest.mark.core
POOL = Kind("pool", cells=24, sequences=2)


def holed(keep, kind=POOL):
    """A memory of which the cells in `keep` are used, the first half of the cells by sequence 0."""
    half = kind.cells // 2
    cells = [f"{i % half}{{{i // half}}}" if i in keep else "." for i in range(kind.cells)]
    return noisy(" ".join(cells), kind)


def is_compact(memory):
    return "." not in drawing(memory).split()


PATTERNS = {
    "every second": range(0, 24, 2),
    "the end": range(17, 24),
    "mixed": [0, 1, 5, 6, 7, 11, 19, 20, 23],
    "one at the end": [23],
    "nothing": [],
    "full": range(24),
    "already compact": range(9),
}


@pytest.mark.parametrize("max_moves", [2, *(pytest.param(most, marks=core) for most in (None, 1))])
def test_defrag_repeated_closes_all_gaps(max_moves):
    for keep in PATTERNS.values():
        memory = holed(keep)
        before, rounds = texts_of(memory), 0
        while (plan := jaxkv.defrag_plan(memory, max_moves=max_moves)).count.any():
            memory = jaxkv.apply(memory, plan)
            assert texts_of(memory) == before
            assert not any(jaxkv.check_invariants(memory).values())
            rounds += 1
            assert rounds <= (1 if max_moves is None else 24)
        assert is_compact(memory)
        assert jaxkv.apply(memory, plan) is memory  # nothing to do costs nothing


def test_defrag_plan_merges_runs_and_begins_at_the_end():
    plan = jaxkv.defrag_plan(holed({0, 3, 4, 5, 10, 11, 12}), max_moves=2)
    moves = [x[0, :2].tolist() for x in (plan.source, plan.destination, plan.length)]
    assert plan.count[0] == 2 and moves == [[12, 10], [6, 1], [1, 2]]


@core
def test_defrag_moves_more_cells_than_a_chunk():
    memory = holed(range(0, 1200, 2), Kind("long", cells=1200, sequences=2))
    after = jaxkv.apply(memory, jaxkv.defrag_plan(memory))
    assert is_compact(after) and texts_of(after) == texts_of(memory)


def test_defrag_of_another_table_changes_nothing():
    memory = holed({0, 5, 15})
    plan = jaxkv.defrag_plan(memory, max_moves=2)
    other, _ = jaxkv.seq_rm(memory, 1, 3, 4)  # cell 15, a source
    filled = drawn("0{0} 1{0} . . . 5{0} . . . . . . . . . 3{1}", POOL)
    for edited in (other, filled):
        assert_identical(jaxkv.apply(edited, plan), edited)


def test_defrag_moves_pending_shifts_with_their_cells():
    memory = drawn("0{0} . . 7{0}+2", POOL)
    memory = jaxkv.apply(memory, jaxkv.defrag_plan(memory, max_moves=2))
    assert drawing(memory) == "0{0} 7{0}+2"


def test_defrag_plan_max_moves_below_one_raises():
    with pytest.raises(ValueError, match="max_moves of at least 1, got 0"):
        jaxkv.defrag_plan(POOL.make(), max_moves=0)


@core
@pytest.mark.parametrize("plan_of", [jaxkv.defrag_plan, jaxkv.init_update])
def test_apply_moves_and_rotates_keys_in_chunks(plan_of):
    """What it holds beside its arguments does not grow with what it moves."""
    sizes = dict(layers=2, cells=16384, kv_heads=2, head_dim=64, rope=jaxkv.make_rope(64))
    memory = jax.eval_shape(partial(jaxkv.make_kv_cache, **sizes))
    plan = jax.eval_shape(plan_of, memory)
    compiled = jax.jit(jaxkv.apply, donate_argnums=0).lower(memory, plan).compile()
    one_layer = 16384 * 2 * 64 * 4
    assert hlo.temporary_bytes(compiled) < one_layer / 2
