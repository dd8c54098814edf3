"""Mamba-2, written for a jaxkv memory: each layer carries a state from token to token.

Readable alone, but for the two recurrences in `models/scans.py`. It asks the memory for the states
before a ubatch, hands back those after it, and never sees whose they are or what is kept of them.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from jaxkv.ops.scans import ssd as scans
from models.checkpoints.checkpoint import Checkpoint
from models.families.linear import linear, matrix

ARCHITECTURES = ("mamba2",)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes and switches of a Mamba-2 mixer; hashable.

    width: numbers of a token between the layers.
    heads: H, parts with a state each.
    size: P, numbers of a token in a head.
    state: M, numbers of the state for each of those.
    groups: G, heads of one group read and write their states alike.
    kernel: tokens that the convolution sees.
    eps: what keeps the norm from dividing by zero.
    limits: the smallest and the largest step.
    bias: whether the projections have biases.
    conv_bias: whether the convolution has one.
    """

    width: int
    heads: int
    size: int
    state: int
    groups: int = 1
    kernel: int = 4
    eps: float = 1e-5
    limits: tuple[float, float] = (0.0, float("inf"))
    bias: bool = False
    conv_bias: bool = True

    @property
    def inner(self) -> int:
        """Numbers of a token in all heads."""
        return self.heads * self.size

    @property
    def channels(self) -> int:
        """Numbers that are convolved: what all heads, `b` and `c` take in."""
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and switches of a model of the family; hashable.

    layers: L.
    vocabulary: V.
    eps: what keeps a norm from dividing by zero.
    mixer: of every layer.
    tied: whether the head is the embedding.
    """

    layers: int
    vocabulary: int
    eps: float
    mixer: Sizes
    tied: bool = True


class RMSNorm(nnx.Module):
    """Divides by the root of the mean square, in float32; of each group by its own."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype, groups: int = 1):
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps, self.groups = eps, groups

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last dimension; returns the dtype of the weight."""
        y = x.astype(jnp.float32).reshape(*x.shape[:-1], self.groups, -1)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (y.reshape(x.shape) * weight.astype(jnp.float32)).astype(weight.dtype)


class Mixer(nnx.Module):
    """What attention is elsewhere: a short convolution, then a state that decays as tokens say."""

    def __init__(self, sizes: Sizes, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = sizes
        self.sizes, self.layer = c, layer
        self.input = matrix(rngs, c.inner + c.channels + c.heads, c.width, dtype)
        self.conv = nnx.Param(
            jax.random.normal(rngs.params(), (c.kernel, c.channels), dtype) * c.kernel**-0.5
        )
        # What decides how fast states decay is exact, whatever the dtype of the rest.
        self.step_bias = nnx.Param(jnp.zeros(c.heads, jnp.float32))
        self.rate_log = nnx.Param(jnp.log(jnp.arange(1.0, c.heads + 1)))
        self.skip = nnx.Param(jnp.ones(c.heads, jnp.float32))
        self.norm = RMSNorm(c.inner, c.eps, dtype, c.groups)
        self.output = matrix(rngs, c.width, c.inner, dtype)
        if c.conv_bias:
            self.conv_bias = nnx.Param(jnp.zeros(c.channels, dtype))
        if c.bias:
            self.input_bias = nnx.Param(jnp.zeros(c.inner + c.channels + c.heads, dtype))
            self.output_bias = nnx.Param(jnp.zeros(c.width, dtype))

    def __call__(self, memory: Any, ubatch: jaxkv.Ubatch, x: jax.Array) -> tuple[Any, jax.Array]:
        """Mix `x`, `[R, T, width]`, with what came before; returns the memory and the outcome."""
        c = self.sizes
        x = linear(x, self.input)
        if c.bias:
            x = x + self.input_bias[...].reshape(1, 1, -1)
        gate, x, steps = jnp.split(x, [c.inner, c.inner + c.channels], axis=-1)
        steps = jax.nn.softplus(steps.astype(jnp.float32) + self.step_bias[...].reshape(1, 1, -1))
        # Padding adds nothing and takes no time, so it leaves the state as it is.
        valid = ubatch.valid[..., None]
        x = jnp.where(valid, x, 0)
        steps = jnp.where(valid, jnp.clip(steps, *c.limits), 0)

        states = jaxkv.read_states(memory, self.layer, ubatch)
        counts = jaxkv.tails(ubatch, jaxkv.states_kept(memory, self.layer) + 1)
        bias = self.conv_bias[...] if c.conv_bias else None
        x, tails = scans.conv(x, states["conv"], self.conv[...], bias, counts)
        x, into, out_of = jnp.split(
            jax.nn.silu(x), [c.inner, c.inner + c.groups * c.state], axis=-1
        )
        x = x.reshape(*x.shape[:2], c.heads, c.size)
        into, out_of = (y.reshape(*y.shape[:2], c.groups, c.state) for y in (into, out_of))
        rate = -jnp.exp(self.rate_log[...])
        y, ends = scans.ssd(x, steps, rate, into, out_of, states["ssm"], counts)
        memory = jaxkv.write_states(memory, self.layer, ubatch, {"conv": tails, "ssm": ends})

        y = (y + self.skip[...].reshape(1, 1, -1, 1) * x).reshape(*x.shape[:2], -1)
        out = linear(self.norm(y * jax.nn.silu(gate.astype(jnp.float32))), self.output)
        if c.bias:
            out = out + self.output_bias[...].reshape(1, 1, -1)
        return memory, out


class Mamba2(nnx.Module):
    """The model: tokens in, logits of the tokens that want them out."""

    def __init__(self, config: Config, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        width, layers = config.mixer.width, range(config.layers)
        self.head = matrix(rngs, config.vocabulary, width, dtype)
        if not config.tied:
            self.embedding = matrix(rngs, config.vocabulary, width, dtype)
        self.norms = nnx.List([RMSNorm(width, config.eps, dtype) for _ in layers])
        self.mixers = nnx.List([Mixer(config.mixer, i, dtype, rngs) for i in layers])
        self.norm = RMSNorm(width, config.eps, dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Turn tokens, `[R, T]`, into what the first layer reads, `[R, T, width]`."""
        if self.config.tied:
            return self.head[...][tokens]
        return self.embedding[...][tokens]

    def __call__(self, memory: Any, ubatch: jaxkv.Ubatch) -> tuple[Any, jax.Array]:
        """Run a ubatch that has been applied; returns the memory and logits `[O, V]`, float32."""
        x = self.embed(ubatch.tokens) if ubatch.embeddings is None else ubatch.embeddings
        x = x.astype(jnp.float32)  # between the layers, as it was trained; norms turn it back
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            memory, out = mixer(memory, ubatch, norm(x))
            x = x + out
        x = x.reshape(-1, x.shape[-1])[ubatch.outputs]
        return memory, linear(self.norm(x), self.head).astype(jnp.float32)


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the sizes of a model of this family from its checkpoint."""
    c = checkpoint.config
    return Config(
        layers=c["num_hidden_layers"],
        vocabulary=c["vocab_size"],
        eps=c["layer_norm_epsilon"],
        mixer=Sizes(
            width=c["hidden_size"],
            heads=c["num_heads"],
            size=c["head_dim"],
            state=c["state_size"],
            groups=c["n_groups"],
            kernel=c["conv_kernel"],
            eps=c["layer_norm_epsilon"],
            limits=c["time_step_limit"],
            bias=c["use_bias"],
            conv_bias=c["use_conv_bias"],
        ),
        tied=c["tie_word_embeddings"],
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Name where each weight of `Mamba2` comes from: a tree of functions that read and arrange it.

    Nothing is read here. Called one after another, and each result put on the device before the
    next, they never hold more than one layer's worth beside the model.
    """
    read = checkpoint.tensor
    layers = [f"backbone.layers.{i}" for i in range(config.layers)]

    def norm(name: str) -> dict:
        return {"weight": lambda: read(f"{name}.weight")}

    head = "backbone.embeddings.weight" if config.tied else "lm_head.weight"
    tree = {
        "head": lambda: read(head),
        "norms": {i: norm(f"{layer}.norm") for i, layer in enumerate(layers)},
        "mixers": {
            i: mixer_weights_of(checkpoint, config.mixer, f"{layer}.mixer")
            for i, layer in enumerate(layers)
        },
        "norm": norm("backbone.norm_f"),
    }
    if not config.tied:
        tree["embedding"] = lambda: read("backbone.embeddings.weight")
    return tree


def mixer_weights_of(checkpoint: Checkpoint, sizes: Sizes, name: str) -> dict:
    """Name where the weights of a `Mixer` come from, like `weights_of`."""
    read = checkpoint.tensor
    tree = {
        "input": lambda: read(f"{name}.in_proj.weight"),
        "conv": lambda: read(f"{name}.conv1d.weight")[:, 0].T,
        "step_bias": lambda: read(f"{name}.dt_bias"),
        "rate_log": lambda: read(f"{name}.A_log"),
        "skip": lambda: read(f"{name}.D"),
        "norm": {"weight": lambda: read(f"{name}.norm.weight")},
        "output": lambda: read(f"{name}.out_proj.weight"),
    }
    if sizes.conv_bias:
        tree["conv_bias"] = lambda: read(f"{name}.conv1d.bias")
    if sizes.bias:
        tree["input_bias"] = lambda: read(f"{name}.in_proj.bias")
        tree["output_bias"] = lambda: read(f"{name}.out_proj.bias")
    return tree


def states_of(sizes: Sizes, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Say what a mixer remembers of a sequence: the end of its inputs, and its sums in float32."""
    return {
        "conv": jax.ShapeDtypeStruct((sizes.kernel - 1, sizes.channels), dtype),
        "ssm": jax.ShapeDtypeStruct((sizes.heads, sizes.size, sizes.state), jnp.float32),
    }


def make_memory(
    config: Config,
    *,
    sequences: int = 1,
    cells: int | None = None,
    kept: int = 0,
    streams: int = 1,
    dtype: Any = jnp.float32,
    ubatch_size: int = 512,
    **options: Any,
) -> Any:
    """Make the memory that a model of this family needs.

    Args:
      config: sizes of the model.
      sequences: Q, the sequences that may be told apart.
      cells: nothing here: a state is as large after a million tokens as after one.
      kept: E, the earlier states of each sequence that can be gone back to.
      streams: S, whether a moved position moves for all sequences that share its state.
      dtype: of what the convolution remembers; sums are float32.
      ubatch_size: nothing here: tokens may come in any number.
      options: whatever else `jaxkv.make_recurrent_cache` takes.
    """
    del cells, ubatch_size
    return jaxkv.make_recurrent_cache(
        layers=config.layers,
        states=states_of(config.mixer, dtype),
        sequences=sequences,
        kept=kept,
        streams=streams,
        **options,
    )


MODULE = Mamba2
