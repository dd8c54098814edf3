"""Keys and values in 4 bits: two codes in a byte, and a scale for each group of 32 dimensions.

Additional letters in shapes: a head has B bytes of codes, and G groups of dimensions, with one
scale for each group. X queries share a key. C is a number of cells.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.pytree import pytree_dataclass
from jaxkv.ops.storage.head_rows import split_rows
from jaxkv.ops.storage.storage import Storage
from jaxkv.rope import Rope

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int8, Int16, Int32

SCALE_GROUP = 32
"""Number of dimensions of a head that share a scale."""

LARGEST_SCALE = np.float32(2**124)
"""Largest magnitude of a scale. The product with a code is at most 2**127, which is finite."""


@pytree_dataclass
class Int4(Storage):
    """Keys or values of a layer in 4 bits, used in place of an array: codes times scales.

    Codes are from -8 to 7. The number of largest magnitude in a group has the code -8, so a scale
    may be negative. If an element of a head is not finite, all codes of the head are 0 and all its
    scales are NaN. Byte b contains the codes of dimensions 2b (lower bits) and 2b + 1.

    scales: Number of largest magnitude in each group, divided by -8, as the bits of a bfloat16.
      Before jax 0.12, a write of some bfloat16 numbers would read all scales on a CPU.

    llama.cpp: `q4_0`.
    """

    packed: Int8[Array, "S K N B"]
    scales: Int16[Array, "S K N G"]

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Int4:
        """Return zeros, of an even size."""
        *rest, size = shape
        return cls(
            packed=jnp.zeros((*rest, size // 2), jnp.int8),
            scales=jnp.zeros((*rest, _num_scales(size)), jnp.int16),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the keys or values."""
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the codes: int4."""
        return jnp.dtype(jnp.int4)

    @property
    def decoded_dtype(self) -> jnp.dtype:
        """Dtype in which numbers are encoded and decoded: float32."""
        return jnp.dtype(jnp.float32)

    def encode(self, x: Float32[Array, "... D"]) -> Int4:
        """Quantise an array."""
        x = jax.lax.stop_gradient(x)
        size, count = x.shape[-1], _num_scales(x.shape[-1])
        padding = [(0, 0)] * (x.ndim - 1) + [(0, count * SCALE_GROUP - size)]
        groups = jnp.pad(x, padding).reshape(*x.shape[:-1], count, SCALE_GROUP)
        highest, lowest = jnp.max(groups, axis=-1), jnp.min(groups, axis=-1)
        scales = jnp.where(highest > -lowest, highest, lowest) * np.float32(-1 / 8)
        scales = jnp.clip(scales, -LARGEST_SCALE, LARGEST_SCALE)
        # A compiled maximum may drop a NaN; a sum does not.
        scales = (scales + jnp.sum(x - x, axis=-1, keepdims=True)).astype(jnp.bfloat16)
        divisors = jnp.repeat(scales.astype(jnp.float32), SCALE_GROUP, axis=-1)[..., :size]
        is_usable = jnp.abs(divisors) > 0  # False for NaN
        codes = jnp.where(is_usable, x, 0) / jnp.where(is_usable, divisors, 1)
        codes = jnp.clip(jnp.round(codes), -8, 7).astype(jnp.int8)
        return Int4(
            packed=codes[..., ::2] & 15 | codes[..., 1::2] << 4,
            scales=jax.lax.bitcast_convert_type(scales, jnp.int16),
        )

    def decode(self) -> Float32[Array, "... D"]:
        """Return codes times scales, in float32."""
        return _interleave(*self._halves())

    def logits(
        self, q: Float[Array, "... X D"], dtype: jnp.dtype, *, keys_first: bool = False
    ) -> Float[Array, "... _ _"]:
        """Multiply queries with keys; return `[..., X, C]`, or `[..., C, X]` if `keys_first`."""
        # Two products save the interleaving of keys, which would triple the time on a CPU.
        form = "...xd,...cd->...cx" if keys_first else "...xd,...cd->...xc"
        product = partial(jnp.einsum, form, preferred_element_type=dtype)
        even, odd = self._halves()
        return product(q[..., ::2], even) + product(q[..., 1::2], odd)

    def weighted_values(self, weights: Float[Array, "... X C"]) -> Float[Array, "... X Dv"]:
        """Multiply weights with values `[..., C, Dv]`, in the dtype of the weights."""
        product = partial(jnp.einsum, "...xc,...cd->...xd", preferred_element_type=weights.dtype)
        return _interleave(*(product(weights, half) for half in self._halves()))

    def rotate(self, start: Int32[Array, " C"], stop: Int32[Array, " C"], rope: Rope) -> Int4:
        """Rotate keys; each call adds a rounding error, since keys are not rounded to a grid."""
        return self.encode(rope.rotate(self.decode(), stop - start))

    def split_rows(self, heads_per_row: int, head_dim: int) -> Int4:
        """Split rows into heads, without the codes and scales of padding."""
        return replace(
            self,
            packed=split_rows(self.packed, heads_per_row, head_dim // 2),
            scales=split_rows(self.scales, heads_per_row, _num_scales(head_dim)),
        )

    def _halves(self) -> tuple[Float32[Array, "... B"], Float32[Array, "... B"]]:
        """Return the numbers of even and of odd dimensions."""
        scales = jax.lax.bitcast_convert_type(self.scales, jnp.bfloat16).astype(jnp.float32)
        scales = jnp.repeat(scales, SCALE_GROUP // 2, axis=-1)
        scales = scales[..., : self.packed.shape[-1]]
        # Shifts to the right keep the sign.
        return (self.packed << 4 >> 4) * scales, (self.packed >> 4) * scales


def _num_scales(size: int) -> int:
    return -(-size // SCALE_GROUP)


def _interleave(even: Float[Array, "*n B"], odd: Float[Array, "*n B"]) -> Float[Array, "*n D"]:
    return jnp.stack([even, odd], axis=-1).reshape(*even.shape[:-1], -1)
