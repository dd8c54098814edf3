"""Settings of a model, by key of `config.json`."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from models.checkpoints.ranges import check_ranges
from models.errors import ModelError, brief_json, unsupported
from models.kinds import refusal


class Config(Mapping[str, Any]):
    """Settings of a model, with a record of the keys that were read.

    A value of None counts as absent. `check_all_read` raises if the model's class has a setting
    that was not read and differs from the default, since its effect is not computed.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ):
        """Make a config.

        Args:
          values: value of each key, with `model_type`.
          source: file name, for messages.
          defaults: default of each setting that has an effect on logits.

        Raises:
          ModelError: If a value is out of range.
        """
        self._values = {key: value for key, value in values.items() if value is not None}
        self._source, self._defaults = source, defaults
        self._read_keys: set[str] = set()
        check_ranges(self._values, "", source)

    def __getitem__(self, key: str) -> Any:
        self._read_keys.add(key)
        if key not in self._values:
            family = self._values["model_type"]
            raise ModelError(
                f"{self._source}: expected {key} in the config of a {family!r} model, got none; "
                "add it."
            )
        return self._values[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` if the key is absent."""
        self._read_keys.add(key)
        return self._values.get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def updated(self, **values: Any) -> "Config":
        """Return the config with other values."""
        return Config(self._values | values, self._source, self._defaults)

    def ignore(self, keys: str) -> None:
        """Count keys, separated by spaces, as read, because they have no effect on logits."""
        self._read_keys.update(keys.split())

    def layer_kinds(self, *kinds: str) -> tuple[str, ...]:
        """Return the kind of each layer, from the key `layer_types`.

        Raises `ModelError` if a kind is not in `kinds`, or the number of kinds is not that of the
        layers.
        """
        found = tuple(self["layer_types"])
        for kind in found:
            if kind not in kinds:
                raise self.refusal("layer_types", f"one of {', '.join(kinds)}", kind)
        if len(found) != self["num_hidden_layers"]:
            raise self.refusal("layer_types", f"one for each of {self['num_hidden_layers']} layers")
        return found

    def check_divides(self, part: str, whole: str) -> None:
        """Raise `ModelError` if the value of `whole` is no multiple of the value of `part`."""
        if self[whole] % self[part]:
            raise self.refusal(whole, f"a multiple of {part} ({self[part]})")

    def check_chosen(self, experts: str, chosen: str = "num_experts_per_tok") -> None:
        """Raise `ModelError` if a token selects no expert, or more experts than there are."""
        if not 1 <= self[chosen] <= self[experts]:
            raise self.refusal(chosen, f"1 to {self[experts]} experts")

    def refusal(self, key: str, expected: str, value: Any = None) -> ModelError:
        """Return the `ModelError` for the value of a key, or for `value`, a part of it."""
        return refusal(self.get(key) if value is None else value, expected, key, self._source)

    def check_all_read(self) -> None:
        """Raise `ModelError` for a setting that was not read and differs from the default."""
        for key, default in self._defaults.items():
            value = self._values.get(key)
            if key not in self._read_keys and value != default:
                raise unsupported(key, brief_json(default), value, self._source)
