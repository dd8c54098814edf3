"""A recurrent memory's oracle, and a tiny model each of whose states names all tokens it has seen.

The oracle keeps no state: it remembers the tokens that came before, and computes again from those
what a state must be, bit for bit.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.recurrent.states import States
from tests.memories import (
    HEADS,
    SIZE,
    WIDTH,
    assert_identical,
    cells_of,
    contents_of,
    plan_rows,
)
from tests.oracle import Oracle, Part, Token

STATES = {
    "hash": ((), jnp.uint32),
    "trace": jax.ShapeDtypeStruct((2,), jnp.float32),
}
"""What each layer remembers: a number that tells all orders of all tokens apart, and a float."""


# ------------------------------------------------------------------------------------- the model


def follow(state: dict[str, Any], token: Any, layer: int, xp: Any) -> dict[str, Any]:
    """Let a state see a token: exact in NumPy as in JAX."""
    number = token.astype(xp.uint32)
    x = token.astype(xp.float32)[..., None]
    return {
        "hash": state["hash"] * xp.uint32(31) + number + xp.uint32(1 + 1000 * layer),
        "trace": state["trace"] / 2 + xp.concatenate([x, -x], axis=-1),
    }


def replay(history: Sequence[int], layer: int) -> dict[str, np.ndarray]:
    """Compute the state that a history of tokens leaves, from nothing."""
    state = {"hash": np.zeros(1, np.uint32), "trace": np.zeros((1, 2), np.float32)}
    for token in history:
        state = follow(state, np.array([token]), layer, np)
    return {name: value[0] for name, value in state.items()}


def compute(memory: Any, ubatch: jaxkv.Ubatch, kinds: str = "rr") -> tuple[Any, list[dict]]:
    """Run every layer over a ubatch that was applied: `a` attends, `r` is recurrent, `b` is both.

    Returns:
      The memory, and for each recurrent layer the states after each token, `[R, T + 1, ...]`.
    """
    passed = []
    for layer, kind in enumerate(kinds):
        if kind in "ab":
            fields = (ubatch.sequences + 1, ubatch.positions, ubatch.tokens)
            labels = [0 * ubatch.tokens + layer * HEADS + h for h in range(HEADS)]
            k = jnp.stack([jnp.stack([*fields, label], -1) for label in labels], axis=-2)
            q = jnp.zeros((*ubatch.valid.shape, 2 * HEADS, SIZE))
            k = k.astype(jnp.float32)
            memory, _ = jaxkv.attend(memory, layer, ubatch, q, k, -k)
        if kind in "rb":
            before = jaxkv.read_states(memory, layer, ubatch)

            def step(state: dict, column: tuple, layer: int = layer) -> tuple[dict, dict]:
                token, valid = column
                after = follow(state, token, layer, jnp)
                mask = {"hash": valid, "trace": valid[:, None]}
                state = {n: jnp.where(mask[n], after[n], state[n]) for n in state}
                return state, state

            _, after = jax.lax.scan(step, before, (ubatch.tokens.T, ubatch.valid.T))
            states = {
                n: jnp.concatenate([before[n][:, None], jnp.moveaxis(after[n], 0, 1)], axis=1)
                for n in before
            }
            last = jaxkv.steps_to_keep(ubatch, jaxkv.rollback_of(memory, layer) + 1)
            written = {
                "hash": jnp.take_along_axis(states["hash"], last, axis=1),
                "trace": jnp.take_along_axis(states["trace"], last[..., None], axis=1),
            }
            memory = jaxkv.write_states(memory, layer, ubatch, written)
            passed.append(states)
    return memory, passed


@partial(jax.jit, static_argnames="kinds")
def walk(memory: Any, ubatch: jaxkv.Ubatch, kinds: str = "rr") -> tuple[Any, list[dict]]:
    """Apply a ubatch and run every layer over it."""
    return compute(jaxkv.apply(memory, ubatch), ubatch, kinds)


def run(memory: Any, batch: jaxkv.Batch, *, ubatch_size: int = 4, kinds: str = "rr") -> Any:
    """Plan a batch that fits and run it."""
    for ubatch in jaxkv.init_batch(memory, batch, ubatch_size=ubatch_size).check().ubatches:
        memory, _ = walk(memory, ubatch, kinds)
    return memory


def planned(memory: Any, *rows: Sequence[int]) -> jaxkv.Ubatch:
    """Plan tokens for sequences 0, 1, 2, at most WIDTH each, that fit; as one ubatch."""
    sequences = jaxkv.split(memory)[0].facts.sequences
    table = np.zeros((2, sequences, WIDTH), np.int32)
    for seq, row in enumerate(rows):
        table[:, seq, : len(row)] = row, [1] * len(row)
    (ubatch,) = plan_rows(memory, *table).check().ubatches
    return ubatch


def tell(memory: Any, *rows: Sequence[int], kinds: str = "rr") -> Any:
    """Run tokens for sequences 0, 1, 2, at most WIDTH each, that fit; all at once."""
    return walk(memory, planned(memory, *rows), kinds)[0]


def make(kept: int = 0, sequences: int = 3, layers: int = 2, streams: int = 1) -> Any:
    """Make a recurrent memory that fits the model."""
    return jaxkv.make_recurrent_cache(
        layers=layers, states=STATES, sequences=sequences, rollback=kept, streams=streams
    )


# -------------------------------------------------------------------------------------- reading


def kept_of(table: States, buffers: Any) -> dict[int, list[tuple[int, tuple[bytes, ...]]]]:
    """List what each sequence can go on from: positions, and the bytes of all layers' states."""
    position, cell = np.asarray(table.position), np.asarray(table.cell)
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(buffers)]
    return {
        seq: [
            (int(p), tuple(array[seq // table.sharing, c].tobytes() for array in arrays))
            for p, c in zip(position[seq], cell[seq], strict=True)
            if p >= 0
        ]
        for seq in range(table.sequences)
    }


def states_of(memory: Any, seq: int = 0) -> list[tuple[int, tuple[bytes, ...]]]:
    """List positions and bytes of what a sequence of a memory without attention keeps."""
    return kept_of(*jaxkv.split(memory))[seq]


def positions_of(memory: Any, seq: int = 0) -> list[int]:
    """List the positions that a sequence's states stand at."""
    table, _ = jaxkv.split(memory)
    return [p for p in np.asarray(table.position)[seq].tolist() if p >= 0]


def bytes_of(history: Sequence[int], layers: Iterable[int]) -> tuple[bytes, ...]:
    """The bytes that a history leaves in each layer, as `kept_of` lists them."""
    return tuple(
        leaf.tobytes() for layer in layers for leaf in jax.tree.leaves(replay(history, layer))
    )


# ------------------------------------------------------------------------------------ the oracle


@dataclass(eq=False)
class Kept:
    """A state, by the tokens it has seen. Sequences that share it share this very object."""

    position: int
    history: tuple[int, ...]


class Histories:
    """What `sequences` sequences remember, the newest `kept` + 1 states of each."""

    def __init__(self, sequences: int, kept: int, *, streams: int = 1) -> None:
        self.size = kept + 1
        self.sharing = sequences // streams
        self.states: dict[int, list[Kept]] = {seq: [] for seq in range(sequences)}
        self.dead_until = dict.fromkeys(self.states, 0)

    def fork(self) -> "Histories":
        """Copy it; what is shared stays shared."""
        return copy.deepcopy(self)

    def last(self, seq: int) -> int:
        """Where the current state stands."""
        return self.states[seq][-1].position if self.states[seq] else -1

    def first(self, seq: int) -> int:
        """Where the oldest state stands."""
        return self.states[seq][0].position if self.states[seq] else -1

    def reached(self, seq: int) -> int:
        """The last position of a sequence, though its states may be gone."""
        return max(self.last(seq), self.dead_until[seq] - 1)

    def used(self) -> int:
        """How many states there are, shared ones once."""
        return len({id(state) for states in self.states.values() for state in states})

    def can_resume(self, seq: int, pos: int) -> bool:
        """Whether a token at a position has a state to go on from, or needs none."""
        if pos == 0 or self.reached(seq) < 0:
            return pos >= 0
        return any(state.position == pos - 1 for state in self.states[seq])

    def _cut(self, seq: int, p0: int, p1: int) -> str:
        """What a range means to one sequence: nothing, the whole of it, a cut, or a refusal."""
        p0, end = max(p0, 0), self.reached(seq)
        if p0 > end or 0 <= p1 <= end:
            return "nothing"
        if p0 == 0:
            return "whole"
        stands = any(state.position == p0 - 1 for state in self.states[seq])
        return "cut" if stands else "refused"

    def can_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        """Whether a range can be forgotten; -1 is every sequence, all or none."""
        asked = list(self.states) if seq == -1 else [seq]
        return all(self._cut(one, p0, p1) != "refused" for one in asked)

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        """Forget a range if that can be done."""
        if not self.can_rm(seq, p0, p1):
            return False
        for one in list(self.states) if seq == -1 else [seq]:
            what = self._cut(one, p0, p1)
            if what == "whole":
                self.states[one], self.dead_until[one] = [], 0
            if what == "cut":
                self.states[one] = [s for s in self.states[one] if s.position < p0]
        return True

    def seq_cp(self, src: int, dsts: Iterable[int], p0: int = -1, p1: int = -1) -> None:
        """Share the states of a sequence as it was at the end of a range.

        Targets in another stream get copies, which those of one stream share.
        """
        copies = self._copies()
        there = [p for p in range(self.reached(src) + 1) if p0 <= p and (p1 < 0 or p < p1)]
        for dst in dsts:
            same_stream = dst // self.sharing == src // self.sharing
            if dst == src or (same_stream and not there):
                continue
            self.states[dst], self.dead_until[dst] = [], 0
            if not there:
                continue
            if any(state.position == there[-1] for state in self.states[src]):
                shared = [s for s in self.states[src] if s.position <= there[-1]]
                self.states[dst] = shared if same_stream else copies(dst, src, shared)
            else:
                self.dead_until[dst] = there[-1] + 1

    def seq_select(self, parents: Sequence[int], seqs: Sequence[int]) -> None:
        """Let sequences have the states of others, each those of its parent."""
        states, dead_until, copies = dict(self.states), dict(self.dead_until), self._copies()
        for parent, seq in zip(parents, seqs, strict=True):
            if parent != seq:
                given = states[parent]
                if parent // self.sharing != seq // self.sharing:
                    given = copies(seq, parent, given)
                self.states[seq] = list(given)
                self.dead_until[seq] = dead_until[parent]

    def _copies(self) -> Callable[[int, int, list[Kept]], list[Kept]]:
        """Make what copies states: once for all of a stream that get those of one sequence."""
        made: dict[tuple[int, int], list[Kept]] = {}

        def copied(seq: int, parent: int, states: list[Kept]) -> list[Kept]:
            key = seq // self.sharing, parent
            return list(made.setdefault(key, copy.deepcopy(states)))

        return copied

    def seq_keep(self, seq: int) -> None:
        """Forget all others."""
        for other in self.states:
            if other != seq:
                self.states[other], self.dead_until[other] = [], 0

    def clear(self) -> None:
        """Forget all."""
        for seq in self.states:
            self.states[seq], self.dead_until[seq] = [], 0

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move what stands in a range, for every sequence that shares it."""
        moved = [s for s in self.states[seq] if p0 <= s.position and (p1 < 0 or s.position < p1)]
        self._move_dead_end(seq, p0, p1, lambda position: position + delta)
        for state in moved:
            state.position += delta
        self._settle(max(p0, 0))

    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        """Divide what stands in a range; what is not current cannot be returned to any more."""
        if divisor == 1:
            return
        moved = [s for s in self.states[seq] if p0 <= s.position and (p1 < 0 or s.position < p1)]
        self._move_dead_end(seq, p0, p1, lambda position: position // divisor)
        for state in moved:
            state.position //= divisor
        drop = {
            other: [s for s in states[:-1] if s in moved] for other, states in self.states.items()
        }
        self._settle(max(p0, 0), drop)

    def _settle(self, start: int, drop: dict[int, list[Kept]] | None = None) -> None:
        """Drop what has left the line: before 0, or not before all that came later."""
        for seq, states in self.states.items():
            stays = [
                state
                for i, state in enumerate(states)
                if state.position >= 0
                and not any(0 <= later.position <= state.position for later in states[i + 1 :])
                and not (drop and state in drop[seq])
            ]
            if states and states[-1].position < 0:  # the end is gone, from where the range begins
                stays = [state for state in stays if state.position < start]
                if not any(state.position == start - 1 for state in stays):
                    stays, self.dead_until[seq] = [], start
            self.states[seq] = stays

    def _move_dead_end(self, seq: int, p0: int, p1: int, move: Any) -> None:
        end = self.dead_until[seq] - 1
        if end >= max(p0, 0) and (p1 < 0 or end < p1):
            self.dead_until[seq] = max(0, move(end) + 1)

    def decode(self, seq: int, tokens: Sequence[int], start: int | None = None) -> None:
        """Let a sequence see more tokens."""
        states = self.states[seq]
        history = states[-1].history if states else ()
        position = self.last(seq) + 1 if start is None else start
        new = []
        for i, token in enumerate(tokens):
            history = (*history, token)
            new.append(Kept(position + i, history))
        self.states[seq] = (states + new)[-self.size :]


# -------------------------------------------------------------------------------------- together


class Twin:
    """A memory and its oracles, led through the same verbs, compared after each.

    kinds: the model's layers, see `compute`. Without attention the memory is no hybrid one.
    """

    def __init__(
        self,
        kinds: str = "rr",
        *,
        sequences: int = 3,
        kept: int = 1,
        streams: int = 1,
        window: jaxkv.window.Window | None = None,
        cells: int = 16,
    ) -> None:
        self.kinds, self.sequences, self.kept = kinds, sequences, kept
        self.recurrent = tuple(i for i, kind in enumerate(kinds) if kind in "rb")
        self.attending = tuple(i for i, kind in enumerate(kinds) if kind in "ab")
        self.memory = make(kept, sequences, len(self.recurrent), streams)
        self.histories = Histories(sequences, kept, streams=streams)
        self.oracle = None
        if self.attending:
            attention = jaxkv.make_kv_cache(
                layers=len(self.attending),
                cells=cells,
                kv_heads=HEADS,
                head_dim=SIZE,
                sequences=sequences,
                streams=streams,
                window=window,
            )
            self.memory = jaxkv.make_hybrid_cache(
                (attention, self.attending), (self.memory, self.recurrent)
            )
            form = window and (window.rule, window.width)
            self.oracle = Oracle(cells, sequences, streams=streams, window=form)
        self.tokens = 0

    def fork(self) -> tuple:
        """Remember everything as it is now."""
        return self.memory, self.histories.fork(), self.oracle and self.oracle.fork()

    def return_to(self, past: tuple) -> None:
        """Take back what `fork` remembered."""
        self.memory, histories, oracle = past
        self.histories, self.oracle = histories.fork(), oracle and oracle.fork()

    def parts(self) -> tuple[Any, Any, Any, Any]:
        """The recurrent table and buffers, and those of attention."""
        table, buffers = jaxkv.split(self.memory)
        if not self.attending:
            return table, buffers, None, None
        return table.parts[1], buffers[1], table.parts[0], buffers[0]

    def compare(self) -> None:
        """States, cells, contents and answers agree for every sequence."""
        table, buffers, cells, attention = self.parts()
        drawn = jaxkv.show(self.memory)
        expected = {
            seq: [(s.position, bytes_of(s.history, self.recurrent)) for s in states]
            for seq, states in self.histories.states.items()
        }
        assert kept_of(table, buffers) == expected, drawn
        assert table.dead_until.tolist() == [*self.histories.dead_until.values()], drawn
        faults = jaxkv.check_invariants(self.memory)
        assert not any(map(int, faults.values())), faults
        ids = [*range(self.sequences)]
        firsts, lasts = [*map(self.histories.first, ids)], [*map(self.histories.last, ids)]
        used = [self.histories.used()]
        if self.oracle:
            places = {p: (c.position, c.owners, c.shift) for p, c in self.oracle.cells.items()}
            assert cells_of(cells) == places, drawn
            assert contents_of(attention, self.attending) == self.oracle.contents, drawn
            pairs = [(f, self.oracle.first(s)) for f, s in zip(firsts, ids, strict=True)]
            firsts = [max(pair) if min(pair) >= 0 else -1 for pair in pairs]
            lasts = [min(last, self.oracle.last(s)) for last, s in zip(lasts, ids, strict=True)]
            used = [self.oracle.used(), *used]
        assert jaxkv.seq_pos_min(self.memory, ids).tolist() == firsts
        assert jaxkv.seq_pos_max(self.memory, ids).tolist() == lasts
        parts = jaxkv.hybrid.parts_of(self.memory)
        assert [jaxkv.used(part).item() for part in parts] == used

    def plan(
        self, sequences: Sequence[int], *, in_parts: bool = False
    ) -> tuple[jaxkv.Plan, Sequence[Part | None]]:
        """Plan new tokens, each with its own number; they are refused where they should be.

        All go into one ubatch, `[Q, WIDTH]`, so that little is compiled; or in parts of 4, and then
        they must be of one sequence.
        """
        first = self.tokens + 1
        self.tokens += len(sequences)
        tokens = [Token(s, None, first + i) for i, s in enumerate(sorted(sequences))]
        if in_parts:
            numbers = [token.token for token in tokens]
            batch = jaxkv.make_batch(numbers, sequences=sorted(sequences))
            plan = jaxkv.init_batch(self.memory, batch, ubatch_size=4)
        else:
            table = np.zeros((2, self.sequences, WIDTH), np.int32)
            for token in tokens:
                row = table[:, token.sequence]
                row[:, np.flatnonzero(row[1] == 0)[0]] = token.token, 1
            plan = plan_rows(self.memory, *table)
        here, expected, ok = set(sequences), None, True
        astray = {seq for seq in here if self.histories.dead_until[seq]}
        if self.oracle:
            expected = self.oracle.plan(tokens, ubatch_size=4 if in_parts else None)
            reached = self.histories.reached
            astray |= {seq for seq in here if self.oracle.reached(seq) != reached(seq)}
            ok = expected.ok
        assert plan.ok.item() == (ok and not astray), jaxkv.show(self.memory)
        for seq in astray:
            reason = jaxkv.Reason(int(plan.reason[seq]))
            assert reason in (jaxkv.Reason.LOST, jaxkv.Reason.UPDATE_PENDING)
        return plan, expected.parts if expected else [None] * len(plan.ubatches)

    def step(self, ubatch: jaxkv.Ubatch, part: Part | None) -> bool:
        """Run a ubatch; both sides take it in, or it changes nothing."""
        before = self.memory
        self.memory, _ = walk(before, ubatch, self.kinds)
        tables = (jax.tree.leaves(jaxkv.split(memory)[0]) for memory in (before, self.memory))
        if all(map(np.array_equal, *tables)):
            assert_identical(self.memory, before)
            return False
        if part is not None:
            assert self.oracle.apply(part)
        valid = np.asarray(ubatch.valid)
        for row in range(len(valid)):
            if valid[row].any():
                tokens = np.asarray(ubatch.tokens)[row][valid[row]].tolist()
                self.histories.decode(int(ubatch.row_sequence[row]), tokens)
        return True

    def decode(self, sequences: Sequence[int], *, in_parts: bool = False) -> bool:
        """Plan new tokens and run them, refused or not."""
        plan, parts = self.plan(sequences, in_parts=in_parts)
        if plan.ok:
            for ubatch, part in zip(plan.ubatches, parts, strict=True):
                assert self.step(ubatch, part)
        else:
            before = self.memory
            for ubatch in plan.ubatches:
                self.memory, _ = walk(self.memory, ubatch, self.kinds)
            assert_identical(self.memory, before)
        return plan.ok.item()

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        """Forget a range on both sides, or on neither."""
        before = self.memory
        could = jaxkv.can_seq_rm(before, seq, p0, p1).item()
        self.memory, ok = jaxkv.seq_rm(before, seq, p0, p1)
        assert ok.item() == could == self.histories.seq_rm(seq, p0, p1)
        if not ok:
            assert_identical(self.memory, before)
        elif self.oracle:
            self.oracle.seq_rm(seq, p0, p1)
        return could

    def copied(self, verb: str, *args: Any) -> None:
        """Share or copy on all sides; where attention has no cells for it, on none."""
        before, can = self.memory, getattr(jaxkv, f"can_{verb}")(self.memory, *args).item()
        assert can == (not self.oracle or getattr(self.oracle, f"can_{verb}")(*args))
        if can:
            self.both(verb, *args)
            return
        with pytest.raises(ValueError, match="for a copy from another one"):
            getattr(jaxkv, verb)(before, *args)
        self.memory = jax.jit(getattr(jaxkv, verb))(before, *args)
        assert_identical(self.memory, before)

    def both(self, verb: str, *args: Any) -> None:
        """Do what a verb that is never refused says, on all sides."""
        self.memory = getattr(jaxkv, verb)(self.memory, *args)
        for side in (self.histories, self.oracle):
            if side:
                getattr(side, verb)(*args)

    def update(self) -> None:
        """Rotate what is pending."""
        self.memory = jaxkv.apply(self.memory, jaxkv.init_update(self.memory))
        if self.oracle:
            self.oracle.update()

    def go_back(self, past: tuple) -> bool:
        """Return to a past, if the memory finds that it can be done exactly."""
        memory, histories, oracle = past
        before = self.memory
        self.memory, ok = jaxkv.go_back(jaxkv.split(memory)[0], before)
        if not ok:
            assert_identical(self.memory, before)
            return False
        self.histories = histories.fork()
        if oracle:
            assert self.oracle.can_return_to(oracle)
            self.oracle.return_to(oracle)
        return True


def told(kept: int = 0, counts: Sequence[int] = (10,), **options: Any) -> Twin:
    """Make a twin whose sequences 0, 1, ... were told so many tokens."""
    twin = Twin(kept=kept, **options)
    counts = list(counts)
    while any(counts):
        now = [min(count, WIDTH) for count in counts]
        assert twin.decode([seq for seq, count in enumerate(now) for _ in range(count)])
        counts = [count - some for count, some in zip(counts, now, strict=True)]
    twin.compare()
    return twin


KINDS = {
    "recurrent": {"kinds": "rr"},
    "attention": {"kinds": "ar"},
    "window": {"kinds": "ra", "window": jaxkv.window.sliding(4)},
    "parallel": {"kinds": "ba"},
}
"""A recurrent memory alone, and beside attention: options of `Twin`."""

over_kinds = pytest.mark.parametrize(
    "kind",
    [kind if kind == "attention" else pytest.param(kind, marks=pytest.mark.core) for kind in KINDS],
)
