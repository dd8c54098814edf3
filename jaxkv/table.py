"""Contract of cache tables: the methods that edits, plans and loops call.

Subclasses of `CacheTable` are `CellTable` (attention), `CrossAttentionTable` (encoder sources),
`StateTable` (recurrence) and `HybridTable` (several tables that step together).
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self, SupportsIndex, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxkv.batch import Ubatch
from jaxkv.core.array_utils import is_traced, nbytes
from jaxkv.core.partitioning import Partitioned
from jaxkv.spec import check_spec

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Int32, PyTree, Shaped, UInt32

    from jaxkv.cache_spec import CacheSpec
    from jaxkv.core.partitioning import ShardingRules
    from jaxkv.core.types import AnyMesh
    from jaxkv.spec import TableSpec

R = TypeVar("R")


class SequenceStatus(NamedTuple):
    """Status of the sequences in a batch.

    last: Last position that a sequence reached; -1 if it is empty or was not asked for.
    missing: Whether the token at `last + 1` attends to a position whose cell or state is missing.
    pending: Whether the sequence owns a key with a pending shift.
    """

    last: Int32[Array, " Q"]
    missing: Bool[Array, " Q"]
    pending: Bool[Array, " Q"]


class Admission(NamedTuple):
    """Which sequences fit into the free cells.

    fits: Whether the tokens of a sequence fit; sequences with fewer tokens are admitted first.
    together: Whether they certainly fit if the batch contains these sequences only.
    num_remaining: Number of cells left after placing the sequences that fit.
    """

    fits: Bool[Array, " Q"]
    together: Bool[Array, " Q"]
    num_remaining: Int32[Array, " Q"]


class KVView(NamedTuple):
    """Keys and values that P lists of T tokens attend to in a layer.

    Unpacks into k, v, mask and positions. The rows of one stream form one list, in order; if each
    sequence has its own stream, each row is a list.

    k: Keys of the cells of each list's stream, in the dtype of the buffers; float32 if quantised.
    v: Values of these cells, in the same dtype.
    mask: Which cells each token attends to.
    positions: Position of each cell; -1 if empty.
    """

    k: Float[Array, "P K N D"]
    v: Float[Array, "P K N Dv"]
    mask: Bool[Array, "P T N"]
    positions: Int32[Array, "P N"]


class MaintenancePlan(Partitioned):
    """Plan of an update or a defrag: changes to a table and its buffers.

    spec: Spec of the cache that was planned for, static.
    """

    spec: TableSpec

    @property
    @abstractmethod
    def pending(self) -> Int32[Array, ""]:
        """Number of keys to rotate, or of cells to move."""

    @property
    def is_empty(self) -> bool:
        """Whether `pending` is 0; the plan must have concrete values."""
        return not self.pending

    @abstractmethod
    def is_current(self, table: Any) -> Bool[Array, ""]:
        """Return whether the parts of a table that the plan depends on are unchanged."""

    @abstractmethod
    def commit(self, table: Any, buffers: PyTree, ok: Bool[Array, ""]) -> tuple[Any, PyTree]:
        """Apply the plan if `ok`, else return the table and buffers unchanged."""

    def partition_by(self, sharding_rules: ShardingRules, mesh: AnyMesh) -> P:
        """Return one `PartitionSpec` for all arrays: that of the streams."""
        return P(sharding_rules.split(mesh, streams=self.spec.streams)["streams"])


def assignable(method: Callable[..., R]) -> Callable[..., R]:
    """Allow a subclass to define a method by assigning a function.

    Type checkers then compare return types only. `tests/cells/test_contract.py` compares the names
    of the arguments.
    """
    return method


class CacheTable(Partitioned):
    """Table of a cache: the methods that edits, plans and loops call.

    An id outside `[0, Q)` leaves the table unchanged. Ranges of positions are `start` to `stop` -
    1: a negative start means 0, a negative stop means no end, and a stop of 0 is an empty range.
    `ok` is False for a refused edit, which leaves the table unchanged.
    """

    @property
    @abstractmethod
    def spec(self) -> TableSpec:
        """Static configuration of the cache."""

    @abstractmethod
    def cache_spec(self, buffers: PyTree) -> CacheSpec:
        """Return the `CacheSpec` of the layers that the cache with these buffers serves."""

    @property
    @abstractmethod
    def is_batch(self) -> bool:
        """Whether the arrays have a leading batch axis of caches, as `vmap` adds it."""

    sharding_rules: ShardingRules | None
    """Mesh axes that split the cache; None on one device."""

    @abstractmethod
    def with_sharding_rules(self, sharding_rules: ShardingRules | None) -> Self:
        """Return the table with other sharding rules."""

    @abstractmethod
    def partition_specs(self, buffers: PyTree, mesh: AnyMesh) -> tuple[Self, PyTree]:
        """Return a `PartitionSpec` for each array of the table and the buffers (or None)."""

    def partition_by(self, sharding_rules: ShardingRules, mesh: AnyMesh) -> Self:
        """Return a `PartitionSpec` for each array, from the sharding rules of the table."""
        del sharding_rules  # those of the table
        return self.partition_specs(None, mesh)[0]

    def pair_parts_with_buffers(self, buffers: PyTree) -> tuple[tuple[CacheTable, PyTree], ...]:
        """Return pairs of part and buffers; a table that is not hybrid is its only part."""
        return ((self, buffers),)

    @property
    def nbytes(self) -> int:
        """Size of the table in bytes."""
        return nbytes(self)

    @abstractmethod
    def num_layers(self, buffers: PyTree) -> int:
        """Return L, the number of layers that the buffers serve."""

    @abstractmethod
    def check_buffers(self, buffers: PyTree) -> None:
        """Raise if the buffers have other streams or cells than the table."""

    def check_can_shift(self, buffers: PyTree) -> None:
        """Raise if the positions of cells with these buffers cannot change."""
        del buffers

    @abstractmethod
    @assignable
    def stream_hash(self) -> PyTree[UInt32[Array, " S"]]:
        """Return a hash of each stream's content; a tuple of them in a hybrid cache."""

    @abstractmethod
    @assignable
    def seq_pos_min(self, seq: Int32[Array, ""]) -> Int32[Array, ""]:
        """Return the smallest position of a sequence; -1 if it has none."""

    @abstractmethod
    @assignable
    def seq_pos_max(self, seq: Int32[Array, ""]) -> Int32[Array, ""]:
        """Return the largest position of a sequence; -1 if it has none."""

    @abstractmethod
    @assignable
    def compare_last_tokens(
        self, sequences: Int32[Array, " T"], contents: UInt32[Array, " T"]
    ) -> tuple[UInt32[Array, " T"], Bool[Array, " T"]]:
        """Return each sequence's last content hash, and whether it equals `contents`."""

    def nonempty_sequences(self) -> Bool[Array, " Q"]:
        """Return which sequences have a token, an evicted one, or an encoder source."""
        return self.sequence_status(jnp.ones(self.spec.sequences, bool)).last >= 0

    @abstractmethod
    @assignable
    def num_used_cells(self) -> Int32[Array, ""]:
        """Return the number of used cells."""

    @abstractmethod
    @assignable
    def sequence_status(self, present: Bool[Array, " Q"]) -> SequenceStatus:
        """Return the status of the sequences in a batch."""

    @abstractmethod
    @assignable
    def find_fitting_sequences(self, demand: Int32[Array, " Q"]) -> Admission:
        """Return which sequences find free cells for `demand` tokens each."""

    @assignable
    def owns_same_cells(self, partner: Int32[Array, " Q"]) -> Bool[Array, " Q"]:
        """Return whether each sequence owns exactly the cells of its partner.

        `partner` is a number within the stream. Caches with recurrent states raise TypeError.
        """
        del partner
        raise TypeError(
            f"expected a cache of attention alone, got kind {self.spec.kind!r}; use one that "
            "CacheSpec.attention describes"
        )

    @abstractmethod
    @assignable
    def num_cells_saved_by_sharing(self) -> PyTree[Int32[Array, " S"]]:
        """Return the cells saved by sharing in each stream: n - 1 for n owners."""

    @abstractmethod
    @assignable
    def can_allocate(
        self,
        lengths: Int[np.ndarray, " Q"],
        at_once: int,
        num_shared_cells: PyTree[Int[np.ndarray, " S"]],
    ) -> Bool[np.ndarray, " S"]:
        """Return which streams have enough cells for sequences of these lengths.

        The answer is valid for any order of arrival. Runs on the CPU and reads sizes only. A
        `contiguous` cache may need a defrag first.

        Args:
          lengths: Largest number of tokens of each sequence.
          at_once: Largest number of tokens of a stream that are computed at once.
          num_shared_cells: Current result of `num_cells_saved_by_sharing`, on the CPU.
        """

    @abstractmethod
    @assignable
    def choose_slots(self, ubatch: Ubatch) -> tuple[PyTree, Int32[Array, "R T"]]:
        """Return the slot of each token, and a `Reason` for each token."""

    def slots_when_skipped(self, ubatch: Ubatch) -> PyTree:
        """Return the slots of this part for a ubatch of other parts of a hybrid cache.

        None by default: operations of this part then reject the ubatch. A part with encoder sources
        returns slots, so that tokens attend to the sources.
        """
        del ubatch

    def as_encoder_table(self) -> Self:
        """Return the table that `init_batch(encoder=True)` plans encoder sources for."""
        raise TypeError(
            f"expected a cache with a part for sources, got kind {self.spec.kind!r}; make one of "
            f"CacheSpec.hybrid with a part of CacheSpec.cross_attention"
        )

    @abstractmethod
    @assignable
    def occupy(self, ubatch: Ubatch) -> Self:
        """Store the tokens of a ubatch in its slots."""

    def stream_hash_after(self, ubatch: Ubatch, occupied: Any) -> PyTree[UInt32[Array, " S"]]:
        """Return the `stream_hash` of the table that `occupy` returned for a ubatch."""
        del ubatch
        return occupied.stream_hash()

    @abstractmethod
    @assignable
    def seq_rm(
        self, seq: Int32[Array, ""], start: Int32[Array, ""], stop: Int32[Array, ""]
    ) -> tuple[Self, Bool[Array, ""]]:
        """Remove a range of a sequence, or of all sequences if -1; return also `ok`."""

    @abstractmethod
    @assignable
    def seq_cp(
        self,
        buffers: PyTree,
        src: Int32[Array, ""],
        dst: Int32[Array, "*n"],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
    ) -> tuple[Self, PyTree]:
        """Copy a range of a sequence to other sequences, if `can_seq_cp` returns True.

        Buffers may be None if all sequences are of one stream.
        """

    @abstractmethod
    @assignable
    def can_seq_cp(
        self,
        src: Int32[Array, ""],
        dst: Int32[Array, "*n"],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
    ) -> tuple[Bool[Array, ""], Int32[Array, " n"]]:
        """Return whether `seq_cp` is possible, and the targets' last positions after it.

        The position is -1 for a target that would be empty.
        """

    @abstractmethod
    @assignable
    def seq_select(
        self, buffers: PyTree, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
    ) -> tuple[Self, PyTree]:
        """Replace each target's content by its parent's, if `can_seq_select` is True.

        A target of Q is skipped. Buffers may be None if parents and targets are of the same stream.
        """

    @abstractmethod
    def can_seq_select(
        self, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
    ) -> Bool[Array, ""]:
        """Return whether `seq_select` is possible."""

    @abstractmethod
    @assignable
    def seq_keep(self, seq: Int32[Array, ""]) -> Self:
        """Remove all sequences except one."""

    @abstractmethod
    @assignable
    def clear(self) -> Any:  # Self, but pyright takes no function of the table alone for that
        """Remove all sequences."""

    @abstractmethod
    @assignable
    def seq_add(
        self,
        seq: Int32[Array, ""],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
        delta: Int32[Array, ""],
        gap: Int32[Array, ""] | None = None,
    ) -> tuple[Self, Bool[Array, ""]]:
        """Add `delta` to the positions of a range of a sequence; return the table and `ok`.

        `gap` is the lowest position from which no token, present or evicted, precedes the range;
        None if unknown.
        """

    @abstractmethod
    @assignable
    def can_seq_add(
        self,
        seq: Int32[Array, ""],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
        delta: Int32[Array, ""],
    ) -> Bool[Array, ""]:
        """Return whether positions remain unique in every sequence after `seq_add`."""

    @abstractmethod
    @assignable
    def seq_div(
        self,
        seq: Int32[Array, ""],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
        divisor: Int32[Array, ""],
    ) -> tuple[Self, Bool[Array, ""]]:
        """Floor-divide the positions of a range of a sequence; return the table and `ok`."""

    @abstractmethod
    @assignable
    def can_resume(self, seq: Int32[Array, ""], pos: Int32[Array, ""]) -> Bool[Array, ""]:
        """Return whether a sequence can continue at a position after it is cut there."""

    @abstractmethod
    def plan_shift(self) -> MaintenancePlan:
        """Return the plan of all pending shifts."""

    @abstractmethod
    def plan_defrag(self, max_moves: int | None) -> MaintenancePlan:
        """Return the plan of the moves that close gaps between used cells."""

    @abstractmethod
    @assignable
    def rewind(self, old: CacheTable) -> tuple[Self, Bool[Array, ""]]:
        """Return `old` with later writes noted, and whether its cells are unchanged."""

    @abstractmethod
    @assignable
    def count_broken_invariants(self) -> dict[str, Int32[Array, ""]]:
        """Return the number of violations of each invariant, by name."""

    def can_serve_layer(self, verb: str, layer: int) -> bool:
        """Return whether a layer supports `verb`: "attend" or "states"."""
        del verb, layer
        return False

    @assignable
    def attend(
        self,
        buffers: PyTree,
        layer: int,
        ubatch: Ubatch,
        q: Float[Array, "R T H D"],
        k: Float[Array, "R T K D"] | None = None,
        v: Float[Array, "R T K Dv"] | None = None,
        **options: object,
    ) -> tuple[Self, PyTree, Float[Array, "R T H Dv"]]:
        """Write keys and values, if any, and attend; options as in `jaxkv.attend`."""
        del buffers, layer, ubatch, q, k, v, options
        raise TypeError(
            f"expected a cache with attention layers, got kind {self.spec.kind!r}; use one with "
            "CacheSpec.attention"
        )

    @assignable
    def write_kv(
        self,
        buffers: PyTree,
        layer: int,
        ubatch: Ubatch,
        k: Float[Array, "R T K D"],
        v: Float[Array, "R T K Dv"] | None = None,
    ) -> tuple[Self, PyTree]:
        """Write keys and values into a layer."""
        del buffers, layer, ubatch, k, v
        raise TypeError(
            f"expected a cache with attention layers, got kind {self.spec.kind!r}; use one with "
            "CacheSpec.attention"
        )

    @assignable
    def read_kv(self, buffers: PyTree, layer: int, ubatch: Ubatch, **options: object) -> KVView:
        """Return the keys and values of a ubatch's streams; options as in `jaxkv.read_kv`."""
        del buffers, layer, ubatch, options
        raise TypeError(
            f"expected a cache with attention layers, got kind {self.spec.kind!r}; use one with "
            "CacheSpec.attention"
        )

    def read_states(
        self, buffers: PyTree, layer: int, ubatch: Ubatch
    ) -> dict[str, Shaped[Array, "R ..."]]:
        """Return the state that precedes each row, by name."""
        del buffers, layer, ubatch
        raise TypeError(
            f"expected a cache with recurrent layers, got kind {self.spec.kind!r}; use one with "
            "CacheSpec.recurrent"
        )

    def write_states(
        self,
        buffers: PyTree,
        layer: int,
        ubatch: Ubatch,
        states: Mapping[str, Shaped[Array, "R E+1 ..."]],
    ) -> tuple[Self, PyTree]:
        """Write the states after each row, by name, oldest first."""
        del buffers, layer, ubatch, states
        raise TypeError(
            f"expected a cache with recurrent layers, got kind {self.spec.kind!r}; use one with "
            "CacheSpec.recurrent"
        )

    def max_rollback(self, layer: int) -> int:
        """Return E, the number of states that a layer keeps before the current one."""
        del layer
        raise TypeError(
            f"expected a cache with recurrent layers, got kind {self.spec.kind!r}; use one with "
            "CacheSpec.recurrent"
        )


def check_sizes(table: Any, streams: int, cells: int) -> None:
    """Raise if the streams S and cells N of buffers differ from those of their table."""
    sizes = table.streams, table.num_cells
    if (streams, cells) != sizes:
        raise ValueError(
            f"expected buffers of {sizes[0]} streams with {sizes[1]} cells, as the table has, "
            f"got {streams} with {cells}; join the table and the buffers of one cache"
        )


def check_made_for(table: CacheTable, ubatch: Ubatch) -> None:
    """Raise if a ubatch was planned for a cache with another spec.

    Raises:
      TypeError: If `ubatch` is not a `Ubatch`, for example a plan.
      ValueError: If the specs differ.
    """
    if not isinstance(ubatch, Ubatch):
        raise TypeError(
            f"expected a ubatch, such as plan.ubatches[0], got {type(ubatch)}; pass one of "
            "plan.ubatches"
        )
    check_spec(ubatch.spec, table.spec, "a ubatch that was planned")


def static_layer_number(layer: SupportsIndex) -> int:
    """Return the layer as an int; raise if it is traced or not an integer."""
    try:
        return operator.index(layer)
    except TypeError:
        if not is_traced(layer):
            raise TypeError(
                f"expected an integer for a layer, got {layer!r}; pass an int"
            ) from None
        raise TypeError(
            f"expected a concrete integer for a layer, got {layer!r}; loop over the layers in "
            "Python, or make the cache with make_cache(stacked=True), unless it is a hybrid"
        ) from None
