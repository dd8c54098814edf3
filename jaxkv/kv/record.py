"""`CellRecord`: the fields that a table stores for each cell, as one tree.

Code that stores, copies, moves or saves cells maps over this tree, so that a new field is declared
here and needs no line elsewhere. N is the last axis of each field.
"""

from __future__ import annotations

from dataclasses import field, fields, replace
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.array_utils import DROP, FILL
from jaxkv.core.constants import EMPTY
from jaxkv.core.pytree import field_values, pytree_dataclass

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Int32, Shaped, UInt32

R = TypeVar("R", bound="CellRecord")
T = TypeVar("T")

FieldSpecs = tuple[tuple[str, tuple[int, ...], np.dtype], ...]
"""Name, shape for one cell, and dtype of each user field, ordered by name."""


@pytree_dataclass
class CellRecord:
    """Fields of each cell.

    position: Position of the token in each cell; EMPTY (-1) for an empty cell.
    owners: Bit mask of the sequences that own each cell, in words of 32 sequences.
    shift: Position of each cell minus the position for which its key is rotated; 0 if empty.
    stamp: Number of each cell's keys and values; every overwrite of the cell changes this number.
      A cell that a ubatch fills gets a hash of its index and of the stream's version.
    content: Hash of each cell's token and of the position for which the key was computed. Copies
      and moves of a cell preserve this hash.
    user_fields: User fields by name, see `Cache.with_fields`; 0 for a new token.
    """

    position: Int32[Array, "S N"] = field(metadata={"initial": np.int32(EMPTY)})
    owners: UInt32[Array, "S W N"] = field(metadata={"initial": np.uint32(0)})
    shift: Int32[Array, "S N"] = field(metadata={"initial": np.int32(0)})
    stamp: UInt32[Array, "S N"] = field(metadata={"initial": np.uint32(0)})
    content: UInt32[Array, "S N"] = field(metadata={"initial": np.uint32(0)})
    user_fields: dict[str, Shaped[Array, "S ... N"]] = field(default_factory=dict)

    @property
    def record(self) -> CellRecord:
        """The fields of `CellRecord`, without the fields of a subclass."""
        own = {name: getattr(self, name) for name in INITIAL}
        return CellRecord(**own, user_fields=self.user_fields)

    @property
    def field_specs(self) -> FieldSpecs:
        """Name, shape for one cell, and dtype of each user field."""
        batch = self.position.ndim - 2  # axes that `jax.vmap` added
        arrays = self.user_fields.items()
        return tuple((name, x.shape[1 + batch : -1], np.dtype(x.dtype)) for name, x in arrays)


INITIAL = {x.name: x.metadata["initial"] for x in fields(CellRecord) if "initial" in x.metadata}
"""Value of each field in a new table, by field name, without user fields."""


def zero_fields(specs: FieldSpecs, streams: int, num_cells: int) -> dict[str, jax.Array]:
    """Return user fields of zeros, by name."""
    return {name: jnp.zeros((streams, *shape, num_cells), dtype) for name, shape, dtype in specs}


def with_fields_of(source: R, target: CellRecord) -> R:
    """Return `source` with the user fields of `target`: 0 for a field that `source` lacks.

    Raises a ValueError if a field of both has different shapes or dtypes.
    """
    forms = {name: form for name, *form in target.field_specs}
    for name, *form in source.field_specs:
        if form != forms.get(name, form):
            raise ValueError(
                f"expected a source whose field {name!r} has shape and dtype {forms[name]} as in "
                f"the cache, got {form}; make both caches with equal fields"
            )
    missing = zero_fields(target.field_specs, *source.position.shape)
    return replace(source, user_fields={x: source.user_fields.get(x, missing[x]) for x in forms})


def with_record(cells: R, record: CellRecord) -> R:
    """Replace the fields of `CellRecord`."""
    return replace(cells, **field_values(record))


def gather_cells(record: T, cell: Int[Array, "S n"]) -> T:
    """Return all fields of the given cells of each stream; 0 for cells past the last one."""

    def gather_row(row: jax.Array, cell: jax.Array) -> jax.Array:
        return row.at[..., cell].get(**FILL, fill_value=0)

    return jax.tree.map(lambda x: jax.vmap(gather_row)(x, cell), record)


def scatter_cells(record: T, cell: Int[Array, "S n"], new: T) -> T:
    """Write the fields of `new` into distinct cells of each stream; skip cells past the last."""

    def scatter_row(row: jax.Array, new: jax.Array, cell: jax.Array) -> jax.Array:
        return row.at[..., cell].set(new, **DROP, unique_indices=True)

    return jax.tree.map(lambda old, new: jax.vmap(scatter_row)(old, new, cell), record, new)


def scatter_tokens(record: T, stream: Int[Array, "*#n"], cell: Int[Array, "*#n"], new: T) -> T:
    """Write the fields of tokens into distinct cells; skip cells past the last one.

    Axes of a field between streams and cells come last in `new`. Numbers apply to all tokens.
    """
    index = jnp.stack(jnp.broadcast_arrays(stream, cell), axis=-1)  # one for all fields

    def scatter(field: jax.Array, value: jax.Array) -> jax.Array:
        value = jnp.broadcast_to(value, (*cell.shape, *field.shape[1:-1]))
        axes = 0, field.ndim - 1
        dimensions = jax.lax.ScatterDimensionNumbers(
            update_window_dims=tuple(range(cell.ndim, value.ndim)),
            inserted_window_dims=axes,
            scatter_dims_to_operand_dims=axes,
        )
        return jax.lax.scatter(field, index, value, dimensions, unique_indices=True, mode="drop")

    return jax.tree.map(scatter, record, new)
