"""Meshes of virtual devices, and caches on them."""

import math
from dataclasses import dataclass

import jax
from jax.sharding import AxisType

import jaxkv
from tests.helpers import caches
from tests.helpers.caches import Kind
from tests.helpers.pods import RULES, place_on_mesh  # noqa: F401


def mesh_of(mode=AxisType.Auto, **axes):
    count = math.prod(axes.values())
    types = (mode,) * len(axes)
    return jax.make_mesh((*axes.values(),), (*axes,), types, devices=jax.devices()[:count])


@dataclass(frozen=True)
class OnMesh(Kind):
    axes: tuple[tuple[str, int], ...] = ()

    def make(self, rope=caches.ROPE):
        return place_on_mesh(super().make(rope))


near = jaxkv.Window.sliding(3)


def _kind(name, axes, sequences=4, **options):
    return OnMesh(name, sequences=sequences, axes=tuple(axes.items()), **options)


DATA_CELLS, TENSOR_CELLS = {"data": 2, "cells": 2}, {"tensor": 2, "cells": 2}
STRIPED = {"placement": "striped:2"}
KINDS = [
    _kind("all", {"data": 2, **TENSOR_CELLS}, cells=8, streams=4, **STRIPED),
    _kind("data", {"data": 4}, cells=8, streams=4),
    _kind("window", TENSOR_CELLS, cells=12, windows=(near,)),
    _kind("full-and-window", DATA_CELLS, cells=14, streams=4, windows=(None, near)),
    _kind("groups", {"data": 2, "tensor": 2}, cells=10, streams=2),
    _kind("striped-window", DATA_CELLS, 8, cells=16, streams=4, windows=(near,), **STRIPED),
    _kind("tiled", TENSOR_CELLS, cells=16, placement="tiled"),
    _kind("groups-tiled", DATA_CELLS, cells=16, streams=2, windows=(None, near), placement="tiled"),
]
