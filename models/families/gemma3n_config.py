"""Configuration of Gemma 3n."""

from dataclasses import dataclass

from jaxkv.rope import Rope
from jaxkv.window import Window
from models.checkpoints.checkpoint import Checkpoint
from models.families import per_layer
from models.families.caches import windows_of
from models.families.language_model import AttentionConfig, attention_fields
from models.families.ropes import rope_of


@dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    """Configuration of Gemma 3n; other fields are in `models.families.language_model`.

    ropes: rotary embedding of each layer.
    hidden: inner size of the feed-forward part of each layer.
    sparsity: expected share of gates of each layer that are replaced by 0; 0 for none.
    cache_layers: layer number in the cache for each layer. A layer with the number of an earlier
      layer writes nothing.
    inputs: sizes of the inputs of layers.
    vectors: number of vectors of a token, A.
    active: index of the vector that layers read and write.
    scaled: whether that vector is multiplied by factors before the input of the layer is added.
    rank: inner size of the map beside attention (LAuReL).
    final_softcap: soft limit of logits; None for no limit.
    """

    windows: tuple[Window | None, ...]
    ropes: tuple[Rope, ...]
    hidden: tuple[int, ...]
    sparsity: tuple[float, ...]
    cache_layers: tuple[int, ...]
    inputs: per_layer.InputSizes
    vectors: int
    active: int
    scaled: bool
    rank: int
    bias: bool
    final_softcap: float | None

    @property
    def layers(self) -> int:
        """Number of layers, L."""
        return len(self.windows)

    def writes(self, layer: int) -> bool:
        """Return whether a layer writes keys and values."""
        return self.cache_layers[layer] == layer


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of a model from its checkpoint."""
    c, windows = checkpoint.config, windows_of(checkpoint)
    c.ignore("altup_coef_clip")  # of training
    full, local = (rope_of(checkpoint, f"{kind}_attention") for kind in ("full", "sliding"))
    if not 0 <= c["altup_active_idx"] < c["altup_num_inputs"]:
        raise c.refusal("altup_active_idx", f"less than {c['altup_num_inputs']}")
    if any(not share < 1 for share in c["activation_sparsity_pattern"]):
        raise c.refusal("activation_sparsity_pattern", "numbers below 1")
    if not c["hidden_size_per_layer_input"]:
        raise c.refusal("hidden_size_per_layer_input", "at least 1")
    return Config(
        **attention_fields(checkpoint),
        windows=windows,
        ropes=tuple(full if window is None else local for window in windows),
        hidden=tuple(c["intermediate_size"]),
        sparsity=tuple(map(float, c["activation_sparsity_pattern"])),
        cache_layers=per_layer.cache_layers(c, windows),
        inputs=per_layer.input_sizes(c),
        vectors=c["altup_num_inputs"],
        active=c["altup_active_idx"],
        scaled=c["altup_correct_scale"],
        rank=c["laurel_rank"],
        bias=c["attention_bias"],
        final_softcap=c.get("final_logit_softcapping"),
    )
