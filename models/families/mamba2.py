"""Mamba-2, written for a jaxkv memory: each layer carries a state from token to token.

A layer asks the memory for the states before a ubatch, hands back those after it, and never sees
whose they are or what is kept of them. The two recurrences are in `jaxkv.ops.scans`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from jaxkv.ops import scans
from models.checkpoints.checkpoint import Checkpoint
from models.families.layers import Linear, RMSNorm, Vocabulary
from models.families.memories import Recurs
from models.families.sources import Sources

ARCHITECTURES = ("mamba2",)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes and switches of a Mamba-2 mixer; hashable.

    width: numbers of a token between the layers.
    heads: H, parts with a state each.
    head_dim: P, numbers of a token in a head.
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
    head_dim: int
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
        return self.heads * self.head_dim

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


class Mixer(nnx.Module):
    """What attention is elsewhere: a short convolution, then a state that decays as tokens say."""

    def __init__(self, sizes: Sizes, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = self.sizes = sizes
        self.layer = layer
        self.input = Linear(c.width, c.inner + c.channels + c.heads, dtype, rngs, bias=c.bias)
        self.conv = nnx.Param(
            jax.random.normal(rngs.params(), (c.kernel, c.channels), dtype) * c.kernel**-0.5
        )
        # What decides how fast states decay is exact, whatever the dtype of the rest.
        self.step_bias = nnx.Param(jnp.zeros(c.heads, jnp.float32))
        self.rate_log = nnx.Param(jnp.log(jnp.arange(1.0, c.heads + 1)))
        self.skip = nnx.Param(jnp.ones(c.heads, jnp.float32))
        self.norm = RMSNorm(c.inner, c.eps, dtype, groups=c.groups)
        self.output = Linear(c.inner, c.width, dtype, rngs, bias=c.bias)
        if c.conv_bias:
            self.conv_bias = nnx.Param(jnp.zeros(c.channels, dtype))

    def __call__(self, memory: Any, ubatch: jaxkv.Ubatch, x: jax.Array) -> tuple[Any, jax.Array]:
        """Mix `x`, `[R, T, width]`, with what came before; returns the memory and the outcome."""
        c = self.sizes
        gate, x, steps = jnp.split(self.input(x), [c.inner, c.inner + c.channels], axis=-1)
        steps = jax.nn.softplus(steps.astype(jnp.float32) + self.step_bias[...].reshape(1, 1, -1))
        # Padding adds nothing and takes no time, so it leaves the state as it is.
        valid = ubatch.valid[..., None]
        x = jnp.where(valid, x, 0)
        steps = jnp.where(valid, jnp.clip(steps, *c.limits), 0)

        states = jaxkv.read_states(memory, self.layer, ubatch)
        counts = jaxkv.steps_to_keep(ubatch, jaxkv.rollback_of(memory, self.layer) + 1)
        bias = self.conv_bias[...] if c.conv_bias else None
        x, tails = scans.convolve(x, states["conv"], self.conv[...], bias, counts)
        x, into, out_of = jnp.split(
            jax.nn.silu(x), [c.inner, c.inner + c.groups * c.state], axis=-1
        )
        x = x.reshape(*x.shape[:2], c.heads, c.head_dim)
        into, out_of = (y.reshape(*y.shape[:2], c.groups, c.state) for y in (into, out_of))
        rate = -jnp.exp(self.rate_log[...])
        y, ends = scans.scan_ssd(x, steps, rate, into, out_of, states["ssm"], counts)
        memory = jaxkv.write_states(memory, self.layer, ubatch, {"conv": tails, "ssm": ends})

        y = (y + self.skip[...].reshape(1, 1, -1, 1) * x).reshape(*x.shape[:2], -1)
        return memory, self.output(self.norm(y * jax.nn.silu(gate.astype(jnp.float32))))


class Mamba2(nnx.Module):
    """The model: tokens in, logits of the tokens that want them out."""

    def __init__(self, config: Config, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
        c = config
        width, layers = c.mixer.width, range(c.layers)
        self.vocabulary = Vocabulary(c.vocabulary, width, dtype, rngs, tied=c.tied)
        self.norms = nnx.List([RMSNorm(width, c.eps, dtype) for _ in layers])
        self.mixers = nnx.List([Mixer(c.mixer, layer, dtype, rngs) for layer in layers])
        self.norm = RMSNorm(width, c.eps, dtype)

    def __call__(self, memory: Any, ubatch: jaxkv.Ubatch) -> tuple[Any, jax.Array]:
        """Run a ubatch that has been applied; returns the memory and logits `[O, V]`, float32."""
        x = ubatch.embeddings
        if x is None:
            x = self.vocabulary.embed(ubatch.tokens)
        x = x.astype(jnp.float32)  # between the layers, as it was trained; norms turn it back
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            memory, out = mixer(memory, ubatch, norm(x))
            x = x + out
        x = x.reshape(-1, x.shape[-1])[ubatch.outputs]
        return memory, self.vocabulary.logits(self.norm(x))


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
            head_dim=c["head_dim"],
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
    """Returns where each weight of `Mamba2` comes from."""
    source = Sources(checkpoint)
    layers = {i: f"backbone.layers.{i}" for i in range(config.layers)}
    return {
        "vocabulary": source.vocabulary("backbone.embeddings.weight", tied=config.tied),
        "norms": {i: source.norm(f"{layer}.norm") for i, layer in layers.items()},
        "mixers": {
            i: mixer_weights_of(source, config.mixer, f"{layer}.mixer")
            for i, layer in layers.items()
        },
        "norm": source.norm("backbone.norm_f"),
    }


def mixer_weights_of(source: Sources, sizes: Sizes, name: str) -> dict:
    """Returns where the weights of a `Mixer` come from."""
    tree = {
        "input": source.linear(f"{name}.in_proj", bias=sizes.bias),
        "conv": source.tensor(f"{name}.conv1d.weight", turn=lambda x: x[:, 0].T),
        "step_bias": source.tensor(f"{name}.dt_bias"),
        "rate_log": source.tensor(f"{name}.A_log"),
        "skip": source.tensor(f"{name}.D"),
        "norm": source.norm(f"{name}.norm"),
        "output": source.linear(f"{name}.out_proj", bias=sizes.bias),
    }
    if sizes.conv_bias:
        tree["conv_bias"] = source.tensor(f"{name}.conv1d.bias")
    return tree


def recurs(sizes: Sizes, dtype: Any) -> Recurs:
    """Returns what a mixer keeps of a sequence: the end of its inputs, and its sums in float32."""
    return Recurs(
        states={
            "conv": jax.ShapeDtypeStruct((sizes.kernel - 1, sizes.channels), dtype),
            "ssm": jax.ShapeDtypeStruct((sizes.heads, sizes.head_dim, sizes.state), jnp.float32),
        }
    )


def layers_of(config: Config, dtype: Any) -> list[Recurs]:
    """Returns what each layer keeps."""
    return [recurs(config.mixer, dtype)] * config.layers


MODULE = Mamba2
