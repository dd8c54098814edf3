"""What JAX's transformations make of an implementation: derivatives, and batches of memories."""

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
    """Give an implementation the derivatives of another, in both modes.

    A loop whose length depends on the data cannot be run backwards, and what is fast forwards need
    not be so backwards.
    """

    def weigh(q: jax.Array, k: Stored, v: Stored, seen: Any, options: Options) -> Sums:
        # What decides which cells are seen is an argument, not closed over: where a step is jitted
        # inside of a `grad`, JAX asks for its derivative when the trace it belongs to has ended. A
        # bias is a part of it.
        @jax.custom_jvp
        def forwards(arrays: tuple, seen: Any) -> Sums:
            return way(*arrays, seen, options)

        @forwards.defjvp
        def derive(primals: tuple, tangents: tuple) -> tuple[Sums, Sums]:
            return jax.jvp(lambda arrays, seen: plain(*arrays, seen, options), primals, tangents)

        return forwards((q, k, v), seen)

    return weigh


def folded(way: Callable[..., Sums]) -> Callable[..., Sums]:
    """Make a batch of memories one memory of more streams, where `vmap` would do both branches.

    A `cond` whose condition differs within a batch becomes a choice between two results, and a loop
    goes on for all as long as for one of them.
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
            elif isinstance(sight.bias, OfPlaces):  # memories with weights of their own each
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
