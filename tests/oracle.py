"""The rules of a cache in plain Python, for the real one to be compared with.

A cell is an entry of a dict and its owners are a set. Nothing here is packed, padded, cached or
clever, nothing is shared with `jaxkv` but the names, and no rule is derived from another where it
can be written down twice. Whoever doubts what a verb does reads it here.

One difference remains by necessity: the real cache is a value, and an `Oracle` changes in place.
`fork` copies it.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Token(NamedTuple):
    """A token of a batch."""

    sequence: int
    position: int | None  # None: one past the last of its sequence
    token: int


class Row(NamedTuple):
    """Who wrote the keys and values beside a cell. It outlives the cell's occupant."""

    sequence: int
    position: int  # that the key was rotated for
    token: int


class Fault(NamedTuple):
    """Why a sequence is refused, what was expected and what was found."""

    reason: str
    expected: int
    found: int


@dataclass
class Cell:
    """A cell that somebody lives in."""

    position: int
    owners: set[int]
    shift: int = 0  # the position now, less the position that its row was rotated for


@dataclass
class Part:
    """A ubatch: tokens with the cells chosen for them, and the last positions they follow."""

    tokens: list[tuple[int, Token]]
    last: dict[int, int]


@dataclass
class Plan:
    """An answer to a batch: the parts to compute in turn, or a fault for each refused sequence."""

    parts: list[Part] = field(default_factory=list)
    faults: dict[int, Fault] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every token has a place: all or nothing."""
        return not self.faults


class Move(NamedTuple):
    """A run of neighbouring cells that a defrag brings elsewhere."""

    source: int
    destination: int
    length: int


class Oracle:
    """One stream of `size` cells that sequences 0 to `sequences` - 1 share.

    cells: who lives where; a cell without an entry is free.
    rows: who wrote the row beside a cell last, whether anybody lives there still or not.
    written: how often that row was written, rotated or replaced.
    """

    def __init__(self, size: int, sequences: int, *, contiguous: bool = False) -> None:
        self.size = size
        self.sequences = sequences
        self.contiguous = contiguous
        self.cells: dict[int, Cell] = {}
        self.rows: dict[int, Row] = {}
        self.written: Counter[int] = Counter()

    def fork(self) -> "Oracle":
        """Copy it, as no change of a real memory ever needs to."""
        return copy.deepcopy(self)

    # ------------------------------------------------------------------------------- questions

    def holds(self, seq: int) -> dict[int, Cell]:
        """List the cells of a sequence."""
        return {index: cell for index, cell in self.cells.items() if seq in cell.owners}

    def first(self, seq: int) -> int:
        """The smallest position of a sequence, -1 if it holds nothing."""
        return min((cell.position for cell in self.holds(seq).values()), default=-1)

    def last(self, seq: int) -> int:
        """The largest position of a sequence, -1 if it holds nothing."""
        return max((cell.position for cell in self.holds(seq).values()), default=-1)

    def used(self) -> int:
        """How many cells somebody lives in; a shared one counts once."""
        return len(self.cells)

    def free(self) -> list[int]:
        """The cells that nobody lives in, the lowest first."""
        return [index for index in range(self.size) if index not in self.cells]

    def sees(self, seq: int, position: int) -> set[int]:
        """The cells that a token sees: its own sequence's, up to its own position."""
        return {i for i, cell in self.holds(seq).items() if cell.position <= position}

    # ----------------------------------------------------------------------------------- verbs

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        """Take a sequence (-1: every sequence) off its cells in a range; free what nobody owns."""
        for index, cell in list(self.cells.items()):
            if not _in_range(cell.position, p0, p1):
                continue
            if seq == -1:
                cell.owners.clear()
            else:
                cell.owners.discard(seq)
            if not cell.owners:
                del self.cells[index]

    def seq_cp(self, src: int, dsts: Iterable[int], p0: int = -1, p1: int = -1) -> None:
        """Let others own the cells of a sequence in a range, and keep what they have."""
        dsts = list(dsts)
        for cell in self.holds(src).values():
            if _in_range(cell.position, p0, p1):
                cell.owners.update(dsts)

    def seq_keep(self, seq: int) -> None:
        """Free every cell that a sequence does not own; the others are its alone."""
        self.cells = self.holds(seq)
        for cell in self.cells.values():
            cell.owners = {seq}

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move the cells of a sequence in a range, for all owners; none stands before 0."""
        for index, cell in self.holds(seq).items():
            if _in_range(cell.position, p0, p1):
                self._move(index, cell.position + delta)

    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        """Divide the positions of a sequence in a range, for all owners."""
        for index, cell in self.holds(seq).items():
            if _in_range(cell.position, p0, p1):
                self._move(index, cell.position // divisor)

    def clear(self) -> None:
        """Free every cell. The rows stay as they are."""
        self.cells.clear()

    def update(self) -> int:
        """Rotate every key that is owed it; how many there were."""
        owed = [index for index, cell in self.cells.items() if cell.shift]
        for index in owed:
            self.cells[index].shift = 0
        self.written.update(owed)
        return len(owed)

    def moves(self) -> list[Move]:
        """Plan to close all gaps with what lies behind them, in order; highest runs go first."""
        used = self.used()
        sources = [index for index in range(used, self.size) if index in self.cells]
        gaps = [index for index in range(used) if index not in self.cells]
        runs: list[Move] = []
        for source, gap in zip(sources, gaps, strict=True):
            if runs and (source, gap) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
                runs[-1] = runs[-1]._replace(length=runs[-1].length + 1)
            else:
                runs.append(Move(source, gap, 1))
        return runs[::-1]

    def defrag(self, moves: Iterable[Move]) -> None:
        """Carry cells and rows where they go. A row leaves its bytes behind."""
        for source, destination, length in moves:
            for i in range(length):
                self.cells[destination + i] = self.cells.pop(source + i)
                self.rows[destination + i] = self.rows[source + i]
                self.written[destination + i] += 1

    def can_return_to(self, past: "Oracle") -> bool:
        """Whether every row that somebody knew in the past is still the same."""
        return all(self.written[index] == past.written[index] for index in past.cells)

    def return_to(self, past: "Oracle") -> None:
        """Take a past table back, beside the rows of today."""
        self.cells = copy.deepcopy(past.cells)

    def _move(self, index: int, position: int) -> None:
        cell = self.cells[index]
        cell.shift += position - cell.position
        cell.position = position
        if position < 0:
            del self.cells[index]

    # ---------------------------------------------------------------------------------- batches

    def plan(self, batch: Sequence[Token], *, ubatch_size: int) -> Plan:
        """Check a batch, then find a cell for every token or for none.

        Faults of position come before a pending rotation, and that before room. A sequence at fault
        asks for no room. Of the others the smallest come first, and the lower id where two ask for
        the same.
        """
        batch = self._numbered(batch)
        faults = self._faults(batch)
        asks = Counter(token.sequence for token in batch if token.sequence not in faults)
        room = len(self.free())
        too_big = []
        for seq in sorted(asks, key=lambda seq: (asks[seq], seq)):
            # Behind one that did not fit no other can, since none is smaller.
            if asks[seq] <= room and not too_big:
                room -= asks[seq]
            else:
                too_big.append(seq)
        faults |= {seq: Fault("NO_ROOM", asks[seq], room) for seq in too_big}
        if faults:
            return Plan(faults=faults)

        last = {seq: self.last(seq) for seq in range(self.sequences)}
        free = self.free()
        plan = Plan()
        for start in range(0, len(batch), ubatch_size):
            tokens = batch[start : start + ubatch_size]
            slots = self._slots(free, len(tokens))
            if slots is None:
                for seq in {token.sequence for token in tokens}:
                    plan.faults[seq] = Fault("FRAGMENTED", asks[seq], room)
                continue
            free = [index for index in free if index not in slots]
            plan.parts.append(Part(list(zip(slots, tokens, strict=True)), dict(last)))
            for token in tokens:
                last[token.sequence] = token.position
        if plan.faults:
            plan.parts = []
        return plan

    def _slots(self, free: list[int], count: int) -> list[int] | None:
        """Choose among free cells: the lowest, or the lowest run of neighbours if need be."""
        if not self.contiguous:
            return free[:count]
        for start in range(self.size - count + 1):
            run = list(range(start, start + count))
            if set(run) <= set(free):
                return run
        return None

    def fits(self, part: Part) -> bool:
        """Whether the table is still as it was when the part was planned."""
        present = {token.sequence for _, token in part.tokens}
        return all(
            index < self.size and index not in self.cells for index, _ in part.tokens
        ) and all(self.last(seq) == part.last[seq] for seq in present)

    def apply(self, part: Part) -> bool:
        """Let the tokens of a part move in and write their rows, or change nothing."""
        if not self.fits(part):
            return False
        for index, token in part.tokens:
            self.cells[index] = Cell(position=token.position, owners={token.sequence})
            self.rows[index] = Row(token.sequence, token.position, token.token)
            self.written[index] += 1
        return True

    def _numbered(self, batch: Sequence[Token]) -> list[Token]:
        """Give each token without a position the one after the last of its sequence."""
        last = {seq: self.last(seq) for seq in range(self.sequences)}
        numbered = []
        for token in batch:
            if token.position is None:
                last[token.sequence] += 1
                token = token._replace(position=last[token.sequence])
            numbered.append(token)
        return numbered

    def _faults(self, batch: Sequence[Token]) -> dict[int, Fault]:
        """Find the first fault of each sequence: what comes next is one past what came before."""
        faults: dict[int, Fault] = {}
        before: dict[int, int] = {}
        for seq, position, _ in batch:
            if seq in faults:
                continue
            if seq in before:
                expected = before[seq] + 1
                if position == before[seq]:
                    faults[seq] = Fault("DUPLICATE", expected, position)
                elif position < before[seq]:
                    faults[seq] = Fault("DECREASING", expected, position)
                elif position > expected:
                    faults[seq] = Fault("GAP", expected, position)
            elif self.holds(seq):
                expected = self.last(seq) + 1
                if position != expected:
                    faults[seq] = Fault("NOT_NEXT", expected, position)
            elif position < 0:  # a sequence that is empty starts anywhere, but there is no before 0
                faults[seq] = Fault("NOT_NEXT", 0, position)
            before[seq] = position
        for seq in {token.sequence for token in batch} - set(faults):
            if any(cell.shift for cell in self.holds(seq).values()):
                faults[seq] = Fault("UPDATE_PENDING", 0, 0)
        return faults


def _in_range(position: int, p0: int, p1: int) -> bool:
    """Whether a position lies in [p0, p1), where a negative p1 means no end."""
    return p0 <= position and (p1 < 0 or position < p1)
