"""Plots of caches with matplotlib: `pip install matplotlib`.

Each function draws on the matplotlib axes `ax` (by default, on new axes), and returns the axes.
Without matplotlib, each function raises an ImportError. The seven sequence colours repeat.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxkv.cache import Cache
from jaxkv.core import array_utils
from jaxkv.core.array_utils import to_host
from jaxkv.core.constants import EMPTY
from jaxkv.core.repr import format_bytes
from jaxkv.draw.cell_view import CellView
from jaxkv.draw.colours import PALETTE, colour_of, text_colour_on
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.mask import visible_cells_mask
from jaxkv.kv.table import CellTable
from jaxkv.step import Step, without_buffers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["cells", "nbytes", "occupancy", "attention_mask"]

TEXTS = 160
"""Maximum number of cells of a plot that shows positions in the cells."""

ACROSS = 24
"""Maximum number of cells in a line of a plot that shows positions in the cells."""

GREY = "#dddddd"
FREE = "#ffffff"
LINE = "#999999"


def cells(cache: Cache, ax: Axes | None = None) -> Axes:
    """Draw the owner of each cell, and positions if there is space.

    A single stream is drawn as a grid, line by line from the top left. Each of several streams is
    one line. A shared cell has the colour of its lowest owner id, and black hatching.

    Args:
      cache: cache that is not hybrid, such as one of the `parts` of a hybrid cache.
      ax: matplotlib axes to draw on; None for new axes.

    Raises:
      TypeError: If the cache is hybrid or traced, or has shapes instead of arrays.
      ValueError: If the cache was donated, or is a batch of caches made by `vmap`.
    """
    view = cache.cells()
    ax = _ensure_axes(ax)
    streams, count = view.position.shape
    across = (
        count if streams > 1 else min(count, max(16, 1 << int((2 * count) ** 0.5).bit_length() - 1))
    )
    position, owner, shared = (
        _wrap_cells(x, across, fill)
        for x, fill in ((view.position, -2), (view.owner, -2), (view.num_owners > 1, False))
    )
    sequences = np.unique(owner[owner >= 0]).tolist()
    ax.imshow(
        _colour_ids_to_rgb(owner), aspect="equal" if streams == 1 else "auto", interpolation="none"
    )
    if view.position.size <= TEXTS and across <= ACROSS:
        _draw_grid_lines(ax, owner.shape)
        for (row, column), at in np.ndenumerate(position):
            if at >= 0:
                colour = text_colour_on(colour_of(int(owner[row, column])))
                box = {"facecolor": colour_of(int(owner[row, column])), "pad": 1, "lw": 0}
                ax.text(
                    column, row, at, ha="center", va="center", color=colour, fontsize=8, bbox=box
                )
    _hatch_cells(ax, shared)
    labels = _colour_labels(sequences)
    if shared.any():
        labels.append(("shared", "shared"))
    if (owner == -1).any():
        labels.append((FREE, "empty"))
    _legend(ax, labels)
    ax.set_xlabel("cell" if len(owner) == streams else f"cell, {across} a line")
    if streams > 1:
        ax.set_ylabel("stream")
        ax.set_yticks(_choose_ticks(streams))
    else:
        ax.set_ylabel("from cell")
        ax.set_yticks(
            _choose_ticks(len(owner)), [str(row * across) for row in _choose_ticks(len(owner))]
        )
    return ax


def occupancy(
    steps: Sequence[Cache] | Sequence[int], *, cells: int | None = None, ax: Axes | None = None
) -> Axes:
    """Draw the number of used cells at each step.

    Args:
      steps: caches, or numbers of used cells from `cache.num_used_cells()`, one for each step.
        For caches, each owner has its own area; a shared cell counts only for the lowest owner id.
      cells: number of cells, drawn as a horizontal line. The default is the number of cells of the
        first cache. If `steps` are numbers, no line is drawn by default.
      ax: matplotlib axes to draw on; None for new axes.

    Raises:
      TypeError: If a cache is traced, or has shapes instead of arrays.
      ValueError: If there is no step, if caches and numbers are mixed, or if a cache was donated.
    """
    if len(steps) == 0:
        raise ValueError(
            "expected caches or counts, one for each step, got none; pass one for each step"
        )
    caches = [step for step in steps if isinstance(step, Cache)]
    if caches and len(caches) < len(steps):
        raise ValueError("expected caches or counts, got both; pass cache.num_used_cells() of each")
    ax = _ensure_axes(ax)
    at = np.arange(len(steps) + 1)  # Each step has width 1, so a single step is visible.
    if caches:
        views = [[part.cells() for part in cache.parts] for cache in caches]
        cells = sum(view.position.size for view in views[0]) if cells is None else cells
        owners = [np.concatenate([view.owner.ravel() for view in of_cache]) for of_cache in views]
        counts = [np.bincount(x[x >= 0], minlength=views[0][0].sequences) for x in owners]
        used = {seq: row.tolist() for seq, row in enumerate(np.transpose(counts)) if row.any()}
        if used:
            colours = [colour_of(seq) for seq in used]
            heights = [[*counts, counts[-1]] for counts in used.values()]
            ax.stackplot(at, *heights, colors=colours, step="post")
        _legend(ax, _colour_labels(used))
    else:
        counts = np.asarray(to_host([*steps, steps[-1]]))
        ax.fill_between(at, counts, color=PALETTE[1], step="post")
    if cells is not None:
        ax.axhline(cells, color=LINE, linestyle="--", linewidth=1)
        where = {"xy": (at[-1], cells), "xytext": (0, -3), "textcoords": "offset points"}
        ax.annotate(f"{cells:,} cells", **where, ha="right", va="top")
    ax.set_ylim(bottom=0, top=None if cells is None else cells * 1.05)
    ax.set_xlim(0, len(steps))
    ax.locator_params(axis="x", integer=True)
    ax.set_xlabel("step")
    ax.set_ylabel("cells in use")
    return ax


def attention_mask(
    step: Step,
    *,
    part: int = 0,
    causal: bool = True,
    by_position: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Draw the attention mask of a ubatch: a line for each valid token, a column for each cell.

    The columns are the cells of the token's stream. Cells that the token attends to have the
    colour of the token's sequence; other used cells are grey.

    Args:
      step: tokens to draw, such as `apply(cache, plan)`.
      part: index of the part to draw, if the cache is hybrid.
      causal: if False, tokens also attend to later positions.
      by_position: if True, the columns are positions of the token's sequence instead of cells.
      ax: matplotlib axes to draw on; None for new axes.

    Raises:
      TypeError: If the cache of the step, or the part, is recurrent or for cross-attention.
    """
    step = without_buffers(step.part(*([part] if step.ubatch.spec.parts else [])))
    if not isinstance(step.table, CellTable) or step.table.spec.is_cross_attention:
        raise TypeError(
            f"expected a step in a cache, or in a part, of attention, got kind "
            f"{step.table.spec.kind!r}; pass such a part, since states and encoder sources have "
            "no mask"
        )
    seen = jax.jit(visible_cells_mask, static_argnames="causal")(step, causal=causal)
    table, ubatch, seen = to_host((step.table, step.ubatch, seen))
    valid = ubatch.valid
    stream = np.broadcast_to(ubatch.row_stream[:, None], valid.shape)
    view = table.view_cells()
    tokens = seen, stream, ubatch.sequences, ubatch.positions
    seen, stream, sequence, at = (np.asarray(x)[valid] for x in tokens)
    colour_ids = np.where(seen, sequence[:, None], np.where(view.position[stream] == EMPTY, -1, -3))
    if by_position:
        colour_ids = _colour_ids_by_position(view, seen, sequence)
    ax = _ensure_axes(ax)
    ax.imshow(_colour_ids_to_rgb(colour_ids), aspect="auto", interpolation="none")
    if colour_ids.size <= 40 * 64:
        _draw_grid_lines(ax, colour_ids.shape)
    ticks = _choose_ticks(len(colour_ids))
    ax.set_yticks(ticks, [f"{sequence[i]} : {at[i]}" for i in ticks])
    ax.set_ylabel("token, sequence : position")
    ax.set_xlabel("position" if by_position else "cell of its stream")
    labels = _colour_labels(np.unique(sequence).tolist(), "visible to sequence")
    _legend(ax, [*labels, (GREY, "hidden"), (FREE, "no cell" if by_position else "empty")])
    return ax


def nbytes(cache: Cache, ax: Axes | None = None) -> Axes:
    """Draw the bytes of a cache by type: table, keys, values or states.

    Args:
      cache: cache, or its shapes from `jax.eval_shape`.
      ax: matplotlib axes to draw on; None for new axes.
    """
    ax = _ensure_axes(ax)
    parts = cache.parts
    kinds: dict[str, int] = {}
    for i, part in enumerate(parts):
        table, buffers = part.table, part.buffers
        prefix = f"part {i}: " if len(parts) > 1 else ""
        kinds[f"{prefix}table"] = array_utils.nbytes(table)
        if isinstance(buffers, Buffers):
            kinds[f"{prefix}keys"] = array_utils.nbytes(buffers.k)
            kinds[f"{prefix}values"] = array_utils.nbytes(buffers.v)
            continue
        for name in sorted({name for layer in buffers for name in layer}):
            kinds[f"{prefix}states {name}"] = array_utils.nbytes([layer[name] for layer in buffers])
    bars = ax.barh(list(kinds), list(kinds.values()), color=PALETTE[4])
    ax.bar_label(bars, [format_bytes(n) for n in kinds.values()], padding=3)
    ax.invert_yaxis()
    ax.margins(x=0.2)
    ax.set_xticks([])
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    return ax


def _ensure_axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    return _import_matplotlib("pyplot").subplots(layout="constrained")[1]


def _import_matplotlib(module: str) -> ModuleType:
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise ImportError(
            "expected the package matplotlib for plots, got none; pip install matplotlib"
        ) from error


def _wrap_cells(x: np.ndarray, across: int, fill: int) -> np.ndarray:
    """Wrap an array `[1, N]` into padded lines of cells; return `[S, N]` with S > 1 unchanged."""
    if len(x) > 1:
        return x
    missing = -x.size % across
    return np.pad(x[0], (0, missing), constant_values=fill).reshape(-1, across)


def _colour_ids_to_rgb(colour_ids: np.ndarray) -> np.ndarray:
    """Return the RGB of colour ids: a sequence id, -1 (empty), -2 (padding) or -3 (masked)."""
    to_rgb = _import_matplotlib("colors").to_rgb
    table = np.array([to_rgb(colour) for colour in (*PALETTE, GREY, FREE, FREE)])
    return table[np.where(colour_ids < 0, colour_ids, colour_ids % len(PALETTE))]


def _colour_ids_by_position(view: CellView, seen: np.ndarray, sequence: np.ndarray) -> np.ndarray:
    """Return colour ids `[T, n]` (see `_colour_ids_to_rgb`), with a column for each position."""
    width = int(view.position.max()) + 1
    colour_ids = np.full((len(seen), width), -1)
    for i, seq in enumerate(sequence):
        positions = view.sequence_positions(int(seq))
        is_present = positions != EMPTY
        colour_ids[i, positions[is_present]] = np.where(seen[i, is_present], seq, -3)
    return colour_ids


def _draw_grid_lines(ax: Axes, shape: tuple[int, ...]) -> None:
    ax.set_xticks(np.arange(-0.5, shape[1]), minor=True)
    ax.set_yticks(np.arange(-0.5, shape[0]), minor=True)
    ax.grid(which="minor", color=LINE, linewidth=0.4)
    ax.tick_params(which="minor", length=0)


def _hatch_cells(ax: Axes, where: np.ndarray) -> None:
    rows, columns = np.nonzero(np.diff(np.pad(where, ((0, 0), (1, 1))), axis=1))
    left, right, top = columns[::2] - 0.5, columns[1::2] - 0.5, rows[::2] - 0.5
    x, y = [left, right, right, left], [top, top, top + 1, top + 1]
    pieces = np.stack([np.stack(x, axis=1), np.stack(y, axis=1)], axis=2)  # [n, 4, 2]
    # One artist draws all polygons: a long table has thousands.
    polygons = _import_matplotlib("collections").PolyCollection
    hatched = polygons(pieces, facecolor="none", edgecolor="black", hatch="////", lw=0, alpha=0.6)
    ax.add_collection(hatched, autolim=False)


def _colour_labels(sequences: Iterable[int], name: str = "sequence") -> list[tuple[str, str]]:
    """Return each colour with a label that names the first two sequences of this colour."""
    sequences_by_colour: dict[str, list[int]] = {}
    for seq in sequences:
        sequences_by_colour.setdefault(colour_of(seq), []).append(seq)
    return [
        (colour, f"{name} {', '.join(map(str, some[:2]))}" + ", …" * (len(some) > 2))
        for colour, some in sequences_by_colour.items()
    ]


def _legend(ax: Axes, labels: list[tuple[str, str]]) -> None:
    patch = _import_matplotlib("patches").Patch
    handles = [
        patch(facecolor=FREE, edgecolor="black", hatch="////", label=name)
        if colour == "shared"
        else patch(facecolor=colour, edgecolor=LINE, label=name)
        for colour, name in labels
    ]
    if handles:
        ax.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(1.01, 1),
            borderaxespad=0,
            frameon=False,
            fontsize=8,
            handlelength=1.2,
        )


def _choose_ticks(count: int) -> list[int]:
    """Return the lines with a tick label: all lines if there are at most 12, else about eight."""
    step = 1 if count <= 12 else -(-count // 8)
    return list(range(0, count, step))
