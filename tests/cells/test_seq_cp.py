"""`seq_cp` and `seq_select` with one stream, with some, and with one for each sequence."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv.hybrid import compose_hybrid_cache
from jaxkv.kv.shift import CHUNK
from tests.cells.plans import BLOCKS, plan_of
from tests.cells.pools import FOUR, ONE, TWO, assert_copied, parse_random
from tests.helpers import edit_sequences
from tests.helpers.caches import (
    SMALL,
    SPLIT,
    Kind,
    assert_identical,
    drawing,
    fill_cache,
    parse_cache,
)
from tests.helpers.edit_sequences import make_filled_twin
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import apply_plan

pytestmark = pytest.mark.core
LONG = Kind("long, two each", cells=600, sequences=6, streams=3)
NEAR = Kind("window", cells=6, sequences=4, streams=2, windows=(jaxkv.Window.sliding(2),))
WIDE = Kind("wide", cells=12, sequences=80, streams=2)


@pytest.mark.parametrize(
    ("kind", "before", "dst", "first", "after"),
    [
        (ONE, "2{0}+2 3{0}+2 0{1} 0{2}", [1, 3], 3, "2{0}+2 3{0,1,3}+2 0{1} 0{2}"),
        (
            TWO, "2{0}+2 3{0}+2 4{0}+2 0{1} | 0{2} 1{2} 0{3}", [1, 3], 3,
            "2{0}+2 3{0,1}+2 4{0,1}+2 0{1} | 0{2} 1{2} 3{3}+2 4{3}+2",
        ),
        # Once for all targets of a stream.
        (
            TWO, "2{0}+2 3{0}+2 4{0}+2 0{1} | 0{2} 1{2} 0{3}", [3, 2], 3,
            "2{0}+2 3{0}+2 4{0}+2 0{1} | 3{2,3}+2 4{2,3}+2",
        ),
        # A range without tokens (trap 31): targets in its stream merge, the others are emptied.
        (TWO, "0{0} 0{1} | 0{2} 0{3}", [1, 3], 5, "0{0} 0{1} | 0{2}"),
        (
            FOUR, "2{0}+2 3{0}+2 4{0}+2 | 0{1} 1{1} | 0{2} | 0{3} 1{3} 2{3} 5{3}", [1, 3], 3,
            "2{0}+2 3{0}+2 4{0}+2 | . 3{1}+2 4{1}+2 | 0{2} | . 3{3}+2 4{3}+2",
        ),
    ],
)  # fmt: skip
def test_seq_cp_shares_in_a_stream_and_copies_to_others(kind, before, dst, first, after):
    """Any range (trap 30), with pending shifts (trap 33, trap 34), and immediately.

    llama.cpp copies in the next decode; saving, restoring or clearing before that fails (trap 32,
    trap 35, trap 36, trap 37).
    """
    cache = parse_random(before, kind)
    copied = jaxkv.seq_cp(cache, 0, dst, first).cache
    assert drawing(copied).strip(" |") == after.strip(" |")
    assert_copied(cache, copied, dict.fromkeys(dst, 0), first, 2**31, merges=True)
    assert drawing(jaxkv.clear(copied)).strip(" |") == ""
    if kind is ONE:
        assert copied.buffers.k[0] is cache.buffers.k[0]
    assert jaxkv.seq_cp(copied, 0, dst, first).cache.num_used_cells() == copied.num_used_cells()


@pytest.mark.parametrize(
    ("copy", "kind", "cells", "args"),
    [
        (jaxkv.seq_cp, TWO, "0{0} 1{0} | 0{2}", (0, [1, 3])),
        (jaxkv.seq_select, FOUR, "0{0} 1{0} | 0{1}", ([1, 0], [0, 1])),
    ],
)
def test_copy_donated_is_the_same_and_deletes(copy, kind, cells, args):
    wanted, cache = (parse_random(cells, kind) for _ in range(2))
    assert_identical(copy(cache, *args, donate=True).cache, copy(wanted, *args).cache)
    assert all(x.is_deleted() for x in jax.tree.leaves(cache.buffers))


def test_seq_cp_more_cells_than_a_chunk():
    cache, targets = parse_random(" ".join(f"{i}{{0}}" for i in range(520)), LONG), [5, 2, 4]
    for end in (CHUNK + 1, 519):  # the second chunk's first cell is the last one, or is not
        copied = jaxkv.seq_cp(cache, 0, targets, 3, end).cache
        assert_copied(cache, copied, dict.fromkeys(targets, 0), 3, end)
        assert copied.num_used_cells() == 520 + (end - 3) * 2


def is_refused(cache, *args):
    """Whether a copy is refused and leaves the cache unchanged, with and without `jit`."""
    answers = [copy(cache, *args) for copy in (jaxkv.seq_cp, jax.jit(jaxkv.seq_cp))]
    for same, _ in answers:
        assert_identical(same, cache)
    return not any(ok for _, ok in answers)


def test_seq_cp_hybrid_copies_in_all_parts_or_none():
    """The part with a window can evict cells, the other one cannot."""
    kinds = replace(NEAR, windows=(None,)), NEAR
    parts = [parse_cache("0{0} 1{0} 2{0} | 0{2} 1{2} 2{2} 3{2}", kind) for kind in kinds]
    copies = [jaxkv.seq_cp(part, 0, [1, 3]) for part in parts]
    assert [ok.item() for _, ok in copies] == [False, True]
    assert copies[1].cache.table.evicted_below.tolist() == [0, 0, 1, 0]
    cache = compose_hybrid_cache(*zip(parts, ((0, 1), (2, 3)), strict=True))
    assert is_refused(cache, 0, [1, 3])


def test_seq_cp_traced_unknown_sequence_changes_nothing():
    """Also if the last sequence, where an index past the end is clamped, has an evicted cell."""
    parts = [
        parse_cache("0{0} 1{0} | 0{3} 1{3} 2{3}", replace(NEAR, windows=(None,))),
        parse_cache("0{0} 1{0} | . 1{3} 2{3}", NEAR),
    ]
    evicted = replace(parts[1].table, evicted_below=jnp.array([0, 0, 0, 1]))
    parts[1] = jaxkv.cache.merge(evicted, parts[1].buffers)
    cache = compose_hybrid_cache(*zip(parts, ((0, 1), (2, 3)), strict=True))
    copy = jax.jit(jaxkv.seq_cp)
    for src, dst in ((4, 0), (4, 3), (9, 2), (0, 4), (3, 7)):
        answer = copy(cache, src, dst)
        assert answer.ok, (src, dst)
        assert_identical(answer.cache, cache)


def test_seq_cp_two_words_of_owners():
    cells = "0{0} 1{0} 0{39} 1{39} | 0{40} 0{79} 1{79}"
    copied = jaxkv.seq_cp(parse_random(cells, WIDE), 39, [33, 78, 41]).cache
    assert copied.table.owners.shape[1] == 2
    assert drawing(copied) == "0{0} 1{0} 0{33,39} 1{33,39} | 0{40} 0{79} 1{79} 0{41,78} 1{41,78}"
    assert copied.seq_pos_max([0, 33, 39, 40, 41, 78]).tolist() == [1, 1, 1, 0, 1, 1]


def test_seq_cp_of_no_state_to_itself_and_another_is_refused():
    cache = make_filled_twin(kept=0, counts=(3, 2)).cache
    copied, ok = jaxkv.seq_cp(cache, 0, [0, 1], 0, 2)
    assert not ok and cache.can_resume(0, 0)
    assert_identical(copied, cache)


@pytest.mark.parametrize("kept", mark_cases([0, 3], [0]))
def test_seq_cp_fork_that_goes_on_leaves_its_origin(kept):
    """Trap 68; and a cell is always free, for any order of forks and steps."""
    twin = make_filled_twin(kept=kept, counts=(5, 0, 0))
    twin.edit("seq_cp", 0, [1, 2])
    assert twin.cache.num_used_cells() == kept + 1
    for turn in range(5):
        twin.edit("seq_cp", turn % 3, [(turn + 1) % 3])
        for seq in (0, 2, 1):
            assert twin.decode([seq] * (4 - turn % 4 // 2 * 2))
            twin.compare()
    assert twin.cache.num_used_cells() == 3 * (kept + 1)


@pytest.mark.parametrize("kept", [0, 2])
def test_seq_cp_into_a_full_stream_takes_the_cells_of_its_target(kept):
    twin = edit_sequences.Twin("r", kept=kept, sequences=4, streams=2)
    for seq in range(4):
        assert twin.decode([seq] * (kept + 1))
    twin.edit("seq_cp", 0, [2])
    twin.compare()
    assert twin.cache.num_used_cells() == 4 * (kept + 1)


def test_seq_cp_hybrid_of_an_evicted_chunk_ends_where_all_parts_do():
    kinds = replace(BLOCKS, cells=8, windows=(None,)), replace(BLOCKS, cells=4)
    parts = [parse_cache("0{0} 1{0} 2{0} 3{0}", kind) for kind in kinds]
    cache = compose_hybrid_cache(*zip(parts, ((0, 1), (2, 3)), strict=True))
    cache, ok = jaxkv.seq_cp(apply_plan(cache, plan_of(cache, 4, 1)), 0, 2)
    assert ok and cache.can_resume(2, 4)


@pytest.mark.parametrize("kind", [TWO, FOUR], ids=str)
def test_seq_select_sequences_change_places(kind):
    """Between streams; cells to copy are not reused, although they have no owner any longer."""
    cells = "0{0} 1{0} 2{0} 0{1} | 0{2} 1{2}" if kind is TWO else "0{0} 1{0} 2{0} | 0{1} | 0{2}"
    cache = parse_random(cells, kind)
    for select in (jaxkv.seq_select, jax.jit(jaxkv.seq_select)):
        swapped, _ = select(cache, [2, 0, 0], [0, 2, 1])
        assert_copied(cache, swapped, {0: 2, 1: 0, 2: 0})
        if kind is TWO:
            assert drawing(swapped) == "0{1} 1{1} 2{1} 0{0} 1{0} | . . 0{2} 1{2} 2{2}"
            swapped, _ = jaxkv.seq_select(cache, [0, 1], [1, 0])
            assert swapped.buffers.k[0] is cache.buffers.k[0]


@pytest.mark.parametrize("kind", [SMALL, SPLIT], ids=str)
def test_seq_select_traced_unknown_ids_change_nothing(kind):
    cache = fill_cache(3, 2, 4, kind=kind)
    select = jax.jit(lambda *args: jaxkv.seq_select(*args).cache)
    assert_identical(jaxkv.seq_select(cache, [], []).cache, cache)
    for parents, ids in (([3, -1, 1], [0, 1, 1]), ([0, 0, 2], [3, -1, 2])):
        assert_identical(select(cache, jnp.array(parents), jnp.array(ids)), cache)
    last = select(cache, jnp.array([1, 0, 2]), jnp.array([0, 1, 1]))  # the last one of two counts
    assert last.seq_pos_max([0, 1, 2]).tolist() == [1, 3, 3]


def test_seq_select_copies_of_one_and_of_three_states_get_separate_cells():
    twin = edit_sequences.Twin("r", kept=2, sequences=4, streams=2)
    assert twin.decode([0]) and twin.decode([1] * 4)
    twin.edit("seq_select", [0, 1], [2, 3])
    twin.compare()
    assert twin.cache.num_used_cells() == 8


def test_seq_select_of_states_into_two_streams_takes_free_cells_of_each():
    twin = edit_sequences.Twin("r", kept=0, sequences=4, streams=2)
    assert twin.decode([0, 2])
    twin.edit("seq_select", [0, 2], [3, 1])
    twin.compare()
    assert twin.cache.num_used_cells() == 4
