"""Selected cells: each token becomes a list, and its selected cells become the stream of this list.

Implementations of attention then need no operation for selected cells. In shapes, Pt is P * T, the
number of tokens of all lists.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import DROP, FILL, out_of_range_slots
from jaxkv.kv.layer_kv import LayerKV
from jaxkv.ops.attention.active_tiles import split_visibility
from jaxkv.ops.attention.visibility import Visibility
from jaxkv.ops.storage.cell_arrays import gather_streams_of_cells
from jaxkv.ops.storage.layer_stack import CellArray, map_arrays

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32

MAX_BYTES = 1 << 28
"""Largest size in bytes of the selected keys and values that are copied at once: 256 MB."""


def max_tokens_at_once(layer_kv: LayerKV, select: Int32[Array, "P T n"]) -> int:
    """Return the number of tokens of each list whose selected cells need at most `MAX_BYTES`."""
    arrays = jax.tree.leaves((layer_kv.keys, layer_kv.values))
    cell_bytes = sum(x.shape[1] * x.shape[3] * x.dtype.itemsize for x in arrays if x.ndim == 4)
    return max(1, MAX_BYTES // (select.shape[0] * select.shape[2] * cell_bytes))


def hide_repeated(select: Int32[Array, "P T n"]) -> Int32[Array, "Pt n"]:
    """Sort the cells of each token, and move repeated cells past the last cell."""
    cells = jnp.sort(select.reshape(-1, select.shape[2]), axis=1)
    is_repeated = jnp.pad(cells[:, 1:] == cells[:, :-1], [(0, 0), (1, 0)])
    return jnp.where(is_repeated, out_of_range_slots(cells), cells)


def select_cells(
    layer_kv: LayerKV, visibility: Visibility, cells: Int32[Array, "Pt n"]
) -> tuple[LayerKV, Visibility]:
    """Return a layer and a `Visibility` in which each token has a stream of its selected cells.

    Cells that do not exist are hidden. The other cells of a token must be distinct.
    """
    visibility = split_visibility(visibility, visibility.at.shape[1])
    streams, bias = visibility.streams, visibility.bias
    word = jnp.arange(visibility.owners.shape[1], dtype=jnp.int32)[:, None]
    if isinstance(bias, jax.Array):
        bias = jnp.take_along_axis(bias, cells[:, None, None], axis=3, mode="clip")

    def gather_cells(x: CellArray) -> jax.Array:
        return gather_streams_of_cells(x, streams, cells)

    keys, values = map_arrays(gather_cells, (layer_kv.keys, layer_kv.values))
    # A cell that does not exist has no owner.
    return replace(layer_kv, keys=keys, values=values), replace(
        visibility,
        position=visibility.position.at[streams[:, None], cells].get(mode="clip"),
        owners=visibility.owners.at[streams[:, None, None], word, cells[:, None]].get(
            **FILL, fill_value=0
        ),
        streams=jnp.arange(len(cells), dtype=jnp.int32),
        all_streams=True,
        bias=bias,
    )


def scatter_mass(
    mass: Float[Array, "Pt H n"], cells: Int32[Array, "Pt n"], lists: int, num_cells: int
) -> Float[Array, "P H N"]:
    """Add the masses of the selected cells of each token to the masses of the cells of its list."""
    tokens, heads = len(cells) // lists, mass.shape[1]
    list_index = jnp.repeat(jnp.arange(lists), tokens, total_repeat_length=len(cells))
    where = list_index[:, None, None], jnp.arange(heads)[:, None], cells[:, None]
    return jnp.zeros((lists, heads, num_cells), mass.dtype).at[where].add(mass, **DROP)
