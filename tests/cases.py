"""Cases of which a few are tried before every change lands, and the others before a release."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_exhaustive(cases: Iterable[Any], few: Iterable[Any]) -> list[Any]:
    """Return the cases of a test, all marked as exhaustive but a few of them."""
    cases, few = list(cases), list(few)
    assert all(one in cases for one in few), f"wanted some of {cases}, got {few}"

    def marked(case: Any) -> Any:
        marks = () if case in few else pytest.mark.exhaustive
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)

    return [marked(case) for case in cases]
