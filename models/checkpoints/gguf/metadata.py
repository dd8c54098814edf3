"""The metadata of a GGUF file, by key."""

from typing import Any

from models.checkpoints.gguf.reader import Reader
from models.errors import ModelError, brief
from models.kinds import Kind, check


class Metadata:
    """Values by key; call it, or ask for a value of a certain kind."""

    def __init__(self, reader: Reader, source: str):
        self._reader, self.source = reader, source

    def __call__(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key, or `default` where there is none.

        Raises:
          ModelError: when the value cannot be decoded.
        """
        field = self._reader.get_field(key)
        if field is None:
            return default
        try:
            return field.contents()
        except Exception as error:  # of bytes that are no text, or not there
            raise ModelError(
                f"{self.source} has a value for {key} that cannot be read ({brief(error)}); it is "
                "damaged, so download it again."
            ) from error

    def keys(self, prefix: str) -> list[str]:
        """Returns the keys that begin with a prefix, in the order of the file."""
        return [key for key in self._reader.fields if key.startswith(prefix)]

    def checked(self, key: str, kind: Kind, default: Any = None) -> Any:
        """Returns the value of a key, which must be of a kind, or `default` where there is none.

        Raises:
          ModelError: when it is of another kind.
        """
        value = self(key)
        if value is None:
            return default
        check(value, kind, key, self.source)
        return value
