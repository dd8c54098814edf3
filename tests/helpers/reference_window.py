"""A window's cache without evictions, the reference for one with few cells."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.helpers.batch_rules import in_range


@dataclass(eq=False)
class Kept:
    """A token that is stored for some sequences."""

    position: int
    owners: set[int]
    content: Any


class Whole:
    """All tokens of `sequences` sequences in `streams` streams, evicted or not."""

    def __init__(self, sequences: int, streams: int) -> None:
        self.sequences_per_stream = sequences // streams
        self.tokens: list[Kept] = []

    def fork(self) -> "Whole":
        other = copy.copy(self)
        other.tokens = [Kept(one.position, {*one.owners}, one.content) for one in self.tokens]
        return other

    def of(self, seq: int) -> list[Kept]:
        return [token for token in self.tokens if seq in token.owners]

    def end(self, seq: int) -> int:
        """The last position of a sequence, -1 if it has none."""
        return max((token.position for token in self.of(seq)), default=-1)

    def seen(self, seq: int, low: int) -> list[tuple[int, Any]]:
        """The tokens from a position on."""
        return sorted((t.position, t.content) for t in self.of(seq) if t.position >= low)

    def append(self, owners: Iterable[int], position: int, content: Any) -> None:
        self.tokens.append(Kept(position, {*owners}, content))

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        """Remove a range of a sequence, of all if it is -1."""
        for token in self.tokens:
            if in_range(token.position, p0, p1):
                token.owners -= token.owners if seq == -1 else {seq}
        self.tokens = [token for token in self.tokens if token.owners]

    def seq_keep(self, seq: int) -> None:
        self.tokens = self.of(seq)
        for token in self.tokens:
            token.owners = {seq}

    def clear(self) -> None:
        self.tokens = []

    def seq_cp(self, src: int, dsts: Iterable[int], p0: int = -1, p1: int = -1) -> None:
        """Give sequences a range of another: shared in its stream, copied in others."""
        given = [token for token in self.of(src) if in_range(token.position, p0, p1)]
        self._give([(given, src, dst) for dst in dsts if dst != src])

    def seq_select(self, parents: Sequence[int], seqs: Sequence[int]) -> None:
        """Replace the tokens of sequences by those of their parents."""
        pairs = [pair for pair in zip(parents, seqs, strict=True) if pair[0] != pair[1]]
        given = [(self.of(parent), parent, seq) for parent, seq in pairs]
        for token in self.tokens:
            token.owners -= {seq for _, seq in pairs}
        self._give(given)

    def _give(self, given: list[tuple[list[Kept], int, int]]) -> None:
        """Give tokens of a sequence to another: the same objects in its stream, else copies."""
        heirs: dict[tuple[int, int], set[int]] = {}
        for tokens, src, dst in given:
            if dst // self.sequences_per_stream == src // self.sequences_per_stream:
                for token in tokens:
                    token.owners.add(dst)
            else:
                for token in self.of(dst):
                    token.owners.remove(dst)
                heirs.setdefault((src, dst // self.sequences_per_stream), set()).add(dst)
        for (src, _), owners in heirs.items():
            tokens = next(tokens for tokens, one, _ in given if one == src)
            for token in tokens:
                self.append(owners, token.position, token.content)
        self.tokens = [token for token in self.tokens if token.owners]

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move a range of a sequence, for all owners; negative positions are removed."""
        self._move(seq, p0, p1, lambda position: position + delta)

    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        self._move(seq, p0, p1, lambda position: position // divisor)

    def _move(self, seq: int, p0: int, p1: int, to: Callable[[int], int]) -> None:
        for token in self.of(seq):
            if in_range(token.position, p0, p1):
                token.position = to(token.position)
        self.tokens = [token for token in self.tokens if token.position >= 0]
