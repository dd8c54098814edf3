"""Types and ranges of settings, checked before a model is built.

Settings that are out of range take much memory, or cannot be computed with.
"""

from collections.abc import Mapping
from typing import Any

from models.kinds import FLAG, TOKEN, WORD, Kind, check, exactly, number, several, whole

LAYERS = 4096
"""Largest number of layers."""

_HEAD = whole(1, 2**14)  # a rotary embedding is a tuple of half as many numbers
_LIMIT = Kind(
    words="a number of at least 0",
    holds=lambda value: type(value) in (int, float) and value >= 0,
)
_OBJECT = Kind(words="an object", holds=lambda value: isinstance(value, dict))
_KINDS: tuple[tuple[Kind, str], ...] = (
    (
        whole(1, 2**20),  # numbers of a token
        "block_multiple_of d_ff d_model hidden_size intermediate_size lru_width "
        "moe_intermediate_size q_lora_rank shared_expert_intermediate_size "
        "shared_intermediate_size",
    ),
    (
        _HEAD,
        "d_kv head_dim kv_lora_rank linear_key_head_dim linear_num_key_heads "
        "linear_num_value_heads linear_value_head_dim mamba_d_head mamba_d_state mamba_n_groups "
        "mamba_n_heads n_group n_groups n_routed_experts n_shared_experts num_attention_heads "
        "num_experts num_heads num_key_value_heads qk_nope_head_dim qk_rope_head_dim state_size "
        "topk_group v_head_dim",
    ),
    (whole(0, 2**14), "num_experts_per_tok num_local_experts"),
    (whole(1, LAYERS), "num_decoder_layers num_hidden_layers num_layers sliding_window_pattern"),
    (whole(0, LAYERS), "first_k_dense_replace num_mtp_layers"),
    (whole(2, 1024), "conv1d_width conv_L_cache conv_kernel linear_conv_kernel_dim mamba_d_conv"),
    (
        whole(1, 2**31 - 2),
        "attention_window_size max_position_embeddings original_max_position_embeddings "
        "relative_attention_max_distance sliding_window",
    ),
    (whole(4, 2**14), "relative_attention_num_buckets"),
    (whole(1, 2**24), "vocab_size"),
    (TOKEN, "decoder_start_token_id"),
    (number(0, 1), "layer_norm_epsilon norm_eps rms_norm_eps"),
    (
        number(-1e6, 1e6),
        "attention_in_multiplier attention_multiplier attention_out_multiplier "
        "embedding_multiplier key_multiplier lm_head_multiplier residual_multiplier "
        "ssm_in_multiplier ssm_out_multiplier",
    ),
    (
        number(0, 1e6, above=True),
        "attention_factor attn_logit_softcapping beta_fast beta_slow block_ffn_dim_multiplier "
        "factor final_logit_softcapping high_freq_factor logits_scaling logits_soft_cap "
        "low_freq_factor query_pre_attn_scalar routed_scaling_factor swiglu_alpha swiglu_limit",
    ),
    (number(0, 1e6), "mscale mscale_all_dim"),
    (number(1, 1e30, above=True), "rope_theta"),
    (number(0, 1, above=True), "partial_rotary_factor"),
    (several(number(0, 1e6, above=True), 2**13), "factors"),
    (several(WORD, LAYERS), "layer_types"),
    (exactly(number(-1e6, 1e6), 2), "mlp_multipliers"),
    (exactly(number(-1e6, 1e6), 5), "ssm_multipliers"),
    (exactly(_LIMIT, 2), "time_step_limit"),
    (WORD, "feed_forward_proj position_embedding_type rope_type topk_method"),
    (
        FLAG,
        "attention_bias block_auto_adjust_ff_dim mamba_conv_bias mamba_norm_before_gate "
        "mamba_proj_bias mamba_rms_norm norm_topk_prob rope_interleave scale_decoder_outputs "
        "tie_word_embeddings truncate use_bias use_conv_bias",
    ),
)
_KIND_OF = {key: kind for kind, keys in _KINDS for key in keys.split()}


def check_ranges(config: Mapping[str, Any], source: str, within: str = "") -> None:
    """Check the values of known keys, also inside `rope_parameters`.

    Args:
      config: value of each key; None counts as absent.
      source: file name, for messages.
      within: name of the object, for messages.

    Raises:
      ModelError: For the first value of another type, or out of range.
    """
    for key, value in config.items():
        if key in _KIND_OF and value is not None:
            check(value, _KIND_OF[key], within + key, source)
        elif key in ("rope_parameters", "full_attention", "sliding_attention") and value:
            check(value, _OBJECT, key, source)
            check_ranges(value, source, f"{within}{key}.")
