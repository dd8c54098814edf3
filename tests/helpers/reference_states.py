"""The rules of a recurrent cache in plain Python, compared with the real one.

The oracle stores no states, only the tokens before them.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.helpers.batch_rules import Part, Plan, Side, Token, in_range, number_tokens


@dataclass(eq=False)
class Kept:
    """A state, by its tokens. Sequences that share it share this object."""

    position: int
    begin: int  # no token of the history is at a lower position
    history: tuple[int, ...]
    number: int  # counts all states ever made in the stream, to distinguish copies


class Histories(Side):
    """The newest `kept` + 1 states of each of `sequences` sequences.

    written: for each stream how often states were written, by tokens or as copies.
    """

    in_rows = True

    def __init__(self, sequences: int, kept: int, *, streams: int = 1) -> None:
        self.size = kept + 1
        self.sequences, self.streams = sequences, streams
        self.states: dict[int, list[Kept]] = {seq: [] for seq in range(sequences)}
        self.written: Counter[int] = Counter()

    def fork(self) -> "Histories":
        return copy.deepcopy(self)

    def last(self, seq: int) -> int:
        return self.states[seq][-1].position if self.states[seq] else -1

    def first(self, seq: int) -> int:
        return self.states[seq][0].position if self.states[seq] else -1

    def begin(self, seq: int) -> float:
        """No token of a sequence is at a lower position."""
        return min((state.begin for state in self.states[seq]), default=math.inf)

    def reached(self, seq: int) -> int:
        return self.last(seq)

    def used(self) -> int:
        return len({state for states in self.states.values() for state in states})

    def can_resume(self, seq: int, pos: int) -> bool:
        """Whether a token at a position has a state before it, or needs none."""
        if 0 <= pos <= self.begin(seq):
            return True
        return pos > 0 and any(state.position == pos - 1 for state in self.states[seq])

    def holds(self, seq: int) -> list[Kept]:
        return self.states[seq]

    def is_pending(self, seq: int) -> bool:
        return False

    def is_whole(self, seq: int) -> bool:
        return True

    def refusal(self, verb: str) -> str:
        """The reason of a refused edit."""
        return "POSITION_OUT_OF_RANGE" if verb == "seq_add" else "STATE_NOT_STORED"

    def has_lost(self, stream: int) -> bool:
        return False

    def seen_next(self, seq: int) -> tuple:
        """The states that the next token of a sequence can continue."""
        return self.reached(seq), [(s.position, s.history) for s in self.states[seq]]

    def sharing(self, seq: int) -> set[int]:
        """The sequences that have a state of a sequence, itself included."""
        mine = set(self.states[seq])
        return {seq} | {other for other, states in self.states.items() if mine & set(states)}

    def stream_hash(self, stream: int) -> tuple:
        mine = [seq for seq in self.states if self.stream(seq) == stream]
        states = [[(s.position, s.number) for s in self.states[seq]] for seq in mine]
        return states, self.written[stream]

    def _cut(self, seq: int, p0: int, p1: int) -> str:
        """Classify a range of one sequence: nothing, whole, a cut, or refused."""
        first, end = max(p0, self.begin(seq)), self.reached(seq)
        if first > end or 0 <= p1 <= first:
            return "nothing"
        if 0 <= p1 <= end:
            return "refused"
        if p0 <= self.begin(seq):
            return "whole"
        stands = any(state.position == p0 - 1 for state in self.states[seq])
        return "cut" if stands else "refused"

    def _forget(self, *seqs: int) -> None:
        for seq in seqs:
            self.states[seq] = []

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove a range of a sequence; -1 is every sequence, all or none."""
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

    def seq_cp(self, src: int, dsts: Iterable[int], p0: int = -1, p1: int = -1) -> bool:
        """Share a sequence's states up to the end of a range, if a state is there.

        Targets in another stream get copies, which those of one stream share.
        """
        copies = self._copies()
        end = self.reached(src)
        there = [p for p in range(end + 1) if p >= self.begin(src) and in_range(p, p0, p1)]
        same = [dst for dst in dsts if self.stream(dst) == self.stream(src)]
        gets = [dst for dst in dsts if dst != src and (there or dst not in same)]
        shared = [s for s in self.states[src] if there and s.position <= there[-1]]
        if gets and there and (not shared or shared[-1].position != there[-1]):
            return False
        for dst in gets:
            self._forget(dst)
            self.states[dst] = copies(dst, shared) if dst not in same else list(shared)
        return True

    def seq_select(self, parents: Sequence[int], seqs: Sequence[int]) -> None:
        """Replace the states of sequences by those of their parents."""
        states, copies = dict(self.states), self._copies()
        for parent, seq in zip(parents, seqs, strict=True):
            same = self.stream(parent) == self.stream(seq)
            self.states[seq] = list(states[parent]) if same else copies(seq, states[parent])

    def insert(self, source: "Histories", parents: Sequence[int], seqs: Sequence[int]) -> None:
        """Replace sequences by copies of the newest states of sequences of another cache."""
        copies = self._copies()
        for parent, seq in zip(parents, seqs, strict=True):
            self.states[seq] = copies(seq, source.states[parent][-self.size :])

    def _copies(self) -> Callable[[int, list[Kept]], list[Kept]]:
        """Return a function that gives copies of states; a stream gets each state once."""
        made: dict[tuple[int, Kept], Kept] = {}

        def given(seq: int, states: list[Kept]) -> list[Kept]:
            stream = self.stream(seq)
            for state in states:
                if (stream, state) not in made:
                    new = self._new(stream, state.position, state.begin, state.history)
                    made[stream, state] = new
            return [made[stream, state] for state in states]

        return given

    def _new(self, stream: int, position: int, begin: int, history: tuple[int, ...]) -> Kept:
        self.written[stream] += 1
        return Kept(position, begin, history, self.written[stream])

    def seq_keep(self, seq: int) -> None:
        self._forget(*(other for other in self.states if other != seq))

    def clear(self) -> None:
        self._forget(*self.states)

    def update(self) -> int:
        return 0

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> bool:
        """Move states in a range, for every sequence that shares them; none below 0."""
        p0 = max(p0, 0)
        low = max(p0, self.begin(seq))
        if low <= self.last(seq) and in_range(low, p0, p1) and low + delta < 0:
            return False
        self._move(seq, p0, p1, lambda position: position + delta, drops=False)
        return True

    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        """Divide positions in a range; older states cannot be restored any longer."""
        if divisor > 1:
            self._move(seq, p0, p1, lambda position: position // divisor, drops=True)

    def _move(self, seq: int, p0: int, p1: int, move: Callable[[int], int], *, drops: bool) -> None:
        """Move states, drop earlier ones if asked, and those not before all later ones."""
        moved = [s for s in self.states[seq] if in_range(s.position, p0, p1)]
        for state in self.states[seq]:
            places = range(state.begin, state.position + 1)  # a gap counts as tokens
            state.begin = min(move(p) if in_range(p, p0, p1) else p for p in places)
        for state in moved:
            state.position = move(state.position)
        for one, states in self.states.items():
            self.states[one] = [
                state
                for i, state in enumerate(states)
                if not any(later.position <= state.position for later in states[i + 1 :])
                and not (drops and state in moved and state is not states[-1])
            ]

    def can_return_to(self, past: "Histories") -> bool | None:
        """Whether a past table can be restored; None if it depends on cells, which it has not."""
        return True if self.written == past.written else None

    def return_to(self, past: "Histories") -> None:
        """Restore a past table; `written` keeps its counts."""
        self.states = past.fork().states

    def plan(self, batch: Sequence[Token], *, ubatch_size: int | None, **known: Any) -> Plan:
        """Check a batch; cells never run out. `known` goes to `Side.faults`."""
        batch = number_tokens(batch, known["reached"])
        plan, after = Plan(faults=self.faults(batch, **known)), self.fork()
        for tokens in self.cut(batch, ubatch_size) if plan.ok else []:
            plan.parts.append(Part([((0, 0), token) for token in tokens], after.digests(tokens)))
            after.apply(plan.parts[-1])
        return plan

    def apply(self, part: Part) -> bool:
        """Add the tokens of a part to sequences, unless it is stale."""
        if not self.fits(part):
            return False
        for _, (seq, position, token, _) in part.tokens:
            states = self.states[seq]
            history = states[-1].history if states else ()
            begin = states[-1].begin if states else position
            new = self._new(self.stream(seq), position, begin, (*history, token))
            self.states[seq] = [*states, new][-self.size :]
        return True
