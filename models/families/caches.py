"""Cache specs and cache options of models, by kind of layer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import jaxkv
from jaxkv.rope import Rope
from jaxkv.window import Window
from models.checkpoints.checkpoint import Checkpoint
from models.meshes import Split


@dataclass(frozen=True, kw_only=True)
class Attends:
    """Description of an attention layer of the cache.

    window: window of the layer; None for full attention.
    value_dim: slice of each key that is used as the value; None if the cache stores values of
      size `head_dim`.
    """

    kv_heads: int
    head_dim: int
    rope: Rope | None
    window: Window | None = None
    value_dim: slice | None = None


@dataclass(frozen=True, kw_only=True)
class Recurs:
    """Description of a recurrent layer of the cache.

    states: shape and dtype of each state, by state name.
    splits: how a mesh may split each state, by state name.
    """

    states: Mapping[str, jax.ShapeDtypeStruct]
    splits: Mapping[str, Split]


@dataclass(frozen=True, kw_only=True)
class CrossAttends:
    """Description of a cross-attention layer of the cache."""

    kv_heads: int
    head_dim: int


Kept = Attends | Recurs | CrossAttends
Layer = Kept | tuple[Kept, ...]  # several for a layer with attention and a recurrence, or none


def all_kept(layers: Sequence[Layer]) -> list[tuple[int, Kept]]:
    """Return the descriptions of all layers, each with its layer number."""
    several = (layer if isinstance(layer, tuple) else (layer,) for layer in layers)
    return [(i, kept) for i, layer in enumerate(several) for kept in layer]


def attending(layers: Sequence[Layer]) -> list[Attends]:
    """Return the descriptions of all attention layers."""
    return [kept for _, kept in all_kept(layers) if isinstance(kept, Attends)]


def windows_of(checkpoint: Checkpoint) -> tuple[Window | None, ...]:
    """Return the window of each layer; None for full attention."""
    c = checkpoint.config
    c.ignore("sliding_window")  # without effect if all layers have full attention
    if "layer_types" not in c:
        return (None,) * c["num_hidden_layers"]
    kinds = c.layer_kinds("full_attention", "sliding_attention")
    window = jaxkv.Window.sliding(c["sliding_window"]) if "sliding_attention" in kinds else None
    return tuple(None if kind == "full_attention" else window for kind in kinds)


def spec_of(layers: Sequence[Layer]) -> jaxkv.CacheSpec:
    """Return the cache spec of L layers, each of one or several kinds.

    If there are several kinds, the spec is hybrid and has one part for each kind. The parts are in
    the order in which their kinds first occur in `layers`. Attention layers with the same window
    are of one kind; they may have different ropes and sizes. The spec is also hybrid if the cache
    stores nothing for some layers, which are empty tuples.
    """
    kinds: list[tuple[Any, list[tuple[int, Kept]]]] = []
    for i, kept in all_kept(layers):
        kind = kept.window if isinstance(kept, Attends) else kept
        for group_kind, members in kinds:
            if kind == group_kind:
                members.append((i, kept))
                break
        else:
            kinds.append((kind, [(i, kept)]))
    parts = [
        (_part([kept for _, kept in members]), [i for i, _ in members]) for _, members in kinds
    ]
    if len(parts) == 1 and len(parts[0][1]) == len(layers):
        return parts[0][0]
    return jaxkv.CacheSpec.hybrid(*parts)


def _part(members: Sequence[Kept]) -> jaxkv.CacheSpec:
    kind, attends = members[0], [kept for kept in members if isinstance(kept, Attends)]
    if isinstance(kind, Recurs):
        splits = {name: (split.axis, split.parts) for name, split in kind.splits.items()}
        return jaxkv.CacheSpec.recurrent(len(members), kind.states, splits)
    if isinstance(kind, CrossAttends):
        return jaxkv.CacheSpec.cross_attention(len(members), kind.kv_heads, kind.head_dim)
    return jaxkv.CacheSpec.attention(
        len(members),
        [kept.kv_heads for kept in attends],
        [kept.head_dim for kept in attends],
        [kept.head_dim if kept.value_dim is None else kept.value_dim for kept in attends],
        window=kind.window,
        rope=tuple(kept.rope for kept in attends),
    )


def make_cache(layers: Sequence[Layer], **options: Any) -> jaxkv.Cache:
    """Make the cache of a model's layers; `options` are the arguments of `options_of`."""
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
    """Return the options of `jaxkv.make_cache` for the cache of a model.

    Args:
      spec: spec of the cache.
      cells: number of cells of each stream (N) in layers with full attention. None is allowed if
        every layer has a window or states, whose sizes are independent of the number of tokens.
      source_cells: number of cells of each stream for encoder sources, by default `cells`.
      max_rollback: number of tokens of each sequence that can be removed in layers with windows or
        states. The default is 32 for windows. It is 0 for states, because each token that can be
        removed requires another copy of the state.
      full_windows: if True and `cells` is given, layers with windows also have `cells` cells, so
        that a rollback can go back to any position.
      options: other options of `jaxkv.make_cache`.

    Raises:
      TypeError: If `placement` or `stacked` is given, and no layer has attention.
      TypeError: If `source_cells` is given, and no layer has cross-attention.

    llama.cpp: `llama_kv_cache_iswa`, `swa_full`; `llama_memory_hybrid`.
    """
    parts = [part for part, _ in spec.parts] or [spec]
    kinds = {part.kind for part in parts}
    unused = sorted({"placement", "stacked"} & options.keys())
    if unused and "attention" not in kinds:
        raise TypeError(f"no layer of this model has attention; leave out {', '.join(unused)}")
    if source_cells is not None and "cross_attention" not in kinds:
        raise TypeError("no layer of this model has cross-attention; leave out source_cells")

    def of_parts(value: Any, replacement: Any, where: Callable[[jaxkv.CacheSpec], bool]) -> Any:
        """Return `replacement` for each part for which `where` is True, `value` for others.

        The result is a tuple with a value for each part, or one value if the cache is not hybrid.
        """
        values = tuple(replacement if where(part) else value for part in parts)
        return values if spec.parts else values[0]

    return options | {
        "cells": of_parts(
            cells,
            cells if source_cells is None else source_cells,
            lambda part: part.kind == "cross_attention",
        ),
        # A window whose rollback is `cells` stores all cells.
        "max_rollback": of_parts(
            max_rollback,
            cells if full_windows and cells is not None else max_rollback,
            lambda part: part.window is not None,
        ),
    }
