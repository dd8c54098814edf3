"""How positions are rotated and stretched, in a config's older and newer words, in one form.

A file may say it in `rope_parameters`, in `rope_scaling`, and beside them. What is said twice must
be the same: `transformers` and other programs do not agree on which of two they read.
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
"""What a rule of stretching reads, or may have for no reason, beside `_ALWAYS`."""
_ALWAYS = {"original_max_position_embeddings"}
_BESIDE = {
    "partial_rotary_factor": "partial_rotary_factor",
    "rope_local_base_freq": "rope_local_base_freq",
    "rope_theta": "rope_theta",
    "theta": "rope_theta",
}


def lift_rope(config: dict[str, Any], source: str) -> None:
    """Bring what a config says of its rotary embedding to the top, in place.

    Then `rope_theta`, `partial_rotary_factor` and `rope_local_base_freq` are there if the file says
    them anywhere, and `rope_scaling` is None or a dict with `rope_type`.

    Raises:
      ModelError: when a value is not what it may be, has no meaning for its rule, or differs from
        what the file says elsewhere.
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
    config["rope_scaling"] = None
    config |= {key: value for key, (_, value) in found.items()}


def _said(family: str, rope: Any, name: str, source: str) -> Iterator[tuple[str, Any]]:
    """Yield each key of the one form that an object says, and its value."""
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
                raise refusal(value, "nothing but rope_theta", where, source)
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
        raise refusal(older, f"{kind!r}, as rope_type,", f"{name}.type", source)
    for key, value in rope.items() if kind in _NUMBERS else ():
        if key not in _NUMBERS[kind] | _ALWAYS | {"rope_type"}:
            raise refusal(value, f"nothing for {kind!r}", f"{name}.{key}", source)
    if rope.pop("truncate", True) is not True:
        raise refusal(False, "true", f"{name}.truncate", source)
    rope.pop("finetuned", None)
    yield "rope_scaling", None if kind == "default" else rope
