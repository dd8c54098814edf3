"""GGUF files of Mamba-2.

GGUF files contain negative decay rates, where Hugging Face has the logarithms of decay rates
(`A_log`). Compared to Hugging Face's form, some vectors have a second dimension, and weights of
convolutions have one dimension less.
"""

from dataclasses import replace

import numpy as np

from models.checkpoints.config import Config
from models.checkpoints.gguf.architecture import OUTSIDE, Architecture, Settings, Shapes
from models.checkpoints.gguf.metadata import INT, Metadata
from models.checkpoints.tensor import Tensor

BACKBONE = OUTSIDE | {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
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
"""Names of tensors of a Mamba-2 mixer."""


def mixer_names(prefix: str) -> dict[str, str]:
    """Return the Hugging Face names of the tensors of a Mamba-2 mixer, by name in the file."""
    return {name: f"{prefix}.{plain}" for name, plain in _MIXER.items()}


def convert_mixer(name: str, tensor: Tensor, config: Config) -> Tensor:
    """Convert a tensor of a Mamba-2 mixer or of a short convolution; return others unchanged."""
    del config
    if name.endswith(".A_log"):
        flat = tensor.map(lambda x: x.reshape(-1))
        return replace(flat, read=lambda: np.log(-flat.read().astype(np.float32)))
    if name.endswith((".D", "mixer.norm.weight", "mamba.norm.weight")):
        return tensor.map(lambda x: x.reshape(-1))
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return tensor.map(lambda x: x[:, None])
    return tensor


def state_sizes(get: Metadata) -> tuple[int, int, int | None, int, int]:
    """Return the sizes of a kernel, heads, a head, a state and groups of recurrent layers."""
    kernel, inner, state, heads, groups = (
        get.required(f"ssm.{name}", INT)
        for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
    )
    return kernel, heads, inner // heads if heads else None, state, groups


def mixer_settings(get: Metadata, shapes: Shapes) -> Settings:
    """Return the settings of Mamba-2 mixers, with the keys of hybrid models."""
    kernel, heads, head_dim, state, groups = state_sizes(get)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_d_state": state,
        "mamba_n_groups": groups,
        "mamba_d_conv": kernel,
        "mamba_conv_bias": any(name.endswith("conv1d.bias") for name in shapes),
        "mamba_proj_bias": False,
        "time_step_limit": (0.0, float("inf")),
    }


def _settings(get: Metadata, config: Settings, shapes: Shapes) -> Settings:
    get.ignore("rope.dimension_count")
    kernel, heads, head_dim, state, groups = state_sizes(get)
    return {
        # The file has 0, since there is neither attention nor a feed-forward part.
        "intermediate_size": None,
        "num_attention_heads": None,
        "num_key_value_heads": None,
        "layer_norm_epsilon": config["rms_norm_eps"],
        "num_heads": heads,
        "head_dim": head_dim,
        "state_size": state,
        "n_groups": groups,
        "conv_kernel": kernel,
        "time_step_limit": (0.0, float("inf")),
        "use_bias": False,
        "use_conv_bias": True,
    }


ARCHITECTURES = {
    "mamba2": Architecture(
        family="mamba2",
        layer={"attn_norm": "norm"} | mixer_names("mixer"),
        outside=BACKBONE,
        layers="backbone.layers",
        settings=_settings,
        convert=convert_mixer,
    )
}
