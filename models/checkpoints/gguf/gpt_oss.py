"""GGUF files of gpt-oss, in which gate and up projections of experts are two tensors."""

from typing import Any

from models.checkpoints.gguf.metadata import INT, Metadata
from models.checkpoints.tensor import Tensor, join


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
