"""What GGUF files store differently of recurrent models: Mamba-2 and Granite 4.

Names apart, decays are stored and not their logarithms; vectors have a second dimension, and
convolutions lack theirs; and the two halves of a gated product are two tensors.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

ARCHITECTURES = ("mamba2", "granitehybrid")

_WHOLE = {
    "mamba2": {
        "token_embd.weight": "backbone.embeddings.weight",
        "output_norm.weight": "backbone.norm_f.weight",
        "output.weight": "lm_head.weight",
    },
    "granitehybrid": {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    },
}
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
# Parts that end in gate and up are halves of one tensor.
_LAYER = {
    "mamba2": {"attn_norm.weight": "norm.weight"}
    | {name: f"mixer.{plain}" for name, plain in _MIXER.items()},
    "granitehybrid": {
        "attn_norm.weight": "input_layernorm.weight",
        "attn_q.weight": "self_attn.q_proj.weight",
        "attn_k.weight": "self_attn.k_proj.weight",
        "attn_v.weight": "self_attn.v_proj.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
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
    | {name: f"mamba.{plain}" for name, plain in _MIXER.items()},
}
_PREFIX = {"mamba2": "backbone.layers", "granitehybrid": "model.layers"}


def plain(name: str, arch: str) -> str | None:
    """The Hugging Face name of a tensor or of half of one; None where there is no such tensor."""
    found = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if found is None:
        return _WHOLE[arch].get(name)
    layer, part = found.groups()
    return f"{_PREFIX[arch]}.{layer}.{_LAYER[arch][part]}" if part in _LAYER[arch] else None


def turned_back(readers: Mapping[str, Callable[[], np.ndarray]]) -> dict[str, Callable]:
    """The functions that read tensors, as Hugging Face has them."""
    out = {}
    for name, read in readers.items():
        if name.endswith(".up"):
            continue
        if name.endswith(".gate"):
            name = name.removesuffix(".gate")
            out[name] = _both(read, readers[f"{name}.up"])
        else:
            out[name] = _turning(name, read)
    return out


def _both(gate: Callable, up: Callable) -> Callable[[], np.ndarray]:
    return lambda: np.concatenate([gate(), up()], axis=-2)


def _turning(name: str, read: Callable) -> Callable[[], np.ndarray]:
    if name.endswith(".A_log"):
        return lambda: np.log(-read().astype(np.float32)).reshape(-1)
    if name.endswith((".D", "mixer.norm.weight", "mamba.norm.weight")):
        return lambda: read().reshape(-1)
    if name.endswith("conv1d.weight"):
        return lambda: read()[:, None]
    return read


def config_from_gguf(arch: str, get: Callable, config: dict[str, Any]) -> dict[str, Any]:
    """What a file's metadata tells of a recurrent model, beside what it tells of any.

    Args:
        arch: the file's name for the architecture, with which most keys begin.
        get: the value of a metadata key, or None.
        config: what it tells of any model.
    """
    kernel, inner, numbers, heads, groups = (
        get(f"{arch}.ssm.{name}")
        for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
    )
    if arch == "mamba2":
        return {
            "layer_norm_epsilon": config["rms_norm_eps"],
            "num_heads": heads,
            "head_dim": inner // heads,
            "state_size": numbers,
            "n_groups": groups,
            "conv_kernel": kernel,
        }
    groups_by_layer = config["num_key_value_heads"]
    return {
        "layer_types": ["attention" if groups else "mamba" for groups in groups_by_layer],
        "num_key_value_heads": max(groups_by_layer),
        "position_embedding_type": "rope" if get(f"{arch}.rope.scaling.finetuned") else None,
        "attention_multiplier": get(f"{arch}.attention.scale") or config["head_dim"] ** -0.5,
        "embedding_multiplier": get(f"{arch}.embedding_scale"),
        "residual_multiplier": get(f"{arch}.residual_scale"),
        "logits_scaling": get(f"{arch}.logit_scale"),
        "num_local_experts": get(f"{arch}.expert_count"),
        "num_experts_per_tok": get(f"{arch}.expert_used_count"),
        "shared_intermediate_size": get(f"{arch}.expert_shared_feed_forward_length"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": numbers,
        "mamba_n_groups": groups,
        "mamba_d_conv": kernel,
    }
