"""The rotary embedding that a config describes."""

import jaxkv
from jaxkv import rope as ropes
from jaxkv.rope import Rope
from models.checkpoints.checkpoint import Checkpoint
from models.errors import ModelError


def rope_of(checkpoint: Checkpoint) -> Rope:
    """Read the rotary embedding of a checkpoint, stretched as its config says."""
    c = checkpoint.config
    size = int(c["head_dim"] * c.get("partial_rotary_factor", 1.0))
    rope = jaxkv.make_rope(size, base=c["rope_theta"])
    scaling = dict(c["rope_scaling"] or {"rope_type": "default"})
    original = scaling.get("original_max_position_embeddings", c.get("max_position_embeddings"))
    match scaling["rope_type"]:
        case "default":
            return rope
        case "linear":
            return ropes.linear(rope, factor=scaling["factor"])
        case "factors":
            return ropes.divide(rope, scaling["factors"])
        case "llama3":
            return ropes.llama3(
                rope,
                factor=scaling["factor"],
                low_freq_factor=scaling["low_freq_factor"],
                high_freq_factor=scaling["high_freq_factor"],
                original=original,
            )
        case "yarn":
            return ropes.yarn(
                rope,
                factor=scaling["factor"],
                original=original,
                base=c["rope_theta"],
                beta_fast=scaling.get("beta_fast") or 32.0,
                beta_slow=scaling.get("beta_slow") or 1.0,
                attention_factor=scaling.get("attention_factor"),
            )
    raise ModelError(
        f"{checkpoint.source} stretches its positions by {scaling['rope_type']!r}; "
        "known are linear, llama3, yarn and factors stored in the file."
    )
