"""Caches over many devices: where each part lies, and what that costs.

A mesh is the one at hand, `jax.set_mesh(mesh)`. All else is as on one device: verbs, plans, loops.
"""

from jaxkv.core.partitioning import ShardingRules
from jaxkv.sharding.device_bytes import DeviceBytes, device_bytes
from jaxkv.sharding.fit_mesh import fit_mesh
from jaxkv.sharding.make import assert_in_sync, make_sharded, shapes, shardings

__all__ = [
    "DeviceBytes",
    "ShardingRules",
    "assert_in_sync",
    "make_sharded",
    "fit_mesh",
    "device_bytes",
    "shapes",
    "shardings",
]
