"""GGUF files of Falcon-H1, whose weights contain the multipliers of its config."""

from models.checkpoints.gguf.architecture import ATTENTION, OUTSIDE, Architecture, Settings, Shapes
from models.checkpoints.gguf.architectures.mamba2 import convert_mixer, mixer_names, mixer_settings
from models.checkpoints.gguf.metadata import Metadata

_MULTIPLIERS = {
    **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier"), 1.0),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), 1.0),
    **dict.fromkeys(("key_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
    "mlp_multipliers": (1.0,) * 2,
    "ssm_multipliers": (1.0,) * 5,
}


def _settings(get: Metadata, config: Settings, shapes: Shapes) -> Settings:
    return {
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": "model.layers.0.mamba.norm.weight" in shapes,
        **_MULTIPLIERS,
        **mixer_settings(get, shapes),
    }


ARCHITECTURES = {
    "falcon-h1": Architecture(
        family="falcon_h1",
        layer=ATTENTION
        | mixer_names("mamba")
        | {
            "attn_norm": "input_layernorm",
            "ffn_norm": "pre_ff_layernorm.weight",  # the only weight without .weight in its name
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        outside=OUTSIDE | {"output_norm.weight": "model.final_layernorm.weight"},
        settings=_settings,
        convert=convert_mixer,
    )
}
