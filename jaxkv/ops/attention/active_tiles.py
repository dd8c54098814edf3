"""The tiles of cells in which anything is seen: what a loop over tiles, or a kernel, goes over.

A pool may be large and mostly empty, full of the tokens of other sequences, or one of many streams
of which few take part. So cells are looked at in tiles, and tokens in blocks. The list of the pairs
of a block and a tile with anything to see is an array: when it changes, nothing is compiled anew.

These are the tiles that are read at once. The tiles that a sequence may have for itself are smaller
and say where tokens go, see `jaxkv.kv.tiles`; attention knows only their size, `Visibility.tile`.

Letters beside those of the package: b blocks of a list, t tokens of a block, M pairs of a block and
a tile, G query heads of a key head, X = G * t queries of a block that share a key.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.ops.attention.softmax import OnlineSoftmax, zero_unseen
from jaxkv.ops.attention.visibility import Visibility, compute_bias, compute_mask, query_bounds_of

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, Shaped

TILE = 512
"""Cells of a tile: large enough that a product with them outweighs a turn of the loop."""

BLOCK = 256
"""The most tokens of a block, which read a tile together: most blocks of a long prompt see only the
tiles before their own."""

MASK = 1 << 22
"""The most pairs of a token and a cell whose mask is held for all layers: 4 MB."""


class ActiveTiles(NamedTuple):
    """What the loop goes over, for P lists of tokens in b equal blocks of t.

    mask: `[P * b, t, N]` bool, what each token sees. Where a mask would be large, or there is a
      bias, it is the visibility of the blocks, from which a turn makes the mask of its tile.
    sees: whether a token sees anything.
    streams: the stream of each block.
    tiles: numbers of all pairs: that of the block times the tiles of a stream, plus that of the
      tile. The pairs in which anything is seen come first, block after block.
    starts: where in `tiles` the seen tiles of each block start, and in the end how many are seen in
      all.
    """

    mask: jax.Array | Visibility
    sees: Bool[Array, "P*b t"]
    streams: Int32[Array, " P*b"]
    tiles: Int32[Array, " M"]
    starts: Int32[Array, " P*b+1"]

    @property
    def num_active_tiles(self) -> Int32[Array, ""]:
        """How many tiles are seen, of all blocks together; int32."""
        return self.starts[-1]

    @property
    def tokens_per_block(self) -> int:
        """The tokens of a block, t."""
        return self.sees.shape[1]

    def mask_and_bias_of_tile(
        self, block: Int32[Array, ""], first: Int32[Array, ""], size: int
    ) -> tuple[Bool[Array, "1 t C"], Float[Array, "1 _ t C"] | None]:
        """Return what a block sees of `size` cells from `first` on, and the bias for them.

        The bias is of H heads or of one.
        """
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
    """List the tiles of `size` cells that are seen, by blocks of `max_tokens` tokens or less.

    As with `compute_mask`, each layer calls this, and the compiler computes it once.
    """
    lists, tokens = visibility.at.shape
    cells = visibility.position.shape[1]
    blocks, size = -(-tokens // max_tokens), min(size, cells)
    tiles = -(-cells // size)
    if lists * tokens * cells > MASK:
        mask = _split_visibility(visibility, blocks)
        seen, sees = _find_seen_cells(mask)
    else:
        mask = split_into_blocks(compute_mask(visibility), blocks)
        seen, sees = jnp.any(mask, axis=1), jnp.any(mask, axis=2)
        mask = mask if visibility.bias is None else _split_visibility(visibility, blocks)
    seen = jnp.pad(seen, [(0, 0), (0, tiles * size - cells)])
    seen = jnp.any(seen.reshape(-1, tiles, size), axis=2)
    live = jnp.argsort(~seen.reshape(-1), stable=True).astype(jnp.int32)  # the seen ones come first
    streams = jnp.repeat(visibility.streams, blocks, total_repeat_length=lists * blocks)
    ends = jnp.cumsum(jnp.sum(seen, axis=1, dtype=jnp.int32))
    return ActiveTiles(mask, sees, streams, live, jnp.pad(ends, (1, 0)))


def _split_visibility(visibility: Visibility, blocks: int) -> Visibility:
    """Return the `Visibility` of P * b lists of t tokens, the blocks of P lists; b is `blocks`."""
    lists = visibility.streams.size * blocks
    return replace(
        visibility.slice_tokens(partial(split_into_blocks, blocks=blocks)),
        streams=jnp.repeat(visibility.streams, blocks, total_repeat_length=lists),
        all_streams=visibility.all_streams and blocks == 1,
    )


def _find_seen_cells(visibility: Visibility) -> tuple[jax.Array, jax.Array]:
    """Return which cells each list sees, `[P, N]` bool, and which tokens see any, `[P, T]` bool.

    It goes token by token, so that no mask of all pairs is held.
    """
    visibility = replace(visibility, bias=None)

    def of_token(i: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def slice_token(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1)

        mask, (seen, sees) = compute_mask(visibility.slice_tokens(slice_token))[:, 0], found
        any_of_it = jnp.any(mask, axis=1, keepdims=True)
        return seen | mask, jax.lax.dynamic_update_slice_in_dim(sees, any_of_it, i, axis=1)

    shape = visibility.at.shape
    none = jnp.zeros((shape[0], visibility.position.shape[1]), bool), jnp.zeros(shape, bool)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(shape[1]), of_token, none)


def query_bounds_in_blocks(
    visibility: Visibility, blocks: int, queries: int
) -> Int32[Array, "Pb X 4"]:
    """Return what decides which cells the queries of blocks see.

    The four numbers are those of `QueryBounds`; b is `blocks` and G is `queries`.
    """
    looks = jnp.stack(query_bounds_of(visibility), axis=-1)
    return jnp.tile(split_into_blocks(looks, blocks), (1, queries, 1))


# No index is negative here. An index that could be would add three instructions to every layer.
slice_of = partial(jax.lax.dynamic_slice, allow_negative_indices=False)


def scalar_at(x: Shaped[Array, " n"], i: Int32[Array, ""]) -> Shaped[Array, ""]:
    """Return the number `x[i]`, for an index that is not negative."""
    return slice_of(x, (i,), (1,))[0]


def split_into_blocks(x: Shaped[Array, "P T ..."], blocks: int) -> Shaped[Array, "Pb t ..."]:
    """Cut lists of tokens into b `blocks` of equal size.

    The last block is filled up with zeros: tokens that see nothing.
    """
    if blocks == 1:
        return x
    size = -(-x.shape[1] // blocks)
    x = jnp.pad(x, [(0, 0), (0, blocks * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(-1, size, *x.shape[2:])


def merge_blocks(sums: OnlineSoftmax, live: ActiveTiles, lists: int, tokens: int) -> OnlineSoftmax:
    """Return the sums of P `lists` of T `tokens` from the sums of their P * b blocks."""
    sums = jax.tree.map(
        lambda x: _merge_array_blocks(x, lists, tokens, live.tokens_per_block), sums
    )
    return zero_unseen(sums, live.sees.reshape(lists, -1)[:, :tokens])


def _merge_array_blocks(x: jax.Array, lists: int, tokens: int, size: int) -> jax.Array:
    """Undo `split_into_blocks` for packed sums; `[P * b, K, X, ...]` to `[P, K, G * T, ...]`.

    P is `lists`, T is `tokens` and t is `size`.
    """
    if x.shape[0] == lists:
        return x
    kv_heads, rest = x.shape[1], x.shape[3:]
    x = jnp.moveaxis(x.reshape(lists, -1, kv_heads, x.shape[2] // size, size, *rest), 1, 3)
    x = x.reshape(*x.shape[:3], -1, *rest)[:, :, :, :tokens]  # [P, K, G, T, ...]
    return x.reshape(lists, kv_heads, -1, *rest)
