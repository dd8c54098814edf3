"""A memory and its oracles, led through the same life: what the one says the others say too."""

import random
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import jaxkv
from tests.memories import (
    COUNTS,
    HEADS,
    LOOKS,
    WIDTH,
    Kind,
    Look,
    Oracles,
    assert_identical,
    cells_of,
    contents_of,
    parts_of,
    plan_rows,
    sign,
)
from tests.oracle import Fault, Oracle, Part, Place, Plan, Token


def mean_of_keys(
    oracle: Oracle, token: Token, places: Iterable[Place], layer: int, look: Look
) -> np.ndarray:
    """The mean of the keys that a token sees in a layer, as each head weighs them; `[H, D]`."""
    places = [*places]
    keys = np.array([oracle.contents[place] for place in places]) + [1, 0, 0]
    heads = np.arange(2 * HEADS)[:, None]
    label = layer * HEADS + heads // 2
    at = np.array([oracle.cells[place].position for place in places])
    logits = np.sin(token.position + 2 * at + heads) if look.biased else 0 * (heads + at)
    weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return np.concatenate([weights @ keys, label], axis=1)


class Twin:
    """A memory and the oracles of its parts, led through the same verbs, compared after each.

    in_rows: a batch is planned as one ubatch, with a row of WIDTH tokens for each sequence, which
      is one shape for any batch; otherwise it is cut in ubatches of 4.
    """

    def __init__(self, kind: Kind, *, in_rows: bool = False) -> None:
        self.kind = kind
        self.in_rows = in_rows
        self.memory = kind.make(rope=None)
        self.oracles = kind.oracles()
        self.tokens = 0  # tokens made so far, so that each has its own number

    @property
    def oracle(self) -> Oracle:
        """The oracle of a memory of one part."""
        (one,) = self.oracles
        return one

    def compare(self) -> None:
        """Tables, contents and answers agree, for every cell and every sequence."""
        parts = zip(parts_of(self.memory), self.kind.layers, self.oracles, strict=True)
        for (table, buffers), layers, oracle in parts:
            expected = {p: (c.position, c.owners, c.shift) for p, c in oracle.cells.items()}
            assert cells_of(table) == expected, jaxkv.show(self.memory)
            marks = [*oracle.evicted_below.values()]
            assert table.evicted_below.tolist() == marks, jaxkv.show(self.memory)
            assert contents_of(buffers, layers) == oracle.contents, jaxkv.show(self.memory)
        faults = jaxkv.check_invariants(self.memory)
        assert not any(map(int, faults.values())), faults
        ids = [*range(self.kind.sequences)]
        used = [jaxkv.used(part).item() for part in jaxkv.hybrid.parts_of(self.memory)]
        assert used == [oracle.used() for oracle in self.oracles]
        assert jaxkv.used(self.memory).item() == sum(used)
        assert jaxkv.seq_pos_min(self.memory, ids).tolist() == [*map(self.oracles.first, ids)]
        assert jaxkv.seq_pos_max(self.memory, ids).tolist() == [*map(self.oracles.last, ids)]

    def batch(self, sequences: Sequence[Any], positions: Sequence[int] | None) -> list[Token]:
        """Make new tokens for an oracle; in place of a sequence there may be several."""
        first, self.tokens = self.tokens + 1, self.tokens + len(sequences)
        places = [None] * len(sequences) if positions is None else positions
        most = 100 if self.kind.is_quantised else self.tokens
        numbers = [1 + (number - 1) % most for number in range(first, self.tokens + 1)]
        sets = [sorted(np.atleast_1d(one).tolist()) for one in sequences]
        return [
            Token(first, place, number, tuple(others))
            for (first, *others), place, number in zip(sets, places, numbers, strict=True)
        ]

    def plan(
        self, sequences: Sequence[Any], positions: Sequence[int] | None = None
    ) -> tuple[jaxkv.Plan, list[Plan]]:
        """Plan new tokens on both sides; the answers are the same."""
        tokens = self.batch(sequences, positions)
        if self.in_rows:
            plan = plan_rows(self.memory, *self.rows(self.oracles[0].numbered(tokens)))
        else:
            batch = jaxkv.make_batch(
                [token.token for token in tokens],
                sequences=sequences,
                positions=positions,
            )
            plan = jaxkv.init_batch(self.memory, batch, ubatch_size=4)
        expected, plans = self.oracles.plan(tokens, ubatch_size=None if self.in_rows else 4)
        faults = {
            seq: Fault(jaxkv.Reason(reason).name, wanted, found)
            for seq, (reason, wanted, found) in enumerate(
                np.stack([plan.reason, plan.expected, plan.found], axis=1).tolist()
            )
            if reason != jaxkv.Reason.FITS
        }
        assert np.flatnonzero(~np.asarray(plan.fits)).tolist() == sorted(faults)
        assert plan.ok.item() == all(one.ok for one in plans)
        if len(plans) == 1:
            assert faults == plans[0].faults
        else:  # several parts may lack room: which sequences are named then is not spelled out
            assert expected.items() <= faults.items()
            assert set(faults) >= set.intersection(*(set(one.faults) for one in plans))
        if plan.ok:
            assert len(plan.ubatches) == len(plans[0].parts)
        return plan, plans

    def rows(self, tokens: Sequence[Token]) -> np.ndarray:
        """Arrange numbers, presence and positions of tokens in rows, `[3, Q, WIDTH]`."""
        table = np.zeros((3, self.kind.sequences, WIDTH), np.int32)
        for token in tokens:
            row = table[:, token.sequence]
            row[:, np.count_nonzero(row[1])] = token.token, 1, token.position
        return table

    def decode(
        self,
        sequences: Sequence[Any],
        positions: Sequence[int] | None = None,
        look: Look = LOOKS[0],
    ) -> bool:
        """Plan new tokens and run them on both sides, if there is room on either."""
        plan, plans = self.plan(sequences, positions)
        if plan.ok:
            for i, ubatch in enumerate(plan.ubatches):
                assert self.step(ubatch, [one.parts[i] for one in plans], look)
        else:  # computed all the same, a refused plan changes nothing
            before = self.memory
            for ubatch in plan.ubatches:
                self.memory, *_ = sign(self.memory, ubatch)
            assert_identical(self.memory, before)
        return plan.ok.item()

    def step(self, ubatch: jaxkv.Ubatch, parts: Sequence[Part], look: Look = LOOKS[0]) -> bool:
        """Run one ubatch on both sides; what its tokens see and say agree."""
        before = self.memory
        until = None if look.ahead is None else ubatch.positions + look.ahead
        self.memory, *found = sign(self.memory, ubatch, until, biased=look.biased)
        masks, saw = jax.tree.map(np.asarray, found)
        pairs = [*zip(self.oracles, parts, strict=True)]
        if not all(oracle.fits(part) for oracle, part in pairs):
            assert_identical(self.memory, before)
            return False
        streams = np.asarray(ubatch.row_stream)
        for (oracle, part), layers, mask in zip(pairs, self.kind.layers, masks, strict=True):
            assert oracle.apply(part)
            owner = {token.token: token for _, token in part.tokens}
            for r, t in np.ndindex(*ubatch.valid.shape):
                cells = {(int(streams[r]), int(i)) for i in np.flatnonzero(mask[r, t])}
                if not ubatch.valid[r, t]:
                    assert not cells
                    assert not any(saw[layer][r, t].any() for layer in layers)
                    continue
                token = owner.pop(int(ubatch.tokens[r, t]))
                assert cells == oracle.sees(token, look.ahead or 0)
                for layer in layers:
                    seen = saw[layer][r, t]
                    wanted = self.kind.value(mean_of_keys(oracle, token, cells, layer, look))
                    within = 0.5 if self.kind.is_quantised else 0.0  # of what rounding takes
                    np.testing.assert_allclose(seen, wanted, rtol=1e-5, atol=within)
            assert not owner
        return True

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        """Forget a range on both sides."""
        self.memory, ok = jaxkv.seq_rm(self.memory, seq, p0, p1)
        assert ok.item()
        for oracle in self.oracles:
            oracle.seq_rm(seq, p0, p1)

    def seq_cp(self, src: int, dsts: Sequence[int], p0: int = -1, p1: int = -1) -> None:
        """Share a range on both sides, or on neither."""
        self._copied("seq_cp", src, [*dsts], p0, p1)

    def seq_select(self, parents: Sequence[int], seqs: Sequence[int]) -> None:
        """Let sequences have what others hold on both sides, or on neither."""
        self._copied("seq_select", parents, seqs)

    def _copied(self, verb: str, *args: Any) -> None:
        """Do it on both sides; where an oracle has no cells for it, on neither."""
        before, can = self.memory, getattr(jaxkv, f"can_{verb}")(self.memory, *args)
        assert can.item() == all(
            getattr(oracle, f"can_{verb}")(*args) for oracle in self.oracles
        ), jaxkv.show(before)
        if can:
            self.memory = getattr(jaxkv, verb)(before, *args)
            for oracle in self.oracles:
                assert getattr(oracle, verb)(*args)
            return
        with pytest.raises(ValueError, match="for a copy from another one"):
            getattr(jaxkv, verb)(before, *args)
        self.memory = jax.jit(getattr(jaxkv, verb))(before, *args)
        assert_identical(self.memory, before)

    def seq_keep(self, seq: int) -> None:
        """Keep one sequence on both sides."""
        self.memory = jaxkv.seq_keep(self.memory, seq)
        for oracle in self.oracles:
            oracle.seq_keep(seq)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move a range on both sides."""
        self.memory = jaxkv.seq_add(self.memory, seq, p0, p1, delta)
        for oracle in self.oracles:
            oracle.seq_add(seq, p0, p1, delta)

    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        """Divide a range on both sides."""
        self.memory = jaxkv.seq_div(self.memory, seq, p0, p1, divisor)
        for oracle in self.oracles:
            oracle.seq_div(seq, p0, p1, divisor)

    def clear(self) -> None:
        """Forget everything on both sides."""
        self.memory = jaxkv.clear(self.memory)
        for oracle in self.oracles:
            oracle.clear()

    def update(self) -> None:
        """Rotate what is pending on both sides."""
        plan = jaxkv.init_update(self.memory)
        self.memory = jaxkv.apply(self.memory, plan)
        assert plan.pending.item() == sum(oracle.update() for oracle in self.oracles)

    def defrag(self, max_moves: int | None = None) -> None:
        """Close gaps on both sides, by the same moves."""
        plan = jaxkv.defrag_plan(self.memory, max_moves=max_moves)
        plans = [plan] if len(self.oracles) == 1 else plan.parts
        for oracle, one in zip(self.oracles, plans, strict=True):
            for stream in range(one.count.shape[0]):
                moves = oracle.moves(stream, max_moves)
                columns = (one.source, one.destination, one.length)
                arrays = np.stack([np.asarray(column)[stream] for column in columns], axis=1)
                assert [*map(tuple, arrays[: np.asarray(one.count)[stream]].tolist())] == moves
                oracle.defrag(moves, stream)
        self.memory = jaxkv.apply(self.memory, plan)

    def go_back(self, past: tuple[Any, Oracles]) -> bool:
        """Return to a past `(memory, oracles)` on both sides, if both find that it can be."""
        memory, oracles = past
        table, _ = jaxkv.split(memory)
        before = self.memory
        self.memory, ok = jaxkv.go_back(table, self.memory)
        pairs = [*zip(self.oracles, oracles, strict=True)]
        assert ok.item() == all(oracle.can_return_to(then) for oracle, then in pairs)
        if not ok:
            assert_identical(self.memory, before)
            return False
        for oracle, then in pairs:
            oracle.return_to(then)
        return True


@cache
def lived_in(kind: Kind, seed: int = 0) -> Any:
    """Lead a memory through a short random life: holes, forks, several sequences, old keys.

    It is a value, so all tests share one; none may donate it.
    """
    rng, twin = random.Random(seed), Twin(kind)
    ids = range(kind.sequences)
    for _ in range(4):
        for _ in range(3):
            twin.decode([rng.choice(ids) for _ in range(rng.choice(COUNTS))])
        twin.seq_cp(rng.choice(ids), [rng.choice(ids)], rng.randint(0, 1))
        start = rng.randint(0, 2)
        twin.seq_rm(rng.choice(ids), start, start + rng.randint(1, 2))
    twin.compare()
    return twin.memory
