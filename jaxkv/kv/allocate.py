"""Choice of cells for tokens whose keys are copied between streams or loaded from a snapshot."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.core.array_utils import DROP, FILL
from jaxkv.core.hashing import hash_overwritten_cells
from jaxkv.kv.cells import C, Cells, incomplete_layers
from jaxkv.kv.eviction import evict_cells
from jaxkv.kv.slots import choose_in_stream
from jaxkv.kv.tiles import order_open_tiles_first

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32


def choose_cells(cells: Cells, open_cells: Bool[Array, "S N"]) -> Int32[Array, "S N"]:
    """Return the slots of N tokens in each stream, from cells where `open_cells` is True.

    The slots of the first n tokens do not depend on the others. If a stream has n open cells, the
    other slots are past the last cell.
    """
    number = 1 + jnp.arange(cells.num_cells, dtype=jnp.int32)

    def choose_for_stream(open_cells: jax.Array, position: jax.Array) -> jax.Array:
        if cells.placement != "tiled":
            return choose_in_stream(cells, open_cells, position, number)
        order = order_open_tiles_first(open_cells)
        nth = choose_in_stream(cells, open_cells[order], position[order], number)
        return order.at[nth].get(**FILL, fill_value=cells.num_cells)

    return jax.vmap(choose_for_stream)(open_cells, cells.position)


def mark_used(
    cells: C, slots: Int32[Array, "S N"], new_cells: C, is_incomplete: Bool[Array, "S L"] | None
) -> C:
    """Store the cells of the table `new_cells` at `slots`; skip slots past the last cell.

    `is_incomplete[s, l]` is True if layer l lacks keys and values of new cells in stream s.
    """
    gets = jnp.any(slots < cells.num_cells, axis=1)[:, None]
    stream = jnp.arange(cells.streams, dtype=jnp.int32)[:, None]
    if cells.window is not None:
        nothing = jnp.zeros(cells.position.shape, bool)
        cells = evict_cells(cells, nothing.at[stream, slots].set(True, **DROP))

    def set_slots(field: jax.Array, value: jax.Array) -> jax.Array:
        return field.at[stream, slots].set(value, **DROP, unique_indices=True)

    # The hash of an overwritten cell must differ from the hash of this cell in older tables.
    old_hash = cells.stamp.at[stream, slots].get(**FILL, fill_value=0)
    words = range(cells.owners.shape[1])
    owners = [set_slots(cells.owners[:, w], new_cells.owners[:, w]) for w in words]
    return replace(
        cells,
        position=set_slots(cells.position, new_cells.position),
        owners=jnp.stack(owners, axis=1),
        shift=set_slots(cells.shift, new_cells.shift),
        stamp=set_slots(cells.stamp, hash_overwritten_cells(old_hash, new_cells.stamp)),
        content=set_slots(cells.content, new_cells.content),
        incomplete=jax.tree.map(
            lambda old, new: old | (gets & new), incomplete_layers(cells), is_incomplete
        ),
    )
