"""Planners of the public interface: `init_batch`, `init_full` and `plan_step`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import Batch, check_extra, make_batch
from jaxkv.cache import Cache, split
from jaxkv.core.array_utils import DROP, is_concrete, next_power_of_two
from jaxkv.core.constants import NO_SLOT
from jaxkv.core.validate import check_bool, check_count, check_int32
from jaxkv.jit_helpers import jit_table
from jaxkv.plan import Plan, Reason
from jaxkv.planning.checks import check_batch, token_sequence_pairs
from jaxkv.planning.fit import needs_only_free_cells, place_at_most_one, place_one_by_one
from jaxkv.planning.layout import (
    MIN_OUTPUTS,
    SplitBy,
    count_rows,
    lay_out_batch,
    layout_single_ubatch,
    order_tokens_first,
    rank_in_sequence,
)
from jaxkv.planning.placement import finish_plan, place_ubatch, plan_single_ubatch
from jaxkv.spec import TableSpec, check_distinct
from jaxkv.ubatch import Ubatch, mask_slots

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Array, Bool, Int32, PyTree, Shaped

    from jaxkv.core.types import Flags, Ids, Tokens
    from jaxkv.table import CacheTable

UBATCH_SIZE = 512
"""Default number of tokens of a ubatch."""


def init_batch(
    cache: Cache,
    batch: Batch,
    *,
    ubatch_size: int | None = None,
    split_by: SplitBy | None = None,
    encoder: bool = False,
    append: bool = False,
) -> Plan:
    """Plan slots for the tokens of a batch. The cache is unchanged, and only its table is read.

    The new positions of a sequence must be its last position + 1, + 2 and so on; an empty sequence
    may start at any position. The plan is refused for other positions, for too few free cells
    (`Reason.OUT_OF_CELLS`), and for the other causes in `Reason`.

    Args:
      cache: any cache.
      batch: the batch, from `make_batch`.
      ubatch_size: largest number of tokens computed at once; by default 512. If a cache with a
        window has the default number of cells, its own `ubatch_size` (see `make_cache`) is the
        default and the upper limit. The last ubatch is padded to a power of two, at most
        `ubatch_size`, so that few shapes are compiled. Ignored with `encoder`, and for a traced
        batch of rows, which is one ubatch.
      split_by: how the batch is cut: "simple", in token order; "equal", with equally many tokens of
        several sequences; "sequence", with one sequence at a time. The default is "simple" for a
        cache of one stream without recurrent layers. For other caches, the default is one ubatch
        with a row for each sequence, if this ubatch needs little padding and requires no more cells
        than the ubatches of "equal". Otherwise the default is "equal".
      encoder: if True, plan the tokens or embeddings (such as audio frames) that an encoder reads.
        The sequences must have no source yet (else `Reason.ENCODER_ALREADY_WRITTEN`). The batch
        becomes one ubatch of any length. The ubatch has a row for each sequence; the rows of a
        traced batch are unchanged. Positions start at 0. After `apply`, write the keys and values
        of each cross-attention layer with `write_kv`.
      append: if True, the tokens for an encoder are added to the sources of their sequences, and
        positions continue after the last one of each source. Forks keep the source they had.

    Returns:
      A `Plan`: the tuple `ubatches`, `ok` `[]` bool, `reason` `[Q]` int32 (a `Reason` for each
      sequence), and `fits` `[Q]` bool. Call `apply` with each of the `ubatches`, and run the model
      after each; a plan of one ubatch can be passed as a whole. If the plan is refused, `ok` is
      False, `apply` of its ubatches has no effect, and `plan.check()` raises a `PlanRefusedError`.
      `fits` has sequences that fit together, those with the fewest new tokens first (see `Plan`):
      a plan of `batch.keep_sequences(plan.fits)` with the same options is not refused.

    Raises:
      TypeError: If `encoder` is True, and the cache has no cross-attention layers.
      TypeError: If `append` is True, and `encoder` is not.
      ValueError: If a concrete sequence id is not from 0 to Q - 1, or no token is valid.
      ValueError: If a traced batch without rows has more than `ubatch_size` tokens.
      ValueError: If a traced batch has no rows, and the cache has several streams or recurrent
        layers.
      ValueError: If `ubatch_size` is below 1 or exceeds the limit of the cache.
      ValueError: If `split_by` is unknown.
      ValueError: If `encoder` is True and the batch has positions.
      ValueError: If a token belongs to several sequences, and `encoder` is True or the cache has
        recurrent layers.

    Examples:
      The batch does not fit into four cells, but the shorter prompt does:

      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
      >>> cache = make_cache(spec, cells=4, sequences=2)
      >>> batch = make_batch([[1, 2, 3], [4, 5]])
      >>> plan = init_batch(cache, batch)
      >>> plan.ok.item(), plan.fits.tolist()
      (False, [False, True])
      >>> cache = prefill(forward, params, cache, batch.keep_sequences(plan.fits)).cache
      >>> cache.seq_pos_max([0, 1]).tolist()
      [-1, 1]

    llama.cpp: `llama_memory_i::init_batch`; with `encoder`, `llama_encode`.
    """
    table, _ = split(cache)
    if not isinstance(batch, Batch):
        raise TypeError(f"expected a batch, got {type(batch)}; make_batch(tokens) makes one")
    if encoder:
        return _init_encoder(table, batch, append=append)
    if append:
        raise TypeError("expected encoder=True with append=True, got encoder=False; pass both")
    ubatch_size = check_ubatch_size(table.spec, ubatch_size)
    plan_part = partial(_plan_ubatches, table, ubatch_size=ubatch_size, split_by=split_by)
    plan = plan_part(batch)
    if len(plan.ubatches) == 1 or needs_only_free_cells(table.spec):
        return plan
    if is_concrete(plan.ok):
        return plan if plan.ok else place_one_by_one(table, batch, plan, plan_part)
    return place_at_most_one(table, batch, plan, ubatch_size)


def _plan_ubatches(
    table: CacheTable, batch: Batch, ubatch_size: int, split_by: SplitBy | None
) -> Plan:
    """Plan a batch; with several ubatches that free cells, a refused plan has one reason."""
    flat, parts, outputs = lay_out_batch(table.spec, batch, ubatch_size, split_by)
    ranks = rank_in_sequence(*token_sequence_pairs(flat))
    if len(parts) == 1:
        return plan_single_ubatch(table, flat, ranks, parts[0], outputs=outputs)
    # One program is compiled for each shape of a ubatch, for any number and order of ubatches.
    builder = check_batch(table, flat, ranks, one_ubatch=False)
    ubatches = []
    for part, continues_later in zip(
        parts, _sequences_with_more(table.spec, flat, parts), strict=True
    ):
        builder, ubatch = place_ubatch(builder, part, continues_later, outputs=outputs)
        ubatches.append(ubatch)
    plan = finish_plan(builder)
    return replace(plan, ubatches=tuple(_mask_ubatch_unless(table, plan.ok, x) for x in ubatches))


def init_full(cache: Cache, *, ubatch_size: int | None = None, outputs: int | None = None) -> Plan:
    """Return the shapes of the largest plan, to compile a model ahead of time or count bytes.

    No array is allocated; the argument `cache` may be a tree of shapes (`jax.eval_shape`).

    Args:
      cache: any cache, or its shapes.
      ubatch_size: largest number of tokens computed at once, see `init_batch`.
      outputs: largest number of tokens with logits in a ubatch; by default the number of
        sequences.

    Returns:
      A plan of one ubatch whose arrays are `jax.ShapeDtypeStruct`. The shape of the tokens is
      `[1, ubatch_size]`. If the cache has several streams or recurrent states, the ubatch has a row
      for each of the Q sequences, and the shape of the tokens is `[Q, max(ubatch_size // Q, 1)]`.
      The plan does not depend on the number of free cells. The number of elements of
      `Ubatch.outputs` is the argument `outputs`, rounded up to a power of two. This number is at
      least 8, but at most the number of tokens.

    Raises:
      ValueError: If an argument is below 1, or `ubatch_size` exceeds the limit of the cache.

    Examples:
      >>> spec = CacheSpec.attention(layers=2, kv_heads=8, head_dim=128)
      >>> cache = jax.eval_shape(lambda: make_cache(spec, cells=4096, sequences=4))
      >>> ubatch = init_full(cache, outputs=20).ubatch
      >>> ubatch.tokens.shape, ubatch.outputs.shape
      ((1, 512), (32,))
      >>> compiled = jax.jit(apply).lower(cache, ubatch).compile()

    llama.cpp: `llama_memory_i::init_full`.
    """
    table, _ = split(cache)
    spec = table.spec
    num_outputs = spec.sequences if outputs is None else check_count(outputs, "outputs")
    rows = spec.sequences if spec.single_sequence_rows else 1
    tokens = max(check_ubatch_size(spec, ubatch_size) // rows, 1)
    index = np.full((rows, tokens), NO_SLOT, np.int32)
    flat = make_batch(np.zeros(index.size, np.int32))
    ranks = rank_in_sequence(flat.sequences, flat.valid)
    plan = partial(
        plan_single_ubatch, index=index, outputs=next_power_of_two(max(num_outputs, MIN_OUTPUTS))
    )
    return jax.eval_shape(lambda table: plan(table, flat, ranks), table)


def _sequences_with_more(spec: TableSpec, flat: Batch, parts: list[PyTree]) -> list[PyTree]:
    """Return for each ubatch which sequences continue in a later ubatch, `[Q]` bool."""
    later, later_of_ubatch = np.zeros(spec.sequences, bool), []
    for part in reversed(parts):
        later_of_ubatch.append(later.copy())
        later[flat.sequences[part[part != NO_SLOT]]] = True
    return later_of_ubatch[::-1]


def check_ubatch_size(spec: TableSpec, ubatch_size: int | None) -> int:
    """Return `ubatch_size` or its default; raise if it exceeds the `ubatch_size` of the cache."""
    if ubatch_size is None:
        return UBATCH_SIZE if spec.ubatch_size is None else spec.ubatch_size
    ubatch_size = check_count(ubatch_size, "ubatch_size")
    if spec.ubatch_size is not None and ubatch_size > spec.ubatch_size:
        raise ValueError(
            f"expected ubatch_size of at most {spec.ubatch_size}, for which the cache was sized, "
            f"got {ubatch_size}; make it with ubatch_size={ubatch_size}, or plan smaller ones"
        )
    return ubatch_size


@jit_table
def _mask_ubatch_unless(table: CacheTable, ok: Bool[Array, ""], ubatch: Ubatch) -> Ubatch:
    """If `ok` is False, replace all slots of a ubatch by indices past the last cell."""
    del table
    return mask_slots(ok, ubatch)


def plan_step(
    cache: Cache,
    tokens: Tokens,
    *,
    sequences: Ids | None = None,
    active: Flags | None = None,
    extra: Mapping[str, PyTree] | None = None,
) -> Plan:
    """Plan the next tokens of several sequences; every token outputs logits.

    Args:
      cache: any cache.
      tokens: `[Z]` int32, one token for each sequence; or `[Z, n]`, n tokens for each sequence.
      sequences: `[Z]` int32, distinct sequence ids; by default 0, 1, 2 and so on. The id of a row
        without active tokens is not checked.
      active: bool, or concrete 0 and 1, in the shape of `tokens`. Inactive tokens are padding and
        may be at any index. By default all tokens are active.
      extra: additional model inputs by name, in the shape of `tokens` and any axes after it, see
        `make_batch`.

    Returns:
      A plan of one ubatch, `plan.ubatch`. The ubatch has an output for each element of the
      argument `tokens`, in the same order, so logits can be reshaped to `[Z, V]` or `[Z, n, V]`. If
      the flag `ok` `[]` bool is False, the plan has no effect. The array `reason` `[Q]` int32 has a
      `Reason` for each sequence id of the cache, such as OUT_OF_CELLS or NEGATIVE_TOKEN. If the
      plan is refused because of other sequences, a sequence that fits has OK. If a traced id is
      invalid, all sequences without another fault have UNKNOWN_SEQUENCE.

    Raises:
      ValueError: If shapes differ, `tokens` is empty, or a concrete id is repeated or invalid.

    Examples:
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
      >>> cache = make_cache(spec, cells=3, sequences=2)
      >>> plan = plan_step(cache, [7, 8])
      >>> plan.ok.item(), plan.ubatch.slots.tolist(), plan.ubatch.outputs.tolist()
      (True, [[0, 1]], [0, 1])

      Three cells are too few for one token of sequence 0 and three tokens of sequence 1. The
      sequence with fewer tokens fits:

      >>> tokens, active = [[7, 8, 9], [5, 0, 0]], [[1, 1, 1], [1, 0, 0]]
      >>> plan = plan_step(cache, tokens, sequences=[1, 0], active=active)
      >>> [Reason(reason).name for reason in plan.reason.tolist()]
      ['OK', 'OUT_OF_CELLS']

    llama.cpp: `init_batch` with a `llama_batch` of one token for each sequence.
    """
    table, _ = split(cache)
    rows = check_int32(tokens, "tokens")
    shape = np.shape(rows)
    valid = np.ones(shape, bool) if active is None else check_bool(active, "active")
    ids: PyTree = np.arange(shape[0] if shape else 0) if sequences is None else sequences
    shapes = [shape, np.shape(valid), np.shape(ids)]
    if len(shape) not in (1, 2) or shapes[1:] != [shape, shape[:1]]:
        raise ValueError(
            f"expected tokens [Z] or [Z, n], active of the same shape and sequences [Z], got "
            f"{shapes[0]}, {shapes[1]} and {shapes[2]}; pass one token and one sequence for each "
            "row"
        )
    inputs = check_extra(extra, shape) or None
    if len(shape) == 1:
        rows, valid = rows[:, None], valid[:, None]
        inputs = jax.tree.map(lambda x: x[:, None], inputs)
    return plan_next(table, *check_next_tokens(table.spec, rows, ids, valid), inputs)


@jit_table
def plan_next(
    table: CacheTable,
    tokens: Int32[Array, "Z n"],
    sequences: Int32[Array, " Z"],
    valid: Bool[Array, "Z n"],
    extra: Mapping[str, Shaped[Array, "Z n ..."]] | None = None,
) -> Plan:
    """Implement `plan_step`; a sequence id given twice is refused with DUPLICATE_POSITION."""
    spec, (count, length) = table.spec, np.shape(valid)
    flat = make_batch(
        tokens.reshape(-1),
        sequences=jnp.broadcast_to(sequences[:, None], (count, length)).reshape(-1),
        valid=valid.reshape(-1),
        outputs=valid.reshape(-1),
        extra=jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), extra),
    )
    index, where = _lay_out_next_tokens(table, sequences, valid)
    plan = plan_single_ubatch(table, flat, _rank_in_rows(valid), index, outputs=count * length)
    goes_on = jnp.where(jnp.any(valid, axis=1), sequences, spec.sequences)
    twice = jnp.zeros(spec.sequences, jnp.int32).at[goes_on].add(1, **DROP) > 1
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


def check_next_tokens(
    spec: TableSpec, tokens: PyTree, sequences: Ids, valid: PyTree
) -> tuple[PyTree, PyTree, PyTree]:
    """Return tokens `[Z, n]`, sequence ids `[Z]` and flags `[Z, n]`; raise for invalid ids."""
    if 0 in np.shape(tokens):
        raise ValueError(
            f"expected a token at least, got tokens of the shape {np.shape(tokens)}; pass one "
            "for each sequence"
        )
    if is_concrete(sequences, valid):
        ids = np.asarray(sequences)[np.any(np.asarray(valid), axis=1)]
        spec.sequence_ids(ids)
        check_distinct(ids)
    return tokens, check_int32(sequences, "sequences"), valid


def _rank_in_rows(valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the results of `layout.rank_in_sequence`; each row must have its own sequence."""
    # Rows with a repeated sequence get wrong ranks, but their plan is refused.
    index = jnp.arange(valid.size, dtype=jnp.int32).reshape(valid.shape)
    # `latest` is the index of the last valid token up to each token, so the previous token is one
    # column to the left. The value that `roll` moves to column 0 is not used, because its rank is
    # 0.
    ranks = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - valid
    latest = jax.lax.cummax(jnp.where(valid, index, -1), axis=1)
    before = jnp.where(ranks == 0, index, jnp.roll(latest, 1, axis=1))
    return ranks.reshape(-1), before.reshape(-1)


def _lay_out_next_tokens(
    table: CacheTable, ids: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the batch index of each ubatch element, and the ubatch index of each batch token."""
    spec, (count, length) = table.spec, valid.shape
    index = jnp.arange(count * length, dtype=jnp.int32).reshape(count, length)
    if not spec.single_sequence_rows:
        return index.reshape(1, -1), index
    row = jnp.arange(count, dtype=jnp.int32)
    if count_rows(table, count, length) == spec.sequences:  # row r is that of sequence r
        row = ids
    if length == 1:
        return index, row[:, None]
    first = order_tokens_first(valid)
    # `first` is a permutation of the columns of each row, and `argsort` inverts it.
    where = row[:, None] * length + jnp.argsort(first, axis=1).astype(jnp.int32)
    return index[:, :1] + first, where


def _init_encoder(table: CacheTable, batch: Batch, *, append: bool) -> Plan:
    table = table.as_encoder_table()
    if batch.shared_with is not None:
        raise ValueError(
            "expected tokens of one sequence each in a source, got some of several; encode it for "
            "one of them, and fork that (seq_cp)"
        )
    if batch.positions is not None:
        raise ValueError("expected no positions for a source, got some; leave them out")
    xp = np if is_concrete(batch) else jnp
    flat, index = layout_single_ubatch(
        table.spec, replace(batch, outputs=xp.zeros_like(batch.valid))
    )
    ranks = rank_in_sequence(flat.sequences, flat.valid)
    if append:
        return plan_single_ubatch(table, flat, ranks, index, outputs=MIN_OUTPUTS)
    return _plan_empty_sequences(table, replace(flat, positions=ranks[0]), ranks, index)


@jit_table
def _plan_empty_sequences(
    table: CacheTable,
    batch: Batch,
    ranks: tuple[Int32[Array, " M"], Int32[Array, " M"]],
    index: Int32[Array, "R T"],
) -> Plan:
    """Plan a batch; a sequence that is not empty is refused with ENCODER_ALREADY_WRITTEN."""
    plan = plan_single_ubatch(table, batch, ranks, index, outputs=MIN_OUTPUTS)
    reason = jnp.where(
        plan.reason == Reason.NOT_CONTIGUOUS, Reason.ENCODER_ALREADY_WRITTEN, plan.reason
    )
    return replace(plan, reason=reason)
