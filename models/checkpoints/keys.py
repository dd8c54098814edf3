"""Allowed keys of `config.json`, and the supported values of some of these keys.

An allowed key is read, or is checked for a supported value, or has no effect. All keys that are not
allowed raise an error, since an unread key could change the computation. Null values count as
absent, as in `transformers`.
"""

import json
from collections.abc import Mapping
from typing import Any

from models.errors import ModelError


def _words(keys: str) -> frozenset[str]:
    return frozenset(keys.split())


_EVERY = _words(
    "model_type vocab_size hidden_size num_hidden_layers tie_word_embeddings bos_token_id "
    "eos_token_id max_position_embeddings"
)
_ATTENDS = _words(
    "num_attention_heads num_key_value_heads head_dim intermediate_size rms_norm_eps rope_theta "
    "rope_scaling rope_parameters partial_rotary_factor"
)
_WINDOWS = _words("sliding_window use_sliding_window max_window_layers layer_types")
_MIXES = _words(
    "mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups "
    "mamba_n_heads time_step_limit"
)
_CHOOSES = _words("moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok")
_LATENT = _words(
    "first_k_dense_replace kv_lora_rank moe_intermediate_size n_group n_routed_experts "
    "n_shared_experts norm_topk_prob num_experts_per_tok num_nextn_predict_layers q_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim rope_interleave routed_scaling_factor topk_group "
    "topk_method v_head_dim"
)
# Keys that a family reads in addition to `_EVERY`.
_READ = {
    "deepseek_v2": _ATTENDS | _LATENT,
    "deepseek_v3": _ATTENDS | _LATENT,
    "falcon_h1": _ATTENDS
    | _MIXES
    | _words(
        "attention_in_multiplier attention_out_multiplier embedding_multiplier key_multiplier "
        "layer_types lm_head_multiplier mamba_d_ssm mamba_norm_before_gate mamba_rms_norm "
        "mlp_multipliers ssm_in_multiplier ssm_multipliers ssm_out_multiplier"
    ),
    "gemma3_text": _ATTENDS
    | _words(
        "attn_logit_softcapping final_logit_softcapping layer_types query_pre_attn_scalar "
        "rope_local_base_freq sliding_window sliding_window_pattern"
    ),
    "gpt_oss": _ATTENDS
    | _words(
        "attention_bias layer_types num_experts_per_tok num_local_experts quantization_config "
        "sliding_window swiglu_alpha swiglu_limit"
    ),
    "granitemoehybrid": _ATTENDS
    | _MIXES
    | _words(
        "attention_bias attention_multiplier embedding_multiplier layer_types logits_scaling "
        "mamba_proj_bias num_experts_per_tok num_local_experts position_embedding_type "
        "residual_multiplier shared_intermediate_size"
    ),
    "lfm2": (_ATTENDS - {"rms_norm_eps"})
    | _words(
        "block_auto_adjust_ff_dim block_ff_dim block_ffn_dim_multiplier block_multiple_of "
        "conv_L_cache full_attn_idxs layer_types norm_eps theta tie_embedding"
    ),
    "llama": _ATTENDS,
    "mamba2": _words(
        "conv_kernel expand head_dim layer_norm_epsilon n_groups num_heads state_size "
        "time_step_limit use_bias use_conv_bias"
    ),
    "mistral": _ATTENDS | {"sliding_window"},
    "olmo2": _ATTENDS,
    "qwen2": _ATTENDS | _WINDOWS,
    "qwen3": _ATTENDS | _WINDOWS,
    "qwen3_moe": _ATTENDS
    | _CHOOSES
    | _words("num_local_experts sliding_window use_sliding_window"),
    "qwen3_next": _ATTENDS
    | _CHOOSES
    | _words(
        "full_attention_interval layer_types linear_conv_kernel_dim linear_key_head_dim "
        "linear_num_key_heads linear_num_value_heads linear_value_head_dim "
        "shared_expert_intermediate_size"
    ),
    "recurrent_gemma": _ATTENDS
    | _words(
        "attention_bias attention_window_size block_types conv1d_width logits_soft_cap lru_width"
    ),
    "t5": _words(
        "d_ff d_kv d_model decoder_start_token_id feed_forward_proj head_dim intermediate_size "
        "layer_norm_epsilon num_attention_heads num_decoder_layers num_heads num_layers "
        "relative_attention_max_distance relative_attention_num_buckets "
        "scale_decoder_outputs"
    ),
}
# Supported values of keys for which `transformers` supports others.
_ONLY_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "use_mrope": (False,),
}
_ONLY: dict[str, dict[str, tuple[Any, ...]]] = {
    "deepseek_v2": {
        "moe_layer_freq": (1,),
        "norm_topk_prob": (False,),  # llama.cpp reads it, transformers does not
        "rope_interleave": (True,),
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
    },
    "deepseek_v3": {
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    "falcon_h1": {
        "mamba_proj_bias": (False,),
        "mamba_use_mlp": (True,),
        "projectors_bias": (False,),
    },
    "gemma3_text": {
        "hidden_act": (),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "tie_word_embeddings": (True,),
        "use_bidirectional_attention": (False,),
    },
    "gpt_oss": {"attention_bias": (False, True)},
    "granitemoehybrid": {
        "attention_bias": (False, True),
        "normalization_function": ("rmsnorm",),
        "position_embedding_type": ("nope", "rope"),
    },
    "lfm2": {"block_use_swiglu": (True,), "conv_bias": (False,), "use_pos_enc": (True,)},
    "llama": {"rope_interleaved": (False,)},
    "mamba2": {"rms_norm": (True,)},
    "qwen2": {"attention_bias": (True,)},
    "qwen3_moe": {
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
        "use_sliding_window": (False,),
    },
    "qwen3_next": {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
    "recurrent_gemma": {
        "attention_bias": (False, True),
        "embeddings_scale_by_sqrt_dim": (True,),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "hidden_act": (),
    },
    "t5": {"feed_forward_proj": ("relu", "gated-gelu"), "is_encoder_decoder": (True,)},
}
# Optional keys that repeat another.
_SAME = {
    "deepseek_v2": {"num_key_value_heads": "num_attention_heads"},
    "deepseek_v3": {"num_key_value_heads": "num_attention_heads"},
    "gpt_oss": {"experts_per_token": "num_experts_per_tok", "num_experts": "num_local_experts"},
    "lfm2": {
        "block_dim": "hidden_size",
        "block_norm_eps": "norm_eps",
        "conv_dim": "hidden_size",
        "conv_dim_out": "hidden_size",
        "num_heads": "num_attention_heads",
    },
}
_MEANINGLESS = _words(
    # Origin of the file and storage of the weights.
    "_commit_hash _name_or_path architectures auto_map custom_pipelines dtype finetuning_task "
    "is_llama_config license name_or_path tokenizer_class torch_dtype torchscript "
    "transformers.js_config transformers_version unsloth_fixed unsloth_optimized unsloth_version "
    # Training and initialisation.
    "attention_dropout attn_pdrop aux_loss_alpha classifier_dropout dropout dropout_rate "
    "embd_pdrop gradient_checkpointing init_method initializer_factor initializer_range "
    "neftune_noise_alpha output_router_logits resid_pdrop router_aux_loss_coef "
    "router_jitter_noise seq_aux "
    # Implementation choices of other programs.
    "_attn_implementation _attn_implementation_autoset _flash_attn_2_enabled attn_implementation "
    "cache_implementation chunk_size_feed_forward ep_size max_sequence_length model_max_length "
    "num_logits_to_keep output_past pretraining_tp pruned_heads tf_legacy_loss use_bfloat16 "
    "use_cache "
    # Outputs in addition to logits, and classification.
    "id2label label2id num_labels output_attentions output_hidden_states output_scores prefix "
    "problem_type return_dict return_dict_in_generate task_specific_params "
    # Generation.
    "bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id "
    "forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size "
    "num_beam_groups num_beams num_return_sequences pad_token_id remove_invalid_values "
    "repetition_penalty sep_token_id suppress_tokens temperature top_k top_p typical_p "
    # Overwritten by the model class.
    "cross_attention_hidden_size is_decoder tie_encoder_decoder"
)
_MEANINGLESS_IN = {
    "deepseek_v2": {"qk_head_dim"},  # the sum of two others
    "deepseek_v3": {"qk_head_dim"},
    "falcon_h1": {"mamba_chunk_size", "mlp_expansion_factor"},
    "gemma3_text": {"_sliding_window_pattern"},  # the class derives it from the other
    "gpt_oss": {"initial_context_length"},  # repeats a value of rope_scaling
    "granitemoehybrid": {"mamba_chunk_size"},
    "lfm2": _words(
        "block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init"
    ),
    "mamba2": _words(
        "chunk_size norm_before_gate rescale_prenorm_residual residual_in_fp32 time_step_floor "
        "time_step_max time_step_min time_step_rank"
    ),
    "qwen3_moe": {"max_window_layers"},  # windows are not supported
    "recurrent_gemma": {"final_w_init_variance_scale", "w_init_variance_scale"},
    "t5": {"dense_act_fn", "is_gated_act", "n_positions"},  # two repeat feed_forward_proj
}


def check_keys(family: str, config: Mapping[str, Any], source: str) -> None:
    """Check whether a model family supports the keys and values of a config.

    The argument `config` has the keys of the file, before `complete` converts them. Raises
    `ModelError` for an unknown family, an unknown key, or an unsupported value.
    """
    if family not in _READ:
        raise ModelError(
            f"{source}: expected a model_type of {', '.join(_READ)}, got {brief_json(family)}; "
            "give another model."
        )
    known_keys = _EVERY | _READ[family] | _MEANINGLESS | _MEANINGLESS_IN.get(family, set())
    only = _ONLY_EVERYWHERE | _ONLY.get(family, {})
    same = _SAME.get(family, {})
    for key, value in config.items():
        if value is None:
            continue
        if key in same:
            same_value = config.get(same[key])
            if value != same_value:
                raise key_error(key, f"{brief_json(same_value)}, as {same[key]}", value, source)
        elif key in only:
            if value not in only[key]:
                expected = " or ".join(map(brief_json, only[key])) or "left out"
                raise key_error(key, expected, value, source)
        elif key not in known_keys:
            raise key_error(key, "left out", value, source)


def brief_json(value: Any) -> str:
    """Return a value as JSON, shortened to 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def key_error(key: str, expected: str, value: Any, source: str) -> ModelError:
    """Return the `ModelError` for an unsupported key or value."""
    return ModelError(
        f"{source}: expected {key} {expected}, got {brief_json(value)}; such models are not "
        "supported, so give another one."
    )
