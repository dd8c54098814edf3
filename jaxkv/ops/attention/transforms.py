"""Derivatives and `vmap` of attention implementations, see `dispatch.AttentionFn`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxkv.ops.attention.bias import PositionBias
from jaxkv.ops.attention.softmax import OnlineSoftmax
from jaxkv.ops.attention.visibility import with_bias_array

if TYPE_CHECKING:
    from jaxtyping import PyTree


def with_derivatives_of(
    plain: Callable[..., OnlineSoftmax], implementation: Callable[..., OnlineSoftmax]
) -> Callable[..., OnlineSoftmax]:
    """Return `implementation` with the forward and reverse derivatives of `plain`."""
    # A loop with a data-dependent length has no reverse mode, and the fastest implementation may
    # have slow derivatives. Visibility and options are arguments: for a jitted step inside of
    # `grad`, JAX computes the derivative after their trace has ended.
    differentiable = jax.custom_jvp(implementation)
    differentiable.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return differentiable


def fold_vmap(implementation: Callable[..., OnlineSoftmax]) -> Callable[..., OnlineSoftmax]:
    """Return an implementation for which `vmap` over caches merges all streams into one cache."""
    # Otherwise a `cond` would compute both branches, and a loop would run for all caches until the
    # longest loop ends.
    batchable = custom_vmap(implementation)

    @batchable.def_vmap
    def attend_batch(
        size: int, batched: PyTree, *args: PyTree
    ) -> tuple[OnlineSoftmax, OnlineSoftmax]:
        def broadcast_to_batch(x: jax.Array, has: bool) -> jax.Array:
            return x if has else jnp.broadcast_to(x, (size, *x.shape))

        *_, options = args
        q, k, v, visibility = jax.tree.map(broadcast_to_batch, args[:4], tuple(batched)[:4])
        # All caches become one cache of size * S streams; stream s of cache c has the index
        # c * S + s.
        first = jnp.arange(size, dtype=visibility.streams.dtype) * visibility.position.shape[1]
        function = None
        if isinstance(visibility.bias, PositionBias) and not any(jax.tree.leaves(batched[3].bias)):
            function, visibility = args[3].bias, replace(visibility, bias=None)
        elif isinstance(visibility.bias, PositionBias):  # batched bias parameters
            visibility = jax.vmap(with_bias_array)(visibility)
        visibility = replace(visibility, streams=visibility.streams + first[:, None])
        q, k, v, visibility = jax.tree.map(
            lambda x: x.reshape(-1, *x.shape[2:]), (q, k, v, visibility)
        )
        if function is not None:
            visibility = replace(visibility, bias=function)
        # `finalize` adds the sinks, which may have a batch axis.
        sums = batchable(q, k, v, visibility, replace(options, sinks=None))
        sums = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), sums)
        return sums, jax.tree.map(lambda _: True, sums)

    return batchable
