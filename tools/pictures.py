"""Draws the pictures of the README and of the site: `python -m tools.pictures`.

The cells are those of a cache after each call, and the bars are rows of tables in the documents.
Each picture is stored twice, for light and for dark pages.
"""

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

import jax.numpy as jnp

import jaxkv

DOCS = Path(__file__).parent.parent / "docs"
FOLDER = DOCS / "pictures"
COLOURS = {  # text, empty cell, sequences 0 to 2, shared cell
    "light": ("#1f2328", "#eceff2", "#9cc9ee", "#f7cf8a", "#a9dcc3", "#d5c3ec"),
    "dark": ("#e6edf3", "#21262d", "#1f6aa5", "#96650f", "#1d7a55", "#6b4aa0"),
}
CELLS, CELL, GAP, ROW, LEFT = 16, 34, 4, 64, 8
States = Iterator[tuple[str, jaxkv.Cache]]


class Drawing:
    """SVG elements."""

    def __init__(self, theme: str, width: int, height: int, title: str):
        self.text = COLOURS[theme][0]
        font = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{title}" font-family="{font}">'
        ]

    def add_text(self, x: float, y: float, text: str, size: int, anchor: str = "start") -> None:
        """Add a line of text."""
        self.lines.append(
            f'<text x="{x:g}" y="{y:g}" fill="{self.text}" font-size="{size}" '
            f'text-anchor="{anchor}">{escape(text)}</text>'
        )

    def add_box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Add a filled rectangle with round corners."""
        self.lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{colour}"/>'
        )

    def to_svg(self) -> str:
        """Return the picture."""
        return "\n".join([*self.lines, "</svg>", ""])


def add_tokens(cache: jaxkv.Cache, *batch: object, **options: object) -> jaxkv.Cache:
    """Add tokens with a model of one layer."""

    def forward(params, step):
        x = jnp.take(params, step.tokens, axis=0)[:, :, None]
        step, out = jaxkv.attend(step, 0, x, x, x)
        return step, out.reshape(-1, 4)[step.outputs] @ params.T

    return jaxkv.prefill(forward, jnp.eye(4), cache, jaxkv.make_batch(*batch, **options)).cache


def make_cache() -> jaxkv.Cache:
    """Make an empty cache for three sequences."""
    spec = jaxkv.CacheSpec.attention(layers=1, kv_heads=1, head_dim=4)
    return jaxkv.make_cache(spec, cells=CELLS, sequences=3)


def cells_states() -> States:
    """Yield forks, a rollback, and cells that are used again."""
    cache = add_tokens(make_cache(), [0, 1, 2, 3, 0, 1])
    yield "prefill(forward, params, cache, prompt)", cache
    cache = jaxkv.seq_cp(cache, 0, [1, 2]).cache
    yield "seq_cp(cache, 0, [1, 2])  # two forks: no key is copied", cache
    cache = add_tokens(cache, [[2, 3], [1, 0, 2, 3], [3]])
    yield "decode(...)  # each sequence writes its own cells", cache
    cache = jaxkv.seq_rm(cache, 1, 7).cache
    yield "seq_rm(cache, 1, 7)  # three tokens of sequence 1 are rolled back", cache
    yield "decode(...)  # freed cells are used again", add_tokens(cache, [2, 0], sequences=2)


def prompts_states() -> States:
    """Yield prompts of different lengths, a removed sequence, and a defragmentation."""
    cache = add_tokens(make_cache(), [[0, 1, 2], [3, 0, 1, 2, 3], [1, 2]])
    yield "prefill(forward, params, cache, [[0, 1, 2], [3, 0, 1, 2, 3], [1, 2]])", cache
    cache = add_tokens(cache, [[3], [2], [1]])
    yield "decode(...)  # one more token of each sequence", cache
    cache = jaxkv.seq_rm(cache, 1).cache
    yield "seq_rm(cache, 1)  # the cells of sequence 1 are free", cache
    cache = jaxkv.apply(cache, jaxkv.defrag_plan(cache))
    yield "apply(cache, defrag_plan(cache))  # no gaps", cache


def drafts_states() -> States:
    """Yield two steps of speculative decoding."""
    cache = add_tokens(make_cache(), [0, 1, 2, 3, 0])
    yield "prefill(forward, params, cache, prompt)", cache
    cache = add_tokens(cache, [1, 2, 3, 1])
    yield "one step verifies the last token 5 and the drafts 6, 7, 8", cache
    cache = jaxkv.seq_rm(cache, 0, 7).cache
    yield "the model accepts 6; the rejected tokens are removed", cache
    yield "the next step verifies three more drafts", add_tokens(cache, [3, 2, 1, 0])


def draw_cells(theme: str, states: States) -> str:
    """Return a row of cells for each call, and a legend."""
    _, empty, *owners, shared = COLOURS[theme]
    steps, width = list(states), 2 * LEFT + CELLS * (CELL + GAP)
    title = "Cells of a cache after each call"
    picture = Drawing(theme, width, ROW * len(steps) + 52, title)
    legend = {empty: "empty"}
    for row, (call, cache) in enumerate(steps):
        cells, top = cache.cells(), row * ROW + 6
        picture.add_text(LEFT, top + 10, call, 13)
        for i in range(CELLS):
            position, owner, count = (
                int(x[0, i]) for x in (cells.position, cells.owner, cells.num_owners)
            )
            colour = shared if count > 1 else owners[owner] if count else empty
            name = "all sequences" if count > 1 else f"sequence {owner}"
            legend.setdefault(colour, name)
            x, y = LEFT + i * (CELL + GAP), top + 18
            picture.add_box(x, y, CELL, 28, colour)
            if count:
                picture.add_text(x + CELL / 2, y + 19, str(position), 13, "middle")
    x, y = LEFT, ROW * len(steps) + 8
    for colour, name in sorted(legend.items(), key=lambda pair: (pair[1] == "empty", pair[1])):
        picture.add_box(x, y, 14, 14, colour)
        picture.add_text(x + 20, y + 12, name, 12)
        x += 34 + 8 * len(name)
    picture.add_text(LEFT, y + 36, "A number is the position of a token in its sequences.", 12)
    return picture.to_svg()


def step_times() -> dict[str, float]:
    """Return the milliseconds of a step with batch 8, from the page on performance."""
    page = (DOCS / "performance.md").read_text()
    table = page.split("## A whole step")[1].split("\n\n")[2]
    rows = [[x.strip() for x in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    times = {name: re.match(r"[\d.]+", last) for name, _, last in rows}
    return {name.replace("`", ""): float(time[0]) for name, time in times.items() if time}


def draw_times(theme: str) -> str:
    """Return a bar for each library."""
    times = step_times()
    picture = Drawing(theme, 640, 30 * len(times) + 30, "Milliseconds a step")
    picture.add_text(LEFT, 16, "milliseconds a step, 8 sequences of 2,016 tokens", 13)
    longest = max(times.values())
    for row, (name, time) in enumerate(times.items()):
        y, own = 26 + 30 * row, name.startswith("jaxkv")
        picture.add_box(270, y, 320 * time / longest, 20, COLOURS[theme][2 if own else 3])
        picture.add_text(262, y + 15, name.removesuffix(', placement="any"'), 12, "end")
        picture.add_text(276 + 320 * time / longest, y + 15, f"{time:.0f}", 12)
    return picture.to_svg()


def draw(name: str, theme: str) -> str:
    """Return a picture by its name."""
    if name == "times":
        return draw_times(theme)
    states = {"cells": cells_states, "prompts": prompts_states, "drafts": drafts_states}
    return draw_cells(theme, states[name]())


NAMES = "cells", "prompts", "drafts", "times"

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in NAMES:
        for theme in COLOURS:
            (FOLDER / f"{name}-{theme}.svg").write_text(draw(name, theme))
