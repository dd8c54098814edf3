"""Models of the families Llama, Mistral, SmolLM2, Qwen 2 and Qwen 3, also with experts."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv import Step
from jaxkv.rope import Rope
from models.checkpoints.checkpoint import Checkpoint
from models.families.caches import Attends, windows_of
from models.families.experts import Experts, SoftmaxRouter
from models.families.language_model import LanguageModel, WindowedConfig, attention_fields
from models.families.layers import Attention, Feed, RMSNorm
from models.families.ropes import rope_of
from models.families.sources import Sources

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, kw_only=True)
class Config(WindowedConfig):
    """Configuration of Llama; other fields are in `models.families.language_model`.

    output_bias: whether the output projection of attention has biases.
    norms: whether query heads and key heads are normalised (Qwen 3).
    experts: number of experts in a layer, of which a token selects `experts_per_token`. An expert
      has the inner size `hidden`. If the number is 0, a layer has one feed-forward part instead.
    normalised: whether the factors of the chosen experts are divided by the sum of these factors.
    """

    hidden: int
    rope: Rope
    bias: bool = False
    output_bias: bool = False
    norms: bool = False
    experts: int = 0
    experts_per_token: int = 0
    normalised: bool = False


class Block(nnx.Module):
    """One layer: attention over the cache, then a gated feed-forward part or experts."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.attention_norm = RMSNorm(c.width, c.eps, dtype)
        self.attention = Attention(
            c,
            layer,
            dtype,
            rngs,
            rope=c.rope,
            bias=c.bias,
            output_bias=c.output_bias,
            norm=partial(RMSNorm, eps=c.eps, dtype=dtype) if c.norms else None,
        )
        self.feed_norm = RMSNorm(c.width, c.eps, dtype)
        if c.experts:
            router = SoftmaxRouter(
                c.width, c.experts, c.experts_per_token, dtype, rngs, normalised=c.normalised
            )
            self.feed = Experts(c.width, c.hidden, c.experts, router, dtype, rngs)
        else:
            self.feed = Feed(c.width, c.hidden, jax.nn.silu, dtype, rngs)

    def __call__(self, step: Step, x: jax.Array) -> tuple[Step, jax.Array]:
        """Apply the layer to `x`, `[R, T, width]`; return the next step and the new `x`."""
        step, out = self.attention(step, self.attention_norm(x))
        x = x + out
        return step, x + self.feed(self.feed_norm(x))


class Llama(LanguageModel):
    """Flax module of Llama, Mistral, SmolLM2 and Qwen; `LanguageModel` runs the layers."""

    block = Block


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of a model from its checkpoint."""
    c, architecture = checkpoint.config, checkpoint.architecture
    selects = architecture == "qwen3_moe"
    if selects:
        c.ignore("intermediate_size")  # of layers without experts
        c.check_chosen("num_experts")
    bias = c.get("attention_bias", architecture == "qwen2")
    return Config(
        **attention_fields(checkpoint),
        hidden=c["moe_intermediate_size" if selects else "intermediate_size"],
        rope=rope_of(checkpoint),
        windows=windows_of(checkpoint),
        bias=bias,
        output_bias=c.get("attention_output_bias", bias and architecture != "qwen2"),
        norms=architecture in ("qwen3", "qwen3_moe"),
        experts=c["num_experts"] if selects else 0,
        experts_per_token=c["num_experts_per_tok"] if selects else 0,
        normalised=selects and c["norm_topk_prob"],
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `Llama`."""
    source = Sources(checkpoint)

    def block(_: int, layer: str) -> dict:
        attention = source.attention(
            f"{layer}.self_attn",
            kv_heads=config.kv_heads,
            bias=config.bias,
            output_bias=config.output_bias,
            norms="norm" if config.norms else None,
        )
        return {
            "attention_norm": source.norm(f"{layer}.input_layernorm"),
            "attention": attention,
            "feed_norm": source.norm(f"{layer}.post_attention_layernorm"),
            "feed": (
                source.experts(f"{layer}.mlp", count=config.experts)
                if config.experts
                else source.gated_feed(f"{layer}.mlp")
            ),
        }

    return source.language_model(block, config)


def layers_of(config: Config, dtype: Any) -> list[Attends]:
    """Return a description of each layer of the cache; the argument `dtype` is unused."""
    del dtype
    sizes = {"kv_heads": config.kv_heads, "head_dim": config.head_dim, "rope": config.rope}
    return [Attends(**sizes, window=window) for window in config.windows]


MODULE = Llama
