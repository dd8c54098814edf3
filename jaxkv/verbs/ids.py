"""Integers that callers pass to verbs: checked, then made int32, so that all share one program."""

from typing import Any

import jax
import numpy as np

from jaxkv.places import integers

Ids = jax.typing.ArrayLike


def position(value: Ids, name: str) -> Any:
    """Return one position, or a bound of a range, as `[]` int32.

    Raises:
      TypeError: when it is no integer.
      ValueError: when it is out of int32's range, or not a single one.
    """
    checked = integers(value, name)
    if np.ndim(checked):
        raise ValueError(f"wanted one integer for {name}, got the shape {np.shape(checked)}")
    return checked


def sequence(table: Any, value: Ids, *, lowest: int = 0) -> Any:
    """Return one sequence id as `[]` int32; see `sequences`."""
    checked = sequences(table, value, lowest=lowest)
    if np.ndim(checked):
        raise ValueError(f"wanted one sequence id, got the shape {np.shape(checked)}")
    return checked


def sequences(table: Any, value: Ids, *, lowest: int = 0) -> Any:
    """Return sequence ids as int32, in their shape `[]` or `[n]`.

    Raises:
      TypeError: when they are no integers.
      ValueError: when a known one is no id of the memory. A traced one that is none stays none.
    """
    return integers(
        value,
        "sequence ids",
        low=lowest,
        high=table.facts.sequences - 1,
        advice="; a memory is made for a fixed number of sequences",
    )
