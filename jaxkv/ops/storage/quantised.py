"""Keys and values in 8 bits: codes, with a scale for each group of at most 128 dimensions.

Additional letters in shapes: a head has G groups of dimensions, with one scale for each group. X
queries share a key. C is a number of cells.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.pytree import pytree_dataclass
from jaxkv.ops.storage.layer_stack import LayerView

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Num, PyTree

SCALE_GROUP = 128
"""Largest number of dimensions of a head that share a scale."""


@pytree_dataclass
class Quantised:
    """Keys or values of a layer in 8 bits, used in place of an array: codes times scales.

    If an element of a head is not finite, all codes of the head are 0 and all its scales are NaN.

    codes: `[S, K, N, D]` int8, or an 8-bit floating dtype.
    scales: Largest absolute value in each of the G groups of a head, divided by the largest code.
    """

    codes: Num[Array, "S K N D"]
    scales: Float[Array, "S K N G"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the keys or values."""
        return self.codes.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the codes."""
        return self.codes.dtype


Numbers = jax.Array | Quantised
"""Keys or values to read or write."""

Stored = Numbers | LayerView
"""Stored keys or values of a layer; a `LayerView` if one array contains all layers."""


def make_stored_zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Numbers:
    """Return zeros, which are `Quantised` if the dtype has 8 bits."""
    numbers = jnp.zeros(shape, dtype)
    if numbers.dtype.itemsize > 1:
        return numbers
    scales = jnp.zeros((*shape[:-1], len(scale_groups(shape[-1]))), jnp.float32)
    return Quantised(codes=numbers, scales=scales)


def scale_groups(size: int) -> list[slice]:
    """Return the slices that cut a head into groups of at most 128 dimensions, one for each scale.

    >>> scale_groups(64), scale_groups(160)
    ([slice(0, 64, None)], [slice(0, 128, None), slice(128, 160, None)])
    """
    return [slice(first, min(first + SCALE_GROUP, size)) for first in range(0, size, SCALE_GROUP)]


def has_one_scale(x: Stored) -> bool:
    """Return True if each head has one scale, or if the array is not quantised."""
    return not isinstance(x, Quantised) or x.scales.shape[-1] == 1


def expand_scales(scales: Float[Array, "... G"], size: int) -> Float[Array, "... _"]:
    """Expand scales to one for each element of a head; a single scale is returned unchanged."""
    if scales.shape[-1] == 1:
        return scales
    return jnp.repeat(scales, SCALE_GROUP, axis=-1)[..., :size]


def codes_and_scales(x: PyTree) -> tuple[PyTree, PyTree]:
    """Return the codes and scales of a `Quantised`; for another array, the array and None."""
    return (x.codes, x.scales) if isinstance(x, Quantised) else (x, None)


def dequantised_dtype(x: Stored) -> jnp.dtype:
    """Return the dtype of the decoded elements: float32 for a `Quantised`."""
    return x.scales.dtype if isinstance(x, Quantised) else x.dtype


def quantise_like(numbers: Float[Array, "... D"], like: Stored) -> Numbers:
    """Return numbers in the format of `like`: quantised if `like` is, otherwise unchanged.

    The argument `numbers` has the dtype `dequantised_dtype(like)`.
    """
    if not isinstance(like, Quantised):
        return numbers
    numbers, dtype = jax.lax.stop_gradient(numbers), like.codes.dtype
    # A product is used, since only some compilers replace a division by a constant by a product.
    size = numbers.shape[-1]
    highest = [
        jnp.max(jnp.abs(numbers[..., group]), -1, keepdims=True) for group in scale_groups(size)
    ]
    scales = jnp.concatenate(highest, axis=-1) * np.float32(1 / largest_code(dtype))
    # A compiled maximum may drop a NaN; a sum does not.
    scales += jnp.sum(numbers - numbers, axis=-1, keepdims=True)
    return Quantised(codes=compute_codes(numbers, scales, dtype), scales=scales)


def compute_codes(
    numbers: Float[Array, "... D"], scales: Float[Array, "... G"], dtype: jnp.dtype
) -> Num[Array, "... D"]:
    """Return the codes of numbers for given scales; 0 for a scale of 0 or NaN."""
    by = expand_scales(scales, numbers.shape[-1])
    is_positive = by > 0
    codes = jnp.where(is_positive, numbers, 0) / jnp.where(is_positive, by, 1)
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


def dequantise(x: Numbers) -> Float[Array, "... D"]:
    """Return the decoded numbers, in the dtype `dequantised_dtype(x)`."""
    if not isinstance(x, Quantised):
        return x
    return x.codes.astype(x.scales.dtype) * expand_scales(x.scales, x.shape[-1])


def qk_logits(
    q: Float[Array, "... X D"], k: Stored, dtype: jnp.dtype, *, keys_first: bool = False
) -> Float[Array, "... _ _"]:
    """Multiply queries with keys; return `[..., X, C]`, or `[..., C, X]` if `keys_first`."""
    codes, scales = codes_and_scales(k)
    form = "...xd,...cd->...cx" if keys_first else "...xd,...cd->...xc"
    product = partial(jnp.einsum, form, preferred_element_type=dtype)
    if scales is None:
        return product(q, codes)

    def of_group(i: int, group: slice) -> jax.Array:
        scale = scales[..., i : i + 1]  # `[..., C, 1]`: one scale for each cell
        return product(q[..., group], codes[..., group]) * (scale if keys_first else scale.mT)

    return reduce(jnp.add, [of_group(*group) for group in enumerate(scale_groups(k.shape[-1]))])


def weighted_values(weights: Float[Array, "... X C"], v: Stored) -> Float[Array, "... X Dv"]:
    """Multiply weights with values `[..., C, Dv]`, in the dtype of the weights."""
    codes, scales = codes_and_scales(v)
    product = partial(jnp.einsum, "...xc,...cd->...xd", preferred_element_type=weights.dtype)
    if scales is None:
        return product(weights, codes)
    outputs = [
        product(weights * scales[..., i : i + 1].mT, codes[..., group])
        for i, group in enumerate(scale_groups(v.shape[-1]))
    ]
    return jnp.concatenate(outputs, axis=-1)
