"""Metadata of GGUF files, converted to the keys of Hugging Face's `config.json`."""

from collections.abc import Container, Mapping
from typing import Any

from models.checkpoints.gguf import gpt_oss, recurrent
from models.checkpoints.gguf.metadata import Metadata
from models.checkpoints.keys import brief_json, key_error
from models.kinds import whole

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
    "rope_theta": "rope.freq_base",
}
_SCALING = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}

_READ = {*_CONFIG.values(), *(f"rope.scaling.{name}" for name in _SCALING.values())} | {
    "rope.dimension_count",
    "rope.scale_linear",
    "rope.scaling.type",
}
"""Metadata keys that are read for every architecture, without the prefix."""
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


def config_from_gguf(arch: str, get: Metadata, factors: list | None = None) -> dict[str, Any]:
    """Convert the metadata of a GGUF file to a config.

    The value of a config key is None if the file does not have the corresponding metadata key.

    Args:
      arch: architecture name in the file, the prefix of most keys.
      get: metadata of the file.
      factors: values of the tensor `rope_freqs.weight`; None if the file has no such tensor.

    Raises:
      ModelError: If a metadata key or its value is unsupported.
      ModelError: If a value is out of range and other values are computed from it.
    """
    known_keys = _READ | _READ_IN.get(arch, set()) | _MEANINGLESS | {"attention.value_length"}
    _check(f"{arch}.", known_keys, _ONLY, get)  # llama.cpp reads no other keys
    config = {key: get(f"{arch}.{name}") for key, name in _CONFIG.items()}
    for key in ("bos", "eos"):
        config[f"{key}_token_id"] = get(f"tokenizer.ggml.{key}_token_id")
    count = whole(0, 2**24)
    for key in ("num_attention_heads", "hidden_size", "head_dim"):
        config[key] = get.checked(f"{arch}.{_CONFIG[key]}", count)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if config["head_dim"] is None and heads and hidden:
        config["head_dim"] = hidden // heads
    if arch == "gemma3":
        # Only the largest Gemma 3 (62 layers) does not scale its queries by head_dim.
        largest = config["num_hidden_layers"] == 62 and hidden and heads
        config["query_pre_attn_scalar"] = hidden // heads if largest else config["head_dim"]
        config["rope_local_base_freq"] = get(f"{arch}.rope.freq_base_swa")
        config["sliding_window"] = get(f"{arch}.attention.sliding_window")
        pattern = get(f"{arch}.attention.sliding_window_pattern")
        if isinstance(pattern, list):  # newer files have a list by layer
            kinds = ("full_attention", "sliding_attention")
            config["layer_types"] = [kinds[bool(slides)] for slides in pattern]
        else:
            config["sliding_window_pattern"] = pattern
    if arch in CONVERTERS:
        config |= CONVERTERS[arch].config_from_gguf(arch, get, config)
    values = get(f"{arch}.attention.value_length")
    if values not in (None, config["head_dim"]):
        expected = f"{config['head_dim']}, the size of a key"
        raise key_error(f"{arch}.attention.value_length", expected, values, get.source)
    config["rope_scaling"] = _scaling(arch, get, factors)
    turned = get.checked(f"{arch}.rope.dimension_count", count)
    if turned and config["head_dim"] and turned != config["head_dim"]:
        config["partial_rotary_factor"] = turned / config["head_dim"]
    return config


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
            raise key_error(name, "left out next to rope_freqs.weight", factor, get.source)
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
            raise key_error(key, expected, value, get.source)
