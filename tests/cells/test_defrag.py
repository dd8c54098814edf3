"""Defragmentation: complete or in chunks of any size; the tokens of all sequences are unchanged."""

import pytest

import jaxkv
from tests.cells.pools import parse_random, texts_of
from tests.helpers.caches import TILES, Kind, drawing
from tests.helpers.steps import apply_plan

core = pytest.mark.core
POOL = Kind("pool", cells=24, sequences=2)


def make_cache_with_holes(keep, kind=POOL):
    """A cache whose cells in `keep` are used; sequence 0 owns those in the first half."""
    half = kind.cells // 2
    cells = [f"{i % half}{{{i // half}}}" if i in keep else "." for i in range(kind.cells)]
    return parse_random(" ".join(cells), kind)


PATTERNS = [range(0, 24, 2), range(17, 24), [0, 1, 5, 6, 7, 11, 19, 20, 23], [23], [], range(9)]


@pytest.mark.parametrize("max_moves", [2, pytest.param(None, marks=core)])
def test_defrag_repeated_closes_all_gaps(max_moves):
    for keep in PATTERNS:
        cache = make_cache_with_holes(keep)
        before, rounds = texts_of(cache), 0
        while (plan := jaxkv.defrag_plan(cache, max_moves=max_moves)).num_changes:
            cache = apply_plan(cache, plan)
            assert texts_of(cache) == before
            assert not any(cache.check().values())
            rounds += 1
            assert rounds <= (1 if max_moves is None else 12)
        assert "." not in drawing(cache).split()
        assert apply_plan(cache, plan) is cache  # returns the same object


@core
def test_defrag_moves_more_cells_than_a_chunk():
    cache = make_cache_with_holes(range(0, 1200, 2), Kind("long", cells=1200, sequences=2))
    after = jaxkv.apply(cache, jaxkv.defrag_plan(cache))
    assert "." not in drawing(after).split() and texts_of(after) == texts_of(cache)


@core
def test_defrag_of_tiles_moves_used_tiles_to_the_first_places():
    size = TILES.make().table.placement.tile(TILES.cells)
    count = TILES.cells // size
    for used in ({count - 1}, {0, 2, 3}, {1, 2}, {0, count - 2, count - 1}):
        cache = make_cache_with_holes({size * tile + 1 for tile in used}, TILES)
        after = jaxkv.apply(cache, jaxkv.defrag_plan(cache))
        tiles = (after.table.position >= 0).reshape(count, size).any(axis=1)
        assert tiles.tolist() == [tile < len(used) for tile in range(count)]
        assert texts_of(after) == texts_of(cache)
