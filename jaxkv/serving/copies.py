"""Copies of sequences in a cache and in host memory, and checks whether they fit."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.api.insert import extract, insert
from jaxkv.cache import Cache, merge, split
from jaxkv.core.array_utils import nbytes
from jaxkv.core.partitioning import current_mesh
from jaxkv.core.validate import check_count
from jaxkv.jit_helpers import jit_method, jit_table
from jaxkv.kv.table import CellTable
from jaxkv.serving.prefix_cache.matching import iterate_part_tables
from jaxkv.table import CacheTable

if TYPE_CHECKING:
    from jaxtyping import Array, Int32

MAX_HOST_BYTES = 2**63 - 1
"""Largest number of bytes of host memory that an argument can allow."""


def check_host_bytes(host_bytes: Any) -> int:
    """Return the argument `host_bytes` as an int; 0 for None."""
    return 0 if host_bytes is None else check_count(host_bytes, "host_bytes", high=MAX_HOST_BYTES)


def commit(cache: Cache) -> Cache:
    """Return a cache whose arrays are committed to their devices, without a copy.

    An insertion from host memory commits the cache, and JAX compiles programs again for committed
    arrays. Therefore commit a cache before its programs are compiled.
    """
    return jax.device_put(cache, jax.tree.map(lambda x: x.sharding, cache))


def copy_to_host(cache: Cache, seq: int, *, max_bytes: int) -> Cache | None:
    """Copy a sequence into a new cache with its buffers in host memory.

    The number of cells is that of the sequence, rounded up to a power of two, so that sequences of
    similar lengths share programs. The small table stays on the devices, for `can_insert`.

    Returns:
      The new cache, or None, without a copy, if its buffers need more than `max_bytes` bytes.
    """
    cells = _round_up(cache, int(_max_owned_cells(cache.table, np.int32(seq))))
    take = partial(extract, sequences=seq, cells=cells)
    if nbytes(jax.eval_shape(take, cache).cache.buffers) > max_bytes:
        return None
    return _move_buffers_to_host(take(cache).cache)


def can_copy(cache: Cache, src: int, dst: int, stop: int) -> bool:
    """Return whether `seq_cp` can copy positions 0 to `stop - 1`."""
    check, _ = _can_copy(cache.table, *map(np.int32, (src, dst, 0, stop)))
    return bool(check.ok)


def can_insert(cache: Cache, source: Cache, seq: int) -> bool:
    """Return whether sequence 0 of a new cache can be inserted in place of a sequence."""
    src, dst = np.array([0], np.int32), np.array([seq], np.int32)
    return bool(_can_insert(cache.table, source.table, src, dst).ok)


def warm_up_copies(cache: Cache, seq: int, *, donate: bool) -> Cache:
    """Compile the programs for copies of all lengths; return the unchanged cache.

    Args:
      cache: A cache in which the sequence `seq` is empty.
      seq: Id of a sequence.
      donate: Value of `donate` in later calls of `insert`.
    """
    largest = max([part.num_cells for part in _attention_parts(cache.table)], default=1)
    _max_owned_cells(cache.table, np.int32(seq))
    for cells in sorted({_round_up(cache, 1 << n) for n in range((largest - 1).bit_length() + 1)}):
        copied = _move_buffers_to_host(extract(cache, seq, cells=cells).cache)
        can_insert(cache, copied, seq)
        cache, _ = insert(cache, copied, 0, seq, donate=donate)
    return cache


def _move_buffers_to_host(cache: Cache) -> Cache:
    table, buffers = split(cache)
    where = jax.tree.map(lambda x: x.sharding.with_memory_kind("pinned_host"), buffers)
    return merge(table, jax.device_put(buffers, where))


def _round_up(cache: Cache, count: int) -> int:
    """Return the number of cells of a copy; a mesh that splits cells can split this number."""
    rules = cache.table.sharding_rules
    mesh = current_mesh(rules)
    shards = 1 if rules is None or mesh is None else rules.devices(mesh, "cells")
    return shards << (-(-count // shards) - 1).bit_length()


def _attention_parts(table: CacheTable) -> list[CellTable]:
    return [part for part in iterate_part_tables(table) if isinstance(part, CellTable)]


@jit_table
def _max_owned_cells(table: CacheTable, seq: Int32[Array, ""]) -> Int32[Array, ""]:
    """Return the largest number of cells that a sequence owns in an attention part, at least 1."""
    counts = [part.seq_keep(seq).num_used_cells() for part in _attention_parts(table)]
    return jnp.max(jnp.array([1, *counts], jnp.int32))


_can_insert = jit_method(CacheTable.can_insert)
_can_copy = jit_method(CacheTable.can_seq_cp)
