"""Saving of a cache, or of some of its sequences, to a file or bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxkv.cache import Cache
from jaxkv.core.donation import explain_donation_errors
from jaxkv.core.validate import check_int32
from jaxkv.snapshot import file
from jaxkv.snapshot.assemble import check_saveable, describe, list_sequences, name_parts
from jaxkv.snapshot.parts import buffer_names

if TYPE_CHECKING:
    from jaxkv.snapshot.description import Json, SnapshotContent


@explain_donation_errors
def save(
    cache: Cache,
    *,
    path: str | os.PathLike | None = None,
    sequences: int | Sequence[int] | None = None,
    tokens: Mapping[int, Sequence[int]] | None = None,
    model_id: Json = None,
    notes: Json = None,
) -> bytes | None:
    """Save a cache, or some of its sequences, to a file or bytes.

    A snapshot contains the cells or states of the saved sequences, with pending shifts and the
    highest evicted positions. Empty cells and stamps are not saved. The file is written
    in a temporary folder and then moved, so a file with the final name is always complete.

    Args:
      cache: any cache. Save a cache on a mesh inside of `jax.set_mesh`.
      path: path of the file; by default, `save` returns bytes. An existing file is replaced, and
        links are followed. If the process is killed, a folder `.*.jaxkv-unfinished` remains next to
        the path until the next `save` there removes it.
      sequences: ids of the sequences to save, without repeats; default: all, also empty sequences.
      tokens: token ids by sequence id, returned by `snapshot.inspect`. They are not compared with
        the cache, which stores no tokens.
      model_id: JSON value that identifies the model. `snapshot.load` raises if it is called with
        another `model_id`. The ids are compared only if neither is None.
      notes: JSON value for any use, returned by `snapshot.inspect`.

    Returns:
      The bytes of the snapshot; None if a path is given.

    Raises:
      ImportError: If the package safetensors is not installed.
      OSError: If writing fails, for example on a full disk. An earlier file is unchanged.
      OSError: If the path is a folder or a device, or the folder of the path does not exist.
      TypeError: If the cache has shapes only.
      ValueError: If the cache is traced, donated, in host memory, or a batch of caches.
      ValueError: If a layer of the cache was not written after `apply`.
      ValueError: If a sequence id is unknown or repeated, or the list of ids is nested.
      ValueError: If `model_id` or `notes` is nested more than 64 deep.
      ValueError: If the tokens of a sequence are not a list, or the sequence is not saved.

    Examples:
      >>> import tempfile
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
      >>> cache = make_cache(spec, cells=6, sequences=2)
      >>> step = apply(cache, init_batch(cache, make_batch([[1, 2, 3], [4, 5]])))
      >>> keys = jnp.ones((*step.valid.shape, 1, 2))
      >>> cache = write_kv(step, 0, keys, keys).cache
      >>> path = tempfile.mkdtemp() + "/chat.safetensors"
      >>> snapshot.save(cache, path=path, sequences=[1], tokens={1: [4, 5]}, model_id="tiny")
      >>> print(show(snapshot.load(path)))
      owner    . . . 1 1 .
      position . . . 0 1 .

    llama.cpp: `llama_state_save_file`, `llama_state_seq_save_file`, `llama_state_get_data`,
    `llama_state_seq_get_data`.
    """
    content = _collect_content(cache, sequences, tokens, model_id, notes)
    if path is None:
        return file.file_bytes(*content)
    file.write_file(path, *content)
    return None


def _collect_content(
    cache: Cache,
    sequences: int | Sequence[int] | None,
    tokens: Mapping[int, Sequence[int]] | None,
    model: Json,
    notes: Json,
) -> tuple[SnapshotContent, dict[str, np.ndarray]]:
    check_saveable(cache)
    spec = cache.table.spec
    saved = list_sequences(spec, range(spec.sequences) if sequences is None else sequences)
    texts = {} if tokens is None else tokens
    if not isinstance(texts, Mapping):
        raise TypeError(
            f"expected tokens by sequence, such as {{0: [1, 2]}}, got {type(texts)}; pass a dict "
            "of ids to lists"
        )
    lists = {int(spec.sequence_ids(seq)): _token_list(text, seq) for seq, text in texts.items()}
    if not set(lists) <= set(saved):
        raise ValueError(
            f"expected tokens of the saved sequences {saved}, got some of "
            f"{sorted(set(lists) - set(saved))}; save these sequences too"
        )
    model, notes = file.json_round_trip(model, "model_id"), file.json_round_trip(notes, "notes")

    arrays: dict[str, np.ndarray] = {}
    for part, part_cache, table, buffers in name_parts(cache):
        part_arrays, tree = part.extract_sequences(part_cache.table, part_cache.buffers, saved)
        arrays.update({table + name: array for name, array in part_arrays.items()})
        arrays.update(
            zip(jax.tree.leaves(buffer_names(tree, buffers)), jax.tree.leaves(tree), strict=True)
        )
    description: SnapshotContent = {
        "cache": describe(cache),
        "sequences": saved,
        "tokens": [lists.get(seq) for seq in saved],
        "model": model,
        "notes": notes,
    }
    return description, arrays


def _token_list(text: Sequence[int], seq: int) -> list[int]:
    ids = np.asarray(check_int32(text, "tokens"))
    if ids.ndim != 1:
        raise ValueError(
            f"expected [n] tokens of sequence {seq}, got {list(ids.shape)}; pass a list of integers"
        )
    return ids.tolist()
