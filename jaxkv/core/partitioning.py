"""Sharding rules of caches on the current mesh, and functions that run on each device's shard."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Self, TypeVar

import jax
import jax.numpy as jnp
from jax.dtypes import float0
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxkv.core.pytree import pytree_dataclass, static_field

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, PyTree, Shaped

    from jaxkv.core.types import AnyMesh


class Partitioned(ABC):
    """Base class of pytrees that define how a mesh splits their arrays."""

    @abstractmethod
    def partition_by(self, sharding_rules: ShardingRules, mesh: AnyMesh) -> PyTree:
        """Return one `PartitionSpec` for all arrays, or a pytree with one for each array."""


R = TypeVar("R")

Axis = str | tuple[str, ...] | None
"""An axis of a mesh, several axes that act as one axis, or no axis."""

_NAMES = {
    "streams": "streams",
    "kv_heads": "kv_heads",
    "cells": "cells",
    # MaxText's names of logical axes.
    "cache_batch": "streams",
    "cache_heads": "kv_heads",
    "cache_sequence": "cells",
}


@dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Mesh axes that split the dimensions of a cache. Hashable and static.

    An axis that is not in the mesh splits no dimension. A dimension of size 1 is not split.
    Heads that cannot be split evenly are replicated; see `jaxkv.sharding.fit_mesh`.

    streams: Axes that split the streams of tables and buffers.
    kv_heads: Axes that split key/value heads (for MLA, query heads). These axes also split model
      parameters and recurrent states (`shard_dims` of `CacheSpec.recurrent`).
    cells: Axes that split the cells of each stream in the buffers, but not in the table.
    """

    streams: Axis = "data"
    kv_heads: Axis = "tensor"
    cells: Axis = None

    @classmethod
    def of(cls, sharding_rules: Sequence[tuple[str, Axis]]) -> ShardingRules:
        """Return the rules for caches from logical axis rules of MaxText or Flax.

        Args:
          sharding_rules: pairs of a logical axis and a mesh axis; only the first pair of each
            logical axis is used. The logical axes of a cache are the fields of `ShardingRules`, and
            cache_batch, cache_heads and cache_sequence. Pairs with other logical axes are ignored.

        Raises:
          ValueError: If no pair has a logical axis of a cache.

        >>> ShardingRules.of([("cache_batch", "data"), ("kv_heads", "tensor"), ("mlp", "fsdp")])
        ShardingRules(streams='data', kv_heads='tensor', cells=None)
        """
        axes_by_field: dict[str, Axis] = {}
        try:
            pairs = [(name, axis) for name, axis in sharding_rules]
        except (TypeError, ValueError):
            raise TypeError(
                f"expected pairs of a logical axis and a mesh axis, got {sharding_rules!r:.60}; "
                'pass [("kv_heads", "tensor")]'
            ) from None
        for name, axis in pairs:
            if name in _NAMES:
                axes_by_field.setdefault(
                    _NAMES[name], tuple(axis) if isinstance(axis, list) else axis
                )
        if not axes_by_field:
            names = [name for name, _ in pairs]
            raise ValueError(
                f"expected a rule for one of {', '.join(_NAMES)}, got {names}; use these names"
            )
        return cls(**{field.name: axes_by_field.get(field.name) for field in fields(cls)})

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the mesh axes that are the value of a field, as a tuple."""
        axis = getattr(self, name)
        return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)

    def split(self, mesh: AnyMesh, **sizes: int) -> dict[str, tuple[str, ...]]:
        """Return the mesh axes that split each dimension; `()` for a dimension that is not split.

        Args:
          mesh: the mesh.
          sizes: sizes of the dimensions, by field name.

        Raises:
          ValueError: If the streams or the cells are more than 1, but not a multiple of the devices
            along their axes.
          ValueError: If an axis would split two dimensions.

        >>> mesh = jax.make_mesh((4,), ("tensor",))
        >>> ShardingRules().split(mesh, streams=2, kv_heads=8)
        {'streams': (), 'kv_heads': ('tensor',)}
        """
        axes_by_size = {}
        for name, size in sizes.items():
            axes, devices = self.present(mesh, name), self.devices(mesh, name)
            if size > 1 and size % devices and name != "kv_heads":
                multiple = -(-size // devices) * devices
                more = ", and a multiple of it for sequences" if name == "streams" else ""
                raise ValueError(
                    f"expected a number of {name} that {devices} devices divide "
                    f"({', '.join(axes)}), got {size}; take {multiple}{more}"
                )
            axes_by_size[name] = axes if size > 1 and size % devices == 0 else ()
        split = [axis for axes in axes_by_size.values() for axis in axes]
        for axis in split:
            if split.count(axis) > 1:
                names = [name for name, axes in axes_by_size.items() if axis in axes]
                raise ValueError(
                    f"expected an axis of the mesh to split one of {', '.join(sizes)}, got "
                    f"{axis!r} for {' and '.join(names)}; name it once in ShardingRules"
                )
        return axes_by_size

    def present(self, mesh: AnyMesh, name: str) -> tuple[str, ...]:
        """Return the axes of a field that are in the mesh and have more than one device."""
        return tuple(axis for axis in self.axes(name) if mesh.shape.get(axis, 1) > 1)

    def devices(self, mesh: AnyMesh, name: str) -> int:
        """Return the number of devices along the mesh axes of a field; 1 if there are no axes."""
        return prod(mesh.shape[axis] for axis in self.present(mesh, name))


@dataclass(frozen=True, kw_only=True)
class AxisPartition:
    """Axes of the current mesh that split each dimension; empty if a dimension is not split."""

    streams: tuple[str, ...] = ()
    kv_heads: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()

    @property
    def partition_spec(self) -> P:
        """`PartitionSpec` of an array `[S, K, N, ...]`."""
        return P(self.streams, self.kv_heads, self.cells)


@pytree_dataclass
class Sharded(Partitioned):
    """Base class of tables; a mesh splits their streams.

    sharding_rules: Mesh axes that split the cache, static; None on one device.
    """

    sharding_rules: ShardingRules | None = static_field(default=None)

    def with_sharding_rules(self, sharding_rules: ShardingRules | None) -> Self:
        """Return the table with the given sharding rules."""
        return replace(self, sharding_rules=sharding_rules)


def check_sharding_rules(rules: object) -> ShardingRules:
    """Return the argument if it is `ShardingRules` of valid axes; otherwise raise a TypeError.

    >>> check_sharding_rules([("kv_heads", "tensor")])
    Traceback (most recent call last):
    TypeError: expected ShardingRules, got list; pass sharding.ShardingRules(kv_heads="tensor"), ...
    """
    if not isinstance(rules, ShardingRules):
        raise TypeError(
            f"expected ShardingRules, got {type(rules).__name__}; pass "
            'sharding.ShardingRules(kv_heads="tensor"), or ShardingRules.of(pairs of axes)'
        )
    for field in fields(rules):
        axis = getattr(rules, field.name)
        names = axis if isinstance(axis, tuple) else () if axis is None else (axis,)
        if not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"expected names of mesh axes for {field.name}, got {axis!r}; pass a string, a "
                "tuple of strings, or None"
            )
    return rules


def check_mesh(mesh: object) -> None:
    """Raise a TypeError if the argument is not a mesh.

    >>> check_mesh(8)
    Traceback (most recent call last):
    TypeError: expected a mesh, got int; make one, as jax.make_mesh((8,), ("tensor",))
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"expected a mesh, got {type(mesh).__name__}; make one, as "
            'jax.make_mesh((8,), ("tensor",))'
        )


WHOLE = AxisPartition()
"""No dimension is split."""


def make_axis_partition(sharding_rules: ShardingRules | None, **sizes: int) -> AxisPartition:
    """Return how the current mesh splits dimensions of given sizes; see `ShardingRules.split`."""
    mesh = _require_mesh(sharding_rules)
    return (
        WHOLE
        if sharding_rules is None or mesh is None
        else AxisPartition(**sharding_rules.split(mesh, **sizes))
    )


def map_shards(
    sharding_rules: ShardingRules | None,
    fun: Callable[..., R],
    in_specs: PyTree[P],
    out_specs: PyTree[P],
) -> Callable[..., R]:
    """Return a function of whole arrays; each device calls `fun` with its shards of the arrays."""
    # Specs are trees, or tree prefixes, of `PartitionSpec`.
    mesh = _require_mesh(sharding_rules)
    if mesh is None:
        return fun
    run = jax.shard_map(fun, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    if AxisType.Explicit not in mesh.axis_types:
        return run

    def reshard_arguments(*args: PyTree) -> R:
        def reshard_argument(spec: P, arg: PyTree) -> PyTree:
            return jax.tree.map(
                lambda x: jax.sharding.reshard(x, keep_explicit_axes(spec, mesh)), arg
            )

        return run(
            *jax.tree.map(reshard_argument, in_specs, args, is_leaf=lambda x: isinstance(x, P))
        )

    return reshard_arguments


def keep_explicit_axes(spec: P, mesh: AnyMesh) -> P:
    """Remove from `spec` all mesh axes that are not explicit.

    The types of JAX arrays contain only explicit mesh axes.

    >>> kinds = (AxisType.Auto, AxisType.Explicit)
    >>> mesh = jax.sharding.AbstractMesh((2, 2), ("data", "tensor"), axis_types=kinds)
    >>> keep_explicit_axes(P("data", ("data", "tensor"), None), mesh) == P(None, "tensor", None)
    True
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def select_explicit(axes: Axis) -> Axis:
        names = (axes,) if isinstance(axes, str) else axes or ()
        return tuple(name for name in names if types[name] == AxisType.Explicit) or None

    return P(*map(select_explicit, spec))


def first_local_index(axes: tuple[str, ...], size: int) -> PyTree[Int32[Array, ""] | int]:
    """Return the global index of the first element of a device's shard, given the shard's size."""
    return jax.lax.axis_index(axes) * size if axes else 0


def to_local_index(
    index: Int32[Array, "*n"], axes: tuple[str, ...], count: int
) -> tuple[Int32[Array, "*n"], PyTree[Bool[Array, "*n"] | bool]]:
    """Convert global indices to indices in a shard; also return which indices are in the shard.

    An index outside of the shard is converted to 0.
    """
    if not axes:
        return index, True
    local = index - first_local_index(axes, count)
    is_own = (local >= 0) & (local < count)
    return jnp.where(is_own, local, 0), is_own


def gather_sharded(
    x: Shaped[Array, " ..."],
    axes: tuple[str, ...],
    index: Int32[Array, " ..."],
    *rest: Int32[Array, " ..."] | slice,
) -> Shaped[Array, " ..."]:
    """Return `x[index, *rest]` on all devices; `axes` split the first dimension of `x`."""
    local, is_own = to_local_index(index, axes, x.shape[0])
    values = x[(local, *rest)]
    if not axes:
        return values
    is_own = is_own.reshape(is_own.shape + (1,) * (values.ndim - is_own.ndim))
    return broadcast_from_owner(jnp.where(is_own, values, jnp.zeros_like(values)), axes)


def broadcast_from_owner(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Copy each entry of `x` to all devices, from the only device where the entry is not 0."""
    if not axes:
        return x
    if x.dtype == bool:
        return jax.lax.psum(x.astype(jnp.int32), axes) > 0
    return _sum_bits(x, axes)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _sum_bits(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    # Bits are summed instead of floats, since -0.0 + 0.0 is 0.0. Bits have no derivative.
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.complex(_sum_bits(x.real, axes), _sum_bits(x.imag, axes))
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return jax.lax.bitcast_convert_type(jax.lax.psum(bits, axes), x.dtype)


@_sum_bits.defjvp
def _sum_bits_derivative(axes: tuple[str, ...], primals: tuple, tangents: tuple) -> tuple:
    (x,), (tangent,) = primals, tangents
    # At most one device has a value that is not 0, so the same is true of tangents, and a float sum
    # copies them.
    if tangent.dtype != float0:
        tangent = jax.lax.psum(tangent, axes)
    return _sum_bits(x, axes), tangent


def current_mesh(sharding_rules: ShardingRules | None) -> AbstractMesh | None:
    """Return the current mesh; None without a mesh, without rules, or inside of a `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    # Inside of a caller's `shard_map`, the cache is a shard already.
    return (
        None if sharding_rules is None or mesh.empty or AxisType.Manual in mesh.axis_types else mesh
    )


def _require_mesh(sharding_rules: ShardingRules | None) -> AbstractMesh | None:
    if sharding_rules is not None and jax.sharding.get_abstract_mesh().empty:
        raise ValueError(
            f"expected a mesh for a cache with {sharding_rules}, got none; call it inside of "
            f"`with jax.set_mesh(mesh):`"
        )
    return current_mesh(sharding_rules)
