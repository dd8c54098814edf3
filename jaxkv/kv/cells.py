"""Who lives in each cell: a position, its owners, and the rotation its key is still owed.

This table is the truth about a cache. It holds not one byte of keys or values, so every edit of it
(forgetting, forking, moving) costs the same whatever the model's size. What can be computed from it
(how many cells are used, the first and last position of a sequence) is computed, never stored.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp

from jaxkv.stamp import mix
from jaxkv.window import Window, first_seen

T = TypeVar("T")

EMPTY = -1
"""Position of a cell that holds no token."""

END = jnp.iinfo(jnp.int32).max
"""One past every position: what an open range ends with."""

WORD = 32
"""Sequences whose ownership is packed into one word."""

Placement = Literal["scattered", "contiguous"]
"""Which cells a ubatch may get: any that are empty, or one run of neighbours only."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """S independent tables of N cells, shared by Q sequences.

    With one stream every sequence lives in it; with Q streams each sequence has its own. A cell has
    an owner exactly when it has a position, and an empty cell owes no rotation.

    position: `[S, N]` int32, position of the token in the cell; EMPTY (-1) if there is none.
    owners: `[S, W, N]` uint32, one bit for each sequence that owns the cell, 32 to a word.
    shift: `[S, N]` int32, the position now less the position that the key was rotated for.
    lost: `[Q]` int32, one past the highest position that window reuse took from the sequence.
    stamp: `[S, N]` uint32, a number for what stands in the rows of the cell, see `jaxkv.stamp`. It
      tells whether they are those of a ubatch, and still those that an earlier table knew.
    placement: which cells a ubatch may get, static.
    window: how far back tokens look, static; a cell that no next token sees may be taken.
    ubatch_size: the most tokens of a ubatch that N was chosen for, static; None for any.
    """

    position: jax.Array  # [S, N]
    owners: jax.Array  # [S, W, N]
    shift: jax.Array  # [S, N]
    lost: jax.Array  # [Q]
    stamp: jax.Array  # [S, N]
    placement: Placement = field(metadata={"static": True})
    window: Window | None = field(metadata={"static": True})
    ubatch_size: int | None = field(metadata={"static": True})

    @property
    def streams(self) -> int:
        """S, the number of independent tables."""
        return self.position.shape[0]

    @property
    def size(self) -> int:
        """N, the number of cells in each stream."""
        return self.position.shape[1]

    @property
    def sequences(self) -> int:
        """Q, the number of sequences that may own cells."""
        return self.lost.shape[0]


def make_cells(
    *,
    cells: int,
    sequences: int,
    streams: int = 1,
    placement: Placement = "scattered",
    window: Window | None = None,
    ubatch_size: int | None = None,
) -> Cells:
    """Make a table with every cell empty.

    Args:
      cells: N, the cells of each stream.
      sequences: Q, the number of sequence ids, 0 to Q - 1.
      streams: S, 1 (all sequences share one table) or Q (each has its own).
      placement: which cells a ubatch may get.
      window: how far back tokens look.
      ubatch_size: the most tokens of a ubatch, where `cells` was chosen for that.

    Examples:
      >>> make_cells(cells=4, sequences=2).position
      Array([[-1, -1, -1, -1]], dtype=int32)

    llama.cpp: `llama_kv_cells`.
    """
    words = -(-(sequences // streams) // WORD)
    return Cells(
        position=jnp.full((streams, cells), EMPTY, jnp.int32),
        owners=jnp.zeros((streams, words, cells), jnp.uint32),
        shift=jnp.zeros((streams, cells), jnp.int32),
        lost=jnp.zeros((sequences,), jnp.int32),
        stamp=jnp.zeros((streams, cells), jnp.uint32),
        placement=placement,
        window=window,
        ubatch_size=ubatch_size,
    )


def home(cells: Cells, seq: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Say where the ownership of a sequence is written: its stream, its word and its bit.

    Any integer may be asked for; one that is no sequence gets some home and must be masked.
    """
    if cells.streams == 1:
        stream, local = jnp.zeros_like(seq), seq
    else:
        stream, local = seq, jnp.zeros_like(seq)
    return stream, local // WORD, (local % WORD).astype(jnp.uint32)


def known(cells: Cells, seq: jax.Array) -> jax.Array:
    """Say whether an integer names a sequence of this table; bool, the shape of `seq`."""
    return (seq >= 0) & (seq < cells.sequences)


def held(cells: Cells, seq: jax.Array) -> jax.Array:
    """List the positions that one sequence holds, cell by cell of its stream.

    Args:
      cells: the table.
      seq: `[]` int32, a sequence id. Any other integer holds nothing.

    Returns:
      `[N]` int32, the position where the sequence owns the cell, EMPTY elsewhere.
    """
    stream, word, bit = home(cells, seq)
    owns = (cells.owners[stream, word] >> bit) & 1 == 1
    return jnp.where(owns & known(cells, seq), cells.position[stream], EMPTY)


def first(cells: Cells, seq: jax.Array) -> jax.Array:
    """Find the smallest position that a sequence holds; `[]` int32, -1 if none."""
    positions = held(cells, seq)
    lowest = jnp.min(jnp.where(positions == EMPTY, END, positions))
    return jnp.where(lowest == END, EMPTY, lowest)


def last(cells: Cells, seq: jax.Array) -> jax.Array:
    """Find the largest position that a sequence holds; `[]` int32, -1 if none."""
    return jnp.max(held(cells, seq))


def free(cells: Cells) -> jax.Array:
    """Say which cells are empty; `[S, N]` bool."""
    return cells.position == EMPTY


def used(cells: Cells) -> jax.Array:
    """Count the cells that hold a token, over all streams; `[]` int32."""
    return jnp.sum(~free(cells), dtype=jnp.int32)


def remove(cells: Cells, seq: jax.Array, start: jax.Array, stop: jax.Array) -> Cells:
    """Take one sequence (every sequence if `seq` is -1) off its cells in a range of positions.

    Args:
      cells: the table.
      seq: `[]` int32, a sequence id, or -1. Any other integer changes nothing.
      start: `[]` int32, first position of the range; negative means 0.
      stop: `[]` int32, one past the last; negative means no end, and 0 an empty range.

    Returns:
      The table after it. A cell that loses its last owner is empty.
    """
    mine = jnp.where(seq == -1, ~jnp.uint32(0), bits(cells, seq))
    gone = mine[..., None] & _spread(within(cells, start, stop))
    # What the caller wants to be gone is not lost.
    asked = (seq == -1) | (jnp.arange(cells.sequences) == seq)
    begins = jnp.minimum(cells.lost, jnp.maximum(start, 0))
    lost = jnp.where(asked & (end_of(stop) >= cells.lost), begins, cells.lost)
    return replace(with_owners(cells, cells.owners & ~gone), lost=lost)


def copy(cells: Cells, src: jax.Array, dst: jax.Array, start: jax.Array, stop: jax.Array) -> Cells:
    """Make one or more sequences of the same stream owners of another's cells in a range.

    What `dst` held before stays its own: a merge, and doing it twice is doing it once.

    Args:
      cells: the table.
      src: `[]` int32, the sequence that owns the cells already.
      dst: `[]` or `[n]` int32, the sequences that will own them too.
      start: `[]` int32, first position of the range; negative means 0.
      stop: `[]` int32, one past the last; negative means no end, and 0 an empty range.
    """
    shared = owned_by(cells, bits(cells, src)) & within(cells, start, stop)
    gained = jax.vmap(partial(bits, cells))(jnp.atleast_1d(dst))  # [n, S, W]
    gained = jax.lax.reduce_or(gained, axes=(0,))
    missed = jnp.where(known(cells, src), lost_within(cells, src, start, stop), 0)
    return replace(
        with_owners(cells, cells.owners | (gained[..., None] & _spread(shared))),
        lost=cells.lost.at[jnp.where(known(cells, dst), dst, cells.sequences)].max(
            missed, mode="drop"
        ),
    )


def lost_within(cells: Cells, seq: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
    """Say what whoever copies a range of a sequence is told to have lost; `[]` int32."""
    lost = cells.lost[seq]
    return jnp.where(jnp.maximum(start, 0) < lost, jnp.minimum(lost, end_of(stop)), 0)


def keep(cells: Cells, seq: jax.Array) -> Cells:
    """Empty every cell that one sequence does not own, and make it the only owner of the rest."""
    only = with_owners(cells, cells.owners & bits(cells, seq)[..., None])
    only = replace(only, lost=jnp.where(jnp.arange(cells.sequences) == seq, cells.lost, 0))
    return jax.tree.map(lambda new, old: jnp.where(known(cells, seq), new, old), only, cells)


def clear(cells: Cells) -> Cells:
    """Empty every cell; nothing is owed and nothing was lost."""
    return replace(
        cells,
        position=jnp.full_like(cells.position, EMPTY),
        owners=jnp.zeros_like(cells.owners),
        shift=jnp.zeros_like(cells.shift),
        lost=jnp.zeros_like(cells.lost),
    )


def can_resume(cells: Cells, seq: jax.Array, pos: jax.Array) -> jax.Array:
    """Say whether a token of a sequence at a position would see all it should; `[]` bool."""
    end = jnp.maximum(last(cells, seq), cells.lost[seq] - 1)
    follows = (end == EMPTY) | (pos <= end + 1)
    whole = cells.lost[seq] <= first_seen(cells.window, pos)
    return known(cells, seq) & (pos >= 0) & follows & whole


def lost(cells: Cells, position: jax.Array) -> jax.Array:
    """Say which sequences would miss something with a token at a position, `[Q]`; `[Q]` bool."""
    return cells.lost > first_seen(cells.window, position)


def hidden(cells: Cells) -> jax.Array:
    """Say which used cells no next token of any owner sees; `[S, N]` bool."""
    if cells.window is None:
        return jnp.zeros(cells.position.shape, bool)
    if cells.streams > 1:
        end = jnp.maximum(jnp.max(cells.position, axis=1), cells.lost - 1)
        return ~free(cells) & (cells.position < first_seen(cells.window, end + 1)[:, None])

    def look(seq: jax.Array, seen: jax.Array) -> jax.Array:
        mine = held(cells, seq)
        end = jnp.maximum(jnp.max(mine), cells.lost[seq] - 1)
        return seen | ((mine != EMPTY) & (mine >= first_seen(cells.window, end + 1)))

    nobody = jnp.zeros((cells.size,), bool)
    return ~free(cells) & ~each(holders(cells, ~free(cells)), look, nobody)[None]


def evict(cells: Cells, taken: jax.Array) -> Cells:
    """Take hidden cells from their owners, `[S, N]` bool, and what lies before them too.

    What an owner keeps is dense from then on, and `lost` says where it begins.
    """
    taken &= ~free(cells)
    if cells.streams > 1:
        end = jnp.max(jnp.where(taken, cells.position, EMPTY), axis=1)
        cells = replace(cells, lost=jnp.maximum(cells.lost, end + 1))
        gone = (cells.position < cells.lost[:, None]) & (end > EMPTY)[:, None]
        return with_owners(cells, jnp.where(gone[:, None], 0, cells.owners))

    def let_go(seq: jax.Array, cells: Cells) -> Cells:
        mine = held(cells, seq)
        end = jnp.maximum(cells.lost[seq], jnp.max(jnp.where(taken[0], mine, EMPTY)) + 1)
        gone = (mine != EMPTY) & (mine < end)
        owners = cells.owners & ~(bits(cells, seq)[..., None] & _spread(gone[None]))
        return replace(cells, owners=owners, lost=cells.lost.at[seq].set(end))

    cells = each(holders(cells, taken), let_go, cells)
    return with_owners(cells, cells.owners)


def each(asked: jax.Array, look: Callable[[jax.Array, T], T], start: T) -> T:
    """Fold over the sequences asked for, `[Q]` bool, or the words of them, one after another.

    A reduction over all pairs of sequences and cells at once costs a hundred times more in a large
    table.
    """
    count = asked.shape[0]
    ids = jnp.nonzero(asked, size=count, fill_value=count)[0].astype(jnp.int32)
    return jax.lax.fori_loop(0, jnp.sum(asked), lambda i, carry: look(ids[i], carry), start)


def holders(cells: Cells, where: jax.Array) -> jax.Array:
    """Say which sequences own one of some cells, `[S, N]` bool; `[Q]` bool."""
    words = [jnp.where(where, cells.owners[:, w], 0) for w in range(cells.owners.shape[1])]
    some = jnp.stack([jax.lax.reduce_or(word, axes=(1,)) for word in words], axis=1)  # [S, W]
    stream, word, bit = home(cells, jnp.arange(cells.sequences))
    return (some[stream, word] >> bit) & 1 == 1


def digest(cells: Cells) -> jax.Array:
    """Sum up what stands in all rows; `[]` uint32."""
    return jnp.sum(cells.stamp, dtype=jnp.uint32)


def unwritten(cells: Cells, old: Cells) -> jax.Array:
    """Say whether no row that an older table uses was written or moved since; `[]` bool."""
    return jnp.all((cells.stamp == old.stamp) | free(old))


def restored(cells: Cells, old: Cells) -> Cells:
    """Give an older table back, remembering what was written since."""
    return replace(old, stamp=cells.stamp)


def restamped(cells: Cells, where: jax.Array) -> jax.Array:
    """Give the stamps for rows that were changed in place, `[S, N]` bool; `[S, N]` uint32."""
    return jnp.where(where, mix(cells.stamp + 1), cells.stamp)


def faults(cells: Cells) -> dict[str, jax.Array]:
    """Count what breaks the invariants of a table, by name; `[]` int32 each."""
    owned = jnp.any(cells.owners != 0, axis=1)
    everyone = jax.vmap(partial(bits, cells))(jnp.arange(cells.sequences))  # [Q, S, W]
    strangers = cells.owners & ~jax.lax.reduce_or(everyone, axes=(0,))[..., None]
    wrong = {
        "position below -1": cells.position < EMPTY,
        "position without an owner": ~free(cells) & ~owned,
        "owner without a position": free(cells) & owned,
        "owner that is no sequence": strangers != 0,
        "rotation owed to an empty cell": free(cells) & (cells.shift != 0),
        "rotated for a negative position": ~free(cells) & (cells.position < cells.shift),
        "negative loss": cells.lost < 0,
    }
    return {name: jnp.sum(where, dtype=jnp.int32) for name, where in wrong.items()}


def bits(cells: Cells, seq: jax.Array) -> jax.Array:
    """Write one sequence, `[]`, as words that can be laid over `owners`; `[S, W]` uint32."""
    stream, word, bit = home(cells, seq)
    streams, words, _ = cells.owners.shape
    here = (jnp.arange(streams)[:, None] == stream) & (jnp.arange(words)[None] == word)
    return jnp.where(here & known(cells, seq), jnp.uint32(1) << bit, jnp.uint32(0))


def owned_by(cells: Cells, words: jax.Array) -> jax.Array:
    """Say which cells have an owner among `words`, `[S, W]`; `[S, N]` bool."""
    return jnp.any(cells.owners & words[..., None] != 0, axis=1)


def within(cells: Cells, start: jax.Array, stop: jax.Array) -> jax.Array:
    """Say which cells hold a position of a range; `[S, N]` bool. Empty cells never do."""
    return (cells.position >= jnp.maximum(start, 0)) & (cells.position < end_of(stop))


def end_of(stop: jax.Array) -> jax.Array:
    """Resolve the end of a range: a negative one is open."""
    return jnp.where(stop < 0, END, stop)


def _spread(cell: jax.Array) -> jax.Array:
    """Turn a bool for each cell into words of all ones or none; `[S, N]` to `[S, 1, N]`."""
    return jnp.where(cell, ~jnp.uint32(0), jnp.uint32(0))[:, None]


def with_owners(cells: Cells, owners: jax.Array) -> Cells:
    """Change owners; a cell that nobody owns any more is empty and owes nothing."""
    kept = jnp.any(owners != 0, axis=1)
    return replace(
        cells,
        owners=owners,
        position=jnp.where(kept, cells.position, EMPTY),
        shift=jnp.where(kept, cells.shift, 0),
    )
