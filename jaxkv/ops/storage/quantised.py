"""Keys and values in 8 bits: codes, with a scale for each group of at most 128 dimensions.

Additional letters in shapes: a head has G groups of dimensions, with one scale for each group. X
queries share a key. C is a number of cells.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.pytree import pytree_dataclass
from jaxkv.ops.storage.head_rows import split_rows
from jaxkv.ops.storage.rotation import map_pairs, pair_lengths, round_to_grid, rounding_unit
from jaxkv.ops.storage.storage import Storage
from jaxkv.rope import Rope

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, Num, PyTree

SCALE_GROUP = 128
"""Largest number of dimensions of a head that share a scale."""


@pytree_dataclass
class Quantised(Storage):
    """Keys or values of a layer in 8 bits, used in place of an array: codes times scales.

    If an element of a head is not finite, all codes of the head are 0 and all its scales are NaN.

    codes: `[S, K, N, D]` int8, or an 8-bit floating dtype.
    scales: Largest absolute value in each of the G groups of a head, divided by the largest code.
    """

    codes: Num[Array, "S K N D"]
    scales: Float[Array, "S K N G"]

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Quantised:
        """Return zeros with codes of the given dtype."""
        scales = jnp.zeros((*shape[:-1], len(scale_groups(shape[-1]))), jnp.float32)
        return cls(codes=jnp.zeros(shape, dtype), scales=scales)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the keys or values."""
        return self.codes.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the codes."""
        return self.codes.dtype

    @property
    def decoded_dtype(self) -> jnp.dtype:
        """Dtype of the scales: float32."""
        return self.scales.dtype

    def encode(self, x: Float[Array, "... D"]) -> Quantised:
        """Quantise an array of the dtype `decoded_dtype`."""
        x = jax.lax.stop_gradient(x)
        highest = _largest_in_groups(jnp.abs(x))
        # A product is used, since only some compilers replace a division by a constant by it.
        scales = highest * np.float32(1 / largest_code(self.dtype))
        # A compiled maximum may drop a NaN; a sum does not.
        scales += jnp.sum(x - x, axis=-1, keepdims=True)
        return Quantised(codes=compute_codes(x, scales, self.dtype), scales=scales)

    def decode(self) -> Float[Array, "... D"]:
        """Return codes times scales, in float32."""
        scales = expand_scales(self.scales, self.shape[-1])
        return self.codes.astype(self.decoded_dtype) * scales

    def logits(
        self, q: Float[Array, "... X D"], dtype: jnp.dtype, *, keys_first: bool = False
    ) -> Float[Array, "... _ _"]:
        """Multiply queries with keys; return `[..., X, C]`, or `[..., C, X]` if `keys_first`."""
        form = "...xd,...cd->...cx" if keys_first else "...xd,...cd->...xc"
        product = partial(jnp.einsum, form, preferred_element_type=dtype)

        def group_logits(i: int, group: slice) -> jax.Array:
            scale = self.scales[..., i : i + 1]  # `[..., C, 1]`: one scale for each cell
            scale = scale if keys_first else scale.mT
            return product(q[..., group], self.codes[..., group]) * scale

        groups = enumerate(scale_groups(self.shape[-1]))
        return reduce(jnp.add, [group_logits(*group) for group in groups])

    def weighted_values(self, weights: Float[Array, "... X C"]) -> Float[Array, "... X Dv"]:
        """Multiply weights with values `[..., C, Dv]`, in the dtype of the weights."""
        product = partial(jnp.einsum, "...xc,...cd->...xd", preferred_element_type=weights.dtype)
        outputs = [
            product(weights * self.scales[..., i : i + 1].mT, self.codes[..., group])
            for i, group in enumerate(scale_groups(self.shape[-1]))
        ]
        return jnp.concatenate(outputs, axis=-1)

    def rotate(self, start: Int32[Array, " C"], stop: Int32[Array, " C"], rope: Rope) -> Quantised:
        """Rotate keys, rounded to the grid of `jaxkv.ops.storage.rotation`."""
        # The scales of a head are kept if the points of the grid fit, because a grid of other
        # scales would round the same key differently. The grid adds at most a unit of the largest
        # scale of the head to a length. New scales have room for it, and fit in later rotations.
        max_code = largest_code(self.dtype)
        unit = rounding_unit(jnp.float32(max_code), self.dtype)
        first = rope.rotate(self.decode(), -start)
        lengths = pair_lengths(first, rope)
        points = self._round_to_grid(first, lengths, self.scales, rope)
        limit = self.scales * (max_code * np.float32(1 + 1e-5))
        fits = jnp.all(_largest_in_groups(pair_lengths(points, rope)) <= limit, -1, keepdims=True)
        longest = _largest_in_groups(lengths)
        largest_scale = jnp.max(longest, -1, keepdims=True) / (max_code - unit)
        scales = jnp.where(fits, self.scales, (longest + unit * largest_scale) / max_code)
        moved = rope.rotate(self._round_to_grid(first, lengths, scales, rope), stop)
        return Quantised(codes=compute_codes(moved, scales, self.dtype), scales=scales)

    def _round_to_grid(
        self, first: jax.Array, lengths: jax.Array, scales: jax.Array, rope: Rope
    ) -> jax.Array:
        """Round keys at position 0, with pairs of the given lengths, to the grid of some scales."""
        scale = jnp.where(scales > 0, scales, 1)
        if scales.shape[-1] > 1:
            # The elements of a pair may be in groups with different scales. The larger scale has
            # the larger error.
            scale = map_pairs(jnp.maximum, expand_scales(scale, first.shape[-1]), rope)
        # `lengths / scale` is the length in codes, whose unit is multiplied by the scale.
        return round_to_grid(first, scale * rounding_unit(lengths / scale, self.dtype), rope)

    def split_rows(self, heads_per_row: int, head_dim: int) -> Quantised:
        """Split rows into heads, without the scales of padding."""
        num_scales = len(scale_groups(head_dim))
        return replace(
            self,
            codes=split_rows(self.codes, heads_per_row, head_dim),
            scales=split_rows(self.scales, heads_per_row, num_scales),
        )


def scale_groups(size: int) -> list[slice]:
    """Return the slices that cut a head into groups of at most 128 dimensions, one for each scale.

    >>> scale_groups(64), scale_groups(160)
    ([slice(0, 64, None)], [slice(0, 128, None), slice(128, 160, None)])
    """
    return [slice(first, min(first + SCALE_GROUP, size)) for first in range(0, size, SCALE_GROUP)]


def _largest_in_groups(x: jax.Array) -> jax.Array:
    """Return the largest element of each group of dimensions."""
    groups = scale_groups(x.shape[-1])
    return jnp.concatenate([jnp.max(x[..., group], -1, keepdims=True) for group in groups], -1)


def expand_scales(scales: Float[Array, "... G"], size: int) -> Float[Array, "... _"]:
    """Expand scales to one for each element of a head; a single scale is returned unchanged."""
    if scales.shape[-1] == 1:
        return scales
    return jnp.repeat(scales, SCALE_GROUP, axis=-1)[..., :size]


def compute_codes(
    x: Float[Array, "... D"], scales: Float[Array, "... G"], dtype: jnp.dtype
) -> Num[Array, "... D"]:
    """Return the codes of an array for given scales; 0 for a scale of 0 or NaN."""
    by = expand_scales(scales, x.shape[-1])
    is_positive = by > 0
    codes = jnp.where(is_positive, x, 0) / jnp.where(is_positive, by, 1)
    max_code = largest_code(dtype)
    # A scale of very small numbers is rounded, so a code may exceed the largest code.
    codes = jnp.clip(jnp.round(codes) if is_integer_dtype(dtype) else codes, -max_code, max_code)
    return codes.astype(dtype)


def largest_code(dtype: jnp.dtype) -> float:
    """Return the largest code of a dtype."""
    return float((jnp.iinfo if is_integer_dtype(dtype) else jnp.finfo)(dtype).max)


def is_integer_dtype(dtype: jnp.dtype) -> bool:
    """Return whether codes of a dtype are integers."""
    return jnp.issubdtype(dtype, jnp.integer)


def codes_and_scales(x: PyTree) -> tuple[PyTree, PyTree]:
    """Return the codes and scales of a `Quantised`; for another array, the array and None."""
    return (x.codes, x.scales) if isinstance(x, Quantised) else (x, None)


def has_one_scale(x: PyTree) -> bool:
    """Return True for an array of floats, or if each head has one scale; False for other forms."""
    return x.scales.shape[-1] == 1 if isinstance(x, Quantised) else not isinstance(x, Storage)
