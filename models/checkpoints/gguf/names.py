"""Hugging Face names of the tensors of GGUF files.

A name in a table stands for the weight and the bias, unless it has a suffix. If two tensors are the
halves of a Hugging Face tensor, their names in a table end in `.gate` and `.up`.
"""

import re

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OUTSIDE_IN = {
    "mamba2": {
        "token_embd.weight": "backbone.embeddings.weight",
        "output_norm.weight": "backbone.norm_f.weight",
    },
    # The last norm, despite its name.
    "lfm2": {"token_embd_norm.weight": "model.embedding_norm.weight"},
    "falcon-h1": {"output_norm.weight": "model.final_layernorm.weight"},
}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_LAYER = _ATTENTION | {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MIXER = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
_MAMBA = _ATTENTION | {name: f"mamba.{plain}" for name, plain in _MIXER.items()}
_LAYER_IN = {
    "mamba2": {"attn_norm": "norm"} | {name: f"mixer.{plain}" for name, plain in _MIXER.items()},
    "granitehybrid": _MAMBA
    | {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_exps.weight": "block_sparse_moe.input_linear.weight.gate",
        "ffn_up_exps.weight": "block_sparse_moe.input_linear.weight.up",
        "ffn_down_exps": "block_sparse_moe.output_linear",
        "ffn_gate_shexp.weight": "shared_mlp.input_linear.weight.gate",
        "ffn_up_shexp.weight": "shared_mlp.input_linear.weight.up",
        "ffn_down_shexp": "shared_mlp.output_linear",
        "ffn_gate.weight": "shared_mlp.input_linear.weight.gate",
        "ffn_up.weight": "shared_mlp.input_linear.weight.up",
        "ffn_down": "shared_mlp.output_linear",
    },
    "lfm2": _ATTENTION
    | {
        "attn_norm": "operator_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
    },
    "falcon-h1": _MAMBA
    | {
        "attn_norm": "input_layernorm",
        "ffn_norm": "pre_ff_layernorm.weight",  # the only weight without .weight in its name
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    "gpt-oss": _ATTENTION
    | {
        "attn_norm": "input_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        "ffn_gate_exps.weight": "mlp.experts.gate_up_proj.gate",
        "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias.gate",
        "ffn_up_exps.weight": "mlp.experts.gate_up_proj.up",
        "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias.up",
        "ffn_down_exps.weight": "mlp.experts.down_proj",
        "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    },
    "gemma3": _LAYER
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}


def hugging_face_name(name: str, arch: str) -> str | None:
    """Return the Hugging Face name of a tensor; None if the architecture has no such tensor.

    If the tensor is one half of a Hugging Face tensor, the returned name ends in `.gate` or `.up`.
    """
    found = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if found is None:
        return (_OUTSIDE | _OUTSIDE_IN.get(arch, {})).get(name)
    layer, part = found.groups()
    names, (base, _, suffix) = _LAYER_IN.get(arch, _LAYER), part.rpartition(".")
    plain = names.get(part)
    if plain is None and base in names and suffix in ("weight", "bias"):
        plain = f"{names[base]}.{suffix}"
    layers = "backbone.layers" if arch == "mamba2" else "model.layers"
    return plain and f"{layers}.{layer}.{plain}"


def stored_name(arch: str, plain: str) -> str:
    """Return the name in the file of a Hugging Face tensor, or of its first half."""
    layer = re.search(r"\d+", plain) or [0]
    parts = [f"blk.{layer[0]}.{part}" for part in _LAYER_IN.get(arch, _LAYER)]
    names = [f"{part}{suffix}" for part in parts for suffix in ("", ".weight", ".bias")]
    names += [*_OUTSIDE, *_OUTSIDE_IN.get(arch, {})]
    ours = (plain, f"{plain}.gate")
    return next((name for name in names if hugging_face_name(name, arch) in ours), plain)
