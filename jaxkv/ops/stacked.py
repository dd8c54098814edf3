"""A layer whose keys or values lie in an array of all layers, as a scan over layers wants them.

Streams and layers are one dimension of that array, so that a layer of several is found like a
stream of several, and nothing is cut out but what is read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class OfLayer:
    """Keys or values of a layer, where else an array `[S, K, N, D]` of that layer alone stands.

    A layer that is none of them is written nowhere, and what is read of it must not be used.

    all: `[S * L, K, N, D]`, those of all layers: number s * L + l is stream s of layer l.
    layer: `[S]` int32, which layer it is, the same in each stream. It may be traced.
    """

    all: jax.Array
    layer: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """That of what it stands for."""
        return (len(self.layer), *self.all.shape[1:])

    @property
    def dtype(self) -> jnp.dtype:
        """That of the array."""
        return self.all.dtype

    @property
    def layers(self) -> int:
        """L."""
        return self.all.shape[0] // len(self.layer)

    @property
    def is_there(self) -> jax.Array:
        """Whether there is such a layer; `[S]` bool."""
        return (self.layer >= 0) & (self.layer < self.layers)

    def numbers(self, streams: jax.Array) -> jax.Array:
        """Return the numbers of streams among those of all layers, past the last one for no layer.

        >>> keys = OfLayer(jnp.zeros((6, 1, 4, 8)), jnp.array([2, 2]))
        >>> keys.shape, keys.layers, keys.numbers(jnp.array([1, 0])).tolist()
        ((2, 1, 4, 8), 3, [5, 2])
        """
        numbers = jnp.arange(len(self.layer), dtype=jnp.int32) * self.layers + self.layer
        return jnp.where(self.is_there, numbers, self.all.shape[0])[streams]


def part_of_all(array: jax.Array, layer: int | jax.Array, layers: int) -> OfLayer:
    """Return what stands for a layer in an array of all layers, `[S * L, K, N, D]`."""
    return OfLayer(array, jnp.full(array.shape[0] // layers, layer, jnp.int32))


def is_of_layer(x: Any) -> bool:
    """Return whether something is a layer's part of an array of all layers."""
    return isinstance(x, OfLayer)


def each_array(change: Callable[..., Any], *stored: Any) -> Any:
    """Apply a function to the arrays of trees, to those of a layer among several as `OfLayer`."""
    return jax.tree.map(change, *stored, is_leaf=is_of_layer)


def of_streams(stored: Any, streams: jax.Array | None) -> Any:
    """Return arrays of some streams, `[P]`, or of all for None; `[P, K, N, D]`.

    They are a copy, but for all of an array that holds nothing else.
    """

    def one(x: Any) -> jax.Array:
        if isinstance(x, OfLayer):
            numbers = x.numbers(jnp.arange(len(x.layer)) if streams is None else streams)
            return x.all.at[numbers].get(mode="clip")
        return x if streams is None else x[streams]

    return each_array(one, stored)


def flat(stored: Any, streams: jax.Array) -> tuple[Any, jax.Array, int]:
    """Return the arrays that a loop or a kernel reads streams of, and where it finds them there.

    Args:
      stored: keys and values of a layer.
      streams: `[...]` int32, numbers of streams.

    Returns:
      Arrays `[S * L, K, N, D]`; `[...]` int32, the numbers of the streams among those of L layers;
      and L, 1 for those of one layer.
    """
    for x in filter(is_of_layer, jax.tree.leaves(stored, is_leaf=is_of_layer)):
        numbers = jnp.minimum(x.numbers(streams), x.all.shape[0] - 1)
        return each_array(lambda x: x.all, stored), numbers, x.layers
    return stored, streams, 1
