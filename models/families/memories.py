"""Memories for layers of two kinds: those that see the whole text and those with a window."""

from collections.abc import Sequence
from typing import Any

import jaxkv
from jaxkv import Rope, Window
from jaxkv.window import cells_for
from models.checkpoints.checkpoint import Checkpoint


def windows_of(checkpoint: Checkpoint) -> tuple[Window | None, ...]:
    """Read the window of each layer, None where it sees the whole text; empty if all do."""
    c = checkpoint.config
    slides = [kind == "sliding_attention" for kind in c["layer_types"]]
    if not any(slides):
        return ()
    window = jaxkv.standard(c["sliding_window"])
    return tuple(window if one else None for one in slides)


def make_memory(
    windows: Sequence[Window | None],
    ropes: Sequence[Rope],
    *,
    cells: int | None,
    sequences: int = 1,
    streams: int = 1,
    ubatch_size: int = 512,
    rollback: int = 32,
    full_windows: bool = False,
    **options: Any,
) -> Any:
    """Make one cache for the layers of each kind; together they are the memory of a model.

    Args:
      windows: of each layer, None where it sees the whole text.
      ropes: of each layer.
      cells: of a stream: the tokens that fit, over all sequences that share it. None for a text of
        any length, where every layer has a window.
      sequences: the sequences that may be told apart.
      streams: 1, or `sequences` to give each sequence cells of its own.
      ubatch_size: the most tokens that are computed at once; a window cache is made for it.
      rollback: positions that can be taken back after the window has moved past them.
      full_windows: give layers with a window `cells` too, so that any position can be gone back to.
      options: what else `jaxkv.make_kv_cache` takes; the same for every layer.

    llama.cpp: `llama_kv_cache_iswa`, `swa_full`.
    """
    parts = []
    for window in dict.fromkeys(windows):
        layers = tuple(i for i, one in enumerate(windows) if one == window)
        rope = tuple(ropes[i] for i in layers)
        small = window is not None and not full_windows
        if small and cells is not None:  # the text may be shorter than what a window needs
            small = cells > cells_for(
                window, ubatch_size=ubatch_size, rollback=rollback, sharing=sequences // streams
            )
        part = jaxkv.make_kv_cache(
            layers=len(layers),
            cells=None if small else cells,
            sequences=sequences,
            streams=streams,
            window=window,
            ubatch_size=ubatch_size,
            rollback=rollback,
            rope=rope if len(set(rope)) > 1 else rope[0],
            **options,
        )
        parts.append((part, layers))
    return parts[0][0] if len(parts) == 1 else jaxkv.make_hybrid_cache(*parts)
