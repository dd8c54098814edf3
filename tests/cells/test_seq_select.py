"""`seq_select` with one stream, with some, and with one for each sequence."""

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from tests.cells.pools import FOUR, TWO, assert_copied, parse_random
from tests.helpers import edit_sequences
from tests.helpers.caches import SMALL, SPLIT, assert_identical, drawing, fill_cache


@pytest.mark.core
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


@pytest.mark.core
@pytest.mark.parametrize("kind", [SMALL, SPLIT], ids=str)
def test_seq_select_traced_unknown_ids_change_nothing(kind):
    cache = fill_cache(3, 2, 4, kind=kind)
    select = jax.jit(lambda *args: jaxkv.seq_select(*args).cache)
    assert_identical(jaxkv.seq_select(cache, [], []).cache, cache)
    for parents, ids in (([3, -1, 1], [0, 1, 1]), ([0, 0, 2], [3, -1, 2])):
        assert_identical(select(cache, jnp.array(parents), jnp.array(ids)), cache)
    last = select(cache, jnp.array([1, 0, 2]), jnp.array([0, 1, 1]))  # the last one of two counts
    assert last.seq_pos_max([0, 1, 2]).tolist() == [1, 3, 3]


@pytest.mark.core
def test_seq_select_copies_of_one_and_of_three_states_get_separate_cells():
    twin = edit_sequences.Twin("r", kept=2, sequences=4, streams=2)
    assert twin.decode([0]) and twin.decode([1] * 4)
    twin.edit("seq_select", [0, 1], [2, 3])
    twin.compare()
    assert twin.cache.num_used_cells() == 8


@pytest.mark.core
def test_seq_select_of_states_into_two_streams_takes_free_cells_of_each():
    twin = edit_sequences.Twin("r", kept=0, sequences=4, streams=2)
    assert twin.decode([0, 2])
    twin.edit("seq_select", [0, 2], [3, 1])
    twin.compare()
    assert twin.cache.num_used_cells() == 4
