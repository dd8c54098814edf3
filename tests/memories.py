"""The memories under test, and two tiny models to run through them.

A test of a property is written once and runs over `KINDS`: a new kind of memory is a new row there.
"""

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.batch import part_of
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.cells import Cells, Placement
from jaxkv.kv.mask import visible
from jaxkv.ops.latent import Latent
from jaxkv.ops.quantised import Quantised, Stored, decoded
from tests.oracle import Fault, Oracle, Part, Place, Plan, Row, Token

LAYERS = 2
HEADS = 2  # of keys and values; queries have twice as many
SIZE = 4
VOCABULARY = 16
ROPE = jaxkv.make_rope(SIZE, base=100.0)


@dataclass(frozen=True)
class Kind:
    """A memory under test: its sizes, how it is made, and the oracles that know what it should do.

    Each window is a part of its own, with half of the layers; a single one is no hybrid.

    latent: which numbers of a key are its value, the first and one past the last.
    """

    name: str
    cells: int
    sequences: int
    placement: Placement = "scattered"
    shards: int | None = None
    streams: int = 1
    windows: tuple[jaxkv.window.Window | None, ...] = (None,)
    dtype: str = "float32"
    stacked: bool = False
    latent: tuple[int, int] | None = None

    @property
    def is_quantised(self) -> bool:
        """Whether a signature is rounded: its numbers are told apart up to 127."""
        return self.dtype == "int8"

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """For each part, the layers that it serves."""
        count = len(self.windows)
        return tuple(tuple(range(part, LAYERS, count)) for part in range(count))

    def value(self, key: np.ndarray) -> np.ndarray:
        """The value that `sign` writes beside a key `[..., D]`, and so for means of both."""
        return -key if self.latent is None else key[..., slice(*self.latent)]

    def make(self, rope: jaxkv.rope.Rope | None = ROPE) -> Any:
        """Make an empty one. Without a rope an update leaves the signatures of `sign` alone."""
        parts = [
            jaxkv.make_kv_cache(
                layers=len(layers),
                cells=self.cells,
                kv_heads=HEADS,
                head_dim=SIZE,
                value_dim=None if self.latent is None else slice(*self.latent),
                sequences=self.sequences,
                streams=self.streams,
                window=window,
                rope=rope,
                placement=self.placement,
                shards=self.shards,
                dtype=self.dtype,
                stacked=self.stacked,
            )
            for window, layers in zip(self.windows, self.layers, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        return jaxkv.make_hybrid_cache(*zip(parts, self.layers, strict=True))

    def oracles(self) -> "Oracles":
        """Make the oracles of its parts."""
        return Oracles(
            Oracle(
                self.cells,
                self.sequences,
                contiguous=self.placement == "contiguous",
                shards=self.shards or 1,
                tiled=self.placement == "tiled",
                streams=self.streams,
                window=window and (window.rule, window.width),
            )
            for window in self.windows
        )


SMALL = Kind("small", cells=12, sequences=3)
RUNS = Kind("contiguous", cells=12, sequences=3, placement="contiguous")
WIDE = Kind("two-owner-words", cells=40, sequences=40)
SPLIT = Kind("split", cells=8, sequences=3, streams=3)
WINDOW = Kind("window", cells=12, sequences=3, windows=(jaxkv.window.sliding(3),))
CHUNKS = Kind("chunks", cells=10, sequences=3, streams=3, windows=(jaxkv.window.chunked(4),))
TWO = Kind("full-and-window", cells=14, sequences=3, windows=(None, jaxkv.window.sliding(4)))
TWO_SPLIT = Kind(
    "full-and-window-split",
    cells=10,
    sequences=3,
    streams=3,
    placement="contiguous",
    windows=(None, jaxkv.window.symmetric(5)),
)
GROUPS = Kind("groups", cells=10, sequences=4, streams=2)
GROUPS_WINDOW = Kind(
    "groups-window", cells=9, sequences=4, streams=2, windows=(jaxkv.window.sliding(3),)
)
GROUPS_RUNS = Kind(
    "groups-contiguous-full-and-window",
    cells=12,
    sequences=8,
    streams=4,
    placement="contiguous",
    windows=(None, jaxkv.window.chunked(4)),
)
STRIPES = Kind("striped", cells=16, sequences=3, placement="striped", shards=2)
STRIPES_SPLIT = Kind(
    "striped-split-full-and-window",
    cells=12,
    sequences=3,
    streams=3,
    placement="striped",
    shards=3,
    windows=(None, jaxkv.window.sliding(4)),
)
GROUPS_STRIPES = Kind(
    "groups-striped-window",
    cells=9,
    sequences=4,
    streams=2,
    placement="striped",
    shards=3,
    windows=(jaxkv.window.sliding(3),),
)
TILES = Kind("tiled", cells=16, sequences=4, placement="tiled")
GROUPS_TILES = Kind(
    "groups-tiled-full-and-window",
    cells=16,
    sequences=4,
    streams=2,
    placement="tiled",
    windows=(None, jaxkv.window.sliding(3)),
)
RUNS_WIDE = Kind("contiguous-two-owner-words", cells=40, sequences=40, placement="contiguous")
CODES = Kind("groups-int8", cells=10, sequences=4, streams=2, dtype="int8")
LATENT = Kind("groups-latent", cells=10, sequences=4, streams=2, latent=(1, 4))
STACKED = Kind("stacked-groups", cells=10, sequences=4, streams=2, stacked=True)
KINDS = [SMALL, RUNS, WIDE, STRIPES]
ALL_KINDS = [*KINDS, SPLIT, WINDOW, CHUNKS, TWO, TWO_SPLIT, GROUPS, GROUPS_WINDOW, GROUPS_RUNS]
ALL_KINDS += [STRIPES_SPLIT, GROUPS_STRIPES, TILES, GROUPS_TILES, STACKED]

WIDTH = 8
"""Tokens of a row where all sequences are told something at once."""

COUNTS = [1, 7]
"""Tokens of a batch: one alone, and a full ubatch with a padded one. Few shapes are compiled."""

over_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


# ------------------------------------------------------------------------------- two tiny models


@dataclass(frozen=True)
class Look:
    """How the tokens of a step look.

    biased: whether `sway` is added to their logits.
    ahead: how many positions past its own each sees, as `until` tells; None where it is left out.
    """

    biased: bool = False
    ahead: int | None = None


LOOKS = [Look(), Look(biased=True, ahead=0), Look(biased=True, ahead=3)]


def sway(query: jax.Array, key: jax.Array, head: jax.Array) -> jax.Array:
    """A bias that tells positions of queries, those of keys and heads apart."""
    return jnp.sin((query + 2 * key + head).astype(jnp.float32))


def masks_of(memory: Any, ubatch: jaxkv.Ubatch, until: jax.Array | None) -> list[jax.Array]:
    """What the tokens of a ubatch that was applied see of each part, `[R, T, N]`."""
    tables = [table for table, _ in parts_of(memory)]
    if len(tables) == 1:
        return [visible(*tables, ubatch, until=until)]
    return [visible(table, part_of(ubatch, i), until=until) for i, table in enumerate(tables)]


@partial(jax.jit, static_argnames="biased")
def sign(
    memory: Any, ubatch: jaxkv.Ubatch, until: jax.Array | None = None, *, biased: bool = False
) -> tuple[Any, list[jax.Array], list[jax.Array]]:
    """Apply a ubatch and let every token sign its rows; see `rows_of` for the other way.

    Queries are zero, so that the output of a token is the mean of the signatures it sees, weighed
    by the bias if there is one. Values are what `Kind.value` says: keys with the other sign, or
    numbers of theirs.

    Returns:
      The memory; the mask of each part, `[R, T, N]`; and what the tokens saw in each layer,
      `[R, T, H, Dv]`.
    """
    latent = any(is_latent(rows) for _, rows in parts_of(memory))
    memory = jaxkv.apply(memory, ubatch)
    q = jnp.zeros((*ubatch.valid.shape, 2 * HEADS, SIZE))
    saw = []
    for layer in range(LAYERS):
        fields = (ubatch.sequences + 1, ubatch.positions, ubatch.tokens)
        rows = [
            jnp.stack([*fields, 0 * ubatch.tokens + layer * HEADS + h], -1) for h in range(HEADS)
        ]
        k = jnp.stack(rows, axis=-2).astype(jnp.float32)
        v, bias = None if latent else -k, sway if biased else None
        memory, seen = jaxkv.attend(memory, layer, ubatch, q, k, v, bias=bias, until=until)
        saw.append(seen)
    return memory, masks_of(memory, ubatch, until), saw


@jax.jit
def plan_rows(memory: Any, tokens: Any, valid: Any, positions: Any = None) -> jaxkv.Plan:
    """Plan rows of tokens, one for each sequence, as one ubatch; `[Q, T]`."""
    sequences = jnp.broadcast_to(jnp.arange(tokens.shape[0])[:, None], tokens.shape)
    batch = jaxkv.make_batch(tokens, sequences=sequences, positions=positions, valid=valid != 0)
    return jaxkv.init_batch(memory, batch)


def parts_of(memory: Any) -> list[tuple[Cells, Buffers]]:
    """List the tables and buffers of a memory, whether it is a hybrid one or not."""
    table, rows = jaxkv.split(memory)
    if isinstance(table, Cells):
        return [(table, rows)]
    return [*zip(table.parts, rows, strict=True)]


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


@cache
def filled(*counts: int, kind: Kind = SMALL) -> Any:
    """Make a memory with so many tokens for sequences 0, 1, 2 ..., rows and all.

    It is a value, so all tests share one; none may donate it.
    """
    memory = kind.make()
    for seq, count in enumerate(counts):
        for start in range(0, count, 4):
            tokens = range(start + 1, min(start + 4, count) + 1)
            memory, _ = run(memory, jaxkv.make_batch(tokens, sequences=seq))
    return memory


def drawn(cells: str, kind: Kind = SMALL) -> Any:
    """Make a memory from a drawing: `0{0} 1{0,1} .`, positions with their owners, or empty cells.

    A third part, as in `7{0}+5`, is how far the cell has moved since its key was rotated. Streams
    are parted by `|`, and what the drawing leaves out is empty.
    """
    table, rows = jaxkv.split(kind.make())
    position, owners, shift = (np.array(x) for x in (table.position, table.owners, table.shift))
    for stream, line in enumerate(cells.split("|")):
        for index, cell in enumerate(line.split()):
            if cell != ".":
                number, seqs, moved = re.fullmatch(r"(\d+)\{([\d,]+)\}([+-]\d+)?", cell).groups()
                position[stream, index], shift[stream, index] = int(number), int(moved or 0)
                for seq in map(int, seqs.split(",")):
                    home, bit = divmod(seq, kind.sequences // kind.streams)
                    assert home == stream
                    owners[stream, bit // 32, index] |= np.uint32(1 << bit % 32)
    fields = {"position": position, "owners": owners, "shift": shift}
    return jaxkv.join(replace(table, **jax.tree.map(jnp.asarray, fields)), rows)


def drawing(memory: Any) -> str:
    """Draw the cells of a memory as `drawn` reads them, each stream up to its last one in use."""
    ((table, _),) = parts_of(memory)
    cells = cells_of(table)
    lines = []
    for stream in range(table.streams):
        used = [index for where, index in cells if where == stream]
        line = ["."] * (max(used, default=-1) + 1)
        for index in used:
            position, owners, shift = cells[stream, index]
            seqs = ",".join(map(str, sorted(owners)))
            line[index] = f"{position}{{{seqs}}}" + (f"{shift:+}" if shift else "")
        lines.append(" ".join(line))
    return " | ".join(lines)


# ------------------------------------------------------------------------------------- comparing


def table_of(memory: Any) -> dict[int, tuple[int, set[int], int]]:
    """Read the one table, of one stream: for each cell in use its position, owners and shift."""
    ((table, _),) = parts_of(memory)
    return {index: cell for (_, index), cell in cells_of(table).items()}


def cells_of(table: Cells) -> dict[Place, tuple[int, set[int], int]]:
    """Read a table bit by bit: for each cell in use its position, owners and shift."""
    position, owners, shift = map(np.asarray, (table.position, table.owners, table.shift))
    read = {}
    for stream, index in np.ndindex(*position.shape):
        first = stream * table.sharing
        mine = {
            first + s
            for s in range(32 * owners.shape[1])
            if int(owners[stream, s // 32, index]) >> (s % 32) & 1
        }
        cell = int(position[stream, index]), mine, int(shift[stream, index])
        if cell != (-1, set(), 0):
            read[stream, index] = cell
    return read


def rows_of(rows: Buffers, layers: Sequence[int]) -> dict[Place, Row]:
    """Read the signatures beside the cells, the same in every layer, head, key and value."""
    k = by_layer(rows.k, rows.depth)  # [L, S, K, N, D]
    if not is_latent(rows):
        np.testing.assert_array_equal(by_layer(rows.v, rows.depth), -k)
    written = k[0, :, 0, :, 0] > 0  # [S, N]
    label = np.array(layers)[:, None] * HEADS + np.arange(HEADS)  # [L, K]
    np.testing.assert_array_equal(k[..., 3], label[:, None, :, None] * written[:, None])
    one = k[:1, :, :1, :, :3]
    np.testing.assert_array_equal(k[..., :3], np.broadcast_to(one, (*k.shape[:4], 3)))
    return {
        (int(s), int(i)): Row(int(k[0, s, 0, i, 0]) - 1, *map(int, k[0, s, 0, i, 1:3]))
        for s, i in np.argwhere(written)
    }


def is_latent(rows: Buffers) -> bool:
    """Whether values are numbers of the keys."""
    return isinstance(rows.v[0], Latent)


def by_layer(half: Sequence[Stored], depth: int) -> np.ndarray:
    """Keys or values of all layers, `[L, S, K, N, D]`; each array is of `depth` layers."""
    arrays = [np.asarray(read(x)) for x in half]
    arrays = [x.reshape(-1, depth, *x.shape[1:]).swapaxes(0, 1) for x in arrays]
    return np.concatenate(arrays)


def read(x: Stored) -> np.ndarray:
    """Keys or values of a layer; of quantised ones the integers that they were."""
    return np.rint(decoded(x)) if isinstance(x, Quantised) else np.asarray(x)


def assert_identical(one: Any, other: Any) -> None:
    """Two values are the same in structure, shapes, dtypes and every bit."""
    chex.assert_trees_all_equal_shapes_and_dtypes(one, other)
    chex.assert_trees_all_equal(jax.tree.map(bits, one), jax.tree.map(bits, other))


def bits(array: Any) -> np.ndarray:
    """The bytes of an array: to them -0 is not 0, and a NaN is itself."""
    return np.atleast_1d(np.asarray(array)).view(np.uint8)


class Oracles(list[Oracle]):
    """The oracles of the parts of a memory, and how their answers become one."""

    def fork(self) -> "Oracles":
        """Copy them."""
        return Oracles(oracle.fork() for oracle in self)

    def last(self, seq: int) -> int:
        """The largest position that all parts hold."""
        return min(oracle.last(seq) for oracle in self)

    def first(self, seq: int) -> int:
        """The smallest position that all parts hold; -1 if one is empty."""
        found = [oracle.first(seq) for oracle in self]
        return -1 if min(found) < 0 else max(found)

    def reached(self, seq: int) -> int:
        """Where a sequence goes on, less one. All parts agree."""
        (found,) = {oracle.reached(seq) for oracle in self}
        return found

    def plan(self, tokens: Sequence[Token], *, ubatch_size: int | None) -> tuple[dict, list[Plan]]:
        """Plan in every part: all faults, with the reason that counts; and the parts' ubatches."""
        plans = [oracle.plan(tokens, ubatch_size=ubatch_size) for oracle in self]
        # Faults are looked for in this order, in all parts before the next: a sequence refused
        # for one reason never gets to the next, and then no sequence gets cells.
        stages = (
            ("NOT_NEXT", "GAP", "DUPLICATE", "DECREASING", "DIVERGED"),
            ("UPDATE_PENDING",),
            ("LOST",),
        )
        faults: dict[int, Fault] = {}
        for stage in stages:
            for plan in plans:
                for seq, fault in plan.faults.items():
                    if fault.reason in stage:
                        faults.setdefault(seq, fault)
        return faults, plans


def mean_of_keys(
    oracle: Oracle, token: Token, places: Iterable[Place], layer: int, look: Look
) -> np.ndarray:
    """The mean of the keys that a token sees in a layer, as each head weighs them; `[H, D]`."""
    places = [*places]
    rows = np.array([oracle.rows[place] for place in places]) + [1, 0, 0]
    heads = np.arange(2 * HEADS)[:, None]
    label = layer * HEADS + heads // 2
    at = np.array([oracle.cells[place].position for place in places])
    logits = np.sin(token.position + 2 * at + heads) if look.biased else 0 * (heads + at)
    weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return np.concatenate([weights @ rows, label], axis=1)


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
        """Tables, rows and answers agree, for every cell and every sequence."""
        parts = zip(parts_of(self.memory), self.kind.layers, self.oracles, strict=True)
        for (table, rows), layers, oracle in parts:
            expected = {p: (c.position, c.owners, c.shift) for p, c in oracle.cells.items()}
            assert cells_of(table) == expected, jaxkv.show(self.memory)
            assert table.evicted_below.tolist() == [*oracle.lost.values()], jaxkv.show(self.memory)
            assert rows_of(rows, layers) == oracle.rows, jaxkv.show(self.memory)
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
    """Lead a memory through a short random life: holes, forks, several sequences, old rows.

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
