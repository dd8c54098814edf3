"""Cases of which a few run for every change, and the others every night."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def mark_cases(
    cases: Iterable[Any], fast: Sequence[Any] = (), core: Sequence[Any] = ()
) -> list[Any]:
    """Mark the cases of a test: those in neither list as `nightly`."""
    cases = list(cases)
    missing = [one for one in [*fast, *core] if one not in cases]
    assert not missing, f"expected some of {cases}, got {missing}"
    marked = []
    for case in cases:
        mark = pytest.mark.core if case in core else pytest.mark.nightly
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=() if case in fast else mark))
    return marked
