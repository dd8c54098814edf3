"""`Ubatch`: a part of a batch that is computed at once."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxkv.core.array_utils import is_traced, out_of_range_slots
from jaxkv.core.constants import MAX_CELLS
from jaxkv.core.hashing import chain_hashes, hash_contents
from jaxkv.core.partitioning import Partitioned, to_local_index
from jaxkv.core.pytree import pytree_dataclass, static_field
from jaxkv.core.repr import FEW, to_numpy_or_none, with_fallback_repr
from jaxkv.core.validate import check_count

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree, Shaped, UInt32

    from jaxkv.core.partitioning import ShardingRules
    from jaxkv.core.types import AnyMesh
    from jaxkv.spec import TableSpec


@pytree_dataclass
class Ubatch(Partitioned):
    """Part of a batch that is computed at once: R rows of T tokens, with padding.

    tokens, embeddings, sequences, shared_with: as in `Batch`.
    extra: as in `Batch`; the values of padding are arbitrary.
    positions: position of each token.
    row_stream: index of the stream of each row.
    row_sequence: sequence id of each row; 0 if a row may have tokens of several sequences.
    slots: index of the cell of each token. Indices of padding, and of all tokens of a refused plan,
      are past the last cell. No index is repeated. For a recurrent cache, the slots are a
      `StateSlots`. For a hybrid cache, the slots are a tuple with an entry for each part; the entry
      of a part that the ubatch does not use is None. In a pytree of slots, int32 arrays are indices
      and uint32 arrays are hashes.
    valid: False for padding.
    continues_later: True for a token whose sequence has further tokens in a later ubatch.
    outputs: indices among the R * T tokens. They select the tokens that need logits; padding
      selects arbitrary tokens. `Plan.gather_outputs` removes the logits of padding, and
      returns the other logits in the order of the batch.
    output_index: index in the batch of each token in `outputs`; 2**31 - 1 for padding.
    version: version of each stream for which the slots were chosen; a tuple for a hybrid cache.
    spec: static `TableSpec` of the cache that the ubatch was planned for.
    row_is_sequence: static, True if R is Q and each row r has the tokens of sequence r.

    llama.cpp: `llama_ubatch`.
    """

    tokens: Int32[Array, "R T"] | None
    embeddings: Float[Array, "R T d"] | None
    positions: Int32[Array, "R T"]
    sequences: Int32[Array, "R T"]
    row_stream: Int32[Array, " R"]
    row_sequence: Int32[Array, " R"]
    slots: PyTree[Int32[Array, "R T"]]
    valid: Bool[Array, "R T"]
    continues_later: Bool[Array, "R T"]
    outputs: Int32[Array, " O"]
    output_index: Int32[Array, " O"]
    version: PyTree[UInt32[Array, " S"]]
    spec: TableSpec = static_field()
    row_is_sequence: bool = static_field()
    shared_with: Int32[Array, "R T n"] | None = None
    extra: dict[str, Shaped[Array, "R T ..."]] | None = None

    @with_fallback_repr
    def __repr__(self) -> str:
        rows, tokens = self.valid.shape
        valid, sequences = to_numpy_or_none(self.valid), to_numpy_or_none(self.sequences)
        if valid is None or sequences is None:
            content = "traced" if is_traced(self) else "values not known"
        else:
            if (others := to_numpy_or_none(self.shared_with)) is not None:
                sequences = np.concatenate([sequences[..., None], others], axis=-1)
            ids = np.unique(sequences[valid])
            ids = ids[ids >= 0].tolist()
            content = f"{valid.sum()} valid"
            content += f" of sequences {ids}" if len(ids) <= FEW else f" of {len(ids)} sequences"
        return f"Ubatch({self.spec.kind}, rows={rows}, tokens={tokens}: {content})"

    def state_write_steps(self, count: int) -> Int32[Array, "R count"]:
        """Return how many tokens of each row come before each of its last `count` states.

        For a row of n valid tokens, the result at index i is max(n - count + 1 + i, 0). A 0
        means the state before the first token of the row; `write_states` does not write this state.
        The argument `count` is static. For states that are passed to `write_states`, `count` must
        be E + 1. A `count` below 1 raises ValueError.

        Examples:
          >>> spec = CacheSpec.recurrent(layers=1, states={"sum": ((), jnp.float32)})
          >>> cache = make_cache(spec, sequences=2)
          >>> plan = init_batch(cache, make_batch([[1, 2, 3], [4]]), split_by="equal")
          >>> [ubatch.state_write_steps(2).tolist() for ubatch in plan.ubatches]
          [[[0, 1], [0, 1]], [[1, 2]]]
        """
        count = check_count(count, "count")
        tokens = jnp.sum(self.valid, axis=1, dtype=jnp.int32)
        return jnp.maximum(
            tokens[:, None] - count + 1 + jnp.arange(count, dtype=jnp.int32)[None], 0
        )

    def partition_by(self, sharding_rules: ShardingRules, mesh: AnyMesh) -> Ubatch:
        """Return a `PartitionSpec` for each array of the ubatch."""
        streams = sharding_rules.split(mesh, streams=self.spec.streams)["streams"]
        return ubatch_partition_specs(self, streams)


class CrossAttentionSlots(NamedTuple):
    """Slots of decoder tokens, which use no cells: 0 for a valid token, else past the last cell."""

    looks: Int32[Array, "R T"]


def hash_tokens(ubatch: Ubatch) -> UInt32[Array, "R T"]:
    """Return a hash of each token and its position."""
    hashes = hash_contents(ubatch.tokens, ubatch.embeddings, ubatch.extra)
    return chain_hashes(hashes, ubatch.positions)


def mask_slots(ok: Bool[Array, ""], ubatch: Ubatch) -> Ubatch:
    """If `ok` is False, replace all slots of a ubatch by indices past the last cell."""

    def mask_leaf(leaf: jax.Array) -> jax.Array:
        return jnp.where(ok, leaf, out_of_range_slots(leaf)) if leaf.dtype == jnp.int32 else leaf

    return replace(ubatch, slots=jax.tree.map(mask_leaf, ubatch.slots))


def placed_rows(ubatch: Ubatch) -> jax.Array:
    """Return which rows have a token with a cell, `[R]` bool; all False in a refused plan."""
    count = ubatch.valid.shape[0]
    answers = [
        jnp.any(slots.reshape(count, -1) < MAX_CELLS, axis=1)
        for slots in jax.tree.leaves(ubatch.slots)
        if slots.dtype == jnp.int32
    ]
    return reduce(jnp.logical_or, answers)


def mask_rows_of_other_devices(ubatch: Ubatch, axes: tuple[str, ...], count: int) -> Ubatch:
    """Return a ubatch in which rows of other devices are padding.

    Must be called in a function that runs on shards, with `count` streams for each device.
    """
    if not axes:
        return ubatch
    stream, is_own = to_local_index(ubatch.row_stream, axes, count)
    return replace(
        ubatch,
        row_stream=stream,
        valid=ubatch.valid & is_own[:, None],
        slots=jax.tree.map(
            lambda x: (
                jnp.where(is_own.reshape(-1, *[1] * (x.ndim - 1)), x, out_of_range_slots(x))
                if x.dtype == jnp.int32
                else x
            ),
            ubatch.slots,
        ),
    )


def expand_streams_to_rows(
    x: Shaped[Array, "S ..."], row_stream: Int32[Array, " R"], row_is_sequence: bool
) -> Shaped[Array, "R ..."]:
    """Return `x[row_stream]`; if `row_is_sequence` is True, row r must be sequence r."""
    if not row_is_sequence:
        return x[row_stream]
    # Rows of a stream are neighbours, so a broadcast replaces the gather.
    rows, streams = row_stream.shape[0], x.shape[0]
    x = jnp.broadcast_to(x[:, None], (streams, rows // streams, *x.shape[1:]))
    return x.reshape(rows, *x.shape[2:])


def row_mesh_axes(ubatch: Ubatch, streams: tuple[str, ...]) -> tuple[str, ...]:
    """Return the mesh axes that split rows: `streams` if `row_is_sequence` is True, else `()`."""
    return streams if ubatch.row_is_sequence else ()


def ubatch_partition_specs(ubatch: Ubatch, streams: tuple[str, ...]) -> Ubatch:
    """Return a `PartitionSpec` for each array of a ubatch; the argument `streams` is mesh axes."""
    rows = row_mesh_axes(ubatch, streams)
    whole = {name: P() for name in ("outputs", "output_index")}
    names = [f.name for f in fields(ubatch) if not f.metadata.get("static")]
    split = {name: None if getattr(ubatch, name) is None else P(rows) for name in names}
    return replace(ubatch, **split | whole | {"version": P(streams)})


def ubatch_of_part(ubatch: Ubatch, part: int) -> Ubatch:
    """Return the ubatch of one part of a hybrid cache; raise if the part has no slots."""
    if ubatch.slots[part] is None:
        raise ValueError(
            f"expected a ubatch of text for part {part}, which is of the text, got one of "
            f"init_batch(encoder=True); it goes into the layers of CacheSpec.cross_attention alone"
        )
    return replace(
        ubatch,
        slots=ubatch.slots[part],
        version=ubatch.version[part],
        spec=ubatch.spec.parts[part],
    )
