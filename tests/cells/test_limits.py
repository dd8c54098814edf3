"""The edges of what numbers, positions, sequences and bits of stamps may be, where all is well."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import make_batch
from jaxkv.kv import slots
from jaxkv.stamp import content
from tests.memories import GROUPS, SMALL, SPLIT, WIDE, WINDOW, assert_identical, drawn

BIG = 2**31 - 1
STATES = {"x": ((), jnp.float32)}


def states():
    return jaxkv.make_recurrent_cache(layers=1, states=STATES, sequences=3)


# -------------------------------------------------------------------------- ids and positions


def test_traced_bound_below_open_is_open():
    memory = drawn("0{0} 1{0} 0{1}")
    cut = jax.jit(lambda at: jaxkv.seq_rm(memory, 0, at)[0])
    assert_identical(cut(-2), cut(-1))


def test_traced_unsigned_id_out_of_range_changes_nothing():
    memory = drawn("0{0} 1{0} 0{1}")
    cut = jax.jit(lambda seq: jaxkv.seq_rm(memory, seq)[0])
    for seq in (2**32 - 1, 2**31, 3):
        assert_identical(cut(jnp.uint32(seq)), memory)


@pytest.mark.parametrize(
    "make", [SMALL.make, pytest.param(states, marks=pytest.mark.core)], ids=["cells", "states"]
)
def test_seq_add_to_int32_max_is_refused(make):
    """2**31 - 1 is one past the last position."""
    memory = make()
    memory = jaxkv.apply(memory, jaxkv.init_batch(memory, make_batch([1], positions=[BIG - 1])))
    for delta in (1, 2, BIG):
        assert not jaxkv.can_seq_add(memory, 0, 0, -1, delta)
        assert_identical(jaxkv.seq_add(memory, 0, 0, -1, delta), memory)
    assert jaxkv.can_seq_add(memory, 0, 0, -1, -5)
    assert jaxkv.seq_pos_max(jaxkv.seq_add(memory, 0, 0, -1, -5), 0) == BIG - 6


def test_init_batch_at_int32_max_is_refused():
    assert not jaxkv.init_batch(drawn(f"{BIG - 1}{{0}}"), make_batch([2])).ok
    assert not jaxkv.init_batch(SMALL.make(), make_batch([1], positions=[BIG])).ok


@pytest.mark.core
def test_seq_add_of_lost_states_moves_where_they_ended():
    memory = states()
    memory = jaxkv.apply(memory, jaxkv.init_batch(memory, make_batch([1] * 8)))
    memory = jaxkv.seq_cp(memory, 0, 1, 0, 5)  # no state stands after position 4
    assert memory.table.dead_until.tolist() == [0, 5, 0]
    assert jaxkv.can_seq_add(memory, 1, 0, -1, BIG - 5)
    assert not jaxkv.can_seq_add(memory, 1, 0, -1, BIG - 4)
    assert jaxkv.can_seq_add(memory, 2, 0, -1, BIG)  # which is empty


# ------------------------------------------------------------------------------------- sizes


def test_make_hybrid_cache_takes_smallest_limits_of_parts():
    one = dict(layers=1, kv_heads=1, head_dim=4, window=jaxkv.window.sliding(4))
    parts = [
        *(jaxkv.make_kv_cache(**one, ubatch_size=size) for size in (8, 4)),
        *(jaxkv.make_recurrent_cache(layers=1, states=STATES, rollback=most) for most in (3, 5)),
    ]
    memory = jaxkv.make_hybrid_cache(*((part, (layer,)) for layer, part in enumerate(parts)))
    facts = jaxkv.split(memory)[0].facts
    assert (facts.ubatch_size, facts.rollback) == (4, 3)


def test_spared_counts_each_owner_of_a_cell_but_one():
    """By stream, and in words beside the first; an engine promises cells by it."""
    table = drawn("0{0,1} . 1{0} | 0{3} 1{3,2} 2{2,3}", GROUPS).table
    assert table.spared().tolist() == [1, 2]
    assert drawn("0{0,1,39} 1{0,39}", WIDE).table.spared().tolist() == [3]


@pytest.mark.parametrize(
    ("kind", "lengths", "at_once", "spared", "wanted"),
    [
        (SMALL, [6, 4, 2], 4, [0], [True]),
        (SMALL, [6, 4, 3], 4, [0], [False]),
        (SMALL, [6, 4, 3], 4, [1], [True]),
        (SPLIT, [8, 9, 0], 1, [0, 0, 0], [True, False, True]),
        (WINDOW, [99, 99, 99], 6, [0], [True]),  # of each, the two tokens that the next one sees
        (replace(WINDOW, cells=8), [8, 3, 0], 4, [2], [True]),
        (replace(WINDOW, cells=7), [8, 3, 0], 4, [2], [False]),
        (WINDOW, [5, 5, 2], 99, [0], [True]),  # never more than the texts are long
    ],
)
def test_can_hold_counts_cells_of_each_stream(kind, lengths, at_once, spared, wanted):
    """Shared ones once."""
    table, _ = jaxkv.split(kind.make())
    assert table.can_hold(np.array(lengths), at_once, np.array(spared)).tolist() == wanted


@pytest.mark.core
@pytest.mark.parametrize("size", [1, 5, 99])
def test_inspect_finds_last_positions_in_any_block_size(size, monkeypatch):
    """With blocks of 5 in 12 cells, the last block overlaps the one before it."""
    monkeypatch.setattr(slots, "BLOCK", size)
    table, _ = jaxkv.split(drawn("0{0} 1{0} 2{0} 3{0} 4{0} . . 0{1} 1{1} 2{1} 0{2}"))
    assert table.inspect(jnp.ones(3, bool)).last.tolist() == [4, 2, 0]


# ------------------------------------------------------------------------------------ stamps


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_content_depends_on_every_bit_of_an_embedding(dtype):
    """And on which number a bit stands in; in float64 with JAX's 64 bits enabled."""
    word = {np.float32: np.uint32, np.float64: np.uint64}[dtype]
    count = 8 * np.dtype(dtype).itemsize
    plain = np.array([1.5, -2.0], dtype)
    flips = np.array([plain.view(word)] * 2 * count)
    flips[:count, 0] ^= word(1) << np.arange(count, dtype=word)
    flips[count:, 1] ^= word(1) << np.arange(count, dtype=word)
    tokens = np.concatenate([[plain, plain[::-1]], flips.view(dtype)])
    with jax.enable_x64(dtype is np.float64):
        stamps = np.asarray(content(None, jnp.asarray(tokens[None])))
    assert len(set(stamps[0].tolist())) == 2 * count + 2
