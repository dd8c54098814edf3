"""Gemma 4: inputs of each layer, and last layers that attend to keys of earlier layers."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv import Step
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.config import Config as Settings
from models.families import gemma3, per_layer, shared_keys
from models.families.caches import windows_of
from models.families.gemma4_experts import BesideExperts, beside_weights
from models.families.language_model import attention_fields
from models.families.layers import gelu
from models.families.ropes import rope_of
from models.families.sources import Sources

ARCHITECTURES = ("gemma4_text",)


@dataclass(frozen=True, kw_only=True)
class Config(shared_keys.Config):
    """Configuration of Gemma 4; other fields are in `models.families.shared_keys`.

    sizes: number of key/value heads and size of a head in each layer.
    same_values: whether keys are also the values in layers with full attention.
    shared_hidden: inner size of the feed-forward parts of layers that write nothing.
    experts: number of experts in a layer, of which a token selects `experts_per_token`. An expert
      has the inner size `expert_hidden`. If the number is 0, a layer has no experts.
    """

    sizes: tuple[tuple[int, int], ...]
    same_values: bool
    shared_hidden: int
    experts: int = 0
    experts_per_token: int = 0
    expert_hidden: int = 0

    def head_sizes(self, layer: int) -> tuple[int, int]:
        """Return the number of key/value heads of a layer, and the size of a head."""
        return self.sizes[layer]

    def has_same_values(self, layer: int) -> bool:
        """Return whether keys of a layer are also its values."""
        return self.same_values and self.windows[layer] is None


class Block(shared_keys.Block):
    """One layer: attention, a feed-forward part, experts, then the input of the layer."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        hidden = c.hidden if c.writes(layer) else c.shared_hidden
        super().__init__(c, layer, hidden, gelu, dtype, rngs)
        if c.experts:
            self.experts = BesideExperts(c, dtype, rngs)
        self.factor = nnx.Param(jnp.ones(1, dtype))

    def __call__(
        self, step: Step, x: jax.Array, inputs: jax.Array | None
    ) -> tuple[Step, jax.Array]:
        """Apply the layer to `x`, `[R, T, width]`, with its inputs `[R, T, P]`, if it has any."""
        step, out = self.attention(step, self.attention_norm(x))
        x = x + self.after_attention_norm(out)
        out = self.feed(self.feed_norm(x))
        if self.config.experts:
            out = self.experts(x, out)
        x = x + self.after_feed_norm(out)
        if inputs is not None:
            x = x + self.gate(x, inputs)
        return step, x * self.factor[...].reshape(1, 1, 1)


class Gemma4(gemma3.Gemma3):
    """Flax module of Gemma 4."""

    block = Block
    less_one = False

    def __init__(self, config: Config, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        if config.inputs is not None:
            self.inputs = per_layer.LayerInputs(config.inputs, config, config.layers, dtype, rngs)

    def run_blocks(self, step: Step, x: jax.Array) -> tuple[Step, jax.Array]:
        """Apply all layers to `x`, `[R, T, width]`; return the next step and the new `x`."""
        inputs = [None] * self.config.layers
        if self.config.inputs is not None:
            inputs = self.inputs(step.tokens, x)
        for block, of_layer in zip(self.blocks, inputs, strict=True):
            step, x = block(step, x, of_layer)
        return step, x


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of a model from its checkpoint."""
    c, windows = checkpoint.config, windows_of(checkpoint)
    if c.get("use_bidirectional_attention") not in (None, "vision"):  # "vision": of images alone
        raise c.refusal("use_bidirectional_attention", "vision or null")
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    sizes = _sizes_of(c, kinds)
    ropes = [rope_of(checkpoint, kind, head_dim=sizes[kind][1]) for kind in kinds]
    hidden, experts = c["intermediate_size"], {}
    if c["enable_moe_block"]:
        c.check_chosen("num_experts", "top_k_experts")
        keys = "num_experts", "top_k_experts", "moe_intermediate_size"
        fields = "experts", "experts_per_token", "expert_hidden"
        experts = {field: c[key] for field, key in zip(fields, keys, strict=True)}
    c.ignore("num_experts top_k_experts moe_intermediate_size")  # without experts
    inputs = per_layer.input_sizes(c) if c.get("hidden_size_per_layer_input") else None
    c.ignore("vocab_size_per_layer_input")  # without inputs
    return Config(
        **attention_fields(checkpoint),
        **experts,
        hidden=hidden,
        windows=windows,
        ropes=tuple(ropes),
        final_softcap=c.get("final_logit_softcapping"),
        sizes=tuple(sizes[kind] for kind in kinds),
        same_values=c["attention_k_eq_v"],
        cache_layers=shared_keys.cache_layers(c, windows),
        shared_hidden=hidden * (2 if c["use_double_wide_mlp"] else 1),
        bias=c["attention_bias"],
        inputs=inputs,
    )


def _sizes_of(c: Settings, kinds: list[str]) -> dict[str, tuple[int, int]]:
    """Return the number of key/value heads and the size of a head, by kind of layer."""
    base = {key: c[key] for key in ("num_key_value_heads", "head_dim")}
    others, sizes = c.get("per_layer_config", {}), {}
    for layer, kind in enumerate(kinds):
        of_layer = base | others.get(layer, {})
        if of_layer.keys() != base.keys() or sizes.setdefault(kind, of_layer) != of_layer:
            raise c.refusal("per_layer_config", "sizes of heads, the same for layers of a kind,")
        if c["num_attention_heads"] % of_layer["num_key_value_heads"]:
            raise c.refusal("num_attention_heads", f"a multiple of {of_layer}")
    return {kind: tuple(of_layer.values()) for kind, of_layer in sizes.items()}


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `Gemma4`."""
    source, c = Sources(checkpoint), config

    def block(i: int, layer: str) -> dict:
        tree = shared_keys.block_weights(source, c, i, layer)
        tree["factor"] = source.tensor(f"{layer}.layer_scalar")
        if c.experts:
            tree["experts"] = beside_weights(source, layer, c.width, c.experts)
        return tree

    tree = source.language_model(block, c)
    if c.inputs is not None:
        tree["inputs"] = per_layer.layer_input_weights(source, c.layers)
    return tree


layers_of = shared_keys.layers_of
MODULE = Gemma4
