"""What a compiler makes of memories on meshes: what is sent, what is held, what is copied.

Compiled only, of shapes: nothing is allocated.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.kv.shift import CHUNK
from tests import hlo
from tests.pods import LAYERS, Pod

PODS = {
    "data": Pod((("data", 8),), streams=8),
    "groups": Pod((("data", 4),), streams=4),
    "tensor": Pod((("tensor", 4),)),
    "data x tensor": Pod((("data", 2), ("tensor", 4)), streams=8),
    "cells": Pod((("cells", 4),)),
    "all": Pod((("data", 2), ("tensor", 2), ("cells", 2)), streams=8),
}
OF_STREAMS = ["data", "groups", "data x tensor", "all"]
FAST = ["all"]
MESSAGES = 9
"""The most small messages of a step: what a plan asks and tells, and the rows of the logits."""


def few_fast(names):
    return [
        name if name in FAST else pytest.param(name, marks=pytest.mark.nightly) for name in names
    ]


over_pods = pytest.mark.parametrize("name", few_fast(PODS))
over_streams = pytest.mark.parametrize("name", few_fast(OF_STREAMS))


def on_mesh(pod):
    return jax.set_mesh(pod.mesh(np.array(jax.devices())))


def compiled(fun, *args):
    return jax.jit(fun, donate_argnums=0).lower(*args).compile()


def without(found, expected):
    """The messages beside those that are expected, each as often as it is."""
    found = list(found)
    for one in expected:
        found.remove(one)
    return found


def joins(pod):
    """What attention sends in a step of one token for each sequence."""
    sent = pod.layout().sent
    return [("all-gather", sent // LAYERS)] * LAYERS if sent else []


def sent_by(program):
    """Pairs of what a program sends: the instruction and the bytes it gives."""
    return [(one.name, one.bytes) for one in hlo.collectives(program)]


def step(pod, count=None):
    def run(memory, weights, tokens, valid):
        return pod.step(weights, memory, tokens, valid)

    return compiled(run, pod.memory(), pod.weights(), *pod.next_tokens(count))


@over_pods
@pytest.mark.parametrize("window", [None, pytest.param(1000, marks=pytest.mark.nightly)])
def test_a_step_sends_no_keys_and_nothing_of_the_tables_size(name, window):
    pod = replace(PODS[name], window=window)
    with on_mesh(pod):
        program, layout = step(pod), pod.layout()
        others = without(sent_by(program), joins(pod))
    assert program.memory_analysis().alias_size_in_bytes == layout.table + layout.buffers
    keys = layout.buffers // LAYERS // 2
    assert max((size for _, size in others), default=0) < min(keys // 100, pod.cells)
    projections = LAYERS if "tensor" in dict(pod.axes) else 0
    planned = MESSAGES if pod.streams > 1 else 0
    assert len(others) <= planned + projections, others


@pytest.mark.nightly
@over_streams
def test_a_step_of_some_sequences_sends_nothing_of_the_tables_size(name):
    """Its rows are not in order, so that all devices look at them."""
    pod = PODS[name]
    with on_mesh(pod):
        found = sent_by(step(pod, count=3))
    # Devices that hold other streams or cells join what they weighed.
    names = dict(pod.axes)
    shards = names.get("data", 1) * names.get("cells", 1)
    sums = 3 * pod.heads // names.get("tensor", 1) * (pod.head_dim + 2) * 4
    others = without(found, [("all-gather", shards * sums)] * LAYERS)
    assert max(size for _, size in others) < pod.cells


@over_pods
@pytest.mark.parametrize("tokens", [1, pytest.param(16, marks=pytest.mark.nightly)])
def test_attention_sends_what_the_layout_says(name, tokens):
    """To the byte; of several tokens for each sequence as many times more."""
    pod = PODS[name]
    with on_mesh(pod):
        ubatch = pod.ubatch(tokens * pod.sequences)
        program = compiled(attend_with(), pod.memory(), ubatch, *pod.new(ubatch))
        sent = pod.layout().sent // LAYERS
    assert sent_by(program) == ([("all-gather", tokens * sent)] if sent else [])


def attend_with():
    return lambda memory, ubatch, q, k, v: jaxkv.attend(memory, 0, ubatch, q, k, v)


def held(pod, tokens):
    """The temporaries of attention on a device, and its share of the layer's keys and values."""
    with on_mesh(pod):
        ubatch = pod.ubatch(tokens)
        program = compiled(attend_with(), pod.memory(), ubatch, *pod.new(ubatch))
        return hlo.temporary_bytes(program), pod.layout().buffers // LAYERS


@over_pods
def test_attention_over_few_cells_holds_little(name):
    temporaries, _ = held(PODS[name], PODS[name].sequences)
    assert temporaries <= 4_000_000


@over_pods
@pytest.mark.parametrize(
    ("cells", "tokens"), [(131_072, 8), pytest.param(1 << 20, 64, marks=pytest.mark.nightly)]
)
def test_attention_over_many_cells_holds_two_hundredths(name, cells, tokens):
    pod = replace(PODS[name], cells=cells, head_dim=128)
    temporaries, share = held(pod, tokens)
    assert temporaries <= share * 0.02


MOVES = {
    "update": lambda m: jaxkv.apply(m, jaxkv.init_update(m)),
    "defrag": lambda m: jaxkv.apply(m, jaxkv.defrag_plan(m)),
}


@pytest.mark.nightly
@over_streams
@pytest.mark.parametrize("move", MOVES)
def test_moving_keys_sends_scalars(name, move):
    """Unless cells move from device to device: then the chunks of each layer are sent."""
    pod = PODS[name]
    with on_mesh(pod):
        program, layout = compiled(MOVES[move], pod.memory()), pod.layout()
    sizes = [size for _, size in sent_by(program)]
    if move == "defrag" and "cells" in dict(pod.axes):
        chunk = CHUNK * layout.buffers // LAYERS // 2 // (pod.cells // dict(pod.axes)["cells"])
        assert max(sizes) == 2 * LAYERS * chunk  # of all layers, in one message
    else:
        assert max(sizes, default=0) <= 4 * pod.streams
    assert program.memory_analysis().alias_size_in_bytes == layout.table + layout.buffers


COPIES = {
    "seq_cp": lambda m, last: jaxkv.seq_cp(m, 0, last),
    "seq_select": lambda m, last: jaxkv.seq_select(m, [0], [last]),
}


@over_streams
@pytest.mark.parametrize("verb", COPIES)
def test_a_copy_between_streams_sends_chunks_and_a_line_of_the_table(name, verb):
    """And in groups where those cells go; a line for each sequence, and no more of the table."""
    pod = PODS[name]
    with on_mesh(pod):
        program = compiled(lambda m: COPIES[verb](m, pod.sequences - 1), pod.memory())
        names = dict(pod.axes)
    heads = pod.kv_heads // names.get("tensor", 1)
    chunk = CHUNK * heads * pod.head_dim * 4
    line = 16 * pod.cells  # of a table of 32 sequences at most
    others = sum(size for _, size in sent_by(program)) - 2 * LAYERS * chunk - line
    groups = pod.streams < pod.sequences
    # The slots of a chunk, and counts and flags; or what a window took of the sequence.
    assert 0 < others <= (8 * CHUNK + 32 * pod.streams if groups else 4)


def test_collectives_are_found():
    """So that the tests above can fail: attention left to the compiler gathers keys."""
    pod = PODS["data"]
    with on_mesh(pod):
        keys = pod.memory().buffers.k[0]
        program = compiled(lambda k, i: k[i], keys, jax.ShapeDtypeStruct((), jnp.int32))
    assert max(size for _, size in sent_by(program)) >= pod.cells * pod.head_dim * 4
