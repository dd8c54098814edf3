"""Cases of which a few are tried before every change lands, and the others before a release."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def mostly_exhaustive(cases: Iterable[Any], few: Iterable[Any]) -> list[Any]:
    """Return the cases of a test, all marked as exhaustive but a few of them."""
    cases, few = list(cases), list(few)
    _known(few, cases)
    return [_marked(case, () if case in few else pytest.mark.exhaustive) for case in cases]


def in_parts(cases: Iterable[Any], *, fast: Sequence[Any], slow: Sequence[Any] = ()) -> list[Any]:
    """Return the cases of a test, each in its part; exhaustive where it is in neither."""
    cases = list(cases)
    _known([*fast, *slow], cases)

    def marks(case: Any) -> Any:
        if case in fast:
            return ()
        return pytest.mark.slow if case in slow else (pytest.mark.slow, pytest.mark.exhaustive)

    return [_marked(case, marks(case)) for case in cases]


def _known(some: Iterable[Any], cases: list[Any]) -> None:
    assert all(one in cases for one in some), f"wanted some of {cases}, got {some}"


def _marked(case: Any, marks: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
