"""Reader of JSON files."""

import json
from pathlib import Path
from typing import Any

from models.errors import ModelError, first_line

LIMIT = 64 * 2**20
"""Largest size of a file in bytes; the index of many shards has a few million bytes."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty dict if the file does not exist.

    Raises `ModelError` if the file is larger than `LIMIT`, is not JSON, or if its value is not an
    object.
    """
    if not path.is_file():
        return {}
    try:
        size = path.stat().st_size
        if size > LIMIT:
            raise ModelError(
                f"{path}: expected a JSON file of at most {LIMIT} bytes, got {size}; download it "
                "again."
            )
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON ({first_line(error)}); download it again.") from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{path}: expected a JSON object, got a {type(content).__name__}; download it again."
        )
    return content
