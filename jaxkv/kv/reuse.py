"""Windows: which cells no next token sees, taking them, and what can be resumed after that."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxkv.kv.cells import (
    WORD,
    C,
    Cells,
    each,
    free,
    holders,
    known,
    last,
    spread,
    with_owners,
)
from jaxkv.places import EMPTY, divided
from jaxkv.window import first_seen


def hidden(cells: Cells) -> jax.Array:
    """Return which used cells no next token of any owner sees; `[S, N]` bool."""
    if cells.window is None:
        return jnp.zeros(cells.position.shape, bool)
    if cells.sharing == 1:
        end = jnp.maximum(jnp.max(cells.position, axis=1), cells.evicted_below - 1)
        return ~free(cells) & (cells.position < first_seen(cells.window, end + 1)[:, None])

    marks = cells.evicted_below.reshape(cells.streams, -1)

    def look(local: jax.Array, seen: jax.Array) -> jax.Array:
        mine, _ = _held_side_by_side(cells, local)
        end = jnp.maximum(jnp.max(mine, axis=1), marks[:, local] - 1)
        return seen | ((mine != EMPTY) & (mine >= first_seen(cells.window, end + 1)[:, None]))

    unseen = jnp.zeros(cells.position.shape, bool)
    return ~free(cells) & ~each(_locals(cells, ~free(cells)), look, unseen)


def evict(cells: C, taken: jax.Array) -> C:
    """Take hidden cells from their owners, `[S, N]` bool, and what lies before them too.

    What an owner keeps is dense from then on, and `evicted_below` says where it begins. Free cells
    may be among those taken: they have no position and no owner.
    """
    if cells.sharing == 1:
        end = jnp.max(jnp.where(taken, cells.position, EMPTY), axis=1)
        cells = replace(cells, evicted_below=jnp.maximum(cells.evicted_below, end + 1))
        gone = (cells.position < cells.evicted_below[:, None]) & (end > EMPTY)[:, None]
        return with_owners(cells, jnp.where(gone[:, None], 0, cells.owners))

    def let_go(local: jax.Array, cells: C) -> C:
        mine, words = _held_side_by_side(cells, local)
        marks = cells.evicted_below.reshape(cells.streams, -1)
        lost = jnp.max(jnp.where(taken, mine, EMPTY), axis=1)
        end = jnp.maximum(marks[:, local], lost + 1)
        # In another stream that sequence may lose nothing now.
        gone = (mine != EMPTY) & (mine < end[:, None]) & (lost > EMPTY)[:, None]
        owners = cells.owners & ~(words[None, :, None] & spread(gone))
        marks = marks.at[:, local].set(end).reshape(-1)
        return replace(cells, owners=owners, evicted_below=marks)

    cells = each(_locals(cells, taken), let_go, cells)
    return with_owners(cells, cells.owners)


def _locals(cells: Cells, where: jax.Array) -> jax.Array:
    """Return which sequences of their streams own one of some cells, `[S, N]`, in any; `[Q / S]`.

    The first ones of all streams are looked at together, then the second ones, and so on.
    """
    return jnp.any(holders(cells, where).reshape(cells.streams, -1), axis=0)


def _held_side_by_side(cells: Cells, local: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the positions that the same sequence of each stream holds, by its number there.

    Returns:
      `[S, N]` int32, EMPTY where it does not own the cell; and its bit, in `[W]` uint32.
    """
    word, bit = divided(local, WORD)
    own = jax.lax.dynamic_index_in_dim(cells.owners, word, axis=1, keepdims=False)
    bit = jnp.uint32(1) << bit.astype(jnp.uint32)
    words = jnp.where(jnp.arange(cells.owners.shape[1]) == word, bit, 0)
    return jnp.where(own & bit != 0, cells.position, EMPTY), words


def can_resume(cells: Cells, seq: jax.Array, pos: jax.Array) -> jax.Array:
    """Return whether a token of a sequence at a position would see all it should; `[]` bool."""
    end = jnp.maximum(last(cells, seq), cells.evicted_below[seq] - 1)
    follows = (end == EMPTY) | (pos <= end + 1)
    complete = cells.evicted_below[seq] <= first_seen(cells.window, pos)
    return known(cells, seq) & (pos >= 0) & follows & complete


def misses(cells: Cells, position: jax.Array) -> jax.Array:
    """Return which sequences would miss something with a token at a position; both `[Q]`."""
    return cells.evicted_below > first_seen(cells.window, position)
