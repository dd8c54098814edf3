"""Attention to one block of tokens at a time, which bounds the bytes of arrays of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.ops.attention.visibility import Visibility

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Shaped

AttendToBlock = Callable[..., tuple[jax.Array, jax.Array | None]]
"""A function of a `Visibility` and of arrays `[P, t, ...]`, see `attend_by_blocks`.

It returns the output `[P, t, H, Dv]`, and the attention mass `[P, H, N]` or None.
"""


def attend_by_blocks(
    attend: AttendToBlock,
    tokens_per_block: int,
    visibility: Visibility,
    *arrays: Shaped[Array, "P T ..."],
) -> tuple[Float[Array, "P T H Dv"], Float[Array, "P H N"] | None]:
    """Call `attend` for equal blocks of tokens; return all outputs, and the sum of the masses."""
    lists, tokens = visibility.at.shape
    blocks = -(-tokens // tokens_per_block)
    if blocks == 1:
        return attend(visibility, *arrays)
    size = -(-tokens // blocks)

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, blocks * size - tokens)] + [(0, 0)] * (x.ndim - 2))

    # A token of the padding has no sequence, and attends to no cell.
    visibility, arrays = visibility.slice_tokens(pad), tuple(map(pad, arrays))

    def attend_to_block(mass: jax.Array | None, i: jax.Array) -> tuple:
        cut = partial(jax.lax.dynamic_slice_in_dim, start_index=i * size, slice_size=size, axis=1)
        out, block_mass = attend(visibility.slice_tokens(cut), *map(cut, arrays))
        return jax.tree.map(jnp.add, mass, block_mass), out

    shape = jax.eval_shape(lambda: attend(visibility, *arrays)[1])
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
    mass, out = jax.lax.scan(attend_to_block, start, jnp.arange(blocks, dtype=jnp.int32))
    return out.swapaxes(0, 1).reshape(lists, -1, *out.shape[3:])[:, :tokens], mass
