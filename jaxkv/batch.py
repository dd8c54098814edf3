"""Tokens that arrive together, and the parts of them that are computed at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

NOWHERE = np.iinfo(np.int32).max
"""Batch index of a token that pads a row: it stands for nothing."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Tokens that arrive together: a flat list, or rows `[R, T]` ready to be computed.

    Make one with `make_batch`, which checks and fills in what it can.

    tokens: `[B]` int32, or None where embeddings come instead.
    embeddings: `[B, d]`, or None where tokens come instead.
    sequences: `[B]` int32, the sequence that each token belongs to.
    positions: `[B]` int32, or None: each token comes after the last one of its sequence.
    outputs: `[B]` bool, which tokens want logits, or None: the last of each sequence.
    valid: `[B]` bool, which tokens are really there.
    """

    tokens: Any  # [B]
    embeddings: Any  # [B, d]
    sequences: Any  # [B]
    positions: Any  # [B]
    outputs: Any  # [B]
    valid: Any  # [B]

    def only(self, fits: Any) -> "Batch":
        """Drop the tokens of some sequences, keeping every shape.

        Args:
          fits: `[Q]` bool, the sequences that stay; `Plan.fits` says which would find room.
        """
        xp = np if is_concrete(self, fits) else jnp
        return replace(self, valid=self.valid & xp.asarray(fits)[self.sequences])


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Ubatch:
    """The part of a batch that is computed at once: R rows of T tokens, padding included.

    tokens: `[R, T]` int32, or None.
    embeddings: `[R, T, d]`, or None.
    positions: `[R, T]` int32, the position of each token.
    sequences: `[R, T]` int32, the sequence of each token.
    streams: `[R]` int32, the sequence of a row, where each has its own stream or state; else 0.
    slots: `[R, T]` int32, the cell chosen for each token. A token that goes nowhere (padding, or
      any token of a refused plan) has an index past the last cell, each its own. For a recurrent
      memory its `StateSlots`, and for a composite a tuple: what each of its parts chose.
    stamps: `[R, T]` uint32, what tells the rows of a token from all others, see `jaxkv.stamp`.
    valid: `[R, T]` bool, False for padding.
    outputs: `[O]` int32, which of the R * T tokens output logits, in the order of the logits.
    order: `[O]` int32, the batch index of each output; NOWHERE for one that only pads.
    last: `[Q]` int32, the last position of each sequence when the slots were chosen. Only that of
      the sequences present is compared with the table before anything is changed.
    """

    tokens: jax.Array | None  # [R, T]
    embeddings: jax.Array | None  # [R, T, d]
    positions: jax.Array  # [R, T]
    sequences: jax.Array  # [R, T]
    streams: jax.Array  # [R]
    slots: Any  # [R, T]
    stamps: jax.Array  # [R, T]
    valid: jax.Array  # [R, T]
    outputs: jax.Array  # [O]
    order: jax.Array  # [O]
    last: jax.Array  # [Q]


def make_batch(
    tokens: Any = None,
    *,
    embeddings: Any = None,
    sequences: Any = None,
    positions: Any = None,
    outputs: Any = None,
    valid: Any = None,
) -> Batch:
    """Gather tokens into a batch.

    Args:
      tokens: `[B]` int32; or a list of lists or an array `[R, T]`, a row for each sequence.
      embeddings: `[B, d]` or `[R, T, d]`, in place of tokens.
      sequences: `[B]` int32, or one id for all, by default 0. For a list of lists, one id for each
        list, by default 0, 1, 2 and so on, which is also the default for the rows of an array.
      positions: `[B]` int32; by default each token follows the last one of its sequence.
      outputs: `[B]` bool, which tokens output logits; by default the last of each sequence.
      valid: `[B]` bool; a token that is not valid is padding and goes nowhere.

    Raises:
      ValueError: when neither or both of tokens and embeddings are given, or shapes differ.

    Examples:
      Two prompts of different lengths, for sequences 0 and 1:

      >>> batch = make_batch([[11, 12, 13], [21, 22]])
      >>> batch.tokens, batch.sequences
      (array([11, 12, 13, 21, 22], dtype=int32), array([0, 0, 0, 1, 1], dtype=int32))

      Tokens that a step has picked, one for each sequence:

      >>> make_batch(np.array([[14], [23]])).sequences.tolist()
      [[0], [1]]

    llama.cpp: `llama_batch`.
    """
    if (tokens is None) == (embeddings is None):
        raise ValueError("a batch holds either tokens or embeddings: give one of them, not both")
    if isinstance(tokens, Sequence) and any(np.ndim(row) == 1 for row in tokens):
        ids = np.arange(len(tokens)) if sequences is None else np.asarray(sequences)
        if ids.shape != (len(tokens),):
            raise ValueError(
                f"sequences must have one id for each of {len(tokens)} lists, got {ids.tolist()}"
            )
        sequences = np.repeat(ids.astype(np.int32), [len(row) for row in tokens])
        tokens = np.concatenate([np.asarray(row, np.int32) for row in tokens])
    if tokens is not None:
        tokens = _array(tokens, np.int32)
        shape = tokens.shape
    else:
        embeddings = embeddings if isinstance(embeddings, jax.Array) else np.asarray(embeddings)
        shape = embeddings.shape[:-1]
    if sequences is None:
        sequences = 0 if len(shape) == 1 else np.indices(shape, np.int32)[0]
    if np.ndim(sequences) == 0:
        sequences = (
            np.full(shape, sequences) if is_concrete(sequences) else jnp.full(shape, sequences)
        )
    fields = {
        "sequences": _array(sequences, np.int32),
        "positions": None if positions is None else _array(positions, np.int32),
        "outputs": None if outputs is None else _array(outputs, np.bool_),
        "valid": np.ones(shape, np.bool_) if valid is None else _array(valid, np.bool_),
    }
    for name, field in fields.items():
        if field is not None and field.shape != shape:
            raise ValueError(
                f"{name} must have one entry a token: wanted {shape}, got {field.shape}"
            )
    return Batch(tokens=tokens, embeddings=embeddings, **fields)


def is_concrete(*trees: Any) -> bool:
    """Say whether values can be looked at, which those inside a transformation cannot."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def bucket(count: int) -> int:
    """Round up to a power of two, so that few shapes are ever compiled.

    >>> [bucket(n) for n in (0, 1, 5, 64)]
    [1, 1, 8, 64]
    """
    return 1 << max(count - 1, 0).bit_length()


def rank(sequences: Any, valid: Any) -> tuple[Any, Any]:
    """Number the tokens of each sequence in the order they come.

    Args:
      sequences: `[B]` int32; NumPy in, NumPy out, so that a batch known to the host costs nothing.
      valid: `[B]` bool; the numbers of other tokens mean nothing.

    Returns:
      `rank`, `[B]` int32, how many tokens of its sequence come before a token; and `before`, `[B]`
      int32, the index of the nearest one, the token's own if there is none.

    >>> rank(np.array([7, 8, 7, 7]), np.ones(4, bool))
    (array([0, 0, 1, 2], dtype=int32), array([0, 1, 0, 2], dtype=int32))
    """
    xp = np if is_concrete(sequences, valid) else jnp
    index = xp.arange(sequences.shape[0], dtype=np.int32)
    ids = xp.where(valid, sequences, NOWHERE)
    order = xp.argsort(ids, stable=True).astype(np.int32)
    ids = ids[order]
    ranks = index - xp.searchsorted(ids, ids).astype(np.int32)
    before = xp.where(ranks == 0, order, order[index - 1])
    back = xp.argsort(order)
    return ranks[back], before[back]


def rows(batch: Batch, index: jax.Array) -> Batch:
    """Lay tokens of a flat batch out in rows; `index`, `[..., R, T]`, is NOWHERE for padding."""

    def take(field: jax.Array) -> jax.Array:
        return field[jnp.minimum(index, field.shape[0] - 1)]

    laid = jax.tree.map(take, batch)
    return replace(laid, valid=laid.valid & (index != NOWHERE))


def _array(value: Any, dtype: Any) -> Any:
    """Keep device arrays where they are, and lists on the host."""
    if isinstance(value, jax.Array):
        return value.astype(dtype)
    return np.asarray(value, dtype)
