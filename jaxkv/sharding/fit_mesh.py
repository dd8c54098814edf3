"""Meshes for caches whose heads cannot be split evenly over all devices of a mesh axis."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Literal, get_args

from jax.sharding import AbstractMesh, Mesh

from jaxkv.cache import Cache
from jaxkv.core.partitioning import ShardingRules, check_mesh, check_sharding_rules
from jaxkv.sharding.device_bytes import num_kv_heads

if TYPE_CHECKING:
    from jaxkv.core.types import AnyMesh

Surplus = Literal["cells", "replicate", "refuse"]
"""Use of the mesh axis that `fit_mesh` adds."""


def fit_mesh(
    cache: Cache,
    mesh: AnyMesh,
    sharding_rules: ShardingRules,
    *,
    surplus: Surplus = "cells",
) -> tuple[AnyMesh, ShardingRules]:
    """Return a mesh and rules that split the heads over no more devices than there are heads.

    Args:
      cache: cache, or its shapes from `jax.eval_shape`.
      mesh: concrete or abstract mesh.
      sharding_rules: names of the mesh axes that split the cache. If no axis splits heads, nothing
        changes.
      surplus: use of the n devices along the second axis (see Returns). "cells": the cells of each
        head are split over the n devices. `make_cache` then raises unless the number of cells is a
        multiple of n. The placement `striped:n` fills these devices evenly. "replicate": the n
        devices store copies of the same heads. "refuse": raise a ValueError.

    Returns:
      The new mesh and rules. The mesh axis that splits the heads becomes two axes. The first axis
      has the old name. Its size is the greatest common divisor of the old size and the numbers of
      heads of all layers with several heads. The second axis is named "cells" or "copies". The mesh
      changes only if a layer has several heads, and the old size does not divide the number of
      these heads. Otherwise, mesh and rules are returned unchanged. Recurrent states are ignored.

    Raises:
      ValueError: If the value of `surplus` is unknown.
      ValueError: If the mesh must change, and `surplus` is "refuse".
      ValueError: If the mesh must change, and several axes split the heads.
      ValueError: If the mesh must change, and the name of the new axis is already in use.

    Examples:
      >>> mesh = jax.make_mesh((4,), ("tensor",))
      >>> make = lambda: make_cache(CacheSpec.attention(layers=1, kv_heads=2, head_dim=4), cells=64)
      >>> mesh, rules = sharding.fit_mesh(jax.eval_shape(make), mesh, sharding.ShardingRules())
      >>> dict(mesh.shape), rules.cells
      ({'tensor': 2, 'cells': 2}, 'cells')
    """
    if surplus not in get_args(Surplus):
        raise ValueError(
            f"expected a surplus of {get_args(Surplus)}, got {surplus!r}; pass one of them"
        )
    check_mesh(mesh)
    axes = check_sharding_rules(sharding_rules).present(mesh, "kv_heads")
    heads = num_kv_heads(cache) - {1}
    devices = sharding_rules.devices(mesh, "kv_heads")
    fit = gcd(devices, *heads)
    if not heads or fit == devices:
        return mesh, sharding_rules
    if surplus == "refuse":
        raise ValueError(
            f"expected numbers of kv_heads that {devices} devices divide ({', '.join(axes)}), got "
            f"{sorted(heads)}; take an axis of {fit}, or surplus='cells'"
        )
    if len(axes) != 1:
        raise ValueError(f"expected one axis for kv_heads, got {', '.join(axes)}; make them one")
    name = {"cells": "cells", "replicate": "copies"}[surplus]
    if name in mesh.axis_names:
        raise ValueError(
            f"expected no axis named {name!r} yet, got a mesh of {dict(mesh.shape)}; take "
            f"{axes[0]}={fit} and {name}={mesh.shape[name] * devices // fit}"
        )
    place = mesh.axis_names.index(axes[0])
    shape, names, types = [*mesh.shape.values()], [*mesh.axis_names], [*mesh.axis_types]
    shape[place : place + 1] = fit, devices // fit
    names.insert(place + 1, name)
    types.insert(place + 1, types[place])
    if isinstance(mesh, Mesh):
        finer = Mesh(mesh.devices.reshape(shape), tuple(names), axis_types=tuple(types))
    else:
        finer = AbstractMesh(tuple(shape), tuple(names), axis_types=tuple(types))
    if surplus == "replicate":
        return finer, sharding_rules
    cells = tuple(dict.fromkeys((*sharding_rules.axes("cells"), name)))
    cells = cells[0] if len(cells) == 1 else cells
    return finer, ShardingRules(
        streams=sharding_rules.streams, kv_heads=sharding_rules.kv_heads, cells=cells
    )
