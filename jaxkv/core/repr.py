"""One-line `repr` of values, which never raises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.array_utils import is_concrete, is_traced

X = TypeVar("X")

FEW = 8
"""Maximum number of elements of an array whose values are printed."""


def with_fallback_repr(line: Callable[[X], str]) -> Callable[..., str]:
    """Return a `repr` that lists the types of the leaves if the wrapped `repr` raises."""

    @wraps(line)
    def safe_repr(self: X) -> str:
        try:
            return line(self)
        except Exception:
            leaves = jax.tree.leaves(self)
            types = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
            return f"{type(self).__name__}(leaves of {types})"

    return safe_repr


@with_fallback_repr
def fields_repr(value: Any) -> str:
    """Return the fields of a dataclass, with values of small arrays, and shapes of large arrays."""
    pairs = ((field.name, getattr(value, field.name)) for field in fields(value) if field.repr)
    shown = [f"{name}={format_value(x)}" for name, x in pairs if x is not None]
    return f"{type(value).__name__}({', '.join(shown)})"


def format_value(value: Any) -> str:
    """Return a short text: the elements, or dtype and shape of an array; a type for long texts."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        array = to_numpy_or_none(value)
        if array is not None and array.size <= FEW:
            return str(array.tolist())
        return f"{value.dtype}[{','.join(map(str, value.shape))}]" + " traced" * is_traced(value)
    if isinstance(value, tuple | list) and len(value) > 2:
        briefs = list(map(format_value, value))
        return f"{len(value)} x {briefs[0]}" if len(set(briefs)) == 1 else f"{len(value)} values"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(format_value, value))})"
    text = repr(value)
    return text if len(text) <= 40 else type(value).__name__


def to_numpy_or_none(x: object) -> np.ndarray | None:
    """Return `x` as a NumPy array; None if this process cannot read the values."""
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(x)
    if not isinstance(x, jax.Array) or not is_concrete(x) or x.is_deleted():
        return None
    return None if jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.asarray(x)


def format_bytes(count: int) -> str:
    """Format a number of bytes with a unit from bytes to TiB."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{count} bytes" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
