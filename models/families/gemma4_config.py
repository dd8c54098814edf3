"""Configuration of Gemma 4."""

from dataclasses import dataclass

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.config import Config as Settings
from models.families import gemma3, per_layer
from models.families.caches import windows_of
from models.families.language_model import attention_fields
from models.families.ropes import rope_of


@dataclass(frozen=True, kw_only=True)
class Config(gemma3.Config):
    """Configuration of Gemma 4; other fields are in `gemma3` and `models.families.language_model`.

    sizes: number of key/value heads and size of a head in each layer.
    same_values: whether keys are also the values in layers with full attention.
    cache_layers: layer number in the cache for each layer. A layer with the number of an earlier
      layer writes nothing.
    shared_hidden: inner size of the feed-forward parts of layers that write nothing.
    bias: whether attention projections have biases.
    inputs: sizes of the inputs of layers; None for no inputs.
    experts: number of experts in a layer, of which a token selects `experts_per_token`. An expert
      has the inner size `expert_hidden`. If the number is 0, a layer has no experts.
    """

    sizes: tuple[tuple[int, int], ...]
    same_values: bool
    cache_layers: tuple[int, ...]
    shared_hidden: int
    bias: bool
    inputs: per_layer.InputSizes | None
    experts: int = 0
    experts_per_token: int = 0
    expert_hidden: int = 0

    def writes(self, layer: int) -> bool:
        """Return whether a layer writes keys and values."""
        return self.cache_layers[layer] == layer

    def has_same_values(self, layer: int) -> bool:
        """Return whether keys of a layer are also its values."""
        return self.same_values and self.windows[layer] is None


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
        scale=1.0,
        windows=windows,
        ropes=tuple(ropes),
        final_softcap=c.get("final_logit_softcapping"),
        sizes=tuple(sizes[kind] for kind in kinds),
        same_values=c["attention_k_eq_v"],
        cache_layers=per_layer.cache_layers(c, windows),
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
