"""Edits of sequences: remove, copy, keep, shift. Each returns the next cache.

*Ids.* An id is an integer from 0 to Q - 1, of any integer dtype. One that is known and is none
raises ValueError; a traced one that is none changes nothing.

*Ranges.* Positions p0 to p1 - 1: a p0 of -1 means 0, a p1 of None or -1 no end, and a p1 of 0 an
empty range. They are counted from the beginning: one that is known and below -1 raises ValueError,
and a traced one is as -1.

*Refusals.* An edit is granted or changes nothing, and `ok` says which: all that it touches is
there, and every sequence can go on where it ends (`can_resume`), in all parts of the cache.

An edit that changes a stream makes the ubatches that were planned on that stream stale: plan again.
What it does to the plans of updates and defrags is said in `is_current`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import Cache, merge, split
from jaxkv.core.array_utils import is_concrete
from jaxkv.core.validate import check_bounds, check_count, check_position, check_range
from jaxkv.jit_helpers import jit_method, jit_table
from jaxkv.spec import TableSpec, are_in_same_streams, check_distinct, mask_unchanged_targets
from jaxkv.table import CacheTable

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Bool, Int32, PyTree

    from jaxkv.core.types import Id, Ids


class EditResult(NamedTuple):
    """What an edit returns.

    cache: the next cache.
    ok: `[]` or `[n]` bool, False where the edit was refused; then that edit changed nothing.
    """

    cache: Cache
    ok: Bool[Array, "*n"]


def seq_rm(cache: Cache, seq: Ids | None = None, p0: Ids = 0, p1: Ids | None = None) -> EditResult:
    """Forget the positions p0 to p1 - 1 of one sequence, of all, or of each of several.

    A whole sequence can always go, and without a window, or before it has taken a cell, any range.
    Of a text that a window has taken cells from, an end can go where the token that comes in its
    place would see none of these. Where states are kept, an end can go that rollback covers, since
    a state cannot forget what it has seen. A source (`CacheSpec.cross_attention`) goes with the
    whole of its sequence alone, a range from 0 without an end.

    Args:
      cache: any cache.
      seq: `[]` or `[n]` int, a sequence id; None or -1 for every sequence.
      p0: `[]` or `[n]` int, the first position to forget; -1 is 0.
      p1: `[]` or `[n]` int, one past the last; None or -1 is no end.

    Returns:
      The next cache, and `ok`, bool, `[]` or `[n]`. Several cuts are made one after another. A
      cell is free as soon as its last owner has let go of it. A bound below -1 raises; traced it is
      refused, as in all edits of ranges.

    Raises:
      ValueError: when `seq`, `p0` and `p1` are lists of different lengths, or have more dimensions.

    Examples:
      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=6, sequences=2
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3, 4])))
      >>> cache, ok = seq_rm(cache, 0, 1, 3)
      >>> print(show(cache))
      owner    0 . . 0 . .
      position 0 . . 3 . .

      What remains still reaches from 0 to 3: the hole is not noticed.

      >>> cache.seq_pos_min(0).item(), cache.seq_pos_max(0).item()
      (0, 3)

      The last token; a p0 of -1 would be the first one:

      >>> shorter, ok = seq_rm(cache, 0, cache.seq_pos_max(0))
      >>> shorter.seq_pos_max(0).item()
      0

      A cut for each of two sequences:

      >>> cache = apply(cache, init_batch(cache, make_batch([5, 6], sequences=1)))
      >>> cache, ok = seq_rm(cache, [0, 1], [3, 1])
      >>> cache.seq_pos_max([0, 1]).tolist(), ok.tolist()
      ([0, 0], [True, True])

    llama.cpp: `llama_memory_seq_rm`.
    """
    table, buffers = split(cache)
    ids = table.spec.sequence_ids(-1 if seq is None else seq, lowest=-1)
    cuts = ids, *check_bounds(p0, p1)
    axes = [np.shape(x) for x in cuts]
    if len(set(axes) - {()}) > 1 or max(map(len, axes)) > 1:
        raise ValueError(f"expected seq, p0 and p1 of one shape [n], or [], got {axes}")
    table, ok = _remove_ranges(table, *cuts)
    return EditResult(merge(table, buffers), ok)


def seq_cp(
    cache: Cache,
    src: Id,
    dst: Ids,
    p0: Id = 0,
    p1: Id | None = None,
    *,
    donate: bool = False,
) -> EditResult:
    """Let one or more sequences have what another holds: fork a conversation.

    Sequences of one stream share its cells: nothing is copied. Keys and values that `dst` held stay
    beside them, so remove first what would stand at the same positions (`seq_rm`); a state takes
    the place of the one that `dst` had. A copy of any range that is not empty also replaces the
    source of `dst` (`CacheSpec.cross_attention`), even where `dst` keeps its text. In another
    stream the buffers are copied, and `dst` then holds these alone; several of that stream share
    one copy.

    With a stream for each sequence a token keeps its cell, and there is always room. Where
    sequences share several streams, a copy takes cells of the stream that it goes to as a batch
    does. It is refused where these are lacking in any stream, where no state is kept that stands at
    the end of the range, and where the next token of a `dst` would see what a window has taken.

    Args:
      cache: any cache.
      src: `[]` int, the sequence to share.
      dst: `[]` or `[n]` int, the sequences that will have its cells too.
      p0: `[]` int, the first position to share.
      p1: `[]` int, one past the last.
      donate: give up the buffers of the cache passed in, which saves a copy of all of them where
        they must be copied outside of `jit`.

    Returns:
      The next cache, and `ok`, `[]` bool. Doing it twice is doing it once.

    Examples:
      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=6, sequences=3
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
      >>> cache, ok = seq_cp(cache, 0, [1, 2], 0, 2)
      >>> cache.seq_pos_max([0, 1, 2]).tolist(), cache.num_used_cells().item()
      ([2, 1, 1], 3)

      With a stream each:

      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=4, sequences=2, streams=2
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
      >>> print(show(seq_cp(cache, 0, 1, 1).cache))
      owner    0 0 0 .
      position 0 1 2 .
      owner    . 1 1 .
      position . 1 2 .

      With two streams for four sequences, 0 and 1 share one, and 2 and 3 the other:

      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=3, sequences=4, streams=2
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([[1, 2], [3, 4]], sequences=[0, 2])))
      >>> print(show(seq_cp(cache, 0, [1, 2, 3], 1).cache))
      owner    0 + .
      position 0 1 .
      owner    + . .
      position 1 . .

      Sequence 2 let go of what it held. Beside it there is no room for two more:

      >>> seq_cp(cache, 0, 3).ok.item()
      False

    llama.cpp: `llama_memory_seq_cp`.
    """
    table, buffers = split(cache)
    spec = table.spec
    ids = table.spec.sequence_id(src), spec.sequence_ids(dst)
    args = *ids, *check_range(p0, p1)
    if are_in_same_streams(spec, *ids):
        changed, ok = _copy(table, None, *args)
        return EditResult(merge(changed.table, buffers), ok)
    return EditResult(*(_copy_donated if donate else _copy)(table, buffers, *args))


def seq_select(cache: Cache, parents: Ids, sequences: Ids, *, donate: bool = False) -> EditResult:
    """Let sequences go on from what others hold, all at once: the step of a beam search.

    Each sequence lets go of what it held and has what its parent held before. Within a stream that
    is one edit of the table; what comes from another stream is copied, as in `seq_cp`. Where
    sequences share several streams, it is refused where cells are lacking for that: those that are
    copied come free only afterwards, so that sequences of two streams change places where both
    copies find room beside them.

    Args:
      cache: any cache.
      parents: `[n]` int, what each sequence goes on from; itself too, and one for several.
      sequences: `[n]` int, the sequences, each at most once. All others stay as they are.
      donate: give up the buffers of the cache passed in, see `seq_cp`.

    Returns:
      The next cache, and `ok`, `[]` bool.

    Raises:
      ValueError: when the shapes differ, or a sequence is known and comes twice or is none.

    Examples:
      Sequence 1 had the two best continuations; both go on, and what 0 had is free:

      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=6, sequences=2
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([[1, 2], [3, 4, 5]])))
      >>> print(show(seq_select(cache, [1, 1], [0, 1]).cache))
      owner    . . + + + .
      position . . 0 1 2 .

      They may change places:

      >>> seq_select(cache, [1, 0], [0, 1]).cache.seq_pos_max([0, 1]).tolist()
      [2, 1]

    llama.cpp: none; its beams were a `llama_memory_seq_cp` and a `llama_memory_seq_rm` for each.
    """
    table, buffers = split(cache)
    ids = _check_parents(table, parents, sequences)
    if not np.size(ids[1]):
        return EditResult(cache, jnp.array(True))
    if are_in_same_streams(table.spec, *ids):
        table, ok = _select_within_streams(table, *ids)
        return EditResult(merge(table, buffers), ok)
    selected = _select_buffers_donated if donate else _select_buffers
    return EditResult(*selected(table, buffers, *ids))


def seq_keep(cache: Cache, seq: Id) -> EditResult:
    """Forget every sequence but one.

    Args:
      cache: any cache.
      seq: `[]` int, the sequence that stays.

    Returns:
      The next cache, and `ok`, True. Cells that the sequence shared are its own.

    Examples:
      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=6, sequences=2
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([[1, 2], [3]])))
      >>> seq_keep(cache, 1).cache.seq_pos_max([0, 1]).tolist()
      [-1, 0]

    llama.cpp: `llama_memory_seq_keep`.
    """
    table, buffers = split(cache)
    table, ok = _keep(table, table.spec.sequence_id(seq))
    return EditResult(merge(table, buffers), ok)


def seq_add(cache: Cache, seq: Id, p0: Id, p1: Id | None, *, delta: Id) -> EditResult:
    """Move a range of a sequence by some positions; its keys are rotated later, all at once.

    The next batch that would see a moved key is refused until `apply(cache, init_update(cache))`
    has rotated it.

    Args:
      cache: any cache.
      seq: `[]` int, the sequence.
      p0: `[]` int, the first position that moves.
      p1: `[]` int, one past the last.
      delta: `[]` int, how far they move. A position that turns negative is forgotten.

    Returns:
      The next cache, and `ok`, `[]` bool: False where a position would reach 2**31 - 1, a state
      would have to forget what it has seen, or a next token would see what a window has taken.
      Positions belong to cells: a cell that is shared moves for every owner, and `can_seq_add` says
      beforehand whether that leaves each of them one token a position.

    Raises:
      ValueError: when the cache was made without `rope=`, so that its keys cannot be rotated.

    Examples:
      Forget a passage and close the gap:

      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, rope=make_rope(2)), cells=6
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3, 4, 5])))
      >>> cache, _ = seq_rm(cache, 0, 1, 3)
      >>> cache, ok = seq_add(cache, 0, 3, -1, delta=-2)
      >>> print(show(cache))
      owner    0 . .  0  0 .
      position 0 . .  1  2 .
      owed     0 . . -2 -2 .
      >>> init_batch(cache, make_batch([6])).ok.item()
      False
      >>> cache = apply(cache, init_update(cache))
      >>> init_batch(cache, make_batch([6])).ok.item()
      True

    llama.cpp: `llama_memory_seq_add`.
    """
    table, buffers = split(cache)
    table.check_can_shift(buffers)
    args = table.spec.sequence_id(seq), *check_range(p0, p1), check_position(delta, "delta")
    table, ok = _add(table, *args)
    return EditResult(merge(table, buffers), ok)


def seq_div(cache: Cache, seq: Id, p0: Id, p1: Id | None, *, divisor: Id) -> EditResult:
    """Divide the positions of a range of a sequence, rounding down; keys are rotated later.

    Args:
      cache: any cache.
      seq: `[]` int, the sequence.
      p0: `[]` int, the first position that moves.
      p1: `[]` int, one past the last.
      divisor: `[]` int, at least 1.

    Returns:
      The next cache, and `ok`, `[]` bool: False where a traced divisor is below 1, or a next token
      would see what a window has taken. Several cells of a sequence may then share a position; none
      is freed. Of states only the last one at a position is kept.

    Raises:
      ValueError: when the divisor is known and below 1, or the cache was made without `rope=`.

    Examples:
      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, rope=make_rope(2)), cells=4
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3, 4])))
      >>> print(show(seq_div(cache, 0, 0, -1, divisor=2).cache))
      owner    0  0  0  0
      position 0  0  1  1
      owed     0 -1 -1 -2

    llama.cpp: `llama_memory_seq_div`; the keys are owed the new position less the old one.
    """
    if is_concrete(divisor):
        check_count(divisor, "divisor")
    table, buffers = split(cache)
    table.check_can_shift(buffers)
    args = (
        table.spec.sequence_id(seq),
        *check_range(p0, p1),
        check_position(divisor, "divisor"),
    )
    table, ok = _divide(table, *args)
    return EditResult(merge(table, buffers), ok)


def clear(cache: Cache) -> Cache:
    """Forget everything. The bytes of the buffers stay as they are; no token sees them.

    Examples:
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=6)
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2])))
      >>> clear(cache).num_used_cells().item()
      0

    llama.cpp: `llama_memory_clear`.
    """
    table, buffers = split(cache)
    return merge(_clear(table), buffers)


_clear = jit_method(CacheTable.clear)


def _are_bounds(start: Int32[Array, ""], stop: Int32[Array, ""]) -> Bool[Array, ""]:
    """Return whether bounds are from -1 on, as those are that the host can look at."""
    return (start >= -1) & (stop >= -1)


def _edit_range(
    edit: Callable[..., tuple[CacheTable, Bool[Array, ""]]],
    spec: TableSpec,
    seq: Int32[Array, ""],
    *args: Int32[Array, ""],
) -> tuple[CacheTable, Bool[Array, ""]]:
    """Edit a range of a sequence; where bounds are wrong that of none, which is refused."""
    are_bounds = _are_bounds(*args[:2])
    edited, ok = edit(jnp.where(are_bounds, seq, spec.sequences), *args)
    return edited, ok & are_bounds


@jit_table
def _remove_ranges(table: CacheTable, *cuts: jax.Array) -> tuple[CacheTable, Bool[Array, "*n"]]:
    """Forget ranges one after another: `seq`, `start`, `stop` and `ok` are `[]` or `[n]`."""

    def remove(table: CacheTable, cut: list) -> tuple[CacheTable, Bool[Array, ""]]:
        return _edit_range(table.seq_rm, table.spec, *cut)

    all_cuts = jnp.broadcast_arrays(*cuts)
    if all_cuts[0].ndim == 0:
        return remove(table, all_cuts)
    return jax.lax.scan(remove, table, all_cuts)


@jit_table
def _add(table: CacheTable, *args: jax.Array) -> tuple[CacheTable, Bool[Array, ""]]:
    return _edit_range(table.seq_add, table.spec, *args)


@jit_table
def _divide(table: CacheTable, *args: jax.Array) -> tuple[CacheTable, Bool[Array, ""]]:
    return _edit_range(table.seq_div, table.spec, *args)


def _copy_sequences(
    table: CacheTable,
    buffers: PyTree,
    src: Int32[Array, ""],
    dst: Int32[Array, "*n"],
    *bounds: Int32[Array, ""],
) -> tuple[Cache, Bool[Array, ""]]:
    """Return a cache after `CacheTable.seq_cp`, as it was if that is refused; and `ok`."""
    ok, _ = table.can_seq_cp(src, dst, *bounds)
    ok &= _are_bounds(*bounds)
    dst = jnp.where(ok, dst, table.spec.sequences)
    table, buffers = table.seq_cp(buffers, src, dst, *bounds)
    return Cache(table=table, buffers=buffers), ok


_copy = jit_table(_copy_sequences)
_copy_donated = jit_table(_copy_sequences, donate_argnames="buffers")


@jit_table
def _keep(table: CacheTable, seq: Int32[Array, ""]) -> tuple[CacheTable, Bool[Array, ""]]:
    """Return the table after `CacheTable.seq_keep`; and `ok`, True."""
    return table.seq_keep(seq), jnp.array(True)


@jit_table
def _select_within_streams(
    table: CacheTable, parents: Int32[Array, " n"], ids: Int32[Array, " n"]
) -> tuple[CacheTable, Bool[Array, ""]]:
    """Return the table after `CacheTable.seq_select` within streams; and `ok`, True."""
    table, _ = table.seq_select(None, *mask_unchanged_targets(table.spec, parents, ids))
    return table, jnp.array(True)


def _select_sequences(
    table: CacheTable, buffers: PyTree, parents: Int32[Array, " n"], ids: Int32[Array, " n"]
) -> tuple[Cache, Bool[Array, ""]]:
    """Return a cache after `CacheTable.seq_select`, as it was if that is refused; and `ok`."""
    parents, ids = mask_unchanged_targets(table.spec, parents, ids)
    ok = table.can_seq_select(parents, ids)
    ids = jnp.where(ok, ids, table.spec.sequences)
    return merge(*table.seq_select(buffers, parents, ids)), ok


_select_buffers = jit_table(_select_sequences)
_select_buffers_donated = jit_table(_select_sequences, donate_argnames="buffers")


def _check_parents(
    table: CacheTable, parents: Ids, sequences: Ids
) -> tuple[Int32[ArrayLike, " n"], Int32[ArrayLike, " n"]]:
    """Return parents and the sequences that go on from them.

    Raises:
      ValueError: when the shapes differ, or a sequence is known and comes twice or is none.
    """
    ids = table.spec.sequence_ids(parents), table.spec.sequence_ids(sequences)
    if np.ndim(ids[0]) != 1 or np.shape(ids[0]) != np.shape(ids[1]):
        raise ValueError(
            f"expected parents and sequences of one shape [n], got {np.shape(ids[0])} and "
            f"{np.shape(ids[1])}"
        )
    check_distinct(ids[1])
    return ids
