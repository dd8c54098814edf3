"""Sequences as values: copies of sequences into another cache, and into a new cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jaxkv.api.edits import EditResult, edit_result
from jaxkv.cache import Cache, merge, split
from jaxkv.cache_spec import CacheSpec
from jaxkv.core.array_utils import is_traced
from jaxkv.core.constants import MAX_CELLS
from jaxkv.core.donation import check_not_donated
from jaxkv.core.validate import check_count
from jaxkv.jit_helpers import jit_table
from jaxkv.sharding.make import move
from jaxkv.spec import check_distinct, mask_unknown_targets
from jaxkv.table import CacheTable, EditCheck, join_checks

if TYPE_CHECKING:
    from jaxtyping import Array, Int32, PyTree

    from jaxkv.core.types import Ids


def insert(cache: Cache, source: Cache, src: Ids, dst: Ids, *, donate: bool = False) -> EditResult:
    """Copy sequences of another cache into a cache, such as a conversation from host memory.

    Sequence `dst[i]` of `cache` is replaced by sequence `src[i]` of `source`, with its pending
    shifts, its evicted positions, its recurrent states and its encoder source. A cell with several
    owners is copied once for all targets of a stream. Hashes of tokens are copied too, so prefixes
    and the state of a loop remain valid.

    The caches have the same `CacheSpec`. They may differ in sequences, streams, cells, placement,
    `lanes`, `stacked`, `dtype`, `max_rollback`, devices and sharding rules. Keys and values are
    converted to the dtype of `cache`; equal dtypes are copied bit for bit. If `cache` has a smaller
    `max_rollback`, only the newest states are copied. Outside of `jit`, a source on other devices
    or in other memory is first moved to the devices of `cache` (`sharding.move`). Its buffers alone
    may be in other memory.

    The flag `ok` and the `reason` are `[]`, for all sequences together. In these cases, the cache
    is unchanged:

    - OUT_OF_CELLS: a stream has too few cells. The cells of replaced sequences, and cells that a
      window makes evictable, count as free. Evictable cells of the source are copied too.
    - LAYER_NOT_WRITTEN: a layer of a stacked source lacks tokens, and `cache` is not stacked.

    Args:
      cache: any cache.
      source: another cache with the same `CacheSpec`.
      src: id of a sequence of `source`, or a list of ids.
      dst: id of the sequence of `cache` to replace, or a list of as many distinct ids. If the id in
        `src` or `dst` is traced and out of range, the target is unchanged and `ok` is True. If a
        traced target is repeated, its last entry is used.
      donate: If True, a call outside of `jit` reuses the buffers of `cache`, which becomes invalid.
        If False, the buffers are copied.

    Raises:
      ValueError: If the specs of the caches differ.
      ValueError: If `src` and `dst` have different shapes or two dimensions, a concrete id is not
        from 0 to Q - 1 of its cache, or a concrete target is repeated.
      ValueError: If `source` or `cache` was donated, or `donate` is True and `source` has buffers
        of `cache`.

    Examples:
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
      >>> chat = make_cache(spec, cells=3)
      >>> chat = prefill(forward, params, chat, [1, 2, 3]).cache
      >>> cache = make_cache(spec, cells=6, sequences=2)
      >>> cache = prefill(forward, params, cache, [4, 5]).cache
      >>> cache, ok = insert(cache, chat, 0, 1)
      >>> print(show(cache))
      owner    0 0 1 1 1 .
      position 0 1 0 1 2 .

    JetStream: `insert`. llama.cpp: `llama_state_seq_set_data`.
    """
    table, buffers = split(cache)
    other = _move_to_devices_of(cache, source)
    other_table, other_buffers = split(other)
    _check_same_spec(cache.spec, other.spec)
    ids = other_table.spec.sequence_ids(src), table.spec.sequence_ids(dst)
    if np.ndim(ids[0]) > 1 or np.shape(ids[0]) != np.shape(ids[1]):
        raise ValueError(
            f"expected src and dst of one shape, [] or [n], got {np.shape(ids[0])} and "
            f"{np.shape(ids[1])}; pass one target for each sequence"
        )
    check_distinct(ids[1])
    if not np.size(ids[1]):
        return edit_result(cache, join_checks())
    if donate:
        _check_shares_no_buffer(buffers, other_buffers)
    run = _insert_donated if donate else _insert
    return edit_result(*run(table, buffers, other_table, other_buffers, *map(jnp.atleast_1d, ids)))


def extract(cache: Cache, sequences: Ids, *, cells: int | Sequence[int]) -> EditResult:
    """Copy sequences of a cache into a new cache, such as a conversation to keep in host memory.

    The new cache has the sequences alone, with the ids 0, 1, ... in the given order, in one stream.
    It has the dtype, `stacked`, `lanes`, `max_rollback` and sharding rules of `cache`, and the
    placement "any". A new cache can be moved (`jax.device_put`, `sharding.move`), saved, drawn and
    extended as any other; `insert` copies its sequences back.

    Args:
      cache: any cache.
      sequences: a sequence id, or a list of ids. For a traced id out of range, the new sequence is
        empty.
      cells: number of cells of each attention part of the new cache, or a tuple with a number for
        each part of a hybrid cache. A part gets at most as many cells as the sequences can own.
        Equal numbers share a compiled program, so round them up.

    Returns:
      An `EditResult` with the new cache. If `ok` is False, the new cache is empty; see `insert` for
      the reasons.

    Raises:
      ValueError: If a concrete id is not from 0 to Q - 1, or `sequences` is empty or nested.
      ValueError: If `cells` is not from 1 to 2**30 - 1, or not one number for each part.
      ValueError: If the cache was donated, or the mesh cannot split the cells evenly.

    Examples:
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
      >>> cache = make_cache(spec, cells=8, sequences=3)
      >>> cache = prefill(forward, params, cache, [[1, 2], [3], [4, 5]]).cache
      >>> chat, ok = extract(cache, 2, cells=4)
      >>> print(show(chat))
      owner    0 0 . .
      position 0 1 . .
      >>> Reason(extract(cache, [0, 2], cells=3).reason).name
      'OUT_OF_CELLS'

    llama.cpp: `llama_state_seq_get_data`.
    """
    table, buffers = split(cache)
    ids = jnp.atleast_1d(table.spec.sequence_ids(sequences))
    if ids.ndim > 1 or not ids.size:
        raise ValueError(
            f"expected one sequence id or a list of them, got the shape {ids.shape}; pass a flat "
            "list of at least one id"
        )
    parts = cache.parts
    numbers = [*cells] if isinstance(cells, Sequence) else [cells] * len(parts)
    if len(numbers) != len(parts):
        raise ValueError(
            f"expected a number of cells for each of {len(parts)} parts, got {cells!r:.60}; see "
            "cache.parts"
        )
    num_cells = tuple(check_count(number, "cells", high=MAX_CELLS - 1) for number in numbers)
    return edit_result(*_extract(table, buffers, ids, num_cells=num_cells))


def _insert_sequences(
    table: CacheTable,
    buffers: PyTree,
    source: CacheTable,
    source_buffers: PyTree,
    src: Int32[Array, " n"],
    dst: Int32[Array, " n"],
) -> tuple[Cache, EditCheck]:
    src, dst = mask_unknown_targets(table.spec, source.spec, src, dst)
    check = table.can_insert(source, src, dst)
    dst = jnp.where(check.ok, dst, table.spec.sequences)
    inserted, buffers = table.insert(buffers, source, source_buffers, src, dst)
    return merge(inserted.advance_version(table), buffers), check


_insert = jit_table(_insert_sequences)
_insert_donated = jit_table(_insert_sequences, donate_argnames="buffers")


@partial(jit_table, static_argnames="num_cells")
def _extract(
    table: CacheTable,
    buffers: PyTree,
    sequences: Int32[Array, " n"],
    *,
    num_cells: tuple[int, ...],
) -> tuple[Cache, EditCheck]:
    count = sequences.size
    empty = table.make_empty_like(buffers, count, num_cells)
    new_ids = jnp.arange(count, dtype=jnp.int32)
    return _insert_sequences(*empty, table, buffers, sequences, new_ids)


def _move_to_devices_of(cache: Cache, source: Cache) -> Cache:
    """Move a concrete source to the devices and the memory of a concrete cache."""
    tables = split(cache)[0], split(source)[0]
    check_not_donated(*map(split, (cache, source)))
    if is_traced(cache, source):
        return source
    firsts = [x for tree in (tables[0], *split(source)) for x in jax.tree.leaves(tree)[:1]]
    if not all(isinstance(x, jax.Array) for x in firsts):  # shapes, or arrays of NumPy
        return source
    own, *others = (x.sharding for x in firsts)
    if all(_is_same_memory(own, other) for other in others):
        return source
    if isinstance(own, NamedSharding):
        return move(source, own.mesh, sharding_rules=tables[0].sharding_rules)
    (device,) = own.device_set
    return move(source, device, memory_kind=own.memory_kind)


def _check_shares_no_buffer(buffers: PyTree, source_buffers: PyTree) -> None:
    """Raise a ValueError if concrete buffers to donate are also buffers of the source."""
    donated = {id(x) for x in jax.tree.leaves(buffers) if not is_traced(x)}
    if any(id(x) in donated for x in jax.tree.leaves(source_buffers)):
        raise ValueError(
            "expected a source with its own buffers, got one with buffers of the cache to donate; "
            "extract the sequences first, or do not donate"
        )


def _is_same_memory(own: Sharding, other: Sharding) -> bool:
    """Return whether two shardings have the same devices, memory and mesh."""
    if (own.device_set, own.memory_kind) != (other.device_set, other.memory_kind):
        return False
    is_on_mesh = isinstance(own, NamedSharding)
    return not is_on_mesh or (isinstance(other, NamedSharding) and own.mesh == other.mesh)


def _check_same_spec(expected: CacheSpec, actual: CacheSpec, where: str = "") -> None:
    """Raise a ValueError that names the first difference of two specs, except for user fields."""
    expected, actual = _without_user_fields(expected), _without_user_fields(actual)
    if expected == actual:
        return
    if expected.kind == actual.kind == "hybrid" and len(expected.parts) == len(actual.parts):
        for i, (part, other) in enumerate(zip(expected.parts, actual.parts, strict=True)):
            _check_same_spec(part[0], other[0], f" in part {i}")
    for name in (field.name for field in fields(CacheSpec)):
        own, other = getattr(expected, name), getattr(actual, name)
        if own != other:
            raise ValueError(
                f"expected a source with the {name} of the cache{where}, {own!r:.80}, got "
                f"{other!r:.80}; pass a cache of the same model"
            )


def _without_user_fields(spec: CacheSpec) -> CacheSpec:
    parts = tuple((_without_user_fields(part), layers) for part, layers in spec.parts)
    return replace(spec, fields=(), parts=parts)
