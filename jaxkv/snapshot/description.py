"""Types of the JSON of a snapshot. Only type checkers import this module.

Letters are those of `jaxkv`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NotRequired, TypeAlias, TypedDict

Json: TypeAlias = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
"""A JSON value."""


class CellDescription(TypedDict):
    """A part with N cells of keys and values, Q sequences and S streams.

    static: static fields of its table, by name.
    ropes: rope of each layer.
    latent: for each layer, bounds of the slice of the key that is the value; None if stored.
    """

    kind: Literal["attention", "source"]
    cells: int
    sequences: int
    streams: int
    static: dict[str, Json]
    ropes: Json
    latent: list[list[int] | None]


class StateDescription(TypedDict):
    """A part with recurrent states of L layers, Q sequences and S streams.

    `static` are the static fields of its table, by name.
    """

    kind: Literal["recurrent"]
    layers: int
    sequences: int
    streams: int
    max_rollback: int
    static: dict[str, Json]


PartDescription = CellDescription | StateDescription


class HybridDescription(TypedDict):
    """A hybrid cache; `layers` are the layers of each part in the model."""

    kind: Literal["hybrid"]
    layers: Json
    parts: list[PartDescription]


class ArrayDescription(TypedDict):
    """Dtype, shape and checksum of an array of a file."""

    dtype: str
    shape: list[int]
    sha256: str


class SnapshotContent(TypedDict):
    """Contents of a snapshot without its arrays.

    cache: static description of the cache.
    sequences: ids of the saved sequences.
    tokens: tokens of each saved sequence; None if not given.
    model: identifies the model; None if not given.
    notes: the caller's notes; absent in older files.
    """

    cache: PartDescription | HybridDescription
    sequences: list[int]
    tokens: list[list[int] | None]
    model: Json
    notes: NotRequired[Json]


class SnapshotDescription(SnapshotContent):
    """Contents of a snapshot, with its arrays by name."""

    arrays: dict[str, ArrayDescription]
