"""The tiles of cells in which anything is seen: what a loop over tiles, or a kernel, goes over.

A pool may be large and mostly empty, full of others' tokens, or one of many streams of which few
take part. So its cells are looked at in tiles, and tokens in blocks; the list of those pairs with
anything to see is an array, and nothing is compiled anew when it changes.

These are the tiles that are read at once. Those that a sequence may have for itself are smaller and
say where tokens go, see `jaxkv.kv.tiles`; of them attention knows `Sight.tile` alone.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.ops.attention.sight import Sight, bias_of, looks_of, mask_of
from jaxkv.ops.attention.softmax import Sums, seen_alone

TILE = 512
"""Cells of a tile: large enough that a product with them outweighs a turn of the loop."""

BLOCK = 256
"""Tokens that read a tile together: of a long prompt, most see but the tiles before their own."""

MASK = 1 << 22
"""Pairs of a token and a cell up to which what is seen is held for all layers: 4 MB."""


class Live(NamedTuple):
    """What the loop goes over, for P lists of tokens in b equal blocks of t.

    mask: `[P * b, t, N]` bool, what each token sees; where that is large, or there is a bias, the
      sight of the blocks, of which each tile makes its part.
    sees: `[P * b, t]` bool, whether a token sees anything.
    streams: `[P * b]` int32, the stream of each block.
    tiles: `[M]` int32, numbered through block after block, those in which anything is seen first.
    starts: `[P * b + 1]` int32, where in that list those of each block start, and at last how many
      there are.
    """

    mask: jax.Array | Sight
    sees: jax.Array
    streams: jax.Array
    tiles: jax.Array
    starts: jax.Array

    @property
    def turns(self) -> jax.Array:
        """How many tiles are seen, of all blocks together."""
        return self.starts[-1]

    @property
    def tokens(self) -> int:
        """The tokens of a block, t."""
        return self.sees.shape[1]

    def of_tile(
        self, block: jax.Array, first: jax.Array, size: int
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return what a block sees of `size` cells from `first` on, and its bias for them.

        `[1, t, size]` bool, and `[1, H or 1, t, size]` or None.
        """
        zero = jnp.zeros_like(first)
        if not isinstance(self.mask, Sight):
            return slice_of(self.mask, (block, zero, first), (1, self.tokens, size)), None
        sight, stream = self.mask, item(self.streams, block)
        words = sight.owners.shape[1]

        def of_block(x: jax.Array) -> jax.Array:
            if x.ndim == 2:
                return slice_of(x, (block, zero), (1, self.tokens))
            return slice_of(x, (block, zero, zero, first), (1, self.tokens, x.shape[2], size))

        part = replace(
            sight.of_tokens(of_block),
            position=slice_of(sight.position, (stream, first), (1, size)),
            owners=slice_of(sight.owners, (stream, zero, first), (1, words, size)),
            all_streams=True,
        )
        return mask_of(part), bias_of(part)


@partial(jax.jit, static_argnames=("most", "size"))
def live_of(sight: Sight, most: int = BLOCK, size: int = TILE) -> Live:
    """List the tiles of `size` cells that are seen, by blocks of `most` tokens or less.

    Like `mask_of`, the compiler does this once for all layers.
    """
    lists, tokens = sight.at.shape
    cells = sight.position.shape[1]
    blocks, size = -(-tokens // most), min(size, cells)
    tiles = -(-cells // size)
    if lists * tokens * cells > MASK:
        mask = _in_blocks(sight, blocks)
        seen, sees = _seen_by_token(mask)
    else:
        mask = in_blocks(mask_of(sight), blocks)
        seen, sees = jnp.any(mask, axis=1), jnp.any(mask, axis=2)
        mask = mask if sight.bias is None else _in_blocks(sight, blocks)
    seen = jnp.pad(seen, [(0, 0), (0, tiles * size - cells)])
    seen = jnp.any(seen.reshape(-1, tiles, size), axis=2)
    live = jnp.argsort(~seen.reshape(-1), stable=True).astype(jnp.int32)  # the seen ones come first
    streams = jnp.repeat(sight.streams, blocks, total_repeat_length=lists * blocks)
    ends = jnp.cumsum(jnp.sum(seen, axis=1, dtype=jnp.int32))
    return Live(mask, sees, streams, live, jnp.pad(ends, (1, 0)))


def _in_blocks(sight: Sight, blocks: int) -> Sight:
    """Return the sight of blocks of tokens, each of which is a list."""
    lists = sight.streams.size * blocks
    return replace(
        sight.of_tokens(partial(in_blocks, blocks=blocks)),
        streams=jnp.repeat(sight.streams, blocks, total_repeat_length=lists),
        all_streams=sight.all_streams and blocks == 1,
    )


def _seen_by_token(sight: Sight) -> tuple[jax.Array, jax.Array]:
    """Return which cells each list sees, and which tokens see any, found token by token.

    `[P, N]` and `[P, T]` bool.
    """
    sight = replace(sight, bias=None)

    def of_token(i: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def one(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1)

        mask, (seen, sees) = mask_of(sight.of_tokens(one))[:, 0], found
        any_of_it = jnp.any(mask, axis=1, keepdims=True)
        return seen | mask, jax.lax.dynamic_update_slice_in_dim(sees, any_of_it, i, axis=1)

    shape = sight.at.shape
    none = jnp.zeros((shape[0], sight.position.shape[1]), bool), jnp.zeros(shape, bool)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(shape[1]), of_token, none)


def looks_in_blocks(sight: Sight, blocks: int, queries: int) -> jax.Array:
    """Return what decides what the queries of blocks see, `[P * b, X, 4]` int32, see `Looks`.

    Each token has some queries of a key.
    """
    looks = jnp.stack(looks_of(sight), axis=-1)
    return jnp.tile(in_blocks(looks, blocks), (1, queries, 1))


# No index is negative, and each that may be is three instructions more in every layer.
slice_of = partial(jax.lax.dynamic_slice, allow_negative_indices=False)


def item(x: jax.Array, i: jax.Array) -> jax.Array:
    """Return `x[i]`, for an index that is not negative."""
    return slice_of(x, (i,), (1,))[0]


def in_blocks(x: jax.Array, blocks: int) -> jax.Array:
    """Cut lists of tokens into equal blocks; `[P, T, ...]` to `[P * blocks, t, ...]`.

    The last one is filled up with zeros: tokens that see nothing.
    """
    if blocks == 1:
        return x
    size = -(-x.shape[1] // blocks)
    x = jnp.pad(x, [(0, 0), (0, blocks * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(-1, size, *x.shape[2:])


def of_lists(sums: Sums, live: Live, lists: int, tokens: int) -> Sums:
    """Return the sums of P lists of T tokens from those of their blocks."""
    sums = jax.tree.map(lambda x: _of_lists(x, lists, tokens, live.tokens), sums)
    return seen_alone(sums, live.sees.reshape(lists, -1)[:, :tokens])


def _of_lists(x: jax.Array, lists: int, tokens: int, size: int) -> jax.Array:
    """Undo `in_blocks` for packed sums; `[P * b, K, G * t, ...]` to `[P, K, G * T, ...]`."""
    if x.shape[0] == lists:
        return x
    groups, rest = x.shape[1], x.shape[3:]
    x = jnp.moveaxis(x.reshape(lists, -1, groups, x.shape[2] // size, size, *rest), 1, 3)
    x = x.reshape(*x.shape[:3], -1, *rest)[:, :, :, :tokens]  # [P, K, G, T, ...]
    return x.reshape(lists, groups, -1, *rest)
