"""OLMo 2: norms are applied to the outputs of attention and of feed-forward parts.

All query heads of a token are normalised as one vector, and all key heads as another.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv import Step
from models.checkpoints.checkpoint import Checkpoint
from models.families import llama
from models.families.layers import Attention, Feed, RMSNorm
from models.families.sources import Sources

ARCHITECTURES = ("olmo2",)


class Block(nnx.Module):
    """One layer: attention over the cache, a norm, a gated feed-forward part and another norm."""

    def __init__(self, config: llama.Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        norm = partial(RMSNorm, eps=c.eps, dtype=dtype)
        self.attention = Attention(c, layer, dtype, rngs, rope=c.rope, norm=norm, joint_norms=True)
        self.attention_norm = norm(c.width)
        self.feed = Feed(c.width, c.hidden, jax.nn.silu, dtype, rngs)
        self.feed_norm = norm(c.width)

    def __call__(self, step: Step, x: jax.Array) -> tuple[Step, jax.Array]:
        """Apply the layer to `x`, `[R, T, width]`; return the next step and the new `x`."""
        step, out = self.attention(step, x)
        x = x + self.attention_norm(out)
        return step, x + self.feed_norm(self.feed(x))


class OLMo2(llama.Llama):
    """Flax module of OLMo 2."""

    block = Block


def weights_of(checkpoint: Checkpoint, config: llama.Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `OLMo2`."""
    source = Sources(checkpoint)

    def block(_: int, layer: str) -> dict:
        attention = f"{layer}.self_attn"
        return {
            "attention": source.attention(attention, kv_heads=config.kv_heads, norms="norm"),
            "attention_norm": source.norm(f"{layer}.post_attention_layernorm"),
            "feed": source.gated_feed(f"{layer}.mlp"),
            "feed_norm": source.norm(f"{layer}.post_feedforward_layernorm"),
        }

    return source.language_model(block, config)


def config_of(checkpoint: Checkpoint) -> llama.Config:
    """Read the configuration of a model from its checkpoint."""
    config = llama.config_of(checkpoint)
    if config.bias:
        raise checkpoint.config.refusal("attention_bias", "false")
    return config


layers_of = llama.layers_of
MODULE = OLMo2
