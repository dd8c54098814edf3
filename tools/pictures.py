"""Draws the pictures of the README and of the site: `python -m tools.pictures`.

The cells are those of a cache after each call. Each picture is stored twice, for light and for dark
pages.
"""

from html import escape
from pathlib import Path

import jax.numpy as jnp

import jaxkv

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
COLOURS = {  # text, empty cell, sequences 0 to 2, shared cell
    "light": ("#1f2328", "#eceff2", "#9cc9ee", "#f7cf8a", "#a9dcc3", "#d5c3ec"),
    "dark": ("#e6edf3", "#21262d", "#1f6aa5", "#96650f", "#1d7a55", "#6b4aa0"),
}
CELL, GAP, ROW, LEFT = 34, 4, 64, 8


def forward(params, step):
    """A model of one layer."""
    x = jnp.take(params, step.tokens, axis=0)[:, :, None]
    step, out = jaxkv.attend(step, 0, x, x, x)
    return step, out.reshape(-1, 4)[step.outputs] @ params.T


def states():
    """Return pairs of a call and the cache after the call."""
    spec = jaxkv.CacheSpec.attention(layers=1, kv_heads=1, head_dim=4)
    cache = jaxkv.make_cache(spec, cells=16, sequences=3)

    def add(cache, batch):
        return jaxkv.prefill(forward, jnp.eye(4), cache, batch).cache

    cache = add(cache, [0, 1, 2, 3, 0, 1])
    yield "prefill(forward, params, cache, prompt)", cache
    cache = jaxkv.seq_cp(cache, 0, [1, 2]).cache
    yield "seq_cp(cache, 0, [1, 2])   # two forks: no key is copied", cache
    cache = add(cache, [[2, 3], [1, 0, 2, 3], [3]])
    yield "decode(...)   # each sequence writes its own cells", cache
    cache = jaxkv.seq_rm(cache, 1, 7).cache
    yield "seq_rm(cache, 1, 7)   # three tokens of sequence 1 are rolled back", cache
    cache = add(cache, jaxkv.make_batch([2, 0], sequences=2))
    yield "decode(...)   # freed cells are used again", cache


def draw(theme):
    """Return the picture as SVG."""
    text, empty, *owners, shared = COLOURS[theme]
    width, steps = 2 * LEFT + 16 * (CELL + GAP), list(states())
    height = ROW * len(steps) + 30
    font = 'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Cells of a cache with three sequences after five calls" {font}>'
    ]

    def add_text(x, y, content, size, anchor="start"):
        lines.append(
            f'<text x="{x}" y="{y}" fill="{text}" font-size="{size}" text-anchor="{anchor}">'
            f"{escape(content)}</text>"
        )

    for row, (call, cache) in enumerate(steps):
        cells, top = cache.cells(), row * ROW + 6
        add_text(LEFT, top + 10, call, 13)
        for i in range(16):
            position, owner, count = (
                int(x[0, i]) for x in (cells.position, cells.owner, cells.num_owners)
            )
            colour = shared if count > 1 else owners[owner] if count else empty
            x, y = LEFT + i * (CELL + GAP), top + 18
            lines.append(
                f'<rect x="{x}" y="{y}" width="{CELL}" height="28" rx="4" fill="{colour}"/>'
            )
            if count:
                add_text(x + CELL / 2, y + 19, str(position), 13, "middle")
    x, y = LEFT, ROW * len(steps) + 8
    for name, colour in [
        *((f"sequence {i}", colour) for i, colour in enumerate(owners)),
        ("all sequences", shared),
        ("empty", empty),
    ]:
        lines.append(f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{colour}"/>')
        add_text(x + 20, y + 12, name, 12)
        x += 34 + 8 * len(name)
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for theme in COLOURS:
        (FOLDER / f"cells-{theme}.svg").write_text(draw(theme))
