"""Models of gated delta rules, and gated attention in some layers: Qwen3-Next and Qwen3.5."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkv
from models.checkpoints.checkpoint import Checkpoint
from models.families.caches import Attends, Layer, Recurs
from models.families.delta_layer import Config, DeltaRule
from models.families.experts import Experts, SoftmaxRouter
from models.families.language_model import LanguageModel, attention_fields
from models.families.layers import Attention, Feed, Linear, RMSNorm
from models.families.sources import Sources


class Block(nnx.Module):
    """One layer: attention or a delta rule over the cache, then a feed-forward part or experts."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = self.config = config
        norm = partial(RMSNorm, eps=c.eps, dtype=dtype, less_one=True)
        self.mix_norm = norm(c.width)
        if c.attends[layer]:
            options = dict(rope=c.rope, axes=c.axes, norm=norm, gated=True)
            self.mixer = Attention(c, layer, dtype, rngs, **options)
        else:
            self.mixer = DeltaRule(c, layer, dtype, rngs)
        self.feed_norm = norm(c.width)
        self.feed = Feed(c.width, c.hidden, jax.nn.silu, dtype, rngs)
        if c.experts:
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
        out = self.feed(y)
        if self.config.experts:
            out = out * jax.nn.sigmoid(self.feed_gate(y)) + self.experts(y)
        return step, x + out


class GatedDelta(LanguageModel):
    """Flax module of Qwen3-Next and Qwen3.5."""

    block = Block
    less_one = True


def shared_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the fields of `Config` that are the same in all families, except `rope`."""
    c = checkpoint.config
    c.check_divides("linear_num_key_heads", "linear_num_value_heads")
    kinds = c.layer_kinds("full_attention", "linear_attention")
    return attention_fields(checkpoint) | {
        "attends": tuple(kind == "full_attention" for kind in kinds),
        "key_heads": c["linear_num_key_heads"],
        "value_heads": c["linear_num_value_heads"],
        "key_dim": c["linear_key_head_dim"],
        "value_dim": c["linear_value_head_dim"],
        "kernel": c["linear_conv_kernel_dim"],
    }


def expert_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the sizes of a feed-forward part with experts from a checkpoint."""
    c = checkpoint.config
    c.check_chosen("num_experts")
    return {
        "hidden": c["shared_expert_intermediate_size"],
        "experts": c["num_experts"],
        "experts_per_token": c["num_experts_per_tok"],
        "expert_hidden": c["moe_intermediate_size"],
    }


def by_group(config: Config, x: np.ndarray) -> np.ndarray:
    """Group rows of queries, keys, values and gates by key head: `[key_heads, n, ...]`.

    A file has the rows of all queries first, then those of all keys, values and gates.
    """
    keys = config.key_heads * config.key_dim
    parts = np.split(x, [keys, 2 * keys, config.channels])
    parts = [part.reshape(config.key_heads, -1, *x.shape[1:]) for part in parts if len(part)]
    return np.concatenate(parts, axis=1)


def block_weights(
    source: Sources, config: Config, layer: str, *, attends: bool, inputs: Callable[[str], dict]
) -> dict:
    """Return a `Tensor` for each parameter of a `Block`.

    The argument `layer` is its name in the checkpoint. The function `inputs` returns the tensors
    for `input` and `steps` of a `DeltaRule`, given its name.
    """
    c = config

    def gates_last(x: np.ndarray) -> np.ndarray:
        # The file has the gate of a head after the query of the head.
        heads = x.reshape(c.kv_heads, -1, c.head_dim, x.shape[-1])
        gates = 2 * np.arange(c.heads // c.kv_heads) + 1
        queries, kv = gates - 1, [-2, -1]
        return heads[:, [*queries, *kv, *gates]].reshape(x.shape)

    def filters(x: np.ndarray) -> np.ndarray:
        return by_group(c, x[:, 0]).reshape(-1, c.kernel).T

    if attends:
        name = f"{layer}.self_attn"
        mixer = source.attention(name, kv_heads=c.kv_heads, norms="norm", arrange=gates_last)
    else:
        name = f"{layer}.linear_attn"
        mixer = inputs(name) | {
            "conv": {"weight": source.tensor(f"{name}.conv1d.weight", arrange=filters)},
            "step_bias": source.tensor(f"{name}.dt_bias"),
            "rate_log": source.tensor(f"{name}.A_log"),
            "norm": source.norm(f"{name}.norm"),
            "output": source.linear(f"{name}.out_proj"),
        }
    tree = {
        "mix_norm": source.norm(f"{layer}.input_layernorm"),
        "mixer": mixer,
        "feed_norm": source.norm(f"{layer}.post_attention_layernorm"),
        "feed": source.gated_feed(f"{layer}.mlp" + (".shared_expert" if c.experts else "")),
    }
    if c.experts:
        tree["feed_gate"] = source.linear(f"{layer}.mlp.shared_expert_gate")
        tree["experts"] = source.experts(f"{layer}.mlp", count=c.experts)
    return tree


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
