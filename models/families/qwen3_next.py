"""Qwen3-Next: gated delta rules, gated attention in some layers, and experts."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkv
from jaxkv.rope import Rope
from models.checkpoints.checkpoint import Checkpoint
from models.families.caches import Attends, Layer, Recurs
from models.families.delta_rule import scan_gated_delta
from models.families.experts import Experts, SoftmaxRouter
from models.families.language_model import HybridConfig, LanguageModel, attention_fields
from models.families.layers import Attention, GatedFeed, Linear, RMSNorm
from models.families.mamba2 import Filter
from models.families.ropes import rope_of
from models.families.sources import Sources
from models.meshes import Split

ARCHITECTURES = ("qwen3_next",)


@dataclass(frozen=True, kw_only=True)
class Config(HybridConfig):
    """Configuration of Qwen3-Next; other fields are in `models.families.language_model`.

    attends: whether each of the L layers has attention; the other layers have a delta rule.
    key_heads: number of key heads of a delta rule. Each key head serves a group of value heads.
    value_heads: number of value heads of a delta rule; each value head has a state.
    key_dim: size of a query and of a key of a delta rule.
    value_dim: size of a value of a delta rule.
    kernel: number of tokens that the convolution of a delta rule reads.
    experts: number of experts, of which a token selects `experts_per_token`.
    normalised: whether the factors of the chosen experts are divided by the sum of these factors.
    expert_hidden: inner size of an expert.
    shared_hidden: inner size of the feed-forward part that every token uses.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    experts: int
    experts_per_token: int
    normalised: bool
    expert_hidden: int
    shared_hidden: int
    rope: Rope

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


class Block(nnx.Module):
    """One layer: attention or a delta rule over the cache, then experts."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        norm = partial(RMSNorm, eps=c.eps, dtype=dtype, less_one=True)
        self.mix_norm = norm(c.width)
        if c.attends[layer]:
            self.mixer = Attention(c, layer, dtype, rngs, rope=c.rope, norm=norm, gated=True)
        else:
            self.mixer = DeltaRule(c, layer, dtype, rngs)
        self.feed_norm = norm(c.width)
        self.feed = GatedFeed(c.width, c.shared_hidden, jax.nn.silu, dtype, rngs)
        self.feed_gate = Linear(c.width, 1, dtype, rngs)
        router = SoftmaxRouter(
            c.width, c.experts, c.experts_per_token, dtype, rngs, normalised=c.normalised
        )
        self.experts = Experts(c.width, c.expert_hidden, c.experts, router, dtype, rngs)

    def __call__(self, step: jaxkv.Step, x: jax.Array) -> tuple[jaxkv.Step, jax.Array]:
        """Apply the layer to `x`, `[R, T, width]`; return the next step and the new `x`."""
        step, out = self.mixer(step, self.mix_norm(x))
        x = x + out
        y = self.feed_norm(x)
        shared = self.feed(y) * jax.nn.sigmoid(self.feed_gate(y))
        return step, x + shared + self.experts(y)


class Qwen3Next(LanguageModel):
    """Flax module of Qwen3-Next."""

    block = Block
    less_one = True


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of a model from its checkpoint."""
    c = checkpoint.config
    c.check_divides("linear_num_key_heads", "linear_num_value_heads")
    c.check_chosen("num_experts")
    c.ignore("intermediate_size")  # of layers without experts
    kinds = c.layer_kinds("full_attention", "linear_attention")
    return Config(
        **attention_fields(checkpoint),
        attends=tuple(kind == "full_attention" for kind in kinds),
        key_heads=c["linear_num_key_heads"],
        value_heads=c["linear_num_value_heads"],
        key_dim=c["linear_key_head_dim"],
        value_dim=c["linear_value_head_dim"],
        kernel=c["linear_conv_kernel_dim"],
        experts=c["num_experts"],
        experts_per_token=c["num_experts_per_tok"],
        normalised=c["norm_topk_prob"],
        expert_hidden=c["moe_intermediate_size"],
        shared_hidden=c["shared_expert_intermediate_size"],
        rope=rope_of(checkpoint, partly=True),
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `Qwen3Next`."""
    source, c = Sources(checkpoint), config

    def attention(name: str) -> dict:
        def gates_last(x: np.ndarray) -> np.ndarray:
            # The file has the gate of a head after the query of the head.
            heads = x.reshape(c.kv_heads, -1, c.head_dim, x.shape[-1])
            gates = 2 * np.arange(c.heads // c.kv_heads) + 1
            queries, kv = gates - 1, [-2, -1]
            return heads[:, [*queries, *kv, *gates]].reshape(x.shape)

        return source.attention(name, kv_heads=c.kv_heads, norms="norm", arrange=gates_last)

    def delta_rule(name: str) -> dict:
        def by_group(x: np.ndarray) -> np.ndarray:
            # The file has all queries, then all keys, then all values.
            keys = c.key_heads * c.key_dim
            parts = np.split(x[:, 0], [keys, 2 * keys])
            parts = [part.reshape(c.key_heads, -1, c.kernel) for part in parts]
            return np.concatenate(parts, axis=1).reshape(-1, c.kernel).T

        return {
            "input": source.linear(f"{name}.in_proj_qkvz", parts=c.key_heads),
            "steps": source.linear(f"{name}.in_proj_ba", parts=c.key_heads),
            "conv": {"weight": source.tensor(f"{name}.conv1d.weight", arrange=by_group)},
            "step_bias": source.tensor(f"{name}.dt_bias"),
            "rate_log": source.tensor(f"{name}.A_log"),
            "norm": source.norm(f"{name}.norm"),
            "output": source.linear(f"{name}.out_proj"),
        }

    def block(i: int, layer: str) -> dict:
        mixer = (
            attention(f"{layer}.self_attn") if c.attends[i] else delta_rule(f"{layer}.linear_attn")
        )
        return {
            "mix_norm": source.norm(f"{layer}.input_layernorm"),
            "mixer": mixer,
            "feed_norm": source.norm(f"{layer}.post_attention_layernorm"),
            "feed": source.gated_feed(f"{layer}.mlp.shared_expert"),
            "feed_gate": source.linear(f"{layer}.mlp.shared_expert_gate"),
            "experts": source.experts(f"{layer}.mlp", count=c.experts),
        }

    return source.language_model(block, c)


def layers_of(config: Config, dtype: Any) -> list[Layer]:
    """Return a description of each layer of the cache; convolution states have dtype `dtype`."""
    c = config
    attends = Attends(kv_heads=c.kv_heads, head_dim=c.head_dim, rope=c.rope)
    state = c.value_heads, c.key_dim, c.value_dim
    recurs = Recurs(
        states={
            "conv": jax.ShapeDtypeStruct((c.kernel - 1, c.channels), dtype),
            "delta": jax.ShapeDtypeStruct(state, jnp.float32),
        },
        splits={"conv": c.by_group(1), "delta": c.by_group(0)},
    )
    return [attends if is_attention else recurs for is_attention in c.attends]


MODULE = Qwen3Next
