"""Falcon-H1: attention and a Mamba-2 mixer in parallel in each layer.

The hybrid cache has a part for attention and a part for mixers; every layer is in both parts.
Multipliers of matrix products are multiplied into the matrices when the matrices are read, as in
llama.cpp's converter. Multipliers of embeddings and logits are applied separately, since embedding
and head may share one matrix.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkv
from jaxkv.rope import Rope
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.tensor import Tensor
from models.families import mamba2
from models.families.caches import Attends, Layer
from models.families.language_model import AttentionConfig, LanguageModel, attention_fields
from models.families.layers import Attention, Feed, RMSNorm
from models.families.ropes import rope_of
from models.families.sources import Sources

ARCHITECTURES = ("falcon_h1",)


@dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    """Configuration of Falcon-H1; other fields are in `models.families.language_model`.

    mixer: configuration of the Mamba-2 mixer of each layer.
    embedding_factor: factor of embeddings.
    logits_factor: factor of logits.
    """

    layers: int
    hidden: int
    mixer: mamba2.Sizes
    rope: Rope
    embedding_factor: float = 1.0
    logits_factor: float = 1.0


class Block(nnx.Module):
    """One layer: attention and a mixer in parallel, then a gated feed-forward part."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.mix_norm = RMSNorm(c.width, c.eps, dtype)
        self.attention = Attention(c, layer, dtype, rngs, rope=c.rope)
        self.mixer = mamba2.Mixer(c.mixer, layer, dtype, rngs)
        self.feed_norm = RMSNorm(c.width, c.eps, dtype)
        self.feed = Feed(c.width, c.hidden, jax.nn.silu, dtype, rngs)

    def __call__(self, step: jaxkv.Step, x: jax.Array) -> tuple[jaxkv.Step, jax.Array]:
        """Apply the layer to `x`, `[R, T, width]`; return the next step and the new `x`."""
        y = self.mix_norm(x)
        step, attended = self.attention(step, y)
        step, mixed = self.mixer(step, y)
        x = x + (attended + mixed)
        return step, x + self.feed(self.feed_norm(x))


class FalconH1(LanguageModel):
    """Flax module of Falcon-H1."""

    block = Block

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embed tokens `[R, T]` as the input of the first layer, `[R, T, width]`."""
        return self.vocabulary.embed(tokens) * self.config.embedding_factor

    def logits(self, x: jax.Array) -> jax.Array:
        """Map normalised vectors `[O, width]` to logits `[O, V]`, float32."""
        return self.vocabulary.logits(x) * self.config.logits_factor


_MULTIPLIERS = (
    "attention_in_multiplier attention_out_multiplier key_multiplier mlp_multipliers "
    "ssm_in_multiplier ssm_multipliers ssm_out_multiplier"
)


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of a model from its checkpoint."""
    c = checkpoint.config
    if c["mamba_norm_before_gate"] and c["mamba_rms_norm"]:
        raise c.refusal("mamba_norm_before_gate", "False")
    for key, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
        if len(c[key]) != count:
            raise c.refusal(key, f"a list of {count}, each a number,")
    c.ignore(_MULTIPLIERS)  # of the weights
    return Config(
        **attention_fields(checkpoint),
        layers=c["num_hidden_layers"],
        hidden=c["intermediate_size"],
        mixer=mamba2.sizes_of(checkpoint, norm=c["mamba_rms_norm"]),
        rope=rope_of(checkpoint),
        embedding_factor=c["embedding_multiplier"],
        logits_factor=c["lm_head_multiplier"],
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `FalconH1`."""
    source = Sources(with_multipliers(checkpoint, config.mixer))

    def block(_: int, layer: str) -> dict:
        return {
            "mix_norm": source.norm(f"{layer}.input_layernorm"),
            "attention": source.attention(f"{layer}.self_attn", kv_heads=config.kv_heads),
            "mixer": mamba2.mixer_weights_of(source, config.mixer, f"{layer}.mamba"),
            "feed_norm": source.norm(f"{layer}.pre_ff_layernorm"),
            "feed": source.gated_feed(f"{layer}.feed_forward"),
        }

    return source.language_model(block, config, norm="model.final_layernorm")


def with_multipliers(checkpoint: Checkpoint, mixer: mamba2.Sizes) -> Checkpoint:
    """Return a checkpoint whose layer matrices are multiplied by the multipliers in its config."""
    c = checkpoint.config
    attention_in, (gate, down) = c["attention_in_multiplier"], c["mlp_multipliers"]
    # Rows are in the order gate, input of heads, `b`, `c`, steps.
    shared = mixer.groups * mixer.state
    sizes = mixer.inner, mixer.inner, shared, shared, mixer.heads
    by_row = np.repeat(np.array(c["ssm_multipliers"], np.float32), sizes)[:, None]
    factors = {
        "self_attn.q_proj": attention_in,
        "self_attn.k_proj": attention_in * c["key_multiplier"],
        "self_attn.v_proj": attention_in,
        "self_attn.o_proj": c["attention_out_multiplier"],
        "mamba.in_proj": by_row * c["ssm_in_multiplier"],
        "mamba.out_proj": c["ssm_out_multiplier"],
        "feed_forward.gate_proj": gate,
        "feed_forward.down_proj": down,
    }

    tensors = dict(checkpoint.tensors)
    for layer in range(c["num_hidden_layers"]):
        for part, factor in factors.items():
            name = f"model.layers.{layer}.{part}.weight"
            if name in tensors and np.any(factor != 1):
                tensors[name] = _times(tensors[name], factor)
    return replace(checkpoint, tensors=tensors)


def _times(tensor: Tensor, factor: float | np.ndarray) -> Tensor:
    return replace(tensor, read=lambda: tensor.read().astype(np.float32) * factor)


def layers_of(config: Config, dtype: Any) -> list[Layer]:
    """Return a description of each layer of the cache; convolution states have dtype `dtype`."""
    attends = Attends(kv_heads=config.kv_heads, head_dim=config.head_dim, rope=config.rope)
    return [(attends, mamba2.recurs(config.mixer, dtype))] * config.layers


MODULE = FalconH1
