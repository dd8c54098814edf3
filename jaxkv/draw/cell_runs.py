"""Runs of neighbouring cells that are drawn as one, and their labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxkv.core.constants import EMPTY
from jaxkv.draw.cell_view import CellView
from jaxkv.kv.cells import WORD

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclass(frozen=True, kw_only=True)
class CellRun:
    """Cells `start` to `stop` - 1 of a stream.

    owners: the sequences that own at least one of the cells.
    positions: the lowest and the highest position; None if all cells are empty.
    owed: the lowest and the highest pending shift.
    shared: whether each cell is owned by all of several owners.
    mixed: whether different runs were merged. Otherwise positions increase by one from cell to
      cell, and owners and shifts are equal.
    """

    start: int
    stop: int
    owners: tuple[int, ...]
    positions: tuple[int, int] | None
    owed: tuple[int, int]
    shared: bool
    mixed: bool


def single_cell_runs(view: CellView, stream: int) -> list[CellRun]:
    """Return a run for each cell of a stream."""
    return [_make_run(view, stream, i, i + 1, mixed=False) for i in range(view.position.shape[1])]


def merge_runs(
    view: CellView, stream: int, max_runs: int, fits: Callable[[list[CellRun]], bool] = bool
) -> list[CellRun]:
    """Return the cells of a stream in at most `max_runs` runs.

    Neighbours with consecutive positions and equal owners and shifts form a run. If these are too
    many, neighbouring short runs are merged, so that long runs stay visible. The result is the
    first one for which `fits` returns True, or a single run.
    """
    bounds = _find_run_bounds(view, stream)
    sizes = np.diff(bounds)
    runs: list[CellRun] = []
    for longest in [0, *np.unique(sizes)]:  # the longest run that is merged
        short = sizes <= longest
        begins = np.concatenate([[True], ~(short[:-1] & short[1:])])
        if begins.sum() > max(max_runs, 1):
            continue
        starts = np.flatnonzero(begins)
        several = np.diff(np.append(starts, sizes.size)) > 1
        edges = np.append(bounds[:-1][begins], bounds[-1])
        runs = [
            _make_run(view, stream, int(start), int(stop), mixed=bool(mixed))
            for start, stop, mixed in zip(edges[:-1], edges[1:], several, strict=True)
        ]
        if fits(runs):
            break
    return runs


def format_range(first: int, last: int) -> str:
    """Format a range of integers, both ends included."""
    return str(first) if first == last else f"{first}..{last}" if first < 0 else f"{first}-{last}"


def format_owners(run: CellRun) -> str:
    """Format the owners of a run: `.` for none, `+` if several share each cell."""
    if run.shared:
        return "+"
    few = len(run.owners) <= 3
    names = ",".join(map(str, run.owners)) if few else f"{len(run.owners)} sequences"
    return ("~" if run.mixed else "") + names or "."


def format_positions(run: CellRun) -> str:
    """Format the positions of a run; `.` if its cells are empty."""
    if run.positions is None:
        return "."
    return ("~" if run.mixed else "") + format_range(*run.positions)


def _find_run_bounds(view: CellView, stream: int) -> Int[np.ndarray, " n"]:
    """Return the first cell of each run, and the number of cells at the end."""
    position, words, shift = view.position[stream], view.words[stream], view.shift[stream]
    empty = position == EMPTY
    follows = np.where(empty[1:], empty[:-1], (position[1:] == position[:-1] + 1) & ~empty[:-1])
    equal_cells = np.all(words[:, 1:] == words[:, :-1], axis=0) & (shift[1:] == shift[:-1])
    return np.concatenate([[0], np.flatnonzero(~(follows & equal_cells)) + 1, [position.size]])


def _make_run(view: CellView, stream: int, start: int, stop: int, *, mixed: bool) -> CellRun:
    position, shift = view.position[stream, start:stop], view.shift[stream, start:stop]
    positions = position[position != EMPTY]
    words = np.bitwise_or.reduce(view.words[stream, :, start:stop], axis=1)
    bits = (words[:, None] >> np.arange(WORD, dtype=np.uint32)) & np.uint32(1)
    owners = tuple((np.flatnonzero(bits) + stream * view.sequences_per_stream).tolist())
    return CellRun(
        start=start,
        stop=stop,
        owners=owners,
        positions=(int(positions.min()), int(positions.max())) if positions.size else None,
        owed=(int(shift.min()), int(shift.max())),
        shared=not mixed and len(owners) > 1,
        mixed=mixed,
    )
