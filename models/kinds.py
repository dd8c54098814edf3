"""Kinds of values in files, and the error for a value that is not of the expected kind."""

import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from models.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of value: a description, and a function that checks a value."""

    words: str
    accepts: Callable[[Any], bool]


def whole(lowest: int, highest: int) -> Kind:
    """Return the kind of integers from `lowest` to `highest`."""
    return Kind(
        words=f"a whole number from {lowest} to {highest}",
        accepts=lambda value: type(value) is int and lowest <= value <= highest,
    )


def number(lowest: float, highest: float, *, above: bool = False) -> Kind:
    """Return the kind of finite numbers in a range; if `above`, the range excludes `lowest`."""

    def accepts(value: Any) -> bool:
        if type(value) not in (int, float) or not lowest <= value <= highest:
            return False
        return math.isfinite(value) and not (above and value == lowest)

    words = f"a number {'above' if above else 'of at least'} {lowest:g}"
    words += f" and at most {highest:g}" if highest < math.inf else ""
    return Kind(words=words, accepts=accepts)


def several(kind: Kind, max_items: int) -> Kind:
    """Return the kind of lists of 1 to `max_items` values of a kind."""
    return Kind(
        words=f"a list of up to {max_items}, each {kind.words}",
        accepts=lambda value: (
            isinstance(value, list | tuple)
            and 0 < len(value) <= max_items
            and all(map(kind.accepts, value))
        ),
    )


_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxlong = 50
FLAG = Kind(words="true or false", accepts=lambda value: type(value) is bool)
TOKEN = whole(0, 2**31 - 2)
"""A token id."""
TEXT = Kind(words="a text", accepts=lambda value: isinstance(value, str))


def check(value: Any, kind: Kind, name: str, source: str) -> None:
    """Raise `ModelError` unless a value is of the given kind."""
    if not kind.accepts(value):
        raise refusal(value, kind.words, name, source)


def refusal(value: Any, expected: str, name: str, source: str) -> ModelError:
    """Return the `ModelError` for a value that is not of the expected kind."""
    return ModelError(
        f"{source}: expected {expected} for {name}, got {_BRIEF.repr(value)}; it is damaged or not "
        "supported, so download it again or give another model."
    )
