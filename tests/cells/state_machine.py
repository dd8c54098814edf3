"""Random edits on a cache and its oracles, compared after each edit.

Each token's key and value encode its sequence, position, number, layer and head; each state names
all its tokens. The comparison detects misplaced, stale and lost entries and wrong masks. See
`tests.helpers.reference_caches` and `tests.helpers.edit_sequences`.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.helpers import edit_sequences, reference_caches
from tests.helpers.caches import Kind

edges = st.integers(-1, 9)
ids = st.integers(0, 10**6)
two = st.lists(ids, min_size=2, max_size=2)
seven = st.lists(ids, min_size=7, max_size=7)
aheads = st.sampled_from([None, 0, 3])

FEW = [0, 1, 2, 31, 32, 39]
"""Some of 40 sequences: those next to the border between two words of owners."""


def tree_of(rng: random.Random, pool: list[int], count: int) -> list[list[int]]:
    """Sets of a random tree: from one token of a sequence to the next they only shrink."""
    alive, sets = [set(pool)], []
    for _ in range(count):
        own = rng.choice(alive)
        sets.append(sorted(own, key=lambda _: rng.random()))
        if len(own) > 1 and rng.random() < 0.4:
            part = set(rng.sample(sorted(own), rng.randint(1, len(own) - 1)))
            alive.remove(own)
            alive += [part, own - part]
    return sets


def nearly_right(
    twin: reference_caches.Twin, rng: random.Random, pool: list[int], count: int
) -> list[list[int]]:
    """Sets of a random tree of sequences that own the same cells; some trees have an error."""
    seq = rng.choice(pool)
    held = {other: [one.holds(other) for one in twin.oracles] for other in pool}
    alike = [other for other in pool if held[other] == held[seq]]
    sets = tree_of(rng, alike, count)
    for _ in range(rng.choice([0, 0, 1, 3])):
        sets[rng.randrange(count)] = rng.sample(pool, rng.randint(1, min(3, len(pool))))
    return sets


class Machine(RuleBasedStateMachine):
    """The edits, in any order. Sequence numbers are drawn large and taken modulo Q.

    counts: the tokens of a batch, few and many.
    moves: the runs of cells that a defrag moves at most, partial and complete.
    looks_ahead: whether tokens may attend to later positions.
    sets: whether tokens may have several sequences.
    parts: whether tokens of a sequence are split into several ubatches, otherwise put into one.
    """

    def __init__(
        self,
        twin: reference_caches.Twin,
        *,
        counts: tuple[int, int] = (1, 7),
        moves: tuple[int, int | None] = (2, None),
        looks_ahead: bool = False,
        sets: bool = False,
        parts: bool = False,
    ) -> None:
        super().__init__()
        self.twin, self.counts, self.moves = twin, counts, moves
        self.looks_ahead, self.sets, self.parts = looks_ahead, sets, parts
        self.kept = None  # a plan that was made earlier and may be stale
        self.past = twin.fork()
        self.away = None  # an extracted cache of two sequences

    def seq(self, number: int) -> int:
        return FEW[number % len(FEW)] % self.twin.kind.sequences

    @contextmanager
    def only(self, *named: int) -> Iterator[None]:
        """Sequences that an edit does not name attend to the same cells before and after it."""
        others = {*map(self.seq, range(len(FEW)))} - {*named}

        def seen() -> list[Any]:
            return [[one.seen_next(seq) for seq in others] for one in self.twin.oracles]

        before = seen()
        yield
        assert seen() == before

    def sharing(self, seq: int) -> set[int]:
        return set().union(*(oracle.sharing(seq) for oracle in self.twin.oracles))

    @rule(many=st.booleans(), numbers=seven, ahead=aheads)
    def decode(self, many: bool, numbers: list[int], ahead: int | None) -> None:
        sequences = [*map(self.seq, numbers[: self.counts[many]])]
        with self.only(*sequences):
            self.twin.decode(sequences, ahead=ahead if self.looks_ahead else None)

    @initialize(numbers=seven)
    def begin(self, numbers: list[int]) -> None:
        self.decode(many=True, numbers=numbers, ahead=None)

    @rule(number=ids, many=st.booleans(), in_parts=st.booleans())
    def decode_one(self, number: int, many: bool, in_parts: bool) -> None:
        sequences = [self.seq(number)] * self.counts[many]
        with self.only(self.seq(number)):
            self.twin.decode(sequences, in_parts=True if in_parts and self.parts else None)

    @rule(
        numbers=seven,
        slips=st.lists(st.sampled_from([0, 0, 0, 0, 0, -1, 1, -3, 4]), min_size=7, max_size=7),
        ahead=aheads,
    )
    def decode_at(self, numbers: list[int], slips: list[int], ahead: int | None) -> None:
        """Decode at positions that are correct or off by a small number."""
        sequences = [*map(self.seq, numbers)]
        positions: list[int] = []
        for i, (seq, slip) in enumerate(zip(sequences, slips, strict=True)):
            before = [p for s, p in zip(sequences[:i], positions, strict=True) if s == seq]
            positions.append((before[-1] if before else self.twin.oracles.reached(seq)) + 1 + slip)
        with self.only(*sequences):
            self.twin.decode(sequences, positions, ahead if self.looks_ahead else None)

    @precondition(lambda self: self.sets)
    @rule(number=ids, seed=ids, later=st.booleans())
    def decode_sets(self, number: int, seed: int, later: bool) -> None:
        """Decode or plan tokens of several sequences that are equal so far, or nearly equal."""
        rng, stream = random.Random(seed), self.twin.oracles[0].stream
        few = {*map(self.seq, range(len(FEW)))}
        beside = sorted(seq for seq in few if stream(seq) == stream(self.seq(number)))
        pool = rng.sample(beside, min(3, len(beside)))
        sets = nearly_right(self.twin, rng, pool, self.counts[1])
        if later:
            self.kept = self.twin.plan(sets)
            return
        with self.only(*pool):
            self.twin.decode(sets)

    @rule(many=st.booleans(), numbers=seven, in_parts=st.booleans())
    def plan(self, many: bool, numbers: list[int], in_parts: bool) -> None:
        sequences = [*map(self.seq, numbers[: self.counts[many]])]
        if in_parts and self.parts:
            self.kept = self.twin.plan([sequences[0]] * 7, in_parts=True)
        else:
            self.kept = self.twin.plan(sequences)

    @precondition(lambda self: self.kept is not None)
    @rule(late=st.booleans(), ahead=aheads)
    def try_kept_plan(self, late: bool, ahead: int | None) -> None:
        """Run an old plan, perhaps from its last ubatch: stale ubatches change no cell."""
        plan, parts = self.kept
        steps = [*zip(plan.ubatches, parts, strict=True)] if plan.ok else []
        for ubatch, part in reversed(steps) if late else steps:
            of_sets = ubatch.shared_with is not None  # these tokens attend to no later position
            self.twin.step(ubatch, part, ahead if self.looks_ahead and not of_sets else None)

    @rule(number=ids, p0=edges, p1=edges)
    def seq_rm(self, number: int, p0: int, p1: int) -> None:
        with self.only(self.seq(number)):
            self.twin.seq_rm(self.seq(number), p0, p1)

    @rule(number=ids, back=st.integers(0, 5))
    def cut(self, number: int, back: int) -> None:
        start = max(self.twin.oracles.reached(self.seq(number)) + 1 - back, 0)
        self.seq_rm(number, start, -1)

    @rule(src=ids, dsts=two, p0=edges, p1=edges)
    def seq_cp(self, src: int, dsts: list[int], p0: int, p1: int) -> None:
        with self.only(*map(self.seq, dsts)):
            self.twin.seq_cp(self.seq(src), [*map(self.seq, dsts)], p0, p1)

    @rule(src=ids, dst=ids)
    def fork(self, src: int, dst: int) -> None:
        """Typical use of `seq_cp`: copy a whole sequence to a removed one."""
        if self.seq(src) != self.seq(dst):
            self.seq_rm(dst, 0, -1)
            self.seq_cp(src, [dst, dst], 0, -1)

    @rule(parents=two, numbers=two)
    def seq_select(self, parents: list[int], numbers: list[int]) -> None:
        pairs = dict(zip(map(self.seq, numbers), map(self.seq, parents), strict=True))
        with self.only(*pairs):
            self.twin.edit("seq_select", [*pairs.values()], [*pairs])

    @rule(parents=two, numbers=two, few=st.booleans(), earlier=st.booleans())
    def travel(self, parents: list[int], numbers: list[int], few: bool, earlier: bool) -> None:
        """Extract two sequences, and insert them, or two that were extracted earlier."""
        away, ok = self.twin.extract([*map(self.seq, parents)], cells=6 if few else 20)
        if ok and (self.away is None or not earlier):
            self.away = away
        one, other = map(self.seq, numbers)
        if self.away is not None and one != other:
            with self.only(one, other):
                self.twin.insert(self.away, [0, 1], [one, other])

    @rule(number=ids, p0=edges, p1=edges, by=st.integers(-5, 5), divides=st.booleans())
    def move(self, number: int, p0: int, p1: int, by: int, divides: bool) -> None:
        verb, by = ("seq_div", abs(by) or 2) if divides else ("seq_add", by)
        with self.only(*self.sharing(self.seq(number))):
            self.twin.edit(verb, self.seq(number), p0, p1, by)

    @rule(how=st.sampled_from(["range", "others", "all"]), number=ids, p0=edges, p1=edges)
    def forget(self, how: str, number: int, p0: int, p1: int) -> None:
        if how == "range":
            self.twin.seq_rm(-1, p0, p1)
        elif how == "others":
            assert self.twin.edit("seq_keep", self.seq(number))
        else:
            assert self.twin.edit("clear")

    @rule()
    def update(self) -> None:
        with self.only():
            self.twin.update()

    @rule(whole=st.booleans())
    def defrag(self, whole: bool) -> None:
        with self.only():
            self.twin.defrag(self.moves[whole])

    @rule()
    def remember(self) -> None:
        self.past = self.twin.fork()

    @rule()
    def rewind(self) -> None:
        self.twin.rewind(self.past)

    @rule()
    def back_to_the_value(self) -> None:
        """Return to an old cache, which is unchanged, buffers included."""
        self.twin.return_to(self.past)

    @invariant()
    def agree(self) -> None:
        self.twin.compare()


class AttentionMachine(Machine):
    """The machine of a cache with attention only."""

    def __init__(self, kind: Kind, *, in_rows: bool = False, **options: Any) -> None:
        twin = reference_caches.Twin(kind, in_rows=in_rows)
        super().__init__(twin, **{"looks_ahead": True} | options)


class StateMachine(Machine):
    """The machine of a cache with states, with the options of `edit_sequences.Twin`."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(edit_sequences.Twin(**options), parts=True)
