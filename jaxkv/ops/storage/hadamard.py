"""Rotation of heads by an orthonormal Hadamard matrix, which spreads large numbers over a head.

The matrix is its own inverse, and keeps products of queries and keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def rotate_by_hadamard(x: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
    """Multiply heads by the Hadamard matrix divided by sqrt(D); D is a power of two.

    >>> rotate_by_hadamard(jnp.array([2.0, 0.0, 0.0, 4.0])).tolist()
    [3.0, -1.0, -1.0, 3.0]
    """
    index = jnp.arange(x.shape[-1])
    signs = 1 - 2 * (jax.lax.population_count(index[:, None] & index[None]) & 1)
    # Signs are exact in each dtype. Without "highest", some devices would round `x`.
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    product = jnp.matmul(
        x, signs.astype(x.dtype), precision="highest", preferred_element_type=dtype
    )
    return (product * x.shape[-1] ** -0.5).astype(x.dtype)
