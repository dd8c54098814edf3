"""Asking a memory what it holds and what it can do. Nothing is stored to answer."""

import math
from typing import Any

import jax
import numpy as np

from jaxkv.memory import (
    split,
    table_can_resume,
    table_can_rm,
    table_faults,
    table_first,
    table_last,
    table_used,
)
from jaxkv.verbs.ids import Ids, checked_ids, whole


def seq_pos_min(memory: Any, seq: Ids) -> jax.Array:
    """Find the smallest position that a sequence holds.

    Args:
      memory: any memory.
      seq: `[]` or `[n]` int, one sequence id or many.

    Returns:
      int32, the shape of `seq`; -1 for a sequence that holds nothing.

    Raises:
      ValueError: when `seq` is known while tracing and is no sequence id.

    Examples:
      >>> seq_pos_min(make_kv_cache(layers=1, cells=6, heads=1, size=2), 0).item()
      -1

    llama.cpp: `llama_memory_seq_pos_min`.
    """
    table, _ = split(memory)
    return _first(table, checked_ids(table, seq))


def seq_pos_max(memory: Any, seq: Ids) -> jax.Array:
    """Find the largest position that a sequence holds: the next token comes one after it.

    Args:
      memory: any memory.
      seq: `[]` or `[n]` int, one sequence id or many.

    Returns:
      int32, the shape of `seq`; -1 for a sequence that holds nothing.

    Raises:
      ValueError: when `seq` is known while tracing and is no sequence id.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=6, sequences=2, heads=1, size=2)
      >>> memory = apply(memory, init_batch(memory, make_batch([1, 2, 3])))
      >>> seq_pos_max(memory, [0, 1]).tolist()
      [2, -1]

    llama.cpp: `llama_memory_seq_pos_max`.
    """
    table, _ = split(memory)
    return _last(table, checked_ids(table, seq))


def used(memory: Any) -> jax.Array:
    """Count the cells that hold a token; `[]` int32.

    A cell that several sequences share counts once.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=6, sequences=2, heads=1, size=2)
      >>> memory = apply(memory, init_batch(memory, make_batch([1, 2, 3])))
      >>> used(seq_cp(memory, 0, 1)).item()
      3
    """
    table, _ = split(memory)
    return _used(table)


def can_seq_rm(memory: Any, seq: Ids, p0: Ids = -1, p1: Ids = -1) -> jax.Array:
    """Ask whether `seq_rm` would be granted, without doing it; `[]` bool.

    Examples:
      >>> can_seq_rm(make_kv_cache(layers=1, cells=4, heads=1, size=2), 0, 2, 3).item()
      True
    """
    table, _ = split(memory)
    return _can_rm(table, checked_ids(table, seq, lowest=-1), whole(p0), whole(p1))


def can_resume(memory: Any, seq: Ids, pos: Ids) -> jax.Array:
    """Ask whether a sequence can go on at a position: would a token there see all it should?

    What lies from there on must be removed first (`seq_rm`).

    Args:
      memory: any memory.
      seq: `[]` int, the sequence.
      pos: `[]` int, where its next token would stand.

    Returns:
      `[]` bool. A sequence that holds nothing can start anywhere.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=4, heads=1, size=2)
      >>> memory = apply(memory, init_batch(memory, make_batch([1, 2, 3])))
      >>> [can_resume(memory, 0, pos).item() for pos in (0, 2, 3, 4)]
      [True, True, True, False]
    """
    table, _ = split(memory)
    return _can_resume(table, checked_ids(table, seq), whole(pos))


def nbytes(memory: Any) -> int:
    """Add up the bytes of a memory, or of a part of one, before it is allocated too.

    Examples:
      >>> make = lambda: make_kv_cache(layers=2, cells=4096, heads=8, size=128)
      >>> nbytes(jax.eval_shape(make)) // 2**20
      64
    """
    leaves = jax.tree.leaves(memory)
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)


def check_invariants(memory: Any) -> dict[str, jax.Array]:
    """Count what is wrong with the table of a memory.

    Returns:
      For each thing that can be wrong, `[]` int32, how many cells or sequences are at fault. All
      are 0 unless a table was made by hand.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=4, heads=1, size=2)
      >>> sum(check_invariants(memory).values()).item()
      0
    """
    table, _ = split(memory)
    return _faults(table)


@jax.jit
def _first(table: Any, seq: jax.Array) -> jax.Array:
    found = jax.lax.map(lambda one: table_first(table, one), seq.reshape(-1))
    return found.reshape(seq.shape)


@jax.jit
def _last(table: Any, seq: jax.Array) -> jax.Array:
    found = jax.lax.map(lambda one: table_last(table, one), seq.reshape(-1))
    return found.reshape(seq.shape)


@jax.jit
def _used(table: Any) -> jax.Array:
    return table_used(table)


@jax.jit
def _can_rm(table: Any, seq: jax.Array, p0: jax.Array, p1: jax.Array) -> jax.Array:
    return table_can_rm(table, seq, p0, p1)


@jax.jit
def _can_resume(table: Any, seq: jax.Array, pos: jax.Array) -> jax.Array:
    return table_can_resume(table, seq, pos)


@jax.jit
def _faults(table: Any) -> dict[str, jax.Array]:
    return table_faults(table)
