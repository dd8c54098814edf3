"""Attention in the forms that a processor is fast with, all of them found by measuring.

The compiler would turn them back into the usual ones, which are right elsewhere: there are no
barriers and no such cuts in a program for another platform.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.ops.attention.sight import Sight, mask_of
from jaxkv.ops.attention.softmax import (
    Options,
    Sums,
    masked,
    packed,
    seen_alone,
    sums_dtype,
)
from jaxkv.ops.attention.xla_tiles import by_tiles, live_of

FEW = 0.4
"""The share of tiles that are seen, below which reading them one by one is faster."""

SMALL = 4
"""Tiles of a pool that are always read all at once: choosing takes time too."""

LARGE = 16
"""Tokens from which on tiles are always read one by one: the logits of all cells would be large."""

THIN = 32
"""The most rows of queries for which keys and values are read by all cores, see `_scores`."""

PRODUCTS = 384
"""Independent products that values are weighed in, if there are as many: enough for all cores."""

PART = 64
"""The fewest rows of such a product."""


def best(q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight, options: Options) -> Sums:
    """Reads tiles where few of them are seen, or tokens are many, and else all cells at once.

    Numbers of 16 bits go through float32, which is for a tile at a time.
    """
    if not sight.all_streams or q.shape[1] > LARGE or k.dtype.itemsize < 4:
        return tiles(q, k, v, sight, options)
    live = live_of(sight)
    if live.tiles.size <= SMALL:
        return whole(q, k, v, sight, options)
    few = live.turns < FEW * live.tiles.size
    ways = (partial(way, options=options) for way in (tiles, whole))
    return jax.lax.cond(few, *ways, q, k, v, sight)


def tiles(q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight, options: Options) -> Sums:
    """Weighs the cells of live tiles, see `jaxkv.ops.attention.xla_tiles`."""
    return by_tiles(q, k, v, sight, options, one=open_softmax)


def whole(q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight, options: Options) -> Sums:
    """Weighs all cells of the streams that take part."""
    return by_mask(q, sight.of_lists(k), sight.of_lists(v), mask_of(sight), options)


def by_mask(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, options: Options) -> Sums:
    """Does what `jaxkv.ops.attention.xla.by_mask` does, with the same arguments."""
    return open_softmax(packed(options.scaled(q), k.shape[1]), k, v, mask, options)


def open_softmax(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, options: Options
) -> Sums:
    """Does what `jaxkv.ops.attention.xla.open_softmax` does, with the same arguments."""
    lists, tokens, _ = mask.shape
    k, v = _in_parts(k, q.shape[2]), _in_parts(v, q.shape[2])
    mask_of_parts = mask.reshape(lists, 1, 1, tokens, *k.shape[2:4]).transpose(0, 1, 4, 2, 3, 5)
    logits = options.capped(_scores(q, k)).reshape(*k.shape[:3], -1, tokens, k.shape[3])
    logits = masked(logits, mask_of_parts)  # [P, K, parts, G, T, C]
    # Maximum, difference and exponential in a row are one fast function of the compiler's on CPU.
    # It takes nothing between them, such as a guard against -inf.
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=(2, 5), keepdims=True))
    weights = jnp.exp(logits - highest)
    total = jnp.sum(weights, axis=(2, 5)).reshape(q.shape[:3])
    out = _weigh(weights.reshape(*k.shape[:3], -1, k.shape[3]), v)
    return seen_alone(Sums(highest.reshape(q.shape[:3]), total, out), mask)


def _in_parts(x: jax.Array, queries: int) -> jax.Array:
    """Cuts keys or values into parts of C; `[P, K, N, D]` to `[P, K, parts, C, D]`, unmoved.

    A processor shares products among its cores one by one, and a few thin ones keep but one core
    busy. Where there are many queries, or few cells, there is one part.
    """
    products, parts, size = x.shape[0] * x.shape[1], 1, x.shape[2]
    while queries <= THIN and products * parts < PRODUCTS and size % 2 == 0 and size >= 2 * PART:
        parts, size = 2 * parts, size // 2
    return x.reshape(*x.shape[:2], parts, size, x.shape[3])


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """Multiplies queries `[P, K, X, D]` and keys in parts; `[P, K, parts, X, C]`.

    With few queries the keys come first: rows of the first factor are shared among cores. The
    barrier keeps the compiler from exchanging the factors to save itself the small transpose. With
    many there is one part, which is left out of the product: as a dimension it doubles the time.
    """
    dtype = sums_dtype(q)
    if q.shape[2] > THIN:
        logits = jnp.einsum("rkxd,rkcd->rkxc", q, k[:, :, 0], preferred_element_type=dtype)
        return logits[:, :, None]
    logits = jnp.einsum("rkpcd,rkxd->rkpcx", k, q, preferred_element_type=dtype)
    return jax.lax.optimization_barrier(logits).swapaxes(3, 4)


def _weigh(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Adds up weighted values, `[P, K, parts, X, C]` times values in parts; `[P, K, X, Dv]`."""
    out = jnp.einsum("rkpxc,rkpcd->rkpxd", weights, v, preferred_element_type=weights.dtype)
    # Without the barrier the sum over parts would become one product again.
    return jax.lax.optimization_barrier(out).sum(2)
