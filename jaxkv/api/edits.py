"""Edits of sequences: remove, copy, keep, shift. Each returns the next cache.

*Ids.* A sequence id is an integer from 0 to Q - 1. A concrete id outside of this range raises
ValueError. A traced one leaves the cache unchanged.

*Ranges.* `p0` to `p1` - 1 are positions. `p0` of -1 is 0, `p1` of None or -1 is no end, and `p1` of
0 is an empty range. A concrete bound below -1 raises ValueError; with a traced one `ok` is False.

*Refusals.* If `ok` is False the cache is unchanged. This happens if a part of the cache cannot make
the edit, or if a sequence could not continue from its end afterwards (`Cache.can_resume`).

An edit of a stream makes all ubatches stale that were planned for that stream. `is_current` lists
the edits that make other plans stale.
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
    """Result of an edit.

    cache: The next cache.
    ok: False if the edit was refused; `cache` is then unchanged by it. `[n]` for n edits.
    """

    cache: Cache
    ok: Bool[Array, "*n"]


def seq_rm(cache: Cache, seq: Ids | None = None, p0: Ids = 0, p1: Ids | None = None) -> EditResult:
    """Remove a range of positions from one sequence, from several, or from all.

    A whole sequence can always be removed. Otherwise `ok` is False:

    - with a window that has evicted cells, if the next token would attend to an evicted cell,
    - with recurrent states, if no state is stored right before the range, or tokens follow the
      range.

    An encoder source (`CacheSpec.cross_attention`) is removed only with its whole sequence.

    Args:
      cache: any cache.
      seq: sequence ids. None or -1 is every sequence.
      p0: first position to remove. -1 is 0.
      p1: one past the last position. None or -1 is no end.

    Returns:
      The next cache, and `ok` of each range. Several ranges are removed in order. A cell is free
      once its last owner is removed.

    Raises:
      ValueError: If `seq`, `p0` and `p1` are not scalars or lists of one length, an id is not from
        0 to Q - 1, or a concrete bound is below -1.

    Examples:
      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=6, sequences=2
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3, 4])))
      >>> cache, ok = seq_rm(cache, 0, 1, 3)
      >>> print(show(cache))
      owner    0 . . 0 . .
      position 0 . . 3 . .

      The first and the last position are unchanged by a hole:

      >>> cache.seq_pos_min(0).item(), cache.seq_pos_max(0).item()
      (0, 3)

      Remove the last token (a p0 of -1 would remove all):

      >>> shorter, ok = seq_rm(cache, 0, cache.seq_pos_max(0))
      >>> shorter.seq_pos_max(0).item()
      0

      Remove a range from each of two sequences:

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
        raise ValueError(
            f"expected seq, p0 and p1 of one shape [n], or [], got {axes}; pass scalars, or "
            "lists of one length"
        )
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
    """Copy a range of one sequence to others: fork a conversation.

    Within a stream the cells are shared and no buffer is copied. `dst` keeps the cells that it has,
    so remove those at the same positions first (`seq_rm`). A copy to another stream copies the
    buffers and replaces all cells of `dst`; several `dst` in one stream share one copy. Recurrent
    states and the encoder source of `dst` are replaced, unless the range is empty.

    With one stream for each sequence a copy always finds enough free cells. `ok` is False:

    - if sequences share several streams, and a stream has too few free cells;
    - if no recurrent state is stored at the end of the range;
    - if the next token of a `dst` would attend to an evicted cell.

    Args:
      cache: any cache.
      src: sequence to copy.
      dst: sequences that get its cells.
      p0: first position to copy.
      p1: one past the last position.
      donate: If True, a copy between streams outside of `jit` reuses the buffers of `cache`, which
        becomes invalid. If False it copies all buffers.

    Returns:
      The next cache, and `ok`. Repeating a copy has no effect.

    Examples:
      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=6, sequences=3
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
      >>> cache, ok = seq_cp(cache, 0, [1, 2], 0, 2)
      >>> cache.seq_pos_max([0, 1, 2]).tolist(), cache.num_used_cells().item()
      ([2, 1, 1], 3)

      With one stream for each sequence:

      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=4, sequences=2, streams=2
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
      >>> print(show(seq_cp(cache, 0, 1, 1).cache))
      owner    0 0 0 .
      position 0 1 2 .
      owner    . 1 1 .
      position . 1 2 .

      With two streams, sequences 0 and 1 share the first, and 2 and 3 the second:

      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=3, sequences=4, streams=2
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([[1, 2], [3, 4]], sequences=[0, 2])))
      >>> print(show(seq_cp(cache, 0, [1, 2, 3], 1).cache))
      owner    0 + .
      position 0 1 .
      owner    + . .
      position 1 . .

      The cells of sequence 2 were replaced. A copy to 3 alone needs two free cells in its stream:

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
    """Replace each sequence by a copy of its parent: the step of a beam search.

    All copies read the cache as it was before the call. Within a stream only the table changes;
    copies from another stream work as in `seq_cp`. If sequences share several streams, `ok` is
    False if a stream has too few free cells for the copies. The replaced cells are freed only
    afterwards.

    Args:
      cache: any cache.
      parents: the sequence that each one is replaced by. Repeats, and the sequence itself, are
        allowed.
      sequences: distinct sequences to replace. Others are unchanged.
      donate: see `seq_cp`.

    Returns:
      The next cache, and `ok`.

    Raises:
      ValueError: If the shapes differ, or a concrete id is repeated in `sequences` or is not from 0
        to Q - 1.

    Examples:
      Both beams continue from sequence 1; the cells of 0 are free:

      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=6, sequences=2
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([[1, 2], [3, 4, 5]])))
      >>> print(show(seq_select(cache, [1, 1], [0, 1]).cache))
      owner    . . + + + .
      position . . 0 1 2 .

      Two sequences swap:

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
    """Remove all sequences but one.

    Args:
      cache: any cache.
      seq: sequence to keep. It becomes the only owner of its cells.

    Returns:
      The next cache, and `ok`, which is True.

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
    """Shift the positions of a range of a sequence.

    Keys are rotated later, all at once, by `apply(cache, init_update(cache))`. Before that, a batch
    that would attend to a shifted key is refused. A cell that several sequences share moves for
    each of them; `Cache.can_seq_add` returns whether each keeps one token at a position.

    Args:
      cache: any cache; attention layers need `rope=`.
      seq: sequence to shift.
      p0: first position of the range.
      p1: one past the last position.
      delta: number added to each position. Tokens whose position becomes negative are removed.

    Returns:
      The next cache, and `ok`: False if a position would reach 2**31 - 1, a recurrent state would
      get a negative position, or a next token would attend to an evicted cell.

    Raises:
      ValueError: If attention layers were made without `rope=`, so that keys cannot be rotated.
      ValueError: If a concrete id is not from 0 to Q - 1, or a concrete bound is below -1.

    Examples:
      Remove a passage and close the gap:

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
    """Divide the positions of a range of a sequence, rounding down.

    Keys are rotated later, and shared cells move for all owners, see `seq_add`. Several tokens of a
    sequence may then have the same position, or a lower one than their predecessor; no cell is
    freed. Of recurrent states only the last one at a position is kept.

    Args:
      cache: any cache; attention layers need `rope=`.
      seq: sequence to change.
      p0: first position of the range.
      p1: one past the last position.
      divisor: an integer of at least 1.

    Returns:
      The next cache, and `ok`: False if a traced divisor is below 1, or a next token would attend
      to an evicted cell.

    Raises:
      ValueError: If a concrete divisor is below 1, and as in `seq_add`.

    Examples:
      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, rope=make_rope(2)), cells=4
      ... )
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3, 4])))
      >>> print(show(seq_div(cache, 0, 0, -1, divisor=2).cache))
      owner    0  0  0  0
      position 0  0  1  1
      owed     0 -1 -1 -2

    llama.cpp: `llama_memory_seq_div`. `owed` is the new position minus the old one.
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
    """Remove all sequences. Buffers keep their bytes, which no token attends to.

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
    """Return whether traced bounds are at least -1."""
    return (start >= -1) & (stop >= -1)


def _edit_range(
    edit: Callable[..., tuple[CacheTable, Bool[Array, ""]]],
    spec: TableSpec,
    seq: Int32[Array, ""],
    *args: Int32[Array, ""],
) -> tuple[CacheTable, Bool[Array, ""]]:
    """Edit a range of a sequence; with invalid bounds `ok` is False."""
    are_bounds = _are_bounds(*args[:2])
    edited, ok = edit(jnp.where(are_bounds, seq, spec.sequences), *args)
    return edited, ok & are_bounds


@jit_table
def _remove_ranges(table: CacheTable, *cuts: jax.Array) -> tuple[CacheTable, Bool[Array, "*n"]]:
    """Remove ranges in order."""

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
    """Return the cache after `CacheTable.seq_cp`, unchanged if `ok` is False; and `ok`."""
    ok, _ = table.can_seq_cp(src, dst, *bounds)
    ok &= _are_bounds(*bounds)
    dst = jnp.where(ok, dst, table.spec.sequences)
    table, buffers = table.seq_cp(buffers, src, dst, *bounds)
    return Cache(table=table, buffers=buffers), ok


_copy = jit_table(_copy_sequences)
_copy_donated = jit_table(_copy_sequences, donate_argnames="buffers")


@jit_table
def _keep(table: CacheTable, seq: Int32[Array, ""]) -> tuple[CacheTable, Bool[Array, ""]]:
    """Return the table after `CacheTable.seq_keep`, and `ok`, True."""
    return table.seq_keep(seq), jnp.array(True)


@jit_table
def _select_within_streams(
    table: CacheTable, parents: Int32[Array, " n"], ids: Int32[Array, " n"]
) -> tuple[CacheTable, Bool[Array, ""]]:
    """Return the table after `CacheTable.seq_select` within streams, and `ok`, True."""
    table, _ = table.seq_select(None, *mask_unchanged_targets(table.spec, parents, ids))
    return table, jnp.array(True)


def _select_sequences(
    table: CacheTable, buffers: PyTree, parents: Int32[Array, " n"], ids: Int32[Array, " n"]
) -> tuple[Cache, Bool[Array, ""]]:
    """Return the cache after `CacheTable.seq_select`, unchanged if `ok` is False; and `ok`."""
    parents, ids = mask_unchanged_targets(table.spec, parents, ids)
    ok = table.can_seq_select(parents, ids)
    ids = jnp.where(ok, ids, table.spec.sequences)
    return merge(*table.seq_select(buffers, parents, ids)), ok


_select_buffers = jit_table(_select_sequences)
_select_buffers_donated = jit_table(_select_sequences, donate_argnames="buffers")


def _check_parents(
    table: CacheTable, parents: Ids, sequences: Ids
) -> tuple[Int32[ArrayLike, " n"], Int32[ArrayLike, " n"]]:
    """Return parents and targets as int32 ids.

    Raises:
      ValueError: If the shapes differ, or a concrete target is repeated or not from 0 to Q - 1.
    """
    ids = table.spec.sequence_ids(parents), table.spec.sequence_ids(sequences)
    if np.ndim(ids[0]) != 1 or np.shape(ids[0]) != np.shape(ids[1]):
        raise ValueError(
            f"expected parents and sequences of one shape [n], got {np.shape(ids[0])} and "
            f"{np.shape(ids[1])}; pass one parent for each sequence"
        )
    check_distinct(ids[1])
    return ids
