"""A layer whose keys or values lie in an array of all layers, as a scan over layers wants them.

Streams and layers are one dimension of that array. So a layer is found among all layers as a stream
is among all streams, and only what is read is cut out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, Num, PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class LayerView:
    """Keys or values of a layer; stands where else an array `[S, K, N, D]` of it would stand.

    A layer outside of 0 to L - 1 is written nowhere, and what is read of it must not be used.

    all: keys or values of all layers: number s * L + l is stream s of layer l.
    layer: the number of the layer, the same for each stream. It may be traced.
    """

    all: Num[Array, "S*L K N D"]
    layer: Int32[Array, " S"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that it stands for, `[S, K, N, D]`."""
        return (len(self.layer), *self.all.shape[1:])

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the array."""
        return self.all.dtype

    @property
    def layers(self) -> int:
        """How many layers there are, L."""
        return self.all.shape[0] // len(self.layer)

    @property
    def is_in_range(self) -> Bool[Array, " S"]:
        """Whether there is such a layer."""
        return (self.layer >= 0) & (self.layer < self.layers)

    def stream_indices(self, streams: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
        """Return where streams of this layer lie in `all`; past the end if there is no such layer.

        >>> keys = LayerView(jnp.zeros((6, 1, 4, 8)), jnp.array([2, 2]))
        >>> keys.shape, keys.layers, keys.stream_indices(jnp.array([1, 0])).tolist()
        ((2, 1, 4, 8), 3, [5, 2])
        """
        numbers = jnp.arange(len(self.layer), dtype=jnp.int32) * self.layers + self.layer
        return jnp.where(self.is_in_range, numbers, self.all.shape[0])[streams]


def make_layer_view(
    array: Num[Array, "SL K N D"], layer: int | Int32[Array, ""], layers: int
) -> LayerView:
    """Return what stands for a layer in an array of all, S * L streams; L is `layers`."""
    return LayerView(array, jnp.full(array.shape[0] // layers, layer, jnp.int32))


def is_layer_view(x: object) -> bool:
    """Return whether something is an `LayerView`."""
    return isinstance(x, LayerView)


def map_arrays(change: Callable[..., PyTree], *stored: PyTree) -> PyTree:
    """Apply a function to the arrays of trees; an `LayerView` is passed as a whole."""
    return jax.tree.map(change, *stored, is_leaf=is_layer_view)


def gather_streams(stored: PyTree, streams: Int32[Array, " P"] | None) -> PyTree:
    """Return the parts `[P, ...]` of arrays `[S, ...]`, for streams, or None for all.

    They are copies, except where all streams of a plain array are asked for.
    """

    def gather_array(x: jax.Array | LayerView) -> jax.Array:
        if isinstance(x, LayerView):
            numbers = x.stream_indices(jnp.arange(len(x.layer)) if streams is None else streams)
            return x.all.at[numbers].get(mode="clip")
        return x if streams is None else x[streams]

    return map_arrays(gather_array, stored)


def flatten_layers(
    stored: PyTree, streams: Int32[Array, "*n"]
) -> tuple[PyTree, Int32[Array, "*n"], int]:
    """Return the arrays that a loop or a kernel reads, and where streams lie in them.

    Args:
      stored: keys and values of a layer, `[S, K, N, D]` or `LayerView`.
      streams: numbers of streams.

    Returns:
      Arrays `[S * L, K, N, D]`; where the streams lie in these; and L, which is 1 for arrays of one
      layer alone.
    """
    for x in filter(is_layer_view, jax.tree.leaves(stored, is_leaf=is_layer_view)):
        numbers = jnp.minimum(x.stream_indices(streams), x.all.shape[0] - 1)
        return map_arrays(lambda x: x.all, stored), numbers, x.layers
    return stored, streams, 1
