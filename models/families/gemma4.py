"""Gemma 4: inputs of each layer, and last layers that attend to keys of earlier layers."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv import Step
from models.checkpoints.checkpoint import Checkpoint
from models.families import gemma3, gemma4_config, per_layer
from models.families.caches import Attends
from models.families.gemma4_config import Config
from models.families.gemma4_experts import BesideExperts, beside_weights
from models.families.layers import Attention, Feed, RMSNorm, gelu
from models.families.sources import Sources

ARCHITECTURES = ("gemma4_text",)


class Block(nnx.Module):
    """One layer: attention, a feed-forward part, experts, then the input of the layer."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = self.config = config
        norm = partial(RMSNorm, eps=c.eps, dtype=dtype)
        kv_heads, head_dim = c.sizes[layer]
        self.attention_norm = norm(c.width)
        self.attention = Attention(
            replace(c, kv_heads=kv_heads, head_dim=head_dim),
            c.cache_layers[layer],
            dtype,
            rngs,
            rope=c.ropes[layer],
            bias=c.bias,
            norm=norm,
            value_norm=norm(head_dim, weighted=False),
            scale=c.scale,
            writes=c.writes(layer),
            keys_are_values=c.has_same_values(layer),
        )
        self.after_attention_norm = norm(c.width)
        self.feed_norm = norm(c.width)
        hidden = c.hidden if c.writes(layer) else c.shared_hidden
        self.feed = Feed(c.width, hidden, gelu, dtype, rngs)
        if c.experts:
            self.experts = BesideExperts(c, dtype, rngs)
        self.after_feed_norm = norm(c.width)
        if c.inputs is not None:
            self.gate = per_layer.InputGate(c.width, c.inputs.size, c.eps, dtype, rngs)
        self.factor = nnx.Param(jnp.ones(1, dtype))

    def __call__(
        self, step: Step, x: jax.Array, inputs: jax.Array | None
    ) -> tuple[Step, jax.Array]:
        """Apply the layer to `x`, `[R, T, width]`, with its inputs `[R, T, P]`, if it has any."""
        step, out = self.attention(step, self.attention_norm(x))
        x = x + self.after_attention_norm(out)
        out = self.feed(self.feed_norm(x))
        if self.config.experts:
            out = self.experts(x, out)
        x = x + self.after_feed_norm(out)
        if inputs is not None:
            x = x + self.gate(x, inputs)
        return step, x * self.factor[...].reshape(1, 1, 1)


class Gemma4(gemma3.Gemma3):
    """Flax module of Gemma 4."""

    block = Block
    less_one = False

    def __init__(self, config: Config, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        if config.inputs is not None:
            self.inputs = per_layer.LayerInputs(config.inputs, config, config.layers, dtype, rngs)

    def run_blocks(self, step: Step, x: jax.Array) -> tuple[Step, jax.Array]:
        """Apply all layers to `x`, `[R, T, width]`; return the next step and the new `x`."""
        inputs = [None] * self.config.layers
        if self.config.inputs is not None:
            inputs = self.inputs(step.tokens, x)
        for block, of_layer in zip(self.blocks, inputs, strict=True):
            step, x = block(step, x, of_layer)
        return step, x


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `Gemma4`."""
    source, c = Sources(checkpoint), config

    def block(i: int, layer: str) -> dict:
        letters = "qk" if c.has_same_values(i) else "qkv"
        tree = gemma3.layer_weights(source, layer)
        tree["attention"] = source.attention(
            f"{layer}.self_attn",
            kv_heads=c.sizes[i][0],
            bias=c.bias,
            norms="norm",
            letters=letters if c.writes(i) else "q",
        )
        tree["factor"] = source.tensor(f"{layer}.layer_scalar")
        if c.experts:
            tree["experts"] = beside_weights(source, layer, c.width, c.experts)
        if c.inputs is not None:
            tree["gate"] = per_layer.input_gate_weights(source, layer)
        return tree

    tree = source.language_model(block, c)
    if c.inputs is not None:
        tree["inputs"] = per_layer.layer_input_weights(source, c.layers)
    return tree


def layers_of(config: Config, dtype: Any) -> list[Attends]:
    """Return a description of each layer of the cache; the argument `dtype` is unused."""
    del dtype
    layers = zip(config.sizes, config.ropes, config.windows, strict=True)
    return [
        Attends(kv_heads=kv_heads, head_dim=head_dim, rope=rope, window=window)
        for i, ((kv_heads, head_dim), rope, window) in enumerate(layers)
        if config.writes(i)
    ]


config_of = gemma4_config.config_of
MODULE = Gemma4
