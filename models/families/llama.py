"""The Llama family, written for a jaxkv memory: Llama, Mistral, SmolLM2, Qwen 2 and Qwen 3.

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
from models.families import memories
from models.families.linear import linear, matrix
from models.families.ropes import rope_of

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and switches of a model of the family; hashable.

    layers: L.
    width: numbers of a token between the layers.
    hidden: numbers of a token inside the feed-forward part.
    heads: H, query heads.
    groups: K, key/value heads.
    size: D, numbers of a head.
    vocabulary: V.
    eps: what keeps a norm from dividing by zero.
    rope: how queries and keys turn with position.
    tied: whether the head is the embedding.
    bias: whether queries, keys and values have biases (Qwen 2).
    norms: whether queries and keys are normalised head by head (Qwen 3).
    windows: of each layer, None where it sees the whole text; empty if all do.
    implementation: how attention is computed, see `jaxkv.attend`; None leaves it to jaxkv.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    groups: int
    size: int
    vocabulary: int
    eps: float
    rope: Rope
    tied: bool = True
    bias: bool = False
    norms: bool = False
    windows: tuple[Window | None, ...] = ()
    implementation: jaxkv.Implementation | None = None


class RMSNorm(nnx.Module):
    """Divides by the root of the mean square, in float32."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last dimension."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].astype(jnp.float32)
        return (y * weight.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


class Block(nnx.Module):
    """One layer: attention over the memory, then a gated feed-forward part."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.config, self.layer = config, layer
        self.attention_norm = RMSNorm(c.width, c.eps, dtype)
        # Queries, keys and values are one product, and gate and up another: with few tokens the
        # time goes into reading weights, and fewer, larger products read them faster.
        self.qkv = matrix(rngs, (c.heads + 2 * c.groups) * c.size, c.width, dtype)
        self.output = matrix(rngs, c.width, c.heads * c.size, dtype)
        if c.bias:
            self.qkv_bias = nnx.Param(jnp.zeros((c.heads + 2 * c.groups) * c.size, dtype))
        if c.norms:
            self.q_norm = RMSNorm(c.size, c.eps, dtype)
            self.k_norm = RMSNorm(c.size, c.eps, dtype)
        self.feed_norm = RMSNorm(c.width, c.eps, dtype)
        self.gate_up = matrix(rngs, 2 * c.hidden, c.width, dtype)
        self.down = matrix(rngs, c.width, c.hidden, dtype)

    def __call__(self, memory: Any, ubatch: Ubatch, x: jax.Array) -> tuple[Any, jax.Array]:
        """Run the layer on `x`, `[R, T, width]`; returns the memory and the next `x`."""
        c = self.config
        qkv = linear(self.attention_norm(x), self.qkv)
        if c.bias:
            qkv = qkv + self.qkv_bias[...].reshape(1, 1, -1)
        qkv = qkv.reshape(*x.shape[:2], c.heads + 2 * c.groups, c.size)
        qk, v = jnp.split(qkv, [c.heads + c.groups], axis=2)
        if c.norms:
            q, k = jnp.split(qk, [c.heads], axis=2)
            qk = jnp.concatenate([self.q_norm(q), self.k_norm(k)], axis=2)
        q, k = jnp.split(jaxkv.rotate(qk, ubatch.positions, c.rope), [c.heads], axis=2)
        memory, out = jaxkv.attend(
            memory, self.layer, ubatch, q, k, v, implementation=c.implementation
        )
        x = x + linear(out.reshape(*x.shape[:2], -1), self.output)
        gate, up = jnp.split(linear(self.feed_norm(x), self.gate_up), 2, axis=-1)
        return memory, x + linear(jax.nn.silu(gate) * up, self.down)


class Llama(nnx.Module):
    """The model: tokens in, logits of the tokens that want them out."""

    def __init__(self, config: Config, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.head = matrix(rngs, config.vocabulary, config.width, dtype)
        if not config.tied:
            self.embedding = matrix(rngs, config.vocabulary, config.width, dtype)
        self.blocks = nnx.List([Block(config, i, dtype, rngs) for i in range(config.layers)])
        self.norm = RMSNorm(config.width, config.eps, dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Turn tokens, `[R, T]`, into what the first layer reads, `[R, T, width]`."""
        if self.config.tied:
            return self.head[...][tokens]
        return self.embedding[...][tokens]

    def __call__(self, memory: Any, ubatch: Ubatch) -> tuple[Any, jax.Array]:
        """Run a ubatch that has been applied; returns the memory and logits `[O, V]`, float32."""
        x = self.embed(ubatch.tokens) if ubatch.embeddings is None else ubatch.embeddings
        for block in self.blocks:
            memory, x = block(memory, ubatch, x)
        x = x.reshape(-1, x.shape[-1])[ubatch.outputs]
        return memory, linear(self.norm(x), self.head).astype(jnp.float32)


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the sizes of a model of this family from its checkpoint."""
    c = checkpoint.config
    return Config(
        layers=c["num_hidden_layers"],
        width=c["hidden_size"],
        hidden=c["intermediate_size"],
        heads=c["num_attention_heads"],
        groups=c["num_key_value_heads"],
        size=c["head_dim"],
        vocabulary=c["vocab_size"],
        eps=c["rms_norm_eps"],
        rope=rope_of(checkpoint),
        tied=c["tie_word_embeddings"],
        bias=c["attention_bias"],
        norms="model.layers.0.self_attn.q_norm.weight" in checkpoint.tensors,
        windows=memories.windows_of(checkpoint),
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Name where each weight of `Llama` comes from: a tree of functions that read and arrange it.

    Nothing is read here. Called one after another, and each result put on the device before the
    next, they never hold more than one layer's worth beside the model.
    """
    read = checkpoint.tensor

    def joined(layer: str, *names: str):
        return lambda: np.concatenate([read(f"{layer}.{name}.weight") for name in names])

    def block(i: int) -> dict:
        layer = f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        tree = {
            "attention_norm": {"weight": lambda: read(f"{layer}.input_layernorm.weight")},
            "qkv": joined(attention, "q_proj", "k_proj", "v_proj"),
            "output": joined(attention, "o_proj"),
            "feed_norm": {"weight": lambda: read(f"{layer}.post_attention_layernorm.weight")},
            "gate_up": joined(f"{layer}.mlp", "gate_proj", "up_proj"),
            "down": joined(f"{layer}.mlp", "down_proj"),
        }
        if config.bias:
            names = [f"{attention}.{name}_proj.bias" for name in "qkv"]
            tree["qkv_bias"] = lambda: np.concatenate([read(name) for name in names])
        if config.norms:
            for name in ("q_norm", "k_norm"):
                tree[name] = {"weight": lambda name=name: read(f"{attention}.{name}.weight")}
        return tree

    tree = {
        "head": lambda: read("model.embed_tokens.weight" if config.tied else "lm_head.weight"),
        "blocks": {i: block(i) for i in range(config.layers)},
        "norm": {"weight": lambda: read("model.norm.weight")},
    }
    if not config.tied:
        tree["embedding"] = lambda: read("model.embed_tokens.weight")
    return tree


def make_memory(config: Config, **options: Any) -> Any:
    """Make the memory that a model of this family needs; see `models.memories.make_memory`."""
    return memories.make_memory(
        config.windows or (None,) * config.layers,
        (config.rope,) * config.layers,
        heads=config.groups,
        size=config.size,
        **options,
    )


MODULE = Llama
