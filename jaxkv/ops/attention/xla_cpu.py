"""Attention in forms that are fast on CPUs; J is the number of parts into which cells are cut."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.ops.attention import xla, xla_tiles
from jaxkv.ops.attention.active_tiles import TILE, find_active_tiles
from jaxkv.ops.attention.softmax import (
    AttentionOptions,
    OnlineSoftmax,
    group_heads,
    group_queries,
    mask_logits,
    softmax_dtype,
    with_weights,
    zero_unseen,
)
from jaxkv.ops.attention.visibility import Visibility, compute_bias, compute_mask
from jaxkv.ops.attention.xla_tiles import AddCells, add_tiles_one_by_one
from jaxkv.ops.storage.forms import is_array, storage_of
from jaxkv.ops.storage.storage import Stored

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

TILE_LOOP_FRACTION = 0.4
"""Fraction of active tiles below which a loop over active tiles is faster than reading all."""

MAX_TILES_AT_ONCE = 4
"""Largest number of tiles of all lists together for which no loop over tiles is compiled."""

SHORT_STREAM = 2
"""Largest number of tiles of a stream for which `MAX_SHORT_TILES` replaces `MAX_TILES_AT_ONCE`."""

MAX_SHORT_TILES = 16
"""Largest number of tiles of all lists together for which all cells of short streams are read.

A branch and a loop in each layer would double the time of the first call.
"""

MAX_TOKENS_AT_ONCE = 16
"""Largest number of tokens of a list for which all cells may be read at once."""

MIN_TOKENS_BY_TILE = 8
"""Smallest number of tokens of a list for which tiles are read singly if logits exceed 8 MB."""

MAX_CACHED_LOGIT_BYTES = 1 << 23
"""Largest number of bytes of logits that fit into the CPU's cache: 8 MB."""

LONG_STREAM = 1 << 17
"""Smallest number of cells of a stream for which 2 tokens suffice, not MIN_TOKENS_BY_TILE."""

MAX_QUERIES = 32
"""Largest number of queries of a key head for which cells are cut into parts."""

MAX_PRODUCTS = 384
"""Number of independent products that occupies all cores; cells are halved until it is reached."""

MIN_PART = 64
"""Smallest number of cells of a part."""

CAN_SPLIT_FACTORS = jax.__version_info__ >= (0, 12)
"""Whether `_terms_for` splits factors; before jax 0.12, XLA converts all cells after a write."""


def attend_to_streams(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    visibility: Visibility,
    options: AttentionOptions,
) -> OnlineSoftmax:
    """Read only active tiles if they are few, or lists long, or XLA would copy all cells."""
    if not (is_array(k) and is_array(v)):
        return attend_by_tiles(q, k, v, visibility, options)
    # Weights that are kept exist anyway, and a loop over tiles would copy them.
    large = not options.keep_weights and are_logits_large(q, k)
    if not visibility.all_streams or large or reads_by_tile(q, k):
        return attend_by_tiles(q, k, v, visibility, options)
    tiles = -(-k.shape[2] // TILE)
    most = MAX_SHORT_TILES if tiles <= SHORT_STREAM else MAX_TILES_AT_ONCE
    mask = compute_mask(visibility)
    if q.shape[0] * tiles <= most:
        return attend_by_mask(q, k, v, mask, options, compute_bias(visibility))
    active = find_active_tiles(visibility)
    # Mask and tiles are arguments, because each layer would compute them again inside a branch.
    sums = jax.lax.cond(
        active.num_active_tiles < TILE_LOOP_FRACTION * active.tiles.size,
        lambda q, active, _: with_weights(
            *add_tiles_one_by_one(q, k, v, active, options, add_cells)
        ),
        lambda q, _, mask: attend_packed(q, k, v, mask, options, compute_bias(visibility)),
        *(group_queries(options.scale_queries(q), k.shape[1]), active, mask),
    )
    return zero_unseen(sums, jnp.any(mask, axis=2))


def attend_by_tiles(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    visibility: Visibility,
    options: AttentionOptions,
) -> OnlineSoftmax:
    """Attend to the cells of active tiles, see `jaxkv.ops.attention.xla_tiles`."""
    return xla_tiles.attend_by_tiles(
        q, k, v, visibility, options, choose_add_cells(k, v), convert_in_loop=k.dtype.itemsize < 4
    )


def choose_add_cells(k: Stored, v: Stored) -> AddCells:
    """Return `xla.add_cells` for encoded keys or values, otherwise `add_cells` of this module."""
    is_encoded = storage_of(k).is_encoded or storage_of(v).is_encoded
    return xla.add_cells if is_encoded else add_cells


def attend_all_cells(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    visibility: Visibility,
    options: AttentionOptions,
) -> OnlineSoftmax:
    """Attend to all cells of each list's stream; for arguments see `dispatch.AttentionFn`."""
    if storage_of(k).is_encoded or storage_of(v).is_encoded:
        return xla.attend_all_cells(q, k, v, visibility, options)
    of_lists, mask = visibility.gather_list_streams, compute_mask(visibility)
    return attend_by_mask(q, of_lists(k), of_lists(v), mask, options, compute_bias(visibility))


def attend_by_mask(
    q: Float[Array, "P T H D"],
    k: Float[Array, "P K N D"],
    v: Float[Array, "P K N Dv"],
    mask: Bool[Array, "P T N"],
    options: AttentionOptions,
    bias: Float[Array, "P _ T N"] | None = None,
) -> OnlineSoftmax:
    """Compute `jaxkv.ops.attention.xla.attend_by_mask` in a form for CPUs."""
    q = group_queries(options.scale_queries(q), k.shape[1])
    return zero_unseen(attend_packed(q, k, v, mask, options, bias), jnp.any(mask, axis=2))


def attend_packed(
    q: Float[Array, "P K X D"],
    k: Float[Array, "P K N D"],
    v: Float[Array, "P K N Dv"],
    mask: Bool[Array, "P T N"],
    options: AttentionOptions,
    bias: Float[Array, "P _ T N"] | None,
) -> OnlineSoftmax:
    """Attend from packed and scaled queries to all cells; callers must then call `zero_unseen`."""
    logits, v = _masked_logits(q, k, mask, options, bias), _split_cells(v, q.shape[2])
    # The compiler fuses maximum, difference and exponential into one fast function, unless another
    # operation is between them, such as a guard against -inf or a maximum of earlier cells.
    # All J parts share one maximum, so their sums are added without factors.
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=(2, 5), keepdims=True))
    weights = jnp.exp(logits - highest)
    total, out = _sum_weighted_values(weights, v)
    kept = _join_cells(weights) if options.keep_weights else None
    return OnlineSoftmax(highest.reshape(q.shape[:3]), total, out, kept)


def add_cells(
    sums: OnlineSoftmax,
    q: Float[Array, "P K X D"],
    k: Float[Array, "P K C D"],
    v: Float[Array, "P K C Dv"],
    mask: Bool[Array, "P T C"],
    options: AttentionOptions,
    bias: Float[Array, "P _ T C"] | None = None,
) -> tuple[OnlineSoftmax, Float[Array, "P K X C"] | None]:
    """Compute `jaxkv.ops.attention.xla.add_cells` in a form for CPUs."""
    logits, v = _masked_logits(q, k, mask, options, bias), _split_cells(v, q.shape[2])
    highest = jnp.max(logits, axis=(2, 5)).reshape(sums.max_logit.shape)
    highest = jax.lax.stop_gradient(jnp.maximum(highest, sums.max_logit))
    weights = jnp.exp(logits - highest.reshape(*q.shape[:2], 1, -1, mask.shape[1], 1))
    sums = sums.merge_block(highest, *_sum_weighted_values(weights, v))
    return sums, _join_cells(logits) if options.keep_weights else None


def _join_cells(x: Float[Array, "P K J G T C"]) -> Float[Array, "P K X N"]:
    lists, kv_heads, parts, _, _, size = x.shape
    return jnp.moveaxis(x, 2, 4).reshape(lists, kv_heads, -1, parts * size)


def _masked_logits(
    q: jax.Array, k: jax.Array, mask: jax.Array, options: AttentionOptions, bias: jax.Array | None
) -> jax.Array:
    """Return masked logits `[P, K, J, G, T, C]`; `q` is `[P, K, X, D]`, `k` is `[P, K, N, D]`."""
    k = _split_cells(k, q.shape[2])
    lists, tokens, _ = mask.shape
    # From [P, 1, 1, T, J, C] to [P, 1, J, 1, T, C].
    mask = mask.reshape(lists, 1, 1, tokens, *k.shape[2:4]).transpose(0, 1, 4, 2, 3, 5)
    logits = options.cap_logits(_multiply_queries_keys(q, k)).reshape(
        *k.shape[:3], -1, tokens, k.shape[3]
    )
    if bias is not None:
        bias = group_heads(bias, k.shape[1])
        bias = bias.reshape(*bias.shape[:4], *k.shape[2:4]).transpose(0, 1, 4, 2, 3, 5)
    return mask_logits(logits, mask, bias)


def are_logits_large(q: Float[Array, "*_"], k: Stored) -> bool:
    """Return whether a list has more than 16 tokens, or several and large logits."""
    lists, tokens, heads, _ = q.shape
    logits = lists * tokens * heads * k.shape[2] * softmax_dtype(q).itemsize
    several = tokens >= MIN_TOKENS_BY_TILE or (tokens > 1 and k.shape[2] >= LONG_STREAM)
    return tokens > MAX_TOKENS_AT_ONCE or (several and logits > MAX_CACHED_LOGIT_BYTES)


def reads_by_tile(q: Float[Array, "P T H D"], k: Stored) -> bool:
    """Return whether the compiler converts all keys to float32 if they are multiplied at once."""
    queries = q.shape[1] * q.shape[2] // k.shape[1]
    return k.dtype.itemsize < 4 and not _has_terms(k, q.dtype, queries)


def _split_cells(x: jax.Array, queries: int) -> jax.Array:
    """Cut keys or values `[P, K, N, D]` into J parts `[P, K, J, C, D]`, without a copy."""
    # A CPU assigns whole products to its cores, so a few products with few queries use only one
    # core.
    products, parts, size = x.shape[0] * x.shape[1], 1, x.shape[2]
    while (
        queries <= MAX_QUERIES
        and products * parts < MAX_PRODUCTS
        and size % 2 == 0
        and size >= 2 * MIN_PART
    ):
        parts, size = 2 * parts, size // 2
    return x.reshape(*x.shape[:2], parts, size, x.shape[3])


def _multiply_queries_keys(q: jax.Array, k: jax.Array) -> jax.Array:
    """Multiply queries `[P, K, X, D]` and keys `[P, K, J, C, D]`; return `[P, K, J, X, C]`."""
    # With few queries, keys are the first factor, which a CPU splits over its cores. The barrier
    # prevents the compiler from swapping the factors. With many queries J is 1, and a product with
    # the axis of size J would take twice as long as without.
    dtype = softmax_dtype(q)
    if q.shape[2] > MAX_QUERIES:
        logits = jnp.einsum("pkxd,pkcd->pkxc", q, k[:, :, 0], preferred_element_type=dtype)
        return logits[:, :, None]
    terms = _terms_for(k, q)
    rows = jnp.concatenate(terms, axis=2)
    logits = jnp.einsum("pkjcd,pkxd->pkjcx", k, rows, preferred_element_type=dtype)
    logits = jax.lax.optimization_barrier(logits).swapaxes(3, 4)
    return _sum_terms(logits, len(terms), axis=3)


def _has_terms(cells: Stored, dtype: jnp.dtype, rows: int) -> bool:
    """Return whether `_terms_for` returns bfloat16 for an `x` of this dtype with `rows` rows."""
    dtypes = jnp.float32, jnp.bfloat16
    return (
        CAN_SPLIT_FACTORS
        and cells.dtype == jnp.bfloat16
        and dtype in dtypes
        and rows <= MAX_QUERIES
    )


def _terms_for(cells: jax.Array, x: Float[Array, "*n X C"]) -> list[jax.Array]:
    """Return `x`; if `_has_terms`, one or two bfloat16 arrays whose sum is `x` with 16 bits."""
    # The compiler multiplies two bfloat16 arrays without a conversion, unless one has a single row.
    if not _has_terms(cells, x.dtype, x.shape[-2]):
        return [x]
    # Two halves avoid a single row, and their sum is exact, because a half changes only the
    # exponent.
    if x.dtype == jnp.bfloat16:
        return [x] if x.shape[-2] > 1 else [x / 2, x / 2]
    # The difference is exact in float32, and bfloat16 stores its 8 upper bits: together 16 bits of
    # `x`.
    high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return [high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)]


def _sum_terms(x: jax.Array, count: int, axis: int) -> jax.Array:
    """Sum the products with each of the terms of `_terms_for`, which are joined along an axis."""
    return x if count == 1 else reduce(jnp.add, jnp.split(x, count, axis))


def _sum_weighted_values(weights: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    # XLA would compile a product with ones in each layer, but it compiles equal sums once.
    total = jnp.sum(weights, axis=(2, 5))
    dtype, weights = weights.dtype, weights.reshape(*weights.shape[:3], -1, weights.shape[5])
    terms = _terms_for(v, weights)
    rows = jnp.concatenate(terms, axis=3)
    out = jnp.einsum("pkjxc,pkjcd->pkjxd", rows, v, preferred_element_type=dtype)
    # The barrier prevents the compiler from merging the products of all parts.
    out = _sum_terms(jax.lax.optimization_barrier(out).sum(2), len(terms), axis=2)
    return total.reshape(*out.shape[:2], -1), out
