"""gpt-oss: attention with sinks, windows in every other layer, and experts with biases."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv import Step
from models.checkpoints.checkpoint import Checkpoint
from models.families import llama
from models.families.caches import windows_of
from models.families.experts import Experts, SoftmaxRouter
from models.families.language_model import attention_fields
from models.families.layers import Attention, RMSNorm
from models.families.ropes import rope_of
from models.families.sources import Sources

ARCHITECTURES = ("gpt_oss",)


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """Configuration of gpt-oss; other fields are in `models.families.llama`.

    alpha: factor of the gate inside the sigmoid.
    limit: upper bound of gates, and bound of the absolute values of up projections.
    bias: whether all projections of attention have biases.
    """

    alpha: float
    limit: float
    bias: bool = True


def clamped_swiglu(gate: jax.Array, up: jax.Array, *, alpha: float, limit: float) -> jax.Array:
    """Clamp `gate` and `up`; return `gate * sigmoid(alpha * gate) * (up + 1)`."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


class Block(nnx.Module):
    """One layer: attention over the cache, then experts."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.attention_norm = RMSNorm(c.width, c.eps, dtype)
        self.attention = Attention(c, layer, dtype, rngs, rope=c.rope, bias=c.bias, sinks=True)
        self.feed_norm = RMSNorm(c.width, c.eps, dtype)
        self.experts = Experts(
            c.width,
            c.hidden,
            c.experts,
            SoftmaxRouter(c.width, c.experts, c.experts_per_token, dtype, rngs, bias=True),
            dtype,
            rngs,
            activation=partial(clamped_swiglu, alpha=c.alpha, limit=c.limit),
            bias=True,
        )

    def __call__(self, step: Step, x: jax.Array) -> tuple[Step, jax.Array]:
        """Apply the layer to `x`, `[R, T, width]`; return the next step and the new `x`."""
        step, out = self.attention(step, self.attention_norm(x))
        x = x + out
        return step, x + self.experts(self.feed_norm(x))


class GptOss(llama.Llama):
    """Flax module of gpt-oss."""

    block = Block


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of a model from its checkpoint."""
    c = checkpoint.config
    c.check_chosen("num_local_experts")
    return Config(
        **attention_fields(checkpoint),
        hidden=c["intermediate_size"],
        rope=rope_of(checkpoint),
        windows=windows_of(checkpoint),
        experts=c["num_local_experts"],
        experts_per_token=c["num_experts_per_tok"],
        alpha=c["swiglu_alpha"],
        limit=c["swiglu_limit"],
        bias=c["attention_bias"],
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `GptOss`."""
    source = Sources(checkpoint)

    def experts(name: str) -> dict:
        tree: dict[str, Any] = {"router": source.linear(f"{name}.router", bias=True)}
        for end in ("", "_bias"):
            both = f"{name}.experts.gate_up_proj{end}"  # gates are at even indices
            tree[f"gate{end}"] = source.tensor(both, arrange=lambda x: x[..., ::2])
            tree[f"up{end}"] = source.tensor(both, arrange=lambda x: x[..., 1::2])
            tree[f"down{end}"] = source.tensor(f"{name}.experts.down_proj{end}")
        return tree

    def block(_: int, layer: str) -> dict:
        attention = source.attention(
            f"{layer}.self_attn", kv_heads=config.kv_heads, bias=config.bias
        )
        return {
            "attention_norm": source.norm(f"{layer}.input_layernorm"),
            "attention": attention | {"sinks": source.tensor(f"{layer}.self_attn.sinks")},
            "feed_norm": source.norm(f"{layer}.post_attention_layernorm"),
            "experts": experts(f"{layer}.mlp"),
        }

    return source.language_model(block, config)


layers_of = llama.layers_of
MODULE = GptOss
