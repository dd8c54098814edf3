"""Compiled programs of attention, not run: temporary bytes, copies, and work that layers share."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv.ops.attention.active_tiles import BLOCK, TILE
from jaxkv.ops.attention.softmax import AttentionOptions
from tests.attention.formula import make_case
from tests.attention.ways import attend
from tests.helpers import hlo
from tests.helpers.caches import attention_cache, recurrent_cache

pytestmark = pytest.mark.core


def of_attention(implementation=None, **options):
    arrays = jax.eval_shape(partial(make_case, **options))
    return attend.lower(*arrays, AttentionOptions(), implementation).compile()


@pytest.mark.parametrize("lists", [[1], [3, 0]])
def test_attend_reads_streams_that_take_part_in_place(lists):
    """A gather of their keys would need as many temporary bytes."""
    one_stream, shapes = 2 * 8192 * 8 * 4, {"streams": 4, "lists": lists, "cells": 8192}
    assert hlo.temporary_bytes(of_attention(**shapes)) < one_stream / 2
    assert hlo.temporary_bytes(of_attention("whole", **shapes)) > one_stream / 2  # exceeds it


def test_attend_long_prompt_holds_nothing_of_all_pairs():
    """No array of logits or bias for all pairs: less than 1 byte per pair instead of 4."""
    program = of_attention(streams=1, tokens=64, cells=8192)
    assert hlo.temporary_bytes(program) < 64 * 4 * 8192
    program = of_attention(streams=1, tokens=2 * BLOCK, cells=64 * TILE, bias="function")
    assert hlo.temporary_bytes(program) < 2 * BLOCK * 64 * TILE


@pytest.mark.parametrize("tokens", [1, 12])
def test_attend_latent_step_copies_no_keys(tokens):
    """No copy for values that are a slice of keys, and none for a loop over tiles."""
    sizes = {"layers": 1, "cells": 8192, "kv_heads": 1, "head_dim": 576}
    cache = jax.eval_shape(partial(attention_cache, **sizes, value_dim=slice(64, 576)))
    (ubatch,) = jaxkv.init_full(cache, ubatch_size=tokens).ubatches
    q, k = (jax.ShapeDtypeStruct((1, tokens, n, 576), jnp.float32) for n in (2, 1))
    step = jax.jit(lambda m, u, q, k: jaxkv.attend(jaxkv.apply(m, u), 0, q, k), donate_argnums=0)
    program = step.lower(cache, ubatch, q, k).compile()
    assert hlo.temporary_bytes(program) < 8192 * 576 * 4 // 2


def test_attend_layers_share_mask_and_list_of_tiles():
    arrays = jax.eval_shape(partial(make_case, streams=1, tokens=8, cells=8 * TILE))

    def layers(q, k, v, visibility, count):
        for _ in range(count):
            q = q + attend(q, k, v, visibility, AttentionOptions())
        return q

    def made(count):
        text = jax.jit(layers, static_argnums=4).lower(*arrays, count).compile().as_text()
        entry = text[text.index("\nENTRY") :]
        masks = len(re.findall(r"= pred\[1,8,4096\]\S* (?!get-tuple|param)", entry))
        return masks, text.count(" while("), entry.count(" conditional(")

    one, four = made(1), made(4)
    assert one[0] == four[0] == 1
    # Each layer has a conditional with a loop over tiles; the list of tiles is computed once.
    assert (four[1] - one[1], four[2] - one[2]) == (3, 3)


def attend_layer(step, layer, x):
    return jaxkv.attend(step, layer, x, x, x)


def add_to_state(step, layer, x):
    state = jaxkv.read_states(step, layer)["sum"] + jnp.sum(x, axis=1)
    return jaxkv.write_states(step, layer, {"sum": state}), x + state[:, None]


cells = partial(attention_cache, cells=64, kv_heads=2, head_dim=8)
states = partial(recurrent_cache, states={"sum": ((2, 8), jnp.float32)})
HASHES = {
    "one sequence": (attend_layer, cells, 1),
    "a stream each": (attend_layer, partial(cells, streams=3), 3),
    "states of one sequence": (add_to_state, states, 1),
}


@pytest.mark.parametrize("name", HASHES)
def test_step_layers_hash_nothing(name):
    """Operations that only hashing uses do not grow with the number of layers.

    XLA recomputes cheap values at each use. For one token of one sequence that would be the whole
    plan, in each layer.
    """
    of_layer, make, sequences = HASHES[name]

    def step(cache, tokens, layers):
        there = jnp.ones(sequences, bool)
        step = jaxkv.apply(cache, jaxkv.plan_step(cache, tokens, active=there))
        x = jnp.ones((*step.valid.shape, 2, 8))
        for layer in range(layers):
            step, out = of_layer(step, layer, x)
            x = x + out
        return step.cache, x

    def mixes(layers):
        cache = jax.eval_shape(partial(make, layers=layers, sequences=sequences))
        tokens = jax.ShapeDtypeStruct((sequences,), jnp.int32)
        compiled = jax.jit(partial(step, layers=layers)).lower(cache, tokens).compile()
        return compiled.as_text().count(" xor(")

    assert mixes(1) == mixes(3) > 0


def rotate_and_look(step, layer, x):
    return attend_layer(step, layer, jaxkv.Rope.make(8, base=1e4).rotate(x, step.positions))


@pytest.mark.parametrize("of_layer, make", [(rotate_and_look, cells), (add_to_state, states)])
@pytest.mark.parametrize("tokens", [1, 12])
def test_layers_share_compiled_loops(of_layer, make, tokens):
    """XLA compiles equal fusions once; only small ones, which slice the table, differ in layers."""

    def step(cache, ubatch, x, layers):
        step = jaxkv.apply(cache, ubatch)
        for layer in range(layers):
            step, out = of_layer(step, layer, x)
            x = (x + out) @ jnp.eye(8)  # not fused with the next layer
        return step.cache, x

    def distinct_loops(layers):
        cache = jax.eval_shape(partial(make, layers=layers))
        (ubatch,) = jaxkv.init_full(cache, ubatch_size=tokens).ubatches
        x = jax.ShapeDtypeStruct((*ubatch.valid.shape, 2, 8), jnp.float32)
        program = jax.jit(partial(step, layers=layers)).lower(cache, ubatch, x).compile()
        return sum(fusion.count("\n") > 8 for fusion in hlo.distinct_fusions(program))

    assert distinct_loops(3) == distinct_loops(6) > 0
