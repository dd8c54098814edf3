"""Weights on a mesh: how each is split, said where it is made, and what that is on the devices."""

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
    """How a weight may be split: along one dimension, into parts that stay whole.

    axis: the dimension.
    parts: how many there are; devices that do not divide them each have the whole weight.
    of: what the parts are, in the plural, whose noun is the first word that ends in s.
    with_cells: whether the devices that split cells split these parts too. Not if they belong to
      heads: devices with cells of the same heads all need them whole.
    """

    axis: int
    parts: int
    of: str
    with_cells: bool = False

    def over(self, mesh: Mesh | AbstractMesh, rules: ShardingRules) -> NamedSharding:
        """Return where the parts are on a mesh.

        They are split by all axes that may split them, or by those of heads alone; whole if the
        devices of neither divide them.
        """
        for axes in self._ways(mesh, rules):
            if axes and self.parts > 1 and self.parts % _devices(mesh, axes) == 0:
                return NamedSharding(mesh, P(*[None] * self.axis, axes))
        return NamedSharding(mesh, P())

    def why_whole(self, mesh: Mesh | AbstractMesh, rules: ShardingRules) -> str | None:
        """Return why each device has the whole weight, None where it has not."""
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
        """The axes that may split the parts: those of heads, and with those of cells if wanted."""
        heads = rules.present(mesh, "kv_heads")
        both = tuple(dict.fromkeys((*heads, *rules.present(mesh, "cells"))))
        return [both, heads] if self.with_cells else [heads]


def _devices(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    return prod(mesh.shape[axis] for axis in axes)


WHOLE = Split(axis=0, parts=1, of="every device needs all of it")
"""Every device has the whole weight."""

RULES = ShardingRules(cells="cells")
"""What each axis of a mesh of the command line splits: `data` streams, `tensor` heads."""


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Make a mesh of the first devices.

    Args:
      sizes: by the name of an axis, how many devices it has.

    Raises:
      ModelError: when there are fewer devices.
    """
    num_devices, devices = prod(sizes.values()), jax.devices()
    if num_devices > len(devices):
        kind = devices[0].platform
        virtual = (
            f"set JAX_NUM_CPU_DEVICES={num_devices}, or "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={num_devices}, to have virtual ones"
            if kind == "cpu"
            else "give smaller sizes"
        )
        raise ModelError(
            f"A mesh of {' x '.join(f'{name}={size}' for name, size in sizes.items())} takes "
            f"{num_devices} devices and there are {len(devices)} ({kind}); {virtual}."
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=devices[:num_devices],
    )
