"""`Storage`, the interface of all forms in which keys and values are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.ops.storage.layer_stack import CellArray
from jaxkv.rope import Rope

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


class Storage(ABC):
    """Keys or values of a layer in one form, `[..., N, D]`.

    An array of floats is wrapped in `Plain` to call these methods. Another form is a pytree of
    arrays `[S, K, N, ...]`, which replaces the array in the buffers. Copies, moves and snapshots
    treat each array of the pytree alike, so they need no method. `forms.py` lists the forms.
    """

    is_encoded = True
    """Whether the stored numbers differ from the keys or values."""

    @classmethod
    @abstractmethod
    def zeros(cls, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Stored:
        """Return zeros in this form."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the keys or values."""

    @property
    @abstractmethod
    def dtype(self) -> jnp.dtype:
        """Dtype of the stored numbers."""

    @property
    @abstractmethod
    def decoded_dtype(self) -> jnp.dtype:
        """Dtype of the result of `decode`, and of the argument of `encode`."""

    @abstractmethod
    def encode(self, x: Float[Array, "... D"]) -> Stored:
        """Return an array in this form, with this dtype."""

    @abstractmethod
    def decode(self) -> Float[Array, "... D"]:
        """Return the keys or values as an array of floats."""

    def logits(
        self, q: Float[Array, "... X D"], dtype: jnp.dtype, *, keys_first: bool = False
    ) -> Float[Array, "... _ _"]:
        """Multiply queries with keys; return `[..., X, C]`, or `[..., C, X]` if `keys_first`."""
        form = "...xd,...cd->...cx" if keys_first else "...xd,...cd->...xc"
        return jnp.einsum(form, q, self.decode(), preferred_element_type=dtype)

    def weighted_values(self, weights: Float[Array, "... X C"]) -> Float[Array, "... X Dv"]:
        """Multiply weights with values `[..., C, Dv]`, in the dtype of the weights."""
        return jnp.einsum(
            "...xc,...cd->...xd", weights, self.decode(), preferred_element_type=weights.dtype
        )

    @abstractmethod
    def rotate(self, start: Int32[Array, " C"], stop: Int32[Array, " C"], rope: Rope) -> Stored:
        """Rotate keys `[C, K, D]` from positions `start` to `stop`.

        The rope has an attention factor of 1. See `jaxkv.ops.storage.rotation`.
        """

    @abstractmethod
    def split_rows(self, heads_per_row: int, head_dim: int) -> Stored:
        """Split rows `[..., K / n, W]` of n heads into heads `[..., K, D]`."""


Stored = CellArray | Storage
"""Stored keys or values of a layer: an array of floats, or a pytree of another form."""
