"""Where the tokens of a ubatch could live: choose cells, then occupy them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.batch import Ubatch
from jaxkv.kv.cells import EMPTY, END, WORD, Cells, each, evict, free, hidden, holders, home
from jaxkv.plan import Reason

FAR = 1 << 30
"""Past the last cell of any table."""

BLOCK = 128
"""Cells that a CPU compares with all sequences of a word at a time: what its registers hold."""


def nowhere(slots: jax.Array) -> jax.Array:
    """Give places past the last cell, each its own, in the shape of `slots`; int32.

    Writes in drop mode leave such a token out. -1 would not do: it writes the last cell.
    """
    return FAR + jnp.arange(slots.size, dtype=jnp.int32).reshape(slots.shape)


def unless(ok: jax.Array, ubatch: Ubatch) -> Ubatch:
    """Send every token of a ubatch nowhere unless all is well: it is carried out whole or not."""
    slots = jax.tree.map(lambda x: jnp.where(ok, x, nowhere(x)), ubatch.slots)
    return replace(ubatch, slots=slots)


def pools(cells: Cells, ubatch: Ubatch) -> jax.Array:
    """Say which streams the tokens of a ubatch live in; `[P]` int32.

    P is 1 where all rows share one stream, and are one list of tokens to it, and else R. Where all
    streams take part, row r is that of stream r.
    """
    return ubatch.streams if cells.streams > 1 else jnp.zeros(1, jnp.int32)


def streams(cells: Cells, ubatch: Ubatch) -> jax.Array:
    """Say which stream each row of a ubatch lives in; `[R]` int32."""
    return jnp.broadcast_to(pools(cells, ubatch), ubatch.streams.shape)


def reached(cells: Cells, present: jax.Array) -> jax.Array:
    """Find the last position that sequences have reached, whether they still hold it or not.

    Args:
      cells: the table.
      present: `[Q]` bool, the sequences to look at.

    Returns:
      `[Q]` int32, the last position, -1 for who has none or was not asked for.
    """
    found = jnp.max(cells.position, axis=1) if cells.streams > 1 else _highest(cells, present)
    return jnp.where(present, jnp.maximum(found, cells.lost - 1), EMPTY)


def _highest(cells: Cells, present: jax.Array) -> jax.Array:
    """Find the last position that sequences of one shared stream hold; `[Q]` int32.

    The sequences of a word lie side by side, so that all are compared with a cell at once: a pass
    for each word that somebody asked for is in, instead of one for each sequence.
    """
    words = cells.owners.shape[1]
    asked = jnp.pad(present, (0, words * WORD - present.size)).reshape(words, WORD)
    asked = jnp.any(asked, axis=1)
    # Elsewhere than on a processor turns of a loop cost more than they save.
    found = jax.lax.platform_dependent(
        cells.owners[0],
        cells.position[0],
        asked,
        cpu=partial(_highest_by, min(BLOCK, cells.size)),
        default=partial(_highest_by, cells.size),
    )
    return found.reshape(-1)[: present.size]


def _highest_by(size: int, owners: jax.Array, position: jax.Array, asked: jax.Array) -> jax.Array:
    """Find it for some words, `[W]` bool, `size` cells at a time; `[W, WORD]` int32."""
    words, cells = owners.shape
    bit = jnp.arange(WORD, dtype=jnp.uint32)

    def look(word: jax.Array, found: jax.Array) -> jax.Array:
        def block(i: jax.Array, highest: jax.Array) -> jax.Array:
            start = jnp.minimum(i * size, cells - size)  # the last may overlap the one before
            here = jax.lax.dynamic_slice(owners, (word, start), (1, size))[0]
            at = jax.lax.dynamic_slice_in_dim(position, start, size)
            owned = (here[:, None] >> bit[None]) & 1 == 1  # [size, WORD]
            return jnp.maximum(highest, jnp.max(jnp.where(owned, at[:, None], EMPTY), axis=0))

        turns = jnp.int32(-(-cells // size))
        return found.at[word].set(jax.lax.fori_loop(jnp.int32(0), turns, block, found[word]))

    return each(asked, look, jnp.full((words, WORD), EMPTY, jnp.int32))


def owing(cells: Cells, present: jax.Array) -> jax.Array:
    """Say which sequences, of those asked for, see a key that is owed a rotation; `[Q]` bool."""
    return present & holders(cells, cells.shift != 0)


def usable(cells: Cells) -> jax.Array:
    """Say which cells a token may get: those that are empty, or that nobody sees; `[S, N]` bool."""
    return free(cells) | hidden(cells)


def present(ubatch: Ubatch, sequences: int) -> jax.Array:
    """Say which sequences have a valid token in a ubatch; `[Q]` bool."""
    ids = jnp.where(ubatch.valid, ubatch.sequences, sequences).reshape(-1)
    return jnp.zeros((sequences,), bool).at[ids].set(True, mode="drop")


def admit(cells: Cells, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Say which sequences would find room, the smallest first.

    A sequence that asks for little is never refused because of one that asks for much. Where a
    window frees cells while a batch goes in, that is known only when each ubatch has been placed,
    and here everybody fits.

    Args:
      cells: the table.
      wanted: `[Q]` int32, how many cells each sequence asks for.

    Returns:
      `[Q]` bool, who asks for nothing always fits; and `[Q]` int32, the cells that are left to each
      when those who fit have theirs.
    """
    room = jnp.sum(usable(cells), axis=1, dtype=jnp.int32)
    if cells.window is not None:
        return wanted >= 0, jnp.broadcast_to(room, wanted.shape)
    if cells.streams > 1:
        return wanted <= room, room
    order = jnp.argsort(wanted, stable=True)
    smallest = jnp.cumsum(wanted[order]) <= room
    fits = jnp.zeros_like(smallest).at[order].set(smallest) | (wanted == 0)
    left = room - jnp.sum(jnp.where(fits, wanted, 0))
    return fits, jnp.broadcast_to(left, wanted.shape)


def find(cells: Cells, ubatch: Ubatch, ok: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Choose a cell for every valid token: empty ones first, then hidden ones; change nothing.

    Of the empty cells the lowest are taken, and of the hidden ones those with the lowest positions.

    Args:
      cells: the table, whose `placement` says whether the cells must be neighbours.
      ubatch: the tokens that want a cell; its `slots` are not looked at.
      ok: `[]` bool, False if the plan is refused, and then nobody gets one.

    Returns:
      `[R, T]` int32, a cell for each token; one that gets none (padding, or the ubatch has no
      place) has an index past the last cell. And `[R, T]` int32, for each token a `Reason`:
      NO_ROOM, or FRAGMENTED where there is room but no run.

    llama.cpp: `llama_kv_cache::find_slot`.
    """
    open_cells = usable(cells)

    def choose(stream: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        turn = jnp.cumsum(valid, dtype=jnp.int32)
        mine = open_cells[stream]
        count = jnp.cumsum(mine, dtype=jnp.int32)  # up to and with each cell
        if cells.placement == "contiguous":
            return _run(count, turn[-1]) + turn - 1, turn[-1] <= count[-1]
        if cells.window is None:
            return jnp.searchsorted(count, turn), jnp.array(False)
        # An empty cell has the lowest position of all.
        order = jnp.argsort(jnp.where(mine, cells.position[stream], END), stable=True)
        order = jnp.append(order, cells.size)
        return order[jnp.where(turn <= count[-1], turn - 1, cells.size)], jnp.array(False)

    streams = pools(cells, ubatch)
    slots, room = jax.vmap(choose)(streams, ubatch.valid.reshape(streams.size, -1))
    slots = slots.reshape(ubatch.valid.shape).astype(jnp.int32)
    room = jnp.broadcast_to(room[:, None], (room.size, ubatch.valid.size // room.size))
    fault = jnp.where(room.reshape(slots.shape), Reason.FRAGMENTED, Reason.NO_ROOM)
    homeless = ubatch.valid & (slots >= cells.size)
    placed = ok & ~jnp.any(homeless) & ubatch.valid
    return jnp.where(placed, slots, nowhere(slots)), jnp.where(homeless, fault, Reason.FITS)


def _run(usable: jax.Array, length: jax.Array) -> jax.Array:
    """Find where the first run of usable cells begins, `[]`; past the last cell if there is none.

    `usable`, `[N]`, counts the usable cells up to and with each one.
    """
    cells = usable.shape[0]
    start = jnp.arange(cells)
    before = jnp.where(start > 0, usable[start - 1], 0)
    until = usable[jnp.minimum(start + length - 1, cells - 1)]
    whole = (until - before == length) & (start + length <= cells)
    return jnp.where(jnp.any(whole), jnp.argmax(whole), cells).astype(jnp.int32)


def fresh(cells: Cells, ubatch: Ubatch) -> jax.Array:
    """Say whether a table is still as a ubatch found it when its cells were chosen; `[]` bool.

    It is not for a ubatch of another table, one applied twice or before its turn, or refused.
    """
    lives = ubatch.valid & (ubatch.slots < cells.size)
    where = (streams(cells, ubatch)[:, None], ubatch.slots)
    untaken = usable(cells).at[where].get(mode="fill", fill_value=False)
    here = present(ubatch, cells.sequences)
    same = ~here | (reached(cells, here) == ubatch.last)
    return jnp.all(lives == ubatch.valid) & jnp.all(untaken | ~lives) & jnp.all(same)


def fill(cells: Cells, ubatch: Ubatch) -> Cells:
    """Occupy the cells that were chosen; an index past the last cell is left out.

    llama.cpp: `llama_kv_cache::apply_ubatch`.
    """
    where = (streams(cells, ubatch)[:, None], ubatch.slots)
    if cells.window is not None:
        nothing = jnp.zeros(cells.position.shape, bool)
        cells = evict(cells, nothing.at[where].set(True, mode="drop"))
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
        stamp=cells.stamp.at[where].set(ubatch.stamps, **put),
    )


def settled(cells: Cells, ubatch: Ubatch) -> jax.Array:
    """Give the slots of the tokens that the table really took in, so that no other row is written.

    Returns:
      `[R, T]` int32, a token's slot where the cell has its stamp; past the last cell elsewhere.
    """
    where = (streams(cells, ubatch)[:, None], ubatch.slots)
    stamp = cells.stamp.at[where].get(mode="fill", fill_value=0)
    lives = ubatch.valid & (ubatch.slots < cells.size) & (stamp == ubatch.stamps)
    return jnp.where(lives, ubatch.slots, nowhere(ubatch.slots))
