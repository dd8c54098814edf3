"""Attention of lists of tokens to the cells of a layer, in blocks of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from jaxkv.kv.layer_kv import LayerKV
from jaxkv.kv.select import hide_repeated, max_tokens_at_once, scatter_mass, select_cells
from jaxkv.ops.attention.dispatch import Implementation, finalize
from jaxkv.ops.attention.softmax import AttentionOptions, merge_over_devices, sum_weights
from jaxkv.ops.attention.token_blocks import attend_by_blocks
from jaxkv.ops.attention.visibility import Visibility

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32

MASS_BLOCK = 64
"""Largest number of tokens of a list whose softmax weights are stored at once for the mass."""


def attend_lists(
    layer_kv: LayerKV,
    q: Float[Array, "P T H D"],
    visibility: Visibility,
    select: Int32[Array, "P T n"] | None,
    options: AttentionOptions,
    axes: tuple[str, ...],
    implementation: Implementation | None,
) -> tuple[Float[Array, "P T H Dv"], Float[Array, "P H N"] | None]:
    """Return the output, and the attention mass if the options have `keep_weights`.

    The mesh axes `axes` split the cells or the lists. The mass is that of the cells and tokens of
    one device; masses are not summed over devices.
    """

    def attend_to_block(visibility: Visibility, q: jax.Array, *select: jax.Array) -> tuple:
        read, cells = layer_kv, None
        if select:
            cells = hide_repeated(*select)
            read, visibility = select_cells(layer_kv, visibility, cells)
        lists = q.reshape(*visibility.at.shape, *q.shape[2:])
        part = read.attend(lists, visibility, options, implementation)
        sums = merge_over_devices(part, axes)
        mass = sum_weights(part, sums, options, lists.shape[1])
        if cells is not None and mass is not None:
            mass = scatter_mass(mass, cells, len(q), layer_kv.num_cells)
        return finalize(sums, lists, options).reshape(*q.shape[:3], -1), mass

    size = MASS_BLOCK if options.keep_weights else q.shape[1]
    if select is None:
        return attend_by_blocks(attend_to_block, size, visibility, q)
    size = min(size, max_tokens_at_once(layer_kv, select))
    return attend_by_blocks(attend_to_block, size, visibility, q, select)
