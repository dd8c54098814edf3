"""Attention cache, assembled: the table that verbs know."""

from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxkv.batch import Ubatch
from jaxkv.cache import Admission, CacheTable, KVView, MaintenancePlan, SequenceStatus, check_sizes
from jaxkv.cache_spec import CacheSpec
from jaxkv.core.partitioning import AxisPartition, ShardingRules
from jaxkv.kv import cells, copy, copy_pooled, defrag, eviction, shift, slots
from jaxkv.kv.buffers import Buffers, sizes_of
from jaxkv.kv.cells import Cells
from jaxkv.kv.layer import attend, read_kv, write_kv
from jaxkv.kv.sharded import endings, map_streams, map_streams_gather
from jaxkv.ops.mla import Values, ValueSlice
from jaxkv.rope import NotGiven
from jaxkv.spec import TableSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class CellTable(Cells, CacheTable):
    """The table of an attention cache: `Cells`, and what verbs, plans and loops ask of them."""

    @property
    def spec(self) -> TableSpec:
        """What is fixed when the cache is made."""
        return TableSpec(
            kind="attention",
            sequences=self.sequences,
            streams=self.streams,
            single_sequence_rows=self.streams > 1,
            ubatch_size=self.ubatch_size,
            details=(
                ("cells", self.num_cells),
                ("window", self.window),
                ("placement", self.placement),
                ("shards", self.shards),
            ),
        )

    def cache_spec(self, buffers: Buffers) -> CacheSpec:
        """Return what the weights fixed of the cache."""
        ends = buffers.of_each(lambda k, v: (k.shape[-3], k.shape[-1], _value_dim(v)))
        heads, keys, values = zip(*ends, strict=True)
        return CacheSpec.attention(len(ends), heads, keys, values, self.window, buffers.ropes)

    def with_sharding_rules(self, sharding_rules: ShardingRules | None) -> "CellTable":
        """Return the table with other rules."""
        return replace(self, sharding_rules=sharding_rules)

    def partition_specs(self, buffers: Buffers | None, mesh: Any) -> tuple[Any, Buffers | None]:
        """Return that streams are split, and of the buffers heads and cells too."""
        rules = self.sharding_rules or ShardingRules()

        def of_array(x: Any) -> P:
            depth = 1 if buffers is None else buffers.depth
            return AxisPartition(**rules.split(mesh, **sizes_of(x, depth))).partition_spec

        streams = P(rules.split(mesh, streams=self.streams)["streams"])
        return jax.tree.map(lambda _: streams, self), jax.tree.map(of_array, buffers)

    def num_layers(self, buffers: Buffers) -> int:
        """Return L."""
        return buffers.layers

    def check_buffers(self, buffers: Buffers) -> None:
        """Raise unless keys have the streams and the cells of the table."""
        streams, _, size, _ = buffers.k[0].shape
        check_sizes(self, streams // buffers.depth, size)

    def check_moves(self, buffers: Buffers) -> None:
        """Raise unless it is known of all layers how keys turn with position."""
        if any(isinstance(rope, NotGiven) for rope in buffers.ropes):
            raise ValueError(
                "expected a cache made with rope= to move keys, got one made without; make it with "
                "rope=make_rope(...), or rope=None if keys have no positions"
            )

    def stream_hash(self) -> jax.Array:
        """See `cells.stream_hash`."""
        return map_streams(self, cells.stream_hash)

    def first(self, seq: jax.Array) -> jax.Array:
        """See `cells.first`."""
        return cells.first(self, seq)

    def last(self, seq: jax.Array) -> jax.Array:
        """See `cells.last`."""
        return cells.last(self, seq)

    def endings(self, sequences: jax.Array, contents: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `by_stream.endings`."""
        return endings(self, sequences, contents)

    def num_used_cells(self) -> jax.Array:
        """See `cells.num_used_cells`."""
        return cells.num_used_cells(self)

    def sequence_status(self, present: jax.Array) -> SequenceStatus:
        """See `slots.sequence_status`."""
        return map_streams_gather(self, slots.sequence_status, present)

    def find_fitting(self, wanted: jax.Array) -> Admission:
        """See `slots.find_fitting`."""
        return map_streams_gather(self, slots.find_fitting, wanted)

    def owns_same_cells(self, partner: jax.Array) -> jax.Array:
        """See `cells.owns_same_cells`."""
        return map_streams_gather(self, cells.owns_same_cells, partner)

    def num_shared_cells(self) -> jax.Array:
        """See `cells.num_shared_cells`."""
        return cells.num_shared_cells(self)

    def can_allocate(
        self, lengths: np.ndarray, at_once: int, num_shared_cells: np.ndarray
    ) -> np.ndarray:
        """See `slots.can_allocate`."""
        return slots.can_allocate(self, lengths, at_once, num_shared_cells)

    def choose_slots(self, ubatch: Ubatch) -> tuple[jax.Array, jax.Array]:
        """See `slots.choose_slots`."""
        return slots.choose_slots(self, ubatch)

    def occupy(self, ubatch: Ubatch) -> Self:
        """See `slots.occupy`."""
        return slots.occupy(self, ubatch)

    def stream_hash_after(self, ubatch: Ubatch, occupied: Any) -> jax.Array:
        """See `slots.stream_hash_after`; a window may take more cells than the ubatch does."""
        if self.window is not None:
            return occupied.stream_hash()
        return slots.stream_hash_after(self, ubatch)

    def remove(self, seq: jax.Array, p0: jax.Array, p1: jax.Array) -> tuple[Self, jax.Array]:
        """See `cells.remove`; refused where a sequence could not go on, see `reuse.granted`."""
        return eviction.granted(self, cells.remove(self, seq, p0, p1), self.evicted_below - 1)

    def copy(
        self, buffers: Any, src: jax.Array, dst: jax.Array, p0: jax.Array, p1: jax.Array
    ) -> tuple["CellTable", Any]:
        """See `cells.copy` within a stream; between streams `copy`, and in groups `transfer`."""
        if buffers is None:
            return cells.copy(self, src, dst, p0, p1), None
        if self.sequences_per_stream == 1:
            return copy.copy_between(self, buffers, src, dst, p0, p1)
        return copy_pooled.execute_copy(self, buffers, copy_pooled.to_copy(self, src, dst, p0, p1))

    def can_copy(
        self, src: jax.Array, dst: jax.Array, p0: jax.Array, p1: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """See `reuse.can_copy`; in groups there must be cells too, see `transfer.to_copy`."""
        ok, ends = eviction.can_copy(self, src, dst, p0, p1)
        if self.spec.has_shared_streams:
            ok &= copy_pooled.to_copy(self, src, dst, p0, p1).need.ok
        return ok, ends

    def select(self, buffers: Any, parents: jax.Array, targets: jax.Array) -> tuple[Self, Any]:
        """See `cells.select` within a stream; between streams `copy`, and in groups `transfer`."""
        if buffers is None:
            return cells.select(self, parents, targets), None
        if self.sequences_per_stream == 1:
            return copy.select_between(self, buffers, parents, targets)
        return copy_pooled.execute_copy(
            self, buffers, copy_pooled.to_select(self, parents, targets)
        )

    def can_select(self, parents: jax.Array, targets: jax.Array) -> jax.Array:
        """Return True, but in groups whether there are cells, see `transfer.to_select`."""
        if not self.spec.has_shared_streams:
            return jnp.array(True)
        return copy_pooled.to_select(self, parents, targets).need.ok

    def keep(self, seq: jax.Array) -> "CellTable":
        """See `cells.keep`."""
        return cells.keep(self, seq)

    def clear(self) -> "CellTable":
        """See `cells.clear`."""
        return cells.clear(self)

    def add(
        self,
        seq: jax.Array,
        p0: jax.Array,
        p1: jax.Array,
        delta: jax.Array,
        gap: jax.Array | None = None,
    ) -> tuple["CellTable", jax.Array]:
        """See `shift.add`."""
        return shift.add(self, seq, p0, p1, delta, gap)

    def can_add(self, seq: jax.Array, p0: jax.Array, p1: jax.Array, delta: jax.Array) -> jax.Array:
        """See `shift.can_add`."""
        return shift.can_add(self, seq, p0, p1, delta)

    def divide(
        self, seq: jax.Array, p0: jax.Array, p1: jax.Array, divisor: jax.Array
    ) -> tuple["CellTable", jax.Array]:
        """See `shift.divide`."""
        return shift.divide(self, seq, p0, p1, divisor)

    def can_resume(self, seq: jax.Array, pos: jax.Array) -> jax.Array:
        """See `reuse.can_resume`."""
        return eviction.can_resume(self, seq, pos)

    def plan_shift(self) -> MaintenancePlan:
        """See `shift.ShiftPlan`."""
        return shift.ShiftPlan(shift=self.shift, spec=self.spec)

    def plan_defrag(self, max_moves: int | None) -> MaintenancePlan:
        """See `defrag.plan_moves`."""
        return defrag.plan_moves(self, max_moves, self.spec)

    def rewind(self, old: "CellTable") -> tuple["CellTable", jax.Array]:
        """See `cells.rewind`."""
        return cells.rewind(self, old)

    def faults(self) -> dict[str, jax.Array]:
        """See `cells.faults`."""
        return cells.faults(self)

    def serves(self, verb: str, layer: int) -> bool:
        """Return whether it is `attend`, which every layer knows."""
        del layer
        return verb == "attend"

    def attend(
        self, buffers: Buffers, layer: int, ubatch: Ubatch, *args: Any, **options: Any
    ) -> tuple[Self, Buffers, jax.Array]:
        """See `attend.attend`."""
        return attend(self, buffers, layer, ubatch, *args, **options)

    def write_kv(
        self, buffers: Buffers, layer: int, ubatch: Ubatch, *new: jax.Array
    ) -> tuple[Self, Buffers]:
        """See `attend.write_kv`."""
        return write_kv(self, buffers, layer, ubatch, *new)

    def read_kv(self, buffers: Buffers, layer: int, ubatch: Ubatch, **options: Any) -> KVView:
        """See `attend.read_kv`."""
        return read_kv(self, buffers, layer, ubatch, **options)


def _value_dim(v: Values) -> int | ValueSlice:
    """Return the numbers of a value, or which of those of its key they are."""
    return v if isinstance(v, ValueSlice) else v.shape[-1]
