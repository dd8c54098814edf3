"""Compiled programs of caches on meshes, from shapes: transfers, temporary bytes, copies."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv.kv.shift import CHUNK
from tests.helpers import hlo
from tests.helpers.parametrize import mark_cases
from tests.helpers.pods import LAYERS, MESSAGES, Pod
from tests.helpers.steps import apply_plan

PODS = {
    "groups": Pod((("data", 4),), streams=4),
    "cells": Pod((("cells", 4),)),
    "data x tensor": Pod((("data", 2), ("tensor", 4)), streams=8),
    "all": Pod((("data", 2), ("tensor", 2), ("cells", 2)), streams=8),
}


def set_mesh(pod):
    return jax.set_mesh(pod.mesh(np.array(jax.devices())))


def compile_donated(fun, *args):
    return jax.jit(fun, donate_argnums=0).lower(*args).compile()


@pytest.mark.parametrize(
    ("name", "window"),
    mark_cases([(name, None) for name in PODS] + [("all", 1000)], core=[("all", None)]),
)
def test_step_sends_no_keys_and_no_tables(name, window):
    pod = replace(PODS[name], window=window)
    with set_mesh(pod):
        program, layout = pod.lower_step().compile(), pod.layout()
    others = hlo.collectives(program)
    for _ in range(LAYERS if layout.sent else 0):
        others.remove(("all-gather", layout.sent // LAYERS))
    assert program.memory_analysis().alias_size_in_bytes == layout.table + layout.buffers
    keys = layout.buffers // LAYERS // 2
    assert max((size for _, size in others), default=0) < min(keys // 100, pod.cells)
    projections = LAYERS if "tensor" in dict(pod.axes) else 0
    planned = MESSAGES if pod.streams > 1 else 0
    assert len(others) <= planned + projections, others


@pytest.mark.parametrize(
    ("name", "tokens"), mark_cases([(name, 1) for name in PODS] + [("all", 16)], core=[("all", 1)])
)
def test_attend_sends_what_the_layout_says(name, tokens):
    """Exact bytes, proportional to the tokens of each sequence."""
    pod = PODS[name]
    with set_mesh(pod):
        program = pod.lower_attention(tokens * pod.sequences).compile()
        sent = pod.layout().sent // LAYERS
    assert hlo.collectives(program) == ([("all-gather", tokens * sent)] if sent else [])
    assert hlo.temporary_bytes(program) <= tokens * 4_000_000


@pytest.mark.parametrize("name", mark_cases(PODS, core=["all"]))
def test_attend_over_many_cells_holds_two_hundredths(name):
    pod = replace(PODS[name], cells=1 << 20, head_dim=128)
    with set_mesh(pod):
        share = pod.layout().buffers // LAYERS
        program = pod.lower_attention(64).compile()
    assert hlo.temporary_bytes(program) <= share * 0.02


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["groups", "all"])
@pytest.mark.parametrize("plan", [jaxkv.init_update, jaxkv.defrag_plan])
def test_update_and_defrag_send_scalars(name, plan):
    """If cells move between devices, chunks of each layer are sent too."""
    pod = PODS[name]
    with set_mesh(pod):
        program = compile_donated(lambda m: apply_plan(m, plan(m)), pod.cache())
        layout = pod.layout()
    sizes = [size for _, size in hlo.collectives(program)]
    if plan is jaxkv.defrag_plan and "cells" in dict(pod.axes):
        chunk = CHUNK * layout.buffers // LAYERS // 2 // (pod.cells // dict(pod.axes)["cells"])
        assert max(sizes) == 2 * LAYERS * chunk  # of all layers, in one message
    else:
        assert max(sizes, default=0) <= 4 * pod.streams
    assert program.memory_analysis().alias_size_in_bytes == layout.table + layout.buffers


@pytest.mark.parametrize("name", mark_cases(["groups", "all"], core=["all"]))
@pytest.mark.parametrize("verb", ["seq_cp", "seq_select"])
def test_copies_between_streams_send_chunks_and_a_line(name, verb):
    """One line of the table for each sequence."""
    pod = PODS[name]
    last = pod.sequences - 1
    args = (0, last) if verb == "seq_cp" else ([0], [last])
    with set_mesh(pod):
        program = compile_donated(lambda m: getattr(jaxkv, verb)(m, *args), pod.cache())
    heads = pod.kv_heads // dict(pod.axes).get("tensor", 1)
    chunk = CHUNK * heads * pod.head_dim * 4
    line = 20 * pod.cells  # of a table of 32 sequences at most
    others = sum(size for _, size in hlo.collectives(program)) - 2 * LAYERS * chunk - line
    groups = pod.streams < pod.sequences
    # The slots of a chunk, counts and flags; or marks of layers and of window evictions.
    marks = 4 * LAYERS + 8
    assert 0 < others <= (8 * CHUNK + 32 * pod.streams if groups else marks + 4)
