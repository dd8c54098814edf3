"""Batches of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.array_utils import is_concrete, next_power_of_two
from jaxkv.core.constants import END
from jaxkv.core.pytree import pytree_dataclass
from jaxkv.core.validate import check_bool, check_int32, to_array

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Bool, Float, Int32, PyTree, Shaped

    from jaxkv.core.types import Flags, Ids, Tokens


@pytree_dataclass
class Batch:
    """Tokens for `init_batch`, as a flat list `[B]` or as rows `[R, T]`; see `make_batch`.

    tokens: token ids; None if the batch has embeddings.
    embeddings: embedding of each token; None if the batch has token ids.
    sequences: sequence id of each token; the lowest id if a token has several ids.
    positions: position of each token; None if each sequence continues after its last position.
    outputs: True for tokens that need logits; None selects the last token of each sequence.
    valid: False for padding.
    shared_with: further sequence ids of each token, padded with negative numbers; None if each
      token has one id.
    extra: additional model inputs of each token, by name.
    """

    tokens: PyTree[Int32[Array, " B"]]
    embeddings: PyTree[Float[Array, "B d"]]
    sequences: PyTree[Int32[Array, " B"]]
    positions: PyTree[Int32[Array, " B"]]
    outputs: PyTree[Bool[Array, " B"]]
    valid: PyTree[Bool[Array, " B"]]
    shared_with: PyTree[Int32[Array, "B n"]] = None
    extra: dict[str, PyTree[Shaped[Array, "B ..."]]] | None = None

    def keep_sequences(self, fits: Flags) -> Batch:
        """Keep the tokens of some sequences, and mark all other tokens as padding.

        `fits` is a bool for each of the Q sequences, such as `Plan.fits`; True keeps the sequence.
        A token of several sequences stays valid if at least one of its sequences is kept. If no
        token stays valid, `init_batch` raises ValueError for the batch.

        Raises:
          ValueError: If a concrete sequence id of the batch has no entry in `fits`.

        Examples:
          >>> make_batch([[1, 2], [3]]).keep_sequences([False, True]).valid.tolist()
          [False, False, True]
        """
        xp = np if is_concrete(self, fits) else jnp
        fits = xp.asarray(check_bool(fits, "sequences that stay", or_integers=False))
        if fits.ndim != 1:
            raise ValueError(
                f"expected a list of bools [Q], as plan.fits, got the shape {fits.shape}; pass "
                f"plan.fits of a plan of this batch"
            )
        if xp is np:
            ids = [array for array in (self.sequences, self.shared_with) if array is not None]
            highest = max(np.max(array, initial=-1) for array in ids)
            if highest >= fits.size:
                raise ValueError(
                    f"expected a bool for each sequence, as plan.fits has, got {fits.size} for a "
                    f"batch with sequence {highest}; pass plan.fits of a plan of this batch"
                )
        if self.shared_with is None:
            return replace(self, valid=self.valid & fits[self.sequences])
        sets = xp.concatenate([self.sequences[..., None], self.shared_with], axis=-1)
        sets = _sort_ids_lowest_first(xp.where((sets >= 0) & fits[sets], sets, -1), xp)
        valid = self.valid & (sets[..., 0] >= 0)
        return replace(self, sequences=sets[..., 0], shared_with=sets[..., 1:], valid=valid)


def make_batch(
    tokens: Tokens = None,
    *,
    embeddings: Float[ArrayLike, "*B d"] | None = None,
    sequences: PyTree = None,
    positions: Ids | None = None,
    outputs: Flags | None = None,
    valid: PyTree = None,
    extra: Mapping[str, PyTree] | None = None,
) -> Batch:
    """Make a batch from token ids or embeddings.

    Args:
      tokens: int32 token ids: a list `[B]`, a list with a list for each sequence, or an array
        `[R, T]` with a row for each sequence.
      embeddings: floats `[B, d]` or `[R, T, d]`, in place of token ids.
      sequences: sequence ids of the tokens.

        - For a list `[B]`, one id for each token, or one id for all tokens; default 0.
        - For a list of lists, one id for each list; default 0, 1, 2 and so on.
        - For rows, one id for each row or token, `[R]` or `[R, T]`; default the index of the row.
        - If several sequences share a token, a list of ids in place of the token's id. The ids of
          all tokens can also be one array `[B, n]` or `[R, T, n]`, padded with -1. Sequences that
          share a token must have the same earlier tokens. Otherwise the plan is refused, with
          `Reason.DIVERGED`. Recurrent caches accept no shared tokens.

      positions: int32 position of each token, in the shape of the batch, `[B]` or `[R, T]`; by
        default, the next positions of each sequence.
      outputs: bool, in the shape of the batch, True for tokens that need logits; default the last
        token of each sequence.
      valid: bool, in the shape of the batch, False for padding.
      extra: additional model inputs of each token by name, `[B, ...]` or `[R, T, ...]`, such as
        `rope_offsets` `[B, 3]` for rotary positions of three axes. For a list of lists, pass one
        array for the tokens of all lists. Models read the inputs from `Step.extra`.

    Returns:
      A `Batch`: arrays `[B]` for a list (lists of a list of lists are concatenated), or arrays
      `[R, T]` for rows. The fields `positions` and `outputs` are None if they were not passed; only
      `init_batch` sets their defaults, and checks whether the cache has the sequence ids.

    Raises:
      ValueError: If token ids and embeddings are both given or both missing, or shapes differ.
      ValueError: If a list in a list of lists is empty.
      ValueError: If a list or a NumPy array has a negative token id where `valid` is True. For a
        JAX array, the plan gives the sequence the reason `NEGATIVE_TOKEN`.
      ValueError: If a list of sequence ids is empty or repeats an id.
      ValueError: If an integer does not fit into int32, or a 64-bit integer of `extra` does not fit
        into the 32 bits that JAX uses by default.

    Examples:
      Two prompts of different lengths, for sequences 0 and 1:

      >>> batch = make_batch([[11, 12, 13], [21, 22]])
      >>> batch.tokens, batch.sequences
      (array([11, 12, 13, 21, 22], dtype=int32), array([0, 0, 0, 1, 1], dtype=int32))

      Two sequences share a prompt, which is stored once; each sequence has one more token:

      >>> batch = make_batch([[11, 12], [13], [14]], sequences=[[0, 1], 0, 1])

    llama.cpp: `llama_batch`.
    """
    if (tokens is None) == (embeddings is None):
        which = "neither" if tokens is None else "both"
        raise ValueError(f"expected either tokens or embeddings, got {which}; pass one of the two")
    if isinstance(tokens, str | Mapping | Set | Iterator):
        raise TypeError(
            f"expected tokens as integers in a list or an array, got {type(tokens)}; encode "
            "texts by a tokenizer"
        )
    if isinstance(tokens, Sequence) and any(np.ndim(row) == 1 for row in tokens):
        tokens, sequences = _join_lists(tokens, sequences)
    if tokens is not None:
        tokens = check_int32(tokens, "tokens")
        shape = tokens.shape
    else:
        embeddings = to_array(embeddings, "embeddings")
        if not jnp.issubdtype(embeddings.dtype, jnp.floating) or embeddings.ndim < 2:
            raise ValueError(
                f"expected embeddings [B, d] or [R, T, d] of floats, got {embeddings.dtype} of "
                f"shape {embeddings.shape}; pass an array of floats"
            )
        shape = embeddings.shape[:-1]
    if len(shape) not in (1, 2):
        raise ValueError(
            f"expected tokens as a list [B] or rows [R, T], got the shape {shape}; reshape them"
        )
    sequences, others = _sequences_of_tokens(sequences, shape)
    fields = {
        "sequences": sequences,
        "positions": None if positions is None else check_int32(positions, "positions", high=END),
        "outputs": None if outputs is None else check_bool(outputs, "outputs", or_integers=False),
        "valid": np.ones(shape, np.bool_) if valid is None else check_bool(valid, "valid"),
    }
    for name, value in fields.items():
        if value is not None and value.shape != shape:
            raise ValueError(
                f"expected {name} of shape {shape}, got {value.shape}; pass one entry for each "
                "token"
            )
    valid = fields["valid"]
    # Tokens on a device are not checked, since a check would wait for the device.
    on_host = isinstance(tokens, np.ndarray) and isinstance(valid, np.ndarray)
    if on_host and (lowest := np.min(np.asarray(tokens), where=valid, initial=0)) < 0:
        raise ValueError(
            f"expected valid tokens of at least 0, got {lowest}; padding has valid=False"
        )
    inputs = check_extra(extra, shape) or None
    return Batch(tokens=tokens, embeddings=embeddings, shared_with=others, extra=inputs, **fields)


def _join_lists(tokens: Sequence, sequences: PyTree) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate lists of tokens; also return the sequence, or the sequences, of each token."""
    if not all(np.ndim(row) == 1 for row in tokens):
        raise ValueError(
            "expected tokens as a list or as a list of lists, got both in one; pass a list "
            "of lists for several sequences"
        )
    ids = np.asarray(range(len(tokens)) if sequences is None else _pad_sequence_sets(sequences))
    if ids.ndim not in (1, 2) or ids.shape[0] != len(tokens):
        raise ValueError(
            f"expected an id, or a list of ids, for each of {len(tokens)} lists of tokens, got "
            f"{sequences}; pass sequences= of that length"
        )
    lengths = [len(row) for row in tokens]
    if empty := ids[np.asarray(lengths) == 0].tolist():
        raise ValueError(
            f"expected a token at least in each list, got none for sequences {empty}; leave "
            f"them out, and call make_batch with sequences= for the others"
        )
    joined = np.concatenate([check_int32(row, "tokens") for row in tokens])
    return joined, np.repeat(ids, lengths, axis=0)


def _sequences_of_tokens(sequences: PyTree, shape: tuple[int, ...]) -> tuple[PyTree, PyTree]:
    """Return the lowest sequence of each token, and the others or None, see `Batch`."""
    if sequences is None:
        sequences = 0 if len(shape) == 1 else np.indices(shape, np.int32)[0]
    check = _pad_sequence_sets if len(shape) == 1 else _check_row_sequences
    sequences = check_int32(check(sequences), "sequences")
    xp = np if is_concrete(sequences) else jnp
    if np.ndim(sequences) == 0:
        return xp.full(shape, sequences), None
    if len(shape) == 2 and sequences.shape == shape[:1]:
        return xp.broadcast_to(xp.asarray(sequences)[:, None], shape), None
    return _split_lowest_sequence(sequences) if sequences.shape[:-1] == shape else (sequences, None)


def check_extra(extra: object, shape: tuple[int, ...]) -> dict[str, PyTree]:
    """Return additional inputs in dtypes of JAX; the axes of each begin with `shape`."""
    if extra is None:
        return {}
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise TypeError(
            f"expected extra as arrays by name, got {extra!r}; pass a dict of names to arrays"
        )
    by_name = {}
    for name, value in extra.items():
        value = to_array(value, f"extra[{name!r}]")
        if not any(
            jnp.issubdtype(value.dtype, kind) for kind in (np.integer, np.floating, np.bool_)
        ):
            raise TypeError(
                f"expected integers, floats or bools for extra[{name!r}], got {value.dtype}; "
                "cast them"
            )
        kept = jax.dtypes.canonicalize_dtype(value.dtype)
        if kept != value.dtype:
            is_integer = jnp.issubdtype(kept, np.integer)
            value = _to_32_bits(value, kept, name) if is_integer else value.astype(kept)
        if value.shape[: len(shape)] != shape:
            raise ValueError(
                f"expected extra[{name!r}] of shape {shape} and any axes after it, got "
                f"{value.shape}; pass one entry for each token"
            )
        by_name[name] = value
    return by_name


def _to_32_bits(value: PyTree, kept: np.dtype, name: str) -> PyTree:
    low, high = jnp.iinfo(kept).min, jnp.iinfo(kept).max
    wrong = value[(value < low) | (value > high)]
    if wrong.size:
        raise ValueError(
            f"expected integers from {low} to {high} for extra[{name!r}], got {wrong[0]}; a JAX "
            f"without 64 bits holds no others"
        )
    return value.astype(kept)


def _pad_sequence_sets(sequences: PyTree) -> PyTree:
    """Convert a list that contains lists of ids to an array padded with -1."""
    if not isinstance(sequences, Sequence):
        return sequences
    several = (list, tuple, set, frozenset, np.ndarray)
    if not any(isinstance(entry, several) for entry in sequences):
        return sequences
    entries = [
        sorted(entry) if isinstance(entry, (set, frozenset)) else entry for entry in sequences
    ]
    sets = [check_int32(np.atleast_1d(entry), "sequences", low=0) for entry in entries]
    if any(not ids.size for ids in sets):
        raise ValueError(
            f"expected a sequence at least in each list of ids, got {sequences}; give each token "
            "an id"
        )
    longest = max(map(len, sets))
    return np.stack([np.pad(ids, (0, longest - len(ids)), constant_values=-1) for ids in sets])


def _check_row_sequences(sequences: PyTree) -> PyTree:
    try:
        return sequences if isinstance(sequences, jax.Array) else np.asarray(sequences)
    except ValueError:
        raise ValueError(
            f"expected sequences [R, T] of the tokens of rows, or [R, T, n] filled up with -1, got "
            f"{sequences}; pad the lists with -1"
        ) from None


def _split_lowest_sequence(sets: PyTree) -> tuple[PyTree, PyTree]:
    """Return the lowest id of each set of ids, and an array of the other ids.

    If each set has one id, None is returned in place of the second array.
    """
    if not isinstance(sets, np.ndarray):
        sets = _sort_ids_lowest_first(sets, jnp)
        return sets[..., 0], sets[..., 1:] if sets.shape[-1] > 1 else None
    sets = _sort_ids_lowest_first(sets, np)
    first, others = sets[..., 0], sets[..., 1:]
    twice = (others >= 0) & (others == sets[..., :-1])
    if twice.any():
        raise ValueError(
            "expected each sequence of a token once, got "
            f"{sets[twice.any(axis=-1)][0].tolist()}; leave out the repeated id"
        )
    num_others = int((others >= 0).sum(axis=-1).max(initial=0))
    if not num_others:
        return first, None
    room = [(0, 0)] * (others.ndim - 1) + [(0, next_power_of_two(num_others) - num_others)]
    return first, np.pad(others[..., :num_others], room, constant_values=-1)


def _sort_ids_lowest_first(sets: PyTree, xp: ModuleType) -> PyTree:
    """Sort each set of ids, `[..., n]`; negative ids become -1 and come last."""
    ids = xp.sort(xp.where(sets < 0, END, sets), axis=-1)
    return xp.where(ids == END, -1, ids)
