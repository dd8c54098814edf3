"""Nemotron-H: a layer is a Mamba-2 mixer, attention without rotation, feed-forward or experts."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from models.checkpoints.checkpoint import Checkpoint
from models.families import deepseek, mamba2
from models.families.caches import Attends, Layer
from models.families.experts import Experts
from models.families.language_model import AttentionConfig, LanguageModel, attention_fields
from models.families.layers import Attention, Feed, Linear, RMSNorm, relu2
from models.families.sources import Sources

ARCHITECTURES = ("nemotron_h",)
KINDS = ("linear_attention", "full_attention", "mlp", "moe")


@dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    """Configuration of Nemotron-H; other fields are in `models.families.language_model`.

    kinds: kind of each layer, one of `KINDS`.
    hidden: inner size of the feed-forward layers.
    mixer: configuration of the Mamba-2 mixers.
    routing: selection of experts; None if no layer has experts.
    latent: size of the inputs and outputs of experts; None for `width`, without projections.
    expert_hidden: inner size of an expert.
    shared_hidden: inner size of the feed-forward part beside experts, which every token uses.
    bias: whether feed-forward parts without routing, and projections, have biases.
    """

    kinds: tuple[str, ...]
    hidden: int
    mixer: mamba2.Sizes
    routing: deepseek.Routing | None
    latent: int | None
    expert_hidden: int
    shared_hidden: int
    bias: bool

    @property
    def layers(self) -> int:
        """Number of layers, L."""
        return len(self.kinds)


class SharedAndRouted(nnx.Module):
    """A feed-forward part that every token uses, and experts."""

    def __init__(self, config: Config, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = self.config = config
        self.feed = Feed(c.width, c.shared_hidden, relu2, dtype, rngs, gated=False, bias=c.bias)
        sizes = c.latent or c.width, c.expert_hidden, c.routing.experts
        router = deepseek.Router(c, dtype, rngs)
        self.experts = Experts(*sizes, router, dtype, rngs, activation=relu2, gated=False)
        if c.latent:
            self.narrow = Linear(c.width, c.latent, dtype, rngs, bias=c.bias)
            self.widen = Linear(c.latent, c.width, dtype, rngs, bias=c.bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map each token's vector in `x`, `[R, T, width]`, to a vector of the same size."""
        if not self.config.latent:
            return self.experts(x) + self.feed(x)
        return self.widen(self.experts(self.narrow(x), routed=x)) + self.feed(x)


class Block(nnx.Module):
    """One layer of one of the `KINDS`."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c, kind = config, config.kinds[layer]
        self.norm = RMSNorm(c.width, c.eps, dtype)
        self.has_cache = kind in ("linear_attention", "full_attention")
        if kind == "linear_attention":
            self.mixer = mamba2.Mixer(c.mixer, layer, dtype, rngs)
        elif kind == "full_attention":
            self.mixer = Attention(c, layer, dtype, rngs, rope=None)
        elif kind == "mlp":
            self.mixer = Feed(c.width, c.hidden, relu2, dtype, rngs, gated=False, bias=c.bias)
        else:
            self.mixer = SharedAndRouted(c, dtype, rngs)

    def __call__(self, step: jaxkv.Step, x: jax.Array) -> tuple[jaxkv.Step, jax.Array]:
        """Apply the layer to `x`, `[R, T, width]`; return the next step and the new `x`."""
        y = self.norm(x)
        if not self.has_cache:
            return step, x + self.mixer(y)
        step, out = self.mixer(step, y)
        return step, x + out


class NemotronH(LanguageModel):
    """Flax module of Nemotron-H."""

    block = Block


_UNUSED = (
    "attention_bias hidden_dropout layers_block_type mamba_proj_bias mamba_ssm_cache_dtype "
    "moe_shared_expert_overlap mtp_layers_block_type n_shared_experts num_nextn_predict_layers "
    "rescale_prenorm_residual sliding_window time_step_limit use_mamba_kernels "
    "n_group n_routed_experts norm_topk_prob num_experts_per_tok routed_scaling_factor topk_group"
)
"""Settings that have no effect on logits; those of the last line, if no layer has experts."""


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of a model from its checkpoint."""
    c = checkpoint.config
    c.ignore(_UNUSED)
    c.check_divides("n_groups", "mamba_num_heads")
    kinds = c.layer_kinds(*KINDS)
    return Config(
        **attention_fields(checkpoint, eps="layer_norm_epsilon"),
        kinds=kinds,
        hidden=c["intermediate_size"],
        mixer=mamba2.Sizes(
            width=c["hidden_size"],
            heads=c["mamba_num_heads"],
            head_dim=c["mamba_head_dim"],
            state=c["ssm_state_size"],
            groups=c["n_groups"],
            kernel=c["conv_kernel"],
            eps=c["layer_norm_epsilon"],
            limits=(c["time_step_min"], float("inf")),
            bias=c["use_bias"],
            conv_bias=c["use_conv_bias"],
        ),
        routing=deepseek.routing_of(checkpoint) if "moe" in kinds else None,
        latent=c.get("moe_latent_size"),
        expert_hidden=c["moe_intermediate_size"],
        shared_hidden=c["moe_shared_expert_intermediate_size"],
        bias=c["mlp_bias"],
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `NemotronH`."""
    source, c = Sources(checkpoint), config

    def feed(name: str) -> dict:
        return {part: source.linear(f"{name}.{part}_proj", bias=c.bias) for part in ("up", "down")}

    def shared_and_routed(name: str) -> dict:
        experts = source.experts(name, count=c.routing.experts, parts=("up", "down"))
        experts["router"]["correction"] = source.tensor(f"{name}.gate.e_score_correction_bias")
        tree = {"feed": feed(f"{name}.shared_experts"), "experts": experts}
        for part, number in (("narrow", 1), ("widen", 2)) if c.latent else ():
            tree[part] = source.linear(f"{name}.fc{number}_latent_proj", bias=c.bias)
        return tree

    def block(i: int, layer: str) -> dict:
        name = f"{layer}.mixer"
        mixer = {
            "linear_attention": lambda: mamba2.mixer_weights_of(source, c.mixer, name),
            "full_attention": lambda: source.attention(name, kv_heads=c.kv_heads),
            "mlp": lambda: feed(name),
            "moe": lambda: shared_and_routed(name),
        }[c.kinds[i]]
        return {"norm": source.norm(f"{layer}.norm"), "mixer": mixer()}

    names = {"embedding": "backbone.embeddings", "norm": "backbone.norm_f"}
    return source.language_model(block, config, layers="backbone.layers", **names)


def layers_of(config: Config, dtype: Any) -> list[Layer]:
    """Return what the cache stores for each layer; convolution states have dtype `dtype`."""
    attends = Attends(kv_heads=config.kv_heads, head_dim=config.head_dim, rope=None)
    stored = {"full_attention": attends, "linear_attention": mamba2.recurs(config.mixer, dtype)}
    return [stored.get(kind, ()) for kind in config.kinds]


MODULE = NemotronH
