"""What JAX's transformations make of an implementation: derivatives, and batches of memories."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxkv.ops.attention.sight import Sight
from jaxkv.ops.attention.softmax import Options, Sums
from jaxkv.ops.quantised import Stored


def derived_by(plain: Callable[..., Sums], way: Callable[..., Sums]) -> Callable[..., Sums]:
    """Give an implementation the derivatives of another, in both modes.

    A loop whose length depends on the data cannot be run backwards, and what is fast forwards need
    not be so backwards.
    """

    def weigh(q: jax.Array, k: Stored, v: Stored, seen: Any, options: Options) -> Sums:
        # What decides which cells are seen is an argument, not closed over: where a step is jitted
        # inside of a `grad`, JAX asks for its derivative when the trace it belongs to has ended.
        @jax.custom_jvp
        def forwards(arrays: tuple, seen: Any) -> Sums:
            return way(*arrays, seen, options)

        @forwards.defjvp
        def derive(primals: tuple, tangents: tuple) -> tuple[Sums, Sums]:
            arrays, seen = primals
            return jax.jvp(lambda *arrays: plain(*arrays, seen, options), arrays, tangents[0])

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
            first = jnp.arange(size, dtype=sight.streams.dtype) * k.shape[1]
            sight = replace(sight, streams=sight.streams + first[:, None])
            sums = alone(*jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (q, k, v, sight)))
            sums = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), sums)
            return sums, jax.tree.map(lambda _: True, sums)

        return alone(q, k, v, sight)

    return weigh
