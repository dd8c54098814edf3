"""GGUF files of Nemotron-H, dense and with experts.

The kind of a layer is computed from its tensors. llama.cpp has no lower limit of the step size of a
mixer (`time_step_min`), and files have none.
"""

from models.checkpoints.gguf.architecture import ATTENTION, Architecture, Settings, Shapes
from models.checkpoints.gguf.architectures.granite_hybrid import convert_hybrid
from models.checkpoints.gguf.architectures.mamba2 import BACKBONE, mixer_names, state_sizes
from models.checkpoints.gguf.metadata import FLOAT, INT, Metadata
from models.kinds import FLAG

_LAYER = {name: plain.replace("self_attn", "mixer") for name, plain in ATTENTION.items()}
_LAYER |= mixer_names("mixer")
_LAYER |= {"attn_norm": "norm", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps.weight": "mixer.experts.up_proj",
    "ffn_down_exps.weight": "mixer.experts.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_MARKS = {
    "A_log": "linear_attention",
    "q_proj.weight": "full_attention",
    "gate.weight": "moe",
    "up_proj.weight": "mlp",
}
"""A tensor of each kind of layer."""


def _settings(get: Metadata, config: Settings, shapes: Shapes) -> Settings:
    get.ignore("expert_shared_count rope.dimension_count")  # no layer rotates heads
    kernel, heads, head_dim, state, groups = state_sizes(get)
    names = [f"backbone.layers.{i}.mixer." for i in range(config["num_hidden_layers"])]
    kinds = [[kind for end, kind in _MARKS.items() if name + end in shapes] for name in names]
    biases = {name.rpartition(".mixer.")[2] for name in shapes if name.endswith("bias")}
    widths = [shapes[key][0] for name in names if shapes.get(key := f"{name}up_proj.weight")]
    epsilon = get("attention.layer_norm_rms_epsilon", FLOAT, config["rms_norm_eps"])
    return {
        "layer_types": [found[0] if found else "mlp" for found in kinds],
        "num_key_value_heads": max(config["num_key_value_heads"], default=0) or None,
        "intermediate_size": max(widths, default=1),
        "layer_norm_epsilon": epsilon,
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "ssm_state_size": state,
        "n_groups": groups,
        "conv_kernel": kernel,
        "time_step_min": 0.0,
        "use_bias": "in_proj.bias" in biases,
        "use_conv_bias": "conv1d.bias" in biases,
        "mlp_bias": not biases.isdisjoint({"up_proj.bias", "shared_experts.up_proj.bias"}),
        "moe_latent_size": get("moe_latent_size", INT) or None,
        "moe_intermediate_size": get("expert_feed_forward_length", INT) or 1,
        "moe_shared_expert_intermediate_size": get("expert_shared_feed_forward_length", INT) or 1,
        "n_routed_experts": get("expert_count", INT) or None,
        "num_experts_per_tok": get("expert_used_count", INT) or None,
        "n_group": get("expert_group_count", INT) or None,
        "topk_group": get("expert_group_used_count", INT) or None,
        "norm_topk_prob": get("expert_weights_norm", FLAG, False),
        "routed_scaling_factor": get("expert_weights_scale", FLOAT) or 1.0,
    }


def _architecture(layer: dict[str, str], *, predicts: bool) -> Architecture:
    return Architecture(
        family="nemotron_h",
        layer=layer,
        outside=BACKBONE,
        layers="backbone.layers",
        eps="attention.layer_norm_epsilon",
        by_layer=("attention.head_count_kv", "feed_forward_length"),
        predicts=predicts,
        settings=_settings,
        convert=convert_hybrid,
    )


ARCHITECTURES = {
    "nemotron_h": _architecture(_LAYER, predicts=False),
    "nemotron_h_moe": _architecture(_LAYER | _EXPERTS, predicts=True),
}
