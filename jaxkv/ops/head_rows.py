"""Rows of neighbouring heads: n heads of size D are stored as one row of n * D numbers.

The TPU compiler stores arrays in rows of 128 lanes, and copies a whole layer to write smaller rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

A = TypeVar("A", jax.Array, np.ndarray)

LANES = 128
"""Number of elements of a row in the memory layout of the TPU compiler."""


def join_heads(x: A, heads_per_row: int) -> A:
    """Join heads `[..., K, D]` to rows `[..., K / heads_per_row, heads_per_row * D]`.

    >>> join_heads(jnp.arange(8).reshape(4, 2), 2).tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    *rest, heads, size = x.shape
    return x.reshape(*rest, heads // heads_per_row, heads_per_row * size)


def split_rows(x: A, heads_per_row: int) -> A:
    """Split rows into heads `[..., K, D]`; the inverse of `join_heads`."""
    *rest, rows, size = x.shape
    return x.reshape(*rest, rows * heads_per_row, size // heads_per_row)


def split_rows_of_cells(x: Float[Array, "P _ N _"], heads_per_row: int) -> Float[Array, "P K N D"]:
    """Split each row of an array `[P, K / n, N, n * D]` into n heads."""
    return split_rows(x.swapaxes(1, 2), heads_per_row).swapaxes(1, 2) if heads_per_row > 1 else x


def pad_queries(
    q: Float[Array, "P T H D"], rows: int, heads_per_row: int
) -> Float[Array, "P T H _"]:
    """Pad each query to the size of a row: the dimensions of the row's other heads are zeros."""
    if heads_per_row == 1:
        return q
    # A TPU concatenates slices of lanes faster than it reshapes a dimension into lanes.
    is_own = _is_own_head(q.shape[2], rows, heads_per_row)
    return jnp.concatenate([jnp.where(own, q, 0) for own in is_own], axis=3)


def take_own_heads(
    out: Float[Array, "P T H _"], rows: int, heads_per_row: int
) -> Float[Array, "P T H Dv"]:
    """Cut the value of each query's own head out of a weighted sum of rows."""
    if heads_per_row == 1:
        return out
    is_own = _is_own_head(out.shape[2], rows, heads_per_row)
    found, *others = jnp.split(out, heads_per_row, axis=3)
    for own, head in zip(is_own[1:], others, strict=True):
        found = jnp.where(own, head, found)
    return found


def _is_own_head(heads: int, rows: int, heads_per_row: int) -> list[Bool[Array, "1 1 H 1"]]:
    """Return, for each head of a row, a mask of the query heads that attend to this head."""
    own = jnp.arange(heads)[None, None, :, None] // (heads // (rows * heads_per_row))
    return [own % heads_per_row == i for i in range(heads_per_row)]
