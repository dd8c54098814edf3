"""Several caches that step together, each for some of a model's layers.

All parts or none: a batch, a cut or a ubatch that one part refuses changes none of them. The parts
may be of any kind. What is known of them here is `jaxkv.cache.CacheTable`, nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import Ubatch, part_of
from jaxkv.cache import (
    Admission,
    Cache,
    CacheTable,
    KVView,
    MaintenancePlan,
    SequenceStatus,
    merge,
    split,
)
from jaxkv.cache_spec import CacheSpec
from jaxkv.core.partitioning import ShardingRules
from jaxkv.spec import TableSpec

__all__ = ["make_hybrid_cache", "parts_of"]

Layers = tuple[tuple[int, ...], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class HybridMaintenancePlan(MaintenancePlan):
    """What is to be done to each part: the plans of an update, or of a defrag.

    parts: the plans.
    spec: of the cache that they were planned for, static.
    """

    parts: tuple[MaintenancePlan, ...]
    spec: TableSpec = field(metadata={"static": True})

    @property
    def pending(self) -> jax.Array:
        """How many keys are rotated, or cells moved, over all parts; `[]` int32."""
        return reduce(jnp.add, [part.pending for part in self.parts])

    def is_current(self, table: "HybridTable") -> jax.Array:
        """Return whether each part is as its plan found it; `[]` bool."""
        parts = zip(self.parts, table.parts, strict=True)
        return _all([plan.is_current(part) for plan, part in parts])

    def commit(
        self, table: "HybridTable", buffers: tuple, ok: jax.Array
    ) -> tuple["HybridTable", tuple]:
        """Carry the plans of all parts out, or none."""
        parts = zip(self.parts, table.parts, buffers, strict=True)
        return table.with_parts([plan.commit(part, own, ok) for plan, part, own in parts])


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class HybridTable(CacheTable):
    """The tables of caches that step together. Arrays have the shapes that `CacheTable` says.

    parts: the tables.
    layers: for each part the layers of the model that it serves, in its own order, static. A layer
      that uses several caches, such as attention beside a recurrence, is listed in each.
    sharding_rules: which axes of a mesh split the cache, those of all parts, static.
    """

    parts: tuple[Any, ...]
    layers: Layers = field(metadata={"static": True})
    sharding_rules: ShardingRules | None = field(default=None, metadata={"static": True})

    @property
    def spec(self) -> TableSpec:
        """What is fixed when the cache is made."""
        parts = tuple(part.spec for part in self.parts)
        sizes = [part.ubatch_size for part in parts if part.ubatch_size is not None]
        kept = [part.max_rollback for part in parts if part.max_rollback is not None]
        return TableSpec(
            kind="hybrid",
            sequences=parts[0].sequences,
            streams=parts[0].streams,
            single_sequence_rows=any(part.single_sequence_rows for part in parts),
            ubatch_size=min(sizes, default=None),
            max_rollback=min(kept, default=None),
            details=(("layers", self.layers),),
            parts=parts,
        )

    def cache_spec(self, buffers: tuple) -> CacheSpec:
        """Return what the weights fixed of each part."""
        parts = zip(self.parts, buffers, self.layers, strict=True)
        return CacheSpec.hybrid(*((part.cache_spec(own), layers) for part, own, layers in parts))

    @property
    def is_batch(self) -> bool:
        """Whether a part is."""
        return any(part.is_batch for part in self.parts)

    def with_sharding_rules(self, sharding_rules: ShardingRules | None) -> "HybridTable":
        """Return the table with other rules, in each part too."""
        parts = tuple(part.with_sharding_rules(sharding_rules) for part in self.parts)
        return replace(self, parts=parts, sharding_rules=sharding_rules)

    def partition_specs(self, buffers: tuple | None, mesh: Any) -> tuple[Any, tuple]:
        """Return those of each part."""
        pairs = zip(self.parts, buffers or (None,) * len(self.parts), strict=True)
        return self.with_parts([part.partition_specs(own, mesh) for part, own in pairs])

    def num_layers(self, buffers: tuple) -> int:
        """Return one more than the highest layer that a part serves."""
        del buffers
        return 1 + max(layer for layers in self.layers for layer in layers)

    def check_buffers(self, buffers: tuple) -> None:
        """Raise unless each part has the buffers of one that is like it."""
        if len(buffers) != len(self.parts):
            raise ValueError(
                f"expected the buffers of {len(self.parts)} parts, got {len(buffers)}: join the "
                f"table and the buffers of one cache"
            )
        for part, one in zip(self.parts, buffers, strict=True):
            part.check_buffers(one)

    def with_parts(self, pairs: list[tuple[Any, Any]]) -> tuple["HybridTable", tuple]:
        """Return the table and the buffers, given those of each part."""
        tables, buffers = zip(*pairs, strict=True)
        return replace(self, parts=tables), buffers

    def check_moves(self, buffers: tuple) -> None:
        """Raise unless every part can."""
        for part, own in zip(self.parts, buffers, strict=True):
            part.check_moves(own)

    def stream_hash(self) -> tuple:
        """Return the digests of each part."""
        return tuple(part.stream_hash() for part in self.parts)

    def as_encoder_table(self) -> "HybridTable":
        """Return the table as it answers where sources are planned."""
        if not self.spec.has_cross_attention:
            return super().as_encoder_table()
        return _ForSources(parts=self.parts, layers=self.layers, sharding_rules=self.sharding_rules)

    def _goes_into(self, part: CacheTable) -> bool:
        """Return whether what is planned goes into a part."""
        return not part.spec.is_cross_attention

    @property
    def _planned(self) -> list[CacheTable]:
        """The parts that what is planned goes into."""
        return [part for part in self.parts if self._goes_into(part)]

    def first(self, seq: jax.Array) -> jax.Array:
        """Return where the text of all parts begins: the largest first one; -1 if one is empty."""
        found = [part.first(seq) for part in self._planned]
        return jnp.where(_smallest(found) < 0, -1, _largest(found))

    def last(self, seq: jax.Array) -> jax.Array:
        """Return the largest position that all parts hold of a text; `[]` int32."""
        return _smallest([part.last(seq) for part in self._planned])

    def endings(self, sequences: jax.Array, contents: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Ask a part of attention, whose cells tell tokens apart, or if there is none, any part."""
        parts = sorted(self._planned, key=lambda part: part.spec.kind != "attention")
        return parts[0].endings(sequences, contents)

    def holding(self) -> jax.Array:
        """Return which sequences hold anything in any part; `[Q]` bool."""
        return _any([part.holding() for part in self.parts])

    def num_used_cells(self) -> jax.Array:
        """Return how many cells are in use, over all parts; `[]` int32."""
        return reduce(jnp.add, [part.num_used_cells() for part in self.parts])

    def sequence_status(self, present: jax.Array) -> SequenceStatus:
        """Return what holds in any part; sequences whose parts end apart miss something too."""
        found = [part.sequence_status(present) for part in self._planned]
        last = _largest([one.last for one in found])
        apart = present & _any([one.last != last for one in found])
        return SequenceStatus(
            last=last,
            missing=apart | _any([one.missing for one in found]),
            pending=_any([one.pending for one in found]),
        )

    def find_fitting(self, wanted: jax.Array) -> Admission:
        """Return what fits in all parts: each orders the sequences alike, so it fits together."""
        found = [part.find_fitting(wanted) for part in self._planned]
        return Admission(
            fits=_all([one.fits for one in found]),
            together=_all([one.together for one in found]),
            left=_smallest([one.left for one in found]),
        )

    def owns_same_cells(self, partner: jax.Array) -> jax.Array:
        """Return whether they own the very same cells in every part; `[Q]` bool."""
        return _all([part.owns_same_cells(partner) for part in self.parts])

    def num_shared_cells(self) -> tuple:
        """Return what is spared in each part."""
        return tuple(part.num_shared_cells() for part in self.parts)

    def can_allocate(
        self, lengths: np.ndarray, at_once: int, num_shared_cells: tuple
    ) -> np.ndarray:
        """Return which streams have the cells in every part; `[S]` bool."""
        parts = zip(self.parts, num_shared_cells, strict=True)
        return np.all([part.can_allocate(lengths, at_once, own) for part, own in parts], axis=0)

    def choose_slots(self, ubatch: Ubatch) -> tuple[tuple, jax.Array]:
        """Return what each part chooses, and the highest `Reason` of each token, `[R, T]` int32."""
        slots, faults = [], []
        for part in self.parts:
            if self._goes_into(part):
                own, fault = part.choose_slots(ubatch)
                faults.append(fault)
            else:
                own = part.slots_when_skipped(ubatch)
            slots.append(own)
        return tuple(slots), _largest(faults)

    def occupy(self, ubatch: Ubatch) -> "HybridTable":
        """Mark the slots in each part that has some."""
        parts = [
            part if slots is None else part.occupy(part_of(ubatch, i))
            for i, (part, slots) in enumerate(zip(self.parts, ubatch.slots, strict=True))
        ]
        return replace(self, parts=tuple(parts))

    def stream_hash_after(self, ubatch: Ubatch, occupied: Any) -> tuple:
        """Return the digests of each part."""
        return tuple(
            digest if slots is None else part.stream_hash_after(part_of(ubatch, i), new)
            for i, (part, new, slots, digest) in enumerate(
                zip(self.parts, occupied.parts, ubatch.slots, ubatch.hash_before, strict=True)
            )
        )

    def remove(
        self, seq: jax.Array, start: jax.Array, stop: jax.Array
    ) -> tuple["HybridTable", jax.Array]:
        """Cut all parts, or none."""
        return self._all_or_none([part.remove(seq, start, stop) for part in self.parts])

    def _all_or_none(self, answers: list[tuple[Any, jax.Array]]) -> tuple["HybridTable", jax.Array]:
        """Return the table with what each part answered, if all of them are ok; and whether.

        It is refused, too, where the text of a sequence would end in one part before it does in
        another.
        """
        parts, granted = zip(*answers, strict=True)
        changed = replace(self, parts=parts)
        present = jnp.ones(self.spec.sequences, bool)
        apart = changed.sequence_status(present).missing & ~self.sequence_status(present).missing
        ok = _all([*granted]) & ~jnp.any(apart)
        return jax.tree.map(lambda new, old: jnp.where(ok, new, old), changed, self), ok

    def copy(
        self, buffers: Any, src: jax.Array, dst: jax.Array, start: jax.Array, stop: jax.Array
    ) -> tuple["HybridTable", Any]:
        """Copy in all parts; within a stream there are no buffers to copy."""
        own = (None,) * len(self.parts) if buffers is None else buffers
        pairs = zip(self.parts, own, strict=True)
        table, copied = self.with_parts(
            [part.copy(one, src, dst, start, stop) for part, one in pairs]
        )
        return table, None if buffers is None else copied

    def can_copy(
        self, src: jax.Array, dst: jax.Array, start: jax.Array, stop: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return whether every part can, and all would end alike; and their ends."""
        found = [(part, *part.can_copy(src, dst, start, stop)) for part in self.parts]
        ends = [end for part, _, end in found if self._goes_into(part)]
        alike = _all([end == ends[0] for end in ends])
        return _all([ok for _, ok, _ in found]) & jnp.all(alike), ends[0]

    def select(
        self, buffers: Any, parents: jax.Array, targets: jax.Array
    ) -> tuple["HybridTable", Any]:
        """Select in all parts; within a stream there are no buffers to copy."""
        own = (None,) * len(self.parts) if buffers is None else buffers
        pairs = zip(self.parts, own, strict=True)
        table, copied = self.with_parts([part.select(one, parents, targets) for part, one in pairs])
        return table, None if buffers is None else copied

    def can_select(self, parents: jax.Array, targets: jax.Array) -> jax.Array:
        """Return whether every part can."""
        return _all([part.can_select(parents, targets) for part in self.parts])

    def keep(self, seq: jax.Array) -> "HybridTable":
        """Keep one sequence in each part."""
        return replace(self, parts=tuple(part.keep(seq) for part in self.parts))

    def clear(self) -> "HybridTable":
        """Clear each part."""
        return replace(self, parts=tuple(part.clear() for part in self.parts))

    def add(
        self,
        seq: jax.Array,
        start: jax.Array,
        stop: jax.Array,
        delta: jax.Array,
        gap: jax.Array | None = None,
    ) -> tuple["HybridTable", jax.Array]:
        """Move in all parts, or none."""
        return self._all_or_none([part.add(seq, start, stop, delta, gap) for part in self.parts])

    def can_add(
        self, seq: jax.Array, start: jax.Array, stop: jax.Array, delta: jax.Array
    ) -> jax.Array:
        """Return whether every part can."""
        return _all([part.can_add(seq, start, stop, delta) for part in self.parts])

    def divide(
        self, seq: jax.Array, start: jax.Array, stop: jax.Array, divisor: jax.Array
    ) -> tuple["HybridTable", jax.Array]:
        """Divide in all parts, or none."""
        return self._all_or_none([part.divide(seq, start, stop, divisor) for part in self.parts])

    def can_resume(self, seq: jax.Array, pos: jax.Array) -> jax.Array:
        """Return whether every part can."""
        return _all([part.can_resume(seq, pos) for part in self.parts])

    def plan_shift(self) -> MaintenancePlan:
        """Return the plans of each part."""
        return HybridMaintenancePlan(
            parts=tuple(part.plan_shift() for part in self.parts), spec=self.spec
        )

    def plan_defrag(self, max_moves: int | None) -> MaintenancePlan:
        """Return the plans of each part."""
        return HybridMaintenancePlan(
            parts=tuple(part.plan_defrag(max_moves) for part in self.parts), spec=self.spec
        )

    def rewind(self, old: "HybridTable") -> tuple["HybridTable", jax.Array]:
        """Go back in all parts, or none."""
        pairs = zip(self.parts, old.parts, strict=True)
        parts, granted = zip(*(part.rewind(was) for part, was in pairs), strict=True)
        return replace(old, parts=parts), _all([*granted])

    def faults(self) -> dict[str, jax.Array]:
        """Return the faults of each part."""
        return {
            f"part {i}: {name}": number
            for i, part in enumerate(self.parts)
            for name, number in part.faults().items()
        }

    def serves(self, verb: str, layer: int) -> bool:
        """Return whether a part does."""
        return bool(self._parts_serving(verb, layer))

    def attend(
        self,
        buffers: tuple,
        layer: int,
        ubatch: Ubatch,
        q: jax.Array,
        k: jax.Array | None = None,
        v: jax.Array | None = None,
        **options: Any,
    ) -> tuple["HybridTable", tuple, jax.Array]:
        """Attend in the part that serves the layer."""
        i, inner = self._part_serving("attend", layer)
        found = self.parts[i].attend(buffers[i], inner, part_of(ubatch, i), q, k, v, **options)
        part, own, out = found
        return replace(self, parts=_put(self.parts, i, part)), _put(buffers, i, own), out

    def write_kv(
        self,
        buffers: tuple,
        layer: int,
        ubatch: Ubatch,
        k: jax.Array,
        v: jax.Array | None = None,
    ) -> tuple["HybridTable", tuple]:
        """Write into the part that serves the layer."""
        i, inner = self._part_serving("attend", layer)
        part, own = self.parts[i].write_kv(buffers[i], inner, part_of(ubatch, i), k, v)
        return replace(self, parts=_put(self.parts, i, part)), _put(buffers, i, own)

    def read_kv(self, buffers: tuple, layer: int, ubatch: Ubatch, **options: Any) -> KVView:
        """Look at the part that serves the layer."""
        i, inner = self._part_serving("attend", layer)
        return self.parts[i].read_kv(buffers[i], inner, part_of(ubatch, i), **options)

    def read_states(self, buffers: tuple, layer: int, ubatch: Ubatch) -> dict[str, jax.Array]:
        """Read from the part that serves the layer."""
        i, inner = self._part_serving("states", layer)
        return self.parts[i].read_states(buffers[i], inner, part_of(ubatch, i))

    def write_states(
        self, buffers: tuple, layer: int, ubatch: Ubatch, states: Mapping[str, jax.Array]
    ) -> tuple["HybridTable", tuple]:
        """Write into the part that serves the layer."""
        i, inner = self._part_serving("states", layer)
        part, own = self.parts[i].write_states(buffers[i], inner, part_of(ubatch, i), states)
        return replace(self, parts=_put(self.parts, i, part)), _put(buffers, i, own)

    def max_rollback(self, layer: int) -> int:
        """Return that of the part that serves the layer."""
        i, inner = self._part_serving("states", layer)
        return self.parts[i].max_rollback(inner)

    def _parts_serving(self, verb: str, layer: int) -> list[tuple[int, int]]:
        """Return the parts that serve a layer, each with its own number for it."""
        return [
            (i, layers.index(layer))
            for i, (part, layers) in enumerate(zip(self.parts, self.layers, strict=True))
            if layer in layers and part.serves(verb, layers.index(layer))
        ]

    def _part_serving(self, verb: str, layer: int) -> tuple[int, int]:
        """Return the one part that serves a layer, and its own number for it."""
        found = self._parts_serving(verb, layer)
        if len(found) != 1:
            known = sorted({layer for layers in self.layers for layer in layers})
            raise ValueError(
                f"wanted a layer that one part serves, of {known}, got {layer}, which "
                f"{len(found)} do"
            )
        return found[0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class _ForSources(HybridTable):
    """The table as it answers where sources are planned; no cache has it.

    of_sources: True, static, see `CrossAttentionTable`.
    """

    of_sources: bool = field(default=True, metadata={"static": True})

    def _goes_into(self, part: CacheTable) -> bool:
        """Return whether what is planned goes into a part."""
        return part.spec.is_cross_attention


def make_hybrid_cache(*parts: tuple[Cache, tuple[int, ...]]) -> Cache:
    """Compose caches into one.

    Args:
      parts: pairs of a cache and the layers of the model that it serves, in its own order, as many
        as it has. All are made with the same `sequences` and `streams`, so that a verb means the
        same in each.

    Raises:
      TypeError: when an argument is not such a pair.
      ValueError: when the parts know different numbers of sequences, only some of them share cells,
        they are on a mesh by different rules, a part is not given as many different layers as it
        has, a layer is given to several parts that keep keys, or to several that keep states, there
        are no parts, or no part beside one for sources, or several for sources.

    Examples:
      Layers 0, 1, 3 and 4 look back 4 positions, and layers 2 and 5 at everything:

      >>> sizes = dict(kv_heads=1, head_dim=2, sequences=2)
      >>> near = make_kv_cache(layers=4, window=window.sliding(4), ubatch_size=4, **sizes)
      >>> far = make_kv_cache(layers=2, cells=64, **sizes)
      >>> cache = make_hybrid_cache((near, (0, 1, 3, 4)), (far, (2, 5)))
      >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
      >>> (
      ...     num_used_cells(cache).item(),
      ...     [num_used_cells(part).item() for part in hybrid.parts_of(cache)],
      ... )
      (6, [3, 3])

    llama.cpp: `llama_kv_cache_iswa`, `llama_memory_hybrid`.
    """
    for pair in parts:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Cache)):
            raise TypeError(f"wanted pairs of a cache and its layers, got {type(pair)}")
    # The layers are checked by the spec.
    whole = CacheSpec.hybrid(*((cache.spec, own) for cache, own in parts))
    caches, layers = tuple(cache for cache, _ in parts), tuple(own for _, own in whole.parts)
    spec = [cache.table.spec for cache in caches]
    for name in ("sequences", "streams"):
        counts = [getattr(fact, name) for fact in spec]
        if len(set(counts)) > 1:
            raise ValueError(
                f"wanted parts with the same number of {name}, got {counts}: verbs would mean "
                f"different things in them; make all parts with the same {name}="
            )
    rules = [cache.table.sharding_rules for cache in caches]
    if len(set(rules)) > 1:
        raise ValueError(
            f"wanted parts that a mesh splits by the same rules, got {rules}: make all of them "
            f"with jaxkv.sharding.allocate"
        )
    tables = tuple(cache.table for cache in caches)
    table = HybridTable(parts=tables, layers=layers, sharding_rules=rules[0])
    return merge(table, tuple(cache.buffers for cache in caches))


def parts_of(cache: Cache) -> tuple[Cache, ...]:
    """Return the parts of a hybrid cache as caches of their own; any other is its one part.

    >>> cache = make_kv_cache(layers=1, cells=4, kv_heads=1, head_dim=2)
    >>> [type(part.table).__name__ for part in hybrid.parts_of(cache)]
    ['CellTable']
    """
    table, buffers = split(cache)
    if not isinstance(table, HybridTable):
        return (cache,)
    return tuple(merge(*pair) for pair in zip(table.parts, buffers, strict=True))


def _put(parts: tuple, i: int, part: Any) -> tuple:
    return (*parts[:i], part, *parts[i + 1 :])


def _all(answers: list[jax.Array]) -> jax.Array:
    """Return where all of some bools are True, elementwise; all have one shape."""
    return reduce(jnp.logical_and, answers)


def _any(answers: list[jax.Array]) -> jax.Array:
    """Return where one of some bools is True, elementwise; all have one shape."""
    return reduce(jnp.logical_or, answers)


def _largest(answers: list[jax.Array]) -> jax.Array:
    """Return the largest of some int32, elementwise; all have one shape."""
    return reduce(jnp.maximum, answers)


def _smallest(answers: list[jax.Array]) -> jax.Array:
    """Return the smallest of some int32, elementwise; all have one shape."""
    return reduce(jnp.minimum, answers)
