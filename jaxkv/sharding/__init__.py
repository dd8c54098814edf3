"""Caches over many devices: where each part lies, and what that costs.

A mesh is the one at hand, `jax.set_mesh(mesh)`. All else is as on one device: verbs, plans, loops.
"""

from jaxkv.mesh import Rules
from jaxkv.sharding.agreement import agree
from jaxkv.sharding.fitting import fitted
from jaxkv.sharding.layouts import Layout, layout
from jaxkv.sharding.places import allocate, shapes, shardings

__all__ = ["Layout", "Rules", "agree", "allocate", "fitted", "layout", "shapes", "shardings"]
