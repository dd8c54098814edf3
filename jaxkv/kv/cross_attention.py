"""Cache of encoder outputs (sources) for cross-attention, written once and then only read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache_spec import CacheSpec
from jaxkv.core.array_utils import out_of_range_slots, resolve_range_end
from jaxkv.core.constants import EMPTY
from jaxkv.core.pytree import field_values, pytree_dataclass
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.table import CellTable
from jaxkv.plan import Reason
from jaxkv.spec import TableSpec, mask_unchanged_targets
from jaxkv.table import CacheTable, EditCheck, join_checks
from jaxkv.ubatch import CrossAttentionSlots, Ubatch

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Int32


@pytree_dataclass
class CrossAttentionTable(CellTable):
    """Table of encoder sources, whose positions never change; decoder tokens use no cells."""

    @property
    def spec(self) -> TableSpec:
        """Static configuration of the table."""
        return replace(super().spec, kind="source")

    def cache_spec(self, buffers: Buffers) -> CacheSpec:
        """Return the `CacheSpec` of the layers in `buffers`."""
        return replace(super().cache_spec(buffers), kind="cross_attention")

    def can_allocate(
        self, lengths: Int[np.ndarray, " Q"], at_once: int, num_shared_cells: Int[np.ndarray, " S"]
    ) -> Bool[np.ndarray, " S"]:
        """Return True for each stream, since decoder tokens use no cells."""
        del lengths, at_once, num_shared_cells
        return np.ones(self.streams, bool)

    def slots_when_skipped(self, ubatch: Ubatch) -> CrossAttentionSlots:
        """Return slots for decoder tokens: 0 for valid tokens, past the last cell for padding."""
        looks = out_of_range_slots(ubatch.positions)
        return CrossAttentionSlots(jnp.where(ubatch.valid, 0, looks))

    def occupy(self, ubatch: Ubatch) -> Self:
        """Store the tokens of sources in their slots; decoder tokens leave the table unchanged."""
        return super().occupy(ubatch) if self.stores(ubatch) else self

    def seq_rm(
        self, seq: Int32[Array, ""], start: Int32[Array, ""], stop: Int32[Array, ""]
    ) -> tuple[CellTable, EditCheck]:
        """Remove the source of a sequence if `start` <= 0 and `stop` < 0; otherwise do nothing."""
        return super().seq_rm(seq, start, jnp.where((start <= 0) & (stop < 0), -1, 0))

    def seq_cp(
        self,
        buffers: Buffers | None,
        src: Int32[Array, ""],
        dst: Int32[Array, "*n"],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
    ) -> tuple[CellTable, Buffers | None]:
        """Give the sequences `dst` the encoder source of `src`, unless the range is empty."""
        return self.seq_select(buffers, *self._parents_of_copy(src, dst, start, stop))

    def can_seq_cp(
        self,
        src: Int32[Array, ""],
        dst: Int32[Array, "*n"],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
    ) -> tuple[EditCheck, Int32[Array, " m"]]:
        """Return whether a copy is possible, and -1 as the last position of each target."""
        ok = self.can_seq_select(*self._parents_of_copy(src, dst, start, stop))
        ends = jnp.full(jnp.atleast_1d(dst).shape, EMPTY)
        return join_checks((ok, Reason.OUT_OF_CELLS)), ends

    def _parents_of_copy(
        self, src: jax.Array, dst: jax.Array, start: jax.Array, stop: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return parents and targets for `seq_select`, with Q in place of each unchanged target."""
        targets = jnp.atleast_1d(dst)
        parent = jnp.where(
            jnp.maximum(start, 0) < resolve_range_end(stop), src, -1
        )  # -1 for an empty range
        return mask_unchanged_targets(self.spec, jnp.broadcast_to(parent, targets.shape), targets)

    def seq_add(
        self,
        seq: Int32[Array, ""],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
        delta: Int32[Array, ""],
        gap: Int32[Array, ""] | None = None,
    ) -> tuple[CrossAttentionTable, EditCheck]:
        """Return the table unchanged, since a source keeps its positions."""
        del seq, start, stop, delta, gap
        return self, join_checks()

    def can_seq_add(
        self,
        seq: Int32[Array, ""],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
        delta: Int32[Array, ""],
    ) -> Bool[Array, ""]:
        """Return True, since a source keeps its positions."""
        del seq, start, stop, delta
        return jnp.array(True)

    def seq_div(
        self,
        seq: Int32[Array, ""],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
        divisor: Int32[Array, ""],
    ) -> tuple[CrossAttentionTable, EditCheck]:
        """Return the table unchanged, since a source keeps its positions."""
        del seq, start, stop, divisor
        return self, join_checks()

    def can_resume(self, seq: Int32[Array, ""], pos: Int32[Array, ""]) -> Bool[Array, ""]:
        """Return True, since decoder tokens at all positions attend to the whole source."""
        del seq, pos
        return jnp.array(True)

    def stores(self, ubatch: Ubatch) -> bool:
        """Return whether a ubatch has tokens of sources."""
        return not isinstance(ubatch.slots, CrossAttentionSlots)


def as_source_table(table: CacheTable) -> CrossAttentionTable:
    """Convert a `CellTable` to a `CrossAttentionTable`."""
    return CrossAttentionTable(**field_values(table))
