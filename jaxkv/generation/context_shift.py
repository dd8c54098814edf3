"""Context extension: removal of old tokens, or shared positions.

`context_shift` removes tokens. `self_extend` moves groups of tokens to one position each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxkv.api.apply import apply
from jaxkv.api.edits import EditResult, edit_result
from jaxkv.cache import Cache, merge, split
from jaxkv.core.constants import END
from jaxkv.core.donation import check_not_donated
from jaxkv.core.pytree import pytree_dataclass
from jaxkv.core.validate import check_count, check_equal_lengths, check_int32, check_position
from jaxkv.jit_helpers import jit_table
from jaxkv.plan import Reason
from jaxkv.spec import TableSpec
from jaxkv.table import EditCheck, MaintenancePlan, join_checks

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32

    from jaxkv.core.types import Id, Ids
    from jaxkv.table import CacheTable


def context_shift(
    cache: Cache, seq: Ids, *, num_keep: Ids, num_discard: Ids, donate: bool = False
) -> EditResult:
    """Remove tokens of a sequence, and move later tokens to lower positions.

    Positions of later tokens are reduced by `num_discard`. The keys of later tokens are rotated,
    not recomputed: above the first layer, keys and values still depend on the removed tokens.

    Args:
      cache: A cache without recurrent states.
      seq: Id of the sequence, or a list of ids. A list takes one program and one rotation.
      num_keep: Number of tokens to keep at the beginning of the sequence.
      num_discard: Number of positions to remove after the kept tokens.
      donate: If True, reuse the buffers of the input cache, which becomes invalid; see `apply`.

    Returns:
      The cache, `ok` and `reason`, `[]` or `[n]` for lists of length n. A refused shift does not
      affect the other sequences. In these cases, `ok` is False, and the sequence is unchanged:

      - ARGUMENT_OUT_OF_RANGE: a traced `seq`, `num_keep` or `num_discard` is out of range.
      - TOO_FEW_TOKENS: the last position of the sequence is below `num_keep + num_discard - 1`.
      - SHARED_CELL: another sequence shares the cell of a token that would move.
      - CONTEXT_EVICTED: the next token would attend to an evicted cell.

    Raises:
      ValueError: If the cache has recurrent states, was made without `rope`, or was donated.
      ValueError: If a concrete `seq` is not in the cache.
      ValueError: If a concrete `num_keep` is below 0, or a concrete `num_discard` is below 1.
      ValueError: If lists have different lengths, or an argument has two dimensions. A scalar
        applies to all sequences.

    Examples:
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, rope=Rope.make(2))
      >>> cache = make_cache(spec, cells=6)
      >>> cache = prefill(forward, params, cache, [1, 2, 3, 4, 5, 6]).cache
      >>> cache, ok = generation.context_shift(cache, 0, num_keep=1, num_discard=3)
      >>> print(show(cache))
      owner    0 . . . 0 0
      position 0 . . . 1 2

    llama.cpp: context shift with `n_keep` and `n_discard`.
    """
    table, buffers = split(cache)
    _check_attention_only(table.spec, "a state cannot forget what it has seen")
    table.check_can_shift(buffers)
    check_not_donated(cache)
    args = (
        table.spec.sequence_ids(seq),
        check_int32(num_keep, "num_keep", low=0),
        check_int32(num_discard, "num_discard", low=1),
    )
    check_equal_lengths("seq, num_keep and num_discard", *args)
    table, plan, check = _context_shift_table(table, *args)
    return edit_result(apply(merge(table, buffers), plan, donate=donate), check)


@pytree_dataclass
class SelfExtendResult(EditResult):
    """Result of `self_extend`, which can be unpacked as `cache, ok, grouped`.

    grouped: Argument of the next call.
    """

    grouped: Int32[Array, ""]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.cache, self.ok, self.grouped))


def self_extend(
    cache: Cache, seq: Id, grouped: Id, *, group: int, width: int, donate: bool = False
) -> SelfExtendResult:
    """Move groups of neighbouring tokens to shared positions, to extend the context.

    The first `width` ungrouped tokens are divided into groups of `group` tokens. Each group moves
    to one position, and later tokens get lower positions. The call repeats these steps while at
    least `width` tokens are ungrouped. After the call, distances from new tokens to grouped tokens
    are approximate, and distances to ungrouped tokens are exact. Keys are rotated, not recomputed.
    No cell becomes free.

    Tokens with equal positions attend to each other, and are removed, moved and copied together.
    Since positions are not unique after a grouping, `can_seq_add` is False for each range of the
    sequence that contains tokens.

    Args:
      cache: A cache without recurrent states.
      seq: Id of the sequence. After the call, its next token gets the new last position plus 1.
      grouped: Number of grouped positions. Pass 0 in the first call for a sequence, and the field
        `grouped` of the last result in each later call.
      group: Number of tokens that share a position.
      width: Number of tokens that are grouped at once, a multiple of `group`.
      donate: If True, reuse the buffers of the input cache, which becomes invalid; see `apply`.

    Returns:
      The cache, `ok` `[]` bool, `grouped` `[]` int32 and `reason`. If fewer than `width` tokens are
      ungrouped, nothing changes and `ok` is True. In these cases, `ok` is False, and the cache is
      unchanged:

      - ARGUMENT_OUT_OF_RANGE: the argument `grouped` is below 0, exceeds the next position of the
        sequence, or is not a multiple of `width // group`.
      - POSITION_OUT_OF_RANGE: the next position of the sequence, multiplied by `group`, exceeds
        2**31 - 1.
      - DUPLICATE_POSITION: two tokens share a position that is not below the argument `grouped`.
        This happens if the argument is below the field `grouped` of the last result, or after an
        edit.
      - SHARED_CELL: another sequence shares the cell of a token that would move.
      - CONTEXT_EVICTED: the next token would attend to an evicted cell.

    Raises:
      ValueError: If the cache has recurrent states, was made without `rope`, or was donated.
      ValueError: If `width` is not a multiple of `group`, or one of them is not in `[1, 2**31)`.
      ValueError: If the argument `grouped` is not one number, or a concrete id is not in the cache.

    Examples:
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, rope=Rope.make(2))
      >>> cache = make_cache(spec, cells=8)
      >>> cache = prefill(forward, params, cache, [1, 2, 3, 4, 5]).cache
      >>> cache, ok, grouped = generation.self_extend(cache, 0, 0, group=2, width=4)
      >>> print(show(cache))
      owner    0 0 0 0 0 . . .
      position 0 0 1 1 2 . . .
      >>> grouped.item(), ok.item()
      (2, True)

    llama.cpp: self-extend, `--grp-attn-n` and `--grp-attn-w`.
    """
    table, buffers = split(cache)
    _check_attention_only(
        table.spec, "a state does not know where the tokens that it has seen stood"
    )
    group, width = check_count(group, "group"), check_count(width, "width")
    if width % group:
        raise ValueError(
            f"expected a width that is a multiple of group={group}, got {width}; pass a multiple"
        )
    table.check_can_shift(buffers)
    check_not_donated(cache)
    args = check_position(grouped, "grouped"), jnp.int32(group), jnp.int32(width)
    ids = table.spec.sequence_id(seq)
    table, plan, next_grouped, check = _self_extend_table(table, ids, *args)
    cache = apply(merge(table, buffers), plan, donate=donate)
    return SelfExtendResult(cache=cache, ok=check.ok, reason=check.reason, grouped=next_grouped)


def _check_attention_only(spec: TableSpec, why: str) -> None:
    kinds = [part.kind for part in spec.parts or (spec,)]
    if spec.max_rollback is not None:
        description = f"kind {spec.kind!r}" + (f" ({', '.join(kinds)})" if spec.parts else "")
        raise ValueError(f"expected a cache of attention alone, got {description}; {why}")


@jit_table
def _context_shift_table(
    table: CacheTable, *args: Int32[Array, "*_"]
) -> tuple[CacheTable, MaintenancePlan, EditCheck]:
    """Return the new table, and a plan that rotates its keys."""
    args = tuple(jnp.broadcast_arrays(*args))
    edit = jax.lax.scan if args[0].ndim else lambda step, table, args: step(table, args)
    table, check = edit(_shift_sequence, table, args)
    return table, _plan_shift_if(jnp.any(check.ok), table), check


def _shift_sequence(
    table: CacheTable, args: Sequence[Int32[Array, ""]]
) -> tuple[CacheTable, EditCheck]:
    seq, num_keep, num_discard = args
    next_position = table.seq_pos_max(seq) + 1
    is_valid = (num_keep >= 0) & (num_discard >= 1)
    has_tokens = num_discard <= next_position - num_keep  # False for an unknown sequence
    is_known = (seq >= 0) & (seq < table.spec.sequences)
    moves = jnp.where(is_valid & has_tokens, num_keep + num_discard, 0)
    is_unshared = _has_unshared_cells(table, seq, moves)
    cut, removed = table.seq_rm(seq, num_keep, moves)
    closed, moved = cut.seq_add(seq, moves, jnp.int32(END), -num_discard, num_keep)
    check = join_checks(
        (is_valid, Reason.ARGUMENT_OUT_OF_RANGE),
        (has_tokens, jnp.where(is_known, Reason.TOO_FEW_TOKENS, Reason.ARGUMENT_OUT_OF_RANGE)),
        (is_unshared, Reason.SHARED_CELL),
        removed,  # refused if evicted tokens would be in the window again
        moved,
    )
    closed = closed.advance_version(table)
    return _select_table(check.ok, closed, table), check


@jit_table
def _self_extend_table(
    table: CacheTable,
    seq: Int32[Array, ""],
    done: Int32[Array, ""],
    group: Int32[Array, ""],
    width: Int32[Array, ""],
) -> tuple[CacheTable, MaintenancePlan, Int32[Array, ""], EditCheck]:
    """Return the new table, a plan that rotates its keys, and `grouped`."""
    next_position = table.seq_pos_max(seq) + 1
    short = jax.lax.div(width, group)
    end = jnp.int32(END)

    def group_once(carry: tuple[CacheTable, jax.Array, jax.Array, EditCheck]) -> tuple:
        table, done, next_position, check = carry
        # Tokens are moved back to their original positions first, so that groups start at multiples
        # of `group`.
        # Grouped position i has the tokens of original positions i * group and later, so position
        # `done` is `done * group` originally.
        delta = done * (group - 1)
        first, last = done + delta, done + delta + width
        lifted, lift = table.seq_add(seq, done, end, delta)
        divided, divide = lifted.seq_div(seq, first, last, group)
        closed, close = divided.seq_add(seq, last, end, short - width - delta, first + short)
        return (
            closed,
            done + short,
            next_position + short - width,
            join_checks(check, lift, divide, close),
        )

    is_valid = (done >= 0) & (done <= next_position) & (jax.lax.rem(done, short) == 0)
    check = join_checks(
        (is_valid, Reason.ARGUMENT_OUT_OF_RANGE),
        (next_position <= jax.lax.div(end, group), Reason.POSITION_OUT_OF_RANGE),
        # Else tokens would be grouped a second time.
        (_has_unique_positions(table, seq, done), Reason.DUPLICATE_POSITION),
        (
            (next_position - width < done) | _has_unshared_cells(table, seq, done),
            Reason.SHARED_CELL,
        ),
    )
    more = (table, jnp.where(check.ok, done, next_position), next_position, check)
    grouped, new_done, _, check = jax.lax.while_loop(
        lambda carry: (carry[2] - width >= carry[1]) & carry[3].ok, group_once, more
    )
    grouped = grouped.advance_version(table)
    table = _select_table(check.ok, grouped, table)
    return table, _plan_shift_if(check.ok, table), jnp.where(check.ok, new_done, done), check


def _has_unshared_cells(
    table: CacheTable, seq: Int32[Array, ""], start: Int32[Array, ""]
) -> Bool[Array, ""]:
    """Return whether a sequence is the only owner of its cells at positions from `start` on."""

    # The number of cells that a removal frees depends on other sequences only if a cell is shared.
    def num_freed_cells(table: CacheTable) -> jax.Array:
        end, _ = table.seq_rm(seq, jnp.int32(0), start)
        rest, _ = end.seq_rm(seq, jnp.int32(0), jnp.int32(END))
        return end.num_used_cells() - rest.num_used_cells()

    return num_freed_cells(table) == num_freed_cells(table.seq_keep(seq))


def _has_unique_positions(
    table: CacheTable, seq: Int32[Array, ""], start: Int32[Array, ""]
) -> Bool[Array, ""]:
    """Return whether no two tokens of a sequence share a position from `start` on."""
    rest, _ = table.seq_keep(seq).seq_rm(seq, jnp.int32(0), start)
    return rest.can_seq_add(seq, jnp.int32(0), jnp.int32(END), jnp.int32(0))


def _select_table(ok: Bool[Array, ""], new: CacheTable, old: CacheTable) -> CacheTable:
    return jax.tree.map(lambda x, y: jnp.where(ok, x, y), new, old)


def _plan_shift_if(ok: Bool[Array, ""], table: CacheTable) -> MaintenancePlan:
    """Return the plan of an update if `ok` is True, else a plan without keys to rotate."""
    # If `ok` is False, the plan is made from an empty table, so that shifts stay pending.
    return _select_table(ok, table, table.clear()).plan_shift()
