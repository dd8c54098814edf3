"""Record the logits of tiny models with one setting changed, from Hugging Face transformers.

Run where torch 2.13 and transformers 5.24 are installed: `PYTHONPATH=. python
tests/data/record_settings.py [model_type ...]`. It writes `settings/<model_type>.json.gz`.

The variants of a family follow from the fields of its config class. `tests/models/
recorded_settings.py` reads the files, and says how weights, tokens and logits are made.
"""

import copy
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.models import recorded_settings as recorded

HERE = Path(__file__).parent
Config = dict[str, Any]
LARGEST = 3_000_000  # bytes of the weights of a variant

ABSENT = object()
LATENT: Config = {
    "head_dim": 8,
    "qk_head_dim": 14,
    "qk_rope_head_dim": 8,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "mscale": 0.9,
        "mscale_all_dim": 0.6,
        "original_max_position_embeddings": 80,
    },
}
# Folder of the config, and keys of it changed such that every setting has an effect.
BASES: dict[str, tuple[str, Config]] = {
    "llama": ("llama_llama3", {"head_dim": 16, "rope_parameters": {"rope_theta": 500.0}}),
    "mistral": ("mistral_window", {"head_dim": 16, "rope_parameters": {"rope_theta": 500.0}}),
    "qwen2": ("qwen2_window", {"rope_parameters": {"rope_theta": 500.0}}),
    "qwen3": ("qwen3_window", {"rope_parameters": {"rope_theta": 500.0}}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "rope_parameters": {"rope_theta": 500.0},
            "num_experts": 6,
            "num_local_experts": ABSENT,
            "sliding_window": 12,
        },
    ),
    "olmo2": ("olmo2", {"rope_parameters": {"rope_theta": 500.0}}),
    "gemma3_text": ("gemma3", {}),
    "mamba2": ("mamba2", {}),
    "granitemoehybrid": (
        "granite_hybrid_experts_rope",
        {"rope_parameters": {"rope_theta": 500.0}, "residual_multiplier": 0.8},
    ),
    "recurrent_gemma": (
        "recurrent_gemma",
        {"lru_width": 32, "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "lfm2": (
        "lfm2",
        {"rope_parameters": {"rope_theta": 500.0}, "block_ffn_dim_multiplier": 0.7},
    ),
    "falcon_h1": (
        "falcon_h1",
        {"head_dim": 8, "mamba_rms_norm": True, "rope_parameters": {"rope_theta": 500.0}},
    ),
    "qwen3_next": (
        "qwen3_next",
        {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "deepseek_v2": ("deepseek_v2_groups", LATENT),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "gpt_oss": ("gpt_oss", {"dtype": "float32"}),
    "t5": (
        "t5_gated",
        {"dense_act_fn": ABSENT, "is_gated_act": ABSENT, "scale_decoder_outputs": ABSENT},
    ),
}
COARSE = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")  # 0.05, or a change has no effect

# Settings of training, of labels, of what is returned, and of generation: changed together.
DEAD: Config = {
    "attention_dropout": 0.5,
    "bos_token_id": 3,
    "chunk_size_feed_forward": 2,
    "classifier_dropout": 0.5,
    "dropout_rate": 0.5,
    "dtype": "float16",
    "eos_token_id": [4, 5],
    "id2label": {"0": "a", "1": "b"},
    "initializer_factor": 3.0,
    "initializer_range": 0.5,
    "label2id": {"a": 0, "b": 1},
    "output_hidden_states": True,
    "output_router_logits": False,
    "pad_token_id": 6,
    "pretraining_tp": 2,
    "problem_type": "regression",
    "return_dict": True,
    "router_aux_loss_coef": 0.5,
    "time_step_floor": 0.01,
    "time_step_max": 0.2,
    "time_step_min": 0.01,
    "time_step_rank": 3,
    "transformers_version": "4.40.0",
    "use_cache": False,
    "w_init_variance_scale": 0.5,
}
KEPT = {"model_type", "architectures", *DEAD}
ACTIVATIONS = ["gelu", "gelu_pytorch_tanh", "relu", "silu", "quick_gelu", "none_such"]
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

# Values instead of those by the rule in `others`.
VALUES: dict[str, list[Any]] = {
    "block_types": [["recurrent", "recurrent", "attention"], ["attention"], ["recurrent"], []],
    "feed_forward_proj": ["relu", "gelu", "gated-relu", "gated-silu", "silu-gated", "gated-gelu-x"],
    "full_attn_idxs": [[0], [0, 2]],
    "mamba_d_head": ["auto", 16],
    "max_position_embeddings": [32],
    "mlp_multipliers": [[0.7, 1.5], [1.5]],
    "mlp_only_layers": [[0], [7]],
    "num_experts_per_tok": [1, 3],
    "num_key_value_heads": [1, 4, 3],
    "num_nextn_predict_layers": [0, 2],
    "position_embedding_type": ["rope", "nope", "alibi"],
    "scale_decoder_outputs": [True],
    "sliding_window": [5, 1],
    "ssm_multipliers": [[1.4, 0.8, 1.1, 0.6, 0.9], [1.0, 1.0]],
    "time_step_limit": [[0.3, 0.6], [0.0, float("inf")], [0.0, "inf"], [0.0, 1.0, 2.0]],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "vocab_size": [64],
}
# Kinds of layers of a model with a list of them, each for a third layer and beyond too.
KINDS = [[FULL, FULL], [SLIDING, FULL], [FULL, LINEAR], ["attention", "mamba"], ["conv", FULL]]
KINDS += [["chunked_attention", FULL], ["none_such", FULL]]

# Keys that the class of a family does not declare, but files of it or of others have.
UNDECLARED: Config = {
    "attention_bias": True,
    "block_ff_dim": 32,
    "final_logit_softcapping": 1.0,
    "full_attention_interval": 2,
    "head_dim": 12,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "max_window_layers": 1,
    "mlp_bias": True,
    "num_experts": 3,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
    "per_layer_config": {"0": {"intermediate_size": 16}},
    "qkv_bias": True,
    "query_pre_attn_scalar": 3,
    "rope_theta": 50.0,
    "shared_expert_intermediate_size": 12,
    "sliding_window": 7,
    "sliding_window_pattern": 2,
    "temperature": 0.5,
    "text_config": {"hidden_size": 64},
    "tie_embedding": True,
    "torch_dtype": "float16",
    "use_qk_norm": True,
    "use_sliding_window": True,
}
# Several keys changed, as an older file has them.
SEVERAL: dict[str, list[Config]] = {
    "qwen2": [
        {"use_sliding_window": True, "layer_types": None, "max_window_layers": 0},
        {"use_sliding_window": False, "layer_types": None},
        {"use_sliding_window": False, "layer_types": [FULL, SLIDING]},
        {"sliding_window": None, "use_sliding_window": True, "layer_types": None},
    ],
    "gemma3_text": [
        {"layer_types": None, "sliding_window_pattern": 2},
        {"layer_types": None, "_sliding_window_pattern": 2, "sliding_window_pattern": None},
        {"rope_parameters": None, "rope_theta": 500.0, "rope_local_base_freq": 50.0},
        {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
    "lfm2": [
        {"layer_types": None, "full_attn_idxs": [1]},
        {"layer_types": None, "full_attn_idxs": None},
        {"tie_embedding": False, "tie_word_embeddings": True},
        {"block_ff_dim": 48, "block_auto_adjust_ff_dim": False},
        {"theta": 50.0, "rope_theta": 50.0, "rope_parameters": None},
    ],
    "qwen3_next": [
        {"layer_types": None, "full_attention_interval": 2},
        {"layer_types": None, "full_attention_interval": 1},
        {"rope_parameters": None, "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        {"rope_parameters": None, "rope_theta": 500.0},
    ],
    "gpt_oss": [
        {"experts_per_token": 3, "num_experts_per_tok": 2},
        {"num_experts": 3, "num_local_experts": 4},
        {"initial_context_length": 32},
        {"rope_parameters": None, "rope_theta": 500.0},
    ],
    "granitemoehybrid": [
        {"layer_types": None, "layers_block_type": ["attention", "mamba"]},
        {"num_local_experts": 0, "num_experts_per_tok": 0},
    ],
    "falcon_h1": [
        {"mamba_d_ssm": None, "mamba_d_head": 12},
        {"mamba_norm_before_gate": True, "mamba_rms_norm": False},
        {"attn_layer_indices": [0]},
    ],
    "recurrent_gemma": [
        {"layers_block_type": ["recurrent", "recurrent", "recurrent"]},
        {"sliding_window": 5},
    ],
    "qwen3_moe": [
        {"num_local_experts": 4},
        {"use_sliding_window": True, "sliding_window": 7},
        {"use_sliding_window": True, "max_window_layers": 1},
        {"mlp_only_layers": [1], "decoder_sparse_step": 2},
    ],
    "deepseek_v2": [
        {"topk_method": "greedy", "q_lora_rank": None},
        {"scoring_func": "sigmoid"},
        {"norm_topk_prob": True, "routed_scaling_factor": 3.0},
        {"moe_layer_freq": 2},
        {"rope_interleave": False},
        {"num_experts": 4},
    ],
    "deepseek_v3": [
        {"scoring_func": "softmax"},
        {"topk_method": "greedy"},
        {"moe_layer_freq": 2},
        {"num_local_experts": 4},
        {"mlp_bias": True},
    ],
    "mamba2": [
        {"layer_types": ["full_attention", "linear_attention"]},
        {"norm_before_gate": False},
        {"rms_norm": False},
        {"intermediate_size": 128},
    ],
    "t5": [
        {"dense_act_fn": "relu"},
        {"dense_act_fn": "gelu_new", "is_gated_act": True},
        {"is_gated_act": False},
        {"scale_decoder_outputs": False},
        {"tie_word_embeddings": False},
        {"tie_word_embeddings": False, "scale_decoder_outputs": True},
        {"feed_forward_proj": None, "dense_act_fn": "relu"},
        {"tie_encoder_decoder": True},
        {"decoder_start_token_id": 5},
        {"layer_norm_eps": 0.5},
        {"relative_attention_num_buckets": 6},
        {"hidden_size": 32},
        {"num_hidden_layers": 1},
    ],
    "olmo2": [{"clip_qkv": 0.1}, {"norm_after": False}],
    "mistral": [{"layer_types": [SLIDING, FULL]}, {"sliding_window_pattern": 2}],
    "llama": [
        {"pad_token_id": -1},
        {"pad_token_id": 99},
        {"rms_norm_eps": "0.05"},
        {"rms_norm_eps": 1},
        {"rms_norm_eps": 0.0},
        {"num_hidden_layers": 2.0},
        {"tie_word_embeddings": "true"},
        {"tie_word_embeddings": 1},
        {"num_key_value_heads": "2"},
        {"hidden_act": None},
        {"vocab_size": None},
        {"is_decoder": True},
        {"parallel_attn": True},
        {"attn_logit_softcapping": 1.0},
        {"attention_multiplier": 0.9},
        {"residual_multiplier": 0.5},
        {"no_rope_layers": [0, 1]},
        {"num_local_experts": 4},
        {"per_layer_config": {"1": {"num_key_value_heads": 4}}},
        {"is_encoder_decoder": True},
    ],
}
YARN: Config = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 80}
LLAMA3: Config = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def ropes(dim: int) -> Iterator[tuple[str, Config]]:
    """Yield the name and the keys of a rope; `dim` counts the rotated numbers of a head."""
    ramp = [1.0 + 0.5 * i for i in range(dim // 2)]
    long = {"rope_type": "longrope", "short_factor": ramp, "long_factor": ramp[::-1]}
    long |= {"original_max_position_embeddings": 32, "factor": 4.0}
    linear = {"rope_type": "linear", "factor": 4.0}
    yield "linear", linear
    yield "dynamic", {"rope_type": "dynamic", "factor": 4.0}
    yield "yarn", YARN
    yield "llama3", LLAMA3
    yield "longrope", long
    yield "proportional", {"rope_type": "proportional", "partial_rotary_factor": 0.5}
    yield "default, partial", {"rope_type": "default", "partial_rotary_factor": 0.5}
    yield "type alone", {"type": "linear", "factor": 4.0}
    yield "two types", {"type": "linear", "rope_type": "default", "factor": 4.0}
    yield "unknown", {"rope_type": "none_such", "factor": 4.0}
    yield "empty", {}
    yield "linear, partial", linear | {"partial_rotary_factor": 0.5}
    yield "linear, factor 0.5", linear | {"factor": 0.5}
    yield "linear, no factor", {"rope_type": "linear"}
    yield "linear, int factor", linear | {"factor": 4}
    yield "linear, null factor", linear | {"factor": None}
    yield "linear, text factor", linear | {"factor": "4.0"}
    yield "linear, unknown key", linear | {"attention_factor": 0.5}
    yield "null type", {"rope_type": None, "factor": 4.0}
    yield (
        "dynamic, original",
        {
            "rope_type": "dynamic",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    )
    yield "dynamic, alpha", {"rope_type": "dynamic", "factor": 1.0, "alpha": 100.0}
    yield "mrope", {"type": "mrope", "mrope_section": [2, 1, 1]}
    yield "su", {"type": "su"} | {key: long[key] for key in long if key != "rope_type"}
    for change in (
        {"attention_factor": 0.5},
        {"attention_factor": None},
        {"beta_fast": 4.0},
        {"beta_slow": 3.0},
        {"beta_fast": 0.5},
        {"beta_fast": 0},
        {"mscale": 0.7},
        {"mscale_all_dim": 0.7},
        {"mscale": 0.7, "mscale_all_dim": 0.3},
        {"mscale": 0.0, "mscale_all_dim": 0.3},
        {"truncate": False},
        {"truncate": True},
        {"factor": None},
        {"factor": 1.0},
        {"factor": 0.5},
        {"original_max_position_embeddings": 32},
        {"original_max_position_embeddings": None},
        {"partial_rotary_factor": 0.5},
        {"rope_theta": 50.0},
        {"finetuned": True},
        {"attn_factor": 0.5},
    ):
        yield f"yarn, {json.dumps(change)}", YARN | change
    short = {key: YARN[key] for key in ("rope_type", "factor")}
    yield "yarn, no original", short
    yield "yarn, no factor", {key: YARN[key] for key in YARN if key != "factor"}
    for key in LLAMA3:
        if key != "rope_type":
            yield f"llama3, no {key}", {k: LLAMA3[k] for k in LLAMA3 if k != key}
    yield "llama3, low above high", LLAMA3 | {"low_freq_factor": 8.0}
    yield "llama3, low is high", LLAMA3 | {"low_freq_factor": 4.0}
    yield "llama3, partial", LLAMA3 | {"partial_rotary_factor": 0.5}
    for change in (
        {"attention_factor": 0.5},
        {"factor": None},
        {"factor": 1.0},
        {"original_max_position_embeddings": 64},
        {"long_factor": [1.0]},
        {"long_factor": ramp},
        {"short_factor": None},
        {"partial_rotary_factor": 0.5},
    ):
        yield f"longrope, {json.dumps(change)}", long | change
    yield "longrope, no factor", {key: long[key] for key in long if key != "factor"}
    yield (
        "proportional, factor",
        {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.5,
            "factor": 4.0,
        },
    )
    yield "proportional, whole", {"rope_type": "proportional"}


FEW = 11  # of the ropes above, in families other than llama
YARNS = ("deepseek_v2", "deepseek_v3", "gpt_oss")  # and these record all options of yarn


def rope_changes(family: str, base: Config) -> Iterator[tuple[str, Config, tuple[str, ...]]]:
    """Yield name, changed keys and absent keys of the variants of rotary embeddings."""
    old = base["rope_parameters"]
    nested = next((value for value in old.values() if isinstance(value, dict)), None)
    flat = nested or old
    theta = {"rope_theta": flat["rope_theta"]}
    theta |= {key: flat[key] for key in ("partial_rotary_factor",) if key in flat}
    size = base.get("head_dim") or base["hidden_size"] // base["num_attention_heads"]
    dim = int(size * flat.get("partial_rotary_factor", 1))
    for i, (name, keys) in enumerate(ropes(dim)):
        listed = family in YARNS and name.startswith("yarn") or family == "llama"
        if i < FEW or listed:
            inside = theta | keys if keys else {}
            changed = {FULL: inside, SLIDING: old[SLIDING]} if nested else inside
            more = {"max_position_embeddings": 32} if name.startswith("dynamic") else {}
            if "max_position_embeddings" not in base:
                more = {}
            yield f"rope_parameters: {name}", {"rope_parameters": changed} | more, ()
    gone = ("rope_parameters",)
    yield "rope_scaling: no rope_parameters", {"rope_scaling": YARN, **theta}, gone
    if family in ("llama", "deepseek_v3", "gpt_oss", "gemma3_text", "qwen3_next"):
        linear = {"type": "linear", "factor": 4.0}
        yield "rope_scaling: old form", {"rope_scaling": linear, **theta}, gone
        yield "rope_scaling: null", {"rope_scaling": None, "rope_theta": 50.0}, gone
        yield "rope_scaling: empty", {"rope_scaling": {}, "rope_theta": 50.0}, gone
        yield "rope_theta: no rope_parameters", {"rope_theta": 50.0}, gone
        yield "rope_theta: null", {"rope_theta": None}, gone
        inside = {"rope_scaling": linear | {"rope_theta": 50.0}, "rope_theta": 7.0}
        yield "rope_theta: inside and outside", inside, gone
    yield (
        "rope_scaling: beside rope_parameters",
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        (),
    )
    by_kind = {FULL: flat | {"rope_theta": 50.0}, SLIDING: {"rope_type": "linear", "factor": 4.0}}
    by_kind[SLIDING] |= theta
    yield "rope_parameters: by kind of layer", {"rope_parameters": by_kind}, ()
    if family == "llama":
        number = {"rope_type": "default", "rope_theta": "500.0"}
        yield "rope_parameters: text theta", {"rope_parameters": number}, ()
        yield "rope_parameters: int theta", {"rope_parameters": number | {"rope_theta": 500}}, ()
        yield "rope_parameters: null theta", {"rope_parameters": number | {"rope_theta": None}}, ()
        yield "rope_parameters: a list", {"rope_parameters": [500.0]}, ()
        outside = {"rope_parameters": YARN | theta, "original_max_position_embeddings": 16}
        yield "original_max_position_embeddings: beside yarn", outside, ()


def others(key: str, value: Any) -> list[Any]:
    """Return other values of a key."""
    if key in VALUES:
        return [one for one in VALUES[key] if one != value]
    if key == "layer_types":
        known = [[kinds[i % 2] for i in range(len(value))] for kinds in KINDS]
        return [value[::-1], *known, value[:-1], [*value, FULL], []]
    if isinstance(value, bool):
        return [not value]
    if key.endswith(("act", "activation")):
        return [one for one in ACTIVATIONS if one != value]
    if isinstance(value, int):
        return (
            [value + 1] if "layers" in key or key.startswith(("n_shared", "first")) else [2 * value]
        )
    if isinstance(value, float):
        return [1.5 * value]
    return []


# Values of fields that are null in the base or absent from it.
FILLED: Config = {
    "attn_logit_softcapping": 0.5,
    "head_dim": 12,
    "layer_types": [SLIDING, FULL],
    "max_window_layers": 0,
    "mlp_only_layers": [0],
    "n_group": 2,
    "num_decoder_layers": 1,
    "q_lora_rank": 6,
    "sliding_window": 7,
    "topk_group": 1,
}


def changes(family: str, base: Config) -> Iterator[tuple[str, Config, tuple[str, ...]]]:
    """Yield name, changed keys and absent keys of every variant."""
    fields = {one.name: one for one in dataclasses.fields(transformers.CONFIG_MAPPING[family])}
    yield "base", {}, ()
    yield "dead keys", {key: DEAD[key] for key in DEAD if key in fields}, ()
    yield "dead keys absent", {}, tuple(key for key in DEAD if key in base)
    yield "architectures", {"architectures": ["LlamaModel"]}, ()
    for key in [*base, *(key for key in fields if key not in base)]:
        if key in KEPT or key == "rope_parameters" or key.startswith("_"):
            continue
        value = base.get(key)
        for one in others(key, value) or ([FILLED[key]] if key in FILLED else []):
            yield f"{key}: {json.dumps(one)}", {key: one}, ()
    for key in base:
        if key not in KEPT:
            yield f"{key}: absent", {}, (key,)
    for key, field in fields.items():
        if key not in KEPT and "None" in str(field.type) and base.get(key) is not None:
            yield f"{key}: null", {key: None}, ()
    for key, value in UNDECLARED.items():
        if key not in fields and key not in base:
            yield f"{key}: {json.dumps(value)}", {key: value}, ()
    for more in SEVERAL.get(family, []):
        yield json.dumps(more)[1:-1], more, ()
    if "rope_parameters" in base:
        yield from rope_changes(family, base)


def read_config(folder: Path) -> Any:
    return transformers.AutoConfig.from_pretrained(folder)


def auto_class(family: str) -> Any:
    return (
        transformers.T5ForConditionalGeneration
        if family == "t5"
        else transformers.AutoModelForCausalLM
    )


def shapes_of(family: str, config: Any, folder: Path) -> recorded.Shapes:
    """Return the shapes of the tensors that transformers saves."""
    make = auto_class(family)
    with torch.device("meta"):
        net = make._from_config(config) if family == "t5" else make.from_config(config)
    size = sum(one.numel() * 4 for one in net.parameters())
    if size > LARGEST or net.config.num_hidden_layers > 12:
        raise MemoryError
    torch.manual_seed(0)
    net = make._from_config(config) if family == "t5" else make.from_config(config)
    net.float().save_pretrained(folder / "saved")
    (file,) = (folder / "saved").glob("*.safetensors")
    with safe_open(file, "numpy") as reader:
        return {name: tuple(reader.get_slice(name).get_shape()) for name in list(reader.keys())}


def logits_of(family: str, net: Any) -> np.ndarray:
    """Return the logits of a model, in float64 where transformers does not fix float32."""
    net.eval()
    if hasattr(net, "set_experts_implementation") and "expert" in str(net).lower():
        net.set_experts_implementation("eager")  # others lack float64
    if family == "t5":
        given = {"input_ids": torch.tensor(recorded.SOURCE)[None]}
        given |= {"decoder_input_ids": torch.tensor(recorded.TARGET)[None]}
    else:
        given = {"input_ids": torch.tensor(recorded.TOKENS)[None]}
    logits = net.double()(**given, use_cache=False).logits[0].numpy()
    if not np.isfinite(logits).all():
        raise ArithmeticError("logits are not finite")
    return recorded.projected(logits)


def run(family: str, folder: Path) -> np.ndarray:
    net, info = auto_class(family).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    if any(info.values()):
        sys.exit(f"expected all tensors of {folder} in the model, and no others; got {info}")
    return logits_of(family, net)


def record(family: str) -> None:
    start = time.time()
    name, more = BASES[family]
    base = json.loads((HERE / name / "config.json").read_text()) | {"vocab_size": recorded.VOCAB}
    base |= more | {key: 0.05 for key in COARSE if key in base}
    base = copy.deepcopy({key: value for key, value in base.items() if value is not ABSENT})
    if "rope_parameters" in more:
        base["rope_parameters"].setdefault("rope_type", "default")
    base_shapes, variants = {}, []
    for title, changed, gone in changes(family, base):
        config = {key: value for key, value in (base | changed).items() if key not in gone}
        variant: dict[str, Any] = {"name": title}
        if changed:
            variant["config"] = changed
        if gone:
            variant["without"] = gone
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "config.json").write_text(json.dumps(config))
            at = "config"
            try:
                read = read_config(folder)
                at = "model"
                shapes = shapes_of(family, read, folder)
                base_shapes = base_shapes or shapes
                gap = {key: shape for key, shape in shapes.items() if base_shapes.get(key) != shape}
                gap |= {key: None for key in base_shapes if key not in shapes}
                if gap:
                    variant["tensors"] = gap
                save_file(
                    recorded.random_tensors(shapes), folder / "model.safetensors", {"format": "pt"}
                )
                at = "forward"
                variant["logits"] = run(family, folder)
            except MemoryError:
                continue
            except Exception as error:
                lines = " ".join((str(error).strip() or repr(error)).split("\n")[:2])
                variant |= {"refused": f"{type(error).__name__}: {lines}"[:200], "at": at}
        variants.append(variant)
    file = recorded.FOLDER / f"{family}.json.gz"
    recorded.write(
        family, {"config": base, "tensors": base_shapes}, [dict(one) for one in variants]
    )
    scale = np.abs(variants[0]["logits"]).max() if "logits" in variants[0] else 1.0
    for one in variants if "-v" in sys.argv else []:
        if "logits" in one:
            effect = (
                np.abs(one["logits"] - variants[0]["logits"]).max() / scale
                if one["logits"].shape == variants[0]["logits"].shape
                else -1
            )
            print(f"  {effect:9.2g}  {one['name']}")
        else:
            print(f"  {one['at']:>9}  {one['name']}   {one['refused'][:110]}")
    refused = sum("refused" in one for one in variants)
    print(
        f"{family}: {len(variants)} variants, {refused} refused, {file.stat().st_size} bytes, "
        f"{time.time() - start:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(50)
    transformers.logging.disable_progress_bar()
    names = [name for name in sys.argv[1:] if name != "-v"]
    with torch.no_grad():
        for family in names or BASES:
            record(family)
