"""Cases of which a few run for every change, and the others every night."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def mostly_nightly(cases: Iterable[Any], few: Iterable[Any]) -> list[Any]:
    """Return the cases of a test, all marked `nightly` but a few of them."""
    cases, few = list(cases), list(few)
    _known(few, cases)
    return [_marked(case, () if case in few else pytest.mark.nightly) for case in cases]


def in_lanes(cases: Iterable[Any], *, fast: Sequence[Any], core: Sequence[Any] = ()) -> list[Any]:
    """Return the cases of a test, each in its lane: `nightly` where it is in neither list."""
    cases = list(cases)
    _known([*fast, *core], cases)

    def marks(case: Any) -> Any:
        if case in fast:
            return ()
        return pytest.mark.core if case in core else pytest.mark.nightly

    return [_marked(case, marks(case)) for case in cases]


def _known(some: Iterable[Any], cases: list[Any]) -> None:
    assert all(one in cases for one in some), f"wanted some of {cases}, got {some}"


def _marked(case: Any, marks: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
