"""Turning stored keys from one position to another, so that errors of many moves do not add up.

A key of 16 or 8 bits that is turned is rounded. Turned from what the last move left, it would be
off by one rounding more with each move. So a move looks at what the key is at position 0 and puts
its pairs on a grid there, wide enough for the rounding at any position to be undone: the first move
brings them onto the grid, and every later one finds them there again.

Letters: C cells, K heads of keys, D numbers of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.ops.quantised import (
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
"""Of the grid, in units of the last place. Rounding takes each number of a pair half a unit away,
so the pair by less than half of the grid's width."""


def rotate_keys(
    keys: Numbers, start: Int32[Array, " C"], stop: Int32[Array, " C"], rope: Rope
) -> Numbers:
    """Return keys that were rotated for some positions, rotated for others.

    Args:
      keys: `[C, K, D]`; they are multiplied by the rope's `attention_factor` already.
      start: the position that each key was rotated for.
      stop: the position that it is rotated for in the result.
      rope: the rotary embedding.
    """
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
    """Return keys at position 0 with their pairs on the grid; what no pair turns stays.

    unit: `[C, K, D]`, the widest unit of the last place that the pair of a number has anywhere.
    """
    size, width = 2 * len(rope.frequencies), WIDTH * unit
    pairs = jnp.round(plain / width) * width
    return jnp.concatenate([pairs[..., :size], plain[..., size:]], axis=-1)


def _map_pairs(
    combine: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, rope: Rope
) -> jax.Array:
    """Return for each number what its pair gives; what no pair turns stays; `[..., D]`."""
    pairs = len(rope.frequencies)
    axis = -1 if rope.interleaved else -2
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    ab = turned.reshape(*x.shape[:-1], *((pairs, 2) if rope.interleaved else (2, pairs)))
    both = combine(ab, jnp.flip(ab, axis)).reshape(turned.shape)
    return jnp.concatenate([both, rest], axis=-1)


def _rounding_unit(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return what a number of such a size, at least 0, is a multiple of in a dtype; float32."""
    if is_integer_dtype(dtype):
        return jnp.ones_like(x)
    info = jnp.finfo(dtype)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000  # the exponent alone
    power = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.maximum(power, np.float32(info.smallest_normal)) * np.float32(info.eps)


def _choose_scales(keys: Quantised, lengths: jax.Array) -> jax.Array:
    """Return scales by which the codes of all pairs have room at every position.

    Scales that give it stay as they are, or each move would round by others.
    """
    max_code = largest_code(keys.dtype)
    unit = _rounding_unit(jnp.float32(max_code), keys.dtype)
    groups = scale_groups(lengths.shape[-1])
    longest = [jnp.max(lengths[..., group], axis=-1, keepdims=True) for group in groups]
    longest = jnp.concatenate(longest, axis=-1)
    fits = longest <= keys.scales * (max_code + 0.75 * unit)
    return jnp.where(fits, keys.scales, longest / (max_code - unit))
