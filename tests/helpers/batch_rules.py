"""The rules of batches in plain Python, the same for the oracles of every kind of cache."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Place = tuple[int, int]
"""A cell: its stream, and its index there."""


class Token(NamedTuple):
    sequence: int  # of several, the lowest
    position: int | None  # None: one past the last of its sequence
    token: int
    shared_with: tuple[int, ...] = ()

    @property
    def owners(self) -> set[int]:
        return {self.sequence, *self.shared_with}


class Fault(NamedTuple):
    """Why a sequence is refused, what was expected and what was found."""

    reason: str
    expected: int
    found: int


@dataclass
class Part:
    """A ubatch: tokens with the cells chosen for them, and what their streams held just before."""

    tokens: list[tuple[Place, Token]]
    found: dict[int, tuple]


@dataclass
class Plan:
    """An answer to a batch: the parts to compute in turn, or a fault for each refused sequence."""

    parts: list[Part] = field(default_factory=list)
    faults: dict[int, Fault] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every token has a place: all or nothing."""
        return not self.faults


def numbered(batch: Iterable[Token], reached: Callable[[int], int]) -> list[Token]:
    """Give each token without a position the one after the last of its sequence."""
    last: dict[int, int] = {}
    tokens = []
    for token in batch:
        if token.position is None:
            for seq in token.owners:
                last[seq] = last.get(seq, reached(seq)) + 1
            token = token._replace(position=last[token.sequence])
        tokens.append(token)
    return tokens


class Side:
    """`sequences` sequences, dealt out in equal runs among `streams` streams.

    A kind of cache says what a sequence `holds`, where it goes on after (`reached`), whether it
    `is_pending`, and in the `stream_hash` of a stream all that plans depend on.

    in_rows: whether each sequence of a ubatch has a row of its own.
    """

    def stream(self, seq: int) -> int:
        return seq // (self.sequences // self.streams)

    def fits(self, part: Part) -> bool:
        """Whether the streams of a part are still as they were when it was planned."""
        return all(self.stream_hash(stream) == found for stream, found in part.found.items())

    def digests(self, tokens: Iterable[Token]) -> dict[int, tuple]:
        return {s: self.stream_hash(s) for s in {self.stream(token.sequence) for token in tokens}}

    def faults(self, batch: Sequence[Token], reached: Callable[[int], int]) -> dict[int, Fault]:
        """Find the first fault of each sequence: what comes next is one past what came before.

        And all sequences of a token hold the same cells, and had the same token before it.
        `reached` is where each sequence goes on after.
        """
        faults: dict[int, Fault] = {}
        before: dict[int, int] = {}
        previous: dict[int, Token] = {}
        claims = [(token, seq) for token in batch for seq in sorted(token.owners)]
        for token, seq in claims:
            lowest, position = token.sequence, token.position
            if seq == lowest:  # what each of its sequences had before it
                had = {one: previous.get(one) for one in token.owners}
                previous |= dict.fromkeys(token.owners, token)
            if seq in faults:
                continue
            begins = had[seq] is None and had[lowest] is None
            if had[seq] != had[lowest] or (begins and self.holds(seq) != self.holds(lowest)):
                faults[seq] = Fault("DIVERGED", lowest, position)
            elif seq in before:
                expected = before[seq] + 1
                if position == before[seq]:
                    faults[seq] = Fault("DUPLICATE_POSITION", expected, position)
                elif position < before[seq]:
                    faults[seq] = Fault("DECREASING_POSITION", expected, position)
                elif position > expected:
                    faults[seq] = Fault("POSITION_GAP", expected, position)
            elif reached(seq) >= 0:
                expected = reached(seq) + 1
                if position != expected:
                    faults[seq] = Fault("NOT_CONTIGUOUS", expected, position)
            elif position < 0:  # a sequence that is empty starts anywhere, but there is no before 0
                faults[seq] = Fault("NOT_CONTIGUOUS", 0, position)
            before[seq] = position
        for seq in set().union(*(token.owners for token in batch)) - set(faults):
            if self.is_pending(seq):
                faults[seq] = Fault("SHIFT_PENDING", 0, 0)
        return faults

    def cut(self, batch: list[Token], size: int | None) -> list[list[Token]]:
        """Cut a batch in its order; where sequences have rows, in equal parts of the sequences.

        Without a size all of it is one part, one sequence after another. A sequence whose next
        token follows one of another sequence that is not computed waits.
        """
        if size is None:
            return [sorted(batch, key=lambda token: token.sequence)]
        if not self.in_rows:
            return [batch[i : i + size] for i in range(0, len(batch), size)]
        left: dict[int, list[Token]] = {}
        for token in batch:
            left.setdefault(token.sequence, []).append(token)
        parts = []
        while left:
            first = {seq: batch.index(tokens[0]) for seq, tokens in left.items()}
            taking = sorted(left, key=first.__getitem__)[:size]
            while True:
                count = min(size // len(taking), *(len(left[seq]) for seq in taking))
                here = [token for seq in taking for token in left[seq][:count]]
                later = [token for tokens in left.values() for token in tokens if token not in here]
                waits = [seq for seq in taking if _followed(batch, left[seq][0]) in later]
                if not waits:
                    break
                taking = [seq for seq in taking if seq not in waits]
            parts.append(here)
            left = {seq: [t for t in tokens if t not in here] for seq, tokens in left.items()}
            left = {seq: tokens for seq, tokens in left.items() if tokens}
        return parts


def _followed(batch: list[Token], token: Token) -> Token | None:
    """The token of a batch that comes before another in its sequence."""
    before = batch[: batch.index(token)]
    return next((one for one in reversed(before) if token.sequence in one.owners), None)


def in_range(position: int, p0: int, p1: int) -> bool:
    """Whether a position lies in [p0, p1), where a negative p1 means no end."""
    return p0 <= position and (p1 < 0 or position < p1)
