"""Recorded runs of another implementation, which lie beside the repository."""

import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_TESTS = Path(__file__).resolve().parent


def golden(name: str) -> Any:
    """Loads one recorded file, "models" or "ops"; skips the test where there is none.

    The folder is looked for in the variable JAXKV_GOLDEN, then in `../shared/golden` beside the
    checkout, then in `tests/golden`.
    """
    named = os.environ.get("JAXKV_GOLDEN")
    places = [Path(named)] if named else []
    places += [_TESTS.parents[1] / "shared" / "golden", _TESTS / "golden"]
    for place in places:
        path = place / f"{name.removesuffix('.json')}.json"
        if path.is_file():
            return _load(path)
    pytest.skip(f"no recorded runs: {name}.json is in none of {', '.join(map(str, places))}")


@functools.cache
def _load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def check_logits(row: np.ndarray, record: dict, ids: list[int], *, within: float) -> None:
    """Compares the logits of one token, `[V]`, with a record of them."""
    top, at = np.array(record["top"]), np.asarray(record["at"])
    np.testing.assert_allclose(row[ids], at, atol=within)
    np.testing.assert_allclose(row[top[:, 0].astype(int)], top[:, 1], atol=within)
    moments = [row.mean(), row.std()]
    np.testing.assert_allclose(moments, [record["mean"], record["std"]], atol=within)
