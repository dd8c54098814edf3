"""Derivatives of attention implementations, see `dispatch.AttentionFn`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from jaxkv.ops.attention.softmax import AttentionOptions, OnlineSoftmax
from jaxkv.ops.quantised import Stored

if TYPE_CHECKING:
    from jaxtyping import PyTree


def with_derivatives_of(
    plain: Callable[..., OnlineSoftmax], implementation: Callable[..., OnlineSoftmax]
) -> Callable[..., OnlineSoftmax]:
    """Return `implementation` with the forward and reverse derivatives of `plain`."""
    # A loop with a data-dependent length has no reverse mode, and the fastest implementation may
    # have slow derivatives.

    def partial_attention(
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

    return partial_attention
