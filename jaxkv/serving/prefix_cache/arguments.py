"""Checks of the arguments of a prefix store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxkv.batch import check_extra
from jaxkv.cache import Cache, split
from jaxkv.core.array_utils import is_concrete
from jaxkv.core.validate import check_int32
from jaxkv.serving.prefix_cache.prompts import ModelInputs
from jaxkv.spec import TableSpec, check_distinct

if TYPE_CHECKING:
    from jaxtyping import PyTree

    from jaxkv.core.types import Ids


def spec_of_concrete(cache: Cache) -> TableSpec:
    """Return the spec of a cache; raise a ValueError if the cache is traced."""
    table, _ = split(cache)
    if not is_concrete(table):
        raise ValueError(
            "expected a cache outside of jit, since a store is a value of the host, got a traced "
            "one; call the store between jitted steps"
        )
    return table.spec


def check_sequences(cache: Cache, sequences: Iterable[int]) -> tuple[int, ...]:
    """Return ids of empty sequences as ints; raise a ValueError for other sequences."""
    if not isinstance(sequences, np.ndarray | jax.Array):
        sequences = list(sequences) if isinstance(sequences, Iterable) else sequences
    ids = np.atleast_1d(cache.table.spec.sequence_ids(sequences))
    check_distinct(ids)
    if ids.ndim > 1 or not ids.size:
        raise ValueError(f"expected one sequence or more, got {sequences}; pass some ids")
    full = ids[np.asarray(cache.seq_pos_max(ids)) >= 0]
    if full.size:
        raise ValueError(
            f"expected sequences that hold nothing, got {full.tolist()} with tokens; remove "
            f"them (seq_rm), or pass others"
        )
    return tuple(ids.tolist())


def check_prompt(tokens: Ids, extra: Mapping[str, PyTree] | None) -> ModelInputs:
    """Return copies of the inputs of a prompt; raise a ValueError if the prompt is empty."""
    prompt = np.array(check_int32(tokens, "tokens"), np.int32)
    if prompt.ndim != 1 or not prompt.size:
        raise ValueError(
            f"expected tokens [n] of one prompt of at least one token, got the shape "
            f"{prompt.shape}; pass one list of token ids"
        )
    arrays = check_extra(extra, prompt.shape)
    return ModelInputs(tokens=prompt, extra={name: np.array(x) for name, x in arrays.items()})
