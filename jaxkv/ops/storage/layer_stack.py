"""View of one layer in an array of the keys or values of all layers, for scans over layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from jaxkv.core.pytree import pytree_dataclass

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, Num, PyTree
    from typing_extensions import TypeIs


@pytree_dataclass
class LayerView:
    """Keys or values of one layer, used in place of an array `[S, K, N, D]`.

    Writes to a layer outside `[0, L)` are skipped; reads from such a layer give undefined results.

    all: Keys or values of all layers. Index s * L + l is stream s of layer l.
    layer: Index of the layer, repeated for each stream; may be traced.
    """

    all: Num[Array, "S*L K N D"]
    layer: Int32[Array, " S"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the layer, `[S, K, N, D]`."""
        return (len(self.layer), *self.all.shape[1:])

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the array."""
        return self.all.dtype

    @property
    def layers(self) -> int:
        """Number of layers, L."""
        return self.all.shape[0] // len(self.layer)

    @property
    def is_in_range(self) -> Bool[Array, " S"]:
        """Whether `layer` is in `[0, L)`."""
        return (self.layer >= 0) & (self.layer < self.layers)

    def stream_indices(self, streams: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
        """Return the indices in `all` of streams of the layer.

        >>> keys = LayerView(all=jnp.zeros((6, 1, 4, 8)), layer=jnp.array([2, 2]))
        >>> keys.shape, keys.layers, keys.stream_indices(jnp.array([1, 0])).tolist()
        ((2, 1, 4, 8), 3, [5, 2])
        """
        # A layer out of range gets the index S * L, at which writes are skipped.
        numbers = jnp.arange(len(self.layer), dtype=jnp.int32) * self.layers + self.layer
        return jnp.where(self.is_in_range, numbers, self.all.shape[0])[streams]


CellArray = jax.Array | LayerView
"""Array of one layer, `[S, K, N, D]`, or a `LayerView`."""

A = TypeVar("A", bound=CellArray)


def make_layer_view(
    array: Num[Array, "SL K N D"], layer: int | Int32[Array, ""], layers: int
) -> LayerView:
    """Return the view of a layer in an array of S * L streams, for L layers."""
    return LayerView(all=array, layer=jnp.full(array.shape[0] // layers, layer, jnp.int32))


def is_layer_view(x: object) -> TypeIs[LayerView]:
    """Return whether an object is a `LayerView`."""
    return isinstance(x, LayerView)


def locate_streams(
    array: CellArray, streams: Int32[Array, "*n"]
) -> tuple[jax.Array, Int32[Array, "*n"]]:
    """Return the array that contains a layer, and the indices of streams in this array."""
    return (array.all, array.stream_indices(streams)) if is_layer_view(array) else (array, streams)


def with_array(array: CellArray, new: Any) -> Any:
    """Replace the array that contains a layer, see `locate_streams`."""
    return replace(array, all=new) if is_layer_view(array) else new


def layer_views(stored: PyTree) -> list[LayerView]:
    """Return the views in a tree; an empty list if the layers are not stacked."""
    return [x for x in jax.tree.leaves(stored, is_leaf=is_layer_view) if is_layer_view(x)]


def map_arrays(change: Callable[..., PyTree], *stored: PyTree) -> PyTree:
    """Map a function over the arrays of trees; a `LayerView` is one leaf."""
    return jax.tree.map(change, *stored, is_leaf=is_layer_view)


def gather_streams(stored: PyTree, streams: Int32[Array, " P"] | None) -> PyTree:
    """Return the given streams of arrays `[S, ...]`; all streams if `streams` is None."""

    def gather_array(x: CellArray) -> jax.Array:
        if is_layer_view(x):
            numbers = x.stream_indices(jnp.arange(len(x.layer)) if streams is None else streams)
            return x.all.at[numbers].get(mode="clip")
        return x if streams is None else x[streams]

    return map_arrays(gather_array, stored)


def flatten_layers(
    stored: PyTree, streams: Int32[Array, "*n"]
) -> tuple[PyTree, Int32[Array, "*n"], int]:
    """Replace each view by its array `all`, and `streams` by indices of `all`; also return L."""
    for x in layer_views(stored):
        numbers = jnp.minimum(x.stream_indices(streams), x.all.shape[0] - 1)
        return map_arrays(lambda x: x.all, stored), numbers, x.layers
    return stored, streams, 1
