"""A cache: an immutable value of a table and buffers, and the questions that can be asked of it.

The table says which token stands in which cell, and is small. The buffers are all the bytes. An
edit is compiled over the table alone and puts the same buffers back beside it: compiled over a
whole cache it would have to copy every buffer, or take the cache away from the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache_spec import CacheSpec
from jaxkv.core.array_utils import nbytes
from jaxkv.core.partitioning import Partitioned, ShardingRules
from jaxkv.core.validate import check_position, check_range
from jaxkv.jit_helpers import jit_method, jit_table
from jaxkv.table import CacheTable, static_layer_number

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Bool, Int32, PyTree

    from jaxkv.batch import Ubatch
    from jaxkv.core.types import AnyMesh, Id, Ids


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["table", "buffers"],
    meta_fields=[],
    drop_fields=["written"],
)
@dataclass(frozen=True, kw_only=True, eq=False)
class Cache(Partitioned):
    """What a model remembers of its sequences: an immutable value, whatever the kind.

    table: which token stands in which cell, a `CacheTable`.
    buffers: the bytes beside it: `Buffers` of keys and values, a tuple of states by layer, or for a
      hybrid cache a tuple of the buffers of its parts.
    written: a ubatch, and the layers that it has written last. No part of the pytree: where it is
      lost, a layer that is written twice is not noticed.

    llama.cpp: `llama_memory_i`.
    """

    table: Any  # a `CacheTable`; who knows the kind uses its fields
    buffers: PyTree
    written: tuple[Ubatch, frozenset[int]] | None = None

    cells: ClassVar[Callable[..., PyTree]]
    """`jaxkv.draw.cell_view.view_cells`: what stands in the cells, as NumPy arrays."""

    to_text: ClassVar[Callable[..., str]]
    """`jaxkv.show`, which sets it."""

    to_html: ClassVar[Callable[..., str]]
    """The table that a notebook displays; `jaxkv.draw` sets it."""

    @property
    def spec(self) -> CacheSpec:
        """What the weights fixed of the cache; `make_cache(cache.spec, cells=...)` makes one more.

        >>> cache = make_cache(CacheSpec.attention(layers=2, kv_heads=1, head_dim=4), cells=8)
        >>> cache.spec
        CacheSpec.attention(layers=2, kv_heads=1, head_dim=4)
        """
        return self.table.cache_spec(self.buffers)

    @property
    def parts(self) -> tuple[Cache, ...]:
        """The parts of a hybrid cache as caches of their own; any other is its one part.

        >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=4)
        >>> len(cache.parts)
        1
        """
        pairs = self.table.pair_parts_with_buffers(self.buffers)
        return tuple(Cache(table=table, buffers=buffers) for table, buffers in pairs)

    @property
    def nbytes(self) -> int:
        """The bytes of the table and the buffers; also of their shapes alone.

        >>> spec = CacheSpec.attention(layers=2, kv_heads=8, head_dim=128)
        >>> jax.eval_shape(lambda: make_cache(spec, cells=4096)).nbytes // 2**20
        64
        """
        return nbytes(self)

    def seq_pos_min(self, seq: Ids | None = None) -> Int32[Array, " ..."]:
        """Return the smallest position that a sequence holds.

        Args:
          seq: one sequence id or many; by default all.

        Returns:
          The shape of `seq`; -1 for a sequence that holds nothing.

        Raises:
          ValueError: when an id is known and is none of the cache.

        Examples:
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
          >>> make_cache(spec, cells=6).seq_pos_min(0).item()
          -1

        llama.cpp: `llama_memory_seq_pos_min`.
        """
        return _seq_pos_min(self.table, self._check_sequence_ids(seq))

    def seq_pos_max(self, seq: Ids | None = None) -> Int32[Array, " ..."]:
        """Return the largest position that a sequence holds; its next token comes one after it.

        Args:
          seq: one sequence id or many; by default all.

        Returns:
          The shape of `seq`; -1 for a sequence that holds nothing.

        Raises:
          ValueError: when an id is known and is none of the cache.

        Examples:
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
          >>> cache = make_cache(spec, cells=6, sequences=2)
          >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
          >>> cache.seq_pos_max().tolist(), cache.seq_pos_max(0).item()
          ([2, -1], 2)

        llama.cpp: `llama_memory_seq_pos_max`.
        """
        return _seq_pos_max(self.table, self._check_sequence_ids(seq))

    def num_used_cells(self) -> Int32[Array, ""]:
        """Return how many cells hold a token, or a state.

        A cell that several sequences share counts once. In a hybrid cache the cells of all `parts`
        are added up, since each holds a token's keys for layers of its own.

        Examples:
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
          >>> cache = make_cache(spec, cells=6, sequences=2)
          >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
          >>> seq_cp(cache, 0, 1).cache.num_used_cells().item()
          3

        llama.cpp: `llama_kv_cells::get_used`.
        """
        return _used(self.table)

    def can_resume(self, seq: Id, pos: Id) -> Bool[Array, ""]:
        """Return whether a sequence can go on at a position once all from there on is removed.

        It can where `seq_rm(cache, seq, pos)` is granted and the next token then stands at `pos`: a
        token there sees all that its window reaches, or a state stands before it. What was removed
        from the middle of a text is not missed.

        Args:
          seq: the sequence.
          pos: where its next token would stand.

        Returns:
          An empty sequence can start anywhere, and any can at 0.

        Examples:
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
          >>> cache = make_cache(spec, cells=4)
          >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
          >>> [cache.can_resume(0, pos).item() for pos in (0, 2, 3, 4)]
          [True, True, True, False]
        """
        ids = self.table.spec.sequence_id(seq)
        return _can_resume(self.table, ids, check_position(pos, "pos"))

    def can_seq_add(self, seq: Id, p0: Id, p1: Id | None, *, delta: Id) -> Bool[Array, ""]:
        """Return whether `seq_add` would leave every sequence one token a position.

        It may not where sequences share cells: these move for every owner, and an owner may hold
        others at the positions that they come to.

        Args:
          seq: the sequence.
          p0: the first position that moves.
          p1: one past the last.
          delta: how far they move.

        Returns:
          False, too, where a position would reach 2**31 - 1. Of states, which stand at
          one position each, nothing else can go wrong.

        Examples:
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, rope=None)
          >>> cache = make_cache(spec, cells=6, sequences=2)
          >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3, 4])))
          >>> fork, _ = seq_cp(cache, 0, 1)
          >>> fork, _ = seq_rm(fork, 0, 0, 2)
          >>> fork.can_seq_add(0, 2, None, delta=-2).item()  # sequence 1 has tokens at 0 and 1
          False
          >>> seq_keep(fork, 0).cache.can_seq_add(0, 2, None, delta=-2).item()
          True
        """
        self.table.check_can_shift(self.buffers)
        ids, bounds = self.table.spec.sequence_id(seq), check_range(p0, p1)
        return _can_add(self.table, ids, *bounds, check_position(delta, "delta"))

    def num_rollback_states(self, layer: int) -> int:
        """Return E, how many earlier states the cache keeps for a recurrent layer.

        It is `max_rollback` of `make_cache`; `write_states` takes one state more.

        Raises:
          TypeError: when the cache has no recurrent layers.
          ValueError: when the layer is none of the cache.

        Examples:
          >>> spec = CacheSpec.recurrent(layers=1, states={"x": ((), jnp.int32)})
          >>> make_cache(spec, max_rollback=3).num_rollback_states(0)
          3

        llama.cpp: `n_rs_seq`.
        """
        return self.table.max_rollback(static_layer_number(layer))

    def check(self) -> dict[str, Int32[Array, ""]]:
        """Return how much is wrong with the table.

        Returns:
          For each thing that can be wrong, how many cells or sequences are at fault.
          All are 0 unless a table was made by hand.

        Examples:
          >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=4)
          >>> sum(cache.check().values()).item()
          0
        """
        return _faults(self.table)

    def partition_by(self, sharding_rules: ShardingRules, mesh: AnyMesh) -> Cache:
        """Return a `PartitionSpec` for each array."""
        del sharding_rules  # those of the table
        table, buffers = self.table.partition_specs(self.buffers, mesh)
        return Cache(table=table, buffers=buffers)

    def _check_sequence_ids(self, seq: Ids | None) -> PyTree[Int32[ArrayLike, " ..."]]:
        spec = self.table.spec
        return spec.sequence_ids(np.arange(spec.sequences) if seq is None else seq)


_used = jit_method(CacheTable.num_used_cells)
_can_add = jit_method(CacheTable.can_seq_add)
_can_resume = jit_method(CacheTable.can_resume)
_faults = jit_method(CacheTable.count_broken_invariants)


@jit_table
def _seq_pos_min(table: CacheTable, seq: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    """Return the first position of each sequence."""
    return jax.lax.map(table.seq_pos_min, jnp.ravel(seq)).reshape(seq.shape)


@jit_table
def _seq_pos_max(table: CacheTable, seq: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    """Return the last position of each sequence."""
    return jax.lax.map(table.seq_pos_max, jnp.ravel(seq)).reshape(seq.shape)


def split(cache: Cache) -> tuple[Any, PyTree]:
    """Return the table and the buffers of a cache that a caller passed.

    Raises:
      TypeError: when it is something else, such as the pair that `seq_rm` returns.
    """
    if isinstance(cache, Cache):
        return cache.table, cache.buffers
    if isinstance(cache, tuple):
        raise TypeError(
            "expected a cache, got a tuple (was `cache, ok = seq_rm(...)` not unpacked?): pass the "
            "cache in it, `.cache`"
        )
    raise TypeError(
        f"expected a cache, got {type(cache)}: pass what make_cache or the last call returned, "
        f"in its place among the arguments"
    )


def merge(table: CacheTable, buffers: PyTree) -> Cache:
    """Put a table and buffers together into a cache: the inverse of `split`.

    Values in the buffers of an attention cache must be finite, as `attend` leaves them.

    Raises:
      TypeError: when the first argument is no table.
      ValueError: when the buffers have other streams or cells than the table.
    """
    if not isinstance(table, CacheTable):
        raise TypeError(f"expected the table of a cache, got {type(table)}")
    if not table.is_batch:
        table.check_buffers(buffers)
    return Cache(table=table, buffers=buffers)
