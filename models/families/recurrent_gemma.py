"""RecurrentGemma, written for a jaxkv memory: layers that attend to a window, others that recur.

Readable alone, but for the two recurrences in `models/scans.py`. Attention asks the memory for
`attend`, a recurrent layer for states; which part of the memory answers, no layer knows.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkv
from jaxkv.ops.scans import ssd as scans
from jaxkv.rope import Rope
from models.checkpoints.checkpoint import Checkpoint
from models.families import memories
from models.families.linear import linear, matrix
from models.families.ropes import rope_of

ARCHITECTURES = ("recurrent_gemma",)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and switches of a model of the family; hashable.

    attends: of each of the L layers, whether it attends or recurs.
    width: numbers of a token between the layers.
    inner: numbers of the state of a recurrent layer.
    hidden: numbers of a token inside the feed-forward part.
    heads: H, query heads; the gates of recurrent layers are cut into as many parts.
    groups: K, key/value heads.
    size: D, numbers of a head.
    kernel: tokens that the convolution of a recurrent layer sees.
    window: positions that attention looks back, the query's own included.
    vocabulary: V.
    eps: what keeps a norm from dividing by zero.
    rope: how queries and keys turn with position.
    softcap: what the logits of tokens stay below.
    tied: whether the head is the embedding.
    bias: whether queries, keys and values have biases.
    implementation: how attention is computed, see `jaxkv.attend`; None leaves it to jaxkv.
    """

    attends: tuple[bool, ...]
    width: int
    inner: int
    hidden: int
    heads: int
    groups: int
    size: int
    kernel: int
    window: int
    vocabulary: int
    eps: float
    rope: Rope
    softcap: float
    tied: bool = True
    bias: bool = False
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


class Linear(nnx.Module):
    """A product and a bias."""

    def __init__(self, inputs: int, outputs: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = matrix(rngs, outputs, inputs, dtype)
        self.bias = nnx.Param(jnp.zeros(outputs, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map the last dimension of `[R, T, inputs]`."""
        return linear(x, self.weight) + self.bias[...].reshape(1, 1, -1)


class Attention(nnx.Module):
    """Attention over the memory."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.config, self.layer = c, layer
        self.qkv = matrix(rngs, (c.heads + 2 * c.groups) * c.size, c.width, dtype)
        if c.bias:
            self.qkv_bias = nnx.Param(jnp.zeros((c.heads + 2 * c.groups) * c.size, dtype))
        self.output = Linear(c.heads * c.size, c.width, dtype, rngs)

    def __call__(self, memory: Any, ubatch: jaxkv.Ubatch, x: jax.Array) -> tuple[Any, jax.Array]:
        """Mix `x`, `[R, T, width]`, with what came before; returns the memory and the outcome."""
        c = self.config
        qkv = linear(x, self.qkv)
        if c.bias:
            qkv = qkv + self.qkv_bias[...].reshape(1, 1, -1)
        qkv = qkv.reshape(*x.shape[:2], c.heads + 2 * c.groups, c.size)
        qk, v = jnp.split(qkv, [c.heads + c.groups], axis=2)
        q, k = jnp.split(jaxkv.rotate(qk, ubatch.positions, c.rope), [c.heads], axis=2)
        memory, out = jaxkv.attend(
            memory, self.layer, ubatch, q, k, v, implementation=c.implementation
        )
        return memory, self.output(out.reshape(*x.shape[:2], -1))


class Recurrence(nnx.Module):
    """A short convolution, then a state that each token lets decay and adds to (an RG-LRU)."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.config, self.layer = c, layer
        part = c.inner // c.heads
        self.input = Linear(c.width, 2 * c.inner, dtype, rngs)
        self.conv = nnx.Param(
            jax.random.normal(rngs.params(), (c.kernel, c.inner), dtype) * c.kernel**-0.5
        )
        self.conv_bias = nnx.Param(jnp.zeros(c.inner, dtype))
        # The input's gate and the decay's: `[H, inner / H]` to twice as many, part by part.
        self.gates = nnx.Param(
            jax.random.normal(rngs.params(), (c.heads, part, 2 * part), dtype) * part**-0.5
        )
        self.gates_bias = nnx.Param(jnp.zeros((c.heads, 2 * part), dtype))
        # What decides how fast states decay is exact, whatever the dtype of the rest.
        self.rate = nnx.Param(jnp.zeros(c.inner, jnp.float32))
        self.output = Linear(c.inner, c.width, dtype, rngs)

    def __call__(self, memory: Any, ubatch: jaxkv.Ubatch, x: jax.Array) -> tuple[Any, jax.Array]:
        """Mix `x`, `[R, T, width]`, with what came before; returns the memory and the outcome."""
        c = self.config
        gate, x = jnp.split(self.input(x), 2, axis=-1)
        valid = ubatch.valid[..., None]
        x = jnp.where(valid, x, 0)

        states = jaxkv.read_states(memory, self.layer, ubatch)
        counts = jaxkv.tails(ubatch, jaxkv.states_kept(memory, self.layer) + 1)
        x, tails = scans.conv(x, states["conv"], self.conv[...], self.conv_bias[...], counts)
        parts = x.reshape(*x.shape[:2], c.heads, -1)
        gates = jnp.einsum("rthi,hio->rtho", parts, self.gates[...].astype(jnp.float32))
        gates = jax.nn.sigmoid(gates + self.gates_bias[...].astype(jnp.float32)[None, None])
        taken, fading = (y.reshape(x.shape) for y in jnp.split(gates, 2, axis=-1))
        log = -8 * fading * jax.nn.softplus(self.rate[...]).reshape(1, 1, -1)
        # What comes in is scaled so that the state keeps its size; a text's first token is all of
        # it. Padding adds nothing and lets nothing decay.
        scale = jnp.where(ubatch.positions[..., None] == 0, 1, jnp.sqrt(-jnp.expm1(2 * log)))
        decay, x = jnp.where(valid, jnp.exp(log), 1), jnp.where(valid, x * taken * scale, 0)
        x, ends = scans.linear(decay, x, states["lru"], counts)
        memory = jaxkv.write_states(memory, self.layer, ubatch, {"conv": tails, "lru": ends})
        return memory, self.output(x.astype(gate.dtype) * jax.nn.gelu(gate, approximate=True))


class Block(nnx.Module):
    """One layer: attention or a recurrence over the memory, then a gated feed-forward part."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.mix_norm = RMSNorm(c.width, c.eps, dtype)
        self.mixer = (Attention if c.attends[layer] else Recurrence)(c, layer, dtype, rngs)
        self.feed_norm = RMSNorm(c.width, c.eps, dtype)
        self.gate_up = Linear(c.width, 2 * c.hidden, dtype, rngs)
        self.down = Linear(c.hidden, c.width, dtype, rngs)

    def __call__(self, memory: Any, ubatch: jaxkv.Ubatch, x: jax.Array) -> tuple[Any, jax.Array]:
        """Run the layer on `x`, `[R, T, width]`; returns the memory and the next `x`."""
        memory, out = self.mixer(memory, ubatch, self.mix_norm(x))
        x = x + out
        gate, up = jnp.split(self.gate_up(self.feed_norm(x)), 2, axis=-1)
        return memory, x + self.down(jax.nn.gelu(gate, approximate=True) * up)


class RecurrentGemma(nnx.Module):
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
        # The factor is rounded to bfloat16 whatever the weights are, as when the model was trained.
        return x * jnp.asarray(self.config.width**0.5, jnp.bfloat16).astype(x.dtype)

    def __call__(self, memory: Any, ubatch: jaxkv.Ubatch) -> tuple[Any, jax.Array]:
        """Run a ubatch that has been applied; returns the memory and logits `[O, V]`, float32."""
        x = self.embed(ubatch.tokens) if ubatch.embeddings is None else ubatch.embeddings
        for block in self.blocks:
            memory, x = block(memory, ubatch, x)
        x = x.reshape(-1, x.shape[-1])[ubatch.outputs]
        logits = linear(self.norm(x), self.head).astype(jnp.float32)
        return memory, self.config.softcap * jnp.tanh(logits / self.config.softcap)


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the sizes of a model of this family from its checkpoint."""
    c = checkpoint.config
    return Config(
        attends=tuple(kind == "sliding_attention" for kind in c["layer_types"]),
        width=c["hidden_size"],
        inner=c.get("lru_width") or c["hidden_size"],
        hidden=c["intermediate_size"] // 2,
        heads=c["num_attention_heads"],
        groups=c["num_key_value_heads"],
        size=c["head_dim"],
        kernel=c["conv1d_width"],
        window=c["sliding_window"],
        vocabulary=c["vocab_size"],
        eps=c["rms_norm_eps"],
        rope=rope_of(checkpoint),
        softcap=c["logits_soft_cap"],
        tied=c["tie_word_embeddings"],
        bias=c["attention_bias"],
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Name where each weight of `RecurrentGemma` comes from: a tree of functions that read it.

    Nothing is read here. Called one after another, and each result put on the device before the
    next, they never hold more than one layer's worth beside the model.
    """
    read = checkpoint.tensor

    def joined(ending: str, names: list[str], axis: int = 0):
        return lambda: np.concatenate([read(f"{name}{ending}") for name in names], axis)

    def norm(name: str) -> dict:
        return {"weight": lambda: read(f"{name}.weight")}

    def biased(*names: str) -> dict:
        return {"weight": joined(".weight", [*names]), "bias": joined(".bias", [*names])}

    def attention(name: str) -> dict:
        names = [f"{name}.{one}_proj" for one in "qkv"]
        tree = {"qkv": joined(".weight", names), "output": biased(f"{name}.o_proj")}
        if config.bias:
            tree["qkv_bias"] = joined(".bias", names)
        return tree

    def recurrence(name: str) -> dict:
        gates = [f"{name}.rg_lru.input_gate", f"{name}.rg_lru.recurrent_gate"]
        return {
            "input": biased(f"{name}.linear_y", f"{name}.linear_x"),
            "conv": lambda: read(f"{name}.conv_1d.weight")[:, 0].T,
            "conv_bias": lambda: read(f"{name}.conv_1d.bias"),
            "gates": joined("_weight", gates, axis=2),
            "gates_bias": joined("_bias", gates, axis=1),
            "rate": lambda: read(f"{name}.rg_lru.recurrent_param"),
            "output": biased(f"{name}.linear_out"),
        }

    def block(i: int) -> dict:
        layer = f"model.layers.{i}"
        mixer = attention if config.attends[i] else recurrence
        return {
            "mix_norm": norm(f"{layer}.temporal_pre_norm"),
            "mixer": mixer(f"{layer}.temporal_block"),
            "feed_norm": norm(f"{layer}.channel_pre_norm"),
            "gate_up": biased(f"{layer}.mlp_block.gate_proj", f"{layer}.mlp_block.up_proj"),
            "down": biased(f"{layer}.mlp_block.down_proj"),
        }

    embedding = "model.embed_tokens.weight"
    tree = {
        "head": lambda: read(embedding if config.tied else "lm_head.weight"),
        "blocks": {i: block(i) for i in range(len(config.attends))},
        "norm": norm("model.final_norm"),
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
    """Make the memory that a model of this family needs: states, and a window of cells.

    Args:
      config: sizes of the model.
      sequences: Q, the sequences that may be told apart.
      cells: tokens that fit into each stream, if texts are shorter than the window.
      kept: E, the earlier states of each sequence that can be gone back to.
      streams: S, whether all sequences share one table of cells or each has its own.
      dtype: of all but the states of the recurrent layers, which are float32.
      options: of the window's cells, see `models.memories.make_memory`.
    """
    parts = []
    if recurs := tuple(i for i, attends in enumerate(config.attends) if not attends):
        states = {
            "conv": jax.ShapeDtypeStruct((config.kernel - 1, config.inner), dtype),
            "lru": jax.ShapeDtypeStruct((config.inner,), jnp.float32),
        }
        memory = jaxkv.make_recurrent_cache(
            layers=len(recurs), states=states, sequences=sequences, kept=kept, streams=streams
        )
        parts.append((memory, recurs))
    if attends := tuple(i for i, attends in enumerate(config.attends) if attends):
        memory = memories.make_memory(
            (jaxkv.standard(config.window),) * len(attends),
            (config.rope,) * len(attends),
            cells=cells,
            heads=config.groups,
            size=config.size,
            sequences=sequences,
            streams=streams,
            dtype=dtype,
            **options,
        )
        parts.append((memory, attends))
    return parts[0][0] if len(parts) == 1 else jaxkv.make_hybrid_cache(*parts)


MODULE = RecurrentGemma
