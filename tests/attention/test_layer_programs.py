"""What a layer adds to the program of a step: nothing of the plan, which is made once for all.

Compiled only; nothing runs. A compiler computes what is cheap again wherever it is used, and of one
token of one sequence all is cheap: left to itself, it puts the whole plan into each layer.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jaxkv


def look(memory, layer, ubatch, x):
    return jaxkv.attend(memory, layer, ubatch, x, x, x)


def go_on(memory, layer, ubatch, x):
    state = jaxkv.read_states(memory, layer, ubatch)["sum"] + jnp.sum(x, axis=1)
    return jaxkv.write_states(memory, layer, ubatch, {"sum": state}), x + state[:, None]


cells = partial(jaxkv.make_kv_cache, cells=64, kv_heads=2, head_dim=8)
states = partial(jaxkv.make_recurrent_cache, states={"sum": ((2, 8), jnp.float32)})
CASES = {
    "one sequence": (look, cells, 1),
    "several in a pool": (look, cells, 3),
    "a stream each": (look, partial(cells, streams=3), 3),
    "window": (look, partial(cells, window=jaxkv.window.sliding(16)), 1),
    "states of one sequence": (go_on, states, 1),
    "states of several": (go_on, states, 3),
}


def step(of_layer, layers, memory, tokens):
    count = tokens.size
    ubatch, _ = jaxkv.plan_step(memory, tokens, jnp.arange(count), jnp.ones(count, bool))
    memory, x = jaxkv.apply(memory, ubatch), jnp.ones((*ubatch.valid.shape, 2, 8))
    for layer in range(layers):
        memory, out = of_layer(memory, layer, ubatch, x)
        x = x + out
    return memory, x


def mixes(layers, of_layer, make, sequences):
    """Count the instructions of a compiled step that hashes are made of, and nothing else is."""
    memory = jax.eval_shape(partial(make, layers=layers, sequences=sequences))
    tokens = jax.ShapeDtypeStruct((sequences,), jnp.int32)
    compiled = jax.jit(partial(step, of_layer, layers)).lower(memory, tokens).compile()
    return len(re.findall(r" xor\(", compiled.as_text()))


@pytest.mark.parametrize("case", CASES)
def test_a_layer_hashes_nothing(case):
    few, many = mixes(1, *CASES[case]), mixes(3, *CASES[case])
    assert few == many > 0
