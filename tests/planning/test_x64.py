"""With 64-bit numbers enabled, as gradient checks want it, everything works and sums promote."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import loops, make_batch
from jaxkv.stamp import content
from tests.cases import mostly_nightly
from tests.memories import HEADS, SIZE, assert_identical
from tests.meshes import edited, mesh_of, placed

SIZES = {"kv_heads": HEADS, "head_dim": SIZE, "sequences": 3}
STATES = {"x": ((2,), jnp.float32), "n": ((), jnp.int32)}
MEMORIES = {
    "pool": lambda: jaxkv.make_kv_cache(layers=1, cells=12, rope=jaxkv.make_rope(4), **SIZES),
    "split": lambda: jaxkv.make_kv_cache(layers=1, cells=12, streams=3, **SIZES),
    "contiguous": lambda: jaxkv.make_kv_cache(layers=1, cells=12, placement="contiguous", **SIZES),
    "tiled": lambda: jaxkv.make_kv_cache(layers=1, cells=12, placement="tiled", **SIZES),
    "striped": lambda: jaxkv.make_kv_cache(
        layers=1, cells=12, placement="striped", shards=2, **SIZES
    ),
    "window": lambda: jaxkv.make_kv_cache(
        layers=1, cells=12, window=jaxkv.window.sliding(3), **SIZES
    ),
    "latent": lambda: jaxkv.make_kv_cache(
        layers=1, cells=12, value_dim=slice(2, 4), rope=jaxkv.make_rope(2), **SIZES
    ),
    "recurrent": lambda: jaxkv.make_recurrent_cache(
        layers=1, states=STATES, sequences=3, rollback=2
    ),
    "recurrent, split": lambda: jaxkv.make_recurrent_cache(
        layers=1, states=STATES, sequences=3, rollback=2, streams=3
    ),
    "hybrid": lambda: jaxkv.make_hybrid_cache(
        (MEMORIES["window"](), (0,)), (MEMORIES["recurrent"](), (0,))
    ),
}


@pytest.fixture
def wide():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def dtypes(tree):
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


@pytest.mark.core
@pytest.mark.parametrize("kind", mostly_nightly(MEMORIES, few=["striped", "hybrid"]))
def test_every_verb_keeps_dtypes_and_gives_what_it_gives_without(kind, wide):
    def live():
        memory = MEMORIES[kind]()
        given = dtypes(memory)
        answers = []

        def note(memory):
            assert dtypes(memory) == given
            answers.append(jax.tree.map(np.asarray, memory.table))
            assert not any(map(int, jaxkv.check_invariants(memory).values()))

        plan = jaxkv.init_batch(memory, make_batch([[1, 2, 3, 4], [5, 6]]), ubatch_size=3)
        assert plan.ok
        for ubatch in plan.ubatches:
            assert jaxkv.is_current(memory, ubatch)
            memory = jaxkv.apply(memory, ubatch)
            note(memory)
        for verb, args in (
            ("seq_cp", (0, [1, 2], 0, 2)), ("seq_add", (0, 2, -1, 3)), ("seq_div", (0, 4, -1, 2)),
            ("seq_keep", (0,)),
        ):  # fmt: skip
            memory = getattr(jaxkv, verb)(memory, *args)
            note(memory)
        for tidy in (jaxkv.init_update, jaxkv.defrag_plan):
            memory = jaxkv.apply(memory, tidy(memory))
            note(memory)
        past = memory.table
        step = jnp.array([7, 8]), jnp.array([2, 1]), jnp.array([True, True])
        ubatch, ok = jaxkv.plan_step(memory, *step)
        assert ok
        memory = jaxkv.apply(memory, ubatch)
        note(memory)
        memory, ok = jaxkv.go_back(past, memory)
        assert ok
        memory, _ = jaxkv.seq_rm(memory, 0)
        note(jaxkv.clear(memory))
        return answers

    answers = live()
    jax.config.update("jax_enable_x64", False)
    for one, other in zip(answers, live(), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.core
@pytest.mark.parametrize("implementation", [None, "tiles", "whole", "xla"])
def test_attention_in_float64(implementation, wide):
    """Sums of float64 are float64, but for JAX's own attention, which rounds its weights."""
    memory = jaxkv.make_kv_cache(layers=1, cells=12, dtype=jnp.float64, **SIZES)
    (ubatch,) = jaxkv.init_batch(memory, make_batch([1, 2, 3, 4])).ubatches
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 1, 4, HEADS, SIZE))
    _, out = jaxkv.attend(
        jaxkv.apply(memory, ubatch), 0, ubatch, q, k, v, implementation=implementation
    )
    assert out.dtype == jnp.float64
    logits = np.einsum("thd,shd->hts", q[0], k[0]) / SIZE**0.5
    weights = np.where(np.tri(4, dtype=bool), np.exp(logits), 0)
    weights /= weights.sum(-1, keepdims=True)
    wanted = np.einsum("hts,shd->thd", weights, v[0])
    atol = 1e-6 if implementation == "xla" else 1e-12
    np.testing.assert_allclose(out[0], wanted, rtol=0, atol=atol)


def test_embeddings_of_64_bits_are_told_apart_by_all_of_them(wide):
    """1e39 and 2e39 are both infinite in 32 bits."""
    stamps = [content(None, jnp.full((1, 1, 2), x)) for x in (1e39, 2e39, 1.0, 1.0 + 1e-9)]
    assert len({int(stamp[0, 0]) for stamp in stamps}) == 4


@pytest.mark.core
@pytest.mark.parametrize("streams", mostly_nightly([1, 2], few=[2]))
def test_loops_work(streams, wide):
    """All of them, with weights of 64 bits; tokens and log-probabilities keep their dtypes."""
    weights = jax.random.normal(jax.random.key(0), (12, 8))
    prompts = [[1, 2, 1, 2], [3, 4, 3]]

    def forward(weights, memory, ubatch):
        x = weights[ubatch.tokens]
        memory, out = jaxkv.attend(memory, 0, ubatch, *3 * [x[:, :, None]])
        return memory, out.reshape(-1, 8)[ubatch.outputs] @ weights.T

    memory = jaxkv.make_kv_cache(
        layers=1, cells=40, kv_heads=1, head_dim=8, sequences=2, streams=streams
    )
    empty = memory
    memory, logits = jaxkv.prefill(forward, weights, memory, make_batch(prompts))
    sampler = loops.sampling.make_sampler(
        temperature=[0.7, 0.0], top_p=0.9, top_k=5, repeat_penalty=1.1
    )
    state, _ = loops.begin(sampler, memory, logits, [0], limit=9, seed=2, prompts=prompts)
    rest = sampler, weights, memory, state, [0]
    _, _, picked = jaxkv.decode(forward, *rest, steps=8)
    made = loops.speculate(forward, loops.lookup(prompts, ngram=1), *rest, steps=8)[3]
    own = loops.draft_model(forward, weights, memory, texts=2)
    *_, other = loops.speculate(forward, own, *rest, steps=8)
    assert {x.dtype for x in jax.tree.leaves((picked, made, other))} == {
        np.dtype(np.int32),
        np.dtype(np.float32),
    }
    assert picked.tokens[1].tolist() == made.tokens[1].tolist() == other.tokens[1].tolist()
    _, beams = loops.beam(forward, weights, memory, logits[0], width=2, steps=4, stop=[0])
    assert beams.tokens.dtype == np.int32 and beams.scores.dtype == np.float32
    _, ok = loops.slide(memory, 0, keep=1, drop=1)
    _, _, grouped = loops.extend(memory, 0, 0, group=2, width=2)
    assert ok and grouped
    request = loops.batching.Request(prompt=prompts[1], limit=5)
    (result,) = loops.batching.serve(forward, weights, empty, [request], chunk=8)
    assert len(result.tokens) == 5


@pytest.mark.core
@pytest.mark.parametrize("streams", mostly_nightly([1, 2], few=[2]))
def test_a_mesh_gives_what_one_device_gives(streams, wide):
    """Verbs that move and copy buffers, defrags and a step, with keys of 64 bits."""
    plain = jaxkv.make_kv_cache(
        layers=2,
        cells=16,
        kv_heads=2,
        head_dim=4,
        sequences=4,
        streams=streams,
        rope=jaxkv.make_rope(4),
        dtype=jnp.float64,
        placement="striped",
        shards=2,
    )
    wanted, outs = edited(plain)
    with jax.set_mesh(mesh_of(data=2, tensor=2, cells=2)):
        memory = placed(plain)
        given = dtypes(memory)
        got, theirs = edited(memory)
    assert dtypes(got) == given
    assert_identical(got.table.with_rules(None), wanted.table)
    for one, other in zip(outs, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    for one, other in zip(*map(jax.tree.leaves, (got.buffers, wanted.buffers)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
