"""GGUF files of Gemma 4, dense and with experts.

The rotary embedding of layers with full attention is a list of divisors, which are 1e30 for pairs
that are not rotated. A layer without a matrix for values uses its keys.
"""

from models.checkpoints.gguf.architecture import Architecture, Settings, Shapes
from models.checkpoints.gguf.architectures.gemma3 import GEMMA, window_settings
from models.checkpoints.gguf.architectures.gemma3n import INPUTS, INPUTS_OUTSIDE, input_settings
from models.checkpoints.gguf.metadata import FLAGS, FLOAT, INT, Metadata
from models.kinds import refusal

_EXPERTS = {
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_exps.weight": "experts.gate_proj",
    "ffn_up_exps.weight": "experts.up_proj",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}


def _settings(get: Metadata, config: Settings, shapes: Shapes) -> Settings:
    get.required("attention.sliding_window_pattern", FLAGS)
    windows = window_settings(get, config | {"rope_parameters": _rope(get, config)}, 6)
    shared, experts = get("attention.shared_kv_layers", INT, 0), get("expert_count", INT, 0)
    full = [kind == "full_attention" for kind in windows["layer_types"]]
    sizes = _head_sizes(get, config, full)
    writes = max(config["num_hidden_layers"] - shared, 0)
    values = [f"model.layers.{i}.self_attn.v_proj.weight" in shapes for i in range(writes)]
    first = full.index(False) if False in full else 0
    return {
        **windows,
        **input_settings(shapes, get.required("embedding_length_per_layer_input", INT)),
        **_feed_settings(get, config, writes),
        **sizes[first],
        "attention_k_eq_v": any(one and not own for one, own in zip(full, values, strict=False)),
        "enable_moe_block": experts > 0,
        "num_experts": experts or None,
        "top_k_experts": get("expert_used_count", INT),
        "moe_intermediate_size": get("expert_feed_forward_length", INT),
        "final_logit_softcapping": get("final_logit_softcapping", FLOAT, 30.0),
        "num_kv_shared_layers": shared,
        "per_layer_config": dict(enumerate(sizes)),
    }


def _rope(get: Metadata, config: Settings) -> Settings:
    """Return the parameters of the rotary embedding of layers with full attention."""
    rope = config["rope_parameters"]
    if rope["rope_type"] != "factors":
        return rope
    divisors = rope["factors"]
    rotated = divisors.count(1)
    fits = 0 < 2 * len(divisors) == config["head_dim"]
    if not fits or min(divisors[rotated:], default=1e30) < 1e30:
        expected = "a divisor for each pair of a head, 1 and then 1e30,"
        raise refusal(divisors, expected, "rope_freqs.weight", get.source)
    share = {"rope_type": "proportional", "partial_rotary_factor": rotated / len(divisors)}
    return share | {"rope_theta": rope["rope_theta"]}


def _head_sizes(get: Metadata, config: Settings, full: list[bool]) -> list[Settings]:
    """Return the number of key/value heads and the size of a head, for each layer."""
    size, smaller = config["head_dim"], get.required("attention.key_length_swa", INT)
    for name in ("attention.value_length", "rope.dimension_count"):
        for key, expected in ((name, size), (f"{name}_swa", smaller)):
            if get(key, INT, expected) != expected:
                raise get.unsupported(key, f"{expected}, the size of a key")
    sizes = [size if one else smaller for one in full]
    pairs = zip(config["num_key_value_heads"], sizes, strict=False)
    return [{"num_key_value_heads": count, "head_dim": size} for count, size in pairs]


def _feed_settings(get: Metadata, config: Settings, writes: int) -> Settings:
    """Return the settings of feed-forward parts; those of layers that share keys may be wider."""
    found = config["intermediate_size"]
    hidden, wide = found[0], found[-1] != found[0]
    if found != [hidden * (2 if wide and i >= writes else 1) for i in range(len(found))]:
        expected = "one number, doubled in layers that share keys"
        raise get.unsupported("feed_forward_length", expected)
    return {"intermediate_size": hidden, "use_double_wide_mlp": wide}


ARCHITECTURES = {
    "gemma4": Architecture(
        family="gemma4_text",
        layer=GEMMA | INPUTS | _EXPERTS | {"layer_output_scale.weight": "layer_scalar"},
        outside=INPUTS_OUTSIDE,
        by_layer=("feed_forward_length", "attention.head_count_kv"),
        settings=_settings,
    )
}
