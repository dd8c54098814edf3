"""`seq_add` and `seq_div`: positions and pending shifts of cells, and positions of states."""

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import make_batch
from tests.helpers import edit_sequences
from tests.helpers.caches import SMALL, Kind, apply_update, assert_identical, drawing, parse_cache
from tests.helpers.steps import apply_batch

BIG = 2**31 - 1
SHIFT = Kind("shift", cells=8, sequences=2)


def shift(cache, p0, p1, delta):
    cache, ok = jaxkv.seq_add(cache, 0, p0, p1, delta=delta)
    assert ok
    return cache


def test_seq_add_of_lists_equals_the_loop():
    cache = parse_cache("0{0} 1{0} 2{0} 0{1} 1{1}", SHIFT)
    ids, starts, ends, deltas = [0, 1, 0, 1], [1, 0, 2, 5], [-1, 1, -1, 9], [2, 2**31 - 2, -1, 7]
    after, flags = cache, []
    for seq, p0, p1, delta in zip(ids, starts, ends, deltas, strict=True):
        after, ok = jaxkv.seq_add(after, seq, p0, p1, delta=delta)
        flags.append(ok.item())
    result = jaxkv.seq_add(cache, ids, starts, ends, delta=deltas)
    assert_identical(result.cache, after)
    assert result.ok.tolist() == flags == [True, True, True, True]
    far = jax.jit(jaxkv.seq_add)(cache, np.array([0, 1]), [-2, 1], -1, delta=2**31 - 2)
    names = [jaxkv.Reason(code).name for code in far.reason.tolist()]
    assert names == ["ARGUMENT_OUT_OF_RANGE", "POSITION_OUT_OF_RANGE"]
    assert_identical(far.cache, cache)


@pytest.mark.parametrize(
    ("before", "verb", "after"),
    [
        # Trap 10: a shared cell moves for every owner.
        (
            "0{0,1} 1{0,1} 2{0,1} 3{0}", lambda m: shift(m, 2, -1, 5),
            "0{0,1} 1{0,1} 7{0,1}+5 8{0}+5",
        ),
        # Trap 11: a position that turns negative frees the cell for all.
        ("0{0,1} 1{0} 2{0}", lambda m: shift(m, 0, -1, -2), ". . 0{0}-2"),
        # Trap 12: shifts add up to one rotation.
        ("0{0} 1{0}", lambda m: shift(shift(m, 0, -1, 3), 0, -1, -1), "2{0}+2 3{0}+2"),
        # Trap 13: shifts that cancel leave none pending.
        ("0{0} 1{0}", lambda m: shift(shift(m, 0, -1, 3), 3, -1, -3), "0{0} 1{0}"),
        # Trap 14: a freed cell has no pending shift.
        ("0{0} 8{0}+3", lambda m: jaxkv.seq_rm(m, 0, 8)[0], "0{0}"),
        # Trap 15: after a division the shift is the new position minus the old one.
        (
            "3{0} 4{0} 5{0} 6{0} 7{0}", lambda m: jaxkv.seq_div(m, 0, 4, 8, divisor=2).cache,
            "3{0} 2{0}-2 2{0}-3 3{0}-3 3{0}-4",
        ),
        # Trap 16: two cells then share a position, and removing it removes both.
        ("0{0} 1{0} 1{0}-1 2{0}-1", lambda m: jaxkv.seq_rm(m, 0, 1, 2)[0], "0{0} . . 2{0}-1"),
    ],
)  # fmt: skip
def test_seq_add_and_seq_div_move_positions(before, verb, after):
    cache = parse_cache(before, SHIFT)
    moved = verb(cache)
    assert drawing(moved) == after
    assert jaxkv.init_update(moved).num_changes == after.count("+") + after.count("-")
    assert moved.buffers.k[0] is cache.buffers.k[0]
    if after == before:  # returns the same object
        assert apply_update(moved) is moved and jaxkv.init_batch(moved, jaxkv.make_batch([1])).ok


@pytest.mark.core
@pytest.mark.parametrize("make", [SMALL.make, edit_sequences.make], ids=["cells", "states"])
def test_seq_add_or_token_to_int32_max_is_refused(make):
    """2**31 - 1 is one past the last position."""
    cache = make()
    assert not jaxkv.init_batch(cache, make_batch([1], positions=[BIG])).ok
    cache = apply_batch(cache, [1], positions=[BIG - 1])
    assert cache.seq_pos_min(0) == BIG - 1
    assert not jaxkv.init_batch(cache, make_batch([2])).ok
    assert not jaxkv.seq_rm(cache, 0)[0].num_used_cells()
    for delta in (1, 2, BIG):
        assert not cache.can_seq_add(0, 0, -1, delta=delta)
        same, ok = jaxkv.seq_add(cache, 0, 0, -1, delta=delta)
        assert not ok
        assert_identical(same, cache)
    assert cache.can_seq_add(0, 9, -1, delta=-5)
    moved, ok = jaxkv.seq_add(cache, 0, 9, -1, delta=-5)
    assert ok and moved.seq_pos_max(0) == BIG - 6


@pytest.mark.core
def test_shifts_drop_earlier_states_at_the_position_of_a_later_one():
    cache = edit_sequences.make_filled_twin(kept=3, counts=(6,)).cache
    assert cache.table.position[0].tolist() == [2, 3, 4, 5]
    shifted, ok = jaxkv.seq_add(cache, 0, 5, -1, delta=-1)
    assert ok and shifted.table.position[0].tolist() == [-1, 2, 3, 4]
    divided, ok = jaxkv.seq_div(cache, 0, 4, -1, divisor=2)
    assert ok and divided.table.position[0].tolist() == [-1, -1, -1, 2]
