"""`Step`: a ubatch in a cache, which a model gets in place of the cache and returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxkv.cache import Cache, merge
from jaxkv.core.array_utils import is_traced
from jaxkv.core.partitioning import Partitioned, ShardingRules, map_shards, to_local_index
from jaxkv.core.pytree import pytree_dataclass, static_field
from jaxkv.jit_helpers import jit_table
from jaxkv.table import static_layer_number
from jaxkv.ubatch import (
    Ubatch,
    mask_rows_of_other_devices,
    row_mesh_axes,
    ubatch_of_part,
    ubatch_partition_specs,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree, Shaped

    from jaxkv.core.types import AnyMesh

R = TypeVar("R")

Path = tuple[int, ...]
"""Path of a layer: indices of nested parts of the cache, and the number of the layer in a part."""


@pytree_dataclass
class Step(Partitioned):
    """A ubatch in the cells of a cache: the argument of a model function.

    `apply` makes a step. A model reads the tokens of the step, and passes the step to `attend` or
    `write_kv` in each attention layer, and to `read_states` and `write_states` in each recurrent
    layer. `write_kv` and `write_states` return the next step, and `attend` returns it with its
    output. After all layers, `cache` is the cache with the tokens of the ubatch.

    table: Table of the cache with the tokens of the ubatch.
    buffers: Buffers of the cache; those of layers that were written contain the tokens.
    ubatch: The ubatch. If it was refused or stale, its slots are past the last cell.
    is_stale: For each row, True if the ubatch is stale and the row has a token. The outputs of
      layers are NaN in this row.
    is_written: For a stacked cache, whether each layer was written; None for other caches.
    written_paths: Paths of the layers that were written with static layer numbers. Static.

    Examples:
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=4)
      >>> step = apply(cache, init_batch(cache, make_batch([1, 2])))
      >>> step.tokens.tolist(), step.positions.tolist()
      ([[1, 2]], [[0, 1]])
      >>> step.cache
      Traceback (most recent call last):
      ...
      ValueError: expected each layer of the cache to be written, got a step without layers [0]; ...

    llama.cpp: `llama_memory_context_i`, which the graph of a model reads.
    """

    table: Any  # a `CacheTable`; layer functions use the fields of one kind
    buffers: PyTree
    ubatch: Ubatch
    is_stale: Bool[Array, " R"]
    is_written: Bool[Array, " L"] | None = None
    written_paths: frozenset[Path] = static_field(default=frozenset())

    @property
    def tokens(self) -> Int32[Array, "R T"] | None:
        """Token ids; None if the batch has embeddings."""
        return self.ubatch.tokens

    @property
    def embeddings(self) -> Float[Array, "R T d"] | None:
        """Embedding of each token; None if the batch has token ids."""
        return self.ubatch.embeddings

    @property
    def positions(self) -> Int32[Array, "R T"]:
        """Position of each token."""
        return self.ubatch.positions

    @property
    def sequences(self) -> Int32[Array, "R T"]:
        """Sequence id of each token."""
        return self.ubatch.sequences

    @property
    def valid(self) -> Bool[Array, "R T"]:
        """False for padding."""
        return self.ubatch.valid

    @property
    def outputs(self) -> Int32[Array, " O"]:
        """Indices among the R * T tokens of the tokens that need logits, see `Ubatch`."""
        return self.ubatch.outputs

    @property
    def extra(self) -> dict[str, Shaped[Array, "R T ..."]] | None:
        """Additional model inputs of each token, by name."""
        return self.ubatch.extra

    def state_write_steps(self, layer: int) -> Int32[Array, "R count"]:
        """Return how many tokens of each row come before each state that a layer writes.

        The result is `Ubatch.state_write_steps(E + 1)`, where E is the number of earlier states
        that the layer stores. The errors are those of `Cache.num_rollback_states`.
        """
        earlier = self.table.max_rollback(self.buffers, static_layer_number(layer))
        return self.ubatch.state_write_steps(earlier + 1)

    def sum_by_stream(self, x: Shaped[Array, "P ..."]) -> Shaped[Array, "S ..."]:
        """Sum an array with an entry for each list of `attend`, such as a mass, by stream.

        Examples:
          >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
          >>> cache = make_cache(spec, cells=4, sequences=3, streams=3)
          >>> step = apply(cache, init_batch(cache, make_batch([7, 8], sequences=2)))
          >>> step.sum_by_stream(jnp.ones((1, 4))).tolist()
          [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
        """
        streams = self.ubatch.spec.streams
        if streams == 1 or self.ubatch.row_is_sequence:
            return x
        return jnp.zeros((streams, *x.shape[1:]), x.dtype).at[self.ubatch.row_stream].add(x)

    @property
    def cache(self) -> Cache:
        """The cache with the tokens of the ubatch.

        Raises a ValueError if a layer was not written, unless the cache is stacked. For a stacked
        cache, whose layer numbers may be traced, the table stores which layers lack the tokens;
        outputs of these layers are NaN.
        """
        layers = self.table.layers_to_write(self.buffers, self.ubatch)
        missing = [
            (verb, number) for path, verb, number in layers if path not in self.written_paths
        ]
        if missing and self.is_written is None:
            verb = missing[0][0]
            numbers = sorted(number for of_verb, number in missing if of_verb == verb)
            function = "attend or write_kv" if verb == "attend" else "write_states"
            raise ValueError(
                "expected each layer of the cache to be written, got a step without layers "
                f"{numbers}; call {function} once in each, with its number, and use the step that "
                "it returns"
            )
        table = self.table
        if missing and self.is_written is not None:
            table = mark_incomplete(table, self.ubatch, ~self.is_written)
        return merge(table, self.buffers)

    def part(self, *path: int) -> Step:
        """Return the step in a part of a hybrid cache; for an empty path, the step itself."""
        step = self
        for i in path:
            table, buffers = step.table.pair_parts_with_buffers(step.buffers)[i]
            step = replace(
                step, table=table, buffers=buffers, ubatch=ubatch_of_part(step.ubatch, i)
            )
        return step

    def with_layer(self, path: Path, buffers: PyTree) -> Step:
        """Return the step after a layer was written; `buffers` are those of the layer's part."""
        *parts, number = path
        is_written, written_paths = self.is_written, self.written_paths
        if is_written is not None:
            is_written |= jnp.arange(is_written.size, dtype=jnp.int32) == number
        if not is_traced(number):
            written_paths |= {path}
        buffers = _replace_at(self.buffers, parts, buffers)
        return replace(self, buffers=buffers, is_written=is_written, written_paths=written_paths)

    def partition_by(self, sharding_rules: ShardingRules, mesh: AnyMesh) -> Step:
        """Return a `PartitionSpec` for each array of a step without buffers."""
        streams = sharding_rules.split(mesh, streams=self.ubatch.spec.streams)["streams"]
        return replace(
            step_partition_specs(self, streams),
            table=self.table.partition_by(sharding_rules, mesh),
            is_written=None if self.is_written is None else P(),
        )


def _replace_at(parts: PyTree, path: Sequence[int], new: PyTree) -> PyTree:
    """Replace an item of nested tuples."""
    if not path:
        return new
    i, *rest = path
    return (*parts[:i], _replace_at(parts[i], rest, new), *parts[i + 1 :])


def without_buffers(step: Step) -> Step:
    """Remove the fields that change from layer to layer, so that `jit` traces equal layers once."""
    return replace(step, buffers=None, is_written=None, written_paths=frozenset())


def step_partition_specs(step: Step, streams: tuple[str, ...]) -> Step:
    """Return a `PartitionSpec` for each array of `without_buffers(step)`."""
    return replace(
        step,
        table=P(streams),
        ubatch=ubatch_partition_specs(step.ubatch, streams),
        is_stale=P(row_mesh_axes(step.ubatch, streams)),
    )


def map_step(
    step: Step,
    streams: tuple[str, ...],
    work: Callable[..., R],
    args: tuple[PyTree, ...],
    in_specs: tuple[PyTree, ...],
    out_specs: PyTree,
) -> R:
    """Call `work(step, *args)` on each device; rows of other devices are padding.

    `step` has no buffers, and `streams` are the mesh axes that split its streams.
    """

    def work_on_shard(step: Step, *args: PyTree) -> R:
        ubatch = mask_rows_of_other_devices(step.ubatch, streams, step.table.streams)
        _, is_own = to_local_index(step.ubatch.row_stream, streams, step.table.streams)
        return work(replace(step, ubatch=ubatch, is_stale=step.is_stale & is_own), *args)

    specs = step_partition_specs(step, streams), *in_specs
    run = work_on_shard if streams else work
    return map_shards(step.table.sharding_rules, run, specs, out_specs)(step, *args)


@jit_table
def mark_incomplete(table: Any, ubatch: Ubatch, is_missing: Bool[Array, " L"]) -> Any:
    """Record in a stacked cache which layers lack the keys of a ubatch."""
    return table.mark_incomplete(ubatch, is_missing)
