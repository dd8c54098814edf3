"""Rope parameters of a config, converted from older and newer forms to one form.

Rope parameters can be in `rope_parameters`, in `rope_scaling` and at the top level. If a parameter
is in several of these places, its values must be equal, since `transformers` and other programs
read different places.
"""

from collections.abc import Iterator
from typing import Any

from models.checkpoints.fields import check_rope
from models.checkpoints.keys import brief_json
from models.errors import ModelError
from models.kinds import refusal

_YARN = "attention_factor beta_fast beta_slow factor finetuned mscale mscale_all_dim truncate"
_NUMBERS = {
    "default": set(),
    "factors": {"factors"},
    "linear": {"factor"},
    "llama3": {"factor", "high_freq_factor", "low_freq_factor"},
    "yarn": set(_YARN.split()),
}
"""Keys of each scaling rule that are read or ignored, in addition to `_ALWAYS`."""
_ALWAYS = {"original_max_position_embeddings"}
_BESIDE = {
    "partial_rotary_factor": "partial_rotary_factor",
    "rope_local_base_freq": "rope_local_base_freq",
    "rope_theta": "rope_theta",
    "theta": "rope_theta",
}


def lift_rope(config: dict[str, Any], source: str) -> None:
    """Add the rope parameters of a config to its top level; the dict `config` is changed.

    Sets the keys `rope_theta`, `partial_rotary_factor`, `rope_local_base_freq` and `rope_scaling`,
    each only if the file has a value for it. The value of `rope_scaling` is None for rope without
    scaling, otherwise a dict with the key `rope_type`.

    Raises:
      ModelError: If a value is out of range, or its key is not allowed for the given `rope_type`.
      ModelError: If two places in the file have different values of a parameter.
    """
    said = [(name, key, config[name]) for name, key in _BESIDE.items() if name in config]
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name) or {}
        said += [(name, *pair) for pair in _said(config["model_type"], rope, name, source)]
    found: dict[str, tuple[str, Any]] = {}
    for name, key, value in said:
        first_name, first_value = found.setdefault(key, (name, value))
        if first_value != value:
            raise ModelError(
                f"{source}: expected the same {key} in {first_name} and {name}, got "
                f"{brief_json(first_value)} and {brief_json(value)}; remove the one that is wrong."
            )
    config.pop("rope_scaling", None)
    config |= {key: value for key, (_, value) in found.items()}


def _said(family: str, rope: Any, name: str, source: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of an object with rope parameters in a config."""
    check_rope(rope, name, source)
    if family == "gemma3_text" and "full_attention" in rope:  # one object for each kind of layer
        for kind in rope:
            if kind not in ("full_attention", "sliding_attention"):
                raise refusal(kind, "full_attention or sliding_attention", name, source)
        where = f"{name}.sliding_attention"
        for key, value in _flat(rope.get("sliding_attention") or {}, where, source):
            if key == "rope_theta":
                yield "rope_local_base_freq", value
            elif value is not None:  # these layers are never stretched
                raise refusal(value, "rope_theta only", where, source)
        yield from _flat(rope["full_attention"], f"{name}.full_attention", source)
    elif rope:
        yield from _flat(rope, name, source)


def _flat(rope: Any, name: str, source: str) -> Iterator[tuple[str, Any]]:
    check_rope(rope, name, source)
    rope = {key: value for key, value in rope.items() if value is not None}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            yield key, rope.pop(key)
    older = rope.pop("type", None)
    kind = rope.setdefault("rope_type", older or "default")
    if older not in (None, kind):
        raise refusal(older, f"{kind!r}, as in rope_type,", f"{name}.type", source)
    for key, value in rope.items() if kind in _NUMBERS else ():
        if key not in _NUMBERS[kind] | _ALWAYS | {"rope_type"}:
            raise refusal(value, f"no value with rope_type {kind!r}", f"{name}.{key}", source)
    rope.pop("finetuned", None)
    yield "rope_scaling", None if kind == "default" else rope
