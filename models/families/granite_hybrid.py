"""Granite 4: most layers have a Mamba-2 mixer and some have attention; experts are optional.

Most models have no positional encoding, since recurrent layers depend on the order of tokens.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkv
from jaxkv.rope import Rope
from models.checkpoints.checkpoint import Checkpoint
from models.families import mamba2
from models.families.caches import Attends, Layer
from models.families.experts import Experts, SoftmaxRouter
from models.families.language_model import HybridConfig, LanguageModel, attention_fields
from models.families.layers import Attention, Feed, RMSNorm
from models.families.ropes import rope_of
from models.families.sources import Sources

ARCHITECTURES = ("granitemoehybrid",)


@dataclass(frozen=True, kw_only=True)
class Config(HybridConfig):
    """Configuration of Granite 4; other fields are in `models.families.language_model`.

    attends: whether each of the L layers has attention; the other layers have a Mamba-2 mixer.
    hidden: inner size of the feed-forward part that every token uses.
    mixer: configuration of the Mamba-2 mixers.
    embedding_factor: factor of embeddings.
    residual_factor: factor of the output of each part of a layer, applied before the residual sum.
    logits_divisor: divisor of logits.
    experts: number of experts, of which a token selects `experts_per_token`; 0 if there are none.
    expert_hidden: inner size of an expert.
    """

    hidden: int
    mixer: mamba2.Sizes
    rope: Rope | None
    scale: float
    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    logits_divisor: float = 1.0
    experts: int = 0
    experts_per_token: int = 0
    expert_hidden: int = 0
    bias: bool = False


class Block(nnx.Module):
    """One layer: attention or a mixer over the cache, then feed-forward parts."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = self.config = config
        self.mix_norm = RMSNorm(c.width, c.eps, dtype)
        if c.attends[layer]:
            self.mixer = Attention(
                c,
                layer,
                dtype,
                rngs,
                rope=c.rope,
                bias=c.bias,
                scale=c.scale,
            )
        else:
            self.mixer = mamba2.Mixer(c.mixer, layer, dtype, rngs)
        self.feed_norm = RMSNorm(c.width, c.eps, dtype)
        self.feed = Feed(c.width, c.hidden, jax.nn.silu, dtype, rngs)
        if c.experts:
            router = SoftmaxRouter(c.width, c.experts, c.experts_per_token, dtype, rngs)
            self.experts = Experts(c.width, c.expert_hidden, c.experts, router, dtype, rngs)

    def __call__(self, step: jaxkv.Step, x: jax.Array) -> tuple[jaxkv.Step, jax.Array]:
        """Apply the layer to `x`, `[R, T, width]`; return the next step and the new `x`."""
        c = self.config
        step, out = self.mixer(step, self.mix_norm(x))
        x = x + out * c.residual_factor
        y = self.feed_norm(x)
        out = self.feed(y)
        if c.experts:
            out = out + self.experts(y)
        return step, x + out * c.residual_factor


class GraniteHybrid(LanguageModel):
    """Flax module of Granite 4."""

    block = Block

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embed tokens `[R, T]` as the input of the first layer, `[R, T, width]`."""
        return self.vocabulary.embed(tokens) * self.config.embedding_factor

    def logits(self, x: jax.Array) -> jax.Array:
        """Map normalised vectors `[O, width]` to logits `[O, V]`, float32."""
        return self.vocabulary.logits(x) / self.config.logits_divisor


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of a model from its checkpoint."""
    c = checkpoint.config
    experts = c.get("num_local_experts", 0)
    if experts:
        c.check_chosen("num_local_experts")
    c.ignore("intermediate_size num_experts_per_tok")  # of experts
    if c.get("position_embedding_type") not in (None, "nope", "rope"):
        raise c.refusal("position_embedding_type", "nope or rope")
    kinds = c.layer_kinds("full_attention", "linear_attention")
    return Config(
        **attention_fields(checkpoint),
        attends=tuple(kind == "full_attention" for kind in kinds),
        hidden=c["shared_intermediate_size"],
        mixer=mamba2.sizes_of(checkpoint, bias=c["mamba_proj_bias"]),
        rope=rope_of(checkpoint) if c.get("position_embedding_type") == "rope" else None,
        scale=c["attention_multiplier"],
        embedding_factor=c["embedding_multiplier"],
        residual_factor=c["residual_multiplier"],
        logits_divisor=c["logits_scaling"],
        experts=experts,
        experts_per_token=c["num_experts_per_tok"] if experts else 0,
        expert_hidden=c["intermediate_size"] if experts else 0,
        bias=c["attention_bias"],
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `GraniteHybrid`."""
    source = Sources(checkpoint)

    def experts(name: str) -> dict:
        both, down = (f"{name}.{side}_linear.weight" for side in ("input", "output"))
        return {
            "router": {"weight": source.tensor(f"{name}.router.layer.weight")},
            "gate": source.tensor(both, arrange=lambda x: np.split(x, 2, axis=1)[0].swapaxes(1, 2)),
            "up": source.tensor(both, arrange=lambda x: np.split(x, 2, axis=1)[1].swapaxes(1, 2)),
            "down": source.tensor(down, arrange=lambda x: x.swapaxes(1, 2)),
        }

    def block(i: int, layer: str) -> dict:
        tree = {
            "mix_norm": source.norm(f"{layer}.input_layernorm"),
            "feed_norm": source.norm(f"{layer}.post_attention_layernorm"),
            "feed": {
                "gate_up": source.linear(f"{layer}.shared_mlp.input_linear", parts=2),
                "down": source.linear(f"{layer}.shared_mlp.output_linear"),
            },
        }
        if config.attends[i]:
            tree["mixer"] = source.attention(
                f"{layer}.self_attn", kv_heads=config.kv_heads, bias=config.bias
            )
        else:
            tree["mixer"] = mamba2.mixer_weights_of(source, config.mixer, f"{layer}.mamba")
        if config.experts:
            tree["experts"] = experts(f"{layer}.block_sparse_moe")
        return tree

    return source.language_model(block, config)


def layers_of(config: Config, dtype: Any) -> list[Layer]:
    """Return a description of each layer of the cache; convolution states have dtype `dtype`."""
    attends = Attends(kv_heads=config.kv_heads, head_dim=config.head_dim, rope=config.rope)
    mixes = mamba2.recurs(config.mixer, dtype)
    return [attends if is_attention else mixes for is_attention in config.attends]


MODULE = GraniteHybrid
