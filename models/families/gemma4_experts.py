"""Experts of Gemma 4, beside a feed-forward part that all tokens use."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from models.families.experts import Experts, SoftmaxRouter
from models.families.layers import RMSNorm, gelu
from models.families.sources import Sources


class Sizes(Protocol):
    """Config fields that experts read, see `models.families.gemma4`."""

    width: int
    eps: float
    experts: int
    experts_per_token: int
    expert_hidden: int


class Router(nnx.Module):
    """Selector of experts, with a norm before it and a factor for each expert."""

    def __init__(self, config: Sizes, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.norm = RMSNorm(c.width, c.eps, dtype)
        self.select = SoftmaxRouter(c.width, c.experts, c.experts_per_token, dtype, rngs)
        self.factors = nnx.Param(jnp.ones(c.experts, dtype))

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Select k experts for each token `[n, width]`; return factors and ids, `[n, k]` each."""
        share, expert_ids = self.select(self.norm(tokens))
        return share * self.factors[...][expert_ids], expert_ids


class BesideExperts(nnx.Module):
    """Experts, whose output is added to that of a feed-forward part; each output has a norm."""

    def __init__(self, config: Sizes, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.norm, self.after_norm, self.after_feed_norm = (
            RMSNorm(c.width, c.eps, dtype) for _ in range(3)
        )
        self.experts = Experts(
            *(c.width, c.expert_hidden, c.experts, Router(c, dtype, rngs), dtype, rngs),
            activation=geglu,
        )

    def __call__(self, x: jax.Array, fed: jax.Array) -> jax.Array:
        """Add the experts' output for `x` and the feed-forward output, `[R, T, width]` each."""
        return self.after_feed_norm(fed) + self.after_norm(self.experts(self.norm(x), routed=x))


def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return `gelu(gate) * up`, the inputs of the down projection."""
    return gelu(gate) * up


def beside_weights(source: Sources, layer: str, width: int, count: int) -> dict[str, Any]:
    """Return the tensors for the `BesideExperts` of the layer with this name."""
    router = {
        "norm": {
            "weight": source.tensor(f"{layer}.router.scale", arrange=lambda x: x * width**-0.5)
        },
        "select": source.linear(f"{layer}.router.proj"),
        "factors": source.tensor(f"{layer}.router.per_expert_scale"),
    }
    return {
        "experts": source.experts(layer, count=count, router=router),
        "norm": source.norm(f"{layer}.pre_feedforward_layernorm_2"),
        "after_norm": source.norm(f"{layer}.post_feedforward_layernorm_2"),
        "after_feed_norm": source.norm(f"{layer}.post_feedforward_layernorm_1"),
    }
