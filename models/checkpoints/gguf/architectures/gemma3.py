"""GGUF files of Gemma 3, in which norm weights are 1 larger."""

from models.checkpoints.config import Config
from models.checkpoints.gguf.architecture import Architecture, Settings, Shapes, less_one
from models.checkpoints.gguf.architectures.llama import LAYER
from models.checkpoints.gguf.metadata import FLAGS, FLOAT, INT, Metadata
from models.checkpoints.ranges import LAYERS
from models.checkpoints.tensor import Tensor
from models.kinds import check, whole

GEMMA = LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def window_settings(get: Metadata, config: Settings, interval: int) -> Settings:
    """Return the settings of windows; by default, every `interval`-th layer has none."""
    layers = config["num_hidden_layers"]
    pattern = get("attention.sliding_window_pattern", default=interval)
    by_layer = isinstance(pattern, list)  # newer files have a flag for each layer
    kind = FLAGS if by_layer else whole(1, LAYERS)
    check(pattern, kind, f"{get.prefix}attention.sliding_window_pattern", get.source)
    if not by_layer:
        pattern = [(layer + 1) % pattern for layer in range(layers)]
    theta = get("rope.freq_base_swa", FLOAT, 10000.0)
    return {
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern],
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
        "sliding_window": get("attention.sliding_window", INT),
    }


def _settings(get: Metadata, config: Settings, shapes: Shapes) -> Settings:
    # Only the largest model (62 layers) does not scale its queries by head_dim.
    c = config
    largest = c["num_hidden_layers"] == 62 and c["hidden_size"] and c["num_attention_heads"]
    size = c["hidden_size"] // c["num_attention_heads"] if largest else c["head_dim"]
    windows = window_settings(get, config, 6)
    if not windows["sliding_window"]:  # all layers attend to all positions, for example of Rnj-1
        windows |= {"sliding_window": 1, "layer_types": ["full_attention"] * c["num_hidden_layers"]}
    return windows | {
        "final_logit_softcapping": get("final_logit_softcapping", FLOAT) or None,
        "query_pre_attn_scalar": size,
    }


def _convert(name: str, tensor: Tensor, config: Config) -> Tensor:
    return less_one(tensor) if name.endswith("norm.weight") else tensor


ARCHITECTURES = {
    "gemma3": Architecture(
        family="gemma3_text",
        layer=GEMMA,
        settings=_settings,
        convert=_convert,
    )
}
