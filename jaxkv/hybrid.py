"""Hybrid cache: several caches (parts) of the same sequences; each part serves some layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, reduce, wraps
from inspect import signature
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import Cache, merge
from jaxkv.cache_spec import CacheSpec
from jaxkv.core.array_utils import nbytes
from jaxkv.core.partitioning import ShardingRules
from jaxkv.core.pytree import pytree_dataclass, static_field
from jaxkv.core.repr import format_bytes
from jaxkv.draw.cell_view import CellView
from jaxkv.plan import Reason
from jaxkv.spec import TableSpec
from jaxkv.table import (
    Admission,
    CacheTable,
    EditCheck,
    MaintenancePlan,
    SequenceStatus,
    join_checks,
)
from jaxkv.ubatch import Ubatch, ubatch_of_part

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, PyTree, UInt32

    from jaxkv.core.types import AnyMesh


R = TypeVar("R")

Layers = tuple[tuple[int, ...], ...]

OWN = "buffers", "num_shared_cells"
"""Names of arguments with one item for each part; None is passed on to each part."""

# Elementwise rules that combine arrays of equal shape, one array from each part.
_all = partial(reduce, jnp.logical_and)
_any = partial(reduce, jnp.logical_or)
_sum = partial(reduce, jnp.add)
_largest = partial(reduce, jnp.maximum)
_smallest = partial(reduce, jnp.minimum)


def _combine_first_positions(firsts: list[Int32[Array, ""]]) -> Int32[Array, ""]:
    """Return the largest of the first positions of a sequence in the parts; -1 if one is -1."""
    return jnp.where(_smallest(firsts) < 0, -1, _largest(firsts))


def _combine_admissions(admissions: list[Admission]) -> Admission:
    """Return which sequences fit in every part."""
    # All parts admit sequences in the same order: the sequence with the fewest tokens first.
    fits, remaining = zip(*admissions, strict=True)
    return Admission(fits=_all(fits), num_remaining=_smallest(remaining))


def _with_part_tables(table: HybridTable, parts: list[CacheTable]) -> HybridTable:
    return replace(table, parts=tuple(parts))


def _combine_parts_and_buffers(
    table: HybridTable, pairs: list[tuple[PyTree, PyTree]]
) -> tuple[HybridTable, PyTree]:
    parts, buffers = zip(*pairs, strict=True)
    return replace(table, parts=parts), None if buffers[0] is None else buffers


def _commit_if_all_ok(
    table: HybridTable, answers: list[tuple[CacheTable, EditCheck]]
) -> tuple[HybridTable, EditCheck]:
    """Return the edited table, or the old table if the edit is refused."""
    parts, checks = zip(*answers, strict=True)
    changed = replace(table, parts=parts)
    present = jnp.ones(table.spec.sequences, bool)
    ends_differ = (
        changed.sequence_status(present).context_evicted
        & ~table.sequence_status(present).context_evicted
    )
    check = join_checks(*checks, (~jnp.any(ends_differ), Reason.PARTS_DIFFER))
    table = jax.tree.map(lambda new, old: jnp.where(check.ok, new, old), changed, table)
    return table, check


def _combine_copy_answers(
    table: HybridTable, answers: list[tuple[EditCheck, jax.Array]]
) -> tuple[EditCheck, jax.Array]:
    """Return whether a copy is possible in all parts, and the last position of each target."""
    checks, ends = zip(*answers, strict=True)
    pairs = zip(table.parts, ends, strict=True)
    ends = [end for part, end in pairs if table._is_planned_part(part)]
    same = jnp.all(_all([end == ends[0] for end in ends]))
    return join_checks(*checks, (same, Reason.PARTS_DIFFER)), ends[0]


def _combine_plans(table: HybridTable, plans: list[MaintenancePlan]) -> HybridMaintenancePlan:
    return HybridMaintenancePlan(parts=tuple(plans), spec=table.spec)


def _make_parts_method(
    method: Callable[..., R], rule: Callable[..., R], which: str = "parts"
) -> Callable[..., R]:
    """Return a method that calls `method` of each part, and combines the results by `rule`."""
    per_part = {i for i, name in enumerate(signature(method).parameters, -1) if name in OWN}

    def call_parts(table: HybridTable, *args: PyTree, **options: PyTree) -> R:
        parts = getattr(table, which)
        arguments = [
            arg if i in per_part and arg is not None else (arg,) * len(parts)
            for i, arg in enumerate(args)
        ]
        calls = zip([getattr(part, method.__name__) for part in parts], *arguments, strict=True)
        return rule(table, [ask(*those, **options) for ask, *those in calls])

    return wraps(method, updated=())(call_parts)  # copying `__dict__` would mark it as abstract


def _make_parts_query(
    method: Callable[..., R], rule: Callable[..., R], which: str = "parts"
) -> Callable[..., R]:
    return _make_parts_method(method, lambda _, returned: rule(returned), which)


@pytree_dataclass
class HybridMaintenancePlan(MaintenancePlan):
    """Plan of an update or a defrag of all parts of a hybrid table."""

    parts: tuple[MaintenancePlan, ...]
    spec: TableSpec = static_field()

    @property
    def num_changes(self) -> Int32[Array, ""]:
        """Number of keys that an update rotates, or of cells that a defrag moves, in all parts."""
        return _sum([part.num_changes for part in self.parts])

    def is_current(self, table: HybridTable) -> Bool[Array, ""]:
        """Return whether the plans of all parts are current."""
        parts = zip(self.parts, table.parts, strict=True)
        return _all([plan.is_current(part) for plan, part in parts])

    def commit(
        self, table: HybridTable, buffers: tuple, ok: Bool[Array, ""]
    ) -> tuple[HybridTable, tuple]:
        """Apply the plans of all parts if `ok` is True."""
        parts = zip(self.parts, table.parts, buffers, strict=True)
        return _combine_parts_and_buffers(
            table, [plan.commit(part, arrays, ok) for plan, part, arrays in parts]
        )


@pytree_dataclass
class HybridTable(CacheTable):
    """Table of a hybrid cache: the tables of its parts.

    layers: For each part, a tuple of the numbers that its layers have in the model. Static.
    """

    parts: tuple[CacheTable, ...]
    layers: Layers = static_field()

    def pair_parts_with_buffers(self, buffers: tuple) -> tuple[tuple[CacheTable, PyTree], ...]:
        """Return pairs of a part and its buffers."""
        return tuple(zip(self.parts, buffers, strict=True))

    num_cells_saved_by_sharing = _make_parts_query(CacheTable.num_cells_saved_by_sharing, tuple)
    num_used_cells = _make_parts_query(CacheTable.num_used_cells, _sum)
    nonempty_sequences = _make_parts_query(CacheTable.nonempty_sequences, _any)
    owns_same_cells = _make_parts_query(CacheTable.owns_same_cells, _all)
    can_allocate = _make_parts_query(CacheTable.can_allocate, partial(np.all, axis=0))
    can_seq_select = _make_parts_query(CacheTable.can_seq_select, _all)
    can_seq_add = _make_parts_query(CacheTable.can_seq_add, _all)
    can_resume = _make_parts_query(CacheTable.can_resume, _all)
    seq_pos_min = _make_parts_query(
        CacheTable.seq_pos_min, _combine_first_positions, "_planned_parts"
    )
    seq_pos_max = _make_parts_query(CacheTable.seq_pos_max, _smallest, "_planned_parts")
    find_fitting_sequences = _make_parts_query(
        CacheTable.find_fitting_sequences, _combine_admissions, "_planned_parts"
    )

    seq_keep = _make_parts_method(CacheTable.seq_keep, _with_part_tables)
    clear = _make_parts_method(CacheTable.clear, _with_part_tables)
    seq_rm = _make_parts_method(CacheTable.seq_rm, _commit_if_all_ok)
    seq_add = _make_parts_method(CacheTable.seq_add, _commit_if_all_ok)
    seq_div = _make_parts_method(CacheTable.seq_div, _commit_if_all_ok)
    seq_cp = _make_parts_method(CacheTable.seq_cp, _combine_parts_and_buffers)
    can_seq_cp = _make_parts_method(CacheTable.can_seq_cp, _combine_copy_answers)
    seq_select = _make_parts_method(CacheTable.seq_select, _combine_parts_and_buffers)
    plan_shift = _make_parts_method(CacheTable.plan_shift, _combine_plans)
    plan_defrag = _make_parts_method(CacheTable.plan_defrag, _combine_plans)

    def evict(self, keep: tuple, is_asked: Bool[Array, " Q"]) -> tuple[HybridTable, EditCheck]:
        """Remove cells of each part by the mask of the part."""
        if not isinstance(keep, tuple) or len(keep) != len(self.parts):
            raise ValueError(
                f"expected a tuple with a mask or None for each of {len(self.parts)} parts, got "
                f"{keep!r:.60}; see cache.parts"
            )
        pairs = zip(self.parts, keep, strict=True)
        return _commit_if_all_ok(self, [part.evict(mask, is_asked) for part, mask in pairs])

    def get_fields(self) -> dict[str, tuple]:
        """Return a tuple for each name: the field of each part, None if the part lacks it."""
        of_parts = [part.get_fields() for part in self.parts]
        names = sorted({name for fields in of_parts for name in fields})
        return {name: tuple(fields.get(name) for fields in of_parts) for name in names}

    def with_fields(self, values: Mapping[str, tuple]) -> HybridTable:
        """Replace user fields of the parts; None leaves a part unchanged."""
        for name, entries in values.items():
            if not isinstance(entries, tuple) or len(entries) != len(self.parts):
                raise ValueError(
                    f"expected a tuple with an array or None for each of {len(self.parts)} parts "
                    f"for the field {name!r}, got {entries!r:.60}; see cache.parts"
                )
        parts = [
            part.with_fields({name: x[i] for name, x in values.items() if x[i] is not None})
            for i, part in enumerate(self.parts)
        ]
        return replace(self, parts=tuple(parts))

    def can_insert(
        self, source: HybridTable, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
    ) -> EditCheck:
        """Return whether all parts can insert sequences of the parts of `source`."""
        pairs = zip(self.parts, source.parts, strict=True)
        return join_checks(*(part.can_insert(other, parents, targets) for part, other in pairs))

    def insert(
        self,
        buffers: tuple,
        source: HybridTable,
        source_buffers: tuple,
        parents: Int32[Array, " n"],
        targets: Int32[Array, " n"],
    ) -> tuple[HybridTable, tuple]:
        """Replace each target by its parent, in each part."""
        pairs = self.pair_parts_with_buffers(buffers)
        others = source.pair_parts_with_buffers(source_buffers)
        return _combine_parts_and_buffers(
            self,
            [
                part.insert(arrays, *other, parents, targets)
                for (part, arrays), other in zip(pairs, others, strict=True)
            ],
        )

    def make_empty_like(
        self, buffers: tuple, sequences: int, num_cells: tuple[int, ...]
    ) -> tuple[HybridTable, tuple]:
        """Return an empty table and buffers of one stream, see `CacheTable`."""
        pairs = zip(self.pair_parts_with_buffers(buffers), num_cells, strict=True)
        return _combine_parts_and_buffers(
            self, [part.make_empty_like(arrays, sequences, (n,)) for (part, arrays), n in pairs]
        )

    @property
    def spec(self) -> TableSpec:
        """Static configuration of the table."""
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
        """Return the `CacheSpec` of a cache with this table and the given buffers."""
        parts = zip(self.parts, buffers, self.layers, strict=True)
        return CacheSpec.hybrid(
            *((part.cache_spec(arrays), layers) for part, arrays, layers in parts)
        )

    def describe(self, buffers: tuple) -> str:
        """Return kinds, sizes and bytes of the parts, for the `repr` of a cache."""
        parts = [f"({part.describe(x)})" for part, x in self.pair_parts_with_buffers(buffers)]
        return f"hybrid of {' + '.join(parts)}, {format_bytes(nbytes((self, buffers)))}"

    def titles(self) -> list[str]:
        """Return the number and the layers of each part."""
        layers = [", ".join(map(str, numbers)) for numbers in self.layers]
        return [f"part {i}, layers {numbers}" for i, numbers in enumerate(layers)]

    def cell_views(self) -> dict[str, CellView]:
        """Return the cells of each part, by title; all arrays must be NumPy arrays."""
        views = (part.view_cells() for part in self.parts)
        return dict(zip(self.titles(), views, strict=True))

    def view_cells(self) -> CellView:
        """Raise a TypeError."""
        raise TypeError(
            "expected a cache of one kind, got a hybrid one; look at each of cache.parts"
        )

    def to_text(self, width: int | None) -> str:
        """Draw each part below its title; all arrays must be NumPy arrays."""
        texts = [part.to_text(width) for part in self.parts]
        return "\n".join(
            f"{title}\n{text}" for title, text in zip(self.titles(), texts, strict=True)
        )

    @property
    def is_batch(self) -> bool:
        """Whether a part has a leading batch axis."""
        return any(part.is_batch for part in self.parts)

    def with_sharding_rules(self, sharding_rules: ShardingRules | None) -> HybridTable:
        """Return the table with the given sharding rules in all parts."""
        parts = tuple(part.with_sharding_rules(sharding_rules) for part in self.parts)
        return replace(self, parts=parts, sharding_rules=sharding_rules)

    def buffer_specs(self, buffers: tuple, mesh: AnyMesh) -> tuple:
        """Return a `PartitionSpec` for each array of the buffers."""
        pairs = self.pair_parts_with_buffers(buffers)
        return tuple(part.buffer_specs(arrays, mesh) for part, arrays in pairs)

    def num_layers(self, buffers: tuple) -> int:
        """Return one more than the highest layer number of all parts."""
        del buffers
        return 1 + max(layer for layers in self.layers for layer in layers)

    def check_buffers(self, buffers: tuple) -> None:
        """Raise unless `buffers` has one entry for each part, and each entry fits its part."""
        if len(buffers) != len(self.parts):
            raise ValueError(
                f"expected the buffers of {len(self.parts)} parts, got {len(buffers)}; join the "
                f"table and the buffers of one cache"
            )
        for part, arrays in zip(self.parts, buffers, strict=True):
            part.check_buffers(arrays)

    def check_can_shift(self, buffers: tuple) -> None:
        """Raise ValueError if an attention layer was made without the argument `rope`."""
        for part, arrays in zip(self.parts, buffers, strict=True):
            part.check_can_shift(arrays)

    def as_encoder_table(self) -> HybridTable:
        """Return the table for which `init_batch` plans encoder sources."""
        if not self.spec.has_cross_attention:
            return super().as_encoder_table()
        return _EncoderHybridTable(
            parts=self.parts, layers=self.layers, sharding_rules=self.sharding_rules
        )

    def _is_planned_part(self, part: CacheTable) -> bool:
        """Return whether plans for this table store tokens in the part."""
        return not part.spec.is_cross_attention

    @property
    def _planned_parts(self) -> list[CacheTable]:
        return [part for part in self.parts if self._is_planned_part(part)]

    def compare_last_tokens(
        self, sequences: Int32[Array, " Z"], contents: UInt32[Array, " Z"]
    ) -> tuple[UInt32[Array, " Z"], Bool[Array, " Z"]]:
        """Return the result of one planned part, which is an attention part if there is one."""
        parts = sorted(self._planned_parts, key=lambda part: part.spec.kind != "attention")
        return parts[0].compare_last_tokens(sequences, contents)

    def sequence_status(self, present: Bool[Array, " Q"]) -> SequenceStatus:
        """Combine the status of all parts; if `last` differs, `context_evicted` is True."""
        statuses = [part.sequence_status(present) for part in self._planned_parts]
        last = _largest([status.last for status in statuses])
        ends_differ = present & _any([status.last != last for status in statuses])
        return SequenceStatus(
            last=last,
            context_evicted=ends_differ | _any([status.context_evicted for status in statuses]),
            shift_pending=_any([status.shift_pending for status in statuses]),
        )

    def choose_slots(self, ubatch: Ubatch) -> tuple[tuple, Bool[Array, ""]]:
        """Return the slots of each part, and whether every token has a cell in every part."""
        slots, oks = [], []
        for part in self.parts:
            if self._is_planned_part(part):
                part_slots, ok = part.choose_slots(ubatch)
                oks.append(ok)
            else:
                part_slots = part.slots_when_skipped(ubatch)
            slots.append(part_slots)
        return tuple(slots), _all(oks)

    def occupy(self, ubatch: Ubatch) -> HybridTable:
        """Store the tokens of a ubatch in each part that has slots for the ubatch."""
        parts = [
            part if slots is None else part.occupy(ubatch_of_part(ubatch, i))
            for i, (part, slots) in enumerate(zip(self.parts, ubatch.slots, strict=True))
        ]
        return replace(self, parts=tuple(parts))

    @property
    def version(self) -> tuple[PyTree[UInt32[Array, " S"]], ...]:
        """Version of each stream in each part."""
        return tuple(part.version for part in self.parts)

    def advance_version(self, old: HybridTable) -> HybridTable:
        """Return the table after an edit, with new versions of the streams changed in each part."""
        pairs = zip(self.parts, old.parts, strict=True)
        return replace(self, parts=tuple(new.advance_version(was) for new, was in pairs))

    def rewind(self, old: HybridTable) -> tuple[HybridTable, Bool[Array, ""]]:
        """Return `old` with rewound parts, and whether every part of `old` can be restored."""
        pairs = zip(self.parts, old.parts, strict=True)
        parts, granted = zip(*(part.rewind(was) for part, was in pairs), strict=True)
        return replace(old, parts=parts), _all(granted)

    def violations_by_invariant(self) -> dict[str, Int32[Array, ""]]:
        """Return the number of violations of each invariant in each part."""
        return {
            f"part {i}: {name}": number
            for i, part in enumerate(self.parts)
            for name, number in part.violations_by_invariant().items()
        }

    def max_rollback(self, buffers: tuple, layer: int) -> int:
        """Return E, the number of earlier states that a recurrent layer stores."""
        i, *_ = self.find_layer("states", layer)
        return self.parts[i].max_rollback(buffers[i], self.layers[i].index(layer))

    def layer_paths(self, verb: str, layer: int) -> list[tuple[int, ...]]:
        """Return the path of each layer with this number that serves `verb`, see `CacheTable`."""
        return [
            (i, *path)
            for i, (part, layers) in enumerate(zip(self.parts, self.layers, strict=True))
            if layer in layers
            for path in part.layer_paths(verb, layers.index(layer))
        ]

    def find_layer(self, verb: str, layer: int) -> tuple[int, ...]:
        """Return the path of a layer; raise if no part has such a layer for `verb`."""
        for path in self.layer_paths(verb, layer):
            return path
        numbers = sorted({layer for layers in self.layers for layer in layers})
        numbers = [number for number in numbers if self.layer_paths(verb, number)]
        kind = "attention" if verb == "attend" else "recurrent"
        raise ValueError(
            f"expected one of the {kind} layers {numbers}, got {layer}; pass a layer of a part in "
            "cache.parts"
        )

    def layers_to_write(
        self, buffers: tuple, ubatch: Ubatch
    ) -> list[tuple[tuple[int, ...], str, int]]:
        """Return each layer that a model must write for a ubatch: its path, verb and number."""
        return [
            ((i, *path), verb, self.layers[i][number])
            for i, (part, slots) in enumerate(zip(self.parts, ubatch.slots, strict=True))
            if slots is not None
            for path, verb, number in part.layers_to_write(buffers[i], ubatch_of_part(ubatch, i))
        ]


@pytree_dataclass
class _EncoderHybridTable(HybridTable):
    """Hybrid table for planning of encoder sources; no cache contains such a table."""

    def _is_planned_part(self, part: CacheTable) -> bool:
        return part.spec.is_cross_attention


def compose_hybrid_cache(*parts: tuple[Cache, tuple[int, ...]]) -> Cache:
    """Combine pairs of a cache and its layer numbers into a hybrid cache."""
    whole = CacheSpec.hybrid(*((cache.spec, numbers) for cache, numbers in parts))
    caches, layers = (
        tuple(cache for cache, _ in parts),
        tuple(numbers for _, numbers in whole.parts),
    )
    for name in ("sequences", "streams"):
        counts = [getattr(cache.table.spec, name) for cache in caches]
        if len(set(counts)) > 1:
            raise ValueError(
                f"expected parts with the same number of {name}, got {counts}; make all of them "
                f"with the same {name}="
            )
    tables = tuple(cache.table for cache in caches)
    table = HybridTable(parts=tables, layers=layers, sharding_rules=tables[0].sharding_rules)
    return merge(table, tuple(cache.buffers for cache in caches))
