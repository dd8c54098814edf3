"""The caches under test, and two tiny models for them.

A test of a property runs over `ALL_KINDS`: add a new kind there.
"""

import functools
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.cache import merge, split
from jaxkv.core.array_utils import is_concrete
from jaxkv.hybrid import compose_hybrid_cache
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.cells import Cells
from jaxkv.kv.mask import visible_cells_mask
from jaxkv.kv.placement import Placement, StreamCells
from jaxkv.ops.storage.forms import storage_of
from jaxkv.ops.storage.head_rows import split_rows_of_cells
from jaxkv.ops.storage.latent import ValueSlice
from jaxkv.ops.storage.storage import Stored
from jaxkv.window import Window
from tests.helpers.batch_rules import Place
from tests.helpers.oracles import Oracles
from tests.helpers.reference_cache import Oracle
from tests.helpers.reference_cells import Content

LAYERS = 2
HEADS = 2  # of keys and values; queries have twice as many
SIZE = 4
VOCABULARY = 16
ROPE = jaxkv.Rope.make(SIZE, base=100.0)


def attention_cache(**sizes: Any) -> Any:
    """Make a cache of attention layers with exactly the requested cells, from one dict."""
    names = inspect.signature(jaxkv.CacheSpec.attention).parameters
    spec = jaxkv.CacheSpec.attention(**{n: sizes.pop(n) for n in names if n in sizes})
    if spec.window and "cells" in sizes:
        sizes["max_rollback"] = sizes["cells"]
    return jaxkv.make_cache(spec, **sizes)


def recurrent_cache(layers: int, states: Any, shard_dims: Any = None, **sizes: Any) -> Any:
    return jaxkv.make_cache(jaxkv.CacheSpec.recurrent(layers, states, shard_dims), **sizes)


@dataclass(frozen=True)
class Kind:
    """A cache under test: its sizes, its construction, and its oracles.

    Each window is a separate part with its share of the layers; a single one is no hybrid.

    latent: the range of a key's numbers that are its value, as (start, stop).
    """

    name: str
    cells: int
    sequences: int
    placement: str | Placement = "any"
    streams: int = 1
    windows: tuple[jaxkv.Window | None, ...] = (None,)
    dtype: str = "float32"
    stacked: bool = False
    lanes: int = 1
    latent: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """For each part, the layers that it serves."""
        count = len(self.windows)
        return tuple(tuple(range(part, LAYERS, count)) for part in range(count))

    def value(self, key: np.ndarray) -> np.ndarray:
        """The value that `sign` writes for a key `[..., D]`; linear, so means of keys map too."""
        return -key if self.latent is None else key[..., slice(*self.latent)]

    def make(self, rope: jaxkv.rope.Rope | None = ROPE) -> Any:
        """Make an empty cache. Without a rope an update does not change signatures (`sign`)."""
        sizes = dict(cells=self.cells, kv_heads=HEADS, head_dim=SIZE, rope=rope, dtype=self.dtype)
        sizes |= dict(sequences=self.sequences, streams=self.streams, placement=self.placement)
        sizes |= dict(stacked=self.stacked, lanes=self.lanes)
        sizes |= dict(value_dim=self.latent and slice(*self.latent))
        parts = [
            attention_cache(layers=len(layers), window=window, **sizes)
            for window, layers in zip(self.windows, self.layers, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        return compose_hybrid_cache(*zip(parts, self.layers, strict=True))

    def oracles(self) -> Oracles:
        sizes = (self.cells, self.sequences, self.streams, str(self.placement))
        windows = [window and (window.rule, window.width) for window in self.windows]
        return Oracles(Oracle(*sizes, window=window) for window in windows)


class LastFit(Placement):
    """A placement of a user: cells with higher indices first."""

    def sort_keys(self, stream: StreamCells) -> jax.Array:
        return -jnp.arange(stream.free.size)


SMALL = Kind("small", cells=12, sequences=3)
WIDE = Kind("two-owner-words", cells=40, sequences=40)
SPLIT = Kind("split", cells=8, sequences=3, streams=3)
WINDOW = replace(SMALL, name="window", windows=(Window.sliding(3),))
CHUNKS = replace(SPLIT, name="chunks", cells=10, windows=(Window.chunked(4),))
TWO = Kind("full-and-window", cells=14, sequences=3, windows=(None, Window.sliding(4)))
TWO_SPLIT = Kind("full-and-window-split", 10, 3, "any", 3, (None, Window.symmetric(5)))
GROUPS = Kind("groups", cells=10, sequences=4, streams=2)
GROUPS_WINDOW = replace(GROUPS, name="groups-window", cells=9, windows=(Window.sliding(3),))
GROUPS_CHUNKS = Kind("groups-full-and-chunks", 12, 8, "any", 4, (None, Window.chunked(4)))
STRIPES = Kind("striped", cells=16, sequences=3, placement="striped:2")
GROUPS_STRIPES = Kind("groups-striped-window", 9, 4, "striped:3", 2, (Window.sliding(3),))
TILES = Kind("tiled", cells=16, sequences=4, placement="tiled")
GROUPS_TILES = replace(
    TILES, name="groups-tiled-full-and-window", streams=2, windows=(None, Window.sliding(3))
)
GROUPS_LAST_FIT = replace(GROUPS, name="groups-last-fit", placement=LastFit())
LAST_FIT_WINDOW = replace(WINDOW, name="last-fit-window", placement=LastFit())
CODES = replace(GROUPS, name="groups-int8", dtype="int8")
LATENT = replace(GROUPS, name="groups-latent", latent=(1, 4))
STACKED = replace(GROUPS, name="stacked-groups", stacked=True)
HEAD_ROWS = replace(GROUPS, name="groups-rows-of-heads", lanes=HEADS * SIZE + 1)
ALL_KINDS = [SMALL, WIDE, STRIPES, SPLIT, WINDOW, CHUNKS, TWO, TWO_SPLIT, GROUPS]
ALL_KINDS += [GROUPS_WINDOW, GROUPS_CHUNKS, GROUPS_STRIPES, TILES, GROUPS_TILES, STACKED]
ALL_KINDS += [HEAD_ROWS]

WIDTH = 8
"""Tokens of a row, if all sequences get tokens at once."""


@jax.jit
def sign(
    cache: Any, ubatch: jaxkv.Ubatch, visible_until: jax.Array | None = None
) -> tuple[Any, list[jax.Array], list[jax.Array]]:
    """Apply a ubatch and write a signature as each token's key and value; `contents_of` reads them.

    Queries are zero, so the output of a token is the mean of visible signatures. `Kind.value`
    defines the values: negated keys, or a slice of them.

    Returns:
      The cache; masks of the parts, `[R, T, N]`; and outputs of the layers, `[R, T, H, Dv]`.
    """
    step = jaxkv.apply(cache, ubatch)
    saw = []
    for layer in range(LAYERS):
        step, seen = attend_signed(step, layer, visible_until)
        saw.append(seen)
    paths = [(i,) for i in range(len(cache.parts))] if ubatch.spec.parts else [()]
    masks = [visible_cells_mask(step.part(*path), visible_until=visible_until) for path in paths]
    return step.cache, masks, saw


def attend_signed(
    step: jaxkv.Step, layer: int, visible_until: jax.Array | None = None
) -> tuple[jaxkv.Step, jax.Array]:
    """Attend with signatures in one layer; the step and the output, `[R, T, H, Dv]`."""
    *path, _ = step.table.find_layer("attend", layer)
    latent = is_latent(step.part(*path).buffers)
    fields = (step.sequences + 1, step.positions, step.tokens)
    labels = [0 * step.tokens + layer * HEADS + h for h in range(HEADS)]
    k = jnp.stack([jnp.stack([*fields, label], -1) for label in labels], axis=-2)
    k = k.astype(jnp.float32)
    q = jnp.zeros((*step.valid.shape, 2 * HEADS, SIZE))
    v = None if latent else -k
    return jaxkv.attend(step, layer, q, k, v, visible_until=visible_until)


@jax.jit
def plan_rows(cache: Any, tokens: Any, valid: Any, positions: Any = None) -> jaxkv.Plan:
    """Plan rows of tokens, one for each sequence, as one ubatch; `[Q, T]`."""
    sequences = jnp.broadcast_to(jnp.arange(tokens.shape[0])[:, None], tokens.shape)
    batch = jaxkv.make_batch(tokens, sequences=sequences, positions=positions, valid=valid != 0)
    return jaxkv.init_batch(cache, batch)


def _weights() -> dict[str, np.ndarray]:
    """Make the weights of `run_model` on the CPU: an import must not initialise devices."""
    rng, width, narrow = np.random.default_rng(0), 2 * HEADS * SIZE, HEADS * SIZE
    shapes = {"embedding": (VOCABULARY, width)}
    sizes = {"q": width, "k": narrow, "v": narrow, "out": width}
    shapes |= {name: (LAYERS, width, size) for name, size in sizes.items()}
    drawn = {name: rng.normal(size=shape) / shape[-2] ** 0.5 for name, shape in shapes.items()}
    drawn["embedding"] *= 4
    return {name: x.astype(np.float32) for name, x in drawn.items()}


WEIGHTS = _weights()


@jax.jit
def run_model(step: jaxkv.Step) -> tuple[jaxkv.Step, jax.Array]:
    """Run a tiny transformer; the step, and logits `[O, V]`."""
    x, heads = jnp.asarray(WEIGHTS["embedding"])[step.tokens], (*step.valid.shape, -1, SIZE)
    for layer in range(LAYERS):
        q, k, v = ((x @ WEIGHTS[name][layer]).reshape(heads) for name in "qkv")
        q, k = (ROPE.rotate(one, step.positions) for one in (q, k))
        step, out = jaxkv.attend(step, layer, q, k, v)
        x = jnp.tanh(x + out.reshape(x.shape) @ WEIGHTS["out"][layer])
    x = x.reshape(-1, x.shape[-1])[step.outputs]
    return step, x @ WEIGHTS["embedding"].T


@jax.jit
def run_ubatch(cache: Any, ubatch: jaxkv.Ubatch) -> tuple[Any, jax.Array]:
    """Run the tiny transformer over a ubatch; the cache, and logits `[O, V]`."""
    step, logits = run_model(jaxkv.apply(cache, ubatch))
    return step.cache, logits


def run_batch(cache: Any, batch: jaxkv.Batch, *, ubatch_size: int = 4) -> tuple[Any, jax.Array]:
    """Plan a batch that fits and run it; the cache, and logits in the order of the batch."""
    plan = jaxkv.init_batch(cache, batch, ubatch_size=ubatch_size).check()
    logits = []
    for ubatch in plan.ubatches:
        cache, out = run_ubatch(cache, ubatch)
        logits.append(out)
    return cache, plan.gather_outputs(logits)


@functools.cache
def fill_cache(*counts: int, kind: Kind = SMALL) -> Any:
    """Make a cache with `counts` tokens of sequences 0, 1, 2 ..., buffers included.

    All tests share it; donating it is not allowed.
    """
    cache = kind.make()
    for seq, count in enumerate(counts):
        for start in range(0, count, 4):
            tokens = range(start + 1, min(start + 4, count) + 1)
            cache, _ = run_batch(cache, jaxkv.make_batch(tokens, sequences=seq))
    return cache


def apply_update(cache: Any) -> Any:
    return jaxkv.apply(cache, jaxkv.init_update(cache))


def parse_cache(cells: str, kind: Kind = SMALL) -> Any:
    """Make a cache from a drawing: `0{0} 1{0,1} .`, positions with their owners, or empty cells.

    A third part, as in `7{0}+5`, is the pending shift. `|` separates streams, and omitted cells are
    empty.
    """
    table, buffers = split(kind.make())
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
    return merge(replace(table, **jax.tree.map(jnp.asarray, fields)), buffers)


def drawing(cache: Any) -> str:
    """Draw cells as `parse_cache` reads them, each stream up to its last used cell."""
    cells, lines = cells_of(cache.table), []
    for stream in range(cache.table.streams):
        used = [index for where, index in cells if where == stream]
        line = ["."] * (max(used, default=-1) + 1)
        for index in used:
            position, owners, shift = cells[stream, index]
            seqs = ",".join(map(str, sorted(owners)))
            line[index] = f"{position}{{{seqs}}}" + (f"{shift:+}" if shift else "")
        lines.append(" ".join(line))
    return " | ".join(lines)


def cells_of(table: Cells) -> dict[Place, tuple[int, set[int], int]]:
    """Read a table bit by bit: for each used cell its position, owners and shift."""
    position, owners, shift = (x.tolist() for x in (table.position, table.owners, table.shift))
    read = {}
    for stream, index in np.ndindex(*table.position.shape):
        first = stream * table.sequences_per_stream
        bits = sum(words[index] << 32 * i for i, words in enumerate(owners[stream]))
        mine = {first + bit for bit in range(bits.bit_length()) if bits >> bit & 1}
        cell = position[stream][index], mine, shift[stream][index]
        if cell != (-1, set(), 0):
            read[stream, index] = cell
    return read


def contents_of(buffers: Buffers, layers: Sequence[int]) -> dict[Place, Content]:
    """Read the signatures of the cells, the same in every layer, head, key and value."""
    k = np.rint(by_layer(buffers.k, buffers))  # [L, S, K, N, D]
    if not is_latent(buffers):
        np.testing.assert_array_equal(np.rint(by_layer(buffers.v, buffers)), -k)
    written = k[0, :, 0, :, 0] > 0  # [S, N]
    label = np.array(layers)[:, None] * HEADS + np.arange(HEADS)  # [L, K]
    np.testing.assert_array_equal(k[..., 3], label[:, None, :, None] * written[:, None])
    one = k[:1, :, :1, :, :3]
    np.testing.assert_array_equal(k[..., :3], np.broadcast_to(one, (*k.shape[:4], 3)))
    return {
        (int(s), int(i)): Content(int(k[0, s, 0, i, 0]) - 1, *map(int, k[0, s, 0, i, 1:3]))
        for s, i in np.argwhere(written)
    }


def is_latent(buffers: Any) -> bool:
    return isinstance(buffers, Buffers) and isinstance(buffers.v[0], ValueSlice)


def by_layer(half: Sequence[Stored], buffers: Buffers) -> np.ndarray:
    """Keys or values of all layers, `[L, S, K, N, D]`."""
    arrays = [storage_of(x).decode() for x in half]
    sizes = buffers.heads_per_row, buffers.head_sizes[0].head_dim
    arrays = [np.asarray(split_rows_of_cells(x, *sizes)) for x in arrays]
    depth = buffers.layers_per_array
    return np.concatenate([x.reshape(-1, depth, *x.shape[1:]).swapaxes(0, 1) for x in arrays])


def assert_identical(one: Any, other: Any) -> None:
    """Two values are equal in structure, shapes, dtypes and every bit."""
    chex.assert_trees_all_equal_shapes_and_dtypes(one, other)
    chex.assert_trees_all_equal(jax.tree.map(bits, one), jax.tree.map(bits, other))


def assert_same_content(one: Any, other: Any) -> None:
    """Two caches are identical but for versions, which depend on the edits that led to them."""

    def without_versions(path: tuple, x: Any) -> Any:
        return x if getattr(path[-1], "name", "") != "version" else jnp.zeros_like(x)

    assert_identical(*(jax.tree_util.tree_map_with_path(without_versions, x) for x in (one, other)))


def bits(array: Any) -> np.ndarray:
    """The bytes of an array: -0 differs from 0, and a NaN equals itself."""
    return np.atleast_1d(np.asarray(array)).view(np.uint8)


def edit(verb: str, cache: Any, *args: Any) -> tuple[Any, Any]:
    """Call an edit by its name; the cache, and whether the edit was made.

    The last argument of `seq_add` and `seq_div` is a keyword.
    """
    keyword, options = {"seq_add": "delta", "seq_div": "divisor"}.get(verb), {}
    if keyword:
        *args, options[keyword] = args
    found = getattr(jaxkv, verb)(cache, *args, **options)
    if not isinstance(found, jaxkv.EditResult):
        return found, True
    if is_concrete(found):
        assert (found.reason == jaxkv.Reason.OK) == found.ok
    return found


def delete_copy(tree: Any) -> Any:
    """A copy whose arrays are deleted, as donation does."""
    copy = jax.tree.map(jnp.copy, tree)
    jax.tree.map(lambda x: x.delete(), copy)
    return copy
