"""Runs of neighbouring cells, and their labels. Each run is drawn as one column or box."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxkv.core.constants import EMPTY, WORD
from jaxkv.draw.cell_view import CellView

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclass(frozen=True, kw_only=True)
class CellRun:
    """A run of neighbouring cells in a stream, with indices from `start` to `stop - 1`.

    positions: lowest and highest position in the run; None if all cells are empty.
    shared: whether each cell of the run has several owners; False if `mixed` is True.
    mixed: whether the run was merged from several runs.
    """

    start: int
    stop: int
    owners: tuple[int, ...]
    positions: tuple[int, int] | None
    shift: tuple[int, int]
    shared: bool
    mixed: bool


def single_cell_runs(view: CellView, stream: int) -> list[CellRun]:
    """Return a run of one cell for each cell of a stream."""
    return [_make_run(view, stream, i, i + 1, mixed=False) for i in range(view.position.shape[1])]


def merge_runs(
    view: CellView, stream: int, max_runs: int, fits: Callable[[list[CellRun]], bool] = bool
) -> list[CellRun]:
    """Return at most `max_runs` runs that cover all cells of a stream.

    Neighbouring cells with consecutive positions, equal owners and equal shifts form a run. So do
    neighbouring empty cells. If there are more than `max_runs` runs, or `fits(runs)` is False,
    neighbouring runs are merged, the shortest runs first. At least one run is left.
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
    """Format a range of integers, with both ends included."""
    return str(first) if first == last else f"{first}..{last}" if first < 0 else f"{first}-{last}"


def format_owners(run: CellRun) -> str:
    """Format the owner ids of a run: "." for no owner, "+" in place of the ids if `run.shared`."""
    if run.shared:
        return "+"
    few = len(run.owners) <= 3
    names = ",".join(map(str, run.owners)) if few else f"{len(run.owners)} sequences"
    return ("~" if run.mixed else "") + names or "."


def format_positions(run: CellRun) -> str:
    """Format the positions of a run; a dot if all cells of the run are empty."""
    if run.positions is None:
        return "."
    return ("~" if run.mixed else "") + format_range(*run.positions)


def _find_run_bounds(view: CellView, stream: int) -> Int[np.ndarray, " n"]:
    """Return the first cell of each run, followed by the number of cells in the stream."""
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
        shift=(int(shift.min()), int(shift.max())),
        shared=not mixed and len(owners) > 1,
        mixed=mixed,
    )
