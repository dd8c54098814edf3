"""Text views of cells and states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxkv.core.constants import EMPTY
from jaxkv.draw.cell_runs import CellRun, format_owners, format_positions, format_range, merge_runs
from jaxkv.draw.cell_view import CellView

if TYPE_CHECKING:
    from jaxtyping import Int32


def draw_cells(view: CellView, width: int | None) -> str:
    """Draw the cells of all streams, see `jaxkv.show`."""
    streams = range(len(view.position))
    lines = [_format_cells(view, stream) for stream in streams]
    if not _fits_width(lines, width):
        lines = [_format_stream(view, stream, width) for stream in streams]
    return "\n".join(line for lines_of_stream in lines for line in lines_of_stream)


def draw_states(position: Int32[np.ndarray, "Q _"], width: int | None) -> str:
    """Draw the positions of the states of each sequence; the last one is the current state."""
    marks = np.where(position == EMPTY, ".", position.astype(str))
    ids = [f"sequence {seq}" for seq in range(len(position))]
    widths = [max(map(len, column)) for column in marks.T]
    rows = [" ".join(map(str.rjust, row, widths)) for row in marks]
    names = [name.ljust(len(ids[-1])) for name in ids]

    def prepend_names(rows: list[str]) -> list[str]:
        return [f"{name} {row}" for name, row in zip(names, rows, strict=True)]

    if not _fits_width([prepend_names(rows)], width):
        rows = [_format_state_positions(row[row != EMPTY]) for row in position]
    return "\n".join(prepend_names(rows))


def _fits_width(lines: list[list[str]], width: int | None) -> bool:
    return width is None or all(len(line) <= width for block in lines for line in block)


def _format_cells(view: CellView, stream: int) -> list[str]:
    """Return the text lines of a stream, with a column for each cell."""
    empty = view.position[stream] == EMPTY
    mark = np.where(view.num_owners[stream] > 1, "+", view.owner[stream].astype(str))
    columns = {"owner": mark, "position": view.position[stream].astype(str)}
    if view.shift[stream].any():
        columns["shift"] = view.shift[stream].astype(str)
    return _align_columns(
        {name: np.where(empty, ".", row).tolist() for name, row in columns.items()}
    )


def _format_stream(view: CellView, stream: int, width: int | None) -> list[str]:
    """Return the text lines of a stream, with a column for each run of cells."""

    def format_runs(runs: list[CellRun]) -> list[str]:
        columns = {
            "cells": [format_range(run.start, run.stop - 1) for run in runs],
            "owner": [format_owners(run) for run in runs],
            "position": [format_positions(run) for run in runs],
        }
        if view.shift[stream].any():
            columns["shift"] = [
                "." if run.positions is None else format_range(*run.shift) for run in runs
            ]
        return _align_columns(columns)

    # A column is at least two characters wide.
    max_runs = view.position.shape[1] if width is None else width // 2
    return format_runs(
        merge_runs(view, stream, max_runs, lambda runs: _fits_width([format_runs(runs)], width))
    )


def _align_columns(columns: dict[str, list[str]]) -> list[str]:
    width = [max(map(len, column)) for column in zip(*columns.values(), strict=True)]
    return [" ".join([name.ljust(8), *map(str.rjust, row, width)]) for name, row in columns.items()]


def _format_state_positions(positions: np.ndarray) -> str:
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return " ".join(format_range(run[0], run[-1]) for run in runs if run.size) or "."
