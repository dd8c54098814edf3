"""GGUF files of Llama, Mistral, Qwen 2 and Qwen 3."""

from models.checkpoints.config import Config
from models.checkpoints.gguf.architecture import ATTENTION, Architecture, even_rows_first
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
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def part_pairs(name: str, tensor: Tensor, config: Config) -> Tensor:
    """Reorder the rows of queries and keys, see `even_rows_first`."""
    key = _HEADS.get(name.split(".")[-2])
    return even_rows_first(tensor, config[key]) if key else tensor


ARCHITECTURES = {
    "llama": Architecture(family="llama", layer=LAYER, convert=part_pairs),
    "qwen2": Architecture(family="qwen2", layer=LAYER),
    "qwen3": Architecture(family="qwen3", layer=LAYER),
}
