"""Caches for models: one cache for the layers of each kind, together if there are several."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

import jaxkv
from jaxkv.rope import Rope
from jaxkv.window import Window
from models.checkpoints.checkpoint import Checkpoint
from models.meshes import Split


@dataclass(frozen=True, kw_only=True)
class Attends:
    """What a layer that attends keeps: keys and values.

    kv_heads: K, key/value heads.
    head_dim: D, numbers of a head.
    rope: how keys turn with position, None where they do not.
    window: what the layer sees, None for the whole text.
    value_dim: which numbers of a key are its value, None where values are stored too, as long as
      keys.
    """

    kv_heads: int
    head_dim: int
    rope: Rope | None
    window: Window | None = None
    value_dim: slice | None = None


@dataclass(frozen=True, kw_only=True)
class Recurs:
    """What a recurrent layer keeps.

    states: by name, the shape and dtype of one sequence's state.
    splits: by name, how those are split on a mesh that are.
    """

    states: Mapping[str, jax.ShapeDtypeStruct]
    splits: Mapping[str, Split]


@dataclass(frozen=True, kw_only=True)
class CrossAttends:
    """What a layer that looks at a source keeps: the keys and values of that.

    kv_heads: K, key/value heads.
    head_dim: D, numbers of a head.
    """

    kv_heads: int
    head_dim: int


Kept = Attends | Recurs | CrossAttends
Layer = Kept | tuple[Kept, ...]  # several where a layer attends beside a recurrence


def all_kept(layers: Sequence[Layer]) -> list[tuple[int, Kept]]:
    """Returns everything that layers keep, each thing with the number of its layer."""
    several = (layer if isinstance(layer, tuple) else (layer,) for layer in layers)
    return [(i, kept) for i, layer in enumerate(several) for kept in layer]


def attending(layers: Sequence[Layer]) -> list[Attends]:
    """Returns what is kept by layers that attend."""
    return [kept for _, kept in all_kept(layers) if isinstance(kept, Attends)]


def windows_of(checkpoint: Checkpoint) -> tuple[Window | None, ...]:
    """Returns the window of each layer, None where it sees the whole text."""
    c = checkpoint.config
    slides = [kind == "sliding_attention" for kind in c["layer_types"]]
    window = jaxkv.Window.sliding(c["sliding_window"]) if any(slides) else None
    return tuple(window if is_sliding else None for is_sliding in slides)


def spec_of(layers: Sequence[Layer]) -> jaxkv.CacheSpec:
    """Returns the spec of what the L layers of a model keep, a tuple where that is several things.

    Layers of one kind are a part, in the order in which the kinds come; they may turn their keys
    differently. A single kind is no hybrid.
    """
    kinds: list[tuple[Kept, list[tuple[int, Kept]]]] = []
    for i, kept in all_kept(layers):
        kind = replace(kept, rope=None) if isinstance(kept, Attends) else kept
        for group_kind, members in kinds:
            if kind == group_kind:
                members.append((i, kept))
                break
        else:
            kinds.append((kind, [(i, kept)]))
    parts = [
        (_part(kind, [kept for _, kept in members]), [i for i, _ in members])
        for kind, members in kinds
    ]
    return parts[0][0] if len(parts) == 1 else jaxkv.CacheSpec.hybrid(*parts)


def _part(kind: Kept, members: Sequence[Kept]) -> jaxkv.CacheSpec:
    if isinstance(kind, Recurs):
        splits = {name: (split.axis, split.parts) for name, split in kind.splits.items()}
        return jaxkv.CacheSpec.recurrent(len(members), kind.states, splits)
    if isinstance(kind, CrossAttends):
        return jaxkv.CacheSpec.cross_attention(len(members), kind.kv_heads, kind.head_dim)
    return jaxkv.CacheSpec.attention(
        len(members),
        kind.kv_heads,
        kind.head_dim,
        value_dim=kind.value_dim,
        window=kind.window,
        rope=tuple(kept.rope for kept in members if isinstance(kept, Attends)),
    )


def make_cache(layers: Sequence[Layer], **options: Any) -> jaxkv.Cache:
    """Make the cache that the layers of a model need.

    Args:
      layers: what each of the L layers keeps, a tuple where that is several things.
      options: see `options_of`.
    """
    spec = spec_of(layers)
    return jaxkv.make_cache(spec, **options_of(spec, **options))


def options_of(
    spec: jaxkv.CacheSpec,
    *,
    cells: int | None = None,
    source_cells: int | None = None,
    max_rollback: int | None = None,
    full_windows: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Returns what `jaxkv.make_cache` is told for the cache of a model.

    Args:
      spec: of the cache.
      cells: of a stream: the tokens that fit, over all sequences that share it, into layers that
        see the whole text. May be left out where there is no such layer: a window and a state take
        the same room for a text of any length.
      source_cells: of a stream: the tokens of sources that fit, by default as many as `cells`. Of
        models that have an encoder alone.
      max_rollback: the tokens of a sequence that can be taken back after a window has moved past
        them, or in a recurrent layer. None is 32 for windows and 0 for recurrent layers, which keep
        a whole state for each.
      full_windows: give layers with a window `cells` too, so that any position can be gone back to.
      options: what else `jaxkv.make_cache` takes.

    Raises:
      TypeError: when there are a `placement` or `stacked` for layers that attend, and no such
        layer, or cells for sources, and no layer that looks at one.

    llama.cpp: `llama_kv_cache_iswa`, `swa_full`; `llama_memory_hybrid`.
    """
    parts = [part for part, _ in spec.parts] or [spec]
    kinds = {part.kind for part in parts}
    unused = sorted({"placement", "stacked"} & options.keys())
    if unused and "attention" not in kinds:
        raise TypeError(f"no layer of this model attends, so leave out {', '.join(unused)}")
    if source_cells is not None and "cross_attention" not in kinds:
        raise TypeError("no layer of this model looks at a source, so leave out source_cells")

    def of_parts(value: Any, replacement: Any, where: Callable[[jaxkv.CacheSpec], bool]) -> Any:
        """One value for each part, another one where something holds; alone if it is one part."""
        values = tuple(replacement if where(part) else value for part in parts)
        return values if spec.parts else values[0]

    return options | {
        "cells": of_parts(
            cells,
            cells if source_cells is None else source_cells,
            lambda part: part.kind == "cross_attention",
        ),
        # As many cells as can be taken back are all that there are.
        "max_rollback": of_parts(
            max_rollback,
            cells if full_windows and cells is not None else max_rollback,
            lambda part: part.window is not None,
        ),
    }
