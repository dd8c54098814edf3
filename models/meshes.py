"""Weights on a mesh: how each is split, said where it is made, and what that is on the devices."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv.mesh import Rules
from models.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a weight may be split: along one dimension, into parts that stay whole.

    axis: the dimension.
    parts: how many there are; devices that do not divide them each have the whole weight.
    of: what the parts are, in the plural.
    """

    axis: int
    parts: int
    of: str

    def over(self, mesh: Mesh, rules: Rules) -> NamedSharding:
        """Return where the parts are on a mesh: over the axes that split key/value heads."""
        axes = rules.split(mesh, kv_heads=self.parts)["kv_heads"]
        return NamedSharding(mesh, P(*[None] * self.axis, axes) if axes else P())

    def why_whole(self, mesh: Mesh, rules: Rules) -> str | None:
        """Return why each device has the whole weight, None where it has not."""
        if not self.over(mesh, rules).is_fully_replicated:
            return None
        devices = prod(mesh.shape[axis] for axis in rules.present(mesh, "kv_heads"))
        if devices == 1:
            return "no axis of the mesh splits weights"
        if self == WHOLE:
            return self.of
        return f"{self.parts} {self.of}, which {devices} devices do not divide"


WHOLE = Split(axis=0, parts=1, of="every device needs all of it")
"""Every device has the whole weight."""


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Make a mesh of the first devices.

    Args:
      sizes: by the name of an axis, how many devices it has.

    Raises:
      ModelError: when there are fewer devices.
    """
    wanted, there = prod(sizes.values()), jax.devices()
    if wanted > len(there):
        kind = there[0].platform
        virtual = (
            f"set JAX_NUM_CPU_DEVICES={wanted}, or "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted}, to have virtual ones"
            if kind == "cpu"
            else "give smaller sizes"
        )
        raise ModelError(
            f"A mesh of {' x '.join(f'{name}={size}' for name, size in sizes.items())} takes "
            f"{wanted} devices and there are {len(there)} ({kind}); {virtual}."
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=there[:wanted],
    )
