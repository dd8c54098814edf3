"""The form of stored keys and values: of an array, and for a dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.ops.storage.layer_stack import is_layer_view
from jaxkv.ops.storage.plain import Plain
from jaxkv.ops.storage.quantised import Quantised
from jaxkv.ops.storage.storage import Storage, Stored

if TYPE_CHECKING:
    from typing_extensions import TypeIs


def storage_of(x: Stored) -> Storage:
    """Return stored keys or values with the methods of `Storage`."""
    return x if isinstance(x, Storage) else Plain(x)


def form_of_dtype(dtype: jax.typing.DTypeLike) -> type[Storage]:
    """Return the form of keys and values for the option `dtype` of a cache.

    >>> form_of_dtype("int8").__name__, form_of_dtype("bfloat16").__name__
    ('Quantised', 'Plain')
    """
    return Quantised if jnp.dtype(dtype).itemsize == 1 else Plain


def is_array(x: Stored) -> TypeIs[jax.Array]:
    """Return whether keys or values are one array of floats, `[S, K, N, D]`."""
    return not (storage_of(x).is_encoded or is_layer_view(x))
