"""Gemma 3: most layers have a window, and every n-th layer has full attention."""

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
from models.families.language_model import LanguageModel, WindowedConfig, attention_fields
from models.families.layers import Attention, Feed, RMSNorm, gelu
from models.families.ropes import rope_of
from models.families.sources import Sources

ARCHITECTURES = ("gemma3_text",)


@dataclass(frozen=True, kw_only=True)
class Config(WindowedConfig):
    """Configuration of Gemma 3; other fields are in `models.families.language_model`.

    ropes: rotary embedding of each layer.
    final_softcap: soft limit of logits; None for no limit.
    """

    hidden: int
    scale: float
    ropes: tuple[Rope, ...]
    final_softcap: float | None = None


class Block(nnx.Module):
    """One layer: attention, then a gated feed-forward part; each has a norm before and after it."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        norm = partial(RMSNorm, eps=c.eps, dtype=dtype, less_one=True)
        self.attention_norm = norm(c.width)
        self.attention = Attention(
            c,
            layer,
            dtype,
            rngs,
            rope=c.ropes[layer],
            norm=norm,
            scale=c.scale,
        )
        self.after_attention_norm = norm(c.width)
        self.feed_norm = norm(c.width)
        self.feed = Feed(c.width, c.hidden, gelu, dtype, rngs)
        self.after_feed_norm = norm(c.width)

    def __call__(self, step: Step, x: jax.Array) -> tuple[Step, jax.Array]:
        """Apply the layer to `x`, `[R, T, width]`; return the next step and the new `x`."""
        step, out = self.attention(step, self.attention_norm(x))
        x = x + self.after_attention_norm(out)
        return step, x + self.after_feed_norm(self.feed(self.feed_norm(x)))


class Gemma3(LanguageModel):
    """Flax module of Gemma 3."""

    block = Block
    less_one = True

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embed tokens `[R, T]` as the input of the first layer, `[R, T, width]`."""
        x = self.vocabulary.embed(tokens)
        # The factor is rounded to the dtype of the params, as in training.
        return x * jnp.asarray(self.config.width**0.5, x.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """Map normalised vectors `[O, width]` to logits `[O, V]`, float32."""
        logits = self.vocabulary.logits(x)
        cap = self.config.final_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of a model from its checkpoint."""
    c = checkpoint.config
    c.ignore("attn_logit_softcapping")  # the class declares it, and does not use it
    rope, local = (rope_of(checkpoint, f"{kind}_attention") for kind in ("full", "sliding"))
    windows = windows_of(checkpoint)
    return Config(
        **attention_fields(checkpoint),
        hidden=c["intermediate_size"],
        scale=c["query_pre_attn_scalar"] ** -0.5,
        windows=windows,
        ropes=tuple(rope if window is None else local for window in windows),
        final_softcap=c.get("final_logit_softcapping"),
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `Gemma3`."""
    source = Sources(checkpoint)

    def block(_: int, layer: str) -> dict:
        attention = source.attention(f"{layer}.self_attn", kv_heads=config.kv_heads, norms="norm")
        return layer_weights(source, layer) | {"attention": attention}

    return source.language_model(block, config)


def layer_weights(source: Sources, layer: str) -> dict[str, Any]:
    """Return the tensors for the norms and the feed-forward part of a layer."""
    return {
        "attention_norm": source.norm(f"{layer}.input_layernorm"),
        "after_attention_norm": source.norm(f"{layer}.post_attention_layernorm"),
        "feed_norm": source.norm(f"{layer}.pre_feedforward_layernorm"),
        "feed": source.gated_feed(f"{layer}.mlp"),
        "after_feed_norm": source.norm(f"{layer}.post_feedforward_layernorm"),
    }


def layers_of(config: Config, dtype: Any) -> list[Attends]:
    """Return a description of each layer of the cache; the argument `dtype` is unused."""
    del dtype
    return [
        Attends(kv_heads=config.kv_heads, head_dim=config.head_dim, rope=rope, window=window)
        for rope, window in zip(config.ropes, config.windows, strict=True)
    ]


MODULE = Gemma3
