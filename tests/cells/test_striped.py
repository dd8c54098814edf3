"""Cells that are dealt to shards in turn: each device of a mesh holds as much of a text."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import loops, sharding
from jaxkv.kv.stripes import STRIPE, cell_of, dealt
from jaxkv.loops.batching import Request, serve
from tests.memories import STRIPES, VOCABULARY, think
from tests.meshes import RULES, mesh_of, placed
from tests.oracle import Oracle

SHARDS, CELLS = 4, 1024
LONG = replace(STRIPES, cells=CELLS, shards=SHARDS, sequences=2)
BY_NUMBER = {"placement": "scattered", "shards": None}


@pytest.mark.parametrize(
    ("share", "shards"), [(100, 1), (1, 2), (3, 2), (12, 2), (65, 3), (256, 3), (320, 4)]
)
def test_every_cell_has_its_turn(share, shards):
    cells = share * shards
    order = dealt(jnp.arange(cells), shards).tolist()
    assert order == Oracle(cells, 1, shards=shards).order
    past = [cells, cells + 1]
    assert cell_of(jnp.arange(cells + 2), cells, shards).tolist() == order + past


def used_by_share(memory):
    """How many cells of each share hold a token."""
    return np.asarray(memory.table.position != -1).reshape(SHARDS, -1).sum(axis=1).tolist()


@pytest.mark.core
def test_a_text_lies_on_all_shares_alike():
    """To a stripe; what comes free is taken again in turn, and a defrag packs in turn."""

    def taken(memory, count):
        batch = jaxkv.make_batch([1] * count)
        plan = jaxkv.init_batch(memory, batch, ubatch_size=256)
        return jaxkv.apply(memory, plan.check())

    memory = taken(LONG.make(), 256)
    assert used_by_share(memory) == [STRIPE] * SHARDS
    memory = taken(taken(memory, 256), 100)
    assert used_by_share(memory) == [192, 164, 128, 128]
    memory, _ = jaxkv.seq_rm(memory, 0, 64, 320)
    assert used_by_share(memory) == [128, 100, 64, 64]
    packed = jaxkv.apply(memory, jaxkv.defrag_plan(memory))
    assert used_by_share(packed) == [128, 100, 64, 64]
    order = dealt(packed.table.position[0], SHARDS)
    assert (order[:356] >= 0).all() and (order[356:] == -1).all()


def forward(weights, memory, ubatch):
    return think(memory, ubatch)


def text_of(memory, prompt):
    """Greedy tokens after a prompt, with their logits; and the memory."""
    memory, logits = jaxkv.prefill(forward, None, memory, jaxkv.make_batch(prompt))
    tokens, seen = [], [np.asarray(logits)]
    for _ in range(4):
        tokens.append(int(np.argmax(seen[-1])))
        memory, logits = jaxkv.prefill(forward, None, memory, jaxkv.make_batch(tokens[-1:]))
        seen.append(np.asarray(logits))
    return memory, tokens, np.concatenate(seen)


@pytest.mark.core
def test_a_quarter_of_a_text_lies_on_each_device_and_answers_are_those_of_one():
    """Of N / 4 tokens, on a mesh that splits cells in 4."""
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, CELLS // 4)
    memory, tokens, logits = text_of(replace(LONG, **BY_NUMBER).make(), prompt)
    assert used_by_share(memory) == [256, 4, 0, 0]
    with jax.set_mesh(mesh_of(cells=SHARDS)):
        memory, theirs, others = text_of(placed(LONG.make()), prompt)
    assert used_by_share(memory) == [68, 64, 64, 64]
    shares = [np.asarray(x.data) for x in memory.buffers.k[0].addressable_shards]
    written = [np.count_nonzero(np.any(x, axis=(0, 1, 3))) for x in shares]
    assert sorted(written) == [64, 64, 64, 68]
    assert theirs == tokens
    np.testing.assert_allclose(others, logits, atol=1e-4)


def test_cells_that_a_window_counts_are_rounded_up_to_the_shards():
    sizes = {"layers": 1, "kv_heads": 1, "head_dim": 2, "window": jaxkv.window.sliding(5)}
    sizes |= {"ubatch_size": 3, "rollback": 2}
    memory = jaxkv.make_kv_cache(placement="striped", shards=4, **sizes)
    assert memory.table.num_cells == 12 and jaxkv.make_kv_cache(**sizes).table.num_cells == 10


TAKE = "take placement='striped', shards=4"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (BY_NUMBER, f"scattered cells are split unevenly by cells: {TAKE}"),
        ({"shards": 2}, f"cells in 2 shards are split unevenly by cells: {TAKE}"),
        ({"shards": 4}, ""),
        ({"shards": 8}, ""),
    ],
)
def test_a_layout_tells_whether_devices_hold_alike(made, said):
    layout = sharding.layout(jax.eval_shape(replace(LONG, **made).make), mesh_of(cells=4), RULES)
    assert "\n".join(layout.uneven) == said and str(layout).endswith(said or " bytes")


@pytest.mark.core
def test_an_engine_gives_the_same_texts():
    """Texts come and go, so that cells are taken again."""

    def texts(**options):
        memory = replace(STRIPES, cells=32, **options).make()
        requests = [Request(prompt=[*range(1, n)], limit=9) for n in (3, 5, 9, 4, 2)]
        results = serve(forward, None, memory, requests, chunk=8)
        return [one.tokens.tolist() for one in results]

    assert texts(shards=4) == texts(**BY_NUMBER)


@pytest.mark.core
def test_a_text_slides_and_searches():
    """What loops cut, move and share lies in stripes as it would lie by numbers."""
    prompt = np.random.default_rng(1).integers(0, VOCABULARY, 10)

    def lived(**options):
        memory, *_ = text_of(replace(STRIPES, **options).make(), prompt)
        memory, ok = loops.slide(memory, 0, keep=2, drop=4)
        assert ok
        memory, logits = jaxkv.prefill(forward, None, memory, jaxkv.make_batch([1, 2]))
        options = {"width": 2, "steps": 2, "stop": [], "sequences": [0, 1]}
        _, beams = loops.beam(forward, None, memory, logits[0], **options)
        return np.asarray(beams.tokens), np.asarray(logits)

    for one, other in zip(lived(), lived(**BY_NUMBER), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
