"""Mamba-2: recurrent layers, see `jaxkv.ops.scans`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkv
from jaxkv.ops import scans
from models.checkpoints.checkpoint import Checkpoint
from models.families import language_model
from models.families.caches import Recurs
from models.families.language_model import LanguageModel
from models.families.layers import Linear, RMSNorm
from models.families.linear import matrix
from models.families.sources import Sources
from models.meshes import Split

ARCHITECTURES = ("mamba2",)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Hashable configuration of a Mamba-2 mixer.

    heads: number of heads, H; each head has a state.
    head_dim: number of channels of a head, P.
    state: number of state values for each channel, M.
    groups: number of groups of heads, G. The heads of a group share, for each token, the vector `b`
      that multiplies their inputs and the vector `c` that multiplies their states.
    kernel: number of tokens that the convolution reads.
    limits: smallest and largest step size.
    bias: whether the projections have biases.
    norm: whether the gated output is normalised.
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
    norm: bool = True

    @property
    def inner(self) -> int:
        """Number of channels of all heads."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Size of the vectors `b` and `c` of all groups, for each token."""
        return 2 * self.groups * self.state

    def by_group(self, axis: int) -> Split:
        """Return how a mesh may split an array by groups of heads."""
        return Split(axis=axis, parts=self.groups, of="groups of heads")

    def by_head(self, axis: int) -> Split:
        """Return how a mesh may split an array: by groups of heads if G > 1, otherwise by heads."""
        if self.groups > 1:
            return self.by_group(axis)
        return Split(axis=axis, parts=self.heads, of="heads of a mixer")


@dataclass(frozen=True, kw_only=True)
class Config(language_model.Config):
    """Configuration of Mamba-2; the field `mixer` configures the mixer of each layer."""

    layers: int
    mixer: Sizes

    @property
    def width(self) -> int:
        """Size of a token's vector between layers."""
        return self.mixer.width


class Filter(nnx.Module):
    """A short convolution of each channel over time, with SiLU."""

    def __init__(
        self,
        kernel: int,
        channels: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        *,
        bias: bool,
        split: Split,
    ):
        self.weight = matrix(rngs, (kernel, channels), dtype, inputs=0, split=split)
        self.biased = bias
        if bias:
            self.bias = nnx.Param(jnp.zeros((1, channels), dtype), split=split)

    def __call__(
        self, x: jax.Array, tail: jax.Array, counts: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Convolve `x`, `[R, T, channels]`; return the outputs and tails.

        The argument `tail` has the inputs before `x`, see `jaxkv.ops.scans.convolve`.
        """
        bias = self.bias[0] if self.biased else None
        x, tails = scans.convolve(x, tail, self.weight[...], bias, counts)
        return jax.nn.silu(x), tails


class Mixer(nnx.Module):
    """A short convolution, followed by a selective state-space recurrence."""

    def __init__(self, sizes: Sizes, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = self.sizes = sizes
        self.layer = layer
        # Gate and input of the heads are one product, by far the largest. A mesh splits it by
        # head, and `b` and `c` by group, so these and the steps are separate products.
        project = partial(Linear, c.width, dtype=dtype, rngs=rngs, bias=c.bias)
        self.input = project((2, c.inner), split=c.by_head(1))
        self.shared = project((c.groups, 2 * c.state), split=c.by_group(0))
        self.steps = project(c.heads, split=c.by_head(0))
        convolve = partial(Filter, c.kernel, dtype=dtype, rngs=rngs, bias=c.conv_bias)
        self.conv = convolve(c.inner, split=c.by_head(1))
        self.shared_conv = convolve(c.shared, split=c.by_group(1))
        # Decay rates are float32 for every dtype.
        self.step_bias = nnx.Param(jnp.zeros(c.heads, jnp.float32))
        self.rate_log = nnx.Param(jnp.log(jnp.arange(1.0, c.heads + 1)))
        self.skip = nnx.Param(jnp.ones(c.heads, jnp.float32))
        if c.norm:
            self.norm = RMSNorm(c.inner, c.eps, dtype, groups=c.groups)
        self.output = Linear(c.inner, c.width, dtype, rngs, bias=c.bias, split=c.by_head(1))

    def __call__(self, step: jaxkv.Step, x: jax.Array) -> tuple[jaxkv.Step, jax.Array]:
        """Run the mixer on `x`, `[R, T, width]`; return the step and the output."""
        c = self.sizes
        steps, shared = self.steps(x), self.shared(x).reshape(*x.shape[:2], -1)
        gate, x = jnp.unstack(self.input(x), axis=-2)
        steps = jax.nn.softplus(steps.astype(jnp.float32) + self.step_bias[...].reshape(1, 1, -1))
        # Padding has inputs and steps of 0, so it does not change the state.
        valid = step.valid[..., None]
        x, shared = jnp.where(valid, x, 0), jnp.where(valid, shared, 0)
        steps = jnp.where(valid, jnp.clip(steps, *c.limits), 0)

        states = jaxkv.read_states(step, self.layer)
        counts = step.state_write_steps(self.layer)
        x, tails = self.conv(x, states["conv"], counts)
        shared, shared_tails = self.shared_conv(shared, states["shared_conv"], counts)
        into, out_of = jnp.split(shared.reshape(*x.shape[:2], c.groups, -1), 2, axis=-1)
        x = x.reshape(*x.shape[:2], c.heads, c.head_dim)
        rate = -jnp.exp(self.rate_log[...])
        y, ends = scans.scan_ssd(x, steps, rate, into, out_of, states["ssm"], counts)
        after = {"conv": tails, "shared_conv": shared_tails, "ssm": ends}
        step = jaxkv.write_states(step, self.layer, after)

        y = (y + self.skip[...].reshape(1, 1, -1, 1) * x).reshape(*x.shape[:2], -1)
        y = y * jax.nn.silu(gate.astype(jnp.float32))
        return step, self.output(self.norm(y) if c.norm else y.astype(gate.dtype))


class Block(nnx.Module):
    """One layer: a Mamba-2 mixer over the cache."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.norm = RMSNorm(c.width, c.eps, dtype)
        self.mixer = Mixer(c.mixer, layer, dtype, rngs)

    def __call__(self, step: jaxkv.Step, x: jax.Array) -> tuple[jaxkv.Step, jax.Array]:
        """Apply the layer to `x`, `[R, T, width]`; return the next step and the new `x`."""
        step, out = self.mixer(step, self.norm(x))
        # `x` is float32 between the layers, as in training; norms cast it.
        return step, x.astype(jnp.float32) + out


class Mamba2(LanguageModel):
    """Flax module of Mamba-2."""

    block = Block


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of a model from its checkpoint."""
    c = checkpoint.config
    c.check_divides("n_groups", "num_heads")
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
            limits=limits_of(checkpoint),
            bias=c["use_bias"],
            conv_bias=c["use_conv_bias"],
        ),
        tied=c["tie_word_embeddings"],
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `Mamba2`."""
    source = Sources(checkpoint)

    def block(_: int, layer: str) -> dict:
        return {
            "norm": source.norm(f"{layer}.norm"),
            "mixer": mixer_weights_of(source, config.mixer, f"{layer}.mixer"),
        }

    names = {"embedding": "backbone.embeddings", "norm": "backbone.norm_f"}
    return source.language_model(block, config, layers="backbone.layers", **names)


def limits_of(checkpoint: Checkpoint) -> tuple[float, float]:
    """Read the smallest and the largest step size from a checkpoint."""
    limits = tuple(checkpoint.config["time_step_limit"])
    if len(limits) != 2:
        raise checkpoint.config.refusal("time_step_limit", "a list of 2 numbers")
    return limits


def sizes_of(checkpoint: Checkpoint, **switches: bool) -> Sizes:
    """Read the configuration of the mixers in a hybrid model from its checkpoint."""
    c = checkpoint.config
    c.check_divides("mamba_n_groups", "mamba_n_heads")
    return Sizes(
        width=c["hidden_size"],
        heads=c["mamba_n_heads"],
        head_dim=c["mamba_d_head"],
        state=c["mamba_d_state"],
        groups=c["mamba_n_groups"],
        kernel=c["mamba_d_conv"],
        eps=c["rms_norm_eps"],
        limits=limits_of(checkpoint),
        conv_bias=c["mamba_conv_bias"],
        **switches,
    )


def mixer_weights_of(source: Sources, sizes: Sizes, name: str) -> dict:
    """Return a `Tensor` for each parameter of a `Mixer`."""
    inner = sizes.inner

    def projection(arrange: Callable[[np.ndarray], np.ndarray]) -> dict:
        return source.linear(f"{name}.in_proj", bias=sizes.bias, arrange=arrange)

    def by_group(x: np.ndarray) -> np.ndarray:
        # The file has `b` of all groups, then `c` of all; here each group has both.
        return x.reshape(2, sizes.groups, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

    def filter_of(channels: Callable[[np.ndarray], np.ndarray]) -> dict:
        weight, bias = f"{name}.conv1d.weight", f"{name}.conv1d.bias"
        tree = {"weight": source.tensor(weight, arrange=lambda x: channels(x)[:, 0].T)}
        if sizes.conv_bias:
            tree["bias"] = source.tensor(bias, arrange=lambda x: channels(x)[None])
        return tree

    tree = {
        "input": projection(lambda x: x[: 2 * inner].reshape(2, -1, *x.shape[1:])),
        "shared": projection(
            lambda x: by_group(x[2 * inner : -sizes.heads]).reshape(sizes.groups, -1, *x.shape[1:])
        ),
        "steps": projection(lambda x: x[-sizes.heads :]),
        "conv": filter_of(lambda x: x[:inner]),
        "shared_conv": filter_of(lambda x: by_group(x[inner:])),
        "step_bias": source.tensor(f"{name}.dt_bias"),
        "rate_log": source.tensor(f"{name}.A_log"),
        "skip": source.tensor(f"{name}.D"),
        "output": source.linear(f"{name}.out_proj", bias=sizes.bias),
    }
    return tree | {"norm": source.norm(f"{name}.norm")} if sizes.norm else tree


def recurs(sizes: Sizes, dtype: Any) -> Recurs:
    """Return a description of a mixer's states: last inputs of its convolutions, and SSM state."""
    return Recurs(
        states={
            "conv": jax.ShapeDtypeStruct((sizes.kernel - 1, sizes.inner), dtype),
            "shared_conv": jax.ShapeDtypeStruct((sizes.kernel - 1, sizes.shared), dtype),
            "ssm": jax.ShapeDtypeStruct((sizes.heads, sizes.head_dim, sizes.state), jnp.float32),
        },
        splits={
            "conv": sizes.by_head(1),
            "shared_conv": sizes.by_group(1),
            "ssm": sizes.by_head(0),
        },
    )


def layers_of(config: Config, dtype: Any) -> list[Recurs]:
    """Return a description of each layer of the cache; convolution states have dtype `dtype`."""
    return [recurs(config.mixer, dtype)] * config.layers


MODULE = Mamba2
