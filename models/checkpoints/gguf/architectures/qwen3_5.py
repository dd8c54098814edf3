"""GGUF files of Qwen3-Next and Qwen3.5, dense and with experts.

- Norm weights are 1 larger, except those of the gated norms of delta rules.
- Files of Qwen3-Next have separate tensors for queries, keys and values, and for gates.
- In files of Qwen3.5, value head i of a delta rule uses key head i modulo their number. In Hugging
  Face's form, the value heads of a key head are next to each other.
- llama.cpp divides the factors of the chosen experts by their sum (`norm_topk_prob`), and files do
  not say otherwise.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from models.checkpoints.config import Config
from models.checkpoints.gguf.architecture import Architecture, Settings, Shapes, less_one
from models.checkpoints.gguf.architectures.llama import EXPERTS, LAYER, expert_settings
from models.checkpoints.gguf.architectures.mamba2 import convert_mixer, state_sizes
from models.checkpoints.gguf.metadata import FLAGS, INT, Metadata
from models.checkpoints.ranges import LAYERS
from models.checkpoints.tensor import Tensor, join
from models.kinds import several, whole

_DELTA = LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_NEXT = _DELTA | {
    "attn_qkv.weight": "linear_attn.in_proj_qkvz.weight.first",
    "attn_gate.weight": "linear_attn.in_proj_qkvz.weight.second",
    "ssm_in": "linear_attn.in_proj_qkvz",  # of older files
    "ssm_ba": "linear_attn.in_proj_ba",
}
_SEPARATE = _DELTA | {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
_SHARED_EXPERT = EXPERTS | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def _settings(get: Metadata, config: Settings, shapes: Shapes) -> Settings:
    kernel, values, value_dim, key_dim, keys = state_sizes(get)
    interval = get("full_attention_interval", whole(1, LAYERS), 4)
    by_interval = [(i + 1) % interval != 0 for i in range(config["num_hidden_layers"])]
    recurs = get("attention.recurrent_layers", FLAGS, by_interval)[: len(by_interval)]
    size = config["head_dim"] or 1
    rope = {"partial_rotary_factor": get("rope.dimension_count", INT, size) / size}
    return {
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurs],
        "linear_conv_kernel_dim": kernel,
        "linear_key_head_dim": key_dim,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_value_head_dim": value_dim,
        "rope_parameters": config["rope_parameters"] | rope,
    }


def _with_sections(get: Metadata, config: Settings, shapes: Shapes) -> Settings:
    name, found = "rope.dimension_sections", _settings(get, config, shapes)
    sections = get.required(name, several(whole(0, 2**14), 4))
    if len(sections) != 4 or sections[3]:
        raise get.unsupported(name, "4 numbers with 0 as the last")
    found["rope_parameters"] |= {"mrope_section": sections[:3]}
    return found


def _with_experts(settings: Callable) -> Callable:
    """Return a function that also returns the settings of experts."""
    shared = "expert_shared_feed_forward_length"

    def all_settings(get: Metadata, config: Settings, shapes: Shapes) -> Settings:
        found = settings(get, config, shapes) | expert_settings(get, config, shapes)
        return found | {"shared_expert_intermediate_size": get(shared, INT)}

    return all_settings


def _convert(name: str, tensor: Tensor, config: Config) -> Tensor:
    if "norm" in name and ".linear_attn." not in name:
        return less_one(tensor)
    if name.endswith(".shared_expert_gate.weight"):  # llama-quantize writes a vector
        return tensor.map(lambda x: x.reshape(1, -1))
    return convert_mixer(name, tensor, config)


def _join(name: str, qkv: Tensor, gates: Tensor, config: Config) -> Tensor:
    """Join rows so that those of a key head and its value heads are next to each other."""
    heads, keys = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]

    def by_key_head(x: np.ndarray) -> np.ndarray:
        parts = np.split(x, [heads * keys, 2 * heads * keys, 2 * heads * keys + values])
        parts = [part.reshape(heads, -1, *x.shape[1:]) for part in parts]
        return np.concatenate(parts, axis=1).reshape(x.shape)

    return join([qkv, gates], axis=0).map(by_key_head)


def _convert_and_reorder(name: str, tensor: Tensor, config: Config) -> Tensor:
    """Reorder the value heads of a delta rule."""
    tensor, part = _convert(name, tensor, config), name.partition(".linear_attn.")[2]
    if not part or part.startswith("norm.") or not tensor.shape:
        return tensor
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    axis = 1 if part.startswith("out_proj.") else 0
    # Queries and keys are before values.
    first = 2 * keys * config["linear_key_head_dim"] if "qkv" in part or "conv1d" in part else 0
    count = tensor.shape[axis] - first if axis < len(tensor.shape) else 0
    if count <= 0 or values % keys or count % values:
        return replace(tensor, shape=())
    order = np.arange(count).reshape(values // keys, keys, -1).swapaxes(0, 1).reshape(-1)
    order = np.append(np.arange(first), first + order)
    return replace(tensor, read=lambda: np.take(tensor.read(), order, axis))


ARCHITECTURES = {
    "qwen3next": Architecture(
        family="qwen3_next",
        layer=_NEXT | _SHARED_EXPERT,
        predicts=True,
        settings=_with_experts(_settings),
        convert=_convert,
        join=_join,
    ),
    "qwen35": Architecture(
        family="qwen3_5_text",
        layer=_SEPARATE,
        predicts=True,
        settings=_with_sections,
        convert=_convert_and_reorder,
    ),
    "qwen35moe": Architecture(
        family="qwen3_5_moe_text",
        layer=_SEPARATE | _SHARED_EXPERT,
        predicts=True,
        settings=_with_experts(_with_sections),
        convert=_convert_and_reorder,
    ),
}
