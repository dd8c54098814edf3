"""T5: an encoder of sources, and a decoder with cross-attention.

The encoder processes all tokens of a source in one call and has no cache. The cache stores the keys
and values of self-attention and of cross-attention in the decoder. Encoder and decoder have a
distance bias instead of a positional encoding.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkv
from models.checkpoints.checkpoint import Checkpoint
from models.families import language_model
from models.families.caches import Attends, CrossAttends, Layer
from models.families.language_model import LanguageModel
from models.families.layers import Attention, Feed, Linear, RMSNorm, Vocabulary, gelu
from models.families.sources import Sources
from models.meshes import Split

ARCHITECTURES = ("t5",)


@dataclass(frozen=True, kw_only=True)
class Config(language_model.Config):
    """Configuration of T5; other fields are in `models.families.language_model`.

    encoders: number of layers of the encoder.
    layers: number of layers of the decoder, L. In the cache, self-attention has layer numbers below
      L, and cross-attention has the next L numbers.
    buckets: number of distance buckets of the biases.
    max_distance: distance from which on all distances are in the last bucket.
    gated: whether the feed-forward part has a gate with GELU; otherwise it has ReLU.
    scaled: whether the input of the head is divided by sqrt(width).
    start: id of the first token of every decoder input.
    """

    encoders: int
    layers: int
    width: int
    hidden: int
    heads: int
    head_dim: int
    buckets: int
    max_distance: int
    gated: bool
    scaled: bool
    start: int
    implementation: jaxkv.ops.attention.Implementation | None = None
    return_mass: bool = False

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, K, which is equal to H."""
        return self.heads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Distances:
    """A bias by distance: one bucket for each short distance, and logarithmic buckets for others.

    table: `[buckets, H]`. Bias of each bucket and head.
    max_distance: distance from which on all distances are in the last bucket. Static.
    both_ways: whether keys after the query have separate buckets; otherwise the distance of such a
      key is 0. Static.
    """

    table: jax.Array
    max_distance: int = field(metadata={"static": True})
    both_ways: bool = field(metadata={"static": True})

    def __call__(self, query: jax.Array, key: jax.Array, head: jax.Array) -> jax.Array:
        """Return the bias of attention logits, given positions of queries and keys, and heads."""
        buckets = self.table.shape[0]
        ahead, away = 0, jnp.maximum(query - key, 0)
        if self.both_ways:
            buckets //= 2
            ahead, away = jnp.where(key > query, buckets, 0), jnp.abs(query - key)
        exact = buckets // 2
        far = jnp.log(jnp.maximum(away, 1).astype(jnp.float32) / exact)
        far = exact + (far / np.log(self.max_distance / exact) * (buckets - exact)).astype(
            jnp.int32
        )
        near = jnp.where(away < exact, away, jnp.minimum(far, buckets - 1))
        return self.table[ahead + near, head]


class Bias(nnx.Module):
    """Bias table that all layers of the encoder, or of the decoder, share."""

    def __init__(self, config: Config, dtype: jnp.dtype, *, both_ways: bool):
        c = config
        self.table = nnx.Param(jnp.zeros((c.buckets, c.heads), dtype))
        self.made = partial(Distances, max_distance=c.max_distance, both_ways=both_ways)

    def __call__(self) -> Distances:
        """Return the bias as a function of a query's position, a key's position and a head."""
        return self.made(self.table[...].astype(jnp.float32))


def make_feed(config: Config, dtype: jnp.dtype, rngs: nnx.Rngs) -> Feed:
    """Make the feed-forward part of a layer, with or without a gate."""
    c = config
    activation = gelu if c.gated else jax.nn.relu
    return Feed(c.width, c.hidden, activation, dtype, rngs, gated=c.gated)


class CrossAttention(nnx.Module):
    """Attention to encoder sources; the keys and values of a source are computed once."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = self.config = config
        self.layer = layer
        by_head = partial(Split, parts=c.heads, of="key/value heads")
        self.q = Linear(c.width, (c.heads, c.head_dim), dtype, rngs, split=by_head(axis=0))
        self.kv = Linear(c.width, (c.heads, 2 * c.head_dim), dtype, rngs, split=by_head(axis=0))
        self.output = Linear(c.heads * c.head_dim, c.width, dtype, rngs, split=by_head(axis=1))

    def keep(self, step: jaxkv.Step, read: jax.Array) -> Any:
        """Write keys and values of an encoder output, `[R, T, width]`; return the cache."""
        return jaxkv.write_kv(step, self.layer, *jnp.split(self.kv(read), 2, axis=-1))

    def __call__(self, step: jaxkv.Step, x: jax.Array) -> tuple[jaxkv.Step, jax.Array]:
        """Attend from `x`, `[R, T, width]`, to sources; return the step and the output."""
        c = self.config
        step, out = jaxkv.attend(
            step, self.layer, self.q(x), scale=1.0, implementation=c.implementation
        )
        return step, self.output(out.reshape(*x.shape[:2], -1))


class EncoderBlock(nnx.Module):
    """One layer of the encoder: attention within each row of tokens, then a feed-forward part."""

    def __init__(self, config: Config, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = self.config = config
        by_head = partial(Split, parts=c.heads, of="key/value heads")
        self.mix_norm = RMSNorm(c.width, c.eps, dtype)
        self.qkv = Linear(c.width, (c.heads, 3 * c.head_dim), dtype, rngs, split=by_head(axis=0))
        self.output = Linear(c.heads * c.head_dim, c.width, dtype, rngs, split=by_head(axis=1))
        self.feed_norm = RMSNorm(c.width, c.eps, dtype)
        self.feed = make_feed(c, dtype, rngs)

    def __call__(self, x: jax.Array, added: jax.Array) -> jax.Array:
        """Apply the layer to `x`, with a bias of attention logits, `[R, H, T, T]`.

        For a query and a key of different sources, the bias is the lowest finite number. A bias of
        -inf would make padding rows NaN.
        """
        q, k, v = jnp.split(self.qkv(self.mix_norm(x)), 3, axis=-1)
        logits = jnp.einsum("rthd,rshd->rhts", q, k, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(logits + added, axis=-1).astype(v.dtype)
        x = x + self.output(jnp.einsum("rhts,rshd->rthd", shares, v).reshape(*x.shape[:2], -1))
        return x + self.feed(self.feed_norm(x))


class Block(nnx.Module):
    """One decoder layer: self-attention, cross-attention and a feed-forward part."""

    def __init__(self, config: Config, layer: int, bias: Bias, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.bias = bias
        self.mix_norm = RMSNorm(c.width, c.eps, dtype)
        self.mixer = Attention(c, layer, dtype, rngs, rope=None, scale=1.0)
        self.look_norm = RMSNorm(c.width, c.eps, dtype)
        self.looker = CrossAttention(c, c.layers + layer, dtype, rngs)
        self.feed_norm = RMSNorm(c.width, c.eps, dtype)
        self.feed = make_feed(c, dtype, rngs)

    def __call__(self, step: jaxkv.Step, x: jax.Array) -> tuple[jaxkv.Step, jax.Array]:
        """Apply the layer to `x`, `[R, T, width]`; return the next step and the new `x`."""
        step, out = self.mixer(step, self.mix_norm(x), self.bias())
        x = x + out
        step, out = self.looker(step, self.look_norm(x))
        x = x + out
        return step, x + self.feed(self.feed_norm(x))


class T5(LanguageModel):
    """Flax module of T5."""

    def __init__(self, config: Config, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
        c = self.config = config
        self.vocabulary = Vocabulary(c.vocabulary, c.width, dtype, rngs, tied=c.tied)
        self.encoder_bias = Bias(c, dtype, both_ways=True)
        self.encoders = nnx.List([EncoderBlock(c, dtype, rngs) for _ in range(c.encoders)])
        self.encoder_norm = RMSNorm(c.width, c.eps, dtype)
        self.bias = Bias(c, dtype, both_ways=False)
        layers = range(c.layers)
        self.blocks = nnx.List([Block(c, layer, self.bias, dtype, rngs) for layer in layers])
        self.norm = RMSNorm(c.width, c.eps, dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """Map normalised vectors `[O, width]` to logits `[O, V]`, float32."""
        return super().logits(x * self.config.width**-0.5 if self.config.scaled else x)

    def encode(self, step: jaxkv.Step) -> Any:
        """Encode sources; return the step with the keys and values of the sources."""
        x = self.embed(step.tokens) if step.embeddings is None else step.embeddings
        at, sequence = step.positions, step.sequences
        heads = jnp.arange(self.config.heads, dtype=jnp.int32)[:, None, None]
        added = self.encoder_bias()(at[:, None, :, None], at[:, None, None], heads)
        same = step.valid[:, None] & (sequence[..., None] == sequence[:, None])
        added = jnp.where(same[:, None], added, jnp.finfo(jnp.float32).min)
        for encoder in self.encoders:
            x = encoder(x, added)
        x = self.encoder_norm(x)
        for block in self.blocks:
            step = block.looker.keep(step, x)
        return step


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of a model from its checkpoint."""
    c = checkpoint.config
    gated = c["is_gated_act"]
    if c["dense_act_fn"] != ("gelu_new" if gated else "relu"):
        raise c.refusal("feed_forward_proj", "relu or gated-gelu")
    c.ignore("feed_forward_proj")
    exact = c["relative_attention_num_buckets"] // 2
    if c["relative_attention_max_distance"] <= exact:
        raise c.refusal("relative_attention_max_distance", f"more than half the buckets ({exact})")
    return Config(
        encoders=c["num_layers"],
        layers=c["num_decoder_layers"],
        width=c["d_model"],
        hidden=c["d_ff"],
        heads=c["num_heads"],
        head_dim=c["d_kv"],
        buckets=c["relative_attention_num_buckets"],
        max_distance=c["relative_attention_max_distance"],
        vocabulary=c["vocab_size"],
        eps=c["layer_norm_epsilon"],
        gated=gated,
        tied=c["tie_word_embeddings"],
        scaled=c["scale_decoder_outputs"],
        start=c.get("decoder_start_token_id", c.get("pad_token_id", 0)),
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `T5`."""
    source, heads = Sources(checkpoint), config.heads

    def product(name: str, matrices: str) -> dict:
        names = [f"{name}.{letter}" for letter in matrices]
        return source.linear(*names, parts=heads, axis=1)

    def feed(name: str) -> dict:
        name = f"{name}.DenseReluDense"
        if config.gated:
            return source.gated_feed(name, names=("wi_0", "wi_1", "wo"))
        return {"up": source.linear(f"{name}.wi"), "down": source.linear(f"{name}.wo")}

    def attention(name: str) -> dict:
        return {"qkv": product(name, "qkv"), "output": source.linear(f"{name}.o")}

    def encoder(i: int) -> dict:
        layer = f"encoder.block.{i}.layer"
        return attention(f"{layer}.0.SelfAttention") | {
            "mix_norm": source.norm(f"{layer}.0.layer_norm"),
            "feed_norm": source.norm(f"{layer}.1.layer_norm"),
            "feed": feed(f"{layer}.1"),
        }

    def block(_: int, name: str) -> dict:
        layer = f"{name}.layer"
        cross = f"{layer}.1.EncDecAttention"
        return {
            "mix_norm": source.norm(f"{layer}.0.layer_norm"),
            "mixer": attention(f"{layer}.0.SelfAttention"),
            "look_norm": source.norm(f"{layer}.1.layer_norm"),
            "looker": {
                "q": product(cross, "q"),
                "kv": product(cross, "kv"),
                "output": source.linear(f"{cross}.o"),
            },
            "feed_norm": source.norm(f"{layer}.2.layer_norm"),
            "feed": feed(f"{layer}.2"),
        }

    def bias(half: str) -> dict:
        name = f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return {"table": source.tensor(name)}

    names = {"embedding": "shared", "norm": "decoder.final_layer_norm"}
    return source.language_model(block, config, layers="decoder.block", **names) | {
        "encoder_bias": bias("encoder"),
        "encoders": {i: encoder(i) for i in range(config.encoders)},
        "encoder_norm": source.norm("encoder.final_layer_norm"),
        "bias": bias("decoder"),
    }


def layers_of(config: Config, dtype: Any) -> list[Layer]:
    """Return descriptions of the cache's layers: first self-attention, then cross-attention."""
    del dtype
    sizes = dict(kv_heads=config.heads, head_dim=config.head_dim)
    return [Attends(rope=None, **sizes)] * config.layers + [CrossAttends(**sizes)] * config.layers


MODULE = T5
