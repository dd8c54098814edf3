"""Tiles for each sequence: where its tokens go, and attention that reads a tile for who sees it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.kv.tiles import TILE, tile_of
from jaxkv.ops.attention import xla_cpu
from jaxkv.ops.attention.api import attend
from jaxkv.ops.attention.reference import reference
from jaxkv.ops.attention.sight import bias_of, mask_of
from jaxkv.ops.attention.softmax import Options
from jaxkv.ops.latent import Latent
from jaxkv.ops.quantised import decoded, encoded, zeros
from jaxkv.window import sliding
from tests import hlo
from tests.memories import TILES, drawing, drawn, run
from tests.oracle import _tiles
from tests.sights import sight_of_mask

core = pytest.mark.core
K, G, D, T = 2, 2, 8, 4
CLOSE = dict(rtol=0, atol=2e-6)
SCATTERED = replace(TILES, placement="scattered")
SINKS = jnp.linspace(-1.0, 1.0, K * G)


# ---------------------------------------------------------------------------------- where tokens go


def test_tiles_are_as_large_as_there_are_four_of_them():
    for cells in (*range(1, 300), 1000, 4096, 4160):
        assert {tile_of(cells)} == {len(tile) for tile in _tiles(cells)}


GOES = [
    # The first tile is begun by 0 alone, the second by two that share a token.
    ("0{0} . . . 0{1,2} . . .", [0], "0{0} 1{0} . . 0{1,2}"),
    ("0{0} . . . 0{1,2} . . .", [1], "0{0} . . . 0{1,2} . . . 1{1}"),
    ("0{0} . . . 0{1,2} . . .", [3, 1], "0{0} . . . 0{1,2} . . . 1{1} . . . 0{3}"),
    # Holes of its own come before a tile that is empty.
    ("0{0} . 1{0} 2{0} 3{0}", [0], "0{0} 4{0} 1{0} 2{0} 3{0}"),
    # No tile is empty: the lowest cell that is left, and it is not asked whose tile it is.
    (
        "0{0} . . . 0{1} . . . 0{2} . . . 0{1,2}", [3],
        "0{0} 0{3} . . 0{1} . . . 0{2} . . . 0{1,2}",
    ),
    # Of two tokens the second gets the next one.
    (
        "0{0} . . . 0{1} . . . 0{0,1} . . . 0{0,1}", [2, 3],
        "0{0} 0{2} 0{3} . 0{1} . . . 0{0,1} . . . 0{0,1}",
    ),
    # One is, and the lowest sequence gets it.
    (
        "0{0} . . . 0{0,1} . . . . . . . 0{0,1} . .", [3, 2],
        "0{0} 0{3} . . 0{0,1} . . . 0{2} . . . 0{0,1}",
    ),
]  # fmt: skip
"""Drawings before and after a token of each of some sequences."""


@pytest.mark.core
def test_a_token_goes_where_its_sequence_is_alone():
    for before, sequences, after in GOES:
        memory = drawn(before, TILES)
        batch = jaxkv.make_batch([[1]] * len(sequences), sequences=sequences)
        plan = jaxkv.init_batch(memory, batch, ubatch_size=2).check()
        assert drawing(jaxkv.apply(memory, plan)) == after


@pytest.mark.core
def test_the_owner_of_a_tile_is_found_in_every_word_of_owners():
    many = replace(TILES, sequences=40)
    for seq in (0, 31, 32, 33, 39):
        memory = drawn(f"0{{{seq}}}", many)
        plan = jaxkv.init_batch(memory, jaxkv.make_batch([1], sequences=seq)).check()
        assert drawing(jaxkv.apply(memory, plan)) == f"0{{{seq}}} 1{{{seq}}}"


@pytest.mark.core
def test_a_window_gives_the_cells_that_it_hides_and_no_other():
    full = [f"{i}{{{seq}}}" for seq in range(4) for i in range(4)]
    for cells in (full, full[:-2]):  # two of each sequence, or of three of them and two empty ones
        memory = drawn(" ".join(cells), replace(TILES, windows=(sliding(3),)))
        for count in (8, 9):
            plan = jaxkv.init_batch(memory, jaxkv.make_batch(range(count)), ubatch_size=16)
            assert plan.ok == (count == 8)


@pytest.mark.core
def test_of_hidden_cells_those_of_the_lowest_positions_are_taken():
    full = [f"{i}{{{seq}}}" for seq in range(4) for i in range(4)]
    memory = drawn(" ".join(full), replace(TILES, windows=(sliding(3),)))
    for count, taken in {1: [0], 3: [0, 4, 8]}.items():  # the cells of position 0
        batch = jaxkv.make_batch([9] * count, sequences=3)
        (ubatch,) = jaxkv.init_batch(memory, batch, ubatch_size=4).check().ubatches
        assert ubatch.slots[0, :count].tolist() == taken


def test_rows_of_some_sequences_go_into_tiles_of_their_streams():
    kind = replace(TILES, streams=2)
    batch = jaxkv.make_batch([[1, 2], [3], [4]], sequences=[3, 0, 1])
    plan = jaxkv.init_batch(kind.make(), batch, ubatch_size=2).check()
    assert len(plan.ubatches[0].row_stream) == 2 < kind.sequences
    memory = kind.make()
    for ubatch in plan.ubatches:
        memory = jaxkv.apply(memory, ubatch)
    assert drawing(memory) == "0{0} . . . 0{1} | 0{3} 1{3}"


def test_a_defrag_moves_whole_tiles():
    memory = drawn("0{0} . 1{0} . . . . . . . . . . 3{1,2} . 4{1}", TILES)
    packed = jaxkv.apply(memory, jaxkv.defrag_plan(memory))
    assert drawing(packed) == "0{0} . 1{0} . . 3{1,2} . 4{1}"


IN_PARTS = [
    "0{0} . . . . . . . . . . . 0{1} 1{1} . 2{1}",  # a hole in the tile that moves
    "0{0} . . . . . . . 0{1} 1{1} 2{1} 3{1} 4{1} . 5{1} 6{1}",  # neighbours in two tiles that do
]


@core
@pytest.mark.parametrize("before", IN_PARTS)
def test_moves_in_parts_end_as_all_at_once(before):
    """No tile is left half moved: two that are begun would stay so for good."""
    memory = drawn(before, TILES)
    at_once = jaxkv.apply(memory, jaxkv.defrag_plan(memory))
    for _ in range(4):
        memory = jaxkv.apply(memory, jaxkv.defrag_plan(memory, max_moves=1))
    assert drawing(memory) == drawing(at_once) != before


@core
def test_what_is_loaded_takes_whole_tiles_as_it_lay():
    """What was mixed stays so, and of what lay apart one begins where another ends."""
    memory = drawn("0{3}", TILES)
    for saved in ("0{0} 0{1} 1{0} 1{1} 2{0} 2{1}", "0{0} 1{0} 2{0} 0{1} 1{1} 2{1}"):
        data = jaxkv.snapshot.to_bytes(drawn(saved, SCATTERED), sequences=[0, 1])
        loaded = jaxkv.snapshot.load_into(data, memory, sequences=[0, 1])
        assert drawing(loaded) == "0{3} . . . " + saved


@core
def test_cells_that_a_window_counts_are_whole_tiles():
    sizes = {"layers": 1, "kv_heads": 1, "head_dim": 2, "window": sliding(5), "sequences": 2}
    assert jaxkv.make_kv_cache(placement="tiled", **sizes).table.num_cells % TILE == 0
    assert jaxkv.make_kv_cache(**sizes).table.num_cells % TILE


def test_cells_that_tiles_do_not_divide_are_refused():
    make = partial(jaxkv.make_kv_cache, layers=1, kv_heads=1, head_dim=2, placement="tiled")
    for cells in (257, 4100):
        with pytest.raises(ValueError, match=f"tiles of 64 divide, got {cells}: take"):
            jax.eval_shape(partial(make, cells=cells))
    for cells in (255, 256, 4160):
        jax.eval_shape(partial(make, cells=cells))


@core
def test_texts_that_grow_side_by_side_have_tiles_of_their_own():
    """Scattered, their tokens take turns in all tiles from the first step on."""

    def shared(placement):
        memory = jaxkv.make_kv_cache(
            layers=1, cells=1024, kv_heads=1, head_dim=2, sequences=T, placement=placement
        )
        ids, valid = jnp.arange(T), jnp.ones(T, bool)

        def step(memory, _):
            ubatch, ok = jaxkv.plan_step(memory, ids, ids, valid)
            return jaxkv.apply(memory, ubatch), ok

        memory, ok = jax.lax.scan(step, memory, length=200)
        assert ok.all() and jaxkv.used(memory) == 200 * T
        owners = np.asarray(memory.table.owners[0, 0]).reshape(-1, TILE)
        return sum(len(set(tile) - {0}) > 1 for tile in owners)

    assert shared("tiled") == 0 and shared("scattered") > 10


# ----------------------------------------------------------------------------------- how it is read


def case(kind, *, lists=1, cells=2048, size=TILE, seed=0, values=D + 1):
    """Queries, keys and values, and a sight in which tiles are seen by some tokens or one."""
    rng = np.random.default_rng(seed)
    tiles = cells // size
    shape = (lists, T, tiles)
    one = np.eye(T, dtype=bool)[rng.integers(0, T, (lists, tiles))].swapaxes(1, 2)
    sees = {
        "own": one & (rng.random((lists, 1, tiles)) < 0.9),
        "few": one & (rng.random((lists, 1, tiles)) < 0.04),
        "shared": np.ones(shape, bool),
        "both": one | (np.arange(tiles) < tiles // 5),  # a prompt, and what follows it in each
        "any": rng.random(shape) < 0.3,
        "nothing": np.zeros(shape, bool),
        "one token": one & (np.arange(T) == 1)[:, None],
    }[kind]
    mask = np.repeat(sees, size, axis=2) & (rng.random((lists, T, cells)) < 0.7)
    q, k, v = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((lists, T, K * G, D), (lists, K, cells, D), (lists, K, cells, values))
    )
    return q, k, v, replace(sight_of_mask(mask, np.arange(lists), lists), tile=size)


@jax.jit
def plain(q, k, v, sight, options):
    return reference(q, decoded(k), decoded(v), mask_of(sight), options)


KINDS = ("own", "few", "shared", "both", "any", "nothing", "one token")
FEW = ("both",)


@pytest.mark.parametrize(
    "kind", [kind if kind in FEW else pytest.param(kind, marks=core) for kind in KINDS]
)
def test_numbers_are_those_of_the_formula(kind):
    arrays = case(kind)
    options = Options(scale=0.3, softcap=2.0, sinks=SINKS)
    np.testing.assert_allclose(attend(*arrays, options), plain(*arrays, options), **CLOSE)


@core
@pytest.mark.parametrize(
    "sizes",
    [{"lists": 2}, {"cells": 2048 + 64}, {"size": 8, "cells": 1000}, {"lists": 2, "size": 128}],
    ids=str,
)
def test_tiles_of_any_size_in_several_pools(sizes):
    for kind in ("own", "few", "both", "any"):
        arrays = case(kind, **sizes)
        np.testing.assert_allclose(attend(*arrays, Options()), plain(*arrays, Options()), **CLOSE)


@core
def test_all_ways_are_taken():
    """The cases are on all sides of what is chosen by, and a wrong way shows."""
    cases = {}
    for kind in KINDS:
        *_, sight = case(kind)
        loops = mask_of(sight).reshape(1, T, -1, TILE).any(3)
        alone = np.asarray(loops.sum(1) == 1)[0]
        tiles = np.asarray(loops.any(1))[0]
        whole = lambda which: which.reshape(-1, 512 // TILE).any(1).mean()  # noqa: E731
        cases[kind] = whole(alone) < xla_cpu.FEW, whole(tiles & ~alone) < xla_cpu.FEW
    assert cases["own"] == (False, True) and cases["few"] == (True, True)
    assert cases["both"] == (False, True) and cases["shared"] == (True, False)


@core
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float64"])
def test_dtypes(dtype):
    for kind in ("own", "few", "both"):
        q, k, v, sight = case(kind, values=2 * D)
        if dtype == "int8":
            k, v = (encoded(x, zeros((1, 1, 1, x.shape[3]), dtype)) for x in (k, v))
        elif dtype == "bfloat16":
            k, v = k.astype(dtype), v.astype(dtype)
        with jax.enable_x64(dtype == "float64"):
            q = q.astype(dtype) if dtype == "float64" else q
            got = attend(q, k, v, sight, Options())
        assert got.dtype == q.dtype
        np.testing.assert_allclose(got, plain(q, k, v, sight, Options()), rtol=0, atol=1e-5)


@core
def test_values_that_are_a_part_of_their_keys():
    q, k, _, sight = case("both")
    got = attend(q, k, Latent(2, 6), sight, Options())
    np.testing.assert_allclose(got, plain(q, k, k[..., 2:6], sight, Options()), **CLOSE)


def slope(query, key, head):
    return -(0.1 ** (head + 1.0)) * abs(query - key)


@core
@pytest.mark.parametrize("form", ["function", "array", "array of all heads"])
@pytest.mark.parametrize("kind", ["own", "few", "both"])
def test_a_bias_is_added_and_hides(form, kind):
    q, k, v, sight = case(kind)
    if form == "function":
        memory_bias = jaxkv.ops.attention.bias.checked_bias(slope, (1, T, K * G, k.shape[2]))
        sight = replace(sight, bias=memory_bias, position=jnp.arange(k.shape[2])[None] % 50)
        sight = replace(sight, at=sight.at + 60)
        bias = bias_of(sight)
    else:
        heads = K * G if form == "array" else 1
        bias = np.random.default_rng(1).normal(size=(1, T, heads, k.shape[2])).astype(np.float32)
        bias[..., ::3] = -np.inf
        bias[:, 2] = -np.inf  # all that this token sees
        sight = replace(sight, bias=jnp.asarray(bias))
        bias = jnp.asarray(bias).swapaxes(1, 2)
    got = attend(q, k, v, sight, Options())
    logits = jnp.einsum("pthd,phnd->phtn", q * D**-0.5, jnp.repeat(k, G, axis=1)) + bias
    seen = np.asarray(mask_of(sight))[:, None] & np.isfinite(np.asarray(bias))
    weights = np.where(seen, np.exp(np.where(seen, logits, 0.0)), 0.0)
    total = weights.sum(-1, keepdims=True)
    wanted = np.einsum("phtn,phnd->pthd", weights / np.where(total, total, 1), np.repeat(v, G, 1))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=5e-6)


@core
@pytest.mark.parametrize("kind", ["own", "few", "both", "any"])
def test_a_nan_shows_to_who_sees_it_and_to_nobody_else(kind):
    q, k, v, sight = case(kind)
    mask = np.asarray(mask_of(sight))[0]
    token = int(mask.any(1).argmax())
    cell = int(mask[token].argmax())
    hidden = ~mask.any(0)
    dirty = np.array(k)
    dirty[:, :, hidden] = np.nan
    clean = attend(q, jnp.asarray(dirty), v, sight, Options())
    np.testing.assert_array_equal(clean, attend(q, k, v, sight, Options()))
    dirty[:, :, cell] = np.nan
    got = np.asarray(attend(q, jnp.asarray(dirty), v, sight, Options()))[0]
    np.testing.assert_array_equal(np.isnan(got).all(axis=(1, 2)), mask[:, cell])
    np.testing.assert_array_equal(got[~mask[:, cell]], clean[0][~mask[:, cell]])


@core
def test_derivatives_and_a_batch_of_memories():
    arrays = [case("both", cells=512, seed=seed) for seed in range(2)]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays)

    def loss(by, q, k, v, sight):
        return jnp.sum(jnp.sin(by(q, k, v, sight, Options(sinks=SINKS))))

    derive = partial(jax.grad, argnums=(0, 1, 2))
    together = jax.jit(jax.vmap(derive(partial(loss, attend))))(*batch)
    said = jax.jit(jax.vmap(partial(attend, options=Options())))(*batch)
    for i, one in enumerate(arrays):
        np.testing.assert_allclose(said[i], plain(*one, Options()), **CLOSE)
        for a, b in zip(together, derive(partial(loss, plain))(*one), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-5)


@core
def test_what_it_holds_is_a_part_of_a_pool():
    """Logits of a token for its tiles, and of what several see; no copy of keys or values."""
    for dtype in (jnp.float32, jnp.bfloat16):
        q, k, v, sight = jax.eval_shape(partial(case, "own", cells=32768, values=D))
        k, v = (jax.ShapeDtypeStruct((1, K, 32768, 64), dtype) for _ in range(2))
        q = jax.ShapeDtypeStruct((1, T, K * G, 64), jnp.float32)
        compiled = attend.lower(q, k, v, sight, Options()).compile()
        assert hlo.temporary_bytes(compiled) < K * 32768 * 64 * k.dtype.itemsize / 2


@core
@pytest.mark.parametrize("cells", [4100, 4160])
def test_a_step_holds_less_than_the_keys_of_a_pool(cells):
    """Or it is refused: with small tiles it would be up to four times as much."""
    sizes = {"layers": 1, "kv_heads": 3, "head_dim": 64, "sequences": 8}
    make = partial(jaxkv.make_kv_cache, cells=cells, placement="tiled", **sizes)
    try:
        memory = jax.eval_shape(make)
    except ValueError:
        return

    def step(memory, q, x):
        ids = jnp.arange(8)
        ubatch, _ = jaxkv.plan_step(memory, ids, ids, jnp.ones(8, bool))
        return jaxkv.attend(jaxkv.apply(memory, ubatch), 0, ubatch, q, x, x)

    q, x = (jax.ShapeDtypeStruct((1, 8, heads, 64), jnp.float32) for heads in (9, 3))
    compiled = jax.jit(step, donate_argnums=0).lower(memory, q, x).compile()
    assert hlo.temporary_bytes(compiled) < cells * 3 * 64 * 4


@core
def test_a_memory_asks_for_it_in_a_step_alone():
    """The program of a prompt is that of any pool."""
    memory = TILES.make()
    sizes = {}
    for count in (TILES.sequences, TILES.sequences + 4):
        ids = jnp.arange(count) % TILES.sequences
        batch = jaxkv.make_batch(jnp.arange(count), sequences=ids)
        (ubatch,) = jaxkv.init_batch(memory, batch).ubatches
        sizes[count] = jaxkv.kv.mask.sight_of(memory.table, ubatch).tile
    assert sizes == {TILES.sequences: 4, TILES.sequences + 4: None}


@core
@pytest.mark.parametrize("sequences", [[0, 1, 2], [3, 0]])
def test_a_life_in_tiles_gives_the_logits_of_any_pool(sequences):
    def lived(kind):
        memory, said = kind.make(), []
        for seq in sequences:
            memory, logits = run(memory, jaxkv.make_batch([1, 2, 3], sequences=seq))
            said.append(logits)
        memory = jaxkv.seq_cp(memory, sequences[0], sequences[1])
        memory, _ = jaxkv.seq_rm(memory, sequences[0], 1)
        memory, logits = run(memory, jaxkv.make_batch([[4]] * len(sequences), sequences=sequences))
        return np.concatenate([*said, logits])

    np.testing.assert_allclose(lived(TILES), lived(SCATTERED), atol=1e-5)
