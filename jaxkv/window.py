"""Attention windows: the range of positions that a token of a layer attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import jax.numpy as jnp

from jaxkv.core.validate import check_count

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32

Rule = Literal["sliding", "chunked", "symmetric"]
"""Shape of a window."""


@dataclass(frozen=True)
class Window:
    """Range of positions that a token attends to. Hashable. Example: `Window.sliding(128)`.

    width: W, at least 1. Its meaning depends on the rule: see `sliding`, `chunked`, `symmetric`.
    rule: "sliding", "chunked" or "symmetric".

    A width below 1 raises ValueError.
    """

    width: int
    rule: Rule

    def __post_init__(self):
        check_count(self.width, "the width of a window in positions")
        if self.rule not in get_args(Rule):
            raise ValueError(
                f"expected a window's rule of {get_args(Rule)}, got {self.rule!r}; make one with "
                "Window.sliding(128)"
            )

    @staticmethod
    def sliding(width: int) -> Window:
        """Attend to the last W positions, including the token's own position (Mistral, Gemma).

        With `causal=False`, a token also attends to all later tokens.

        >>> can_see(Window.sliding(3), jnp.int32(7), jnp.arange(4, 9)).tolist()
        [False, True, True, True, False]

        llama.cpp: `LLAMA_SWA_TYPE_STANDARD`.
        """
        return Window(width, "sliding")

    @staticmethod
    def chunked(width: int) -> Window:
        """Attend to the token's own chunk of W positions, up to the token (Llama 4).

        With `causal=False`, a token also attends to all later tokens.

        >>> can_see(Window.chunked(4), jnp.int32(6), jnp.arange(3, 8)).tolist()
        [False, True, True, True, False]

        llama.cpp: `LLAMA_SWA_TYPE_CHUNKED`.
        """
        return Window(width, "chunked")

    @staticmethod
    def symmetric(width: int) -> Window:
        """Attend to the token's own position and W // 2 earlier positions.

        With `causal=False`, a token also attends to W // 2 later positions.

        >>> can_see(Window.symmetric(4), jnp.int32(6), jnp.arange(3, 8)).tolist()
        [False, True, True, True, False]
        >>> can_see(Window.symmetric(4), jnp.int32(6), jnp.int32(8), causal=False).item()
        True

        llama.cpp: `LLAMA_SWA_TYPE_SYMMETRIC`.
        """
        return Window(width, "symmetric")

    def __repr__(self) -> str:
        return f"Window.{self.rule}({self.width})"


def num_cells_for_window(
    window: Window, *, ubatch_size: int, max_rollback: int, sequences_per_stream: int
) -> int:
    """Return the number of cells that a stream needs for sequences of unlimited length.

    The argument `sequences_per_stream` is the number of sequences in the stream.
    """
    # When a ubatch gets cells, all cells in the window of its first token are still in use. After a
    # rollback, the window of the next token must still be stored.
    return (window.width + ubatch_size + max_rollback) * sequences_per_stream


def max_lookback(window: Window) -> int:
    """Return the largest distance to an earlier position that a token attends to.

    >>> [max_lookback(x) for x in (Window.sliding(4), Window.chunked(4), Window.symmetric(4))]
    [3, 3, 2]
    """
    return window.width // 2 if window.rule == "symmetric" else window.width - 1


def first_seen(window: Window | None, position: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    """Return the lowest position to which the token at `position` attends.

    If `position` grows, the result does not fall.

    >>> [first_seen(x, jnp.int32(6)).item() for x in (None, Window.sliding(3), Window.chunked(4))]
    [0, 4, 4]
    """
    if window is None:
        return jnp.zeros_like(position)
    if window.rule == "chunked":
        return position // window.width * window.width
    return jnp.maximum(position - max_lookback(window), 0)


def last_seen(
    window: Window | None,
    position: Int32[Array, "#*n"],
    *,
    causal: bool = True,
    visible_until: Int32[Array, "#*n"] | None = None,
) -> Int32[Array, "*n"]:
    """Return the highest position to which the token at `position` attends.

    If `visible_until` is given, `causal` is ignored.

    >>> last_seen(Window.symmetric(4), jnp.int32(6), visible_until=jnp.int32(9)).item()
    8
    """
    if visible_until is not None:
        return jnp.minimum(visible_until, last_seen(window, position, causal=False))
    if causal:
        return position
    highest = jnp.iinfo(position.dtype).max
    if window is not None and window.rule == "symmetric":
        ahead = window.width // 2
        return jnp.minimum(position, highest - ahead) + ahead  # the sum could be too large
    return jnp.full_like(position, highest)


def can_see(
    window: Window | None,
    query: Int32[Array, "#*n"],
    key: Int32[Array, "#*n"],
    *,
    causal: bool = True,
    visible_until: Int32[Array, "#*n"] | None = None,
) -> Bool[Array, "*n"]:
    """Return whether the token at a query position attends to the token at a key position.

    For `causal` and `visible_until` see `attend`. llama.cpp: `llama_hparams::is_masked_swa`.
    """
    first, last = (
        first_seen(window, query),
        last_seen(window, query, causal=causal, visible_until=visible_until),
    )
    return (key >= first) & (key <= last)
