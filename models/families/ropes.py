"""Rotary embeddings from the configs of models."""

import math
from dataclasses import replace
from typing import Any

import jaxkv
from jaxkv.rope import Rope
from models.checkpoints.checkpoint import Checkpoint
from models.errors import ModelError
from models.kinds import check, refusal, several, whole


def rope_of(
    checkpoint: Checkpoint,
    kind: str | None = None,
    *,
    head_dim: int | None = None,
    partly: bool = False,
) -> Rope:
    """Return the rotary embedding of a checkpoint, with the scaling of its config.

    Args:
      checkpoint: source of the parameters, under the key `rope_parameters`.
      kind: kind of layer, if the config has parameters for each kind.
      head_dim: size of a head; None for the value in the config.
      partly: whether the family rotates a part of each head (`partial_rotary_factor`). The classes
        of other families ignore the key, but the scaling rules do not.

    Raises:
      ModelError: If the scaling rule is unknown, or its parameters are missing or invalid.
    """
    c, source = checkpoint.config, checkpoint.source
    values = _parameters(checkpoint, kind)
    rule, factor = values["rope_type"], values.get("partial_rotary_factor") or 1.0
    if rule == "proportional":  # the factor is not of the size, see `_stretch`
        factor = 1.0
    if factor != 1 and not partly:
        if rule != "default":
            raise refusal(factor, "1.0, since heads are rotated as a whole,", _PART, source)
        factor = 1.0
    head_dim = head_dim or c["head_dim"]
    size = int(head_dim * factor)
    if size < 2 or size % 2:
        raise ModelError(
            f"{source}: expected an even number of rotated dimensions, at least 2, got {size} "
            f"(head_dim = {head_dim}, {_PART} = {factor}); download it again."
        )
    if rule not in _NEEDS:
        raise ModelError(
            f"{source}: expected a rope_type of {', '.join(_NEEDS)}, got {rule!r}; give another "
            "model."
        )
    for name in (*_NEEDS[rule], "rope_theta"):
        if values.get(name) is None:
            raise ModelError(
                f"{source}: expected {name} for rope_type {rule!r}, got none; add it to "
                "rope_parameters in its config."
            )
    try:
        return _stretch(jaxkv.Rope.make(size, base=values["rope_theta"]), rule, values)
    except ValueError as error:
        raise ModelError(
            f"{source}: the values for rope_type {rule!r} are invalid ({error}); download it again."
        ) from error


def alternating_axes(checkpoint: Checkpoint, rope: Rope) -> tuple[int, ...]:
    """Return the axis of each pair of a rope: time (0), height (1) or width (2), in turns.

    The number of pairs of an axis is in `mrope_section`. Pairs after the last turn of height or
    width are of time.
    """
    sections = _parameters(checkpoint, None).get("mrope_section", [11, 11, 10])
    check(sections, several(whole(0, 2**14), 3), "mrope_section", checkpoint.source)
    if len(sections) != 3:
        raise refusal(sections, "3 numbers", "mrope_section", checkpoint.source)
    pairs = range(len(rope.frequencies))
    return tuple(i % 3 if i // 3 < sections[i % 3] else 0 for i in pairs)


def yarn_sharpness(checkpoint: Checkpoint) -> float:
    """Return the factor that YaRN computes from `mscale_all_dim`.

    Attention logits are multiplied by the square of the result. The result is 1 if the config has
    no `mscale_all_dim`, or the scaling factor is not above 1.
    """
    values = _parameters(checkpoint, None)
    return _sharpness(values.get("factor") or 1.0, values.get("mscale_all_dim") or 0.0)


def _parameters(checkpoint: Checkpoint, kind: str | None) -> dict[str, Any]:
    values = checkpoint.config["rope_parameters"]
    if kind is not None:
        values = values.get(kind) or {}
    longest = checkpoint.config.get("max_position_embeddings")
    defaults = {"rope_type": "default", "original_max_position_embeddings": longest}
    given = {key: value for key, value in values.items() if value is not None or key == "rope_type"}
    return defaults | given


def _sharpness(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


_PART = "partial_rotary_factor"
_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "factors": ("factors",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
    "proportional": (),
}
"""Parameters of each scaling rule that must be given."""


def _stretch(rope: Rope, rule: str, scaling: dict[str, Any]) -> Rope:
    original = scaling.get("original_max_position_embeddings")
    match rule:
        case "linear":
            return rope.linear(factor=scaling["factor"])
        case "factors":
            return rope.divide(scaling["factors"])
        case "proportional":  # the slowest pairs of the whole head are not rotated
            share, pairs = scaling.get(_PART, 1.0), len(rope.frequencies)
            if not 0 <= share <= 1:
                raise ValueError(f"expected {_PART} from 0 to 1, got {share}")
            rotated = int(share * 2 * pairs // 2)
            faster = rope.linear(factor=scaling.get("factor", 1.0)).frequencies[:rotated]
            return replace(rope, frequencies=faster + (0.0,) * (pairs - rotated))
        case "llama3":
            return rope.llama3(
                factor=scaling["factor"],
                low_freq_factor=scaling["low_freq_factor"],
                high_freq_factor=scaling["high_freq_factor"],
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
                base=scaling["rope_theta"],
                beta_fast=scaling.get("beta_fast") or 32.0,
                beta_slow=scaling.get("beta_slow") or 1.0,
                attention_factor=attention_factor,
                truncate=scaling.get("truncate", True),
            )
    return rope
