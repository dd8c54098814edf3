"""Configs in one form: defaults filled in, and older keys of `config.json` converted."""

from collections.abc import Mapping
from typing import Any

from models.checkpoints.fields import check_config
from models.checkpoints.stretches import lift_rope
from models.errors import ModelError
from models.kinds import refusal

# Defaults of absent keys in config.json. Files of Gemma 3 leave out most keys.
_FAMILY = {
    "deepseek_v2": {
        "first_k_dense_replace": 0,
        "n_group": 1,
        "norm_topk_prob": False,
        "rope_interleave": True,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "topk_method": "greedy",
    },
    "deepseek_v3": {
        "first_k_dense_replace": 3,
        "n_group": 8,
        "norm_topk_prob": True,
        "rope_interleave": True,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "topk_method": "noaux_tc",
    },
    "falcon_h1": {
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "key_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "mamba_conv_bias": True,
        "mamba_norm_before_gate": True,
        "mlp_multipliers": (1.0, 1.0),
        "ssm_in_multiplier": 1.0,
        "ssm_multipliers": (1.0,) * 5,
        "ssm_out_multiplier": 1.0,
        "time_step_limit": (0.0, float("inf")),
    },
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gpt_oss": {
        "attention_bias": True,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "granitemoehybrid": {
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "num_experts_per_tok": 0,
        "num_local_experts": 0,
        "position_embedding_type": None,
        "residual_multiplier": 1.0,
        "time_step_limit": (0.0, float("inf")),
    },
    "lfm2": {
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
    "mamba2": {
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": (0.0, float("inf")),
        "use_bias": False,
        "use_conv_bias": True,
    },
    "olmo2": {"rms_norm_eps": 1e-5},
    "qwen3_moe": {"norm_topk_prob": False, "use_sliding_window": False},
    "qwen3_next": {
        "full_attention_interval": 4,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
    },
    "recurrent_gemma": {"partial_rotary_factor": 0.5},
    "t5": {
        "decoder_start_token_id": 0,
        "feed_forward_proj": "relu",
        "layer_norm_epsilon": 1e-6,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32,
    },
}
# Newer name of each older or family-specific key. The value of an older key replaces that of the
# newer key; of two older keys, the last one counts.
_OLDER = {
    "lfm2": {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "t5": {
        "d_ff": "intermediate_size",
        "d_kv": "head_dim",
        "d_model": "hidden_size",
        "num_heads": "num_attention_heads",
        "num_layers": "num_hidden_layers",
        "num_decoder_layers": "num_hidden_layers",
    },
}
# Families whose head is tied if tie_word_embeddings is absent; used without tensors.
_TIED = {"gemma3_text", "lfm2", "recurrent_gemma"}
_VOCABULARY = {"gemma3_text": 262208}
_ANY = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "sliding_window": None}
_ATTENDS = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_NEEDED = (*_ATTENDS, "intermediate_size")
_MIXES = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
_CHOOSES = ("moe_intermediate_size", "num_experts", "num_experts_per_tok")
_LATENT = (
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
)
_NEEDED_BY = {
    "deepseek_v2": (*_LATENT, *_NEEDED),
    "deepseek_v3": (*_LATENT, *_NEEDED),
    "falcon_h1": (*_MIXES, *_NEEDED),
    "gpt_oss": ("num_local_experts", *_NEEDED),
    "granitemoehybrid": (
        "shared_intermediate_size",
        "attention_multiplier",
        "logits_scaling",
        *_MIXES,
        *_ATTENDS,
    ),
    "mamba2": (
        "hidden_size",
        "num_hidden_layers",
        "num_heads",
        "head_dim",
        "state_size",
        "n_groups",
        "conv_kernel",
    ),
    "qwen3_moe": (*_CHOOSES, *_ATTENDS),
    "qwen3_next": (
        "head_dim",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "shared_expert_intermediate_size",
        *_CHOOSES,
        *_ATTENDS,
    ),
    "recurrent_gemma": ("attention_window_size", "conv1d_width", "logits_soft_cap", *_NEEDED),
    "t5": ("num_layers", "head_dim", *_NEEDED),
}
_EXPANDS = [("expand", "num_heads", "head_dim"), ("mamba_expand", "mamba_n_heads", "mamba_d_head")]
_KINDS = {
    "attention": "full_attention",
    "conv": "linear_attention",
    "mamba": "linear_attention",
    "recurrent": "linear_attention",
}
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_KINDS_OF = {
    "deepseek_v2": {_FULL},
    "deepseek_v3": {_FULL},
    "falcon_h1": {_FULL},
    "granitemoehybrid": {_FULL, _LINEAR},
    "lfm2": {_FULL, _LINEAR},
    "mamba2": {_LINEAR},
    "olmo2": {_FULL},
    "qwen3_moe": {_FULL},
    "qwen3_next": {_FULL, _LINEAR},
    "recurrent_gemma": {_SLIDING, _LINEAR},
}


def complete(
    config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], source: str
) -> dict[str, Any]:
    """Return a config with all keys that models read, with values checked for their range.

    - `rope_theta` and `rope_scaling` are at the top level, see `models.checkpoints.stretches`.
    - `layer_types` has "full_attention", "sliding_attention" or "linear_attention" (recurrent) for
      each layer. `sliding_window` is None if `use_sliding_window` is False.
    - `intermediate_size` is the width of the feed-forward tensors. For LFM2 files it is computed
      from several keys.
    - `tie_word_embeddings` is True if there is no tensor `lm_head.weight`, or if it is True in the
      file. The value in a T5 file is ignored.
    - Missing `attention_bias`, `mamba_rms_norm` and `vocab_size` are inferred from the tensors.

    Args:
      config: keys of the file, with `model_type`.
      shapes: shapes of the tensors by Hugging Face name.
      source: file name, for messages.

    Raises:
      ModelError: If a key is missing, is out of range, or contradicts another key.
    """
    out = {key: value for key, value in _with_new_keys(config).items() if value is not None}
    lift_rope(out, source)
    out = _ANY | _FAMILY.get(out["model_type"], {}) | out
    check_config({key: value for key, value in out.items() if value is not None}, source)
    for key in _NEEDED_BY.get(out["model_type"], _NEEDED):
        if key not in out:
            raise ModelError(
                f"{source}: expected {key} in the config of a {out['model_type']!r} model, got "
                "none; add it."
            )
    if "qk_rope_head_dim" in out:  # DeepSeek files use head_dim otherwise, or lack it
        out["head_dim"] = out["qk_rope_head_dim"]
    if out.get("topk_method") == "greedy":  # greedy selection ignores groups
        out["n_group"] = out["topk_group"] = 1
    if heads := out.get("num_attention_heads"):
        out.setdefault("num_key_value_heads", heads)
        out.setdefault("head_dim", out["hidden_size"] // heads)
    if out["model_type"] == "lfm2" and out["block_auto_adjust_ff_dim"]:
        _adjust_hidden(out, source)
    if "attention_window_size" in out:  # all attention of RecurrentGemma has a window
        out["sliding_window"] = out["attention_window_size"]
    if "time_step_limit" in out:  # JSON lacks infinity, so newer files use a dict
        limits = (x["__float__"] if isinstance(x, dict) else x for x in out["time_step_limit"])
        out["time_step_limit"] = tuple(map(float, limits))
    if out.get("use_sliding_window") is False:
        out["sliding_window"] = None
    if out["model_type"] == "t5":
        out["scale_decoder_outputs"] = _scales(out)
    out.setdefault("layer_types", _layer_types(out))
    out["layer_types"] = [_KINDS.get(kind, kind) for kind in out["layer_types"]]
    # The defaults depend on the class that wrote the file, so the tensors decide.
    tied = bool(out.get("tie_word_embeddings")) and out["model_type"] != "t5"
    out["tie_word_embeddings"] = tied or "lm_head.weight" not in shapes
    for name in ("model.embed_tokens.weight", "backbone.embeddings.weight"):
        if shapes.get(name):
            out.setdefault("vocab_size", shapes[name][0])
    out.setdefault("vocab_size", None)  # loading will report the missing embedding
    out.setdefault("attention_bias", "model.layers.0.self_attn.q_proj.bias" in shapes)
    out.setdefault("mamba_rms_norm", "model.layers.0.mamba.norm.weight" in shapes)
    _check_agreement(out, source)
    return out


def implied_tensors(config: Mapping[str, Any], source: str) -> dict[str, tuple[int, ...]]:
    """Return shapes of the tensors that `complete` looks up, inferred from a config alone.

    The shapes are incomplete: at most the first dimension is given. An absent key has the default
    of the family's class in `transformers`. Raises `ModelError` if the vocabulary size is unknown.
    """
    family = config["model_type"]
    size = config.get("vocab_size") or _VOCABULARY.get(family)
    if not size:
        raise ModelError(
            f"{source}: expected vocab_size in config.json, got none; add it, since no weights are "
            "read."
        )
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (size,)}
    tied = _scales(config) if family == "t5" else _with_new_keys(config).get("tie_word_embeddings")
    if not (family in _TIED if tied is None else tied):
        shapes["lm_head.weight"] = (size,)
    if family == "qwen2":
        shapes["model.layers.0.self_attn.q_proj.bias"] = ()
    return shapes


def _scales(config: Mapping[str, Any]) -> bool:
    """Return whether a T5 model scales the input of its head.

    If `scale_decoder_outputs` is absent, the input is scaled unless `tie_word_embeddings` is False.
    """
    scales = config.get("scale_decoder_outputs")
    return config.get("tie_word_embeddings") is not False if scales is None else scales


def _with_new_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    older = _OLDER.get(config["model_type"], {}).items()
    return dict(config) | {new: config[old] for old, new in older if config.get(old) is not None}


def _adjust_hidden(config: dict[str, Any], source: str) -> None:
    """Set `intermediate_size` in place to the width of LFM2's tensors."""
    c, multiple = config, config["block_multiple_of"]
    size = int(c["block_ffn_dim_multiplier"] * int(2 * c["intermediate_size"] / 3))
    c["intermediate_size"] = -(-size // multiple) * multiple
    check_config({"intermediate_size": c["intermediate_size"]}, source)


def _layer_types(config: dict[str, Any]) -> list[str]:
    layers = range(config["num_hidden_layers"])
    if kinds := config.get("block_types"):  # RecurrentGemma repeats this list
        kinds = [kinds[layer % len(kinds)] for layer in layers]
        return [_SLIDING if kind == "attention" else kind for kind in kinds]
    if config["model_type"] in ("granitemoehybrid", "mamba2"):
        return [_LINEAR for _ in layers]
    if config["model_type"] == "lfm2":
        attends = config.get("full_attn_idxs", layers)
        return [_FULL if layer in attends else _LINEAR for layer in layers]
    if config["model_type"] == "qwen3_next":
        interval = config["full_attention_interval"]
        return [_LINEAR if (layer + 1) % interval else _FULL for layer in layers]
    if config["sliding_window"] is None:
        slides = [False for _ in layers]
    elif pattern := config.get("sliding_window_pattern"):  # every n-th layer has full attention
        slides = [(layer + 1) % pattern != 0 for layer in layers]
    else:  # the first layers of Qwen, by default 0, have full attention
        slides = [layer >= config.get("max_window_layers", 0) for layer in layers]
    return [_SLIDING if slide else _FULL for slide in slides]


def _check_agreement(config: dict[str, Any], source: str) -> None:
    """Raise `ModelError` if the config fields that a family uses contradict each other."""
    c, family = config, config["model_type"]
    kinds = _KINDS_OF.get(family, {_FULL, _SLIDING})
    for kind in c["layer_types"]:
        if kind not in kinds:
            raise refusal(kind, f"one of {', '.join(sorted(kinds))}", "layer_types", source)
    if len(c["layer_types"]) != c["num_hidden_layers"]:
        layers = f"one for each of {c['num_hidden_layers']} layers"
        raise refusal(c["layer_types"], layers, "layer_types", source)
    if _SLIDING in c["layer_types"] and c["sliding_window"] is None:
        raise refusal(None, "a number of positions", "sliding_window", source)
    whole_parts = [("num_attention_heads", "num_key_value_heads")]
    if family == "mamba2":
        whole_parts = [("num_heads", "n_groups")]
    elif family == "falcon_h1":
        whole_parts.append(("mamba_n_heads", "mamba_n_groups"))
        inner = c["mamba_n_heads"] * c["mamba_d_head"]
        if c.get("mamba_d_ssm", inner) != inner:
            expected = f"mamba_n_heads times mamba_d_head ({inner})"
            raise refusal(c["mamba_d_ssm"], expected, "mamba_d_ssm", source)
        if c["mamba_rms_norm"] and c["mamba_norm_before_gate"]:
            raise refusal(True, "False", "mamba_norm_before_gate", source)
    elif family == "granitemoehybrid":
        whole_parts.append(("mamba_n_heads", "mamba_n_groups"))
        if c["num_local_experts"] and "intermediate_size" not in c:
            raise refusal(None, "a width of experts", "intermediate_size", source)
    elif family in ("qwen3_moe", "qwen3_next"):
        if family == "qwen3_next":
            whole_parts.append(("linear_num_value_heads", "linear_num_key_heads"))
        experts, chosen = c["num_experts"], c["num_experts_per_tok"]
        if not 1 <= chosen <= experts:
            raise refusal(chosen, f"1 to {experts} experts", "num_experts_per_tok", source)
    elif family == "t5":
        name, exact = "relative_attention_max_distance", c["relative_attention_num_buckets"] // 2
        if c[name] <= exact:
            raise refusal(c[name], f"more than half the buckets ({exact})", name, source)
    elif family in ("deepseek_v2", "deepseek_v3"):
        _check_routing(c, source)
    elif family == "recurrent_gemma":
        if c["head_dim"] * c["num_attention_heads"] != c["hidden_size"]:
            expected = "hidden_size divided by num_attention_heads"
            raise refusal(c["head_dim"], expected, "head_dim", source)
        c.setdefault("lru_width", c["hidden_size"])
        whole_parts.append(("lru_width", "num_attention_heads"))
    experts, chosen = c.get("num_local_experts", 0), c.get("num_experts_per_tok", 0)
    if (experts or family == "gpt_oss") and not 1 <= chosen <= experts:
        raise refusal(chosen, f"1 to {experts} experts", "num_experts_per_tok", source)
    for key, *sizes in _EXPANDS:
        if key in c and "mamba_d_ssm" not in c:
            inner = c[sizes[0]] * c[sizes[1]]
            if int(c[key] * c["hidden_size"]) != inner:
                raise refusal(
                    c[key], f"{' times '.join(sizes)} ({inner}) divided by hidden_size", key, source
                )
    for all_, part in whole_parts:
        if c[all_] % c[part]:
            raise refusal(c[all_], f"a multiple of {part} ({c[part]})", all_, source)
    if c.get("head_dim") == 0:
        raise refusal(c["hidden_size"], "at least num_attention_heads", "hidden_size", source)


def _check_routing(config: dict[str, Any], source: str) -> None:
    """Raise `ModelError` if the fields for expert routing of DeepSeek contradict each other."""
    c, experts = config, config["n_routed_experts"]
    newer = c["model_type"] == "deepseek_v3"
    groups, least = c["n_group"], 2 if newer else 1  # number of experts that rank a group
    if experts % groups or experts // groups < least:
        expected = f"a divisor of n_routed_experts ({experts}) with {least} or more for each"
        raise refusal(groups, expected, "n_group", source)
    if c["topk_group"] > groups:
        raise refusal(c["topk_group"], f"1 to {groups} groups", "topk_group", source)
    max_chosen = c["topk_group"] * (experts // groups)
    if not 1 <= c["num_experts_per_tok"] <= max_chosen:
        expected = f"1 to {max_chosen} experts"
        raise refusal(c["num_experts_per_tok"], expected, "num_experts_per_tok", source)
