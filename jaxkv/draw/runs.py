"""Neighbouring cells that are drawn as one, so that a long table becomes a short line."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxkv.draw.look import CellView
from jaxkv.kv.cells import WORD
from jaxkv.places import EMPTY


@dataclass(frozen=True, kw_only=True)
class Run:
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


def folded(view: CellView, stream: int, fits: Callable[[list[Run]], bool]) -> list[Run]:
    """Return the cells of a stream in few enough runs.

    Neighbours that go on from each other are one run. Where these are still too many, the short
    ones are put together, the shortest first, so that the long ones stay to be seen.

    Args:
      view: what stands in the cells.
      stream: which stream.
      fits: whether runs are few enough; one alone is taken as it is.
    """
    bounds = _bounds(view, stream)
    pure = set(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    shortest = 1
    while True:
        pairs = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        runs = [_run(view, stream, *pair, mixed=pair not in pure) for pair in pairs]
        if len(runs) == 1 or fits(runs):
            return runs
        shortest *= 2
        sizes = np.diff(bounds)
        between_short = (sizes[:-1] < shortest) & (sizes[1:] < shortest)
        bounds = np.concatenate([bounds[:1], bounds[1:-1][~between_short], bounds[-1:]])


def _bounds(view: CellView, stream: int) -> np.ndarray:
    """Return where runs begin, and the number of cells at the end; `[n]` int."""
    position, words, shift = view.position[stream], view.words[stream], view.shift[stream]
    empty = position == EMPTY
    follows = np.where(empty[1:], empty[:-1], (position[1:] == position[:-1] + 1) & ~empty[:-1])
    alike = np.all(words[:, 1:] == words[:, :-1], axis=0) & (shift[1:] == shift[:-1])
    return np.concatenate([[0], np.flatnonzero(~(follows & alike)) + 1, [position.size]])


def _run(view: CellView, stream: int, start: int, stop: int, *, mixed: bool) -> Run:
    position, shift = view.position[stream, start:stop], view.shift[stream, start:stop]
    held = position[position != EMPTY]
    words = np.bitwise_or.reduce(view.words[stream, :, start:stop], axis=1)
    bits = (words[:, None] >> np.arange(WORD, dtype=np.uint32)) & np.uint32(1)
    owners = tuple((np.flatnonzero(bits) + stream * view.sharing).tolist())
    return Run(
        start=start,
        stop=stop,
        owners=owners,
        positions=(int(held.min()), int(held.max())) if held.size else None,
        owed=(int(shift.min()), int(shift.max())),
        shared=not mixed and len(owners) > 1,
        mixed=mixed,
    )
