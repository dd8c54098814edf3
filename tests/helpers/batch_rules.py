"""The rules of batches in plain Python, common to the oracles of all kinds of caches."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Place = tuple[int, int]
"""A cell: its stream, and its index in it."""


class Token(NamedTuple):
    sequence: int  # of several, the lowest
    position: int | None  # None: one past the last of its sequence
    token: int
    shared_with: tuple[int, ...] = ()

    @property
    def owners(self) -> set[int]:
        return {self.sequence, *self.shared_with}


class Fault(NamedTuple):
    """Why a sequence is refused, with the expected and the actual number."""

    reason: str
    expected: int
    found: int


@dataclass
class Part:
    """A ubatch: tokens with their cells, and the earlier contents of their streams."""

    tokens: list[tuple[Place, Token]]
    found: dict[int, tuple]


@dataclass
class Plan:
    """The result for a batch: parts in order of computation, or faults of refused sequences."""

    parts: list[Part] = field(default_factory=list)
    faults: dict[int, Fault] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every token has a cell; none is placed otherwise."""
        return not self.faults


def number_tokens(batch: Iterable[Token], reached: Callable[[int], int]) -> list[Token]:
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
    """`sequences` sequences in `streams` streams, the same number in each.

    A subclass defines the cells that a sequence `holds`, its last position (`reached`), whether it
    `is_pending`, and as `stream_hash` all data of a stream that plans depend on.

    in_rows: whether each sequence of a ubatch has a separate row.
    """

    def stream(self, seq: int) -> int:
        return seq // (self.sequences // self.streams)

    def fits(self, part: Part) -> bool:
        """Whether the streams of a part are unchanged since it was planned."""
        return all(self.stream_hash(stream) == found for stream, found in part.found.items())

    def digests(self, tokens: Iterable[Token]) -> dict[int, tuple]:
        return {s: self.stream_hash(s) for s in {self.stream(token.sequence) for token in tokens}}

    def faults(self, batch: Sequence[Token], reached: Callable[[int], int]) -> dict[int, Fault]:
        """Find the first fault of each sequence: each position is the previous one plus 1.

        All sequences of a token have the same cells, and the same token before it. `reached`
        returns the last position of a sequence.
        """
        faults: dict[int, Fault] = {}
        before: dict[int, int] = {}
        previous: dict[int, Token] = {}
        claims = [(token, seq) for token in batch for seq in sorted(token.owners)]
        for token, seq in claims:
            lowest, position = token.sequence, token.position
            if seq == lowest:  # the token before it in each of its sequences
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
            elif position < 0:  # an empty sequence starts anywhere from 0 on
                faults[seq] = Fault("NOT_CONTIGUOUS", 0, position)
            before[seq] = position
        for seq in set().union(*(token.owners for token in batch)) - set(faults):
            if self.is_pending(seq):
                faults[seq] = Fault("SHIFT_PENDING", 0, 0)
        return faults

    def cut(self, batch: list[Token], size: int | None) -> list[list[Token]]:
        """Split a batch in its order; where sequences have rows, in equal parts of the sequences.

        Without a size it is one part, one sequence after another. A sequence waits if the token
        before its next one, in another sequence, is not computed.
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
    """The token of a batch that precedes another in its sequence."""
    before = batch[: batch.index(token)]
    return next((one for one in reversed(before) if token.sequence in one.owners), None)


def in_range(position: int, p0: int, p1: int) -> bool:
    """Whether a position is in [p0, p1), where a negative p1 means no end."""
    return p0 <= position and (p1 < 0 or position < p1)
