"""Differentiable loops with a traced number of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

X = TypeVar("X")


def differentiable_fori_loop(
    step: Callable[..., X], count: jax.Array, limit: int, carry: X, *args: Any
) -> X:
    """Run a step `count` times, as `jax.lax.fori_loop` does, but differentiably in `carry`.

    The derivative always runs `limit` steps, so `step` must return the carry unchanged if the index
    is `count` or more. Pass traced arrays of an enclosing function in `args`.

    >>> def step(i, x, count):
    ...     return jnp.where(i < count, 2 * x, x)
    >>> loop = differentiable_fori_loop
    >>> jax.grad(lambda x: loop(step, jnp.int32(3), 5, x, 3))(1.0).item()
    8.0
    """

    @jax.custom_jvp
    def run(carry: X, count: jax.Array, *args: Any) -> X:
        return jax.lax.fori_loop(jnp.int32(0), count, lambda i, x: step(i, x, *args), carry)

    @run.defjvp
    def derivative(primals: tuple, tangents: tuple) -> tuple[X, X]:
        carry, _, *args = primals

        def run_all(carry: X) -> X:
            return jax.lax.fori_loop(0, limit, lambda i, x: step(i, x, *args), carry)

        return run(*primals), jax.jvp(run_all, (carry,), tangents[:1])[1]

    return run(carry, count, *args)
