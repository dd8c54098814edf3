"""Caches over many devices: where each part lies, and what that costs.

A mesh is the one at hand, `jax.set_mesh(mesh)`. All else is as on one device: verbs, plans, loops.
"""

from jaxkv.mesh import ShardingRules
from jaxkv.sharding.agreement import assert_in_sync
from jaxkv.sharding.fitting import fit_mesh
from jaxkv.sharding.layouts import DeviceBytes, device_bytes
from jaxkv.sharding.places import make_sharded, shapes, shardings

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
