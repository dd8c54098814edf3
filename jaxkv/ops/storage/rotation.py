"""Rotation of stored keys to new positions, without accumulating rounding errors.

A key of 16 or 8 bits is first rotated to position 0 and rounded to a grid, and then rotated to its
new position. The distance between grid points is at least twice the rounding error of a stored key.
Therefore all later rotations of the key start from the same grid point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.rope import Rope

if TYPE_CHECKING:
    from jaxtyping import Array, Float

# Storage changes each element of a pair by at most 1/2 unit, and the pair by at most sqrt(2) / 2
# units. Twice this error is sqrt(2).
WIDTH = np.float32(2**0.5)
"""Width of the grid in units of the last place: at least twice the rounding error of a pair."""


def round_to_grid(
    plain: Float[Array, "C K D"], unit: Float[Array, "C K D"], rope: Rope
) -> Float[Array, "C K D"]:
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


def pair_lengths(x: Float[Array, "C K D"], rope: Rope) -> Float[Array, "C K D"]:
    """Return the length of each rotated pair, twice; other dimensions are unchanged."""
    return map_pairs(jnp.hypot, jnp.abs(x), rope)


def map_pairs(
    combine: Callable[[jax.Array, jax.Array], jax.Array], x: Float[Array, "C K D"], rope: Rope
) -> Float[Array, "C K D"]:
    """Combine the two elements of each rotated pair; other dimensions of `x` are unchanged."""
    pairs = len(rope.frequencies)
    axis = -1 if rope.interleaved else -2
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    # Both elements of a pair get the result, since `flip` gives each element the other one.
    ab = turned.reshape(*x.shape[:-1], *((pairs, 2) if rope.interleaved else (2, pairs)))
    both = combine(ab, jnp.flip(ab, axis)).reshape(turned.shape)
    return jnp.concatenate([both, rest], axis=-1)


def rounding_unit(x: Float[Array, "*n"], dtype: jnp.dtype) -> Float[Array, "*n"]:
    """Return the rounding unit (ulp) of each non-negative number in a dtype, as float32."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.ones_like(x)
    info = jnp.finfo(dtype)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000  # the exponent alone
    power = jax.lax.bitcast_convert_type(bits, jnp.float32)
    # Numbers below the smallest normal number all have the rounding unit of this number.
    return jnp.maximum(power, np.float32(info.smallest_normal)) * np.float32(info.eps)
