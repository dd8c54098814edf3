"""The metadata of a GGUF file in the words of Hugging Face's `config.json`."""

from typing import Any

from models.checkpoints.gguf import recurrent
from models.checkpoints.gguf.metadata import Metadata
from models.kinds import whole

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
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
}
_SCALING = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "attention_factor": "attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def config_from_gguf(arch: str, get: Metadata, factors: list | None = None) -> dict[str, Any]:
    """The config that a file's metadata tells; what it does not tell is `None`.

    Args:
        arch: the file's name for the architecture, with which most keys begin.
        get: the metadata.
        factors: the values of the tensor `rope_freqs.weight`, if there is one.

    Raises:
        ModelError: when a value that others are computed from is out of its range.
    """
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
        # Only the largest Gemma 3 (62 layers) scales its queries by something else than head_dim.
        largest = config["num_hidden_layers"] == 62 and hidden and heads
        config["query_pre_attn_scalar"] = hidden // heads if largest else config["head_dim"]
        pattern = get(f"{arch}.attention.sliding_window_pattern")
        if isinstance(pattern, list):  # newer files say it layer by layer
            kinds = ("full_attention", "sliding_attention")
            config["layer_types"] = [kinds[bool(slides)] for slides in pattern]
        else:
            config["sliding_window_pattern"] = pattern
    if arch in recurrent.ARCHITECTURES:
        config |= recurrent.config_from_gguf(arch, get, config)
    config["rope_scaling"] = _scaling(arch, get, factors)
    turned = get.checked(f"{arch}.rope.dimension_count", count)
    if turned and config["head_dim"] and turned != config["head_dim"]:
        config["partial_rotary_factor"] = turned / config["head_dim"]
    return config


def _scaling(arch: str, get: Metadata, factors: list | None) -> dict[str, Any] | None:
    """How positions are stretched, in Hugging Face's words.

    Files of Llama 3.1 and later do not name their rule ("llama3"); they carry what it comes to.
    That is given as `{"rope_type": "factors", "factors": [...]}`: D/2 numbers, by which the
    frequencies are divided one by one.
    """
    if factors is not None:
        return {"rope_type": "factors", "factors": factors}
    kind = get(f"{arch}.rope.scaling.type")
    old = get(f"{arch}.rope.scale_linear")  # how linear stretching was written at first
    if kind is None and old not in (None, 1.0):
        return {"rope_type": "linear", "factor": old}
    if kind in (None, "none"):
        return None
    found = {key: get(f"{arch}.rope.scaling.{name}") for key, name in _SCALING.items()}
    return {"rope_type": kind} | {key: value for key, value in found.items() if value is not None}
