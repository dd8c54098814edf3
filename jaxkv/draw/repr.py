"""One-line `repr` of caches, plans, batches and results; a `repr` never raises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import Cache
from jaxkv.core.array_utils import is_concrete, is_traced, nbytes
from jaxkv.core.constants import EMPTY
from jaxkv.core.donation import is_donated
from jaxkv.hybrid import HybridTable
from jaxkv.kv.table import CellTable
from jaxkv.ops.quantised import Quantised
from jaxkv.plan import Plan, Reason
from jaxkv.recurrent.states import States
from jaxkv.spec import TableSpec
from jaxkv.ubatch import Ubatch

if TYPE_CHECKING:
    from jaxtyping import PyTree

    from jaxkv.table import CacheTable

X = TypeVar("X")

FEW = 8
"""Maximum number of elements of an array whose values are printed."""


def with_fallback_repr(line: Callable[[X], str]) -> Callable[[X], str]:
    """Return a `repr` that lists the types of the leaves if the wrapped `repr` raises."""

    @wraps(line)
    def safe_repr(self: X) -> str:
        try:
            return line(self)
        except Exception:
            leaves = jax.tree.leaves(self)
            types = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
            return f"{type(self).__name__}(leaves of {types})"

    return safe_repr


@with_fallback_repr
def cache_repr(cache: Cache) -> str:
    """Return the kind, sizes and number of used cells of a cache."""
    return f"Cache({_format_sizes(cache.table, cache.buffers)}: {_format_usage(cache)})"


@with_fallback_repr
def plan_repr(plan: Plan) -> str:
    """Return the shapes of a plan's ubatches, or the refused sequences with their reasons."""
    shapes = ", ".join("{} x {}".format(*ubatch.valid.shape) for ubatch in plan.ubatches)
    ubatches = f"{len(plan.ubatches)} ubatch{'es' * (len(plan.ubatches) != 1)}: {shapes} tokens"
    if (ok := _to_numpy_or_none(plan.ok)) is None:
        return f"Plan({ubatches}; {'traced' if is_traced(plan) else 'values not known'})"
    if ok:
        return f"Plan(ok, {ubatches})"
    reason, fits = _to_numpy_or_none(plan.reason), _to_numpy_or_none(plan.fits)
    assert reason is not None and fits is not None
    refused = [(seq, Reason(code).name) for seq, code in enumerate(reason) if code != Reason.OK]
    shown = [f"sequence {seq} {name}" for seq, name in refused[:FEW]]
    more = [f"{len(refused) - FEW} more"] if len(refused) > FEW else []
    return f"Plan(refused: {', '.join(shown + more)})"


@with_fallback_repr
def ubatch_repr(ubatch: Ubatch) -> str:
    """Return the kind, shape and sequences of a ubatch."""
    rows, tokens = ubatch.valid.shape
    valid, sequences = _to_numpy_or_none(ubatch.valid), _to_numpy_or_none(ubatch.sequences)
    if valid is None or sequences is None:
        content = "traced" if is_traced(ubatch) else "values not known"
    else:
        if (others := _to_numpy_or_none(ubatch.shared_with)) is not None:
            sequences = np.concatenate([sequences[..., None], others], axis=-1)
        ids = np.unique(sequences[valid])
        ids = ids[ids >= 0].tolist()
        content = f"{valid.sum()} valid"
        content += f" of sequences {ids}" if len(ids) <= FEW else f" of {len(ids)} sequences"
    return f"Ubatch({ubatch.spec.kind}, rows={rows}, tokens={tokens}: {content})"


@with_fallback_repr
def fields_repr(value: Any) -> str:
    """Return the fields of a dataclass, with values of small arrays, and shapes of large arrays."""
    pairs = ((field.name, getattr(value, field.name)) for field in fields(value))
    shown = [f"{name}={_format_field(x)}" for name, x in pairs if x is not None]
    return f"{type(value).__name__}({', '.join(shown)})"


@with_fallback_repr
def result_repr(result: Any) -> str:
    """Return the fields of a result, and its reasons by name."""
    names = getattr(result, "_fields", None) or [field.name for field in fields(result)]
    shown = {name: _format_field(getattr(result, name)) for name in names}
    for name in ("reason", "finish_reason"):
        if hasattr(result, name):
            shown[name] = _format_reasons(getattr(result, name))
    pairs = [f"{name}={text}" for name, text in shown.items() if text != "None"]
    return f"{type(result).__name__}({', '.join(pairs)})"


def _format_reasons(codes: Any) -> str:
    """Return the names of `Reason`s; for many sequences, the number of sequences by name."""
    array = _to_numpy_or_none(codes)
    if array is None:
        return _format_field(codes)
    names = [Reason(code).name for code in array.reshape(-1)]
    if array.size > FEW:
        names = [f"{count} {name}" for name, count in Counter(names).most_common()]
    return f"[{', '.join(names)}]" if array.ndim else names[0]


def _format_sizes(table: CacheTable, buffers: PyTree) -> str:
    """Return kind and sizes of a cache; leading axes of `vmap` are shown as `batch`."""
    size = f"{_format_dtypes(buffers)}, {format_bytes(nbytes((table, buffers)))}"
    match table:
        case CellTable():
            heads = {heads for heads, _, _ in buffers.head_sizes}
            sizes: dict[str, object] = {
                "layers": buffers.layers,
                "cells": table.position.shape[-1],
                "sequences": table.evicted_below.shape[-1],
                "streams": table.position.shape[-2],
                "kv_heads": heads.pop() if len(heads) == 1 else sorted(heads),
            }
            if table.window is not None:
                sizes["window"] = f"{table.window.rule}({table.window.width})"
            if table.placement != "any":
                sizes["placement"] = table.placement
            kind, extra = table.spec.kind, table.position.shape[:-2]
        case States():
            sizes = {
                "layers": len(buffers),
                "cells": table.stamp.shape[-1],
                "sequences": table.position.shape[-2],
                "streams": table.stamp.shape[-2],
                "max_rollback": table.position.shape[-1] - 1,
            }
            kind, extra = "recurrent", table.position.shape[:-2]
        case HybridTable():
            parts = zip(table.parts, buffers, strict=True)
            inner = " + ".join(
                f"({_format_sizes(part, part_buffers)})" for part, part_buffers in parts
            )
            return f"hybrid of {inner}, {format_bytes(nbytes((table, buffers)))}"
        case _:
            return f"{type(table).__name__}, {size}"
    if sizes["streams"] == 1:
        del sizes["streams"]
    if extra:
        sizes["batch"] = extra
    return ", ".join([kind, *(f"{name}={n}" for name, n in sizes.items()), size])


def _format_dtypes(buffers: PyTree) -> str:
    leaves = jax.tree.leaves(buffers, is_leaf=lambda x: isinstance(x, Quantised))
    return " and ".join(sorted({np.dtype(leaf.dtype).name for leaf in leaves}))


def _format_usage(cache: Cache) -> str:
    """Return the number of used cells, or the reason why the number is unknown."""
    if is_traced(cache):
        return "traced"
    if is_donated(cache.table):
        return "donated"
    lost = ", buffers donated" if is_donated(cache.buffers) else ""
    parts = cache.table.parts if isinstance(cache.table, HybridTable) else (cache.table,)
    counts = [_num_used_cells(part) for part in parts]
    if not all(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(cache.table)):
        return "shapes alone"
    if any(count is None for count in counts):
        return "split over processes" + lost
    return " + ".join(map(str, counts)) + " used" + lost


def _num_used_cells(table: CacheTable) -> int | None:
    """Return the number of used cells in all streams; None if the table cannot be read."""
    if isinstance(table, States):
        position, cell = _to_numpy_or_none(table.position), _to_numpy_or_none(table.cell)
        if position is None or cell is None:
            return None
        pairs, (streams, cells) = position.shape[-2:], table.stamp.shape[-2:]
        first = np.arange(pairs[0]) // (pairs[0] // streams) * cells
        numbers = np.where(position == EMPTY, -1, cell + first[:, None])
        return sum(len({*row} - {-1}) for row in numbers.reshape(-1, pairs[0] * pairs[1]).tolist())
    assert isinstance(table, CellTable)
    position = _to_numpy_or_none(table.position)
    return None if position is None else int((position != EMPTY).sum())


def _format_field(value: Any) -> str:
    if isinstance(value, Cache):
        return cache_repr(value)
    if isinstance(value, TableSpec):
        return value.kind
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        array = _to_numpy_or_none(value)
        if array is not None and array.size <= FEW:
            return str(array.tolist())
        return f"{value.dtype}[{','.join(map(str, value.shape))}]" + " traced" * is_traced(value)
    if isinstance(value, tuple | list) and len(value) > 2:
        briefs = list(map(_format_field, value))
        return f"{len(value)} x {briefs[0]}" if len(set(briefs)) == 1 else f"{len(value)} values"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_format_field, value))})"
    text = repr(value)
    return text if len(text) <= 40 else type(value).__name__


def _to_numpy_or_none(x: object) -> np.ndarray | None:
    """Return `x` as a NumPy array; None if this process cannot read the values."""
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(x)
    if not isinstance(x, jax.Array) or not is_concrete(x) or x.is_deleted():
        return None
    return None if jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.asarray(x)


def format_bytes(count: int) -> str:
    """Format a number of bytes with a unit from bytes to TiB."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{count} bytes" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
