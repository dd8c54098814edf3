"""Buffers of an attention cache: the keys and values of all cells."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import jax

from jaxkv.core.array_utils import nbytes
from jaxkv.core.pytree import pytree_dataclass, static_field
from jaxkv.kv.layer_kv import HeadSizes, LayerKV, make_layer_kv
from jaxkv.ops.storage.latent import ValueSlice
from jaxkv.ops.storage.layer_stack import (
    make_layer_view,
    map_arrays,
)
from jaxkv.ops.storage.storage import Stored
from jaxkv.rope import NotGiven, Rope

if TYPE_CHECKING:
    pass


X = TypeVar("X")


@pytree_dataclass
class Buffers:
    """Keys and values of all cells, for each layer.

    k: L arrays `[S, K, N, D]` of keys. If stacked, one array `[S * L, K, N, D]`, in which index s *
      L + l is stream s of layer l. The key of a cell at position p with shift d is rotated for
      position p - d. If n heads share a row (`ops.storage.head_rows`), K becomes K / n, and D
      becomes the size of a row.
    v: L arrays `[S, K, N, Dv]` of values; if stacked, one array `[S * L, K, N, Dv]`.
    ropes: Rotary embedding of each layer's keys, static; None for keys without rotation, `NotGiven`
      if the cache was made without `rope=`.
    rotated: Whether heads are stored rotated by a Hadamard matrix (`ops.storage.hadamard`), static.
    """

    k: tuple[Stored, ...]
    v: tuple[Stored | ValueSlice, ...]
    ropes: tuple[Rope | NotGiven | None, ...] = static_field()
    head_sizes: tuple[HeadSizes, ...] = static_field()
    stacked: bool = static_field(default=False)
    rotated: bool = static_field(default=False)

    @property
    def layers(self) -> int:
        """Number of layers, L."""
        return len(self.ropes)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the keys and values of all layers."""
        return nbytes(self)

    @property
    def layers_per_array(self) -> int:
        """Number of layers in each array: L if stacked, otherwise 1."""
        return self.layers if self.stacked else 1

    @property
    def heads_per_row(self) -> int:
        """Number of heads in a row of an array, see `ops.storage.head_rows`."""
        return self.head_sizes[0].kv_heads // self.k[0].shape[-3]

    def layer(self, layer: int | jax.Array) -> LayerKV:
        """Return the keys and values of a layer, as two `LayerView` if layers are stacked."""
        if not self.stacked:
            sizes = self.head_sizes[layer]
            return make_layer_kv(self.k[layer], self.v[layer], sizes, rotated=self.rotated)
        k, v = jax.tree.map(
            lambda x: make_layer_view(x, layer, self.layers), (self.k[0], self.v[0])
        )
        return make_layer_kv(k, v, self.head_sizes[0], rotated=self.rotated)

    def with_layer(self, layer: int | jax.Array, new: LayerKV) -> Buffers:
        """Replace the keys and values of a layer, in the form that `Buffers.layer` returns."""
        if self.stacked:
            k, v = map_arrays(lambda x: x.all, (new.keys, new.values))
            return replace(self, k=(k,), v=(v,))

        def put(old: tuple[X, ...], new: X) -> tuple[X, ...]:
            return (*old[:layer], new, *old[layer + 1 :])

        return replace(self, k=put(self.k, new.keys), v=put(self.v, new.values))
