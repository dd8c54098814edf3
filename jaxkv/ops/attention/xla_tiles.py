"""Attention that reads only what somebody sees: tile after tile of cells, with a running softmax.

A pool may be large and mostly empty, full of others' tokens, or one of many streams of which few
take part. Its cells are looked at in tiles; a list of those with anything to see is made from the
mask, and the loop goes over that list. So a step costs what is seen, and nothing is compiled anew
when that changes.
"""

import jax
import jax.numpy as jnp

from jaxkv.ops.attention.softmax import (
    LOWEST,
    Sums,
    closed,
    joined,
    packed,
    sinks_alone,
    unpacked,
)
from jaxkv.ops.attention.xla import Arrays, attention, open_softmax

TILE = 512
"""Cells of a tile: large enough that a product with them outweighs a turn of the loop."""

FEW = 0.4
"""The share of tiles that are seen, below which reading them one by one is faster."""

SMALL = 4
"""Tiles of a pool that are always read all at once: choosing takes time too."""

LARGE = 16
"""Tokens from which on tiles are always read one by one: the logits of all cells would be large."""

BLOCK = 256
"""Tokens that read a tile together: of a long prompt, most see but the tiles before their own."""


def attention_by_tiles(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    pools: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Do what `attention` does, for tokens of some of many streams, reading what is seen alone.

    Args:
      q: `[P, T, H, D]`, queries of the tokens of P streams.
      k: `[S, K, N, D]`, keys of all streams.
      v: `[S, K, N, Dv]`, values.
      mask: `[P, T, N]` bool, which cells of its stream each token sees.
      pools: `[P]` int32, the stream of each list of tokens. With P = S list p is stream p's.
      scale: see `attention`.
      softcap: see `attention`.
      sinks: see `attention`.

    Returns:
      `[P, T, H, Dv]`. Derivatives, in both modes, are those of `attention`.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    all_streams = pools.shape[0] == k.shape[0]

    # The mask and the pools are arguments, not closed over: where a step is jitted inside of a
    # `grad`, JAX asks for its derivative when the trace that they belong to has ended.
    def whole(arrays: Arrays, mask: jax.Array, pools: jax.Array) -> jax.Array:
        q, k, v, sinks = arrays
        mine = (k, v) if all_streams else (k[pools], v[pools])
        return attention(q, *mine, mask, scale=factor, softcap=softcap, sinks=sinks)

    @jax.custom_jvp
    def attend(arrays: Arrays, mask: jax.Array, pools: jax.Array) -> jax.Array:
        q, k, v, sinks = arrays
        size, tokens = min(TILE, k.shape[2]), mask.shape[1]
        blocks = -(-tokens // BLOCK)
        seen = _in_blocks(mask, blocks)
        live, count = _live(seen, size)

        def tiles() -> jax.Array:
            lists = jnp.repeat(pools, blocks)
            rows = _in_blocks(q, blocks)
            out = _by_tiles(rows, k, v, seen, lists, live, count, size, factor, softcap, sinks)
            return out.reshape(q.shape[0], -1, *out.shape[2:])[:, :tokens]

        if not all_streams or tokens > LARGE:
            return tiles()
        if live.shape[0] <= SMALL:
            return whole(arrays, mask, pools)
        few = count < FEW * live.shape[0]
        return jax.lax.cond(few, tiles, lambda: whole(arrays, mask, pools))

    @attend.defjvp
    def derive(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
        # The loop's length depends on the data, which reverse mode cannot follow.
        arrays, mask, pools = primals
        return jax.jvp(lambda arrays: whole(arrays, mask, pools), (arrays,), tangents[:1])

    return attend((q, k, v, sinks), mask, pools)


def _in_blocks(x: jax.Array, blocks: int) -> jax.Array:
    """Cut lists of tokens into equal blocks, each a list; `[P, T, ...]` to `[P * blocks, t, ...]`.

    The last one is filled up with zeros: tokens that see nothing.
    """
    if blocks == 1:
        return x
    size = -(-x.shape[1] // blocks)
    x = jnp.pad(x, [(0, 0), (0, blocks * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(-1, size, *x.shape[2:])


def _live(mask: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """List the tiles in which anything is seen: `[M]` int32, numbered through, and how many."""
    pools, _, cells = mask.shape
    tiles = -(-cells // size)
    seen = jnp.any(mask, axis=1)
    seen = jnp.pad(seen, [(0, 0), (0, tiles * size - cells)]).reshape(pools * tiles, size)
    seen = jnp.any(seen, axis=1)
    live = jnp.nonzero(seen, size=seen.size, fill_value=0)[0].astype(jnp.int32)
    return live, jnp.sum(seen, dtype=jnp.int32)


def _by_tiles(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    pools: jax.Array,
    live: jax.Array,
    count: jax.Array,
    size: int,
    scale: float,
    softcap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    groups, cells, dtype = *k.shape[1:3], q.dtype
    tiles = -(-cells // size)
    tokens, heads = q.shape[1:3]
    q = packed(q * jnp.asarray(scale, q.dtype), groups)  # [P, K, X, D]
    nothing = jnp.zeros(q.shape[:3], jnp.float32)
    sums = Sums(nothing + LOWEST, nothing, jnp.zeros((*q.shape[:3], v.shape[3]), jnp.float32))
    if sinks is not None:
        sums = sinks_alone(sinks, sums)

    def tile(i: jax.Array, sums: Sums) -> Sums:
        pool, turn = live[i] // tiles, live[i] % tiles
        first = jnp.minimum(turn * size, cells - size)  # the last may overlap the one before
        new = first + jnp.arange(size) >= turn * size

        def cut(x: jax.Array) -> jax.Array:
            start = (pools[pool], 0, first, 0)
            return jax.lax.dynamic_slice(x, start, (1, groups, size, x.shape[3]))

        def mine(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, pool, 1)

        seen = jax.lax.dynamic_slice(mask, (pool, 0, first), (1, tokens, size)) & new[None, None]
        more = open_softmax(mine(q), cut(k), cut(v), seen, softcap)
        return jax.tree.map(
            lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, pool, 0),
            sums,
            joined(jax.tree.map(mine, sums), more),
        )

    sums = jax.lax.fori_loop(0, count, tile, sums)
    return unpacked(closed(sums), tokens, heads).astype(dtype)
