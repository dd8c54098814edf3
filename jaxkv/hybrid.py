"""Several memories that step together, each for some of a model's layers.

All parts or none: a batch, a cut or a ubatch that one part refuses changes none of them. The parts
may be of any kind. What is known of them here is the contract of `jaxkv.memory`, nothing else.
"""

from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv import memory as contract
from jaxkv.batch import Ubatch

Layers = tuple[tuple[int, ...], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class HybridTable:
    """The tables of the parts."""

    parts: tuple[Any, ...]
    layers: Layers = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class HybridPlan:
    """What is to be done to each part: the plans of an update, or of a defrag."""

    parts: tuple[Any, ...]

    @property
    def pending(self) -> jax.Array:
        """How many keys an update rotates, over all parts; `[]` int32."""
        return jnp.sum(jnp.stack([part.pending for part in self.parts]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class HybridCache:
    """Memories that step together.

    parts: the memories.
    layers: for each part the layers of the model that it serves, in its own order, static. A layer
      that uses several memories, such as attention beside a recurrence, is listed in each.
    """

    parts: tuple[Any, ...]
    layers: Layers = field(metadata={"static": True})


def make_hybrid_cache(*parts: tuple[Any, tuple[int, ...]]) -> HybridCache:
    """Compose memories into one.

    Args:
      parts: pairs of a memory and the layers of the model that it serves, in its own order. All are
        made with the same `sequences` and `streams`, so that a verb means the same in each: where
        `seq_cp` shares cells, `seq_add` moves them for whoever shares them.

    Raises:
      ValueError: when the parts know different numbers of sequences, only some of them share cells,
        or there are none.

    Examples:
      Layers 0, 1, 3 and 4 look back 4 positions, and layers 2 and 5 at everything:

      >>> sizes = dict(heads=1, size=2, sequences=2)
      >>> memory = make_hybrid_cache(
      ...     (make_kv_cache(layers=4, window=standard(4), ubatch_size=4, **sizes), (0, 1, 3, 4)),
      ...     (make_kv_cache(layers=2, cells=64, **sizes), (2, 5)),
      ... )
      >>> memory = apply(memory, init_batch(memory, make_batch([1, 2, 3])))
      >>> used(memory)
      (Array(3, dtype=int32), Array(3, dtype=int32))

    llama.cpp: `llama_kv_cache_iswa`, `llama_memory_hybrid`.
    """
    if not parts:
        raise ValueError("a hybrid cache needs at least one part")
    memories, layers = zip(*parts, strict=True)
    tables = [contract.split(memory)[0] for memory in memories]
    counts = [*map(contract.table_sequences, tables)]
    if len(set(counts)) > 1:
        raise ValueError(f"wanted parts with the same number of sequences, got {counts}")
    streams = [counts[0] if contract.table_apart(table) else 1 for table in tables]
    if len(set(streams)) > 1:
        raise ValueError(
            f"wanted parts with the same streams, got {streams}: verbs would mean different things "
            f"in them; make all with streams=1, or all with streams={counts[0]}"
        )
    return HybridCache(parts=memories, layers=tuple(map(tuple, layers)))


def parts_of(memory: HybridCache, layer: int, verb: Any) -> list[tuple[int, int]]:
    """List the parts that serve a layer and understand a verb, each with its own number for it."""
    return [
        (i, layers.index(layer))
        for i, (part, layers) in enumerate(zip(memory.parts, memory.layers, strict=True))
        if layer in layers and _understands(part, layers.index(layer), verb)
    ]


def _understands(part: Any, layer: int, verb: Any) -> bool:
    if isinstance(part, HybridCache):
        return bool(parts_of(part, layer, verb))
    return verb.dispatch(type(part)) is not verb.dispatch(object)


def serving(memory: HybridCache, verb: Any, layer: int) -> tuple[int, int]:
    """Find the one part that does for a layer what a verb says, and its own number for it."""
    found = parts_of(memory, layer, verb)
    if len(found) != 1:
        known = sorted({layer for layers in memory.layers for layer in layers})
        raise ValueError(
            f"wanted a layer that one part serves, of {known}, got {layer}, which {len(found)} do"
        )
    return found[0]


def _with_part(memory: HybridCache, i: int, part: Any) -> HybridCache:
    return replace(memory, parts=(*memory.parts[:i], part, *memory.parts[i + 1 :]))


@contract.attend.register
def _attend(
    memory: HybridCache, layer: int, ubatch: Ubatch, *args: Any, **options: Any
) -> tuple[HybridCache, jax.Array]:
    i, inner = serving(memory, contract.attend, layer)
    part, out = contract.attend(memory.parts[i], inner, _of_part(ubatch, i), *args, **options)
    return _with_part(memory, i, part), out


@contract.read_states.register
def _read_states(memory: HybridCache, layer: int, ubatch: Ubatch) -> dict[str, jax.Array]:
    i, inner = serving(memory, contract.read_states, layer)
    return contract.read_states(memory.parts[i], inner, _of_part(ubatch, i))


@contract.write_states.register
def _write_states(memory: HybridCache, layer: int, ubatch: Ubatch, states: Any) -> HybridCache:
    i, inner = serving(memory, contract.write_states, layer)
    part = contract.write_states(memory.parts[i], inner, _of_part(ubatch, i), states)
    return _with_part(memory, i, part)


@contract.states_kept.register
def _states_kept(memory: HybridCache, layer: int) -> int:
    i, inner = serving(memory, contract.states_kept, layer)
    return contract.states_kept(memory.parts[i], inner)


@contract.split.register
def _split(memory: HybridCache) -> tuple[HybridTable, tuple[Any, ...]]:
    tables, rows = zip(*map(contract.split, memory.parts), strict=True)
    return HybridTable(parts=tables, layers=memory.layers), rows


@contract.join.register
def _join(table: HybridTable, rows: tuple[Any, ...]) -> HybridCache:
    parts = tuple(contract.join(part, row) for part, row in zip(table.parts, rows, strict=True))
    return HybridCache(parts=parts, layers=table.layers)


def _of_part(ubatch: Ubatch, i: int) -> Ubatch:
    return replace(ubatch, slots=ubatch.slots[i])


def _all(answers: list[jax.Array]) -> jax.Array:
    return reduce(jnp.logical_and, answers)


def _any(answers: list[jax.Array]) -> jax.Array:
    return reduce(jnp.logical_or, answers)


def _every(verb: Any):
    """Do what a verb says to each part."""

    def done(table: HybridTable, *args: Any) -> HybridTable:
        return replace(table, parts=tuple(verb(part, *args) for part in table.parts))

    return done


def _together(verb: Any, join_answers: Any):
    """Ask each part, and make one answer of theirs."""
    return lambda table, *args: join_answers([verb(part, *args) for part in table.parts])


def _largest(answers: list[jax.Array]) -> jax.Array:
    return reduce(jnp.maximum, answers)


def _smallest(answers: list[jax.Array]) -> jax.Array:
    return reduce(jnp.minimum, answers)


def _first(table: HybridTable, seq: jax.Array) -> jax.Array:
    """What all parts hold begins where the last of them begins; nothing if one is empty."""
    found = [contract.table_first(part, seq) for part in table.parts]
    return jnp.where(_smallest(found) < 0, -1, _largest(found))


def _ubatch_size(table: HybridTable) -> int | None:
    sizes = [contract.table_ubatch_size(part) for part in table.parts]
    return min((size for size in sizes if size is not None), default=None)


def _reached(table: HybridTable, present: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A sequence whose parts end at different positions cannot go on in all of them."""
    ends, agreed = zip(
        *(contract.table_reached(part, present) for part in table.parts), strict=True
    )
    last = _largest([*ends])
    return last, _all([*agreed, *(end == last for end in ends)])


def _admit(table: HybridTable, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each part orders the sequences in the same way, so those who fit everywhere fit together."""
    fits, room = zip(*(contract.table_admit(part, wanted) for part in table.parts), strict=True)
    return _all([*fits]), _smallest([*room])


def _place(table: HybridTable, ubatch: Ubatch, ok: jax.Array) -> tuple[Any, jax.Array]:
    slots, faults = zip(
        *(contract.table_place(part, ubatch, ok) for part in table.parts), strict=True
    )
    return slots, _largest([*faults])


def _fresh(table: HybridTable, ubatch: Ubatch) -> jax.Array:
    answers = [
        contract.table_fresh(part, _of_part(ubatch, i)) for i, part in enumerate(table.parts)
    ]
    return _all(answers)


def _fill(table: HybridTable, ubatch: Ubatch) -> HybridTable:
    parts = [contract.table_fill(part, _of_part(ubatch, i)) for i, part in enumerate(table.parts)]
    return replace(table, parts=tuple(parts))


def _rm(table: HybridTable, *args: jax.Array) -> tuple[HybridTable, jax.Array]:
    ok = _can_rm(table, *args)
    cut = replace(table, parts=tuple(contract.table_rm(part, *args)[0] for part in table.parts))
    return jax.tree.map(lambda new, old: jnp.where(ok, new, old), cut, table), ok


def _copy_rows(table: HybridTable, rows: tuple, *args: jax.Array) -> tuple[HybridTable, tuple]:
    done = []
    for part, part_rows in zip(table.parts, rows, strict=True):
        if contract.copies_rows(part):
            done.append(contract.copy_rows(part, part_rows, *args))
        else:
            done.append((contract.table_cp(part, *args), part_rows))
    tables, rows = zip(*done, strict=True)
    return replace(table, parts=tables), rows


def _paired(verb: Any, join_answers: Any):
    """Hand each part what an older table knew of it."""

    def done(table: HybridTable, old: HybridTable) -> Any:
        pairs = zip(table.parts, old.parts, strict=True)
        return join_answers([verb(part, was) for part, was in pairs])

    return done


def _restored(table: HybridTable, old: HybridTable) -> HybridTable:
    pairs = zip(table.parts, old.parts, strict=True)
    return replace(old, parts=tuple(contract.table_restored(part, was) for part, was in pairs))


def _faults(table: HybridTable) -> dict[str, jax.Array]:
    return {
        f"part {i}: {name}": count
        for i, part in enumerate(table.parts)
        for name, count in contract.table_faults(part).items()
    }


def _planned(verb: Any):
    return lambda table, *args: HybridPlan(parts=tuple(verb(part, *args) for part in table.parts))


@contract.carry_out.register
def _carry_out(plan: HybridPlan, table: HybridTable, rows: tuple) -> tuple[HybridTable, tuple]:
    done = [contract.carry_out(*part) for part in zip(plan.parts, table.parts, rows, strict=True)]
    tables, rows = zip(*done, strict=True)
    return replace(table, parts=tables), rows


@contract.nothing_to_do.register
def _nothing_to_do(plan: HybridPlan) -> bool:
    return all(map(contract.nothing_to_do, plan.parts))


_can_rm = _together(contract.table_can_rm, _all)

contract.table_sequences.register(
    HybridTable, lambda table: contract.table_sequences(table.parts[0])
)
contract.table_streams.register(HybridTable, _together(contract.table_streams, max))
contract.table_apart.register(HybridTable, lambda table: contract.table_apart(table.parts[0]))
contract.table_ubatch_size.register(HybridTable, _ubatch_size)
contract.table_digest.register(HybridTable, _together(contract.table_digest, sum))
contract.table_first.register(HybridTable, _first)
contract.table_last.register(HybridTable, _together(contract.table_last, _smallest))
contract.table_used.register(HybridTable, _together(contract.table_used, tuple))
contract.table_reached.register(HybridTable, _reached)
contract.table_lost.register(HybridTable, _together(contract.table_lost, _any))
contract.table_owing.register(HybridTable, _together(contract.table_owing, _any))
contract.table_admit.register(HybridTable, _admit)
contract.table_place.register(HybridTable, _place)
contract.table_fresh.register(HybridTable, _fresh)
contract.table_fill.register(HybridTable, _fill)
contract.table_rm.register(HybridTable, _rm)
contract.table_cp.register(HybridTable, _every(contract.table_cp))
contract.copies_rows.register(HybridTable, _together(contract.copies_rows, any))
contract.copy_rows.register(HybridTable, _copy_rows)
contract.table_keep.register(HybridTable, _every(contract.table_keep))
contract.table_clear.register(HybridTable, _every(contract.table_clear))
contract.table_add.register(HybridTable, _every(contract.table_add))
contract.table_div.register(HybridTable, _every(contract.table_div))
contract.table_can_rm.register(HybridTable, _can_rm)
contract.table_can_resume.register(HybridTable, _together(contract.table_can_resume, _all))
contract.table_update.register(HybridTable, _planned(contract.table_update))
contract.table_defrag.register(HybridTable, _planned(contract.table_defrag))
contract.table_unwritten.register(HybridTable, _paired(contract.table_unwritten, _all))
contract.table_restored.register(HybridTable, _restored)
contract.table_faults.register(HybridTable, _faults)
