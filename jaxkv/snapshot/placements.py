"""Placements in snapshots: a name and a number of stripes; those of a user are known by name."""

from dataclasses import dataclass

from jaxkv.cache import Cache
from jaxkv.core.validate import check_count
from jaxkv.kv.cells import Cells
from jaxkv.kv.placement import FirstFit, Placement, Striped
from jaxkv.kv.tiles import Tiled


@dataclass(frozen=True)
class UnknownPlacement(Placement):
    """Placement of a user, of which a snapshot has only the name."""

    saved_name: str

    @property
    def name(self) -> str:
        """The name in the snapshot."""
        return self.saved_name


def find_saved_placement(name: str, shards: int) -> Placement:
    """Return the placement with the given static fields in a snapshot."""
    saved = {"placement": name, "shards": check_count(shards, "runs of cells")}
    known: list[Placement] = [FirstFit(), Tiled(), Striped(shards)]
    if isinstance(name, str) and ":" not in name:
        known.append(UnknownPlacement(name))
    for placement in known:
        if placement.snapshot_fields() == saved:
            return placement
    raise ValueError(
        f"expected a placement with {shards} runs of cells, got {name!r}; save the snapshot again"
    )


def check_placements(cache: Cache) -> None:
    """Raise a ValueError if a part of a saved cache has a placement of a user."""
    for table in (part.table for part in cache.parts):
        if isinstance(table, Cells) and isinstance(table.placement, UnknownPlacement):
            raise ValueError(
                f"expected a placement of jaxkv for a new cache, got {table.placement.name!r} of a "
                f"user; load into a cache made with this placement (into=)"
            )
