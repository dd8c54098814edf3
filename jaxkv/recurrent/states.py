"""Which states a recurrent memory keeps, and in which cells: a table without a byte of a state.

A state stands after a token: it is what that token and all before it have left. Each sequence has a
current state and up to E earlier ones, as pairs of a position and a cell. So forking a sequence
shares cells, cutting its end drops pairs, and no state is ever moved or copied. What was there
before a state cannot be taken out of it, and the table says so rather than pretend.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jaxkv.batch import Ubatch
from jaxkv.kv.cells import EMPTY, END, end_of
from jaxkv.kv.slots import nowhere, present
from jaxkv.plan import Reason


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class States:
    """The E + 1 newest states of each of Q sequences, in N = Q (E + 1) cells.

    The pairs of a sequence are ordered, the oldest first and the current one last; where there are
    fewer, empty ones come before them. Positions rise from pair to pair. A sequence that lost its
    past has no pair.

    position: `[Q, E + 1]` int32, position of the token that a state stands after; EMPTY (-1) if
      there is no state.
    cell: `[Q, E + 1]` int32, the cell of the state, which sequences may share; N if there is none.
    lost: `[Q]` int32, one past the last position of a sequence none of whose states is left though
      it has tokens before that; it must be forgotten (`seq_rm`) and computed again. Else 0.
    stamp: `[N]` uint32, the stamp of the token that the state of a cell stands after, see
      `jaxkv.stamp`.
    done: `[L, N]` bool, whether the state of a cell has been written into the rows of a layer. The
      table takes it in before it is computed, and it is written once.
    streams: 1 or Q, static. With 1 a position belongs to a cell, and moves for every sequence that
      shares it; with Q each sequence has positions of its own.
    """

    position: jax.Array  # [Q, E + 1]
    cell: jax.Array  # [Q, E + 1]
    lost: jax.Array  # [Q]
    stamp: jax.Array  # [N]
    done: jax.Array  # [L, N]
    streams: int = field(metadata={"static": True})

    @property
    def sequences(self) -> int:
        """Q, the number of sequences."""
        return self.position.shape[0]

    @property
    def kept(self) -> int:
        """E, how many states are kept beside the current one."""
        return self.position.shape[1] - 1

    @property
    def size(self) -> int:
        """N, the number of cells."""
        return self.stamp.shape[0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class StateSlots:
    """The cells chosen for the states of a ubatch; an index past the last cell is nowhere.

    source: `[R]` int32, the cell of the state that a row goes on from; nowhere if it starts afresh.
    cells: `[R, E + 1]` int32, the cells of the states after the last tokens of a row, oldest first.
    """

    source: jax.Array  # [R]
    cells: jax.Array  # [R, E + 1]


def make_states(*, layers: int, sequences: int, kept: int, streams: int = 1) -> States:
    """Make a table without a state.

    >>> make_states(layers=1, sequences=2, kept=1).position
    Array([[-1, -1], [-1, -1]], dtype=int32)
    """
    shape, size = (sequences, kept + 1), sequences * (kept + 1)
    return States(
        position=jnp.full(shape, EMPTY, jnp.int32),
        cell=jnp.full(shape, size, jnp.int32),
        lost=jnp.zeros((sequences,), jnp.int32),
        stamp=jnp.zeros((size,), jnp.uint32),
        done=jnp.zeros((layers, size), bool),
        streams=streams,
    )


def known(states: States, seq: jax.Array) -> jax.Array:
    """Say whether an integer names a sequence of this table; bool, the shape of `seq`."""
    return (seq >= 0) & (seq < states.sequences)


def first(states: States, seq: jax.Array) -> jax.Array:
    """Find the lowest position that a sequence can be cut back to, `[]` int32; -1 if none."""
    positions = states.position[seq]
    lowest = jnp.min(jnp.where(positions == EMPTY, END, positions))
    return jnp.where(known(states, seq) & (lowest != END), lowest, EMPTY)


def last(states: States, seq: jax.Array) -> jax.Array:
    """Find the position of the current state of a sequence, `[]` int32; -1 if none."""
    return jnp.where(known(states, seq), states.position[seq, -1], EMPTY)


def occupied(cell: jax.Array, size: int) -> jax.Array:
    """Say which cells a table of pairs, `[Q, E + 1]`, names; `[N]` bool."""
    return jnp.zeros((size,), bool).at[cell.reshape(-1)].set(True, mode="drop")


def used(states: States) -> jax.Array:
    """Count the cells that hold a state, shared ones once; `[]` int32."""
    return jnp.sum(occupied(states.cell, states.size), dtype=jnp.int32)


def digest(states: States) -> jax.Array:
    """Sum up what stands in all rows; `[]` uint32."""
    return jnp.sum(states.stamp, dtype=jnp.uint32)


def reached(states: States, present: jax.Array) -> jax.Array:
    """Find the last position of the sequences asked for, `[Q]` bool; `[Q]` int32, -1 elsewhere."""
    end = jnp.maximum(states.position[:, -1], states.lost - 1)
    return jnp.where(present, end, EMPTY)


def can_resume(states: States, seq: jax.Array, pos: jax.Array) -> jax.Array:
    """Say whether a state stands before a position, or none is needed; `[]` bool."""
    empty = (states.position[seq, -1] == EMPTY) & (states.lost[seq] == 0)
    stands = jnp.any(states.position[seq] == pos - 1) & (pos > 0)
    return known(states, seq) & (pos >= 0) & (empty | stands | (pos == 0))


def can_remove(states: States, seq: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
    """Say whether a range can be forgotten, see `remove`; `[]` bool."""
    _, _, ok = _cut(states, seq, start, stop)
    return ok


def remove(
    states: States, seq: jax.Array, start: jax.Array, stop: jax.Array
) -> tuple[States, jax.Array]:
    """Forget a range of one sequence, of every sequence if `seq` is -1; or refuse.

    A range that ends before the end of a sequence, or begins beyond it, is granted and changes
    nothing: what a state has seen stays in it. An end is cut off where a state stands right before
    it, and that becomes the current one. A whole sequence can always go. All else is refused.

    Args:
      states: the table.
      seq: `[]` int32, a sequence id, or -1. Any other integer changes nothing.
      start: `[]` int32, first position of the range; negative means 0.
      stop: `[]` int32, one past the last; negative means no end, and 0 an empty range.

    Returns:
      The table after it; and `[]` bool, False if one of the sequences had to refuse, and then
      nothing changed.
    """
    stays, whole, ok = _cut(states, seq, start, stop)
    cut = replace(_with(states, stays), lost=jnp.where(whole, 0, states.lost))
    return jax.tree.map(lambda new, old: jnp.where(ok, new, old), cut, states), ok


def _cut(
    states: States, seq: jax.Array, start: jax.Array, stop: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Say which pairs stay, `[Q, E + 1]`; who goes as a whole, `[Q]`; and if it is granted."""
    asked = (seq == -1) | (jnp.arange(states.sequences) == seq)
    end = reached(states, asked)
    start, stop = jnp.maximum(start, 0), end_of(stop)
    cut = (start <= end) & (end < stop)  # never where nobody asks or nothing is held
    whole = cut & (start == 0)
    stands = jnp.any(states.position == start - 1, axis=1)
    stays = ~cut[:, None] | (states.position < start)
    return stays, whole, jnp.all(~cut | whole | stands)


def copy(
    states: States, src: jax.Array, dst: jax.Array, start: jax.Array, stop: jax.Array
) -> States:
    """Give sequences the states of another, as it was at the end of a range; they share its cells.

    What comes before the range is in the states already, so where it begins does not matter. Where
    no state stands at its end, the targets lose their past: they are refused until they have been
    forgotten. What a target held before is replaced, but if the range holds nothing of the source
    it stays, as it does in an attention memory; unless sequences have positions of their own.

    Args:
      states: the table.
      src: `[]` int32, the sequence that is copied.
      dst: `[]` or `[n]` int32, the targets; `src` itself stays as it is.
      start: `[]` int32, first position of the range; negative means 0.
      stop: `[]` int32, one past the last; negative means no end, and 0 an empty range.
    """
    start, stop = jnp.maximum(start, 0), end_of(stop)
    end = jnp.maximum(states.position[src, -1], states.lost[src] - 1)
    some = (start <= end) & (start < stop)
    cut = jnp.where(some, jnp.minimum(stop, end + 1), 0)  # one past the last that is copied
    stands = jnp.any(states.position[src] == cut - 1) & some
    fork = _with(states, (states.position < cut) & stands)
    does = known(states, src) & (some | (states.streams > 1))
    dst = jnp.atleast_1d(dst)
    dst = jnp.where(does & known(states, dst) & (dst != src), dst, states.sequences)
    return replace(
        states,
        position=states.position.at[dst].set(fork.position[src][None], mode="drop"),
        cell=states.cell.at[dst].set(fork.cell[src][None], mode="drop"),
        lost=states.lost.at[dst].set(jnp.where(stands, 0, cut), mode="drop"),
    )


def keep(states: States, seq: jax.Array) -> States:
    """Forget every sequence but one; an integer that is none changes nothing."""
    stays = (jnp.arange(states.sequences) == seq) | ~known(states, seq)
    return replace(_with(states, stays[:, None]), lost=jnp.where(stays, states.lost, 0))


def clear(states: States) -> States:
    """Forget everything."""
    return replace(_with(states, jnp.array(False)), lost=jnp.zeros_like(states.lost))


def add(
    states: States, seq: jax.Array, start: jax.Array, stop: jax.Array, delta: jax.Array
) -> States:
    """Move the positions of a sequence in a range, those of its states too.

    A state whose position turns negative is dropped, as the token is that it stands after. If it is
    the current one, the end of the sequence goes with it, as in `remove`: an earlier state that
    stands right before the range becomes the current one; where there is none, the sequence is
    empty if the range began at 0, and has lost its past if it did not.

    An earlier state is dropped, too, when it no longer stands before all later ones: then there is
    no end that could be cut off to return to it.
    """
    moves = _moves(states, seq, start, stop)
    return _moved(
        states, seq, start, stop, lambda position: position + delta, moves, jnp.array(False)
    )


def divide(
    states: States, seq: jax.Array, start: jax.Array, stop: jax.Array, divisor: jax.Array
) -> States:
    """Divide the positions of a sequence in a range, rounding down.

    Several tokens may then share a position, so earlier states in the range cannot be returned to:
    they are dropped. A divisor of 1 or less changes nothing.
    """
    moves = _moves(states, seq, start, stop) & (divisor > 1)
    divisor = jnp.maximum(divisor, 1)
    earlier = moves & (jnp.arange(states.kept + 1) < states.kept)[None]
    return _moved(states, seq, start, stop, lambda position: position // divisor, moves, earlier)


def _moves(states: States, seq: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
    """Say which pairs move with those of a sequence in a range; `[Q, E + 1]` bool."""
    inside = (states.position >= jnp.maximum(start, 0)) & (states.position < end_of(stop))
    mine = inside & (jnp.arange(states.sequences) == seq)[:, None]
    if states.streams > 1:
        return mine
    cells = occupied(jnp.where(mine, states.cell, states.size), states.size)
    return cells.at[states.cell].get(mode="fill", fill_value=False)


def _moved(
    states: States,
    seq: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    move: Callable[[jax.Array], jax.Array],
    moves: jax.Array,
    drop: jax.Array,
) -> States:
    """Move pairs and drop some of them, and whatever cannot be returned to any more."""
    start = jnp.maximum(start, 0)
    held = states.position != EMPTY
    position = jnp.where(moves, move(states.position), states.position)
    there = held & (position >= 0)
    later = jax.lax.cummin(jnp.where(there, position, END), axis=1, reverse=True)
    later = jnp.pad(later[:, 1:], [(0, 0), (0, 1)], constant_values=END)
    stays = there & ~drop & (position < later)
    # Where the current state is gone, so is all that stood from `start` on.
    gone = held[:, -1] & ~there[:, -1]
    before = stays & (position < start)
    stands = jnp.any(before & (position == start - 1), axis=1)
    stays = jnp.where(gone[:, None], before & stands[:, None], stays)
    # What a sequence without a past has lost moves as if it were still there.
    end = states.lost - 1
    moving = (jnp.arange(states.sequences) == seq) & (end >= start) & (end < end_of(stop))
    lost = jnp.where(moving, jnp.maximum(move(end) + 1, 0), states.lost)
    lost = jnp.where(gone & ~stands, start, lost)
    return replace(_with(replace(states, position=position), stays), lost=lost)


def place(states: States, ubatch: Ubatch, ok: jax.Array) -> tuple[StateSlots, jax.Array]:
    """Choose a cell for each state that a ubatch will leave; change nothing.

    A row of n tokens leaves the states after its last min(n, E + 1), and its sequence lets go of as
    many of the oldest. So there is always room. Cells that are empty already are taken first, and
    then those that are let go of: what stood there is read before it is written over.

    Args:
      states: the table.
      ubatch: the tokens, a row for each sequence; its `slots` are not looked at.
      ok: `[]` bool, False if the plan is refused, and then nobody gets a cell.

    Returns:
      The slots; and `[R, T]` int32, for each token a `Reason`: MIXED_ROW where two rows are of one
      sequence, since the second would have to wait for the first.
    """
    active = jnp.any(ubatch.valid, axis=1)
    seq = jnp.where(active, ubatch.streams, states.sequences)
    rows = jnp.zeros((states.sequences,), jnp.int32).at[seq].add(1, mode="drop")
    crowded = active & (rows[ubatch.streams] > 1)
    placed = active & ok & ~jnp.any(crowded)
    new = placed[:, None] & (_numbers(states, ubatch) > 0)
    left = occupied(_let_go(states, ubatch, placed), states.size)
    usable = jnp.where(left, 2, jnp.where(occupied(states.cell, states.size), 1, 0))
    order = jnp.argsort(usable, stable=True).astype(jnp.int32)
    turn = jnp.cumsum(new.reshape(-1)).reshape(new.shape) - 1
    cells = jnp.where(new, order[turn], nowhere(new))
    source = _source(states, ubatch)
    source = jnp.where(placed & (source < states.size), source, nowhere(source))
    fault = jnp.where(crowded[:, None] & ubatch.valid, Reason.MIXED_ROW, Reason.FITS)
    return StateSlots(source=source, cells=cells), fault


def fresh(states: States, ubatch: Ubatch) -> jax.Array:
    """Say whether a table is still as a ubatch found it when its cells were chosen; `[]` bool.

    It is not for a ubatch of another table, one applied twice or before its turn, or refused.
    """
    slots: StateSlots = ubatch.slots
    active = jnp.any(ubatch.valid, axis=1)
    new = active[:, None] & (_numbers(states, ubatch) > 0)
    chosen = slots.cells < states.size
    left = occupied(_let_go(states, ubatch, active), states.size)
    usable = ~left.at[slots.cells].get(mode="fill", fill_value=True)
    goes_on = jnp.minimum(slots.source, states.size) == _source(states, ubatch)
    here = present(ubatch, states.sequences)
    same = ~here | (reached(states, here) == ubatch.last)
    right = jnp.all(chosen == new) & jnp.all(usable | ~new) & jnp.all(goes_on | ~active)
    return right & jnp.all(same)


def fill(states: States, ubatch: Ubatch) -> States:
    """Take in the states that a ubatch will leave, where they were planned to go."""
    slots: StateSlots = ubatch.slots
    new = slots.cells < states.size
    placed = new[:, -1]
    steps = _steps(states, ubatch, placed)
    pair = jnp.arange(states.kept + 1)[None]
    shifted = jnp.minimum(pair + steps[:, None], states.kept)
    seq = jnp.where(new, ubatch.streams[:, None], states.sequences)

    def taken(old: jax.Array, value: jax.Array) -> jax.Array:
        old = jnp.take_along_axis(old, shifted, axis=1)
        return old.at[seq, pair].set(value, mode="drop")

    return replace(
        states,
        position=taken(states.position, _after(states, ubatch, ubatch.positions)),
        cell=taken(states.cell, slots.cells),
        stamp=states.stamp.at[slots.cells].set(_after(states, ubatch, ubatch.stamps), mode="drop"),
        done=states.done.at[:, slots.cells].set(False, mode="drop"),
    )


def settled(states: States, layer: int, ubatch: Ubatch) -> StateSlots:
    """Give the slots of a ubatch that the table really took in, so that no other row is touched.

    Returns:
      The cells to read, and those to write: nowhere for a ubatch that never entered the table, and
      those of a layer that were written already are not written again. Computed a second time, a
      ubatch finds the states that it went on from unless it has taken their cells itself.
    """
    slots: StateSlots = ubatch.slots
    stamp = _after(states, ubatch, ubatch.stamps)
    chosen = slots.cells < states.size
    lives = chosen & (states.stamp.at[slots.cells].get(mode="fill", fill_value=0) == stamp)
    done = states.done[layer].at[slots.cells].get(mode="fill", fill_value=False)
    taken = occupied(slots.cells, states.size).at[slots.source].get(mode="fill", fill_value=False)
    reads = lives[:, -1] & ~(done[:, -1] & taken)
    return StateSlots(
        source=jnp.where(reads, slots.source, nowhere(slots.source)),
        cells=jnp.where(lives & ~done, slots.cells, nowhere(slots.cells)),
    )


def finish(states: States, layer: int, cells: jax.Array) -> States:
    """Note that states were written into the rows of a layer; `cells` are those of `settled`."""
    done = states.done.at[layer, cells].set(True, mode="drop", unique_indices=True)
    return replace(states, done=done)


def unwritten(states: States, old: States) -> jax.Array:
    """Say whether every cell that an older table uses holds the same state still; `[]` bool."""
    return jnp.all((states.stamp == old.stamp) | ~occupied(old.cell, old.size))


def restored(states: States, old: States) -> States:
    """Give an older table back, remembering what was written since."""
    return replace(old, stamp=states.stamp, done=states.done)


def faults(states: States) -> dict[str, jax.Array]:
    """Count what breaks the invariants of a table, by name; `[]` int32 each."""
    held, celled = states.position != EMPTY, states.cell < states.size
    rises = states.position[:, 1:] > states.position[:, :-1]
    times = jax.vmap(lambda row: jnp.zeros((states.size,), jnp.int32).at[row].add(1, mode="drop"))
    wrong = {
        "position below -1": states.position < EMPTY,
        "position without a cell": held & ~celled,
        "cell without a position": celled & ~held,
        "cell before the first": states.cell < 0,
        "positions that do not rise": ~rises & held[:, :-1],
        "one cell twice": times(states.cell) > 1,
        "negative loss": states.lost < 0,
        "state of a lost past": (states.lost > 0) & held[:, -1],
    }
    if states.streams == 1:
        put = jnp.full((states.size,), EMPTY).at[states.cell].set(states.position, mode="drop")
        same = put.at[states.cell].get(mode="fill", fill_value=EMPTY) == states.position
        wrong["shared cell with two positions"] = held & celled & ~same
    return {name: jnp.sum(where, dtype=jnp.int32) for name, where in wrong.items()}


def tails(ubatch: Ubatch, count: int) -> jax.Array:
    """Number the last tokens of each row: how many its sequence has consumed after each of them.

    What `write_states` wants in the last E + 1 places of a row are the states after so many tokens;
    0 stands for the state that the row began with, and such an entry is not written.

    Args:
      ubatch: R rows of tokens; those that are not valid do not count.
      count: how many of the last tokens, static; E + 1 for `write_states`.

    Returns:
      `[R, count]` int32, n - count + 1 + i at place i of a row of n valid tokens, or 0 if that is
      negative.

    Examples:
      >>> memory = make_recurrent_cache(layers=1, states={"sum": ((), jnp.float32)}, sequences=2)
      >>> plan = init_batch(memory, make_batch([[1, 2, 3], [4]]))
      >>> [tails(ubatch, 2).tolist() for ubatch in plan.ubatches]
      [[[0, 1], [0, 1]], [[1, 2]]]
    """
    tokens = jnp.sum(ubatch.valid, axis=1, dtype=jnp.int32)
    return jnp.maximum(tokens[:, None] - count + 1 + jnp.arange(count, dtype=jnp.int32)[None], 0)


def _numbers(states: States, ubatch: Ubatch) -> jax.Array:
    return tails(ubatch, states.kept + 1)


def _after(states: States, ubatch: Ubatch, field: jax.Array) -> jax.Array:
    """Take a field of the tokens, `[R, T]`, that the states of a ubatch stand after."""
    turn = jnp.cumsum(ubatch.valid, axis=1, dtype=jnp.int32)
    before = turn[:, None] < _numbers(states, ubatch)[..., None]  # [R, E + 1, T]
    index = jnp.sum(before, axis=2, dtype=jnp.int32)
    return jnp.take_along_axis(field, jnp.minimum(index, field.shape[1] - 1), axis=1)


def _source(states: States, ubatch: Ubatch) -> jax.Array:
    """Find the cell that each row goes on from, `[R]`; N if its sequence has no state."""
    return states.cell[ubatch.streams, -1]


def _steps(states: States, ubatch: Ubatch, placed: jax.Array) -> jax.Array:
    """Count the new states of each sequence, `[Q]`, of the rows that are placed, `[R]` bool."""
    count = jnp.sum(_numbers(states, ubatch) > 0, axis=1, dtype=jnp.int32)
    seq = jnp.where(placed, ubatch.streams, states.sequences)
    return jnp.zeros((states.sequences,), jnp.int32).at[seq].set(count, mode="drop")


def _let_go(states: States, ubatch: Ubatch, placed: jax.Array) -> jax.Array:
    """Give the cells that stay in use when rows have left their new states; `[Q, E + 1]`."""
    stays = jnp.arange(states.kept + 1)[None] >= _steps(states, ubatch, placed)[:, None]
    return jnp.where(stays, states.cell, states.size)


def _with(states: States, stays: jax.Array) -> States:
    """Drop pairs that do not stay, and close up towards the current one."""
    stays = jnp.broadcast_to(stays, states.position.shape) & (states.position != EMPTY)
    order = jnp.argsort(stays, axis=1, stable=True)  # what is dropped comes first
    position = jnp.where(stays, states.position, EMPTY)
    cell = jnp.where(stays, states.cell, states.size)
    return replace(
        states,
        position=jnp.take_along_axis(position, order, axis=1),
        cell=jnp.take_along_axis(cell, order, axis=1),
    )
