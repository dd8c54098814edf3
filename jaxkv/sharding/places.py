"""Where each array of a memory lies on a mesh, and memories made there."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv.memory import Memory, join, split
from jaxkv.mesh import Rules


def shardings(memory: Memory, mesh: Mesh | AbstractMesh, rules: Rules) -> Memory:
    """Return where each array of a memory lies on a mesh.

    Args:
      memory: any memory, or its shapes.
      mesh: the mesh.
      rules: which of its axes split what.

    Returns:
      A tree like the memory with a `NamedSharding` for each array; its tables know the rules.

    Raises:
      ValueError: when streams or cells are more than one, and no multiple of the devices that they
        are split over. Heads that the devices do not divide are whole on each.

    Examples:
      >>> mesh = jax.make_mesh((2, 2), ("data", "tensor"))
      >>> make = lambda: make_kv_cache(
      ...     layers=1, cells=8, kv_heads=2, head_dim=4, sequences=4, streams=4
      ... )
      >>> where = sharding.shardings(jax.eval_shape(make), mesh, sharding.Rules())
      >>> [*where.buffers.k[0].spec], [*where.table.position.spec]
      (['data', 'tensor', None], ['data'])
    """
    table, buffers = split(memory)
    specs = table.with_rules(rules).specs(buffers, mesh)
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)
    return Memory(table=where[0], buffers=where[1])


def shapes(make: Callable[[], Memory], mesh: Mesh | AbstractMesh, rules: Rules) -> Memory:
    """Return the shapes of a memory on a mesh, each with its sharding; nothing is allocated.

    They are what `init_full` plans for, what a step is lowered and compiled for, and the target
    that Orbax restores a memory to.

    Args:
      make: makes the memory, of sizes that are known.
      mesh: the mesh.
      rules: which of its axes split what.
    """
    memory = jax.eval_shape(make)
    where = shardings(memory, mesh, rules)
    table, buffers = split(memory)

    def placed(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(placed, join(table.with_rules(rules), buffers), where)


def allocate(make: Callable[[], Memory], mesh: Mesh, rules: Rules | None = None) -> Memory:
    """Make a memory on a mesh, each device its own share: no array is first made whole somewhere.

    Args:
      make: makes the memory, such as `lambda: make_kv_cache(...)`.
      mesh: the mesh.
      rules: which of its axes split what, by default `Rules()`.

    Returns:
      The memory. Planning a batch, and all that reads or writes its buffers, wants the mesh at
      hand, `jax.set_mesh(mesh)`; edits and questions do not.

    Raises:
      ValueError: see `shardings`.

    Examples:
      >>> mesh = jax.make_mesh((2, 2), ("data", "tensor"))
      >>> sizes = dict(layers=1, cells=8, kv_heads=2, head_dim=4, sequences=2, streams=2)
      >>> memory = sharding.allocate(lambda: make_kv_cache(**sizes), mesh)
      >>> memory.buffers.k[0].shape, memory.buffers.k[0].addressable_shards[0].data.shape
      ((2, 2, 8, 4), (1, 1, 8, 4))
    """
    rules = Rules() if rules is None else rules

    def made() -> Memory:
        table, buffers = split(make())
        return join(table.with_rules(rules), buffers)

    where = shardings(jax.eval_shape(make), mesh, rules)
    return jax.jit(made, out_shardings=where)()


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)
