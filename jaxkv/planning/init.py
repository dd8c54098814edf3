"""Planning a batch: `init_batch`, and `init_full`, which plans by shapes alone."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxkv.batch import Batch, Ubatch, make_batch, mask_slots
from jaxkv.cache import Cache, split
from jaxkv.places import NO_SLOT, check_count, next_power_of_two
from jaxkv.plan import Plan
from jaxkv.planning.check import check
from jaxkv.planning.layout import FEW, layout, turn_in_sequence
from jaxkv.planning.place import finish_plan, place, plan_single_ubatch
from jaxkv.planning.sets import members_of
from jaxkv.planning.splits import SplitBy
from jaxkv.spec import TableSpec
from jaxkv.tables import jit_table

UBATCH_SIZE = 512
"""Tokens that are computed at once where neither the caller nor the cache says otherwise."""


def init_batch(
    cache: Cache, batch: Batch, *, ubatch_size: int | None = None, split_by: SplitBy | None = None
) -> Plan:
    """Plan where the tokens of a batch go. Looks at the table only, and changes nothing.

    The batch is checked first: each sequence goes on one past its last position (one that is empty
    may start anywhere), without gaps, duplicates or steps back. Then every token finds a cell, or
    none does.

    Args:
      cache: any cache.
      batch: the tokens, `make_batch` makes it. Traced, it must fit one ubatch or come in rows.
      ubatch_size: the most tokens that are computed at once, by default what the cache was sized
        for, or 512. What is left over at the end is padded to a power of two, so that few shapes
        are ever compiled.
      split_by: how the batch is cut into ubatches: "simple", in the order that tokens come, the
        default where rows may hold tokens of several sequences; "equal", as many tokens of several
        sequences, the default where they may not; or "sequence", one sequence at a time.

    Returns:
      A `Plan`. Whether it is carried out is a value, `plan.ok`; `plan.check()` raises instead.

    Raises:
      TypeError: when it is no batch.
      ValueError: when a sequence id is known and is none of the cache, when nothing is in the
        batch, when a traced batch is longer than `ubatch_size` or lacks the rows that the cache
        needs, when `ubatch_size` is more than the cache was sized for, or when there is no such
        `split_by`.

    Examples:
      >>> cache = make_kv_cache(layers=1, cells=4, kv_heads=1, head_dim=2, sequences=2)
      >>> plan = init_batch(cache, make_batch([[1, 2, 3], [4, 5]]))
      >>> plan.ok.item(), plan.fits.tolist()
      (False, [False, True])

      The batch does not fit, but the shorter prompt alone does:

      >>> batch = make_batch([[1, 2, 3], [4, 5]]).keep_sequences(plan.fits)
      >>> cache = apply(cache, init_batch(cache, batch))
      >>> seq_pos_max(cache, [0, 1]).tolist()
      [-1, 1]

    llama.cpp: `llama_memory_i::init_batch`.
    """
    table, _ = split(cache)
    if not isinstance(batch, Batch):
        raise TypeError(f"wanted a batch, got {type(batch)}: make_batch(tokens) makes one")
    flat, parts, outputs = layout(
        table.spec, batch, checked_size(table.spec, ubatch_size), split_by
    )
    ranks = turn_in_sequence(*members_of(flat))
    if len(parts) == 1:
        return plan_single_ubatch(table, flat, ranks, parts[0], outputs=outputs)
    # One program for each shape of a ubatch, however many there are and in whatever order.
    builder = check(table, flat, ranks)
    ubatches = []
    for part, more in zip(parts, _more(table.spec, flat, parts), strict=True):
        builder, ubatch = place(builder, part, more, outputs=outputs)
        ubatches.append(ubatch)
    plan = finish_plan(builder)
    return replace(plan, ubatches=tuple(_drop_unless(table, plan.ok, one) for one in ubatches))


def init_full(cache: Cache, *, ubatch_size: int | None = None, outputs: int | None = None) -> Plan:
    """Plan the largest ubatch of a full cache, as shapes: for compiling ahead and counting bytes.

    Nothing is allocated, and `cache` may be shapes itself (`jax.eval_shape`).

    Args:
      cache: any cache, or its shapes.
      ubatch_size: the most tokens that will be computed at once, see `init_batch`.
      outputs: the most tokens of a ubatch that output logits, by default one for each sequence.

    Returns:
      A plan of one ubatch whose arrays are `jax.ShapeDtypeStruct`.

    Raises:
      TypeError: when `ubatch_size` or `outputs` is no integer.
      ValueError: when one is below 1, or `ubatch_size` is more than the cache was sized for.

    Examples:
      >>> make = lambda: make_kv_cache(layers=2, cells=4096, kv_heads=8, head_dim=128, sequences=4)
      >>> cache = jax.eval_shape(make)
      >>> plan = init_full(cache, ubatch_size=256)
      >>> compiled = jax.jit(apply).lower(cache, plan.ubatches[0]).compile()
      >>> init_full(cache).ubatches[0].tokens.shape  # by default
      (1, 512)
      >>> init_full(cache, outputs=20).ubatches[0].outputs.shape  # a power of two
      (32,)

    llama.cpp: `llama_memory_i::init_full`.
    """
    table, _ = split(cache)
    spec = table.spec
    wanted = spec.sequences if outputs is None else check_count(outputs, "outputs")
    rows = spec.sequences if spec.single_sequence_rows else 1
    tokens = max(checked_size(spec, ubatch_size) // rows, 1)
    index = np.full((rows, tokens), NO_SLOT, np.int32)
    flat = make_batch(np.zeros(index.size, np.int32))
    ranks = turn_in_sequence(flat.sequences, flat.valid)
    plan = partial(plan_single_ubatch, index=index, outputs=next_power_of_two(max(wanted, FEW)))
    return jax.eval_shape(lambda table: plan(table, flat, ranks), table)


def _more(spec: TableSpec, flat: Batch, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Return for each ubatch which sequences go on in a later one, `[Q]` bool each.

    `parts` are indices into the flat batch, see `layout`.
    """
    later, found = np.zeros(spec.sequences, bool), []
    for part in reversed(parts):
        found.append(later.copy())
        later[flat.sequences[part[part != NO_SLOT]]] = True
    return found[::-1]


def checked_size(spec: TableSpec, ubatch_size: int | None) -> int:
    """Return how many tokens are computed at once, as the caller or the cache wants it."""
    if ubatch_size is None:
        return UBATCH_SIZE if spec.ubatch_size is None else spec.ubatch_size
    ubatch_size = check_count(ubatch_size, "ubatch_size")
    if spec.ubatch_size is not None and ubatch_size > spec.ubatch_size:
        raise ValueError(
            f"the cache was sized for ubatches of {spec.ubatch_size} tokens, got "
            f"ubatch_size={ubatch_size}: make it with ubatch_size={ubatch_size}, or plan smaller "
            f"ones"
        )
    return ubatch_size


@jit_table
def _drop_unless(table: Any, ok: jax.Array, ubatch: Ubatch) -> Ubatch:
    """Do what `mask_slots` says, on the mesh of a table."""
    del table
    return mask_slots(ok, ubatch)
