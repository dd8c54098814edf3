"""Kernel for NVIDIA GPUs that reads each active tile once for all queries that attend to the tile.

The active tiles of a block of tokens are split over J programs, so that even one sequence uses all
multiprocessors. A second kernel merges the partial softmaxes of the programs (flash-decoding).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxkv.ops.attention.active_tiles import (
    find_active_tiles,
    join_blocks,
    query_bounds_in_blocks,
    split_into_blocks,
)
from jaxkv.ops.attention.softmax import LOWEST, AttentionOptions, OnlineSoftmax, group_queries
from jaxkv.ops.attention.visibility import QueryBounds, Visibility
from jaxkv.ops.storage.layer_stack import flatten_layers
from jaxkv.ops.storage.quantised import SCALE_GROUP, codes_and_scales, has_one_scale
from jaxkv.ops.storage.storage import Stored

if TYPE_CHECKING:
    from jaxtyping import Array, Float, PyTree

    Ref = PyTree
    """Reference to memory of a kernel, or a `Quantised` of two references."""

DTYPES = (jnp.float32, jnp.bfloat16)
"""Dtypes of queries that the kernel supports."""

STORED = (*DTYPES, jnp.int8)
"""Dtypes of keys and values that the kernel supports."""

LARGEST = 256
"""Largest head size of keys and values for which tiles fit into a multiprocessor."""

PROGRAMS = 264
"""Number of programs that run at once on an H100: two for each multiprocessor."""


class KernelTiling(NamedTuple):
    """Division of the work into programs. All fields are static.

    queries: Number of queries that share a key and are computed together, a power of two.
    cells: Number of cells of a tile, C.
    programs: Number of programs that share the tiles of a block of tokens, J.
    stages: Number of tiles that a program fetches or computes at the same time.
    """

    queries: int
    cells: int
    programs: int
    warps: int
    stages: int


def choose_tiling(q: Float[Array, "P T H D"], k: Stored, v: Stored) -> KernelTiling:
    """Return the tiling that is fastest on an H100 for these shapes."""
    lists, tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    exact, large = _needs_float32(q, k, v), max(k.shape[3], v.shape[3]) > 128
    if tokens * group <= 16:
        queries, warps, stages = 16, (8 if exact and large else 4), (2 if exact and large else 4)
    elif not exact:
        queries = min(_pad_to_power_of_two(tokens * group), 64)
        warps, stages = (8, 2) if large and queries == 64 else (4, 3)
    elif not large:
        queries, warps, stages = 128, 8, 2
    else:
        queries, warps, stages = 16, 8, 2
    # If blocks and key heads are few, each block is split over several programs, so that about as
    # many programs exist as can run at once. A block gets at most as many programs as a stream has
    # tiles.
    blocks = lists * -(-tokens // (queries // group))
    cells = 32 if exact else 64
    tiles = -(-k.shape[2] // cells)
    programs = min(max(1, PROGRAMS // (blocks * k.shape[1])), tiles)
    return KernelTiling(queries, cells, programs, warps, stages)


def _needs_float32(q: jax.Array, k: Stored, v: Stored) -> bool:
    return jnp.float32 in (q.dtype, k.dtype, v.dtype)


def can_attend(q: Float[Array, "P T H D"], k: Stored, v: Stored, visibility: Visibility) -> bool:
    """Return whether the kernel supports the dtypes, heads, mesh and bias of the arguments."""
    # A compiler cannot split a kernel over devices, so on a mesh the kernel runs in `shard_map`
    # only.
    split = set(jax.sharding.get_abstract_mesh().axis_types) - {jax.sharding.AxisType.Manual}
    size = max(k.shape[3], v.shape[3])
    max_group = 64 if not _needs_float32(q, k, v) else 128 if size <= 128 else 16
    fits = size <= LARGEST and q.shape[2] // k.shape[1] <= max_group and visibility.bias is None
    dtypes = q.dtype in DTYPES and k.dtype in STORED and v.dtype in STORED
    return dtypes and fits and not split and has_one_scale(k) and has_one_scale(v)


def attend(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    visibility: Visibility,
    options: AttentionOptions,
    *,
    cut: KernelTiling | None = None,
    interpret: bool = False,
) -> OnlineSoftmax:
    """Attend to the cells of active tiles; raise a ValueError if `can_attend` returns False."""
    if not can_attend(q, k, v, visibility):
        raise ValueError(
            f"expected float32, bfloat16 or int8 with heads of at most {SCALE_GROUP}, heads of at "
            f"most {LARGEST}, few query heads for each key head, and rules on a mesh for 'pallas', "
            f"got {q.dtype} {q.shape}, {k.dtype} {k.shape} and {v.dtype} {v.shape}; pass "
            f"implementation=None"
        )
    cut = choose_tiling(q, k, v) if cut is None else cut
    kv_heads, cells = k.shape[1:3]
    queries = q.shape[2] // kv_heads
    active = find_active_tiles(visibility, cut.queries // queries, cut.cells)
    blocks = active.streams.size // visibility.streams.size
    packed_q = group_queries(options.scale_queries(split_into_blocks(q, blocks)), kv_heads)
    (k, v), streams, layers = flatten_layers((k, v), active.streams)
    arrays = (
        active.tiles,
        active.starts,
        streams,
        query_bounds_in_blocks(visibility, blocks, queries),
        visibility.position,
        jax.lax.bitcast_convert_type(visibility.owners, jnp.int32),
        packed_q,
        k,
        v,
    )
    parts = _call_kernel(
        "jaxkv_attention",
        partial(
            _kernel,
            options=options,
            cut=cut,
            tiles=-(-cells // cut.cells),
            layers=layers,
            interpret=interpret,
        ),
        grid=(packed_q.shape[0], cut.programs, kv_heads),
        inputs=arrays,
        outputs=_softmax_shapes(cut.programs, *packed_q.shape[:3], v.shape[3]),
        interpret=interpret,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    if cut.programs == 1:
        sums = [x[0] for x in parts]
    else:
        sums = _call_kernel(
            "jaxkv_join",
            _merge_programs,
            grid=packed_q.shape[:3],
            inputs=parts,
            outputs=_softmax_shapes(*packed_q.shape[:3], v.shape[3]),
            interpret=interpret,
        )
    return join_blocks(
        OnlineSoftmax(*sums), active, *visibility.at.shape
    )  # Blocks without a tile are undefined.


def _softmax_shapes(*shape: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape[:-1], shape[:-1], shape)]


def _call_kernel(
    name: str,
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    inputs: Sequence[PyTree],
    outputs: Sequence[jax.ShapeDtypeStruct],
    interpret: bool,
    **options: int,
) -> list[jax.Array]:
    """Run a kernel in which each program gets references to whole arrays."""

    def whole_array_spec(x: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))

    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=jax.tree.map(whole_array_spec, list(inputs)),
        out_specs=[whole_array_spec(x) for x in outputs],
        out_shape=outputs,
        compiler_params=triton.CompilerParams(**options),
        interpret=interpret,
        name=name,
    )(*inputs)


def _kernel(
    tiles_of: Ref,
    starts: Ref,
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
    cut: KernelTiling,
    tiles: int,
    layers: int,
    interpret: bool,
) -> None:
    """Attend from a block of tokens to the active tiles of this program, for one key head.

    Shapes: `[P * b, X, 4]` for `query_bounds`, `[P * b, K, X, D]` for `q`, `[S * L, K, N, ...]` for
    `k` and `v`, and `[J, P * b, K, X, ...]` for outputs. `streams` are indices into a stack of
    layers (s * L + l), but position and owners have only S streams. Program j of J adds the tiles
    from `count * j // J` on. A value is its code times the scale of its cell, so the scale
    multiplies the weight of the cell, but not the denominator.
    """
    block, part, head = (pl.program_id(i) for i in range(3))
    cells, stream = k.shape[2], streams[block]
    pool = stream if layers == 1 else jax.lax.div(stream, jnp.int32(layers))
    query, in_query = _padded_range(q.shape[2], cut.queries)
    key, in_key = _padded_range(k.shape[3])
    value, in_value = _padded_range(v.shape[3])
    queries = _load(
        q, block, head, query[:, None], key[None], inside=in_query[:, None] & in_key[None]
    )
    look = QueryBounds(
        *(_load(query_bounds, block, query, j, inside=in_query)[:, None] for j in range(4))
    )
    dtype = jnp.promote_types(q.dtype, k.dtype)
    queries = queries.astype(dtype)
    product = partial(_multiply_tile, interpret=interpret)

    def add_tile(i: jax.Array, carry: tuple) -> tuple:
        highest, total, out = carry
        cell = jax.lax.rem(tiles_of[i], tiles) * cut.cells + jnp.arange(cut.cells, dtype=jnp.int32)
        in_cells = cell < cells if cells % cut.cells else None

        def load_tile(
            x: Ref, number: jax.Array, inside: jax.Array
        ) -> tuple[jax.Array, jax.Array | None]:
            """Return a tile `[C, n]` and its scales `[1, C]`; scales are None if not quantised."""
            numbers, scales = codes_and_scales(x)
            where = stream, head, cell[:, None], number[None]
            values = _load(numbers, *where, inside=_tile_bounds_mask(in_cells, inside, x.shape[3]))
            if scales is None:
                return values, None
            return values, _load(scales, stream, head, cell, 0, inside=in_cells)[None]

        keys, key_scales = load_tile(k, key, in_key)
        values, scales = load_tile(v, value, in_value)
        at = _load(position, pool, cell, inside=in_cells)
        words = [_load(owners, pool, w, cell, inside=in_cells) for w in range(owners.shape[1])]
        seen = look.can_see(at[None], [word[None] for word in words])
        seen = seen if in_cells is None else seen & in_cells[None]
        logits = product(queries, keys.astype(dtype), 1)
        logits = logits if key_scales is None else logits * key_scales
        logits = options.cap_logits(logits)
        # A NaN must be kept; the compiler's maximum drops it, but a comparison does not.
        logits = jnp.where(seen, jnp.where(logits < LOWEST / 2, LOWEST / 2, logits), LOWEST)
        top = jnp.maximum(highest, jnp.max(logits, axis=1))
        down, weights = jnp.exp(highest - top), jnp.exp(logits - top[:, None])
        of_codes = weights if scales is None else weights * scales
        values = values if scales is None else values.astype(q.dtype)
        more = product(of_codes.astype(values.dtype), values, 0)
        return top, total * down + jnp.sum(weights, axis=1), out * down[:, None] + more

    first, count = starts[block], starts[block + 1] - starts[block]
    begin, end = (first + jax.lax.div(count * n, cut.programs) for n in (part, part + 1))
    zero = jnp.zeros(query.shape, jnp.float32)
    nothing = zero + LOWEST, zero, jnp.zeros((query.size, value.size), jnp.float32)
    sums = jax.lax.fori_loop(begin, end, add_tile, nothing)
    where = part, block, head
    triton.store(max_logit.at[*where, query], sums[0], mask=in_query)
    triton.store(denom.at[*where, query], sums[1], mask=in_query)
    both = in_query[:, None] & in_value[None]
    triton.store(out.at[*where, query[:, None], value[None]], sums[2], mask=both)


def _merge_programs(
    highest_of: Ref,
    total_of: Ref,
    out_of: Ref,
    max_logit: Ref,
    denom: Ref,
    out: Ref,
) -> None:
    """Merge the partial softmaxes of J programs of `_kernel`, for one query."""
    where = tuple(pl.program_id(i) for i in range(3))
    part, in_part = _padded_range(out_of.shape[0])
    value, in_value = _padded_range(out_of.shape[4])
    # Programs without a tile and padding have a denominator of 0, so they add 0.
    tops = _load(highest_of, part, *where, inside=in_part, fill=LOWEST)
    totals = _load(total_of, part, *where, inside=in_part)
    both = in_part[:, None] & in_value[None]
    outs = _load(out_of, part[:, None], *where, value[None], inside=both)
    top = jnp.max(tops)
    down = jnp.exp(tops - top)
    max_logit[where] = top
    denom[where] = jnp.sum(totals * down)
    triton.store(out.at[*where, value], jnp.sum(outs * down[:, None], axis=0), mask=in_value)


def _pad_to_power_of_two(count: int) -> int:
    """Round up to a power of two, at least 16. Matrix units require dimensions of at least 16."""
    return max(16, 1 << (count - 1).bit_length())


def _padded_range(count: int, size: int | None = None) -> tuple[jax.Array, jax.Array]:
    # Triton requires the size of a range to be a power of two.
    numbers = jnp.arange(_pad_to_power_of_two(count) if size is None else size, dtype=jnp.int32)
    return numbers, numbers < count


def _load(
    ref: Ref, *where: jax.Array | int, inside: jax.Array | None, fill: float = 0
) -> jax.Array:
    return triton.load(ref.at[where], mask=inside, other=None if inside is None else fill)


def _tile_bounds_mask(
    in_cells: jax.Array | None, inside: jax.Array, count: int
) -> jax.Array | None:
    """Return which elements of a tile are not padding; None if no element is padding."""
    if in_cells is None and inside.size == count:
        return None
    every = jnp.ones((1, 1), bool) if in_cells is None else in_cells[:, None]
    return every & inside[None]


def _multiply_tile(a: jax.Array, b: jax.Array, over: int, *, interpret: bool) -> jax.Array:
    """Contract the last axis of `a` with the axis `over` of `b`, in float32."""
    # Three TF32 products on the matrix units are as exact as one float32 product, see
    # `docs/kernels.md`. By default the compiler would use one TF32 product.
    exact = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    exact = jax.lax.Precision.HIGHEST if interpret or a.dtype != jnp.float32 else exact
    dimensions = ((1,), (over,)), ((), ())
    return jax.lax.dot_general(
        a, b, dimensions, precision=exact, preferred_element_type=jnp.float32
    )
