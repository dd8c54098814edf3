"""Models of Flax whose attention function is replaced equal the same models without a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxkv
from jaxkv import AttentionLayers
from tests.helpers.mistakes import assert_raises, mistakes
from tests.helpers.parametrize import mark_cases

pytestmark = pytest.mark.core

LAYERS, TOKENS = 2, [3, 1, 4, 1, 5]
SPEC = jaxkv.CacheSpec.attention(LAYERS, kv_heads=2, head_dim=4, rope=None)
RNGS = nnx.Rngs(0)


class Decoder(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(9, 8, rngs=RNGS)
        sizes = dict(num_heads=2, in_features=8, decode=False, rngs=RNGS)
        self.blocks = nnx.List([nnx.MultiHeadAttention(**sizes) for _ in range(LAYERS)])

    def __call__(self, tokens, mask=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x, mask=mask)
        return self.embed.attend(x)


class LinenDecoder(nn.Module):
    attention_fn: object = nn.dot_product_attention

    @nn.compact
    def __call__(self, tokens, mask=None):
        embed = nn.Embed(9, 8)
        x = embed(tokens)
        for _ in range(LAYERS):
            block = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=self.attention_fn)
            x = x + block(x, mask=mask)
        return embed.attend(x)


GRAPH, WEIGHTS = nnx.split(Decoder())
VARIABLES = LinenDecoder().init(jax.random.key(0), jnp.array([TOKENS]))


def nnx_forward(params, step, order=range(LAYERS)):
    model, layers = nnx.merge(GRAPH, params), AttentionLayers(step)
    for block, layer in zip(model.blocks, order, strict=False):
        block.attention_fn = layers[layer]
    logits = model(step.tokens)
    return layers.step, logits.reshape(-1, 9)[step.outputs]


def linen_forward(params, step):
    layers = AttentionLayers(step)
    logits = LinenDecoder(layers).apply(params, step.tokens)
    return layers.step, logits.reshape(-1, 9)[step.outputs]


MODELS = {
    "nnx": (nnx_forward, WEIGHTS, lambda *args: nnx.merge(GRAPH, WEIGHTS)(*args)),
    "linen": (linen_forward, VARIABLES, lambda *args: LinenDecoder().apply(VARIABLES, *args)),
}


@pytest.mark.parametrize("name", mark_cases(MODELS, fast=["linen"]))
def test_model_with_replaced_attention_equals_itself(name):
    forward, params, plain = MODELS[name]
    cache, found = jaxkv.make_cache(SPEC, cells=8), []
    for part in (TOKENS[:3], TOKENS[3:]):
        batch = jaxkv.make_batch(part, outputs=np.ones(len(part), bool))
        cache, logits, *_ = jaxkv.prefill(forward, params, cache, batch)
        found.append(logits)
    (made,) = jaxkv.generate(forward, params, [TOKENS], spec=SPEC, max_new_tokens=3).lists()
    wanted = plain(jnp.array([TOKENS + made]), jnp.tril(jnp.ones((1, 1, 8, 8), bool)))[0]
    np.testing.assert_allclose(jnp.concatenate(found), wanted[:5], atol=1e-5)
    assert made == jnp.argmax(wanted, axis=1)[4:7].tolist()


@pytest.mark.parametrize("call, outcome", mistakes("attention_layers"))
def test_attention_layers_mistake_raises(call, outcome):
    cache = jaxkv.make_cache(SPEC, cells=8)
    step = jaxkv.apply(cache, jaxkv.init_batch(cache, jaxkv.make_batch([1, 2])))
    x = jnp.zeros((1, 2, 2, 4))

    def layers(*called):
        made = AttentionLayers(step)
        for layer in called:
            made[layer](x, x, x)
        return made

    run = jaxkv.prefill
    assert_raises(call, outcome, globals() | locals())
