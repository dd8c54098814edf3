"""`Cache`: an immutable value of a small table and large buffers.

Edits that change only the table are compiled as functions of the table. Outside of `jit`, such an
edit therefore copies no buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache_spec import CacheSpec
from jaxkv.core.array_utils import is_traced, nbytes, to_host
from jaxkv.core.constants import EMPTY
from jaxkv.core.donation import is_donated
from jaxkv.core.partitioning import Partitioned, ShardingRules
from jaxkv.core.pytree import pytree_dataclass
from jaxkv.core.repr import to_numpy_or_none, with_fallback_repr
from jaxkv.core.validate import check_count, check_position, check_range
from jaxkv.draw.cell_view import CellView
from jaxkv.draw.html import draw_html, draw_line
from jaxkv.jit_helpers import check_concrete_cache, jit_method, jit_table
from jaxkv.plan import Plan
from jaxkv.stale import check_plan, is_current
from jaxkv.table import CacheTable, MaintenancePlan, static_layer_number
from jaxkv.ubatch import Ubatch

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Bool, Int32, PyTree, Shaped

    from jaxkv.core.types import AnyMesh, Id, Ids


@pytree_dataclass
class Cache(Partitioned):
    """Immutable KV cache or recurrent-state cache of a set of sequences.

    table: `CacheTable` with the positions and owners of all cells.
    buffers: `Buffers` of keys and values, or a tuple with the recurrent states of each layer. For a
      hybrid cache, a tuple of the buffers of the parts.

    llama.cpp: `llama_memory_i`.
    """

    table: CacheTable
    buffers: PyTree

    @with_fallback_repr
    def __repr__(self) -> str:
        return f"Cache({self.table.describe(self.buffers)}: {self._usage()})"

    def _usage(self) -> str:
        """Return the number of used cells, or the reason why the number is unknown."""
        if is_traced(self):
            return "traced"
        if is_donated(self.table):
            return "donated"
        if not all(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(self.table)):
            return "shapes alone"
        lost = ", buffers donated" if is_donated(self.buffers) else ""
        table = jax.tree.map(to_numpy_or_none, self.table)
        if self.table.is_batch or jax.tree.structure(table) != jax.tree.structure(self.table):
            return ("batch" if self.table.is_batch else "split over processes") + lost
        counts = [int((view.position != EMPTY).sum()) for view in table.cell_views().values()]
        return " + ".join(map(str, counts)) + " used" + lost

    def _repr_html_(self) -> str:
        """Draw the cells for a notebook; only the `repr` if the values cannot be read."""
        line = draw_line(repr(self))
        try:  # the `repr` describes a traced, donated or invalid cache
            return line + draw_html(_fetch_table(self.table).cell_views())
        except Exception:
            return line

    @property
    def spec(self) -> CacheSpec:
        """`CacheSpec` of the cache, for example for another call of `make_cache`."""
        return self.table.cache_spec(self.buffers)

    @property
    def parts(self) -> tuple[Cache, ...]:
        """The parts of a hybrid cache, each as a `Cache`; for other caches, the cache itself."""
        pairs = self.table.pair_parts_with_buffers(self.buffers)
        return tuple(Cache(table=table, buffers=buffers) for table, buffers in pairs)

    @property
    def fields(self) -> dict[str, Any]:
        """User fields of each cell, `[S, ..., N]`, by name, see `with_fields`.

        For a hybrid cache, a tuple for each name, with None for a part without the field.
        """
        return self.table.get_fields()

    def with_fields(self, **values: PyTree[Shaped[ArrayLike, "S ... N"]]) -> Cache:
        """Replace user fields, which `fields` of `CacheSpec.attention` declares.

        A field stores numbers for each cell, such as a score. Copies, `defrag`, `insert` and
        snapshots move the numbers of a cell with its keys. A new token gets 0. Values of empty
        cells have no meaning. Cells that several sequences share have one value.

        Args:
          **values: an array `[S, ..., N]` by name, which is cast to the dtype of the field. For a
            hybrid cache, a tuple with an array or None for each part.

        Raises:
          ValueError: If no field has the name, or an array has another shape.
          ValueError: If a cast would change the kind of number, such as floats to integers.

        Examples:
          >>> fields = {"score": ((), "float32")}
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, fields=fields)
          >>> cache = make_cache(spec, cells=4)
          >>> cache = prefill(forward, params, cache, [1, 2, 3]).cache
          >>> cache = cache.with_fields(score=cache.fields["score"] + cache.cell_positions())
          >>> cache = seq_rm(cache, 0, 0, 1).cache
          >>> cache = apply(cache, defrag_plan(cache))
          >>> cache.cell_positions(0).tolist(), cache.fields["score"].tolist()
          ([2, 1, -1, -1], [[2.0, 1.0, 2.0, -1.0]])
        """
        return merge(self.table.with_fields(values), self.buffers)

    @property
    def nbytes(self) -> int:
        """Size of table and buffers in bytes. The cache may have shapes in place of arrays.

        >>> spec = CacheSpec.attention(layers=2, kv_heads=8, head_dim=128)
        >>> jax.eval_shape(lambda: make_cache(spec, cells=4096)).nbytes // 2**20
        64
        """
        return nbytes(self)

    def seq_pos_min(self, seq: Ids | None = None) -> Int32[Array, " ..."]:
        """Return the smallest position of each sequence; -1 for an empty sequence.

        `seq` is an id or an array of sequence ids, default all ids. The result has the shape of
        `seq`. For a traced id out of range, the result is -1.

        Raises:
          ValueError: If a concrete id is not from 0 to Q - 1.

        Examples:
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
          >>> make_cache(spec, cells=6).seq_pos_min(0).item()
          -1

        llama.cpp: `llama_memory_seq_pos_min`.
        """
        return _seq_pos_min(self.table, self._check_sequence_ids(seq))

    def seq_pos_max(self, seq: Ids | None = None) -> Int32[Array, " ..."]:
        """Return the largest position of each sequence; -1 for an empty sequence.

        For the argument, the shape of the result and the errors, see `seq_pos_min`.

        Examples:
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
          >>> cache = make_cache(spec, cells=6, sequences=2)
          >>> cache = prefill(forward, params, cache, [1, 2, 3]).cache
          >>> cache.seq_pos_max().tolist(), cache.seq_pos_max(0).item()
          ([2, -1], 2)

        llama.cpp: `llama_memory_seq_pos_max`.
        """
        return _seq_pos_max(self.table, self._check_sequence_ids(seq))

    def num_used_cells(self) -> Int32[Array, ""]:
        """Return the number of cells that store a token or a state, in all parts of a hybrid cache.

        A cell that several sequences share counts once.

        Examples:
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
          >>> cache = make_cache(spec, cells=6, sequences=2)
          >>> cache = prefill(forward, params, cache, [1, 2, 3]).cache
          >>> seq_cp(cache, 0, 1).cache.num_used_cells().item()
          3

        llama.cpp: `llama_kv_cells::get_used`.
        """
        return _used(self.table)

    def can_resume(self, seq: Id, pos: Id) -> Bool[Array, ""]:
        """Return whether a sequence can continue at `pos` if tokens from `pos` on are removed.

        The result is True if `seq_rm(cache, seq, pos)` is not refused, and `init_batch` expects the
        next token of the sequence at `pos` after this removal. Gaps at earlier positions do not
        matter. Every sequence can continue at position 0. An empty sequence can continue at any
        position. The result may be True for a full cache.

        Raises:
          ValueError: If an argument is a list, or a concrete id is not from 0 to Q - 1.

        Examples:
          >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=4)
          >>> cache = prefill(forward, params, cache, [1, 2, 3]).cache
          >>> [cache.can_resume(0, pos).item() for pos in (0, 2, 3, 4)]
          [True, True, True, False]
        """
        ids = self.table.spec.sequence_id(seq)
        return _can_resume(self.table, ids, check_position(pos, "pos"))

    def can_seq_add(self, seq: Id, p0: Id, p1: Id | None, *, delta: Id) -> Bool[Array, ""]:
        """Return whether positions would stay unique in every sequence after `seq_add`.

        `seq_add` shifts a shared cell for all owners, so two tokens of an owner may get equal
        positions. The result is also False if a position would reach 2**31 - 1. The arguments and
        the errors are those of `seq_add`.

        Examples:
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, rope=None)
          >>> cache = make_cache(spec, cells=6, sequences=2)
          >>> cache = prefill(forward, params, cache, [1, 2, 3, 4]).cache
          >>> fork, _ = seq_rm(seq_cp(cache, 0, 1).cache, 0, 0, 2)
          >>> fork.can_seq_add(0, 2, None, delta=-2).item()  # sequence 1 has tokens at 0 and 1
          False
        """
        self.table.check_can_shift(self.buffers)
        ids, bounds = self.table.spec.sequence_id(seq), check_range(p0, p1)
        return _can_add(self.table, ids, *bounds, check_position(delta, "delta"))

    def num_rollback_states(self, layer: int) -> int:
        """Return E, the number of earlier states that a recurrent layer stores (`max_rollback`).

        A layer without states raises ValueError. A cache without recurrent layers raises TypeError.

        Examples:
          >>> spec = CacheSpec.recurrent(layers=1, states={"x": ((), jnp.int32)})
          >>> make_cache(spec, max_rollback=3).num_rollback_states(0)
          3

        llama.cpp: `n_rs_seq`.
        """
        return self.table.max_rollback(self.buffers, static_layer_number(layer))

    def is_current(self, plan: Ubatch | Plan | MaintenancePlan) -> Bool[Array, ""]:
        """Return whether `apply` would commit a plan: False if the plan is stale or was refused.

        - A ubatch becomes stale when an edit or any applied ubatch changes a stream of this ubatch.
        - The plan of an update becomes stale when the shift of a key changes.
        - The plan of a defrag becomes stale when the set of empty cells changes.

        `is_current` accepts the same plans as `apply`.

        Raises:
          ValueError: If the plan has several ubatches, or was made for another `TableSpec`.

        Examples:
          >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=4)
          >>> (ubatch,) = init_batch(cache, make_batch([1, 2])).ubatches
          >>> later, *_ = prefill(forward, params, cache, [1, 2])
          >>> cache.is_current(ubatch).item(), later.is_current(ubatch).item()
          (True, False)
        """
        return is_current(self.table, check_plan(plan, self.table))

    def cells(self) -> CellView:
        """Return the positions, owners and pending shifts of all cells.

        If the cache is split over processes, every process must call this method.

        Returns:
          A `CellView` of NumPy arrays `[S, N]` int32: `position`, `owner`, `num_owners`, `shift`.
          `owner` is the lowest id of a cell's owners. For an empty cell, `position` and `owner`
          are -1.

        Raises:
          TypeError: If the cache is hybrid or traced, or has shapes instead of arrays.
          ValueError: If the cache was donated, or is a batch of caches made by `vmap`.

        Examples:
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
          >>> cache = make_cache(spec, cells=5, sequences=3)
          >>> cache = prefill(forward, params, cache, [[1, 2], [3]]).cache
          >>> view = seq_cp(cache, 0, 2).cache.cells()
          >>> view.position.tolist(), view.owner.tolist(), view.num_owners.tolist()
          ([[0, 1, 0, -1, -1]], [[0, 0, 1, -1, -1]], [[2, 2, 1, 0, 0]])
          >>> view.sequence_positions(2).tolist()
          [0, 1, -1, -1, -1]
        """
        return _fetch_table(self.table).view_cells()

    def cell_positions(self, seq: Ids | None = None) -> Int32[Array, "*n N"]:
        """Return the positions of a sequence's tokens in the N cells of its stream, also in `jit`.

        `seq` is an id or an array of sequence ids, default all ids. The position is -1 in cells
        that the sequence does not own.

        Raises:
          TypeError: If the cache is not an attention cache; see `Cache.parts`.
          ValueError: If a concrete id is not from 0 to Q - 1.

        Examples:
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
          >>> cache = make_cache(spec, cells=4, sequences=2)
          >>> cache = prefill(forward, params, cache, [[1, 2], [3]]).cache
          >>> cache.cell_positions().tolist()
          [[0, 1, -1, -1], [-1, -1, 0, -1]]
        """
        return _cell_positions(self.table, self._check_sequence_ids(seq))

    def check(self) -> dict[str, Int32[Array, ""]]:
        """Count violated invariants of the table, for debugging.

        The result maps the name of each invariant to the number of cells or sequences that violate
        it. All numbers are 0 for tables made by jaxkv.

        Examples:
          >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=4)
          >>> sum(cache.check().values()).item()
          0
        """
        return _faults(self.table)

    def partition_by(self, sharding_rules: ShardingRules, mesh: AnyMesh) -> Cache:
        """Return a `PartitionSpec` for each array of the cache."""
        table = self.table.partition_by(sharding_rules, mesh)
        if self.buffers is None:  # an edit of the table alone
            return Cache(table=table, buffers=None)
        return Cache(table=table, buffers=self.table.buffer_specs(self.buffers, mesh))

    def _check_sequence_ids(self, seq: Ids | None) -> PyTree[Int32[ArrayLike, " ..."]]:
        spec = self.table.spec
        return spec.sequence_ids(np.arange(spec.sequences) if seq is None else seq)


_used = jit_method(CacheTable.num_used_cells)
_can_add = jit_method(CacheTable.can_seq_add)
_can_resume = jit_method(CacheTable.can_resume)
_faults = jit_method(CacheTable.violations_by_invariant)


@jit_table
def _seq_pos_min(table: CacheTable, seq: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    return jax.lax.map(table.seq_pos_min, jnp.ravel(seq)).reshape(seq.shape)


@jit_table
def _seq_pos_max(table: CacheTable, seq: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    return jax.lax.map(table.seq_pos_max, jnp.ravel(seq)).reshape(seq.shape)


@jit_table
def _cell_positions(table: CacheTable, seq: Int32[Array, "*n"]) -> Int32[Array, "*n N"]:
    rows = jax.vmap(table.cell_positions)(jnp.ravel(seq))
    return rows.reshape(*seq.shape, -1)


def split(cache: Cache) -> tuple[Any, PyTree]:
    """Return the table and the buffers of a cache; raise TypeError for another object."""
    if isinstance(cache, Cache):
        return cache.table, cache.buffers
    if hasattr(cache, "is_stale"):
        raise TypeError("expected a cache, got a step; pass step.cache, after the last layer")
    if isinstance(cache, tuple) or hasattr(cache, "cache"):
        kind = "a tuple" if isinstance(cache, tuple) else "a result"
        raise TypeError(
            f"expected a cache, got {kind} (was `cache, ok = seq_rm(...)` not unpacked?); pass the "
            "cache in it, `.cache`"
        )
    raise TypeError(
        f"expected a cache, got {type(cache)}; pass the cache of make_cache or of the "
        f"last call, after forward and params if there are any"
    )


def merge(table: CacheTable, buffers: PyTree) -> Cache:
    """Make a cache from a table and buffers: the inverse of the function `split`.

    All stored values of an attention cache must be finite. Raises a TypeError if `table` is not a
    table, and a ValueError if table and buffers have different numbers of streams or cells.
    """
    if not isinstance(table, CacheTable):
        raise TypeError(f"expected the table of a cache, got {type(table)}; pass cache.table")
    if not table.is_batch:
        table.check_buffers(buffers)
    return Cache(table=table, buffers=buffers)


def show(cache: Cache, *, width: int | None = 100) -> str:
    """Draw the table of a cache as text: a column for each cell, owner above position.

    For a recurrent cache, each line shows the positions of the states of one sequence, the current
    state last. A hybrid cache is drawn part by part. llama.cpp: the debug drawing of `find_slot`.

    Args:
      cache: any cache. If the cache is split over processes, every process must call `show`.
      width: highest number of characters in a line; None for no limit. If columns of single cells
        do not fit, columns show runs of cells, and an additional first line shows cell indices. A
        line with one column can be longer than `width`.

    Returns:
      Two lines for each stream: owners and positions. A dot marks an empty cell, and a plus marks a
      cell with several owners. If shifts are pending, the third line `shift` shows them. A column
      of several runs shows a tilde, all owners (only their number if there are more than three),
      and the lowest and highest position.

    Raises:
      TypeError: If `cache` is traced, or has shapes instead of arrays.
      ValueError: If `width` is below 1.
      ValueError: If the cache was donated, or is a batch of caches made by `vmap`.

    Examples:
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
      >>> cache = make_cache(spec, cells=6, sequences=12)
      >>> batch = make_batch([[1, 2, 3], [4]], sequences=[0, 11])
      >>> cache = prefill(forward, params, cache, batch).cache
      >>> print(show(seq_cp(cache, 0, 5, 0, 1).cache))
      owner    + 0 0 11 . .
      position 0 1 2  0 . .
    """
    limit = None if width is None else check_count(width, "width")
    return _fetch_table(split(cache)[0]).to_text(limit)


def _fetch_table(table: CacheTable) -> CacheTable:
    """Return a table with NumPy arrays; raise if the arrays have no concrete values."""
    if is_traced(table):
        raise TypeError(
            "expected a concrete cache, got a traced one; draw it outside of jit, or "
            "by jax.debug.callback"
        )
    check_concrete_cache(table)
    return to_host(table)
