"""Active tiles: the tiles of cells that a loop or a kernel reads for a block of tokens.

A tile is active for a block if a token of the block attends to a cell of the tile. M is the number
of all pairs (block of tokens, tile). `ActiveTiles.tiles` has M entries, however many tiles are
active, so its size is static. The tiles of `jaxkv.kv.tiles` are smaller.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import divmod_nonnegative
from jaxkv.ops.attention.softmax import OnlineSoftmax, zero_unseen
from jaxkv.ops.attention.visibility import Visibility, compute_bias, compute_mask, query_bounds_of

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, Shaped

TILE = 512
"""Number of cells of a tile; large, so that a product takes longer than the overhead of a loop."""

BLOCK = 256
"""Largest number of tokens of a block; the first blocks of a long prompt skip later tiles."""

MASK = 1 << 22
"""Largest number of (token, cell) pairs of a stored mask, which all layers share: 4 MB."""


class ActiveTiles(NamedTuple):
    """Active tiles of P lists of tokens; each list is cut into b equal blocks of t tokens.

    mask: Visible cells of each token, `[P * b, t, N]` bool. If this array would be large, or if
      there is a bias, `mask` is a `Visibility` instead, in which each block is a list of tokens.
    sees: Whether each token of each block has a visible cell.
    streams: Stream of each block.
    tiles: For each pair of a block and a tile, the number block * n + tile, where n is the number
      of tiles of a stream. Pairs with an active tile come first, by increasing number.
    starts: Index in `tiles` of the first active tile of each block; the last element is the number
      of active tiles of all blocks.
    places: For each number in `tiles`: the block, the first cell of the tile, and the first cell
      that a loop reads. The last two differ if the stream ends inside the tile: a loop then reads
      earlier cells too, so that all reads have one length.
    """

    mask: jax.Array | Visibility
    sees: Bool[Array, "P*b t"]
    streams: Int32[Array, " P*b"]
    tiles: Int32[Array, " M"]
    starts: Int32[Array, " P*b+1"]
    places: Int32[Array, "M 3"]

    @property
    def num_active_tiles(self) -> Int32[Array, ""]:
        """Number of active tiles of all blocks; int32."""
        return self.starts[-1]

    @property
    def tokens_per_block(self) -> int:
        """Number of tokens of a block, t."""
        return self.sees.shape[1]

    def mask_and_bias_of_tile(
        self, block: Int32[Array, ""], first: Int32[Array, ""], size: int
    ) -> tuple[Bool[Array, "1 t C"], Float[Array, "1 _ t C"] | None]:
        """Return the mask and the bias for a block of tokens and the cells of a tile."""
        zero = jnp.zeros_like(first)
        if not isinstance(self.mask, Visibility):
            return slice_of(self.mask, (block, zero, first), (1, self.tokens_per_block, size)), None
        visibility, stream = self.mask, scalar_at(self.streams, block)
        words = visibility.owners.shape[1]

        def of_block(x: jax.Array) -> jax.Array:
            if x.ndim == 2:
                return slice_of(x, (block, zero), (1, self.tokens_per_block))
            return slice_of(
                x, (block, zero, zero, first), (1, self.tokens_per_block, x.shape[2], size)
            )

        part = replace(
            visibility.slice_tokens(of_block),
            position=slice_of(visibility.position, (stream, first), (1, size)),
            owners=slice_of(visibility.owners, (stream, zero, first), (1, words, size)),
            all_streams=True,
        )
        return compute_mask(part), compute_bias(part)


@partial(jax.jit, static_argnames=("max_tokens", "size"))
def find_active_tiles(
    visibility: Visibility, max_tokens: int = BLOCK, size: int = TILE
) -> ActiveTiles:
    """List active tiles of at most `size` cells, for blocks of at most `max_tokens` tokens."""
    # All layers call this function with equal arguments, and the compiler computes the list once.
    lists, tokens = visibility.at.shape
    cells = visibility.position.shape[1]
    blocks, size = -(-tokens // max_tokens), min(size, cells)
    tiles = -(-cells // size)
    if lists * tokens * cells > MASK:
        mask = split_visibility(visibility, blocks)
        seen, sees = _find_seen_cells(mask)
    else:
        mask = split_into_blocks(compute_mask(visibility), blocks)
        seen, sees = jnp.any(mask, axis=1), jnp.any(mask, axis=2)
        mask = mask if visibility.bias is None else split_visibility(visibility, blocks)
    # `seen` is [P * b, N], then [P * b, tiles]. The active pairs of a block are neighbours in
    # `ordered`, so cumulative counts are the bounds of each block.
    seen = jnp.pad(seen, [(0, 0), (0, tiles * size - cells)])
    seen = jnp.any(seen.reshape(-1, tiles, size), axis=2)
    ordered = jnp.argsort(~seen.reshape(-1), stable=True).astype(jnp.int32)  # active tiles first
    streams = jnp.repeat(visibility.streams, blocks, total_repeat_length=lists * blocks)
    ends = jnp.cumsum(jnp.sum(seen, axis=1, dtype=jnp.int32))
    block, tile = divmod_nonnegative(ordered, tiles)
    first = tile * size
    places = jnp.stack([block, first, jnp.minimum(first, cells - size)], axis=1)
    return ActiveTiles(mask, sees, streams, ordered, jnp.pad(ends, (1, 0)), places)


def split_visibility(visibility: Visibility, blocks: int) -> Visibility:
    """Return the visibility in which each block of the tokens of a list is a list."""
    lists = visibility.streams.size * blocks
    return replace(
        visibility.slice_tokens(partial(split_into_blocks, blocks=blocks)),
        streams=jnp.repeat(visibility.streams, blocks, total_repeat_length=lists),
        all_streams=visibility.all_streams and blocks == 1,
    )


def _find_seen_cells(visibility: Visibility) -> tuple[jax.Array, jax.Array]:
    """Return which cells are visible to each list, and which tokens have a visible cell."""
    # A loop over tokens avoids a mask of all pairs of a token and a cell.
    visibility = replace(visibility, bias=None)

    def of_token(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def slice_token(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1)

        mask, (seen, sees) = compute_mask(visibility.slice_tokens(slice_token))[:, 0], carry
        any_of_it = jnp.any(mask, axis=1, keepdims=True)
        return seen | mask, jax.lax.dynamic_update_slice_in_dim(sees, any_of_it, i, axis=1)

    shape = visibility.at.shape
    none = jnp.zeros((shape[0], visibility.position.shape[1]), bool), jnp.zeros(shape, bool)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(shape[1]), of_token, none)


def query_bounds_in_blocks(
    visibility: Visibility, blocks: int, queries: int
) -> Int32[Array, "Pb X 4"]:
    """Return an array with the four fields of `QueryBounds` for each query of each block."""
    # The X queries of a key head are G copies of the t tokens, as in `group_queries`.
    bounds = jnp.stack(query_bounds_of(visibility), axis=-1)
    return jnp.tile(split_into_blocks(bounds, blocks), (1, queries, 1))


# Support for negative indices, which are not used, would add three instructions to every layer.
slice_of = partial(jax.lax.dynamic_slice, allow_negative_indices=False)


def scalar_at(x: Shaped[Array, " n"], i: Int32[Array, ""]) -> Shaped[Array, ""]:
    """Return `x[i]` for an index that is not negative."""
    return slice_of(x, (i,), (1,))[0]


def split_into_blocks(x: Shaped[Array, "P T ..."], blocks: int) -> Shaped[Array, "Pb t ..."]:
    """Cut each list of tokens into b equal blocks, padded with tokens that attend to no cell."""
    if blocks == 1:
        return x
    size = -(-x.shape[1] // blocks)
    x = jnp.pad(x, [(0, 0), (0, blocks * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(-1, size, *x.shape[2:])


def join_blocks(sums: OnlineSoftmax, active: ActiveTiles, lists: int, tokens: int) -> OnlineSoftmax:
    """Undo `split_into_blocks` for the partial softmax of P lists, and drop padding tokens."""
    sums = jax.tree.map(
        lambda x: _join_array_blocks(x, lists, tokens, active.tokens_per_block), sums
    )
    return zero_unseen(sums, active.sees.reshape(lists, -1)[:, :tokens])


def _join_array_blocks(x: jax.Array, lists: int, tokens: int, size: int) -> jax.Array:
    """Undo `split_into_blocks` for an array `[P * b, K, X, ...]`; return `[P, K, G * T, ...]`."""
    if x.shape[0] == lists:
        return x
    kv_heads, rest = x.shape[1], x.shape[3:]
    # From [P, b, K, G, t, ...] to [P, K, G, b, t, ...], so that the blocks of a list are joined.
    x = jnp.moveaxis(x.reshape(lists, -1, kv_heads, x.shape[2] // size, size, *rest), 1, 3)
    x = x.reshape(*x.shape[:3], -1, *rest)[:, :, :, :tokens]  # [P, K, G, T, ...]
    return x.reshape(lists, kv_heads, -1, *rest)
