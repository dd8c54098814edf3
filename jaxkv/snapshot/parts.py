"""`Part`, the interface to save and restore a kind of cache, and its helpers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from jaxkv.ops.layer_stack import is_layer_view
from jaxkv.rope import NotGiven, Rope
from jaxkv.table import CacheTable
from jaxkv.window import Window

if TYPE_CHECKING:
    from jax.tree_util import KeyPath
    from jaxtyping import Int, Int32, PyTree

    from jaxkv.kv.cells import Cells
    from jaxkv.recurrent.states import States
    from jaxkv.snapshot.description import Json

T = TypeVar("T", bound=CacheTable)
B = TypeVar("B")
D = TypeVar("D")

Entries = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
"""Dtype and shape of the saved buffer arrays of a part, by name."""

Form = jax.ShapeDtypeStruct
"""Dtype and shape of an array."""

Read = Callable[[str], np.ndarray]
"""Read an array of a part by name."""

Fill = Callable[[Any, str], Any]
"""Fill a buffer array with the saved values of that name."""

_VALUES = {"Window": Window, "Rope": Rope, "NotGiven": NotGiven}
"""Classes of static field values, by name in a file."""


@dataclass(frozen=True, kw_only=True)
class SlotAssignment:
    """Slots of saved cells or states in a cache.

    table: the table after restoring.
    streams: stream of each written cell.
    cells: slot of each written cell.
    origin: index in the snapshot of its content.
    """

    table: CacheTable
    streams: Int32[np.ndarray, " m"]
    cells: Int32[np.ndarray, " m"]
    origin: Int[np.ndarray, " m"]


class SequenceMap(NamedTuple):
    """Mapping from saved sequences to targets; three lists of equal length.

    turn: index of the sequence among the saved ones.
    old: saved id.
    new: target id, without repeats.
    """

    turn: list[int]
    old: list[int]
    new: list[int]


class Part(ABC, Generic[T, B, D]):
    """Save and restore one kind of cache, with tables T, buffers B and description D."""

    @staticmethod
    @abstractmethod
    def describe(table: T, buffers: B) -> D:
        """Return the static description of a cache, as JSON values."""

    @staticmethod
    @abstractmethod
    def make_empty(description: D, entries: Entries) -> tuple[T, B]:
        """Return the table and the buffers of an empty cache."""

    @staticmethod
    @abstractmethod
    def compatibility_fields(table: T, buffers: B) -> dict[str, object]:
        """Return the fields that must be equal to load a snapshot, by name."""

    @staticmethod
    @abstractmethod
    def extract_sequences(
        table: T, buffers: B, sequences: list[int]
    ) -> tuple[dict[str, np.ndarray], PyTree]:
        """Return table arrays of sequences, by name, and a tree of buffer values `[n, ...]`."""

    @staticmethod
    @abstractmethod
    def saved_shapes(
        table: T, buffers: B, count: int, saved: int
    ) -> tuple[dict[str, Form], PyTree]:
        """Return the shapes of `extract_sequences` for `count` cells and `saved` sequences."""

    @staticmethod
    @abstractmethod
    def check_saved_table(table: T, read: Read, sequences: list[int]) -> None:
        """Raise a ValueError if a cache with these saved arrays would break an invariant."""

    @staticmethod
    @abstractmethod
    def assign_slots(
        table: T, saved: T, read: Read, moves: SequenceMap, seed: int, fresh: bool
    ) -> SlotAssignment:
        """Remove the target sequences from a table and add the saved ones.

        Only shapes of `saved` are read; `seed` makes cell hashes unique to the file. Unless
        `fresh`, the saved cells are used. Raises a PlanRefusedError if a stream has too few free
        cells.
        """

    @staticmethod
    def fill_buffers(buffers: B, prefix: str, fill: Fill) -> B:
        """Return the buffers with each array filled by `fill`."""
        return jax.tree.map(fill, buffers, buffer_names(buffers, prefix))

    @staticmethod
    @abstractmethod
    def write_array(array: Any, placed: SlotAssignment, new: np.ndarray) -> Any:
        """Write the saved values, `[n, ...]`, into a buffer array, which is donated."""


def check_values(ok: np.ndarray, name: str, values: np.ndarray, rule: str) -> None:
    """Raise a ValueError with the first of `values` that breaks a rule.

    >>> check_values(np.array([True, False]), "cell", np.array([1, 9]), "from 0 to 3")
    Traceback (most recent call last):
    ...
    ValueError: expected cell from 0 to 3, got 9; the snapshot was changed after it was saved, ...
    """
    if not np.all(ok):
        found = np.broadcast_to(values, ok.shape)[~ok][0]
        raise ValueError(
            f"expected {name} {rule}, got {found}; the snapshot was changed after it was saved, "
            f"save it again"
        )


def check_places(read: Read, streams: int, cells: int) -> None:
    """Raise a ValueError unless the saved cells are in a table, unique and in order."""
    stream, cell = (read(name).astype(np.int64) for name in ("stream", "cell"))
    check_values((stream >= 0) & (stream < streams), "stream", stream, f"from 0 to {streams - 1}")
    check_values((cell >= 0) & (cell < cells), "cell", cell, f"from 0 to {cells - 1}")
    place = stream * cells + cell
    check_values(place[1:] > place[:-1], "cell", cell[1:], "after the one before it")


def buffer_names(buffers: PyTree, prefix: str) -> PyTree:
    """Return the name of each buffer array of a part, as a tree like `buffers`."""

    def name_of_path(path: KeyPath, _: object) -> str:
        return prefix + jax.tree_util.keystr(path, simple=True, separator=".")

    return jax.tree_util.tree_map_with_path(name_of_path, buffers, is_leaf=is_layer_view)


def static_fields(table: Cells | States) -> dict[str, Json]:
    """Return the static fields of a table as JSON values, without its sharding rules."""
    return {
        field.name: to_json(getattr(table, field.name))
        for field in fields(table)
        if field.metadata.get("static") and field.name != "sharding_rules"
    }


def to_json(value: Any) -> Json:
    """Convert a static value to JSON.

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
    """Convert a JSON value made by `to_json` back to a static value.

    >>> from_json([None, {"Window": {"width": 4, "rule": "sliding"}}])
    (None, Window.sliding(4))
    """
    if isinstance(value, list):
        return tuple(from_json(item) for item in value)
    if isinstance(value, dict):
        ((name, found),) = value.items()
        return _VALUES[name](**{key: from_json(item) for key, item in found.items()})
    return value
