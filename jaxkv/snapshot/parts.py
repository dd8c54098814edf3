"""`Part`, the interface that saves and restores one kind of cache, and helper functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.hashing import chain_hashes
from jaxkv.ops.storage.layer_stack import is_layer_view
from jaxkv.rope import NotGiven, Rope
from jaxkv.table import CacheTable
from jaxkv.window import Window

if TYPE_CHECKING:
    from jax.tree_util import KeyPath
    from jaxtyping import Int, Int32, PyTree, UInt32

    from jaxkv.kv.cells import Cells
    from jaxkv.recurrent.states import States
    from jaxkv.snapshot.description import Json

T = TypeVar("T", bound=CacheTable)
B = TypeVar("B")
D = TypeVar("D")

Entries = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
"""Dtype and shape of each saved buffer array of a part, by array name."""

Form = jax.ShapeDtypeStruct
"""Dtype and shape of a saved array."""

Read = Callable[[str], np.ndarray]
"""Function that reads a saved array by name."""

_VALUES = {"Window": Window, "Rope": Rope, "NotGiven": NotGiven}
"""Classes of static field values, by class name."""


@dataclass(frozen=True, kw_only=True)
class SlotAssignment:
    """Slots in a cache for saved cells or states.

    table: table in which the slots belong to the target sequences.
    streams, cells: stream index and cell index of each written cell.
    origin: for each written cell, the index of the saved cell or state in the snapshot.
    """

    table: CacheTable
    streams: Int32[np.ndarray, " m"]
    cells: Int32[np.ndarray, " m"]
    origin: Int[np.ndarray, " m"]


class SequenceMap(NamedTuple):
    """Mapping from saved sequences to target sequences, as two lists of equal length.

    saved_index: index of each sequence in the list of saved sequences.
    new: target id of each sequence, without repeats.
    """

    saved_index: list[int]
    new: list[int]


class Part(ABC, Generic[T, B, D]):
    """Interface to save and restore a kind of cache (table T, buffers B, description D)."""

    @staticmethod
    @abstractmethod
    def describe(table: T, buffers: B) -> D:
        """Return the description of a cache in a snapshot, as JSON values."""

    @staticmethod
    @abstractmethod
    def make_empty(description: D, entries: Entries) -> tuple[T, B]:
        """Return the table and the buffers of an empty cache with the saved sizes."""

    @staticmethod
    @abstractmethod
    def compatibility_fields(table: T, buffers: B) -> dict[str, object]:
        """Return, by name, the properties that must be equal in the saved and the target cache."""

    @staticmethod
    @abstractmethod
    def extract_sequences(
        table: T, buffers: B, sequences: list[int]
    ) -> tuple[dict[str, np.ndarray], PyTree]:
        """Return saved table arrays, by name, and a tree of saved buffer arrays, `[n, ...]`."""

    @staticmethod
    @abstractmethod
    def saved_shapes(
        table: T, buffers: B, count: int, saved: int
    ) -> tuple[dict[str, Form], PyTree]:
        """Return the shapes of saved arrays, for `count` cells or states of `saved` sequences."""

    @staticmethod
    @abstractmethod
    def check_saved_table(table: T, read: Read, sequences: list[int]) -> None:
        """Raise a ValueError if the saved arrays are not the arrays of a valid table."""

    @staticmethod
    @abstractmethod
    def restore_table(table: T, read: Read, sequences: list[int], seed: int) -> SlotAssignment:
        """Add the saved sequences to an empty table, each saved cell at its own index.

        The seed makes stamps unique to the file.
        """

    @staticmethod
    @abstractmethod
    def insert_into_table(
        table: T, saved: T, read: Read, sequences: list[int], moves: SequenceMap, seed: int
    ) -> SlotAssignment:
        """Replace target sequences of a table by saved sequences, see `jaxkv.insert`.

        Only the shapes of the arrays of `saved` are read.
        """

    @staticmethod
    @abstractmethod
    def write_buffers(buffers: B, prefix: str, placed: SlotAssignment, read: Read) -> B:
        """Write saved values into the assigned slots of donated buffers."""


def check_values(ok: np.ndarray, name: str, values: np.ndarray, rule: str) -> None:
    """Raise a ValueError with the first value that breaks a rule.

    >>> check_values(np.array([True, False]), "cell", np.array([1, 9]), "from 0 to 3")
    Traceback (most recent call last):
    ValueError: expected cell from 0 to 3, got 9; the snapshot was changed after it was saved, ...
    """
    if not np.all(ok):
        wrong = np.broadcast_to(values, ok.shape)[~ok][0]
        raise ValueError(
            f"expected {name} {rule}, got {wrong}; the snapshot was changed after it was saved, "
            f"save it again"
        )


def check_places(read: Read, streams: int, cells: int) -> None:
    """Raise a ValueError unless the saved cells are inside the table, unique and sorted."""
    stream, cell = (read(name).astype(np.int64) for name in ("stream", "cell"))
    check_values((stream >= 0) & (stream < streams), "stream", stream, f"from 0 to {streams - 1}")
    check_values((cell >= 0) & (cell < cells), "cell", cell, f"from 0 to {cells - 1}")
    place = stream * cells + cell
    check_values(place[1:] > place[:-1], "cell", cell[1:], "after the one before it")


def stamps_of_saved_cells(read: Read, seed: int) -> UInt32[np.ndarray, " n"]:
    """Return a stamp for each saved cell, from a seed that is unique to the file."""
    index = jnp.arange(len(read("stream")), dtype=jnp.int32)
    return np.asarray(chain_hashes(jnp.full(index.shape, seed, jnp.uint32), index))


def buffer_names(buffers: PyTree, prefix: str) -> PyTree:
    """Return a tree like the buffers, with the name of each array in place of the array."""

    def name_of_path(path: KeyPath, _: object) -> str:
        return prefix + jax.tree_util.keystr(path, simple=True, separator=".")

    return jax.tree_util.tree_map_with_path(name_of_path, buffers, is_leaf=is_layer_view)


def static_fields(table: Cells | States) -> dict[str, Json]:
    """Return static fields of a table, but not rules and placement, as JSON values."""
    return {
        field.name: to_json(getattr(table, field.name))
        for field in fields(table)
        if field.metadata.get("static")
        and field.name not in ("sharding_rules", "placement", "_class")
    }


def to_json(value: Any) -> Json:
    """Convert the value of a static field to a JSON value.

    >>> to_json((None, Window(4, "sliding")))
    [None, {'Window': {'width': 4, 'rule': 'sliding'}}]
    """
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    name = type(value).__name__
    if name in _VALUES:
        return {name: {field.name: to_json(getattr(value, field.name)) for field in fields(value)}}
    return value


def from_json(value: Any) -> Any:
    """Convert a JSON value from `to_json` back to the value of a static field."""
    if isinstance(value, list):
        return tuple(from_json(item) for item in value)
    if isinstance(value, dict):
        ((name, values),) = value.items()
        fields = {key: from_json(item) for key, item in values.items()}
        if name == "Rope":
            for number in (*fields["frequencies"], fields["attention_factor"]):
                if type(number) not in (int, float):
                    raise ValueError(
                        f"expected a rope of numbers, got {number!r}; save the snapshot again"
                    )
            if not isinstance(fields["interleaved"], int):  # also a bool
                raise ValueError(
                    f"expected interleaved as a bool, got {fields['interleaved']!r}; save the "
                    "snapshot again"
                )
        return _VALUES[name](**fields)
    return value
