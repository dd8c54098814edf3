"""Values that are numbers of the keys, as in latent attention (MLA), with no bytes of their own.

In latent attention one compressed vector stands for the keys and values of all heads, beside the
numbers of a key that are rotated. So a value is a part of its key, and a cache holds only keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.ops.quantised import Stored

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@jax.tree_util.register_static
@dataclass(frozen=True)
class ValueSlice:
    """Which numbers of a key are its value; stands where else an array of values would stand.

    first: the first of these numbers.
    last: one past the last. They are not all of the key.
    """

    first: int
    last: int

    def slice_values(self, x: Float[Array, "... D"]) -> Float[Array, "... Dv"]:
        """Return the values of keys, or the weighted values of weighted keys.

        In the same dtype.
        """
        return x[..., self.first : self.last]

    def nan_unless_finite(self, keys: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
        """Return keys whose values are finite.

        A key that is not finite becomes zeros where its value is, and NaN elsewhere.

        >>> ValueSlice(1, 3).nan_unless_finite(
        ...     jnp.array([[1.0, 2.0, 3.0], [4.0, jnp.inf, 5.0]])
        ... ).tolist()
        [[1.0, 2.0, 3.0], [nan, 0.0, 0.0]]
        """
        number = jnp.arange(keys.shape[-1])
        broken = jnp.where((number >= self.first) & (number < self.last), 0, jnp.nan)
        finite = jnp.isfinite(jnp.sum(keys - keys, axis=-1, keepdims=True))
        return jnp.where(finite, keys, broken.astype(keys.dtype))


Values = Stored | ValueSlice
"""Values of a layer as they are stored."""


def value_dim(v: Values) -> int:
    """Return how many numbers a value has."""
    return v.last - v.first if isinstance(v, ValueSlice) else v.shape[-1]
