"""Rows of neighbouring heads: n heads of size D are stored as one row, padded with zeros.

The TPU compiler stores arrays in rows of 128 lanes. If the size of a row is not a multiple of 128,
the compiler copies a whole layer for each write. Letter in shapes: a row has W numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Float

A = TypeVar("A", jax.Array, np.ndarray)

LANES = 128
"""Number of elements of a row in the memory layout of the TPU compiler."""


def join_heads(x: A, heads_per_row: int, row_size: int) -> A:
    """Join heads `[..., K, D]` to rows `[..., K / heads_per_row, row_size]`.

    >>> join_heads(jnp.arange(8).reshape(4, 2), 2, row_size=5).tolist()
    [[0, 1, 2, 3, 0], [4, 5, 6, 7, 0]]
    """
    *rest, heads, size = x.shape
    x = x.reshape(*rest, heads // heads_per_row, heads_per_row * size)
    if x.shape[-1] == row_size:
        return x
    padding = [(0, 0)] * (x.ndim - 1) + [(0, row_size - x.shape[-1])]
    return np.pad(x, padding) if isinstance(x, np.ndarray) else jnp.pad(x, padding)


def split_rows(x: A, heads_per_row: int, head_dim: int) -> A:
    """Split rows into heads `[..., K, D]`; the inverse of `join_heads`."""
    x = x[..., : heads_per_row * head_dim]
    *rest, rows, size = x.shape
    return x.reshape(*rest, rows * heads_per_row, size // heads_per_row)


def split_rows_of_cells(
    x: Float[Array, "P _ N W"], heads_per_row: int, head_dim: int
) -> Float[Array, "P K N D"]:
    """Split each row of an array `[P, K / n, N, W]` into n heads."""
    if x.shape[-1] == head_dim:
        return x
    return split_rows(x.swapaxes(1, 2), heads_per_row, head_dim).swapaxes(1, 2)


def pad_queries(
    q: Float[Array, "P T H D"], rows: int, heads_per_row: int, row_size: int
) -> Float[Array, "P T H W"]:
    """Pad each query to the size of a row, with zeros for the other heads of the row."""
    if q.shape[3] == row_size:
        return q
    # `head` is the key head of each query head. A row has `heads_per_row` key heads, and the
    # products with the zeros do not change a logit.
    head = jnp.arange(q.shape[2])[:, None] // (q.shape[2] // (rows * heads_per_row))
    # A TPU concatenates slices of lanes faster than it reshapes a dimension into lanes.
    parts = [jnp.where(head % heads_per_row == i, q, 0) for i in range(heads_per_row)]
    padding = jnp.zeros((*q.shape[:3], row_size - heads_per_row * q.shape[3]), q.dtype)
    return jnp.concatenate([*parts, padding], axis=3)


def take_own_heads(
    out: Float[Array, "P _ X W"], heads_per_row: int, value_dim: int
) -> Float[Array, "P _ X Dv"]:
    """Return the part of each query's weighted sum of rows that belongs to the query's own head.

    The X queries of a row are in the order of the row's heads.
    """
    if out.shape[3] == value_dim:
        return out
    own = [
        queries[..., i * value_dim : (i + 1) * value_dim]
        for i, queries in enumerate(jnp.split(out, heads_per_row, axis=2))
    ]
    return jnp.concatenate(own, axis=2)
