"""Attention memory: a table of cells and the rows beside it, assembled."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxkv import memory as contract
from jaxkv.batch import Ubatch
from jaxkv.kv import buffers as store
from jaxkv.kv import cells as table_of_cells
from jaxkv.kv import copy as streams
from jaxkv.kv import defrag, shift, slots
from jaxkv.kv.buffers import Rows
from jaxkv.kv.cells import Cells, Placement
from jaxkv.kv.mask import sight_of
from jaxkv.ops.attention import api as attention
from jaxkv.ops.attention.api import Implementation
from jaxkv.ops.attention.softmax import Options
from jaxkv.rope import Rope
from jaxkv.window import Window, cells_for


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
    cells: int | None = None,
    heads: int,
    size: int,
    sequences: int = 1,
    streams: int = 1,
    window: Window | None = None,
    ubatch_size: int | None = None,
    rollback: int = 32,
    value_size: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rope: Rope | tuple[Rope | None, ...] | None = None,
    placement: Placement = "scattered",
) -> KVCache:
    """Make an empty attention memory.

    Args:
      layers: L, the attention layers.
      cells: N, the tokens that fit into each stream. With a window it may be left out: then there
        are cells for the window, a ubatch and a rollback, for each sequence of a stream.
      heads: K, the key/value heads of each layer.
      size: D, the numbers of a key.
      sequences: Q, the sequences that may be told apart.
      streams: S, 1 or Q: whether all sequences share one pool of cells, or each has its own. A pool
        gives room to whoever needs it and forks without a copy; with its own stream, a sequence
        costs what it holds itself, however long its neighbours are.
      window: how far back tokens look, see `jaxkv.window`. None for everything.
      ubatch_size: the most tokens that will be computed at once, by default 512; larger plans are
        refused. Only where `cells` is left out.
      rollback: how many tokens can be taken back (`seq_rm` of an end) though a window is full. Only
        where `cells` is left out; more cells mean more rollback.
      value_size: the numbers of a value, by default D.
      dtype: of keys and values.
      rope: how keys were rotated when they come in, for all layers or one for each; None where
        keys carry no position.
      placement: which cells a ubatch may get: "scattered", any that are empty; or "contiguous", one
        run of neighbours, which is refused when there is room but no run (see `make_room`).

    Returns:
      The cache, all cells empty.

    Raises:
      ValueError: when a count is below 1, `streams` is neither 1 nor Q, `cells` is missing, or the
        ropes do not fit the layers or the heads.

    Examples:
      >>> cache = make_kv_cache(layers=2, cells=512, heads=3, size=64, sequences=8)
      >>> cache.rows.k[0].shape, nbytes(cache)
      ((1, 3, 512, 64), 1581088)

      A window of 128 positions, for two sequences with a stream each:

      >>> cache = make_kv_cache(
      ...     layers=2, heads=3, size=64, sequences=2, streams=2, window=standard(128)
      ... )
      >>> cache.rows.k[0].shape
      (2, 3, 672, 64)

    llama.cpp: `llama_kv_cache`, with `kv_unified` for one stream and `n_swa` for the window.
    """
    if cells is None:
        if window is None:
            raise ValueError("a cache without a window needs to be told its cells")
        ubatch_size = 512 if ubatch_size is None else ubatch_size
        cells = cells_for(
            window, ubatch_size=ubatch_size, rollback=rollback, sharing=sequences // streams
        )
    else:
        ubatch_size = None
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
    if streams not in (1, sequences):
        raise ValueError(f"wanted streams of 1 or {sequences}, one a sequence, got {streams}")
    ropes = rope if isinstance(rope, tuple) else (rope,) * layers
    if len(ropes) != layers:
        raise ValueError(f"wanted one rope for all layers or {layers}, one each, got {len(ropes)}")
    for one in ropes:
        if one is not None and 2 * len(one.frequencies) > size:
            raise ValueError(f"a rope of {len(one.frequencies)} pairs does not fit keys of {size}")
    return KVCache(
        table=table_of_cells.make_cells(
            cells=cells,
            sequences=sequences,
            streams=streams,
            placement=placement,
            window=window,
            ubatch_size=ubatch_size,
        ),
        rows=store.make_rows(
            layers=layers,
            streams=streams,
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
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    causal: bool = True,
    implementation: Implementation | None = None,
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
    stream = slots.streams(table, ubatch)
    rows = store.write(rows, layer, stream, slots.settled(table, ubatch), k, v)
    sight = sight_of(table, ubatch, causal=causal)
    lists = q.reshape(*sight.at.shape, *q.shape[2:])
    options = Options(scale=scale, softcap=softcap, sinks=sinks)
    out = attention.attend(lists, rows.k[layer], rows.v[layer], sight, options, implementation)
    return KVCache(table=table, rows=rows), out.reshape(*q.shape[:3], -1)


contract.split.register(KVCache, lambda memory: (memory.table, memory.rows))
contract.join.register(Cells, lambda table, rows: KVCache(table=table, rows=rows))
contract.table_sequences.register(Cells, lambda table: table.sequences)
contract.table_streams.register(Cells, lambda table: table.streams)
contract.table_apart.register(Cells, lambda table: table.streams > 1)
contract.table_ubatch_size.register(Cells, lambda table: table.ubatch_size)
contract.table_digest.register(Cells, table_of_cells.digest)
contract.table_first.register(Cells, table_of_cells.first)
contract.table_last.register(Cells, table_of_cells.last)
contract.table_used.register(Cells, table_of_cells.used)
contract.table_reached.register(
    Cells, lambda table, present: (slots.reached(table, present), jnp.array(True))
)
contract.table_lost.register(Cells, table_of_cells.lost)
contract.table_owing.register(Cells, slots.owing)
contract.table_admit.register(Cells, slots.admit)
contract.table_place.register(Cells, slots.find)
contract.table_fresh.register(Cells, slots.fresh)
contract.table_fill.register(Cells, slots.fill)
contract.table_rm.register(
    Cells, lambda table, *args: (table_of_cells.remove(table, *args), jnp.array(True))
)
contract.table_cp.register(Cells, table_of_cells.copy)
contract.copies_rows.register(Cells, streams.copies)
contract.copy_rows.register(Cells, streams.copy)
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
