"""Rotation of stored keys to new positions, without accumulating rounding errors.

A key of 16 or 8 bits is first rotated to position 0 and rounded to a grid, and then rotated to its
new position. The distance between grid points is at least twice the rounding error of a stored key.
Therefore all later rotations of the key start from the same grid point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.ops.storage.quantised import (
    Numbers,
    Quantised,
    compute_codes,
    dequantise,
    expand_scales,
    is_integer_dtype,
    largest_code,
    scale_groups,
)
from jaxkv.rope import Rope

if TYPE_CHECKING:
    from jaxtyping import Array, Int32

WIDTH = np.float32(2**0.5)
"""Width of the grid in units of the last place: at least twice the rounding error of a pair."""


def rotate_keys(
    keys: Numbers, start: Int32[Array, " C"], stop: Int32[Array, " C"], rope: Rope
) -> Numbers:
    """Rotate keys `[C, K, D]` from positions `start` to `stop`, with an attention factor of 1."""
    rope = replace(rope, attention_factor=1.0)
    if not isinstance(keys, Quantised) and keys.dtype.itemsize > 2:
        return rope.rotate(keys, stop - start)
    plain = rope.rotate(dequantise(keys).astype(jnp.float32), -start)
    lengths = _map_pairs(jnp.hypot, jnp.abs(plain), rope)
    if not isinstance(keys, Quantised):
        moved = _round_to_grid(plain, _rounding_unit(lengths, keys.dtype), rope)
        return rope.rotate(moved, stop).astype(keys.dtype)
    scales = _choose_scales(keys, lengths)
    scale = jnp.broadcast_to(expand_scales(scales, plain.shape[-1]), plain.shape)
    scale = _map_pairs(jnp.maximum, jnp.where(scale > 0, scale, 1), rope)
    moved = _round_to_grid(plain, scale * _rounding_unit(lengths / scale, keys.dtype), rope)
    codes = compute_codes(rope.rotate(moved, stop), scales, keys.dtype)
    return Quantised(codes=codes, scales=scales)


def _round_to_grid(plain: jax.Array, unit: jax.Array, rope: Rope) -> jax.Array:
    """Round keys at position 0 to the grid; `unit` is the rounding unit of each pair."""
    tiny = jnp.finfo(jnp.float32).tiny  # a width below it is flushed to 0
    size, width = 2 * len(rope.frequencies), jax.lax.stop_gradient(jnp.maximum(WIDTH * unit, tiny))
    pairs = _round(plain / width) * width
    return jnp.concatenate([pairs[..., :size], plain[..., size:]], axis=-1)


@jax.custom_jvp
def _round(x: jax.Array) -> jax.Array:
    """Round to integers; the derivative is 1, as for a cast to a smaller dtype."""
    return jnp.round(x)


_round.defjvps(lambda tangent, _, __: tangent)


def _map_pairs(
    combine: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, rope: Rope
) -> jax.Array:
    """Combine the two elements of each rotated pair; other dimensions of `x` are unchanged."""
    pairs = len(rope.frequencies)
    axis = -1 if rope.interleaved else -2
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    ab = turned.reshape(*x.shape[:-1], *((pairs, 2) if rope.interleaved else (2, pairs)))
    both = combine(ab, jnp.flip(ab, axis)).reshape(turned.shape)
    return jnp.concatenate([both, rest], axis=-1)


def _rounding_unit(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the rounding unit (ulp) of each non-negative number in a dtype, as float32."""
    if is_integer_dtype(dtype):
        return jnp.ones_like(x)
    info = jnp.finfo(dtype)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000  # the exponent alone
    power = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.maximum(power, np.float32(info.smallest_normal)) * np.float32(info.eps)


def _choose_scales(keys: Quantised, lengths: jax.Array) -> jax.Array:
    """Return scales for which codes do not overflow after a rotation to any position."""
    # Old scales that fit are kept, because each move with other scales would round differently.
    max_code = largest_code(keys.dtype)
    unit = _rounding_unit(jnp.float32(max_code), keys.dtype)
    groups = scale_groups(lengths.shape[-1])
    longest = [jnp.max(lengths[..., group], axis=-1, keepdims=True) for group in groups]
    longest = jnp.concatenate(longest, axis=-1)
    fits = longest <= keys.scales * (max_code + 0.75 * unit)
    return jnp.where(fits, keys.scales, longest / (max_code - unit))
