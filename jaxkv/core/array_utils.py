"""Array helpers: indices, sizes, and checks for traced or concrete values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jaxkv.core.constants import END, MAX_CELLS

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Int32, PyTree, Shaped, UInt8

DROP: dict[str, Any] = {"mode": "drop", "wrap_negative_indices": False}
"""Options of `x.at[index].set` and others, which skip indices out of range."""

FILL: dict[str, Any] = {"mode": "fill", "wrap_negative_indices": False}
"""Options of `x.at[index].get`, which returns `fill_value` for indices out of range."""


MAX_COMPARISONS = 1 << 16
"""Largest number of comparisons that are made in place of a search in a loop, or of a sort."""


def out_of_range_slots(slots: Shaped[Array, "*n"]) -> Int32[Array, "*n"]:
    """Return an array of distinct slots past the last cell, with the shape of `slots`."""
    # Writes promise unique indices to XLA, also for skipped slots, so these are distinct too.
    return MAX_CELLS + jnp.arange(slots.size, dtype=jnp.int32).reshape(slots.shape)


def dtype_names(tree: PyTree) -> list[str]:
    """Return the dtype name of each array of a tree; a node with an attribute `dtype` is one."""
    arrays = jax.tree.leaves(tree, is_leaf=lambda x: hasattr(x, "dtype"))
    return [np.dtype(x.dtype).name for x in arrays]


def nbytes(tree: PyTree) -> int:
    """Return the number of bytes of a tree of arrays or of shapes."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)


def bytes_of_rows(array: Shaped[np.ndarray, "n ..."]) -> UInt8[np.ndarray, "n bytes"]:
    """Return the bytes of each entry along the first axis.

    >>> bytes_of_rows(np.array([[1, 256]], np.int16)).tolist(), bytes_of_rows(np.zeros(0)).shape
    ([[1, 0, 0, 1]], (0, 8))
    """
    rows = array.reshape(len(array), math.prod(array.shape[1:]))
    return np.ascontiguousarray(rows).view(np.uint8)


def resolve_range_end(stop: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    """Replace a negative end of a range of positions by END."""
    return jnp.where(stop < 0, END, stop)


def indices_of_true(which: Bool[Array, " n"], count: int) -> Int32[Array, " count"]:
    """Return the indices of the first `count` True values, padded with n if fewer are True.

    >>> indices_of_true(jnp.array([False, True, True, False]), 3)
    Array([1, 2, 4], dtype=int32)
    """
    return jnp.nonzero(which, size=count, fill_value=which.size)[0].astype(jnp.int32)


def search_sorted(ascending: Int32[Array, " n"], values: Int32[Array, " m"]) -> Int32[Array, " m"]:
    """Return how many elements of an ascending array are less than each value.

    >>> search_sorted(jnp.array([1, 3, 3, 5]), jnp.array([3, 4, 6])).tolist()
    [1, 3, 4]
    """
    # A loop takes more time than few comparisons, on GPUs above all.
    method = "compare_all" if ascending.size * values.size <= MAX_COMPARISONS else "scan"
    return jnp.searchsorted(ascending, values, method=method).astype(jnp.int32)


def divmod_nonnegative(
    numbers: Int[Array, "*n"], size: int
) -> tuple[Int[Array, "*n"], Int[Array, "*n"]]:
    """Return quotients and remainders of non-negative integers, in fewer instructions than `//`."""
    by = jnp.asarray(size, numbers.dtype)
    return jax.lax.div(numbers, by), jax.lax.rem(numbers, by)


def is_traced(*trees: PyTree) -> bool:
    """Return whether any value of the trees is a tracer."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def is_concrete(*trees: PyTree) -> bool:
    """Return whether no leaf is a tracer, and this process can read the values of all leaves."""
    return all(map(_is_known, jax.tree.leaves(trees)))


def to_host(tree: PyTree) -> PyTree:
    """Return a tree of NumPy arrays; arrays that are split over processes are gathered."""
    # All processes must call this function.
    arrays = jax.tree.map(lambda x: x if _is_known(x) else process_allgather(x, tiled=True), tree)
    return jax.device_get(arrays)


def _is_known(x: object) -> bool:
    if isinstance(x, jax.core.Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


@jax.jit
def take_rows(
    parts: Sequence[Shaped[Array, "*_"]], index: Int[Array | np.ndarray, " n"]
) -> Shaped[Array, "*_"]:
    """Concatenate arrays and return the rows with given indices, in one compiled program."""
    return jnp.concatenate(parts)[index]


@partial(jax.jit, static_argnames="axis")
def stack_unfused(arrays: Sequence[Shaped[Array, "*n"]], axis: int) -> Shaped[Array, " ..."]:
    """Stack arrays; on a CPU, XLA does not compute the arrays again in loops that read the result.

    Other backends may compute the arrays again.
    """
    # XLA fuses no concatenation into the loops that read it. The barrier keeps XLA from replacing a
    # slice of the concatenation by the sliced array.
    return jax.lax.platform_dependent(
        jnp.stack(arrays, axis), cpu=jax.lax.optimization_barrier, default=lambda x: x
    )


def next_power_of_two(count: int) -> int:
    """Round an integer up to a power of two (at least 1), so that fewer shapes are compiled."""
    return 1 << max(count - 1, 0).bit_length()
