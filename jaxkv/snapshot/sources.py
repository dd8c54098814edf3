"""Snapshots of caches for sources: cells like those of attention."""

from collections.abc import Mapping
from typing import Any

from jaxkv.kv.source import as_source_table
from jaxkv.snapshot.cells import CellPart
from jaxkv.snapshot.parts import Entries


class SourcePart(CellPart):
    """A cache for sources, of which a snapshot holds what it does of one of attention."""

    @staticmethod
    def describe(table: Any, buffers: Any) -> dict[str, Any]:
        """Return sizes, static fields and ropes; `of_sources` is said by the kind."""
        found = CellPart.describe(table, buffers)
        static = {name: x for name, x in found["static"].items() if name != "of_sources"}
        return found | {"kind": "source", "static": static}

    @staticmethod
    def make(description: Mapping[str, Any], entries: Entries) -> tuple[Any, Any]:
        """Make an empty one, with keys and values as large as those that are saved."""
        table, buffers = CellPart.make(description, entries)
        return as_source_table(table), buffers
