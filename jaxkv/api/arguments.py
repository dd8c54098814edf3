"""Arguments of the functions of this folder: ids and positions as int32, caches with values."""

from typing import Any

import jax
import numpy as np

from jaxkv.core.donation import check_there
from jaxkv.core.validate import check_int32
from jaxkv.jit_helpers import check_single
from jaxkv.spec import check_once

Ids = jax.typing.ArrayLike


def position(value: Ids, name: str) -> Any:
    """Return one position, or how far one moves, as `[]` int32.

    Raises:
      TypeError: when it is no integer.
      ValueError: when it is out of int32's range, or not a single one.
    """
    return _single(check_int32(value, name), name)


def bounds(p0: Ids, p1: Ids | None) -> tuple[Any, Any]:
    """Return the bounds of a range of positions as int32, `[]` or `[n]`.

    -1 is the lowest position of `p0`, and the end of the sequence of `p1`, as None is.

    Raises:
      TypeError: when one is no integer.
      ValueError: when a known one is below -1, which would mean all where the last ones are meant.
    """
    advice = (
        ": positions are counted from the beginning, and the last n tokens of a sequence begin at "
        "seq_pos_max(cache, seq) + 1 - n"
    )
    p1 = -1 if p1 is None else p1
    p0, p1 = (
        check_int32(one, name, low=-1, advice=advice) for one, name in ((p0, "p0"), (p1, "p1"))
    )
    return p0, p1


def single_bounds(p0: Ids, p1: Ids | None) -> tuple[Any, Any]:
    """Return the bounds of one range as `[]` int32, see `bounds`."""
    p0, p1 = bounds(p0, p1)
    return _single(p0, "p0"), _single(p1, "p1")


def _single(checked: Any, name: str) -> Any:
    if np.ndim(checked):
        raise ValueError(f"wanted one integer for {name}, got the shape {np.shape(checked)}")
    return checked


def sequence(table: Any, value: Ids, *, lowest: int = 0) -> Any:
    """Return one sequence id as `[]` int32; see `TableSpec.sequence_ids`."""
    checked = table.spec.sequence_ids(value, lowest=lowest)
    if np.ndim(checked):
        raise ValueError(f"wanted one sequence id, got the shape {np.shape(checked)}")
    return checked


def pairs(table: Any, parents: Ids, sequences: Ids) -> tuple[Any, Any]:
    """Return parents and the sequences that go on from them as `[n]` int32.

    Raises:
      ValueError: when the shapes differ, or a sequence is known and comes twice or is none.
    """
    ids = table.spec.sequence_ids(parents), table.spec.sequence_ids(sequences)
    if np.ndim(ids[0]) != 1 or np.shape(ids[0]) != np.shape(ids[1]):
        raise ValueError(
            f"wanted parents and sequences of one shape [n], got {np.shape(ids[0])} and "
            f"{np.shape(ids[1])}"
        )
    check_once(ids[1])
    return ids


def check_known(table: Any, buffers: Any = ()) -> None:
    """Raise unless this is the table of one cache whose arrays have values; the same of buffers.

    Raises:
      TypeError: when there are shapes alone.
      ValueError: when an array was donated, or the table is that of a batch of caches, as `vmap`
        makes them.

    >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=4)
    >>> check_known(jax.tree.map(lambda x: x[None], cache.table))
    Traceback (most recent call last):
    ...
    ValueError: wanted one cache, got a batch of them: go over it with jax.vmap, or take each by \
itself, such as jax.tree.map(lambda x: x[0], cache)
    """
    if not all(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves((table, buffers))):
        raise TypeError("wanted a cache with values, got the shapes of one: make it first")
    check_there(table, buffers)
    check_single(table)
