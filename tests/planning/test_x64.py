"""With JAX's 64 bits enabled, as gradient checks want it, dtypes stay as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import loops, make_batch
from tests.cases import mostly_nightly
from tests.memories import HEADS, SIZE, assert_identical
from tests.meshes import edited, mesh_of, placed

CELLS = dict(layers=1, cells=12, kv_heads=HEADS, head_dim=SIZE, sequences=3)
STATES = {"x": ((2,), jnp.float32), "n": ((), jnp.int32)}
MEMORIES = {
    "rotated": dict(rope=jaxkv.make_rope(4)),
    "split": dict(streams=3),
    "contiguous": dict(placement="contiguous"),
    "tiled": dict(placement="tiled"),
    "striped": dict(placement="striped", shards=2),
    "window": dict(window=jaxkv.window.sliding(3)),
    "latent": dict(value_dim=slice(2, 4), rope=jaxkv.make_rope(2)),
    "states": dict(rollback=2),
    "states, split": dict(rollback=2, streams=3),
    "hybrid": {},
}


def make(name):
    if name == "hybrid":
        return jaxkv.make_hybrid_cache((make("window"), (0,)), (make("states"), (0,)))
    if name.startswith("states"):
        return jaxkv.make_recurrent_cache(layers=1, states=STATES, sequences=3, **MEMORIES[name])
    return jaxkv.make_kv_cache(**CELLS, **MEMORIES[name])


@pytest.fixture
def wide():
    with jax.enable_x64(True):
        yield


def dtypes(tree):
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


def tables_of_life(name):
    """The table after each edit; dtypes never change."""
    memory = make(name)
    given, tables = dtypes(memory), []

    def note(memory):
        assert dtypes(memory) == given
        tables.append(jax.tree.map(np.asarray, memory.table))
        assert not any(map(int, jaxkv.check_invariants(memory).values()))
        return memory

    plan = jaxkv.init_batch(memory, make_batch([[1, 2, 3, 4], [5, 6, 7, 8]])).check()
    assert jaxkv.is_current(memory, plan.ubatches[0])
    memory = note(jaxkv.apply(memory, plan))
    memory = note(jaxkv.seq_cp(memory, 0, [1, 2], 0, 2))
    memory = note(jaxkv.seq_add(memory, 0, 2, -1, 3))
    memory = note(jaxkv.seq_div(memory, 0, 4, -1, 2))
    memory = note(jaxkv.seq_keep(memory, 0))
    memory = note(jaxkv.apply(memory, jaxkv.init_update(memory)))
    memory = note(jaxkv.apply(memory, jaxkv.defrag_plan(memory)))
    past = memory.table
    ubatch, ok = jaxkv.plan_step(memory, *map(jnp.array, ([7, 8], [2, 1], [True, True])))
    assert ok
    memory, ok = jaxkv.go_back(past, note(jaxkv.apply(memory, ubatch)))
    assert ok
    memory, _ = jaxkv.seq_rm(memory, 0)
    note(jaxkv.clear(memory))
    return tables


@pytest.mark.core
@pytest.mark.parametrize("name", mostly_nightly(MEMORIES, few=["striped", "states"]))
def test_verbs_x64_keep_dtypes_and_tables(name):
    with jax.enable_x64(True):
        found = tables_of_life(name)
    for one, other in zip(found, tables_of_life(name), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.core
@pytest.mark.parametrize("implementation", [None, "tiles", "whole", "xla"])
def test_attend_x64_sums_in_float64(implementation, wide):
    """All but JAX's own attention, which rounds its weights."""
    memory = jaxkv.make_kv_cache(**CELLS, dtype=jnp.float64)
    (ubatch,) = jaxkv.init_batch(memory, make_batch([1, 2, 3, 4])).ubatches
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 4, HEADS, SIZE))
    memory = jaxkv.apply(memory, ubatch)
    _, out = jaxkv.attend(memory, 0, ubatch, q, k, v, implementation=implementation)
    assert out.dtype == jnp.float64
    logits = np.einsum("thd,shd->hts", q[0], k[0]) / SIZE**0.5
    weights = np.where(np.tri(4, dtype=bool), np.exp(logits), 0)
    weights /= weights.sum(-1, keepdims=True)
    wanted = np.einsum("hts,shd->thd", weights, v[0])
    atol = 1e-6 if implementation == "xla" else 1e-12
    np.testing.assert_allclose(out[0], wanted, rtol=0, atol=atol)


PROMPTS = [[1, 2, 1, 2], [3, 4, 3]]


def forward(weights, memory, ubatch):
    x = weights[ubatch.tokens]
    memory, out = jaxkv.attend(memory, 0, ubatch, *3 * [x[:, :, None]])
    return memory, out.reshape(-1, 8)[ubatch.outputs] @ weights.T


def prompted():
    """Weights of float64, an empty memory, one after two prompts, and its logits."""
    weights = jax.random.normal(jax.random.key(0), (12, 8), jnp.float64)
    sizes = dict(layers=1, cells=40, kv_heads=1, head_dim=8, sequences=2, streams=2)
    empty = jaxkv.make_kv_cache(**sizes)
    return weights, empty, *jaxkv.prefill(forward, weights, empty, make_batch(PROMPTS))


@pytest.mark.core
def test_decode_x64_keeps_dtypes(wide):
    weights, _, memory, logits = prompted()
    sampler = loops.sampling.make_sampler(
        temperature=[0.7, 0.0], top_p=0.9, top_k=5, repeat_penalty=1.1
    )
    state, _ = loops.begin(sampler, memory, logits, [0], limit=9, seed=2, prompts=PROMPTS)
    _, after, picked = jaxkv.decode(forward, sampler, weights, memory, state, [0], steps=8)
    assert dtypes(after) == dtypes(state)
    assert {*dtypes(picked)} == {np.dtype(np.int32), np.dtype(np.float32)}


@pytest.mark.core
@pytest.mark.parametrize("draft", mostly_nightly(["lookup", "model"], few=["lookup"]))
def test_speculate_x64_picks_as_decode(draft, wide):
    weights, _, memory, logits = prompted()
    sampler = loops.sampling.make_sampler()
    state, _ = loops.begin(sampler, memory, logits, limit=9)
    rest = sampler, weights, memory, state
    picked = jaxkv.decode(forward, *rest, steps=8)[2]
    guesses = (
        loops.lookup(PROMPTS, ngram=1)
        if draft == "lookup"
        else loops.draft_model(forward, weights, memory, texts=2)
    )
    made = loops.speculate(forward, guesses, *rest, steps=8)[3]
    assert {*dtypes(made)} == {np.dtype(np.int32), np.dtype(np.float32)}
    np.testing.assert_array_equal(made.tokens[:, :8], picked.tokens)


@pytest.mark.core
def test_beam_and_edits_x64_keep_dtypes(wide):
    weights, _, memory, logits = prompted()
    _, beams = loops.beam(forward, weights, memory, logits[0], width=2, steps=4, stop=[0])
    assert beams.tokens.dtype == np.int32 and beams.scores.dtype == np.float32
    slid, ok = loops.slide(memory, 0, keep=1, drop=1)
    grouped, _, grew = loops.extend(memory, 0, 0, group=2, width=2)
    assert ok and grew and dtypes(slid) == dtypes(grouped) == dtypes(memory)


@pytest.mark.core
def test_serve_x64_answers(wide):
    weights, empty, *_ = prompted()
    request = loops.batching.Request(prompt=PROMPTS[1], limit=5)
    (result,) = loops.batching.serve(forward, weights, empty, [request], chunk=8)
    assert len(result.tokens) == 5


@pytest.mark.nightly
@pytest.mark.parametrize("streams", [1, 2])
def test_mesh_x64_matches_one_device(streams, wide):
    """Verbs that move and copy buffers, defrags and a step, with keys of 64 bits."""
    sizes = dict(layers=2, cells=16, kv_heads=2, head_dim=4, sequences=4, streams=streams)
    plain = jaxkv.make_kv_cache(
        **sizes, rope=jaxkv.make_rope(4), dtype=jnp.float64, placement="striped", shards=2
    )
    wanted, outs = edited(plain)
    with jax.set_mesh(mesh_of(data=2, tensor=2, cells=2)):
        memory = placed(plain)
        got, theirs = edited(memory)
    assert dtypes(got) == dtypes(memory)
    assert_identical(got.table.with_rules(None), wanted.table)
    for one, other in zip(outs, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    for one, other in zip(*map(jax.tree.leaves, (got.buffers, wanted.buffers)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
