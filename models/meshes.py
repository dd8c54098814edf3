"""Rules that determine how a mesh splits parameters."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv.core.partitioning import ShardingRules
from models.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a mesh may split a parameter along one dimension.

    axis: dimension that may be split.
    parts: number of indivisible parts; the parameter is replicated if `parts` is not a multiple of
      the number of devices.
    of: name of the parts in the plural, for messages. For the singular, the final "s" of the
      first word that ends with "s" is removed.
    with_cells: whether the mesh axes that split cells may also split the parameter. False for parts
      of heads, since each device that has some cells of a head needs the whole head.
    """

    axis: int
    parts: int
    of: str
    with_cells: bool = False

    def over(self, mesh: Mesh | AbstractMesh, rules: ShardingRules) -> NamedSharding:
        """Return the sharding of the parameter on a mesh.

        The tuples of axes from `_ways` are tried in order. The first tuple whose number of devices
        divides `parts` splits the parameter. If no number divides `parts`, or if `parts` is 1, the
        parameter is replicated.
        """
        for axes in self._ways(mesh, rules):
            if axes and self.parts > 1 and self.parts % _devices(mesh, axes) == 0:
                return NamedSharding(mesh, P(*[None] * self.axis, axes))
        return NamedSharding(mesh, P())

    def why_whole(self, mesh: Mesh | AbstractMesh, rules: ShardingRules) -> str | None:
        """Return the reason why the parameter is replicated; None if the mesh splits it."""
        if not self.over(mesh, rules).is_fully_replicated:
            return None
        devices = _devices(mesh, self._ways(mesh, rules)[0])
        if devices == 1 and not rules.present(mesh, "cells"):
            return "no axis of the mesh splits weights"
        if self == WHOLE:
            return self.of
        if devices == 1:
            return f"no axis of the mesh splits {self.of}"
        of = re.sub(r"s\b", "", self.of, count=1) if self.parts == 1 else self.of
        return f"{self.parts} {of}, which {devices} devices do not divide"

    def _ways(self, mesh: Mesh | AbstractMesh, rules: ShardingRules) -> list[tuple[str, ...]]:
        """Return tuples of axes that may split the parts, the preferred tuple first."""
        heads = rules.present(mesh, "kv_heads")
        both = tuple(dict.fromkeys((*heads, *rules.present(mesh, "cells"))))
        return [both, heads] if self.with_cells else [heads]


def _devices(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    return prod(mesh.shape[axis] for axis in axes)


WHOLE = Split(axis=0, parts=1, of="every device needs all of it")
"""`Split` of a parameter that every mesh replicates."""

RULES = ShardingRules(cells="cells")
"""Rules of the command line: axes `data`, `tensor` and `cells` split streams, heads and cells."""


def axes_of(mesh: Mapping[str, int]) -> str:
    """Format the sizes of mesh axes in the syntax of `--mesh`."""
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Make a mesh of the first devices; raise `ModelError` if there are too few devices."""
    num_devices, devices = prod(sizes.values()), jax.devices()
    if num_devices > len(devices):
        kind = devices[0].platform
        virtual = (
            f"set JAX_NUM_CPU_DEVICES={num_devices}, or "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={num_devices}, for virtual devices"
            if kind == "cpu"
            else "give smaller sizes"
        )
        raise ModelError(
            f"expected {num_devices} devices for the mesh {axes_of(sizes)}, got {len(devices)} "
            f"({kind}); {virtual}."
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=devices[:num_devices],
    )
