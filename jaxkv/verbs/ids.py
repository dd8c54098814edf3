"""Integers that callers pass: made int32, and checked where they can be looked at."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import is_concrete
from jaxkv.memory import table_sequences

Ids = jax.typing.ArrayLike


def whole(value: Ids) -> Any:
    """Make an int32 of a position, so that all callers share one compiled function."""
    return value.astype(jnp.int32) if isinstance(value, jax.Array) else np.asarray(value, np.int32)


def checked_ids(table: Any, seq: Ids, *, lowest: int = 0) -> Any:
    """Make int32 of sequence ids; refuse those that are known and wrong."""
    seq = whole(seq)
    count = table_sequences(table)
    if is_concrete(seq):
        wrong = [int(one) for one in np.asarray(seq).reshape(-1) if not lowest <= one < count]
        if wrong:
            raise ValueError(
                f"wanted sequence ids from {lowest} to {count - 1}, got {wrong[0]}; a memory is "
                f"made for a fixed number of sequences"
            )
    return seq
