"""GGUF files of Llama 4.

llama.cpp has constants instead of several settings: chunks of 8192 positions in three of four
layers, no rotation in the fourth, the factors of its queries, and norms of queries and keys unless
there are 128 experts.
"""

from models.checkpoints.gguf.architecture import ATTENTION, Architecture, Settings, Shapes
from models.checkpoints.gguf.architectures.gpt_oss import transpose_experts
from models.checkpoints.gguf.metadata import INT, Metadata


def _settings(get: Metadata, config: Settings, shapes: Shapes) -> Settings:
    layers, experts = range(config["num_hidden_layers"]), get("expert_count", INT)
    step = get.required("interleave_moe_layer_step", INT)
    rotated = [(i + 1) % 4 != 0 for i in layers]
    return {
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "intermediate_size": get.required("expert_feed_forward_length", INT),
        "intermediate_size_mlp": config["intermediate_size"],
        "layer_types": ["chunked_attention" if one else "full_attention" for one in rotated],
        "moe_layers": [i for i in layers if step and (i + 1) % step == 0],
        "no_rope_layers": [int(one) for one in rotated],
        "num_experts_per_tok": get("expert_used_count", INT),
        "num_local_experts": experts,
        "use_qk_norm": experts != 128,
    }


ARCHITECTURES = {
    "llama4": Architecture(
        family="llama4_text",
        layer=ATTENTION
        | {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            "ffn_gate_inp": "feed_forward.router",
            "ffn_gate_exps.weight": "feed_forward.experts.gate_up_proj.first",
            "ffn_up_exps.weight": "feed_forward.experts.gate_up_proj.second",
            "ffn_down_exps.weight": "feed_forward.experts.down_proj",
            "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
            "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
            "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
        },
        settings=_settings,
        convert=transpose_experts,
    )
}
