"""Values that are slices of the keys, as in multi-head latent attention (MLA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@jax.tree_util.register_static
@dataclass(frozen=True)
class ValueSlice:
    """Slice of the keys that serves as the values, in place of an array of values.

    last: One past the last dimension of the slice.
    """

    first: int
    last: int

    def __repr__(self) -> str:
        return f"slice({self.first}, {self.last})"

    @property
    def size(self) -> int:
        """Size of a value, Dv."""
        return self.last - self.first

    def slice_values(self, x: Float[Array, "... D"]) -> Float[Array, "... Dv"]:
        """Return the value slice of keys, or of weighted sums of keys."""
        return x[..., self.first : self.last]

    def nan_unless_finite(self, keys: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
        """In each key with a non-finite element, set the value slice to 0, and the rest to NaN.

        >>> ValueSlice(1, 3).nan_unless_finite(
        ...     jnp.array([[1.0, 2.0, 3.0], [4.0, jnp.inf, 5.0]])
        ... ).tolist()
        [[1.0, 2.0, 3.0], [nan, 0.0, 0.0]]
        """
        number = jnp.arange(keys.shape[-1])
        broken = jnp.where((number >= self.first) & (number < self.last), 0, jnp.nan)
        finite = jnp.isfinite(jnp.sum(keys - keys, axis=-1, keepdims=True))
        return jnp.where(finite, keys, broken.astype(keys.dtype))
