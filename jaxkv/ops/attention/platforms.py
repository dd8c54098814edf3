"""A JAX primitive that is lowered to the attention implementation of the target platform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import batching, mlir

from jaxkv.ops.attention.bias import PositionBias
from jaxkv.ops.attention.softmax import AttentionOptions, OnlineSoftmax, softmax_dtype
from jaxkv.ops.attention.visibility import Visibility, with_bias_array
from jaxkv.ops.quantised import Stored

if TYPE_CHECKING:
    from jax.extend.core import Primitive

PLATFORMS = "cpu", "cuda", "tpu"
"""Platforms with separate implementations; all others have the implementation `default`."""


def by_platform(**ways: Callable[..., OnlineSoftmax]) -> Callable[..., OnlineSoftmax]:
    """Return a function that runs the implementation for the platform of the compiled program.

    Its fourth argument is a `Visibility` of the cells, or a mask `[P, T, N]` if k and v have P
    streams. Under `vmap`, it runs the implementation once, for the streams of all caches.
    """
    # `jax.lax.platform_dependent` would trace the implementations of all platforms, and compute
    # both branches of a `cond` under `vmap`.

    def partial_attention(
        q: jax.Array, k: Stored, v: Stored, seen: Visibility | jax.Array, options: AttentionOptions
    ) -> OnlineSoftmax:
        options = replace(options, sinks=None)  # `finalize` adds them
        arrays, tree = jax.tree.flatten((q, k, v, seen, options))
        return OnlineSoftmax(*_attention_p().bind(*arrays, tree=tree, ways=tuple(ways.items())))

    return partial_attention


@cache
def _attention_p() -> Primitive:
    from jax.extend.core import Primitive  # slow to import

    attention_p = Primitive("jaxkv_attention")
    attention_p.multiple_results = True
    attention_p.def_impl(lambda *x, **params: jax.jit(partial(attention_p.bind, **params))(*x))
    attention_p.def_abstract_eval(_shapes_of_results)
    batching.primitive_batchers[attention_p] = _attend_batch
    mlir.register_lowering(attention_p, mlir.lower_fun(partial(_attend_on, "default")))
    for platform in PLATFORMS:
        lowering = mlir.lower_fun(partial(_attend_on, platform))
        mlir.register_lowering(attention_p, lowering, platform=platform)
    return attention_p


def _shapes_of_results(*arrays: ShapedArray, tree: Any, ways: tuple) -> list[ShapedArray]:
    del ways  # all return these shapes
    q, k, v, _, _ = jax.tree.unflatten(tree, arrays)
    lists, tokens, heads, _ = q.shape
    shape = (lists, k.shape[1], heads // k.shape[1] * tokens)
    return [ShapedArray(x, softmax_dtype(q)) for x in (shape, shape, (*shape, v.shape[3]))]


def _attend_on(platform: str, *arrays: jax.Array, tree: Any, ways: tuple) -> OnlineSoftmax:
    implementations = dict(ways)
    attend = implementations.get(platform, implementations["default"])
    return attend(*jax.tree.unflatten(tree, arrays))


def _attend_batch(
    arrays: Sequence[jax.Array], axes: Sequence[int | None], *, tree: Any, ways: tuple
) -> tuple[list[jax.Array], list[int]]:
    """Attend to the streams of B caches as to B * S streams of one cache."""
    (size, *_) = {x.shape[i] for x, i in zip(arrays, axes, strict=True) if i is not None}

    def move_batch_first(x: jax.Array, axis: int | None) -> jax.Array:
        return jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)

    def fold(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:])

    batched = [move_batch_first(x, i) for x, i in zip(arrays, axes, strict=True)]
    q, k, v, seen, options = jax.tree.unflatten(tree, batched)
    if isinstance(seen, Visibility):
        bias = seen.bias
        if isinstance(bias, PositionBias):
            is_batched = jax.tree.unflatten(tree, [i is not None for i in axes])[3].bias
            if any(jax.tree.leaves(is_batched)):
                bias = (seen := jax.vmap(with_bias_array)(seen)).bias
            else:
                bias = jax.tree.unflatten(tree, arrays)[3].bias
        seen = replace(seen, bias=None if isinstance(bias, PositionBias) else bias)
        first = jnp.arange(size, dtype=seen.streams.dtype) * seen.position.shape[1]
        seen = jax.tree.map(fold, replace(seen, streams=seen.streams + first[:, None]))
        seen = replace(seen, bias=bias) if isinstance(bias, PositionBias) else seen
    else:
        seen = fold(seen)
    q, k, v = jax.tree.map(fold, (q, k, v))
    sums = by_platform(**dict(ways))(q, k, v, seen, options)
    return [x.reshape(size, -1, *x.shape[1:]) for x in sums], [0] * len(sums)
