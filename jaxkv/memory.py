"""What every memory understands: the verbs, dispatched by the kind of memory.

A memory is two halves. The table says who lives where and is small; the rows are all the bytes. A
verb here is compiled over the table alone and puts the same rows back beside it: compiled over a
whole memory it would have to copy every row, or take the memory away from the caller.

A kind of memory registers how it splits and joins, and what its table does for each of the
functions below that begin with `table_`. Everything else follows.
"""

from collections.abc import Callable, Mapping
from functools import singledispatch, wraps
from typing import Any, TypeVar

import jax

from jaxkv.batch import Ubatch
from jaxkv.ops.attention.api import Implementation

Memory = TypeVar("Memory")
T = TypeVar("T")


def by_table(stub: Callable[..., T]):
    """Make a function of a table that each kind of memory registers its own version of."""

    @wraps(stub)
    def unknown(table: Any, *args: Any) -> T:
        del args
        raise TypeError(f"wanted the table of a memory, got {type(table)}")

    return singledispatch(unknown)


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
      (68, 64)
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
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    causal: bool = True,
    implementation: Implementation | None = None,
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
      softcap: what those products stay below: c * tanh(x / c) (Gemma 2).
      sinks: `[H]`, a logit of each head that takes its share of the attention and gives nothing.
      causal: False lets tokens see those that come after them, as far as a window allows.
      implementation: how attention is computed, "tiles", "whole", "xla" or "cudnn", see
        `jaxkv.ops.attention.api`; None leaves it to jaxkv. With the last two a row that is hidden
        and not a number may show.

    Returns:
      The memory with the rows written, and `[R, T, H, Dv]`, in the dtype of `q`. A token that sees
      nothing gets zeros.

    Raises:
      ValueError: when shapes do not fit the memory, or the implementation cannot do it.

    llama.cpp: `cpy_k`, `cpy_v` and `build_attn`.
    """
    del layer, ubatch, q, k, v, scale, softcap, sinks, causal, implementation
    raise _no_memory(memory)


@singledispatch
def read_states(memory: Any, layer: int, ubatch: Ubatch) -> dict[str, jax.Array]:
    """Read the states that the rows of a ubatch go on from.

    Args:
      memory: a memory that the ubatch has been applied to, and whose layer it has not written yet.
      layer: 0 to L - 1, static.
      ubatch: the tokens, a row for each sequence.

    Returns:
      By name, `[R, ...]`, the state of each row's sequence before the first token of the ubatch.
      Zeros where the sequence had none, and for a row that the table did not take in (padding, a
      refused plan).

    Raises:
      ValueError: when the layer is none of the memory.

    Examples:
      >>> memory = make_recurrent_cache(layers=2, states={"x": ((3,), jnp.bfloat16)}, sequences=4)
      >>> plan = init_batch(memory, make_batch([[1, 2], [3, 4]]))
      >>> read_states(apply(memory, plan), 1, plan.ubatches[0])["x"].shape
      (2, 3)

    llama.cpp: `build_rs`.
    """
    del layer, ubatch
    raise _no_memory(memory)


@singledispatch
def write_states(
    memory: Memory, layer: int, ubatch: Ubatch, states: Mapping[str, jax.Array]
) -> Memory:
    """Write the states that the rows of a ubatch leave, after `read_states` of the same layer.

    Args:
      memory: a memory that the ubatch has been applied to.
      layer: 0 to L - 1, static.
      ubatch: the tokens. A row that the table did not take in (padding, a refused plan) is written
        nowhere.
      states: by name, `[R, E + 1, ...]`, the states after the last E + 1 valid tokens of each row,
        the oldest first: after so many tokens as `tails(ubatch, E + 1)` says. Where that is 0 the
        state is older than the ubatch, and not written. `[R, ...]` will do where E is 0. Fewer
        than E + 1 are refused: the table lists what a ubatch leaves, so it must be there.

    Returns:
      The memory with the states written.

    Raises:
      ValueError: when the names or shapes are not those of the memory.

    Examples:
      >>> memory = make_recurrent_cache(layers=1, states={"x": ((), jnp.float32)}, sequences=2)
      >>> plan = init_batch(memory, make_batch([[1, 2], [3, 4]]))
      >>> ubatch = plan.ubatches[0]
      >>> memory = write_states(apply(memory, plan), 0, ubatch, {"x": jnp.array([5.0, 6.0])})
      >>> plan = init_batch(memory, make_batch([7], sequences=1))
      >>> read_states(apply(memory, plan), 0, plan.ubatches[0])["x"]
      Array([6.], dtype=float32)

    llama.cpp: the copies to `r_l` and `s_l` that a model's graph makes.
    """
    del layer, ubatch, states
    raise _no_memory(memory)


@singledispatch
def states_kept(memory: Any, layer: int) -> int:
    """Say how many states a layer keeps before the current one: E, a static integer.

    Raises:
      ValueError: when the layer is none of the memory.

    Examples:
      >>> states_kept(make_recurrent_cache(layers=1, states={"x": ((), jnp.int32)}, kept=3), 0)
      3

    llama.cpp: `n_rs_seq`.
    """
    del layer
    raise _no_memory(memory)


@by_table
def table_sequences(table: Any) -> int:
    """Q, how many sequences a table knows."""
    ...


@by_table
def table_streams(table: Any) -> int:
    """1 if sequences may share the rows of a ubatch, Q if each needs a row of its own."""
    ...


@by_table
def table_apart(table: Any) -> bool:
    """Say whether sequences have positions of their own, or those of the cells that they share."""
    ...


@by_table
def table_ubatch_size(table: Any) -> int | None:
    """The most tokens of a ubatch that a memory was sized for; None for any."""
    ...


@by_table
def table_digest(table: Any) -> jax.Array:
    """Sum up all that was written so far, `[]` uint32."""
    ...


@by_table
def table_first(table: Any, seq: jax.Array) -> jax.Array:
    """Find the smallest position of one sequence, `[]`; -1 if it holds none."""
    ...


@by_table
def table_last(table: Any, seq: jax.Array) -> jax.Array:
    """Find the largest position of one sequence, `[]`; -1 if it holds none."""
    ...


@by_table
def table_used(table: Any) -> Any:
    """Count the cells in use."""
    ...


@by_table
def table_reached(table: Any, present: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Find what the sequences asked for, `[Q]` bool, go on after, `[Q]`; -1 elsewhere.

    And whether all parts of a composite go on after it, `[]` or `[Q]` bool.
    """
    ...


@by_table
def table_lost(table: Any, position: jax.Array) -> jax.Array:
    """Say which sequences, `[Q]`, would miss something with a next token at `position`, `[Q]`."""
    ...


@by_table
def table_owing(table: Any, present: jax.Array) -> jax.Array:
    """Say which of the sequences asked for see a key that is owed a rotation, `[Q]` bool."""
    ...


@by_table
def table_admit(table: Any, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Say which sequences, `[Q]`, find room for the tokens they bring, and what room is left."""
    ...


@by_table
def table_place(table: Any, ubatch: Ubatch, ok: jax.Array) -> tuple[Any, jax.Array]:
    """Choose where tokens go, nowhere if not `ok`; and why some have no place, a `Reason` each."""
    ...


@by_table
def table_fresh(table: Any, ubatch: Ubatch) -> jax.Array:
    """Say whether a table is as it was when a ubatch was planned, `[]` bool."""
    ...


@by_table
def table_fill(table: Any, ubatch: Ubatch) -> Any:
    """Take a ubatch into a table, where it was planned to go."""
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
def copies_rows(table: Any) -> bool:
    """Say whether `seq_cp` must copy rows, since sequences do not share a stream."""
    ...


@by_table
def copy_rows(
    table: Any, rows: Any, src: jax.Array, dst: jax.Array, p0: jax.Array, p1: jax.Array
) -> tuple[Any, Any]:
    """Do what `seq_cp` says, on a table whose rows must be copied too."""
    ...


@by_table
def table_keep(table: Any, seq: jax.Array) -> Any:
    """Do what `seq_keep` says, on a table."""
    ...


@by_table
def table_clear(table: Any) -> Any:
    """Do what `clear` says, on a table."""
    ...


@by_table
def table_add(table: Any, seq: jax.Array, p0: jax.Array, p1: jax.Array, delta: jax.Array) -> Any:
    """Do what `seq_add` says, on a table."""
    ...


@by_table
def table_div(table: Any, seq: jax.Array, p0: jax.Array, p1: jax.Array, divisor: jax.Array) -> Any:
    """Do what `seq_div` says, on a table."""
    ...


@by_table
def table_can_rm(table: Any, seq: jax.Array, p0: jax.Array, p1: jax.Array) -> jax.Array:
    """Say what `can_seq_rm` says, of a table."""
    ...


@by_table
def table_can_resume(table: Any, seq: jax.Array, pos: jax.Array) -> jax.Array:
    """Say what `can_resume` says, of a table."""
    ...


@by_table
def table_update(table: Any) -> Any:
    """Plan the rotations that keys are owed."""
    ...


@by_table
def table_defrag(table: Any, max_moves: int | None) -> Any:
    """Plan the moves that close the gaps."""
    ...


@by_table
def table_unwritten(table: Any, old: Any) -> jax.Array:
    """Say whether every row that an older table uses is still as it was, `[]` bool."""
    ...


@by_table
def table_restored(table: Any, old: Any) -> Any:
    """Give an older table back, knowing what has been written since."""
    ...


@by_table
def table_faults(table: Any) -> dict[str, jax.Array]:
    """Count what is wrong with a table, by name."""
    ...


@singledispatch
def carry_out(part: Any, table: Any, rows: Any) -> tuple[Any, Any]:
    """Commit a plan that moves rows; each kind of plan registers how."""
    del table, rows
    raise TypeError(f"wanted a ubatch or a plan, got {type(part)}")


@singledispatch
def nothing_to_do(part: Any) -> bool:
    """Say whether a plan that moves rows, and is known, moves none."""
    raise TypeError(f"wanted a ubatch or a plan, got {type(part)}")


def _no_memory(value: Any) -> TypeError:
    what = "a tuple (was `memory, ok = seq_rm(...)` not unpacked?)"
    return TypeError(f"wanted a memory, got {what if isinstance(value, tuple) else type(value)}")
