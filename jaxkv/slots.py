"""Where the tokens of a ubatch could live: choose cells, then occupy them."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxkv.batch import Ubatch
from jaxkv.cells import EMPTY, Cells, free, home, last


def nowhere(cells: Cells, ubatch: Ubatch) -> jax.Array:
    """Give every token an index past the last cell, each its own; `[R, T]` int32.

    Writes in drop mode leave such a token out. -1 would not do: it writes the last cell.
    """
    return cells.size + jnp.arange(ubatch.valid.size, dtype=jnp.int32).reshape(ubatch.valid.shape)


def last_positions(cells: Cells, present: jax.Array) -> jax.Array:
    """Find the last position of the sequences asked for.

    It looks at one sequence after another, and only at those: a reduction over all pairs of
    sequences and cells costs a hundred times more in a large table.

    Args:
      cells: the table.
      present: `[Q]` bool, the sequences to look at.

    Returns:
      `[Q]` int32, the last position, -1 where it is empty or was not asked for.
    """
    ids = jnp.nonzero(present, size=cells.sequences, fill_value=cells.sequences)[0]
    ids = ids.astype(jnp.int32)

    def look(i: jax.Array, found: jax.Array) -> jax.Array:
        return found.at[ids[i]].set(last(cells, ids[i]))

    start = jnp.full((cells.sequences,), EMPTY, jnp.int32)
    return jax.lax.fori_loop(0, jnp.sum(present), look, start)


def owing(cells: Cells, present: jax.Array) -> jax.Array:
    """Say which sequences, of those asked for, see a key that is owed a rotation; `[Q]` bool."""
    moved = cells.shift != 0
    words = [
        jnp.where(moved, cells.owners[:, w], 0) for w in range(cells.owners.shape[1])
    ]  # each [S, N]
    some = jnp.stack([jax.lax.reduce_or(word, axes=(1,)) for word in words], axis=1)  # [S, W]
    stream, word, bit = home(cells, jnp.arange(cells.sequences))
    return present & ((some[stream, word] >> bit) & 1 == 1)


def present(ubatch: Ubatch, sequences: int) -> jax.Array:
    """Say which sequences have a valid token in a ubatch; `[Q]` bool."""
    ids = jnp.where(ubatch.valid, ubatch.sequences, sequences).reshape(-1)
    return jnp.zeros((sequences,), bool).at[ids].set(True, mode="drop")


def admit(cells: Cells, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Say which sequences would find room, the smallest first.

    A sequence that asks for little is never refused because of one that asks for much.

    Args:
      cells: the table.
      wanted: `[Q]` int32, how many cells each sequence asks for.

    Returns:
      `[Q]` bool, who asks for nothing always fits; and `[]` int32, the empty cells that are left
      when those who fit have theirs.
    """
    order = jnp.argsort(wanted, stable=True)
    room = jnp.sum(free(cells), dtype=jnp.int32)
    smallest = jnp.cumsum(wanted[order]) <= room
    fits = jnp.zeros_like(smallest).at[order].set(smallest) | (wanted == 0)
    return fits, room - jnp.sum(jnp.where(fits, wanted, 0))


def find(cells: Cells, ubatch: Ubatch, ok: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Choose an empty cell for every valid token, lowest cells first; change nothing.

    Args:
      cells: the table, whose `placement` says whether the cells must be neighbours.
      ubatch: the tokens that want a cell; its `slots` are not looked at.
      ok: `[]` bool, False if the plan is refused, and then nobody gets one.

    Returns:
      `[R, T]` int32, a cell for each token; one that gets none (padding, or the ubatch has no
      place) has an index past the last cell. And `[]` bool, whether all valid tokens have one.

    llama.cpp: `llama_kv_cache::find_slot`.
    """
    empty = jnp.cumsum(free(cells)[0], dtype=jnp.int32)  # empty cells up to and with this one
    turn = jnp.cumsum(ubatch.valid.reshape(-1), dtype=jnp.int32)
    if cells.placement == "contiguous":
        slot = _run(empty, turn[-1]) + turn - 1
    else:
        slot = jnp.searchsorted(empty, turn).astype(jnp.int32)
    slot = slot.reshape(ubatch.valid.shape)
    placed = ok & jnp.all((slot < cells.size) | ~ubatch.valid)
    return jnp.where(placed & ubatch.valid, slot, nowhere(cells, ubatch)), placed


def _run(empty: jax.Array, length: jax.Array) -> jax.Array:
    """Find where the first run of empty cells begins, `[]`; past the last cell if there is none.

    `empty`, `[N]`, counts the empty cells up to and with each one.
    """
    cells = empty.shape[0]
    start = jnp.arange(cells)
    before = jnp.where(start > 0, empty[start - 1], 0)
    until = empty[jnp.minimum(start + length - 1, cells - 1)]
    whole = (until - before == length) & (start + length <= cells)
    return jnp.where(jnp.any(whole), jnp.argmax(whole), cells).astype(jnp.int32)


def fill(cells: Cells, ubatch: Ubatch) -> Cells:
    """Occupy the cells that were chosen; an index past the last cell is left out.

    llama.cpp: `llama_kv_cache::apply_ubatch`.
    """
    where = (ubatch.streams[:, None], ubatch.slots)
    _, word, bit = home(cells, ubatch.sequences)
    words = jnp.arange(cells.owners.shape[1])
    owner = jnp.where(words[None, None] == word[..., None], jnp.uint32(1) << bit[..., None], 0)
    put = {"mode": "drop", "unique_indices": True}
    return replace(
        cells,
        position=cells.position.at[where].set(ubatch.positions, **put),
        owners=cells.owners.at[where[0][..., None], words[None, None], where[1][..., None]].set(
            owner, **put
        ),
        shift=cells.shift.at[where].set(0, **put),
        written=cells.written.at[where].add(1, **put),
    )


def settle(cells: Cells, ubatch: Ubatch) -> Cells:
    """Occupy the cells of a ubatch if they are as they were when they were chosen, else nothing.

    A ubatch of another table, applied twice or before its turn, or refused, changes nothing.
    """
    lives = ubatch.valid & (ubatch.slots < cells.size)
    empty = free(cells).at[ubatch.streams[:, None], ubatch.slots].get(mode="fill", fill_value=False)
    here = present(ubatch, cells.sequences)
    same = ~here | (last_positions(cells, here) == ubatch.last)
    fresh = jnp.all(lives == ubatch.valid) & jnp.all(empty | ~lives) & jnp.all(same)
    return fill(
        cells, replace(ubatch, slots=jnp.where(fresh, ubatch.slots, nowhere(cells, ubatch)))
    )


def settled(cells: Cells, ubatch: Ubatch) -> jax.Array:
    """Give the slots of the tokens that the table really holds, so that no other row is written.

    Returns:
      `[R, T]` int32, a token's slot where the cell has its position and its sequence; past the last
      cell for every other token.
    """
    stream, slot = ubatch.streams[:, None], ubatch.slots
    _, word, bit = home(cells, ubatch.sequences)
    position = cells.position.at[stream, slot].get(mode="fill", fill_value=EMPTY)
    owner = cells.owners.at[stream, word, slot].get(mode="fill", fill_value=0)
    mine = ubatch.valid & (position == ubatch.positions) & ((owner >> bit) & 1 == 1)
    return jnp.where(mine, slot, nowhere(cells, ubatch))
