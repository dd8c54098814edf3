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
CLOSE = dict(rtol=0, atol=5e-6)
SCATTERED = replace(TILES, placement="scattered")
SINKS = jnp.linspace(-1.0, 1.0, K * G)


# ---- where tokens go


def test_tile_of_matches_oracle():
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


@core
def test_init_batch_tiled_takes_tiles_of_its_sequence_first():
    for before, sequences, after in GOES:
        memory = drawn(before, TILES)
        batch = jaxkv.make_batch([[1]] * len(sequences), sequences=sequences)
        plan = jaxkv.init_batch(memory, batch, ubatch_size=2).check()
        assert drawing(jaxkv.apply(memory, plan)) == after


@core
def test_init_batch_tiled_finds_owners_in_every_word():
    many = replace(TILES, sequences=40)
    for seq in (0, 31, 32, 39):
        memory = drawn(f"0{{{seq}}}", many)
        plan = jaxkv.init_batch(memory, jaxkv.make_batch([1], sequences=seq)).check()
        assert drawing(jaxkv.apply(memory, plan)) == f"0{{{seq}}} 1{{{seq}}}"


@core
def test_init_batch_tiled_takes_hidden_cells_of_the_lowest_positions():
    """Where none is empty: two of each sequence; or of three of them, and two empty ones."""
    full = [f"{i}{{{seq}}}" for seq in range(4) for i in range(4)]

    def planned(cells, count):
        memory = drawn(" ".join(cells), replace(TILES, windows=(sliding(3),)))
        there = np.arange(9) < count
        batch = jaxkv.make_batch([9] * 9, sequences=3, valid=there)
        return jaxkv.init_batch(memory, batch, ubatch_size=16)

    for cells in (full, full[:-2]):
        assert planned(cells, 8).ok and not planned(cells, 9).ok
    (ubatch,) = planned(full, 3).ubatches
    assert ubatch.slots[0, :3].tolist() == [0, 4, 8]  # the cells of position 0


@core
def test_init_batch_tiled_rows_take_tiles_of_their_streams():
    kind = replace(TILES, streams=2)
    batch = jaxkv.make_batch([[1, 2], [3], [4]], sequences=[3, 0, 1])
    memory = kind.make()
    for ubatch in jaxkv.init_batch(memory, batch, ubatch_size=2).check().ubatches:
        memory = jaxkv.apply(memory, ubatch)
    assert drawing(memory) == "0{0} . . . 0{1} | 0{3} 1{3}"


@core
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("0{0} . 1{0} . . . . . . . . . . 3{1,2} . 4{1}", "0{0} . 1{0} . . 3{1,2} . 4{1}"),
        # Neighbours in two tiles that move.
        (
            "0{0} . . . . . . . 0{1} 1{1} 2{1} 3{1} 4{1} . 5{1} 6{1}",
            "0{0} . . . 4{1} . 5{1} 6{1} 0{1} 1{1} 2{1} 3{1}",
        ),
    ],
)
def test_defrag_tiled_moves_whole_tiles_all_at_once_or_in_parts(before, after):
    """No tile is left half moved: two that are begun would stay so for good."""
    for most, times in ((None, 1), (1, 4)):
        memory = drawn(before, TILES)
        for _ in range(times):
            memory = jaxkv.apply(memory, jaxkv.defrag_plan(memory, max_moves=most))
        assert drawing(memory) == after


@core
def test_load_into_tiled_takes_whole_tiles():
    """What was mixed stays so, and of what lay apart one begins where another ends."""
    memory = drawn("0{3}", TILES)
    for saved in ("0{0} 0{1} 1{0} 1{1} 2{0} 2{1}", "0{0} 1{0} 2{0} 0{1} 1{1} 2{1}"):
        data = jaxkv.snapshot.to_bytes(drawn(saved, SCATTERED), sequences=[0, 1])
        loaded = jaxkv.snapshot.load_into(data, memory, sequences=[0, 1])
        assert drawing(loaded) == "0{3} . . . " + saved


def test_make_kv_cache_tiled_cells_are_whole_tiles():
    make = partial(jaxkv.make_kv_cache, layers=1, kv_heads=1, head_dim=2, placement="tiled")
    memory = jax.eval_shape(partial(make, window=sliding(5), sequences=2))
    assert memory.table.num_cells % TILE == 0
    for cells in (257, 4100):
        with pytest.raises(ValueError, match=f"tiles of 64 divide, got {cells}: take"):
            jax.eval_shape(partial(make, cells=cells))
    for cells in (255, 256, 4160):
        jax.eval_shape(partial(make, cells=cells))


@core
def test_plan_step_tiled_keeps_texts_in_tiles_of_their_own():
    memory = jaxkv.make_kv_cache(
        layers=1, cells=1024, kv_heads=1, head_dim=2, sequences=T, placement="tiled"
    )
    ids, valid = jnp.arange(T), jnp.ones(T, bool)

    def step(memory, _):
        ubatch, ok = jaxkv.plan_step(memory, ids, ids, valid)
        return jaxkv.apply(memory, ubatch), ok

    memory, ok = jax.lax.scan(step, memory, length=200)
    assert ok.all() and jaxkv.used(memory) == 200 * T
    owners = np.asarray(memory.table.owners[0, 0]).reshape(-1, TILE)
    assert all(len(set(tile) - {0}) == 1 for tile in owners if tile.any())


# ---- how it is read


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


@core
@pytest.mark.parametrize(
    ("kinds", "sizes", "dtype", "options"),
    [
        (KINDS, {}, None, Options(scale=0.3, softcap=2.0, sinks=SINKS)),
        (("own", "few", "both", "any"), {"cells": 2048 + 64}, None, Options()),
        (("own", "few", "both", "any"), {"size": 8, "cells": 1000}, None, Options()),
        (("own", "few", "both", "any"), {"lists": 2, "size": 128}, None, Options()),
        (("own", "few", "both"), {"values": 2 * D}, "int8", Options()),
        (("own", "few", "both"), {"values": 2 * D}, "bfloat16", Options()),
        (("both",), {}, "latent", Options()),
    ],
)
def test_attend_tiled_matches_reference(kinds, sizes, dtype, options):
    for kind in kinds:
        q, k, v, sight = case(kind, **sizes)
        if dtype == "int8":
            k, v = (encoded(x, zeros((1, 1, 1, x.shape[3]), dtype)) for x in (k, v))
        elif dtype == "bfloat16":
            k, v = k.astype(dtype), v.astype(dtype)
        elif dtype == "latent":
            v = Latent(2, 6)
        values = k[..., 2:6] if dtype == "latent" else decoded(v)
        got = attend(q, k, v, sight, options)
        wanted = reference(q, decoded(k), values, mask_of(sight), options)
        assert got.dtype == q.dtype
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 if dtype else 2e-6)


@core
def test_attend_tiled_cases_take_every_way():
    """The kinds of `case` lie on all sides of what a way is chosen by."""
    ways = set()
    for kind in ("own", "few", "shared"):
        *_, sight = case(kind)
        seen = np.asarray(mask_of(sight)).reshape(T, -1, TILE).any(2)
        alone, tiles = seen.sum(0) == 1, seen.any(0)
        share = [x.reshape(-1, 512 // TILE).any(1).mean() for x in (alone, tiles & ~alone)]
        ways.add(tuple(one < xla_cpu.FEW for one in share))
    assert ways == {(False, True), (True, True), (True, False)}


def slope(query, key, head):
    return -(0.1 ** (head + 1.0)) * abs(query - key)


@core
@pytest.mark.parametrize("form", ["function", "array of all heads"])
def test_attend_tiled_bias_is_added_and_hides(form):
    for kind in ("own", "few", "both"):
        q, k, v, sight = case(kind)
        if form == "function":
            bias = jaxkv.ops.attention.bias.checked_bias(slope, (1, T, K * G, k.shape[2]))
            position = jnp.arange(k.shape[2])[None] % 50
            sight = replace(sight, bias=bias, position=position, at=sight.at + 60)
            bias = bias_of(sight)
        else:
            bias = np.random.default_rng(1).normal(size=(1, T, 1, k.shape[2])).astype(np.float32)
            bias[..., ::3] = -np.inf
            bias[:, 2] = -np.inf  # all that this token sees
            sight = replace(sight, bias=jnp.asarray(bias))
            bias = jnp.asarray(bias).swapaxes(1, 2)
        got = attend(q, k, v, sight, Options())
        logits = jnp.einsum("pthd,phnd->phtn", q * D**-0.5, jnp.repeat(k, G, axis=1)) + bias
        seen = np.asarray(mask_of(sight))[:, None] & np.isfinite(np.asarray(bias))
        weights = np.where(seen, np.exp(np.where(seen, logits, 0.0)), 0.0)
        weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
        wanted = np.einsum("phtn,phnd->pthd", weights, np.repeat(v, G, 1))
        np.testing.assert_allclose(got, wanted, **CLOSE)


@core
def test_attend_tiled_nan_reaches_only_tokens_that_see_it():
    for kind in ("own", "few", "both", "any"):
        q, k, v, sight = case(kind)
        mask = np.asarray(mask_of(sight))[0]
        cell = int(mask[mask.any(1).argmax()].argmax())
        dirty = np.array(k)
        dirty[:, :, ~mask.any(0)] = np.nan
        clean = attend(q, jnp.asarray(dirty), v, sight, Options())
        np.testing.assert_array_equal(clean, attend(q, k, v, sight, Options()))
        dirty[:, :, cell] = np.nan
        got = np.asarray(attend(q, jnp.asarray(dirty), v, sight, Options()))[0]
        np.testing.assert_array_equal(np.isnan(got).all(axis=(1, 2)), mask[:, cell])
        np.testing.assert_array_equal(got[~mask[:, cell]], clean[0][~mask[:, cell]])


@core
def test_attend_tiled_derivatives_in_vmap_match_reference():
    arrays = [case("both", cells=512, seed=seed) for seed in range(2)]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays)

    def plain(q, k, v, sight, options):
        return reference(q, k, v, mask_of(sight), options)

    def derive(by):
        def loss(q, k, v, sight):
            out = by(q, k, v, sight, Options(sinks=SINKS))
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2), has_aux=True)))(*batch)

    for one, other in zip(*(jax.tree.leaves(derive(by)) for by in (attend, plain)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@core
def test_plan_step_tiled_holds_less_than_the_keys_of_a_pool():
    """No copy of keys or values, and logits of a token for its tiles alone."""
    sizes = {"layers": 1, "kv_heads": 3, "head_dim": 64, "sequences": 8}
    make = partial(jaxkv.make_kv_cache, cells=4160, placement="tiled", **sizes)

    def step(memory, q, x):
        ids = jnp.arange(8)
        ubatch, _ = jaxkv.plan_step(memory, ids, ids, jnp.ones(8, bool))
        return jaxkv.attend(jaxkv.apply(memory, ubatch), 0, ubatch, q, x, x)

    q, x = (jax.ShapeDtypeStruct((1, 8, heads, 64), jnp.float32) for heads in (9, 3))
    compiled = jax.jit(step, donate_argnums=0).lower(jax.eval_shape(make), q, x).compile()
    assert hlo.temporary_bytes(compiled) < 4160 * 3 * 64 * 4


@core
def test_run_tiled_matches_scattered():
    """Tiles are asked for in a step alone; the program of a prompt is that of any pool."""

    def lived(kind):
        memory, said = kind.make(), []
        for seq in (0, 1, 2):
            memory, logits = run(memory, jaxkv.make_batch([1, 2, 3], sequences=seq))
            said.append(logits)
        memory = jaxkv.seq_cp(memory, 0, 1)
        memory, _ = jaxkv.seq_rm(memory, 0, 1)
        batch = jaxkv.make_batch([[4]] * 3, sequences=[0, 1, 2])
        (ubatch,) = jaxkv.init_batch(memory, batch).ubatches
        tile = jaxkv.kv.mask.sight_of(memory.table, ubatch).tile
        memory, logits = run(memory, batch)
        return np.concatenate([*said, logits]), tile

    (tiled, tile), (wanted, none) = lived(TILES), lived(SCATTERED)
    assert (tile, none) == (4, None)
    np.testing.assert_allclose(tiled, wanted, atol=1e-5)
    (ubatch,) = jaxkv.init_batch(TILES.make(), jaxkv.make_batch(range(8)), ubatch_size=8).ubatches
    assert jaxkv.kv.mask.sight_of(TILES.make().table, ubatch).tile is None
