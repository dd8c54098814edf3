"""Gemma 3n: several vectors per token, inputs of each layer, and layers that share keys."""

from functools import partial
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv import Step
from models.checkpoints.checkpoint import Checkpoint
from models.families import gemma3, gemma3n_config, per_layer
from models.families.altup import AltUp, Expansion, altup_weights, expansion_weights
from models.families.caches import Attends
from models.families.gemma3n_config import Config
from models.families.layers import Attention, Feed, Linear, RMSNorm, gelu
from models.families.sources import Sources

ARCHITECTURES = ("gemma3n_text",)


class Block(nnx.Module):
    """One layer: attention beside a map of low rank, a feed-forward part, the layer's input."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        norm = partial(RMSNorm, eps=c.eps, dtype=dtype)
        self.altup = AltUp(c.vectors, c.active, c.width, c.eps, dtype, rngs)
        self.attention_norm = norm(c.width)
        self.attention = Attention(
            c,
            c.cache_layers[layer],
            dtype,
            rngs,
            rope=c.ropes[layer],
            bias=c.bias,
            norm=norm,
            value_norm=norm(c.head_dim, weighted=False),
            scale=1.0,
            writes=c.writes(layer),
        )
        self.after_attention_norm = norm(c.width)
        self.left = Linear(c.width, c.rank, dtype, rngs)
        self.right = Linear(c.rank, c.width, dtype, rngs)
        self.beside_norm = norm(c.width)
        self.feed_norm = norm(c.width)
        activation = partial(sparse_gelu, sparsity=c.sparsity[layer])
        self.feed = Feed(c.width, c.hidden[layer], activation, dtype, rngs)
        self.after_feed_norm = norm(c.width)
        self.gate = per_layer.InputGate(c.width, c.inputs.size, c.eps, dtype, rngs)

    def __call__(self, step: Step, x: jax.Array, inputs: jax.Array) -> tuple[Step, jax.Array]:
        """Apply the layer to `x`, `[A, R, T, width]`, with its inputs `[R, T, P]`."""
        predicted = self.altup.predict(x)
        active = predicted[self.altup.active]
        y = self.attention_norm(active)
        step, out = self.attention(step, y)
        beside = y + self.beside_norm(self.right(self.left(y)))
        y = (active + self.after_attention_norm(out) + beside) * 2**-0.5
        y = y + self.after_feed_norm(self.feed(self.feed_norm(y)))
        x = self.altup.correct(predicted, y)
        added = self.gate(self.altup.scaled(x), inputs)
        return step, x.at[1:].add(added[None])


def sparse_gelu(gate: jax.Array, sparsity: float) -> jax.Array:
    """Return the GELU of the largest gates, less a limit; of normal gates, `sparsity` are below it.

    The limit follows from mean and deviation of the last dimension. If `sparsity` is 0 or less,
    return the GELU of all gates.
    """
    if sparsity <= 0:
        return gelu(gate)
    mean = jnp.mean(gate, axis=-1, keepdims=True)
    limit = mean + jnp.std(gate, axis=-1, keepdims=True) * NormalDist().inv_cdf(sparsity)
    return gelu(jax.nn.relu(gate - limit))


class Gemma3n(gemma3.Gemma3):
    """Flax module of Gemma 3n."""

    block = Block
    less_one = False

    def __init__(self, config: Config, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        c = config
        self.inputs = per_layer.LayerInputs(c.inputs, c, c.layers, dtype, rngs)
        self.expansion = Expansion(c.vectors, c.width, dtype, rngs)

    def run_blocks(self, step: Step, x: jax.Array) -> tuple[Step, jax.Array]:
        """Apply all layers to `x`, `[R, T, width]`; return the next step and the new `x`."""
        tokens = step.tokens
        if tokens is not None:  # further tokens, as those of images, have the inputs of token 0
            tokens = jnp.where(tokens < self.config.inputs.tokens, tokens, 0)
        inputs = self.inputs(tokens, x)
        x = self.expansion.expand(x)
        for block, of_layer in zip(self.blocks, inputs, strict=True):
            step, x = block(step, x, of_layer)
        return step, self.expansion.merge(x)


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `Gemma3n`."""
    source, c = Sources(checkpoint), config

    def block(i: int, layer: str) -> dict:
        attention = source.attention(
            f"{layer}.self_attn",
            kv_heads=c.kv_heads,
            bias=c.bias,
            norms="norm",
            letters="qkv" if c.writes(i) else "q",
        )
        return gemma3.layer_weights(source, layer) | {
            "altup": altup_weights(
                source, f"{layer}.altup", count=c.vectors, width=c.width, scaled=c.scaled
            ),
            "attention": attention,
            "left": source.linear(f"{layer}.laurel.linear_left"),
            "right": source.linear(f"{layer}.laurel.linear_right"),
            "beside_norm": source.norm(f"{layer}.laurel.post_laurel_norm"),
            "gate": per_layer.input_gate_weights(source, layer),
        }

    return source.language_model(block, c) | {
        "inputs": per_layer.layer_input_weights(source, c.layers),
        "expansion": expansion_weights(source, c.vectors),
    }


def layers_of(config: Config, dtype: Any) -> list[Attends]:
    """Return a description of each layer of the cache; the argument `dtype` is unused."""
    del dtype
    sizes = {"kv_heads": config.kv_heads, "head_dim": config.head_dim}
    layers = enumerate(zip(config.ropes, config.windows, strict=True))
    return [
        Attends(**sizes, rope=rope, window=window)
        for i, (rope, window) in layers
        if config.writes(i)
    ]


config_of = gemma3n_config.config_of
MODULE = Gemma3n
