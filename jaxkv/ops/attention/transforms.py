"""What JAX's transformations make of an implementation: derivatives, and batches of caches.

The arrays of an implementation are those of `jaxkv.ops.attention.api.Way`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxkv.ops.attention.bias import OfPlaces
from jaxkv.ops.attention.sight import Sight, with_array
from jaxkv.ops.attention.softmax import Options, Sums
from jaxkv.ops.quantised import Stored


def derived_by(plain: Callable[..., Sums], way: Callable[..., Sums]) -> Callable[..., Sums]:
    """Give the implementation `way` the derivatives of another, `plain`, in both modes.

    A loop whose length depends on the data cannot be run backwards, and what is fast forwards need
    not be fast backwards. What decides what is seen, `seen`, may be a sight or a mask.
    """

    def weigh(q: jax.Array, k: Stored, v: Stored, seen: Any, options: Options) -> Sums:
        # `seen` is an argument, not closed over: where a step is jitted inside of a `grad`, JAX
        # asks for the derivative when the trace of `seen` has ended. A bias is part of `seen`.
        @jax.custom_jvp
        def forwards(arrays: tuple, seen: Any) -> Sums:
            return way(*arrays, seen, options)

        @forwards.defjvp
        def derive(primals: tuple, tangents: tuple) -> tuple[Sums, Sums]:
            return jax.jvp(lambda arrays, seen: plain(*arrays, seen, options), primals, tangents)

        return forwards((q, k, v), seen)

    return weigh


def folded(way: Callable[..., Sums]) -> Callable[..., Sums]:
    """Under `vmap`, run an implementation on one cache with the streams of the whole batch.

    Else a `cond` whose condition differs within the batch would compute both branches, and a loop
    would go on for all caches as long as for any of them.
    """

    def weigh(q: jax.Array, k: Stored, v: Stored, sight: Sight, options: Options) -> Sums:
        @custom_vmap
        def alone(q: jax.Array, k: Stored, v: Stored, sight: Sight) -> Sums:
            return way(q, k, v, sight, options)

        @alone.def_vmap
        def together(size: int, batched: Any, *args: Any) -> tuple[Sums, Sums]:
            def stacked(x: jax.Array, has: bool) -> jax.Array:
                return x if has else jnp.broadcast_to(x, (size, *x.shape))

            q, k, v, sight = jax.tree.map(stacked, args, tuple(batched))
            first = jnp.arange(size, dtype=sight.streams.dtype) * sight.position.shape[1]
            function = None
            if isinstance(sight.bias, OfPlaces) and not any(jax.tree.leaves(batched[3].bias)):
                function, sight = args[3].bias, replace(sight, bias=None)
            elif isinstance(sight.bias, OfPlaces):  # each cache has weights of its own
                sight = jax.vmap(with_array)(sight)
            sight = replace(sight, streams=sight.streams + first[:, None])
            args = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (q, k, v, sight))
            if function is not None:
                args = *args[:3], replace(args[3], bias=function)
            sums = alone(*args)
            sums = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), sums)
            return sums, jax.tree.map(lambda _: True, sums)

        return alone(q, k, v, sight)

    return weigh
