"""Derivatives and `vmap` of attention implementations, see `dispatch.AttentionFn`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxkv.ops.attention.bias import PositionBias
from jaxkv.ops.attention.softmax import AttentionOptions, OnlineSoftmax
from jaxkv.ops.attention.visibility import Visibility, with_bias_array
from jaxkv.ops.storage.storage import Stored

if TYPE_CHECKING:
    from jaxtyping import PyTree


def with_derivatives_of(
    plain: Callable[..., OnlineSoftmax], implementation: Callable[..., OnlineSoftmax]
) -> Callable[..., OnlineSoftmax]:
    """Return `implementation` with the forward and reverse derivatives of `plain`."""
    # A loop with a data-dependent length has no reverse mode, and the fastest implementation may
    # have slow derivatives.

    def differentiable_attention(
        q: jax.Array, k: Stored, v: Stored, seen: PyTree, options: AttentionOptions
    ) -> OnlineSoftmax:
        # `seen` is an argument and not closed over: for a jitted step inside of `grad`, JAX
        # computes the derivative after the trace of `seen` has ended. A bias is part of `seen`.
        @jax.custom_jvp
        def run_forward(arrays: tuple, seen: PyTree) -> OnlineSoftmax:
            return implementation(*arrays, seen, options)

        @run_forward.defjvp
        def compute_jvp(primals: tuple, tangents: tuple) -> tuple[OnlineSoftmax, OnlineSoftmax]:
            return jax.jvp(lambda arrays, seen: plain(*arrays, seen, options), primals, tangents)

        return run_forward((q, k, v), seen)

    return differentiable_attention


def fold_vmap(implementation: Callable[..., OnlineSoftmax]) -> Callable[..., OnlineSoftmax]:
    """Return an implementation for which `vmap` over caches merges all streams into one cache."""
    # Otherwise a `cond` would compute both branches, and a loop would run for all caches until the
    # longest loop ends.

    def batchable_attention(
        q: jax.Array, k: Stored, v: Stored, visibility: Visibility, options: AttentionOptions
    ) -> OnlineSoftmax:
        @custom_vmap
        def attend_single(
            q: jax.Array, k: Stored, v: Stored, visibility: Visibility
        ) -> OnlineSoftmax:
            return implementation(q, k, v, visibility, options)

        @attend_single.def_vmap
        def attend_batch(
            size: int, batched: PyTree, *args: PyTree
        ) -> tuple[OnlineSoftmax, OnlineSoftmax]:
            def broadcast_to_batch(x: jax.Array, has: bool) -> jax.Array:
                return x if has else jnp.broadcast_to(x, (size, *x.shape))

            q, k, v, visibility = jax.tree.map(broadcast_to_batch, args, tuple(batched))
            first = jnp.arange(size, dtype=visibility.streams.dtype) * visibility.position.shape[1]
            function = None
            if isinstance(visibility.bias, PositionBias) and not any(
                jax.tree.leaves(batched[3].bias)
            ):
                function, visibility = args[3].bias, replace(visibility, bias=None)
            elif isinstance(visibility.bias, PositionBias):  # batched bias parameters
                visibility = jax.vmap(with_bias_array)(visibility)
            visibility = replace(visibility, streams=visibility.streams + first[:, None])
            args = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (q, k, v, visibility))
            if function is not None:
                args = *args[:3], replace(args[3], bias=function)
            sums = attend_single(*args)
            sums = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), sums)
            return sums, jax.tree.map(lambda _: True, sums)

        return attend_single(q, k, v, visibility)

    return batchable_attention
