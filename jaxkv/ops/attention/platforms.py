"""A primitive of JAX in place of the attention implementations of several platforms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import jax
from jax.core import ShapedArray
from jax.interpreters import mlir

from jaxkv.ops.attention.softmax import AttentionOptions, OnlineSoftmax, softmax_dtype
from jaxkv.ops.quantised import Stored

if TYPE_CHECKING:
    from jax.extend.core import Primitive
    from jaxtyping import PyTree

PLATFORMS = "cpu", "cuda", "tpu"
"""Platforms with separate implementations; all others have the implementation `default`."""


def by_platform(**ways: Callable[..., OnlineSoftmax]) -> Callable[..., OnlineSoftmax]:
    """Return a function that runs the implementation for the platform of the compiled program."""
    # `jax.lax.platform_dependent` would trace the implementations of all platforms. The primitive
    # traces one when the program is lowered.

    def partial_attention(
        q: jax.Array, k: Stored, v: Stored, seen: PyTree, options: AttentionOptions
    ) -> OnlineSoftmax:
        options = replace(options, sinks=None)  # added to the result
        arrays, tree = jax.tree.flatten((q, k, v, seen, options))
        return OnlineSoftmax(*_attention_p().bind(*arrays, tree=tree, ways=tuple(ways.items())))

    return partial_attention


@cache
def _attention_p() -> Primitive:
    from jax.extend.core import Primitive  # slow to import

    attention_p = Primitive("jaxkv_attention")
    attention_p.multiple_results = True
    attention_p.def_impl(lambda *x, **params: jax.jit(partial(attention_p.bind, **params))(*x))
    attention_p.def_abstract_eval(_shapes_of_result)
    mlir.register_lowering(attention_p, mlir.lower_fun(partial(_attend_on, "default")))
    for platform in PLATFORMS:
        lowering = mlir.lower_fun(partial(_attend_on, platform))
        mlir.register_lowering(attention_p, lowering, platform=platform)
    return attention_p


def _shapes_of_result(*arrays: ShapedArray, tree: Any, ways: tuple) -> list[ShapedArray]:
    del ways  # they agree
    q, k, v, _, _ = jax.tree.unflatten(tree, arrays)
    lists, tokens, heads, _ = q.shape
    shape = (lists, k.shape[1], heads // k.shape[1] * tokens)
    return [ShapedArray(x, softmax_dtype(q)) for x in (shape, shape, (*shape, v.shape[3]))]


def _attend_on(platform: str, *arrays: jax.Array, tree: Any, ways: tuple) -> OnlineSoftmax:
    implementations = dict(ways)
    attend = implementations.get(platform, implementations["default"])
    return attend(*jax.tree.unflatten(tree, arrays))
