"""Caches for models: one cache for the layers of each kind, together if there are several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv.rope import Rope
from jaxkv.window import Window, cells_for
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
    window = jaxkv.window.sliding(c["sliding_window"]) if any(slides) else None
    return tuple(window if one else None for one in slides)


def make_cache(
    layers: Sequence[Layer],
    *,
    cells: int | None = None,
    source_cells: int | None = None,
    sequences: int = 1,
    streams: int = 1,
    ubatch_size: int = 512,
    max_rollback: int | None = None,
    full_windows: bool = False,
    dtype: Any = jnp.float32,
    **options: Any,
) -> Any:
    """Make the cache that the layers of a model need.

    Args:
      layers: what each of the L layers keeps, a tuple where that is several things.
      cells: of a stream: the tokens that fit, over all sequences that share it, into layers that
        see the whole text. May be left out where there is no such layer: a window and a state take
        the same room for a text of any length.
      source_cells: of a stream: the tokens of sources that fit, by default as many as `cells`. Of
        models that have an encoder alone.
      sequences: Q, the sequences that may be told apart.
      streams: S, the pools of cells that sequences are dealt out among: 1 for all of them together,
        `sequences` to give each sequence cells of its own, or another divisor of that.
      ubatch_size: the most tokens that are computed at once; the cache of a window is made for it.
      max_rollback: the tokens of a sequence that can be taken back after a window has moved past
        them, or in a recurrent layer. None is 32 for windows and 0 for recurrent layers, which keep
        a whole state for each.
      full_windows: give layers with a window `cells` too, so that any position can be gone back to.
      dtype: of keys and values.
      options: what else `jaxkv.make_kv_cache` takes, for all layers that attend.

    Raises:
      ValueError: when a count is out of its range, or `cells` are needed and left out.
      TypeError: when there are options for layers that attend, and no such layer, or cells for
        sources, and no layer that looks at one.

    llama.cpp: `llama_kv_cache_iswa`, `swa_full`; `llama_memory_hybrid`.
    """
    if options and not attending(layers):
        raise TypeError(f"no layer of this model attends, so leave out {', '.join(options)}")
    if source_cells is not None and not any(
        isinstance(one, CrossAttends) for _, one in all_kept(layers)
    ):
        raise TypeError("no layer of this model looks at a source, so leave out source_cells")
    kinds: list[tuple[Kept, list[tuple[int, Kept]]]] = []
    for i, kept in all_kept(layers):
        # Layers of one cache may turn their keys differently.
        kind = replace(kept, rope=None) if isinstance(kept, Attends) else kept
        for other, members in kinds:
            if kind == other:
                members.append((i, kept))
                break
        else:
            kinds.append((kind, [(i, kept)]))
    parts = []
    for kind, members in kinds:
        if isinstance(kind, Recurs):
            part = jaxkv.make_recurrent_cache(
                layers=len(members),
                states=kind.states,
                shard_dims={name: (one.axis, one.parts) for name, one in kind.splits.items()},
                sequences=sequences,
                max_rollback=max_rollback or 0,
                streams=streams,
            )
        elif isinstance(kind, CrossAttends):
            held = cells if source_cells is None else source_cells
            if held is None:
                raise ValueError("a part for sources needs to be told its cells: pass cells=")
            part = jaxkv.make_cross_attention_cache(
                layers=len(members),
                cells=held,
                kv_heads=kind.kv_heads,
                head_dim=kind.head_dim,
                sequences=sequences,
                streams=streams,
                dtype=dtype,
            )
        else:
            ropes = tuple(kept.rope for _, kept in members)
            part = jaxkv.make_kv_cache(
                layers=len(members),
                kv_heads=kind.kv_heads,
                head_dim=kind.head_dim,
                value_dim=kind.value_dim,
                sequences=sequences,
                streams=streams,
                window=kind.window,
                dtype=dtype,
                rope=ropes if len(set(ropes)) > 1 else ropes[0],
                **_room(
                    kind.window,
                    cells=cells,
                    ubatch_size=ubatch_size,
                    max_rollback=32 if max_rollback is None else max_rollback,
                    full=full_windows,
                    sharing=sequences // max(streams, 1),
                ),
                **options,
            )
        parts.append((part, tuple(i for i, _ in members)))
    return parts[0][0] if len(parts) == 1 else jaxkv.make_hybrid_cache(*parts)


def _room(
    window: Window | None,
    *,
    cells: int | None,
    ubatch_size: int,
    max_rollback: int,
    full: bool,
    sharing: int,
) -> dict[str, Any]:
    """Return how large a cache is: as many cells, or what its window needs if that is less."""
    sized = {"ubatch_size": ubatch_size, "max_rollback": max_rollback}
    if window is None or (full and cells is not None):
        return {"cells": cells}
    if cells is not None and cells <= cells_for(window, **sized, sharing=sharing):
        return {"cells": cells}  # the text is shorter than what the window needs
    return sized
