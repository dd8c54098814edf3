"""GGUF files of Gemma 3n.

A tensor has all projections to further vectors of a token (`altup_proj`), and another one all
projections back. Files have inputs of layers for all tokens; those that the model lacks are 0. They
lack `altup_correct_scale`, since llama.cpp always scales. For some keys, such as
`altup.active_idx`, llama.cpp has constants.
"""

import math
from statistics import NormalDist

from models.checkpoints.gguf.architecture import OUTSIDE, Architecture, Settings, Shapes
from models.checkpoints.gguf.architectures.gemma3 import GEMMA, window_settings
from models.checkpoints.gguf.metadata import FLOAT, INT, Metadata
from models.checkpoints.ranges import LAYERS
from models.kinds import Kind, refusal, several

INPUTS = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
"""Names of tensors of a layer for its inputs."""
INPUTS_OUTSIDE = OUTSIDE | {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_LIMIT = 1.6448533535003662
"""Limit of gates in the first layers, in standard deviations: llama.cpp's constant."""
_LIMITS = several(
    Kind(
        words="a number of standard deviations, or -Infinity",
        accepts=lambda value: FLOAT.accepts(value) or value == -math.inf,
    ),
    LAYERS,
)


def input_settings(shapes: Shapes, size: int) -> Settings:
    """Return the settings of inputs of layers, of this size."""
    shape = shapes.get("model.embed_tokens_per_layer.weight")
    return {
        "hidden_size_per_layer_input": size,
        "vocab_size_per_layer_input": shape[0] if shape else None,
    }


def _settings(get: Metadata, config: Settings, shapes: Shapes) -> Settings:
    layers = config["num_hidden_layers"]
    name, default = "activation_sparsity_scale", [_LIMIT] * 10 + [-math.inf] * layers
    limits = get(name, _LIMITS, default[:layers])
    if len(limits) != layers:
        raise refusal(limits, f"{layers} numbers", get.prefix + name, get.source)
    rank = shapes.get("model.layers.0.laurel.linear_left.weight")
    return {
        **window_settings(get, config, 5),
        **input_settings(shapes, get("embedding_length_per_layer_input", INT, 256)),
        "activation_sparsity_pattern": [NormalDist().cdf(limit) for limit in limits],
        "altup_active_idx": get("altup.active_idx", INT, 0),
        "altup_correct_scale": True,
        "altup_num_inputs": get("altup.num_inputs", INT, 4),
        "final_logit_softcapping": get("final_logit_softcapping", FLOAT, 30.0),
        "laurel_rank": rank[0] if rank else None,
        "num_kv_shared_layers": get("attention.shared_kv_layers", INT, max(layers - 20, 0)),
    }


ARCHITECTURES = {
    "gemma3n": Architecture(
        family="gemma3n_text",
        layer=GEMMA
        | INPUTS
        | {
            "altup_correct_coef": "altup.correction_coefs",
            "altup_correct_scale.weight": "altup.correct_output_scale",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        outside=INPUTS_OUTSIDE
        | {
            "altup_proj.weight": "model.altup_projections.weight",
            "altup_unembd_proj.weight": "model.altup_unembed_projections.weight",
        },
        by_layer=("feed_forward_length",),
        settings=_settings,
    )
}
