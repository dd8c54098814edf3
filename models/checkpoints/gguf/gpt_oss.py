"""GGUF files of gpt-oss, in which gate and up projections of experts are two tensors."""

from collections.abc import Mapping
from typing import Any

from models.checkpoints.gguf.halves import convert_tensors
from models.checkpoints.gguf.metadata import Metadata
from models.checkpoints.tensor import Tensor, join
from models.errors import unsupported

READ = {
    "gpt-oss": {
        "attention.sliding_window",
        "expert_count",
        "expert_feed_forward_length",
        "expert_used_count",
    }
}
"""Additional metadata keys that are read, without the prefix."""

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


def to_hugging_face(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Convert GGUF tensors with Hugging Face names to the form of Hugging Face.

    Matrices of experts are transposed. The gate and the up projection of experts are joined to one
    tensor, in which gates and up projections alternate. Raises `ModelError` if a tensor `x.gate`
    has no second half `x.up`.
    """
    return convert_tensors(tensors, source, join_halves=_alternating, convert=_transposed)


def _transposed(name: str, tensor: Tensor) -> Tensor:
    """Transpose a tensor if it contains matrices of experts; return other tensors unchanged."""
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return tensor.map(lambda x: x.swapaxes(1, 2))
    return tensor


def _alternating(gate: Tensor, up: Tensor) -> Tensor:
    """Join gates and up projections so that they alternate along the second dimension."""
    pairs = join([half.map(lambda x: x[:, :, None]) for half in (gate, up)], axis=2)
    return pairs.map(lambda x: x.reshape(len(x), -1, *x.shape[3:]))


def config_from_gguf(arch: str, get: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config keys to add for gpt-oss; `config` has the keys that all models share."""
    hidden, name = config["intermediate_size"], f"{arch}.expert_feed_forward_length"
    if get(name) not in (None, hidden):
        raise unsupported(name, f"{hidden}, as feed_forward_length", get(name), get.source)
    layers = range(config["num_hidden_layers"])
    return {
        "attention_bias": True,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in layers],
        "num_experts_per_tok": get(f"{arch}.expert_used_count"),
        "num_local_experts": get(f"{arch}.expert_count"),
        "sliding_window": get(f"{arch}.attention.sliding_window"),
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
