"""What is fixed when a cache is made, and checks of what is given to it."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, SupportsIndex

import jax.numpy as jnp
import numpy as np

from jaxkv.core.array_utils import is_concrete
from jaxkv.core.validate import check_count, check_int32

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Int32, PyTree


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """What is fixed when a cache is made. Hashable; two caches of equal specs share all plans.

    kind: the kind of table: "attention", "source", "recurrent" or "hybrid".
    sequences: Q.
    streams: S. Sequence q lives in stream q // sharing.
    single_sequence_rows: whether a row of a ubatch holds tokens of one sequence only.
    ubatch_size: the most tokens of a ubatch that the cache was sized for; None for any.
    max_rollback: E, where states are kept: how many of its last tokens a sequence can take back.
      None where it can take back any, as in attention.
    details: all else that a plan depends on, pairs of a name and a value.
    parts: of a hybrid cache, the specs of its parts.
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
        """Q // S, the number of sequences that share a stream."""
        return self.sequences // self.streams

    @property
    def has_shared_streams(self) -> bool:
        """Whether there are several streams and several sequences in each: 1 < S < Q.

        There alone a copy between streams needs cells that may be lacking.
        """
        return 1 < self.streams < self.sequences

    @property
    def is_cross_attention(self) -> bool:
        """Whether it holds sources, which a text looks at, and not the text."""
        return self.kind == "source"

    @property
    def has_cross_attention(self) -> bool:
        """Whether it holds sources, or a part of it does."""
        return self.is_cross_attention or any(part.has_cross_attention for part in self.parts)

    def sequence_ids(self, value: PyTree, *, lowest: int = 0) -> PyTree[Int32[ArrayLike, " ..."]]:
        """Return sequence ids that a caller passed as int32, checked before they are cast.

        Raises:
          TypeError: when they are no integers.
          ValueError: when a known one is no id of the cache. A traced one that is none stays none.
        """
        return check_int32(
            value,
            "sequence ids",
            low=lowest,
            high=self.sequences - 1,
            advice="; a cache is made for a fixed number of sequences",
        )

    def sequence_id(self, value: PyTree, *, lowest: int = 0) -> PyTree[Int32[ArrayLike, ""]]:
        """Return one sequence id as int32; see `sequence_ids`."""
        sequence = self.sequence_ids(value, lowest=lowest)
        if np.ndim(sequence):
            raise ValueError(f"expected one sequence id, got the shape {np.shape(sequence)}")
        return sequence


def are_in_same_streams(spec: TableSpec, ids: PyTree, others: PyTree) -> bool:
    """Return whether sequences are known to lie in the streams of others, so that all is shared."""
    if spec.streams == 1:
        return True
    if not is_concrete(ids, others):
        return False
    streams, other_streams = (np.asarray(x) // spec.sequences_per_stream for x in (ids, others))
    return bool(np.all(streams == other_streams))


def check_distinct(ids: PyTree) -> None:
    """Raise a ValueError if a known sequence id comes twice."""
    if is_concrete(ids) and np.unique(ids).size < np.size(ids):
        raise ValueError(f"expected each sequence at most once, got {np.asarray(ids).tolist()}")


def mask_unchanged_targets(
    spec: TableSpec, parents: Int32[Array, " n"], ids: Int32[Array, " n"]
) -> tuple[Int32[Array, " n"], Int32[Array, " n"]]:
    """Return parents and targets as given, a target of Q where nothing changes.

    Nothing does for a sequence that is its own parent, nor where one of the two is no sequence. Of
    a sequence that comes twice, which only a traced one can, the last counts.
    """
    count = spec.sequences
    is_known = (parents >= 0) & (parents < count) & (ids >= 0) & (ids < count)
    targets = jnp.where(is_known & (parents != ids), ids, count)
    turn = jnp.arange(ids.size, dtype=jnp.int32)
    last = jnp.full(count, -1, jnp.int32).at[targets].max(turn, mode="drop")
    counts = last.at[targets].get(mode="fill", fill_value=-1) == turn
    return jnp.where(is_known, parents, 0), jnp.where(counts, targets, count)


def check_sequences_and_streams(sequences: SupportsIndex, streams: SupportsIndex) -> dict[str, int]:
    """Return the sequences and the streams that a caller wants, checked.

    >>> check_sequences_and_streams(6, 4)
    Traceback (most recent call last):
    ...
    ValueError: expected streams that deal out 6 sequences evenly, one of [1, 2, 3, 6], got 4
    """
    sequences = check_count(sequences, "sequences")
    streams = check_count(streams, "streams")
    if sequences % streams:
        low = [n for n in range(1, math.isqrt(sequences) + 1) if sequences % n == 0]
        divisors = sorted({*low, *(sequences // n for n in low)})
        raise ValueError(
            f"expected streams that deal out {sequences} sequences evenly, one of {divisors}, got "
            f"{streams}"
        )
    return {"sequences": sequences, "streams": streams}


def check_spec(spec: TableSpec, expected_spec: TableSpec, name: str) -> None:
    """Raise a ValueError unless something, called `name`, was made for a cache of the same spec."""
    if spec == expected_spec:
        return
    expected, actual = _flat_fields(expected_spec), _flat_fields(spec)
    keys = [key for key in expected | actual if expected.get(key) != actual.get(key)]
    if "kind" in keys:
        keys = ["kind"]
    expected, actual = (
        ", ".join(f"{key}={found[key]}" for key in keys if key in found)
        for found in (expected, actual)
    )
    raise ValueError(
        f"expected {name} for this cache, {expected}, got one for {actual}: plan again"
    )


def _flat_fields(spec: TableSpec, of: str = "") -> dict[str, object]:
    """Return all fields by name, those of parts too."""
    names = [field.name for field in fields(spec) if field.name not in ("details", "parts")]
    pairs = [*((name, getattr(spec, name)) for name in names), *spec.details]
    values = {of + name: value for name, value in pairs}
    for i, part in enumerate(spec.parts):
        values |= _flat_fields(part, f"{of}part {i} ")
    return values
