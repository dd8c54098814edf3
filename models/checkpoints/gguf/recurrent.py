"""GGUF files of recurrent models: Mamba-2, Granite 4, LFM2 and Falcon-H1.

GGUF files contain negative decay rates, where Hugging Face has the logarithms of decay rates
(`A_log`). Compared to Hugging Face's form, some vectors have a second dimension, and weights of
convolutions have one dimension less. The gate and the up projection of Granite 4 are two tensors
(one in Hugging Face's form). The multipliers of a Falcon-H1 config are already in the weights.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from models.checkpoints.gguf.halves import convert_tensors
from models.checkpoints.gguf.metadata import Metadata
from models.checkpoints.ranges import LAYERS
from models.checkpoints.tensor import Tensor, join
from models.kinds import FLAG, several, whole

SSM = tuple(
    f"ssm.{name}"
    for name in ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank")
)
"""Metadata keys of a Mamba-2 mixer, without the prefix."""
READ = {
    "mamba2": {*SSM},
    "granitehybrid": {
        *SSM,
        "attention.scale",
        "embedding_scale",
        "expert_count",
        "expert_shared_feed_forward_length",
        "expert_used_count",
        "logit_scale",
        "residual_scale",
    },
    "lfm2": {"shortconv.l_cache"},
    "falcon-h1": {*SSM},
}
"""Additional metadata keys that are read for an architecture, without the prefix."""

_MIXER = {
    "ssm_in.weight": "in_proj.weight",
    "ssm_conv1d.weight": "conv1d.weight",
    "ssm_conv1d.bias": "conv1d.bias",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm.weight": "norm.weight",
    "ssm_out.weight": "out_proj.weight",
}
_ATTENTION = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
}
LAYER = {
    "mamba2": {"attn_norm.weight": "norm.weight"}
    | {name: f"mixer.{plain}" for name, plain in _MIXER.items()},
    "granitehybrid": {
        "attn_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "ffn_gate_inp.weight": "block_sparse_moe.router.layer.weight",
        "ffn_gate_exps.weight": "block_sparse_moe.input_linear.weight.gate",
        "ffn_up_exps.weight": "block_sparse_moe.input_linear.weight.up",
        "ffn_down_exps.weight": "block_sparse_moe.output_linear.weight",
        "ffn_gate_shexp.weight": "shared_mlp.input_linear.weight.gate",
        "ffn_up_shexp.weight": "shared_mlp.input_linear.weight.up",
        "ffn_down_shexp.weight": "shared_mlp.output_linear.weight",
        "ffn_gate.weight": "shared_mlp.input_linear.weight.gate",
        "ffn_up.weight": "shared_mlp.input_linear.weight.up",
        "ffn_down.weight": "shared_mlp.output_linear.weight",
    }
    | _ATTENTION
    | {name: f"mamba.{plain}" for name, plain in _MIXER.items()},
    "lfm2": _ATTENTION
    | {
        "attn_norm.weight": "operator_norm.weight",
        "attn_output.weight": "self_attn.out_proj.weight",
        "attn_q_norm.weight": "self_attn.q_layernorm.weight",
        "attn_k_norm.weight": "self_attn.k_layernorm.weight",
        "shortconv.in_proj.weight": "conv.in_proj.weight",
        "shortconv.conv.weight": "conv.conv.weight",
        "shortconv.out_proj.weight": "conv.out_proj.weight",
        "ffn_norm.weight": "ffn_norm.weight",
        "ffn_gate.weight": "feed_forward.w1.weight",
        "ffn_up.weight": "feed_forward.w3.weight",
        "ffn_down.weight": "feed_forward.w2.weight",
    },
    "falcon-h1": {
        "attn_norm.weight": "input_layernorm.weight",
        "ffn_norm": "pre_ff_layernorm.weight",  # the only weight without .weight in its name
        "ffn_gate.weight": "feed_forward.gate_proj.weight",
        "ffn_up.weight": "feed_forward.up_proj.weight",
        "ffn_down.weight": "feed_forward.down_proj.weight",
    }
    | _ATTENTION
    | {name: f"mamba.{plain}" for name, plain in _MIXER.items()},
}
"""Hugging Face names of the tensors of a layer; halves of a tensor end in `.gate` and `.up`."""


def to_hugging_face(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Convert GGUF tensors with Hugging Face names to the form of Hugging Face.

    Raises `ModelError` if a tensor `x.gate` has no second half `x.up`.
    """
    return convert_tensors(
        tensors, source, join_halves=_one_above_the_other, convert=_tensor_to_hugging_face
    )


def _one_above_the_other(gate: Tensor, up: Tensor) -> Tensor:
    return join([gate, up], axis=-2)


def _tensor_to_hugging_face(name: str, tensor: Tensor) -> Tensor:
    if name.endswith(".A_log"):
        flat = tensor.map(lambda x: x.reshape(-1))
        return replace(flat, read=lambda: np.log(-flat.read().astype(np.float32)))
    if name.endswith((".D", "mixer.norm.weight", "mamba.norm.weight")):
        return tensor.map(lambda x: x.reshape(-1))
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return tensor.map(lambda x: x[:, None])
    return tensor


_FALCON = {
    **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier"), 1.0),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), 1.0),
    **dict.fromkeys(("key_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
    "mlp_multipliers": (1.0,) * 2,
    "ssm_multipliers": (1.0,) * 5,
}
"""Multipliers of Falcon-H1, which are in the weights of a file."""


def config_from_gguf(arch: str, get: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config keys to add or to replace; `config` has the keys that all models share."""
    kernel, inner, numbers, heads, groups = (
        get(f"{arch}.ssm.{name}")
        for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
    )
    head_dim = inner // heads if inner and heads else None
    if arch == "mamba2":
        return {
            # The file has 0, since there is neither attention nor a feed-forward part.
            "intermediate_size": None,
            "num_attention_heads": None,
            "num_key_value_heads": None,
            "layer_norm_epsilon": config["rms_norm_eps"],
            "num_heads": heads,
            "head_dim": head_dim,
            "state_size": numbers,
            "n_groups": groups,
            "conv_kernel": kernel,
            "time_step_limit": (0.0, float("inf")),
            "use_bias": False,
            "use_conv_bias": True,
        }
    mixer = {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_d_state": numbers,
        "mamba_n_groups": groups,
        "mamba_d_conv": kernel,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "time_step_limit": (0.0, float("inf")),
    }
    if arch == "falcon-h1":
        return {"mamba_norm_before_gate": False, **_FALCON, **mixer}
    by_layer = several(whole(0, 2**14), LAYERS)
    kv_heads = get.checked(f"{arch}.attention.head_count_kv", by_layer, [0])
    other = "conv" if arch == "lfm2" else "linear_attention"
    kinds = {
        "layer_types": ["full_attention" if count else other for count in kv_heads],
        "num_key_value_heads": max(kv_heads) or None,
    }
    if arch == "lfm2":
        return {
            "block_auto_adjust_ff_dim": False,  # the width in the file is final
            "conv_L_cache": get(f"{arch}.shortconv.l_cache"),
            "norm_eps": config["rms_norm_eps"],
            **kinds,
        }
    scale = get(f"{arch}.attention.scale")
    rotates = get.checked(f"{arch}.rope.scaling.finetuned", FLAG, False)
    return {
        "position_embedding_type": "rope" if rotates else None,
        "attention_multiplier": scale or (config["head_dim"] or 1) ** -0.5,
        "attention_bias": False,
        "embedding_multiplier": get(f"{arch}.embedding_scale", 1.0),
        "residual_multiplier": get(f"{arch}.residual_scale", 1.0),
        "logits_scaling": get(f"{arch}.logit_scale"),
        "num_local_experts": get(f"{arch}.expert_count"),
        "num_experts_per_tok": get(f"{arch}.expert_used_count"),
        "shared_intermediate_size": get(f"{arch}.expert_shared_feed_forward_length"),
        **kinds,
        **mixer,
    }
