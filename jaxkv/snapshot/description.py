"""Types of the JSON description in a snapshot, imported only by type checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NotRequired, TypeAlias, TypedDict

Json: TypeAlias = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
"""A JSON value."""


class CellDescription(TypedDict):
    """Description of a part with N cells of keys and values, Q sequences and S streams.

    latent: for each layer, the bounds of the slice of a key that is used as value; None if the
      layer stores values.
    fields: name, shape and dtype of each user field; absent without user fields.
    rotated: True if heads are rotated by a Hadamard matrix; otherwise, the key is absent.
    """

    kind: Literal["attention", "source"]
    cells: int
    sequences: int
    streams: int
    static: dict[str, Json]
    ropes: Json
    latent: list[list[int] | None]
    fields: NotRequired[list[tuple[str, list[int], str]]]
    rotated: NotRequired[bool]


class StateDescription(TypedDict):
    """Description of a recurrent part; the field `static` has static fields of the table."""

    kind: Literal["recurrent"]
    layers: int
    sequences: int
    streams: int
    max_rollback: int
    static: dict[str, Json]


PartDescription = CellDescription | StateDescription


class HybridDescription(TypedDict):
    """Description of a hybrid cache; `layers` has the model layers of each part."""

    kind: Literal["hybrid"]
    layers: Json
    parts: list[PartDescription]


class ArrayDescription(TypedDict):
    """Dtype, shape and checksum of one saved array."""

    dtype: str
    shape: list[int]
    sha256: str


class SnapshotContent(TypedDict):
    """Description of a snapshot except for its arrays.

    tokens: token ids of each saved sequence; None if no tokens were passed for the sequence.
    notes: `notes` passed to `save`; the key is absent in older files.
    """

    cache: PartDescription | HybridDescription
    sequences: list[int]
    tokens: list[list[int] | None]
    model: Json
    notes: NotRequired[Json]


class SnapshotDescription(SnapshotContent):
    """Description of a snapshot with its arrays, by array name."""

    arrays: dict[str, ArrayDescription]
