"""Caches on several devices: sharding rules, meshes, and bytes per device.

Call planning functions and loops under `jax.set_mesh(mesh)`; edits do not need the mesh.
"""

from jaxkv.core.partitioning import ShardingRules
from jaxkv.sharding.device_bytes import device_bytes
from jaxkv.sharding.fit_mesh import fit_mesh
from jaxkv.sharding.make import assert_in_sync, move, shapes

__all__ = ["ShardingRules", "assert_in_sync", "device_bytes", "fit_mesh", "move", "shapes"]
