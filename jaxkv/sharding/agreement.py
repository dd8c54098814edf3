"""Whether all processes hold the same table."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxkv.memory import Memory, Table, split


def agree(memory: Memory) -> None:
    """Raise unless all devices and processes hold the same table.

    What JAX calls replicated is never compared: processes that were given different batches plan
    and compute on, each by its own. Every process must call this.

    Raises:
      RuntimeError: when devices differ; it names their processes.

    Examples:
      >>> mesh = jax.make_mesh((2, 2), ("data", "tensor"))
      >>> sizes = dict(layers=1, cells=8, kv_heads=2, head_dim=4, sequences=2, streams=2)
      >>> sharding.agree(sharding.allocate(lambda: make_kv_cache(**sizes), mesh))
    """
    table, buffers = split(memory)
    mesh = getattr(jax.tree.leaves(table)[0].sharding, "mesh", None)
    if table.rules is None or mesh is None:
        return
    specs, _ = table.specs(buffers, mesh)
    run = jax.shard_map(
        _digest, mesh=mesh, in_specs=(specs,), out_specs=P(mesh.axis_names), check_vma=False
    )
    found = multihost_utils.process_allgather(jax.jit(run)(table), tiled=True)
    # The devices of a row hold the same streams.
    axes = table.rules.split(mesh, streams=table.facts.streams)["streams"]
    numbers = _by_streams(np.asarray(found).reshape(mesh.devices.shape), mesh, axes)
    devices = _by_streams(mesh.devices, mesh, axes)
    for mine, holders in zip(numbers, devices, strict=True):
        wrong = sorted({device.process_index for device in holders[mine != mine[0]]})
        if wrong:
            raise RuntimeError(
                f"wanted one table on all devices, got another one in processes {wrong} than in "
                f"process {holders[0].process_index}: give every process the same batches, see "
                f"jax.experimental.multihost_utils.broadcast_one_to_all"
            )


def _digest(table: Table) -> jax.Array:
    """Return one number of a device's share of a table, `[1]` uint32."""
    found = jnp.concatenate(jax.tree.leaves(table.digest()))
    return jnp.sum(found * (2 * jnp.arange(found.size, dtype=jnp.uint32) + 1), keepdims=True)


def _by_streams(x: np.ndarray, mesh: Mesh, axes: tuple[str, ...]) -> np.ndarray:
    """Lay out what each device has, in rows of those that share their streams."""
    places = [mesh.axis_names.index(axis) for axis in axes]
    rows = prod(x.shape[place] for place in places)
    return np.moveaxis(x, places, range(len(places))).reshape(rows, -1)
