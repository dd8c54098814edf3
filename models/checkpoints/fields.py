"""Types and ranges of config fields, checked before a model is built."""

from collections.abc import Mapping
from typing import Any

from models.kinds import FLAG, TOKEN, WORD, Kind, check, exactly, number, refusal, several, whole

LAYERS = 4096
"""Largest number of layers."""

_WIDTH = whole(1, 2**20)  # numbers of a token
_HEAD = whole(1, 2**14)  # numbers of a head; a rotary embedding is a tuple of half as many
_HEADS = whole(1, 2**14)
_POSITIONS = whole(1, 2**31 - 2)
_EPSILON = number(0, 1)
_FACTOR = number(-1e6, 1e6)
_POSITIVE = number(0, 1e6, above=True)
_BASE = number(1, 1e30, above=True)
_LIMIT = Kind(
    words='a number of at least 0, or {"__float__": "Infinity"}',
    holds=lambda value: (
        (type(value) in (int, float) and value >= 0) or value == {"__float__": "Infinity"}
    ),
)

_CONFIG = {
    "attention_bias": FLAG,
    "attention_in_multiplier": _FACTOR,
    "attention_multiplier": _FACTOR,
    "attention_out_multiplier": _FACTOR,
    "attention_window_size": _POSITIONS,
    "attn_logit_softcapping": _POSITIVE,
    "block_auto_adjust_ff_dim": FLAG,
    "block_ffn_dim_multiplier": _POSITIVE,
    "block_multiple_of": _WIDTH,
    "block_types": several(WORD, LAYERS),
    "conv1d_width": whole(2, 1024),
    "conv_L_cache": whole(2, 1024),
    "conv_kernel": whole(2, 1024),
    "embedding_multiplier": _FACTOR,
    "decoder_start_token_id": TOKEN,
    "expand": _POSITIVE,
    "feed_forward_proj": WORD,
    "final_logit_softcapping": _POSITIVE,
    "first_k_dense_replace": whole(0, LAYERS),
    "full_attention_interval": whole(1, LAYERS),
    "full_attn_idxs": several(whole(0, LAYERS - 1), LAYERS),
    "head_dim": _HEAD,
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "key_multiplier": _FACTOR,
    "kv_lora_rank": _HEAD,
    "layer_norm_epsilon": _EPSILON,
    "layer_types": several(WORD, LAYERS),
    "linear_conv_kernel_dim": whole(2, 1024),
    "linear_key_head_dim": _HEAD,
    "linear_num_key_heads": _HEADS,
    "linear_num_value_heads": _HEADS,
    "linear_value_head_dim": _HEAD,
    "lm_head_multiplier": _FACTOR,
    "logits_scaling": _POSITIVE,
    "logits_soft_cap": _POSITIVE,
    "lru_width": _WIDTH,
    "mamba_conv_bias": FLAG,
    "mamba_d_conv": whole(2, 1024),
    "mamba_d_head": _HEAD,
    "mamba_d_ssm": _WIDTH,
    "mamba_d_state": _HEAD,
    "mamba_expand": _POSITIVE,
    "mamba_n_groups": _HEADS,
    "mamba_n_heads": _HEADS,
    "mamba_norm_before_gate": FLAG,
    "mamba_proj_bias": FLAG,
    "mamba_rms_norm": FLAG,
    "max_position_embeddings": _POSITIONS,
    "max_window_layers": whole(0, LAYERS),
    "mlp_multipliers": exactly(_FACTOR, 2),
    "moe_intermediate_size": _WIDTH,
    "n_group": _HEADS,
    "n_groups": _HEADS,
    "n_routed_experts": whole(1, 2**14),
    "n_shared_experts": whole(1, 2**10),
    "norm_eps": _EPSILON,
    "norm_topk_prob": FLAG,
    "num_attention_heads": _HEADS,
    "num_experts": whole(1, 2**14),
    "num_experts_per_tok": whole(0, 2**14),
    "num_heads": _HEADS,
    "num_hidden_layers": whole(1, LAYERS),
    "num_layers": whole(1, LAYERS),
    "num_key_value_heads": _HEADS,
    "num_local_experts": whole(0, 2**14),
    "num_nextn_predict_layers": whole(0, LAYERS),
    "partial_rotary_factor": number(0, 1, above=True),
    "position_embedding_type": WORD,
    "q_lora_rank": _WIDTH,
    "qk_nope_head_dim": _HEAD,
    "qk_rope_head_dim": _HEAD,
    "query_pre_attn_scalar": _POSITIVE,
    "relative_attention_max_distance": _POSITIONS,
    "relative_attention_num_buckets": whole(4, 2**14),
    "residual_multiplier": _FACTOR,
    "rms_norm_eps": _EPSILON,
    "rope_interleave": FLAG,
    "rope_local_base_freq": _BASE,
    "rope_theta": _BASE,
    "routed_scaling_factor": _POSITIVE,
    "scale_decoder_outputs": FLAG,
    "shared_expert_intermediate_size": _WIDTH,
    "shared_intermediate_size": _WIDTH,
    "sliding_window": _POSITIONS,
    "sliding_window_pattern": whole(1, LAYERS),
    "ssm_in_multiplier": _FACTOR,
    "ssm_multipliers": exactly(_FACTOR, 5),
    "ssm_out_multiplier": _FACTOR,
    "state_size": _HEAD,
    "swiglu_alpha": _POSITIVE,
    "swiglu_limit": _POSITIVE,
    "tie_word_embeddings": FLAG,
    "time_step_limit": exactly(_LIMIT, 2),
    "topk_group": _HEADS,
    "topk_method": WORD,
    "use_bias": FLAG,
    "use_conv_bias": FLAG,
    "use_sliding_window": FLAG,
    "v_head_dim": _HEAD,
    "vocab_size": whole(1, 2**24),
}
_ROPE = {
    "attention_factor": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "factor": _POSITIVE,
    "factors": several(_POSITIVE, 2**13),
    "high_freq_factor": _POSITIVE,
    "low_freq_factor": _POSITIVE,
    "mscale": number(0, 1e6),
    "mscale_all_dim": number(0, 1e6),
    "original_max_position_embeddings": _POSITIONS,
    "partial_rotary_factor": number(0, 1, above=True),
    "rope_theta": _BASE,
    "rope_type": WORD,
    "truncate": FLAG,
    "type": WORD,
}


def check_config(config: Mapping[str, Any], source: str) -> None:
    """Check the known fields of a config; raise `ModelError` for the first invalid field."""
    for name, kind in _CONFIG.items():
        if name in config:
            check(config[name], kind, name, source)


def check_rope(scaling: Any, name: str, source: str) -> None:
    """Check the fields of a rope scaling object; raise `ModelError` for an invalid field."""
    if not isinstance(scaling, dict):
        raise refusal(scaling, "an object", name, source)
    for key, kind in _ROPE.items():
        if scaling.get(key) is not None:
            check(scaling[key], kind, f"{name}.{key}", source)
