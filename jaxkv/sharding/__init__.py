"""Caches over many devices: where each part lies, and what that costs.

A mesh is the one at hand, `jax.set_mesh(mesh)`. All else is as on one device: edits, plans, loops.
"""

from jaxkv.core.partitioning import ShardingRules
from jaxkv.sharding.device_bytes import device_bytes
from jaxkv.sharding.fit_mesh import fit_mesh
from jaxkv.sharding.make import assert_in_sync, shapes

__all__ = ["ShardingRules", "assert_in_sync", "device_bytes", "fit_mesh", "shapes"]
