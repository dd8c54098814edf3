"""Gemma 3, written for a jaxkv memory: most layers look back over a window, every few over all.

Readable alone: the module below is the whole model. It asks the memory for one thing, `attend`, and
never sees a mask, a cell or a length.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkv
from jaxkv import Rope, Ubatch, Window
from models.checkpoints.checkpoint import Checkpoint
from models.errors import ModelError
from models.families import memories
from models.families.linear import linear, matrix
from models.families.ropes import rope_of

ARCHITECTURES = ("gemma3_text",)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and switches of a model of the family; hashable.

    width: numbers of a token between the layers.
    hidden: numbers of a token inside the feed-forward part.
    heads: H, query heads.
    groups: K, key/value heads.
    size: D, numbers of a head.
    vocabulary: V.
    eps: what keeps a norm from dividing by zero.
    scale: what products of queries and keys are multiplied by.
    windows: of each of the L layers, None where it sees the whole text.
    ropes: how queries and keys turn with position, layer by layer.
    softcap: what the logits of attention stay below, None for no limit.
    final_softcap: what the logits of tokens stay below, None for no limit.
    implementation: how attention is computed, see `jaxkv.attend`; None leaves it to jaxkv.
    """

    width: int
    hidden: int
    heads: int
    groups: int
    size: int
    vocabulary: int
    eps: float
    scale: float
    windows: tuple[Window | None, ...]
    ropes: tuple[Rope, ...]
    softcap: float | None = None
    final_softcap: float | None = None
    implementation: jaxkv.Implementation | None = None


class RMSNorm(nnx.Module):
    """Divides by the root of the mean square, in float32; the weight is stored less 1."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.zeros(size, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last dimension."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        weight = 1 + self.weight[...].astype(jnp.float32)
        return (y * weight.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


class Block(nnx.Module):
    """One layer: attention over the memory, then a gated feed-forward part; norms around both."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.config, self.layer = config, layer
        self.attention_norm = RMSNorm(c.width, c.eps, dtype)
        # Queries, keys and values are one product, and gate and up another: with few tokens the
        # time goes into reading weights, and fewer, larger products read them faster.
        self.qkv = matrix(rngs, (c.heads + 2 * c.groups) * c.size, c.width, dtype)
        self.output = matrix(rngs, c.width, c.heads * c.size, dtype)
        self.q_norm = RMSNorm(c.size, c.eps, dtype)
        self.k_norm = RMSNorm(c.size, c.eps, dtype)
        self.after_attention_norm = RMSNorm(c.width, c.eps, dtype)
        self.feed_norm = RMSNorm(c.width, c.eps, dtype)
        self.gate_up = matrix(rngs, 2 * c.hidden, c.width, dtype)
        self.down = matrix(rngs, c.width, c.hidden, dtype)
        self.after_feed_norm = RMSNorm(c.width, c.eps, dtype)

    def __call__(self, memory: Any, ubatch: Ubatch, x: jax.Array) -> tuple[Any, jax.Array]:
        """Run the layer on `x`, `[R, T, width]`; returns the memory and the next `x`."""
        c = self.config
        qkv = linear(self.attention_norm(x), self.qkv)
        qkv = qkv.reshape(*x.shape[:2], c.heads + 2 * c.groups, c.size)
        q, k, v = jnp.split(qkv, [c.heads, c.heads + c.groups], axis=2)
        qk = jnp.concatenate([self.q_norm(q), self.k_norm(k)], axis=2)
        qk = jaxkv.rotate(qk, ubatch.positions, c.ropes[self.layer])
        q, k = jnp.split(qk, [c.heads], axis=2)
        options = {"scale": c.scale, "softcap": c.softcap, "implementation": c.implementation}
        memory, out = jaxkv.attend(memory, self.layer, ubatch, q, k, v, **options)
        out = linear(out.reshape(*x.shape[:2], -1), self.output)
        x = x + self.after_attention_norm(out)
        gate, up = jnp.split(linear(self.feed_norm(x), self.gate_up), 2, axis=-1)
        out = linear(jax.nn.gelu(gate, approximate=True) * up, self.down)
        return memory, x + self.after_feed_norm(out)


class Gemma3(nnx.Module):
    """The model: tokens in, logits of the tokens that want them out."""

    def __init__(self, config: Config, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.head = matrix(rngs, config.vocabulary, config.width, dtype)
        layers = range(len(config.windows))
        self.blocks = nnx.List([Block(config, i, dtype, rngs) for i in layers])
        self.norm = RMSNorm(config.width, config.eps, dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Turn tokens, `[R, T]`, into what the first layer reads, `[R, T, width]`."""
        x = self.head[...][tokens]
        # The factor is rounded to the weights' dtype, as it was when the model was trained.
        return x * jnp.asarray(self.config.width**0.5, x.dtype)

    def __call__(self, memory: Any, ubatch: Ubatch) -> tuple[Any, jax.Array]:
        """Run a ubatch that has been applied; returns the memory and logits `[O, V]`, float32."""
        x = self.embed(ubatch.tokens) if ubatch.embeddings is None else ubatch.embeddings
        for block in self.blocks:
            memory, x = block(memory, ubatch, x)
        x = x.reshape(-1, x.shape[-1])[ubatch.outputs]
        logits = linear(self.norm(x), self.head).astype(jnp.float32)
        if (cap := self.config.final_softcap) is not None:
            logits = cap * jnp.tanh(logits / cap)
        return memory, logits


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the sizes of a model of this family from its checkpoint."""
    c = checkpoint.config
    if c.get("use_bidirectional_attention") or not c["tie_word_embeddings"]:
        raise ModelError(
            f"{checkpoint.source} looks ahead or has a head of its own; only Gemma 3 models that "
            "continue texts, with their embedding as the head, can be run."
        )
    size = c["head_dim"]
    layers = c["num_hidden_layers"]
    # Only layers that see the whole text have their positions stretched.
    rope, local = rope_of(checkpoint), jaxkv.make_rope(size, base=c["rope_local_base_freq"])
    windows = memories.windows_of(checkpoint) or (None,) * layers
    return Config(
        width=c["hidden_size"],
        hidden=c["intermediate_size"],
        heads=c["num_attention_heads"],
        groups=c["num_key_value_heads"],
        size=size,
        vocabulary=c["vocab_size"],
        eps=c["rms_norm_eps"],
        scale=c["query_pre_attn_scalar"] ** -0.5,
        windows=windows,
        ropes=tuple(rope if window is None else local for window in windows),
        softcap=c.get("attn_logit_softcapping"),
        final_softcap=c.get("final_logit_softcapping"),
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Name where each weight of `Gemma3` comes from: a tree of functions that read and arrange it.

    Nothing is read here. Called one after another, and each result put on the device before the
    next, they never hold more than the head beside the model.
    """
    read = checkpoint.tensor

    def joined(layer: str, *names: str):
        return lambda: np.concatenate([read(f"{layer}.{name}.weight") for name in names])

    def norm(name: str):
        return {"weight": lambda: read(f"{name}.weight")}

    def block(i: int) -> dict:
        layer = f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        return {
            "attention_norm": norm(f"{layer}.input_layernorm"),
            "qkv": joined(attention, "q_proj", "k_proj", "v_proj"),
            "output": joined(attention, "o_proj"),
            "q_norm": norm(f"{attention}.q_norm"),
            "k_norm": norm(f"{attention}.k_norm"),
            "after_attention_norm": norm(f"{layer}.post_attention_layernorm"),
            "feed_norm": norm(f"{layer}.pre_feedforward_layernorm"),
            "gate_up": joined(f"{layer}.mlp", "gate_proj", "up_proj"),
            "down": joined(f"{layer}.mlp", "down_proj"),
            "after_feed_norm": norm(f"{layer}.post_feedforward_layernorm"),
        }

    return {
        "head": lambda: read("model.embed_tokens.weight"),
        "blocks": {i: block(i) for i in range(len(config.windows))},
        "norm": norm("model.norm"),
    }


def make_memory(config: Config, **options: Any) -> Any:
    """Make the memory that a model of this family needs; see `models.memories.make_memory`."""
    return memories.make_memory(
        config.windows, config.ropes, heads=config.groups, size=config.size, **options
    )


MODULE = Gemma3
