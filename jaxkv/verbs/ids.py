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
    """Return one sequence id as `[]` int32; see `Facts.sequence_ids`."""
    checked = table.facts.sequence_ids(value, lowest=lowest)
    if np.ndim(checked):
        raise ValueError(f"wanted one sequence id, got the shape {np.shape(checked)}")
    return checked
