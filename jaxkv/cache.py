"""Attention memory: a table of cells and the rows beside it, assembled."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxkv import cells as table_of_cells
from jaxkv import defrag, shift, slots, store
from jaxkv import memory as contract
from jaxkv.attention import attention
from jaxkv.batch import Ubatch
from jaxkv.cells import Cells, Placement
from jaxkv.mask import visible
from jaxkv.rope import Rope
from jaxkv.store import Rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class KVCache:
    """Keys and values of many sequences in one pool of cells.

    table: who lives in each cell.
    rows: the keys and values of each layer.
    """

    table: Cells
    rows: Rows


def make_kv_cache(
    *,
    layers: int,
    cells: int,
    heads: int,
    size: int,
    sequences: int = 1,
    value_size: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rope: Rope | tuple[Rope | None, ...] | None = None,
    placement: Placement = "scattered",
) -> KVCache:
    """Make an empty attention memory that all sequences share.

    Args:
      layers: L, the attention layers.
      cells: N, the tokens that fit, over all sequences together.
      heads: K, the key/value heads of each layer.
      size: D, the numbers of a key.
      sequences: Q, the sequences that may be told apart.
      value_size: the numbers of a value, by default D.
      dtype: of keys and values.
      rope: how keys were rotated when they come in, for all layers or one for each; None where
        keys carry no position.
      placement: which cells a ubatch may get: "scattered", any that are empty; or "contiguous", one
        run of neighbours, which is refused when there is room but no run (see `make_room`).

    Returns:
      The cache, all cells empty.

    Raises:
      ValueError: when a count is below 1, or the ropes do not fit the layers or the heads.

    Examples:
      >>> cache = make_kv_cache(layers=2, cells=512, heads=3, size=64, sequences=8)
      >>> cache.rows.k[0].shape, nbytes(cache)
      ((1, 3, 512, 64), 1581088)

    llama.cpp: `llama_kv_cache` with one stream.
    """
    counts = {
        "layers": layers,
        "cells": cells,
        "heads": heads,
        "size": size,
        "sequences": sequences,
    }
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"a cache needs {name} of at least 1, got {count}")
    ropes = rope if isinstance(rope, tuple) else (rope,) * layers
    if len(ropes) != layers:
        raise ValueError(f"wanted one rope for all layers or {layers}, one each, got {len(ropes)}")
    for one in ropes:
        if one is not None and 2 * len(one.frequencies) > size:
            raise ValueError(f"a rope of {len(one.frequencies)} pairs does not fit keys of {size}")
    return KVCache(
        table=table_of_cells.make_cells(cells=cells, sequences=sequences, placement=placement),
        rows=store.make_rows(
            layers=layers,
            streams=1,
            heads=heads,
            cells=cells,
            size=size,
            value_size=size if value_size is None else value_size,
            dtype=dtype,
            ropes=ropes,
        ),
    )


@contract.attend.register
def _attend(
    memory: KVCache,
    layer: int,
    ubatch: Ubatch,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
) -> tuple[KVCache, jax.Array]:
    table, rows = memory.table, memory.rows
    if not 0 <= layer < len(rows.k):
        raise ValueError(f"wanted a layer from 0 to {len(rows.k) - 1}, got {layer}")
    for name, new, old in (("k", k, rows.k[layer]), ("v", v, rows.v[layer])):
        wanted = (*ubatch.valid.shape, old.shape[1], old.shape[3])
        if new.shape != wanted:
            raise ValueError(f"wanted {name} [R, T, K, D] of {wanted}, got {new.shape}")
    if q.shape[:2] != ubatch.valid.shape:
        raise ValueError(f"wanted q [R, T, H, D] of {ubatch.valid.shape} tokens, got {q.shape[:2]}")
    rows = store.write(rows, layer, ubatch.streams, slots.settled(table, ubatch), k, v)
    # All rows of one stream are one list of tokens, so that its keys are read once for all of them.
    packed = q.reshape(1, -1, *q.shape[2:])
    mask = visible(table, ubatch).reshape(1, packed.shape[1], table.size)
    out = attention(packed, rows.k[layer], rows.v[layer], mask, scale=scale)
    return KVCache(table=table, rows=rows), out.reshape(*q.shape[:3], -1)


contract.split.register(KVCache, lambda memory: (memory.table, memory.rows))
contract.join.register(Cells, lambda table, rows: KVCache(table=table, rows=rows))
contract.table_sequences.register(Cells, lambda table: table.sequences)
contract.table_first.register(Cells, table_of_cells.first)
contract.table_last.register(Cells, slots.last_positions)
contract.table_used.register(Cells, table_of_cells.used)
contract.table_admit.register(Cells, slots.admit)
contract.table_owing.register(Cells, slots.owing)
contract.table_place.register(Cells, slots.find)
contract.table_settle.register(Cells, slots.settle)
contract.table_rm.register(
    Cells, lambda table, *args: (table_of_cells.remove(table, *args), jnp.array(True))
)
contract.table_cp.register(Cells, table_of_cells.copy)
contract.table_keep.register(Cells, table_of_cells.keep)
contract.table_add.register(Cells, shift.add)
contract.table_div.register(Cells, shift.divide)
contract.table_can_rm.register(Cells, lambda table, *args: jnp.array(True))
contract.table_can_resume.register(Cells, table_of_cells.can_resume)
contract.table_update.register(Cells, shift.update_of)
contract.table_defrag.register(Cells, defrag.defrag_of)
contract.table_unwritten.register(Cells, table_of_cells.unwritten)
contract.table_restored.register(Cells, table_of_cells.restored)
contract.table_faults.register(Cells, table_of_cells.faults)
contract.table_clear.register(Cells, table_of_cells.clear)
contract.carry_out.register(
    shift.Update, lambda part, table, rows: shift.carry_out(table, rows, part)
)
contract.carry_out.register(
    defrag.Defrag, lambda part, table, rows: defrag.carry_out(table, rows, part)
)
contract.nothing_to_do.register(shift.Update, lambda part: not part.pending)
contract.nothing_to_do.register(defrag.Defrag, lambda part: not part.count.any())
