"""Bytes of a cache on each device of a mesh, computed from shapes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxkv.cache import Cache, split
from jaxkv.core.partitioning import ShardingRules
from jaxkv.core.validate import check_count
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.cells import Cells
from jaxkv.kv.layer_kv import LayerKV, shardable_sizes
from jaxkv.sharding.make import shardings

if TYPE_CHECKING:
    from jax.sharding import Sharding
    from jaxtyping import PyTree

    from jaxkv.core.types import AnyMesh


@dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """Bytes of a cache on each device of a mesh.

    params: bytes of model parameters on each device; 0 if no parameters were passed.
    sent: bytes that attention sends to each device, in a step in which each sequence has one token.
    """

    devices: int
    table: int
    buffers: int
    params: int
    sent: int
    whole: tuple[str, ...]
    uneven: tuple[str, ...]

    @property
    def total(self) -> int:
        """Bytes of table, buffers and parameters on each device."""
        return self.table + self.buffers + self.params

    def check(self, room: int) -> DeviceBytes:
        """Raise a ValueError if `total` exceeds `room`, the memory of a device in bytes."""
        if self.total > room:
            raise ValueError(
                f"expected at most {room:,} bytes on each of {self.devices} devices, got "
                f"{self.total:,}; take more devices, fewer cells, or another split\n{self}"
            )
        return self

    def __str__(self) -> str:
        rows = [
            ("table", self.table),
            ("buffers", self.buffers),
            ("params", self.params),
            ("in all", self.total),
            ("sent in a step", self.sent),
        ]
        lines = [f"{name:<16}{number:>20,} bytes" for name, number in rows]
        head = "on the device" if self.devices == 1 else f"on each of {self.devices} devices"
        return "\n".join([head, *lines, *self.whole, *self.uneven])


def device_bytes(
    cache: Cache,
    mesh: AnyMesh,
    sharding_rules: ShardingRules,
    *,
    heads: int | None = None,
    params: PyTree = None,
) -> DeviceBytes:
    """Return the bytes of a cache on each device of a mesh, without allocating the cache.

    Args:
      cache: cache, or its shapes from `sharding.shapes`. Shapes from `jax.eval_shape` give the same
        bytes, unless the default of `make_cache(lanes=)` depends on the mesh, as on a TPU.
      mesh: concrete or abstract mesh.
      sharding_rules: names of the mesh axes that split the cache.
      heads: number of query heads, for the field `sent`; default: the number of key/value heads.
      params: model parameters, or their shapes. For an array with a sharding, the bytes of one
        shard are counted; for other arrays, the bytes of the whole array.

    Returns:
      A `DeviceBytes` with the bytes on each device, as ints: `table`, `buffers` and `params`; their
      sum `total`; and `sent`, the bytes that attention sends to each device in a step of one token
      for each sequence. The messages in `uneven` describe placements that store a short
      sequence on only some of the devices. The messages in `whole` describe streams or heads that
      are not split.

    Raises:
      ValueError: If the devices cannot split the streams or the cells evenly. A single stream, or a
        single cell, is not split and raises no error.
      ValueError: If a mesh axis would split two dimensions, such as streams and heads.
      ValueError: If `heads` is below 1 or not a multiple of the number of key/value heads.

    Examples:
      >>> mesh = jax.make_mesh((2, 2), ("data", "tensor"))
      >>> spec = CacheSpec.attention(layers=2, kv_heads=4, head_dim=64)
      >>> make = lambda: make_cache(spec, cells=1024, sequences=8, streams=8)
      >>> print(sharding.device_bytes(jax.eval_shape(make), mesh, sharding.ShardingRules()))
      on each of 4 devices
      table                         81,952 bytes
      buffers                    8,388,608 bytes
      params                             0 bytes
      in all                     8,470,560 bytes
      sent in a step                     0 bytes
    """
    of_keys = num_kv_heads(cache)
    if heads is not None and any(check_count(heads, "heads") % kv_heads for kv_heads in of_keys):
        raise ValueError(
            f"expected heads a multiple of kv_heads {sorted(of_keys)}, got {heads}; pass the "
            "query heads of the model"
        )
    halves = zip(split(cache), split(shardings(cache, mesh, sharding_rules)), strict=True)
    table, buffers = (
        sum(map(_local_bytes, jax.tree.leaves(half), jax.tree.leaves(where)))
        for half, where in halves
    )
    parts = cache.parts
    return DeviceBytes(
        devices=mesh.size,
        table=table,
        buffers=buffers,
        params=sum(_local_bytes(x, getattr(x, "sharding", None)) for x in jax.tree.leaves(params)),
        sent=sum(_softmax_bytes(part, mesh, sharding_rules, heads) for part in parts),
        whole=tuple(
            dict.fromkeys(
                line for part in parts for line in _describe_unsplit(part, mesh, sharding_rules)
            )
        ),
        uneven=tuple(
            dict.fromkeys(
                line for part in parts for line in _describe_uneven_fill(part, mesh, sharding_rules)
            )
        ),
    )


def num_kv_heads(cache: Cache) -> set[int]:
    """Return the numbers of key/value heads of attention layers, without repeats."""
    table, buffers = split(cache)
    parts = [part for _, part in table.pair_parts_with_buffers(buffers)]
    return {heads for x in parts if isinstance(x, Buffers) for heads, _, _ in x.head_sizes}


def _local_bytes(x: jax.Array | jax.ShapeDtypeStruct, where: Sharding | None) -> int:
    shape = x.shape if where is None else where.shard_shape(x.shape)
    return prod(shape) * np.dtype(x.dtype).itemsize


def _softmax_bytes(
    part: Cache, mesh: AnyMesh, sharding_rules: ShardingRules, heads: int | None
) -> int:
    """Return the bytes of the partial softmaxes that each device receives in one step."""
    if not isinstance(part.buffers, Buffers):
        return 0

    def of_layer(layer_kv: LayerKV) -> int:
        split = sharding_rules.split(mesh, **shardable_sizes(layer_kv.keys))
        shards = {name: prod(mesh.shape[axis] for axis in axes) for name, axes in split.items()}
        if shards["cells"] == 1:
            return 0
        sizes, rows = layer_kv.sizes, part.table.spec.sequences // shards["streams"]
        queries = heads or sizes.kv_heads
        axes = layer_kv.query_axes(sharding_rules, mesh, queries)
        queries //= prod(mesh.shape[axis] for axis in axes)
        return shards["cells"] * rows * queries * (sizes.value_dim + 2) * 4

    def all_layers(buffers: Buffers) -> list[LayerKV]:
        return [buffers.layer(i) for i in range(buffers.layers)]

    return sum(map(of_layer, jax.eval_shape(all_layers, part.buffers)))


def _describe_unsplit(part: Cache, mesh: AnyMesh, sharding_rules: ShardingRules) -> list[str]:
    """Return messages about streams or heads that cannot be split as the rules require."""
    sizes = [("streams", part.table.spec.streams, 1)]
    n = part.buffers.heads_per_row if isinstance(part.buffers, Buffers) else 1
    sizes += [("kv_heads", kv_heads, n) for kv_heads in sorted(num_kv_heads(part))]
    return [
        f"{name} ({size}) are not split by {', '.join(sharding_rules.present(mesh, name))}"
        for name, size, n in sizes
        if sharding_rules.present(mesh, name)
        and not sharding_rules.split(mesh, **{name: size // n})[name]
    ]


def _describe_uneven_fill(part: Cache, mesh: AnyMesh, sharding_rules: ShardingRules) -> list[str]:
    """If the placement fills the devices unevenly, return a message with a better placement."""
    axes, devices = sharding_rules.present(mesh, "cells"), sharding_rules.devices(mesh, "cells")
    # Sources have no other placement, and a single cell is not split.
    table = part.table
    if table.spec.is_cross_attention or not isinstance(table, Cells):
        return []
    if table.num_cells == 1 or table.placement.fills_evenly(devices):
        return []
    return [
        f"placement={table.placement.name!r} fills the devices unevenly that split cells by "
        f"{', '.join(axes)}; take placement='striped:{devices}'"
    ]
