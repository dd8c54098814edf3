"""The rules of an attention cache in plain Python, compared with the real one.

A cell is an entry of a dict, its owners are a set, and only names are shared with `jaxkv`. An
`Oracle` changes in place, where the real cache is a value; `fork` copies it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tests.helpers import batch_rules
from tests.helpers.batch_rules import Fault, Part, Place, Plan, Token, in_range
from tests.helpers.reference_cells import Cell, CellOracle, Content


class Move(NamedTuple):
    """A run of neighbouring cells that a defrag moves."""

    source: int
    destination: int
    length: int


class Oracle(CellOracle):
    """The edits and batches of an attention cache, on its cells."""

    def can_resume(self, seq: int, pos: int) -> bool:
        """Whether a sequence can continue at a position once all from it on is removed."""
        cut = self.fork()
        cut.seq_rm(seq, max(pos, 0))
        return pos >= 0 and cut.reached(seq) in (-1, pos - 1) and cut.is_whole(seq)

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        """Remove a sequence (-1: every one) from its cells in a range; free cells without owner."""
        self._remove(seq, p0, p1)
        if self.whole:
            self.whole._remove(seq, p0, p1)

    def _remove(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        for place, cell in list(self.cells.items()):
            if not in_range(cell.position, p0, p1):
                continue
            cell.owners -= cell.owners if seq == -1 else {seq}
            if not cell.owners:
                del self.cells[place]

    def seq_cp(self, src: int, dsts: Iterable[int], p0: int = -1, p1: int = -1) -> bool:
        """Add owners to the cells of a sequence in a range.

        Targets in other streams get copies only. False, without a change, if cells for these are
        missing.
        """
        return self._give([(src, dst) for dst in dsts], p0, p1, keeps=True)

    def seq_select(self, parents: Sequence[int], seqs: Sequence[int]) -> bool:
        """Replace the cells of sequences by those of their parents.

        False, without a change, if cells for copies between streams are missing.
        """
        return self._give([*zip(parents, seqs, strict=True)], 0, -1, keeps=False)

    def _give(self, pairs: list[tuple[int, int]], p0: int, p1: int, *, keeps: bool) -> bool:
        """Give a range of each parent to its sequence, which keeps its cells or loses them."""
        pairs = [(parent, seq) for parent, seq in pairs if parent != seq]
        before = self.fork()
        if self.whole:
            self.whole._give(pairs, p0, p1, keeps=keeps)
        if self.streams == self.sequences:
            self._give_streams(before, pairs, p0, p1)
            return True
        apart = [(p, seq) for p, seq in pairs if self.stream(p) != self.stream(seq)]
        for parent, seq in pairs:
            if (parent, seq) in apart:
                continue
            if not keeps:
                self._remove(seq)
            for place, cell in before.held(parent, p0, p1).items():
                again = Cell(cell.position, set(), cell.shift)
                self.cells.setdefault(place, again).owners.add(seq)
        return self._copy_apart(before, apart, p0, p1)

    def insert(self, source: "Oracle", parents: Sequence[int], seqs: Sequence[int]) -> bool:
        """Replace sequences by copies of sequences of another cache, with their evictions.

        False, without a change, if cells are missing.
        """
        before, pairs = self.fork(), [*zip(parents, seqs, strict=True)]
        if self.whole:
            self.whole.insert(source.whole, parents, seqs)
        self.evicted_below |= {seq: source.evicted_below[parent] for parent, seq in pairs}
        if self._copy(source, pairs, 0, -1):
            return True
        self.cells, self.whole = before.cells, before.whole
        self.evicted_below = before.evicted_below
        return False

    def _copy_apart(self, before: "Oracle", pairs: list[tuple[int, int]], p0: int, p1: int) -> bool:
        """Replace sequences by copies of their parents' cells, or undo all.

        Copied cells are not reused, although they may be free.
        """
        kept = {place for parent, _ in pairs for place in before.held(parent, p0, p1)}
        if self._copy(before, pairs, p0, p1, kept):
            return True
        self.cells, self.whole = before.cells, before.whole
        return False

    def _copy(
        self,
        source: "Oracle",
        pairs: list[tuple[int, int]],
        p0: int,
        p1: int,
        kept: Iterable[Place] = (),
    ) -> bool:
        """Replace sequences by copies of their parents' cells; False if cells are missing.

        A stream gets each cell once, for all its targets. Cells in `kept` are not overwritten.
        """
        for _, seq in pairs:
            self._remove(seq)
        heirs: dict[tuple[int, Place], set[int]] = {}
        for parent, seq in pairs:
            for place in source.held(parent, p0, p1):
                heirs.setdefault((self.stream(seq), place), set()).add(seq)
        arrivals = []
        for stream in {self.stream(seq) for _, seq in pairs}:
            # The cells of one stream after those of another, in the order of the parents.
            order = [source.stream(parent) for parent, seq in pairs if self.stream(seq) == stream]
            wanted = sorted(
                (place for where, place in heirs if where == stream),
                key=lambda place, order=order: (order.index(place[0]), place[1]),
            )
            usable = [index for index in self.usable(stream) if (stream, index) not in kept]
            if len(wanted) > len(usable):
                return False
            found = zip(self._whole_first(stream, usable), wanted, strict=False)
            arrivals += [((stream, i), place, heirs[stream, place]) for i, place in found]
        origins = {place: (source.cells[place], source.contents) for _, place, _ in arrivals}
        for place, _, _ in arrivals:
            if place in self.cells:
                self._evict(place)
        for place, origin, owners in arrivals:
            cell, contents = origins[origin]
            self.cells[place] = Cell(cell.position, owners, cell.shift)
            if origin in contents:
                self.contents[place] = contents[origin]
            self.written[place] += 1
        return True

    def _whole_first(self, stream: int, usable: list[int]) -> list[int]:
        """Usable cells, first those of completely usable tiles; hidden ones last."""
        whole = [index for tile in self.tiles if set(tile) <= set(usable) for index in tile]
        order = [*whole, *(index for tile in self.tiles for index in tile if index not in whole)]

        def rank(index: int) -> tuple[int, int]:
            cell = self.cells.get((stream, index))
            return (cell.position if cell else -1, order.index(index))

        return sorted(usable, key=rank) if self.tiles else usable

    def _give_streams(
        self, before: "Oracle", pairs: list[tuple[int, int]], p0: int, p1: int
    ) -> None:
        """Replace streams of one sequence each; contents keep their index, free cells too."""
        given = {parent: before.held(parent, p0, p1) for parent, _ in pairs}
        for parent, seq in pairs:
            self._remove(seq)
            for (_, index), cell in given[parent].items():
                self.cells[seq, index] = Cell(cell.position, {seq}, cell.shift)
            for index in range(self.size) if any(given.values()) else ():
                self.written[seq, index] += 1
                self.contents.pop((seq, index), None)
                if (parent, index) in before.contents:
                    self.contents[seq, index] = before.contents[parent, index]

    def seq_keep(self, seq: int) -> None:
        """Free every cell that a sequence does not own; it becomes the only owner of the others."""
        self.cells = self.holds(seq)
        for cell in self.cells.values():
            cell.owners = {seq}
        if self.whole:
            self.whole.seq_keep(seq)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Add to positions of a sequence in a range, for all owners; negative ones are freed."""
        self._move_range(seq, p0, p1, lambda position: position + delta)
        if self.whole:
            self.whole.seq_add(seq, p0, p1, delta)

    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        self._move_range(seq, p0, p1, lambda position: position // divisor)
        if self.whole:
            self.whole.seq_div(seq, p0, p1, divisor)

    def clear(self) -> None:
        self.cells.clear()
        if self.whole:
            self.whole.clear()

    def update(self) -> int:
        """Rotate every key with a pending shift; return their number."""
        pending = [place for place, cell in self.cells.items() if cell.shift]
        for place in pending:
            self.cells[place].shift = 0
        self.written.update(pending)
        return len(pending)

    def moves(self, stream: int = 0, most: int | None = None) -> list[Move]:
        """Plan to fill all gaps with later cells, in order; the last runs go first.

        Return the first `most`; with tiles, complete tiles until there are `most` moves.
        """
        free = self.free(stream)
        if not self.tiles:
            used = self.size - len(free)
            sources = [index for index in self.order[used:] if index not in free]
            gaps = [index for index in self.order[:used] if index in free]
            return _runs([*zip(sources, gaps, strict=True)])[::-1][:most]
        begun = [tile for tile in self.tiles if not set(tile) <= set(free)]
        last = [tile for tile in self.tiles[len(begun) :] if tile in begun]
        empty = [tile for tile in self.tiles[: len(begun)] if tile not in begun]
        moves: list[Move] = []
        for one, other in [*zip(last, empty, strict=True)][::-1]:
            if most is None or len(moves) < most:
                pairs = [pair for pair in zip(one, other, strict=True) if pair[0] not in free]
                moves += _runs(pairs)[::-1]
        return moves

    def defrag(self, moves: Iterable[Move], stream: int = 0) -> None:
        """Move cells and contents. The buffers keep the old bytes too."""
        for source, destination, length in moves:
            for i in range(length):
                there, here = (stream, destination + i), (stream, source + i)
                self.cells[there] = self.cells.pop(here)
                self.contents[there] = self.contents[here]
                self.written[there] += 1

    def can_return_to(self, past: "Oracle") -> bool:
        """Whether the buffers are unchanged for the used cells of the past."""
        return all(self.written[place] == past.written[place] for place in past.cells)

    def return_to(self, past: "Oracle") -> None:
        """Restore a past table with the current buffers."""
        past = past.fork()
        self.cells, self.whole, self.evicted_below = past.cells, past.whole, past.evicted_below

    def _move_range(self, seq: int, p0: int, p1: int, to: Callable[[int], int]) -> None:
        for place, cell in self.held(seq, p0, p1).items():
            cell.shift += to(cell.position) - cell.position
            cell.position = to(cell.position)
            if cell.position < 0:
                del self.cells[place]

    # ---------------------------------------------------------------------------------- batches

    def plan(
        self, batch: Sequence[Token], *, ubatch_size: int | None, reached: Callable[[int], int]
    ) -> Plan:
        """Check a batch, then find a cell for every token or for none.

        Faults of position precede a pending rotation, and that precedes a lack of cells. A sequence
        with a fault needs no cells. Of the others the smallest are first, then the lower id. Those
        that share a token are one group. If one of several ubatches lacks cells, all sequences have
        its fault. See `Side.faults` and `Side.cut` for the options.
        """
        batch = batch_rules.number_tokens(batch, reached)
        faults = self.faults(batch, reached)
        groups = self._groups(batch, faults)
        asks = Counter(
            next(seq for seq, group in groups.items() if token.owners & group)
            for token in batch
            if token.owners - set(faults)
        )
        cut = self.cut(batch, ubatch_size)
        room = {stream: len(self.usable(stream)) for stream in range(self.streams)}
        lacks = {}
        for seq in sorted(asks, key=lambda seq: (asks[seq], seq)):
            stream = self.stream(seq)
            if len(cut) > 1 and self.window is not None:  # only the ubatches show it
                continue
            # After one that did not fit no other of its stream fits, since none is smaller.
            if asks[seq] > room[stream] or stream in lacks.values():
                lacks[seq] = stream
            else:
                room[stream] -= asks[seq]
        for seq, stream in lacks.items():
            faults |= dict.fromkeys(groups[seq], Fault("OUT_OF_CELLS", asks[seq], room[stream]))
        if faults:
            return Plan(faults=faults)

        after, plan = self.fork(), Plan()
        for tokens in cut:
            slots = after._slots(tokens)
            if len(slots) < len(tokens):
                assert len(cut) > 1
                everyone = set().union(*(token.owners for token in batch))
                return Plan(faults=dict.fromkeys(everyone, Fault("OUT_OF_CELLS", 0, 0)))
            part = Part([*zip(slots, tokens, strict=True)], after.digests(tokens))
            plan.parts.append(part)
            assert after.apply(part)
        return plan

    def _groups(self, batch: Sequence[Token], faults: Iterable[int]) -> dict[int, set[int]]:
        """The sequences of a batch that share a token, or single ones, by the lowest of them."""
        groups: list[set[int]] = []
        for token in batch:
            mine = token.owners - set(faults)
            joined = [group for group in groups if group & mine]
            groups = [group for group in groups if not group & mine]
            groups += [mine.union(*joined)] if mine else []
        return {min(group): group for group in groups}

    def _slots(self, tokens: list[Token]) -> list[Place]:
        """The cells of the tokens that get one, in their order."""
        slots = {}
        for stream in {self.stream(token.sequence) for token in tokens}:
            mine = [token for token in tokens if self.stream(token.sequence) == stream]
            if self.streams > 1:  # row by row
                mine.sort(key=lambda token: token.sequence)
            found = self.usable(stream)
            if self.tiles:
                mine.sort(key=lambda token: token.sequence)
                found = self._in_tiles(stream, mine)
            slots |= {token: (stream, i) for token, i in zip(mine, found, strict=False)}
        return [slots[token] for token in tokens if token in slots]

    def _in_tiles(self, stream: int, tokens: list[Token]) -> list[int]:
        """Cells for tokens in the order of their sequences, as many as there are.

        First each sequence gets free cells of tiles that only it owns, and of tiles without an
        owner; then those without a cell get the rest.
        """
        free, hidden = self.free(stream), self.hidden(stream)
        owners = {
            tile: set().union(*(self.cells[stream, i].owners for i in tile if i not in free))
            for tile in self.tiles
        }
        empty = [tile for tile in self.tiles if set(tile) <= set(free)]
        found: dict[Token, int] = {}
        for seq in sorted({token.sequence for token in tokens}):
            mine = [tile for tile in self.tiles if owners[tile] == {seq}]
            room = [index for tile in mine for index in tile if index in free]
            for token in [token for token in tokens if token.sequence == seq]:
                if not room and empty:
                    room = [*empty.pop(0)]
                if room:
                    found[token] = room.pop(0)
        others = [token for token in tokens if token not in found]
        left = [index for index in free if index not in found.values()] + hidden
        found |= zip(others, left, strict=False)
        return [found[token] for token in tokens if token in found]

    def stream_hash(self, stream: int) -> tuple:
        cells = {
            index: (cell.position, sorted(cell.owners), cell.shift, self.contents[where, index])
            for (where, index), cell in self.cells.items()
            if where == stream
        }
        written = {i: n for (where, i), n in self.written.items() if where == stream and n}
        marks = {s: mark for s, mark in self.evicted_below.items() if self.stream(s) == stream}
        return cells, written, marks

    def apply(self, part: Part) -> bool:
        """Put the tokens of a part into cells and buffers, unless it is stale."""
        if not self.fits(part):
            return False
        for place, _ in part.tokens:
            if place in self.cells:
                self._evict(place)
        for place, token in part.tokens:
            self._write(place, token)
            if self.whole:
                self.whole._write((place[0], self.whole.free(place[0])[0]), token)
        return True

    def _write(self, place: Place, token: Token) -> None:
        self.cells[place] = Cell(position=token.position, owners=set(token.owners))
        self.contents[place] = Content(token.sequence, token.position, token.token)
        self.written[place] += 1

    def _evict(self, place: Place) -> None:
        """Evict a hidden cell, and all earlier cells of its owners."""
        taken = self.cells[place]
        for seq in list(taken.owners):
            self.evicted_below[seq] = max(self.evicted_below[seq], taken.position + 1)
            self._remove(seq, 0, self.evicted_below[seq])


def _runs(pairs: list[tuple[int, int]]) -> list[Move]:
    """Join pairs of source and destination into runs of neighbours."""
    runs: list[Move] = []
    for source, gap in pairs:
        if runs and (source, gap) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = runs[-1]._replace(length=runs[-1].length + 1)
        else:
            runs.append(Move(source, gap, 1))
    return runs
