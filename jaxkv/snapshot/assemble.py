"""Parts of a cache that a snapshot saves, and names of the saved arrays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxkv.cache import Cache, merge, split
from jaxkv.core.array_utils import is_traced
from jaxkv.core.validate import check_count, check_int32
from jaxkv.hybrid import HybridTable, compose_hybrid_cache
from jaxkv.jit_helpers import check_concrete_cache
from jaxkv.snapshot.cells import CellPart, SourcePart
from jaxkv.snapshot.file import SnapshotFile, raise_no_cache, shorten
from jaxkv.snapshot.parts import Part, buffer_names, from_json, to_json
from jaxkv.snapshot.states import StatePart
from jaxkv.spec import TableSpec, check_distinct

if TYPE_CHECKING:
    from jaxtyping import PyTree

    from jaxkv.snapshot.description import HybridDescription, PartDescription
    from jaxkv.table import CacheTable

KINDS: dict[str, type[Part]] = {
    "attention": CellPart,
    "recurrent": StatePart,
    "source": SourcePart,
}
"""Subclass of `Part` for each `kind` of a `TableSpec`."""


MAX_GROWTH, MIN_LIMIT = 1000, 2**26
"""`load` allocates at most 1000 times the size of the file, or 64 MiB, by default."""


class NamedPart(NamedTuple):
    """A part of a cache, the class that saves the part, and the prefixes of array names."""

    part: type[Part]
    cache: Cache
    table: str
    buffers: str


def name_parts(cache: Cache) -> list[NamedPart]:
    """Return the parts of a hybrid cache; for another cache, the cache itself as the only part."""
    if not isinstance(cache.table, HybridTable):
        return [NamedPart(KINDS[cache.table.spec.kind], cache, "table.", "buffers.")]
    return [
        NamedPart(KINDS[part.table.spec.kind], part, f"table.parts.{i}.", f"buffers.{i}.")
        for i, part in enumerate(cache.parts)
    ]


def describe(cache: Cache) -> PartDescription | HybridDescription:
    """Return the description of a cache in a snapshot, as JSON values."""
    descriptions = [
        entry.part.describe(entry.cache.table, entry.cache.buffers) for entry in name_parts(cache)
    ]
    if not isinstance(cache.table, HybridTable):
        return descriptions[0]
    return {"kind": "hybrid", "layers": to_json(cache.table.layers), "parts": descriptions}


def make_empty_cache(file: SnapshotFile) -> Cache:
    """Make an empty cache from the description in a snapshot."""
    description = file.description["cache"]
    if description["kind"] != "hybrid":
        return merge(*_make_part(file, description, "buffers."))
    pairs = [_make_part(file, part, f"buffers.{i}.") for i, part in enumerate(description["parts"])]
    layers = from_json(description["layers"])
    return compose_hybrid_cache(*zip([merge(*pair) for pair in pairs], layers, strict=True))


def cache_shapes(file: SnapshotFile) -> Cache:
    """Return the shapes of the saved cache; raise if the arrays do not match the description."""
    check_dtypes(file)
    try:
        cache = jax.eval_shape(partial(make_empty_cache, file))
        expected, actual = describe(cache), file.description["cache"]
        if json.dumps(expected, sort_keys=True) != json.dumps(actual, sort_keys=True):
            raise ValueError(
                f"expected the description {shorten(expected)}, got {shorten(actual)}; save the "
                "snapshot again"
            )
        _check_arrays(file, cache)
        return cache
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise_no_cache(error)


def check_size(file: SnapshotFile, saved: Cache, max_bytes: int | None) -> None:
    """Raise a ValueError if the saved cache, which `load` would allocate, is too large."""
    limit = max(MAX_GROWTH * file.nbytes, MIN_LIMIT)
    limit = limit if max_bytes is None else check_count(max_bytes, "max_bytes", high=2**63)
    if saved.nbytes > limit:
        raise ValueError(
            f"expected a cache of at most {limit} bytes in a snapshot of {file.nbytes} bytes, got "
            f"one of {saved.nbytes}; pass max_bytes={saved.nbytes}, or a cache to load into (into=)"
        )


def _check_arrays(file: SnapshotFile, cache: Cache) -> None:
    """Raise a ValueError if arrays, sequence ids or token lists do not match the cache."""
    saved, tokens = file.description["sequences"], file.description["tokens"]
    if list_sequences(cache.table.spec, saved) != saved:
        raise ValueError(
            f"expected a list of sequence ids, got {shorten(saved)}; save the snapshot again"
        )
    for text in tokens:
        if np.ndim(check_int32([] if text is None else text, "tokens")) != 1:
            raise ValueError(
                f"expected tokens as a flat list, got {shorten(text)}; save the snapshot again"
            )
    expected: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for part, part_cache, table, buffers in name_parts(cache):
        (count,) = file.arrays[f"{table}cell"][1]
        part_table: Any = part_cache.table
        slots = part_table.streams * part_table.num_cells
        check_count(count, "saved cells", low=0, high=slots)
        forms, tree = part.saved_shapes(part_table, part_cache.buffers, count, len(saved))
        pairs = zip(
            jax.tree.leaves(buffer_names(tree, buffers)), jax.tree.leaves(tree), strict=True
        )
        for name, form in [*((table + name, form) for name, form in forms.items()), *pairs]:
            if name in file.arrays or not name.endswith(".first_position"):  # not in older files
                expected[name] = form.dtype, form.shape
    if len(tokens) != len(saved) or expected != file.arrays:
        odd = sorted(set(expected.items()) ^ set(file.arrays.items()), key=str)
        raise ValueError(
            f"expected the arrays of the cache, got others, {shorten(odd[:2])}; save the "
            "snapshot again"
        )


def with_parts(cache: Cache, pairs: list[tuple[CacheTable, PyTree]]) -> Cache:
    """Return a cache with a new table and new buffers for each part."""
    if not isinstance(cache.table, HybridTable):
        return merge(*pairs[0])
    tables, buffers = zip(*pairs, strict=True)
    return merge(replace(cache.table, parts=tables), buffers)


def check_dtypes(file: SnapshotFile) -> None:
    """Raise a ValueError if JAX, without `jax_enable_x64`, would cast a saved array to 32 bits."""
    for name, (dtype, _) in file.arrays.items():
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise ValueError(
                f"expected {name} of {dtype} as saved, got a JAX without 64 bits; set "
                f'jax_enable_x64, as by jax.config.update("jax_enable_x64", True)'
            )


def list_sequences(spec: TableSpec, sequences: int | Sequence[int]) -> list[int]:
    """Return sequence ids as a list; raise if an id is invalid or repeated."""
    ids = spec.sequence_ids(sequences)
    if np.ndim(ids) > 1:
        raise ValueError(f"expected a list of sequence ids, got {sequences}; pass a flat list")
    check_distinct(ids)
    return np.atleast_1d(ids).tolist()


def check_saveable(cache: Cache) -> None:
    """Raise unless an object is a single concrete cache."""
    table, buffers = split(cache)
    if is_traced(cache):
        raise ValueError("expected a cache outside of jit, got a traced one; call it between steps")
    check_concrete_cache(table, buffers)


def check_fits(saved: Cache, cache: Cache) -> None:
    """Raise a ValueError with the first difference if a saved cache does not fit another cache."""
    own_parts, saved_parts = name_parts(cache), name_parts(saved)
    kinds = [
        [entry.cache.table.spec.kind for entry in entries] for entries in (own_parts, saved_parts)
    ]
    _check_same("kind", cache.table.spec.kind, saved.table.spec.kind)
    _check_same("kinds of parts", *kinds)
    if isinstance(cache.table, HybridTable) and isinstance(saved.table, HybridTable):
        _check_same("layers of parts", cache.table.layers, saved.table.layers)
    for i, (own_entry, saved_entry) in enumerate(zip(own_parts, saved_parts, strict=True)):
        where = f" in part {i}" if len(own_parts) > 1 else ""
        expected = own_entry.part.compatibility_fields(
            own_entry.cache.table, own_entry.cache.buffers
        )
        actual = own_entry.part.compatibility_fields(
            saved_entry.cache.table, saved_entry.cache.buffers
        )
        for name in expected:
            _check_same(name + where, expected[name], actual.get(name))


def _check_same(name: str, expected: object, actual: object) -> None:
    if expected != actual:
        raise ValueError(
            f"expected a snapshot of a cache with the {name} of this one, "
            f"{shorten(expected)}, got one with {shorten(actual)}; nothing was changed"
        )


def _make_part(
    file: SnapshotFile, description: PartDescription, prefix: str
) -> tuple[CacheTable, PyTree]:
    entries = {
        name.removeprefix(prefix): entry
        for name, entry in file.arrays.items()
        if name.startswith(prefix)
    }
    return KINDS[description["kind"]].make_empty(description, entries)
