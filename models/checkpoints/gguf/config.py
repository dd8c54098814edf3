"""Metadata of GGUF files, converted to the keys of Hugging Face's `config.json`."""

from collections.abc import Mapping
from typing import Any

from models.checkpoints.gguf.architecture import Architecture, Settings, Shapes
from models.checkpoints.gguf.metadata import FLOAT, INT, Metadata
from models.checkpoints.ranges import LAYERS
from models.kinds import refusal, several, whole

# Config key of Hugging Face -> key of the file, after the architecture's name.
_REQUIRED = {
    "hidden_size": ("embedding_length", INT),
    "max_position_embeddings": ("context_length", INT),
}
"""Keys that llama.cpp requires for every architecture, each with the kind of the value."""
_OPTIONAL = {
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
}
_COUNT = whole(0, 2**14)
"""A number of a layer."""
_SCALING = {
    "factor": ("factor", FLOAT),
    "original_max_position_embeddings": ("original_context_length", INT),
    "beta_fast": ("yarn_beta_fast", FLOAT),
    "beta_slow": ("yarn_beta_slow", FLOAT),
}
# Supported values; llama.cpp has others too.
_ONLY = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "nextn_predict_layers": (0,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "ssm.dt_b_c_rms": (False,),
}
# These repeat the tensors, or concern embeddings, the converter or training.
_MEANINGLESS = "vocab_size pooling_type tensor_data_layout rope.scaling.finetuned"


def count_layers(arch: Architecture, get: Metadata) -> int:
    """Return the number of layers, without those that predict further tokens."""
    further = get("nextn_predict_layers", INT, 0) if arch.predicts else 0
    return get.required("block_count", whole(1, LAYERS)) - further


def config_from_gguf(
    arch: Architecture,
    get: Metadata,
    shapes: Shapes,
    factors: list | None = None,
) -> Settings:
    """Convert the metadata of a GGUF file to settings with the keys of `config.json`.

    The value of a setting is None if the file does not have the metadata key.

    Args:
      arch: architecture of the file.
      get: metadata of the architecture.
      shapes: shapes of the tensors by Hugging Face name.
      factors: values of the tensor `rope_freqs.weight`; None if the file has no such tensor.

    Raises:
      ModelError: If a metadata key or its value is unsupported, or a key that llama.cpp requires is
        missing.
      ModelError: If a value is out of range and other values are computed from it.
    """
    config = {key: get.required(name, kind) for key, (name, kind) in _REQUIRED.items()}
    config |= {"model_type": arch.family, "num_hidden_layers": count_layers(arch, get)}
    config["rms_norm_eps"] = get.required(arch.eps, FLOAT)
    for key, name in _OPTIONAL.items():
        config[key] = _by_layer(get, name, config) if name in arch.by_layer else get(name, INT)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if config["head_dim"] is None and heads and hidden:
        config["head_dim"] = hidden // heads
    if config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = heads
    biased = [f"model.layers.0.self_attn.{letter}_proj.bias" in shapes for letter in "qo"]
    config["attention_bias"], config["attention_output_bias"] = biased
    config["tie_word_embeddings"] = "lm_head.weight" not in shapes
    for name in ("model.embed_tokens.weight", "backbone.embeddings.weight"):
        if shapes.get(name):
            config["vocab_size"] = shapes[name][0]
    theta = get("rope.freq_base", FLOAT, 10000.0)
    config["rope_parameters"] = _scaling(get, factors) | {"rope_theta": theta}
    config |= arch.settings(get, config, shapes)
    get.ignore(_MEANINGLESS)
    size = (config["head_dim"],)
    sizes = {"attention.value_length": size, "rope.dimension_count": size}
    get.check_all_read(_ONLY | sizes)  # llama.cpp reads no other keys
    return config


def _by_layer(get: Metadata, name: str, config: Mapping[str, Any]) -> list[int]:
    """Return the number of each layer under a key, which has a number or a list of numbers."""
    value, layers = get(name, default=0), config["num_hidden_layers"]
    if not isinstance(value, list):
        return [get(name, _COUNT, 0)] * layers
    if len(get(name, several(_COUNT, LAYERS))) < layers:
        expected = f"a number for each of {layers} layers"
        raise refusal(value, expected, get.prefix + name, get.source)
    return value[:layers]


def _scaling(get: Metadata, factors: list | None) -> dict[str, Any]:
    """Return the rope scaling in Hugging Face's form.

    GGUF files of Llama 3.1 and later have one divisor for each of the D/2 frequencies instead of
    the "llama3" rule. The divisors are returned as `{"rope_type": "factors", "factors": [...]}`.
    """
    kind = get("rope.scaling.type")
    found = {key: get(f"rope.scaling.{name}", form) for key, (name, form) in _SCALING.items()}
    older_factor = get("rope.scale_linear", FLOAT)
    factor = found["factor"] or older_factor
    if kind is None and factor not in (None, 0, 1):  # default rule of llama.cpp
        kind = "linear"
    if factors is not None:
        if kind not in (None, "none"):
            raise get.unsupported("rope.scaling.factor", "left out next to rope_freqs.weight")
        return {"rope_type": "factors", "factors": factors}
    if kind in (None, "none"):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    return {"rope_type": kind} | {key: value for key, value in found.items() if value is not None}
