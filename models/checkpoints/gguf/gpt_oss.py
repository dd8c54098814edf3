"""GGUF files of gpt-oss, in which gate and up projections of experts are two tensors."""

from typing import Any

from models.checkpoints.gguf.metadata import INT, Metadata
from models.checkpoints.tensor import Tensor, join

_BIASED = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate_inp": "mlp.router",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj.gate",
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias.gate",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj.up",
    "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias.up",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
} | {
    f"{name}.{end}": f"{plain}.{end}"
    for name, plain in _BIASED.items()
    for end in ("weight", "bias")
}
LAYER = {"gpt-oss": _LAYER}
"""Hugging Face names of the tensors of a layer; halves of a tensor end in `.gate` and `.up`."""


def join_halves(gate: Tensor, up: Tensor) -> Tensor:
    """Join gates and up projections so that they alternate along the second dimension."""
    pairs = join([half.map(lambda x: x[:, :, None]) for half in (gate, up)], axis=2)
    return pairs.map(lambda x: x.reshape(len(x), -1, *x.shape[3:]))


def convert(name: str, tensor: Tensor) -> Tensor:
    """Transpose a tensor if it contains matrices of experts; return other tensors unchanged."""
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return tensor.map(lambda x: x.swapaxes(1, 2))
    return tensor


def config_from_gguf(arch: str, get: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config keys to add for gpt-oss; `config` has the keys that all models share."""
    del arch
    hidden, name = config["intermediate_size"], "expert_feed_forward_length"
    if get.required(name, INT) != hidden:
        raise get.unsupported(name, f"{hidden}, as feed_forward_length")
    layers = range(config["num_hidden_layers"])
    return {
        "attention_bias": True,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in layers],
        "num_experts_per_tok": get("expert_used_count", INT),
        "num_local_experts": get("expert_count", INT),
        "sliding_window": get.required("attention.sliding_window", INT),
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
