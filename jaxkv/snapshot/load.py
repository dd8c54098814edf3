"""Loading of a snapshot as a new cache, or of its sequences into an existing cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import Cache
from jaxkv.core.validate import check_int32
from jaxkv.snapshot.assemble import (
    cache_shapes,
    check_fits,
    check_saveable,
    check_size,
    list_sequences,
    make_empty_cache,
    name_parts,
    with_parts,
)
from jaxkv.snapshot.file import VERSION, SnapshotFile, Source, json_round_trip, open_file
from jaxkv.snapshot.parts import SequenceMap
from jaxkv.snapshot.placements import check_placements

if TYPE_CHECKING:
    from jaxkv.snapshot.description import Json


@dataclass(frozen=True, kw_only=True)
class SnapshotInfo:
    """Description of a snapshot, returned by `inspect`.

    sequences: ids of all saved sequences, also of empty sequences.
    model_id, notes: values passed to `save`; None if not passed.
    cache: shapes of the cache that `load` makes; see `cache.nbytes` and `cache.table.spec`.
    """

    version: int
    sequences: tuple[int, ...]
    tokens: dict[int, list[int]]
    model_id: Json
    notes: Json
    cache: Cache
    arrays: dict[str, tuple[str, tuple[int, ...]]]


def inspect(source: Source) -> SnapshotInfo:
    """Return the description of a snapshot; the arrays of a file are not read.

    Args:
      source: path of a snapshot file, or the bytes of a snapshot; bytes are copied.

    Returns:
      A `SnapshotInfo`: `sequences`, a tuple of saved ids; `tokens`, a dict from ids to lists;
      `model_id` and `notes`, as passed to `save`; `version`, an int. The field `cache` has the
      shapes of the cache that `load` makes. `arrays` maps the name of each array to its dtype and
      shape.

    Raises:
      ImportError: If the package safetensors is not installed.
      OSError: If the file does not exist, is a folder or a device, or cannot be opened.
      ValueError: If the file is not a snapshot, has another version, or has a damaged description.
        Only `load` compares checksums of arrays.

    Examples:
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=6)
      >>> step = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
      >>> keys = jnp.ones((*step.valid.shape, 1, 2))
      >>> cache = write_kv(step, 0, keys, keys).cache
      >>> info = snapshot.inspect(snapshot.save(cache, tokens={0: [1, 2, 3]}, notes={"name": "a"}))
      >>> info.sequences, info.tokens, info.notes, info.arrays["buffers.k.0"]
      ((0,), {0: [1, 2, 3]}, {'name': 'a'}, ('float32', (3, 1, 2)))
    """
    with open_file(source) as file:
        said, cache = file.description, cache_shapes(file)
        pairs = zip(said["sequences"], said["tokens"], strict=True)
        return SnapshotInfo(
            version=VERSION,
            sequences=tuple(said["sequences"]),
            tokens={seq: tokens for seq, tokens in pairs if tokens is not None},
            model_id=said["model"],
            notes=said.get("notes"),  # older files of this version have no notes
            cache=cache,
            arrays={name: (dtype.name, shape) for name, (dtype, shape) in file.arrays.items()},
        )


def load(
    source: Source,
    *,
    into: Cache | None = None,
    sequences: int | Sequence[int] | Mapping[int, int] | None = None,
    model_id: Json = None,
    donate: bool = False,
    max_bytes: int | None = None,
) -> Cache:
    """Load a snapshot as a new cache, or write the saved sequences into an existing cache.

    A new cache has the sizes of the saved cache, and each saved token is in the same cell. The new
    cache has the default `lanes` of the platform. If the saved cache has the same `lanes`, the
    saved cache and the new cache give bit-identical results. A ubatch that was planned for the
    saved cache is stale for the new cache if a stream of the ubatch has saved tokens.

    If `into` is a cache, the saved sequences replace sequences of that cache. The saved and the
    existing cache may differ in numbers of cells, sequences and streams, and in placement. Free
    cells are chosen as for the tokens of a batch. With tiled placement, the saved cells first fill
    empty tiles, in saved order. Evictable cells may be reused. Sequences that share cells in the
    snapshot also share cells in the existing cache if their target sequences are in one stream. If
    the existing cache stores fewer states of a sequence than the snapshot contains, only the newest
    states are loaded. If the snapshot is damaged or does not fit, the existing cache is unchanged.

    Args:
      source: path of a snapshot file, or the bytes of a snapshot.
      into: cache on one device, with the layers, heads, dtypes, states, ropes and windows of the
        saved cache. None makes a new cache.
      sequences: target ids, one for each saved sequence in saved order; by default the saved ids. A
        mapping from saved ids to target ids loads only the sequences in the mapping.
      model_id: id of the current model; compared with the snapshot's `model_id` if both are given.
      donate: if True, reuse the buffers of the existing cache, which becomes invalid.
      max_bytes: largest size of a new cache, so that a small file cannot allocate a large cache.
        The default is 1,000 times the size of the file, but at least 64 MiB. A snapshot of few
        tokens in a large cache needs more. With `into`, no cache is allocated.

    Returns:
      The loaded cache. All ubatches planned for changed streams of the existing cache are stale.
      The plan of an update or a defrag may stay current (`Cache.is_current`).

    Raises:
      ImportError: If the package safetensors is not installed.
      OSError: If the file does not exist, is a folder or a device, or cannot be opened.
      PlanRefusedError: If a stream has too few free cells.
      TypeError: If `into` has shapes only.
      ValueError: If the file is not a snapshot, has another version, or is damaged.
      ValueError: If a new cache would be larger than `max_bytes`, or have a placement of your own.
      ValueError: If `model_id` differs, or the saved cache does not fit the existing cache.
      ValueError: If the snapshot contains 64-bit arrays and `jax_enable_x64` is off.
      ValueError: If the existing cache is traced, split over a mesh, donated, or a batch of caches.
      ValueError: If a sequence id is unknown or repeated, the number of target ids is wrong, or
        `sequences` is given without an existing cache.

    Examples:
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
      >>> cache = make_cache(spec, cells=4)
      >>> step = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
      >>> keys = jnp.ones((*step.valid.shape, 1, 2))
      >>> cache = write_kv(step, 0, keys, keys).cache
      >>> data = snapshot.save(cache)
      >>> print(show(snapshot.load(data)))
      owner    0 0 0 .
      position 0 1 2 .

      Load the saved sequence into sequence 2 of another cache:

      >>> other = make_cache(spec, cells=5, sequences=3)
      >>> other = prefill(forward, params, other, [[3], [4]]).cache
      >>> print(show(snapshot.load(data, into=other, sequences=[2])))
      owner    0 1 2 2 2
      position 0 0 0 1 2

    llama.cpp: `llama_state_load_file`, `llama_state_set_data`, `llama_state_seq_load_file`,
    `llama_state_seq_set_data`.
    """
    if into is None and sequences is not None:
        raise ValueError(
            f"expected into= with sequences=, got {sequences!r} alone; pass the cache to load into"
        )
    if into is not None:
        check_saveable(into)
    with open_file(source) as file:
        saved = _check_model(file, model_id)
        ids = file.description["sequences"]
        if into is None:
            check_size(file, saved, max_bytes)
            check_placements(saved)
            return _restore(file, saved, make_empty_cache(file), None, donate=True)
        check_fits(saved, into)
        return _restore(file, saved, into, _map_sequences(ids, into, sequences), donate=donate)


def _check_model(file: SnapshotFile, model: Json) -> Cache:
    """Return the shapes of the saved cache; raise if both model ids are given and differ."""
    source = file.description["model"]
    if model is not None and source is not None and json_round_trip(model, "model_id") != source:
        raise ValueError(
            f"expected a snapshot of the model {model!r}, got one of {source!r}; compute the "
            f"sequences again with this model"
        )
    return cache_shapes(file)


def _map_sequences(
    saved: list[int], cache: Cache, sequences: int | Sequence[int] | Mapping[int, int] | None
) -> SequenceMap:
    spec, target_of = cache.table.spec, {seq: seq for seq in saved}
    if isinstance(sequences, Mapping):
        check_int32([*sequences], "saved sequence ids")
        if not set(sequences) <= set(saved):
            raise ValueError(
                f"expected some of the saved sequences {saved}, got {sorted(sequences)}; pass "
                "ids of snapshot.inspect(path)"
            )
        target_of = dict(sequences)
    elif sequences is not None:
        targets = list_sequences(spec, sequences)
        if len(targets) != len(saved):
            raise ValueError(
                f"expected a target for each of the saved sequences {saved}, got {targets}; "
                f"pass as many, or a mapping of those that are wanted"
            )
        target_of = dict(zip(saved, targets, strict=True))
    new = list_sequences(spec, [*target_of.values()])
    return SequenceMap([saved.index(seq) for seq in target_of], new)


def _restore(
    file: SnapshotFile, saved: Cache, cache: Cache, moves: SequenceMap | None, *, donate: bool
) -> Cache:
    """Write saved sequences into a cache, after a check of all arrays in the file.

    If `moves` is None, the cache is empty, and each saved cell gets its own index.
    """
    file.check()
    ids, all_placed = file.description["sequences"], []
    for entry, saved_entry in zip(name_parts(cache), name_parts(saved), strict=True):
        part, table, saved_table = entry.part, entry.cache.table, saved_entry.cache.table

        def read(name: str, prefix: str = saved_entry.table) -> np.ndarray:
            return file[prefix + name]

        part.check_saved_table(saved_table, read, ids)
        if moves is None:
            all_placed.append(part.restore_table(table, read, ids, file.seed))
        elif moves.new:
            placed = part.insert_into_table(table, saved_table, read, ids, moves, file.seed)
            all_placed.append(placed)
    if moves is not None and not moves.new:
        return cache
    parts = []
    for entry, placed in zip(name_parts(cache), all_placed, strict=True):
        buffers = entry.cache.buffers
        buffers = buffers if donate else jax.tree.map(jnp.copy, buffers)
        written = entry.part.write_buffers(buffers, entry.buffers, placed, file.__getitem__)
        parts.append((placed.table, written))
    return with_parts(cache, parts)
