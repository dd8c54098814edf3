"""A cache and its oracles, changed by the same edits and compared."""

import copy
import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

import jaxkv
from tests.helpers import caches
from tests.helpers.batch_rules import Fault, Part, Token, number_tokens
from tests.helpers.caches import HEADS, Kind, Oracles, assert_identical, cells_of, edit, plan_rows
from tests.helpers.reference_cache import Oracle
from tests.helpers.steps import apply_plan


class Twin:
    """A cache and the oracles of its parts, changed by the same edits, compared after each.

    in_rows: a batch is planned as one ubatch, with a row of WIDTH tokens for each sequence, which
      is one shape for any batch; otherwise it is split into ubatches of 4.
    """

    is_rewound = False

    def __init__(self, kind: Kind, *, in_rows: bool = False) -> None:
        self.kind = kind
        self.in_rows = in_rows
        self.cache = kind.make(rope=None)
        self.oracles = kind.oracles()
        self.tokens = 0  # tokens made so far, to number them

    def fork(self) -> tuple[Any, Oracles]:
        return self.cache, self.oracles.fork()

    def return_to(self, past: tuple[Any, Oracles]) -> None:
        """Restore the result of `fork`, buffers included."""
        cache, oracles = past
        self.cache, self.oracles = cache, oracles.fork()

    def compare(self) -> None:
        """Compare tables, contents and results, for every cell and every sequence."""
        for one in zip(self.cache.parts, self.kind.layers, self.oracles, strict=True):
            self.compare_part(*one)
        faults = self.cache.check()
        assert not any(map(int, faults.values())), faults
        ids = [*range(self.kind.sequences)]
        used = [part.num_used_cells().item() for part in self.cache.parts]
        assert used == [oracle.used() for oracle in self.oracles]
        assert self.cache.num_used_cells().item() == sum(used)
        assert self.cache.seq_pos_min(ids).tolist() == [*map(self.oracles.first, ids)]
        assert self.cache.seq_pos_max(ids).tolist() == [*map(self.oracles.last, ids)]

    def compare_part(self, part: Any, layers: Sequence[int], oracle: Any) -> None:
        """Compare cells, evictions and contents of an attention part."""
        expected = {p: (c.position, c.owners, c.shift) for p, c in oracle.cells.items()}
        assert cells_of(part.table) == expected, jaxkv.show(self.cache)
        marks = [*oracle.evicted_below.values()]
        assert part.table.evicted_below.tolist() == marks, jaxkv.show(self.cache)
        assert caches.contents_of(part.buffers, layers) == oracle.contents, jaxkv.show(self.cache)

    def plan(
        self, sequences: Sequence[Any], positions: Any = None, *, in_parts: bool | None = None
    ) -> tuple[jaxkv.Plan, list[list[Part]]]:
        """Plan new tokens, of a sequence or several each, on both sides; the results are equal.

        `in_parts` selects ubatches of 4, by default as `in_rows` says. Returns the plan, and for
        each of its ubatches the parts of the oracles.
        """
        in_parts = not self.in_rows if in_parts is None else in_parts
        tokens = self.batch(sequences, positions)
        if in_parts:
            numbers = [token.token for token in tokens]
            batch = jaxkv.make_batch(numbers, sequences=sequences, positions=positions)
            split_by = "equal" if self.kind.streams > 1 else None  # as llama.cpp
            plan = jaxkv.init_batch(self.cache, batch, ubatch_size=4, split_by=split_by)
        else:
            plan = plan_rows(self.cache, *self.rows(number_tokens(tokens, self.oracles.reached)))
        expected, plans = self.oracles.plan(tokens, ubatch_size=4 if in_parts else None)
        answers = np.stack([plan.reason, plan.expected, plan.actual], axis=1).tolist()
        faults = {
            seq: Fault(jaxkv.Reason(reason).name, wanted, found)
            for seq, (reason, wanted, found) in enumerate(answers)
            if reason != jaxkv.Reason.OK
        }
        assert np.flatnonzero(~np.asarray(plan.fits)).tolist() == sorted(faults)
        assert plan.ok.item() == all(one.ok for one in plans), jaxkv.show(self.cache)
        if len(plans) == 1:
            assert faults == plans[0].faults
        else:  # several parts may lack cells; which sequences are named is open
            assert expected.items() <= faults.items()
            assert set(faults) >= set.intersection(*(set(one.faults) for one in plans))
        if not plan.ok:
            return plan, []
        return plan, [[one.parts[i] for one in plans] for i in range(len(plan.ubatches))]

    def batch(self, sequences: Sequence[Any], positions: Sequence[int] | None) -> list[Token]:
        """Make new tokens for an oracle; in place of a sequence there may be several."""
        first, self.tokens = self.tokens + 1, self.tokens + len(sequences)
        places = [None] * len(sequences) if positions is None else positions
        most = 100 if self.kind.dtype == "int8" else self.tokens  # distinct after rounding
        numbers = [1 + (number - 1) % most for number in range(first, self.tokens + 1)]
        sets = [sorted(np.atleast_1d(one).tolist()) for one in sequences]
        return [
            Token(first, place, number, tuple(others))
            for (first, *others), place, number in zip(sets, places, numbers, strict=True)
        ]

    def rows(self, tokens: Sequence[Token]) -> np.ndarray:
        """Arrange numbers, presence and positions of tokens in rows, `[3, Q, WIDTH]`."""
        table = np.zeros((3, self.kind.sequences, caches.WIDTH), np.int32)
        for token in tokens:
            row = table[:, token.sequence]
            row[:, np.count_nonzero(row[1])] = token.token, 1, token.position
        return table

    def decode(
        self, sequences: Sequence[Any], positions: Any = None, ahead: Any = None, **how: Any
    ) -> bool:
        """Plan new tokens and run them on both sides, if both have cells.

        Each attends up to `ahead` positions after it, as `visible_until`; None omits that.
        """
        plan, parts = self.plan(sequences, positions, **how)
        if plan.ok:
            for ubatch, part in zip(plan.ubatches, parts, strict=True):
                assert self.step(ubatch, part, ahead)
        else:  # a refused plan has no effect, even if computed
            cache = self.cache
            for ubatch in plan.ubatches:
                cache, *_ = self.run(cache, ubatch)
            assert_identical(cache, self.cache)
        return plan.ok.item()

    def step(self, ubatch: jaxkv.Ubatch, parts: Sequence[Part], ahead: int | None = None) -> bool:
        """Run one ubatch on both sides; a stale one leaves both unchanged."""
        before = self.cache
        self.cache, masks, saw = self.run(before, ubatch, ahead)
        pairs = [*zip(self.oracles, parts, strict=True)]
        is_current = all(oracle.fits(part) for oracle, part in pairs)
        if self.is_rewound:  # a plan of an equal cache with another history is stale
            is_current = is_current and bool(before.is_current(ubatch))
        if not is_current:
            assert_identical(self.cache, before)
            return False
        for oracle, part in pairs:
            assert oracle.apply(part)
        for pair, mask, layers in zip(pairs, masks, self.kind.layers, strict=False):
            seen = {layer: np.asarray(saw[layer]) for layer in layers}
            self.compare_seen(ubatch, *pair, np.asarray(mask), seen, ahead or 0)
        return True

    def run(self, cache: Any, ubatch: jaxkv.Ubatch, ahead: int | None = None) -> tuple[Any, ...]:
        """Run a model: the cache, the masks of parts, and the outputs of each layer."""
        return caches.sign(cache, ubatch, None if ahead is None else ubatch.positions + ahead)

    def compare_seen(
        self, ubatch: Any, oracle: Oracle, part: Part, mask: Any, saw: dict[int, Any], ahead: int
    ) -> None:
        """Compare the masks of a ubatch's tokens in a part, and their outputs."""
        streams, valid = np.asarray(ubatch.row_stream), np.asarray(ubatch.valid)
        numbers, owner = np.asarray(ubatch.tokens), {t.token: t for _, t in part.tokens}
        within = 0.5 if self.kind.dtype == "int8" else 0.0  # the rounding error
        for r, t in np.ndindex(*valid.shape):
            cells = {(int(streams[r]), int(i)) for i in np.flatnonzero(mask[r, t])}
            if not valid[r, t]:
                assert not cells
                assert not any(seen[r, t].any() for seen in saw.values())
                continue
            token = owner.pop(int(numbers[r, t]))
            assert cells == oracle.sees(token, ahead)
            last = max(one.position for _, one in part.tokens if one.sequence == token.sequence)
            end = oracle.window_ends(token.position)
            reach = token.position + ahead
            if last < (reach if end is None else min(reach, end)):  # attends to missing tokens
                assert all(np.isnan(seen[r, t]).all() for seen in saw.values())
                continue
            for layer, seen in saw.items():
                mean = np.mean([oracle.contents[cell] for cell in cells], axis=0) + [1, 0, 0]
                keys = [[*mean, layer * HEADS + head // 2] for head in range(2 * HEADS)]
                wanted = self.kind.value(np.array(keys))
                np.testing.assert_allclose(seen[r, t], wanted, rtol=1e-5, atol=within)
        assert not owner

    def after(self, verb: str, *args: Any) -> tuple[Oracles | None, set[str]]:
        """The oracles after an edit, None if one refuses; and the reasons for a refusal.

        The oracles of the twin do not change.
        """
        after = self.oracles.fork()
        refused = [oracle for oracle in after if getattr(oracle, verb)(*args) is False]
        reasons = {oracle.refusal(verb) for oracle in refused}
        if any(any(map(one.has_lost, range(one.streams))) for one in self.oracles):
            reasons.add("CONTEXT_EVICTED")
        if refused:
            return None, reasons
        ids = range(self.kind.sequences)
        if any(len({oracle.reached(seq) for oracle in after}) > 1 for seq in ids):
            reasons.add("PARTS_DIFFER")
        return after, reasons

    def edit(self, verb: str, *args: Any) -> bool:
        """Edit both sides, or neither if the cache refuses it for a reason."""
        before, (after, reasons) = self.cache, self.after(verb, *args)
        result = edit(verb, before, *args)
        self.cache, ok = result
        if not ok:
            assert_identical(self.cache, before)
            name = jaxkv.Reason(result.reason).name
            assert name in reasons, (verb, args, name, reasons, jaxkv.show(before))
            return False
        assert after is not None, (verb, args, jaxkv.show(before))
        self.granted(after)
        return True

    def granted(self, after: Oracles) -> None:
        """Continue with other oracles, and the marks of the cache."""
        self.oracles = after
        for part, oracle in zip(self.cache.parts, after, strict=True):
            if isinstance(oracle, Oracle):
                oracle.evicted_below = dict(enumerate(part.table.evicted_below.tolist()))
        for seq in range(self.kind.sequences):
            assert len({oracle.reached(seq) for oracle in after}) == 1, jaxkv.show(self.cache)
            assert all(oracle.is_whole(seq) for oracle in after), jaxkv.show(self.cache)

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        ok = self.edit("seq_rm", seq, p0, p1)
        assert ok or p0 > 0 or p1 >= 0  # removing everything always works
        return ok

    def seq_cp(self, src: int, dsts: Sequence[int], p0: int = -1, p1: int = -1) -> bool:
        return self.edit("seq_cp", src, [*dsts], p0, p1)

    def insert(self, other: "Twin", src: Sequence[int], dst: Sequence[int]) -> bool:
        """Insert sequences of another twin on both sides, or on neither."""
        before = self.cache
        self.cache, ok = result = jaxkv.insert(before, other.cache, src, dst)
        self._inserted(result, other.oracles, src, dst)
        if not ok:
            assert_identical(self.cache, before)
        return ok.item()

    def extract(self, sequences: Sequence[int], cells: int) -> tuple[Self, bool]:
        """Extract sequences on both sides: another twin, and whether it has the sequences."""
        twin, streams = copy.copy(self), min(len(sequences), self.kind.streams)
        sizes = dict(cells=min(cells, self.kind.cells * streams), sequences=len(sequences))
        twin.kind = replace(self.kind, **sizes, streams=1, placement="any")
        twin.oracles = twin.kind.oracles()
        twin.cache, ok = result = jaxkv.extract(self.cache, sequences, cells=cells)
        twin._inserted(result, self.oracles, sequences, range(len(sequences)))
        twin.compare()
        return twin, ok.item()

    def _inserted(self, result: Any, of: Oracles, *ids: Sequence[int]) -> None:
        """Insert sequences of other oracles, if all have cells, and compare the results."""
        after = self.oracles.fork()
        pairs = zip(after, of, strict=True)
        ok = all([one.insert(other, *ids) is not False for one, other in pairs])
        assert result.ok == ok, (ids, jaxkv.show(self.cache))
        assert jaxkv.Reason(result.reason).name == ("OK" if ok else "OUT_OF_CELLS")
        self.oracles = after if ok else self.oracles

    def update(self) -> None:
        plan = jaxkv.init_update(self.cache)
        self.cache = apply_plan(self.cache, plan)
        assert plan.num_changes.item() == sum(oracle.update() for oracle in self.oracles)

    def defrag(self, max_moves: int | None = None) -> None:
        plan = jaxkv.defrag_plan(self.cache, max_moves=max_moves)
        plans = [plan] if len(self.oracles) == 1 else plan.parts
        for oracle, one in zip(self.oracles, plans, strict=True):
            if not isinstance(oracle, Oracle):
                continue
            for stream in range(oracle.streams):
                moves = oracle.moves(stream, max_moves)
                columns = (one.source, one.destination, one.length)
                arrays = np.stack([np.asarray(column)[stream] for column in columns], axis=1)
                assert [*map(tuple, arrays[: len(moves)].tolist())] == moves
                assert not arrays[len(moves) :, 2].any()
                oracle.defrag(moves, stream)
        self.cache = apply_plan(self.cache, plan)

    def rewind(self, past: tuple[Any, Oracles]) -> bool:
        """Return to the table of a past on both sides, if both allow it."""
        cache, oracles = past
        before = self.cache
        self.cache, ok = jaxkv.rewind(before, to=cache.table)
        pairs = [*zip(self.oracles, oracles, strict=True)]
        can = {oracle.can_return_to(then) for oracle, then in pairs}  # None: unknown
        assert not ok or False not in can
        assert ok or can & {False, None}
        if not ok:
            assert_identical(self.cache, before)
            return False
        for oracle, then in pairs:
            oracle.return_to(then)
        self.is_rewound = True
        return True


@functools.cache
def make_edited(kind: Kind, seed: int = 0) -> Any:
    """All tests share the cache; donating it is not allowed."""
    return edit_randomly(Twin(kind), seed)


def edit_randomly(twin: Twin, seed: int) -> Any:
    """Return the cache after a short random run: holes, forks, several sequences, old keys."""
    rng, ids = random.Random(seed), range(twin.kind.sequences)
    for _ in range(4):
        for _ in range(3):
            twin.decode([rng.choice(ids) for _ in range(rng.choice([1, 7]))])
        twin.seq_cp(rng.choice(ids), [rng.choice(ids)], rng.randint(0, 1))
        start = rng.randint(0, 2)
        twin.seq_rm(rng.choice(ids), start, start + rng.randint(1, 2))
    twin.compare()
    return twin.cache
