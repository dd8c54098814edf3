"""Edits of sequences: remove, copy, keep, shift and divide. Each edit returns the next cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import Cache, merge, split
from jaxkv.core.array_utils import is_concrete
from jaxkv.core.pytree import pytree_dataclass
from jaxkv.core.validate import (
    check_bounds,
    check_count,
    check_equal_lengths,
    check_int32,
    check_position,
    check_range,
)
from jaxkv.jit_helpers import jit_table
from jaxkv.plan import PlanRefusedError, Reason, result_repr
from jaxkv.spec import are_in_same_streams, check_distinct, mask_unchanged_targets
from jaxkv.table import CacheTable, EditCheck, join_checks

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Bool, Int32, PyTree

    from jaxkv.core.types import Id, Ids


@pytree_dataclass
class EditResult:
    """Result of an edit, which can be unpacked as `cache, ok`.

    cache: The next cache. A refused edit does not change the cache.
    ok: `[]` bool, False if the edit was refused; `[n]` bool if lists were passed.
    reason: A `Reason` with the shape of `ok`, OK if and only if `ok` is True.
    """

    cache: Cache
    ok: Bool[Array, "*n"]
    reason: Int32[Array, "*n"]

    __repr__ = result_repr

    def __iter__(self) -> Iterator[Any]:
        return iter((self.cache, self.ok))

    def __getitem__(self, index: int | slice) -> Any:
        return tuple(self)[index]

    def check(self) -> Cache:
        """Return the cache, or raise if the edit was refused.

        Raises:
          PlanRefusedError: If the edit was refused. The message has advice for each refused range.
          TypeError: If the result is traced; inside of `jit`, use the fields `ok` and `reason`.

        Examples:
          >>> cache = make_cache(CacheSpec.recurrent(layers=1, states={"x": ((), jnp.int32)}))
          >>> cache = prefill(forward, params, cache, [1, 2, 3]).cache
          >>> result = seq_rm(cache, 0, 1)
          >>> Reason(result.reason).name
          'STATE_NOT_STORED'
          >>> result.check()
          Traceback (most recent call last):
          ...
          jaxkv.plan.PlanRefusedError: STATE_NOT_STORED, expected a stored state of exactly ...
        """
        if not is_concrete(self.ok, self.reason):
            raise TypeError("expected a concrete result to check, got a traced one; use result.ok")
        codes = np.asarray(self.reason)
        refused = [(i, Reason(code)) for i, code in enumerate(codes.reshape(-1)) if code]
        if not refused:
            return self.cache
        raise PlanRefusedError(
            "\n".join(
                f"range {i}: " * codes.ndim + f"{reason.name}, {reason.edit_advice}"
                for i, reason in refused
            )
        )


def seq_rm(cache: Cache, seq: Ids | None = None, p0: Ids = 0, p1: Ids | None = None) -> EditResult:
    """Remove a range of positions from one sequence, from several, or from all.

    A cell is free when no sequence owns the cell. A whole sequence can always be removed. An
    encoder source is removed only if the range is from 0 to the end. A refused edit leaves the
    cache unchanged, and `ok` is False. A removal of only some tokens of a sequence can be refused:

    - CONTEXT_EVICTED: with a window, the next token of a sequence would attend to an evicted cell.
    - STATE_NOT_STORED: with recurrent states, tokens follow the range, or tokens precede it and no
      state is stored at the position before the range.
    - PARTS_DIFFER: the last position of a sequence would differ between the parts of a hybrid
      cache.

    Args:
      cache: any cache.
      seq: a sequence id, or a list of sequence ids. None or -1 means every sequence. A traced id
        out of range has no effect, and `ok` is True.
      p0: first position to remove; -1 means 0.
      p1: one past the last position to remove. None or -1 means no end; a list cannot contain None.
        0 means an empty range. If a traced `p0` or `p1` is below -1, the removal is refused
        (ARGUMENT_OUT_OF_RANGE).

    Returns:
      An `EditResult`: the next cache, `ok`, and `reason`, `[]` or `[n]` for lists of length n.
      Several ranges are removed in order; a refused range does not affect the other ranges.

    Raises:
      ValueError: If lists have different lengths, or an argument has two dimensions. A scalar
        applies to all ranges.
      ValueError: If a concrete id is not from -1 to Q - 1, or a concrete bound is below -1.

    Examples:
      Remove the tokens at positions 1 and 2. Then remove the last token:

      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
      >>> cache = make_cache(spec, cells=6, sequences=2)
      >>> cache = prefill(forward, params, cache, [1, 2, 3, 4]).cache
      >>> cache, ok = seq_rm(cache, 0, 1, 3)
      >>> print(show(cache))
      owner    0 . . 0 . .
      position 0 . . 3 . .
      >>> seq_rm(cache, 0, cache.seq_pos_max(0)).cache.seq_pos_max(0).item()
      0

    llama.cpp: `llama_memory_seq_rm`.
    """
    table, buffers = split(cache)
    ids = table.spec.sequence_ids(-1 if seq is None else seq, lowest=-1)
    cuts = ids, *check_bounds(p0, p1)
    check_equal_lengths("seq, p0 and p1", *cuts)
    table, check = _remove(table, *cuts)
    return edit_result(merge(table, buffers), check)


def seq_cp(
    cache: Cache,
    src: Id,
    dst: Ids,
    p0: Id = 0,
    p1: Id | None = None,
    *,
    donate: bool = False,
) -> EditResult:
    """Copy a range of one sequence to other sequences, for example to fork a chat.

    Within a stream, the copy shares the cells of the range and copies no buffer. A target in the
    stream of `src` keeps its own tokens, even at positions in the range. To avoid two tokens at one
    position, first remove the range from the target (`seq_rm`). A copy to another stream copies
    keys and values, and replaces all old tokens of the target. Targets in the same other stream
    share the cells of one copy.

    Recurrent states of a target are replaced if `src` has tokens in the range, or if the target is
    in another stream. The encoder source of a target is replaced unless the range is empty.

    The flag `ok` and the `reason` are `[]`, for all targets together. In these cases, the cache is
    unchanged:

    - OUT_OF_CELLS: with 1 < S < Q, the stream of a target has too few free cells.
    - STATE_NOT_STORED: no recurrent state is stored at the last position of `src` in the range.
    - CONTEXT_EVICTED: with a window, the next token of a target would attend to an evicted cell.
    - PARTS_DIFFER: the last position of a target would differ between the parts of a hybrid cache.
    - ARGUMENT_OUT_OF_RANGE: a traced bound is below -1.

    Args:
      cache: any cache.
      src: id of the sequence to copy.
      dst: sequence id of the target, or a list of ids. Traced ids out of range have no effect.
      p0: first position to copy; -1 means 0.
      p1: one past the last position to copy; None or -1 means no end.
      donate: If True, a copy to another stream outside of `jit` reuses the buffers of the input
        cache, which becomes invalid. If False, the buffers are copied.

    Raises:
      ValueError: If a concrete id is not from 0 to Q - 1, or a concrete bound is below -1.
      ValueError: If `src`, `p0` or `p1` is a list, or `dst` has two dimensions.

    Examples:
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
      >>> cache = make_cache(spec, cells=6, sequences=3)
      >>> cache = prefill(forward, params, cache, [1, 2, 3]).cache
      >>> cache, ok = seq_cp(cache, 0, [1, 2], 0, 2)
      >>> cache.seq_pos_max([0, 1, 2]).tolist(), cache.num_used_cells().item()
      ([2, 1, 1], 3)

      Sequences 2 and 3 are in another stream, in which one cell is free:

      >>> cache = make_cache(spec, cells=3, sequences=4, streams=2)
      >>> batch = make_batch([[1, 2], [3, 4]], sequences=[0, 2])
      >>> cache = prefill(forward, params, cache, batch).cache
      >>> Reason(seq_cp(cache, 0, 3).reason).name
      'OUT_OF_CELLS'

    llama.cpp: `llama_memory_seq_cp`.
    """
    table, buffers = split(cache)
    spec = table.spec
    ids = spec.sequence_id(src), spec.sequence_ids(dst)
    if np.ndim(ids[1]) > 1:
        raise ValueError(
            f"expected dst [n], or [], got {np.shape(ids[1])}; pass an id, or a list of ids"
        )
    args = *ids, *check_range(p0, p1)
    if not np.size(ids[1]):
        return edit_result(cache, join_checks())
    if are_in_same_streams(spec, *ids):
        changed, check = _copy(table, None, *args)
        return edit_result(merge(changed.table, buffers), check)
    return edit_result(*(_copy_donated if donate else _copy)(table, buffers, *args))


def seq_select(cache: Cache, parents: Ids, sequences: Ids, *, donate: bool = False) -> EditResult:
    """Replace each sequence by a copy of its parent, as in a step of beam search.

    All copies are made from the input cache. Sequence q is in stream q // (Q // S). If 1 < S < Q, a
    copy from another stream needs free cells. Cells of replaced sequences count as free unless a
    parent or an unchanged sequence owns them. If a stream has too few cells, `ok` `[]` bool is
    False, `reason` is OUT_OF_CELLS, and the cache is unchanged.

    Args:
      cache: any cache.
      parents: id of the parent of each sequence to replace. A sequence may be its own parent.
      sequences: distinct ids of the sequences to replace. If the id or the parent is traced and out
        of range, the sequence is unchanged and `ok` is True. If a traced id is repeated, parents
        equal to the id are ignored, and the last of its other parents is used.
      donate: If True, a copy between streams outside of `jit` reuses the buffers of the input
        cache, which becomes invalid. If False, the buffers are copied.

    Raises:
      ValueError: If `parents` and `sequences` are not lists of equal length.
      ValueError: If a concrete id to replace is repeated, or a concrete id is not from 0 to Q - 1.

    Examples:
      Both sequences become copies of sequence 1, so the old cells of sequence 0 are free:

      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
      >>> cache = make_cache(spec, cells=6, sequences=2)
      >>> cache = prefill(forward, params, cache, [[1, 2], [3, 4, 5]]).cache
      >>> print(show(seq_select(cache, [1, 1], [0, 1]).cache))
      owner    . . + + + .
      position . . 0 1 2 .

    llama.cpp: beam search called `llama_memory_seq_cp` and `llama_memory_seq_rm` for each beam.
    """
    table, buffers = split(cache)
    ids = _check_parents(table, parents, sequences)
    if not np.size(ids[1]):
        return edit_result(cache, join_checks())
    if are_in_same_streams(table.spec, *ids):
        table, check = _select_within_streams(table, *ids)
        return edit_result(merge(table, buffers), check)
    selected = _select_buffers_donated if donate else _select_buffers
    return edit_result(*selected(table, buffers, *ids))


def seq_keep(cache: Cache, seq: Id) -> EditResult:
    """Remove all sequences except one; the flag `ok` is always True.

    The kept sequence becomes the only owner of its cells. Encoder sources of other sequences are
    removed. For a traced id out of range, the cache is unchanged.

    Args:
      cache: any cache.
      seq: id of the sequence to keep. The sequence may be empty.

    Raises:
      ValueError: If the id is a list, or a concrete id is not from 0 to Q - 1.

    Examples:
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
      >>> cache = make_cache(spec, cells=6, sequences=2)
      >>> cache = prefill(forward, params, cache, [[1, 2], [3]]).cache
      >>> seq_keep(cache, 1).cache.seq_pos_max([0, 1]).tolist()
      [-1, 0]

    llama.cpp: `llama_memory_seq_keep`.
    """
    table, buffers = split(cache)
    table, check = _keep(table, table.spec.sequence_id(seq))
    return edit_result(merge(table, buffers), check)


def seq_add(cache: Cache, seq: Ids, p0: Ids, p1: Ids | None, *, delta: Ids) -> EditResult:
    """Add `delta` to the positions of a range of a sequence, or of several ranges in order.

    An update (`init_update`, then `apply`) rotates all shifted keys at once. Before the update, a
    batch is refused if a sequence of the batch owns a shifted key. A shared cell is shifted for all
    owners. `seq_add` does not check whether positions stay unique. If `Cache.can_seq_add` returns
    False for the same arguments, two tokens of a sequence may get equal positions.

    The flag `ok` and the `reason` are `[]`, or `[n]` for lists of length n. A refused range does
    not affect the other ranges. In these cases, `ok` is False, and the range is unchanged:

    - POSITION_OUT_OF_RANGE: a position would reach 2**31 - 1. With recurrent states, the range has
      tokens and `p0 + delta` is negative.
    - CONTEXT_EVICTED: the next token of a sequence would attend to an evicted cell.
    - PARTS_DIFFER: the last position of a sequence would differ between the parts of a hybrid
      cache.
    - ARGUMENT_OUT_OF_RANGE: a traced bound is below -1.

    Args:
      cache: any cache; attention layers need the argument `rope` of `CacheSpec.attention`.
      seq: id of the sequence to shift, or a list of ids. A traced id out of range has no effect,
        and `ok` is True.
      p0: first position of the range; -1 means 0.
      p1: one past the last position of the range; None or -1 means no end.
      delta: number to add to each position. Tokens with a negative new position are removed.

    Raises:
      ValueError: If attention layers were made without the argument `rope`.
      ValueError: If a concrete id is not from 0 to Q - 1, or a concrete bound is below -1.
      ValueError: If a concrete `abs(delta)` exceeds 2**31 - 1.
      ValueError: If lists have different lengths, or an argument has two dimensions. A scalar
        applies to all ranges.

    Examples:
      Remove two tokens, and close the gap in the positions:

      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, rope=Rope.make(2))
      >>> cache = make_cache(spec, cells=6)
      >>> cache = prefill(forward, params, cache, [1, 2, 3, 4, 5]).cache
      >>> cache, _ = seq_rm(cache, 0, 1, 3)
      >>> cache, ok = seq_add(cache, 0, 3, -1, delta=-2)
      >>> print(show(cache))
      owner    0 . .  0  0 .
      position 0 . .  1  2 .
      shift    0 . . -2 -2 .
      >>> updated = apply(cache, init_update(cache))
      >>> [init_batch(x, make_batch([6])).ok.item() for x in (cache, updated)]
      [False, True]

    llama.cpp: `llama_memory_seq_add`.
    """
    table, buffers = split(cache)
    table.check_can_shift(buffers)
    args = table.spec.sequence_ids(seq), *check_bounds(p0, p1), check_int32(delta, "delta")
    check_equal_lengths("seq, p0, p1 and delta", *args)
    table, check = _add(table, *args)
    return edit_result(merge(table, buffers), check)


def seq_div(cache: Cache, seq: Id, p0: Id, p1: Id | None, *, divisor: Id) -> EditResult:
    """Divide the positions of a range of a sequence by a number, rounding down.

    As in `seq_add`, the position of a shared cell changes for all owners. Keys are rotated only by
    an update (`init_update`, then `apply`). Before the update, a batch is refused if a sequence of
    the batch owns a shifted key.

    After the division, two tokens of a sequence may have equal positions, and a later token may
    have a lower position than an earlier token. In attention layers, a division frees no cell. In
    recurrent layers, a division by more than 1 removes the states in the range, except the current
    state.

    In these cases, the flag `ok` `[]` bool is False, and the cache is unchanged:

    - ARGUMENT_OUT_OF_RANGE: a traced divisor is below 1, or a traced bound is below -1.
    - CONTEXT_EVICTED: the next token of a sequence would attend to an evicted cell.
    - PARTS_DIFFER: the last position of a sequence would differ between the parts of a hybrid
      cache.

    Args:
      cache: any cache; attention layers need the argument `rope` of `CacheSpec.attention`.
      seq: sequence id. For a traced id out of range, the cache is unchanged and `ok` is True.
      p0: first position of the range; -1 means 0.
      p1: one past the last position of the range; None or -1 means no end.
      divisor: at least 1.

    Raises:
      ValueError: If attention layers were made without the argument `rope`.
      ValueError: If a concrete id is not from 0 to Q - 1, or a concrete bound is below -1.
      ValueError: If a concrete divisor is below 1, or an id, a bound or the divisor is a list.

    Examples:
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, rope=Rope.make(2))
      >>> cache = make_cache(spec, cells=4)
      >>> cache = prefill(forward, params, cache, [1, 2, 3, 4]).cache
      >>> print(show(seq_div(cache, 0, 0, -1, divisor=2).cache))
      owner    0  0  0  0
      position 0  0  1  1
      shift    0 -1 -1 -2

    llama.cpp: `llama_memory_seq_div`.
    """
    divisor = check_position(divisor, "divisor")
    if is_concrete(divisor):
        check_count(divisor, "divisor")
    table, buffers = split(cache)
    table.check_can_shift(buffers)
    table, check = _divide(table, table.spec.sequence_id(seq), *check_range(p0, p1), divisor)
    return edit_result(merge(table, buffers), check)


def clear(cache: Cache) -> Cache:
    """Remove all sequences, their encoder sources and their states. The buffers are not changed.

    Examples:
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=6)
      >>> cache = prefill(forward, params, cache, [1, 2]).cache
      >>> clear(cache).num_used_cells().item()
      0

    llama.cpp: `llama_memory_clear`.
    """
    table, buffers = split(cache)
    return merge(_clear(table), buffers)


@jit_table
def _clear(table: CacheTable) -> CacheTable:
    return table.clear().advance_version(table)


def edit_result(cache: Cache, check: EditCheck) -> EditResult:
    """Return the result of an edit, with the next cache."""
    return EditResult(cache=cache, ok=check.ok, reason=check.reason)


def _are_bounds(start: Int32[Array, ""], stop: Int32[Array, ""]) -> Bool[Array, ""]:
    return (start >= -1) & (stop >= -1)


def _jit_range_edit(
    method: Callable[..., tuple[CacheTable, EditCheck]],
) -> Callable[..., tuple[CacheTable, EditCheck]]:
    """Compile a method that edits a range, or several in order; a bound below -1 is refused."""

    def edit_range(table: CacheTable, args: Sequence[jax.Array]) -> tuple[CacheTable, EditCheck]:
        seq, *others = args
        are_bounds = _are_bounds(*others[:2])
        seq = jnp.where(are_bounds, seq, table.spec.sequences)
        edited, check = getattr(table, method.__name__)(seq, *others)
        edited = edited.advance_version(table)
        return edited, join_checks((are_bounds, Reason.ARGUMENT_OUT_OF_RANGE), check)

    def edit_ranges(table: CacheTable, *args: jax.Array) -> tuple[CacheTable, EditCheck]:
        args = tuple(jnp.broadcast_arrays(*args))
        return jax.lax.scan(edit_range, table, args) if args[0].ndim else edit_range(table, args)

    return jit_table(wraps(method, updated=())(edit_ranges))


_remove, _add, _divide = map(
    _jit_range_edit, (CacheTable.seq_rm, CacheTable.seq_add, CacheTable.seq_div)
)


def _copy_sequences(
    table: CacheTable,
    buffers: PyTree,
    src: Int32[Array, ""],
    dst: Int32[Array, "*n"],
    *bounds: Int32[Array, ""],
) -> tuple[Cache, EditCheck]:
    check, _ = table.can_seq_cp(src, dst, *bounds)
    check = join_checks((_are_bounds(*bounds), Reason.ARGUMENT_OUT_OF_RANGE), check)
    dst = jnp.where(check.ok, dst, table.spec.sequences)
    copied, buffers = table.seq_cp(buffers, src, dst, *bounds)
    copied = copied.advance_version(table)
    return Cache(table=copied, buffers=buffers), check


_copy = jit_table(_copy_sequences)
_copy_donated = jit_table(_copy_sequences, donate_argnames="buffers")


@jit_table
def _keep(table: CacheTable, seq: Int32[Array, ""]) -> tuple[CacheTable, EditCheck]:
    return table.seq_keep(seq).advance_version(table), join_checks()


@jit_table
def _select_within_streams(
    table: CacheTable, parents: Int32[Array, " n"], ids: Int32[Array, " n"]
) -> tuple[CacheTable, EditCheck]:
    selected, _ = table.seq_select(None, *mask_unchanged_targets(table.spec, parents, ids))
    return selected.advance_version(table), join_checks()


def _select_sequences(
    table: CacheTable, buffers: PyTree, parents: Int32[Array, " n"], ids: Int32[Array, " n"]
) -> tuple[Cache, EditCheck]:
    parents, ids = mask_unchanged_targets(table.spec, parents, ids)
    check = join_checks((table.can_seq_select(parents, ids), Reason.OUT_OF_CELLS))
    ids = jnp.where(check.ok, ids, table.spec.sequences)
    selected, buffers = table.seq_select(buffers, parents, ids)
    selected = selected.advance_version(table)
    return merge(selected, buffers), check


_select_buffers = jit_table(_select_sequences)
_select_buffers_donated = jit_table(_select_sequences, donate_argnames="buffers")


def _check_parents(
    table: CacheTable, parents: Ids, sequences: Ids
) -> tuple[Int32[ArrayLike, " n"], Int32[ArrayLike, " n"]]:
    ids = table.spec.sequence_ids(parents), table.spec.sequence_ids(sequences)
    if np.ndim(ids[0]) != 1 or np.shape(ids[0]) != np.shape(ids[1]):
        raise ValueError(
            f"expected parents and sequences of one shape [n], got {np.shape(ids[0])} and "
            f"{np.shape(ids[1])}; pass one parent for each sequence"
        )
    check_distinct(ids[1])
    return ids
