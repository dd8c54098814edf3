"""Attention on CPUs over streams in which sequences reserve tiles of cells.

A small tile, of `Visibility.tile` cells, is private if only one token attends to it. Private tiles
are multiplied with the queries of this token. Then tiles of `active_tiles.TILE` cells that contain
other visible cells are multiplied with the queries of all tokens. Each pass masks the cells of the
other pass. M is the number of small tiles.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.ops.attention import xla_cpu
from jaxkv.ops.attention.active_tiles import BLOCK, find_active_tiles
from jaxkv.ops.attention.softmax import (
    LOWEST,
    AttentionOptions,
    OnlineSoftmax,
    empty_softmax,
    group_heads,
    group_queries,
    mask_logits,
    softmax_dtype,
    with_weights,
    zero_unseen,
)
from jaxkv.ops.attention.visibility import Visibility, compute_bias, compute_mask
from jaxkv.ops.attention.xla_tiles import add_tiles_one_by_one
from jaxkv.ops.storage.forms import is_array, storage_of
from jaxkv.ops.storage.storage import Stored

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float


def attend_on_cpu(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    visibility: Visibility,
    options: AttentionOptions,
) -> OnlineSoftmax:
    """Attend as this module describes, if shapes allow; else run `xla_cpu.attend_to_streams`."""
    tokens, cells, size = visibility.at.shape[1], k.shape[2], visibility.tile
    if size is None or cells % size or not visibility.all_streams or not 1 < tokens <= BLOCK:
        return xla_cpu.attend_to_streams(q, k, v, visibility, options)
    private_visibility, shared_visibility, sees = split_tiles(visibility, size)
    private_tiles = find_active_tiles(private_visibility)
    packed_q = group_queries(options.scale_queries(q), k.shape[1])
    narrow = k.dtype.itemsize < 4  # products of single tokens convert cells
    # Keys and values are converted, or copied out of all layers, for a few tiles at a time.
    piecewise = narrow or not (is_array(k) and is_array(v))
    each, mask = partial(add_cells, size), compute_mask(private_visibility)

    def add_private_tiles_one_by_one() -> tuple:
        return add_tiles_one_by_one(
            packed_q, k, v, private_tiles, options, each, convert_in_loop=narrow
        )

    def add_private_tiles_at_once() -> tuple:
        none = empty_softmax(packed_q, v.shape[3])
        return each(none, packed_q, k, v, mask, options, compute_bias(private_visibility))

    if piecewise:
        sums = add_private_tiles_one_by_one()
    else:
        # With the loop alone, a layer has a third fewer instructions, but a step of a pool with
        # 8,192 used cells takes up to 13 % longer.
        few = xla_cpu.TILE_LOOP_FRACTION * private_tiles.tiles.size
        sums = jax.lax.cond(
            private_tiles.num_active_tiles < few,
            add_private_tiles_one_by_one,
            add_private_tiles_at_once,
        )
    shared_tiles, add_shared = find_active_tiles(shared_visibility), xla_cpu.choose_add_cells(k, v)
    sums = add_tiles_one_by_one(
        packed_q, k, v, shared_tiles, options, add_shared, sums, convert_in_loop=narrow
    )
    return zero_unseen(with_weights(*sums), sees)


@partial(jax.jit, static_argnames="size")
def split_tiles(
    visibility: Visibility, size: int
) -> tuple[Visibility, Visibility, Bool[Array, "P T"]]:
    """Return two visibilities: of tiles that only one token attends to, and of all other tiles."""
    # The third result is which tokens attend to any cell.
    mask = compute_mask(visibility)
    # All lists are streams (P is S), so one mask [P, 1, N] selects the owners [S, W, N] of private
    # tiles. Cells without an owner are hidden from all tokens.
    seen = jnp.any(mask.reshape(*mask.shape[:2], -1, size), axis=3)  # [P, T, M]
    is_private = jnp.repeat(jnp.sum(seen, axis=1) == 1, size, axis=1)[:, None]
    private_owners, shared_owners = (
        jnp.where(is_private, visibility.owners, 0),
        jnp.where(is_private, 0, visibility.owners),
    )
    return (
        replace(visibility, owners=private_owners),
        replace(visibility, owners=shared_owners),
        jnp.any(seen, axis=2),
    )


def add_cells(
    size: int,
    sums: OnlineSoftmax,
    q: Float[Array, "P K X D"],
    k: Stored,
    v: Stored,
    mask: Bool[Array, "P T C"],
    options: AttentionOptions,
    bias: Float[Array, "P _ T C"] | None = None,
) -> tuple[OnlineSoftmax, Float[Array, "P K X C"] | None]:
    """Compute `jaxkv.ops.attention.xla.add_cells` for tiles that are visible to one token each."""
    lists, tokens, _ = mask.shape
    kv_heads = k.shape[1]
    cut = mask.reshape(lists, tokens, -1, size)
    sees = jnp.any(cut, axis=3)  # [P, T, M]
    token = jnp.argmax(sees, axis=1)  # [P, M]
    pick = partial(jnp.take_along_axis, axis=3, mode="promise_in_bounds")
    by_token = q.reshape(lists, kv_heads, -1, tokens, q.shape[3])
    queries = pick(by_token, token[:, None, None, :, None]).swapaxes(2, 3)  # [P, K, M, G, D]
    logits = options.cap_logits(
        _multiply_queries_keys(queries, _cut_tiles(k, size))
    )  # [P, K, M, G, C]
    if bias is not None:
        bias = group_heads(bias, kv_heads)
        bias = bias.reshape(*bias.shape[:4], -1, size)  # [P, K, G, T, M, C]
        bias = pick(bias, token[:, None, None, None, :, None])[:, :, :, 0].swapaxes(2, 3)
    logits = mask_logits(logits, jnp.any(cut, axis=1)[:, None, :, None], bias)
    highest = jnp.max(logits, axis=4, keepdims=True)
    total, out = _sum_weighted_values(jnp.exp(logits - highest), _cut_tiles(v, size))
    sums = _join_tiles(sums, sees, highest[..., 0], total, out)
    if not options.keep_weights:
        return sums, None
    # From [P, K, M, G, C] to [P, K, G, T, M, C]; a tile is hidden from all but its token.
    logits = logits.swapaxes(2, 3)[:, :, :, None]
    logits = jnp.where(sees[:, None, None, ..., None], logits, LOWEST)
    return sums, logits.reshape(*q.shape[:3], -1)


def _join_tiles(
    sums: OnlineSoftmax, sees: jax.Array, max_logit: jax.Array, denom: jax.Array, out: jax.Array
) -> OnlineSoftmax:
    """Add the partial softmax of tiles to the sums of the tokens that attend to the tiles."""
    # NaN is selected, never multiplied by the zeros of tokens that do not attend to the tile.
    lists, tokens, _ = sees.shape
    packed_shape, kv_heads = sums.max_logit.shape, max_logit.shape[1]
    max_logit, denom = (
        x.swapaxes(2, 3)[:, :, :, None] for x in (max_logit, denom)
    )  # [P, K, G, 1, M]
    sees = sees[:, None, None]
    before = sums.max_logit.reshape(lists, kv_heads, -1, tokens)
    # Axes: [P, K, G, T, M]. Each tile is visible to one token, so for a tile, `down` is 0 for all
    # other tokens.
    top = jnp.maximum(before, jnp.max(jnp.where(sees, max_logit, LOWEST), axis=4))
    down = jnp.where(sees, jnp.exp(max_logit - top[..., None]), 0.0)  # [P, K, G, T, M]
    # Values are finite, so `out` is NaN only with its denominator. The sum of denominators selects
    # by token, and its NaN reaches the output of that token.
    whole = jnp.isfinite(denom[:, :, :, 0].swapaxes(2, 3))[..., None]
    out = jnp.einsum("pkgtm,pkmgd->pkgtd", down, jnp.where(whole, out, 0.0))
    denom = jnp.sum(jnp.where(sees, denom * down, 0.0), axis=4)
    flat = (x.reshape(*packed_shape, *x.shape[4:]) for x in (top, denom, out))
    return sums.merge_block(*flat)


def _cut_tiles(x: Stored, size: int) -> Stored:
    """Cut keys or values `[P, K, M * C, D]` into tiles `[P, K, M, C, D]`, without a copy."""
    return jax.tree.map(lambda y: y.reshape(*y.shape[:2], -1, size, y.shape[3]), x)


def _multiply_queries_keys(q: jax.Array, k: Stored) -> jax.Array:
    """Multiply queries `[P, K, M, G, D]` and keys `[P, K, M, C, D]`; return `[P, K, M, G, C]`."""
    logits = storage_of(k).logits(q, softmax_dtype(q), keys_first=True)
    return jax.lax.optimization_barrier(logits).swapaxes(3, 4)


def _sum_weighted_values(weights: jax.Array, v: Stored) -> tuple[jax.Array, jax.Array]:
    """Return sums of weights, `[P, K, M, G]`, and sums of weighted values, `[P, K, M, G, Dv]`."""
    out = storage_of(v).weighted_values(weights)
    return jnp.sum(weights, axis=-1), jax.lax.optimization_barrier(out)
