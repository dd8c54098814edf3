"""Whether all processes hold the same table, and were given the same batch."""

from math import prod
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxkv.memory import Memory, Table, split
from jaxkv.places import is_concrete, is_traced
from jaxkv.verbs.known import check_known


def agree(memory: Memory, batch: Any = None) -> None:
    """Raise unless devices agree on the table of their streams, and all processes on the batch.

    What JAX calls replicated is never compared: processes that were given different batches plan
    and compute on, each by its own. Every process must call this.

    Args:
      memory: any memory. Where each stream lies on devices of one process alone there is nothing
        to compare, and the batch tells.
      batch: what every process was given, such as a batch: a tree of arrays and numbers. Arrays
        that are split over processes are left out.

    Raises:
      RuntimeError: when devices or processes differ; it names the processes.
      TypeError: when something else than arrays and numbers is to be compared, or inside of `jit`.
      ValueError: when the table was donated, or is that of a batch of memories.

    Examples:
      >>> mesh = jax.make_mesh((2, 2), ("data", "tensor"))
      >>> sizes = dict(layers=1, cells=8, kv_heads=2, head_dim=4, sequences=2, streams=2)
      >>> sharding.agree(sharding.allocate(lambda: make_kv_cache(**sizes), mesh))
    """
    if is_traced(memory, batch):
        raise TypeError("wanted values to compare, got traced ones: call agree outside of jit")
    table, buffers = split(memory)
    check_known(table)
    given = np.ravel(multihost_utils.process_allgather(np.uint32(_checksum(batch))))
    _check("batch in all processes", given, np.arange(jax.process_count()))
    mesh = getattr(getattr(jax.tree.leaves(table)[0], "sharding", None), "mesh", None)
    if table.rules is None or mesh is None:
        return
    specs, _ = table.specs(buffers, mesh)
    run = jax.shard_map(
        _digest, mesh=mesh, in_specs=(specs,), out_specs=P(mesh.axis_names), check_vma=False
    )
    found = multihost_utils.process_allgather(jax.jit(run)(table), tiled=True)
    # The devices of a group hold the same streams.
    axes = table.rules.split(mesh, streams=table.facts.streams)["streams"]
    numbers = _by_streams(np.asarray(found).reshape(mesh.devices.shape), mesh, axes)
    processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
    for group in zip(numbers, _by_streams(processes, mesh, axes), strict=True):
        _check("table on all devices", *group)


def _check(what: str, numbers: np.ndarray, processes: np.ndarray) -> None:
    """Raise unless all numbers are one; each is of one of the processes."""
    if wrong := np.unique(processes[numbers != numbers[0]]).tolist():
        raise RuntimeError(
            f"wanted one {what}, got another one in processes {wrong} than in process "
            f"{processes[0]}: give every process the same batches, see jaxkv.sharding.broadcast"
        )


def _checksum(batch: Any) -> int:
    """Return a number of the arrays that this process can look at."""
    number = crc32(str(jax.tree.structure(batch)).encode())
    for path, leaf in jax.tree.leaves_with_path(batch):
        if is_concrete(leaf):
            array = np.asarray(leaf)
            if array.dtype == object:
                raise TypeError(
                    f"wanted arrays and numbers to compare, got {type(leaf)}: give agree the "
                    f"batch that was made of it"
                )
            name = f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}"
            number = crc32(array.tobytes(), crc32(name.encode(), number))
    return number


def _digest(table: Table) -> jax.Array:
    """Return one number of a device's share of a table, `[1]` uint32."""
    found = jnp.concatenate(jax.tree.leaves(table.digest()))
    return jnp.sum(found * (2 * jnp.arange(found.size, dtype=jnp.uint32) + 1), keepdims=True)


def _by_streams(x: np.ndarray, mesh: Mesh, axes: tuple[str, ...]) -> np.ndarray:
    """Lay out what each device has, in groups of those that share their streams."""
    places = [mesh.axis_names.index(axis) for axis in axes]
    rows = prod(x.shape[place] for place in places)
    return np.moveaxis(x, places, range(len(places))).reshape(rows, -1)
