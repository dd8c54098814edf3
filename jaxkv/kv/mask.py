"""Attention mask of a ubatch: a token attends to its sequence, up to its own position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxkv.core.array_utils import DROP, FILL
from jaxkv.core.constants import MAX_CELLS
from jaxkv.kv.cells import locate_owner_bit
from jaxkv.ops.attention.visibility import Visibility, compute_mask
from jaxkv.step import Step
from jaxkv.window import last_seen

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32


def list_shape(step: Step) -> tuple[int, int]:
    """Return the number of lists of tokens, P, and the number of tokens of a list, T."""
    # P lists of tokens, each in one stream; attention reads keys once for each list. If row r is
    # sequence r, the rows of each stream are neighbours. Otherwise the stream of a row is traced,
    # so each row is a list.
    streams, (rows, tokens) = step.table.streams, step.valid.shape
    lists = streams if streams == 1 or step.ubatch.row_is_sequence else rows
    return lists, rows * tokens // lists


def visibility_of(
    step: Step,
    *,
    causal: bool = True,
    visible_until: Int32[Array, "R T"] | None = None,
) -> Visibility:
    """Return the inputs of the attention mask for a step of an attention cache."""
    cells, ubatch = step.table, step.ubatch
    # All sequences of a shared token own the same earlier cells, or the plan is refused. Therefore
    # the mask checks only whether the first sequence of a token owns a cell.
    if ubatch.shared_with is not None and not (causal and visible_until is None):
        raise ValueError(
            "expected causal attention without visible_until for tokens of several sequences, got "
            "another; make_batch with one sequence for each token"
        )
    _, word, bit = locate_owner_bit(cells, ubatch.sequences)
    all_streams = cells.streams == 1 or ubatch.row_is_sequence
    streams = jnp.arange(cells.streams, dtype=jnp.int32) if all_streams else ubatch.row_stream
    is_query = ubatch.valid & (ubatch.slots < MAX_CELLS)
    bit = is_query.astype(jnp.uint32) << bit
    at, word, bit = (x.reshape(list_shape(step)) for x in (ubatch.positions, word, bit))
    # If a list has more tokens than sequences, several tokens of a prompt attend to the same tiles.
    has_few_tokens = at.shape[1] <= cells.sequences_per_stream
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
        tile=cells.placement.tile(cells.num_cells) if has_few_tokens else None,
    )


def needs_unwritten_tokens(
    step: Step, *, causal: bool, visible_until: Int32[Array, "R T"] | None
) -> Bool[Array, "R T"] | None:
    """Return which tokens attend to tokens whose keys are not written yet."""
    # These tokens attend beyond the last token of their sequence in this ubatch. If `causal` is
    # False, the sequence must also continue in a later ubatch of the plan.
    if causal and visible_until is None:
        return None
    ubatch, window = step.ubatch, step.table.window
    is_query = ubatch.valid & (ubatch.slots < MAX_CELLS)
    count, ids = ubatch.spec.sequences, ubatch.sequences
    # `last` is [Q]: the highest position of each sequence in this ubatch, -1 without a token.
    last = jnp.full(count, -1, jnp.int32)
    last = last.at[jnp.where(is_query, ids, count)].max(ubatch.positions, **DROP)
    ahead = last_seen(window, ubatch.positions, causal=causal, visible_until=visible_until)
    ahead = is_query & (ahead > last.at[ids].get(**FILL, fill_value=-1))
    return ahead if visible_until is not None else ahead & ubatch.continues_later


def visible_cells_mask(
    step: Step,
    *,
    causal: bool = True,
    visible_until: Int32[Array, "R T"] | None = None,
) -> Bool[Array, "R T N"]:
    """Return which cells each token attends to (llama.cpp: `set_input_kq_mask`)."""
    mask = compute_mask(visibility_of(step, causal=causal, visible_until=visible_until))
    return mask.reshape(*step.valid.shape, step.table.num_cells)
