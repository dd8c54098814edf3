"""Metadata of a GGUF file, by key."""

from collections.abc import Mapping
from typing import Any

from models.checkpoints.gguf.reader import Reader
from models.checkpoints.ranges import LAYERS
from models.errors import ModelError, brief_json, first_line, unsupported
from models.kinds import Kind, check, number, several, whole

INT, FLOAT = whole(0, 2**31 - 2), number(-1e30, 1e30)
_FLAG = Kind(
    words="true or false, or 0 or 1",
    accepts=lambda value: type(value) in (bool, int) and value in (0, 1),
)
FLAGS = several(_FLAG, LAYERS)
"""A flag for each layer."""
_ID = whole(0, 2**32 - 1)
_OTHER_SENSES = ("vision.", "audio.", "mm.")
"""Beginnings of keys for images and audio, which have no effect on tokens of text."""


class Metadata:
    """Values of the metadata keys with a prefix, with a record of the keys that were read.

    `check_all_read` raises if the file has another key, since its effect is not computed.
    """

    def __init__(self, reader: Reader, source: str, prefix: str = ""):
        self._reader, self.source, self.prefix = reader, source, prefix
        self._read_keys: set[str] = set()

    def __call__(self, name: str, kind: Kind | None = None, default: Any = None) -> Any:
        """Return the value of a key, or `default` if the file does not have the key.

        Args:
          name: key without the prefix.
          kind: kind of the value; None for any value.
          default: result for an absent key.

        Raises:
          ModelError: If the value cannot be read, or is not of the kind.
        """
        self._read_keys.add(name)
        key = self.prefix + name
        field = self._reader.get_field(key)
        if field is None:
            return default
        try:
            value = field.contents()
        except Exception as error:  # for invalid UTF-8 or missing bytes
            raise ModelError(
                f"{self.source}: the value of {key} cannot be read ({first_line(error)}); download "
                "it again."
            ) from error
        if kind is not None:
            check(value, kind, key, self.source)
        return value

    def required(self, name: str, kind: Kind) -> Any:
        """Return the value of a key; raise `ModelError` if the file does not have the key."""
        value = self(name, kind)
        if value is None:
            raise ModelError(
                f"{self.source}: expected {self.prefix}{name}, which llama.cpp requires, got none; "
                "download it again."
            )
        return value

    def unsupported(self, name: str, expected: str) -> ModelError:
        """Return the `ModelError` for a key with a value that no supported model has."""
        return unsupported(self.prefix + name, expected, self(name), self.source)

    def ignore(self, names: str) -> None:
        """Count keys, separated by spaces, as read, because they have no effect."""
        self._read_keys.update(names.split())

    def check_all_read(self, allowed: Mapping[str, tuple]) -> None:
        """Raise `ModelError` for a key that was not read, unless its value is in `allowed`."""
        for key in self._reader.fields:
            name = key.removeprefix(self.prefix)
            read = name in self._read_keys or name.startswith(_OTHER_SENSES)
            if key.startswith(self.prefix) and not read:
                values = allowed.get(name, ())
                if self(name) not in values:
                    expected = " or ".join(map(brief_json, values)) or "left out"
                    raise self.unsupported(name, expected)


def token_id(
    get: Metadata, name: str, default: int | None = None, count: int = 2**31 - 1
) -> int | None:
    """Return the token id under a key; `default` if it is absent or not one of `count` tokens.

    In some files, an absent token has the id -1, written as 2**32 - 1.
    """
    found = get(name, _ID, default)
    return found if found is None or found < count else default
