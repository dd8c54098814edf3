"""Windows: which cells no next token sees, taking them, and what can be resumed after that."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxkv.kv.cells import (
    C,
    Cells,
    bits,
    each,
    free,
    held,
    holders,
    known,
    last,
    spread,
    with_owners,
)
from jaxkv.places import EMPTY
from jaxkv.window import first_seen


def hidden(cells: Cells) -> jax.Array:
    """Return which used cells no next token of any owner sees; `[S, N]` bool."""
    if cells.window is None:
        return jnp.zeros(cells.position.shape, bool)
    if cells.sharing == 1:
        end = jnp.maximum(jnp.max(cells.position, axis=1), cells.evicted_below - 1)
        return ~free(cells) & (cells.position < first_seen(cells.window, end + 1)[:, None])

    def look(seq: jax.Array, seen: jax.Array) -> jax.Array:
        mine = held(cells, seq)
        end = jnp.maximum(jnp.max(mine), cells.evicted_below[seq] - 1)
        return seen | ((mine != EMPTY) & (mine >= first_seen(cells.window, end + 1)))

    unseen = jnp.zeros((cells.num_cells,), bool)
    return ~free(cells) & ~each(holders(cells, ~free(cells)), look, unseen)[None]


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

    def let_go(seq: jax.Array, cells: C) -> C:
        mine = held(cells, seq)
        end = jnp.max(jnp.where(taken[0], mine, EMPTY)) + 1
        end = jnp.maximum(cells.evicted_below[seq], end)
        gone = (mine != EMPTY) & (mine < end)
        owners = cells.owners & ~(bits(cells, seq)[..., None] & spread(gone[None]))
        return replace(cells, owners=owners, evicted_below=cells.evicted_below.at[seq].set(end))

    cells = each(holders(cells, taken), let_go, cells)
    return with_owners(cells, cells.owners)


def can_resume(cells: Cells, seq: jax.Array, pos: jax.Array) -> jax.Array:
    """Return whether a token of a sequence at a position would see all it should; `[]` bool."""
    end = jnp.maximum(last(cells, seq), cells.evicted_below[seq] - 1)
    follows = (end == EMPTY) | (pos <= end + 1)
    complete = cells.evicted_below[seq] <= first_seen(cells.window, pos)
    return known(cells, seq) & (pos >= 0) & follows & complete


def misses(cells: Cells, position: jax.Array) -> jax.Array:
    """Return which sequences would miss something with a token at a position; both `[Q]`."""
    return cells.evicted_below > first_seen(cells.window, position)
