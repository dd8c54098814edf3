"""The memories under test, and two tiny models to run through them.

A test of a property is written once and runs over `KINDS`: a new kind of memory is a new row there.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.cells import Placement
from jaxkv.mask import visible
from tests.oracle import Oracle, Part, Plan, Row, Token

LAYERS = 2
HEADS = 2  # of keys and values; queries have twice as many
SIZE = 4
VOCABULARY = 16
ROPE = jaxkv.make_rope(SIZE, base=100.0)


@dataclass(frozen=True)
class Kind:
    """A memory under test: its sizes, how it is made, and who knows what it should do."""

    name: str
    cells: int
    sequences: int
    placement: Placement = "scattered"

    def make(self, rope: jaxkv.Rope | None = ROPE) -> Any:
        """Make an empty one. Without a rope an update leaves the signatures of `sign` alone."""
        return jaxkv.make_kv_cache(
            layers=LAYERS,
            cells=self.cells,
            heads=HEADS,
            size=SIZE,
            sequences=self.sequences,
            rope=rope,
            placement=self.placement,
        )

    def oracle(self) -> Oracle:
        """Make its empty oracle."""
        return Oracle(self.cells, self.sequences, contiguous=self.placement == "contiguous")


SMALL = Kind("small", cells=12, sequences=3)
RUNS = Kind("contiguous", cells=12, sequences=3, placement="contiguous")
WIDE = Kind("two-owner-words", cells=40, sequences=40)
KINDS = [SMALL, RUNS, WIDE]

COUNTS = [1, 7]
"""Tokens of a batch: one alone, and a full ubatch with a padded one. Few shapes are compiled."""

over_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


# ------------------------------------------------------------------------------- two tiny models


@jax.jit
def sign(memory: Any, ubatch: jaxkv.Ubatch) -> tuple[Any, jax.Array, jax.Array]:
    """Apply a ubatch and let every token sign its rows; see `rows_of` for the other way.

    Queries are zero, so that the output of a token is the mean of the signatures it sees.

    Returns:
      The memory; the mask, `[R, T, N]`; and what the tokens saw in the last layer, `[R, T, H, D]`.
    """
    memory = jaxkv.apply(memory, ubatch)
    q = jnp.zeros((*ubatch.valid.shape, 2 * HEADS, SIZE))
    for layer in range(LAYERS):
        fields = (ubatch.sequences + 1, ubatch.positions, ubatch.tokens)
        rows = [
            jnp.stack([*fields, 0 * ubatch.tokens + layer * HEADS + h], -1) for h in range(HEADS)
        ]
        k = jnp.stack(rows, axis=-2).astype(jnp.float32)
        memory, seen = jaxkv.attend(memory, layer, ubatch, q, k, -k)
    table, _ = jaxkv.split(memory)
    return memory, visible(table, ubatch), seen


def random_weights() -> dict[str, jax.Array]:
    """Make the weights of `think`, always the same."""
    rng = np.random.default_rng(0)
    width = 2 * HEADS * SIZE

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)

    return {
        "embedding": normal(VOCABULARY, width) * 4,
        "q": normal(LAYERS, width, width),
        "k": normal(LAYERS, width, HEADS * SIZE),
        "v": normal(LAYERS, width, HEADS * SIZE),
        "out": normal(LAYERS, width, width),
    }


WEIGHTS = random_weights()


@jax.jit
def think(memory: Any, ubatch: jaxkv.Ubatch) -> tuple[Any, jax.Array]:
    """Run a real if tiny transformer over a ubatch; the memory, and logits `[O, V]`."""
    memory = jaxkv.apply(memory, ubatch)
    x = WEIGHTS["embedding"][ubatch.tokens]
    for layer in range(LAYERS):
        q, k, v = (
            (x @ WEIGHTS[name][layer]).reshape(*ubatch.valid.shape, -1, SIZE) for name in "qkv"
        )
        q, k = (jaxkv.rotate(heads, ubatch.positions, ROPE) for heads in (q, k))
        memory, out = jaxkv.attend(memory, layer, ubatch, q, k, v)
        x = jnp.tanh(x + out.reshape(x.shape) @ WEIGHTS["out"][layer])
    x = x.reshape(-1, x.shape[-1])[ubatch.outputs]
    return memory, x @ WEIGHTS["embedding"].T


def run(memory: Any, batch: jaxkv.Batch, *, ubatch_size: int = 4) -> tuple[Any, jax.Array]:
    """Plan a batch that fits and run it; the memory, and logits in the order of the batch."""
    plan = jaxkv.init_batch(memory, batch, ubatch_size=ubatch_size).check()
    logits = []
    for ubatch in plan.ubatches:
        memory, out = think(memory, ubatch)
        logits.append(out)
    return memory, plan.collect(logits)


def filled(*counts: int, kind: Kind = SMALL) -> Any:
    """Make a memory with so many tokens for sequences 0, 1, 2 ..., rows and all."""
    memory = kind.make()
    for seq, count in enumerate(counts):
        for start in range(0, count, 4):
            tokens = range(start + 1, min(start + 4, count) + 1)
            memory, _ = run(memory, jaxkv.make_batch(tokens, sequences=seq))
    return memory


def drawn(cells: str, kind: Kind = SMALL) -> Any:
    """Make a memory from a drawing: `0{0} 1{0,1} .`, positions with their owners, or empty cells.

    A third part, as in `7{0}+5`, is how far the cell has moved since its key was rotated. What the
    drawing leaves out is empty.
    """
    table, rows = jaxkv.split(kind.make())
    position, owners, shift = (np.array(x) for x in (table.position, table.owners, table.shift))
    for index, cell in enumerate(cells.split()):
        if cell != ".":
            number, seqs, moved = re.fullmatch(r"(\d+)\{([\d,]+)\}([+-]\d+)?", cell).groups()
            position[0, index], shift[0, index] = int(number), int(moved or 0)
            for seq in map(int, seqs.split(",")):
                owners[0, seq // 32, index] |= np.uint32(1 << seq % 32)
    fields = {"position": position, "owners": owners, "shift": shift}
    return jaxkv.join(replace(table, **jax.tree.map(jnp.asarray, fields)), rows)


def drawing(memory: Any) -> str:
    """Draw the cells of a memory as `drawn` reads them, up to the last one in use."""
    cells = table_of(memory)
    drawn = ["."] * (max(cells, default=-1) + 1)
    for index, (position, owners, shift) in cells.items():
        seqs = ",".join(map(str, sorted(owners)))
        drawn[index] = f"{position}{{{seqs}}}" + (f"{shift:+}" if shift else "")
    return " ".join(drawn)


# ------------------------------------------------------------------------------------- comparing


def table_of(memory: Any) -> dict[int, tuple[int, set[int], int]]:
    """Read the table bit by bit: for each cell in use its position, owners and shift."""
    table, _ = jaxkv.split(memory)
    position, owners, shift = (
        np.asarray(x)[0] for x in (table.position, table.owners, table.shift)
    )
    read = {}
    for index in range(table.size):
        mine = {s for s in range(32 * len(owners)) if int(owners[s // 32, index]) >> (s % 32) & 1}
        if mine or position[index] != -1 or shift[index]:
            read[index] = (int(position[index]), mine, int(shift[index]))
    return read


def rows_of(memory: Any) -> dict[int, Row]:
    """Read the signatures beside the cells, the same in every layer, head, key and value."""
    _, rows = jaxkv.split(memory)
    k, v = (np.stack([np.asarray(x)[0] for x in half]) for half in (rows.k, rows.v))  # [L, K, N, D]
    np.testing.assert_array_equal(v, -k)
    written = k[0, 0, :, 0] > 0
    label = np.arange(LAYERS * HEADS).reshape(LAYERS, HEADS, 1) * written
    np.testing.assert_array_equal(k[..., 3], label)
    np.testing.assert_array_equal(k[..., :3], np.broadcast_to(k[:1, :1, :, :3], (*k.shape[:3], 3)))
    return {
        int(i): Row(int(k[0, 0, i, 0]) - 1, int(k[0, 0, i, 1]), int(k[0, 0, i, 2]))
        for i in np.flatnonzero(written)
    }


def assert_identical(one: Any, other: Any) -> None:
    """Two values are the same in structure, shapes, dtypes and every bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes()


class Twin:
    """A memory and its oracle, led through the same verbs and compared after each."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.memory = kind.make(rope=None)
        self.oracle = kind.oracle()
        self.tokens = 0  # tokens made so far, so that each has its own number

    def compare(self) -> None:
        """Table, rows and answers agree, for every cell and every sequence."""
        expected = {i: (c.position, c.owners, c.shift) for i, c in self.oracle.cells.items()}
        assert table_of(self.memory) == expected, jaxkv.show(self.memory)
        assert rows_of(self.memory) == self.oracle.rows
        faults = jaxkv.check_invariants(self.memory)
        assert not any(map(int, faults.values())), faults
        ids = range(self.kind.sequences)
        assert jaxkv.used(self.memory).item() == self.oracle.used()
        assert jaxkv.seq_pos_min(self.memory, [*ids]).tolist() == [*map(self.oracle.first, ids)]
        assert jaxkv.seq_pos_max(self.memory, [*ids]).tolist() == [*map(self.oracle.last, ids)]

    def batch(self, sequences: Sequence[int], positions: Sequence[int] | None) -> list[Token]:
        """Make new tokens for an oracle."""
        first, self.tokens = self.tokens + 1, self.tokens + len(sequences)
        places = [None] * len(sequences) if positions is None else positions
        numbers = range(first, self.tokens + 1)
        return [Token(*token) for token in zip(sequences, places, numbers, strict=True)]

    def plan(
        self, sequences: Sequence[int], positions: Sequence[int] | None = None
    ) -> tuple[jaxkv.Plan, Plan]:
        """Plan new tokens on both sides; the answers are the same."""
        tokens = self.batch(sequences, positions)
        batch = jaxkv.make_batch(
            [token.token for token in tokens],
            sequences=sequences,
            positions=positions,
        )
        plan = jaxkv.init_batch(self.memory, batch, ubatch_size=4)
        expected = self.oracle.plan(tokens, ubatch_size=4)
        faults = {
            seq: (jaxkv.Reason(reason).name, wanted, found)
            for seq, (reason, wanted, found) in enumerate(
                np.stack([plan.reason, plan.expected, plan.found], axis=1).tolist()
            )
            if reason != jaxkv.Reason.FITS
        }
        assert faults == expected.faults
        assert plan.ok.item() == expected.ok
        assert np.flatnonzero(~np.asarray(plan.fits)).tolist() == sorted(faults)
        if expected.ok:
            assert len(plan.ubatches) == len(expected.parts)
        return plan, expected

    def decode(self, sequences: Sequence[int], positions: Sequence[int] | None = None) -> bool:
        """Plan new tokens and run them on both sides, if there is room on either."""
        plan, expected = self.plan(sequences, positions)
        for ubatch, part in zip(plan.ubatches, expected.parts, strict=False):
            assert self.step(ubatch, part)
        if not expected.ok:  # computed all the same, a refused plan changes nothing
            before = self.memory
            for ubatch in plan.ubatches:
                self.memory, *_ = sign(self.memory, ubatch)
            assert_identical(self.memory, before)
        return expected.ok

    def step(self, ubatch: jaxkv.Ubatch, part: Part) -> bool:
        """Run one ubatch on both sides; what its tokens see and say agree."""
        self.memory, mask, seen = sign(self.memory, ubatch)
        taken = self.oracle.apply(part)
        if not taken:
            return False
        count = len(part.tokens)
        mask = np.asarray(mask)[0]
        assert not mask[count:].any()
        sees = [self.oracle.sees(token.sequence, token.position) for _, token in part.tokens]
        assert [set(np.flatnonzero(row).tolist()) for row in mask[:count]] == sees
        rows = self.oracle.rows
        for t, cells in enumerate(sees):
            mean = np.mean([[rows[i][0] + 1, *rows[i][1:]] for i in cells], axis=0)
            expected = np.broadcast_to(-mean, (2 * HEADS, 3))
            np.testing.assert_allclose(np.asarray(seen)[0, t, :, :3], expected, rtol=1e-5)
        np.testing.assert_array_equal(np.asarray(seen)[0, count:], 0.0)
        return True

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        """Forget a range on both sides."""
        self.memory, ok = jaxkv.seq_rm(self.memory, seq, p0, p1)
        assert ok.item()
        self.oracle.seq_rm(seq, p0, p1)

    def seq_cp(self, src: int, dsts: Sequence[int], p0: int = -1, p1: int = -1) -> None:
        """Share a range on both sides."""
        self.memory = jaxkv.seq_cp(self.memory, src, [*dsts], p0, p1)
        self.oracle.seq_cp(src, dsts, p0, p1)

    def seq_keep(self, seq: int) -> None:
        """Keep one sequence on both sides."""
        self.memory = jaxkv.seq_keep(self.memory, seq)
        self.oracle.seq_keep(seq)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move a range on both sides."""
        self.memory = jaxkv.seq_add(self.memory, seq, p0, p1, delta)
        self.oracle.seq_add(seq, p0, p1, delta)

    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        """Divide a range on both sides."""
        self.memory = jaxkv.seq_div(self.memory, seq, p0, p1, divisor)
        self.oracle.seq_div(seq, p0, p1, divisor)

    def clear(self) -> None:
        """Forget everything on both sides."""
        self.memory = jaxkv.clear(self.memory)
        self.oracle.clear()

    def update(self) -> None:
        """Rotate what is pending on both sides."""
        plan = jaxkv.init_update(self.memory)
        self.memory = jaxkv.apply(self.memory, plan)
        assert plan.pending.item() == self.oracle.update()

    def defrag(self, max_moves: int | None = None) -> None:
        """Close gaps on both sides, by the same moves."""
        plan = jaxkv.defrag_plan(self.memory, max_moves=max_moves)
        moves = self.oracle.moves()[:max_moves]
        arrays = np.stack([plan.source[0], plan.destination[0], plan.length[0]], axis=1)
        assert [*map(tuple, arrays[: plan.count[0]].tolist())] == moves
        self.memory = jaxkv.apply(self.memory, plan)
        self.oracle.defrag(moves)

    def go_back(self, past: tuple[Any, Oracle]) -> bool:
        """Return to a past `(memory, oracle)` on both sides, if both find that it can be."""
        memory, oracle = past
        table, _ = jaxkv.split(memory)
        before = self.memory
        self.memory, ok = jaxkv.go_back(table, self.memory)
        assert ok.item() == self.oracle.can_return_to(oracle)
        if not ok:
            assert_identical(self.memory, before)
            return False
        self.oracle.return_to(oracle)
        return True


def lived_in(kind: Kind, seed: int = 0) -> Twin:
    """Lead a memory through a short random life: holes, forks, several sequences, old rows."""
    rng, twin = random.Random(seed), Twin(kind)
    ids = range(kind.sequences)
    for _ in range(4):
        for _ in range(3):
            twin.decode([rng.choice(ids) for _ in range(rng.choice(COUNTS))])
        twin.seq_cp(rng.choice(ids), [rng.choice(ids)], rng.randint(0, 1))
        start = rng.randint(0, 2)
        twin.seq_rm(rng.choice(ids), start, start + rng.randint(1, 2))
    twin.compare()
    return twin
