"""Metadata of GGUF files, converted to the keys of Hugging Face's `config.json`."""

from collections.abc import Mapping
from typing import Any

from models.checkpoints.gguf import gpt_oss, recurrent
from models.checkpoints.gguf.metadata import FLOAT, INT, Metadata
from models.checkpoints.ranges import LAYERS
from models.kinds import Kind, check, several, whole

CONVERTERS = {
    "gpt-oss": gpt_oss,
    **dict.fromkeys(("mamba2", "granitehybrid", "lfm2", "falcon-h1"), recurrent),
}
"""Module that converts tensors and keys of an architecture."""

# Config key of Hugging Face -> key of the file, after the architecture's name.
_REQUIRED = {
    "hidden_size": ("embedding_length", INT),
    "num_hidden_layers": ("block_count", whole(1, LAYERS)),
    "max_position_embeddings": ("context_length", INT),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", FLOAT),
}
"""Keys that llama.cpp requires for every architecture, each with the kind of the value."""
_OPTIONAL = {
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
}
_HAS_LISTS = ("granitehybrid", "lfm2")
"""Architectures whose files have the number of key/value heads of each layer."""
_FLAG_OF_LAYER = Kind(
    words="true or false, or 0 or 1",
    accepts=lambda value: type(value) in (bool, int) and value in (0, 1),
)
_MAY_NOT_ROTATE = ("granitehybrid", "mamba2")
"""Architectures of models without a rotary embedding."""
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


def config_from_gguf(
    arch: str, get: Metadata, shapes: Mapping[str, tuple[int, ...]], factors: list | None = None
) -> dict[str, Any]:
    """Convert the metadata of a GGUF file to settings with the keys of `config.json`.

    The value of a setting is None if the file does not have the metadata key.

    Args:
      arch: architecture name in the file, the prefix of most keys.
      get: metadata of the architecture.
      shapes: shapes of the tensors by Hugging Face name.
      factors: values of the tensor `rope_freqs.weight`; None if the file has no such tensor.

    Raises:
      ModelError: If a metadata key or its value is unsupported, or a key that llama.cpp requires is
        missing.
      ModelError: If a value is out of range and other values are computed from it.
    """
    config = {key: get.required(name, kind) for key, (name, kind) in _REQUIRED.items()}
    for key, name in _OPTIONAL.items():
        lists = name == "attention.head_count_kv" and arch in _HAS_LISTS
        config[key] = get(name, recurrent.BY_LAYER if lists else INT)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if config["head_dim"] is None and heads and hidden:
        config["head_dim"] = hidden // heads
    if config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = heads
    biased = [f"model.layers.0.self_attn.{letter}_proj.bias" in shapes for letter in "qo"]
    config["attention_bias"], config["attention_output_bias"] = biased
    config["mamba_rms_norm"] = "model.layers.0.mamba.norm.weight" in shapes
    config["tie_word_embeddings"] = "lm_head.weight" not in shapes
    for name in ("model.embed_tokens.weight", "backbone.embeddings.weight"):
        if shapes.get(name):
            config["vocab_size"] = shapes[name][0]
    if arch in CONVERTERS:
        config |= CONVERTERS[arch].config_from_gguf(arch, get, config)
    if get("attention.value_length", INT) not in (None, config["head_dim"]):
        raise get.unsupported("attention.value_length", f"{config['head_dim']}, the size of a key")
    none = (0,) if arch in _MAY_NOT_ROTATE else ()
    if get("rope.dimension_count", INT) not in (None, *none, config["head_dim"]):
        raise get.unsupported("rope.dimension_count", f"{config['head_dim']}, the size of a head")
    theta = get("rope.freq_base", FLOAT, 10000.0)
    config["rope_parameters"] = _scaling(arch, get, factors) | {"rope_theta": theta}
    if arch == "gemma3":
        config |= _gemma3(get, config)
    get.ignore(_MEANINGLESS)
    get.check_all_read(_ONLY)  # llama.cpp reads no other keys
    return config


def _gemma3(get: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of Gemma 3 to add or to replace."""
    # Only the largest model (62 layers) does not scale its queries by head_dim.
    c, layers = config, config["num_hidden_layers"]
    largest = layers == 62 and c["hidden_size"] and c["num_attention_heads"]
    pattern = get("attention.sliding_window_pattern", default=6)
    by_layer = isinstance(pattern, list)  # newer files have a flag for each layer
    kind = several(_FLAG_OF_LAYER, LAYERS) if by_layer else whole(1, LAYERS)
    check(pattern, kind, "gemma3.attention.sliding_window_pattern", get.source)
    if not by_layer:
        pattern = [(layer + 1) % pattern for layer in range(layers)]
    theta = get("rope.freq_base_swa", FLOAT, 10000.0)
    return {
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern],
        "query_pre_attn_scalar": (
            c["hidden_size"] // c["num_attention_heads"] if largest else c["head_dim"]
        ),
        "rope_parameters": {
            "full_attention": c["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
        "sliding_window": get("attention.sliding_window", INT),
    }


def _scaling(arch: str, get: Metadata, factors: list | None) -> dict[str, Any]:
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
    if arch == "gpt-oss":  # trained without rounding, which llama.cpp applies to all models
        found["truncate"] = False
    return {"rope_type": kind} | {key: value for key, value in found.items() if value is not None}
