"""The combined results of the oracles of a cache's parts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tests.helpers.batch_rules import Fault, Plan, Side, Token
from tests.helpers.reference_cache import Oracle


class Oracles(list[Side]):
    """The oracles of the parts of a cache, and their combined results."""

    def fork(self) -> "Oracles":
        return Oracles(oracle.fork() for oracle in self)

    def last(self, seq: int) -> int:
        """The largest position that all parts have."""
        return min(oracle.last(seq) for oracle in self)

    def first(self, seq: int) -> int:
        """The smallest position that all parts have; -1 if one is empty."""
        found = [oracle.first(seq) for oracle in self]
        return -1 if min(found) < 0 else max(found)

    def reached(self, seq: int) -> int:
        """The next position of a sequence minus 1."""
        return max(oracle.reached(seq) for oracle in self)

    def plan(self, tokens: Sequence[Token], *, ubatch_size: int | None) -> tuple[dict, list[Plan]]:
        """Plan in every part: all faults by priority, and the ubatches of the parts.

        If several ubatches free cells, sequences are added one by one, the smallest first, and stay
        if the batch of those that stay has cells.
        """
        faults, plans = self._plan(tokens, ubatch_size)
        counts_decide = all(one.window is None for one in self.cells())
        one_ubatch = len(self[0].cut([*tokens], ubatch_size)) == 1
        if all(plan.ok for plan in plans) or counts_decide or one_ubatch:
            return faults, plans
        asks = Counter(seq for token in tokens for seq in token.owners)
        fits, lacks = set(), set()
        for seq in sorted(set(asks) - set(faults), key=lambda seq: (asks[seq], seq)):
            _, again = self._plan(keep_sequences(tokens, {*fits, seq}), ubatch_size)
            (fits if all(plan.ok for plan in again) else lacks).add(seq)
        for seq in lacks:
            stream = self[0].stream(seq)
            taken = sum(asks[one] for one in fits if self[0].stream(one) == stream)
            left = min(len(one.usable(stream)) for one in self.cells()) - taken
            faults[seq] = Fault("OUT_OF_CELLS", asks[seq], max(left, 0))
        return faults, [replace(plan, faults=faults) for plan in plans]

    def cells(self) -> list[Oracle]:
        """The oracles of the attention parts."""
        return [oracle for oracle in self if isinstance(oracle, Oracle)]

    def _plan(self, tokens: Sequence[Token], ubatch_size: int | None) -> tuple[dict, list[Plan]]:
        options = dict(ubatch_size=ubatch_size, reached=self.reached)
        plans = [oracle.plan(tokens, **options) for oracle in self]
        # Each fault in this order is checked in all parts before the next one. A refused sequence
        # is not checked further, and then no sequence gets cells.
        of_order = "NOT_CONTIGUOUS POSITION_GAP DUPLICATE_POSITION DECREASING_POSITION DIVERGED"
        faults: dict[int, Fault] = {}
        for stage in (of_order.split(), ["SHIFT_PENDING"]):
            for seq, fault in (pair for plan in plans for pair in plan.faults.items()):
                if fault.reason in stage:
                    faults.setdefault(seq, fault)
        return faults, plans


def keep_sequences(tokens: Sequence[Token], kept: set[int]) -> list[Token]:
    """The tokens of some sequences, as of `Batch.keep_sequences`."""
    pairs = [(token, sorted(token.owners & kept)) for token in tokens]
    return [
        token._replace(sequence=owners[0], shared_with=tuple(owners[1:]))
        for token, owners in pairs
        if owners
    ]
