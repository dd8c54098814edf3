"""Questions: what a cache holds, and what it can do. Nothing is stored to answer them.

Ids and ranges are read as in `jaxkv.api.edits`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.api.arguments import Ids, position, sequence, single_bounds
from jaxkv.cache import Cache, CacheTable, split
from jaxkv.jit_helpers import jit_method, jit_table


def seq_pos_min(cache: Cache, seq: Ids) -> jax.Array:
    """Return the smallest position that a sequence holds.

    Args:
      cache: any cache.
      seq: `[]` or `[n]` int, one sequence id or many.

    Returns:
      int32, the shape of `seq`; -1 for a sequence that holds nothing.

    Raises:
      ValueError: when an id is known and is none of the cache.

    Examples:
      >>> seq_pos_min(
      ...     make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=6), 0
      ... ).item()
      -1

    llama.cpp: `llama_memory_seq_pos_min`.
    """
    table, _ = split(cache)
    return _first(table, table.spec.sequence_ids(seq))


def seq_pos_max(cache: Cache, seq: Ids) -> jax.Array:
    """Return the largest position that a sequence holds; its next token comes one after it.

    Args:
      cache: any cache.
      seq: `[]` or `[n]` int, one sequence id or many.

    Returns:
      int32, the shape of `seq`; -1 for a sequence that holds nothing.

    Raises:
      ValueError: when an id is known and is none of the cache.

    Examples:
      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=6, sequences=2
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
      >>> seq_pos_max(cache, [0, 1]).tolist()
      [2, -1]

    llama.cpp: `llama_memory_seq_pos_max`.
    """
    table, _ = split(cache)
    return _last(table, table.spec.sequence_ids(seq))


def num_used_cells(cache: Cache) -> jax.Array:
    """Return how many cells hold a token, or a state; `[]` int32.

    A cell that several sequences share counts once. In a hybrid cache the cells of all parts are
    added up, since each holds a token's keys for layers of its own; see `Cache.parts`.

    Examples:
      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=6, sequences=2
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
      >>> num_used_cells(seq_cp(cache, 0, 1).cache).item()
      3

    llama.cpp: `llama_kv_cells::get_used`.
    """
    table, _ = split(cache)
    return _used(table)


def can_seq_add(cache: Cache, seq: Ids, p0: Ids, p1: Ids, delta: Ids) -> jax.Array:
    """Return whether `seq_add` would leave every sequence one token a position.

    It may not where sequences share cells: these move for every owner, and an owner may hold others
    at the positions that they come to.

    Args:
      cache: any cache.
      seq: `[]` int, the sequence.
      p0: `[]` int, the first position that moves.
      p1: `[]` int, one past the last.
      delta: `[]` int, how far they move.

    Returns:
      `[]` bool; False, too, where a position would reach 2**31 - 1. Of states, which stand at one
      position each, nothing else can go wrong.

    Examples:
      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, rope=None), cells=6, sequences=2
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3, 4])))
      >>> fork, _ = seq_cp(cache, 0, 1)
      >>> fork, _ = seq_rm(fork, 0, 0, 2)
      >>> can_seq_add(fork, 0, 2, -1, -2).item()  # sequence 1 still has tokens at 0 and 1
      False
      >>> can_seq_add(seq_keep(fork, 0).cache, 0, 2, -1, -2).item()
      True
    """
    table, buffers = split(cache)
    table.check_moves(buffers)
    args = sequence(table, seq), *single_bounds(p0, p1), position(delta, "delta")
    return _can_add(table, *args)


def can_resume(cache: Cache, seq: Ids, pos: Ids) -> jax.Array:
    """Return whether a sequence can go on at a position once what lies from there on is removed.

    It can where `seq_rm(cache, seq, pos)` is granted and the next token then stands at `pos`: a
    token there sees all that its window reaches, or a state stands before it. What was removed from
    the middle of a text is not missed.

    Args:
      cache: any cache.
      seq: `[]` int, the sequence.
      pos: `[]` int, where its next token would stand.

    Returns:
      `[]` bool. An empty sequence can start anywhere, and any can at 0.

    Examples:
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=4)
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
      >>> [can_resume(cache, 0, pos).item() for pos in (0, 2, 3, 4)]
      [True, True, True, False]
    """
    table, _ = split(cache)
    return _can_resume(table, sequence(table, seq), position(pos, "pos"))


def nbytes(cache: Any) -> int:
    """Return the bytes of a cache, or of a half of one; also of their shapes alone.

    Examples:
      >>> make = lambda: make_cache(
      ...     CacheSpec.attention(layers=2, kv_heads=8, head_dim=128), cells=4096
      ... )
      >>> nbytes(jax.eval_shape(make)) // 2**20
      64
    """
    leaves = jax.tree.leaves(cache)
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)


def check_invariants(cache: Cache) -> dict[str, jax.Array]:
    """Return how much is wrong with the table of a cache.

    Returns:
      For each thing that can be wrong, `[]` int32, how many cells or sequences are at fault. All
      are 0 unless a table was made by hand.

    Examples:
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=4)
      >>> sum(check_invariants(cache).values()).item()
      0
    """
    table, _ = split(cache)
    return _faults(table)


_used = jit_method(CacheTable.num_used_cells)
_can_add = jit_method(CacheTable.can_add)
_can_resume = jit_method(CacheTable.can_resume)
_faults = jit_method(CacheTable.faults)


@jit_table
def _first(table: Any, seq: jax.Array) -> jax.Array:
    """Return the first position of each sequence, int32, the shape of `seq`."""
    return jax.lax.map(table.first, jnp.ravel(seq)).reshape(seq.shape)


@jit_table
def _last(table: Any, seq: jax.Array) -> jax.Array:
    """Return the last position of each sequence, int32, the shape of `seq`."""
    return jax.lax.map(table.last, jnp.ravel(seq)).reshape(seq.shape)
