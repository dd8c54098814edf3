"""Attention in a loop over active tiles (see `active_tiles`), with an online softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.ops.attention import xla
from jaxkv.ops.attention.active_tiles import (
    TILE,
    ActiveTiles,
    find_active_tiles,
    join_blocks,
    scalar_at,
    slice_of,
    split_into_blocks,
)
from jaxkv.ops.attention.softmax import (
    LOWEST,
    AttentionOptions,
    OnlineSoftmax,
    empty_softmax,
    group_queries,
    softmax_dtype,
    with_weights,
)
from jaxkv.ops.attention.visibility import Visibility
from jaxkv.ops.storage.layer_stack import flatten_layers
from jaxkv.ops.storage.storage import Stored

if TYPE_CHECKING:
    from jaxtyping import Array, Float

AddCells = Callable[..., tuple[OnlineSoftmax, jax.Array | None]]
"""A function that adds a tile to a partial softmax, see `jaxkv.ops.attention.xla.add_cells`."""


def attend_by_tiles(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    visibility: Visibility,
    options: AttentionOptions,
    add_cells: AddCells = xla.add_cells,
    *,
    convert_in_loop: bool = False,
) -> OnlineSoftmax:
    """Attend from each block of tokens to its active tiles; call `add_cells` for each tile."""
    active = find_active_tiles(visibility)
    lists, tokens = visibility.at.shape
    packed_q = group_queries(
        options.scale_queries(split_into_blocks(q, active.streams.size // lists)), k.shape[1]
    )
    sums = add_tiles_one_by_one(
        packed_q, k, v, active, options, add_cells, convert_in_loop=convert_in_loop
    )
    return join_blocks(with_weights(*sums), active, lists, tokens)


def add_tiles_one_by_one(
    q: Float[Array, "Pb K X D"],
    k: Stored,
    v: Stored,
    active: ActiveTiles,
    options: AttentionOptions,
    add_cells: AddCells,
    start: tuple[OnlineSoftmax, jax.Array | None] | None = None,
    *,
    convert_in_loop: bool = False,
) -> tuple[OnlineSoftmax, Float[Array, "Pb K X N"] | None]:
    """Add the active tiles to a partial softmax; callers must then call `zero_unseen`.

    The queries `q` must be packed and scaled. If `convert_in_loop` is True, the compiler must
    convert the dtype of each tile in the loop. Otherwise, it may convert all cells before the loop.
    """
    kv_heads, cells = k.shape[1:3]
    (k, v), streams, _ = flatten_layers((k, v), active.streams)
    size = min(TILE, cells)

    def add_tile(i: jax.Array, carry: tuple) -> tuple:
        (sums, logits), k, v = carry
        zero = jnp.zeros_like(i)
        block, tile_start, first = slice_of(active.places, (i, zero), (1, 3))[0]

        def slice_tile(x: Stored) -> Stored:
            start = (scalar_at(streams, block), zero, first, zero)
            shape = (1, kv_heads, size)
            return jax.tree.map(lambda y: slice_of(y, start, (*shape, y.shape[3])), x)

        def slice_block(x: jax.Array) -> jax.Array:
            return slice_of(x, (block, *(zero,) * (x.ndim - 1)), (1, *x.shape[1:]))

        def update_block(x: jax.Array, part: jax.Array) -> jax.Array:
            start = (block, *(zero,) * (x.ndim - 1))
            return jax.lax.dynamic_update_slice(x, part, start, allow_negative_indices=False)

        # If the stream ends inside the last tile, `first` is before `tile_start`, and the cells
        # between them belong to the previous tile.
        seen, bias = active.mask_and_bias_of_tile(block, first, size)
        if cells % size:
            seen &= (first + jnp.arange(size) >= tile_start)[None, None]
        more, added = add_cells(
            jax.tree.map(slice_block, sums),
            slice_block(q),
            slice_tile(k),
            slice_tile(v),
            seen,
            options,
            bias,
        )
        sums = jax.tree.map(update_block, sums, more)
        if added is not None:
            # A cell that an earlier tile or pass added is hidden here, and has the lowest logit.
            place = block, zero, zero, first
            added = jnp.maximum(slice_of(logits, place, added.shape), added)
            logits = jax.lax.dynamic_update_slice(
                logits, added, place, allow_negative_indices=False
            )
        # The barrier makes keys and values different in each iteration for XLA, which therefore
        # cannot move their conversion out of the loop.
        k, v = jax.lax.optimization_barrier((k, v)) if convert_in_loop else (k, v)
        return (sums, logits), k, v

    if start is None:
        shape, dtype = (*q.shape[:3], cells), softmax_dtype(q)
        logits = jnp.full(shape, LOWEST, dtype) if options.keep_weights else None
        start = empty_softmax(q, v.shape[3]), logits
    return jax.lax.fori_loop(jnp.int32(0), active.num_active_tiles, add_tile, (start, k, v))[0]
