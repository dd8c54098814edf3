"""GGUF files of recurrent models: Mamba-2, Granite 4, LFM2 and Falcon-H1.

GGUF files contain negative decay rates, where Hugging Face has the logarithms of decay rates
(`A_log`). Compared to Hugging Face's form, some vectors have a second dimension, and weights of
convolutions have one dimension less. The gate and the up projection of Granite 4 are two tensors
(one in Hugging Face's form). The multipliers of a Falcon-H1 config are already in the weights.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from models.checkpoints.gguf.metadata import FLOAT, INT, Metadata
from models.checkpoints.ranges import LAYERS
from models.checkpoints.tensor import Tensor, join
from models.kinds import FLAG, several, whole

BY_LAYER = several(whole(0, 2**14), LAYERS)
"""A number of key/value heads for each layer."""


def join_halves(gate: Tensor, up: Tensor) -> Tensor:
    """Join gate and up projection, one above the other."""
    return join([gate, up], axis=-2)


def convert(name: str, tensor: Tensor) -> Tensor:
    """Convert a GGUF tensor with a Hugging Face name to the form of Hugging Face."""
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
    kinds = {}
    if arch in ("granitehybrid", "lfm2"):
        kv_heads = get("attention.head_count_kv", BY_LAYER, [0])
        other = "conv" if arch == "lfm2" else "linear_attention"
        kinds = {
            "layer_types": ["full_attention" if count else other for count in kv_heads],
            "num_key_value_heads": max(kv_heads) or None,
        }
    if arch == "lfm2":
        return {
            "block_auto_adjust_ff_dim": False,  # the width in the file is final
            "conv_L_cache": get.required("shortconv.l_cache", INT),
            "norm_eps": config["rms_norm_eps"],
            **kinds,
        }
    kernel, inner, numbers, heads, groups = (
        get.required(f"ssm.{name}", INT)
        for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
    )
    head_dim = inner // heads if heads else None
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
    rotates = get("rope.scaling.finetuned", FLAG)
    return {
        "position_embedding_type": "rope" if rotates else None,
        "attention_multiplier": get("attention.scale", FLOAT) or (config["head_dim"] or 1) ** -0.5,
        "attention_bias": False,
        "embedding_multiplier": get("embedding_scale", FLOAT, 1.0),
        "residual_multiplier": get("residual_scale", FLOAT, 1.0),
        "logits_scaling": get("logit_scale", FLOAT),
        "num_local_experts": get("expert_count", INT),
        "num_experts_per_tok": get("expert_used_count", INT),
        "shared_intermediate_size": get("expert_shared_feed_forward_length", INT),
        **kinds,
        **mixer,
    }
