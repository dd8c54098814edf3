"""Tiles of one sequence each, and attention that reads a tile for the tokens that attend to it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.kv.placement import TILE, StreamCells, tile_size
from jaxkv.kv.tiles import choose_for_list
from jaxkv.ops.attention.bias import check_bias
from jaxkv.ops.attention.softmax import AttentionOptions
from jaxkv.ops.attention.visibility import compute_mask
from jaxkv.ops.storage.latent import ValueSlice
from jaxkv.ops.storage.quantised import Quantised
from jaxkv.window import Window
from tests.attention.ways import attend, attend_with_mass
from tests.helpers import hlo
from tests.helpers.batch_rules import Token
from tests.helpers.caches import TILES, attention_cache, drawing, parse_cache
from tests.helpers.reference_cache import Oracle
from tests.helpers.reference_cells import Cell, make_tiles
from tests.helpers.steps import apply_plan
from tests.helpers.visibility import make_visibility

core = pytest.mark.core
K, G, D, T = 2, 2, 8, 4
SCATTERED = replace(TILES, placement="any")
SINKS = jnp.linspace(-1.0, 1.0, K * G)


def test_tile_of_matches_oracle():
    for cells in (*range(1, 300), 1000, 4096, 4160):
        assert {tile_size(cells)} == {len(tile) for tile in make_tiles(cells)}


@core
def test_load_into_tiled_takes_whole_tiles():
    """Interleaved cells stay interleaved; separate sequences start where the one before ends."""
    cache = parse_cache("0{3}", TILES)
    for saved in ("0{0} 0{1} 1{0} 1{1} 2{0} 2{1}", "0{0} 1{0} 2{0} 0{1} 1{1} 2{1}"):
        data = jaxkv.snapshot.save(parse_cache(saved, SCATTERED), sequences=[0, 1])
        loaded = jaxkv.snapshot.load(data, into=cache, sequences=[0, 1])
        assert drawing(loaded) == "0{3} . . . " + saved


def test_make_cache_tiled_cells_are_whole_tiles():
    make = partial(attention_cache, layers=1, kv_heads=1, head_dim=2, placement="tiled")
    cache = jax.eval_shape(partial(make, window=Window.sliding(5), sequences=2))
    assert cache.table.num_cells % TILE == 0
    jax.eval_shape(partial(make, cells=255))  # too few for separate tiles


def case(kind, *, lists=1, cells=2048, size=TILE, seed=0, values=D + 1):
    """Queries, keys and values, and a mask whose tiles are visible to one or to several tokens."""
    rng = np.random.default_rng(seed)
    tiles = cells // size
    shape = (lists, T, tiles)
    one = np.eye(T, dtype=bool)[rng.integers(0, T, (lists, tiles))].swapaxes(1, 2)
    sees = {
        "own": one & (rng.random((lists, 1, tiles)) < 0.9),
        "few": one & (rng.random((lists, 1, tiles)) < 0.04),
        "shared": np.ones(shape, bool),
        "both": one | (np.arange(tiles) < tiles // 5),  # a prompt, and the tokens of each after it
        "any": rng.random(shape) < 0.3,
        "nothing": np.zeros(shape, bool),
        "one token": one & (np.arange(T) == 1)[:, None],
    }[kind]
    mask = np.repeat(sees, size, axis=2) & (rng.random((lists, T, cells)) < 0.7)
    q, k, v = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((lists, T, K * G, D), (lists, K, cells, D), (lists, K, cells, values))
    )
    return q, k, v, replace(make_visibility(mask, np.arange(lists), lists), tile=size)


def int8(q, k, v, visibility):
    k, v = (Quantised.zeros(x.shape, "int8").encode(x) for x in (k, v))
    return q, k, v, visibility


def bfloat16(q, k, v, visibility):
    return q, k.astype("bfloat16"), v.astype("bfloat16"), visibility


def add_bias(q, k, v, visibility):
    def slope(query, key, head):
        return -(0.1 ** (head + 1.0)) * abs(query - key)

    bias = check_bias(slope, (1, T, K * G, k.shape[2]))
    position = jnp.arange(k.shape[2])[None] % 50
    return q, k, v, replace(visibility, bias=bias, position=position, at=visibility.at + 60)


def hidden_by_bias(q, k, v, visibility):
    bias = np.random.default_rng(1).normal(size=(1, T, 1, k.shape[2])).astype(np.float32)
    bias[..., ::3] = -np.inf
    bias[:, 2] = -np.inf  # all cells of this token
    return q, k, v, replace(visibility, bias=jnp.asarray(bias))


def break_keys(q, k, v, visibility):
    """Set keys to NaN: of all hidden cells, and of one visible cell."""
    mask = np.asarray(compute_mask(visibility))[0].any(axis=0)
    dirty = ~mask | (np.arange(mask.size) == mask.argmax())
    return q, k.at[:, :, dirty].set(np.nan), v, visibility


KINDS = ("own", "few", "shared", "both", "any", "nothing", "one token")


@core
@pytest.mark.parametrize(
    ("kinds", "sizes", "change"),
    [
        (KINDS, {}, None),
        (KINDS[:4], {"cells": 2048 + 64}, None),
        (("own", "both", "any"), {"size": 8, "cells": 1000}, None),
        (("own", "both", "any"), {"lists": 2, "size": 128}, None),
        (("own", "few", "both"), {"values": 2 * D}, int8),
        (("both",), {"values": 2 * D}, bfloat16),
        (("both",), {}, lambda q, k, v, visibility: (q, k, ValueSlice(2, 6), visibility)),
        (("own", "few", "both"), {}, add_bias),
        (("own", "few", "both"), {}, hidden_by_bias),
        (("own", "few", "both", "any"), {}, break_keys),
    ],
)
def test_attend_tiled_matches_attention_without_tiles(kinds, sizes, change):
    special = {} if sizes or change else dict(scale=0.3, softcap=2.0, sinks=SINKS)
    options = AttentionOptions(**special)
    for kind in kinds:
        q, k, v, visibility = change(*case(kind, **sizes)) if change else case(kind, **sizes)
        got = attend(q, k, v, visibility, options)
        wanted = attend(q, k, v, replace(visibility, tile=None), options)
        assert got.dtype == q.dtype
        within = 1e-5 if change in (int8, bfloat16) else 5e-6
        np.testing.assert_allclose(got, wanted, rtol=0, atol=within)


@core
@pytest.mark.parametrize("change", [None, int8, hidden_by_bias])
def test_mass_tiled_matches_mass_without_tiles(change):
    for kind in ("own", "both", "any", "nothing"):
        q, k, v, visibility = change(*case(kind)) if change else case(kind)
        options = AttentionOptions(sinks=SINKS)
        got = attend_with_mass("default", q, k, v, visibility, options)
        wanted = attend_with_mass("default", q, k, v, replace(visibility, tile=None), options)
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@core
def test_attend_tiled_derivatives_in_vmap_match_those_without():
    cases = [case("both", cells=512, seed=seed) for seed in (0, 1)]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases)

    def derive(tile):
        def loss(q, k, v, visibility):
            out = attend(q, k, v, replace(visibility, tile=tile), AttentionOptions(sinks=SINKS))
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2), has_aux=True)))(*batch)

    for one, other in zip(*(jax.tree.leaves(derive(tile)) for tile in (TILE, None)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@core
def test_plan_step_tiled_rows_of_one_stream_take_separate_tiles():
    """Lower sequences first, in any order of rows."""
    plan = jaxkv.plan_step(replace(TILES, streams=2).make(), [5, 6], sequences=[3, 2])
    assert plan.ubatch.slots.tolist() == [[4], [0]]


@core
def test_plan_step_tiled_with_window_takes_cells_that_no_next_token_sees():
    spec = jaxkv.CacheSpec.attention(1, 1, 2, window=Window.sliding(4))
    cache = jaxkv.make_cache(spec, cells=8, ubatch_size=1, max_rollback=0, placement="tiled")
    step = jax.jit(
        lambda cache, token: (plan := jaxkv.plan_step(cache, token), apply_plan(cache, plan))
    )
    for token in range(20):
        plan, cache = step(cache, jnp.array([token]))
        assert plan.ok
    assert {15, 16, 17, 18, 19} <= {*cache.table.position[0].tolist()}


@core
@pytest.mark.parametrize("sequences", [3, 40])
def test_tiled_slots_in_random_pools_match_oracle(sequences):
    """Tiles are empty, of one sequence or of several; batches may exceed all of them."""
    cells, tokens, rng = 24, 12, np.random.default_rng(sequences)
    choose = jax.jit(jax.vmap(partial(choose_for_list, count=sequences), in_axes=(0, 0, 0)))
    oracles, pools, batches = [], [], []
    for _ in range(150):
        few = rng.choice(sequences, 3, replace=False)
        oracle = Oracle(cells, sequences, placement="tiled")
        for tile in oracle.tiles:
            owners = few[: rng.integers(0, 4)] if rng.random() < 0.5 else few[:1]
            for index in tile if len(owners) else ():
                if rng.random() < 0.6:
                    oracle.cells[0, index] = Cell(index, {int(rng.choice(owners))})
        words = np.zeros((-(-sequences // 32), cells), np.uint32)
        for (_, index), cell in oracle.cells.items():
            for seq in cell.owners:
                words[seq // 32, index] |= np.uint32(1 << seq % 32)
        free = ~words.any(axis=0)
        pools.append(StreamCells(words, free, None, np.arange(cells, dtype=np.int32)))
        batches.append((rng.choice(few, tokens).astype(np.int32), rng.random(tokens) < 0.8))
        oracles.append(oracle)
    stack = jax.tree.map(lambda *leaves: np.stack(leaves), *pools)
    got = choose(stack, *map(np.stack, zip(*batches, strict=True)))
    for oracle, (ids, valid), slots in zip(oracles, batches, np.asarray(got), strict=True):
        assert (slots[~valid] == cells).all()
        order = np.argsort(ids[valid], kind="stable")
        batch = [Token(int(ids[valid][i]), int(i), 0) for i in order]
        found = slots[valid][order]
        assert found[found < cells].tolist() == oracle._in_tiles(0, batch)


@core
def test_plan_step_tiled_holds_less_than_the_keys_of_a_pool():
    """No copy of keys or values, and logits only for the tiles of each token."""
    sizes = {"layers": 1, "kv_heads": 3, "head_dim": 64, "sequences": 8}
    make = partial(attention_cache, cells=4160, placement="tiled", **sizes)

    def step(cache, q, x):
        ids = jnp.arange(8)
        ubatch = jaxkv.plan_step(cache, ids, sequences=ids).ubatch
        return jaxkv.attend(jaxkv.apply(cache, ubatch), 0, q, x, x)

    q, x = (jax.ShapeDtypeStruct((1, 8, heads, 64), jnp.float32) for heads in (9, 3))
    compiled = jax.jit(step, donate_argnums=0).lower(jax.eval_shape(make), q, x).compile()
    assert hlo.temporary_bytes(compiled) < 4160 * 3 * 64 * 4


@core
def test_visibility_has_tiles_in_a_step_alone():
    """A prompt uses the same program as in other pools."""
    for kind, tile in ((TILES, 4), (SCATTERED, None)):
        cache = kind.make()
        for batch, wanted in ([[[4]] * 3, tile], [[[5] * 8], None]):
            plan = jaxkv.init_batch(cache, jaxkv.make_batch(batch))
            assert jaxkv.kv.mask.visibility_of(jaxkv.apply(cache, plan)).tile == wanted
