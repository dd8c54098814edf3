"""Keys and values of one layer: `LayerKV`, or `LatentKV` if values are slices of the keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxkv.core.partitioning import AxisPartition, ShardingRules
from jaxkv.core.pytree import pytree_dataclass, static_field
from jaxkv.ops.attention.dispatch import Implementation, partial_attention
from jaxkv.ops.attention.softmax import AttentionOptions, OnlineSoftmax
from jaxkv.ops.attention.visibility import Visibility
from jaxkv.ops.storage.cell_arrays import scatter
from jaxkv.ops.storage.forms import storage_of
from jaxkv.ops.storage.hadamard import rotate_by_hadamard
from jaxkv.ops.storage.head_rows import (
    join_heads,
    pad_queries,
    split_rows_of_cells,
    take_own_heads,
)
from jaxkv.ops.storage.latent import ValueSlice
from jaxkv.ops.storage.layer_stack import map_arrays
from jaxkv.ops.storage.storage import Stored

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32

    from jaxkv.core.types import AnyMesh

NewKV = tuple[jax.Array | np.ndarray, ...]
"""New keys `[R, T, K, D]` and values `[R, T, K, Dv]`; keys alone if values are slices of keys."""


class HeadSizes(NamedTuple):
    """Sizes of heads in a layer; `values` is Dv, or a slice if each value is a slice of its key."""

    kv_heads: int
    head_dim: int
    values: int | ValueSlice

    @property
    def latent(self) -> ValueSlice | None:
        """The slice of the keys that serves as values; None if values are stored."""
        return None if isinstance(self.values, int) else self.values

    @property
    def value_dim(self) -> int:
        """Size of a value, Dv."""
        return self.values if isinstance(self.values, int) else self.values.size


@pytree_dataclass
class LayerKV:
    """Keys and values of a layer, with the operations of attention.

    keys: `[S, K, N, D]`. If n heads share a row (`ops.storage.head_rows`), K is the number of rows,
      and D the size of a row.
    values: `[S, K, N, Dv]`.
    sizes: Sizes of the heads before rows are formed.
    heads_per_row: The number n, which a shard of the layer cannot know.
    rotated: Whether keys and values are rotated by a Hadamard matrix before they are encoded.
    """

    keys: Stored
    values: Any
    sizes: HeadSizes = static_field()
    heads_per_row: int = static_field()
    rotated: bool = static_field()

    @property
    def _form(self) -> tuple:
        """Form and dtype of keys and values, and whether they are rotated."""
        stored = [storage_of(x) for x in (self.keys, self.values) if not isinstance(x, ValueSlice)]
        return (self.rotated, *((type(x), x.dtype) for x in stored))

    @property
    def num_cells(self) -> int:
        """Number of cells, N; in a shard if the mesh splits cells."""
        return self.keys.shape[2]

    def partition_specs(self, axes: AxisPartition) -> LayerKV:
        """Return this pytree with a `PartitionSpec` instead of each array."""
        # Arrays of keys and values have 4 axes; the array `layer` of a view has streams alone.
        spec, streams = axes.partition_spec, P(axes.streams)
        return jax.tree.map(lambda x: streams if x.ndim == 1 else spec, self)

    def query_axes(
        self, sharding_rules: ShardingRules | None, mesh: AnyMesh | None, heads: int
    ) -> tuple[str, ...]:
        """Return the mesh axes that split the query heads; `()` without a mesh."""
        if sharding_rules is None or mesh is None:
            return ()
        return sharding_rules.split(mesh, **shardable_sizes(self.keys))["kv_heads"]

    def check_new(self, tokens: tuple[int, ...], k: object, v: object) -> NewKV:
        """Raise unless `k` and `v` are new keys and values for `[R, T]` tokens; return both."""
        if (k is None) != (v is None):
            alone = "keys" if v is None else "values"
            raise TypeError(
                f"expected both keys and values, got only {alone}; pass both, or neither to attend "
                f"without a write"
            )
        heads = *tokens, self.sizes.kv_heads
        k = _check_heads("k", "D", k, (*heads, self.sizes.head_dim))
        return k, _check_heads("v", "Dv", v, (*heads, self.sizes.value_dim))

    def write(self, streams: Int32[Array, " R"], slots: Int32[Array, "R T"], new: NewKV) -> LayerKV:
        """Write the keys and values of a ubatch; skip slots past the last cell."""
        rows = streams[:, None]
        return self.put(self.encode(new), lambda x, y: scatter(x, rows, slots, y))

    def put(self, new: LayerKV, scatter: Callable[[Any, jax.Array], Any]) -> LayerKV:
        """Write keys and values of the form of this layer, by a function for each array."""
        keys, values = map_arrays(scatter, (self.keys, self.values), (new.keys, new.values))
        return replace(self, keys=keys, values=values)

    def encode(self, new: NewKV) -> LayerKV:
        """Return new keys and values in the form of this layer."""
        # Stored values are always finite, so that a masked cell contributes 0.
        k, v = (
            self._rotate(jnp.asarray(x, storage_of(old).decoded_dtype))
            for x, old in zip(new, (self.keys, self.values), strict=True)
        )
        is_finite = jnp.isfinite(v)
        # A NaN in one element is sufficient, and a reduction would take longer.
        of_key = is_finite if v.shape == k.shape else jnp.all(is_finite, axis=-1, keepdims=True)
        k, v = jnp.where(of_key & jnp.isfinite(k), k, jnp.nan), jnp.where(is_finite, v, 0)
        keys, values = (
            storage_of(old).encode(join_heads(x, self.heads_per_row, old.shape[3]))
            for x, old in ((k, self.keys), (v, self.values))
        )
        return replace(self, keys=keys, values=values)

    def attend(
        self,
        q: Float[Array, "P T H D"],
        visibility: Visibility,
        options: AttentionOptions,
        implementation: Implementation | None = None,
    ) -> OnlineSoftmax:
        """Return the partial softmax of lists of queries, without sinks."""
        keys = self.keys
        q = pad_queries(self._rotate(q), keys.shape[1], self.heads_per_row, keys.shape[3])
        sums = partial_attention(q, keys, self._rows_to_sum(), visibility, options, implementation)
        return sums._replace(out=self._values_of_sums(sums.out))

    def _rows_to_sum(self) -> Stored:
        """Return the rows whose weighted sums contain the weighted sums of values."""
        return self.values

    def _values_of_sums(self, out: Float[Array, "P _ X W"]) -> Float[Array, "P _ X Dv"]:
        """Return the weighted sums of values from the weighted sums of rows."""
        return self._rotate(take_own_heads(out, self.heads_per_row, self.sizes.value_dim))

    def _rotate(self, x: Float[Array, "*n _"]) -> Float[Array, "*n _"]:
        """Rotate heads to the form in which they are stored, or back."""
        return rotate_by_hadamard(x) if self.rotated else x

    def decode(self) -> tuple[Float[Array, "P K N D"], Float[Array, "P K N Dv"]]:
        """Return keys and values as arrays, one for each head."""
        sizes = self.sizes.head_dim, self.sizes.value_dim
        keys, values = (
            self._rotate(split_rows_of_cells(storage_of(x).decode(), self.heads_per_row, size))
            for x, size in zip((self.keys, self.values), sizes, strict=True)
        )
        return keys, values

    def read_heads(self, gather: Callable[[Any], Any]) -> LayerKV:
        """Read rows `[..., K, D]` from each array with a function, and split them into heads."""
        n, sizes = self.heads_per_row, self.sizes
        keys, values = map_arrays(gather, (self.keys, self.values))
        return replace(
            self,
            keys=storage_of(keys).split_rows(n, sizes.head_dim),
            values=storage_of(values).split_rows(n, sizes.value_dim),
        )

    def join(self, heads: LayerKV) -> LayerKV:
        """Join heads, which `read_heads` of any layer returned, to rows in the form of this layer.

        Stored numbers are kept if both layers have the same form; otherwise heads are converted.
        """
        if self._form != heads._form:
            return self.encode(heads.decode_heads())

        def join_array(old: Any, new: jax.Array) -> jax.Array:
            return join_heads(new, self.heads_per_row, old.shape[3])

        stored = self.keys, self.values
        keys, values = map_arrays(join_array, stored, (heads.keys, heads.values))
        return replace(self, keys=keys, values=values)

    def decode_heads(self) -> NewKV:
        """Return keys and values `[..., K, D]` that `read_heads` returned, as arrays of floats."""
        return tuple(self._rotate(storage_of(x).decode()) for x in (self.keys, self.values))


@pytree_dataclass
class LatentKV(LayerKV):
    """Keys of a layer whose values are slices of the keys (MLA): `values` is a `ValueSlice`."""

    def query_axes(
        self, sharding_rules: ShardingRules | None, mesh: AnyMesh | None, heads: int
    ) -> tuple[str, ...]:
        """Return the mesh axes that split the query heads; `()` without a mesh."""
        # Each device stores the only key head, and the rule of `kv_heads` splits the query heads.
        # Other layers with one key head have replicated projections of keys, and a split of their
        # query heads would add communication.
        if sharding_rules is None or mesh is None or self.keys.shape[1] > 1:
            return super().query_axes(sharding_rules, mesh, heads)
        split = sharding_rules.split(mesh, **shardable_sizes(self.keys))
        axes = sharding_rules.split(mesh, kv_heads=heads)["kv_heads"]
        return () if {*axes} & {*split["streams"], *split["cells"]} else axes

    def check_new(self, tokens: tuple[int, ...], k: object, v: object) -> NewKV:
        """Return new keys for `[R, T]` tokens; raise for other shapes, or if `v` is given."""
        if v is not None:
            raise TypeError(
                f"expected keys alone, whose numbers {self.values.first} to {self.values.last - 1} "
                f"are the values of this cache, got values too; leave v out"
            )
        return (_check_heads("k", "D", k, (*tokens, self.sizes.kv_heads, self.sizes.head_dim)),)

    def encode(self, new: NewKV) -> LayerKV:
        """Return new keys in the form of this layer."""
        k = self.values.nan_unless_finite(jnp.asarray(new[0], self.keys.dtype))
        k = join_heads(k, self.heads_per_row, self.keys.shape[3])
        return replace(self, keys=storage_of(self.keys).encode(k))

    def _rows_to_sum(self) -> Stored:
        # Whole keys are weighted, so that no slice of them is copied.
        return self.keys

    def _values_of_sums(self, out: Float[Array, "P _ X W"]) -> Float[Array, "P _ X Dv"]:
        return self.values.slice_values(out)

    def decode(self) -> tuple[Float[Array, "P K N D"], Float[Array, "P K N Dv"]]:
        """Return keys and values as arrays, one for each head."""
        keys = split_rows_of_cells(
            storage_of(self.keys).decode(), self.heads_per_row, self.sizes.head_dim
        )
        return keys, self.values.slice_values(keys)

    def read_heads(self, gather: Callable[[Any], Any]) -> LayerKV:
        """Read rows `[..., K, D]` from each array with a function, and split them into heads."""
        keys = storage_of(map_arrays(gather, self.keys))
        return replace(self, keys=keys.split_rows(self.heads_per_row, self.sizes.head_dim))

    def decode_heads(self) -> NewKV:
        """Return keys `[..., K, D]` that `read_heads` returned, as an array of floats."""
        return (storage_of(self.keys).decode(),)


def make_layer_kv(
    keys: Stored, values: Stored | ValueSlice, sizes: HeadSizes, *, rotated: bool = False
) -> LayerKV:
    """Return a `LatentKV` if values are slices of the keys, otherwise a `LayerKV`."""
    kind = LatentKV if sizes.latent else LayerKV
    heads_per_row = sizes.kv_heads // keys.shape[1]
    return kind(keys=keys, values=values, sizes=sizes, heads_per_row=heads_per_row, rotated=rotated)


def shardable_sizes(array: Stored, depth: int = 1) -> dict[str, int]:
    """Return the numbers of streams, key heads and cells of an array, by field name."""
    streams, kv_heads, cells, _ = array.shape
    return {"streams": streams // depth, "kv_heads": kv_heads, "cells": cells}


def check_floats(name: str, x: object) -> jax.Array | np.ndarray:
    """Raise a TypeError unless `x` is an array of floats."""
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"expected an array for {name}, got {type(x)}; convert it with jnp.asarray")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"expected floats for {name}, got {x.dtype}; cast them")
    return x


def _check_heads(
    name: str, letter: str, x: object, shape: tuple[int, ...]
) -> jax.Array | np.ndarray:
    array = check_floats(name, x)
    if array.shape != shape:
        raise ValueError(
            f"expected {name} [R, T, K, {letter}] of {shape}, got {array.shape}; tokens come "
            "before heads, whose sizes are those of the spec"
        )
    return array
