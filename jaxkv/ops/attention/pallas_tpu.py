"""Kernel for TPUs that reads each active tile once for all queries that attend to the tile.

A line of memory has 128 lanes. If the head size is a multiple of 128, the lanes of a line store 128
dimensions of one cell. Otherwise, the lanes of a line store one dimension of 128 neighbouring
cells. M is the number of all pairs (block of tokens, tile).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxkv.ops.attention.active_tiles import (
    TILE,
    find_active_tiles,
    join_blocks,
    query_bounds_in_blocks,
    split_into_blocks,
)
from jaxkv.ops.attention.softmax import (
    LOWEST,
    AttentionOptions,
    OnlineSoftmax,
    group_queries,
    mask_logits,
    softmax_dtype,
)
from jaxkv.ops.attention.visibility import QueryBounds, Visibility
from jaxkv.ops.storage.head_rows import LANES
from jaxkv.ops.storage.layer_stack import flatten_layers
from jaxkv.ops.storage.quantised import SCALE_GROUP, codes_and_scales, has_one_scale
from jaxkv.ops.storage.storage import Stored

if TYPE_CHECKING:
    from jaxtyping import Array, Float, PyTree

    Ref = PyTree
    """Reference to memory of a kernel, or a `Quantised` of two references."""

DTYPES = (jnp.float32, jnp.bfloat16)
"""Dtypes of queries that the kernel supports."""

QUERIES = 128
"""Number of queries that share a key and are computed together: the size of a matrix unit."""

STORED = (*DTYPES, jnp.int8)
"""Dtypes of keys and values that the kernel supports."""

VMEM = 6 << 20
"""Largest number of bytes of tiles and logits in fast memory; the limit of a kernel is 16 MB."""

PAIRS = 1 << 17
"""Largest number of (block, tile) pairs; the list of pairs is in scalar memory of 1 MB."""


def can_attend(q: Float[Array, "P T H D"], k: Stored, v: Stored, visibility: Visibility) -> bool:
    """Return whether the kernel supports the dtypes, sizes, mesh and bias of the arguments."""
    # A compiler cannot split a kernel over devices, so on a mesh the kernel runs in `shard_map`
    # only.
    split = set(jax.sharding.get_abstract_mesh().axis_types) - {jax.sharding.AxisType.Manual}
    tokens, queries = visibility.at.shape[1], q.shape[2] // k.shape[1]
    pairs = (
        visibility.at.shape[0]
        * -(-tokens // _max_tokens_per_block(queries))
        * -(-k.shape[2] // TILE)
    )
    fits = pairs <= PAIRS and visibility.bias is None
    dtypes = q.dtype in DTYPES and k.dtype in STORED and v.dtype in STORED
    return dtypes and fits and not split and has_one_scale(k) and has_one_scale(v)


def attend(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    visibility: Visibility,
    options: AttentionOptions,
    *,
    interpret: bool = False,
) -> OnlineSoftmax:
    """Attend to the cells of active tiles; raise a ValueError if `can_attend` returns False."""
    if not can_attend(q, k, v, visibility):
        raise ValueError(
            f"expected float32, bfloat16 or int8 with heads of at most {SCALE_GROUP}, at most "
            f"{PAIRS} pairs of a token and a cell, and rules on a mesh for 'pallas', got {q.dtype} "
            f"{q.shape}, {k.dtype} {k.shape} and {v.dtype} {v.shape}; pass implementation=None"
        )
    kv_heads, cells = k.shape[1:3]
    queries = q.shape[2] // kv_heads
    active = find_active_tiles(visibility, _max_tokens_per_block(queries))
    blocks = active.streams.size // visibility.streams.size
    size = min(TILE, cells)
    tiles = -(-cells // size)
    packed_q = group_queries(options.scale_queries(split_into_blocks(q, blocks)), kv_heads)
    (k, v), streams, layers = flatten_layers((k, v), active.streams)
    owners = jax.lax.bitcast_convert_type(visibility.owners, jnp.int32)
    numbers = (1, 1, v.shape[3])  # maximum, denominator, weighted values
    highest, total, out = pl.pallas_call(
        partial(
            _kernel,
            options=options,
            cells=cells,
            tiles=tiles,
            in_lanes=(_has_cells_in_lanes(k), _has_cells_in_lanes(v)),
        ),
        grid_spec=_make_grid_spec(
            packed_q, k, v, owners.shape[1], active.num_active_tiles, layers, numbers
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*packed_q.shape[:3], n), softmax_dtype(q)) for n in numbers
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="jaxkv_attention",
    )(
        active.tiles,
        streams,
        query_bounds_in_blocks(visibility, blocks, queries),
        visibility.position[:, None],
        owners,
        packed_q,
        *(jax.tree.map(partial(_pin_buffers_to_hbm, interpret=interpret), x) for x in (k, v)),
    )
    sums = OnlineSoftmax(highest[..., 0], total[..., 0], out)
    return join_blocks(sums, active, *visibility.at.shape)  # Blocks without a pair are undefined.


def _make_grid_spec(
    q: Float[Array, "Pb K X D"],
    k: Stored,
    v: Stored,
    words: int,
    num_active_tiles: jax.Array,
    layers: int,
    numbers: tuple[int, ...],
) -> pltpu.PrefetchScalarGridSpec:
    """Return the grid (head groups, active tiles) and the block of each argument and output."""
    kv_heads, cells = k.shape[1:3]
    heads, size = _heads_at_once(q, k, v), min(TILE, cells)
    tiles = -(-cells // size)

    def make_index_map(where: Callable[..., tuple]) -> Callable[..., tuple]:
        def index_of_grid_step(h: jax.Array, i: jax.Array, pairs: Ref, streams: Ref) -> tuple:
            block, tile = _split_pair_number(pairs[i], tiles)
            return where(h, block, streams[block], tile)

        return index_of_grid_step

    def query_block_spec(numbers: int) -> pl.BlockSpec:
        shape = (1, heads, q.shape[2], numbers)
        return pl.BlockSpec(shape, make_index_map(lambda h, block, stream, tile: (block, h, 0, 0)))

    def table_block_spec(words: int) -> pl.BlockSpec:
        def tile_index(h: jax.Array, block: jax.Array, stream: jax.Array, tile: jax.Array) -> tuple:
            pool = stream if layers == 1 else jax.lax.div(stream, jnp.int32(layers))
            return pool, 0, tile

        return pl.BlockSpec((1, words, size), make_index_map(tile_index))

    def buffer_block_spec(x: jax.Array) -> pl.BlockSpec:
        if _has_cells_in_lanes(x):
            shape = (1, heads, x.shape[3], size)
            return pl.BlockSpec(
                shape, make_index_map(lambda h, block, stream, tile: (stream, h, 0, tile))
            )
        shape = (1, heads, size, x.shape[3])
        return pl.BlockSpec(
            shape, make_index_map(lambda h, block, stream, tile: (stream, h, tile, 0))
        )

    of_bounds = make_index_map(lambda h, block, stream, tile: (block, 0, 0))
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(kv_heads // heads, num_active_tiles),
        in_specs=[
            pl.BlockSpec((1, q.shape[2], 4), of_bounds),
            table_block_spec(1),
            table_block_spec(words),
            query_block_spec(q.shape[3]),
            *(jax.tree.map(buffer_block_spec, x) for x in (k, v)),
        ],
        out_specs=[query_block_spec(n) for n in numbers],
    )


def _kernel(
    pairs: Ref,
    streams: Ref,
    query_bounds: Ref,
    position: Ref,
    owners: Ref,
    q: Ref,
    k: Ref,
    v: Ref,
    max_logit: Ref,
    denom: Ref,
    out: Ref,
    *,
    options: AttentionOptions,
    cells: int,
    tiles: int,
    in_lanes: tuple[bool, bool],
) -> None:
    """Add a tile to the partial softmax of a block of tokens, for h key heads at once.

    The partial softmax stays in fast memory until all active tiles of the block are added.
    Shapes: `[1, 1, C]` for `position`, `[1, W, C]` for `owners`, `[1, X, 4]` for `query_bounds`,
    `[1, h, X, D]` for `q`, `[1, h, 1, C]` for scales, and `[1, h, X, ...]` for outputs. The shape
    of `k` and `v` is `[1, h, C, ...]`, or `[1, h, ..., C]` if lanes store cells.
    """
    i = pl.program_id(1)
    # Active pairs are sorted by block, so a block begins where its number changes.
    block, tile = _split_pair_number(pairs[i], tiles)

    @pl.when((i == 0) | (block != _split_pair_number(pairs[jnp.maximum(i - 1, 0)], tiles)[0]))
    def reset_sums() -> None:
        max_logit[...] = jnp.full_like(max_logit, LOWEST)
        denom[...] = jnp.zeros_like(denom)
        out[...] = jnp.zeros_like(out)

    look = QueryBounds(*(query_bounds[0, :, j : j + 1] for j in range(4)))  # [X, 1]
    words = [owners[0, w : w + 1] for w in range(owners.shape[1])]
    seen = look.can_see(position[0], words)  # [X, C]
    keys, key_scales = codes_and_scales(k)
    values, scales = codes_and_scales(v)
    values, scales = values[0], None if scales is None else scales[0]
    axis, size = 2 if in_lanes[1] else 1, position.shape[2]
    if cells % size:  # Values past the last cell are undefined, and may be NaN.
        count = cells - tile * size
        seen &= jax.lax.broadcasted_iota(jnp.int32, (1, size), 1) < count
        if scales is None:
            values = _zero_after(values, axis, count)
        else:
            scales = _zero_after(scales, 2, count)

    dtype = jnp.promote_types(q.dtype, k.dtype)
    over = ((2,), (1 if in_lanes[0] else 2,)), ((0,), (0,))
    logits = _multiply_tile(q[0].astype(dtype), keys[0].astype(dtype), over, out.dtype)  # [h, X, C]
    logits = logits if key_scales is None else logits * key_scales[0]
    logits = mask_logits(options.cap_logits(logits), seen[None])
    top = jnp.maximum(max_logit[0], jnp.max(logits, axis=2, keepdims=True))
    down, weights = jnp.exp(max_logit[0] - top), jnp.exp(logits - top)
    max_logit[0] = top
    denom[0] = denom[0] * down + jnp.sum(weights, axis=2, keepdims=True)
    over = ((2,), (axis,)), ((0,), (0,))
    if scales is not None:
        # A value is its code times the scale of its cell, so the scale multiplies the weight of the
        # cell.
        weights, values = weights * scales, values.astype(q.dtype)
    out[0] = out[0] * down + _multiply_tile(weights.astype(values.dtype), values, over, out.dtype)


def _zero_after(x: jax.Array, axis: int, count: jax.Array) -> jax.Array:
    is_inside = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) < count
    return jnp.where(is_inside, x, jnp.zeros_like(x))


def _multiply_tile(
    a: jax.Array, b: jax.Array, over: jax.lax.DotDimensionNumbers, dtype: jnp.dtype
) -> jax.Array:
    return jax.lax.dot_general(a, b, over, preferred_element_type=dtype)


def _split_pair_number(number: jax.Array, tiles: int) -> tuple[jax.Array, jax.Array]:
    """Return the block and the tile of the pair with the number block * tiles + tile."""
    return jax.lax.div(number, jnp.int32(tiles)), jax.lax.rem(number, jnp.int32(tiles))


def _max_tokens_per_block(queries: int) -> int:
    """Return QUERIES // G, at least 1; the argument `queries` is G."""
    return max(1, QUERIES // queries)


def _has_cells_in_lanes(x: Stored) -> bool:
    """Return whether the lanes of a line of memory store cells (True) or dimensions (False)."""
    return x.shape[3] % LANES != 0


def _pin_buffers_to_hbm(x: jax.Array, interpret: bool) -> jax.Array:
    """Place an array in HBM; transpose it to `[S, K, D, N]` if lanes store cells."""
    # Without the constraint, the compiler would copy small buffers to fast memory before each
    # access.
    x = x.swapaxes(2, 3) if _has_cells_in_lanes(x) else x
    return x if interpret else pltpu.with_memory_space_constraint(x, pltpu.HBM)


def _heads_at_once(q: jax.Array, k: Stored, v: Stored) -> int:
    """Return h, the largest divisor of K for which tiles and logits fit into fast memory."""
    # More heads make fetches larger, and share one mask. Each head needs two tiles, one of which is
    # being fetched, and four arrays of the size of the logits.
    size = min(TILE, k.shape[2])
    tiles = 2 * size * (k.shape[3] * k.dtype.itemsize + v.shape[3] * v.dtype.itemsize)
    logits = 4 * size * q.shape[2] * softmax_dtype(q).itemsize
    max_heads = max(1, VMEM // (tiles + logits))
    return max(h for h in range(1, min(max_heads, k.shape[1]) + 1) if k.shape[1] % h == 0)
