"""What the JSON of a snapshot describes. Type checkers import this module, and nothing else.

Letters are those of `jaxkv`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NotRequired, TypeAlias, TypedDict

Json: TypeAlias = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
"""What JSON holds."""


class CellDescription(TypedDict):
    """A part of keys and values.

    cells: N.
    sequences: Q.
    streams: S.
    static: by name, the static fields of its table.
    ropes: for each layer how its keys were rotated.
    latent: for each layer which numbers of a key are its value, None if none are.
    """

    kind: Literal["attention", "source"]
    cells: int
    sequences: int
    streams: int
    static: dict[str, Json]
    ropes: Json
    latent: list[list[int] | None]


class StateDescription(TypedDict):
    """A part of states.

    layers: L.
    sequences: Q.
    streams: S.
    max_rollback: E.
    static: by name, the static fields of its table.
    """

    kind: Literal["recurrent"]
    layers: int
    sequences: int
    streams: int
    max_rollback: int
    static: dict[str, Json]


PartDescription = CellDescription | StateDescription


class HybridDescription(TypedDict):
    """A hybrid cache.

    layers: for each part the layers of the model that it serves.
    parts: the parts.
    """

    kind: Literal["hybrid"]
    layers: Json
    parts: list[PartDescription]


class ArrayDescription(TypedDict):
    """An array of a file.

    dtype: its name.
    shape: its sizes.
    sha256: the checksum of its bytes.
    """

    dtype: str
    shape: list[int]
    sha256: str


class SnapshotContent(TypedDict):
    """What is saved, but for the arrays.

    cache: what is fixed when the cache is made.
    sequences: those that are saved.
    tokens: those of each of them; None if they were not given.
    model: what the model is called; None if that was not said.
    notes: what else goes along; files from before there were notes lack them.
    """

    cache: PartDescription | HybridDescription
    sequences: list[int]
    tokens: list[list[int] | None]
    model: Json
    notes: NotRequired[Json]


class SnapshotDescription(SnapshotContent):
    """What is saved.

    arrays: by name, the arrays of the file.
    """

    arrays: dict[str, ArrayDescription]
