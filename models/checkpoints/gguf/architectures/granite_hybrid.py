"""GGUF files of Granite 4, in which gate and up projections are two tensors."""

from models.checkpoints.config import Config
from models.checkpoints.gguf.architecture import ATTENTION, Architecture, Settings, Shapes
from models.checkpoints.gguf.architectures.llama import part_pairs
from models.checkpoints.gguf.architectures.mamba2 import convert_mixer, mixer_names, mixer_settings
from models.checkpoints.gguf.metadata import FLOAT, INT, Metadata
from models.checkpoints.tensor import Tensor
from models.kinds import FLAG


def _settings(get: Metadata, config: Settings, shapes: Shapes) -> Settings:
    rotates = get("rope.scaling.finetuned", FLAG, True)
    if not rotates:
        get.ignore("rope.dimension_count")
    kv_heads = config["num_key_value_heads"]
    return {
        "layer_types": ["full_attention" if count else "linear_attention" for count in kv_heads],
        "num_key_value_heads": max(kv_heads) or None,
        "position_embedding_type": "rope" if rotates else None,
        "attention_multiplier": get("attention.scale", FLOAT) or (config["head_dim"] or 1) ** -0.5,
        "attention_bias": False,
        "embedding_multiplier": get("embedding_scale", FLOAT, 1.0),
        "residual_multiplier": get("residual_scale", FLOAT, 1.0),
        "logits_scaling": get("logit_scale", FLOAT) or 1.0,
        "num_local_experts": get("expert_count", INT),
        "num_experts_per_tok": get("expert_used_count", INT),
        "shared_intermediate_size": get("expert_shared_feed_forward_length", INT),
        **mixer_settings(get, shapes),
    }


def convert_hybrid(name: str, tensor: Tensor, config: Config) -> Tensor:
    """Convert a tensor of a Mamba-2 mixer, or of queries or keys; return others unchanged."""
    return part_pairs(name, convert_mixer(name, tensor, config), config)


ARCHITECTURES = {
    "granitehybrid": Architecture(
        family="granitemoehybrid",
        layer=ATTENTION
        | mixer_names("mamba")
        | {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_gate_exps.weight": "block_sparse_moe.input_linear.weight.first",
            "ffn_up_exps.weight": "block_sparse_moe.input_linear.weight.second",
            "ffn_down_exps": "block_sparse_moe.output_linear",
            "ffn_gate_shexp.weight": "shared_mlp.input_linear.weight.first",
            "ffn_up_shexp.weight": "shared_mlp.input_linear.weight.second",
            "ffn_down_shexp": "shared_mlp.output_linear",
            "ffn_gate.weight": "shared_mlp.input_linear.weight.first",
            "ffn_up.weight": "shared_mlp.input_linear.weight.second",
            "ffn_down": "shared_mlp.output_linear",
        },
        by_layer=("attention.head_count_kv",),
        settings=_settings,
        convert=convert_hybrid,
    )
}
