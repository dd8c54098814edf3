"""A recurrent memory's oracle, and a tiny model each of whose states names all tokens it has seen.

The oracle keeps no state: it remembers the tokens that came before, and computes again from those
what a state must be, bit for bit.
"""

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.recurrent.states import States
from tests import twins
from tests.memories import HEADS, SIZE, WIDTH, Kind, Oracles, attend_signed, parts_of, plan_rows
from tests.oracle import Oracle
from tests.rules import Part, Plan, Side, Token, in_range, numbered

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
            memory, _ = attend_signed(memory, layer, ubatch)
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
    number: int  # of all states that were ever made, so that a copy is told from what it is of


class Histories(Side):
    """What `sequences` sequences remember, the newest `kept` + 1 states of each.

    written: for each stream how often states were written there, by tokens or as copies.
    """

    in_rows = True

    def __init__(self, sequences: int, kept: int, *, streams: int = 1) -> None:
        self.size = kept + 1
        self.sequences, self.streams = sequences, streams
        self.states: dict[int, list[Kept]] = {seq: [] for seq in range(sequences)}
        self.dead_until = dict.fromkeys(self.states, 0)
        self.written: Counter[int] = Counter()
        self.made = 0

    def fork(self) -> "Histories":
        """Copy it; what is shared stays shared."""
        return copy.deepcopy(self)

    # ------------------------------------------------------------------------------- questions

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
        return len({state for states in self.states.values() for state in states})

    def can_resume(self, seq: int, pos: int) -> bool:
        """Whether a token at a position has a state to go on from, or needs none."""
        if pos == 0 or self.reached(seq) < 0:
            return pos >= 0
        return any(state.position == pos - 1 for state in self.states[seq])

    def holds(self, seq: int) -> list[Kept]:
        """The states of a sequence."""
        return self.states[seq]

    def is_pending(self, seq: int) -> bool:
        """Whether anything is left to be done for a move: never."""
        return False

    def is_lost(self, seq: int) -> bool:
        """Whether no state is left of a sequence that has tokens."""
        return self.dead_until[seq] > 0

    def seen_next(self, seq: int) -> tuple:
        """What the next token of a sequence goes on from, or can be cut back to."""
        return self.reached(seq), [(s.position, s.history) for s in self.states[seq]]

    def sharing(self, seq: int) -> set[int]:
        """The sequences that have a state of a sequence, itself among them."""
        mine = set(self.states[seq])
        return {seq} | {other for other, states in self.states.items() if mine & set(states)}

    def digest(self, stream: int) -> tuple:
        """All that a plan on a stream depends on, spelled out, to be compared."""
        mine = [seq for seq in self.states if self.stream(seq) == stream]
        states = [[(s.position, s.number) for s in self.states[seq]] for seq in mine]
        return states, [self.dead_until[seq] for seq in mine], self.written[stream]

    # ----------------------------------------------------------------------------------- verbs

    def _cut(self, seq: int, p0: int, p1: int) -> str:
        """What a range means to one sequence: nothing, the whole of it, a cut, or a refusal."""
        p0, end = max(p0, 0), self.reached(seq)
        if p0 > end or 0 <= p1 <= end:
            return "nothing"
        if p0 == 0:
            return "whole"
        stands = any(state.position == p0 - 1 for state in self.states[seq])
        return "cut" if stands else "refused"

    def _forget(self, *seqs: int) -> None:
        for seq in seqs:
            self.states[seq], self.dead_until[seq] = [], 0

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        """Forget a range of a sequence; -1 is every sequence, all or none."""
        asked = list(self.states) if seq == -1 else [seq]
        cuts = {one: self._cut(one, p0, p1) for one in asked}
        if "refused" in cuts.values():
            return False
        for one, what in cuts.items():
            if what == "whole":
                self._forget(one)
            if what == "cut":
                self.states[one] = [s for s in self.states[one] if s.position < p0]
        return True

    def seq_cp(self, src: int, dsts: Iterable[int], p0: int = -1, p1: int = -1) -> None:
        """Share the states of a sequence as it was at the end of a range.

        Targets in another stream get copies, which those of one stream share.
        """
        copies = self._copies()
        there = [p for p in range(self.reached(src) + 1) if in_range(p, p0, p1)]
        for dst in dsts:
            same_stream = self.stream(dst) == self.stream(src)
            if dst == src or (same_stream and not there):
                continue
            self._forget(dst)
            if not there:
                continue
            if any(state.position == there[-1] for state in self.states[src]):
                shared = [s for s in self.states[src] if s.position <= there[-1]]
                self.states[dst] = copies(dst, src, shared)
            else:
                self.dead_until[dst] = there[-1] + 1

    def seq_select(self, parents: Sequence[int], seqs: Sequence[int]) -> None:
        """Let sequences have the states of others, each those of its parent."""
        states, dead_until, copies = dict(self.states), dict(self.dead_until), self._copies()
        for parent, seq in zip(parents, seqs, strict=True):
            if parent != seq:
                self.states[seq] = copies(seq, parent, states[parent])
                self.dead_until[seq] = dead_until[parent]

    def _copies(self) -> Callable[[int, int, list[Kept]], list[Kept]]:
        """Make what gives states: shared in a stream, and copied once to each other stream."""
        made: dict[tuple[int, int], list[Kept]] = {}

        def given(seq: int, parent: int, states: list[Kept]) -> list[Kept]:
            stream = self.stream(seq)
            if stream == self.stream(parent):
                return list(states)
            if (stream, parent) not in made:
                made[stream, parent] = [self._new(s.position, s.history) for s in states]
                self.written[stream] += len(states)
            return list(made[stream, parent])

        return given

    def _new(self, position: int, history: tuple[int, ...]) -> Kept:
        self.made += 1
        return Kept(position, history, self.made)

    def seq_keep(self, seq: int) -> None:
        """Forget all others."""
        self._forget(*(other for other in self.states if other != seq))

    def clear(self) -> None:
        """Forget all."""
        self._forget(*self.states)

    def update(self) -> int:
        """Nothing is ever pending."""
        return 0

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move what stands in a range, for every sequence that shares it."""
        self._move(seq, p0, p1, lambda position: position + delta, drops=False)

    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        """Divide what stands in a range; what is not current cannot be returned to any more."""
        if divisor > 1:
            self._move(seq, p0, p1, lambda position: position // divisor, drops=True)

    def _move(self, seq: int, p0: int, p1: int, move: Callable[[int], int], *, drops: bool) -> None:
        """Move states, drop earlier ones if asked, and what has left the line.

        That is what stands before 0, or not before all that came later.
        """
        moved = [s for s in self.states[seq] if in_range(s.position, p0, p1)]
        start, end = max(p0, 0), self.dead_until[seq] - 1
        if in_range(end, start, p1):
            self.dead_until[seq] = max(0, move(end) + 1)
        for state in moved:
            state.position = move(state.position)
        for one, states in self.states.items():
            stays = [
                state
                for i, state in enumerate(states)
                if state.position >= 0
                and not any(0 <= later.position <= state.position for later in states[i + 1 :])
                and not (drops and state in moved and state is not states[-1])
            ]
            if states and states[-1].position < 0:  # the end is gone, from where the range begins
                stays = [state for state in stays if state.position < start]
                if not any(state.position == start - 1 for state in stays):
                    stays, self.dead_until[one] = [], start
            self.states[one] = stays

    def can_return_to(self, past: "Histories") -> bool | None:
        """Whether a past table can be taken back; None where cells would tell, which none has."""
        return True if self.written == past.written else None

    def return_to(self, past: "Histories") -> None:
        """Take a past table back, though what was written since stays written."""
        then = past.fork()
        self.states, self.dead_until = then.states, then.dead_until

    # ---------------------------------------------------------------------------------- batches

    def plan(
        self,
        batch: Sequence[Token],
        *,
        ubatch_size: int | None,
        reached: Callable[[int], int],
        lost: Collection[int],
    ) -> Plan:
        """Check a batch; there is always room."""
        batch = numbered(batch, reached)
        plan, after = Plan(faults=self.faults(batch, reached, lost)), self.fork()
        for tokens in self.cut(batch, ubatch_size) if plan.ok else []:
            plan.parts.append(Part([((0, 0), token) for token in tokens], after.digests(tokens)))
            after.apply(plan.parts[-1])
        return plan

    def apply(self, part: Part) -> bool:
        """Let sequences see the tokens of a part, or change nothing."""
        if not self.fits(part):
            return False
        for _, (seq, position, token, _) in part.tokens:
            states = self.states[seq]
            history = states[-1].history if states else ()
            new = self._new(position, (*history, token))
            self.states[seq] = [*states, new][-self.size :]
            self.written[self.stream(seq)] += 1
        return True


# -------------------------------------------------------------------------------------- together


@dataclass(frozen=True)
class StateKind(Kind):
    """A memory with states under test, alone or beside attention.

    model: the layers, see `compute`. Without attention the memory is no hybrid one.
    kept: how many states are kept beside the current one.
    """

    model: str = "rr"
    kept: int = 1

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """For each part, the layers that it serves."""
        served = (
            tuple(i for i, kind in enumerate(self.model) if kind in "ab"),
            tuple(i for i, kind in enumerate(self.model) if kind in "rb"),
        )
        return tuple(filter(None, served))

    def make(self, rope: Any = None) -> Any:
        """Make an empty one."""
        *attending, recurrent = self.layers
        states = make(self.kept, self.sequences, len(recurrent), self.streams)
        if not attending:
            return states
        attention = jaxkv.make_kv_cache(
            layers=len(*attending),
            cells=self.cells,
            kv_heads=HEADS,
            head_dim=SIZE,
            sequences=self.sequences,
            streams=self.streams,
            window=self.windows[0],
            rope=rope,
        )
        return jaxkv.make_hybrid_cache((attention, *attending), (states, recurrent))

    def oracles(self) -> Oracles:
        """Make the oracles of its parts."""
        histories = Histories(self.sequences, self.kept, streams=self.streams)
        if len(self.layers) == 1:
            return Oracles([histories])
        (attention,) = super().oracles()
        attention.in_rows = True
        return Oracles([attention, histories])


class Twin(twins.Twin):
    """A memory with states and its oracles, led through the same verbs, compared after each.

    All tokens of a batch go into one ubatch, `[Q, WIDTH]`, so that little is compiled; or in parts
    of 4, and then they must be of one sequence.
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
        sizes = dict(cells=cells, sequences=sequences, streams=streams, windows=(window,))
        super().__init__(StateKind("states", model=kinds, kept=kept, **sizes), in_rows=True)
        self.kinds, self.sequences = kinds, sequences

    def parts(self) -> list[Any]:
        """The recurrent table and buffers, and those of attention."""
        return [x for part in reversed(parts_of(self.memory)) for x in part]

    def compare_part(self, table: Any, buffers: Any, layers: Sequence[int], oracle: Any) -> None:
        """States agree, or cells and their contents."""
        if isinstance(oracle, Oracle):
            super().compare_part(table, buffers, layers, oracle)
            return
        expected = {
            seq: [(s.position, bytes_of(s.history, layers)) for s in states]
            for seq, states in oracle.states.items()
        }
        assert kept_of(table, buffers) == expected, jaxkv.show(self.memory)
        assert table.dead_until.tolist() == [*oracle.dead_until.values()], jaxkv.show(self.memory)

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        """Forget a range on both sides, or on neither, as is said before."""
        can = jaxkv.can_seq_rm(self.memory, seq, p0, p1).item()
        assert super().seq_rm(seq, p0, p1) == can
        return can

    def run(self, memory: Any, ubatch: jaxkv.Ubatch, look: Any = None) -> tuple[Any, ...]:
        """Run the model; what its tokens see of attention is not compared."""
        memory, _ = walk(memory, ubatch, self.kinds)
        return memory, [], []


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
