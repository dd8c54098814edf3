"""What every memory understands: the verbs, dispatched by the kind of memory.

A memory is two halves. The table says who lives where and is small; the rows are all the bytes. A
verb here is compiled over the table alone and puts the same rows back beside it: compiled over a
whole memory it would have to copy every row, or take the memory away from the caller.

A kind of memory registers how it splits and joins, and what its table does for each of the
functions below that begin with `table_`. Everything else follows.
"""

import math
from collections.abc import Callable
from functools import singledispatch, wraps
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import Ubatch, is_concrete

Memory = TypeVar("Memory")
F = TypeVar("F", bound=Callable[..., Any])
Ids = jax.typing.ArrayLike


def by_table(stub: F) -> F:
    """Make a function of a table that each kind of memory registers its own version of."""

    def unknown(table: Any, *args: Any) -> Any:
        del args
        raise TypeError(f"wanted the table of a memory, got {type(table)}")

    return cast(F, singledispatch(wraps(stub)(unknown)))


# ------------------------------------------------------------------ what a kind of memory registers


@singledispatch
def split(memory: Any) -> tuple[Any, Any]:
    """Take a memory apart into its table and its rows.

    Rows are what one donates, differentiates and shards; the table is what verbs edit.

    Raises:
      TypeError: when it is given something else than a memory, such as the pair that `seq_rm`
        returns.

    Examples:
      >>> table, rows = split(make_kv_cache(layers=1, cells=4, heads=1, size=2))
      >>> nbytes(table), nbytes(rows)
      (52, 64)
    """
    raise _no_memory(memory)


@singledispatch
def join(table: Any, rows: Any) -> Any:
    """Put a table and rows together into a memory: the inverse of `split`.

    Raises:
      TypeError: when the first argument is no table.
    """
    del rows
    raise TypeError(f"wanted the table of a memory, got {type(table)}")


@singledispatch
def attend(
    memory: Memory,
    layer: int,
    ubatch: Ubatch,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
) -> tuple[Memory, jax.Array]:
    """Write the keys and values of a ubatch into a layer and attend over what its tokens see.

    Args:
      memory: a memory that the ubatch has been applied to.
      layer: 0 to L - 1, static.
      ubatch: the tokens. Those that the table does not hold (padding, a refused plan) are written
        nowhere.
      q: `[R, T, H, D]`, queries, rotated by the layer's rope.
      k: `[R, T, K, D]`, keys, rotated by the layer's rope.
      v: `[R, T, K, Dv]`, values.
      scale: what the products of queries and keys are multiplied by; by default 1 / sqrt(D).

    Returns:
      The memory with the rows written, and `[R, T, H, Dv]`, in the dtype of `q`. A token that sees
      nothing gets zeros.

    Raises:
      ValueError: when shapes do not fit the memory.

    llama.cpp: `cpy_k`, `cpy_v` and `build_attn`.
    """
    del layer, ubatch, q, k, v, scale
    raise _no_memory(memory)


@by_table
def table_sequences(table: Any) -> int:
    """Q, how many sequences a table knows."""
    ...


@by_table
def table_last(table: Any, present: jax.Array) -> jax.Array:
    """Find the last position, `[Q]`, of the sequences asked for, `[Q]` bool; -1 elsewhere."""
    ...


@by_table
def table_first(table: Any, seq: jax.Array) -> jax.Array:
    """Find the smallest position of one sequence, `[]`; -1 if it holds none."""
    ...


@by_table
def table_used(table: Any) -> jax.Array:
    """Count the cells in use."""
    ...


@by_table
def table_admit(table: Any, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Say which sequences, `[Q]`, find room for the tokens they bring, and what room is left."""
    ...


@by_table
def table_place(table: Any, ubatch: Ubatch, ok: jax.Array) -> jax.Array:
    """Choose where the tokens of a ubatch go, `[R, T]`; nowhere if not `ok`. Changes nothing."""
    ...


@by_table
def table_settle(table: Any, ubatch: Ubatch) -> Any:
    """Take a ubatch into the table, if the table is as it was when the ubatch was planned."""
    ...


@by_table
def table_rm(table: Any, seq: jax.Array, p0: jax.Array, p1: jax.Array) -> tuple[Any, jax.Array]:
    """Do what `seq_rm` says, on a table."""
    ...


@by_table
def table_cp(table: Any, src: jax.Array, dst: jax.Array, p0: jax.Array, p1: jax.Array) -> Any:
    """Do what `seq_cp` says, on a table."""
    ...


@by_table
def table_keep(table: Any, seq: jax.Array) -> Any:
    """Do what `seq_keep` says, on a table."""
    ...


@by_table
def table_clear(table: Any) -> Any:
    """Do what `clear` says, on a table."""
    ...


# ----------------------------------------------------------------------------------------- the verbs


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
    table, ok = _rm(table, _ids(table, seq, lowest=-1), _int(p0), _int(p1))
    return join(table, rows), ok


def seq_cp(memory: Memory, src: Ids, dst: Ids, p0: Ids = -1, p1: Ids = -1) -> Memory:
    """Let one or more sequences share what another holds: fork a conversation without a copy.

    Args:
      memory: any memory.
      src: `[]` int, the sequence to share.
      dst: `[]` or `[n]` int, the sequences that will own its cells too. What they held stays.
      p0: `[]` int, the first position to share; negative means 0.
      p1: `[]` int, one past the last; negative means no end, and 0 an empty range.

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

    llama.cpp: `llama_memory_seq_cp`.
    """
    table, rows = split(memory)
    table = _cp(table, _ids(table, src), _ids(table, dst), _int(p0), _int(p1))
    return join(table, rows)


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
    return join(_keep(table, _ids(table, seq)), rows)


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


def seq_pos_min(memory: Memory, seq: Ids) -> jax.Array:
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
    return _first(table, _ids(table, seq))


def seq_pos_max(memory: Memory, seq: Ids) -> jax.Array:
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
    return _last(table, _ids(table, seq))


def used(memory: Memory) -> jax.Array:
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


def nbytes(memory: Any) -> int:
    """Add up the bytes of a memory, or of a part of one, before it is allocated too.

    Examples:
      >>> make = lambda: make_kv_cache(layers=2, cells=4096, heads=8, size=128)
      >>> nbytes(jax.eval_shape(make)) // 2**20
      64
    """
    leaves = jax.tree.leaves(memory)
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)


# --------------------------------------------------------------- compiled over the table alone, once


@jax.jit
def _rm(table: Any, seq: jax.Array, p0: jax.Array, p1: jax.Array) -> tuple[Any, jax.Array]:
    return table_rm(table, seq, p0, p1)


@jax.jit
def _cp(table: Any, src: jax.Array, dst: jax.Array, p0: jax.Array, p1: jax.Array) -> Any:
    return table_cp(table, src, dst, p0, p1)


@jax.jit
def _keep(table: Any, seq: jax.Array) -> Any:
    return table_keep(table, seq)


@jax.jit
def _clear(table: Any) -> Any:
    return table_clear(table)


@jax.jit
def _first(table: Any, seq: jax.Array) -> jax.Array:
    found = jax.lax.map(lambda one: table_first(table, one), seq.reshape(-1))
    return found.reshape(seq.shape)


@jax.jit
def _last(table: Any, seq: jax.Array) -> jax.Array:
    count = table_sequences(table)
    ids = jnp.where((seq >= 0) & (seq < count), seq, count)
    present = jnp.zeros(count, bool).at[ids.reshape(-1)].set(True, mode="drop")
    return table_last(table, present).at[ids].get(mode="fill", fill_value=-1)


@jax.jit
def _used(table: Any) -> jax.Array:
    return table_used(table)


def _no_memory(value: Any) -> TypeError:
    what = "a tuple (was `memory, ok = seq_rm(...)` not unpacked?)"
    return TypeError(f"wanted a memory, got {what if isinstance(value, tuple) else type(value)}")


def _int(value: Ids) -> Any:
    """Make an int32 of a position, so that all callers share one compiled function."""
    return value.astype(jnp.int32) if isinstance(value, jax.Array) else np.asarray(value, np.int32)


def _ids(table: Any, seq: Ids, *, lowest: int = 0) -> Any:
    """Make int32 of sequence ids; refuse those that are known and wrong."""
    seq = _int(seq)
    count = table_sequences(table)
    if is_concrete(seq):
        wrong = [int(one) for one in np.asarray(seq).reshape(-1) if not lowest <= one < count]
        if wrong:
            raise ValueError(
                f"wanted sequence ids from {lowest} to {count - 1}, got {wrong[0]}; a memory is made "
                f"for a fixed number of sequences"
            )
    return seq
