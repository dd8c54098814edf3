"""Chunks of prompts. A chunk has one of a few shapes, so that few programs are compiled."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import make_batch
from jaxkv.cache import Cache
from jaxkv.core.array_utils import DROP, FILL
from jaxkv.core.pytree import pytree_dataclass
from jaxkv.generation.model_program import ModelProgram
from jaxkv.generation.model_step import Edit, Forward, model_step
from jaxkv.planning.layout import rank_in_sequence
from jaxkv.planning.placement import plan_single_ubatch
from jaxkv.serving.prefix_cache.prompts import ModelInputs
from jaxkv.spec import TableSpec

if TYPE_CHECKING:
    from jaxtyping import Bool, Int32, PyTree, Shaped

SMALLEST = 8
"""Number of tokens of the shortest compiled row; shorter rows cost the same."""

PASS = 24
"""Number of tokens whose computation takes about as long as reading the params."""


class ChunkShape(NamedTuple):
    """Shape of a chunk: the number of rows, and the number of tokens of a row."""

    rows: int
    tokens: int


@pytree_dataclass
class Chunk:
    """Parts of prompts, in rows; `ends` is True for the last token of each prompt."""

    tokens: Int32[np.ndarray, "R T"]
    sequences: Int32[np.ndarray, "R T"]
    valid: Bool[np.ndarray, "R T"]
    ends: Bool[np.ndarray, "R T"]
    extra: dict[str, Shaped[np.ndarray, "R T ..."]]


class PromptPart(NamedTuple):
    """The sequence id and the remaining inputs of a prompt."""

    sequence: int
    inputs: ModelInputs


def chunk_shapes(spec: TableSpec, size: int) -> list[ChunkShape]:
    """Return chunk shapes of up to `size` tokens: one row, or more if `spec.single_sequence_rows`.

    >>> cache = make_cache(
    ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=9, sequences=3, streams=3
    ... )
    >>> [tuple(shape) for shape in chunk_shapes(cache.table.spec, 32)]
    [(1, 8), (1, 16), (1, 24), (1, 32), (2, 16), (3, 8)]
    """
    steps = [n << i for i in range(size.bit_length()) for n in (SMALLEST, SMALLEST * 3 // 2)]
    lengths = [*sorted(n for n in steps if n < size and n % SMALLEST == 0), size]
    shapes = [ChunkShape(1, length) for length in lengths]
    if spec.single_sequence_rows:
        counts = {min(2 << n, spec.sequences) for n in range(spec.sequences.bit_length())}
        for count in sorted(counts - {1}):
            fitting = [length for length in lengths if count * length <= size]
            shapes += [ChunkShape(count, length) for length in fitting[-1:]]
    return shapes


# Costs are in tokens. All whole chunks of the longest shape come first; the rest is a search over
# shapes.
@functools.cache
def _min_prompt_cost(lengths: tuple[int, ...], count: int) -> int:
    """Return the minimum cost of chunks for `count` tokens; a chunk of length n costs PASS + n.

    >>> [_min_prompt_cost((8, 64), n) - PASS for n in (5, 8, 9, 64)]
    [8, 8, 40, 64]
    """
    whole, rest = divmod(count, lengths[-1])
    cost = whole * (PASS + lengths[-1])
    if not rest:
        return cost
    return cost + min(PASS + n + _min_prompt_cost(lengths, max(rest - n, 0)) for n in lengths)


def cut_chunk(
    spec: TableSpec, shapes: Sequence[ChunkShape], parts: Sequence[PromptPart]
) -> tuple[Chunk, list[int]]:
    """Cut a chunk from the first prompts; also return the number of tokens from each prompt."""

    def chunk_lengths(shape: ChunkShape) -> list[int]:
        if spec.single_sequence_rows:
            return [min(len(part.inputs), shape.tokens) for part in parts[: shape.rows]]
        lengths = [len(part.inputs) for part in parts]
        return np.diff(np.minimum(np.cumsum(lengths), shape.tokens), prepend=0).tolist()

    def cost_of_shape(shape: ChunkShape) -> int:
        rest = [len(part.inputs) for part in parts]
        for i, n in enumerate(chunk_lengths(shape)):
            rest[i] -= n
        if not spec.single_sequence_rows:
            rest = [sum(rest)]
        here = PASS + shape.rows * shape.tokens
        return here + sum(_min_prompt_cost(lengths, count) for count in rest)

    lengths = tuple(shape.tokens for shape in shapes if shape.rows == 1)
    shape = min(shapes, key=cost_of_shape)
    counts = chunk_lengths(shape)
    chunk = empty_chunk(shape, parts[0].inputs[:0].extra)
    place = 0
    for row, (part, n) in enumerate(zip(parts, counts, strict=False)):
        where = (row, slice(n)) if spec.single_sequence_rows else (0, slice(place, place + n))
        chunk.tokens[where] = part.inputs.tokens[:n]
        for name, x in part.inputs.extra.items():
            chunk.extra[name][where] = x[:n]
        chunk.sequences[where] = part.sequence
        chunk.valid[where] = True
        if n == len(part.inputs):
            chunk.ends[where[0], where[1].stop - 1] = True
        place += n
    return chunk, counts + [0] * (len(parts) - len(counts))


def empty_chunk(shape: ChunkShape, extra: Mapping[str, Shaped[np.ndarray, "0 ..."]]) -> Chunk:
    """Return a chunk of padding only; `extra` has the additional inputs of no token."""
    return Chunk(
        tokens=np.zeros(shape, np.int32),
        sequences=np.zeros(shape, np.int32),
        valid=np.zeros(shape, bool),
        ends=np.zeros(shape, bool),
        extra={name: np.zeros((*shape, *x.shape[1:]), x.dtype) for name, x in extra.items()},
    )


def _run_chunk(
    forward: Forward, params: PyTree, cache: Cache, chunk: Chunk, *, edit: Edit | None = None
) -> tuple:
    """Compute a chunk; return the cache, logits `[Q, V]`, and `ok` and `reason` of the plan.

    The logits are 0 for sequences whose prompt does not end in the chunk.
    """
    table = cache.table
    count, shape = table.spec.sequences, chunk.valid.shape
    batch = make_batch(
        chunk.tokens.reshape(-1),
        sequences=chunk.sequences.reshape(-1),
        valid=chunk.valid.reshape(-1),
        outputs=chunk.ends.reshape(-1),
        extra=jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), chunk.extra),
    )
    index = jnp.arange(chunk.valid.size, dtype=jnp.int32).reshape(shape)
    num_outputs = shape[0] if table.spec.single_sequence_rows else count
    ranks = rank_in_sequence(batch.sequences, batch.valid)
    ended = jnp.zeros(count, bool).at[batch.sequences].max(batch.outputs, **DROP)
    plan = plan_single_ubatch(table, batch, ranks, index, ~ended, outputs=num_outputs)
    ubatch = plan.ubatches[0]
    cache, logits = model_step(forward, params, cache, ubatch, edit=edit)
    whose = batch.sequences.at[ubatch.output_index].get(**FILL, fill_value=count)
    of_each = jnp.zeros((count, logits.shape[1]), logits.dtype)
    return cache, of_each.at[whose].set(logits, **DROP), (plan.ok, plan.reason)


run_chunk = ModelProgram(_run_chunk)
