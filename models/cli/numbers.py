"""Parsers of numbers and sizes in arguments."""

import argparse
import contextlib
import re
from collections.abc import Callable
from typing import Any

from models import kinds
from models.cli.screen import brief
from models.meshes import RULES

AXES = tuple(axis for field in ("streams", "kv_heads", "cells") for axis in RULES.axes(field))
"""Names of mesh axes."""


MOST_CELLS = 2**30 - 1
"""Largest number of cells of a stream, see `jaxkv.make_cache`."""

MOST_DEVICES = 2**20


def refusal(expected: str, text: str) -> argparse.ArgumentTypeError:
    """Return the error for the text of an argument that is not of the expected kind."""
    return argparse.ArgumentTypeError(f"expected {expected}, got {brief(text)!r}")


def whole(lowest: int, highest: int) -> Callable[[str], int]:
    """Return a parser of integers from `lowest` to `highest`."""
    return _parser(int, kinds.whole(lowest, highest))


def number(lowest: float, highest: float, *, above: bool = False) -> Callable[[str], float]:
    """Return a parser of finite numbers in a range; if `above`, the range excludes `lowest`."""
    return _parser(float, kinds.number(lowest, highest, above=above))


def _parser(convert: Callable[[str], Any], kind: kinds.Kind) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if kind.accepts(value := convert(text)):
                return value
        raise refusal(kind.words, text)

    return read


def mesh_sizes(text: str) -> dict[str, int]:
    """Parse the sizes of mesh axes (see `models.meshes.RULES`), such as data=2,tensor=2."""
    sizes: dict[str, int] = {}
    for axis in text.split(","):
        name, _, size = axis.partition("=")
        count = int(size) if size.isdecimal() and len(size) < 10 else 0
        if not name.isidentifier() or name in sizes or not 1 <= count <= MOST_DEVICES:
            named = f"distinct names with sizes from 1 to {MOST_DEVICES}"
            raise refusal(f"{named}, such as data=2,tensor=2", text)
        sizes[name] = count
    if not sizes.keys() <= set(AXES):
        raise refusal(f"axes named {', '.join(AXES)}", text)
    return sizes


def bytes_of(text: str) -> int:
    """Parse a number of bytes, with units such as GB (powers of 1,000) or GiB (powers of 1,024).

    >>> bytes_of("16GB"), bytes_of("1.5 KiB"), bytes_of("7")
    (16000000000, 1536, 7)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i?)b?|b?)", text, re.IGNORECASE)
    if found is not None:
        amount, letter, binary = found.groups()
        power = "kmgt".index(letter.lower()) + 1 if letter else 0
        count = float(amount) * (1024 if binary else 1000) ** power
        if 1 <= count < 2**63:
            return int(count)
    raise refusal("a number of bytes from 1 to 2**63 - 1, such as 16GB or 80GiB", text)
