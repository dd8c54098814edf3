"""What a snapshot knows of a kind of cache: `Part`, and what has been found for it."""

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
"""By name, the dtype and the shape of what a snapshot holds for the buffers of a part."""

Form = jax.ShapeDtypeStruct
"""The dtype and the shape of an array."""

Read = Callable[[str], np.ndarray]
"""Reads an array of a part by its name."""

Fill = Callable[[Any, str], Any]
"""Fills an array of buffers with what was saved of it, by its name."""

_VALUES = {"Window": Window, "Rope": Rope, "NotGiven": NotGiven}
"""Values among static fields, by the name that they have in a file."""


@dataclass(frozen=True, kw_only=True)
class SlotAssignment:
    """Where what is saved goes.

    table: the table that has taken it in.
    streams: the stream of each cell that is written.
    cells: the cell.
    origin: what is written there, as numbered in the snapshot.
    """

    table: CacheTable
    streams: Int32[np.ndarray, " m"]
    cells: Int32[np.ndarray, " m"]
    origin: Int[np.ndarray, " m"]


class SequenceMap(NamedTuple):
    """Which saved sequences go where; three lists of one length.

    turn: the place of each one among those that were saved.
    old: its number when it was saved.
    new: its number from now on, each at most once.
    """

    turn: list[int]
    old: list[int]
    new: list[int]


class Part(ABC, Generic[T, B, D]):
    """A kind of cache that is no hybrid one, and how it is saved and restored.

    Its tables are T, its buffers B, and D is what describes them.
    """

    @staticmethod
    @abstractmethod
    def describe(table: T, buffers: B) -> D:
        """Return what is fixed when such a cache is made, as JSON holds it."""

    @staticmethod
    @abstractmethod
    def make_empty(description: D, entries: Entries) -> tuple[T, B]:
        """Return the table and the buffers of an empty cache."""

    @staticmethod
    @abstractmethod
    def compatibility_fields(table: T, buffers: B) -> dict[str, object]:
        """Return by name what must be the same in a cache for a snapshot to fit."""

    @staticmethod
    @abstractmethod
    def extract_sequences(
        table: T, buffers: B, sequences: list[int]
    ) -> tuple[dict[str, np.ndarray], PyTree]:
        """Return what the table holds for sequences, by name; and a tree of what buffers hold.

        The former has the shapes that the class says; the latter are `[n, ...]`, for n cells.
        """

    @staticmethod
    @abstractmethod
    def saved_shapes(
        table: T, buffers: B, count: int, saved: int
    ) -> tuple[dict[str, Form], PyTree]:
        """Return the forms of what `take` returns, of `count` cells and `saved` sequences.

        Of the table and the buffers only shapes are read.
        """

    @staticmethod
    @abstractmethod
    def check_saved_table(table: T, read: Read, sequences: list[int]) -> None:
        """Compare the saved arrays of a table with what a table may hold.

        Raises:
          ValueError: when a cache with this content would break an invariant.
        """

    @staticmethod
    @abstractmethod
    def assign_slots(
        table: T, saved: T, read: Read, moves: SequenceMap, seed: int, fresh: bool
    ) -> SlotAssignment:
        """Let sequences of a table go, and give them what was saved.

        Args:
          table: the table.
          saved: the table that was saved, its shapes alone.
          read: reads what was saved of it.
          moves: which sequences.
          seed: a number of the file, for stamps.
          fresh: whether cells are chosen; else they are those that were saved.

        Raises:
          PlanRefusedError: when cells are lacking.
        """

    @staticmethod
    def fill_buffers(buffers: B, prefix: str, fill: Fill) -> B:
        """Return the buffers with each array filled, which `fill` does by its name."""
        return jax.tree.map(fill, buffers, buffer_names(buffers, prefix))

    @staticmethod
    @abstractmethod
    def write_array(array: Any, placed: SlotAssignment, new: np.ndarray) -> Any:
        """Write what was saved of an array of the buffers, `[n, ...]`; the array is donated."""


def check_values(ok: np.ndarray, name: str, values: np.ndarray, rule: str) -> None:
    """Raise a ValueError with the first of some values that does not follow a rule.

    >>> check_values(np.array([True, False]), "cell", np.array([1, 9]), "from 0 to 3")
    Traceback (most recent call last):
    ...
    ValueError: expected cell from 0 to 3, got 9: the snapshot was changed after it was saved, ...
    """
    if not np.all(ok):
        found = np.broadcast_to(values, ok.shape)[~ok][0]
        raise ValueError(
            f"expected {name} {rule}, got {found}: the snapshot was changed after it was saved, "
            f"save it again"
        )


def check_places(read: Read, streams: int, cells: int) -> None:
    """Raise a ValueError unless the saved cells are cells of a table, each once and in order."""
    stream, cell = (read(name).astype(np.int64) for name in ("stream", "cell"))
    check_values((stream >= 0) & (stream < streams), "stream", stream, f"from 0 to {streams - 1}")
    check_values((cell >= 0) & (cell < cells), "cell", cell, f"from 0 to {cells - 1}")
    place = stream * cells + cell
    check_values(place[1:] > place[:-1], "cell", cell[1:], "after the one before it")


def buffer_names(buffers: PyTree, prefix: str) -> PyTree:
    """Return the name of each array of a part's buffers, as a tree of the same form."""

    def name_of_path(path: KeyPath, _: object) -> str:
        return prefix + jax.tree_util.keystr(path, simple=True, separator=".")

    return jax.tree_util.tree_map_with_path(name_of_path, buffers, is_leaf=is_layer_view)


def static_fields(table: Cells | States) -> dict[str, Json]:
    """Return the static fields of a table as JSON holds them, without the rules of a mesh."""
    return {
        field.name: to_json(getattr(table, field.name))
        for field in fields(table)
        if field.metadata.get("static") and field.name != "sharding_rules"
    }


def to_json(value: Any) -> Json:
    """Return a static value as JSON holds it.

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
    """Return the static value that JSON holds, which `to_json` made of it.

    >>> from_json([None, {"Window": {"width": 4, "rule": "sliding"}}])
    (None, Window.sliding(4))
    """
    if isinstance(value, list):
        return tuple(from_json(item) for item in value)
    if isinstance(value, dict):
        ((name, found),) = value.items()
        return _VALUES[name](**{key: from_json(item) for key, item in found.items()})
    return value
