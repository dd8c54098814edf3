"""GGUF files of LFM2."""

from models.checkpoints.gguf.architecture import ATTENTION, OUTSIDE, Architecture, Settings, Shapes
from models.checkpoints.gguf.architectures.mamba2 import convert_mixer
from models.checkpoints.gguf.metadata import INT, Metadata


def _settings(get: Metadata, config: Settings, shapes: Shapes) -> Settings:
    kv_heads = config["num_key_value_heads"]
    return {
        "block_auto_adjust_ff_dim": False,  # the width in the file is final
        "conv_L_cache": get.required("shortconv.l_cache", INT),
        "norm_eps": config["rms_norm_eps"],
        "layer_types": ["full_attention" if count else "conv" for count in kv_heads],
        "num_key_value_heads": max(kv_heads) or None,
    }


ARCHITECTURES = {
    "lfm2": Architecture(
        family="lfm2",
        layer=ATTENTION
        | {
            "attn_norm": "operator_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.conv": "conv.conv",
            "shortconv.out_proj": "conv.out_proj",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
        },
        # The last norm, despite its name.
        outside=OUTSIDE | {"token_embd_norm.weight": "model.embedding_norm.weight"},
        by_layer=("attention.head_count_kv",),
        settings=_settings,
        convert=convert_mixer,
    )
}
