"""Metadata of a GGUF file, by key."""

from typing import Any

from models.checkpoints.gguf.reader import Reader
from models.errors import ModelError, brief
from models.kinds import Kind, check


class Metadata:
    """Metadata values by key, with optional checks of their types and ranges."""

    def __init__(self, reader: Reader, source: str):
        self._reader, self.source = reader, source

    def __call__(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` if the file does not have the key.

        Raises `ModelError` if the value cannot be read.
        """
        field = self._reader.get_field(key)
        if field is None:
            return default
        try:
            return field.contents()
        except Exception as error:  # for invalid UTF-8 or missing bytes
            raise ModelError(
                f"{self.source}: the value of {key} cannot be read ({brief(error)}); download it "
                "again."
            ) from error

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix, in file order."""
        return [key for key in self._reader.fields if key.startswith(prefix)]

    def checked(self, key: str, kind: Kind, default: Any = None) -> Any:
        """Return the value of a key, or `default` if the file does not have the key.

        Raises `ModelError` if the value cannot be read, or is not of the given kind.
        """
        value = self(key)
        if value is None:
            return default
        check(value, kind, key, self.source)
        return value
