"""Neighbouring cells that are drawn as one, so a long table is a short line; and words for them."""

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

    owners: the sequences that own one of the cells, or several of them.
    positions: the lowest and the highest position; None where all cells are empty.
    owed: the lowest and the highest shift of its keys.
    shared: whether each cell is owned by all of the owners, and those are several.
    mixed: whether cells of several kinds were put together. Else positions rise by one from cell to
      cell, and owners and shifts are the same.
    """

    start: int
    stop: int
    owners: tuple[int, ...]
    positions: tuple[int, int] | None
    owed: tuple[int, int]
    shared: bool
    mixed: bool


def single_cell_runs(view: CellView, stream: int) -> list[CellRun]:
    """Return each cell of a stream as a run of its own."""
    return [_make_run(view, stream, i, i + 1, mixed=False) for i in range(view.position.shape[1])]


def merge_runs(
    view: CellView, stream: int, max_runs: int, fits: Callable[[list[CellRun]], bool] = bool
) -> list[CellRun]:
    """Return the cells of a stream in few enough runs.

    Neighbours that go on from each other are one run. Where these are still too many, neighbouring
    short ones are put together, so that the long ones stay to be seen.

    Args:
      view: what stands in the cells.
      stream: which stream.
      max_runs: how many runs there may be; more are not even looked at.
      fits: whether so many are few enough; one alone is taken as it is.
    """
    bounds = _find_run_bounds(view, stream)
    sizes = np.diff(bounds)
    runs: list[CellRun] = []
    for longest in [0, *np.unique(sizes)]:  # of those that are put together
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
    """Return a range of numbers as text, both ends included."""
    return str(first) if first == last else f"{first}..{last}" if first < 0 else f"{first}-{last}"


def format_owners(run: CellRun) -> str:
    """Return who owns the cells of a run: `.` for none, `+` for several that share each."""
    if run.shared:
        return "+"
    few = len(run.owners) <= 3
    names = ",".join(map(str, run.owners)) if few else f"{len(run.owners)} sequences"
    return ("~" if run.mixed else "") + names or "."


def format_positions(run: CellRun) -> str:
    """Return the positions in the cells of a run; `.` where they are empty."""
    if run.positions is None:
        return "."
    return ("~" if run.mixed else "") + format_range(*run.positions)


def _find_run_bounds(view: CellView, stream: int) -> Int[np.ndarray, " n"]:
    """Return where runs begin, and the number of cells at the end."""
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
