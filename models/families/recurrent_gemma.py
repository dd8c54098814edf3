"""RecurrentGemma: attention layers with windows, and layers with gated linear recurrences."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from jaxkv.ops import scans
from jaxkv.rope import Rope
from models.checkpoints.checkpoint import Checkpoint
from models.families.caches import Attends, Layer, Recurs
from models.families.language_model import HybridConfig, LanguageModel, attention_fields
from models.families.layers import Attention, Feed, Linear, RMSNorm, gelu
from models.families.linear import matrix
from models.families.ropes import rope_of
from models.families.sources import Sources
from models.meshes import Split

ARCHITECTURES = ("recurrent_gemma",)


@dataclass(frozen=True, kw_only=True)
class Config(HybridConfig):
    """Configuration of RecurrentGemma; other fields are in `models.families.language_model`.

    attends: whether each of the L layers has attention; the other layers are recurrent.
    inner: size of the state of a recurrent layer.
    heads: number of query heads, H. The gate matrices of recurrent layers have H blocks.
    kernel: number of tokens that the convolution of a recurrent layer reads.
    window: number of positions that a query attends to, including its own position.
    softcap: soft limit of logits.
    """

    inner: int
    hidden: int
    kernel: int
    window: int
    rope: Rope
    softcap: float
    bias: bool = False


def split_of(config: Config, *, axis: int) -> Split:
    """Return how a mesh may split the channels of a recurrent layer: by blocks of gate matrices."""
    return Split(axis=axis, parts=config.heads, of="parts of a recurrent layer")


class Recurrence(nnx.Module):
    """A short convolution and a gated linear recurrence (RG-LRU)."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = self.config = config
        self.layer = layer
        part, first, second = c.inner // c.heads, split_of(c, axis=0), split_of(c, axis=1)
        # Gate and input of the convolution are one product.
        self.input = Linear(c.width, (2, c.inner), dtype, rngs, bias=True, split=second)
        self.conv = matrix(rngs, (c.kernel, c.inner), dtype, inputs=0, split=second)
        self.conv_bias = nnx.Param(jnp.zeros(c.inner, dtype), split=first)
        # Gates of input and decay: `[H, inner / H]` to twice the size, for each part.
        self.gates = matrix(rngs, (c.heads, part, 2 * part), dtype, inputs=1, split=first)
        self.gates_bias = nnx.Param(jnp.zeros((c.heads, 2 * part), dtype), split=first)
        # Decay rates are float32 for every dtype.
        self.rate = nnx.Param(jnp.zeros(c.inner, jnp.float32), split=first)
        self.output = Linear(c.inner, c.width, dtype, rngs, bias=True, split=second)

    def __call__(self, step: jaxkv.Step, x: jax.Array) -> tuple[jaxkv.Step, jax.Array]:
        """Run the recurrence on `x`, `[R, T, width]`; return the step and the output."""
        c = self.config
        gate, x = jnp.unstack(self.input(x), axis=-2)
        valid = step.valid[..., None]
        x = jnp.where(valid, x, 0)

        states = jaxkv.read_states(step, self.layer)
        counts = step.state_write_steps(self.layer)
        x, tails = scans.convolve(x, states["conv"], self.conv[...], self.conv_bias[...], counts)
        parts = x.reshape(*x.shape[:2], c.heads, -1)
        gates = jnp.einsum("rthi,hio->rtho", parts, self.gates[...].astype(jnp.float32))
        gates = jax.nn.sigmoid(gates + self.gates_bias[...].astype(jnp.float32)[None, None])
        input_gate, fading = (y.reshape(x.shape) for y in jnp.split(gates, 2, axis=-1))
        log = -8 * fading * jax.nn.softplus(self.rate[...]).reshape(1, 1, -1)
        # The input is scaled to keep the size of the state; the first token of a text is not
        # scaled. Padding neither adds to the state nor lets it decay.
        scale = jnp.where(step.positions[..., None] == 0, 1, jnp.sqrt(-jnp.expm1(2 * log)))
        decay, x = jnp.where(valid, jnp.exp(log), 1), jnp.where(valid, x * input_gate * scale, 0)
        x, ends = scans.scan_diagonal(decay, x, states["lru"], counts)
        step = jaxkv.write_states(step, self.layer, {"conv": tails, "lru": ends})
        return step, self.output(x.astype(gate.dtype) * gelu(gate))


class Block(nnx.Module):
    """One layer: attention or a recurrence, then a gated feed-forward part."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.mix_norm = RMSNorm(c.width, c.eps, dtype, less_one=True)
        if c.attends[layer]:
            self.mixer = Attention(
                c, layer, dtype, rngs, rope=c.rope, bias=c.bias, output_bias=True
            )
        else:
            self.mixer = Recurrence(c, layer, dtype, rngs)
        self.feed_norm = RMSNorm(c.width, c.eps, dtype, less_one=True)
        self.feed = Feed(c.width, c.hidden, gelu, dtype, rngs, bias=True)

    def __call__(self, step: jaxkv.Step, x: jax.Array) -> tuple[jaxkv.Step, jax.Array]:
        """Apply the layer to `x`, `[R, T, width]`; return the next step and the new `x`."""
        step, out = self.mixer(step, self.mix_norm(x))
        x = x + out
        return step, x + self.feed(self.feed_norm(x))


class RecurrentGemma(LanguageModel):
    """Flax module of RecurrentGemma."""

    block = Block
    less_one = True

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embed tokens `[R, T]` as the input of the first layer, `[R, T, width]`."""
        x = self.vocabulary.embed(tokens)
        # The factor is rounded to bfloat16 for every dtype, as in training.
        return x * jnp.asarray(self.config.width**0.5, jnp.bfloat16).astype(x.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """Map normalised vectors `[O, width]` to logits `[O, V]`, float32."""
        cap = self.config.softcap
        return cap * jnp.tanh(self.vocabulary.logits(x) / cap)


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of a model from its checkpoint."""
    c = checkpoint.config
    c.check_divides("num_attention_heads", "lru_width")
    if c["head_dim"] * c["num_attention_heads"] != c["hidden_size"]:
        raise c.refusal("head_dim", "hidden_size divided by num_attention_heads")
    if c["rope_parameters"].get("rope_type") not in (None, "default"):
        raise c.refusal("rope_parameters", "parameters without scaling")
    kinds = c.layer_kinds("sliding_attention", "linear_attention")
    return Config(
        **attention_fields(checkpoint),
        attends=tuple(kind == "sliding_attention" for kind in kinds),
        inner=c["lru_width"],
        hidden=c["intermediate_size"] // 2,
        kernel=c["conv1d_width"],
        window=c["attention_window_size"],
        rope=rope_of(checkpoint, partly=True),
        softcap=c["logits_soft_cap"],
        bias=c["attention_bias"],
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `RecurrentGemma`."""
    source = Sources(checkpoint)

    def recurrence(name: str) -> dict:
        gates = [f"{name}.rg_lru.input_gate", f"{name}.rg_lru.recurrent_gate"]
        return {
            "input": source.linear(f"{name}.linear_y", f"{name}.linear_x", bias=True, parts=1),
            "conv": source.tensor(f"{name}.conv_1d.weight", arrange=lambda x: x[:, 0].T),
            "conv_bias": source.tensor(f"{name}.conv_1d.bias"),
            "gates": source.tensor(*(f"{gate}_weight" for gate in gates), axis=2),
            "gates_bias": source.tensor(*(f"{gate}_bias" for gate in gates), axis=1),
            "rate": source.tensor(f"{name}.rg_lru.recurrent_param"),
            "output": source.linear(f"{name}.linear_out", bias=True),
        }

    def block(i: int, layer: str) -> dict:
        mixer = f"{layer}.temporal_block"
        return {
            "mix_norm": source.norm(f"{layer}.temporal_pre_norm"),
            "mixer": (
                source.attention(
                    mixer, kv_heads=config.kv_heads, bias=config.bias, output_bias=True
                )
                if config.attends[i]
                else recurrence(mixer)
            ),
            "feed_norm": source.norm(f"{layer}.channel_pre_norm"),
            "feed": source.gated_feed(f"{layer}.mlp_block", bias=True),
        }

    return source.language_model(block, config, norm="model.final_norm")


def layers_of(config: Config, dtype: Any) -> list[Layer]:
    """Return a description of each layer of the cache; convolution states have dtype `dtype`."""
    attends = Attends(
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        rope=config.rope,
        window=jaxkv.Window.sliding(config.window),
    )
    recurs = Recurs(
        states={
            "conv": jax.ShapeDtypeStruct((config.kernel - 1, config.inner), dtype),
            "lru": jax.ShapeDtypeStruct((config.inner,), jnp.float32),
        },
        splits={"conv": split_of(config, axis=1), "lru": split_of(config, axis=0)},
    )
    return [attends if is_attention else recurs for is_attention in config.attends]


MODULE = RecurrentGemma
