"""What a table answers: the contract of all kinds of caches.

There are four kinds of tables: `CellTable` (attention), `CrossAttentionTable` (what an encoder
read), `StateTable` (recurrence), and `HybridTable`, several of them that step together. A kind is a
subclass of `CacheTable`, which lists what edits, plans and loops ask of one.
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
    """What a table says of the sequences that a batch brings tokens for.

    last: the position that a sequence goes on after; -1 if it holds none, and for those that were
      not asked for.
    missing: whether a token right after it would miss something that it should see.
    pending: whether a sequence sees a key that is owed a rotation.
    """

    last: Int32[Array, " Q"]
    missing: Bool[Array, " Q"]
    pending: Bool[Array, " Q"]


class Admission(NamedTuple):
    """Which sequences find room for their tokens.

    fits: whether there are cells enough, the sequences that want least first.
    together: the sequences that are sure to find them if they come without the others.
    num_remaining: the cells that are left when those that fit have theirs.
    """

    fits: Bool[Array, " Q"]
    together: Bool[Array, " Q"]
    num_remaining: Int32[Array, " Q"]


class KVView(NamedTuple):
    """What P lists of T tokens see of a layer. It unpacks into k, v, mask and positions.

    Rows of one stream are one list, in their order; with a stream for each sequence, a row is one.

    k: the keys in the cells of each list's stream, in the dtype of the buffers, or float32 where
      these are quantised.
    v: the values likewise.
    mask: which cells each token sees.
    positions: the position of each cell; -1 where it is empty.
    """

    k: Float[Array, "P K N D"]
    v: Float[Array, "P K N Dv"]
    mask: Bool[Array, "P T N"]
    positions: Int32[Array, "P N"]


class MaintenancePlan(Partitioned):
    """The plan of an update or a defrag: what will be done to a table and its buffers.

    spec: of the cache that it was planned for, static.
    """

    spec: TableSpec

    @property
    @abstractmethod
    def pending(self) -> Int32[Array, ""]:
        """How many keys will be rotated, or cells moved."""

    @property
    def is_empty(self) -> bool:
        """Whether a plan whose values are known does nothing."""
        return not self.pending

    @abstractmethod
    def is_current(self, table: Any) -> Bool[Array, ""]:
        """Return whether all that the plan depends on is in a table as it was."""

    @abstractmethod
    def commit(self, table: Any, buffers: PyTree, ok: Bool[Array, ""]) -> tuple[Any, PyTree]:
        """Carry the plan out if `ok`; else return both as they are."""

    def partition_by(self, sharding_rules: ShardingRules, mesh: AnyMesh) -> P:
        """Return one `PartitionSpec` for all arrays: that of the streams."""
        return P(sharding_rules.split(mesh, streams=self.spec.streams)["streams"])


def assignable(method: Callable[..., R]) -> Callable[..., R]:
    """Let subclasses assign a function to a method, as in `seq_pos_min = cells.seq_pos_min`.

    Type checkers then compare what it returns alone. `tests/cells/test_contract.py` compares the
    names of its arguments.
    """
    return method


class CacheTable(Partitioned):
    """The table of a cache: what verbs, plans and loops ask of it.

    An id that is no sequence changes nothing. Ranges of positions are `start` to `stop` - 1: a
    negative start means 0, a negative stop no end, and a stop of 0 an empty range. `ok` is False
    where an edit was refused, and then nothing is changed.
    """

    @property
    @abstractmethod
    def spec(self) -> TableSpec:
        """What is fixed when the cache is made."""

    @abstractmethod
    def cache_spec(self, buffers: PyTree) -> CacheSpec:
        """Return what the weights fixed of the cache with these buffers, see `CacheSpec`."""

    @property
    @abstractmethod
    def is_batch(self) -> bool:
        """Whether these are the tables of several caches side by side, as `vmap` makes them."""

    sharding_rules: ShardingRules | None
    """Which axes of a mesh split the cache; None where it is on one device."""

    @abstractmethod
    def with_sharding_rules(self, sharding_rules: ShardingRules | None) -> Self:
        """Return the table with other rules."""

    @abstractmethod
    def partition_specs(self, buffers: PyTree, mesh: AnyMesh) -> tuple[Self, PyTree]:
        """Return which axes of a mesh split the table, and the buffers: `PartitionSpec`s.

        Buffers may be None.
        """

    def partition_by(self, sharding_rules: ShardingRules, mesh: AnyMesh) -> Self:
        """Return a `PartitionSpec` for each array."""
        del sharding_rules  # those of the table
        return self.partition_specs(None, mesh)[0]

    def pair_parts_with_buffers(self, buffers: PyTree) -> tuple[tuple[CacheTable, PyTree], ...]:
        """Return the parts of a hybrid, each with its buffers; of any other table it alone."""
        return ((self, buffers),)

    @property
    def nbytes(self) -> int:
        """The bytes of the table."""
        return nbytes(self)

    @abstractmethod
    def num_layers(self, buffers: PyTree) -> int:
        """L, the layers that the buffers beside the table are of."""

    @abstractmethod
    def check_buffers(self, buffers: PyTree) -> None:
        """Raise unless buffers have the streams and the cells of the table."""

    def check_can_shift(self, buffers: PyTree) -> None:
        """Raise unless the positions of what buffers hold can be changed."""
        del buffers

    @abstractmethod
    @assignable
    def stream_hash(self) -> PyTree[UInt32[Array, " S"]]:
        """Return a number of each stream's content; a tuple of them in a hybrid."""

    @abstractmethod
    @assignable
    def seq_pos_min(self, seq: Int32[Array, ""]) -> Int32[Array, ""]:
        """Return the smallest position of a sequence; -1 if it holds none."""

    @abstractmethod
    @assignable
    def seq_pos_max(self, seq: Int32[Array, ""]) -> Int32[Array, ""]:
        """Return the largest position of a sequence; -1 if it holds none."""

    @abstractmethod
    @assignable
    def compare_last_tokens(
        self, sequences: Int32[Array, " T"], contents: UInt32[Array, " T"]
    ) -> tuple[UInt32[Array, " T"], Bool[Array, " T"]]:
        """Return what tells the last token of each sequence from others, and whether it is so.

        `contents` are those asked about.
        """

    def nonempty_sequences(self) -> Bool[Array, " Q"]:
        """Return which sequences hold anything: a text, or a source without one."""
        return self.sequence_status(jnp.ones(self.spec.sequences, bool)).last >= 0

    @abstractmethod
    @assignable
    def num_used_cells(self) -> Int32[Array, ""]:
        """Return how many cells are in use."""

    @abstractmethod
    @assignable
    def sequence_status(self, present: Bool[Array, " Q"]) -> SequenceStatus:
        """Return what holds of the sequences in a batch."""

    @abstractmethod
    @assignable
    def find_fitting_sequences(self, demand: Int32[Array, " Q"]) -> Admission:
        """Return which sequences find room for so many tokens as they bring."""

    @assignable
    def owns_same_cells(self, partner: Int32[Array, " Q"]) -> Bool[Array, " Q"]:
        """Return whether sequences own the very same cells as others of their stream.

        It is asked for tokens of several sequences, which no cache has that keeps states.

        Args:
          partner: the number of the other one within the stream.
        """
        del partner
        raise TypeError(f"expected a cache of attention alone, got kind {self.spec.kind!r}")

    @abstractmethod
    @assignable
    def num_cells_saved_by_sharing(self) -> PyTree[Int32[Array, " S"]]:
        """Return how many cells sharing spares in each stream; a tuple in a hybrid.

        A cell of n sequences spares n - 1.
        """

    @abstractmethod
    @assignable
    def can_allocate(
        self,
        lengths: Int[np.ndarray, " Q"],
        at_once: int,
        num_shared_cells: PyTree[Int[np.ndarray, " S"]],
    ) -> Bool[np.ndarray, " S"]:
        """Return which streams have cells for such texts side by side, whatever comes first.

        It is asked on the host, and looks at sizes alone.

        Args:
          lengths: how many tokens each sequence will have at most.
          at_once: the most tokens of a stream that are computed at once.
          num_shared_cells: what `num_shared_cells` returned of the texts as they are, on the host.

        Where cells must be neighbours they may have to be brought together first.
        """

    @abstractmethod
    @assignable
    def choose_slots(self, ubatch: Ubatch) -> tuple[PyTree, Int32[Array, "R T"]]:
        """Return where tokens go; and a `Reason` for each one."""

    def slots_when_skipped(self, ubatch: Ubatch) -> PyTree:
        """Return what a ubatch that goes into other parts of a hybrid cache has as slots here.

        That is None, and then no verb takes the ubatch for this part; where it holds sources,
        tokens look at them.
        """
        del ubatch

    def as_encoder_table(self) -> Self:
        """Return the table as it answers where `init_batch(encoder=True)` plans sources."""
        raise TypeError(
            f"expected a cache with a part for sources, got kind {self.spec.kind!r}; make one of "
            f"CacheSpec.hybrid with a part of CacheSpec.cross_attention"
        )

    @abstractmethod
    @assignable
    def occupy(self, ubatch: Ubatch) -> Self:
        """Mark the slots of a ubatch as taken by its tokens."""

    def stream_hash_after(self, ubatch: Ubatch, occupied: Any) -> PyTree[UInt32[Array, " S"]]:
        """Return the `stream_hash` of the table that `occupy` returned for a ubatch."""
        del ubatch
        return occupied.stream_hash()

    @abstractmethod
    @assignable
    def seq_rm(
        self, seq: Int32[Array, ""], start: Int32[Array, ""], stop: Int32[Array, ""]
    ) -> tuple[Self, Bool[Array, ""]]:
        """Forget a range of a sequence, or of all for -1; return the table, and `ok`."""

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
        """Let sequences have a range of another, where `can_seq_cp` grants it.

        Buffers are None where all is known to stay within streams: then none is touched.
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
        """Return whether `copy` is granted; and the ends of its targets after it.

        The ends are positions, -1 for a target that would be empty.
        """

    @abstractmethod
    @assignable
    def seq_select(
        self, buffers: PyTree, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
    ) -> tuple[Self, PyTree]:
        """Let targets have what their parents held, all at once, where `can_seq_select` grants it.

        A target of Q is left out. Buffers are None where all is known to stay
        within streams: then none is touched.
        """

    @abstractmethod
    def can_seq_select(
        self, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
    ) -> Bool[Array, ""]:
        """Return whether `select` is granted."""

    @abstractmethod
    @assignable
    def seq_keep(self, seq: Int32[Array, ""]) -> Self:
        """Forget every sequence but one."""

    @abstractmethod
    @assignable
    def clear(self) -> Any:  # Self, but pyright takes no function of the table alone for that
        """Forget everything."""

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
        """Move a range of a sequence by `delta`; return the table, and `ok`.

        `gap` is the lowest position from which nothing stands up to the range, taken by a window
        or not; None where that is not known.
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
        """Return whether `add` leaves every sequence one token a position."""

    @abstractmethod
    @assignable
    def seq_div(
        self,
        seq: Int32[Array, ""],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
        divisor: Int32[Array, ""],
    ) -> tuple[Self, Bool[Array, ""]]:
        """Divide the positions of a range of a sequence, rounding down; the table, and `ok`."""

    @abstractmethod
    @assignable
    def can_resume(self, seq: Int32[Array, ""], pos: Int32[Array, ""]) -> Bool[Array, ""]:
        """Return whether a sequence goes on at a position when it is cut there."""

    @abstractmethod
    def plan_shift(self) -> MaintenancePlan:
        """Return the plan of the rotations that keys are owed."""

    @abstractmethod
    def plan_defrag(self, max_moves: int | None) -> MaintenancePlan:
        """Return the plan of the moves that close the gaps."""

    @abstractmethod
    @assignable
    def rewind(self, old: CacheTable) -> tuple[Self, Bool[Array, ""]]:
        """Return an older table that knows what was written since; and `ok`, `[]` bool.

        `ok` is whether all that the older one uses is still in the buffers as it was.
        """

    @abstractmethod
    @assignable
    def count_broken_invariants(self) -> dict[str, Int32[Array, ""]]:
        """Return how often each invariant is broken, by name."""

    def can_serve_layer(self, verb: str, layer: int) -> bool:
        """Return whether a layer is known to a verb: to "attend", or to those of "states"."""
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
        """Write keys and values into a layer, if any; and attend.

        Options are those of `jaxkv.attend`.
        """
        del buffers, layer, ubatch, q, k, v, options
        raise TypeError(f"expected a cache with attention layers, got kind {self.spec.kind!r}")

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
        raise TypeError(f"expected a cache with attention layers, got kind {self.spec.kind!r}")

    @assignable
    def read_kv(self, buffers: PyTree, layer: int, ubatch: Ubatch, **options: object) -> KVView:
        """Return what the tokens of a ubatch see of a layer; options as in `jaxkv.read_kv`."""
        del buffers, layer, ubatch, options
        raise TypeError(f"expected a cache with attention layers, got kind {self.spec.kind!r}")

    def read_states(
        self, buffers: PyTree, layer: int, ubatch: Ubatch
    ) -> dict[str, Shaped[Array, "R ..."]]:
        """Return by name the states that rows go on from."""
        del buffers, layer, ubatch
        raise TypeError(f"expected a cache with recurrent layers, got kind {self.spec.kind!r}")

    def write_states(
        self,
        buffers: PyTree,
        layer: int,
        ubatch: Ubatch,
        states: Mapping[str, Shaped[Array, "R E+1 ..."]],
    ) -> tuple[Self, PyTree]:
        """Write the states that rows leave, by name, the oldest first."""
        del buffers, layer, ubatch, states
        raise TypeError(f"expected a cache with recurrent layers, got kind {self.spec.kind!r}")

    def max_rollback(self, layer: int) -> int:
        """Return E, how many states a layer keeps before the current one."""
        del layer
        raise TypeError(f"expected a cache with recurrent layers, got kind {self.spec.kind!r}")


def check_sizes(table: Any, streams: int, cells: int) -> None:
    """Raise unless buffers have the streams S and the cells N of each that their table has."""
    sizes = table.streams, table.num_cells
    if (streams, cells) != sizes:
        raise ValueError(
            f"expected buffers of {sizes[0]} streams with {sizes[1]} cells, as the table has, "
            f"got {streams} with {cells}: join the table and the buffers of one cache"
        )


def check_made_for(table: CacheTable, ubatch: Ubatch) -> None:
    """Raise unless a ubatch was planned for a cache of the same spec.

    Raises:
      TypeError: when it is no ubatch, such as a plan of several.
      ValueError: when it was planned for a cache made in another way.
    """
    if not isinstance(ubatch, Ubatch):
        raise TypeError(f"expected a ubatch, such as plan.ubatches[0], got {type(ubatch)}")
    check_spec(ubatch.spec, table.spec, "a ubatch that was planned")


def static_layer_number(layer: SupportsIndex) -> int:
    """Return the number of a layer, which must be known while tracing."""
    try:
        return operator.index(layer)
    except TypeError:
        if not is_traced(layer):
            raise TypeError(f"expected an integer for a layer, got {layer!r}") from None
        raise TypeError(
            f"expected a layer as an integer that is known while tracing, got {layer!r}: each "
            "layer has arrays of its own, so go over the layers in Python, or make the cache with "
            f"make_cache(stacked=True), which a hybrid one cannot be"
        ) from None
