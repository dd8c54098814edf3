"""Attention by tiles is attention: the same numbers and derivatives, read another way."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.ops.attention.api import attend
from jaxkv.ops.attention.live import BLOCK, TILE
from jaxkv.ops.attention.reference import reference
from jaxkv.ops.attention.sight import mask_of
from jaxkv.ops.attention.softmax import Options
from jaxkv.ops.attention.xla_cpu import FEW, LARGE, SMALL
from tests import hlo
from tests.sights import sight_of_mask

S, K, G, D = 4, 2, 3, 8


def case(*, streams=S, pools=None, tokens=2, cells=2 * TILE + 40, seen=0.1, seed=0):
    """Arrays of some streams, and a sight in which whole tiles are not seen."""
    rng = np.random.default_rng(seed)
    pools = np.arange(streams) if pools is None else np.array(pools)
    q, k, v = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in (
            (len(pools), tokens, K * G, D),
            (streams, K, cells, D),
            (streams, K, cells, D + 1),
        )
    )
    tiles = rng.random((len(pools), -(-cells // TILE))) < seen
    mask = np.repeat(tiles, TILE, axis=1)[:, None, :cells] & (
        rng.random((len(pools), tokens, cells)) < 0.5
    )
    return q, k, v, sight_of_mask(mask, pools, streams)


@jax.jit
def plain(q, k, v, sight, options):
    k, v = k[sight.streams], v[sight.streams]
    return reference(q, k, v, mask_of(sight), options)


def shapes(**options):
    return jax.eval_shape(lambda: case(**options))


NONE = Options()
BOTH = (None, "tiles")  # what jaxkv chooses, and what it then may have chosen


@pytest.mark.parametrize(
    "options",
    [
        {},  # a few tiles of all streams
        pytest.param({"seen": 0.9}, marks=pytest.mark.core),  # most tiles: all at once
        {"seen": 0.0},  # nothing at all
        pytest.param({"pools": [2, 0], "seen": 0.9}, marks=pytest.mark.core),  # in another order
        pytest.param({"pools": [3]}, marks=pytest.mark.core),
        pytest.param({"tokens": LARGE + 1, "seen": 0.9}, marks=pytest.mark.core),
        # Two blocks, of which one is filled up.
        pytest.param({"tokens": BLOCK + 3, "streams": 2}, marks=pytest.mark.core),
        pytest.param({"streams": 1, "cells": 30, "seen": 1.0}, marks=pytest.mark.core),  # no tile
        pytest.param({"streams": 1, "cells": TILE, "seen": 1.0}, marks=pytest.mark.core),
    ],
    ids=str,
)
def test_numbers_are_those_of_the_formula(options):
    arrays = case(**options)
    sinks = jnp.linspace(-1.0, 1.0, K * G)
    for extra in (NONE, Options(scale=0.3, softcap=2.0, sinks=sinks)):
        wanted = plain(*arrays, extra)
        for way in BOTH:
            np.testing.assert_allclose(attend(*arrays, extra, way), wanted, rtol=2e-5, atol=2e-6)


def test_both_ways_are_taken():
    """The cases above are on both sides of the border."""
    for options, few in (({}, True), ({"seen": 0.9}, False)):
        *_, sight = case(**options)
        tiles = np.pad(np.asarray(mask_of(sight)).any(1), [(0, 0), (0, TILE - 40)]).reshape(
            S, -1, TILE
        )
        assert tiles.shape[0] * tiles.shape[1] > SMALL
        assert (tiles.any(-1).mean() < FEW) == few


@pytest.mark.parametrize("options", [{}, {"pools": [2, 0]}], ids=str)
def test_hidden_keys_may_hold_anything(options):
    q, k, v, sight = case(**options)
    hidden = ~np.asarray(mask_of(sight)).any(1)  # [P, N]
    dirty = np.array(k)
    for p, stream in enumerate(np.asarray(sight.streams)):
        dirty[stream][:, hidden[p]] = np.nan
    for way in BOTH:
        got = attend(q, jnp.asarray(dirty), v, sight, NONE, way)
        np.testing.assert_array_equal(got, attend(q, k, v, sight, NONE, way))


@pytest.mark.core
@pytest.mark.parametrize("pools", [None, [2, 0]])
def test_derivatives_in_both_modes_are_those_of_the_formula(pools):
    q, k, v, sight = case(pools=pools, cells=40, seen=1.0)
    sinks = jnp.zeros(K * G)

    def loss(by, q, k, v, sinks):
        return jnp.sum(jnp.sin(by(q, k, v, sight, Options(sinks=sinks))))

    got, wanted = (
        jax.jit(jax.grad(partial(loss, by), argnums=(0, 1, 2, 3)))(q, k, v, sinks)
        for by in (attend, plain)
    )
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    forward = [
        jax.jit(partial(jax.jvp, partial(loss, by)))((q, k, v, sinks), (q, k, v, sinks + 1))
        for by in (attend, plain)
    ]
    np.testing.assert_allclose(forward[0], forward[1], rtol=1e-4)


@pytest.mark.core
@pytest.mark.parametrize("pools", [[1], [3, 0]])
def test_streams_that_take_part_are_read_where_they_lie(pools):
    """A gather of their keys would hold as many bytes again."""
    arrays = shapes(pools=pools, cells=8192)
    one_stream = K * 8192 * D * 4
    assert hlo.temporary_bytes(attend.lower(*arrays, NONE).compile()) < one_stream / 2
    gathered = attend.lower(*arrays, NONE, "whole").compile()
    assert hlo.temporary_bytes(gathered) > one_stream / 2  # so that this can fail


def test_a_long_prompt_holds_no_logits_of_a_large_pool():
    arrays = shapes(streams=1, tokens=64, cells=8192)
    logits = 64 * K * G * 8192 * 4
    assert hlo.temporary_bytes(attend.lower(*arrays, NONE).compile()) < logits / 4


def test_a_batch_of_memories_is_computed_once_and_as_each_alone():
    """Both sides of a choice would be, if `vmap` made it one between two results."""
    cases = [case(seen=seen, seed=seed) for seed, seen in enumerate((0.1, 0.9, 0.0))]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases)
    sinks = jnp.linspace(-1.0, 1.0, K * G)

    def one_memory(*arrays):
        return attend(*arrays, Options(sinks=sinks))

    together = jax.jit(jax.vmap(one_memory))
    for got, one in zip(together(*batch), cases, strict=True):
        wanted = plain(*one, Options(sinks=sinks))
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)
    batched, alone = (
        program.lower(*arrays).compile().as_text()
        for program, arrays in ((together, batch), (jax.jit(one_memory), cases[0]))
    )
    assert batched.count(" conditional(") == alone.count(" conditional(") == 1
    assert batched.count(" while(") == alone.count(" while(") > 0


@pytest.mark.core
def test_derivatives_of_a_batch_of_memories_are_those_of_each():
    cases = [case(cells=40, seen=1.0, seed=seed) for seed in range(2)]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases)

    def loss(q, k, v, sight):
        return jnp.sum(jnp.sin(attend(q, k, v, sight, NONE)))

    derive = jax.grad(loss, argnums=(0, 1, 2))
    together = jax.jit(jax.vmap(derive))(*batch)
    for i, one in enumerate(cases):
        for a, b in zip(together, derive(*one), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-5)


def test_what_layers_share_is_computed_once():
    """The mask and the list of tiles, in the program that the compiler makes of 1 and of 4."""
    q, k, v, sight = shapes(streams=1, tokens=8, cells=8 * TILE)

    def layers(q, k, v, sight, count):
        for _ in range(count):
            q = q + attend(q, k, v, sight, NONE)[..., :D]
        return q

    def made(count):
        text = jax.jit(layers, static_argnums=4).lower(q, k, v, sight, count).compile().as_text()
        entry = text[text.index("\nENTRY") :]
        masks = len(re.findall(r"= pred\[1,8,4096\]\S* (?!get-tuple|param)", entry))
        return masks, text.count(" while("), entry.count(" conditional(")

    one, four = made(1), made(4)
    assert one[0] == four[0] == 1
    # Each layer has its choice and the loop over tiles in it; what lists the tiles is there once.
    assert (four[1] - one[1], four[2] - one[2]) == (3, 3)
