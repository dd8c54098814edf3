"""Shardings of a cache, construction on a mesh, and a check that all processes agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from zlib import crc32

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxkv.cache import Cache, merge, split
from jaxkv.core.array_utils import is_concrete, is_traced, to_host
from jaxkv.core.partitioning import ShardingRules, check_mesh, check_sharding_rules
from jaxkv.jit_helpers import check_concrete_cache
from jaxkv.kv.make import HEAD_DEVICES

if TYPE_CHECKING:
    from jaxtyping import PyTree

    from jaxkv.core.types import AnyMesh


def shardings(cache: Cache, mesh: AnyMesh, sharding_rules: ShardingRules) -> Cache:
    """Return a `Cache` with a `NamedSharding` for each array, and with the rules in the table."""
    check_mesh(mesh)
    check_sharding_rules(sharding_rules)
    table, buffers = split(cache)
    cache = merge(table.with_sharding_rules(sharding_rules), buffers)

    def to_sharding(spec: P) -> NamedSharding:
        # Programs return specs without trailing None. A first call with another spec is slow.
        axes = tuple(spec)
        while axes and axes[-1] is None:
            axes = axes[:-1]
        return NamedSharding(mesh, P(*axes))

    specs = cache.partition_by(sharding_rules, mesh)
    return jax.tree.map(to_sharding, specs, is_leaf=_is_partition_spec)


def shapes(make: Callable[[], Cache], mesh: AnyMesh, sharding_rules: ShardingRules) -> Cache:
    """Return the shapes of a cache on a mesh, with shardings, without allocating the cache.

    To compile a step before the cache is made, call `init_full(shapes)` and lower the step with the
    shapes and the ubatch of this plan. Do both inside `with jax.set_mesh(mesh)`.

    Args:
      make: function without arguments that returns the cache; not jitted, with static sizes.
      mesh: concrete or abstract mesh.
      sharding_rules: names of the mesh axes that split the cache.

    Returns:
      The cache with `jax.ShapeDtypeStruct` in place of arrays; shapes are those of whole arrays.

    Raises:
      TypeError: If `make` does not return a `Cache`.
      ValueError: If the devices cannot split the streams or the cells evenly. A single stream, or a
        single cell, is not split and raises no error.
      ValueError: If a mesh axis would split two dimensions, such as streams and heads.

    Examples:
      >>> mesh = jax.make_mesh((2, 2), ("data", "tensor"))
      >>> spec = CacheSpec.attention(layers=1, kv_heads=4, head_dim=8)
      >>> make = lambda: make_cache(spec, cells=16, sequences=2, streams=2)
      >>> k = sharding.shapes(make, mesh, sharding.ShardingRules()).buffers.k[0]
      >>> k.shape, k.sharding.shard_shape(k.shape)
      ((2, 4, 16, 8), (1, 2, 16, 8))
    """
    check_mesh(mesh)
    token = HEAD_DEVICES.set(check_sharding_rules(sharding_rules).devices(mesh, "kv_heads"))
    try:
        cache = jax.eval_shape(lambda: make())  # new, since traces of `make` are cached
    finally:
        HEAD_DEVICES.reset(token)
    where = shardings(cache, mesh, sharding_rules)
    table, buffers = split(cache)

    def with_sharding(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(
        with_sharding, merge(table.with_sharding_rules(sharding_rules), buffers), where
    )


def make_sharded(
    make: Callable[[], Cache], mesh: Mesh, sharding_rules: ShardingRules | None = None
) -> Cache:
    """Make a cache on a mesh; each device allocates only its own shards."""
    sharding_rules = ShardingRules() if sharding_rules is None else sharding_rules

    def make_with_rules() -> Cache:
        table, buffers = split(make())
        return merge(table.with_sharding_rules(sharding_rules), buffers)

    where = shardings(jax.eval_shape(make), mesh, sharding_rules)
    return jax.jit(make_with_rules, out_shardings=where)()


def move(
    cache: Cache,
    to: Mesh | jax.Device,  # pyright: ignore[reportInvalidTypeForm]
    *,
    sharding_rules: ShardingRules | None = None,
    memory_kind: str | None = None,
) -> Cache:
    """Move a cache to the devices of a mesh, to one device, or to another memory of its devices.

    Any cache can be moved between any meshes, such as from a mesh for prefills to a mesh for
    decoding. To move some sequences only, extract them first (`jaxkv.extract`).

    Args:
      cache: concrete cache.
      to: a mesh of devices, or one device.
      sharding_rules: names of the mesh axes that split the cache; default: the rules of the cache,
        or `ShardingRules()` for a cache from one device.
      memory_kind: memory of the devices, such as "pinned_host" for memory of the host. The default
        is the memory in which the devices compute.

    Returns:
      The cache in its new place. On one device, it has no sharding rules.

    Raises:
      TypeError: If `to` is neither a mesh nor a device, or the cache is traced or has shapes only.
      ValueError: If the mesh cannot split the streams or the cells evenly, or `sharding_rules` is
        given for one device.
      ValueError: If the cache was donated, or is a batch of caches, or the devices lack the memory.

    Examples:
      >>> spec = CacheSpec.attention(layers=1, kv_heads=2, head_dim=4)
      >>> cache = prefill(forward, params, make_cache(spec, cells=8), [1, 2, 3]).cache
      >>> waiting = sharding.move(cache, jax.devices()[0], memory_kind="pinned_host")
      >>> waiting.buffers.k[0].sharding.memory_kind
      'pinned_host'
      >>> mesh = jax.make_mesh((2,), ("tensor",))
      >>> len(sharding.move(waiting, mesh).buffers.k[0].devices())
      2
    """
    table, buffers = split(cache)
    if is_traced(cache):
        raise TypeError(
            "expected a concrete cache, got a traced one; move it outside of jit, or by "
            "jax.device_put"
        )
    check_concrete_cache(table, buffers)
    if isinstance(to, Mesh):
        rules = sharding_rules or table.sharding_rules or ShardingRules()
        where: PyTree = shardings(cache, to, rules)
        if memory_kind is not None:
            where = jax.tree.map(lambda sharding: sharding.with_memory_kind(memory_kind), where)
        return jax.device_put(merge(table.with_sharding_rules(rules), buffers), where)
    if not isinstance(to, jax.Device):
        raise TypeError(f"expected a mesh or a device, got {type(to)}; pass jax.devices()[0]")
    if sharding_rules is not None:
        raise ValueError("expected a mesh with sharding_rules, got one device; pass a mesh")
    kind = memory_kind or to.default_memory().kind

    def move_array(x: jax.Array | np.ndarray) -> jax.Array:
        # JAX cannot copy from a mesh to one of its devices and to other memory at once.
        if isinstance(x, jax.Array):
            x = jax.device_put(x, x.sharding.with_memory_kind(kind))
        return jax.device_put(x, SingleDeviceSharding(to, memory_kind=kind))

    return jax.tree.map(move_array, merge(table.with_sharding_rules(None), buffers))


def _is_partition_spec(x: object) -> bool:
    return isinstance(x, P)


def assert_in_sync(cache: Cache, batch: PyTree = None) -> None:
    """Raise unless all processes have the same table and the same batch.

    Every process must call `assert_in_sync` outside of `jit`. The bytes of all arrays are compared;
    shapes, dtypes and static fields are not compared.

    Args:
      cache: cache whose table is compared; buffers are not compared.
      batch: pytree of arrays and numbers, such as a `Batch`. Arrays that are traced, or split over
        processes, are ignored.

    Raises:
      RuntimeError: If the table or batch of a process differs from that of process 0. Every process
        raises, with the indices of the differing processes.
      RuntimeError: If an array of the batch was donated.
      TypeError: If the cache is traced or has shapes only, or the batch has a `jax.random.key`.
      ValueError: If the table was donated, or the cache is a batch of caches.

    Examples:
      >>> mesh = jax.make_mesh((2, 2), ("data", "tensor"))
      >>> spec = CacheSpec.attention(layers=1, kv_heads=2, head_dim=4)
      >>> cache = make_cache(spec, cells=8, sequences=2, streams=2, mesh=mesh)
      >>> sharding.assert_in_sync(cache)
    """
    table, _ = split(cache)
    check_concrete_cache(table)
    seen = jax.tree.leaves((to_host(table), batch))
    data = b"".join(np.asarray(x).tobytes() for x in seen if is_concrete(x))
    checksums = np.ravel(multihost_utils.process_allgather(np.uint32(crc32(data))))
    if wrong := np.flatnonzero(checksums != checksums[0]).tolist():
        raise RuntimeError(
            f"expected the table and batch of process 0, got others in processes {wrong}; give "
            f"every process the same, as jax.experimental.multihost_utils.broadcast_one_to_all does"
        )
