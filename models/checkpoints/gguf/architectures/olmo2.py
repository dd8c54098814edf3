"""GGUF files of OLMo 2."""

from models.checkpoints.gguf.architecture import Architecture
from models.checkpoints.gguf.architectures.llama import LAYER

ARCHITECTURES = {
    "olmo2": Architecture(
        family="olmo2",
        layer=LAYER
        | {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    )
}
