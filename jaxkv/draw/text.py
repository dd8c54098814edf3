"""Text view of the table of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxkv.cache import Cache
from jaxkv.core.constants import EMPTY
from jaxkv.core.validate import check_count
from jaxkv.draw.cell_runs import CellRun, format_owners, format_positions, format_range, merge_runs
from jaxkv.draw.cell_view import CellView, fetch_table, make_cell_view, part_names
from jaxkv.hybrid import HybridTable
from jaxkv.recurrent.states import States

if TYPE_CHECKING:
    from jaxkv.table import CacheTable


def show(cache: Cache, *, width: int | None = 100) -> str:
    """Draw the table of a cache as text: a column for each cell, owner above position.

    For a recurrent cache, each line shows the positions of the states of one sequence, the current
    state last. A hybrid cache is drawn part by part. llama.cpp: the debug drawing of `find_slot`.

    Args:
      cache: any cache. If the cache is split over processes, every process must call `show`.
      width: highest number of characters in a line; None for no limit. If columns of single cells
        do not fit, columns show runs of cells, and an additional first line shows cell indices. A
        line with one column can be longer than `width`.

    Returns:
      Two lines for each stream: owners and positions. A dot marks an empty cell, and a plus marks a
      cell with several owners. If shifts are pending, the third line `shift` shows them. A column
      of several runs shows a tilde, all owners (only their number if there are more than three),
      and the lowest and highest position.

    Raises:
      TypeError: If `cache` is traced, or has shapes instead of arrays.
      ValueError: If `width` is below 1.
      ValueError: If the cache was donated, or is a batch of caches made by `vmap`.

    Examples:
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
      >>> cache = make_cache(spec, cells=6, sequences=12)
      >>> batch = make_batch([[1, 2, 3], [4]], sequences=[0, 11])
      >>> cache = prefill(forward, params, cache, batch).cache
      >>> print(show(seq_cp(cache, 0, 5, 0, 1).cache))
      owner    + 0 0 11 . .
      position 0 1 2  0 . .
    """
    return _draw_table(fetch_table(cache), None if width is None else check_count(width, "width"))


def _draw_table(table: CacheTable, width: int | None) -> str:
    if isinstance(table, HybridTable):
        return "\n".join(
            f"{name}\n{_draw_table(part, width)}"
            for part, name in zip(table.parts, part_names(table), strict=True)
        )
    if isinstance(table, States):
        return "\n".join(_format_states(table, width))
    view = make_cell_view(table)
    streams = range(len(view.position))
    lines = [_format_cells(view, stream) for stream in streams]
    if not _fits_width(lines, width):
        lines = [_format_stream(view, stream, width) for stream in streams]
    return "\n".join(line for lines_of_stream in lines for line in lines_of_stream)


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


def _format_states(table: States, width: int | None) -> list[str]:
    position = table.position
    marks = np.where(position == EMPTY, ".", position.astype(str))
    ids = [f"sequence {seq}" for seq in range(table.sequences)]
    widths = [max(map(len, column)) for column in marks.T]
    rows = [" ".join(map(str.rjust, row, widths)) for row in marks]
    names = [name.ljust(len(ids[-1])) for name in ids]

    def prepend_names(rows: list[str]) -> list[str]:
        return [f"{name} {row}" for name, row in zip(names, rows, strict=True)]

    if not _fits_width([prepend_names(rows)], width):
        rows = [_format_state_positions(row[row != EMPTY]) for row in position]
    return prepend_names(rows)


def _format_state_positions(positions: np.ndarray) -> str:
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return " ".join(format_range(run[0], run[-1]) for run in runs if run.size) or "."
