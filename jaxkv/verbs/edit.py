"""Editing who lives where: forget, fork, keep, move. Each returns the next memory."""

from typing import Any, TypeVar

import jax
import numpy as np

from jaxkv.batch import is_concrete
from jaxkv.memory import (
    copies_rows,
    copy_rows,
    join,
    split,
    table_add,
    table_clear,
    table_cp,
    table_div,
    table_keep,
    table_rm,
)
from jaxkv.verbs.ids import Ids, checked_ids, whole

Memory = TypeVar("Memory")


def seq_rm(memory: Memory, seq: Ids, p0: Ids = -1, p1: Ids = -1) -> tuple[Memory, jax.Array]:
    """Forget the positions p0 to p1 - 1 of one sequence, or of all.

    The only verb that a kind of memory may refuse; an attention memory never does.

    Args:
      memory: any memory.
      seq: `[]` int, a sequence id, or -1 for every sequence.
      p0: `[]` int, the first position to forget; negative means 0.
      p1: `[]` int, one past the last; negative means no end, and 0 an empty range.

    Returns:
      The next memory, and `ok`, `[]` bool: False if it was refused, and then nothing changed. A
      cell is free as soon as its last owner has let go of it.

    Raises:
      ValueError: when `seq` is known while tracing and is no sequence id. A traced one that is none
        changes nothing.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=6, sequences=2, heads=1, size=2)
      >>> memory = apply(memory, init_batch(memory, make_batch([1, 2, 3, 4])))
      >>> memory, ok = seq_rm(memory, 0, 1, 3)
      >>> print(show(memory))
      owner   0 . . 0 . .
      position 0 . . 3 . .

      What remains still reaches from 0 to 3: the hole is not noticed.

      >>> seq_pos_min(memory, 0).item(), seq_pos_max(memory, 0).item()
      (0, 3)

    llama.cpp: `llama_memory_seq_rm`.
    """
    table, rows = split(memory)
    table, ok = _rm(table, checked_ids(table, seq, lowest=-1), whole(p0), whole(p1))
    return join(table, rows), ok


def seq_cp(
    memory: Memory, src: Ids, dst: Ids, p0: Ids = -1, p1: Ids = -1, *, donate: bool = False
) -> Memory:
    """Let one or more sequences have what another holds: fork a conversation.

    Where sequences share a stream they share its cells: nothing is copied, and what `dst` held
    stays. Where each has its own stream the rows are copied, and `dst` then holds these alone.

    Args:
      memory: any memory.
      src: `[]` int, the sequence to share.
      dst: `[]` or `[n]` int, the sequences that will have its cells too.
      p0: `[]` int, the first position to share; negative means 0.
      p1: `[]` int, one past the last; negative means no end, and 0 an empty range.
      donate: give up the memory passed in, which saves a copy of all rows where rows must be copied
        outside of `jit`.

    Returns:
      The next memory. Doing it twice is doing it once.

    Raises:
      ValueError: when an id is known while tracing and is no sequence id. A traced one that is none
        changes nothing.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=6, sequences=3, heads=1, size=2)
      >>> memory = apply(memory, init_batch(memory, make_batch([1, 2, 3])))
      >>> memory = seq_cp(memory, 0, [1, 2], 0, 2)
      >>> seq_pos_max(memory, [0, 1, 2]).tolist(), used(memory).item()
      ([2, 1, 1], 3)

      With a stream each:

      >>> memory = make_kv_cache(layers=1, cells=4, sequences=2, streams=2, heads=1, size=2)
      >>> memory = apply(memory, init_batch(memory, make_batch([1, 2, 3])))
      >>> print(show(seq_cp(memory, 0, 1, 1)))
      owner    0 0 0 .
      position 0 1 2 .
      owner    . 1 1 .
      position . 1 2 .

    llama.cpp: `llama_memory_seq_cp`.
    """
    table, rows = split(memory)
    args = checked_ids(table, src), checked_ids(table, dst), whole(p0), whole(p1)
    if copies_rows(table):
        return join(*(_cp_rows_donated if donate else _cp_rows)(table, rows, *args))
    return join(_cp(table, *args), rows)


def seq_keep(memory: Memory, seq: Ids) -> Memory:
    """Forget every sequence but one.

    Args:
      memory: any memory.
      seq: `[]` int, the sequence that stays.

    Returns:
      The next memory. Cells that it shared are its own.

    Raises:
      ValueError: when `seq` is known while tracing and is no sequence id. A traced one that is none
        changes nothing.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=6, sequences=2, heads=1, size=2)
      >>> memory = apply(memory, init_batch(memory, make_batch([[1, 2], [3]])))
      >>> seq_pos_max(seq_keep(memory, 1), [0, 1]).tolist()
      [-1, 0]

    llama.cpp: `llama_memory_seq_keep`.
    """
    table, rows = split(memory)
    return join(_keep(table, checked_ids(table, seq)), rows)


def seq_add(memory: Memory, seq: Ids, p0: Ids, p1: Ids, delta: Ids) -> Memory:
    """Move a range of a sequence by some positions; its keys are rotated later, all at once.

    The next batch that would see a moved key is refused until `apply(memory, init_update(memory))`
    has rotated it.

    Args:
      memory: any memory.
      seq: `[]` int, the sequence.
      p0: `[]` int, the first position that moves; negative means 0.
      p1: `[]` int, one past the last; negative means no end, and 0 an empty range.
      delta: `[]` int, how far they move. A position that turns negative is forgotten.

    Returns:
      The next memory. Positions belong to cells: a cell that is shared moves for every owner.

    Raises:
      ValueError: when `seq` is known while tracing and is no sequence id. A traced one that is none
        changes nothing.

    Examples:
      Forget a passage and close the gap:

      >>> memory = make_kv_cache(layers=1, cells=6, heads=1, size=2, rope=make_rope(2))
      >>> memory = apply(memory, init_batch(memory, make_batch([1, 2, 3, 4, 5])))
      >>> memory, _ = seq_rm(memory, 0, 1, 3)
      >>> memory = seq_add(memory, 0, 3, -1, -2)
      >>> print(show(memory))
      owner    0 . .  0  0 .
      position 0 . .  1  2 .
      owed     0 . . -2 -2 .
      >>> init_batch(memory, make_batch([6])).ok.item()
      False
      >>> memory = apply(memory, init_update(memory))
      >>> init_batch(memory, make_batch([6])).ok.item()
      True

    llama.cpp: `llama_memory_seq_add`.
    """
    table, rows = split(memory)
    return join(_add(table, checked_ids(table, seq), whole(p0), whole(p1), whole(delta)), rows)


def seq_div(memory: Memory, seq: Ids, p0: Ids, p1: Ids, divisor: Ids) -> Memory:
    """Divide the positions of a range of a sequence, rounding down; keys are rotated later.

    Args:
      memory: any memory.
      seq: `[]` int, the sequence.
      p0: `[]` int, the first position that moves; negative means 0.
      p1: `[]` int, one past the last; negative means no end, and 0 an empty range.
      divisor: `[]` int, at least 1.

    Returns:
      The next memory. Several cells of a sequence may then share a position; none is freed.

    Raises:
      ValueError: when the divisor is known while tracing and is below 1, or `seq` is no sequence
        id. Traced ones change nothing.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=4, heads=1, size=2)
      >>> memory = apply(memory, init_batch(memory, make_batch([1, 2, 3, 4])))
      >>> print(show(seq_div(memory, 0, 0, -1, 2)))
      owner    0  0  0  0
      position 0  0  1  1
      owed     0 -1 -1 -2

    llama.cpp: `llama_memory_seq_div`; the keys are owed the new position less the old one.
    """
    if is_concrete(divisor) and np.any(np.asarray(divisor) < 1):
        raise ValueError(f"wanted a divisor of at least 1, got {divisor}")
    table, rows = split(memory)
    return join(_div(table, checked_ids(table, seq), whole(p0), whole(p1), whole(divisor)), rows)


def clear(memory: Memory) -> Memory:
    """Forget everything. The bytes of the rows stay as they are; nobody sees them.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=6, heads=1, size=2)
      >>> memory = apply(memory, init_batch(memory, make_batch([1, 2])))
      >>> used(clear(memory)).item()
      0

    llama.cpp: `llama_memory_clear`.
    """
    table, rows = split(memory)
    return join(_clear(table), rows)


@jax.jit
def _rm(table: Any, seq: jax.Array, p0: jax.Array, p1: jax.Array) -> tuple[Any, jax.Array]:
    return table_rm(table, seq, p0, p1)


@jax.jit
def _cp(table: Any, src: jax.Array, dst: jax.Array, p0: jax.Array, p1: jax.Array) -> Any:
    return table_cp(table, src, dst, p0, p1)


_cp_rows = jax.jit(lambda table, rows, *args: copy_rows(table, rows, *args))
_cp_rows_donated = jax.jit(
    lambda table, rows, *args: copy_rows(table, rows, *args), donate_argnames="rows"
)


@jax.jit
def _keep(table: Any, seq: jax.Array) -> Any:
    return table_keep(table, seq)


@jax.jit
def _add(table: Any, seq: jax.Array, p0: jax.Array, p1: jax.Array, delta: jax.Array) -> Any:
    return table_add(table, seq, p0, p1, delta)


@jax.jit
def _div(table: Any, seq: jax.Array, p0: jax.Array, p1: jax.Array, divisor: jax.Array) -> Any:
    return table_div(table, seq, p0, p1, divisor)


@jax.jit
def _clear(table: Any) -> Any:
    return table_clear(table)
