"""Caches on several devices: sharding rules, meshes, and bytes per device.

Functions use the current mesh, which `jax.set_mesh(mesh)` sets. Edits, plans and loops are called
as on one device.
"""

from jaxkv.core.partitioning import ShardingRules
from jaxkv.sharding.device_bytes import device_bytes
from jaxkv.sharding.fit_mesh import fit_mesh
from jaxkv.sharding.make import assert_in_sync, shapes

__all__ = ["ShardingRules", "assert_in_sync", "device_bytes", "fit_mesh", "shapes"]
