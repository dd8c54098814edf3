"""Five short programs of users, with their output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv
from jaxkv import generation, serving

pytestmark = pytest.mark.core

ROPE = jaxkv.Rope.make(8)
SPEC = jaxkv.CacheSpec.attention(layers=2, kv_heads=2, head_dim=8, rope=ROPE)
PROMPTS = [[1, 2, 3, 4], [5, 6]]


class Layer(nnx.Module):
    def __init__(self, number, rngs):
        self.number = number
        self.qkv = nnx.Linear(16, 48, rngs=rngs)
        self.out = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, cache, ubatch, x):
        q, k, v = jnp.split(self.qkv(x).reshape(*x.shape[:2], 6, 8), 3, axis=2)
        q, k = (ROPE.rotate(one, ubatch.positions) for one in (q, k))
        cache, out = jaxkv.attend(cache, self.number, ubatch, q, k, v)
        return cache, x + self.out(out.reshape(x.shape))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.layers = nnx.List([Layer(number, rngs) for number in range(2)])

    def __call__(self, cache, ubatch):
        x = self.embed(ubatch.tokens)
        for layer in self.layers:
            cache, x = layer(cache, ubatch, x)
        return cache, self.embed.attend(x.reshape(-1, 16)[ubatch.outputs])


GRAPH, PARAMS = nnx.split(Transformer(nnx.Rngs(0)))


def forward(params, cache, ubatch):
    return nnx.merge(GRAPH, params)(cache, ubatch)


def test_researcher_generates_from_an_nnx_model():
    sampler = generation.make_sampler(temperature=0.8)
    options = dict(max_new_tokens=20, stop_tokens=[0], sampler=sampler, seed=7)
    result = jaxkv.generate(forward, PARAMS, PROMPTS, spec=SPEC, **options)
    assert [len(tokens) for tokens in result.lists()] and result.tokens.shape == (2, 20)
    again = jaxkv.generate(forward, PARAMS, PROMPTS, spec=SPEC, **options)
    assert again.lists() == result.lists()


def test_jitted_loop_learns_the_reason_of_each_sequence():
    @jax.jit
    def run(params, cache, token):
        def step(carry):
            cache, token, _ = carry
            plan = jaxkv.plan_step(cache, token)
            cache, logits = generation.model_step(forward, params, cache, plan.ubatch)
            return cache, jnp.where(plan.ok, jnp.argmax(logits, -1), token), plan.reason

        start = cache, token, jnp.zeros(2, jnp.int32)
        return jax.lax.while_loop(lambda carry: jnp.all(carry[2] == 0), step, start)

    cache = jaxkv.make_cache(SPEC, cells=15, sequences=2)
    cache, logits, *_ = jaxkv.prefill(forward, PARAMS, cache, PROMPTS)
    cache, _, reason = run(PARAMS, cache, jnp.argmax(logits, -1))
    assert [jaxkv.Reason(one).name for one in reason.tolist()] == ["OK", "OUT_OF_CELLS"]
    assert cache.seq_pos_max().tolist() == [7, 5]


def test_engine_streams_tokens_and_reuses_prefixes():
    cache = jaxkv.make_cache(SPEC, cells=256, sequences=6)
    options = dict(stop_tokens=[0], prefill_chunk=16, tokens_per_step=4, prefix_sequences=[4, 5])
    engine = serving.Engine(forward, PARAMS, cache, **options)
    prompts = [[1, 2, 3, n] for n in (5, 6, 7)]
    for prompt in prompts:
        engine.submit(serving.Request(prompt=prompt, max_new_tokens=8))
    texts, ended = {0: [], 1: [], 2: []}, {}
    for request_id, tokens, finish_reason in engine.stream():
        texts[request_id] += tokens
        if finish_reason is not None:
            ended[request_id] = finish_reason
    alone = jaxkv.generate(forward, PARAMS, prompts, spec=SPEC, max_new_tokens=8, stop_tokens=[0])
    assert [*texts.values()] == alone.lists() and sorted(ended) == [0, 1, 2]


def test_pod_generates_as_one_device():
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=types)
    prompts = [[1, 2], [3], [4], [5]]
    with jax.set_mesh(mesh):
        cache = jaxkv.make_cache(SPEC, cells=64, sequences=4, streams=2, mesh=mesh)
        result = jaxkv.generate(forward, PARAMS, prompts, cache=cache, max_new_tokens=8)
    assert result.cache.buffers.k[0].addressable_shards[0].data.shape == (1, 1, 64, 8)
    alone = jaxkv.generate(forward, PARAMS, prompts, spec=SPEC, max_new_tokens=8)
    assert result.lists() == alone.lists()


def test_student_forks_removes_and_looks():
    cache = jaxkv.make_cache(SPEC, cells=10, sequences=2)
    cache, logits, *_ = jaxkv.prefill(forward, PARAMS, cache, [1, 2, 3, 4])
    cache, ok = jaxkv.seq_cp(cache, 0, 1)  # no key is copied
    cache, logits, *_ = jaxkv.prefill(forward, PARAMS, cache, [[7], [8, 9]])
    cache, ok = jaxkv.seq_rm(cache, 0, 1, 3)  # removes two tokens of sequence 0
    assert ok and np.isfinite(logits).all()
    assert cache.to_text() == "owner    + 1 1 + 0 1 1 . . .\nposition 0 1 2 3 4 4 5 . . ."
    assert jaxkv.show(cache) == cache.to_text() and "7 used" in cache.to_html()
    assert cache.num_used_cells() == 7 and cache.nbytes - cache.table.nbytes == 2 * 1280
