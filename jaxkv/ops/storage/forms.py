"""Forms of stored keys and values: by array, by dtype, by the entries of a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.ops.storage.int4 import Int4
from jaxkv.ops.storage.layer_stack import is_layer_view
from jaxkv.ops.storage.plain import Plain
from jaxkv.ops.storage.quantised import Quantised
from jaxkv.ops.storage.storage import Storage, Stored

if TYPE_CHECKING:
    from typing_extensions import TypeIs


ENCODED_FORMS: tuple[type[Storage], ...] = (Quantised, Int4)
"""All forms but `Plain`. No two forms have fields of the same names."""

ENCODED_DTYPES = ("int8", "float8_e4m3fn", "int4")
"""Dtypes of encoded keys and values that messages and the command line name."""


def storage_of(x: Stored) -> Storage:
    """Return stored keys or values with the methods of `Storage`."""
    return x if isinstance(x, Storage) else Plain(x)


def form_of_dtype(dtype: jax.typing.DTypeLike) -> type[Storage]:
    """Return the form of keys and values for the option `dtype` of a cache.

    >>> [form_of_dtype(dtype).__name__ for dtype in ("int8", "int4", "bfloat16")]
    ['Quantised', 'Int4', 'Plain']
    >>> form_of_dtype("int32")
    Traceback (most recent call last):
    ValueError: expected a floating dtype with signs and NaN, int8 or int4 for keys and values, ...
    """
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        raise TypeError(
            f"expected a dtype for keys and values, got {dtype!r}; pass one, as jnp.bfloat16"
        ) from None
    if known == jnp.int4:
        return Int4
    if known != jnp.int8 and not _has_signs_and_nan(known):
        raise ValueError(
            f"expected a floating dtype with signs and NaN, int8 or int4 for keys and values, got "
            f"{known}; for few bits pass {', '.join(ENCODED_DTYPES[:-1])} or {ENCODED_DTYPES[-1]}"
        )
    return Quantised if known.itemsize == 1 else Plain


def _has_signs_and_nan(dtype: jnp.dtype) -> bool:
    """Return whether a dtype is floating and has all numbers that a stored key may be."""
    signs = np.array([0.0, -1.0, np.nan])
    return jnp.issubdtype(dtype, jnp.floating) and np.array_equal(
        signs.astype(dtype).astype(float), signs, equal_nan=True
    )


def storage_in_snapshot(
    name: str, entries: Mapping[str, tuple[np.dtype, tuple[int, ...]]]
) -> Storage:
    """Return keys or values with shapes in place of arrays, from entries of a snapshot.

    The entry `name` is an array of floats, and entries `name.field` are the fields of another form.
    Raises a ValueError if the entries are neither.

    >>> entries = {"k.0.codes": ("int8", (3, 1, 8)), "k.0.scales": ("float32", (3, 1, 1))}
    >>> found = storage_in_snapshot("k.0", entries)
    >>> found.dtype.name, found.shape
    ('int8', (3, 1, 8))
    """
    if name in entries:
        return Plain(_shape_of_entry(entries[name]))
    for form in ENCODED_FORMS:
        saved = {field: f"{name}.{field}" for field in _array_fields(form)}
        if entries.keys() >= {*saved.values()}:
            return form(**{field: _shape_of_entry(entries[key]) for field, key in saved.items()})
    raise ValueError(f"expected the arrays of {name}, got none or some; save the snapshot again")


def _array_fields(form: Any) -> list[str]:
    return [field.name for field in fields(form) if not field.metadata.get("static")]


def _shape_of_entry(entry: tuple[np.dtype, tuple[int, ...]]) -> jax.ShapeDtypeStruct:
    dtype, shape = entry
    return jax.ShapeDtypeStruct(shape, dtype)


def is_array(x: Stored) -> TypeIs[jax.Array]:
    """Return whether keys or values are one array of floats, `[S, K, N, D]`."""
    return not (storage_of(x).is_encoded or is_layer_view(x))
