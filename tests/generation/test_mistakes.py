"""What newcomers get wrong raises a sentence: what was wanted, what came, and what to do."""

import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import loops, make_batch

W = jnp.eye(8)


def make(**sizes):
    return jaxkv.make_kv_cache(
        **dict(layers=2, cells=16, kv_heads=2, head_dim=4, sequences=2) | sizes
    )


def model(q=lambda x: x, k=lambda x: x, layers=(0, 1), end=lambda m, logits, _: (m, logits)):
    """A model of two layers, in which one thing is changed."""

    def forward(weights, memory, ubatch):
        old, x = memory, jnp.take(weights, ubatch.tokens, axis=0)
        for layer in layers:
            h = x.reshape(*x.shape[:2], 2, 4)
            memory, out = jaxkv.attend(memory, layer, ubatch, q(h), k(h), h)
            x = x + out.reshape(x.shape)
        return end(memory, x.reshape(-1, 8)[ubatch.outputs] @ weights.T, old)

    return forward


def run(batch=None, memory=None, plan=None, **changes):
    memory, batch = memory or make(), batch or make_batch([[1, 2, 3], [4]])
    return jaxkv.prefill(model(**changes), W, memory, batch, plan=plan)


def stale():
    memory, batch = make(), make_batch([1])
    plan = jaxkv.init_batch(memory, batch)
    return run(batch, jaxkv.apply(memory, plan), plan)


def beside_an_engine():
    memory = make()
    engine = loops.batching.Engine(model(), W, memory)
    engine.submit(loops.batching.Request(prompt=[1], limit=2))
    engine.step()
    return run(memory=memory)


def drafted():
    narrow, warm = (
        model(end=lambda m, x, _: (m, x[:, :5])),
        loops.sampling.make_sampler(temperature=1),
    )
    memory = run().cache
    draft, state = loops.draft_model(narrow, W, memory, texts=2), loops.start(memory, [1, 2])
    return loops.speculate(model(), draft, warm, W, memory, state, steps=2)


MISTAKES = [
    (lambda: run(end=lambda m, x, _: (m, x[:, :0])), r"logits \[O, V\] .* got \(4, 0\): flatten"),
    (lambda: run(end=lambda m, x, _: (m, x[None])), r"logits \[O, V\] .* got \(1, 4, 8\): flatten"),
    (lambda: run(end=lambda m, x, _: (m, x[:1])), r"a row for each of the 4 .* got \(1, 8\): flat"),
    (lambda: run(end=lambda m, x, _: (m, x.astype(int))), "logits of floats .* got int32: cast"),
    (drafted, "a draft of 8 tokens, .* got one of 5; take a draft model with that vocabulary"),
    (lambda: run(q=lambda x: x.swapaxes(1, 2)), r"got \(1, 2, 4, 4\): tokens come before heads"),
    (lambda: run(k=lambda x: x.swapaxes(1, 2)), r"got \(1, 2, 4, 4\): tokens come before heads"),
    (lambda: run(memory=make(head_dim=8)), r"of \(1, 4, 2, 8\), got \(1, 4, 2, 4\): tokens"),
    (lambda: run(layers=(0, 0)), r"in each layer .* got none in layers \[1\]: call attend once"),
    (lambda: run(layers=(1,)), r"in each layer .* got none in layers \[0\]: call attend once"),
    (lambda: run(layers=(0, 2)), "wanted a layer from 0 to 1, got 2: make the memory with layers="),
    (lambda: run(make_batch([1], sequences=5)), "ids from 0 to 1, got 5; a memory is made for a"),
    (stale, "wanted a plan of this memory as it is, got a stale one: plan again"),
    (beside_an_engine, "a memory with its buffers, got one whose buffers were donated: go on with"),
    (lambda: make_batch([1.0, 2.0]), "wanted integers for tokens, got float64: cast them"),
    (lambda: make_batch("hello"), "wanted tokens as integers .* got <class 'str'>: encode texts"),
    (lambda: make_batch(["hello"]), "wanted integers for tokens, got <U5: encode texts by a token"),
    (lambda: run(end=lambda m, x, _: m), "a pair from forward, .* got <class .*Memory'>: end it"),
    (lambda: run(end=lambda m, x, old: (old, x)), "gave back the memory it was given, .* it must"),
    (lambda: jaxkv.prefill(model(), make(), W, make_batch([1])), "wanted a memory, got .*: pass"),
    (lambda: loops.begin(W, run().cache, W[:1]), "a sampler, such as loops.sampling.make_sampler"),
    (lambda: run(k=lambda x: x.astype(int)), "wanted floats for k, got int32: cast them"),
]


@pytest.mark.parametrize(("mistake", "words"), MISTAKES, ids=range(len(MISTAKES)))
def test_newcomers_mistake_raises_a_sentence(mistake, words):
    with pytest.raises((TypeError, ValueError), match=words):
        mistake()
