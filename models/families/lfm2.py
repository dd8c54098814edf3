"""LFM2: gated short convolutions, and attention in some layers.

The state of a convolution consists of the last few inputs of the convolution.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from jaxkv.ops import scans
from jaxkv.rope import Rope
from models.checkpoints.checkpoint import Checkpoint
from models.families.caches import Attends, Layer, Recurs
from models.families.language_model import HybridConfig, LanguageModel, attention_fields
from models.families.layers import Attention, Feed, Linear, RMSNorm
from models.families.linear import matrix
from models.families.ropes import rope_of
from models.families.sources import Sources
from models.meshes import Split

ARCHITECTURES = ("lfm2",)


@dataclass(frozen=True, kw_only=True)
class Config(HybridConfig):
    """Configuration of LFM2; other fields are in `models.families.language_model`.

    attends: whether each of the L layers has attention; the other layers have a convolution.
    kernel: number of tokens that a convolution reads.
    """

    hidden: int
    kernel: int
    rope: Rope


def split_of(config: Config) -> Split:
    """Return how a mesh may split an array whose second dimension is the channels."""
    return Split(axis=1, parts=config.width, of="channels of a convolution")


class ShortConvolution(nnx.Module):
    """Convolution of each channel over the last few tokens, between two gates."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.layer, split = layer, split_of(c)
        # Input gate, output gate and input of the convolution are one product.
        self.input = Linear(c.width, (3, c.width), dtype, rngs, split=split)
        self.conv = matrix(rngs, (c.kernel, c.width), dtype, inputs=0, split=split)
        self.output = Linear(c.width, c.width, dtype, rngs, split=split)

    def __call__(self, step: jaxkv.Step, x: jax.Array) -> tuple[jaxkv.Step, jax.Array]:
        """Convolve `x`, `[R, T, width]`; return the step and the output."""
        into, out_of, x = jnp.unstack(self.input(x), axis=-2)
        x = jnp.where(step.valid[..., None], into * x, 0)
        tail = jaxkv.read_states(step, self.layer)["conv"]
        counts = step.state_write_steps(self.layer)
        x, tails = scans.convolve(x, tail, self.conv[...], None, counts)
        step = jaxkv.write_states(step, self.layer, {"conv": tails})
        return step, self.output(out_of * x.astype(out_of.dtype))


class Block(nnx.Module):
    """One layer: attention or a convolution, then a gated feed-forward part."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.mix_norm = RMSNorm(c.width, c.eps, dtype)
        if c.attends[layer]:
            norm = partial(RMSNorm, eps=c.eps, dtype=dtype)
            self.mixer = Attention(c, layer, dtype, rngs, rope=c.rope, norm=norm)
        else:
            self.mixer = ShortConvolution(c, layer, dtype, rngs)
        self.feed_norm = RMSNorm(c.width, c.eps, dtype)
        self.feed = Feed(c.width, c.hidden, jax.nn.silu, dtype, rngs)

    def __call__(self, step: jaxkv.Step, x: jax.Array) -> tuple[jaxkv.Step, jax.Array]:
        """Apply the layer to `x`, `[R, T, width]`; return the next step and the new `x`."""
        step, out = self.mixer(step, self.mix_norm(x))
        x = x + out
        return step, x + self.feed(self.feed_norm(x))


class LFM2(LanguageModel):
    """Flax module of LFM2."""

    block = Block


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of a model from its checkpoint."""
    c = checkpoint.config
    kinds = c.layer_kinds("full_attention", "conv")
    hidden = c["intermediate_size"]
    if c["block_auto_adjust_ff_dim"]:
        hidden = int(c["block_ffn_dim_multiplier"] * int(2 * hidden / 3))
        hidden = -(-hidden // c["block_multiple_of"]) * c["block_multiple_of"]
    c.ignore("block_ffn_dim_multiplier block_multiple_of")
    return Config(
        **attention_fields(checkpoint, eps="norm_eps"),
        attends=tuple(kind == "full_attention" for kind in kinds),
        hidden=hidden,
        kernel=c["conv_L_cache"],
        rope=rope_of(checkpoint),
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `LFM2`."""
    source = Sources(checkpoint)

    def attention(name: str) -> dict:
        names = {"output": "out_proj", "norms": "layernorm"}
        return source.attention(name, kv_heads=config.kv_heads, **names)

    def convolution(name: str) -> dict:
        return {
            "input": source.linear(f"{name}.in_proj", parts=3),
            "conv": source.tensor(f"{name}.conv.weight", arrange=lambda x: x[:, 0].T),
            "output": source.linear(f"{name}.out_proj"),
        }

    def block(i: int, layer: str) -> dict:
        return {
            "mix_norm": source.norm(f"{layer}.operator_norm"),
            "mixer": (
                attention(f"{layer}.self_attn")
                if config.attends[i]
                else convolution(f"{layer}.conv")
            ),
            "feed_norm": source.norm(f"{layer}.ffn_norm"),
            "feed": source.gated_feed(f"{layer}.feed_forward", names=("w1", "w3", "w2")),
        }

    return source.language_model(block, config, norm="model.embedding_norm")


def layers_of(config: Config, dtype: Any) -> list[Layer]:
    """Return a description of each layer of the cache; convolution states have dtype `dtype`."""
    attends = Attends(kv_heads=config.kv_heads, head_dim=config.head_dim, rope=config.rope)
    convolves = Recurs(
        states={"conv": jax.ShapeDtypeStruct((config.kernel - 1, config.width), dtype)},
        splits={"conv": split_of(config)},
    )
    return [attends if is_attention else convolves for is_attention in config.attends]


MODULE = LFM2
