"""Only the tiles of cells in which anything is seen, one after another, with a running softmax.

A pool may be large and mostly empty, full of others' tokens, or one of many streams of which few
take part. Its cells are looked at in tiles; a list of those with anything to see is made from the
mask, and a loop goes over that list. So a step costs what is seen, and nothing is compiled anew
when that changes.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.ops.attention import xla
from jaxkv.ops.attention.sight import Sight, mask_of
from jaxkv.ops.attention.softmax import Options, Sums, nothing, packed, seen_alone

Added = Callable[..., Sums]
"""How a tile is added to the sums over others, see `jaxkv.ops.attention.xla.added`."""

TILE = 512
"""Cells of a tile: large enough that a product with them outweighs a turn of the loop."""

BLOCK = 256
"""Tokens that read a tile together: of a long prompt, most see but the tiles before their own."""

MASK = 1 << 22
"""Pairs of a token and a cell up to which what is seen is held for all layers: 4 MB."""


class Live(NamedTuple):
    """What the loop goes over, for P lists of tokens in b equal blocks of t.

    mask: `[P * b, t, N]` bool, what each token sees; where that is large, the sight of the blocks,
      of which each tile makes its part.
    sees: `[P * b, t]` bool, whether a token sees anything.
    streams: `[P * b]` int32, the stream of each block.
    tiles: `[M]` int32, numbered through block after block, those in which anything is seen first.
    turns: `[]` int32, how many of those there are.
    """

    mask: jax.Array | Sight
    sees: jax.Array
    streams: jax.Array
    tiles: jax.Array
    turns: jax.Array

    @property
    def tokens(self) -> int:
        """The tokens of a block, t."""
        return (self.mask.at if isinstance(self.mask, Sight) else self.mask).shape[1]

    def seen(self, block: jax.Array, first: jax.Array, size: int) -> jax.Array:
        """Return what a block sees of `size` cells from `first` on; `[1, t, size]` bool."""
        zero = jnp.zeros_like(first)
        if not isinstance(self.mask, Sight):
            return _slice(self.mask, (block, zero, first), (1, self.tokens, size))
        sight, stream = self.mask, _at(self.streams, block)
        words = sight.owners.shape[1]
        at, word, bit = (
            _slice(x, (block, zero), (1, self.tokens)) for x in (sight.at, sight.word, sight.bit)
        )
        part = replace(
            sight,
            position=_slice(sight.position, (stream, first), (1, size)),
            owners=_slice(sight.owners, (stream, zero, first), (1, words, size)),
            at=at,
            word=word,
            bit=bit,
            all_streams=True,
        )
        return mask_of(part)


@jax.jit
def live_of(sight: Sight) -> Live:
    """List the tiles that are seen. Like `mask_of`, the compiler does this once for all layers."""
    lists, tokens = sight.at.shape
    cells = sight.position.shape[1]
    blocks, size = -(-tokens // BLOCK), min(TILE, cells)
    tiles = -(-cells // size)
    if lists * tokens * cells > MASK:
        mask, seen, sees = _sight_in_blocks(sight, blocks)
    else:
        mask = _in_blocks(mask_of(sight), blocks)
        seen, sees = jnp.any(mask, axis=1), jnp.any(mask, axis=2)
    seen = jnp.pad(seen, [(0, 0), (0, tiles * size - cells)])
    seen = jnp.any(seen.reshape(-1, size), axis=1)
    live = jnp.argsort(~seen, stable=True).astype(jnp.int32)  # those that are seen come first
    streams = jnp.repeat(sight.streams, blocks, total_repeat_length=lists * blocks)
    return Live(mask, sees, streams, live, jnp.sum(seen, dtype=jnp.int32))


def _sight_in_blocks(sight: Sight, blocks: int) -> tuple[Sight, jax.Array, jax.Array]:
    """Return the sight of blocks of tokens, which cells each sees, and which tokens see any.

    `[P * b, N]` and `[P * b, t]` bool, found token by token.
    """
    streams = jnp.repeat(sight.streams, blocks, total_repeat_length=sight.streams.size * blocks)
    at, word, bit = (_in_blocks(x, blocks) for x in (sight.at, sight.word, sight.bit))
    sight = replace(
        sight,
        streams=streams,
        at=at,
        word=word,
        bit=bit,
        all_streams=sight.all_streams and blocks == 1,
    )

    def of_token(i: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def one(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1)

        alone = replace(sight, at=one(at), word=one(word), bit=one(bit))
        mask, (seen, sees) = mask_of(alone)[:, 0], found
        any_of_it = jnp.any(mask, axis=1, keepdims=True)
        return seen | mask, jax.lax.dynamic_update_slice_in_dim(sees, any_of_it, i, axis=1)

    none = jnp.zeros((at.shape[0], sight.position.shape[1]), bool), jnp.zeros(at.shape, bool)
    return sight, *jax.lax.fori_loop(jnp.int32(0), jnp.int32(at.shape[1]), of_token, none)


def by_tiles(q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight, options: Options) -> Sums:
    """Weigh the cells of live tiles, see `jaxkv.ops.attention.api`."""
    return in_blocks(q, k, v, sight, options, xla.added)


def in_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sight: Sight,
    options: Options,
    added: Added,
    *,
    pinned: bool = False,
) -> Sums:
    """Weigh the cells of live tiles, each as `added` does, for tokens in blocks."""
    live = live_of(sight)
    lists, tokens = sight.at.shape
    rows = packed(options.scaled(_in_blocks(q, live.streams.size // lists)), k.shape[1])
    sums = one_by_one(rows, k, v, live, options, added, pinned=pinned)
    sums = jax.tree.map(lambda x: _of_lists(x, lists, tokens, live.tokens), sums)
    return seen_alone(sums, live.sees.reshape(lists, -1)[:, :tokens])


def one_by_one(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    live: Live,
    options: Options,
    added: Added,
    *,
    pinned: bool = False,
) -> Sums:
    """Go over live tiles, for packed queries `[P * b, K, X, D]`; leave `seen_alone` to callers.

    Keys and values are read where they lie, also those of a few streams of many. Where they are
    pinned, what is done to a tile, such as converting it, cannot be done to all cells beforehand.
    """
    groups, cells = k.shape[1:3]
    size = min(TILE, cells)
    tiles = -(-cells // size)

    def tile(i: jax.Array, carry: tuple[Sums, jax.Array, jax.Array]) -> tuple:
        sums, k, v = carry
        number = _at(live.tiles, i)
        block, turn = jax.lax.div(number, jnp.int32(tiles)), jax.lax.rem(number, jnp.int32(tiles))
        first = jnp.minimum(turn * size, cells - size)  # the last may overlap the one before
        zero = jnp.zeros_like(first)

        def cut(x: jax.Array) -> jax.Array:
            start = (_at(live.streams, block), zero, first, zero)
            return _slice(x, start, (1, groups, size, x.shape[3]))

        def mine(x: jax.Array) -> jax.Array:
            return _slice(x, (block, *(zero,) * (x.ndim - 1)), (1, *x.shape[1:]))

        def put(x: jax.Array, part: jax.Array) -> jax.Array:
            start = (block, *(zero,) * (x.ndim - 1))
            return jax.lax.dynamic_update_slice(x, part, start, allow_negative_indices=False)

        seen = live.seen(block, first, size)
        if cells % size:
            seen &= (first + jnp.arange(size) >= turn * size)[None, None]
        more = added(jax.tree.map(mine, sums), mine(q), cut(k), cut(v), seen, options)
        sums = jax.tree.map(put, sums, more)
        return (sums, *(jax.lax.optimization_barrier((k, v)) if pinned else (k, v)))

    start = nothing(q, v.shape[3]), k, v
    return jax.lax.fori_loop(jnp.int32(0), live.turns, tile, start)[0]


# No index is negative, and each that may be is three instructions more in every layer.
_slice = partial(jax.lax.dynamic_slice, allow_negative_indices=False)


def _at(x: jax.Array, i: jax.Array) -> jax.Array:
    return _slice(x, (i,), (1,))[0]


def _in_blocks(x: jax.Array, blocks: int) -> jax.Array:
    """Cut lists of tokens into equal blocks; `[P, T, ...]` to `[P * blocks, t, ...]`.

    The last one is filled up with zeros: tokens that see nothing.
    """
    if blocks == 1:
        return x
    size = -(-x.shape[1] // blocks)
    x = jnp.pad(x, [(0, 0), (0, blocks * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(-1, size, *x.shape[2:])


def _of_lists(x: jax.Array, lists: int, tokens: int, size: int) -> jax.Array:
    """Undo `_in_blocks` for packed sums; `[P * b, K, G * t, ...]` to `[P, K, G * T, ...]`."""
    if x.shape[0] == lists:
        return x
    groups, rest = x.shape[1], x.shape[3:]
    x = jnp.moveaxis(x.reshape(lists, -1, groups, x.shape[2] // size, size, *rest), 1, 3)
    x = x.reshape(*x.shape[:3], -1, *rest)[:, :, :, :tokens]  # [P, K, G, T, ...]
    return x.reshape(lists, groups, -1, *rest)
