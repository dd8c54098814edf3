"""Which positions a layer looks back at: all of them, or those inside of a window."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Window:
    """How far tokens see; hashable. Made by `standard`, `chunked` and `symmetric`.

    size: W, how many positions a token sees at most, its own included.
    rule: where those positions lie.
    """

    size: int
    rule: Literal["standard", "chunked", "symmetric"]

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"a window must be of at least 1 position, got {self.size}")


def standard(size: int) -> Window:
    """See the last W positions, one's own included (Mistral, Gemma).

    llama.cpp: `LLAMA_SWA_TYPE_STANDARD`.

    >>> [sees(standard(3), jnp.int32(7), jnp.int32(key)).item() for key in (4, 5, 7, 8)]
    [False, True, True, False]
    """
    return Window(size, "standard")


def chunked(size: int) -> Window:
    """See what lies in one's own chunk of W positions, up to oneself (Llama 4).

    llama.cpp: `LLAMA_SWA_TYPE_CHUNKED`.

    >>> [sees(chunked(4), jnp.int32(6), jnp.int32(key)).item() for key in (3, 4, 6, 7)]
    [False, True, True, False]
    """
    return Window(size, "chunked")


def symmetric(size: int) -> Window:
    """See W // 2 positions to both sides; those ahead only where attention is not causal.

    llama.cpp: `LLAMA_SWA_TYPE_SYMMETRIC`.

    >>> [sees(symmetric(4), jnp.int32(6), jnp.int32(key)).item() for key in (3, 4, 6, 7)]
    [False, True, True, False]
    >>> sees(symmetric(4), jnp.int32(6), jnp.int32(8), causal=False).item()
    True
    """
    return Window(size, "symmetric")


def cells_for(window: Window, *, ubatch_size: int, rollback: int, sharing: int = 1) -> int:
    """Count the cells of a stream that serve a text of any length.

    Args:
      window: how far tokens look back.
      ubatch_size: the most tokens that are computed at once.
      rollback: how many tokens can be taken back though the window is full.
      sharing: how many sequences share the stream.

    >>> cells_for(standard(512), ubatch_size=64, rollback=32, sharing=2)
    1216
    """
    return (window.size + ubatch_size + rollback) * sharing


def first_seen(window: Window | None, position: jax.Array) -> jax.Array:
    """Find the lowest position that a token at a position sees; it never falls as that rises.

    >>> [first_seen(window, jnp.int32(6)).item() for window in (None, standard(3), chunked(4))]
    [0, 4, 4]
    """
    if window is None:
        return jnp.zeros_like(position)
    if window.rule == "chunked":
        return position // window.size * window.size
    back = window.size // 2 if window.rule == "symmetric" else window.size - 1
    return jnp.maximum(position - back, 0)


def sees(
    window: Window | None, query: jax.Array, key: jax.Array, *, causal: bool = True
) -> jax.Array:
    """Say whether a token at position `query` sees one at `key`; the shapes broadcast.

    Args:
      window: how far it sees, None for everything.
      query: int32, where the token stands that looks.
      key: int32, where the one stands that is looked at.
      causal: False lets tokens see those that come after them too.

    llama.cpp: `llama_hparams::is_masked_swa`.
    """
    seen = key >= first_seen(window, query)
    if causal:
        return seen & (key <= query)
    if window is not None and window.rule == "symmetric":
        return seen & (key <= query + window.size // 2)
    return seen
