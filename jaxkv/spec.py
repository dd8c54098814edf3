"""Static configuration of a cache table, and checks of sequence ids and specs."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, SupportsIndex

import jax.numpy as jnp
import numpy as np

from jaxkv.core.array_utils import DROP, FILL, is_concrete
from jaxkv.core.validate import check_count, check_int32

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Bool, Int32, PyTree


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """Static configuration of a table. Hashable; caches with equal specs accept each other's plans.

    kind: "attention", "source" (encoder sources), "recurrent" or "hybrid".
    sequences, streams: Q and S; sequence q is in stream q // sequences_per_stream.
    single_sequence_rows: True if each row of a ubatch has tokens of only one sequence.
    ubatch_size: largest ubatch that the cache was sized for; None for any size.
    max_rollback: E, the number of earlier states of recurrent layers; None without such layers.
    details: further (name, value) pairs that a plan depends on.
    parts: specs of the tables of all parts of a hybrid cache.
    """

    kind: str
    sequences: int
    streams: int
    single_sequence_rows: bool
    ubatch_size: int | None
    max_rollback: int | None = None
    details: tuple[tuple[str, Hashable], ...] = ()
    parts: tuple[TableSpec, ...] = ()

    @property
    def sequences_per_stream(self) -> int:
        """Q // S."""
        return self.sequences // self.streams

    @property
    def has_shared_streams(self) -> bool:
        """Whether 1 < S < Q; if True, a copy to another stream needs free cells."""
        return 1 < self.streams < self.sequences

    @property
    def is_cross_attention(self) -> bool:
        """Whether the table is for encoder sources."""
        return self.kind == "source"

    @property
    def has_cross_attention(self) -> bool:
        """Whether the table, or a part of the table, is for encoder sources."""
        return self.is_cross_attention or any(part.has_cross_attention for part in self.parts)

    def sequence_ids(self, value: PyTree, *, lowest: int = 0) -> PyTree[Int32[ArrayLike, " ..."]]:
        """Return sequence ids as int32; raise ValueError for concrete ids outside `[lowest, Q)`."""
        return check_int32(
            value,
            "sequence ids",
            low=lowest,
            high=self.sequences - 1,
            advice="a cache is made for a fixed number of sequences",
        )

    def sequence_id(self, value: PyTree, *, lowest: int = 0) -> PyTree[Int32[ArrayLike, ""]]:
        """Return one sequence id as int32; raise for a list, or if `sequence_ids` would raise."""
        sequence = self.sequence_ids(value, lowest=lowest)
        if np.ndim(sequence):
            raise ValueError(
                f"expected one sequence id, got the shape {np.shape(sequence)}; pass a scalar"
            )
        return sequence


def are_in_same_streams(spec: TableSpec, ids: PyTree, others: PyTree) -> bool:
    """Return whether `ids[i]` and `others[i]` are known to be in the same stream for all i."""
    if spec.streams == 1:
        return True
    if not is_concrete(ids, others):
        return False
    streams, other_streams = (np.asarray(x) // spec.sequences_per_stream for x in (ids, others))
    return bool(np.all(streams == other_streams))


def check_distinct(ids: PyTree) -> None:
    """Raise ValueError if a concrete sequence id is repeated."""
    if is_concrete(ids) and np.unique(ids).size < np.size(ids):
        raise ValueError(
            f"expected each sequence at most once, got {np.asarray(ids).tolist()}; leave out the "
            "repeated id"
        )


def mask_unchanged_targets(
    spec: TableSpec, parents: Int32[Array, " n"], ids: Int32[Array, " n"]
) -> tuple[Int32[Array, " n"], Int32[Array, " n"]]:
    """Return parents and targets, with Q in place of each target that does not change.

    A target does not change if target and parent are equal, or if one of the two is not a sequence
    id. If a traced target is repeated, only the last entry that changes the target is used.
    """
    is_known = (parents >= 0) & (parents < spec.sequences)
    targets = _last_of_each(spec, ids, is_known & (parents != ids))
    return jnp.where(is_known, parents, 0), targets


def mask_unknown_targets(
    spec: TableSpec, source: TableSpec, parents: Int32[Array, " n"], ids: Int32[Array, " n"]
) -> tuple[Int32[Array, " n"], Int32[Array, " n"]]:
    """Return parents of a cache `source` and targets, with Q in place of skipped targets.

    A target is skipped if it or its parent is not a sequence id. If a traced target is repeated,
    only the last entry is used.
    """
    is_known = (parents >= 0) & (parents < source.sequences)
    return jnp.where(is_known, parents, 0), _last_of_each(spec, ids, is_known)


def _last_of_each(
    spec: TableSpec, ids: Int32[Array, " n"], is_used: Bool[Array, " n"]
) -> Int32[Array, " n"]:
    """Return ids with Q in place of unused, unknown and all but the last of equal ids."""
    count = spec.sequences
    targets = jnp.where(is_used & (ids >= 0) & (ids < count), ids, count)
    index = jnp.arange(ids.size, dtype=jnp.int32)
    last = jnp.full(count, -1, jnp.int32).at[targets].max(index, **DROP)
    is_last = last.at[targets].get(**FILL, fill_value=-1) == index
    return jnp.where(is_last, targets, count)


def check_sequences_and_streams(sequences: SupportsIndex, streams: SupportsIndex) -> dict[str, int]:
    """Check the numbers of sequences and streams, and return both by name."""
    sequences = check_count(sequences, "sequences")
    streams = check_count(streams, "streams")
    if sequences % streams:
        low = [n for n in range(1, math.isqrt(sequences) + 1) if sequences % n == 0]
        divisors = sorted({*low, *(sequences // n for n in low)})
        raise ValueError(
            f"expected streams that deal out {sequences} sequences evenly, one of {divisors}, got "
            f"{streams}; pass one of them"
        )
    return {"sequences": sequences, "streams": streams}


def check_spec(spec: TableSpec, expected_spec: TableSpec, name: str) -> None:
    """Raise a ValueError if the two specs differ; `name` describes the object that has `spec`."""
    if spec == expected_spec:
        return
    expected, actual = _flat_fields(expected_spec), _flat_fields(spec)
    keys = [key for key in expected | actual if expected.get(key) != actual.get(key)]
    if "kind" in keys:
        keys = ["kind"]
    expected, actual = (
        ", ".join(f"{key}={values[key]}" for key in keys if key in values)
        for values in (expected, actual)
    )
    raise ValueError(
        f"expected {name} for this cache, {expected}, got one for {actual}; plan again"
    )


def _flat_fields(spec: TableSpec, of: str = "") -> dict[str, object]:
    names = [field.name for field in fields(spec) if field.name not in ("details", "parts")]
    pairs = [*((name, getattr(spec, name)) for name in names), *spec.details]
    values = {of + name: value for name, value in pairs}
    for i, part in enumerate(spec.parts):
        values |= _flat_fields(part, f"{of}part {i} ")
    return values
