"""Context extension: removal of old tokens, or shared positions.

`context_shift` removes tokens. `self_extend` moves groups of tokens to one position each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.api.apply import apply
from jaxkv.api.edits import EditResult
from jaxkv.cache import Cache, merge, split
from jaxkv.core.constants import END
from jaxkv.core.donation import check_not_donated
from jaxkv.core.validate import check_count, check_int32
from jaxkv.jit_helpers import jit_table
from jaxkv.spec import TableSpec
from jaxkv.table import MaintenancePlan

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32

    from jaxkv.core.types import Id
    from jaxkv.table import CacheTable


def context_shift(
    cache: Cache, seq: Id, *, num_keep: Id, num_discard: Id, donate: bool = False
) -> EditResult:
    """Remove tokens of a sequence, and move later tokens to lower positions.

    Positions of later tokens are reduced by `num_discard`. The keys of later tokens are rotated,
    not recomputed: above the first layer, keys and values still depend on the removed tokens.

    Args:
      cache: A cache without recurrent states.
      seq: Id of the sequence.
      num_keep: Number of tokens to keep at the beginning of the sequence.
      num_discard: Number of positions to remove after the kept tokens.
      donate: If True, reuse the buffers of the input cache, which becomes invalid; see `apply`.

    Returns:
      The cache and `ok` `[]` bool. In these cases, `ok` is False, and the cache is unchanged:

      - The last position of the sequence is below `num_keep + num_discard - 1`.
      - Another sequence shares the cell of a token that would move.
      - The next token would attend to an evicted cell.
      - A traced `seq`, `num_keep` or `num_discard` is out of range.

    Raises:
      ValueError: If the cache has recurrent states, was made without `rope`, or was donated.
      ValueError: If an argument is not one number, or a concrete `seq` is not in the cache.
      ValueError: If a concrete `num_keep` is below 0, or a concrete `num_discard` is below 1.

    Examples:
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, rope=Rope.make(2))
      >>> cache = make_cache(spec, cells=6)
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3, 4, 5, 6])))
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
    bounds = (
        _check_token_count(num_keep, "num_keep", low=0),
        _check_token_count(num_discard, "num_discard", low=1),
    )
    table, plan, ok = _context_shift_table(table, table.spec.sequence_id(seq), *bounds)
    return EditResult(apply(merge(table, buffers), plan, donate=donate), ok)


class SelfExtendResult(NamedTuple):
    """Result of `self_extend`. The field `grouped` is an argument of the next call."""

    cache: Cache
    ok: Bool[Array, ""]
    grouped: Int32[Array, ""]


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
      The cache, `ok` `[]` bool and `grouped` `[]` int32. If fewer than `width` tokens are
      ungrouped, nothing changes and `ok` is True. If `ok` is False, the cache is unchanged, and one
      of these conditions is true:

      - Another sequence shares the cell of a token that would move.
      - Two tokens share a position that is not below the argument `grouped`. This happens if the
        argument is below the field `grouped` of the last result, or after an edit.
      - The argument `grouped` is below 0 or exceeds the next position of the sequence.
      - The argument `grouped` is not a multiple of `width // group`.
      - The next position of the sequence, multiplied by `group`, exceeds 2**31 - 1.
      - The next token would attend to an evicted cell.

    Raises:
      ValueError: If the cache has recurrent states, was made without `rope`, or was donated.
      ValueError: If `width` is not a multiple of `group`, or one of them is not in `[1, 2**31)`.
      ValueError: If the argument `grouped` is not one number, or a concrete id is not in the cache.

    Examples:
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, rope=Rope.make(2))
      >>> cache = make_cache(spec, cells=8)
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3, 4, 5])))
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
    args = _check_token_count(grouped, "grouped"), jnp.int32(group), jnp.int32(width)
    table, plan, next_grouped, ok = _self_extend_table(table, table.spec.sequence_id(seq), *args)
    return SelfExtendResult(apply(merge(table, buffers), plan, donate=donate), ok, next_grouped)


def _check_token_count(
    value: Id, name: str, low: int = -END
) -> Int32[Array | np.ndarray | np.int32, ""]:
    if np.ndim(value):
        raise ValueError(
            f"expected one integer for {name}, got the shape {np.shape(value)}; pass a scalar"
        )
    return check_int32(value, name, low=low)


def _check_attention_only(spec: TableSpec, why: str) -> None:
    kinds = [part.kind for part in spec.parts or (spec,)]
    if spec.max_rollback is not None:
        description = f"kind {spec.kind!r}" + (f" ({', '.join(kinds)})" if spec.parts else "")
        raise ValueError(f"expected a cache of attention alone, got {description}; {why}")


@jit_table
def _context_shift_table(
    table: CacheTable,
    seq: Int32[Array, ""],
    num_keep: Int32[Array, ""],
    num_discard: Int32[Array, ""],
) -> tuple[CacheTable, MaintenancePlan, Bool[Array, ""]]:
    """Return the new table, a plan that rotates its keys, and the flag `ok`."""
    next_position = table.seq_pos_max(seq) + 1
    ok = (num_keep >= 0) & (num_discard >= 1) & (num_discard <= next_position - num_keep)
    moves = jnp.where(ok, num_keep + num_discard, 0)
    ok &= _has_unshared_cells(table, seq, moves)
    cut, removed = table.seq_rm(seq, num_keep, moves)
    closed, moved = cut.seq_add(seq, moves, jnp.int32(END), -num_discard, num_keep)
    ok &= removed & moved  # False if evicted tokens would be in the window again
    return *_select_table_and_plan(ok, closed, table), ok


@jit_table
def _self_extend_table(
    table: CacheTable,
    seq: Int32[Array, ""],
    done: Int32[Array, ""],
    group: Int32[Array, ""],
    width: Int32[Array, ""],
) -> tuple[CacheTable, MaintenancePlan, Int32[Array, ""], Bool[Array, ""]]:
    """Return the new table, a plan that rotates its keys, `grouped` and `ok`."""
    next_position = table.seq_pos_max(seq) + 1
    short = jax.lax.div(width, group)
    end = jnp.int32(END)

    def group_once(carry: tuple[CacheTable, jax.Array, jax.Array, jax.Array]) -> tuple:
        table, done, next_position, ok = carry
        # Tokens are moved back to their original positions first, so that groups start at multiples
        # of `group`.
        lift = done * (group - 1)
        first, last = done + lift, done + lift + width
        lifted, lift_ok = table.seq_add(seq, done, end, lift)
        divided, divide_ok = lifted.seq_div(seq, first, last, group)
        closed, close_ok = divided.seq_add(seq, last, end, short - width - lift, first + short)
        return (
            closed,
            done + short,
            next_position + short - width,
            ok & lift_ok & divide_ok & close_ok,
        )

    is_valid = (done >= 0) & (done <= next_position) & (jax.lax.rem(done, short) == 0)
    ok = is_valid & (next_position <= jax.lax.div(end, group))
    ok &= _has_unique_positions(table, seq, done)  # else tokens would be grouped a second time
    ok &= (next_position - width < done) | _has_unshared_cells(table, seq, done)
    more = (table, jnp.where(ok, done, next_position), next_position, ok)
    grouped, new_done, _, ok = jax.lax.while_loop(
        lambda carry: (carry[2] - width >= carry[1]) & carry[3], group_once, more
    )
    return *_select_table_and_plan(ok, grouped, table), jnp.where(ok, new_done, done), ok


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


def _select_table_and_plan(
    ok: Bool[Array, ""], new: CacheTable, old: CacheTable
) -> tuple[CacheTable, MaintenancePlan]:
    """Return the new table and its plan if `ok` is True, else the old table and an empty plan."""
    table = jax.tree.map(lambda x, y: jnp.where(ok, x, y), new, old)
    # If `ok` is False, the plan is made from an empty table, so that shifts of `old` stay pending.
    plan = jax.tree.map(lambda x, y: jnp.where(ok, x, y), new, new.clear()).plan_shift()
    return table, plan
