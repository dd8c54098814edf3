"""Which cells each token of a ubatch may see: those of its sequence, up to its own position.

The sequences of a token that has several share all that comes before it, or the plan was refused.
So what the first of them owns is what all of them do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxkv.batch import Ubatch
from jaxkv.core.constants import MAX_CELLS
from jaxkv.kv.cells import Cells, locate_owner_bit
from jaxkv.kv.slots import group_rows_by_stream
from jaxkv.kv.tiles import tile_size
from jaxkv.ops.attention.visibility import Visibility, compute_mask
from jaxkv.window import last_seen

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32


def visibility_of(
    cells: Cells,
    ubatch: Ubatch,
    *,
    causal: bool = True,
    visible_until: Int32[Array, "R T"] | None = None,
) -> Visibility:
    """Return what decides which cells the tokens of a ubatch see.

    The table decides, nothing else: an empty cell has no owner, and a token sees the tokens of its
    own ubatch because they already stand in the table. With a window, a token sees what lies inside
    of it; see `jaxkv.window` for the rules.

    Rows of one stream are one list of tokens where shapes tell it (see
    `slots.group_rows_by_stream`), so that its keys are read once for all of them. A token without a
    slot (padding, a refused plan) sees nothing.

    Args:
      cells: the table, with the ubatch applied.
      ubatch: the tokens that look.
      causal: False lets them see what comes after them too.
      visible_until: the last position that each token sees; None for its own.

    Raises:
      ValueError: when they may, and a token may belong to several sequences.
    """
    if ubatch.shared_with is not None and not (causal and visible_until is None):
        raise ValueError(
            "expected causal attention without visible_until, or tokens of one sequence each: "
            "several sequences of a token do not share what comes after it"
        )
    _, word, bit = locate_owner_bit(cells, ubatch.sequences)
    streams, all_streams = group_rows_by_stream(cells, ubatch)
    looks = ubatch.valid & (ubatch.slots < MAX_CELLS)
    bit = jnp.where(looks, jnp.uint32(1) << bit, 0)
    at, word, bit = (x.reshape(streams.size, -1) for x in (ubatch.positions, word, bit))
    # More tokens than sequences are those of prompts, several of which see the same tiles.
    tiled = cells.placement == "tiled" and at.shape[1] <= cells.sequences_per_stream
    return Visibility(
        position=cells.position,
        owners=cells.owners,
        streams=streams,
        at=at,
        word=word,
        bit=bit,
        window=cells.window,
        causal=causal,
        all_streams=all_streams,
        visible_until=None if visible_until is None else visible_until.reshape(at.shape),
        tile=tile_size(cells.num_cells) if tiled else None,
    )


def needs_unwritten_tokens(
    cells: Cells, ubatch: Ubatch, *, causal: bool, visible_until: Int32[Array, "R T"] | None
) -> Bool[Array, "R T"] | None:
    """Return which tokens should see one that no ubatch has brought yet.

    With `visible_until`, the ubatch ends before it; without causal attention, the sequence goes on
    in a later ubatch of the plan, within the window.

    Args:
      cells: the table.
      ubatch: the tokens that look.
      causal: False lets them see what comes after them too.
      visible_until: the last position that each token sees; None for its own.

    Returns:
      None where no token sees ahead.
    """
    if causal and visible_until is None:
        return None
    looks = ubatch.valid & (ubatch.slots < MAX_CELLS)
    count, ids = ubatch.spec.sequences, ubatch.sequences
    last = jnp.full(count, -1, jnp.int32)
    last = last.at[jnp.where(looks, ids, count)].max(ubatch.positions, mode="drop")
    ahead = last_seen(cells.window, ubatch.positions, causal=causal, visible_until=visible_until)
    ahead = looks & (ahead > last.at[ids].get(mode="fill", fill_value=-1))
    return ahead if visible_until is not None else ahead & ubatch.more


def visible_cells_mask(
    cells: Cells,
    ubatch: Ubatch,
    *,
    causal: bool = True,
    visible_until: Int32[Array, "R T"] | None = None,
) -> Bool[Array, "R T N"]:
    """Return which cells each token sees; arguments as of `visibility_of`.

    llama.cpp: `set_input_kq_mask`.
    """
    mask = compute_mask(visibility_of(cells, ubatch, causal=causal, visible_until=visible_until))
    return mask.reshape(*ubatch.valid.shape, cells.num_cells)
