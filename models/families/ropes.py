"""Rotary embeddings from the configs of models."""

import math
from typing import Any

import jaxkv
from jaxkv.rope import Rope
from models.checkpoints.checkpoint import Checkpoint
from models.errors import ModelError


def rope_of(checkpoint: Checkpoint) -> Rope:
    """Return the rotary embedding of a checkpoint, with the scaling of its config.

    Raises `ModelError` if the scaling rule is unknown, or its parameters are missing or invalid.
    """
    c = checkpoint.config
    rope = plain_rope(checkpoint, c["rope_theta"])
    scaling = dict(c["rope_scaling"] or {"rope_type": "default"})
    scaling.setdefault("original_max_position_embeddings", c.get("max_position_embeddings"))
    kind = scaling["rope_type"]
    needs = {
        "default": (),
        "linear": ("factor",),
        "factors": ("factors",),
        "llama3": _LLAMA3,
        "yarn": ("factor", "original_max_position_embeddings"),
    }
    if kind not in needs:
        raise ModelError(
            f"{checkpoint.source}: expected a rope_type of {', '.join(needs)}, got {kind!r}; give "
            "another model."
        )
    for name in needs[kind]:
        if scaling.get(name) is None:
            raise ModelError(
                f"{checkpoint.source}: expected {name} for rope_type {kind!r}, got none; add it to "
                "rope_scaling in its config."
            )
    try:
        return _stretch(rope, kind, scaling, c["rope_theta"])
    except ValueError as error:
        raise ModelError(
            f"{checkpoint.source}: the values for rope_type {kind!r} are invalid ({error}); "
            "download it again."
        ) from error


def plain_rope(checkpoint: Checkpoint, base: float) -> Rope:
    """Return the rotary embedding of a checkpoint without scaling."""
    c = checkpoint.config
    factor = c.get("partial_rotary_factor", 1.0)
    size = int(c["head_dim"] * factor)
    if size < 2 or size % 2:
        raise ModelError(
            f"{checkpoint.source}: expected an even number of rotated dimensions, at least 2, got "
            f"{size} (head_dim = {c['head_dim']}, partial_rotary_factor = {factor}); download it "
            "again."
        )
    return jaxkv.Rope.make(size, base=base)


def yarn_sharpness(checkpoint: Checkpoint) -> float:
    """Return the factor that YaRN computes from `mscale_all_dim`.

    Attention logits are multiplied by the square of the result. The result is 1 if the config has
    no `mscale_all_dim`, or the scaling factor is not above 1.
    """
    scaling = checkpoint.config["rope_scaling"] or {}
    return _sharpness(scaling.get("factor", 1.0), scaling.get("mscale_all_dim") or 0.0)


def _sharpness(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _stretch(rope: Rope, kind: str, scaling: dict[str, Any], base: float) -> Rope:
    original = scaling["original_max_position_embeddings"]
    match kind:
        case "linear":
            return rope.linear(factor=scaling["factor"])
        case "factors":
            return rope.divide(scaling["factors"])
        case "llama3":
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            if low >= high:
                raise ValueError(
                    f"expected low_freq_factor below {high} (high_freq_factor), got {low}"
                )
            return rope.llama3(
                factor=scaling["factor"],
                low_freq_factor=low,
                high_freq_factor=high,
                original=original,
            )
        case "yarn":
            sharper, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
            attention_factor = scaling.get("attention_factor")
            if attention_factor is None and sharper and of_all:
                factor = scaling["factor"]
                attention_factor = _sharpness(factor, sharper) / _sharpness(factor, of_all)
            return rope.yarn(
                factor=scaling["factor"],
                original=original,
                base=base,
                beta_fast=scaling.get("beta_fast") or 32.0,
                beta_slow=scaling.get("beta_slow") or 1.0,
                attention_factor=attention_factor,
                truncate=scaling.get("truncate", True),
            )
    return rope
