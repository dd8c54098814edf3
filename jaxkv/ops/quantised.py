"""Keys and values in 8 bits: codes, and a scale for each head and cell.

`encoded` and `decoded` say what codes mean. Attention multiplies codes as they are, and logits and
weights by the scales (`parts`). What copies, cuts, splits or counts arrays does so with codes and
scales alike, array by array (`jax.tree.map`): both have streams, heads and cells first, and a last
dimension of their own.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Quantised:
    """Keys or values of a layer in 8 bits, where else an array of them stands.

    A number is its code times the scale of its head and cell. What is not finite has codes of 0 and
    the scale NaN.

    codes: `[S, K, N, D]` int8, or a floating dtype of 8 bits.
    scales: `[S, K, N, 1]` float32, the largest number of a head over that of the codes' dtype.
    """

    codes: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """That of what it stands for."""
        return self.codes.shape

    @property
    def dtype(self) -> jnp.dtype:
        """That of the codes, by which a memory is made."""
        return self.codes.dtype


Stored = jax.Array | Quantised
"""Keys or values of a layer as they are stored."""


def zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Stored:
    """Return stored zeros: quantised if the dtype has 8 bits, else an array.

    >>> zeros((1, 2, 3, 4), "int8").scales.shape
    (1, 2, 3, 1)
    """
    numbers = jnp.zeros(shape, dtype)
    if numbers.dtype.itemsize > 1:
        return numbers
    return Quantised(codes=numbers, scales=jnp.zeros((*shape[:-1], 1), jnp.float32))


def parts(x: Any) -> tuple[Any, Any]:
    """Return codes and scales, for a kernel's references too; what is plain itself, and None."""
    return (x.codes, x.scales) if isinstance(x, Quantised) else (x, None)


def dtype_of(x: Stored) -> jnp.dtype:
    """Return the dtype of the numbers that are stored: of quantised ones float32."""
    return x.scales.dtype if isinstance(x, Quantised) else x.dtype


def encoded(numbers: jax.Array, like: Stored) -> Stored:
    """Return numbers `[..., D]` in the form of what is stored.

    Codes are rounded to the nearest, ties to even. Nothing is differentiated through them.

    Args:
      numbers: in the dtype of `dtype_of(like)`. If one of a head is not finite, all of that head
        are NaN from then on.
      like: says the form, and its shape does not matter.

    >>> like = zeros((1,), "int8")
    >>> encoded(jnp.array([[1.0, -2.0, 0.3], [0.0, 0.0, 0.0]]), like).codes.tolist()
    [[64, -127, 19], [0, 0, 0]]
    """
    if not isinstance(like, Quantised):
        return numbers
    numbers, dtype = jax.lax.stop_gradient(numbers), like.codes.dtype
    whole = jnp.issubdtype(dtype, jnp.integer)
    most = float(jnp.iinfo(dtype).max if whole else jnp.finfo(dtype).max)
    # A product with what a compiler would make of a division by a constant anyway, on some devices.
    scales = jnp.max(jnp.abs(numbers), axis=-1, keepdims=True) * np.float32(1 / most)
    # A compiler's maximum may forget a NaN, and its sum does not.
    scales += jnp.sum(numbers - numbers, axis=-1, keepdims=True)
    there = scales > 0  # neither zeros alone, nor NaN
    codes = jnp.where(there, numbers, 0) / jnp.where(there, scales, 1)
    # A scale that is rounded, as those of the smallest numbers are, may leave more than the most.
    codes = jnp.clip(jnp.round(codes) if whole else codes, -most, most)
    return Quantised(codes=codes.astype(dtype), scales=scales)


def decoded(x: Stored) -> jax.Array:
    """Return the numbers that are stored, in the dtype of `dtype_of`.

    >>> like = zeros((1,), "int8")
    >>> decoded(encoded(jnp.array([127.0, -3.4, jnp.nan]), like)).tolist()
    [nan, nan, nan]
    """
    return x.codes.astype(x.scales.dtype) * x.scales if isinstance(x, Quantised) else x
