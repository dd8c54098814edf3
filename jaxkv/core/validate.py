"""Checks of arguments: integers within bounds, numbers, flags, and sizes that XLA supports."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.array_utils import is_concrete
from jaxkv.core.constants import END

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Bool, Int32, PyTree, Shaped


def check_count(value: PyTree, name: str, *, low: int = 1, high: int = END) -> int:
    """Return an integer argument in `[low, high]`; raise for other values."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"expected an integer for {name}, got {value!r}; pass an int") from None
    if number < low:
        raise ValueError(f"expected {name} of at least {low}, got {number}; pass {low} or more")
    if number > high:
        raise ValueError(f"expected {name} of at most {high}, got {number}; pass {high} or less")
    return number


def check_number(value: PyTree, name: str) -> float:
    """Convert an argument to a float; raise a TypeError if it is traced or not a number."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"expected a number for {name}, known while tracing, got {value!r}; pass a float"
        ) from None


def check_shape(shape: tuple[int, ...], name: str) -> None:
    """Raise a ValueError for a shape of 2**60 elements or more, since XLA would abort.

    >>> check_shape((2**31, 2**31), "keys")
    Traceback (most recent call last):
    ValueError: expected fewer than 2**60 numbers of keys, got the shape (2147483648, ...); ...
    """
    if math.prod(shape) >= 1 << 60:
        raise ValueError(
            f"expected fewer than 2**60 numbers of {name}, got the shape {shape}; make it smaller"
        )


def check_int32(
    value: PyTree,
    name: str,
    *,
    low: int = -END,
    high: int = END,
    advice: str = "pass one in this range",
) -> PyTree[Int32[ArrayLike, "*n"]]:
    """Return integers as int32: a JAX array if `value` is a JAX array or traced, else NumPy.

    If the dtype of traced integers has a larger range than int32, they are clipped to
    `[low - 1, high + 1]`, so that integers out of bounds remain out of bounds. If `high` is END,
    integers above END become END.
    """
    if type(value) is int and low <= value <= high:  # Fast path for the most common argument.
        return np.int32(value)
    is_known = is_concrete(value)
    try:
        array = np.asarray(value) if is_known else jnp.asarray(value)
    except ValueError:  # NumPy raises it for rows of different lengths.
        raise ValueError(
            f"expected {name} as an integer or as lists of one length, got {value!r:.60}; "
            f"concatenate or pad them"
        ) from None
    if array.size == 0:
        return np.zeros(array.shape, np.int32)
    large = False  # of more than 64 bits
    if isinstance(array, np.ndarray) and array.dtype == object:
        large = all(isinstance(element, int) for element in array.flat)
    if not large and not jnp.issubdtype(array.dtype, jnp.integer):
        remedy = "cast them"
        if array.dtype.kind == "U":
            remedy = "encode texts by a tokenizer" if "token" in name else f"pass {name} as int"
        raise TypeError(f"expected integers for {name}, got {array.dtype}; {remedy}")
    if not isinstance(array, np.ndarray):
        return _cast_to_int32(array, low, high)
    wrong = array[(array < low) | (array > high)]
    if wrong.size:
        raise ValueError(
            f"expected {name} from {low} to {high}, got {wrong.reshape(-1)[0]}; {advice}"
        )
    if not isinstance(value, jax.Array):
        return array.astype(np.int32)
    return value if value.dtype == jnp.int32 else value.astype(jnp.int32)


def check_position(value: PyTree, name: str) -> PyTree[Int32[ArrayLike, ""]]:
    """Return a position, or a difference of positions, as int32; raise for other values."""
    return _check_scalar(check_int32(value, name), name)


def check_bounds(
    p0: PyTree, p1: PyTree
) -> tuple[PyTree[Int32[ArrayLike, "*n"]], PyTree[Int32[ArrayLike, "*m"]]]:
    """Return the bounds of a range of positions as int32.

    A `p0` of -1 means position 0; a `p1` of -1 or None means the end of the sequence.
    """
    advice = "count from the beginning; the last n tokens begin at cache.seq_pos_max(seq) + 1 - n"
    p1 = -1 if p1 is None else p1
    p0, p1 = (
        check_int32(bound, name, low=-1, advice=advice) for bound, name in ((p0, "p0"), (p1, "p1"))
    )
    return p0, p1


def check_range(
    p0: PyTree, p1: PyTree
) -> tuple[PyTree[Int32[ArrayLike, ""]], PyTree[Int32[ArrayLike, ""]]]:
    """Return the bounds of a single range of positions, see `check_bounds`."""
    p0, p1 = check_bounds(p0, p1)
    return _check_scalar(p0, "p0"), _check_scalar(p1, "p1")


def check_equal_lengths(names: str, *values: PyTree[Int32[ArrayLike, " ..."]]) -> None:
    """Raise ValueError unless each value is a scalar or a list, and all lists have one length."""
    axes = [np.shape(value) for value in values]
    if len(set(axes) - {()}) > 1 or max(map(len, axes)) > 1:
        raise ValueError(
            f"expected {names} of one shape [n], or [], got {axes}; pass scalars, or "
            "lists of one length"
        )


def _check_scalar(value: PyTree[Int32[ArrayLike, "*n"]], name: str) -> PyTree[Int32[ArrayLike, ""]]:
    if np.ndim(value):
        raise ValueError(
            f"expected one integer for {name}, got the shape {np.shape(value)}; pass a scalar"
        )
    return value


def to_array(value: PyTree, name: str) -> Shaped[Array | np.ndarray, "*n"]:
    """Return a JAX array unchanged, and other values as a NumPy array."""
    try:
        return value if isinstance(value, jax.Array) else np.asarray(value)
    except ValueError:  # NumPy raises it for rows of different lengths.
        raise ValueError(
            f"expected {name} as lists of one length, got {value!r:.60}; concatenate or pad them"
        ) from None


def check_bool(
    value: PyTree, name: str, *, or_integers: bool = True
) -> PyTree[Bool[ArrayLike, "*n"]]:
    """Return flags as an array of bools; raise a TypeError for values that are not flags.

    JAX arrays stay on their device. If `or_integers` is True, untraced 0 and 1 count as flags.
    """
    array = to_array(value, name)
    binary = or_integers and is_concrete(array) and np.issubdtype(array.dtype, np.integer)
    if binary and not np.all((np.asarray(array) == 0) | (np.asarray(array) == 1)):
        binary = False
    if array.size and array.dtype != bool and not binary:
        advice = "cast them" if or_integers else "pass one for each, not indices"
        raise TypeError(f"expected bool for {name}, got {array.dtype}; {advice}")
    return array.astype(bool)


def check_static_bool(value: object, name: str) -> None:
    """Raise a TypeError unless an option is True or False while tracing."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"expected {name} as True or False, known while tracing, got {value!r}; pass a Python "
            "bool"
        )


def _cast_to_int32(value: jax.Array, low: int, high: int) -> jax.Array:
    span = jnp.iinfo(value.dtype)
    int32 = np.iinfo(np.int32)
    if span.max > int32.max:
        value = jnp.minimum(value, min(high + 1, int32.max))
    if span.min < int32.min:
        value = jnp.maximum(value, max(low - 1, int32.min))
    return value.astype(jnp.int32)
