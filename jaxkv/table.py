"""`CacheTable`: the methods of a table that are called by edits, plans and loops."""

from __future__ import annotations

import operator
from abc import abstractmethod
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, SupportsIndex, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxkv.core.array_utils import dtype_names, is_traced, nbytes
from jaxkv.core.partitioning import Partitioned, Sharded, ShardingRules
from jaxkv.core.repr import format_bytes
from jaxkv.draw.cell_view import CellView
from jaxkv.plan import Reason
from jaxkv.spec import check_spec
from jaxkv.ubatch import Ubatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Array, Bool, Float, Int, Int32, PyTree, UInt32

    from jaxkv.cache_spec import CacheSpec
    from jaxkv.core.types import AnyMesh
    from jaxkv.spec import TableSpec

R = TypeVar("R")


class SequenceStatus(NamedTuple):
    """Status of each sequence that has tokens in a batch.

    last: Last position of the sequence; -1 if the sequence is empty or not in the batch.
    context_evicted: Whether a cell or state that the next token needs was evicted or removed.
    shift_pending: Whether the sequence owns a key with a pending shift.
    """

    last: Int32[Array, " Q"]
    context_evicted: Bool[Array, " Q"]
    shift_pending: Bool[Array, " Q"]


class Admission(NamedTuple):
    """Sequences that fit into the free cells.

    fits: Whether each sequence fits; sequences with fewer tokens are admitted first.
    num_remaining: Number of free cells in the stream of each sequence, minus the cells for the
      sequences that fit.
    """

    fits: Bool[Array, " Q"]
    num_remaining: Int32[Array, " Q"]


class EditCheck(NamedTuple):
    """Whether an edit is possible, and the `Reason` if it is refused."""

    ok: Bool[Array, "*n"]
    reason: Int32[Array, "*n"]


def join_checks(*checks: tuple[Bool[Array, ""], Int32[Array, ""] | Reason]) -> EditCheck:
    """Combine checks; the reason is that of the first check whose flag is False, or OK."""
    # The flag does not depend on the reasons, so XLA removes an unused reason.
    reason = jnp.int32(Reason.OK)
    for ok, code in reversed(checks):
        reason = jnp.where(ok, reason, jnp.int32(code))
    return EditCheck(reduce(jnp.logical_and, [ok for ok, _ in checks], jnp.array(True)), reason)


class KVView(NamedTuple):
    """Keys, values, mask and positions of a layer, for P lists of T tokens; see `read_kv`."""

    k: Float[Array, "P K N D"]
    v: Float[Array, "P K N Dv"]
    mask: Bool[Array, "P T N"]
    positions: Int32[Array, "P N"]


class MaintenancePlan(Partitioned):
    """Plan of an update or a defrag: changes to a table and its buffers."""

    spec: TableSpec

    @property
    @abstractmethod
    def num_changes(self) -> Int32[Array, ""]:
        """Number of keys that an update rotates, or of cells that a defrag moves."""

    @property
    def is_empty(self) -> bool:
        """Whether the plan rotates no keys and moves no cells; the plan must not be traced."""
        return not self.num_changes

    @abstractmethod
    def is_current(self, table: Any) -> Bool[Array, ""]:
        """Return False if a table field that the plan depends on has changed since planning."""

    @abstractmethod
    def commit(self, table: Any, buffers: PyTree, ok: Bool[Array, ""]) -> tuple[Any, PyTree]:
        """Apply the plan if `ok` is True, else return the table and buffers unchanged."""

    def partition_by(self, sharding_rules: ShardingRules, mesh: AnyMesh) -> P:
        """Return one `PartitionSpec` for all arrays of the plan; it splits the streams."""
        return P(sharding_rules.split(mesh, streams=self.spec.streams)["streams"])


class CacheTable(Sharded):
    """Table of a cache: the methods that are called by edits, plans and loops.

    An edit of a sequence id outside `[0, Q)` has no effect, but -1 in `seq_rm` means all sequences.
    A range has the positions from `start` to `stop` - 1. A negative start means 0, a negative stop
    means no end, and stop 0 means an empty range. An edit that can be refused returns a table and
    an `EditCheck`. If the edit is refused, it returns the old table.
    """

    @property
    @abstractmethod
    def spec(self) -> TableSpec:
        """Static configuration of the table."""

    @abstractmethod
    def cache_spec(self, buffers: PyTree) -> CacheSpec:
        """Return the `CacheSpec` of a cache with this table and the given buffers."""

    @property
    @abstractmethod
    def is_batch(self) -> bool:
        """Whether the table is for a batch of caches: each array has an additional leading axis."""

    def partition_by(self, sharding_rules: ShardingRules, mesh: AnyMesh) -> Self:
        """Return a `PartitionSpec` for each array; the mesh splits streams."""
        del sharding_rules  # the rules of the table are used
        rules = self.sharding_rules or ShardingRules()
        streams = P(rules.split(mesh, streams=self.spec.streams)["streams"])
        return jax.tree.map(lambda _: streams, self)

    @abstractmethod
    def buffer_specs(self, buffers: Any, mesh: AnyMesh) -> Any:
        """Return a `PartitionSpec` for each array of the buffers."""

    def pair_parts_with_buffers(self, buffers: PyTree) -> tuple[tuple[CacheTable, PyTree], ...]:
        """Return each part with its buffers; a table that is not hybrid is its only part."""
        return ((self, buffers),)

    @abstractmethod
    def describe(self, buffers: PyTree) -> str:
        """Return kind, sizes and bytes of a cache, for its `repr`."""

    def cell_views(self) -> dict[str, CellView]:
        """Return the cells of each part, by title; all arrays must be NumPy arrays."""
        return {"": self.view_cells()}

    @abstractmethod
    def view_cells(self) -> CellView:
        """Return the cells of a table that is not hybrid; all arrays must be NumPy arrays."""

    @abstractmethod
    def to_text(self, width: int | None) -> str:
        """Draw the table, see `jaxkv.show`; all arrays must be NumPy arrays."""

    @property
    def nbytes(self) -> int:
        """Size of the table in bytes."""
        return nbytes(self)

    @abstractmethod
    def num_layers(self, buffers: PyTree) -> int:
        """Return L, the number of layers of the buffers."""

    @abstractmethod
    def check_buffers(self, buffers: PyTree) -> None:
        """Raise if table and buffers have different numbers of streams or cells."""

    def check_can_shift(self, buffers: PyTree) -> None:
        """Raise ValueError if an attention layer was made without the argument `rope`."""
        del buffers

    version: Any
    """Version of each stream, `[S]` uint32; a property with a tuple of arrays for a hybrid cache.

    Each ubatch and each edit that changes a stream also changes its version.
    """

    @abstractmethod
    def advance_version(self, old: Any) -> Any:
        """Return the table after an edit of `old`, with new versions of the changed streams."""

    @abstractmethod
    def seq_pos_min(self, seq: Int32[Array, ""]) -> Int32[Array, ""]:
        """Return the smallest position of a sequence; -1 if the sequence is empty."""

    @abstractmethod
    def seq_pos_max(self, seq: Int32[Array, ""]) -> Int32[Array, ""]:
        """Return the largest position of a sequence; -1 if the sequence is empty."""

    def cell_positions(self, seq: Int32[Array, ""]) -> Int32[Array, " N"]:
        """Return the positions of a sequence's tokens in the cells of its stream; -1 elsewhere."""
        del seq
        raise TypeError(
            f"expected an attention cache, got kind {self.spec.kind!r}; take one of cache.parts"
        )

    @abstractmethod
    def compare_last_tokens(
        self, sequences: Int32[Array, " Z"], contents: UInt32[Array, " Z"]
    ) -> tuple[UInt32[Array, " Z"], Bool[Array, " Z"]]:
        """Return a hash of each sequence's last token, and which hashes equal `contents`."""

    def nonempty_sequences(self) -> Bool[Array, " Q"]:
        """Return which sequences have a token, an evicted token, or an encoder source."""
        return self.sequence_status(jnp.ones(self.spec.sequences, bool)).last >= 0

    @abstractmethod
    def num_used_cells(self) -> Int32[Array, ""]:
        """Return the number of used cells."""

    @abstractmethod
    def sequence_status(self, present: Bool[Array, " Q"]) -> SequenceStatus:
        """Return the status of the sequences that are True in a mask."""

    @abstractmethod
    def find_fitting_sequences(self, demand: Int32[Array, " Q"], one_ubatch: bool) -> Admission:
        """Return which sequences fit if each sequence gets the given number of new tokens.

        If the tokens are in several ubatches (`one_ubatch` False), only cells that no ubatch frees
        are counted: all sequences fit into a table with a window.
        """

    def owns_same_cells(self, partner: Int32[Array, " Q"]) -> Bool[Array, " Q"]:
        """Return whether each sequence owns exactly the same cells as another sequence.

        Sequence q is compared with the sequence at index `partner[q]` of the same stream.
        """
        del partner
        raise TypeError(
            f"expected a cache of attention alone, got kind {self.spec.kind!r}; use one that "
            "CacheSpec.attention describes"
        )

    @abstractmethod
    def num_cells_saved_by_sharing(self) -> PyTree[Int32[Array, " S"]]:
        """Return how many cells each stream saves by sharing: n - 1 for each cell with n owners."""

    @abstractmethod
    def can_allocate(
        self,
        lengths: Int[np.ndarray, " Q"],
        at_once: int,
        num_shared_cells: PyTree[Int[np.ndarray, " S"]],
    ) -> Bool[np.ndarray, " S"]:
        """Return which streams have enough cells for sequences of the given `lengths`.

        `lengths` has the largest number of tokens of each sequence. At most `at_once` tokens of a
        stream are computed at once.
        """

    @abstractmethod
    def choose_slots(self, ubatch: Ubatch) -> tuple[PyTree, Bool[Array, ""]]:
        """Return the slot of each token, and whether every token has a cell."""

    def slots_when_skipped(self, ubatch: Ubatch) -> PyTree:
        """Return the slots of a part in which a ubatch stores no tokens.

        If the result is None, calls with the ubatch, such as `attend`, raise for the part's layers.
        """
        del ubatch

    def as_encoder_table(self) -> Self:
        """Return the table for which `init_batch` plans encoder sources."""
        raise TypeError(
            f"expected a cache with a part for sources, got kind {self.spec.kind!r}; make one of "
            f"CacheSpec.hybrid with a part of CacheSpec.cross_attention"
        )

    @abstractmethod
    def occupy(self, ubatch: Ubatch) -> Self:
        """Store the tokens of a ubatch in its slots, and change the versions of their streams."""

    @abstractmethod
    def seq_rm(
        self, seq: Int32[Array, ""], start: Int32[Array, ""], stop: Int32[Array, ""]
    ) -> tuple[Self, EditCheck]:
        """Remove a range of `seq` (-1: all sequences)."""

    @abstractmethod
    def seq_cp(
        self,
        buffers: PyTree,
        src: Int32[Array, ""],
        dst: Int32[Array, "*n"],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
    ) -> tuple[Self, PyTree]:
        """Copy a range of a sequence to other sequences; callers first check `can_seq_cp`.

        Buffers may be None if all sequences are in one stream.
        """

    @abstractmethod
    def can_seq_cp(
        self,
        src: Int32[Array, ""],
        dst: Int32[Array, "*n"],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
    ) -> tuple[EditCheck, Int32[Array, " n"]]:
        """Return whether `seq_cp` is possible, and each target's last position after the copy."""

    @abstractmethod
    def seq_select(
        self, buffers: PyTree, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
    ) -> tuple[Self, PyTree]:
        """Replace each target by a copy of its parent; callers first check `can_seq_select`.

        Buffers may be None if each target is in the stream of its parent.
        """

    @abstractmethod
    def can_seq_select(
        self, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
    ) -> Bool[Array, ""]:
        """Return whether `seq_select` is possible for these parents and targets."""

    def evict(self, keep: Any, is_asked: Bool[Array, " Q"]) -> tuple[Self, EditCheck]:
        """Remove the cells with False in the mask `keep` `[S, N]` from some sequences.

        `keep` is None for a part that keeps all cells.
        """
        del is_asked
        if keep is not None:
            raise TypeError(
                f"expected None for a part of kind {self.spec.kind!r}, got a mask; only cells of "
                "attention layers can be evicted"
            )
        return self, join_checks()

    def get_fields(self) -> dict[str, Any]:
        """Return the user fields of cells by name; none by default."""
        return {}

    def with_fields(self, values: Mapping[str, Any]) -> Self:
        """Replace user fields; raise a ValueError for an unknown name."""
        if values:
            raise ValueError(
                f"expected no fields for a cache of kind {self.spec.kind!r}, got "
                f"{sorted(values)}; only attention layers can have fields"
            )
        return self

    @abstractmethod
    def can_insert(
        self, source: Any, parents: Int32[Array, " n"], targets: Int32[Array, " n"]
    ) -> EditCheck:
        """Return whether `insert` of sequences of the table `source` is possible."""

    @abstractmethod
    def insert(
        self,
        buffers: PyTree,
        source: Any,
        source_buffers: PyTree,
        parents: Int32[Array, " n"],
        targets: Int32[Array, " n"],
    ) -> tuple[Self, PyTree]:
        """Replace each target by a copy of its parent, a sequence of the table `source`.

        Targets of Q or more are skipped. Callers first check `can_insert`.
        """

    @abstractmethod
    def make_empty_like(
        self, buffers: PyTree, sequences: int, num_cells: tuple[int, ...]
    ) -> tuple[Self, PyTree]:
        """Return an empty table and buffers of one stream, with the layers and form of others.

        `num_cells` has the number of cells of each part. An attention part has no more cells than
        the sequences can own; recurrent layers ignore the number.
        """

    @abstractmethod
    def seq_keep(self, seq: Int32[Array, ""]) -> Self:
        """Remove all sequences except one."""

    @abstractmethod
    def clear(self) -> Any:  # Self; pyright rejects it for a function of the table alone
        """Remove all sequences."""

    @abstractmethod
    def seq_add(
        self,
        seq: Int32[Array, ""],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
        delta: Int32[Array, ""],
        gap: Int32[Array, ""] | None = None,
    ) -> tuple[Self, EditCheck]:
        """Add `delta` to the positions of a range of a sequence.

        If `gap` is not None, the caller ensures that the sequence has no token at positions
        `[gap, start)`, not even an evicted token.
        """

    @abstractmethod
    def can_seq_add(
        self,
        seq: Int32[Array, ""],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
        delta: Int32[Array, ""],
    ) -> Bool[Array, ""]:
        """Return whether positions remain unique in every sequence after `seq_add`."""

    @abstractmethod
    def seq_div(
        self,
        seq: Int32[Array, ""],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
        divisor: Int32[Array, ""],
    ) -> tuple[Self, EditCheck]:
        """Divide the positions of a range, rounding down."""

    @abstractmethod
    def can_resume(self, seq: Int32[Array, ""], pos: Int32[Array, ""]) -> Bool[Array, ""]:
        """Return whether a sequence can continue at `pos` if tokens from `pos` on are removed."""

    @abstractmethod
    def plan_shift(self) -> MaintenancePlan:
        """Return the plan of an update, which rotates all keys with a pending shift."""

    @abstractmethod
    def plan_defrag(self, max_moves: int | None) -> MaintenancePlan:
        """Return the plan of the moves that close gaps between used cells."""

    @abstractmethod
    def rewind(self, old: Any) -> tuple[Self, Bool[Array, ""]]:
        """Return `old` with new stamps and versions, and whether `old` can be restored.

        `old` can be restored if the cells that `old` uses have the same stamps in both tables.
        """

    @abstractmethod
    def violations_by_invariant(self) -> dict[str, Int32[Array, ""]]:
        """Return the number of violations of each invariant, by name."""

    serves: ClassVar[Literal["attend", "states"]]
    """What the layers store: keys and values ("attend"), or recurrent states ("states")."""

    @property
    def num_stacked_layers(self) -> int:
        """L if the cache is stacked; otherwise 0."""
        return 0

    def layer_paths(self, verb: str, layer: PyTree) -> list[tuple[PyTree, ...]]:
        """Return the path of each layer with this number that serves `verb`.

        A path has the indices of nested parts of a hybrid cache, and then the number of the layer
        in the innermost part.
        """
        return [(layer,)] if verb == self.serves else []

    def find_layer(self, verb: str, layer: PyTree) -> tuple[PyTree, ...]:
        """Return the path of a layer; raise if the cache has no such layer for `verb`."""
        for path in self.layer_paths(verb, layer):
            return path
        kind = {"attend": "attention", "states": "recurrent"}[verb]
        raise TypeError(
            f"expected a cache with {kind} layers, got kind {self.spec.kind!r}; use one with "
            f"CacheSpec.{kind}"
        )

    def stores(self, ubatch: Ubatch) -> bool:
        """Return whether a ubatch, which has slots for this table, stores tokens in it."""
        del ubatch
        return True

    def layers_to_write(
        self, buffers: PyTree, ubatch: Ubatch
    ) -> list[tuple[tuple[int, ...], str, int]]:
        """Return each layer that a model must write for a ubatch: its path, verb and number."""
        layers = range(self.num_layers(buffers)) if self.stores(ubatch) else ()
        return [((layer,), self.serves, layer) for layer in layers]

    def max_rollback(self, buffers: PyTree, layer: int) -> int:
        """Return E, the number of earlier states that a recurrent layer stores."""
        del buffers, layer
        raise TypeError(
            f"expected a cache with recurrent layers, got kind {self.spec.kind!r}; use one with "
            "CacheSpec.recurrent"
        )


def check_sizes(table: Any, streams: int, cells: int) -> None:
    """Raise if the numbers of streams and cells of buffers differ from those of the table."""
    sizes = table.streams, table.num_cells
    if (streams, cells) != sizes:
        raise ValueError(
            f"expected buffers of {sizes[0]} streams with {sizes[1]} cells, as the table has, "
            f"got {streams} with {cells}; join the table and the buffers of one cache"
        )


def check_made_for(table: CacheTable, ubatch: Ubatch) -> None:
    """Raise unless `ubatch` is a `Ubatch` that was planned for the spec of the table."""
    if not isinstance(ubatch, Ubatch):
        raise TypeError(
            f"expected a ubatch, such as plan.ubatches[0], got {type(ubatch)}; pass one of "
            "plan.ubatches"
        )
    check_spec(ubatch.spec, table.spec, "a ubatch that was planned")


def static_layer_number(layer: SupportsIndex) -> int:
    """Return a layer number as an int; raise if the number is traced or not an integer."""
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


def format_sizes(
    kind: str, sizes: dict[str, object], batch: tuple[int, ...], table: Any, buffers: PyTree
) -> str:
    """Format the sizes of a cache; `batch` has the leading axes of `vmap`."""
    dtypes = " and ".join(sorted({*dtype_names(buffers)}))
    shown = {name: size for name, size in sizes.items() if (name, size) != ("streams", 1)}
    shown |= {"batch": batch} if batch else {}
    total = f"{dtypes}, {format_bytes(nbytes((table, buffers)))}"
    return ", ".join([kind, *(f"{name}={size}" for name, size in shown.items()), total])
