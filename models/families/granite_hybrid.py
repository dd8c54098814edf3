"""Granite 4, written for a jaxkv memory: mostly Mamba-2 layers, and every few an attention layer.

Readable beside `models/mamba2.py`, whose mixers it uses. Attention asks the memory for `attend`, a
mixer for states; which part of the memory answers, no layer knows. There may be experts, and most
models of the family have no positional encoding: their recurrent layers tell the order of tokens.
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
from models.families.linear import linear, matrix
from models.families.mamba2 import Mixer, RMSNorm
from models.families.ropes import rope_of

ARCHITECTURES = ("granitemoehybrid",)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and switches of a model of the family; hashable.

    attends: of each of the L layers, whether it attends or has a Mamba-2 mixer.
    width: numbers of a token between the layers.
    hidden: numbers of a token inside the feed-forward part that all tokens share.
    heads: H, query heads.
    groups: K, key/value heads.
    size: D, numbers of a head.
    vocabulary: V.
    eps: what keeps a norm from dividing by zero.
    mixer: of every layer that does not attend.
    rope: how queries and keys turn with position, None where they do not.
    scale: what products of queries and keys are multiplied by.
    embedding_factor: what embeddings are multiplied by.
    residual_factor: what each part of a layer is multiplied by before it is added.
    logits_divisor: what logits are divided by.
    experts: feed-forward parts of which each token chooses; 0 where there are none.
    chosen: how many it chooses.
    expert_hidden: numbers of a token inside one of them.
    tied: whether the head is the embedding.
    bias: whether the projections of attention have biases.
    implementation: how attention is computed, see `jaxkv.attend`; None leaves it to jaxkv.
    """

    attends: tuple[bool, ...]
    width: int
    hidden: int
    heads: int
    groups: int
    size: int
    vocabulary: int
    eps: float
    mixer: mamba2.Sizes
    rope: Rope | None
    scale: float
    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    logits_divisor: float = 1.0
    experts: int = 0
    chosen: int = 0
    expert_hidden: int = 0
    tied: bool = True
    bias: bool = False
    implementation: jaxkv.Implementation | None = None


class Attention(nnx.Module):
    """Attention over the memory."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.config, self.layer = c, layer
        self.qkv = matrix(rngs, (c.heads + 2 * c.groups) * c.size, c.width, dtype)
        self.output = matrix(rngs, c.width, c.heads * c.size, dtype)
        if c.bias:
            self.qkv_bias = nnx.Param(jnp.zeros((c.heads + 2 * c.groups) * c.size, dtype))
            self.output_bias = nnx.Param(jnp.zeros(c.width, dtype))

    def __call__(self, memory: Any, ubatch: jaxkv.Ubatch, x: jax.Array) -> tuple[Any, jax.Array]:
        """Mix `x`, `[R, T, width]`, with what came before; returns the memory and the outcome."""
        c = self.config
        qkv = linear(x, self.qkv)
        if c.bias:
            qkv = qkv + self.qkv_bias[...].reshape(1, 1, -1)
        qkv = qkv.reshape(*x.shape[:2], c.heads + 2 * c.groups, c.size)
        qk, v = jnp.split(qkv, [c.heads + c.groups], axis=2)
        if c.rope is not None:
            qk = jaxkv.rotate(qk, ubatch.positions, c.rope)
        q, k = jnp.split(qk, [c.heads], axis=2)
        memory, out = jaxkv.attend(
            memory, self.layer, ubatch, q, k, v, scale=c.scale, implementation=c.implementation
        )
        out = linear(out.reshape(*x.shape[:2], -1), self.output)
        if c.bias:
            out = out + self.output_bias[...].reshape(1, 1, -1)
        return memory, out


class Experts(nnx.Module):
    """Feed-forward parts, a few of which each token goes through."""

    def __init__(self, config: Config, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.config = c
        self.router = matrix(rngs, c.experts, c.width, dtype)
        self.gate_up = _experts(rngs, c.experts, c.width, 2 * c.expert_hidden, dtype)
        self.down = _experts(rngs, c.experts, c.expert_hidden, c.width, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Send each token of `x`, `[R, T, width]`, to the experts with its largest logits."""
        c = self.config
        tokens = x.reshape(-1, c.width)
        logits, chosen = jax.lax.top_k(linear(tokens, self.router).astype(jnp.float32), c.chosen)
        share = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
        if chosen.size <= c.experts:  # few tokens: reading the chosen weights alone is less work
            gate_up = jnp.einsum("nd,nkdh->nkh", tokens, self.gate_up[...][chosen])
            gate, up = jnp.split(gate_up, 2, axis=-1)
            out = jnp.einsum(
                "nkh,nkhd,nk->nd", jax.nn.silu(gate) * up, self.down[...][chosen], share
            )
            return out.reshape(x.shape)
        # Many: each expert has one product with all of its tokens, which lie side by side.
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=c.experts)
        gate_up = jax.lax.ragged_dot(tokens[order // c.chosen], self.gate_up[...], sizes)
        gate, up = jnp.split(gate_up, 2, axis=-1)
        out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, self.down[...], sizes)
        out = out * share.reshape(-1)[order][:, None]
        return jnp.zeros_like(tokens).at[order // c.chosen].add(out).reshape(x.shape)


class Block(nnx.Module):
    """One layer: attention or a mixer over the memory, then feed-forward parts."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.config = c
        self.mix_norm = RMSNorm(c.width, c.eps, dtype)
        if c.attends[layer]:
            self.mixer = Attention(c, layer, dtype, rngs)
        else:
            self.mixer = Mixer(c.mixer, layer, dtype, rngs)
        self.feed_norm = RMSNorm(c.width, c.eps, dtype)
        self.gate_up = matrix(rngs, 2 * c.hidden, c.width, dtype)
        self.down = matrix(rngs, c.width, c.hidden, dtype)
        if c.experts:
            self.experts = Experts(c, dtype, rngs)

    def __call__(self, memory: Any, ubatch: jaxkv.Ubatch, x: jax.Array) -> tuple[Any, jax.Array]:
        """Run the layer on `x`, `[R, T, width]`; returns the memory and the next `x`."""
        c = self.config
        memory, out = self.mixer(memory, ubatch, self.mix_norm(x))
        x = x + out * c.residual_factor
        y = self.feed_norm(x)
        gate, up = jnp.split(linear(y, self.gate_up), 2, axis=-1)
        out = linear(jax.nn.silu(gate) * up, self.down)
        if c.experts:
            out = out + self.experts(y)
        return memory, x + out * c.residual_factor


class GraniteHybrid(nnx.Module):
    """The model: tokens in, logits of the tokens that want them out."""

    def __init__(self, config: Config, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.head = matrix(rngs, config.vocabulary, config.width, dtype)
        if not config.tied:
            self.embedding = matrix(rngs, config.vocabulary, config.width, dtype)
        layers = range(len(config.attends))
        self.blocks = nnx.List([Block(config, i, dtype, rngs) for i in layers])
        self.norm = RMSNorm(config.width, config.eps, dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Turn tokens, `[R, T]`, into what the first layer reads, `[R, T, width]`."""
        if self.config.tied:
            x = self.head[...][tokens]
        else:
            x = self.embedding[...][tokens]
        return x * self.config.embedding_factor

    def __call__(self, memory: Any, ubatch: jaxkv.Ubatch) -> tuple[Any, jax.Array]:
        """Run a ubatch that has been applied; returns the memory and logits `[O, V]`, float32."""
        x = self.embed(ubatch.tokens) if ubatch.embeddings is None else ubatch.embeddings
        for block in self.blocks:
            memory, x = block(memory, ubatch, x)
        x = x.reshape(-1, x.shape[-1])[ubatch.outputs]
        logits = linear(self.norm(x), self.head).astype(jnp.float32)
        return memory, logits / self.config.logits_divisor


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the sizes of a model of this family from its checkpoint."""
    c = checkpoint.config
    experts = c["num_local_experts"]
    return Config(
        attends=tuple(kind == "full_attention" for kind in c["layer_types"]),
        width=c["hidden_size"],
        hidden=c["shared_intermediate_size"],
        heads=c["num_attention_heads"],
        groups=c["num_key_value_heads"],
        size=c["head_dim"],
        vocabulary=c["vocab_size"],
        eps=c["rms_norm_eps"],
        mixer=mamba2.Sizes(
            width=c["hidden_size"],
            heads=c["mamba_n_heads"],
            size=c["mamba_d_head"],
            state=c["mamba_d_state"],
            groups=c["mamba_n_groups"],
            kernel=c["mamba_d_conv"],
            eps=c["rms_norm_eps"],
            limits=c["time_step_limit"],
            bias=c["mamba_proj_bias"],
            conv_bias=c["mamba_conv_bias"],
        ),
        rope=rope_of(checkpoint) if c["position_embedding_type"] == "rope" else None,
        scale=c["attention_multiplier"],
        embedding_factor=c["embedding_multiplier"],
        residual_factor=c["residual_multiplier"],
        logits_divisor=c["logits_scaling"],
        experts=experts,
        chosen=c["num_experts_per_tok"] if experts else 0,
        expert_hidden=c["intermediate_size"] if experts else 0,
        tied=c["tie_word_embeddings"],
        bias=c["attention_bias"],
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Name where each weight of `GraniteHybrid` comes from: a tree of functions that read it.

    Nothing is read here. Called one after another, and each result put on the device before the
    next, they never hold more than one layer's worth beside the model.
    """
    read = checkpoint.tensor

    def norm(name: str) -> dict:
        return {"weight": lambda: read(f"{name}.weight")}

    def attention(name: str) -> dict:
        names = [f"{name}.{one}_proj" for one in "qkv"]
        tree = {
            "qkv": lambda: np.concatenate([read(f"{one}.weight") for one in names]),
            "output": lambda: read(f"{name}.o_proj.weight"),
        }
        if config.bias:
            tree["qkv_bias"] = lambda: np.concatenate([read(f"{one}.bias") for one in names])
            tree["output_bias"] = lambda: read(f"{name}.o_proj.bias")
        return tree

    def experts(name: str) -> dict:
        return {
            "router": lambda: read(f"{name}.router.layer.weight"),
            "gate_up": lambda: read(f"{name}.input_linear.weight").swapaxes(1, 2),
            "down": lambda: read(f"{name}.output_linear.weight").swapaxes(1, 2),
        }

    def block(i: int) -> dict:
        layer = f"model.layers.{i}"
        tree = {
            "mix_norm": norm(f"{layer}.input_layernorm"),
            "feed_norm": norm(f"{layer}.post_attention_layernorm"),
            "gate_up": lambda: read(f"{layer}.shared_mlp.input_linear.weight"),
            "down": lambda: read(f"{layer}.shared_mlp.output_linear.weight"),
        }
        if config.attends[i]:
            tree["mixer"] = attention(f"{layer}.self_attn")
        else:
            tree["mixer"] = mamba2.mixer_weights_of(checkpoint, config.mixer, f"{layer}.mamba")
        if config.experts:
            tree["experts"] = experts(f"{layer}.block_sparse_moe")
        return tree

    embedding = "model.embed_tokens.weight"
    tree = {
        "head": lambda: read(embedding if config.tied else "lm_head.weight"),
        "blocks": {i: block(i) for i in range(len(config.attends))},
        "norm": norm("model.norm"),
    }
    if not config.tied:
        tree["embedding"] = lambda: read(embedding)
    return tree


def make_memory(
    config: Config,
    *,
    sequences: int = 1,
    cells: int | None = None,
    kept: int = 0,
    streams: int = 1,
    dtype: Any = jnp.float32,
    **options: Any,
) -> Any:
    """Make the memory that a model of this family needs: states, and cells for attention.

    Args:
      config: sizes of the model.
      sequences: Q, the sequences that may be told apart.
      cells: N, the tokens that fit into each stream.
      kept: E, the earlier states of each sequence that can be gone back to.
      streams: S, whether all sequences share one table of cells or each has its own.
      dtype: of all but the sums of the recurrent layers, which are float32.
      options: whatever else `jaxkv.make_kv_cache` takes.
    """
    parts = []
    for attends in (False, True):
        layers = tuple(i for i, one in enumerate(config.attends) if one == attends)
        if not layers:
            continue
        if attends:
            part = jaxkv.make_kv_cache(
                layers=len(layers),
                cells=cells,
                heads=config.groups,
                size=config.size,
                sequences=sequences,
                streams=streams,
                dtype=dtype,
                rope=config.rope,
                **options,
            )
        else:
            part = jaxkv.make_recurrent_cache(
                layers=len(layers),
                states=mamba2.states_of(config.mixer, dtype),
                sequences=sequences,
                kept=kept,
                streams=streams,
            )
        parts.append((part, layers))
    return parts[0][0] if len(parts) == 1 else jaxkv.make_hybrid_cache(*parts)


def _experts(rngs: nnx.Rngs, experts: int, rows: int, columns: int, dtype: jnp.dtype) -> nnx.Param:
    # From `rows` numbers to `columns`, as `ragged_dot` wants them.
    shape = (experts, rows, columns)
    return nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * rows**-0.5)


MODULE = GraniteHybrid
