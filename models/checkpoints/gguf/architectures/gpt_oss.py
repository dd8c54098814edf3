"""GGUF files of gpt-oss, in which gate and up projections of experts are two tensors."""

from models.checkpoints.config import Config
from models.checkpoints.gguf.architecture import ATTENTION, Architecture, Settings, Shapes
from models.checkpoints.gguf.metadata import INT, Metadata
from models.checkpoints.tensor import Tensor, join


def _join(name: str, gate: Tensor, up: Tensor, config: Config) -> Tensor:
    """Join gates and up projections so that they alternate along the second dimension."""
    pairs = join([half.map(lambda x: x[:, :, None]) for half in (gate, up)], axis=2)
    return pairs.map(lambda x: x.reshape(len(x), -1, *x.shape[3:]))


def transpose_experts(name: str, tensor: Tensor, config: Config) -> Tensor:
    """Transpose a tensor if it contains matrices of experts; return other tensors unchanged."""
    del config
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return tensor.map(lambda x: x.swapaxes(1, 2))
    return tensor


def _settings(get: Metadata, config: Settings, shapes: Shapes) -> Settings:
    hidden, name = config["intermediate_size"], "expert_feed_forward_length"
    if get.required(name, INT) != hidden:
        raise get.unsupported(name, f"{hidden}, as feed_forward_length")
    rope, layers = config["rope_parameters"], range(config["num_hidden_layers"])
    if rope["rope_type"] == "yarn":
        # Trained without rounding, which llama.cpp applies to all models.
        rope = rope | {"truncate": False}
    return {
        "attention_bias": True,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in layers],
        "num_experts_per_tok": get("expert_used_count", INT),
        "num_local_experts": get("expert_count", INT),
        "rope_parameters": rope,
        "sliding_window": get.required("attention.sliding_window", INT),
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }


ARCHITECTURES = {
    "gpt-oss": Architecture(
        family="gpt_oss",
        layer=ATTENTION
        | {
            "attn_norm": "input_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps.weight": "mlp.experts.gate_up_proj.first",
            "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias.first",
            "ffn_up_exps.weight": "mlp.experts.gate_up_proj.second",
            "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias.second",
            "ffn_down_exps.weight": "mlp.experts.down_proj",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        settings=_settings,
        convert=transpose_experts,
        join=_join,
    )
}
