"""Keys and values as arrays of floats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxkv.ops.storage.head_rows import split_rows
from jaxkv.ops.storage.rotation import pair_lengths, round_to_grid, rounding_unit
from jaxkv.ops.storage.storage import Storage
from jaxkv.rope import Rope

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


class Plain(Storage):
    """An array of floats, with the methods of `Storage`; the buffers contain the array alone."""

    is_encoded = False

    def __init__(self, array: Any) -> None:
        self.array = array

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
        """Return an array of zeros."""
        return jnp.zeros(shape, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.array.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the array."""
        return self.array.dtype

    @property
    def decoded_dtype(self) -> jnp.dtype:
        """Dtype of the array."""
        return self.dtype

    def encode(self, x: Float[Array, "... D"]) -> jax.Array:
        """Return `x` unchanged."""
        return x

    def decode(self) -> Float[Array, "... D"]:
        """Return the array."""
        return self.array

    def rotate(self, start: Int32[Array, " C"], stop: Int32[Array, " C"], rope: Rope) -> jax.Array:
        """Rotate keys; round keys of 16 bits to the grid of `jaxkv.ops.storage.rotation`."""
        if self.dtype.itemsize > 2:
            return rope.rotate(self.array, stop - start)
        first = rope.rotate(self.array.astype(jnp.float32), -start)
        unit = rounding_unit(pair_lengths(first, rope), self.dtype)
        return rope.rotate(round_to_grid(first, unit, rope), stop).astype(self.dtype)

    def split_rows(self, heads_per_row: int, head_dim: int) -> jax.Array:
        """Split rows `[..., K / n, W]` of n heads into heads `[..., K, D]`."""
        return split_rows(self.array, heads_per_row, head_dim)
