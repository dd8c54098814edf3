"""Eviction of single cells by a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from jaxkv.api.edits import EditResult, edit_result
from jaxkv.cache import Cache, merge, split
from jaxkv.core.array_utils import DROP
from jaxkv.jit_helpers import jit_table
from jaxkv.table import CacheTable, EditCheck

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, PyTree

    from jaxkv.core.types import Ids


def evict(
    cache: Cache,
    keep: PyTree[Bool[Array | np.ndarray, "S _"]],
    *,
    sequences: Ids | None = None,
) -> EditResult:
    """Remove cells from sequences by a mask, in one pass, for example by attention scores.

    Other tokens keep their positions. Keep the last token of a sequence: otherwise, the next token
    gets a lower position. Empty cells may have any flag. A refused edit leaves the cache unchanged:

    - CONTEXT_EVICTED: with a window, the next token of a sequence would attend to an evicted cell.
    - PARTS_DIFFER: the last position of a sequence would differ between the parts of a hybrid
      cache.

    Args:
      cache: any cache.
      keep: True for each cell to keep. For a hybrid cache, a tuple with a mask for each part, or
        None for a part that keeps all cells, such as recurrent states. Parts may keep different
        cells.
      sequences: a sequence id or a list of ids, from which cells are removed; by default all. A
        cell is free when no sequence owns the cell. A traced id out of range has no effect.

    Raises:
      TypeError: If a mask is passed for a part with recurrent states.
      ValueError: If a mask is not bool `[S, N]`, or there is not one entry for each part.
      ValueError: If a concrete id is not from 0 to Q - 1.

    Examples:
      Keep the first two tokens and the last two, as StreamingLLM does:

      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
      >>> cache = make_cache(spec, cells=6)
      >>> cache = prefill(forward, params, cache, [1, 2, 3, 4, 5]).cache
      >>> position = cache.cell_positions(0)
      >>> keep = (position < 2) | (position >= cache.seq_pos_max(0) - 1)
      >>> print(show(evict(cache, keep[None]).cache))
      owner    0 0 . 0 0 .
      position 0 1 . 3 4 .
    """
    table, buffers = split(cache)
    ids = table.spec.sequence_ids(
        np.arange(table.spec.sequences) if sequences is None else sequences
    )
    table, check = _evict(table, keep, jnp.atleast_1d(ids))
    return edit_result(merge(table, buffers), check)


@jit_table
def _evict(
    table: CacheTable, keep: PyTree, sequences: Int32[Array, " n"]
) -> tuple[CacheTable, EditCheck]:
    is_asked = jnp.zeros(table.spec.sequences, bool).at[sequences].set(True, **DROP)
    evicted, check = table.evict(keep, is_asked)
    return evicted.advance_version(table), check
