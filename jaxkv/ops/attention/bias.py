"""Additive bias of logits, such as ALiBi and T5's relative positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.array_utils import is_concrete
from jaxkv.core.pytree import pytree_dataclass
from jaxkv.core.tree_types import TreeWithTypes, attach_node_types

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32

Function = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""A function that returns the bias of logits for token positions, cell positions and query heads.

The arguments are int32 arrays `[P, 1, T, 1]`, `[P, 1, T or 1, N]` and `[1, H, 1, 1]`. The result is
an array of floats that broadcasts to `[P, H, T, N]`; the bias of hidden cells is ignored.

A plain function is static and hashed, so each new function object is compiled again. A function
with parameters must be a pytree with the parameters as leaves, such as
`jax.tree_util.Partial(function, params)`.
"""

Bias = Function | jax.Array | np.ndarray
"""A bias function, or an array `[R, T, H, N]` of floats for the cells of each row's stream."""


@pytree_dataclass
class PositionBias:
    """Bias function of positions, and the query heads for which it is called.

    function: The bias function, stored as a pytree together with the types of its nodes.
    heads: Indices of the query heads; on a mesh, only the indices of the heads on the device.
    """

    function: TreeWithTypes[Function]
    heads: Int32[Array, " H"]

    def compute_bias(
        self, at: Int32[Array, "P T"], position: Int32[Array, "P _ N"]
    ) -> Float[Array, "P _ T N"]:
        """Return the bias `[P, H, T, N]` for token positions `at` and cell positions `position`.

        The size of axis 1 is 1 if the function returns one bias for all heads.
        """
        key = position[:, None]
        added = self.function.value(at[:, None, :, None], key, self.heads[None, :, None, None])
        shape = (at.shape[0], added.shape[1], at.shape[1], key.shape[3])
        return jnp.broadcast_to(added, shape)


BiasOfLists = jax.Array | PositionBias
"""Bias of lists of tokens: an array `[P, T, H or 1, N]` of floats, or a function of positions."""


def check_bias(bias: object, shape: tuple[int, ...]) -> BiasOfLists | None:
    """Check the bias that a caller passed, and convert it for attention.

    Returns an array `[R, T, H or 1, N]` for an array, a `PositionBias` for a function, and None for
    None. The argument `shape` is (R, T, H, N). Traced arrays that the function uses must be leaves
    of the function as a pytree (see `Function`); otherwise a TypeError is raised.
    """
    if bias is None:
        return None
    rows, tokens, heads, cells = shape
    if isinstance(bias, jax.Array | np.ndarray):
        _check_fit("R, T, H, N", bias, shape)
        return jnp.broadcast_to(bias, (rows, tokens, bias.shape[2], cells))
    if not callable(bias):
        raise TypeError(
            f"expected a bias as a function or as an array, got {type(bias)}; pass a function "
            "(query, key, head) or an array"
        )
    is_tree = not jax.tree_util.all_leaves([bias])
    function = jax.tree.map(jnp.asarray, bias) if is_tree else jax.tree_util.Partial(bias)
    places = ((rows, 1, tokens, 1), (rows, 1, 1, cells), (1, heads, 1, 1))
    arguments = function, *(jax.ShapeDtypeStruct(x, jnp.int32) for x in places)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    traced = jax.make_jaxpr(lambda function, *places: function(*places))(*shapes)
    if not is_concrete(traced.consts):
        raise TypeError(
            "expected a bias with its weights as leaves, got a function that closes over traced "
            "arrays; pass jax.tree_util.Partial(function, weights)"
        )
    if len(traced.out_avals) != 1:
        raise TypeError(
            f"expected a bias that returns an array, got {len(traced.out_avals)} of them; return "
            "one array"
        )
    _check_fit("R, H, T, N", traced.out_avals[0], (rows, heads, tokens, cells))
    return PositionBias(
        function=attach_node_types(function), heads=jnp.arange(heads, dtype=jnp.int32)
    )


def _check_fit(
    letters: str, x: jax.Array | np.ndarray | jax.ShapeDtypeStruct, shape: tuple[int, ...]
) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"expected a bias of floats, got {x.dtype}; cast it")
    fits = all(n in (1, size) for n, size in zip(x.shape, shape, strict=False))
    if len(x.shape) != len(shape) or not fits:
        raise ValueError(
            f"expected a bias that broadcasts to [{letters}] of {shape}, got {x.shape}; reshape it"
        )
