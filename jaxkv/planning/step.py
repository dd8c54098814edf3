"""Planning the next tokens of several sequences: the short calls for loops that generate."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import Ubatch, make_batch, mask_slots
from jaxkv.cache import Cache, split
from jaxkv.places import NO_SLOT, check_bool, check_int32, is_concrete
from jaxkv.plan import Plan, Reason
from jaxkv.planning.layout import tokens_first
from jaxkv.planning.place import plan_single_ubatch
from jaxkv.spec import TableSpec, check_once
from jaxkv.tables import jit_table


def plan_step(
    cache: Cache, tokens: jax.Array, sequences: jax.Array, valid: jax.Array
) -> tuple[Ubatch, jax.Array]:
    """Plan one more token for each of several sequences.

    Args:
      cache: any cache.
      tokens: `[T]` int32, one for each sequence.
      sequences: `[T]` int32, the sequences, each at most once.
      valid: `[T]` bool, the sequences that go on; the others are padding.

    Returns:
      A ubatch whose outputs are all T tokens in this order, and `ok`, `[]` bool. When it is False
      the ubatch changes nothing: there is no room for all of them, a sequence comes twice, keys are
      not rotated yet, or a window has given up what a token would see. `init_batch(...).check()`
      says which.

    Raises:
      ValueError: when the shapes differ, or a sequence is known and comes twice or is none.
      TypeError: when tokens or sequences are no integers, or `valid` no bools.

    Examples:
      >>> cache = make_kv_cache(layers=1, cells=4, kv_heads=1, head_dim=2, sequences=2)
      >>> ubatch, ok = plan_step(cache, jnp.array([7, 8]), jnp.arange(2), jnp.array([True, True]))
      >>> ok.item(), ubatch.slots.tolist(), ubatch.outputs.tolist()
      (True, [[0, 1]], [0, 1])
    """
    shapes = [np.shape(x) for x in (tokens, sequences, valid)]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise ValueError(
            f"wanted tokens, sequences and valid of one shape [T], got {shapes[0]}, {shapes[1]} "
            f"and {shapes[2]}"
        )
    tokens, valid = check_int32(tokens, "tokens"), check_bool(valid, "valid")
    return plan_tokens(cache, tokens[:, None], sequences, valid[:, None])


def plan_tokens(
    cache: Cache, tokens: jax.Array, sequences: jax.Array, valid: jax.Array
) -> tuple[Ubatch, jax.Array]:
    """Plan some more tokens for each of several sequences, all of which output logits.

    Args:
      cache: any cache.
      tokens: `[T, n]` int32, n for each sequence.
      sequences: `[T]` int32, the sequences, each at most once.
      valid: `[T, n]` bool, the tokens that are there; the others are padding, wherever they stand.

    Returns:
      A ubatch whose outputs are all T * n tokens in this order, so that its logits are `[T, n, V]`
      when they are reshaped; and `ok`, `[]` bool, see `plan_step`.

    Raises:
      ValueError: when the shapes differ, or a sequence is known and comes twice or is none.
      TypeError: when tokens or sequences are no integers, or `valid` no bools.

    Examples:
      Three tokens for sequence 1, and one for sequence 0:

      >>> cache = make_kv_cache(layers=1, cells=6, kv_heads=1, head_dim=2, sequences=2)
      >>> tokens, valid = jnp.array([[7, 8, 9], [5, 0, 0]]), jnp.array([[1, 1, 1], [1, 0, 0]])
      >>> ubatch, ok = plan_tokens(cache, tokens, jnp.array([1, 0]), valid)
      >>> print(show(apply(cache, ubatch)))
      owner    1 1 1 0 . .
      position 0 1 2 0 . .
    """
    table, _ = split(cache)
    plan = plan_next(table, *checked_next(table.spec, tokens, sequences, valid))
    return plan.ubatches[0], plan.ok


@jit_table
def plan_next(table: Any, tokens: Any, sequences: Any, valid: Any) -> Plan:
    """Return the plan of `plan_tokens`; one that comes twice is refused as DUPLICATE_POSITION."""
    spec, (count, length) = table.spec, np.shape(valid)
    flat = make_batch(
        tokens.reshape(-1),
        sequences=jnp.broadcast_to(sequences[:, None], (count, length)).reshape(-1),
        valid=valid.reshape(-1),
        outputs=valid.reshape(-1),
    )
    index, where = _rows_of(spec, sequences, valid)
    plan = plan_single_ubatch(table, flat, _ranks(valid), index, outputs=count * length)
    goes_on = jnp.where(jnp.any(valid, axis=1), sequences, spec.sequences)
    twice = jnp.zeros(spec.sequences, jnp.int32).at[goes_on].add(1, mode="drop") > 1
    once = ~jnp.any(twice)
    order = jnp.where(flat.valid, jnp.arange(count * length, dtype=jnp.int32), NO_SLOT)
    ubatch = replace(plan.ubatches[0], outputs=where.reshape(-1), output_index=order)
    reason = jnp.where(twice, Reason.DUPLICATE_POSITION, plan.reason)
    return replace(
        plan,
        ubatches=(mask_slots(once, ubatch),),
        ok=plan.ok & once,
        reason=reason,
        fits=reason == Reason.OK,
    )


def checked_next(spec: TableSpec, tokens: Any, sequences: Any, valid: Any) -> tuple[Any, Any, Any]:
    """Return what `plan_tokens` is given as int32 and bool, or raise."""
    tokens, valid = check_int32(tokens, "tokens"), check_bool(valid, "valid")
    shapes = [np.shape(x) for x in (tokens, sequences, valid)]
    if len(shapes[0]) != 2 or shapes != [shapes[0], shapes[0][:1], shapes[0]]:
        raise ValueError(
            f"wanted tokens and valid of one shape [T, n], and sequences [T], got {shapes[0]}, "
            f"{shapes[2]} and {shapes[1]}"
        )
    if 0 in shapes[0]:
        raise ValueError(f"wanted a token at least, got tokens of the shape {shapes[0]}")
    if is_concrete(sequences, valid):
        ids = np.asarray(sequences)[np.any(np.asarray(valid), axis=1)]
        spec.sequence_ids(ids)
        check_once(ids)
    return tokens, check_int32(sequences, "sequences"), valid


def _ranks(valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what `layout.turn_in_sequence` does for tokens `[T, n]` of rows; `[T * n]` each.

    No two rows are of one sequence: such a plan is refused, whatever its ranks.
    """
    index = jnp.arange(valid.size, dtype=jnp.int32).reshape(valid.shape)
    ranks = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - valid
    latest = jax.lax.cummax(jnp.where(valid, index, -1), axis=1)
    before = jnp.where(ranks == 0, index, jnp.roll(latest, 1, axis=1))
    return ranks.reshape(-1), before.reshape(-1)


def _rows_of(spec: TableSpec, ids: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lay out `[T, n]` tokens: the index of the ubatch, and where each token stands in it.

    The index is `[T, n]` int32, or one row of all; the places are `[T, n]` int32. `ids` is `[T]`.
    """
    count, length = valid.shape
    index = jnp.arange(count * length, dtype=jnp.int32).reshape(count, length)
    if not spec.single_sequence_rows:
        return index.reshape(1, -1), index
    row = jnp.arange(count, dtype=jnp.int32)
    if count == spec.sequences:  # row r is that of sequence r
        row = ids
    if length == 1:
        return index, row[:, None]
    first = tokens_first(valid)
    where = row[:, None] * length + jnp.argsort(first, axis=1).astype(jnp.int32)
    return index[:, :1] + first, where
