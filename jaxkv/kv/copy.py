"""Copying sequences from their streams into those of others, where each has a stream of its own."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxkv.kv.buffers import Buffers, copy_run, gather, scatter
from jaxkv.kv.cells import C, inherited, known, within
from jaxkv.kv.shift import CHUNK
from jaxkv.places import EMPTY, nowhere
from jaxkv.stamp import mix


def copy_between(
    cells: C, buffers: Buffers, src: jax.Array, dst: jax.Array, start: jax.Array, stop: jax.Array
) -> tuple[C, Buffers]:
    """Replace what sequences hold by a range of another's, in the table and the buffers.

    A token keeps its cell, so that a stretch of cells is copied as it lies. Rotations that are owed
    are copied with the keys that owe them.

    Args:
      cells: the table, with a stream for each sequence.
      buffers: the buffers beside it.
      src: `[]` int32, the sequence that is copied.
      dst: `[]` or `[n]` int32, those that are replaced; `src` itself stays as it is.
      start: first position of the range.
      stop: one past the last.
    """

    def into(i: jax.Array, carry: tuple[C, Buffers]) -> tuple[C, Buffers]:
        return _copy_one(*carry, src, targets[i], start, stop)

    targets = jnp.atleast_1d(dst)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(targets.size), into, (cells, buffers))


def _copy_one(
    cells: C, buffers: Buffers, src: jax.Array, dst: jax.Array, start: jax.Array, stop: jax.Array
) -> tuple[C, Buffers]:
    does = known(cells, src) & known(cells, dst) & (src != dst)
    shared = within(cells, start, stop)[src]  # [N]
    index = jnp.arange(cells.num_cells, dtype=jnp.int32)
    size = min(CHUNK, cells.num_cells)
    chunks = jnp.where(does, -(-(jnp.max(jnp.where(shared, index, -1)) + 1) // size), 0)

    def put(field: jax.Array, value: jax.Array) -> jax.Array:
        return field.at[jnp.where(does, dst, cells.streams)].set(value, mode="drop")

    overwritten = index < chunks * size
    stamp = mix(cells.stamp[dst] + mix(cells.stamp[src] + 1))
    cells = replace(
        cells,
        position=put(cells.position, jnp.where(shared, cells.position[src], EMPTY)),
        owners=put(cells.owners, jnp.where(shared[None], cells.owners[src], 0)),
        shift=put(cells.shift, jnp.where(shared, cells.shift[src], 0)),
        evicted_below=put(cells.evicted_below, inherited(cells, src, start, stop)),
        stamp=put(cells.stamp, jnp.where(overwritten, stamp, cells.stamp[dst])),
    )

    def chunk(i: jax.Array, halves: tuple) -> tuple:
        first = jnp.minimum(i * size, cells.num_cells - size)  # the last may overlap the one before
        return jax.tree.map(lambda x: copy_run(x, src, dst, first, size), halves)

    k, v = jax.lax.fori_loop(jnp.int32(0), chunks, chunk, (buffers.k, buffers.v))
    return cells, replace(buffers, k=k, v=v)


def select_between(
    cells: C, buffers: Buffers, parents: jax.Array, targets: jax.Array
) -> tuple[C, Buffers]:
    """Replace what each target holds by what its parent does, all at once.

    A chunk of cells is read of all parents before it is written to any target, so that sequences
    may change places.

    Args:
      cells: the table, with a stream for each sequence.
      buffers: the buffers beside it.
      parents: `[n]` int32, the sequences that are copied.
      targets: `[n]` int32, each at most once; one that is no sequence is left out.
    """
    does = known(cells, targets)
    index = jnp.arange(cells.num_cells, dtype=jnp.int32)
    source = jnp.where(does, parents, 0)
    held = jnp.where(does[:, None] & (cells.position[source] != EMPTY), index, -1)
    size = min(CHUNK, cells.num_cells)
    chunks = -(-(jnp.max(held) + 1) // size)
    overwritten = index < chunks * size
    stamp = mix(cells.stamp[targets] + mix(cells.stamp[source] + 1))

    def put(field: jax.Array, value: jax.Array) -> jax.Array:
        return field.at[targets].set(value, mode="drop")

    def chunk(i: jax.Array, halves: tuple) -> tuple:
        slots = jnp.broadcast_to(i * size + jnp.arange(size), (targets.size, size))
        slots = jnp.where(does[:, None] & (slots < cells.num_cells), slots, nowhere(slots))

        def carried(x: jax.Array) -> jax.Array:
            return scatter(x, targets[:, None], slots, gather(x, source[:, None], slots))

        return jax.tree.map(carried, halves)

    k, v = jax.lax.fori_loop(jnp.int32(0), chunks, chunk, (buffers.k, buffers.v))
    cells = replace(
        cells,
        position=put(cells.position, cells.position[source]),
        owners=put(cells.owners, cells.owners[source]),
        shift=put(cells.shift, cells.shift[source]),
        evicted_below=put(cells.evicted_below, cells.evicted_below[source]),
        stamp=put(cells.stamp, jnp.where(overwritten, stamp, cells.stamp[targets])),
    )
    return cells, replace(buffers, k=k, v=v)
