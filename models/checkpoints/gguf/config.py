"""Metadata of GGUF files, converted to the keys of Hugging Face's `config.json`."""

import re
from collections.abc import Container, Mapping
from typing import Any

from models.checkpoints.gguf import gpt_oss, recurrent
from models.checkpoints.gguf.metadata import Metadata
from models.checkpoints.ranges import LAYERS
from models.errors import ModelError, brief_json, unsupported
from models.kinds import FLAG, check, either, number, several, whole

CONVERTERS = {arch: module for module in (gpt_oss, recurrent) for arch in module.READ}
"""Module that converts tensors and keys of an architecture."""

# Config key of Hugging Face -> key of the file, after the architecture's name.
_CONFIG = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_REQUIRED = (
    *("attention.layer_norm_rms_epsilon", "block_count", "context_length", "embedding_length"),
)
"""Metadata keys that llama.cpp requires for every architecture, without the prefix."""
_REQUIRED_IN = {
    "falcon-h1": recurrent.SSM,
    "gpt-oss": ("attention.sliding_window", "expert_feed_forward_length"),
    "granitehybrid": recurrent.SSM,
    "lfm2": ("shortconv.l_cache",),
    "mamba2": recurrent.SSM,
}
_MAY_NOT_ROTATE = ("granitehybrid", "mamba2")
"""Architectures of models without a rotary embedding."""
_SCALING = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}

_READ = {*_CONFIG.values(), *(f"rope.scaling.{name}" for name in _SCALING.values())} | {
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
}
"""Metadata keys that are read for every architecture, without the prefix."""
_OTHER_TYPES = {
    "attention.sliding_window_pattern",
    "rope.scaling.finetuned",
    "rope.scaling.type",
}
"""Metadata keys with texts, flags or lists; all others have numbers."""
_FLOATS = re.compile("epsilon|scal(?!ing.original)|freq|yarn")
_FLOAT, _INT = number(-1e30, 1e30), whole(0, 2**31 - 2)
_READ_IN = {
    "gemma3": {
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
    },
    **gpt_oss.READ,
    **recurrent.READ,
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
_MEANINGLESS = {"vocab_size", "pooling_type", "tensor_data_layout", "rope.scaling.finetuned"}
_TOKENIZER = frozenset(
    # Keys that are read, then keys of infilling, padding, classifiers and other tokenizers.
    [
        *("model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token"),
        *("add_space_prefix", "bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id"),
        *("unknown_token_id", "padding_token_id", "mask_token_id", "cls_token_id"),
        *("seperator_token_id", "separator_token_id", "token_type_count"),
        *("precompiled_charsmap", "remove_extra_whitespaces"),
        *(f"fim_{part}_token_id" for part in ("pre", "suf", "mid", "pad", "rep", "sep")),
        *(f"{part}_token_id" for part in ("prefix", "suffix", "middle")),
    ]
)


def config_from_gguf(
    arch: str, get: Metadata, shapes: Mapping[str, tuple[int, ...]], factors: list | None = None
) -> dict[str, Any]:
    """Convert the metadata of a GGUF file to settings with the keys of `config.json`.

    The value of a setting is None if the file does not have the metadata key.

    Args:
      arch: architecture name in the file, the prefix of most keys.
      get: metadata of the file.
      shapes: shapes of the tensors by Hugging Face name.
      factors: values of the tensor `rope_freqs.weight`; None if the file has no such tensor.

    Raises:
      ModelError: If a metadata key or its value is unsupported, or a key that llama.cpp requires is
        missing.
      ModelError: If a value is out of range and other values are computed from it.
    """
    for name in (*_REQUIRED, *_REQUIRED_IN.get(arch, ())):
        if get(f"{arch}.{name}") is None:
            raise ModelError(
                f"{get.source}: expected {arch}.{name}, which llama.cpp requires, got none; "
                "download it again."
            )
    known_keys = _READ | _READ_IN.get(arch, set()) | _MEANINGLESS | {"attention.value_length"}
    _check(f"{arch}.", known_keys, _ONLY, get)  # llama.cpp reads no other keys
    by_layer = {"attention.head_count_kv"} if arch in ("granitehybrid", "lfm2") else set()
    for name in known_keys - _MEANINGLESS - _OTHER_TYPES - by_layer:
        get.checked(f"{arch}.{name}", _FLOAT if _FLOATS.search(name) else _INT)
    get.checked(f"{arch}.block_count", whole(1, LAYERS))
    config = {key: get(f"{arch}.{name}") for key, name in _CONFIG.items()}
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
    values = get(f"{arch}.attention.value_length")
    if values not in (None, config["head_dim"]):
        expected = f"{config['head_dim']}, the size of a key"
        raise unsupported(f"{arch}.attention.value_length", expected, values, get.source)
    rotated = get(f"{arch}.rope.dimension_count")
    none = (0,) if arch in _MAY_NOT_ROTATE else ()
    if rotated not in (None, *none, config["head_dim"]):
        expected = f"{config['head_dim']}, the size of a head"
        raise unsupported(f"{arch}.rope.dimension_count", expected, rotated, get.source)
    rope = _scaling(arch, get, factors)
    rope["rope_theta"] = get(f"{arch}.rope.freq_base", 10000.0)
    config["rope_parameters"] = rope
    if arch == "gemma3":
        config |= _gemma3(get, config)
    return config


def _gemma3(get: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of Gemma 3 to add or to replace."""
    # Only the largest model (62 layers) does not scale its queries by head_dim.
    c, layers = config, config["num_hidden_layers"]
    largest = layers == 62 and c["hidden_size"] and c["num_attention_heads"]
    key = "gemma3.attention.sliding_window_pattern"
    pattern = get(key, 6)
    if isinstance(pattern, list):  # newer files have a flag for each layer
        check(pattern, several(either(FLAG, whole(0, 1)), LAYERS), key, get.source)
    else:
        check(pattern, whole(1, LAYERS), key, get.source)
        pattern = [(layer + 1) % pattern for layer in range(layers)]
    theta = get("gemma3.rope.freq_base_swa", 10000.0)
    return {
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern],
        "query_pre_attn_scalar": (
            c["hidden_size"] // c["num_attention_heads"] if largest else c["head_dim"]
        ),
        "rope_parameters": {
            "full_attention": c["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
        "sliding_window": get("gemma3.attention.sliding_window"),
    }


def _scaling(arch: str, get: Metadata, factors: list | None) -> dict[str, Any]:
    """Return the rope scaling in Hugging Face's form.

    GGUF files of Llama 3.1 and later have one divisor for each of the D/2 frequencies instead of
    the "llama3" rule. The divisors are returned as `{"rope_type": "factors", "factors": [...]}`.
    """
    kind, name = get(f"{arch}.rope.scaling.type"), f"{arch}.rope.scaling.factor"
    factor = get(name) or get(f"{arch}.rope.scale_linear")  # key of older files
    if kind is None and factor not in (None, 0, 1):  # default rule of llama.cpp
        kind = "linear"
    if factors is not None:
        if kind not in (None, "none"):
            raise unsupported(name, "left out next to rope_freqs.weight", factor, get.source)
        return {"rope_type": "factors", "factors": factors}
    if kind in (None, "none"):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    found = {key: get(f"{arch}.rope.scaling.{name}") for key, name in _SCALING.items()}
    if arch == "gpt-oss":  # trained without rounding, which llama.cpp applies to all models
        found["truncate"] = False
    return {"rope_type": kind} | {key: value for key, value in found.items() if value is not None}


def check_tokenizer(get: Metadata) -> None:
    """Raise `ModelError` for the first unsupported tokenizer key or value."""
    _check(
        "tokenizer.ggml.", _TOKENIZER, {"add_eos_token": (False,), "add_sep_token": (False,)}, get
    )


def _check(
    prefix: str, known_keys: Container[str], only: Mapping[str, tuple], get: Metadata
) -> None:
    for key in get.keys(prefix):
        name = key.removeprefix(prefix)
        if name in known_keys:
            continue
        value = get(key)
        if value not in only.get(name, ()):
            expected = " or ".join(map(brief_json, only.get(name, ()))) or "left out"
            raise unsupported(key, expected, value, get.source)
