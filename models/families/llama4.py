"""Llama 4, the language model: chunks in most layers, positions unknown to others, and experts.

In most layers, tokens attend within chunks of positions, and queries and keys are rotated. In the
other layers, tokens attend to all positions without rotation, and a factor of queries grows with
the position.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkv
from jaxkv.rope import Rope
from jaxkv.window import Window
from models.checkpoints.checkpoint import Checkpoint
from models.families import gemma3
from models.families.experts import Experts, SigmoidRouter
from models.families.language_model import LanguageModel, WindowedConfig, attention_fields
from models.families.layers import Attention, Feed, RMSNorm
from models.families.ropes import rope_of
from models.families.sources import Sources

ARCHITECTURES = ("llama4_text",)


@dataclass(frozen=True, kw_only=True)
class Config(WindowedConfig):
    """Configuration of Llama 4; other fields are in `models.families.language_model`.

    hidden: inner size of the feed-forward parts of layers without experts.
    ropes: rotary embedding of each layer; None for no rotation.
    qk_norm: whether rotated queries and keys are normalised.
    norm_eps: epsilon of these norms.
    temperature: in layers without rotation, the query at position p has the factor
      1 + `temperature` * ln(1 + (p + 1) // `temperature_span`). 0 for no factor.
    sparse: whether each layer has experts.
    experts: number of experts, of which a token selects `experts_per_token`.
    expert_hidden: inner size of an expert, and of the feed-forward part that every token uses in
      layers with experts.
    bias: whether the projections of attention have biases.
    """

    hidden: int
    ropes: tuple[Rope | None, ...]
    qk_norm: bool
    norm_eps: float
    temperature: float
    temperature_span: int
    sparse: tuple[bool, ...]
    experts: int
    experts_per_token: int
    expert_hidden: int
    bias: bool = False

    def query_factor(self, positions: jax.Array) -> jax.Array:
        """Return the factors of queries at positions `[R, T]`, in layers without rotation."""
        spans = (positions + 1) // self.temperature_span
        return 1 + self.temperature * jnp.log1p(spans.astype(jnp.float32))


class Block(nnx.Module):
    """One layer: attention, a gated feed-forward part and possibly experts."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c, rope = config, config.ropes[layer]
        unit_norm = partial(RMSNorm, eps=c.norm_eps, dtype=dtype, weighted=False)
        self.attention_norm = RMSNorm(c.width, c.eps, dtype)
        self.attention = Attention(
            c,
            layer,
            dtype,
            rngs,
            rope=rope,
            bias=c.bias,
            norm=unit_norm if c.qk_norm and rope else None,
            query_factor=c.query_factor if c.temperature and rope is None else None,
        )
        self.feed_norm = RMSNorm(c.width, c.eps, dtype)
        self.sparse = c.sparse[layer]
        hidden = c.expert_hidden if self.sparse else c.hidden
        self.feed = Feed(c.width, hidden, jax.nn.silu, dtype, rngs)
        if self.sparse:
            router = SigmoidRouter(c.width, c.experts, c.experts_per_token, dtype, rngs)
            sizes = c.width, c.expert_hidden, c.experts
            self.experts = Experts(*sizes, router, dtype, rngs, scales_inputs=True)

    def __call__(self, step: jaxkv.Step, x: jax.Array) -> tuple[jaxkv.Step, jax.Array]:
        """Apply the layer to `x`, `[R, T, width]`; return the next step and the new `x`."""
        step, out = self.attention(step, self.attention_norm(x))
        x = x + out
        y = self.feed_norm(x)
        out = self.feed(y)
        return step, x + (out + self.experts(y) if self.sparse else out)


class Llama4(LanguageModel):
    """Flax module of Llama 4."""

    block = Block


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of a model from its checkpoint."""
    c = checkpoint.config
    c.ignore("interleave_moe_layer_step no_rope_layer_interval")  # the class makes lists of them
    c.ignore("attention_chunk_size attn_scale floor_scale router_jitter_noise")  # may be unused
    layers = c["num_hidden_layers"]
    has_rope = tuple(c["no_rope_layers"])[:layers]  # 0 for a layer without rotation
    if len(has_rope) < layers:
        raise c.refusal("no_rope_layers", f"one for each of {layers} layers")
    kinds = c.layer_kinds("full_attention", "chunked_attention")
    chunks = "chunked_attention" in kinds
    window = Window.chunked(c["attention_chunk_size"]) if chunks else None
    sparse = tuple(layer in c["moe_layers"] for layer in range(layers))
    if any(sparse):
        c.check_chosen("num_local_experts")
    # Keys are normalised after the rotation, whose factor the norm cancels but for its epsilon.
    # Here they are normalised before, so that stored keys can be rotated further.
    rope, factor = replace(rope_of(checkpoint), interleaved=True), 1.0
    if c["use_qk_norm"]:
        rope, factor = replace(rope, attention_factor=1.0), rope.attention_factor
    return Config(
        **attention_fields(checkpoint),
        hidden=c["intermediate_size_mlp"],
        windows=tuple(window if kind == "chunked_attention" else None for kind in kinds),
        ropes=tuple(rope if one else None for one in has_rope),
        qk_norm=c["use_qk_norm"],
        norm_eps=c["rms_norm_eps"] / factor**2,
        temperature=c["attn_scale"] if c["attn_temperature_tuning"] else 0.0,
        temperature_span=c["floor_scale"],
        sparse=sparse,
        experts=c["num_local_experts"],
        experts_per_token=c["num_experts_per_tok"],
        expert_hidden=c["intermediate_size"],
        bias=c["attention_bias"],
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `Llama4`."""
    source = Sources(checkpoint)

    def experts(name: str) -> dict:
        both = f"{name}.experts.gate_up_proj"
        return {
            "router": source.linear(f"{name}.router"),
            "gate": source.tensor(both, arrange=lambda x: np.split(x, 2, axis=2)[0]),
            "up": source.tensor(both, arrange=lambda x: np.split(x, 2, axis=2)[1]),
            "down": source.tensor(f"{name}.experts.down_proj"),
        }

    def block(i: int, layer: str) -> dict:
        feed, sparse = f"{layer}.feed_forward", config.sparse[i]
        tree = {
            "attention_norm": source.norm(f"{layer}.input_layernorm"),
            "attention": source.attention(
                f"{layer}.self_attn", kv_heads=config.kv_heads, bias=config.bias
            ),
            "feed_norm": source.norm(f"{layer}.post_attention_layernorm"),
            "feed": source.gated_feed(f"{feed}.shared_expert" if sparse else feed),
        }
        return tree | {"experts": experts(feed)} if sparse else tree

    return source.language_model(block, config)


layers_of = gemma3.layers_of
MODULE = Llama4
