"""Valid extremes: numbers, positions, sequences, window sizes and bits of hashes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import make_batch
from jaxkv.core.hashing import hash_contents
from jaxkv.hybrid import compose_hybrid_cache
from jaxkv.kv import cells
from tests.helpers import caches
from tests.helpers.caches import (
    GROUPS,
    SMALL,
    WINDOW,
    assert_identical,
    attention_cache,
    parse_cache,
)

pytestmark = pytest.mark.core

STATES = {"x": ((), jnp.float32)}


def test_seq_rm_traced_unsigned_id_out_of_range_is_unknown():
    cache = parse_cache("0{0} 1{0} 0{1}")
    cut = jax.jit(lambda seq: jaxkv.seq_rm(cache, seq)[0])
    for seq in (2**32 - 1, 2**31, 3):
        assert_identical(cut(jnp.uint32(seq)), cache)


def test_hybrid_cache_takes_smallest_limits_of_parts():
    one = dict(layers=1, kv_heads=1, head_dim=4, window=jaxkv.Window.sliding(4))
    parts = [attention_cache(**one, ubatch_size=size) for size in (8, 4)]
    parts += [caches.recurrent_cache(1, STATES, max_rollback=n) for n in (3, 5)]
    cache = compose_hybrid_cache(*((part, (i,)) for i, part in enumerate(parts)))
    assert (cache.table.spec.ubatch_size, cache.table.spec.max_rollback) == (4, 3)
    assert len(jaxkv.init_batch(cache, make_batch([1] * 8)).ubatches) == 2  # the default size


def test_spared_counts_each_owner_of_a_cell_but_one():
    """Per stream, and in words after the first; the engine uses it to reserve cells."""
    table = parse_cache("0{0,1} . 1{0} | 0{3} 1{3,2} 2{2,3}", caches.GROUPS).table
    assert table.num_cells_saved_by_sharing().tolist() == [1, 2]
    table = parse_cache("0{0,1,39} 1{0,39}", caches.WIDE).table
    assert table.num_cells_saved_by_sharing().tolist() == [3]


@pytest.mark.parametrize(
    ("kind", "lengths", "at_once", "spared", "wanted"),
    [
        (SMALL, [6, 4, 2], 4, [0], [True]),
        (SMALL, [6, 4, 3], 4, [0], [False]),
        (SMALL, [6, 4, 3], 4, [1], [True]),
        (caches.SPLIT, [8, 9, 0], 1, [0, 0, 0], [True, False, True]),
        (WINDOW, [99, 99, 99], 6, [0], [True]),  # of each, the two tokens in its window
        (replace(WINDOW, cells=8), [8, 3, 0], 4, [2], [True]),
        (replace(WINDOW, cells=7), [8, 3, 0], 4, [2], [False]),
        (WINDOW, [5, 5, 2], 99, [0], [True]),  # never more than their length
    ],
)
def test_can_hold_counts_cells_of_each_stream(kind, lengths, at_once, spared, wanted):
    table = kind.make().table
    assert table.can_allocate(np.array(lengths), at_once, np.array(spared)).tolist() == wanted


@pytest.mark.parametrize("size", [1, 5, 99])
def test_inspect_finds_last_positions_in_any_block_size(size, monkeypatch):
    """With blocks of 5 in 12 cells, the last block overlaps the one before it."""
    monkeypatch.setattr(cells, "BLOCK", size)
    table = parse_cache("0{0} 1{0} 2{0} 3{0} 4{0} . . 0{1} 1{1} 2{1} 0{2}").table
    assert table.sequence_status(jnp.ones(3, bool)).last.tolist() == [4, 2, 0]
    table = parse_cache("0{0} | 0{2} 1{2}", GROUPS).table
    assert table.sequence_status(jnp.arange(4) > 1).last.tolist() == [-1, -1, 1, -1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_content_depends_on_every_bit_of_an_embedding(dtype):
    """And on the index of the number with that bit; in float64 with 64-bit JAX."""
    count = 8 * np.dtype(dtype).itemsize
    plain = np.array([1.5, -2.0], dtype)
    flips = np.array([plain.view(f"uint{count}")] * 2 * count)
    for bit, other in enumerate(flips):
        other[bit // count] ^= other.dtype.type(1 << bit % count)
    tokens = np.concatenate([[plain, plain[::-1]], flips.view(dtype)])
    with jax.enable_x64(dtype is np.float64):
        stamps = np.asarray(hash_contents(None, jnp.asarray(tokens[None])))
    assert len(set(stamps[0].tolist())) == 2 * count + 2
