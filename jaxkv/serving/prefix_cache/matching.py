"""Search for the longest prefix of a prompt after which a stored sequence can be resumed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import Cache
from jaxkv.core.array_utils import DROP, FILL, search_sorted
from jaxkv.core.constants import EMPTY, END
from jaxkv.core.hashing import chain_hashes, hash_contents
from jaxkv.hybrid import HybridTable
from jaxkv.jit_helpers import jit_table
from jaxkv.kv.cells import Cells, locate_owner_bit, sequence_positions
from jaxkv.recurrent.states import States, seq_first_positions, stream_of
from jaxkv.serving.prefix_cache.prompts import (
    CachedPrompt,
    HostPrompt,
    MissReason,
    ModelInputs,
    PrefixHit,
    PrefixMatch,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, Shaped, UInt8, UInt32

    from jaxkv.kv.table import CellTable
    from jaxkv.recurrent.table import StateTable
    from jaxkv.table import CacheTable

BLOCK = 1024
"""Number of positions that a program checks in one call; long prompts need several calls."""


def find_miss_reasons(cache: Cache, seq: int, inputs: ModelInputs) -> UInt8[np.ndarray, " n+1"]:
    """Return a `MissReason` for each prefix length, NONE if the prefix can be resumed."""
    last = len(inputs)
    starts = np.arange(0, last + 1, BLOCK, dtype=np.int32)
    rest = (0, starts[-1] + BLOCK - last)
    padded = jax.tree.map(
        lambda x: np.pad(x, [rest] + [(0, 0)] * (x.ndim - 1)), (inputs.tokens, {**inputs.extra})
    )
    found = np.full(last + 1, MissReason.NONE, np.uint8)
    for table in iterate_part_tables(cache.table):
        blocks, total = [], jnp.uint32(0)
        for start in starts:
            block_inputs = jax.tree.map(lambda x, start=start: x[start : start + BLOCK], padded)
            *block, total = _resumable_in_block(table, np.int32(seq), *block_inputs, start, total)
            blocks.append(block)
        can_resume, whole, same = (
            np.concatenate(x)[: last + 1] for x in zip(*jax.device_get(blocks), strict=True)
        )
        same = np.logical_and.accumulate(np.append(True, same[:last]))
        is_window = table.spec.max_rollback is None
        reasons = [
            (can_resume, MissReason.CONTEXT_EVICTED if is_window else MissReason.NO_STATE),
            (whole, MissReason.INCOMPLETE),
            (same, MissReason.OTHER_TOKENS),
        ]
        for can, reason in reasons:
            found = np.where((found == MissReason.NONE) & ~can, np.uint8(reason), found)
    return found


def resumes_wherever(
    reasons: UInt8[np.ndarray, " m"], other_reasons: UInt8[np.ndarray, " n"]
) -> bool:
    """Return whether each prefix that one prompt can resume, up to the shorter, the other can too.

    The arguments are results of `find_miss_reasons`: the prefixes of `other_reasons` are resumable
    in `reasons`.
    """
    size = min(reasons.size, other_reasons.size)
    return bool(
        np.all((reasons[:size] == MissReason.NONE) | (other_reasons[:size] != MissReason.NONE))
    )


def find_longest_match(
    cache: Cache,
    prompts: Sequence[CachedPrompt | HostPrompt],
    evicted: Sequence[ModelInputs],
    inputs: ModelInputs,
    near: Collection[int],
) -> PrefixMatch:
    """Return the prompt that shares the longest resumable prefix with given inputs.

    Of equally long prefixes, the result is one in the cache, then one in the sequences `near`, then
    the first.
    """
    begin = inputs[:-1]
    agreeing = [(prompt.inputs.common_prefix_length(begin), prompt) for prompt in prompts]
    agreeing = [(common, prompt) for common, prompt in agreeing if common]
    agreeing.sort(key=lambda pair: (pair[0], *_preference(pair[1], near)), reverse=True)
    source, best, miss = None, (0, True), MissReason.UNKNOWN  # a length, and whether in the cache
    for i, (common, prompt) in enumerate(agreeing):
        in_cache = isinstance(prompt, CachedPrompt)
        if (common, in_cache) <= best:
            break
        reasons = (
            find_miss_reasons(cache, prompt.sequence, prompt.inputs[:common])
            if isinstance(prompt, CachedPrompt)
            else prompt.miss_reasons[: common + 1]
        )
        miss = MissReason(reasons[-1]) if i == 0 else miss  # at the longest common prefix
        furthest = int(np.flatnonzero(reasons == MissReason.NONE)[-1])
        if (furthest, in_cache) > best:
            source, best = prompt, (furthest, in_cache)
    longest = agreeing[0][0] if agreeing else 0
    if best[0] == longest > 0:
        miss = MissReason.NONE
    if max((past.common_prefix_length(begin) for past in evicted), default=0) > longest:
        miss = MissReason.EVICTED
    return PrefixMatch(source, PrefixHit(best[0], miss, isinstance(source, HostPrompt)))


def _preference(prompt: CachedPrompt | HostPrompt, near: Collection[int]) -> tuple[bool, bool]:
    in_cache = isinstance(prompt, CachedPrompt)
    return in_cache, in_cache and prompt.sequence in near


def iterate_part_tables(table: CacheTable) -> Iterator[Any]:
    """Yield the tables of all parts of a hybrid table, or another table itself."""
    yield from table.parts if isinstance(table, HybridTable) else [table]


@jit_table
def _resumable_in_block(
    table: CellTable | StateTable,
    seq: Int32[Array, ""],
    tokens: Int32[Array, " block"],
    extra: dict[str, Shaped[Array, "block ..."]],
    start: Int32[Array, ""],
    before: UInt32[Array, ""],
) -> tuple[Bool[Array, " block"], Bool[Array, " block"], Bool[Array, " block"], UInt32[Array, ""]]:
    """Return three masks over the positions of a block, and `before` for the next block.

    Mask 1 is True if the sequence can be resumed at the position. Mask 2 is True if the sequence
    has all tokens before the position. Mask 3 is False if the sequence has, at the position, a
    token that differs from the one in `tokens`, or has other additional inputs than in `extra`. The
    argument `before` is the sum of the token hashes of all earlier blocks.
    """
    positions = start + jnp.arange(BLOCK, dtype=jnp.int32)
    is_reachable = positions <= table.seq_pos_max(seq) + 1
    can_resume = jax.vmap(table.can_resume, in_axes=(None, 0))(seq, positions)
    can_resume = (positions == 0) | (is_reachable & can_resume)
    # `hash_contents` hashes rows `[R, T]`.
    contents = hash_contents(*jax.tree.map(lambda x: x[None], (tokens, None, extra)))[0]
    hashes = chain_hashes(contents, positions)
    total = before + jnp.cumsum(hashes, dtype=jnp.uint32)
    if isinstance(table, States):
        place = stream_of(table, seq), table.cell[seq]
        same = _has_same_content(table.position[seq] - start, table.content[place], total)
        begins_at_0 = seq_first_positions(table)[seq] == 0
        return can_resume, (positions == 0) | begins_at_0, same, total[-1]
    stream, *_ = locate_owner_bit(table, seq)
    same = _has_same_content(sequence_positions(table, seq) - start, table.content[stream], hashes)
    return can_resume, _has_unbroken_prefix(table, seq, positions), same, total[-1]


def _has_same_content(
    index: Int32[Array, " n"], hashes: UInt32[Array, " n"], expected: UInt32[Array, " block"]
) -> Bool[Array, " block"]:
    """Return a mask `[block]`: False at `index[i]` if `hashes[i]` is not `expected[index[i]]`."""
    # Indices before the block are negative. Indices after the block are compared with 0, and the
    # write skips the result.
    differs = (index >= 0) & (hashes != expected.at[index].get(**FILL, fill_value=0))
    return jnp.ones(BLOCK, bool).at[jnp.where(differs, index, BLOCK)].set(False, **DROP)


def _has_unbroken_prefix(
    cells: Cells, seq: Int32[Array, ""], positions: Int32[Array, " n"]
) -> Bool[Array, " n"]:
    """Return whether all tokens before each position are in unshifted cells, or were evicted."""
    evicted_below, (stream, *_) = cells.evicted_below[seq], locate_owner_bit(cells, seq)
    # The prefix is unbroken if the distinct own positions below a position are as many as the
    # positions from `evicted_below` on. Other cells become END, and come last.
    own_positions = jnp.where(cells.shift[stream] == 0, sequence_positions(cells, seq), EMPTY)
    own_positions = jnp.sort(jnp.where(own_positions < evicted_below, END, own_positions))
    first = jnp.concatenate([jnp.ones(1, bool), own_positions[1:] != own_positions[:-1]])
    distinct = jnp.pad(jnp.cumsum(first, dtype=jnp.int32), (1, 0))  # among the first n, for each n
    below = distinct[search_sorted(own_positions, positions)]
    return below == jnp.maximum(positions - evicted_below, 0)
