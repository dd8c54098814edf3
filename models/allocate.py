"""Memories on a mesh.

TODO: `jaxkv.sharding.allocate(make, mesh, rules)` replaces this file.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv.mesh import Rules
from models.meshes import WHOLE, Split


def allocate(make: Callable[[], Any], mesh: Mesh, rules: Rules, states: Mapping[str, Split]) -> Any:
    """Make a memory whose buffers are never whole on one device; its table is, on each.

    Args:
      make: makes the memory.
      mesh: what it is put on.
      rules: which axes split streams and heads.
      states: by name, how the states of recurrent layers are split.
    """

    def spec(path: Any, array: jax.ShapeDtypeStruct) -> NamedSharding:
        streams = tuple(axis for axis in rules.axes("streams") if mesh.shape.get(axis, 1) > 1)
        axes: list[Any] = [None] * array.ndim
        if array.shape[0] > 1 and array.shape[0] % math.prod(map(mesh.shape.get, streams)) == 0:
            axes[0] = streams
        if isinstance(path[-1], jax.tree_util.DictKey):  # a state, [S, N, ...]
            heads, first = states.get(path[-1].key, WHOLE), 2
        else:  # keys or values, [S, K, N, D]
            heads, first = Split(axis=0, parts=array.shape[1], of="key/value heads"), 1
        for i, axis in enumerate(heads.over(mesh, rules).spec, start=first):
            axes[i] = axis
        return NamedSharding(mesh, P(*axes))

    table, buffers = jaxkv.split(jax.eval_shape(make))
    table = jax.tree.map(lambda _: NamedSharding(mesh, P()), table)
    buffers = jax.tree_util.tree_map_with_path(spec, buffers)
    return jax.jit(make, out_shardings=jaxkv.join(table, buffers))()
