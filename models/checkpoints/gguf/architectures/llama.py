"""GGUF files of Llama, Mistral, Qwen 2 and Qwen 3, also with experts.

llama.cpp divides the factors of the chosen experts of Qwen 3 by their sum (`norm_topk_prob`), and
files do not say otherwise.
"""

from models.checkpoints.config import Config
from models.checkpoints.gguf.architecture import (
    ATTENTION,
    Architecture,
    Settings,
    Shapes,
    even_rows_first,
)
from models.checkpoints.gguf.metadata import INT, Metadata
from models.checkpoints.tensor import Tensor

LAYER = ATTENTION | {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps.weight": "mlp.experts.gate_proj",
    "ffn_up_exps.weight": "mlp.experts.up_proj",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def part_pairs(name: str, tensor: Tensor, config: Config) -> Tensor:
    """Reorder the rows of queries and keys, see `even_rows_first`."""
    key = _HEADS.get(name.split(".")[-2])
    return even_rows_first(tensor, config[key]) if key else tensor


def expert_settings(get: Metadata, config: Settings, shapes: Shapes) -> Settings:
    """Return the settings of experts of Qwen."""
    del config, shapes
    return {
        "num_experts": get("expert_count", INT),
        "num_experts_per_tok": get("expert_used_count", INT),
        "moe_intermediate_size": get("expert_feed_forward_length", INT),
        "norm_topk_prob": True,
    }


ARCHITECTURES = {
    "llama": Architecture(family="llama", layer=LAYER, convert=part_pairs),
    "qwen2": Architecture(family="qwen2", layer=LAYER),
    "qwen3": Architecture(family="qwen3", layer=LAYER),
    "qwen3moe": Architecture(family="qwen3_moe", layer=LAYER | EXPERTS, settings=expert_settings),
}
