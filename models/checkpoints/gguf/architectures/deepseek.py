"""GGUF files of DeepSeek V2 and V3, and of V3.2.

A head's matrices for keys and for values are two tensors; the matrix for keys is transposed. Models
whose router computes sigmoids are of V3. Files have one of the two factors of YaRN (`mscale` and
`mscale_all_dim`), and llama.cpp assumes that they are equal. Groups of experts of V2 are ranked by
their best expert, as in Hugging Face's form; llama.cpp ranks them by their two best.
"""

from models.checkpoints.config import Config
from models.checkpoints.gguf.architecture import Architecture, Settings, Shapes
from models.checkpoints.gguf.architectures.llama import EXPERTS, LAYER
from models.checkpoints.gguf.metadata import FLOAT, INT, Metadata
from models.checkpoints.tensor import Tensor, join
from models.kinds import FLAG, number

_SOFTMAX, _SIGMOID = 1, 2
_FACTOR = number(0, 1e9, above=True)
"""A tenth of a factor of YaRN."""
_LAYER = {
    **LAYER,
    **EXPERTS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # of older files
    "attn_k_b.weight": "self_attn.kv_b_proj.weight.first",
    "attn_v_b.weight": "self_attn.kv_b_proj.weight.second",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_INDEXER = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}


def _settings(get: Metadata, config: Settings, shapes: Shapes) -> Settings:
    heads, rotated = config["num_attention_heads"], get.required("rope.dimension_count", INT)
    rank = get.required("attention.kv_lora_rank", INT)
    # Newer files have sizes of latents and sizes of heads.
    suffix = "" if get("attention.key_length_mla", INT) is None else "_mla"
    key, value = (get.required(f"attention.{of}_length{suffix}", INT) for of in ("key", "value"))
    get.ignore("attention.value_length")
    return {
        "model_type": "deepseek_v3" if _has_sigmoids(get) else "deepseek_v2",
        "first_k_dense_replace": get("leading_dense_block_count", INT, 0),
        "head_dim": rotated,
        "kv_lora_rank": rank,
        "moe_intermediate_size": get.required("expert_feed_forward_length", INT),
        "n_routed_experts": get("expert_count", INT),
        "n_shared_experts": get.required("expert_shared_count", INT),
        "num_experts_per_tok": get("expert_used_count", INT),
        "num_key_value_heads": heads,
        "q_lora_rank": get("attention.q_lora_rank", INT) or None,
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "rope_interleave": True,
        "rope_parameters": _rope(get, config["rope_parameters"]),
        "routed_scaling_factor": get("expert_weights_scale", FLOAT) or 1.0,
        "v_head_dim": value,
        **_group_settings(get),
    }


def _has_sigmoids(get: Metadata) -> bool:
    """Return whether the router computes sigmoids instead of a softmax."""
    found = get("expert_gating_func", INT, _SOFTMAX)
    if found not in (0, _SOFTMAX, _SIGMOID):
        raise get.unsupported("expert_gating_func", f"{_SOFTMAX} or {_SIGMOID}")
    normalised = get("expert_weights_norm", FLAG, False)
    if normalised and found != _SIGMOID:
        raise get.unsupported("expert_weights_norm", "false with a softmax")
    return found == _SIGMOID


def _group_settings(get: Metadata) -> Settings:
    """Return the settings of groups of experts."""
    groups = get("expert_group_count", INT, 0) or 1
    return {
        "n_group": groups,
        "norm_topk_prob": get("expert_weights_norm", FLAG, False),
        "topk_group": get("expert_group_used_count", INT, 0) or 1,
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
    }


def _rope(get: Metadata, rope: Settings) -> Settings:
    """Return the parameters of a rotary embedding with the two factors of YaRN."""
    scales = rope["rope_type"] == "yarn"
    factor = (get.required if scales else get)("rope.scaling.yarn_log_multiplier", _FACTOR)
    return rope | dict.fromkeys(("mscale", "mscale_all_dim"), factor and 10 * factor)


def _indexed_settings(get: Metadata, config: Settings, shapes: Shapes) -> Settings:
    if not _has_sigmoids(get):
        raise get.unsupported("expert_gating_func", f"{_SIGMOID}")
    found, layers = _settings(get, config, shapes), config["num_hidden_layers"]
    dense = found["first_k_dense_replace"]
    return found | {
        "model_type": "deepseek_v32",
        "index_n_heads": get.required("attention.indexer.head_count", INT),
        "index_head_dim": get.required("attention.indexer.key_length", INT),
        "index_topk": get.required("attention.indexer.top_k", INT),
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(layers)],
    }


def _join(name: str, keys: Tensor, values: Tensor, config: Config) -> Tensor:
    """Join matrices `[H, rank, key]` and `[H, value, rank]`, those of a head next to each other."""
    both = join([keys.map(lambda x: x.swapaxes(1, 2)), values], axis=1)
    return both.map(lambda x: x.reshape(-1, x.shape[2]))


ARCHITECTURES = {
    "deepseek2": Architecture(family="deepseek_v3", layer=_LAYER, settings=_settings, join=_join),
    "deepseek32": Architecture(
        family="deepseek_v32",
        layer=_LAYER | _INDEXER,
        predicts=True,
        settings=_indexed_settings,
        join=_join,
    ),
}
