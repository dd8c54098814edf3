"""Memory that a model and its cache need on each device of a mesh; nothing is allocated."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh

import jaxkv
from jaxkv.core.constants import MAX_CELLS
from jaxkv.sharding import device_bytes, fit_mesh
from jaxkv.sharding.device_bytes import DeviceBytes
from models.model import Model, name_of, on_mesh


@dataclass(frozen=True, kw_only=True)
class Part:
    """Memory of a cache part, which contains the buffers of all layers of one kind.

    kind: kind of the layers, such as "full attention" (see `kind_of`).
    each: bytes for each token or for each sequence (see `unit`) in all layers of the part, summed
      over devices.
    unit: "sequence" for recurrent states; "token" for other layers.
    kept: number of cells for each sequence if the layers have a window; otherwise None.
    on_device: bytes of the buffers on each device.
    """

    kind: str
    layers: int
    each: int
    unit: Literal["token", "sequence"]
    kept: int | None
    on_device: int


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Memory of a model and its cache on each device of a mesh.

    mesh: sizes of the mesh axes, by name.
    cache: values of the options `sequences`, `streams` and `cells` of the cache; None for each
      absent option.
    parts: memory of each kind of layer.
    splits: names of the arrays that each mesh axis splits.
    whole: bytes of the replicated params, by the reason for replication.
    """

    mesh: Mapping[str, int]
    cache: Mapping[str, int | None]
    layout: DeviceBytes
    parts: tuple[Part, ...]
    splits: Mapping[str, tuple[str, ...]]
    whole: Mapping[str, int]

    def a_sequence(self, length: int | None) -> int:
        """Return the bytes that a sequence of `length` tokens needs in the buffers of the cache.

        The bytes are summed over devices.
        """
        found = 0
        for part in self.parts:
            tokens = length if part.kept is None else min(length or part.kept, part.kept)
            found += part.each * (1 if part.unit == "sequence" else tokens or 0)
        return found


def costs_of(model: Model, **sizes: Any) -> Costs:
    """Return the memory of a model and a cache on the mesh of the model.

    The keyword arguments `sizes` are options of `Model.make_cache`. Raises a ValueError if the
    sizes are inconsistent, or cannot be divided among the devices of the mesh.
    """
    cache = model.cache_shapes(**sizes)
    return Costs(
        mesh=dict(model.mesh.shape),
        cache={name: sizes.get(name) for name in ("sequences", "streams", "cells")},
        layout=_layout(model, cache),
        parts=tuple(_part(part, model) for part in cache.parts),
        splits=_splits(model, cache),
        whole=whole_bytes(model),
    )


def costs_on_fitted_mesh(model: Model, **sizes: Any) -> Costs | None:
    """Return the memory on the mesh that `jaxkv.sharding.fit_mesh` returns.

    Returns None if `fit_mesh` returns the mesh of the model. Raises a ValueError if `fit_mesh`
    finds no mesh for the heads, or if the sizes cannot be divided among the devices of its mesh.
    """
    cache = model.cache_shapes(**sizes)
    mesh, rules = fit_mesh(cache, model.mesh, model.rules)
    return None if mesh is model.mesh else costs_of(on_mesh(model, mesh, rules), **sizes)


def most_sequences(
    model: Model, *, room: int, length: int | None, streams: int, **sizes: Any
) -> int:
    """Return how many sequences fit if each device has `room` bytes for params and cache.

    The argument `length` is the number of tokens of each sequence. It is None if the size of the
    cache does not depend on this number. All streams have the same number of sequences.
    """

    def fits(each: int) -> bool:
        whole = None if length is None else whole_cells(model, each * length)
        if max(each, whole or 0) >= MAX_CELLS:  # no stream has more cells
            return False
        shapes = model.cache_shapes(sequences=each * streams, streams=streams, cells=whole, **sizes)
        return _layout(model, shapes).total <= room

    num_fitting, above = 0, 1
    while fits(above):
        num_fitting, above = above, 2 * above
    while above - num_fitting > 1:
        middle = (num_fitting + above) // 2
        if fits(middle):
            num_fitting = middle
        else:
            above = middle
    return num_fitting * streams


def whole_cells(model: Model, tokens: int) -> int:
    """Round a number of tokens up to a multiple of the number of devices that split cells."""
    devices = model.rules.devices(model.mesh, "cells")
    return -(-tokens // devices) * devices


def whole_bytes(model: Model) -> dict[str, int]:
    """Return the bytes of the replicated params, by the reason for replication."""
    bytes_of, why = Counter[str](), model.whole_weights()
    for path, array in jax.tree_util.tree_leaves_with_path(model.params):
        if reason := why.get(name_of(path)):
            bytes_of[reason] += array.size * array.dtype.itemsize
    return dict(bytes_of.most_common())


def kind_of(part: jaxkv.Cache) -> str:
    """Return a name for the kind of layers in a cache part, such as "full attention"."""
    if part.table.spec.kind == "recurrent":
        return "recurrent states"
    if part.table.spec.is_cross_attention:
        return "sources"
    window = part.table.window
    return f"window of {window.width:,}" if window else "full attention"


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """Make a mesh without devices, from the sizes of the axes."""
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def _splits(model: Model, cache: jaxkv.Cache) -> dict[str, tuple[str, ...]]:
    """Return the names of the arrays that each mesh axis splits, from the arrays' shardings."""
    found: dict[str, dict[str, None]] = {axis: {} for axis in model.mesh.shape}

    def note(array: Any, *names: str) -> None:
        spec = array.sharding.spec
        for axes, name in zip(spec, [*names[: len(spec)], *names[-1:] * len(spec)], strict=False):
            for axis in (axes,) if isinstance(axes, str) else axes or ():
                found[axis][name] = None

    for part in cache.parts:
        table, buffers = part.table, part.buffers
        for array in jax.tree.leaves(buffers):
            if table.spec.kind == "recurrent":
                note(array, f"{array.shape[0]:,} streams", "states")
            else:
                streams, heads, cells, _ = array.shape
                note(array, f"{streams:,} streams", f"{heads:,} kv_heads", f"{cells:,} cells")
    for array in jax.tree.leaves(model.params):
        note(array, "weights")
    return {axis: tuple(names) for axis, names in found.items()}


def _layout(model: Model, cache: Any) -> DeviceBytes:
    heads = getattr(model.config, "heads", None)
    return device_bytes(cache, model.mesh, model.rules, heads=heads, params=model.params)


def _part(part: jaxkv.Cache, model: Model) -> Part:
    table, buffers = part.table, part.buffers
    spec, num_bytes = table.spec, part.nbytes - table.nbytes
    recurs = spec.kind == "recurrent"
    units = spec.sequences if recurs else spec.streams * table.num_cells
    return Part(
        kind=kind_of(part),
        layers=table.num_layers(buffers),
        each=num_bytes // units,
        unit="sequence" if recurs else "token",
        kept=None if recurs or table.window is None else units // spec.sequences,
        on_device=device_bytes(part, model.mesh, model.rules).buffers,
    )
