"""Random verbs on attention memories and their oracles: the same tables, masks, keys and answers.

Memories with states have theirs in `test_recurrent_verbs.py`.

Every token signs its key and value with its sequence, position, number, layer and head (`sign`), so
a key in the wrong place, left over or lost is seen, and so is a wrong mask.
"""

import random
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.cases import mostly_nightly
from tests.memories import ALL_KINDS, CODES, GROUPS_STRIPES, LATENT, LOOKS, SMALL, Kind, Look
from tests.sets import nearly_right
from tests.twins import Twin

KINDS = [*ALL_KINDS, CODES, LATENT]

edges = st.integers(-1, 14)
ids = st.integers(0, 10**6)
looks = st.integers(0, 5)

FEW = [0, 1, 2, 31, 32, 39]
"""Sequences of many: those on both sides of the border between two words of owners."""


class Verbs(RuleBasedStateMachine):
    """The verbs, in any order. Sequence numbers are drawn large and taken modulo Q.

    counts: the tokens of a batch, few and many.
    moves: the runs of cells that a defrag moves at most, in part and as a whole.
    looks: how tokens look, of which one is drawn.
    sets: whether tokens are told that belong to several sequences.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        counts: tuple[int, int] = (1, 7),
        moves: tuple[int, int | None] = (2, None),
        looks: Sequence[Look] = LOOKS,
        sets: bool = False,
        in_rows: bool = False,
    ) -> None:
        super().__init__()
        self.counts, self.moves, self.looks, self.sets = counts, moves, looks, sets
        self.twin = Twin(kind, in_rows=in_rows)
        self.kept = None  # a plan that was made earlier and may be stale
        self.past = (self.twin.memory, self.twin.oracles.fork())

    def seq(self, number: int) -> int:
        return FEW[number % len(FEW)] % self.twin.kind.sequences

    def look(self, number: int) -> Look:
        return self.looks[number % len(self.looks)]

    @rule(many=st.booleans(), numbers=st.lists(ids, min_size=7, max_size=7), look=looks)
    def decode(self, many: bool, numbers: list[int], look: int) -> None:
        sequences = [*map(self.seq, numbers[: self.counts[many]])]
        self.twin.decode(sequences, look=self.look(look))

    @rule(
        numbers=st.lists(ids, min_size=7, max_size=7),
        slips=st.lists(st.sampled_from([0, 0, 0, 0, 0, -1, 1, -3, 4]), min_size=7, max_size=7),
        look=looks,
    )
    def decode_at(self, numbers: list[int], slips: list[int], look: int) -> None:
        """Positions that are right or nearly so."""
        sequences = [*map(self.seq, numbers)]
        positions: list[int] = []
        for i, (seq, slip) in enumerate(zip(sequences, slips, strict=True)):
            before = [p for s, p in zip(sequences[:i], positions, strict=True) if s == seq]
            positions.append((before[-1] if before else self.twin.oracles.reached(seq)) + 1 + slip)
        self.twin.decode(sequences, positions, self.look(look))

    @precondition(lambda self: self.sets)
    @rule(number=ids, seed=ids, later=st.booleans())
    def decode_sets(self, number: int, seed: int, later: bool) -> None:
        """Tokens of several sequences that agree so far, or nearly so; or a plan of them."""
        rng, stream = random.Random(seed), self.twin.oracles[0].stream
        few = {self.seq(i) for i in range(len(FEW))}
        beside = sorted(seq for seq in few if stream(seq) == stream(self.seq(number)))
        pool = rng.sample(beside, min(3, len(beside)))
        sets = nearly_right(self.twin, rng, pool, self.counts[1])
        if later:
            self.kept = self.twin.plan(sets)
        else:
            self.twin.decode(sets)

    @rule(many=st.booleans(), numbers=st.lists(ids, min_size=7, max_size=7))
    def plan(self, many: bool, numbers: list[int]) -> None:
        """Plan, and leave it for later."""
        self.kept = self.twin.plan([*map(self.seq, numbers[: self.counts[many]])])

    @precondition(lambda self: self.kept is not None)
    @rule(late=st.booleans(), look=looks)
    def try_kept_plan(self, late: bool, look: int) -> None:
        """Run an old plan, perhaps from its last ubatch: what is stale changes nothing."""
        plan, plans = self.kept
        if not plan.ok:
            return
        steps = [(u, [one.parts[i] for one in plans]) for i, u in enumerate(plan.ubatches)]
        for ubatch, parts in reversed(steps) if late else steps:
            of_sets = ubatch.others is not None  # these look no further than themselves
            self.twin.step(ubatch, parts, LOOKS[0] if of_sets else self.look(look))

    @rule(number=ids, p0=edges, p1=edges)
    def seq_rm(self, number: int, p0: int, p1: int) -> None:
        self.twin.seq_rm(self.seq(number), p0, p1)

    @rule(p0=edges, p1=edges)
    def seq_rm_of_all(self, p0: int, p1: int) -> None:
        self.twin.seq_rm(-1, p0, p1)

    @rule(src=ids, dsts=st.lists(ids, min_size=2, max_size=2), p0=edges, p1=edges)
    def seq_cp(self, src: int, dsts: list[int], p0: int, p1: int) -> None:
        self.twin.seq_cp(self.seq(src), [*map(self.seq, dsts)], p0, p1)

    @rule(
        parents=st.lists(ids, min_size=2, max_size=2), numbers=st.lists(ids, min_size=2, max_size=2)
    )
    def seq_select(self, parents: list[int], numbers: list[int]) -> None:
        pairs = {
            self.seq(number): self.seq(parent)
            for number, parent in zip(numbers, parents, strict=True)
        }
        self.twin.seq_select([*pairs.values()], [*pairs])

    @rule(number=ids)
    def seq_keep(self, number: int) -> None:
        self.twin.seq_keep(self.seq(number))

    @rule(number=ids, p0=edges, p1=edges, delta=st.integers(-5, 5))
    def seq_add(self, number: int, p0: int, p1: int, delta: int) -> None:
        self.twin.seq_add(self.seq(number), p0, p1, delta)

    @rule(number=ids, p0=edges, p1=edges, divisor=st.integers(1, 4))
    def seq_div(self, number: int, p0: int, p1: int, divisor: int) -> None:
        self.twin.seq_div(self.seq(number), p0, p1, divisor)

    @rule()
    def update(self) -> None:
        self.twin.update()

    @rule(whole=st.booleans())
    def defrag(self, whole: bool) -> None:
        self.twin.defrag(self.moves[whole])

    @rule()
    def clear(self) -> None:
        self.twin.clear()

    @rule()
    def remember(self) -> None:
        self.past = (self.twin.memory, self.twin.oracles.fork())

    @rule()
    def go_back(self) -> None:
        self.twin.go_back(self.past)

    @rule()
    def back_to_the_value(self) -> None:
        """An old memory is a value: it is still there, buffers and all."""
        memory, oracles = self.past
        self.twin.memory, self.twin.oracles = memory, oracles.fork()

    @invariant()
    def agree(self) -> None:
        self.twin.compare()


@pytest.mark.parametrize("kind", [SMALL, GROUPS_STRIPES], ids=lambda kind: kind.name)
def test_verbs(kind):
    """The fast part: few runs, the same every time, in few shapes, each of which is compiled."""
    run_state_machine_as_test(
        lambda: Verbs(kind, counts=(3, 7), moves=(2, 2), looks=LOOKS[:1], in_rows=kind.streams > 1),
        settings=settings(max_examples=5, stateful_step_count=20),
    )


@pytest.mark.core
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name",
    mostly_nightly(
        [kind.name for kind in KINDS],
        few=[
            "full-and-window",
            "groups-contiguous-full-and-window",
            "striped-split-full-and-window",
            "groups-tiled-full-and-window",
        ],
    ),
)
def test_verbs_at_length(name):
    """Many more of them: thousands of runs over all memories, in ubatches of 4."""
    (kind,) = (kind for kind in KINDS if kind.name == name)
    run_state_machine_as_test(
        lambda: Verbs(kind, sets=True),
        settings=settings(max_examples=100, stateful_step_count=20, derandomize=True),
    )
