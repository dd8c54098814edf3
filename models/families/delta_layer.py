"""Layer with a gated delta rule, and the configuration of models with such layers."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from jaxkv.rope import Rope
from models.families.delta_rule import scan_gated_delta
from models.families.language_model import HybridConfig
from models.families.layers import Linear, RMSNorm
from models.families.mamba2 import Filter
from models.meshes import Split


@dataclass(frozen=True, kw_only=True)
class Config(HybridConfig):
    """Configuration of a model; other fields are in `models.families.language_model`.

    attends: whether each of the L layers has attention; the other layers have a delta rule.
    hidden: inner size of the feed-forward part that every token uses.
    key_heads: number of key heads of a delta rule. Each key head serves a group of value heads.
    value_heads: number of value heads of a delta rule; each value head has a state.
    key_dim: size of a query and of a key of a delta rule.
    value_dim: size of a value of a delta rule.
    kernel: number of tokens that the convolution of a delta rule reads.
    axes: axis of each pair of the rope, see `Attention`; None for one axis.
    experts: number of experts, of which a token selects `experts_per_token`; 0 for none.
    normalised: whether the factors of the chosen experts are divided by the sum of these factors.
    expert_hidden: inner size of an expert.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    rope: Rope
    axes: tuple[int, ...] | None = None
    experts: int = 0
    experts_per_token: int = 0
    normalised: bool = True
    expert_hidden: int = 0

    @property
    def channels(self) -> int:
        """Number of channels of a convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def by_group(self, axis: int) -> Split:
        """Return how a mesh may split an array by key head.

        A device with a key head also has all value heads that share this key head.
        """
        return Split(axis=axis, parts=self.key_heads, of="key heads of a delta rule")


class DeltaRule(nnx.Module):
    """A short convolution, followed by a gated delta rule with a gated and normalised output."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = self.config = config
        self.layer = layer
        # Each key head has a query, a key, and values and gates of its value heads.
        size = c.channels // c.key_heads + c.value_heads // c.key_heads * c.value_dim
        project = partial(Linear, c.width, dtype=dtype, rngs=rngs, split=c.by_group(0))
        self.input = project((c.key_heads, size))
        self.steps = project((c.key_heads, c.value_heads // c.key_heads * 2))
        self.conv = Filter(c.kernel, c.channels, dtype, rngs, bias=False, split=c.by_group(1))
        # Decay rates are float32 for every dtype.
        self.step_bias = nnx.Param(jnp.ones(c.value_heads, jnp.float32))
        self.rate_log = nnx.Param(jnp.log(jnp.arange(1.0, c.value_heads + 1)))
        self.norm = RMSNorm(c.value_dim, c.eps, dtype)
        inner = c.value_heads * c.value_dim
        self.output = Linear(inner, c.width, dtype, rngs, split=c.by_group(1))

    def __call__(self, step: jaxkv.Step, x: jax.Array) -> tuple[jaxkv.Step, jax.Array]:
        """Run the delta rule on `x`, `[R, T, width]`; return the step and the output."""
        c, token = self.config, x.shape[:2]
        steps = self.steps(x).astype(jnp.float32)
        beta, steps = (part.reshape(*token, -1) for part in jnp.split(steps, 2, axis=-1))
        x, gate = jnp.split(self.input(x), [c.channels // c.key_heads], axis=-1)
        rate = jnp.exp(self.rate_log[...]).reshape(1, 1, -1)
        log_decay = -rate * jax.nn.softplus(steps + self.step_bias[...].reshape(1, 1, -1))
        # Padding has inputs and factors of 0 and does not decay, so it does not change the state.
        valid = step.valid[..., None]
        x = jnp.where(valid, x.reshape(*token, -1), 0)
        log_decay, beta = (jnp.where(valid, y, 0) for y in (log_decay, jax.nn.sigmoid(beta)))

        states = jaxkv.read_states(step, self.layer)
        counts = step.state_write_steps(self.layer)
        x, tails = self.conv(x, states["conv"], counts)
        x = x.reshape(*token, c.key_heads, -1)
        q, k, v = jnp.split(x, [c.key_dim, 2 * c.key_dim], axis=-1)
        q, k = _unit(q) * c.key_dim**-0.5, _unit(k)
        v = v.reshape(*token, c.value_heads, c.value_dim)
        y, ends = scan_gated_delta(q, k, v, log_decay, beta, states["delta"], counts)
        step = jaxkv.write_states(step, self.layer, {"conv": tails, "delta": ends})

        y = self.norm(y) * jax.nn.silu(gate.astype(jnp.float32)).reshape(y.shape)
        return step, self.output(y.astype(gate.dtype).reshape(*token, -1))


def _unit(x: jax.Array) -> jax.Array:
    """Divide vectors by their length."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
