"""HTML view of a cache for notebooks, with inline styles and without scripts."""

from html import escape

from jaxkv.draw.cell_runs import (
    CellRun,
    format_owners,
    format_positions,
    format_range,
    merge_runs,
    single_cell_runs,
)
from jaxkv.draw.cell_view import CellView
from jaxkv.draw.colours import colour_of, text_colour_on

CELLS = 32
"""Maximum size of a stream that is drawn cell by cell; larger streams are drawn as runs."""

STREAMS = 16
"""Highest number of streams that are drawn."""

_BOX = (
    "display:inline-block;box-sizing:border-box;min-width:2.2em;padding:1px 4px;margin:1px;"
    "border:1px solid {border};border-radius:3px;text-align:center;vertical-align:top;"
    "background:{background};color:{text}"
)
_SMALL = "font-size:75%;opacity:.75"


def draw_html(views: dict[str, CellView]) -> str:
    """Draw the cells of each part of a cache, with a title for each of several parts.

    Each owner has a colour; a shared cell has a bar with the colours of its first eight owners.
    """
    titles = [
        f'<div style="{_SMALL};margin-top:6px">{title}</div>' * (len(views) > 1) for title in views
    ]
    return "".join(map(str.__add__, titles, map(_render_cells, views.values())))


def draw_line(text: str) -> str:
    """Draw a line of code."""
    return f'<div style="margin:4px 0"><code>{escape(text)}</code></div>'


def _render_cells(view: CellView) -> str:
    streams, cells = view.position.shape
    rows = []
    for stream in range(min(streams, STREAMS)):
        if cells <= CELLS:
            runs = single_cell_runs(view, stream)
        else:
            runs = merge_runs(view, stream, CELLS)
        name = f'<span style="{_SMALL};margin-right:4px">stream {stream}</span>'
        rows.append(f"<div>{name * (streams > 1)}{''.join(map(_render_run, runs))}</div>")
    if streams > STREAMS:
        rows.append(f'<div style="{_SMALL}">and {streams - STREAMS} more streams</div>')
    return f'<div style="line-height:1.25;font-size:90%">{"".join(rows)}</div>'


def _render_run(run: CellRun) -> str:
    empty = run.positions is None
    fill = "transparent" if empty or run.mixed else colour_of(run.owners[0])
    text = "inherit" if fill == "transparent" else text_colour_on(fill)
    style = _BOX.format(
        border="rgba(128,128,128,.5)" if empty or not run.mixed else "currentColor",
        background=fill,
        text=text,
    )
    few = run.shared and len(run.owners) <= 3
    owners = ",".join(map(str, run.owners)) if few else format_owners(run)
    lines = [owners, format_positions(run)]
    if empty:
        lines = ["·", "" if run.stop - run.start == 1 else f"{run.stop - run.start:,} free"]
    if run.shift != (0, 0):
        lines.append(f"shift {format_range(*run.shift)}")
    small = "".join(f'<div style="font-size:80%">{line or "&nbsp;"}</div>' for line in lines[1:])
    content = f"<b>{lines[0]}</b>{small}{_render_owner_bar(run)}"
    return f'<div title="{_tooltip_text(run)}" style="{style}">{content}</div>'


def _render_owner_bar(run: CellRun) -> str:
    if len(run.owners) < 2:
        return ""
    parts = "".join(
        f'<span style="flex:1;background:{colour_of(seq)}"></span>' for seq in run.owners[:8]
    )
    edge = "border:1px solid #ffffff;border-radius:2px;overflow:hidden"
    return f'<div style="display:flex;height:7px;min-width:1.4em;{edge}">{parts}</div>'


def _tooltip_text(run: CellRun) -> str:
    cells = (
        f"cell {run.start}" if run.stop - run.start == 1 else f"cells {run.start} to {run.stop - 1}"
    )
    if run.positions is None:
        return f"{cells}: empty"
    owners = ", ".join(map(str, run.owners[:16])) + ", …" * (len(run.owners) > 16)
    several = "s" * (len(run.owners) > 1)
    return f"{cells}: sequence{several} {owners}, position {format_range(*run.positions)}"
