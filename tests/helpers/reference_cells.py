"""The cells of an attention cache in plain Python, and what sequences own and see of them."""

import copy
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from tests.helpers.batch_rules import Place, Side, Token, in_range


class Content(NamedTuple):
    """The token whose key and value are in a cell's buffers. It stays when the cell is freed."""

    sequence: int
    position: int  # that the key was rotated for
    token: int


@dataclass
class Cell:
    """A used cell."""

    position: int
    owners: set[int]
    shift: int = 0  # the position minus the one of its key's rotation


class CellOracle(Side):
    """`streams` streams of `size` cells, with the same number of sequences in each.

    order: the cells in the order of their use.
    tiles: the cells of each tile, if sequences may have separate tiles.
    cells: the used cells; others are free.
    contents: the buffers' contents of a cell, used or not.
    written: how often a cell was written, rotated or replaced.
    evicted_below: for each sequence, one past the highest position that may have been evicted.
      The cache sets it after edits; `whole` checks it.
    whole: where a window may evict cells, the same cache without evictions.
    """

    def __init__(
        self,
        size: int,
        sequences: int,
        streams: int = 1,
        placement: str = "any",
        window: tuple[str, int] | None = None,
    ) -> None:
        self.size, self.sequences, self.streams, self.window = size, sequences, streams, window
        self.order = order_in_stripes(size, shards=int(placement.partition(":")[2] or 1))
        if placement == "LastFit":
            self.order.reverse()
        self.tiles = make_tiles(size) if placement == "tiled" else []
        self.in_rows = streams > 1
        self.cells: dict[Place, Cell] = {}
        self.contents: dict[Place, Content] = {}
        self.written: Counter[Place] = Counter()
        self.evicted_below = dict.fromkeys(range(sequences), 0)
        self.whole = type(self)(1000, sequences, streams) if window else None

    def fork(self) -> Self:
        other = copy.copy(self)
        other.cells = {p: replace(cell, owners={*cell.owners}) for p, cell in self.cells.items()}
        other.contents, other.written = self.contents.copy(), self.written.copy()
        other.evicted_below, other.whole = {**self.evicted_below}, self.whole and self.whole.fork()
        return other

    def holds(self, seq: int) -> dict[Place, Cell]:
        return {place: cell for place, cell in self.cells.items() if seq in cell.owners}

    def held(self, seq: int, p0: int, p1: int) -> dict[Place, Cell]:
        """The cells of a sequence in a range."""
        return {p: one for p, one in self.holds(seq).items() if in_range(one.position, p0, p1)}

    def first(self, seq: int) -> int:
        """The smallest position of a sequence, -1 if it is empty."""
        return min((cell.position for cell in self.holds(seq).values()), default=-1)

    def last(self, seq: int) -> int:
        """The largest position of a sequence, -1 if it is empty."""
        return max((cell.position for cell in self.holds(seq).values()), default=-1)

    def reached(self, seq: int) -> int:
        """The largest position of a sequence, evicted or not."""
        return (self.whole or self).last(seq)

    def used(self) -> int:
        return len(self.cells)

    def is_pending(self, seq: int) -> bool:
        return any(cell.shift for cell in self.holds(seq).values())

    def is_whole(self, seq: int) -> bool:
        """Whether the next token of a sequence attends to all tokens of its window."""
        low = self.window_begins(self.reached(seq) + 1)
        return self.seen(seq, low) == (self.whole or self).seen(seq, low)

    def seen(self, seq: int, low: int) -> list[tuple[int, Content]]:
        """The tokens of a sequence from a position on."""
        held = self.holds(seq).items()
        return sorted((cell.position, self.contents[p]) for p, cell in held if cell.position >= low)

    def refusal(self, verb: str) -> str:
        """The reason of a refused edit."""
        return "OUT_OF_CELLS"

    def has_lost(self, stream: int) -> bool:
        """Whether a sequence of a stream lost a cell to evictions."""
        mine = [seq for seq in range(self.sequences) if self.stream(seq) == stream]
        return any(len((self.whole or self).holds(seq)) > len(self.holds(seq)) for seq in mine)

    def seen_next(self, seq: int) -> tuple:
        """The tokens that the next token of a sequence attends to, in any cells."""
        low = self.window_begins(self.reached(seq) + 1)
        return self.reached(seq), (self.whole or self).seen(seq, low)

    def sharing(self, seq: int) -> set[int]:
        """The sequences that own a cell of a sequence, itself included."""
        return {seq}.union(*(cell.owners for cell in self.holds(seq).values()))

    def free(self, stream: int) -> list[int]:
        """The free cells of a stream, in the order of their use."""
        return [index for index in self.order if (stream, index) not in self.cells]

    def window_begins(self, position: int) -> int:
        """The lowest position that a token at a position may attend to."""
        if self.window is None:
            return 0
        rule, size = self.window
        if rule == "chunked":
            while position % size:
                position -= 1
            return position
        return max(0, position - (size // 2 if rule == "symmetric" else size - 1))

    def window_ends(self, position: int) -> int | None:
        """The highest position that a token at a position may attend to; None without an end."""
        if self.window is None or self.window[0] != "symmetric":
            return None
        return position + self.window[1] // 2

    def sees(self, token: Token, ahead: int = 0) -> set[Place]:
        """The visible cells of a token: of its sequences, in its window, up to `ahead` after it."""
        low, end = self.window_begins(token.position), self.window_ends(token.position)
        return {
            place
            for place, cell in self.cells.items()
            if token.owners <= cell.owners
            and low <= cell.position <= token.position + ahead
            and (end is None or cell.position <= end)
        }

    def hidden(self, stream: int) -> list[int]:
        """The used cells of a stream hidden from its owners' next tokens, lowest position first."""
        unseen = []
        for (where, index), cell in self.cells.items():
            nexts = [self.window_begins(self.reached(seq) + 1) for seq in cell.owners]
            if where == stream and all(cell.position < low for low in nexts):
                unseen.append((cell.position, self.order.index(index), index))
        return [index for *_, index in sorted(unseen)]

    def usable(self, stream: int) -> list[int]:
        """Free and hidden cells, in the order of their use."""
        return self.free(stream) + self.hidden(stream)


def order_in_stripes(size: int, shards: int) -> list[int]:
    """Order cells in stripes: some of the first share, some of the next one, and so on."""
    share = size // shards
    return [n * share + i for stripe in make_tiles(share) for n in range(shards) for i in stripe]


def make_tiles(size: int) -> list[tuple[int, ...]]:
    """Cut cells into tiles, at least four if possible."""
    fits = (n for n in (64, 32, 16, 8, 4, 2, 1) if size % n == 0 and (4 * n <= size or n == 1))
    tile = next(fits)
    return [(*range(i, i + tile),) for i in range(0, size, tile)]
