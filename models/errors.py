"""The exception of this package."""

import json
from collections.abc import Sequence
from typing import Any


class ModelError(Exception):
    """Error for a model that cannot be loaded or run; the message also says how to fix it."""


class NoTokenizerError(ModelError):
    """Error for a model whose files contain no tokenizer."""


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, at most 200 characters."""
    text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    lines = text.strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".")


def brief_json(value: Any) -> str:
    """Return a value as JSON, shortened to 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def few(names: Sequence[str]) -> str:
    """Return up to three names as a text, with dots in place of the others."""
    return ", ".join([*names[:3], *["..."] * (len(names) > 3)])


def unsupported(key: str, expected: str, value: Any, source: str) -> ModelError:
    """Return the `ModelError` for a key or a value that no supported model has."""
    return ModelError(
        f"{source}: expected {key} {expected}, got {brief_json(value)}; such models are not "
        "supported, so give another one."
    )
